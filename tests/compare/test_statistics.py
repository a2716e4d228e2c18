"""Statistics against slow implementations of their definitions."""

from __future__ import annotations

from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.compare import statistics
from lpfs.compare.statistics import Interval, SeedValue, bootstrap, interval_over_rows
from lpfs.errors import InputError
from lpfs.train.metrics import auc, logloss, row_losses

NAMES = st.sets(st.sampled_from("abcdefgh"))


@given(st.dictionaries(st.integers(1, 60), st.floats(0.3, 1.0), min_size=2, max_size=8))
def test_area_is_the_mean_height_of_the_curve(curve):
    sizes = sorted(curve)
    fine = np.linspace(sizes[0], sizes[-1], 60 * (sizes[-1] - sizes[0]) + 1)  # every K is one of these points
    heights = np.interp(fine, sizes, [(curve[size] - 0.5) / 0.5 for size in sizes])
    slow = float(((heights[1:] + heights[:-1]) / 2).mean())
    assert area(curve) == pytest.approx(slow, abs=1e-9)


def area(curve):
    """Return the area under a curve of one seed; its bootstrap draws are twice the same curve."""
    series = {size: {3: SeedValue(auc, np.full(2, auc))} for size, auc in curve.items()}
    result = statistics.curve_areas(series)[3]
    assert result.draws == pytest.approx([result.value] * 2)
    return result.value


def test_area_of_one_size_and_of_any_order():
    assert area({7: 0.8}) == pytest.approx(0.6)
    assert area({20: 0.8, 5: 0.7}) == area({5: 0.7, 20: 0.8}) == pytest.approx(0.5)
    assert area({5: 0.75, 10: 0.8, 20: 0.8}) == pytest.approx(0.583333, abs=1e-6)


@given(st.lists(NAMES, min_size=2, max_size=5))
def test_mean_jaccard(sets):
    slow = []
    for first in range(len(sets)):
        for second in range(first):
            both = [name for name in "abcdefgh" if name in sets[first] and name in sets[second]]
            any_of = [name for name in "abcdefgh" if name in sets[first] or name in sets[second]]
            slow.append(len(both) / len(any_of) if any_of else 1.0)
    assert statistics.mean_jaccard(sets) == pytest.approx(mean(slow))


def test_overlap_of_one_set_is_unknown():
    assert statistics.mean_jaccard([["a"]]) is None


def test_t_quantiles_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    for freedom, point in enumerate(statistics.T_975, 1):
        assert point == pytest.approx(stats.t.ppf(0.975, freedom), abs=6e-4)
    assert pytest.approx(stats.norm.ppf(0.975), abs=6e-4) == statistics.Z_975


def test_the_interval_over_seeds():
    values = [0.01, 0.03, 0.02, 0.05]
    interval = statistics.interval_over_seeds(values)
    width = 3.182 * stdev(values) / 2
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.0275, 0.0275 - width, 0.0275 + width))
    assert (interval.low > 0) == (width < 0.0275)
    assert statistics.interval_over_seeds([0.1]) is None
    assert statistics.interval_over_seeds([0.1] * 40).low > 0  # more degrees of freedom than the table has


@pytest.mark.parametrize(
    ("value", "seeds", "rows", "expected"),
    [
        (0.2, 0.1, 0.15, "ahead"),
        (-0.2, 0.1, 0.15, "behind"),
        (0.2, 0.15, 0.15, "level"),  # larger than each width, not than both together
        (0.2, 0.1, 0.3, "level"),
        (0.2, 0.3, 0.1, "level"),
        (0.2, None, 0.1, "unknown"),
        (0.2, 0.1, None, "ahead"),
        (0.0, 0.0, 0.0, "level"),
        (0.0, None, None, "unknown"),
    ],
)
def test_verdict_combines_both_intervals(value, seeds, rows, expected):
    intervals = [None if width is None else Interval(value, value - width, value + width) for width in (seeds, rows)]
    assert statistics.verdict(*intervals) == expected


