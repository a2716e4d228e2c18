"""prune: smaller, the same predictions, and a proof or an honest 'not certified'."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import Certificate, Selection, Site
from lpfs.errors import AbsenceError, FieldError, InputError, LeakError, StateError
from lpfs.gates.prune import _carry_optimizer
from lpfs.gates.verification import check_batch
from tests.helpers.zoo import (
    GATES,
    INPUTS,
    OPTIMIZERS,
    B,
    D,
    Plain,
    Stacked,
    batch,
    gated,
    set_gates,
    trained,
    whole_weights,
)


class Pair(NamedTuple):
    ids: torch.Tensor
    flag: torch.Tensor


ROWS = ("rowwise", True)  # one number for a row of a Linear: a mean over columns, which cutting would change
DROPPED = [0.0, 1.0, 0.0, 0.0, 0.5, 0.0]  # user, city, tags, dense


def absorbed(model: nn.Module | None = None, values=DROPPED, **settings) -> tuple[nn.Module, Selection]:
    model = gated(model or Plain(), values, **settings)
    return model, lpfs.absorb(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropped_tables_bags_and_branches_are_gone_bit_for_bit(dtype):
    model, selection = absorbed(Plain().to(dtype))
    before = model(*batch(dtype))
    state = copy.deepcopy(model.state_dict())
    pruned = lpfs.prune(model, selection, batch=batch(dtype), inputs=INPUTS)
    assert torch.equal(pruned.model(*batch(dtype)), before)
    names = {name.rpartition(".")[0] for name, _ in pruned.model.named_parameters()}
    assert names == {"emb.item", "price", "top.0", "top.2"}
    assert pruned.certificate.certified
    assert pruned.certificate.max_logit_change == 0.0
    assert pruned.certificate.bound == 0.0
    assert str(pruned.certificate).startswith("certified: max |Δlogit| 0 (bound 0), 4 dropped fields")
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.emb["user"].weight.shape == (10, D)


def test_the_pruned_model_never_looks_a_dropped_id_up():
    model, selection = absorbed()
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS).model
    ids, tags, price, dense = batch()
    ids[:, 0] = 10**9  # far outside the table that was there
    assert torch.equal(pruned(ids, tags, price, dense), model(*batch()))


def test_bags_with_offsets_keep_their_shape():
    for last in (False, True):
        bag = nn.EmbeddingBag(5, D, include_last_offset=last)
        model = nn.ModuleDict({"bag": bag})
        set_gates(lpfs.attach(model, {"bag": bag}), [0.0])
        selection = lpfs.absorb(model)
        pruned = lpfs.prune(model, selection).model
        ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3] if last else [0, 2])
        assert torch.equal(pruned["bag"](ids, offsets), bag(ids, offsets))


def test_a_leak_is_found_and_named():
    class Leaky(Plain):
        def __init__(self):
            super().__init__()
            self.wide = nn.Embedding(10, 1)

        def forward(self, ids, tags, price, dense):
            return super().forward(ids, tags, price, dense) + self.wide(ids[:, 2]).squeeze(1)

    model, selection = absorbed(Leaky())
    with pytest.raises(LeakError, match="field 'city'.*still change the output"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)
    mended = Leaky()
    gates = lpfs.attach(mended, {**mended.fields, "city": [mended.emb["city"], mended.wide]})
    set_gates(gates, DROPPED)
    pruned = lpfs.prune(mended, lpfs.absorb(mended), batch=batch(), inputs=INPUTS)
    assert pruned.certificate.certified
    assert not any("wide" in name for name, _ in pruned.model.named_parameters())


def test_without_a_map_or_a_batch_it_says_not_certified():
    model, selection = absorbed()
    some = lpfs.prune(model, selection, batch=batch(), inputs={"user": (0, 0)}).certificate
    assert not some.certified
    assert some.checked == ("user",)
    assert str(some).startswith("not certified: max |Δlogit| 0 (bound 0)")
    assert "city, tags, dense" in str(some)
    assert "inputs=" in str(some)
    none = lpfs.prune(model, selection).certificate
    assert str(none).startswith("not certified")
    assert "batch=" in str(none)
    assert none.max_logit_change is None


def test_values_that_cannot_be_replaced_are_not_called_checked():
    model, selection = absorbed()
    ids, tags, price, dense = batch()
    ids[:, 0] = 3  # every row the same: nothing to replace it by
    certificate = lpfs.prune(model, selection, batch=(ids, tags, price, dense), inputs=INPUTS).certificate
    assert certificate.unchecked == ("user",)


def test_inputs_in_dicts_objects_and_by_function():
    class Named(Plain):
        def forward(self, data):
            data = data if isinstance(data, dict) else vars(data)
            return super().forward(data["ids"], data["tags"], data["price"], data["dense"])

    class Record:
        pass

    model, selection = absorbed(Named())
    data = dict(zip(("ids", "tags", "price", "dense"), batch(), strict=True))
    record = Record()
    record.__dict__.update(data)
    where = {"user": ("ids", 0), "city": ("ids", 2), "tags": "tags", "dense": "dense"}
    for each in (data, record):
        assert lpfs.prune(model, selection, batch=each, inputs=where).certificate.certified
    calls = []

    def other(given):
        calls.append(given)
        return {**given, "tags": given["tags"].flip(0)}

    certificate = lpfs.prune(model, selection, batch=data, inputs={**where, "tags": other}).certificate
    assert certificate.certified
    assert calls
    by_call = lpfs.prune(
        model, selection, batch=[data], inputs={"user": (0, "ids", 0)}, call=lambda model, batch: model(batch[0])
    )
    assert by_call.certificate.checked == ("user",)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"user": 9}, "the batch has no 9"),
        ({"user": "ids"}, "the batch has no 'ids'"),
        ({"user": (0, 9)}, "9 is not a column"),
        ({"user": (0, 0, 0)}, "0 is not a column"),
    ],
)
def test_a_wrong_map_is_named(inputs, message):
    model, selection = absorbed()
    with pytest.raises(InputError, match=message):
        lpfs.prune(model, selection, batch=batch(), inputs=inputs)


def test_a_misspelt_field_of_a_map_is_named():
    model, selection = absorbed()
    inputs = {"User" if name == "user" else name: path for name, path in INPUTS.items()}
    with pytest.raises(FieldError, match="inputs: there is no field 'User'.*did you mean 'user'"):
        lpfs.prune(model, selection, batch=batch(), inputs=inputs)
    other = {**INPUTS, "another": (0, 0)}  # a field without a gate, beside those that are needed
    assert lpfs.prune(model, selection, batch=batch(), inputs=other).certificate.certified


def test_gates_on_the_zeros_of_a_dropped_field_are_refused():
    model, selection = absorbed()
    smaller = lpfs.prune(model, selection, batch=batch()).model
    with pytest.raises(FieldError, match="'user' was dropped by prune: 'emb.user' is a Zeros module.*Omit it"):
        lpfs.attach(smaller, smaller.fields, reader=smaller.top[0])


def test_other_kinds_of_values_can_be_replaced():
    class Kinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Embedding(9, D), nn.Linear(1, D)
            self.top = nn.Linear(2 * D, 1)

        def forward(self, data):
            ids, flag = data
            return self.top(torch.cat([self.a(ids.long()), self.b(flag.float()[:, None])], 1)).squeeze(1)

    model = Kinds()
    set_gates(lpfs.attach(model, {"ids": model.a, "flag": model.b}), [0.0, 0.0])
    selection = lpfs.absorb(model)
    data = Pair(torch.randint(9, (B,)).float(), torch.arange(B) % 2 == 0)  # ids that came as floats stay in range
    where = {"ids": 0, "flag": "flag"}
    run = {"call": lambda model, batch: model(batch)}
    assert lpfs.prune(model, selection, batch=data, inputs=where, **run).certificate.certified
    same = lpfs.prune(model, selection, batch=data, inputs={**where, "ids": lambda batch: batch}, **run)
    assert same.certificate.unchecked == ("ids",)
    empty = Pair(torch.zeros(0), torch.zeros(0, dtype=torch.bool))
    with pytest.raises(InputError, match="the batch is empty"):
        lpfs.prune(model, selection, batch=empty, inputs={"ids": lambda batch: Pair(*batch)}, **run)


def test_a_model_that_never_answers_the_same_cannot_be_checked():
    class Dice(Plain):
        def forward(self, *inputs):
            return super().forward(*inputs) + torch.rand(())

    model, selection = absorbed(Dice())
    with pytest.raises(InputError, match="different outputs for the same batch"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)


# ---------------------------------------------------------------------------------------- columns


def test_columns_are_cut_exactly_where_arithmetic_is():
    model = whole_weights(Plain()).double()
    data = batch(torch.float64, whole=True)
    model, selection = absorbed(model, reader=model.top[0])
    pruned = lpfs.prune(model, selection, batch=data, inputs=INPUTS, cut=True)
    assert torch.equal(pruned.model(*data), model(*data))
    assert pruned.model.top[0].weight.shape == (8, 2 * D)
    assert pruned.model.top[0].in_features == 2 * D
    assert model.top[0].weight.shape == (8, 6 * D)
    assert pruned.certificate.certified


def test_columns_are_cut_to_rounding():
    model = Plain()
    model, selection = absorbed(model, reader=model.top[0])
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, cut=True)
    change = (pruned.model(*batch()) - model(*batch())).abs().max().item()
    assert change == pruned.certificate.max_logit_change
    assert change <= pruned.certificate.bound < 1e-3
    assert "bound" in str(pruned.certificate)


class Normed(nn.Module):
    """Three tables whose concatenation goes through something before the Linear."""

    def __init__(self, between: nn.Module, stack: bool = False) -> None:
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(6, D) for _ in range(3)])
        self.between, self.stack = between, stack
        self.top = nn.Linear(3 * D, 1)

    def forward(self, ids):
        parts = [table(ids[:, n]) for n, table in enumerate(self.emb)]
        if self.stack:
            tokens = torch.stack(parts, 1)
            return self.top(self.between(tokens, tokens, tokens)[0].flatten(1)).squeeze(1)
        return self.top(self.between(torch.cat(parts, 1))).squeeze(1)


@pytest.mark.parametrize(
    ("between", "stack", "kind"),
    [
        (nn.LayerNorm(3 * D), False, "LayerNorm"),
        (nn.BatchNorm1d(3 * D), False, "BatchNorm1d"),
        (nn.MultiheadAttention(D, 2, batch_first=True), True, "MultiheadAttention"),
    ],
)
def test_columns_are_not_cut_where_zero_is_not_absence(between, stack, kind):
    model, ids = Normed(between, stack), torch.randint(6, (B, 3))
    set_gates(lpfs.attach(model, reader=model.top), [0.0, 1.0, 1.0])
    selection = lpfs.absorb(model)
    where = {"emb.0": (0, 0)}
    with pytest.raises(AbsenceError, match=f"'between' is a {kind}"):
        lpfs.prune(model, selection, batch=(ids,), inputs=where, cut=True)
    whole = lpfs.prune(model, selection, batch=(ids,), inputs=where)  # zeros instead: exact for any model
    assert whole.certificate.max_logit_change == 0.0
    assert whole.certificate.certified


def test_cutting_needs_to_know_who_reads_the_fields():
    model, selection = absorbed()
    with pytest.raises(InputError, match="no dropped field is read.*reader=, or prune with cut=False$"):
        lpfs.prune(model, selection, batch=batch(), cut=True)
    model = Normed(nn.LayerNorm(3 * D))
    set_gates(lpfs.attach(model), [0.0, 1.0, 1.0])
    with pytest.raises(InputError, match="no dropped field is read.*reader=.*if 'between' is a LayerNorm"):
        lpfs.prune(model, lpfs.absorb(model), cut=True)


def test_a_layer_of_a_field_is_not_called_the_reason_why_columns_stay():
    model = Normed(nn.ReLU())
    model.emb[1] = nn.Sequential(model.emb[1], nn.BatchNorm1d(D))
    model.eval()
    fields = {f"f{n}": f"emb.{n}" for n in range(3)}
    set_gates(lpfs.attach(model, fields), [0.0, 1.0, 1.0])
    selection = lpfs.absorb(model)
    with pytest.raises(InputError, match="prune with cut=False$"):
        lpfs.prune(model, selection, cut=True)
    model.between = nn.Sigmoid()  # changes zeros
    set_gates(lpfs.attach(model, fields, reader=model.top), [0.0, 1.0, 1.0])
    selection = lpfs.absorb(model)
    with pytest.raises(AbsenceError, match="perhaps because a layer before the Linear changes zeros"):
        lpfs.prune(model, selection, batch=(torch.randint(6, (B, 3)),), cut=True)


# ---------------------------------------------------------------------------------- the optimizer


@pytest.mark.parametrize(
    ("name", "cut"), [(name, cut) for name in sorted(OPTIMIZERS) for cut in (False, True) if (name, cut) != ROWS]
)
def test_the_next_step_of_the_pruned_model_is_that_of_the_absorbed_one(name, cut):
    model, optimizer = trained(name)
    lpfs.detach(model)
    gates = lpfs.attach(model, model.fields, reader=model.top[0])
    set_gates(gates, [0.0, -2.0, 0.0, 4.0, -0.25, 0.0])
    selection = lpfs.absorb(model, optimizer)
    groups = [len(group["params"]) for group in optimizer.param_groups]
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer, cut=cut)
    assert [len(group["params"]) for group in optimizer.param_groups] == groups
    assert type(pruned.optimizer) is type(optimizer)
    assert {id(p) for group in pruned.optimizer.param_groups for p in group["params"]} == {
        id(p) for p in pruned.model.parameters()
    }
    for each, step in ((model, optimizer), (pruned.model, pruned.optimizer)):
        step.zero_grad()
        functional.binary_cross_entropy_with_logits(each(*batch()), torch.arange(B) % 2 * 1.0).backward()
        step.step()
    after = dict(model.named_parameters())
    for path, weight in pruned.model.named_parameters():
        whole = after[path]
        if weight.shape != whole.shape:
            whole = whole[:, torch.tensor([*range(D, 2 * D), *range(3 * D, 5 * D)])]
        if cut:
            # a sum of 12 instead of 24 terms: some roundings, which Adagrad and Adam may amplify near zero
            torch.testing.assert_close(weight, whole, rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(weight, whole)


def test_a_row_wise_state_of_a_linear_is_not_cut():
    model, optimizer = trained("rowwise")
    lpfs.detach(model)
    set_gates(lpfs.attach(model, model.fields, reader=model.top[0]), DROPPED)
    selection = lpfs.absorb(model, optimizer)
    with pytest.raises(InputError, match="row-wise optimizer state of a Linear cannot be cut"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer, cut=True)


def test_several_optimizers_come_along_and_one_without_weights_goes():
    model = gated(Plain(), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    optimizers = [torch.optim.Adagrad(model.emb.parameters()), torch.optim.Adam(model.top.parameters())]
    selection = lpfs.absorb(model, optimizers)
    first, second = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizers).optimizer
    assert first is None
    assert type(second) is torch.optim.Adam


def test_the_pruned_model_can_change_its_dtype_and_keeps_its_mode():
    model, selection = absorbed()
    pruned = lpfs.prune(model.eval(), selection, batch=batch(), inputs=INPUTS).model
    assert not any(each.training for each in pruned.modules())
    torch.testing.assert_close(
        pruned.bfloat16()(*batch(torch.bfloat16)), model.bfloat16()(*batch(torch.bfloat16)), rtol=0, atol=0
    )


def test_stand_ins_answer_as_what_they_stand_for():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.seq = nn.Embedding(9, D), nn.Linear(3, D)
            self.top = nn.Linear(2 * D, 1)

        def forward(self, ids, x):
            return self.top(torch.cat([self.emb(input=ids), self.seq(input=x)], -1)).sum((1, 2))

    model = Keyword()
    data = (torch.randint(9, (B, 5)), torch.randn(B, 5, 3))
    set_gates(lpfs.attach(model, {"ids": model.emb, "x": model.seq}), [0.0, 0.0])
    pruned = lpfs.prune(model, lpfs.absorb(model), batch=data, inputs={"ids": 0, "x": 1})
    assert torch.equal(pruned.model(*data), model(*data))
    assert pruned.certificate.certified


class History(nn.Module):
    """A mean over a list of ids of any length, and one id."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.user, self.list = nn.Embedding(9, D), nn.Sequential(nn.Embedding(9, D), *layers)
        self.top = nn.Linear(2 * D, 1)

    def forward(self, user, ids):
        return self.top(torch.cat([self.user(user), self.list(ids).mean(1)], 1)).squeeze(1)


