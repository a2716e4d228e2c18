"""Modules that take gates themselves: attach, absorb and prune by their own word."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import Selection, Site
from lpfs.errors import ExactnessError, FieldError, InputError, LeakError, SharedTableError
from lpfs.gates.hooks import GateTap
from lpfs.gates.sites import PartWeight
from lpfs.gates.stepping import check_all_used
from tests.helpers.parts_zoo import CROSSED, Parts, Rebuilding, rows
from tests.helpers.zoo import OPTIMIZERS, B, D, set_gates, whole_weights


def exact(fields=Rebuilding.FIELDS, **settings) -> tuple[Rebuilding, tuple]:
    """Whole weights in float64: sums and products are exact in any order."""
    return whole_weights(Rebuilding(fields, **settings)).double().eval(), rows(fields, torch.float64)


# ------------------------------------------------------------------------------------------ attach


def test_declared_fields_are_gated_by_the_module_itself():
    model, data = Rebuilding().eval(), rows()
    before = model(*data)
    gates = lpfs.attach(model)
    assert gates.names == Rebuilding.FIELDS
    assert torch.equal(model(*data), before)
    assert not model.table._forward_hooks
    set_gates(gates, [2.0, 0.0, 1.0, -0.5])
    table = model.table(*data)
    with gates.disabled():
        plain = model.table(*data)
        assert model.table.gate() is None
        assert torch.equal(model(*data), before)
    assert torch.equal(table, plain * torch.tensor([2.0, 0.0, 1.0, -0.5])[:, None])
    assert lpfs.detach(model) is gates
    assert model.table.gate is None
    assert torch.equal(model(*data), before)


def test_where_the_parts_are_the_gates_the_values_come_as_they_are():
    model = Rebuilding()
    gates = lpfs.attach(model)
    seen = []
    model.table.register_forward_hook(lambda module, args, output: seen.append((module.gate(), gates.live[0])))
    model(*rows()).sum().backward()
    assert seen[0][0] is seen[0][1]
    assert bool(gates.x.grad.abs().min() > 0)


@pytest.mark.parametrize("names", [["city", "user"], ["price"], "item", ("city", "price", "item", "user")])
def test_only_the_named_fields_are_gated(names):
    model, data = Rebuilding().eval(), rows()
    plain = model.table(*data)
    gates = lpfs.attach(model, names)
    names = [names] if isinstance(names, str) else list(names)
    assert list(gates.names) == names
    values = [2.0, -0.5, 4.0, 0.0][: len(names)]
    set_gates(gates, values)
    factors = torch.tensor([dict(zip(names, values, strict=True)).get(name, 1.0) for name in model.fields])
    assert torch.equal(model.table(*data), plain * factors[:, None])
    model(*data).sum().backward()
    assert gates.x.grad is not None


def test_wrong_names_and_parts_are_refused():
    with pytest.raises(FieldError, match="no field 'nobody'.*'user'"):
        lpfs.attach(Rebuilding(), ["user", "nobody"])
    with pytest.raises(FieldError, match="named twice"):
        lpfs.attach(Rebuilding(), ["user", "user"])
    with pytest.raises(FieldError, match="'table' has 4 parts, but the field is at \\[4:5\\]"):
        lpfs.attach(Rebuilding(), {"x": Site("table", index=4)})
    with pytest.raises(FieldError, match="overlap"):
        lpfs.attach(Rebuilding(), {"x": Site("table", index=1), "y": Site("table", index=slice(0, 2))})


def test_a_field_may_have_several_parts():
    model, data = Rebuilding().eval(), rows()
    plain = model.table(*data)
    gates = lpfs.attach(model, {"who": [Site("table", index=0), Site("table", index=slice(2, 4))]})
    set_gates(gates, [-2.0])
    assert torch.equal(model.table(*data), plain * torch.tensor([-2.0, 1.0, -2.0, -2.0])[:, None])
    selection = lpfs.absorb(model)
    assert selection.made["absorbed"] == {"who": "part"}


def test_a_copy_and_a_pickle_have_gates_of_their_own():
    model = Rebuilding().eval()
    gates = lpfs.attach(model)
    set_gates(gates, [2.0, 0.0, 1.0, -0.5])
    before = model(*rows())
    others = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    with torch.no_grad():
        gates.x.fill_(3.0)
    for other in others:
        assert other.table.gate.source is other.lpfs_gates
        assert torch.equal(other(*rows()), before)


def test_a_module_that_never_ran_is_noticed():
    class Idle(Rebuilding):
        def forward(self, ids, price):
            return self.top(torch.zeros(len(ids), len(self.wide) * D)).squeeze(1)

    model = Idle()
    gates = lpfs.attach(model)
    model(*rows())
    with pytest.raises(FieldError, match=r"never ran"):
        check_all_used(gates)
    model.table(*rows())
    check_all_used(gates)


# ------------------------------------------------------------------------------------------ absorb


@pytest.mark.parametrize("values", [[2.0, 0.0, -4.0, 0.5], [0.0, -0.5, 0.0, 8.0]])
def test_gates_go_into_the_parts_weights(values):
    model, data = exact()
    set_gates(lpfs.attach(model), values)
    before, old = model(*data), model.table.rows.detach().clone()
    selection = lpfs.absorb(model, batch=data)
    assert torch.equal(model(*data), before)
    assert model.table.gate is None
    assert set(selection.made["absorbed"].values()) == {"part"}
    factors = torch.tensor([values[0]] * 6 + [values[1]] * 5 + [values[3]] * 4)
    assert torch.equal(model.table.rows, old * factors[:, None])
    again = Selection.from_json(json.loads(json.dumps(selection.to_json())))
    assert again.sites["item"][0]["module"] == "table"
    assert (again.sites["item"][0]["start"], again.sites["item"][0]["stop"]) == (1, 2)


def test_exactness_is_what_the_module_says():
    model, data = Rebuilding().eval(), rows()
    gates = lpfs.attach(model, ["user", "item", "city"])
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.123, -0.7, 0.9]))
    before = model(*data)
    assert lpfs.absorb(model, batch=data).made["exact"] is True
    assert torch.equal(model(*data), before)
    gates = lpfs.attach(model, ["price"])
    assert lpfs.absorb(model, batch=data).made["exact"] is False


@pytest.mark.parametrize("readers", [False, True])
def test_a_part_without_weights_goes_into_its_reader_or_stays_as_a_constant(readers):
    model, data = exact(CROSSED, readers=readers)
    set_gates(lpfs.attach(model, ["city", "user*item"]), [2.0, -0.5])
    before = model(*data)
    selection = lpfs.absorb(model, batch=data)
    assert torch.equal(model(*data), before)
    assert selection.made["absorbed"] == {"city": "part", "user*item": "reader" if readers else "constant"}
    assert (model.table.gate is None) == readers
    if readers:
        return
    fresh = Rebuilding(CROSSED).double().eval()
    lpfs.restore(fresh, selection)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(*data), before)
    # a second search on top of the constants; detached again, they are what stays
    gates = lpfs.attach(model)
    assert torch.equal(model(*data), before)
    set_gates(gates, [1.0, 1.0, 1.0, 4.0, -2.0])
    second = model(*data)
    lpfs.absorb(model, batch=data)
    assert torch.equal(model(*data), second)
    lpfs.attach(model)
    lpfs.detach(model)
    assert isinstance(model.table.gate, GateTap)
    assert torch.equal(model(*data), second)


def test_weights_shared_with_other_modules_or_between_parts_are_refused():
    model = Rebuilding()
    model.other = nn.Embedding(15, D)
    model.other.weight = model.table.rows
    lpfs.attach(model)
    for untie in (False, True):
        with pytest.raises(SharedTableError, match="'table.rows'.*'other.weight'.*cannot be untied"):
            lpfs.absorb(model, untie=untie)

    class Same(Parts):
        def part_weights(self, part):
            return [PartWeight("rows", 0, 0, 6, exact=True)] if part < 2 else super().part_weights(part)

    model = Rebuilding()
    model.table = Same(Rebuilding.FIELDS)
    lpfs.attach(model, ["user"])
    with pytest.raises(SharedTableError, match="parts 0 and 1 of Same.*'rows'"):
        lpfs.absorb(model)
    lpfs.detach(model)
    lpfs.attach(model, ["city"])
    lpfs.absorb(model)


def test_slices_outside_a_weight_and_overflow_are_named():
    class Wrong(Parts):
        def part_weights(self, part):
            return [PartWeight("rows", 0, 10, 99, exact=True)]

    model = Rebuilding()
    model.table = Wrong(Rebuilding.FIELDS)
    lpfs.attach(model)
    with pytest.raises(InputError, match=r"part_weights\(0\) of Wrong names \[10:99\] along dim 0 of 'rows'"):
        lpfs.absorb(model)
    model = Rebuilding()
    gates = lpfs.attach(model)
    set_gates(gates, [1.0, 4.0, 1.0, 1.0])
    with torch.no_grad():
        model.table.rows[0] = 3e38  # user: its gate is one
    lpfs.absorb(copy.deepcopy(model))
    with torch.no_grad():
        model.table.rows[7] = 3e38  # item
    with pytest.raises(InputError, match="field 'item'.*overflow"):
        lpfs.absorb(model)


# --------------------------------------------------------------------------------- optimizer state


def step(model, optimizer, data) -> None:
    optimizer.zero_grad()
    functional.binary_cross_entropy_with_logits(model(*data), torch.arange(B) % 2 * 1.0).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(name: str, fields=Rebuilding.FIELDS):
    model, data = Rebuilding(fields).eval(), rows(fields)
    gates = lpfs.attach(model)
    optimizer = OPTIMIZERS[name](gates.model_parameters())
    for _ in range(3):
        step(model, optimizer, data)
    gates.zero_grad()
    return model, gates, optimizer, data


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_state_is_rescaled_on_the_same_slices(name):
    model, gates, optimizer, _ = trained(name)
    set_gates(gates, [2.0, 0.0, 1.0, -4.0])
    old = copy.deepcopy(optimizer.state[model.table.rows])
    lpfs.absorb(model, optimizer)
    power = {"sum": 2, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2, "square_avg": 2, "grad_avg": 1}
    power |= {"momentum_buffer": 1 if name == "sgd" else 0}
    for key, value in optimizer.state[model.table.rows].items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        assert value.shape[0] == 15
        for (start, stop), gate in zip(((0, 6), (6, 11), (11, 15)), (2.0, 0.0, -4.0), strict=True):
            part = old[key][start:stop]
            wanted = part / gate ** power[key] if gate else (part if power[key] == 0 else torch.zeros_like(part))
            assert torch.equal(value[start:stop], wanted), key


def test_a_row_wise_state_along_columns_is_refused():
    class Across(Parts):
        def part_weights(self, part):
            return [PartWeight("rows", 1, part, part + 1, exact=True)]

    model = Rebuilding()
    model.table = Across(Rebuilding.FIELDS)
    gates = lpfs.attach(model)
    optimizer = OPTIMIZERS["rowwise"](gates.model_parameters())
    step(model, optimizer, rows())
    with pytest.raises(InputError, match="row-wise state"):
        lpfs.absorb(model, optimizer)
    assert hasattr(model, "lpfs_gates")


# ------------------------------------------------------------------------------------------- prune


@pytest.mark.parametrize("cut", [False, True])
def test_a_model_that_rebuilds_itself_is_pruned_exactly(cut):
    model, data = exact()
    model.table.scale.fill_(2.0)
    model.top[0].weight.requires_grad_(False)
    model.top[2].train()
    set_gates(lpfs.attach(model, ["user", "item", "price"]), [2.0, 0.0, -4.0])
    selection = lpfs.absorb(model)
    state = copy.deepcopy(model.state_dict())
    model.top[2].eval()
    before = model(*data)
    model.top[2].train()
    pruned = lpfs.prune(model, selection, batch=data, cut=cut)
    small = pruned.model
    assert small.fields == ("user", "price", "city")  # city had no gate: it stays
    assert small.table.rows.shape == (10, D)
    assert small.table.rows.dtype == torch.float64
    assert small.top[0].weight.shape == (8, (3 if cut else 4) * D)
    assert not small.top[0].weight.requires_grad
    assert small.table.rows.requires_grad
    assert torch.equal(small.table.scale, model.table.scale)
    assert (small.training, small.top[2].training) == (False, True)
    assert torch.equal(small.eval()(*model.narrow(data, small)), before)
    assert pruned.certificate.certified
    assert pruned.certificate.max_logit_change == 0.0
    assert (pruned.certificate.bound == 0.0) is (not cut)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    fresh = Rebuilding(small.fields, wide=small.wide).double()
    fresh.load_state_dict(small.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [False, True])
def test_elsewhere_to_the_last_bit_or_to_rounding(cut, dtype):
    model, data = Rebuilding().to(dtype).eval(), rows(dtype=dtype)
    set_gates(lpfs.attach(model), [0.0, 0.5, 0.0, 1.0])
    selection = lpfs.absorb(model)
    pruned = lpfs.prune(model, selection, batch=data, cut=cut)
    change = (pruned.model(*model.narrow(data, pruned.model)) - model(*data)).abs().max().item()
    assert change == pruned.certificate.max_logit_change <= pruned.certificate.bound
    assert pruned.certificate.checked == ("user", "price")


def test_constants_of_fields_that_stay_go_along():
    model, data = exact(CROSSED)
    set_gates(lpfs.attach(model), [1.0, 1.0, 0.0, 1.0, -0.5])
    selection = lpfs.absorb(model)
    pruned = lpfs.prune(model, selection, batch=data)
    small = pruned.model
    assert small.lpfs_factors.names == ("user*item",)
    assert torch.equal(small(*model.narrow(data, small)), model(*data))
    assert small.table.gate().tolist() == [1.0, 1.0, 1.0, -0.5]
    assert model.table.gate().tolist() == [1.0, 1.0, 1.0, 1.0, -0.5]


def test_a_leak_past_the_gates_is_found_by_the_models_own_word():
    class Leaky(Rebuilding):
        def forward(self, ids, price):
            return super().forward(ids, price) + price.squeeze(1)

    model, data = Leaky().eval(), rows()
    set_gates(lpfs.attach(model), [1.0, 1.0, 0.0, 1.0])
    selection = lpfs.absorb(model)
    with pytest.raises(LeakError, match="field 'price' is dropped"):
        lpfs.prune(model, selection, batch=data)


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS)))
@pytest.mark.parametrize("cut", [False, True])
def test_the_next_step_is_that_of_the_absorbed_model(name, cut):
    model, gates, optimizer, data = trained(name)
    set_gates(gates, [2.0, 0.0, 1.0, -4.0])
    selection = lpfs.absorb(model, optimizer)
    if (name, cut) == ("rowwise", True):
        with pytest.raises(InputError, match="row-wise optimizer state of a Linear"):
            lpfs.prune(model, selection, batch=data, optimizer=optimizer, cut=True)
        return
    pruned = lpfs.prune(model, selection, batch=data, optimizer=optimizer, cut=cut)
    small = pruned.model
    assert type(pruned.optimizer) is type(optimizer)
    assert {id(p) for group in pruned.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in small.parameters()
    }
    step(model, optimizer, data)
    step(small, pruned.optimizer, model.narrow(data, small))
    rows_kept = torch.tensor([*range(6), *range(11, 15)])
    wanted = {"table.rows": model.table.rows[rows_kept]}
    if cut:
        wanted["top.0.weight"] = model.top[0].weight[:, torch.tensor([*range(D), *range(2 * D, 4 * D)])]
    whole = dict(model.named_parameters())
    for path, weight in small.named_parameters():
        if cut:  # sums of fewer terms: some roundings, which Adagrad and Adam may amplify near zero
            torch.testing.assert_close(weight, wanted.get(path, whole[path]), rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(weight, wanted.get(path, whole[path])), path


def test_a_subclass_of_adagrad_comes_along():
    class Rows(torch.optim.Adagrad):
        def __init__(self, params, lr=0.01, initial_accumulator_value=0.0):
            super().__init__(params, lr=lr, initial_accumulator_value=initial_accumulator_value)

    model, data = Rebuilding().eval(), rows()
    gates = lpfs.attach(model)
    optimizer = Rows(gates.model_parameters(), lr=0.05)
    step(model, optimizer, data)
    set_gates(gates, [2.0, 0.0, 1.0, 1.0])
    selection = lpfs.absorb(model, optimizer)
    pruned = lpfs.prune(model, selection, batch=data, optimizer=optimizer)
    assert type(pruned.optimizer) is Rows
    assert pruned.optimizer.param_groups[0]["lr"] == 0.05
    old, new = optimizer.state[model.table.rows]["sum"], pruned.optimizer.state[pruned.model.table.rows]["sum"]
    assert torch.equal(new, old[torch.tensor([*range(6), *range(11, 15)])])


def test_a_rebuilt_model_on_the_meta_device_is_filled():
    class Light(Rebuilding):
        def smaller(self, kept, cut):
            model, index = super().smaller(kept, cut)
            for module in model.modules():
                for name, each in list(module._parameters.items()):
                    if each is not None:
                        module._parameters[name] = nn.Parameter(each.to("meta"))
            return model, index

    model, data = Light().eval(), rows()
    set_gates(lpfs.attach(model), [1.0, 0.0, 1.0, 1.0])
    pruned = lpfs.prune(model, lpfs.absorb(model), batch=data)
    assert not any(each.is_meta for each in pruned.model.parameters())
    assert pruned.certificate.certified


def test_a_wrong_smaller_model_is_refused():
    class Odd(Rebuilding):
        change = staticmethod(lambda model, index: (model, index))

        def smaller(self, kept, cut):
            return self.change(*super().smaller(kept, cut))

    def extra(model, index):
        model.new = nn.Linear(1, 1)
        return model, index

    def scrambled(model, index):
        return model, {"table.rows": {0: index["table.rows"][0].flip(0)}}

    cases = {
        "parameter 'new.weight'": extra,
        "\\(15, 4\\) of the parameter 'table.rows'.*\\(10, 4\\)": lambda m, i: (m, {}),
        "would change the output": scrambled,
    }
    for message, change in cases.items():
        model = Odd().eval()
        model.change = change
        set_gates(lpfs.attach(model), [1.0, 0.0, 1.0, 1.0])
        selection = lpfs.absorb(model)
        with pytest.raises(ExactnessError, match=message):
            lpfs.prune(model, selection, batch=rows())
    other = Rebuilding().eval()
    gates = lpfs.attach(other, {"nobody": Site("table", index=0)})
    set_gates(gates, [0.0])
    with pytest.raises(FieldError, match="field 'nobody'"):
        lpfs.prune(other, lpfs.absorb(other), batch=rows())


def test_a_search_in_parts():
    torch.manual_seed(0)
    model = Rebuilding(CROSSED)
    gates = lpfs.attach(model, steps=100)
    prox = gates.optimizer(keep=2)
    optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.05)
    ids, price = rows(CROSSED)
    clicks = (ids[:, 0] % 2).float()
    for _ in range(100):
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(ids, price), clicks).backward()
        for each in (optimizer, prox, gates):
            each.step()
    assert len(gates.kept) == 2


def test_a_part_that_another_part_reads_ungated_is_noticed_on_a_batch():
    model, data = exact(CROSSED)
    set_gates(lpfs.attach(model, ["user"]), [2.0])  # the cross reads the table of user, past its gate
    with pytest.raises(ExactnessError, match="would change the output"):
        lpfs.absorb(model, batch=data)


def test_a_part_with_an_empty_slice_is_named():
    """Its gate would be absorbed by no weight at all."""

    class Empty(Parts):
        def part_weights(self, part):
            return [PartWeight("rows", 0, 6, 6, exact=True)]

    model = Rebuilding()
    model.table = Empty(Rebuilding.FIELDS)
    lpfs.attach(model)
    with pytest.raises(InputError, match=r"part_weights\(0\) of Empty names \[6:6\]"):
        lpfs.absorb(model)
