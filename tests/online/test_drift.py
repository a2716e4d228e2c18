"""Drift alarms: the stability index, the loss, and the fields of a stream that drifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.online.drift import REFERENCE, WARMUP_BATCHES, Alarm, DriftMonitor, PageHinkley
from lpfs.schema import Field, Schema
from lpfs.train.metrics import population_stability
from lpfs.train.tensor_io import states_equal

SCHEMA = Schema((Field("word", cardinality=50), Field("price", "numeric"), Field("other", cardinality=50)))


def test_stability_is_about_zero_without_a_change() -> None:
    rng, p = np.random.default_rng(0), np.full(20, 0.05)
    values = [population_stability(*(rng.multinomial(2000, p, 1).astype(float) for _ in "ab"))[0] for _ in range(200)]
    assert abs(np.mean(values)) < 0.002
    moved = np.concatenate([np.full(10, 0.08), np.full(10, 0.02)])
    assert population_stability(2000 * p[None], 2000 * moved[None])[0] == pytest.approx(0.42, abs=0.03)


def test_the_loss_raises_an_alarm_once() -> None:
    rng, detector, alarms = np.random.default_rng(0), PageHinkley(), []
    for batch in range(3000):
        mean = 0.45 if batch < 2000 else 0.47
        alarm = detector.add(float(rng.normal(mean, 0.02)), batch * 100)
        alarms += [alarm] if alarm else []
    assert len(alarms) == 1
    assert 195_000 <= alarms[0].since <= 210_000
    assert alarms[0].field is None


def test_a_falling_loss_is_no_drift() -> None:
    rng, detector = np.random.default_rng(0), PageHinkley()
    losses = 0.4 + 0.3 * np.exp(-np.arange(3000) / 200) + rng.normal(0, 0.02, 3000)
    assert not any(detector.add(float(loss), 0) for loss in losses)
    assert WARMUP_BATCHES > 0


def run_windows(monitor: DriftMonitor, first: int, windows: int, **change: Any) -> list[Alarm]:
    alarms = []
    for window in range(first, first + windows):
        rng = np.random.default_rng(window)
        for _ in range(10):
            words = rng.integers(2, 40, (200, 2))
            if change.get("shift"):
                words[:, 0] = rng.integers(2, 10, 200)
            batch = Batch(torch.from_numpy(words).int(), torch.randn(200, 1), torch.zeros(200, 1))
            worth = rng.normal([change.get("worth", 0.01), 0.0, 0.005], 0.001)
            unseen = {"other": change.get("unseen", 2)}
            monitor.add(batch, unseen, None if change.get("warmup") else worth, 0.5, 0)
        alarms += monitor.close_window(window * 2000)
    return alarms


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"shift": True}, [("word", "distribution")]),
        ({"unseen": 40}, [("other", "unseen")]),
        ({"worth": 0.0}, [("word", "worth")]),
    ],
)
def test_alarms_of_fields(change: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    torch.manual_seed(0)
    monitor = DriftMonitor(SCHEMA)
    assert run_windows(monitor, 0, REFERENCE + 7) == []
    alarms = run_windows(monitor, REFERENCE + 7, 8, **change)  # an alarm is not repeated while it holds
    assert [(alarm.field, alarm.kind) for alarm in alarms] == expected
    assert all(alarm.since == (REFERENCE + 7) * 2000 for alarm in alarms)


def test_the_reference_of_the_worth_has_batches_that_train_gates() -> None:
    torch.manual_seed(0)
    monitor = DriftMonitor(SCHEMA)
    assert run_windows(monitor, 0, REFERENCE + 3, warmup=True) == []  # no batch trains gates yet
    assert run_windows(monitor, REFERENCE + 3, 8) == []
    assert monitor.worth[1, 0].tolist() == [40.0] * len(SCHEMA)
    assert [alarm.kind for alarm in run_windows(monitor, REFERENCE + 11, 4, worth=0.0)] == ["worth"]


def test_the_state_is_complete() -> None:
    torch.manual_seed(0)
    first, second = DriftMonitor(SCHEMA), DriftMonitor(SCHEMA)
    run_windows(first, 0, REFERENCE + 2)
    second.load(first.state())
    torch.manual_seed(1)
    one = run_windows(first, 20, 2, unseen=40)
    torch.manual_seed(1)
    assert run_windows(second, 20, 2, unseen=40) == one
    assert states_equal(first.state(), second.state())
