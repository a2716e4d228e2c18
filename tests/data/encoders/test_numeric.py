"""Moments and quantiles, chunk by chunk."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.data.bins import bin_edges
from lpfs.data.encoders.numeric import Moments, Quantiles


def test_moments_of_chunks_are_those_of_the_whole():
    numbers = np.random.default_rng(0).normal(1e6, 3.0, (1000, 2))
    numbers[::7, 1] = np.nan
    moments = Moments(2)
    for part in np.array_split(numbers, 9):
        moments.merge(Moments.of(part))
    np.testing.assert_allclose(moments.mean, np.nanmean(numbers, 0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation, np.nanstd(numbers, 0), rtol=1e-9)
    assert not moments.constant


@pytest.mark.parametrize("bins", [3, 16, 100])
def test_a_frequent_number_has_a_bin_of_its_own(bins):
    rng = np.random.default_rng(0)
    for frequent in (0.0, 7.0):  # the smallest number, and one in the middle
        numbers = np.where(rng.random(5000) < 0.9, frequent, frequent * (rng.random(5000) - 0.5) + rng.random(5000))
        edges = bin_edges(numbers, bins)
        assert len(edges) < bins
        assert (np.diff(edges) > 0).all()
        bin_of = np.searchsorted(edges, numbers, side="right")
        (own,) = np.unique(bin_of[numbers == frequent])
        assert (numbers[bin_of == own] == frequent).all()
        assert len(np.unique(bin_of)) == len(edges) + 1  # none is empty


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.integers(2, 20))
def test_bins_are_increasing_and_none_is_empty(values, bins):
    numbers = np.array(values, float)
    edges = bin_edges(numbers, bins)
    assert len(edges) < bins
    assert set(edges) <= set(numbers)
    assert len(np.unique(np.searchsorted(edges, numbers, side="right"))) == len(edges) + 1


def test_numbers_without_a_mode_have_equally_filled_bins():
    numbers = np.random.default_rng(0).random(4000)
    assert set(np.bincount(np.searchsorted(bin_edges(numbers, 16), numbers, side="right"))) <= {249, 250, 251}


def test_quantiles_keep_a_bounded_sample_that_chunks_do_not_change(monkeypatch):
    monkeypatch.setattr("lpfs.data.encoders.numeric.SAMPLE_SIZE", 500)
    numbers = np.random.default_rng(0).random(20_000)
    whole, chunked = Quantiles(3), Quantiles(3)
    whole.add(numbers)
    for part in np.array_split(numbers, 33):
        chunked.add(part)
        assert len(chunked._values) <= 2 * 500
    assert whole.edges(4).tolist() == chunked.edges(4).tolist()
    assert np.abs(whole.edges(4) - [0.25, 0.5, 0.75]).max() < 0.1
    assert Quantiles(0).edges(5).tolist() == []
