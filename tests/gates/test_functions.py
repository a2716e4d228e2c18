"""One suite for every gate function in the registry."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from hypothesis import given, strategies as st

from lpfs import FUNCTIONS, gate_function
from lpfs.errors import InputError

EVERY = sorted(FUNCTIONS)
PLUS = [name for name in EVERY if FUNCTIONS[name].alpha is not None]
EVEN = [name for name in EVERY if not FUNCTIONS[name].odd]


def value(name: str, x: float, epsilon: float | None = None, dtype: torch.dtype = torch.float64) -> float:
    gate = FUNCTIONS[name]
    at = torch.tensor(gate.epsilon if epsilon is None else epsilon, dtype=dtype)
    return gate.value(torch.tensor(x, dtype=dtype), at).item()


# ---------------------------------------------------------------- the formulas, written a second time
def reference(name: str, x: float, e: float) -> float:
    polar = x * x / (x * x + e)
    plus = math.copysign(polar, x) if x else 0.0
    return {
        "lpfs": lambda: polar,
        "lpfs-noise": lambda: polar,
        "lpfs++": lambda: plus + 10 * math.sqrt(e) * math.atan(x),
        "lpfs++tanh": lambda: plus + 10 * math.sqrt(e) * math.tanh(x),
        "lpfs++softsign": lambda: plus + 10 * math.sqrt(e) * x / (1 + abs(x)),
        "gaussian": lambda: 1 - math.exp(-x * x / (2 * e * e)),
        "sin-arctan": lambda: math.sin(math.atan(abs(x) / e)),
        "tanh": lambda: math.tanh(x * x / (2 * e * e)),
        "rational": lambda: x * x / (x * x + e * e),
    }[name]()


@pytest.mark.parametrize("name", EVERY)
@given(x=st.floats(-3, 3), shrink=st.floats(0.01, 1))
def test_the_value_is_the_formula(name, x, shrink):
    epsilon = FUNCTIONS[name].epsilon * shrink
    assert value(name, x, epsilon) == pytest.approx(reference(name, x, epsilon), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_at_zero_exactly(name, dtype):
    for epsilon in (1.0, 0.1, 1e-5, 1e-8):
        assert value(name, 0.0, epsilon, dtype) == 0.0


@pytest.mark.parametrize("name", EVERY)
def test_the_limit_for_small_epsilon_is_the_indicator(name):
    gate = FUNCTIONS[name]
    for x in (1.0, 0.1, 0.01):
        assert value(name, x, 1e-14 if gate.square else 1e-7) == pytest.approx(1, abs=1e-3)
        assert value(name, -x, 1e-14 if gate.square else 1e-7) == pytest.approx(-1 if gate.odd else 1, abs=1e-3)


@pytest.mark.parametrize("name", EVERY)
def test_the_gate_rises_at_epsilon_or_at_its_root(name):
    """``square`` says which: there the gate is about one half, whatever ε is."""
    for epsilon in (1e-4, 1e-8):
        assert 0.35 < value(name, math.sqrt(epsilon) if FUNCTIONS[name].square else epsilon, epsilon) < 0.75


def test_epsilon_of_every_entry():
    gate, x, epsilon = FUNCTIONS["lpfs"], torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.1, 0.01, 1.0])
    with torch.no_grad():
        values, slopes = gate.value_and_slope(x, epsilon)
    assert values.tolist() == pytest.approx([0.25 / 0.35, 1 / 1.01, 0.8])
    assert slopes.tolist() == pytest.approx([0.1 / 0.35**2, 0.02 / 1.01**2, 4 / 25])


@pytest.mark.parametrize("name", EVERY)
@given(x=st.floats(0, 1e3))
def test_even_or_odd(name, x):
    sign = -1 if FUNCTIONS[name].odd else 1
    assert value(name, -x) == sign * value(name, x)


@pytest.mark.parametrize("name", EVERY)
def test_the_slope_is_the_derivative(name):
    gate = FUNCTIONS[name]
    epsilon = torch.tensor(gate.epsilon, dtype=torch.float64)
    x = torch.linspace(-2, 2, 81, dtype=torch.float64)
    x = x[x.abs() > 1e-6]  # sin-arctan has a kink at 0
    probe = x.clone().requires_grad_()
    by_chain_rule = torch.autograd.grad(gate.value_and_slope(probe, epsilon)[0].sum(), probe)[0]
    h = 1e-6
    by_difference = (gate.value(x + h, epsilon) - gate.value(x - h, epsilon)) / (2 * h)
    torch.testing.assert_close(gate.slope(x, epsilon), by_chain_rule, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gate.slope(x, epsilon), by_difference, rtol=1e-6, atol=1e-8)
    by_backward = torch.autograd.grad(gate.value(probe, epsilon).sum(), probe)[0]
    assert torch.equal(by_backward, gate.slope(x, epsilon))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("epsilon", [0.1, 1e-3, 1e-5])
def test_the_slope_at_zero(name, epsilon):
    gate = FUNCTIONS[name]
    slope = gate.slope(torch.zeros((), dtype=torch.float64), torch.tensor(epsilon, dtype=torch.float64)).item()
    expected = gate.alpha * epsilon ** (1 / gate.tau) if gate.alpha is not None and gate.tau is not None else 0.0
    assert slope == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_monotone_for_positive_x(name, dtype):
    x = torch.logspace(-8, 4, 2000, dtype=dtype)
    values = FUNCTIONS[name].value(x, torch.tensor(FUNCTIONS[name].epsilon, dtype=dtype))
    room = 4 * torch.finfo(dtype).eps * values.abs()
    assert bool((values.diff() >= -room[1:]).all())
    assert values[-1] > values[0]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_finite_from_1e_minus_30_to_1e30(name, dtype):
    gate = FUNCTIONS[name]
    size = torch.logspace(-30, 30, 241, dtype=torch.float64).to(dtype)
    x = torch.cat([-size, size.new_zeros(1), size])
    for epsilon in (gate.epsilon, 1e-5, 1e-8):
        at = torch.tensor(epsilon, dtype=dtype)
        for each in gate.value_and_slope(x, at):
            assert bool(torch.isfinite(each).all())
        probe = x.clone().requires_grad_()
        gate.value(probe, at).sum().backward()
        assert probe.grad is not None
        assert bool(torch.isfinite(probe.grad).all())


def test_worked_values():
    assert value("lpfs", 1.0, 0.1) == pytest.approx(0.9090909, abs=1e-7)
    assert value("lpfs++", 1.0, 0.1) == pytest.approx(1 / 1.1 + 10 * math.sqrt(0.1) * math.pi / 4, abs=1e-12)
    assert value("lpfs++", 1.0, 0.1) == pytest.approx(3.3927, abs=1e-4)


@pytest.mark.parametrize("name", PLUS)
def test_alpha_and_tau_can_be_changed(name):
    gate = gate_function(name, alpha=50.0, tau=3.0)
    assert gate.slope(torch.zeros(()), torch.tensor(0.1)).item() == pytest.approx(50 * 0.1 ** (1 / 3))
    assert gate.revives
    assert not gate_function(name, alpha=0.0).revives


@pytest.mark.parametrize("name", EVERY)
def test_a_gate_function_can_be_pickled(name):
    gate = pickle.loads(pickle.dumps(FUNCTIONS[name]))
    assert gate.value(torch.ones(()), torch.tensor(0.1)) == FUNCTIONS[name].value(torch.ones(()), torch.tensor(0.1))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lpfs", {"epsilon": 0.0}, "epsilon must be > 0"),
        ("lpfs", {"epsilon": -1.0}, "epsilon must be > 0"),
        ("lpfs++", {"tau": 0.0}, "tau must be > 0"),
        ("lpfs++", {"tau": -2.0}, "tau must be > 0"),
        ("lpfs++", {"alpha": -1.0}, "alpha must be >= 0"),
        ("lpfs++", {"alpha": math.nan}, "alpha must be >= 0"),
        ("lpfs", {"alpha": 10.0}, "has no alpha"),
        ("lpfs", {"noise": -1.0}, "noise must be >= 0"),
        ("lpfs+", {}, "did you mean 'lpfs"),
    ],
)
def test_nonsense_is_refused(name, arguments, message):
    with pytest.raises(InputError, match=message):
        gate_function(name, **arguments)


@pytest.mark.parametrize("gate", [name for name, function in FUNCTIONS.items() if function.compiles])
@pytest.mark.parametrize("tau", [2.0, 3.0])
def test_compiled_functions_give_the_bits_of_torch(gate, tau):
    function = FUNCTIONS[gate] if FUNCTIONS[gate].tau is None else gate_function(gate, tau=tau)
    constants = () if function.alpha is None else (function.alpha, function.tau)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 27, 400):
        for power in range(50):
            epsilon = torch.tensor(0.1 * 0.82**power)
            x = torch.randn(size, generator=generator)
            x[0] = [0.0, -0.0, 1e30, float("inf"), float("nan")][power % 5]
            by_array, by_tensor = function.value_and_slope(x, epsilon), function.both(x, epsilon, *constants)
            for one, two in zip(by_array, by_tensor, strict=True):
                assert one.dtype == torch.float32
                assert torch.equal(one.nan_to_num(nan=7.0), two.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", EVEN)
def test_gate_functions_start_equally_open(name):
    """The default ε of each function gives about 0.9 at x = 1, so that results of several functions compare."""
    assert value(name, 1.0) == pytest.approx(0.9, abs=0.02)