def test_zeros_of_a_branch_have_the_length_of_the_input():
    model = History(nn.Dropout(0.1)).eval()
    set_gates(lpfs.attach(model, {"user": model.user, "list": model.list}), [1.0, 0.0])
    selection = lpfs.absorb(model)

    def rows(length, batch=B):
        return torch.randint(9, (batch,)), torch.randint(9, (batch, length))

    pruned = lpfs.prune(model, selection, batch=rows(5), inputs={"list": 1})
    assert pruned.certificate.certified
    for data in (rows(7), rows(1, 3)):
        assert torch.equal(pruned.model(*data), model(*data))


class Tokens(nn.Module):
    """A field with a dense branch of another shape."""

    def __init__(self, layer):
        super().__init__()
        self.user, self.branch = nn.Embedding(9, 6), nn.Sequential(nn.Linear(2, 6), layer)
        self.top = nn.Linear(6, 1)

    def forward(self, user, x):
        return self.top(self.user(user) + self.branch(x).view(-1, 6)).squeeze(1)


def test_a_branch_of_several_tokens_is_pruned_and_one_without_rows_is_refused():
    def pruned(layer):
        model = Tokens(layer).eval()
        set_gates(lpfs.attach(model, {"user": model.user, "x": model.branch}), [1.0, 0.0])
        selection = lpfs.absorb(model)
        rows = torch.randint(9, (4,)), torch.randn(4, 2)
        return model, lpfs.prune(model, selection, batch=rows, inputs={"x": 1}).model

    model, smaller = pruned(nn.Unflatten(1, (3, 2)))  # (B, 3, 2) for (B, 2)
    rows = torch.randint(9, (7,)), torch.randn(7, 2)
    assert torch.equal(smaller(*rows), model(*rows))
    with pytest.raises(AbsenceError, match=r"'branch'.*output has shape \(24,\) for an input of shape \(4, 2\)"):
        pruned(nn.Flatten(0))


