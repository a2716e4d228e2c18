"""Gates on the columns of the Linear that reads the fields."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import Selection, Site
from lpfs.errors import FieldError, InputError
from tests.helpers.zoo import GATES, INPUTS, OPTIMIZERS, B, D, Plain, Stacked, batch, gated, set_gates, whole_weights


def attach(model, **settings):
    return lpfs.attach(model, model.fields, reader=model.top[0], at="reader", **settings)


def hook_count(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attach_changes_no_prediction_no_parameter_and_no_key(dtype):
    model = Plain().to(dtype)
    before, keys, weight = model(*batch(dtype)), list(model.state_dict()), model.top[0].weight
    attach(model)
    assert torch.equal(model(*batch(dtype)), before)
    assert model.top[0].weight is weight
    assert [key for key in model.state_dict() if "lpfs" not in key] == keys


def test_values_and_gradients_are_those_of_gates_on_the_outputs():
    models = [whole_weights(Plain()) for _ in range(2)]  # sums of whole numbers are exact in any order
    gates = [lpfs.attach(models[0], models[0].fields), attach(models[1])]
    logits = []
    for model, gate in zip(models, gates, strict=True):
        set_gates(gate, GATES)
        logits.append(model(*batch(whole=True)))
        logits[-1].sum().backward()
    assert torch.equal(*logits)
    assert gates[0].x.grad[0] != 0  # a dead gate has a gradient, with which it can revive
    assert torch.equal(gates[0].x.grad, gates[1].x.grad)
    for (name, first), second in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if "lpfs" not in name:
            assert torch.equal(first.grad, second.grad), name


def test_a_search_keeps_what_gates_on_the_outputs_keep():
    kept = []
    for at in ("output", "reader"):
        torch.manual_seed(0)
        model = Plain().double()
        data = batch(torch.float64)
        labels = (data[0][:, 1] % 2).double()
        gates = lpfs.attach(model, model.fields, steps=150, reader=model.top[0], at=at)
        optimizer = torch.optim.Adagrad(gates.model_parameters(), lr=0.05)
        with gates.search(optimizer, keep=2) as step:
            for _ in range(150):
                step(functional.binary_cross_entropy_with_logits(model(*data), labels))
        kept.append(gates.values)
    # the gradients of gates are sums in another order in float32, and 150 steps of Adagrad amplify their rounding
    torch.testing.assert_close(kept[0], kept[1], rtol=0.02, atol=0.0)
    assert int((kept[1] != 0).sum()) == 2


@pytest.mark.parametrize("name", ["adagrad", "adam", "sgd"])
@pytest.mark.parametrize("cut", [False, True])
def test_absorb_is_bitwise_equal_and_prune_is_certified(name, cut):
    model = Plain()
    gates = attach(model)
    optimizer = OPTIMIZERS[name](gates.model_parameters())
    functional.binary_cross_entropy_with_logits(model(*batch()), torch.arange(B) % 2 * 1.0).backward()
    optimizer.step()
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.0, -0.7, 0.0, 0.9, 1.3, 0.0]))
    before = model(*batch())
    selection = lpfs.absorb(model, optimizer, batch=batch())
    assert selection.made["absorbed"] == dict.fromkeys(model.fields, "reader")
    assert selection.made["exact"]
    assert selection.made["max_logit_change"] == 0.0
    assert torch.equal(model(*batch()), before)
    assert hook_count(model) == 0
    again = Selection.from_json(selection.to_json())
    pruned = lpfs.prune(model, again, batch=batch(), inputs=INPUTS, optimizer=optimizer, cut=cut)
    assert pruned.certificate.certified
    assert pruned.certificate.max_logit_change == 0.0 or cut
    assert pruned.model.top[0].in_features == (3 if cut else 6) * D
    for module, step in ((model, optimizer), (pruned.model, pruned.optimizer)):
        step.zero_grad()
        functional.binary_cross_entropy_with_logits(module(*batch()), torch.arange(B) % 2 * 1.0).backward()
        step.step()
    after = dict(model.named_parameters())
    kept = torch.tensor([*range(D, 2 * D), *range(3 * D, 5 * D)])  # the columns of a dropped field would learn again
    for path, weight in pruned.model.named_parameters():
        ours, theirs = weight, after[path]
        if path == "top.0.weight":
            ours, theirs = weight if cut else weight[:, kept], theirs[:, kept]
        # with cut columns: sums of 12 instead of 24 terms
        torch.testing.assert_close(ours, theirs, rtol=1e-4 if cut else 0, atol=1e-5 if cut else 0)


def test_a_shared_reader_keeps_its_gates_as_constants_and_restore_repeats_them():
    def shared():
        model = Plain()
        model.again = nn.Linear(6 * D, 8)
        model.again.weight = model.top[0].weight
        return model

    model = shared()
    state = copy.deepcopy(model.state_dict())
    set_gates(attach(model), GATES)
    before = model(*batch())
    selection = lpfs.absorb(model)
    assert selection.made["absorbed"] == dict.fromkeys(model.fields, "constant")
    assert torch.equal(model(*batch()), before)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items() if key in state)
    other = shared()
    lpfs.restore(other, selection)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*batch()), before)
    # a second search on the same columns: the constants stay
    set_gates(attach(other), [2.0] * 6)
    doubled = other(*batch())
    lpfs.absorb(other)
    assert torch.equal(other(*batch()), doubled)


def test_a_part_of_an_output_can_have_its_columns():
    model = whole_weights(Stacked())
    sites = {f"f{n}": Site("table", n, reader="top.0", columns=slice(n * D, (n + 1) * D)) for n in range(4)}
    ids = torch.randint(6, (B, 4))
    gates = lpfs.attach(model, sites, at="reader")
    set_gates(gates, [0.0, 2.0, -1.0, 0.5])
    logits = model(ids)
    lpfs.detach(model)
    set_gates(lpfs.attach(model, sites), [0.0, 2.0, -1.0, 0.5])
    assert torch.equal(model(ids), logits)


def test_gates_that_are_disabled_copied_or_detached_leave_the_weight_alone():
    model = Plain()
    before = model(*batch())
    set_gates(attach(model), GATES)
    clone = copy.deepcopy(model)  # before the check has run
    gated_logits = model(*batch())
    assert torch.equal(clone(*batch()), gated_logits)
    clone(*batch()).sum().backward()
    assert clone._modules["lpfs_gates"].x.grad is not None
    assert model._modules["lpfs_gates"].x.grad is None
    with model._modules["lpfs_gates"].disabled():
        assert torch.equal(model(*batch()), before)
    lpfs.detach(model)
    assert torch.equal(model(*batch()), before)
    assert hook_count(model) == 0


def test_the_weight_is_restored_after_an_error():
    model = Plain()
    set_gates(attach(model), GATES)
    weight = model.top[0].weight
    with pytest.raises(RuntimeError):
        model.top[0](torch.ones(B, 3))
    assert model.top[0].weight is weight


# -------------------------------------------------------------------------------------------- the check


class TwoReaders(Plain):
    def __init__(self):
        super().__init__()
        self.side = nn.Linear(D, 1)

    def forward(self, *inputs):
        return super().forward(*inputs) + self.side(self.emb["city"](inputs[0][:, 2])).squeeze(1)


class Interaction(Plain):
    """The product of two fields enters beside the reader."""

    def forward(self, ids, tags, price, dense):
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        inner = (parts[0] * parts[1]).sum(1)
        parts += [self.bag(tags), self.price(price), self.dense(dense)]
        return self.top(torch.cat(parts, dim=1)).squeeze(1) + inner


class Dropped(Plain):
    def forward(self, ids, tags, price, dense):
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        parts += [self.bag(tags), self.price(price), self.dense(dense)]
        return self.top(torch.relu(torch.cat(parts, dim=1))).squeeze(1)


@pytest.mark.parametrize("freeze", [False, True])
def test_a_field_that_is_also_read_elsewhere_is_refused(freeze):
    model = Interaction()
    model.emb.requires_grad_(not freeze)
    attach(model)
    with torch.no_grad():
        model(*batch())  # without gradients there is nothing to check yet
    with pytest.raises(FieldError, match="field 'user': the output of 'emb.user' is also used outside 'top.0'"):
        model(*batch())
    with pytest.raises(FieldError, match="omit at='reader'"):
        model(*batch())


def test_columns_that_are_not_those_of_the_field_are_refused():
    model = Plain()
    fields = dict(reversed(model.fields.items()))
    lpfs.attach(model, fields, reader=model.top[0], at="reader")
    with pytest.raises(FieldError, match="in the order of the concatenation"):
        model(*batch())
    lpfs.detach(model)
    model(*batch())
    changed = Dropped()
    attach(changed)
    with pytest.raises(FieldError, match=r"columns \(0, 4\) of the input of 'top.0' are not the output of 'emb.user'"):
        changed(*batch())


def test_the_check_runs_once_also_for_frozen_tables():
    model = Plain()
    model.emb.requires_grad_(False)
    attach(model)
    model(*batch()).sum().backward()
    assert all(table.weight.grad is None for table in model.emb.values())
    assert hook_count(model) == 4  # values and their removal; the product and its removal


def test_bad_arguments():
    model = Plain()
    with pytest.raises(InputError, match="at must be 'output' or 'reader', found 'input'"):
        lpfs.attach(model, model.fields, at="input")
    with pytest.raises(FieldError, match="field 'user' has no reader: at='reader' needs reader="):
        lpfs.attach(model, model.fields, at="reader")
    stacked = Stacked()
    sites = {f"f{n}": Site("table", n, reader="top.0", columns=slice(0, D)) for n in range(2)}
    with pytest.raises(FieldError, match="fields 'f0' and 'f1' both have column 0 of 'top.0'"):
        lpfs.attach(stacked, sites, at="reader")


def test_a_gate_outside_the_model_output_still_names_the_field_that_bypasses_it():
    model = TwoReaders()
    attach(model)
    with pytest.raises(FieldError, match="'city'"):
        model(*batch())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about itself
def test_under_torch_compile():
    model = gated(Plain(), reader=None)
    lpfs.detach(model)
    gates = attach(model)
    model(*batch())
    compiled = torch.compile(model)
    set_gates(gates, GATES)
    grads = []
    for module in (model, compiled):
        gates.x.grad = None
        module(*batch()).sum().backward()
        grads.append(gates.x.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)  # compiled kernels round differently
    torch.testing.assert_close(compiled(*batch()), model(*batch()), rtol=1e-5, atol=1e-5)
