"""Rows of a log as plain columns, and what parts of a model make of the scores of fields."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clicks import MIXED, Case, batch_of
from known_truth import FIELDS

from lpfs.errors import InputError
from lpfs.methods.sample import batches_of, columns, of_parts, sample
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.schema import Schema


def task_of(model, stream):
    return Task(model, torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), stream, None, Wish(keep=1), 10)


def test_columns_are_what_the_batch_holds():
    batch = batch_of(MIXED)
    found = columns(batch, MIXED)
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
    assert not np.isnan(columns(batch_of(MIXED, missing=False), MIXED).numbers["n1"]).any()


def test_rows_of_several_batches_are_put_together():
    model = Case("mlp").make(MIXED)
    batches = [batch_of(MIXED, seed=seed) for seed in (1, 2, 3)]
    found = sample(task_of(model, batches), "this", 20)
    assert len(found) == 24  # whole batches
    one, two = (columns(each, MIXED) for each in batches[:2])
    assert found.ids[".."].tolist() == [*one.ids[".."], *two.ids[".."]]
    assert found.bags["a bag"][0].tolist() == [*one.bags["a bag"][0], *two.bags["a bag"][0]]
    assert found.bags["a bag"][1].tolist() == [*one.bags["a bag"][1], *two.bags["a bag"][1]]
    assert found.numbers["three"].shape == (24, 3)


@pytest.mark.parametrize("most", [100, 10**6])
def test_the_stream_is_left_where_it_was(log, most):
    stream = log.part(0, 300).stream(64, shuffle=True, seed=3)
    list(stream)
    before = stream.state_dict()
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    first = [len(each) for each in batches_of(task_of(model, stream), most)]
    assert sum(first) == (128 if most == 100 else 300)
    assert stream.state_dict() == before
    rows = [sample(task_of(model, stream), "this", most).ids["ad"].tolist() for _ in range(2)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("most", [100, 151, 291, 300])
def test_rows_are_taken_from_all_of_the_period(log, most):
    """Also where there are less than twice as many as wanted: the last ones must not be left out."""
    stream = log.part(0, 300).stream(10)
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    every = [each.ids.tolist() for each in stream]
    taken = [every.index(each.ids.tolist()) for each in batches_of(task_of(model, stream), most)]
    assert most <= sum(len(every[each]) for each in taken) <= most + 9
    assert max(taken) >= 27
    assert taken == sorted(taken)


def test_one_class_says_nothing(log):
    batch = batch_of(MIXED)
    batch.labels.zero_()
    with pytest.raises(InputError, match="this: the 12 rows hold one class only"):
        sample(task_of(Case("mlp").make(MIXED), [batch]), "this", 100)


def test_parts_of_a_model():
    scores = {name: float(number) for number, name in enumerate(MIXED.names)}
    assert of_parts(Case("mlp").make(MIXED), scores) == scores
    tokens = of_parts(Case("dlrm").make(MIXED), scores)
    assert tokens["dense'"] == scores["n1"] + scores["three"] + scores["n2"]
    assert list(tokens) == list(Case("dlrm").make(MIXED).names)
    with pytest.raises(InputError, match="this looks at fields, and DLRMCross has crosses of them"):
        sample(task_of(Case("dlrm_cross").make(MIXED), []), "this", 10)


def test_a_part_of_many_rows_comes_from_all_of_the_period(log):
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    stream = log.part(0, 1000).stream(50)
    whole = [each.ids for each in stream]
    found = [each.ids for each in batches_of(task_of(model, stream), 250)]
    assert [each.tolist() for each in found] == [whole[at].tolist() for at in (0, 4, 8, 12, 16)]


def test_rows_that_the_weights_never_see_come_before_those_they_learn_from(log):
    model = Case("mlp").make(Schema(FIELDS, label="click"))
    task = task_of(model, log.part(0, 500).stream(50))
    task.held = log.part(500, 600).stream(50)
    found = [each.ids.tolist() for each in batches_of(task, 10**6)]
    assert found == [each.ids.tolist() for each in log.part(500, 600).stream(50)]