def test_a_module_that_zeros_cannot_stand_in_for_is_named():
    class Peeks(Plain):
        def forward(self, ids, tags, price, dense):
            return super().forward(ids.to(self.emb["user"].weight.device), tags, price, dense)

    model, selection = absorbed(Peeks())
    with pytest.raises(AbsenceError, match="cannot be replaced by zeros"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)


def test_settings_of_groups_come_along():
    model = gated(Plain())
    optimizer = torch.optim.AdamW(
        [{"params": model.emb.parameters(), "lr": 0.5}, {"params": model.top.parameters()}], lr=0.1, betas=(0.8, 0.9)
    )
    selection = lpfs.absorb(model, optimizer)
    new = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer).optimizer
    assert [group["lr"] for group in new.param_groups] == [0.5, 0.1]
    assert new.param_groups[1]["betas"] == (0.8, 0.9)
    assert len(new.param_groups[0]["params"]) == 2


# ------------------------------------------------------------------------------------ other paths


def test_slices_cannot_be_removed_but_stay_zero():
    model, ids = Stacked(), torch.randint(6, (B, 4))
    set_gates(lpfs.attach(model, {f"f{n}": Site("table", index=n) for n in range(4)}), [0.0, 1.0, 2.0, 0.0])
    selection = lpfs.absorb(model)
    with pytest.warns(UserWarning, match="nothing got smaller: 'f0' is a part of the output of 'table'"):
        pruned = lpfs.prune(model, selection, batch=(ids,), inputs={f"f{n}": (0, n) for n in range(4)})
    assert torch.equal(pruned.model(ids), model(ids))
    assert pruned.certificate.certified