def test_bootstrap_agrees_with_resampled_rows():
    draw = np.random.default_rng(3)
    labels = (draw.random(600) < 0.3).astype(np.float32)
    good = (labels + draw.normal(0, 1.2, 600)).astype(np.float32)
    better = (good + 0.5 * labels).astype(np.float32)
    slow: list[list[list[float]]] = [[], []]
    for _ in range(1500):
        rows = draw.integers(0, 600, 600)
        for metric, values in zip((auc, logloss), slow, strict=True):
            values.append([metric(scores[rows], labels[rows]) for scores in (good, better)])
    for draws, reference in zip(bootstrap([good, better], labels, draws=1500), map(np.array, slow), strict=True):
        assert draws.mean(0) == pytest.approx(reference.mean(0), abs=0.003)
        assert draws.std(0) == pytest.approx(reference.std(0), rel=0.1)
        paired, paired_slow = draws[:, 1] - draws[:, 0], reference[:, 1] - reference[:, 0]
        assert paired.std() == pytest.approx(paired_slow.std(), rel=0.1)
        assert paired.std() < 0.8 * draws[:, 0].std()  # a difference on the same rows is less noisy than either


def test_row_losses_are_loglosses_and_do_not_overflow():
    draw = np.random.default_rng(1)
    labels, logits = (draw.random(50) < 0.5).astype(np.float32), draw.normal(0, 3, 50).astype(np.float32)
    assert row_losses(logits, labels).mean() == pytest.approx(logloss(logits, labels), rel=1e-6)
    assert row_losses(np.array([800.0, -800.0]), np.array([0.0, 0.0])).tolist() == [800.0, 0.0]


def test_draws_depend_neither_on_the_models_nor_on_the_chunk_size(monkeypatch):
    draw = np.random.default_rng(0)
    labels, scores = (draw.random(50) < 0.5).astype(np.float32), draw.random((2, 50)).astype(np.float32)
    both = bootstrap(list(scores), labels, draws=9)
    for draws, alone in zip(both, bootstrap([scores[1]], labels, draws=9), strict=True):
        assert draws[:, 1:] == pytest.approx(alone, rel=1e-5)
    monkeypatch.setattr("lpfs.compare.statistics.MAX_WEIGHTS", 100)
    for draws, chunked in zip(both, bootstrap(list(scores), labels, draws=9), strict=True):
        assert draws == pytest.approx(chunked, rel=1e-5)


def test_a_single_class_has_no_auc():
    aucs, losses = bootstrap([np.array([0.1, 0.2])], np.array([1.0, 1.0]), draws=4)
    assert np.isnan(aucs).all()
    assert np.isfinite(losses).any()


def test_an_interval_over_rows():
    interval = interval_over_rows(0.5, np.array([0.4, 0.6, np.nan]))
    assert interval.value == 0.5
    assert interval.high - 0.5 == pytest.approx(1.96 * stdev([0.4, 0.6]))
    assert interval_over_rows(0.5, np.array([np.nan, 0.2])) is None
    with pytest.raises(InputError, match="labels between 0 and 1"):
        bootstrap([np.zeros(2)], np.array([0.0, 1.5]))


def test_a_draw_is_near_the_auc_of_weighted_rows():
    """A draw with weights w is the AUC in which a row counts as w·p clicks and w·(1-p) others, to first order."""
    draw = np.random.default_rng(3)
    scores = draw.normal(size=3000).round(1)
    labels = 1 / (1 + np.exp(-scores - draw.normal(size=3000)))
    aucs, losses = bootstrap([scores], labels, draws=50)
    weights = np.random.default_rng(0).poisson(1.0, (50, 3000)).astype(float)  # the same draws
    exact = np.array([auc(scores, labels, row) for row in weights])
    assert np.square(aucs[:, 0] - exact).mean() ** 0.5 < 0.05 * exact.std()
    assert losses[:, 0] == pytest.approx([logloss(scores, labels, row) for row in weights], rel=1e-5)
    with pytest.raises(InputError, match="between 0 and 1"):
        bootstrap([scores], labels * 3)
