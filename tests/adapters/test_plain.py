"""Hand-written models in plain torch, under the contract of all adapters."""

from __future__ import annotations

import pytest
import torch
from contract import CHECKS, FIELDS, VALUES, Case, prove
from torch import Tensor, nn

from lpfs.adapters import Plain
from lpfs.adapters.plain import Each, Fused

D = 4
INPUTS = {name: (0, n) for n, name in enumerate(FIELDS)}


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))


def table(rows: int = VALUES, dim: int = D) -> nn.Embedding:
    made = nn.Embedding(rows, dim)
    nn.init.normal_(made.weight, std=0.1)
    return made


class ByDict(nn.Module):
    """A dict of tables, and a wide weight for every id beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({name: table() for name in FIELDS})
        self.wide = nn.ModuleDict({name: table(dim=1) for name in FIELDS})
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        deep = torch.cat([each(ids[:, n]) for n, each in enumerate(self.emb.values())], 1)
        wide = sum(each(ids[:, n]) for n, each in enumerate(self.wide.values()))
        return (self.top(deep) + wide).squeeze(1)


class ByList(nn.Module):
    """A list of tables, normalised together: zero is a value like any other there."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.emb = nn.ModuleList([table() for _ in FIELDS])
        self.norm = nn.LayerNorm(len(FIELDS) * D) if norm else nn.Identity()
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.norm(torch.cat([each(ids[:, n]) for n, each in enumerate(self.emb)], 1))).squeeze(1)


class ByOffsets(nn.Module):
    """One table for all, by offsets; a wide one in the same way; an MLP and the second order of a FM."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = table(len(FIELDS) * VALUES), table(len(FIELDS) * VALUES, 1)
        self.register_buffer("offsets", torch.arange(len(FIELDS)) * VALUES)
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        each = self.rows(ids + self.offsets)  # (B, F, D)
        pairs = (each.sum(1) ** 2 - (each**2).sum(1)).sum(1) / 2
        return self.top(each.flatten(1)).squeeze(1) + pairs + self.wide(ids + self.offsets).sum((1, 2))


class Sharing(nn.Module):
    """f0 and f4, f1 and f5 look up one table, which stands in the dict under both names."""

    def __init__(self) -> None:
        super().__init__()
        own = {name: table() for name in FIELDS}
        own["f4"], own["f5"] = own["f0"], own["f1"]
        self.emb = nn.ModuleDict(own)
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([self.emb[name](ids[:, n]) for n, name in enumerate(FIELDS)], 1)).squeeze(1)


def by_ids(ids: Tensor, numbers: Tensor) -> tuple[Tensor]:
    return (ids,)


SIZES = dict.fromkeys(FIELDS, VALUES)
CASES = [
    Case(
        "dict of modules, wide part",
        ByDict,
        lambda: Plain(Each("emb", reader="top.0"), Each("wide"), inputs=INPUTS),
        by_ids,
    ),
    Case("ModuleList", ByList, lambda: Plain(Each("emb", FIELDS, reader="top.0"), inputs=INPUTS), by_ids),
    Case(
        "ModuleList, LayerNorm over it",
        lambda: ByList(norm=True),
        lambda: Plain(Each("emb", FIELDS), inputs=INPUTS),
        by_ids,
    ),
    Case(
        "one fused table by offsets, wide part",
        ByOffsets,
        lambda: Plain(Fused("rows", SIZES, reader="top.0"), Fused("wide", SIZES), inputs=INPUTS),
        by_ids,
    ),
    Case(
        "shared tables, untied",
        Sharing,
        lambda: Plain(Each("emb", reader="top.0"), inputs=INPUTS, untie=True),
        by_ids,
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_the_contract(case, check):
    prove("plain", case, check)