def test_a_selection_read_from_a_file_prunes_a_model_loaded_again():
    model, selection = absorbed()
    again = Plain()
    again.load_state_dict(model.state_dict())
    read = Selection.from_json(json.loads(json.dumps(selection.to_json())))
    pruned = lpfs.prune(again, read, batch=batch(), inputs=INPUTS)
    assert pruned.certificate.certified
    assert torch.equal(pruned.model(*batch()), model(*batch()))


def test_the_constants_of_removed_fields_go_too():
    model, selection = absorbed(Plain(max_norm=1.0), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    assert hasattr(model, "lpfs_factors")
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)
    assert not hasattr(pruned.model, "lpfs_factors")
    assert hasattr(model, "lpfs_factors")


def test_nothing_dropped_is_a_plain_copy():
    model, selection = absorbed(values=[1.0] * 6)
    pruned = lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)
    assert torch.equal(pruned.model(*batch()), model(*batch()))
    assert pruned.certificate.certified


def test_wrong_arguments():
    model = gated(Plain(), GATES)
    with pytest.raises(StateError, match="absorb them first"):
        lpfs.prune(model, lpfs.Selection((), ()))
    selection = lpfs.absorb(model)
    with pytest.raises(InputError, match="Selection.*found list"):
        lpfs.prune(model, ["user"])
    with pytest.raises(FieldError, match="field 'x'"):
        lpfs.prune(model, Selection((), ("x",)))
    with pytest.raises(FieldError, match="no module 'emb.user'"):
        lpfs.prune(nn.Linear(1, 1), selection)


