"""Rows of a log as plain columns, scores of parts from scores of fields, and shuffled fields."""

from __future__ import annotations

from dataclasses import make_dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.methods.base import SearchTask
from lpfs.methods.sampling import SampledRanking, batch_columns, iterate_unseen, sample_rows, shuffle_fields
from lpfs.methods.target import SelectionTarget
from lpfs.schema import Schema
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import FIELDS


def task_of(model, stream):
    return SearchTask(
        model, torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), stream, None, SelectionTarget(keep=1), 10
    )


def test_columns_are_what_the_batch_holds():
    batch = batch_of(MIXED)
    found = batch_columns(batch, MIXED)
    assert found.labels.tolist() == batch.labels[:, 0].tolist()
    assert list(found.ids) == ["a.b", "..", "weight", "c*d"]
    assert found.ids["weight"].tolist() == batch.ids[:, 2].tolist()
    assert found.numbers["three"].shape == (12, 3)
    assert np.array_equal(np.isnan(found.numbers["three"]), batch.missing[:, 1:4].numpy())
    there = ~batch.missing[:, 4].numpy()
    assert found.numbers["n2"][there, 0].tolist() == batch.dense[:, 4].double().numpy()[there].tolist()
    values, sizes = found.bags["a bag"]
    assert values.tolist() == batch.bags["a bag"][0].tolist()
    assert sizes.tolist() == [0, 3, 1, 5] * 3
    assert not np.isnan(batch_columns(batch_of(MIXED, missing=False), MIXED).numbers["n1"]).any()


def test_batches_are_concatenated():
    model = Case("mlp").make(MIXED)
    batches = [batch_of(MIXED, seed=seed) for seed in (1, 2, 3)]
    found = sample_rows(task_of(model, batches), model.reads, 20, "this")
    assert len(found) == 24  # whole batches
    one, two = (batch_columns(batch, MIXED) for batch in batches[:2])
    assert found.ids[".."].tolist() == [*one.ids[".."], *two.ids[".."]]
    assert found.bags["a bag"][0].tolist() == [*one.bags["a bag"][0], *two.bags["a bag"][0]]
    assert found.bags["a bag"][1].tolist() == [*one.bags["a bag"][1], *two.bags["a bag"][1]]
    assert found.numbers["three"].shape == (24, 3)


@pytest.mark.parametrize("most", [100, 10**6])
def test_the_stream_keeps_its_position(log, most):
    stream = log.part(0, 300).stream(64, shuffle=True, seed=3)
    list(stream)
    before = stream.state_dict()
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    first = [len(batch) for batch in iterate_unseen(task_of(model, stream), most)]
    assert sum(first) == (128 if most == 100 else 300)
    assert stream.state_dict() == before
    rows = [sample_rows(task_of(model, stream), model.reads, most, "this").ids["ad"].tolist() for _ in range(2)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("most", [100, 151, 291, 300])
def test_sampled_batches_cover_the_period(log, most):
    """Also where there are less than twice as many as wanted: the last ones must not be left out."""
    stream = log.part(0, 300).stream(10)
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    every = [batch.ids.tolist() for batch in stream]
    taken = [every.index(batch.ids.tolist()) for batch in iterate_unseen(task_of(model, stream), most)]
    assert most <= sum(len(every[value]) for value in taken) <= most + 9
    assert max(taken) >= 27
    assert taken == sorted(taken)


def test_rows_of_one_class_are_refused(log):
    batch = batch_of(MIXED)
    batch.labels.zero_()
    with pytest.raises(InputError, match="this: the 12 rows have only one class"):
        sample_rows(task_of(Case("mlp").make(MIXED), [batch]), MIXED, 100, "this")


class ByPosition(SampledRanking):
    """Scores a field by its position in the schema."""

    Options = make_dataclass("PositionOptions", [("rows", int, 20)], frozen=True)

    def score_fields(self, rows, schema, seed):
        return {field.name: float(number) for number, field in enumerate(schema)}


def test_a_part_of_several_fields_has_the_sum_of_their_scores():
    def scores(backbone):
        task = task_of(Case(backbone).make(MIXED), [batch_of(MIXED)])
        return ByPosition("this").search(task).made["scores"]

    fields, tokens = scores("mlp"), scores("dlrm")
    assert fields == {name: float(number) for number, name in enumerate(MIXED.names)}
    assert tokens["dense'"] == fields["n1"] + fields["three"] + fields["n2"]
    assert list(tokens) == list(Case("dlrm").make(MIXED).names)
    with pytest.raises(InputError, match="this .*DLRMCross"):
        scores("dlrm_cross")


def test_a_small_sample_is_spread_evenly(log):
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    stream = log.part(0, 1000).stream(50)
    whole = [batch.ids for batch in stream]
    found = [batch.ids for batch in iterate_unseen(task_of(model, stream), 250)]
    assert [batch.tolist() for batch in found] == [whole[at].tolist() for at in (0, 4, 8, 12, 16)]


def test_holdout_rows_are_preferred_to_search_rows(log):
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    task = task_of(model, log.part(0, 500).stream(50))
    task.holdout = log.part(500, 600).stream(50)
    found = [batch.ids.tolist() for batch in iterate_unseen(task, 10**6)]
    assert found == [batch.ids.tolist() for batch in log.part(500, 600).stream(50)]


BATCH = batch_of(MIXED, rows=9)


def values_by_row(batch, field):
    """What a batch holds of a field, a value a row."""
    ids = [field.name for field in MIXED if field.kind == "categorical"]
    if field.kind == "categorical":
        return batch.ids[:, ids.index(field.name)].tolist()
    if field.kind == "multi":
        values, offsets = batch.bags[field.name]
        ends = [*offsets.tolist()[1:], len(values)]
        return [values[first:end].tolist() for first, end in zip(offsets.tolist(), ends, strict=True)]
    numbers = [field for field in MIXED if field.kind == "numeric"]
    first = sum(value.dim for value in numbers[: numbers.index(field)])
    own = slice(first, first + field.dim)
    return list(zip(batch.dense[:, own].tolist(), batch.missing[:, own].tolist(), strict=True))


@given(st.sets(st.sampled_from(MIXED.names)), st.permutations(range(9)))
def test_only_the_named_fields_are_shuffled(names, order):
    before = {field.name: values_by_row(BATCH, field) for field in MIXED}
    found = shuffle_fields(BATCH, MIXED, sorted(names), torch.tensor(order))
    for field in MIXED:
        expected = [before[field.name][row] for row in order] if field.name in names else before[field.name]
        assert values_by_row(found, field) == expected
    assert found.labels is BATCH.labels
    assert {field.name: values_by_row(BATCH, field) for field in MIXED} == before  # the batch itself is left alone


def test_numbers_without_a_mask_of_missing_ones():
    batch = batch_of(MIXED, rows=4, missing=False)
    found = shuffle_fields(batch, MIXED, ["three"], torch.tensor([3, 2, 1, 0]))
    assert found.missing is None
    assert torch.equal(found.dense[:, 1:4], batch.dense[[3, 2, 1, 0], 1:4])
    assert torch.equal(found.dense[:, [0, 4]], batch.dense[:, [0, 4]])
