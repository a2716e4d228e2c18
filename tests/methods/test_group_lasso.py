"""Group LASSO: blocks of the first layer that shrink to zero."""

from __future__ import annotations

import pytest
import torch

from lpfs.errors import InputError, SearchError
from lpfs.methods.base import SearchTask
from lpfs.methods.group_sparsity import ColumnShrinkage, first_layer, learning_rate_of, shrink_factors
from lpfs.methods.target import SelectionTarget
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import NOISE, STRONG


def driven(target, steps=100):
    model = Case("mlp").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    layer = first_layer(model, "group_lasso")
    driver = ColumnShrinkage(SearchTask(model, optimizer, [batch_of(MIXED)], None, target, steps), layer)
    return layer, driver, State(model, optimizer, Training(), steps)


def test_a_step_is_the_formula():
    layer, driver, state = driven(SelectionTarget(penalty=3.0, must_keep=("..",)))
    before = layer.weight.detach().clone()
    driver.within_step(state)
    assert torch.equal(layer.weight, before)  # it begins when the first step is counted
    driver.after_step(state)
    driver.within_step(state)
    for number, name in enumerate(layer.names):
        block = before[:, 4 * number : 4 * number + 4]
        factor = max(0.0, 1 - 0.05 * 3.0 * 4**0.5 / float(block.norm())) if name != ".." else 1.0
        torch.testing.assert_close(layer.weight[:, 4 * number : 4 * number + 4].detach(), factor * block)
    driver.penalty.fill_(1e3)
    driver.within_step(state)
    assert [name for name, norm in zip(layer.names, driver.norms(), strict=True) if norm > 0] == [".."]


def test_a_step_is_the_smallest_sum_of_distance_and_penalty():
    generator = torch.Generator().manual_seed(3)
    block = torch.randn(5, generator=generator, dtype=torch.float64)
    for cut in (0.1, 1.0, 2.0, 5.0):
        best = block * shrink_factors(block.norm()[None], torch.tensor([cut], dtype=torch.float64))

        def worth(value, cut=cut):
            return 0.5 * (value - block).square().sum() + cut * value.norm()

        for _ in range(200):
            other = best + 0.05 * torch.randn(5, generator=generator, dtype=torch.float64)
            assert worth(best) <= worth(other)


def test_the_rate_is_that_of_the_group_of_the_weight():
    layer, _, state = driven(SelectionTarget(keep=2))
    assert learning_rate_of(state, layer.weight) == 0.05
    with pytest.raises(InputError, match="the optimizer does not train the first layer"):
        learning_rate_of(state, torch.zeros(1))


def test_the_planted_fields_are_found(run_search):
    model, found = run_search("group_lasso", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    scores = found.made["scores"]
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 10 * max(scores[name] for name in NOISE)
    assert found.made["own_count"] == 2
    assert found.made["forwards"] == found.made["backwards"] > 0
    assert found.history[0]["alive"] == 7
    assert found.history[-1]["alive"] == 2
    assert not hasattr(model, "lpfs_gates")


def test_a_fixed_penalty_keeps_the_fields_alive(run_search):
    _, found = run_search("group_lasso", penalty=0.2, must_keep=("slot",))
    assert set(STRONG) | {"slot"} <= set(found.kept)
    assert set(found.dropped) & set(NOISE)
    assert found.made["penalty"] == pytest.approx(0.2)
    _, all_of_them = run_search("group_lasso", penalty=0.0)
    assert not all_of_them.dropped
    with pytest.raises(SearchError, match="group_lasso keeps no field at penalty=1000"):
        run_search("group_lasso", penalty=1000.0)


def test_invalid_options_and_models(run_search):
    with pytest.raises(InputError, match="group_lasso .*DeepFM"):
        run_search("group_lasso", "deepfm", keep=2)
    with pytest.raises(InputError, match="unknown key 'alpha'"):
        run_search("group_lasso", keep=2, alpha=1)