def test_the_error_of_a_wrong_batch_names_the_call_that_failed():
    for wrong, call, text in (
        ((1, 2), None, r"model\(\*batch\)"),
        ({}, None, r"model\(batch\)"),
        ({}, lambda model, batch: batch["ids"], r"call\(model, batch\)"),
    ):
        with pytest.raises(InputError, match=text + " failed with .*; the batch is of type"):
            check_batch("prune", nn.Linear(2, 1), wrong, call)


def test_a_weight_with_two_names_stays_in_the_optimizer_if_one_name_does():
    model, smaller = nn.Module(), nn.Module()
    model.first, model.second, smaller.second = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
    model.second.weight = model.first.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.first.weight]["momentum_buffer"] = torch.ones(1, 2)
    carried = _carry_optimizer(optimizer, model, smaller, {})
    assert [id(weight) for weight in carried.param_groups[0]["params"]] == [*map(id, smaller.parameters())]
    assert carried.state[smaller.second.weight]["momentum_buffer"].tolist() == [[1.0, 1.0]]


def test_a_pruned_model_adds_nothing_to_the_state_dict():
    """So that its weights can be loaded into a model of the kept fields alone."""
    model, selection = absorbed()
    pruned = lpfs.prune(model, selection, batch=batch()).model
    assert pruned.state_dict().keys() < model.state_dict().keys()


