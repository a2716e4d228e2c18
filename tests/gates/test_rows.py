"""One fused table for many fields: its rows take the gates in, and leave with their fields."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lpfs
from lpfs import Selection, Site
from lpfs.errors import FieldError, InputError, SharedTableError
from lpfs.gates.rebuild import CompactedEmbedding
from tests.helpers.zoo import OPTIMIZERS, B, D, set_gates

SIZES = (5, 3, 7, 4)
STARTS = (0, 5, 8, 15)
NAMES = ("a", "b", "c", "d")
INPUTS = {name: (0, n) for n, name in enumerate(NAMES)}
VALUES = [2.0, 0.0, -0.5, 0.0]  # b and d go


class Model(nn.Module):
    def __init__(self, **table) -> None:
        super().__init__()
        self.rows = nn.Embedding(sum(SIZES), D, **table)
        self.register_buffer("starts", torch.tensor(STARTS))
        self.top = nn.Sequential(nn.Linear(len(SIZES) * D, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.rows(ids + self.starts).flatten(1)).squeeze(1)


def batch(dtype: torch.dtype = torch.int64) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.stack([torch.randint(size, (B,), generator=generator) for size in SIZES], 1).to(dtype),)


def sites(reader: str | None = "top.0") -> dict[str, Site]:
    return {
        name: Site(
            "rows",
            index=n,
            rows=slice(STARTS[n], STARTS[n] + SIZES[n]),
            reader=reader,
            columns=None if reader is None else slice(n * D, (n + 1) * D),
        )
        for n, name in enumerate(NAMES)
    }


def gated(model: nn.Module | None = None, values=VALUES, **settings) -> nn.Module:
    model = Model() if model is None else model
    set_gates(lpfs.attach(model, sites(**settings)), values)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("values", [VALUES, [0.7, 1.3, -0.9, 0.0]])
def test_rows_take_any_gate_bit_for_bit(dtype, values):
    model = Model().to(dtype)
    gates = lpfs.attach(model, sites())
    with torch.no_grad():
        gates.x.copy_(torch.tensor(values))
    before = model(*batch())
    rest = copy.deepcopy(model.top.state_dict())
    selection = lpfs.absorb(model, batch=batch())
    assert torch.equal(model(*batch()), before)
    assert selection.made["exact"]
    assert set(selection.made["absorbed"].values()) == {"rows"}
    assert selection.made["max_logit_change"] == 0.0
    assert all(torch.equal(rest[key], each) for key, each in model.top.state_dict().items())


@pytest.mark.parametrize("ids", [torch.int64, torch.int32])
@pytest.mark.parametrize("cut", [False, True])
def test_rows_leave_with_their_fields(cut, ids):
    model = gated()
    selection = lpfs.absorb(model)
    data = batch(ids)
    pruned = lpfs.prune(model, selection, batch=data, inputs=INPUTS, cut=cut)
    assert pruned.certificate.certified
    assert pruned.certificate.checked == ("b", "d")
    if not cut:
        assert torch.equal(pruned.model(*data), model(*data))
    table = pruned.model.rows
    assert isinstance(table, CompactedEmbedding)
    stay = torch.tensor([*range(0, 5), *range(8, 15)])
    assert torch.equal(table.weight, model.rows.weight[stay])
    assert table(data[0] + model.starts).shape == (B, 2 if cut else 4, D)
    assert pruned.model.top[0].in_features == (2 if cut else 4) * D
    assert repr(table) == "CompactedEmbedding(12, 4, dropped=[1, 3])"


def test_a_dropped_field_is_never_looked_up():
    model = gated()
    pruned = lpfs.prune(model, lpfs.absorb(model), batch=batch(), inputs=INPUTS).model
    ids = batch()[0].clone()
    ids[:, 1] = 10**9
    ids[:, 3] = -7
    assert torch.equal(pruned(ids), model(*batch()))


def test_every_field_of_a_table_may_go():
    class Two(Model):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Embedding(sum(SIZES), 1)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.other(ids + self.starts).sum((1, 2))

    model = Two()
    set_gates(lpfs.attach(model, sites()), [0.0] * 4)
    pruned = lpfs.prune(model, lpfs.absorb(model), batch=batch())
    assert torch.equal(pruned.model(*batch()), model(*batch()))
    assert pruned.model.rows.weight.shape == (0, D)


def test_a_selection_read_from_a_file_removes_rows():
    model = gated()
    selection = lpfs.absorb(model)
    again = Model()
    again.load_state_dict(model.state_dict())
    read = Selection.from_json(json.loads(json.dumps(selection.to_json())))
    assert read.sites["b"][0]["rows"] == [5, 8]
    pruned = lpfs.prune(again, read, batch=batch(), inputs=INPUTS)
    assert torch.equal(pruned.model(*batch()), model(*batch()))
    assert pruned.model.rows.weight.shape == (12, D)


@pytest.mark.parametrize("padding", [0, 6, 9])
def test_padding_stays_padding(padding):
    model = gated(Model(padding_idx=padding))
    pruned = lpfs.prune(model, lpfs.absorb(model), batch=batch(), inputs=INPUTS).model
    assert pruned.rows.padding_idx == {0: 0, 6: None, 9: 6}[padding]
    pruned(*batch()).sum().backward()
    grads = pruned.rows.weight.grad
    used = torch.zeros(12, dtype=torch.bool)
    used[batch()[0][:, 0]] = True
    used[batch()[0][:, 2] + 5] = True
    if pruned.rows.padding_idx is not None:
        used[pruned.rows.padding_idx] = False
    assert torch.equal(grads.abs().sum(1) > 0, used)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_next_step_is_that_of_the_absorbed_model(name):
    model = Model()
    gates = lpfs.attach(model, sites())
    optimizer = OPTIMIZERS[name](gates.model_parameters())

    def step(one: nn.Module, its: torch.optim.Optimizer) -> None:
        its.zero_grad()
        functional.binary_cross_entropy_with_logits(one(*batch()), torch.arange(B) % 2 * 1.0).backward()
        its.step()

    for _ in range(3):
        step(model, optimizer)
    set_gates(gates, VALUES)
    selection = lpfs.absorb(model, optimizer)
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer)
    absorbed, its = copy.deepcopy((model, optimizer))
    step(absorbed, its)
    step(pruned.model, pruned.optimizer)
    stay = torch.tensor([*range(0, 5), *range(8, 15)])
    assert torch.equal(pruned.model.rows.weight, absorbed.rows.weight[stay])
    assert torch.equal(pruned.model.top[2].weight, absorbed.top[2].weight)


def test_a_leak_past_the_rows_is_found():
    class Leaky(Model):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Embedding(sum(SIZES), 1)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.wide(ids + self.starts).sum((1, 2))

    model = gated(Leaky())
    with pytest.raises(lpfs.errors.LeakError, match="'b'"):
        lpfs.prune(model, lpfs.absorb(model), batch=batch(), inputs=INPUTS)


def test_rows_that_others_use_too():
    model = Model()
    model.tied = nn.Embedding(sum(SIZES), D)
    model.tied.weight = model.rows.weight
    gated(model)
    with pytest.raises(SharedTableError, match="cannot be untied"):
        lpfs.absorb(model, untie=True)
    clipped = gated(Model(max_norm=1.0), reader=None)
    selection = lpfs.absorb(clipped)
    assert set(selection.made["absorbed"].values()) == {"constant"}
    with pytest.warns(UserWarning, match="nothing got smaller: the weights of b, d are used elsewhere"):
        pruned = lpfs.prune(clipped, selection, batch=batch(), inputs=INPUTS)
    assert torch.equal(pruned.model(*batch()), clipped(*batch()))
    assert type(pruned.model.rows) is nn.Embedding


def test_columns_behind_a_norm_stay():
    model = Model()
    model.top.insert(0, nn.LayerNorm(len(SIZES) * D))
    set_gates(lpfs.attach(model, sites(reader=None)), VALUES)
    with pytest.raises(InputError, match="attach with reader=.*LayerNorm"):
        lpfs.prune(model, lpfs.absorb(model), batch=batch(), inputs=INPUTS, cut=True)


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (Site("rows", rows=slice(0, 5)), "for a part, index=…"),
        (Site("top.0", index=0, rows=slice(0, 5)), "found Linear and index=0"),
        (Site("rows", index=0, rows=slice(15, 20)), "19 rows"),
        (Site("rows", index=0, rows=slice(4, 4)), "19 rows"),
        (Site("rows", index=0, rows=slice(0, 6, 2)), "19 rows"),
    ],
)
def test_rows_that_are_none(site, reason):
    with pytest.raises(FieldError, match=reason):
        lpfs.attach(Model(), {"a": site})


def test_rows_of_two_fields():
    both = {"a": Site("rows", index=0, rows=slice(0, 6)), "b": Site("rows", index=1, rows=slice(5, 8))}
    with pytest.raises(FieldError, match=r"share rows of 'rows', \(0, 6\) and \(5, 8\)"):
        lpfs.attach(Model(), both)
