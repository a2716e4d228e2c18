"""attach: any model, not one prediction changed."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lpfs
from lpfs import FUNCTIONS, Site
from lpfs.errors import AbsenceError, FieldError, InputError, SharedTableError, StateError
from lpfs.gates.hooks import _live
from tests.helpers.zoo import INPUTS, B, D, Plain, Stacked, batch, set_gates


@pytest.mark.parametrize("gate", sorted(FUNCTIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_predictions_are_bit_identical_right_after(gate, dtype, training):
    model = Plain().to(dtype).train(training)
    before = model(*batch(dtype))
    gates = lpfs.attach(model, model.fields, gate=gate)
    assert torch.equal(model(*batch(dtype)), before)
    assert gates.names == tuple(INPUTS)
    assert gates is model.lpfs_gates


def test_the_state_dict_keeps_its_keys_and_gains_the_gates():
    model = Plain()
    keys = set(model.state_dict())
    lpfs.attach(model, model.fields)
    after = set(model.state_dict())
    assert keys < after
    assert all(key.startswith("lpfs_gates.") for key in after - keys)


def test_slices_of_a_stack_and_of_a_concatenation():
    ids = torch.randint(6, (B, 4))
    for sites in (
        {f"f{n}": Site("table", index=n) for n in range(4)},
        {"f1": Site("table", index=1)},
        {f"f{n}": Site("norm", index=slice(n * D, (n + 1) * D)) for n in range(4)},
    ):
        model = Stacked()
        before = model(ids)
        gates = lpfs.attach(model, sites)
        assert torch.equal(model(ids), before)
        set_gates(gates, [0.0] + [1.0] * (len(sites) - 1))
        other = ids.clone()
        other[:, int(gates.names[0][1])] = (ids[:, int(gates.names[0][1])] + 1) % 6
        assert torch.equal(model(other), model(ids))
        gates.zero_grad()
        model(ids).sum().backward()
        assert gates.x.grad is not None
        assert gates.x.grad.any()


def test_the_gradient_is_that_of_the_formula():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    with torch.no_grad():
        gates.x.uniform_(0.1, 0.9)
    model(*batch()).sum().backward()
    embedded = {name: module for name, module in model.fields.items()}
    values = gates.values.clone().requires_grad_()
    ids, tags, price, dense = batch()
    with gates.disabled():
        inputs = [embedded[name](ids[:, n]) for n, name in enumerate(("user", "item", "city"))]
        inputs += [model.bag(tags), model.price(price), model.dense(dense)]
    model.top(torch.cat([part * g for part, g in zip(inputs, values, strict=True)], 1)).sum().backward()
    slope = gates.function.slope(gates.x, gates.epsilon) / (gates.norm * gates.scale)
    torch.testing.assert_close(gates.x.grad, values.grad * slope)


def test_one_field_may_enter_in_several_places():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.deep, self.wide = nn.Embedding(9, D), nn.Embedding(9, 1)
            self.top = nn.Linear(D, 1)

        def forward(self, ids):
            return (self.top(self.deep(ids)) + self.wide(ids)).squeeze(1)

    model, ids = Wide(), torch.arange(9)
    before = model(ids)
    gates = lpfs.attach(model, {"user": [model.deep, model.wide]})
    assert torch.equal(model(ids), before)
    set_gates(gates, [0.0])
    assert model(ids).unique().numel() == 1


def test_patterns_of_paths_and_all_tables():
    model = Plain()
    assert lpfs.attach(model, "emb.*").names == ("emb.user", "emb.item", "emb.city")
    lpfs.detach(model)
    assert lpfs.attach(model).names == ("emb.user", "emb.item", "emb.city", "bag")
    lpfs.detach(model)
    assert lpfs.attach(model, ["emb.user", "bag"]).names == ("emb.user", "bag")


def test_detach_leaves_the_model_as_it_was():
    model = Plain()
    before, keys = model(*batch()), set(model.state_dict())
    gates = lpfs.attach(model, model.fields)
    set_gates(gates, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    lpfs.detach(model)
    assert torch.equal(model(*batch()), before)
    assert set(model.state_dict()) == keys
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_disabled_runs_the_model_without_gates():
    model = Plain()
    before = model(*batch())
    gates = lpfs.attach(model, model.fields)
    set_gates(gates, [0.0, 2.0, -1.0, 0.5, 1.0, 4.0])
    gated = model(*batch())
    assert not torch.equal(gated, before)
    with gates.disabled():
        assert torch.equal(model(*batch()), before)
    assert torch.equal(model(*batch()), gated)


def test_a_module_called_outside_the_model_is_gated_too():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    set_gates(gates, [0.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    assert not model.emb["user"](torch.arange(3)).any()
    for _ in range(2):  # a graph of its own each time
        model.emb["item"](torch.arange(3)).sum().backward()


def test_an_error_inside_the_model_leaves_no_stale_values():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    with pytest.raises(TypeError):
        model(1)
    assert gates.live is None


def test_model_parameters_are_all_but_the_gates():
    model = Plain()
    count = len(list(model.parameters()))
    gates = lpfs.attach(model, model.fields)
    assert len(gates.model_parameters()) == count
    assert all(each is not gates.x for each in gates.model_parameters())


@pytest.mark.parametrize("make", [torch.optim.Adagrad, torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_that_holds_both_is_refused_by_name(make):
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    both = make(model.parameters(), lr=0.1)
    model(*batch()).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateError, match=f"{make.__name__} holds the gates"):
        both.step()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    make(gates.model_parameters(), lr=0.1).step()
    clone = copy.deepcopy(model)
    clone(*batch()).sum().backward()
    with pytest.raises(StateError, match="holds the gates"):
        make(clone.parameters(), lr=0.1).step()


def test_a_gate_added_later_is_noticed_too():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    optimizer = torch.optim.SGD(gates.model_parameters(), lr=0.1)
    optimizer.step()
    optimizer.add_param_group({"params": [gates.x]})
    with pytest.raises(StateError, match="SGD holds the gates"):
        optimizer.step()


def test_a_copy_has_gates_of_its_own():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    clone = copy.deepcopy(model)
    set_gates(clone.lpfs_gates, [0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert torch.equal(gates.values, torch.ones(6))
    assert not clone.emb["user"](torch.arange(3)).any()
    assert model.emb["user"](torch.arange(3)).any()
    theirs, ours = set(clone.lpfs_gates.model_parameters()), set(gates.model_parameters())
    assert len(theirs) == len(ours)
    assert not theirs & ours


def test_a_whole_model_can_be_saved_and_loaded(tmp_path):
    model = Plain()
    set_gates(lpfs.attach(model, model.fields), [0.0, 1.0, 1.0, 1.0, -1.0, 1.0])
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = Plain()
    gates = lpfs.attach(other, other.fields)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(other(*batch()), model(*batch()))
    assert gates.dropped == ["user"]


def test_a_model_is_freed_when_nobody_holds_it():
    import weakref

    model = Plain()
    lpfs.attach(model, model.fields)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_autocast():
    model = Plain()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(*batch())
        gates = lpfs.attach(model, model.fields)
        after = model(*batch())
    assert torch.equal(before, after)
    after.float().sum().backward()
    assert gates.x.grad is not None
    assert gates.x.grad.dtype == torch.float32
    assert bool(torch.isfinite(gates.x.grad).all())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        table = nn.Embedding(9, D)
        self.emb = nn.ModuleDict({"seen": table, "item": table})
        self.top = nn.Linear(2 * D, 1)

    def forward(self, ids):
        return self.top(torch.cat([self.emb["item"](ids[:, 0]), self.emb["seen"](ids[:, 1])], 1)).squeeze(1)


def test_a_module_registered_twice_can_be_given_a_gate_for_each_name():
    model, ids = Twice(), torch.randint(9, (B, 2))
    before = model(ids)
    with pytest.raises(SharedTableError, match="untie=True"):
        lpfs.attach(model, {"item": model.emb["item"], "seen": model.emb["seen"]})
    assert not hasattr(model, "lpfs_gates")
    gates = lpfs.attach(model, {"item": model.emb["item"], "seen": model.emb["seen"]}, untie=True)
    assert torch.equal(model(ids), before)
    assert model.emb["item"].weight is model.emb["seen"].weight
    set_gates(gates, [0.0, 1.0])
    assert not model.emb["item"](ids[:, 0]).any()
    assert model.emb["seen"](ids[:, 0]).any()


def test_one_module_under_two_paths_is_noticed_however_it_is_named():
    by_path, by_site = {"item": "emb.item", "seen": "emb.seen"}, {"item": Site("emb.item"), "seen": Site("emb.seen")}
    for fields in (by_path, by_site, ["emb.item", "emb.seen"]):
        with pytest.raises(SharedTableError, match="untie=True"):
            lpfs.attach(Twice(), fields)
        model, ids = Twice(), torch.randint(9, (B, 2))
        before = model(ids)
        gates = lpfs.attach(model, fields, untie=True)
        assert torch.equal(model(ids), before)
        set_gates(gates, [0.0, 1.0])
        assert not model.emb["item"](ids[:, 0]).any()
        assert model.emb["seen"](ids[:, 0]).any()


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(InputError, match=r"'emb.user.weight' is on the meta device.*to_empty"):
        lpfs.attach(model, model.fields)
    assert not hasattr(model, "lpfs_gates")


def test_one_module_under_two_paths_is_noticed_without_names_too():
    for fields in (None, "emb.*"):
        with pytest.raises(SharedTableError, match=r"'emb.seen', 'emb.item'.*untie=True.*one of these names"):
            lpfs.attach(Twice(), fields)
        gates = lpfs.attach(model := Twice(), fields, untie=True)
        assert gates.names == ("emb.seen", "emb.item")
        assert model.emb["seen"] is not model.emb["item"]
    assert lpfs.attach(Twice(), "emb.item").names == ("emb.item",)


def test_the_tables_of_a_module_that_is_registered_twice_have_one_gate():
    tower = Plain()
    model = nn.ModuleDict({"user": tower, "item": tower})
    assert lpfs.attach(model, "*.emb.*").names == ("user.emb.user", "user.emb.item", "user.emb.city")


def test_a_field_whose_module_never_runs_is_noticed():
    class ByWeight(Plain):
        def forward(self, ids, tags, price, dense):
            parts = [functional.embedding(ids[:, n], table.weight) for n, table in enumerate(self.emb.values())]
            parts += [self.bag(tags), self.price(price), self.dense(dense)]
            return self.top(torch.cat(parts, dim=1)).squeeze(1)

    model = ByWeight()
    gates = lpfs.attach(model, model.fields, steps=200)
    prox = gates.optimizer(penalty=0.1)
    for _ in range(99):
        model(*batch()).sum().backward()
        prox.step()
        gates.step()
    with pytest.raises(FieldError, match="the modules given for .'city', 'item', 'user'. never ran"):
        gates.step()
    with pytest.raises(FieldError, match="never ran"):
        lpfs.absorb(model)


def test_values_of_the_last_forward_pass_serve_only_in_backward():
    """A checkpointed forward pass runs again there; its gates must not be computed again."""
    seen, x = [], torch.ones(1, requires_grad=True)
    past, current = SimpleNamespace(live=None, last="last"), SimpleNamespace(live="live", last="last")
    x.register_hook(lambda grad: seen.extend([_live(past), _live(current)]))
    assert (_live(past), _live(current)) == (None, "live")
    x.sum().backward()
    assert seen == ["last", "live"]


@pytest.mark.parametrize("gate", ["lpfs++", "gaussian"])  # with a compiled loop, and without
def test_a_checkpointed_module_and_inference_mode_first(gate):
    class Saving(Plain):
        def forward(self, *inputs):
            return checkpoint(super().forward, *inputs, use_reentrant=False)

    model, plain = Saving(), Plain()
    plain.load_state_dict(model.state_dict())
    grads = []
    for each in (model, plain):
        gates = lpfs.attach(each, each.fields, gate=gate)
        each(*batch()).sum().backward()
        grads.append(gates.x.grad)
    assert torch.equal(*grads)
    stacked, ids = Stacked(), torch.randint(6, (B, 4))
    gates = lpfs.attach(stacked, {"a": Site("table", index=1)})
    with torch.inference_mode():
        stacked(ids)
    stacked(ids).sum().backward()
    assert gates.x.grad is not None


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (lambda m: {}, FieldError, "no field was given"),
        (lambda m: "embedding.*", FieldError, "no field matched 'embedding.\\*'; the tables of this model are"),
        (lambda m: ["emb.user", "nope"], FieldError, "no field matched 'nope'"),
        (lambda m: {"user": "emb.usr"}, FieldError, "the model has no module 'emb.usr'"),
        (lambda m: {"user": nn.Embedding(3, 2)}, FieldError, "this Embedding is not part of the model"),
        (lambda m: {"user": 3}, FieldError, "field 'user'"),
        (lambda m: {"": m.bag}, FieldError, "name of a field.*found"),
        (lambda m: {"user": []}, FieldError, "has no site"),
        (lambda m: {"a": m.bag, "b": m.bag}, FieldError, "'a' and 'b'.*'bag'.*index="),
        (lambda m: {"a": [m.bag, m.bag]}, FieldError, "names 'bag' twice"),
        (lambda m: {"a": Site("bag", slice(0, 3)), "b": Site("bag", 2)}, FieldError, "overlap"),
        (lambda m: {"a": Site("bag", 0), "b": Site("bag", 1, dim=0)}, FieldError, "'bag'.*same dim"),
        (lambda m: {"a": Site("bag", -1)}, FieldError, "counts from 0"),
        (lambda m: {"a": Site("bag", slice(2, 1))}, FieldError, "0 <= start < stop"),
        (lambda m: {"a": Site("bag", index="0")}, FieldError, "a position or a slice"),
        (lambda m: {"a": m.emb}, FieldError, "'emb' is a container"),
        (lambda m: {"a": Site("bag", reader="top.0")}, FieldError, "columns=slice"),
        (lambda m: {"a": Site("bag", reader="top.0", columns=slice(20, 28))}, FieldError, "do not fit the 24"),
        (lambda m: {"a": Site("bag", reader="top.1", columns=slice(0, 4))}, InputError, "must be an nn.Linear"),
    ],
)
def test_wrong_fields_are_refused_and_nothing_changes(fields, error, message):
    model = Plain()
    keys = set(model.state_dict())
    with pytest.raises(error, match=message):
        lpfs.attach(model, fields(model))
    assert set(model.state_dict()) == keys
    assert not any(module._forward_hooks for module in model.modules())


def test_other_wrong_arguments():
    model = Plain()
    with pytest.raises(InputError, match="attach needs an nn.Module, found dict"):
        lpfs.attach({}, None)
    with pytest.raises(InputError, match="gate function 'l0'"):
        lpfs.attach(model, model.fields, gate="l0")
    with pytest.raises(InputError, match="epsilon must be > 0"):
        lpfs.attach(model, model.fields, epsilon=0.0)
    with pytest.raises(FieldError, match="4 columns.* 24"):
        lpfs.attach(model, {"bag": model.bag}, reader=model.top[0])
    with pytest.raises(AbsenceError, match="a LayerNorm"):
        lpfs.attach(Stacked(norm=nn.LayerNorm(16)), {"a": Site("table", 0)}, reader="norm")
    lpfs.attach(model, model.fields)
    with pytest.raises(StateError, match="already has gates"):
        lpfs.attach(model, model.fields)
    with pytest.raises(StateError, match="no gates"):
        lpfs.detach(Plain())


def test_a_module_that_returns_something_else_is_named():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    model = nn.Sequential(Pair())
    lpfs.attach(model, {"pair": "0"})
    with pytest.raises(FieldError, match="'0' returns tuple"):
        model(torch.ones(2))
    small = Stacked()
    lpfs.attach(small, {"far": Site("table", index=7)})
    with pytest.raises(FieldError, match="returned 4 along dim 1"):
        small(torch.zeros(B, 4, dtype=torch.long))


@pytest.mark.parametrize("wrong", [lambda model: [model.user], lambda model: model.user, lambda model: 3])
def test_modules_without_names_are_refused(wrong):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.Embedding(3, 2)

    class Declared(Tables):
        def sites(self):
            return {"user": self.user}

    for model in (Tables(), Declared()):
        with pytest.raises(FieldError, match=r"fields: .* found (Embedding|int); .*\{'user'"):
            lpfs.attach(model, wrong(model))
        lpfs.attach(model, ["user"])


@pytest.mark.parametrize(("name", "advice"), [("DataParallel", "model.module"), ("OptimizedModule", "attach first")])
def test_gates_are_not_looked_for_in_a_wrapper(name, advice):
    wrapped = type(name, (nn.Module,), {})()
    with pytest.raises(StateError, match=f"absorb needs the model.*{advice}"):
        lpfs.absorb(wrapped)


def test_gates_of_a_wrapped_model_are_not_removed():
    model = Plain()
    gates = lpfs.attach(model, model.fields)
    for verb in (lpfs.detach, lpfs.absorb):
        with pytest.raises(StateError, match=f"{verb.__name__} needs the model"):
            verb(nn.DataParallel(model))
    assert lpfs.detach(model) is gates


def test_the_default_seed_is_zero():
    """A search without a seed can be repeated with seed=0, noise and ties included."""
    by_default, explicit = (
        lpfs.attach(model, model.fields, gate="lpfs-noise", steps=100, **seed)
        for model, seed in ((Plain(), {}), (Plain(), {"seed": 0}))
    )
    for gates in (by_default, explicit):
        gates.optimizer(penalty=0.0)
        gates.step()
    assert torch.equal(by_default.noise, explicit.noise)
    assert by_default.selection(partial=True).made["seed"] == 0
