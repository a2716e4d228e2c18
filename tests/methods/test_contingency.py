"""Mutual information and χ²: tables of values and labels, against other people's code and counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.contingency import (
    CONSTANT_SCORE,
    bin_numbers,
    chi_squared,
    count_table,
    count_tables,
    degrees_of_freedom,
    mutual_information,
    z_score,
)
from lpfs.methods.registry import make_method
from lpfs.methods.sampling import batch_columns
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.schema import Field, Schema
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import NOISE, STRONG

stats = pytest.importorskip("scipy.stats")
metrics = pytest.importorskip("sklearn.metrics")


@st.composite
def some_rows(draw):
    size = draw(st.integers(2, 60))
    values = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    labels = draw(st.lists(st.integers(0, 1), min_size=size - 2, max_size=size - 2))
    return np.array(values), np.array([0, 1, *labels], float)


@given(some_rows())
def test_counts_of_a_table(rows):
    values, labels = rows
    found = count_table(values, labels)
    for value, line in zip(sorted(set(values.tolist())), found, strict=True):
        assert line.tolist() == [int(((values == value) & (labels == label)).sum()) for label in (0, 1)]


@given(some_rows())
def test_information_is_that_of_scikit_learn(rows):
    assert mutual_information(count_table(*rows)) == pytest.approx(metrics.mutual_info_score(*rows), abs=1e-9)


@given(some_rows())
def test_chi_squared_is_that_of_scipy_and_ranks_as_its_p_value(rows):
    counts = count_table(*rows)
    expected = stats.chi2_contingency(counts, correction=False)
    assert chi_squared(counts) == pytest.approx(expected.statistic, abs=1e-9)
    assert degrees_of_freedom(counts) == expected.dof
    if expected.dof:
        assert stats.norm.sf(z_score(counts)) == pytest.approx(expected.pvalue, abs=0.03)
    else:
        assert z_score(counts) == CONSTANT_SCORE


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_many_uninformative_ids_rank_below_few_weak_ids(method):
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
    assert mutual_information(count_table(ids[:, 0].numpy(), labels[:, 0].double().numpy())) > 0.3


def test_bins_are_quantiles_and_missing_numbers_have_their_own():
    numbers = np.array([*range(100), np.nan, np.nan], float)
    found = bin_numbers(numbers, 4)
    assert np.bincount(found + 1).tolist() == [2, 25, 25, 25, 25]
    assert set(bin_numbers(np.full(5, np.nan), 4).tolist()) == {-1}
    assert set(bin_numbers(np.ones(5), 4).tolist()) == {0}


def test_a_bag_is_divided_over_its_ids():
    batch = batch_of(MIXED)
    rows = batch_columns(batch, MIXED)
    (found,) = count_tables(rows, MIXED["a bag"], 8)
    assert found.sum() == pytest.approx(12)
    expected = {}
    values, offsets = (value.tolist() for value in batch.bags["a bag"])
    for row, (first, last) in enumerate(zip(offsets, [*offsets[1:], len(values)], strict=True)):
        for value in values[first:last] or [-1]:
            pair = expected.setdefault(value, [0.0, 0.0])
            pair[int(batch.labels[row, 0])] += 1 / max(1, last - first)
    np.testing.assert_allclose(found, [expected[value] for value in sorted(expected)])
    assert len(count_tables(rows, MIXED["three"], 4)) == 3


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_the_planted_fields_are_found(run_search, method):
    model, found = run_search(method, keep=2)
    scores = found.made["scores"]
    assert set(found.kept) == set(STRONG)
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 5 * max(scores[name] for name in NOISE)
    assert (found.made["rows"], found.made["forwards"], found.made["steps"]) == (1000, 0, 0)
    assert run_search(method, keep=2, rows=100)[1].made["rows"] == 128
    assert run_search(method, keep=2)[1].made["scores"] == scores


@pytest.mark.parametrize("method", ["mutual_information", "chi2"])
def test_invalid_options_and_models(method):
    with pytest.raises(InputError, match="bins must be an integer >= 1, found 0"):
        make_method(method, {"bins": 0})
    with pytest.raises(InputError, match=f"{method} .*DLRMCross"):
        search(Case("dlrm_cross").make(MIXED), [batch_of(MIXED)], method, keep=2)
