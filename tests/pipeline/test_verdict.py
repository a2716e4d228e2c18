"""The words of the verdict follow from the intervals, and claim no more than these."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.pipeline.allowance import SMALLEST
from lpfs.pipeline.stages import RowScores
from lpfs.pipeline.verdict import LossOnRows, _rows_needed, describe_allowance, format_auc, make_verdict
from lpfs.train.evaluate import Predictions
from lpfs.train.intervals import Z_975, PairedDifference

ALLOWED = 0.0021


def on_rows(loss, se, auc=0.75, rows=61_000, positives=3900):
    difference = PairedDifference(loss, se)
    return LossOnRows(difference, difference, auc, rows, positives)


def judge(valid, test, *, kept=12, total=40, allowed=ALLOWED, because="given", too_few=None):
    upper = valid.auc.upper
    check = {"fields": kept, "loss": valid.auc.value, "upper": upper, "rows": valid.rows, "positives": valid.positives}
    checks = [{**check, "holds": bool(upper <= allowed)}]
    return make_verdict(kept, total, valid, test, allowed=allowed, because=because, checks=checks, too_few=too_few)


@pytest.mark.parametrize(
    ("valid", "test", "kind", "text"),
    [
        (
            *((0.0002, 0.0005), (0.0004, 0.00056)),
            *("enough", "12 of 40 fields are enough (AUC -0.0004 ± 0.0011 on 61,000 rows, 3,900 positives)"),
        ),
        ((0.0002, 0.0005), (-0.0012, 0.00056), "enough", "are enough (AUC +0.0012 ± 0.0011 on"),
        ((0.0002, 0.0005), (0.0015, 0.0005), "enough", "AUC -0.0015 ± 0.0010"),  # a small loss, but an allowed one
        (
            *((0.0002, 0.0005), (0.0031, 0.0006)),
            *("costs", "12 of 40 fields cost 0.0031 ± 0.0012 of AUC (61,000 rows, 3,900 positives)"),
        ),
        ((0.0002, 0.0005), (0.0025, 0.0005), "costs", "cost 0.0025 ± 0.0010"),  # larger than allowed, and not by chance
        ((0.0745, 0.005), (0.07, 0.006), "costs", "cost 0.070 ± 0.012 of AUC"),
        ((0.0745, 0.005), (0.05, 0.04), "costs", "on the validation rows; on the test rows 0.05 ± 0.08"),
        (
            (0.0745, 0.005),
            (0.001, 0.002),
            "not decided",
            "0.074 ± 0.010 of AUC on the validation rows and 0.001 ± 0.004",
        ),
        ((0.0010, 0.001), (0.001, 0.001), "not decided", "0.0021 is allowed; about 140,000 rows would decide"),
        ((0.0030, 0.001), (0.001, 0.001), "not decided", "keep more fields, or allow more (--max-auc-loss)"),
        ((-0.01, 0.005), (-0.05, 0.01), "enough", "AUC +0.050 ± 0.020"),
    ],
)
def test_kind_and_text_follow_from_the_intervals(valid, test, kind, text):
    verdict = judge(on_rows(*valid), on_rows(*test))
    assert (verdict["kind"], text in verdict["text"]) == (kind, True), verdict["text"]
    assert (verdict["reason"] is None) == (kind == "enough" or verdict["low"] > 0)
    assert (verdict["allowed"], verdict["allowed_because"]) == (ALLOWED, "given")
    assert verdict["low"] < verdict["loss"] < verdict["high"]


def test_more_than_a_thousand_times_the_rows_are_not_asked_for():
    valid = on_rows(0.0, math.sqrt(1000), rows=61)
    assert _rows_needed(valid, margin=1.0, factor=1.0) == "; about 61,000 rows would decide"
    assert "--max-auc-loss" in _rows_needed(valid, margin=0.999, factor=1.0)
    assert "--max-auc-loss" in _rows_needed(valid, margin=0.0, factor=1.0)


def test_rows_agree_if_their_intervals_touch():
    """The test interval ends where the validation interval starts: they do not contradict each other."""
    width = Z_975 * 0.01
    assert judge(on_rows(2 * width, 0.01), on_rows(0.0, 0.01))["kind"] == "costs"
    assert judge(on_rows(2 * width, 0.01), on_rows(-0.001, 0.01))["kind"] == "not decided"


def test_one_field_is_singular_and_all_fields_are_no_saving():
    near = on_rows(0.0, 0.0001)
    assert judge(near, near, kept=1)["text"].startswith("1 of 40 fields is enough")
    assert judge(on_rows(0.1, 0.001), on_rows(0.1, 0.001), kept=1)["text"].startswith("1 of 40 fields costs 0.1")
    assert judge(near, near, kept=40)["text"].startswith("all 40 fields are kept; no smaller set was shown")


def test_few_positives_decide_nothing_whatever_the_loss():
    verdict = judge(on_rows(0.3, 0.01), on_rows(0.3054, 0.01), too_few="the test rows have 3 positives")
    assert (verdict["kind"], verdict["reason"]) == ("not decided", "the test rows have 3 positives")
    assert verdict["text"] == "not decided: the test rows have 3 positives"


def test_rows_that_can_only_decide_large_losses_call_nothing_enough():
    """The gain of all fields is 0.25: a loss of 0.05 that cannot be excluded is a fifth of it."""
    rows = on_rows(-0.001, 0.02)
    verdict = judge(rows, rows, allowed=0.0497, because=SMALLEST)
    assert verdict["checks"][-1]["holds"]
    assert verdict["kind"] == "not decided"
    assert "can only exclude losses above 0.050" in verdict["text"]
    assert "about 970,000 rows would decide" in verdict["text"]
    assert judge(rows, rows, allowed=0.0497)["kind"] == "enough"  # the user has accepted this loss


def test_fields_that_predict_nothing_are_said_so():
    rows = replace(on_rows(0.0, 0.01, auc=0.51), full_low=0.48)
    verdict = judge(rows, rows, allowed=0.025, because=SMALLEST)
    assert verdict["text"].startswith("not decided: all 40 fields together do not clearly predict the label")
    assert verdict["text"].endswith("is 0.510 ± 0.030")


def test_one_class_gives_no_numbers():
    nothing = on_rows(float("nan"), float("nan"))
    verdict = judge(nothing, nothing)
    assert verdict["kind"] == "not decided"
    assert (verdict["loss"], verdict["low"], verdict["checks"][0]["upper"]) == (None, None, None)
    assert "could not be checked" in describe_allowance(verdict)


losses = st.floats(-0.1, 0.1)
errors = st.floats(1e-5, 0.05)


@given(valid=losses, valid_se=errors, test=losses, test_se=errors, allowed=st.floats(1e-4, 0.05), given_=st.booleans())
def test_words_are_never_stronger_than_the_intervals(valid, valid_se, test, test_se, allowed, given_):
    checked, tested = on_rows(valid, valid_se), on_rows(test, test_se)
    verdict = judge(checked, tested, allowed=allowed, because="given" if given_ else SMALLEST)
    if verdict["kind"] == "enough":
        assert checked.auc.upper <= allowed
        assert tested.auc.interval.low <= allowed
        assert test <= allowed or tested.auc.interval.low <= 0
    elif verdict["kind"] == "costs":
        assert tested.auc.interval.low > 0 or checked.auc.interval.low > 0
    assert "cost -" not in verdict["text"]
    assert "nan" not in verdict["text"]


def scores(logits, labels):
    predicted = Predictions(np.array(logits, np.float32)[:, None], np.array(labels, np.float32)[:, None], None, 0)
    return RowScores(predicted, ["click"])


def test_loss_is_that_of_the_predictions():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 500)
    full, kept = (scores(labels + rng.normal(size=500), labels) for _ in range(2))
    loss = LossOnRows.of(full, kept)
    assert loss.auc.value == pytest.approx(full["auc"] - kept["auc"])
    assert loss.logloss.value == pytest.approx(kept["logloss"] - full["logloss"])
    assert (loss.rows, loss.positives) == (500, labels.sum())


def test_interval_of_two_perfect_models_has_a_width():
    labels = np.arange(400) % 2
    loss = LossOnRows.of(scores(labels * 2.0, labels), scores(labels * 3.0, labels))
    assert loss.auc.value == 0.0
    assert 0.001 < loss.auc.interval.high < 0.01


def test_scores_have_intervals_and_no_more_digits_than_these():
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 2, 200)
    some = scores(labels + 2 * rng.normal(size=200), labels)
    assert some["auc_low"] < some["auc"] < some["auc_high"]
    assert (some["rows"], some["positives"]) == (200, labels.sum())
    value, _, width = format_auc(some).partition(" ± ")
    assert len(value) == len(width) == 4  # two decimals on 200 rows
    assert format_auc(scores(np.zeros(3), np.zeros(3))) == "-"
    assert format_auc({"auc": 0.75, "auc_low": None, "auc_high": 0.8}) == format_auc({"auc": 0.75})  # no interval