def test_a_batch_that_the_model_does_not_accept_is_refused():
    class Named(Plain):
        def forward(self, data):
            return super().forward(data["ids"], data["tags"], data["price"], data["dense"])

    named = dict(zip(("ids", "tags", "price", "dense"), batch(), strict=True))
    model, selection = absorbed(Named())
    without_ids = {key: value for key, value in named.items() if key != "ids"}
    with pytest.raises(InputError, match=r"model\(batch\) failed with KeyError: 'ids'; .* dict"):
        lpfs.prune(model, selection, batch=without_ids)
    model, selection = absorbed()
    with pytest.raises(InputError, match=r"model\(batch\) failed with TypeError: .* dict. .*model\(\*\*batch\)"):
        lpfs.prune(model, selection, batch=named)
    certificate = lpfs.prune(model, selection, batch=named, call=lambda model, batch: model(**batch)).certificate
    assert certificate.max_logit_change == 0.0


class BinaryLeak(Plain):
    """A dropped field of two values reaches the output past its gate."""

    def forward(self, ids, tags, price, dense):
        return super().forward(ids, tags, price, dense) + ids[:, 0]


def test_a_leak_of_a_field_with_two_values_is_found():
    model, selection = absorbed(BinaryLeak())
    ids, *rest = batch()
    ids[:, 0] = torch.arange(B) % 2
    with pytest.raises(LeakError, match="field 'user'"):
        lpfs.prune(model, selection, batch=(ids, *rest), inputs=INPUTS)


