"""Models of others: outputs that hold their tensor inside, and smaller models that somebody else builds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import lpfs
from lpfs import Site
from lpfs.errors import FieldError, LeakError, SharedTableError
from lpfs.gates.hooks import OUTPUT_TYPES, ConstantFactors
from lpfs.gates.rebuild import copy_without_factors
from tests.helpers.zoo import B, D, set_gates

NAMES = ("a", "b", "c")


@dataclass
class Held:
    """What some libraries return: keys and values, no tensor."""

    keys: tuple[str, ...]
    values: Tensor


class Collection(nn.Module):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.tables = nn.ModuleDict({name: nn.Embedding(6, D) for name in names})

    def forward(self, ids: dict[str, Tensor]) -> Held:
        return Held(self.names, torch.cat([self.tables[name](ids[name]) for name in self.names], 1))


class Foreign(nn.Module):
    """Somebody's model, which knows nothing of lpfs."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        super().__init__()
        self.collection = Collection(names)
        self.dense = nn.Tanh()
        self.top = nn.Linear(len(names) * D + 2, 1)

    def forward(self, ids: dict[str, Tensor], numbers: Tensor) -> Tensor:
        return self.top(torch.cat([self.collection(ids).values, self.dense(numbers)], 1)).squeeze(1)


class Builder:
    """Knows the model in its place."""

    def sites(self, model: Foreign) -> dict[str, Site]:
        names = model.collection.names
        parts = {name: Site("collection", index=slice(n * D, (n + 1) * D)) for n, name in enumerate(names)}
        return {**parts, "dense": Site("dense")}

    def smaller(self, model, kept, cut):
        names = tuple(name for name in model.collection.names if name in kept)
        smaller = copy_without_factors(model, {id(model.collection): Collection(names)})
        smaller.top = nn.Linear(len(names) * D + 2, 1, device="meta")
        columns = [n * D + each for n, name in enumerate(NAMES) if name in kept for each in range(D)]
        return smaller, {"top.weight": {1: torch.tensor([*columns, 3 * D, 3 * D + 1])}}

    def narrow(self, model, batch, smaller):
        return {name: batch[0][name] for name in smaller.collection.names}, batch[1]


@pytest.fixture(autouse=True)
def known():
    OUTPUT_TYPES[Held] = (lambda output: output.values, lambda output, values: Held(output.keys, values))
    yield
    del OUTPUT_TYPES[Held]


def batch() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = {name: torch.randint(6, (B,), generator=generator) for name in NAMES}
    return ids, torch.randn(B, 2, generator=generator)


INPUTS = {"a": (0, "a"), "b": (0, "b"), "c": (0, "c"), "dense": 1}


def test_an_output_that_holds_its_tensor_inside_is_gated():
    model = Foreign()
    before, held = model(*batch()), model.collection(batch()[0])
    gates = lpfs.attach(model, Builder().sites(model))
    assert torch.equal(model(*batch()), before)
    set_gates(gates, [2.0, 0.0, -1.0, 1.0])
    inside = model.collection(batch()[0])
    assert inside.keys == NAMES
    assert torch.equal(inside.values[:, :D], 2 * held.values[:, :D])
    assert bool((inside.values[:, D : 2 * D] == 0).all())
    model(*batch()).sum().backward()
    assert bool((gates.x.grad[[0, 2]] != 0).all())


def test_one_that_nobody_told_of_is_named():
    del OUTPUT_TYPES[Held]
    model = Foreign()
    lpfs.attach(model, Builder().sites(model))
    with pytest.raises(FieldError, match="'collection' returns Held"):
        model(*batch())
    OUTPUT_TYPES[Held] = (None, None)


