"""Gates in a steady state: confidence sequences, nominations, decisions, the control law, and the state."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lpfs.errors import FieldError, InputError
from lpfs.online.gates import BURN_IN_ROWS, MIN_TEST_ROWS, Decision, GainTests, GateSettings, SteadyGates
from lpfs.train.tensor_io import states_equal

NAMES = ("a", "b", "c", "d")


def make_gates(**settings: object) -> SteadyGates:
    return SteadyGates(NAMES, GateSettings(**settings))  # type: ignore[arg-type]


def step(gates: SteadyGates, gradient: list[float], times: int = 1) -> None:
    for _ in range(times):
        gates.values().backward(torch.tensor(gradient))
        gates.step()


def add_additive(gates: SteadyGates, field: int, gains: np.ndarray) -> Decision | None:
    return next(iter(gates.add_additive(np.array([field]), gains[None])), None)


def test_the_interval_covers_the_mean_at_all_times() -> None:
    error, streams, misses = 0.05, 200, 0
    for seed in range(streams):
        tests, rng = GainTests(1, error), np.random.default_rng(seed)
        missed = False
        for _ in range(40):
            tests.add(np.array([0]), rng.normal(0.01, 0.2, (1, 500)))
            evidence = tests.evidence(0)
            missed |= not evidence.low <= 0.01 <= evidence.high
        misses += missed
    assert misses / streams <= error
    assert evidence.high - evidence.low < 0.02


def test_no_interval_before_enough_rows() -> None:
    tests = GainTests(1, 0.01)
    tests.add(np.array([0]), np.full((1, MIN_TEST_ROWS - 1), 0.5))
    assert tests.evidence(0).low == -math.inf
    assert tests.evidence(0).gain == pytest.approx(0.5)


def test_factors_are_one_at_the_start_and_exactly_zero_when_closed() -> None:
    gates = SteadyGates(NAMES, GateSettings(), opened=["a", "c"])
    assert gates.values().tolist() == [1.0, 0.0, 1.0, 0.0]
    assert gates.kept == ("a", "c")


def test_a_closed_gate_receives_its_gradient() -> None:
    gates = SteadyGates(NAMES, GateSettings(lr=1.0), opened=["a"])
    step(gates, [0.0, -0.05, 0.0, 0.0], 20)
    assert gates.x[1] > 0
    assert gates.applied()[1] == 0.0  # it is only nominated
    assert gates.nominated() == [1]


def test_a_gate_without_gradient_is_nominated_and_the_test_decides() -> None:
    gates = make_gates(penalty=0.02)
    step(gates, [-0.1, -0.1, -0.1, 0.0], 200)
    assert gates.nominated() == [3]
    assert gates.kept == NAMES
    rng = np.random.default_rng(0)
    assert gates.applied().tolist() == [1.0] * 4
    gates.add_gains(3, rng.normal(8e-4, 0.005, MIN_TEST_ROWS))
    assert gates.applied()[3] == 1.0  # it seems useful
    gates.tests.sums[:] = 0.0
    gates.add_gains(3, rng.normal(-1e-4, 0.005, MIN_TEST_ROWS))
    assert 0 < gates.applied()[3] < 0.01  # almost hidden until the decision
    decision = None
    for _ in range(100):
        add_additive(gates, 3, rng.normal(-1e-4, 0.005, 500))
        decision = decision or gates.add_gains(3, rng.normal(-1e-4, 0.005, 500))
    assert decision is not None
    assert (decision.field, decision.action) == ("d", "closed")
    assert decision.evidence.high < 5e-4
    assert gates.kept == ("a", "b", "c")
    reopened = None
    for _ in range(100):
        reopened = reopened or add_additive(gates, 3, rng.normal(0.01, 0.05, 500))
    assert reopened is not None
    assert reopened.action == "reopened"
    assert gates.kept == NAMES
    assert gates.x[3] == 1.0


def test_a_probe_that_has_not_learned_yet_is_no_evidence() -> None:
    gates = make_gates()
    with torch.no_grad():
        gates.x[0] = 0.0
    assert not gates.hidden().any()
    gates.add_gains(0, np.tile([-0.5, 0.49], MIN_TEST_ROWS // 2))
    assert gates.hidden().tolist() == [True, False, False, False]
    for _ in range(int(BURN_IN_ROWS / 500)):  # it corrects no logit yet, so that all gains are zero
        add_additive(gates, 0, np.zeros(500))
        assert gates.add_gains(0, np.random.default_rng(0).normal(0, 0.5, 500)) is None
    assert gates.additive.evidence(0).rows == 0
    gates.set_open(0, True)
    assert gates.hidden_rows[0] == 0


def test_a_gain_between_the_limits_changes_nothing() -> None:
    gates, rng = SteadyGates(NAMES, GateSettings(), opened=["a"]), np.random.default_rng(0)
    for _ in range(80):  # hysteresis: neither below half of the threshold nor above it
        assert add_additive(gates, 1, rng.normal(7.5e-4, 0.005, 500)) is None
        assert gates.add_gains(0, rng.normal(7.5e-4, 0.005, 500)) is None


def test_keep_is_held_by_the_control_of_the_penalty() -> None:
    gates = make_gates(keep=2, horizon=100)
    step(gates, [-0.5, -0.4, -0.02, -0.01], 2000)
    assert (gates.x != 0).tolist() == [True, True, False, False]
    assert float(gates.control[0]) >= 1 / 100


def test_must_keep_is_never_nominated() -> None:
    gates = make_gates(penalty=0.05, must_keep=("d",))
    step(gates, [0.1, 0.1, 0.1, 0.1], 300)
    assert 3 not in gates.nominated()


def test_the_state_is_complete() -> None:
    first, second = make_gates(keep=2, horizon=200), make_gates(keep=2, horizon=200)
    rng = np.random.default_rng(1)
    gradients = rng.normal(-0.01, 0.05, (60, 4)).tolist()
    for gradient in gradients[:30]:
        step(first, gradient)
        add_additive(first, 1, rng.normal(0.01, 0.05, 100))
    second.load(first.state())
    for gradient in gradients[30:]:
        step(first, gradient)
        step(second, gradient)
    assert states_equal(first.state(), second.state())


@pytest.mark.parametrize("settings", [{"keep": 0}, {"epsilon": 2.0}, {"hysteresis": 1.5}, {"error": 0.9}])
def test_invalid_settings(settings: dict[str, float]) -> None:
    with pytest.raises(InputError):
        GateSettings(**settings)  # type: ignore[arg-type]


def test_unknown_fields() -> None:
    with pytest.raises(FieldError, match="'e'"):
        SteadyGates(NAMES, GateSettings(must_keep=("e",)))
    with pytest.raises(InputError, match="at most the number of fields"):
        SteadyGates(NAMES, GateSettings(keep=5))
