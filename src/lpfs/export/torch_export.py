"""Files of ``torch.export``: ids and numbers in, logits out.

Loading such a file runs pickle: open only files that you trust.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, embedding_bag

import lpfs
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.embeddings.table import Table
from lpfs.export.parity import check_logits
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.models.crosses import Crosses
from lpfs.models.inputs import fields_by_kind

METADATA_FILE = "lpfs.json"  # extra file inside the .pt2 file that describes the inputs


class ExportableTable(nn.Module):
    """A Table in operations that torch.export supports; an id out of range is an error, as in the Table."""

    starts: Tensor
    sizes: Tensor

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.weight.detach().clone(), requires_grad=False)
        self.register_buffer("starts", table.starts[:-1].clone())
        self.register_buffer("sizes", torch.tensor(table.sizes, device=table.starts.device))
        self.fields, self.rows = table.fields, int(table.weight.shape[0])
        self.mode = "mean" if table.mean else "sum"

    def forward(self, ids: Tensor, gate: None = None) -> Tensor:
        """Return (B, F, D) for ids (B, F)."""
        return embedding(self._rows(ids, slice(0, self.fields)), self.weight)

    def bags(self, bags: Sequence[tuple[Tensor, Tensor]], gate: None = None, *, padded: bool) -> Tensor:
        """Return (B, F, D) for bags, each given by its ids (V,) and the offset of every row (B,)."""
        pooled = []
        for field, (ids, offsets) in enumerate(bags, self.fields):
            rows = self._rows(ids, slice(field, field + 1))
            pooled.append(embedding_bag(rows, self.weight, offsets.long(), mode=self.mode))
        return torch.stack(pooled, 1)

    def _rows(self, ids: Tensor, fields: slice) -> Tensor:
        ids = ids.long()
        valid = (ids >= 0) & (ids < self.sizes[fields])
        return torch.where(valid, ids + self.starts[fields], self.rows)


class ExportableCrosses(nn.Module):
    """Crosses in operations that torch.export supports."""

    first: Tensor
    second: Tensor
    single: Tensor
    order: Tensor

    def __init__(self, crosses: Crosses) -> None:
        super().__init__()
        plan, self.dim = crosses.plan, crosses.dim
        for name, size, factor in (("single", 1, 0), ("first", 2, 0), ("second", 2, 1)):
            index = [part[factor] for part in plan.parts if len(part) == size]
            self.register_buffer(name, torch.tensor(index, dtype=torch.long))
        numbers = sorted(range(len(plan.parts)), key=lambda number: len(plan.parts[number]))  # single ones first
        order = torch.full((plan.slots,), len(plan.parts))  # the last part is zeros
        order[[plan.places[number] for number in numbers]] = torch.arange(len(plan.parts))
        self.register_buffer("order", order)

    def forward(self, tokens: Tensor, beside: Tensor | None = None) -> Tensor:
        """Return (B, slots·D + E) for embeddings (B, N, D) and a tensor (B, E) to append."""
        products = tokens.index_select(1, self.first) * tokens.index_select(1, self.second)
        zeros = torch.zeros_like(tokens[:, :1])
        parts = torch.cat([tokens.index_select(1, self.single), products, zeros], 1).index_select(1, self.order)
        return parts.flatten(1) if beside is None else torch.cat([parts.flatten(1), beside], 1)


class ExportableModel(nn.Module):
    """A model whose inputs are tensors: ids (B, F), dense and missing (B, C), values and offsets of each bag."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        self.bags = bag_names(model)
        for path, module in list(self.model.named_modules()):
            exportable = {Table: ExportableTable, Crosses: ExportableCrosses}.get(type(module))
            if exportable is not None:
                self.model.set_submodule(path, exportable(module))

    def forward(self, ids: Tensor, dense: Tensor, missing: Tensor, bags: list[Tensor]) -> Tensor:
        """Return logits (B,), or (B, 1 + tasks); ``bags`` holds values, offsets, values, offsets, …"""
        named = {name: (bags[2 * number], bags[2 * number + 1]) for number, name in enumerate(self.bags)}
        out = self.model.outputs(Batch(ids, dense, ids, missing, named))
        return out if self.model.schema.tasks else out[:, 0]


def export_inputs(model: Model, batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return a batch as the arguments of the exported program."""
    batch = batch.to("cpu")
    missing = torch.zeros_like(batch.dense, dtype=torch.bool) if batch.missing is None else batch.missing
    return batch.ids, batch.dense, missing, [tensor for name in bag_names(model) for tensor in batch.bags[name]]


def bag_names(model: Model) -> tuple[str, ...]:
    """Return the names of the bags, in the order of the program's arguments."""
    return tuple(field.name for field in fields_by_kind(model.reads)[1])


def write_torch(model: Model, dataset: Dataset | None, batch: Batch, file: Path) -> tuple[float, float, str]:
    """Trace the model, write it with its metadata, and check the file on rows.

    Return the largest difference of a logit, its bound, and the runtime.
    """
    rows, bags = {0: torch.export.Dim("B")}, bag_names(model)
    bag_shapes = [shape for number in range(len(bags)) for shape in ({0: torch.export.Dim(f"V{number}")}, rows)]
    program = torch.export.export(
        ExportableModel(model),
        export_inputs(model, _tracing_batch(model)),
        dynamic_shapes=(rows, rows, rows, bag_shapes),
    )
    metadata = {
        "lpfs": lpfs.__version__,
        "model": {"name": registered_name(model), "config": model.config, "silent": list(model.silent)},
        "schema": model.reads.to_json(),
        "inputs": ["ids", "dense", "missing", "bags"],
        "bags": list(bags),
        "fingerprint": None if dataset is None else dataset.fingerprint,
    }
    torch.export.save(program, file, extra_files={METADATA_FILE: json.dumps(metadata)})
    with torch.no_grad():
        logits = torch.export.load(file).module()(*export_inputs(model, batch))
    return *check_logits(model, batch, logits), f"torch {torch.__version__}"


def _tracing_batch(model: Model) -> Batch:
    """Return rows to trace with: sizes of 0 or 1 would become constants, and a tensor used twice one argument."""
    ids, bags, dense = fields_by_kind(model.reads)
    values = {
        field.name: (torch.zeros(5 + number, dtype=torch.int32), torch.tensor([0, 2, 4], dtype=torch.int32))
        for number, field in enumerate(bags)
    }
    numbers = torch.zeros(3, sum(field.dim for field in dense))
    return Batch(torch.zeros(3, len(ids), dtype=torch.int32), numbers, torch.zeros(3, 1), numbers.bool(), values)