def test_somebody_else_builds_the_smaller_model():
    model, builder = Foreign(), Builder()
    set_gates(lpfs.attach(model, builder.sites(model)), [2.0, 0.0, -0.5, 4.0])
    optimizer = torch.optim.Adagrad(model.lpfs_gates.model_parameters())
    selection = lpfs.absorb(model, optimizer, batch=batch())
    assert set(selection.made["absorbed"].values()) == {"constant"}
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer, cut=True, by=builder)
    assert pruned.certificate.certified
    smaller = pruned.model
    after = smaller(*builder.narrow(model, batch(), smaller))
    assert torch.allclose(after, model(*batch()), atol=1e-5)
    assert list(smaller.collection.tables) == ["a", "c"]
    assert smaller.top.weight.shape == (1, 2 * D + 2)
    constants = [each for each in smaller.children() if isinstance(each, ConstantFactors)]
    assert [(each.names, each.values.tolist()) for each in constants] == [(("a", "c", "dense"), [2.0, -0.5, 4.0])]
    assert len(model.collection._forward_hooks) == 1
    assert {id(each) for group in pruned.optimizer.param_groups for each in group["params"]} == {
        id(each) for each in smaller.parameters()
    }


def test_a_copy_without_constants_leaves_the_model_as_it_was():
    model = Foreign()
    set_gates(lpfs.attach(model, Builder().sites(model)), [2.0, 1.0, 1.0, 4.0])
    lpfs.absorb(model)
    before = model(*batch())
    bare = copy_without_factors(model)
    assert not any(isinstance(each, ConstantFactors) for each in bare.children())
    assert not bare.collection._forward_hooks
    assert not torch.equal(bare(*batch()), before)
    assert torch.equal(model(*batch()), before)


def test_a_leak_is_found_whoever_builds():
    class Leaky(Foreign):
        def forward(self, ids, numbers):
            return super().forward(ids, numbers) + ids["b"]

    model = Leaky()
    set_gates(lpfs.attach(model, Builder().sites(model)), [1.0, 0.0, 1.0, 1.0])
    with pytest.raises(LeakError, match="'b'"):
        lpfs.prune(model, lpfs.absorb(model), batch=batch(), inputs=INPUTS, by=Builder())


# ------------------------------------------------------------------- the table behind a part of an output


def by_tables(names: tuple[str, ...] = NAMES) -> dict[str, Site]:
    return {
        name: Site("collection", index=slice(n * D, (n + 1) * D), table=f"collection.tables.{name}")
        for n, name in enumerate(names)
    }


@pytest.mark.parametrize("values", [[2.0, 0.0, -0.5], [0.7, -1.3, 0.9]])
def test_the_table_behind_a_part_takes_the_gate_in(values):
    model = Foreign()
    gates = lpfs.attach(model, by_tables())
    with torch.no_grad():
        gates.x.copy_(torch.tensor(values))
    before = model(*batch())
    selection = lpfs.absorb(model, batch=batch())
    assert torch.equal(model(*batch()), before)
    assert set(selection.made["absorbed"].values()) == {"table"}
    assert selection.made["exact"]
    assert not model.collection._forward_hooks
    again = lpfs.Selection.from_json(selection.to_json())
    assert again.sites["b"][0]["table"] == "collection.tables.b"


def test_a_table_that_serves_others_too_is_refused():
    model = Foreign()
    model.collection.tables["b"] = model.collection.tables["a"]
    with pytest.raises(FieldError, match="'a' and 'b' share the table 'collection.tables.a'"):
        lpfs.attach(model, {**by_tables(), "b": Site("collection", slice(D, 2 * D), table="collection.tables.a")})
    model = Foreign()
    model.tied = nn.Embedding(6, D)
    model.tied.weight = model.collection.tables["a"].weight
    set_gates(lpfs.attach(model, by_tables()), [2.0, 1.0, 1.0])
    with pytest.raises(SharedTableError, match="'tied.weight'"):
        lpfs.absorb(model)


def test_what_is_no_table():
    for site, found in [
        (Site("collection", slice(0, D), table="top"), "found Linear"),
        (Site("collection", table="collection.tables.a"), "index=None"),
        (Site("collection", slice(0, D), rows=slice(0, 2), table="collection.tables.a"), r"rows=slice\(0, 2"),
    ]:
        with pytest.raises(FieldError, match=f"table= is an nn.Embedding .*{found}"):
            lpfs.attach(Foreign(), {"a": site})
