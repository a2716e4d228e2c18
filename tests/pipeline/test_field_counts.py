"""Counts of values equal those of the rows, and what follows from them."""

from __future__ import annotations

import numpy as np
import pytest

from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.pipeline.field_counts import BLOCKS, count_fields, counted_auc, stability_index
from lpfs.pipeline.splits import split_dataset
from lpfs.schema import Field, Schema
from lpfs.train.metrics import auc
from tests.helpers.known_truth import known_truth


def test_counts_equal_those_of_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("lpfs.pipeline.field_counts.READ_ROWS", 77)  # several batches
    log = known_truth(tmp_path / "log", rows=1200)
    splits = split_dataset(log)
    counts = count_fields(splits, log.schema)
    train, test = (next(iter(rows.stream(10_000))) for rows in (splits.train, splits.test))
    column = counts["user"].columns[0]
    ids, labels = train.ids[:, 0].numpy(), train.labels[:, 0].numpy()
    assert column.train.sum(0).tolist() == np.bincount(ids, minlength=8).tolist()
    assert column.clicks.sum(0).tolist() == np.bincount(ids, labels, minlength=8).tolist()
    halves = np.arange(len(ids)) // -(-len(ids) // BLOCKS) % 2  # blocks of rows belong to each half in turn
    for half in (0, 1):
        assert column.train[half].tolist() == np.bincount(ids[halves == half], minlength=8).tolist()
    assert column.test.tolist() == np.bincount(test.ids[:, 0], minlength=8).tolist()
    assert counts["user"].missing_share == pytest.approx((ids == 0).mean())
    assert counts["user"].distinct == 6  # of eight ids, two stand for missing and unseen values
    assert counts["tags"].columns[0].train.sum() == len(train.bags["tags"][0])
    assert counts["price"].columns[0].train.sum() == splits.train.rows
    assert counts["price"].distinct is None
    assert (counts["price"].columns[0].train.sum(0) > 0).tolist() == [False, *[True] * 100]  # bin 0: missing
    assert counts["user"].alone_auc() > 0.7 > 0.6 > counts["site"].alone_auc()
    assert all(field.drift() < 0.1 for field in counts.values())
    assert counts["user"].unseen_share() == 0.0


def test_auc_from_counts_equals_that_of_rows():
    rng = np.random.default_rng(0)
    values, labels = rng.integers(10, size=500), rng.integers(2, size=500)
    rates = rng.random(10).round(1)  # with ties
    clicks, rows = np.bincount(values, labels, minlength=10), np.bincount(values, minlength=10)
    assert counted_auc(rates, clicks, rows - clicks) == pytest.approx(auc(rates[values], labels))
    assert counted_auc(rates, clicks * 0, rows) == 0.5


def test_values_that_occur_once_predict_nothing(tmp_path):
    """Rates of one half predict the other half, so that a near-unique field does not look like a leak."""
    rng = np.random.default_rng(0)
    schema = Schema((Field("request", cardinality=2002), Field("user", cardinality=12)), label="click")
    with DatasetWriter(tmp_path / "log", schema, fingerprint="1") as writer:
        for day in range(10):
            ids = {"request": np.arange(day * 200, day * 200 + 200) + 2, "user": rng.integers(10, size=200) + 2}
            writer.day(str(day)).append(ids=ids, labels={"click": rng.integers(2, size=200)})
    log = Dataset(tmp_path / "log")
    splits = split_dataset(log)
    counts = count_fields(splits, log.schema)
    assert counts["request"].alone_auc() == 0.5
    assert counts["request"].distinct == splits.train.rows
    assert counts["request"].unseen_share() == 1.0


def test_stability_index_is_small_without_drift_and_large_with_it():
    rng = np.random.default_rng(0)
    for size in (5, 50, 5000):
        same = [np.bincount(rng.integers(size, size=rows), minlength=size) for rows in (10_000, 1000)]
        assert stability_index(*same) < 0.1
    moved = np.bincount(rng.integers(3, size=1000), minlength=5)
    assert stability_index(np.full(5, 2000), moved) > 0.25
    assert stability_index(np.array([100, 0]), np.array([0, 100])) > 1
    assert stability_index(np.array([5, 5]), np.array([0, 0])) == 0.0


def test_stability_index_compares_groups_of_about_equal_frequency():
    """Of 40 values two make a group: values that change places within their group are no drift."""
    train = np.full(40, 10_000)
    assert stability_index(train, np.tile([15_000, 5_000], 20)) == 0.0
    moved = stability_index(train, np.repeat([15_000, 5_000], 20))
    assert moved == pytest.approx(0.25 * np.log(1.5) + 0.25 * np.log(2), rel=0.1)  # one group has values of both halves
