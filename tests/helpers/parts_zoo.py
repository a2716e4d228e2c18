"""A model whose fields all live in one module that takes gates itself, and that can rebuild itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpfs.gates.sites import PartWeight, Site
from tests.helpers.zoo import B, D

SIZES = {"user": 6, "item": 5, "city": 4}  # tables
CROSSES = {"user*item": ("user", "item")}


class Parts(nn.Module):
    """Tables in one weight, a number with its own weights, and products without any: (B, parts, D)."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        super().__init__()
        self.fields = fields
        self.tables = [name for name in fields if name in SIZES]
        self.parts = len(fields)
        self.gate = None
        self.rows = nn.Parameter(torch.randn(sum(SIZES[name] for name in self.tables), D))
        self.number = nn.Linear(1, D)  # price
        starts = torch.tensor([0, *(SIZES[name] for name in self.tables)]).cumsum(0)
        self.register_buffer("starts", starts, persistent=False)
        self.register_buffer("scale", torch.ones(D))

    def part_weights(self, part: int) -> list[PartWeight]:
        name = self.fields[part]
        if name in SIZES:
            at = self.tables.index(name)
            return [PartWeight("rows", 0, int(self.starts[at]), int(self.starts[at + 1]), exact=True)]
        if name == "price":
            return [PartWeight(each, 0, 0, D, exact=False) for each in ("number.weight", "number.bias")]
        return []

    def forward(self, ids: Tensor, price: Tensor) -> Tensor:
        looked = {name: self.rows[ids[:, at] + self.starts[at]] for at, name in enumerate(self.tables)}
        looked["price"] = self.number(price)
        for name, (one, two) in CROSSES.items():
            if name in self.fields:
                looked[name] = looked[one] * looked[two] / 4
        stacked = torch.stack([looked[name] for name in self.fields], 1) * self.scale
        gate = None if self.gate is None else self.gate()
        return stacked if gate is None else stacked * gate.to(stacked.dtype)[:, None]


class Rebuilding(nn.Module):
    """Parts, concatenated, then an MLP; crosses have no weight unless the Linear after them is declared."""

    FIELDS = ("user", "item", "price", "city")

    def __init__(
        self, fields: tuple[str, ...] = FIELDS, wide: tuple[str, ...] | None = None, readers: bool = False
    ) -> None:
        super().__init__()
        self.fields, self.wide, self.readers = fields, wide or fields, readers
        self.table = Parts(fields)
        self.top = nn.Sequential(nn.Linear(len(self.wide) * D, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, ids: Tensor, price: Tensor) -> Tensor:
        parts = self.table(ids, price)
        if self.wide != self.fields:
            at = torch.tensor([self.wide.index(name) for name in self.fields])
            parts = parts.new_zeros(len(parts), len(self.wide), D).index_copy(1, at, parts)
        return self.top(parts.flatten(1)).squeeze(1)

    def sites(self) -> dict[str, Site | list[Site]]:
        def site(name: str) -> Site:
            at = self.wide.index(name) * D
            reader = {"reader": "top.0", "columns": slice(at, at + D)} if self.readers else {}
            return Site("table", index=self.fields.index(name), **reader)

        return {name: site(name) for name in self.fields}

    def inputs_of_fields(self):
        def other(name):
            def change(batch):
                ids, price = batch
                if name == "price":
                    return ids, price + 1
                ids = ids.clone()
                ids[:, self.table.tables.index(name)] += 1
                return ids % torch.tensor([SIZES[each] for each in self.table.tables]), price

            return change

        return {name: other(name) for name in self.fields if name not in CROSSES}

    def smaller(self, kept, cut):
        kept = tuple(kept)
        model = Rebuilding(kept, wide=None if cut else self.wide, readers=self.readers)
        rows = [
            torch.arange(int(self.table.starts[at]), int(self.table.starts[at + 1]))
            for at, name in enumerate(self.table.tables)
            if name in kept
        ]
        index: dict[str, dict[int, Tensor]] = {"table.rows": {0: torch.cat(rows)}}
        if cut:
            columns = [torch.arange(D) + self.wide.index(name) * D for name in kept]
            index["top.0.weight"] = {1: torch.cat(columns)}
        return model, index

    def narrow(self, batch, smaller):
        ids, price = batch
        return ids[:, [self.table.tables.index(name) for name in smaller.table.tables]], price


CROSSED = ("user", "item", "price", "city", "user*item")


def rows(fields: tuple[str, ...] = Rebuilding.FIELDS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch: ids of the tables in order, and a whole price."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(SIZES[name], (B,), generator=generator) for name in fields if name in SIZES]
    return torch.stack(ids, 1), torch.randint(-3, 4, (B, 1), generator=generator).to(dtype)
