"""Hand-written models in plain torch under the contract of all adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lpfs.adapters.plain import Each, Fused, Plain
from lpfs.errors import ExactnessError, FieldError, SharedTableError
from tests.helpers.adapter_contract import CHECKS, FIELDS, VALUES, Case, check_complete, run_check
from tests.helpers.zoo import set_gates

D = 4
INPUTS = {name: (0, n) for n, name in enumerate(FIELDS)}


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, 1))


def table(rows: int = VALUES, dim: int = D) -> nn.Embedding:
    embedding = nn.Embedding(rows, dim)
    nn.init.normal_(embedding.weight, std=0.1)
    return embedding


class ByDict(nn.Module):
    """A dict of tables, and a dict of wide weights."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({name: table() for name in FIELDS})
        self.wide = nn.ModuleDict({name: table(dim=1) for name in FIELDS})
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        deep = torch.cat([embed(ids[:, n]) for n, embed in enumerate(self.emb.values())], 1)
        wide = sum(embed(ids[:, n]) for n, embed in enumerate(self.wide.values()))
        return (self.top(deep) + wide).squeeze(1)


class ByList(nn.Module):
    """A list of tables, optionally with a LayerNorm, for which zero is an ordinary value."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.emb = nn.ModuleList([table() for _ in FIELDS])
        self.norm = nn.LayerNorm(len(FIELDS) * D) if norm else nn.Identity()
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.norm(torch.cat([embed(ids[:, n]) for n, embed in enumerate(self.emb)], 1))).squeeze(1)


class ByOffsets(nn.Module):
    """One table for all fields, by offsets; a wide one likewise; an MLP and the second order of an FM."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.wide = table(len(FIELDS) * VALUES), table(len(FIELDS) * VALUES, 1)
        self.register_buffer("offsets", torch.arange(len(FIELDS)) * VALUES)
        self.top = mlp(len(FIELDS) * D)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.rows(ids + self.offsets)  # (B, F, D)
        pairs = (tokens.sum(1) ** 2 - (tokens**2).sum(1)).sum(1) / 2
        return self.top(tokens.flatten(1)).squeeze(1) + pairs + self.wide(ids + self.offsets).sum((1, 2))


class Sharing(nn.Module):
    """f0 and f4 share a table, f1 and f5 too; the dict has it under both names."""

    def __init__(self) -> None:
        super().__init__()
        tables = {name: table() for name in FIELDS}
        tables["f4"], tables["f5"] = tables["f0"], tables["f1"]
        self.emb = nn.ModuleDict(tables)
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
        "shared tables, untied", Sharing, lambda: Plain(Each("emb", reader="top.0"), inputs=INPUTS, untie=True), by_ids
    ),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model)
def test_contract(case, check):
    run_check("plain", case, check)


def test_results_have_exactly_these_models():
    check_complete("plain", CASES)


def test_shared_table_raises_without_untie():
    adapter = Plain(Each("emb"), inputs=INPUTS)
    with pytest.raises(SharedTableError, match="Pass untie=True"):
        adapter.attach(Sharing())
    model = Sharing()
    adapter.attach(model, untie=True)
    assert model.emb["f0"] is not model.emb["f4"]
    assert model.emb["f0"].weight is model.emb["f4"].weight
    with pytest.raises(SharedTableError, match="'emb.f4.weight'"):
        adapter.absorb(model)


def test_two_calls_of_one_module_raise():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.item = table()

        def forward(self, ids: Tensor) -> Tensor:
            return (self.item(ids[:, 0]) * self.item(ids[:, 1])).sum(1)

    model = Twice()
    with pytest.raises(FieldError, match="'seen' and 'shown' are both the output of 'item'"):
        Plain({"seen": "item", "shown": "item"}).attach(model)


def test_modules_that_torch_does_not_register():
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.rest = {"f0": table()}, [table()]
            self.top = nn.Linear(1, 1)

    with pytest.raises(FieldError, match="'emb' is a dict.* nn.ModuleDict"):
        Plain(Each("emb")).attach(Hidden())
    with pytest.raises(FieldError, match="'rest' is a list.* nn.ModuleList"):
        Plain(Each("rest", ["f0"])).attach(Hidden())
    with pytest.raises(FieldError, match="no module 'embedding'"):
        Plain(Each("embedding")).attach(Hidden())
    with pytest.raises(FieldError, match="no module 'embedding'"):
        Plain(Fused("embedding", SIZES)).attach(Hidden())
    with pytest.raises(FieldError, match="'top' is a Linear; Each needs"):
        Plain(Each("top")).attach(Hidden())


def test_groups_that_do_not_match_the_model():
    with pytest.raises(FieldError, match="'emb' has 8 modules, but 2 fields are named"):
        Plain(Each("emb", ["f0", "f1"])).attach(ByList())
    with pytest.raises(FieldError, match="'emb' has 8 modules, but 0 fields are named"):
        Plain(Each("emb")).attach(ByList())
    with pytest.raises(FieldError, match="'rows' has 80 rows, .* 160"):
        Plain(Fused("rows", dict.fromkeys(FIELDS, 2 * VALUES))).attach(ByOffsets())
    model = ByList()
    model.emb[1] = nn.Sequential(table(), nn.Tanh())
    with pytest.raises(FieldError, match="'f1': the width of 'emb.1' is unknown"):
        Plain(Each("emb", FIELDS, reader="top.0")).attach(model)


def test_wrong_offsets_raise_before_the_model_changes():
    """The rows of f1 are attributed to f0: absorbing would change the output."""
    model, ids = ByOffsets(), (torch.arange(64).reshape(8, 8) % VALUES,)
    wrong = {**dict.fromkeys(("f0",), 20), **dict.fromkeys(FIELDS[1:7], VALUES)}  # f0 with the rows of f1 too
    adapter = Plain(Fused("rows", wrong), Fused("wide", wrong), inputs=INPUTS)
    set_gates(adapter.attach(model), [0.5, *[1.0] * 6])
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ExactnessError, match="absorb would change the output"):
        adapter.absorb(model, batch=ids)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in state.items())


def test_fused_table_of_a_pruned_model_has_fewer_rows():
    case = CASES[3]
    model, adapter, batch = case.new_model(), case.adapter(), case.batch()
    set_gates(adapter.attach(model), [1.0, 0.0, 1.0, *[0.0] * 5])
    pruned = adapter.prune(model, adapter.absorb(model), batch=batch, cut=True)
    assert pruned.model.rows.weight.shape == (2 * VALUES, D)
    assert pruned.model.wide.weight.shape == (2 * VALUES, 1)
    assert pruned.model.top[0].in_features == 2 * D
