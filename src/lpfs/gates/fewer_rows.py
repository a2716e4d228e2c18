"""FewerRows: what stays of one fused table when some of its fields are dropped."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lpfs.gates.hooks import hooks_of
from lpfs.gates.sites import Place


class FewerRows(nn.Module):
    """A fused ``nn.Embedding`` without the rows of dropped fields; it is called with the ids of before.

    With removed blocks of rows [a₁, b₁), [a₂, b₂), … an id i that stays is row i - Σ_{b_k ≤ i} (b_k - a_k) of the
    smaller weight. Dropped fields are not looked up: they read zeros, or are gone from the output.

    Args:
        table: the table of before.
        rows: the rows (R',) of its weight that stay.
        blocks: the rows that do not, in order.
        dropped: positions of the dropped fields along ``dim``.
        gone: those of them that leave the output altogether.
        dim: the dimension of the ids that counts fields.

    """

    stops: Tensor
    removed: Tensor

    def __init__(
        self,
        table: nn.Embedding,
        rows: Tensor,
        blocks: Sequence[tuple[int, int]],
        dropped: Collection[int],
        gone: Collection[int],
        dim: int,
    ) -> None:
        super().__init__()
        self.dim, self.dropped, self.gone = dim, frozenset(dropped), frozenset(gone)
        self.embedding_dim, self.sparse = table.embedding_dim, table.sparse
        self.scale_grad_by_freq = table.scale_grad_by_freq
        padding = [] if table.padding_idx is None else (rows == table.padding_idx).nonzero().flatten().tolist()
        self.padding_idx = padding[0] if padding else None
        self.weight = nn.Parameter(table.weight.detach().index_select(0, rows), table.weight.requires_grad)
        sizes = torch.tensor([0, *(stop - start for start, stop in blocks)]).cumsum(0)
        stops = torch.tensor([stop for _, stop in blocks])
        self.register_buffer("stops", stops.to(rows.device), persistent=False)
        self.register_buffer("removed", sizes.to(rows.device), persistent=False)
        self._places: tuple[int, Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of the fields that stay, (…, F, …, D) with zeros or nothing for the others."""
        stay, places, left = self._positions(input)
        ids = input.index_select(self.dim, stay)
        ids = ids - self.removed.to(ids.dtype)[torch.bucketize(ids, self.stops.to(ids.dtype), right=True)]
        found = functional.embedding(
            ids, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )
        if left == stay.numel():
            return found
        shape = list(found.shape)
        shape[self.dim] = left
        return found.new_zeros(shape).index_copy(self.dim, places, found)

    def _positions(self, input: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return which fields of the input stay, where they are in the output, and how many that has."""
        size = input.shape[self.dim]
        if self._places is None or self._places[0] != size or self._places[1].device != input.device:
            stay = [at for at in range(size) if at not in self.dropped]
            left = [at for at in range(size) if at not in self.gone]
            places = [number for number, at in enumerate(left) if at not in self.dropped]
            index = torch.tensor([stay, places], dtype=torch.long, device=input.device)
            self._places = (size, index[0], index[1])
        return self._places[1], self._places[2], size - len(self.gone)

    def extra_repr(self) -> str:
        """Show the size, and which fields are dropped."""
        return f"{self.weight.shape[0]}, {self.embedding_dim}, dropped={sorted(self.dropped)}"


def fewer_rows(
    model: nn.Module, path: str, places: Sequence[Place], cut: Collection[Place]
) -> tuple[FewerRows, Tensor] | None:
    """Return what stays of a fused table and the rows (R',) that stay; None where its rows cannot go.

    That is where constants of gates are still on its output, where its weight serves other modules too, and where
    it is no plain table.
    """
    table = model.get_submodule(path)
    if type(table) is not nn.Embedding or table.max_norm is not None or hooks_of(table):
        return None
    if sum(weight is table.weight for _, weight in model.named_parameters(remove_duplicate=False)) > 1:
        return None
    keep = torch.ones(table.num_embeddings, dtype=torch.bool)
    blocks = sorted(place.rows for place in places if place.rows is not None)
    for start, stop in blocks:
        keep[start:stop] = False
    rows = keep.nonzero().flatten().to(table.weight.device)
    positions = {place: range(place.start or 0, place.stop or 0) for place in places}
    dropped = {at for several in positions.values() for at in several}
    gone = {at for place, several in positions.items() if place in cut for at in several}
    return FewerRows(table, rows, blocks, dropped, gone, places[0].dim).train(table.training), rows
