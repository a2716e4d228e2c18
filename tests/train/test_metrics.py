"""Metrics compared with their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.train import metrics

FEW = st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.25, 1.0, 3.0])  # few values: many ties
ROWS = st.lists(st.tuples(FEW, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 2.0])), min_size=1)
EIGHTHS = st.integers(0, 8).map(lambda eighths: eighths / 8)
SOFT = st.lists(st.tuples(st.floats(-50, 50), EIGHTHS, st.floats(0.01, 10)), min_size=1, max_size=40)


def columns(rows):
    return (np.array(column) for column in zip(*rows, strict=True))


def pairwise_auc(z, y, w):
    won = total = 0.0
    for zi, p in zip(z, w * y, strict=True):
        for zj, n in zip(z, w * (1 - y), strict=True):
            won += p * n * (1.0 if zi > zj else 0.5 if zi == zj else 0.0)
            total += p * n
    return won / total if total > 0 else None


@given(ROWS)
def test_auc_counts_every_pair_and_half_of_the_ties(rows):
    z, y, w = columns(rows)
    if not w.any():
        w = w + 1
    expected = pairwise_auc(z, y, w)
    assert metrics.auc(z, y, w) == (None if expected is None else pytest.approx(expected, abs=1e-14))


@given(SOFT)
def test_auc_of_soft_labels_and_any_weights(rows):
    z, y, w = columns(rows)
    expected = pairwise_auc(z, y, w)
    assert metrics.auc(z, y, w) == (None if expected is None else pytest.approx(expected, abs=1e-12))


@given(ROWS)
def test_auc_does_not_depend_on_order_or_scale(rows):
    z, y, _ = columns(rows)
    assert metrics.auc(z[::-1], y[::-1]) == metrics.auc(z, y) == metrics.auc(z * 8, y)


def test_auc_is_exact_on_a_million_rows_and_is_not_a_mean_of_parts():
    random = np.random.default_rng(0)
    y = (random.random(1_000_000) < 0.03).astype(float)
    z = np.round(random.normal(size=y.size) + y, 2)
    values, at = np.unique(z, return_inverse=True)
    clicks = np.bincount(at, y, len(values)).astype(object)
    others = np.bincount(at, 1 - y, len(values)).astype(object)  # Python integers are exact
    below, twice = 0, 0
    for p, n in zip(map(int, clicks), map(int, others), strict=True):
        twice += p * (2 * below + n)
        below += n
    exact = twice / (2 * int(y.sum()) * int((1 - y).sum()))
    assert metrics.auc(z, y) == pytest.approx(exact, abs=1e-15)
    parts = [metrics.auc(z[i : i + 100], y[i : i + 100]) for i in range(0, 10_000, 100)]
    assert np.mean([part for part in parts if part is not None]) != pytest.approx(exact, abs=1e-4)


@given(SOFT)
def test_logloss_accuracy_entropy_and_calibration_by_their_definitions(rows):
    z, y, w = columns(rows)
    p = 1 / (1 + np.exp(-z))
    loss = -(y * np.log(p) + (1 - y) * (-z - np.log1p(np.exp(-z)))) @ w / w.sum()
    assert metrics.logloss(z, y, w) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert metrics.accuracy(z, y, w) == pytest.approx((w * np.where(z >= 0, y, 1 - y)).sum() / w.sum())
    mean = (w * y).sum() / w.sum()
    result = metrics.normalised_entropy(z, y, w)
    if 1e-6 < mean < 1 - 1e-6:
        entropy = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
        assert result == pytest.approx(loss / entropy, rel=1e-6)
    if mean > 1e-12:
        assert metrics.calibration(z, y, w) == pytest.approx((w * p).sum() / (w * y).sum())


@given(st.lists(st.tuples(FEW, st.sampled_from([0.0, 1.0]), st.integers(1, 3)), min_size=1, max_size=12))
def test_a_weight_is_a_row_repeated(rows):
    z, y, w = columns(rows)
    whole, repeated = metrics.scores(z, y, w), metrics.scores(np.repeat(z, w), np.repeat(y, w))
    for name in ("positives", "auc", "logloss", "accuracy", "entropy", "calibration"):
        one, two = getattr(whole, name), getattr(repeated, name)
        assert one == (None if two is None else pytest.approx(two))


def test_one_class_has_no_auc_and_no_clicks_no_calibration():
    none = metrics.scores([0.1, 0.2], [0, 0])
    assert (none.auc, none.entropy, none.calibration, none.positives) == (None, None, None, 0.0)
    all_clicks = metrics.scores([0.1, 0.2], [1, 1])
    assert (all_clicks.auc, all_clicks.entropy) == (None, None)
    assert all_clicks.calibration is not None


def test_a_perfect_model_of_the_whole_log_is_calibrated_after_correction():
    """Known probabilities, negatives kept at 1/4, and the logits that training on these rows would give."""
    p, rate, count = np.array([0.02, 0.2, 0.6]), 0.25, 100_000
    z = np.log(p / (1 - p) / rate)
    clicks, kept = p * count, (1 - p) * count * rate
    logits = np.concatenate([z, z])
    labels = np.array([1.0, 1, 1, 0, 0, 0])
    weights = np.concatenate([clicks, kept])  # number of rows that each one represents
    assert metrics.calibration(logits, labels, weights) == pytest.approx(1)
    assert metrics.calibration(logits, labels, weights, rate) == pytest.approx(1)
    assert metrics.probabilities(z, rate) == pytest.approx(p)
    high = np.log(2 * p / (1 - 2 * p).clip(1e-3) / rate)[:2]
    weights = weights[[0, 1, 3, 4]]
    result = metrics.calibration(np.concatenate([high, high]), np.array([1.0, 1, 0, 0]), weights, rate)
    assert result == pytest.approx(2)  # twice the probability of the whole log; not 2 on the sampled one
    assert metrics.calibration(np.concatenate([high, high]), np.array([1.0, 1, 0, 0]), weights) < 1.9


def test_huge_logits_do_not_overflow():
    result = metrics.scores([1e4, -1e4, 800.0], [1, 0, 0])
    assert result.logloss == pytest.approx(800 / 3)
    assert result.auc == 1.0


def test_tensors_of_any_dtype_are_accepted():
    z = torch.randn(50, requires_grad=True)
    y = (torch.rand(50) < 0.5).float()
    assert metrics.auc(z, y) == metrics.auc(z.detach().numpy(), y.numpy())
    assert metrics.auc(z.bfloat16(), y) is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1.0]), "same shape"),
        (([], []), "same shape"),
        (([[1.0]], [[1.0]]), "same shape"),
        (([1.0], [2.0]), r"labels must be in \[0, 1\], found 2.0 in row 0"),
        (([1.0], [math.nan]), "labels must be in"),
        (([0.0, math.nan], [1.0, 0.0]), "logit of row 1 is not finite"),
        (([1.0], [1.0], [-1.0]), "weights must be"),
        (([1.0], [1.0], [0.0]), "weights must be"),
        (([1.0], [1.0], None, 0.0), "negative_rate must be"),
        (([1.0], [1.0], None, 1.5), "negative_rate must be"),
    ],
)
def test_invalid_inputs_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        metrics.scores(*arguments)
