"""Batch: the rows a model sees at once, as tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lpfs.schema import Schema


@dataclass(frozen=True)
class Batch:
    """Rows of a Dataset as tensors; columns follow the order of the schema.

    Args:
        ids: (B, F) int32, one column a categorical field.
        dense: (B, C) float32, the numbers of the numeric fields side by side (a field of width w takes w).
        labels: (B, T) float32, the label first, then the tasks.
        missing: (B, C) bool, where a number is missing (it reads 0.0 there); None when none ever is.
        bags: of each multi field its values and the (B,) offsets where rows begin, both int32, as
            ``torch.nn.EmbeddingBag`` takes them.

    """

    ids: Tensor
    dense: Tensor
    labels: Tensor
    missing: Tensor | None = None
    bags: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.labels.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which CUDA copies without waiting."""
        return self._map(Tensor.pin_memory)

    def select(self, schema: Schema, names: Sequence[str]) -> Batch:
        """Return the batch with only these fields; ``schema`` says which it holds, and keeps their order."""
        wanted = {schema[name].name for name in names}
        if len(wanted) == len(schema):
            return self
        ids: list[int] = []
        dense: list[int] = []
        seen = at = 0
        for each in schema:
            if each.kind == "numeric":
                dense += range(at, at + each.dim) if each.name in wanted else ()
                at += each.dim
            elif each.kind != "multi":
                ids += [seen] if each.name in wanted else []
                seen += 1
        columns = torch.tensor(dense, dtype=torch.long, device=self.dense.device)
        return Batch(
            self.ids.index_select(1, torch.tensor(ids, dtype=torch.long, device=self.ids.device)),
            self.dense.index_select(1, columns),
            self.labels,
            None if self.missing is None else self.missing.index_select(1, columns),
            {name: bag for name, bag in self.bags.items() if name in wanted},
        )

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            change(self.ids),
            change(self.dense),
            change(self.labels),
            None if self.missing is None else change(self.missing),
            {name: (change(values), change(offsets)) for name, (values, offsets) in self.bags.items()},
        )
