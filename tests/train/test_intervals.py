"""Intervals of the AUC: against DeLong's formula by brute force, and their coverage on simulated rows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from lpfs.train.intervals import PairedDifference, auc_difference, auc_influence, auc_interval, logloss_difference
from lpfs.train.metrics import auc, row_losses


def brute_force_delong(first, second, labels):
    """Return the variance of AUC(first) - AUC(second) by the definition, over all pairs."""
    parts = []
    for z in (first, second):
        wins = (z[labels == 1][:, None] > z[labels == 0]) + 0.5 * (z[labels == 1][:, None] == z[labels == 0])
        parts.append((wins.mean(1), wins.mean(0)))
    positive, negative = parts[0][0] - parts[1][0], parts[0][1] - parts[1][1]
    return positive.var(ddof=1) / len(positive) + negative.var(ddof=1) / len(negative)


rows = st.integers(8, 40).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(-3, 3), min_size=n, max_size=n) for _ in range(2)),
        st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda y: 2 <= sum(y) <= len(y) - 2),
    )
)


@given(rows)
@settings(max_examples=60, deadline=None)
def test_equals_the_definition_by_delong(values):
    first, second, labels = (np.array(part, float) for part in values)
    difference = auc_difference(first, second, labels)
    assert difference.value == pytest.approx(auc(first, labels) - auc(second, labels), abs=1e-12)
    assert difference.se_rows**2 == pytest.approx(brute_force_delong(first, second, labels), abs=1e-12)
    assert auc_influence(first, labels)[1].sum() == pytest.approx(0.0, abs=1e-9)


def test_a_model_against_itself_has_no_difference():
    generator = np.random.default_rng(0)
    logits, labels = generator.normal(size=500), generator.integers(0, 2, 500).astype(float)
    assert auc_difference(logits, logits, labels) == PairedDifference(0.0, 0.0)
    assert logloss_difference(logits, logits, labels).upper == 0.0


def test_a_single_class_has_no_auc():
    assert math.isnan(auc_interval(np.array([0.0, 1.0]), np.array([1.0, 1.0])).value)
    assert math.isnan(auc_difference(np.zeros(3), np.ones(3), np.zeros(3)).value)


def test_rows_of_one_user_count_once():
    generator = np.random.default_rng(1)
    first, second = generator.normal(size=(2, 300))
    labels, users = generator.integers(0, 2, 300).astype(float), np.arange(300)
    repeated = [np.repeat(values, 4) for values in (first, second, labels)]
    apart = auc_difference(first, second, labels, users).se_rows
    assert auc_difference(*repeated, np.repeat(users, 4)).se_rows == pytest.approx(apart, rel=0.01)
    assert auc_difference(*repeated).se_rows == pytest.approx(apart / 2, rel=0.02)


def test_folds_are_evaluated_apart_and_their_variance_counts():
    generator = np.random.default_rng(2)
    labels, folds = generator.integers(0, 2, 4000).astype(float), np.arange(4000) % 4
    first = labels + generator.normal(size=4000) + 100.0 * folds  # each network has a scale of its own
    second = generator.normal(size=4000) + labels * folds
    difference = auc_difference(first, second, labels, folds=folds)
    values = [
        auc(first[folds == m], labels[folds == m]) - auc(second[folds == m], labels[folds == m]) for m in range(4)
    ]
    assert difference.value == pytest.approx(np.mean(values))
    assert difference.se_folds == pytest.approx(math.sqrt((1 / 4 + 1 / 3) * np.var(values, ddof=1)))
    assert difference.upper == pytest.approx(difference.value + 2.353 * difference.se_folds)
    assert difference.interval.high == pytest.approx(difference.value + 3.182 * difference.se_folds)


def test_logloss_difference_is_that_of_the_rows():
    generator = np.random.default_rng(3)
    first, second = generator.normal(size=(2, 200))
    labels = generator.integers(0, 2, 200).astype(float)
    losses = row_losses(second, labels) - row_losses(first, labels)
    difference = logloss_difference(first, second, labels)
    assert difference.value == pytest.approx(losses.mean())
    assert difference.se_rows == pytest.approx(losses.std() / math.sqrt(200))


def test_intervals_contain_the_truth_as_often_as_they_say():
    generator = np.random.default_rng(4)
    covered = {"auc": 0, "difference": 0}
    for _ in range(400):
        labels = (generator.random(400) < 0.3).astype(float)
        signal = labels + generator.normal(size=400)
        noisy = signal + generator.normal(size=400)
        interval = auc_interval(signal, labels)
        covered["auc"] += interval.low <= 0.76025 <= interval.high  # Φ(1/√2)
        difference = auc_difference(signal, noisy, labels).interval
        covered["difference"] += difference.low <= 0.76025 - 0.69146 <= difference.high  # Φ(1/√2) - Φ(1/2)
    assert min(covered.values()) >= 368  # of 400 × .95 = 380, less three standard deviations
    assert max(covered.values()) <= 392
