"""Moments and quantiles, chunk by chunk."""

import numpy as np

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
