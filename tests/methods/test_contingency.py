"""Mutual information and χ²: tables of values and labels, against other people's code and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clicks import MIXED, Case, batch_of
from hypothesis import given
from hypothesis import strategies as st
from known_truth import NOISE, STRONG

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.chi2 import NEVER, significance
from lpfs.methods.contingency import binned, chi_squared, freedom, information, table, tables
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.sample import columns
from lpfs.methods.search import search
from lpfs.methods.wish import Wish
from lpfs.models import make_model
from lpfs.schema import Field, Schema

stats = pytest.importorskip("scipy.stats")
metrics = pytest.importorskip("sklearn.metrics")


@st.composite
def some_rows(draw):
    size = draw(st.integers(2, 60))
    values = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(0, 1), min_size=size - 2, max_size=size - 2))
    return np.array(values), np.array([0, 1, *labels], float)


@given(some_rows())
def test_a_table_counts(rows):
    values, labels = rows
    found = table(values, labels)
    for value, line in zip(sorted(set(values.tolist())), found, strict=True):
        assert line.tolist() == [int(((values == value) & (labels == each)).sum()) for each in (0, 1)]


@given(some_rows())
def test_information_is_that_of_scikit_learn(rows):
    assert information(table(*rows)) == pytest.approx(metrics.mutual_info_score(*rows), abs=1e-9)


@given(some_rows())
def test_chi_squared_is_that_of_scipy_and_ranks_as_its_p_value(rows):
    counts = table(*rows)
    expected = stats.chi2_contingency(counts, correction=False)
    assert chi_squared(counts) == pytest.approx(expected.statistic, abs=1e-9)
    assert freedom(counts) == expected.dof
    if expected.dof:
        assert stats.norm.sf(significance(counts)) == pytest.approx(expected.pvalue, abs=0.03)
    else:
        assert significance(counts) == NEVER


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_many_ids_that_say_nothing_come_after_few_that_say_a_little(method):
    """As many ids as rows: what chance gives is far more than what the weak field says."""
    draw = torch.Generator().manual_seed(0)
    labels = (torch.rand(4000, 1, generator=draw) < 0.3).float()
    few = torch.randint(3, (4000,), generator=draw)
    weak = torch.where(torch.rand(4000, generator=draw) < 0.2, labels[:, 0].long(), few)
    ids = torch.stack([torch.randint(4000, (4000,), generator=draw), weak], 1)
    schema = Schema((Field("many", cardinality=4000), Field("weak", cardinality=3)))
    batch = Batch(ids.int(), torch.zeros(4000, 0), labels)
    found = search(make_model("mlp", schema, dim=2, hidden=(2,)), [batch], method, keep=1)
    scores = found.made["scores"]
    assert found.kept == ("weak",)
    assert scores["weak"] > 3 * abs(scores["many"])
    assert information(table(ids[:, 0].numpy(), labels[:, 0].double().numpy())) > 0.3


def test_bins_are_cut_at_quantiles_and_missing_ones_are_apart():
    numbers = np.array([*range(100), np.nan, np.nan], float)
    found = binned(numbers, 4)
    assert np.bincount(found + 1).tolist() == [2, 25, 25, 25, 25]
    assert set(binned(np.full(5, np.nan), 4).tolist()) == {-1}
    assert set(binned(np.ones(5), 4).tolist()) == {0}


def test_a_bag_is_shared_out_over_its_ids():
    batch = batch_of(MIXED)
    rows = columns(batch, MIXED)
    (found,) = tables(rows, MIXED["a bag"], 8)
    assert found.sum() == pytest.approx(12)
    expected = {}
    values, offsets = (each.tolist() for each in batch.bags["a bag"])
    for row, (first, last) in enumerate(zip(offsets, [*offsets[1:], len(values)], strict=True)):
        for value in values[first:last] or [-1]:
            pair = expected.setdefault(value, [0.0, 0.0])
            pair[int(batch.labels[row, 0])] += 1 / max(1, last - first)
    np.testing.assert_allclose(found, [expected[value] for value in sorted(expected)])
    assert len(tables(rows, MIXED["three"], 4)) == 3


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_the_planted_fields_are_found(looked, method):
    model, found = looked(method, keep=2)
    scores = found.made["scores"]
    assert set(found.kept) == set(STRONG)
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 5 * max(scores[name] for name in NOISE)
    assert (found.made["rows"], found.made["forwards"], found.made["steps"]) == (1000, 0, 0)
    assert looked(method, keep=2, rows=100)[1].made["rows"] == 128
    assert looked(method, keep=2)[1].made["scores"] == scores


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_refusals(method):
    with pytest.raises(InputError, match=f"{method} ranks fields.*say keep=K"):
        check_search(method, {}, Wish(penalty=0.1), ("a", "b"), 100)
    with pytest.raises(InputError, match="bins must be a whole number >= 1, found 0"):
        check_method(method, {"bins": 0})
    with pytest.raises(InputError, match="DLRMCross has crosses of them"):
        search(Case("dlrm_cross").make(MIXED), [batch_of(MIXED)], method, keep=2)