def test_a_leak_is_found_in_a_batch_that_is_an_object():
    @dataclass(frozen=True)
    class Record:
        ids: torch.Tensor
        rest: tuple[torch.Tensor, ...]

    class Named(BinaryLeak):
        def forward(self, record):
            return super().forward(record.ids, *record.rest)

    model, selection = absorbed(Named())
    ids, *rest = batch()
    record = Record(ids, tuple(rest))
    before = ids.clone()
    with pytest.raises(LeakError, match="field 'user'"):
        lpfs.prune(model, selection, batch=record, inputs={"user": ("ids", 0)})
    assert torch.equal(record.ids, before)


@pytest.mark.parametrize(("count", "shortened"), [(5, False), (6, True), (9, True)])
def test_a_certificate_says_if_it_does_not_name_all_unchecked_fields(count, shortened):
    text = str(Certificate(0.0, 0.0, (), tuple(f"field{n}" for n in range(count))))
    assert [f"field{n}" in text for n in range(count)] == [n < 5 for n in range(count)]
    assert ("…" in text) is shortened


def test_the_pruned_model_shows_the_width_of_its_zeros():
    model, selection = absorbed()
    text = str(lpfs.prune(model, selection, batch=batch()).model)
    assert f"(user): Zeros(({D},))" in text
    assert f"(bag): ZeroBags(({D},))" in text


def test_prune_leaves_no_hooks_on_the_model():
    model, selection = absorbed()
    hooks = {path: dict(module._forward_hooks) for path, module in model.named_modules()}
    lpfs.prune(model, selection, batch=batch(), inputs=INPUTS)
    assert {path: dict(module._forward_hooks) for path, module in model.named_modules()} == hooks


def test_columns_of_a_shared_weight_are_not_cut():
    model = Plain()
    model.tied = nn.Linear(6 * D, 8)
    model.tied.weight = model.top[0].weight
    model, selection = absorbed(model, reader=model.top[0])
    with pytest.raises(InputError, match=r"shared: \['top.0.weight', 'tied.weight'\]"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, cut=True)


def test_an_optimizer_with_an_unknown_state_is_refused():
    class Momentum(torch.optim.SGD):
        pass

    model, selection = absorbed()
    optimizer = Momentum(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.top[0].weight]["curvature"] = torch.ones(8, 8)
    with pytest.raises(InputError, match="state 'curvature' of Momentum"):
        lpfs.prune(model, selection, batch=batch(), inputs=INPUTS, optimizer=optimizer)
