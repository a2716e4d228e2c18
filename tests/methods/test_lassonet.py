"""LassoNet: the hierarchical proximal operator, and a path along which fields leave."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.methods.base import SearchTask
from lpfs.methods.group_sparsity import first_layer
from lpfs.methods.lassonet import ModelWithSkip, PenaltyPath, hierarchical_prox
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.train.config import Training
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
    assert min(scores[name] for name in STRONG) > 1.3 * max(scores[name] for name in NOISE)
    before = pretrained("mlp")[0].state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(not module._forward_pre_hooks for module in model.modules())
    assert found.made["levels"] >= 20


def test_fields_disappear_one_after_another_as_lambda_grows(run_search):
    """A score is the λ of the last level at which a field was alive, so that one path serves every K."""
    _, found = run_search("lassonet", keep=2, steps=200)
    alive = [record["alive"] for record in found.history]
    penalties = [record["penalty"] for record in found.history if record["level"] > 0]
    assert alive[0] == 7
    assert alive[-1] <= 2
    assert max(a - b for a, b in pairwise(alive)) <= 3  # not all at once
    assert penalties == sorted(penalties)
    assert min(b / a for a, b in pairwise(sorted(set(penalties)))) >= 1.02 - 1e-6
    levels = sorted(set(penalties))
    for score in found.made["scores"].values():
        assert score == 0 or any(level * 0.999 <= score <= level * 1.0011 for level in levels)
    _, other = run_search("lassonet", keep=5, steps=200)
    assert other.made["scores"] == found.made["scores"]


def test_the_skip_layer_is_pretrained_if_the_rows_are_given(log, pretrained, monkeypatch):
    nets = []
    monkeypatch.setattr(PenaltyPath, "begin", lambda self, state: nets.append(copy.deepcopy(state.model)))
    model, optimizer = pretrained("mlp")
    stream = log.part(0, 1000).stream(64, shuffle=True)
    valid = log.part(1000, 1200).stream(4096)
    task = SearchTask(model, optimizer, stream, valid, SelectionTarget(keep=2), 40, training=Training(quiet=True))
    method = make_method("lassonet")
    method.search(replace(task, early=log.part(0, 800).stream(64, shuffle=True), early_steps=60))
    method.search(task)
    with_rows, without = (float(net.skip.weight.detach().norm()) for net in nets)
    assert with_rows > 3 * without > 0
    assert not torch.equal(nets[0].model.top[0].weight, nets[1].model.top[0].weight)  # new weights


def test_centering_leaves_the_logits_of_the_skip_layer(log, pretrained):
    model, _ = pretrained("mlp")
    net = ModelWithSkip(model, first_layer(model, "lassonet"))
    stream = log.part(0, 600).stream(600)
    batch = next(iter(stream))
    with torch.no_grad():
        net.skip.weight.normal_()
        before = net(batch)
        net.center(stream)
        torch.testing.assert_close(net(batch), before, rtol=1e-4, atol=1e-4)
        part = net.model.inputs(batch)[:, 0]
        assert float(part.mean(0).abs().max()) < 1e-4


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
