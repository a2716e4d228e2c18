"""Inputs of the models: selected fields, numeric fields of any width, tokens, crosses and their names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lpfs.errors import FieldError, InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.models.dlrm import DLRM, DLRMCross, part_name
from lpfs.models.inputs import Inputs
from lpfs.models.layers import NumericEmbeddings
from lpfs.models.mlp import FM, MLP
from lpfs.models.user_item import UserItem
from lpfs.schema import Field, Schema
from tests.helpers.clicks import MIXED, batch_of


def test_selected_fields_of_a_batch_are_in_the_order_of_the_schema():
    batch = batch_of(MIXED)
    assert batch.select(MIXED, MIXED.names) is batch
    small = batch.select(MIXED, ["n2", "..", "three", "a bag"])
    assert torch.equal(small.ids, batch.ids[:, 1:2])
    assert torch.equal(small.dense, batch.dense[:, 1:5])
    assert torch.equal(small.missing, batch.missing[:, 1:5])
    assert list(small.bags) == ["a bag"]
    assert small.labels is batch.labels
    nothing = batch.select(MIXED, [])
    assert (nothing.ids.shape, nothing.dense.shape, nothing.bags) == ((12, 0), (12, 0), {})
    with pytest.raises(FieldError, match="'unknown'"):
        batch.select(MIXED, ["unknown"])


@pytest.mark.parametrize("widths", [[1, 1, 1], [1, 3, 1, 2, 3], [4], [2, 2]])
@pytest.mark.parametrize("missing", [False, True])
def test_numeric_embeddings_equal_their_formula(widths, missing):
    numbers = NumericEmbeddings([Field(f"f{n}", "numeric", dim=width) for n, width in enumerate(widths)], 4).double()
    dense = torch.randn(6, sum(widths), dtype=torch.float64)
    absent = torch.rand(6, sum(widths)) < 0.5
    gate = torch.randn(len(widths), dtype=torch.float64)
    result = numbers(dense, absent if missing else None, gate)
    start = 0
    for number, width in enumerate(widths):
        columns = slice(start, start + width)
        expected = dense[:, columns] @ numbers.weight[columns]
        if missing:
            expected = expected + absent[:, columns].double() @ numbers.missing[columns]
        torch.testing.assert_close(result[:, number], expected * gate[number])
        start += width


def test_missing_numbers_change_the_logits():
    model, batch = MLP(MIXED, dim=4), batch_of(MIXED)
    assert model(batch_of(MIXED, missing=False)).shape == (12,)
    assert not torch.equal(model(replace(batch, missing=None)), model(batch))


def test_pooling():
    batch = batch_of(MIXED)
    mean, total = (Inputs(MIXED, ["a bag"], 4, pooling=pooling) for pooling in ("mean", "sum"))
    total.load_state_dict(mean.state_dict())
    sizes = torch.tensor([0, 3, 1, 5] * 3)[:, None, None]
    torch.testing.assert_close(mean(batch) * sizes, total(batch))
    assert (mean(batch)[0] == 0).all()
    with pytest.raises(InputError, match="pooling must be"):
        Inputs(MIXED, ["a bag"], 4, pooling="max")


def test_the_dense_token_is_dropped_with_all_numbers():
    model, batch = DLRM(MIXED, dim=4), batch_of(MIXED)
    assert model.config["token"] == "dense'", "a bag is called dense"
    smaller, _ = model.smaller([name for name in model.names if name != "dense'"], cut=True)
    assert all(field.kind != "numeric" for field in smaller.schema)
    only, _ = model.smaller(["dense'", "dense"], cut=True)
    assert only.schema.names == ("n1", "three", "n2", "dense")
    no_bag, _ = model.smaller(["dense'", "weight"], cut=True)
    assert no_bag.names == ("weight", "dense'"), "the token keeps its name"
    assert no_bag(model.narrow(batch, no_bag)).shape == (12,)
    assert DLRM(Schema(MIXED.fields[:3])).names == ("a.b", "..", "dense")


def test_pruning_a_field_with_the_name_of_the_token_keeps_the_token():
    model, batch = DLRM(MIXED, dim=4), batch_of(MIXED)
    gates = attach(model, steps=10)
    with torch.no_grad():
        gates.x[gates.names.index("dense")] = 0.0
    model(batch)
    pruned = prune(model, absorb(model), batch=batch, cut=True)
    assert pruned.certificate.certified


def test_names_of_crosses_are_unique():
    names = ["a", "b", "a*b", "*", "\\", "a\\", "\\*b", "a\\*b"]
    schema = Schema(tuple(Field(name, cardinality=3) for name in names))
    model = DLRMCross(schema, dim=2)
    assert len(set(model.names)) == len(model.names) == 8 + 28
    assert part_name(["a", "b"]) == "a*b"
    assert set(model.fields_of_parts()["a*b"]) == {"a", "b"}
    assert model.fields_of_parts()[part_name(["a*b"])] == ("a*b",)
    with pytest.raises(FieldError, match="'a[*]c'"):
        DLRMCross(schema, parts=["a", "a*c"])


def test_a_cross_can_be_kept_without_its_fields():
    schema = Schema(tuple(Field(name, cardinality=5) for name in "abcd"))
    model, batch = DLRMCross(schema, dim=4), batch_of(schema)
    gates = attach(model, steps=10)
    with torch.no_grad():
        for number, name in enumerate(gates.names):
            gates.x[number] = 1.0 if name in ("a*b", "c") else 0.0
    before = model(batch)
    selection = absorb(model)
    for cut in (False, True):
        pruned = prune(model, selection, batch=batch, cut=cut)
        assert pruned.certificate.certified
        assert pruned.model.reads.names == ("a", "b", "c")
        assert pruned.model.names == ("c", "a*b")
        narrow = model.narrow(batch, pruned.model)
        torch.testing.assert_close(pruned.model(narrow), before)
        assert narrow.ids.shape == (12, 3)
    assert pruned.model.top[0].in_features == 2 * 4
    assert pruned.model.config["parts"] == ["c", "a*b"]


def groups(**counts) -> Schema:
    return Schema(
        tuple(Field(f"{group}{n}", cardinality=4, group=group) for group, count in counts.items() for n in range(count))
    )


def test_dropping_a_field_drops_its_crosses():
    schema = groups(user=3, item=2, combine=1)
    model = UserItem(schema, dim=4, other_dim=3)
    assert model.top[0].in_features == 3 * 2 * 4 + 3
    smaller, kept = model.smaller(["user0", "user2", "item1", "combine0"], cut=True)
    assert smaller.top[0].in_features == 2 * 1 * 4 + 3
    pairs = [(user, item) for user in range(3) for item in range(2)]
    stay = [pairs.index((user, 1)) for user in (0, 2)]
    columns = [pair * 4 + k for pair in stay for k in range(4)]
    assert kept["top.0.weight"][1].tolist() == [*columns, *range(24, 27)]


def test_without_items_the_users_are_dropped_too():
    schema, batch = groups(user=2, item=1, context=2), batch_of(groups(user=2, item=1, context=2))
    with pytest.raises(InputError, match="group user.*group item"):
        UserItem(groups(user=2, context=1))
    model = UserItem(schema, dim=4)
    gates = attach(model, steps=10)
    with torch.no_grad():
        gates.x[gates.names.index("item0")] = 0.0
    before = model(batch)
    pruned = prune(model, absorb(model), batch=batch, cut=True)
    assert pruned.model.names == ("context0", "context1")
    torch.testing.assert_close(pruned.model(model.narrow(batch, pruned.model)), before)
    with pytest.raises(InputError, match="group item.*must_keep"):
        model.smaller(["user0"], cut=True)


def test_every_task_has_a_head():
    schema = Schema(groups(user=1, item=1).fields, tasks=("buy", "stay"))
    model = UserItem(schema, dim=4)
    assert len(model.heads) == 3
    with pytest.raises(InputError, match="hidden"):
        UserItem(schema, hidden=())


def test_a_gate_multiplies_the_linear_weight_too():
    schema = Schema((Field("a", cardinality=4), Field("b", cardinality=3)))
    model, batch = FM(schema, dim=2), batch_of(schema)
    gates = attach(model, steps=10)
    with torch.no_grad():
        gates.x.zero_()
    assert torch.equal(model(batch), model.bias.expand(12))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLP(MIXED, dim=0), "dim must be at least 1"),
        (lambda: MLP(MIXED, hidden=[0]), "hidden widths"),
        (lambda: DLRM(MIXED, interaction="sum"), "interaction must be"),
        (lambda: DLRM(Schema(MIXED.fields[1:2]), interaction="dot"), "no input columns"),
    ],
)
def test_wrong_arguments_raise(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_many_numeric_fields_take_one_operation():
    """400 columns need as many operations as one."""
    schema = Schema(tuple(Field(f"n{n}", "numeric") for n in range(400)))
    model, batch = MLP(schema, dim=4), batch_of(schema, missing=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::mul"] == 1
    assert max(calls.values()) < 20
