"""Gates on the columns of the Linear that reads the fields."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lpfs
from lpfs import Selection, Site
from lpfs.errors import FieldError, InputError, StateError
from tests.helpers.zoo import GATES, INPUTS, OPTIMIZERS, B, D, Plain, Stacked, batch, set_gates, whole_weights


def attach(model, **settings):
    return lpfs.attach(model, model.fields, reader=model.top[0], at="reader", **settings)


def hook_count(model):
    """Number of hooks; the class of the reader depends on whether there are gates."""
    assert (type(model.top[0]) is nn.Linear) != hasattr(model, "lpfs_gates")
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


# -------------------------------------------------------------------------------------------- the check


class Beside(Plain):
    """What is added to the logits from the parts before the concatenation."""

    def __init__(self, beside, reads=lambda parts: torch.cat(parts, 1)):
        super().__init__()
        self.beside, self.reads = beside, reads

    def forward(self, ids, tags, price, dense):
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
        early = self.beside(parts)
        parts += [self.bag(tags), self.price(price), self.dense(dense)]
        return self.top(self.reads(parts)).squeeze(1) + early


@pytest.mark.parametrize(
    "model",
    [
        Beside(lambda parts: (parts[0] * parts[1]).sum(1)),
        Beside(lambda parts: parts[0].detach().sum(1)),
        Beside(lambda parts: functional.normalize(parts[0]).sum(1)),
        Beside(lambda parts: (parts[0] * parts[1] * parts[2]).square().sum(1)),
        Beside(lambda parts: 0.0, lambda parts: torch.relu(torch.cat(parts, 1))),
        Beside(lambda parts: 0.0, lambda parts: torch.cat([parts[0] + parts[1], *parts[1:]], 1)),
    ],
    ids=[
        "product beside",
        "detached use beside",
        "only the direction",
        "square of a product",
        "relu before",
        "sum in the columns",
    ],
)
def test_a_field_that_does_not_enter_through_its_columns_alone_is_refused(model):
    model = copy.deepcopy(model)
    attach(model)
    for _ in range(2):
        with pytest.raises(FieldError, match="field 'user': a gate on columns .* does not act as one on the output"):
            model(*batch())
    lpfs.detach(model)
    model(*batch())


def test_a_cross_in_ungated_columns_of_the_reader_is_refused():
    model = Beside(lambda parts: 0.0)
    model.top[0] = nn.Linear(7 * D, 8)
    model.reads = lambda parts: torch.cat([*parts, parts[0] * parts[2]], 1)
    columns = {name: slice(n * D, (n + 1) * D) for n, name in enumerate(model.fields)}
    sites = {name: Site(module, reader="top.0", columns=columns[name]) for name, module in model.fields.items()}
    lpfs.attach(model, sites, at="reader")
    with pytest.raises(FieldError, match="field 'user'"):
        model(*batch())
    model.reads = lambda parts: torch.cat([*parts, torch.ones(B, D)], 1)  # other inputs are allowed
    model(*batch())
    model(*batch())


def test_the_order_is_checked_whatever_the_tables_contain():
    for values in (0.0, float("nan")):
        model = Plain()
        for table in model.emb.values():
            nn.init.constant_(table.weight, values)
        fields = model.fields
        fields["user"], fields["city"] = fields["city"], fields["user"]
        gates = lpfs.attach(model, fields, reader=model.top[0], at="reader")
        with gates.disabled():
            model(*batch())  # nothing to check
        with pytest.raises(FieldError, match="in the order of the concatenation"):
            model(*batch())
        lpfs.detach(model)
        attach(model)
        model(*batch())


def test_every_pair_of_many_fields_is_told_apart():
    model = Stacked(fields=20)
    order = list(range(20))
    order[3], order[19] = order[19], order[3]  # the same factor in the first of three runs
    sites = {f"f{n}": Site("table", n, reader="top.0", columns=slice(m * D, (m + 1) * D)) for n, m in enumerate(order)}
    lpfs.attach(model, sites, at="reader")
    with pytest.raises(FieldError, match="field 'f3'"):
        model(torch.randint(6, (B, 20)))


def test_the_check_changes_nothing_and_ends():
    model = Beside(lambda parts: 0.0)
    model.top.insert(1, nn.BatchNorm1d(8))
    model.top.insert(2, nn.Dropout(0.5))
    other = copy.deepcopy(model)
    model.emb.requires_grad_(False)
    gates = attach(model)
    assert gates.unverified
    torch.manual_seed(3)
    logits = model(*batch())
    torch.manual_seed(3)
    assert torch.equal(logits, other(*batch()))
    assert torch.equal(model.top[1].running_mean, other.top[1].running_mean)
    assert model.training
    assert model.top[2].training
    assert not gates.unverified
    assert hook_count(model) == 2  # the values of the gates, and their removal
    logits.sum().backward()
    assert all(table.weight.grad is None for table in model.emb.values())


def test_an_output_that_does_not_depend_on_the_fields_yet_is_checked_later():
    model = Plain()
    nn.init.zeros_(model.top[2].weight)
    gates = attach(model, steps=4)
    gates.optimizer(penalty=0.01)
    model(*batch())
    assert gates.unverified
    ids, *rest = batch()
    for _ in range(3):
        gates.step()
    with pytest.raises(FieldError, match="have not been compared"):
        gates.step()
    nn.init.ones_(model.top[2].weight)
    model(ids[:0], *(part[:0] for part in rest))  # an empty batch
    assert gates.unverified
    model(ids=ids, tags=rest[0], price=rest[1], dense=rest[2])
    assert not gates.unverified


def test_the_check_waits_for_all_fields_and_absorb_for_the_check():
    class Model(Plain):
        def forward(self, ids, tags, price, dense, skip=False):
            parts = [table(ids[:, n]) for n, table in enumerate(self.emb.values())]
            parts += [torch.zeros(B, D) if skip else self.bag(tags), self.price(price), self.dense(dense)]
            return self.top(torch.cat(parts, dim=1)).squeeze(1)

    model = Model()
    gates = attach(model)
    model(*batch(), skip=True)
    assert gates.unverified
    with pytest.raises(FieldError, match="have not been compared"):
        lpfs.absorb(model)
    model(*batch())
    assert not gates.unverified
    lpfs.absorb(model)


def test_arguments_modes_and_calls_of_the_model_are_left_alone():
    class Model(Plain):
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

        def forward(self, ids, tags, price, dense, again=True):
            ids -= 1
            if again:  # a pair of rows
                return self(ids + 1, tags, price, dense, False) - self(ids.flip(0) + 1, tags, price, dense, False)
            return super().forward(ids, tags, price, dense)

    model = Model()
    gates = attach(model)
    ids, *rest = batch()
    given = ids + 1
    model(given, *rest)
    assert torch.equal(given, ids)
    assert not gates.unverified
    assert (model.training, model.merged) == (True, False)


def test_a_model_that_cannot_be_compared_is_refused_with_the_reason():
    class Noise(Plain):
        def __init__(self):
            super().__init__()
            self.calls = [0]

        def forward(self, *inputs):
            self.calls[0] += 1
            return super().forward(*inputs) + self.calls[0]

    model = Noise()
    attach(model)
    with pytest.raises(FieldError, match="different outputs for the same batch.*omit at='reader'"):
        model(*batch())


def test_columns_of_zeros_do_not_hide_a_wrong_order():
    model = Plain()
    with torch.no_grad():
        model.top[0].weight[:, D:] = 0
    fields = model.fields
    fields["item"], fields["city"] = fields["city"], fields["item"]
    lpfs.attach(model, fields, reader=model.top[0], at="reader")
    with pytest.raises(FieldError, match="field 'item'"):
        model(*batch())


@dataclass
class Output:
    logits: torch.Tensor


def test_an_output_in_a_dataclass_is_compared():
    class Model(Beside):
        def forward(self, *inputs):
            return Output(super().forward(*inputs))

    model = Model(lambda parts: parts[2].sum(1))
    attach(model)
    with pytest.raises(FieldError, match="field 'city'"):
        model(*batch())


def test_bad_arguments():
    model = Plain()
    with pytest.raises(InputError, match="at must be 'output' or 'reader', found 'input'"):
        lpfs.attach(model, model.fields, at="input")
    with pytest.raises(FieldError, match="field 'user' has no reader: at='reader' needs the Linear that reads it"):
        lpfs.attach(model, model.fields, at="reader")
    stacked = Stacked()
    sites = {f"f{n}": Site("table", n, reader="top.0", columns=slice(0, D)) for n in range(2)}
    with pytest.raises(FieldError, match="fields 'f0' and 'f1' have column 0 of 'top.0'"):
        lpfs.attach(stacked, sites, at="reader")
    twice = [Site(model.emb["user"], reader="top.0", columns=slice(0, D))] * 2
    with pytest.raises(FieldError, match="names 'emb.user' twice"):
        lpfs.attach(model, {"user": twice}, at="reader")
    twice = [Site(module, reader="top.0", columns=slice(0, D)) for module in (model.emb["user"], model.price)]
    with pytest.raises(FieldError, match="two sites of 'user' have column 0 of 'top.0'"):
        lpfs.attach(model, {"user": twice}, at="reader")


# ------------------------------------------------------------------------------------- what users do with it


@pytest.mark.parametrize("gate", ["lpfs++", "gaussian"])  # with a compiled loop, and without
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(gate, reentrant):
    class Model(Plain):
        def forward(self, *inputs):
            return checkpoint(super().forward, *inputs, use_reentrant=reentrant)

    model, plain = Model(), Plain()
    plain.load_state_dict(model.state_dict())
    data = [part.requires_grad_() if part.is_floating_point() else part for part in batch()]
    grads = []
    for module in (model, plain):
        gates = attach(module, gate=gate)
        module(*data).sum().backward()
        grads.append(gates.x.grad)
    assert torch.equal(*grads)


def test_a_norm_of_the_weight_that_is_added_later_is_respected():
    model = Plain()
    gates = attach(model)
    model(*batch())
    nn.utils.parametrizations.weight_norm(model.top[0])
    model(*batch()).sum().backward()
    assert gates.x.grad.abs().min() > 0
    set_gates(gates, [0.0] * 6)
    assert torch.equal(model(*batch()), model(*reversed_batch()))


def reversed_batch():
    return [part.flip(0) for part in batch()]


def test_a_wrapped_forward_stays_wrapped():
    model = Plain()
    before, calls = model(*batch()), []
    gates = attach(model)
    inner = model.top[0].forward
    model.top[0].forward = lambda input: (calls.append(1), inner(input))[1]
    model(*batch())
    set_gates(gates, GATES)
    assert not torch.equal(gated := model(*batch()), before)
    lpfs.absorb(model, batch=batch())
    calls.clear()
    assert torch.equal(model(*batch()), gated)
    assert calls == [1]


def test_a_layer_with_gates_takes_no_others():
    model = Plain()
    attach(model)
    sites = {"user": Site("inner.emb.user", reader="inner.top.0", columns=slice(0, D))}
    with pytest.raises(StateError, match="'inner.top.0' already has gates on its columns"):
        lpfs.attach(outer := nn.ModuleDict({"inner": model}), sites, at="reader")
    assert not hasattr(outer, "lpfs_gates")
    assert not outer._forward_hooks
    assert not outer._forward_pre_hooks


def test_rounding_is_admitted_where_a_product_changes_the_layout():
    model = Plain()
    model.top[0].weight = nn.Parameter(model.top[0].weight.detach().t().contiguous().t())
    gates = attach(model)
    model(*batch())
    set_gates(gates, GATES)
    selection = lpfs.absorb(model, batch=batch())
    assert not selection.made["exact"]
    assert selection.made["max_logit_change"] < 1e-5


def test_columns_with_constants_are_not_cut():
    model = Plain()
    model.top[0].register_forward_hook(lambda module, args, output: output)
    gates = attach(model)
    model(*batch())
    set_gates(gates, GATES)
    selection = lpfs.absorb(model)
    assert selection.made["absorbed"] == dict.fromkeys(model.fields, "constant")
    with pytest.raises(InputError, match="columns of 'top.0' cannot be removed: gates remained there as constants"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, cut=True)
    before = model(*batch())
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)
    assert pruned.certificate.certified
    assert torch.equal(pruned.model(*batch()), before)
    assert torch.equal(model(*batch()), before)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about itself
def test_under_torch_compile():
    model = Plain()
    gates = attach(model)
    compiled = torch.compile(model)
    compiled(*batch())
    assert gates.unverified
    model(*batch())
    assert not gates.unverified
    set_gates(gates, GATES)
    grads = []
    for module in (model, compiled):
        gates.x.grad = None
        module(*batch()).sum().backward()
        grads.append(gates.x.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)  # compiled kernels round differently
    torch.testing.assert_close(compiled(*batch()), model(*batch()), rtol=1e-5, atol=1e-5)
