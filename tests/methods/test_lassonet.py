"""LassoNet: the hierarchical proximal operator, and a path along which fields leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.methods.lassonet import hierarchical_prox
from lpfs.methods.registry import make_method
from tests.helpers.known_truth import NOISE, STRONG

REALS = st.floats(-3, 3, allow_nan=False, width=32)


@given(
    st.lists(REALS, min_size=1, max_size=3),
    st.lists(REALS, min_size=1, max_size=6),
    st.floats(0, 8),
    st.sampled_from([0.1, 1.0, 10.0]),
)
def test_the_operator_finds_the_smallest_value(skip, weight, penalty, bound):
    """Against a fine grid over the length of θ, for which W is known."""
    v, u = torch.tensor([skip], dtype=torch.float64), torch.tensor([weight], dtype=torch.float64)
    theta, found = hierarchical_prox(v, u, torch.tensor([penalty], dtype=torch.float64), bound)
    length = float(theta.norm())
    assert float(found.abs().max()) <= bound * length * (1 + 1e-9) + 1e-12

    def worth(radius):
        cut = u.abs().clamp(max=bound * radius)
        near = 0.5 * (float(v.norm()) - radius) ** 2
        return near + 0.5 * float((u.abs() - cut).square().sum()) + penalty * radius

    mine = 0.5 * float((v - theta).square().sum() + (u - found).square().sum()) + penalty * length
    assert mine == pytest.approx(worth(length), abs=1e-9)
    most = float(v.norm() + u.abs().sum() / bound) + 1
    grid = [most * value / 2000 for value in range(2001)]
    assert mine <= min(map(worth, grid)) + 1e-9


def test_the_operator_treats_groups_separately():
    made = torch.Generator().manual_seed(0)
    v, u = torch.randn(5, 3, generator=made), torch.randn(5, 7, generator=made)
    penalty = torch.tensor([0.0, 1.0, 2.0, 5.0, 100.0])
    together = hierarchical_prox(v, u, penalty, 2.0)
    for row in range(5):
        alone = hierarchical_prox(v[row : row + 1], u[row : row + 1], penalty[row : row + 1], 2.0)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))
    assert float(together[0][4].norm()) == float(together[1][4].norm()) == 0.0
    assert float(together[0][1].norm()) > 0


def test_the_planted_fields_are_found_and_the_model_is_unchanged(run_search, pretrained):
    model, found = run_search("lassonet", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    scores = found.made["scores"]
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 3 * max(scores[name] for name in NOISE)
    before = pretrained("mlp")[0].state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert found.history[-1]["alive"] == found.made["own_count"] <= 3


def test_a_fixed_penalty(run_search):
    _, found = run_search("lassonet", penalty=0.0)
    assert found.dropped == ()
    _, some = run_search("lassonet", penalty=10.0, must_keep=("slot",))
    assert "slot" in some.kept
    assert len(some.kept) < 7


def test_crosses_have_skip_weights_too(run_search):
    model, found = run_search("lassonet", "dlrm_cross", keep=5, steps=60)
    assert len(found.kept) == 5
    assert set(found.made["scores"]) == set(model.names)


def test_invalid_options_and_models(run_search):
    with pytest.raises(InputError, match="M must be a number > 0, found -1"):
        make_method("lassonet", {"M": -1})
    with pytest.raises(InputError, match="lassonet .*FM"):
        run_search("lassonet", "fm", keep=2)
