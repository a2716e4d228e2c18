"""The proximal steps against brute-force minimisation of their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.gates.optimizer import hard_threshold, positive_threshold, soft_threshold

points = st.floats(-3, 3)
thresholds = st.floats(0, 2)


def brute_force(x: float, penalty) -> float:
    """The minimiser of ½(z - x)² + penalty(z) on a fine grid that holds 0 and x themselves."""
    exact = torch.tensor([0.0, x], dtype=torch.float64)
    grid = torch.cat([torch.linspace(-6, 6, 120_001, dtype=torch.float64), exact])
    return grid[(0.5 * (grid - x) ** 2 + penalty(grid)).argmin()].item()


@given(points, thresholds)
def test_the_soft_threshold_minimises_its_definition(x, t):
    expected = brute_force(x, lambda z: t * z.abs())
    assert soft_threshold(torch.tensor(x, dtype=torch.float64), t).item() == pytest.approx(expected, abs=1e-4)


@given(points, thresholds)
def test_the_positive_threshold_minimises_its_definition(x, t):
    expected = brute_force(x, lambda z: torch.where(z < 0, float("inf"), t * z))
    assert positive_threshold(torch.tensor(x, dtype=torch.float64), t).item() == pytest.approx(expected, abs=1e-4)


@given(points, thresholds)
def test_the_hard_threshold_minimises_its_definition(x, p):
    if abs(abs(x) - (2 * p) ** 0.5) < 1e-6:
        return  # both 0 and x are minimisers there
    expected = brute_force(x, lambda z: p * (z != 0))
    assert hard_threshold(torch.tensor(x, dtype=torch.float64), p).item() == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=9))
def test_no_threshold_changes_nothing_and_an_infinite_one_leaves_zeros(values):
    x = torch.tensor(values)
    for none in (0.0, torch.zeros_like(x)):
        assert torch.equal(soft_threshold(x, none), x)
        assert torch.equal(hard_threshold(x, none), x)
    assert not soft_threshold(x, torch.full_like(x, float("inf"))).any()
    assert not soft_threshold(x, float("inf")).any()


def test_inside_the_threshold_is_exactly_zero_and_a_vector_counts_by_entry():
    x = torch.tensor([0.3, -0.3, 0.3, -2.0])
    t = torch.tensor([0.3, 0.4, 0.1, 1.0])
    assert soft_threshold(x, t).tolist() == pytest.approx([0.0, 0.0, 0.2, -1.0])
    assert soft_threshold(x, t)[:2].tolist() == [0.0, 0.0]
