"""Group LASSO: blocks of the first layer that shrink to zero."""

from __future__ import annotations

import pytest
import torch
from clicks import MIXED, Case
from known_truth import NOISE, STRONG

from lpfs.errors import InputError, SearchError
from lpfs.methods.first_layer import first_layer
from lpfs.methods.group_lasso import Columns, rate_of, shrunk
from lpfs.methods.registry import check_search
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer


def driven(wish, steps=100):
    model = Case("mlp").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    layer = first_layer(model, "group_lasso")
    driver = Columns(Task(model, optimizer, [], None, wish, steps), layer)
    return layer, driver, State(model, optimizer, Training(), steps)


def test_a_step_is_the_formula():
    layer, driver, state = driven(Wish(penalty=3.0, must_keep=("..",)))
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
        best = block * shrunk(block.norm()[None], torch.tensor([cut], dtype=torch.float64))

        def worth(value, cut=cut):
            return 0.5 * (value - block).square().sum() + cut * value.norm()

        for _ in range(200):
            other = best + 0.05 * torch.randn(5, generator=generator, dtype=torch.float64)
            assert worth(best) <= worth(other)


def test_the_rate_is_that_of_the_group_of_the_weight():
    layer, _, state = driven(Wish(keep=2))
    assert rate_of(state, layer.weight) == 0.05
    with pytest.raises(InputError, match="the optimizer does not train the first layer"):
        rate_of(state, torch.zeros(1))


def test_the_planted_fields_are_found(looked):
    model, found = looked("group_lasso", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    scores = found.made["scores"]
    assert set(scores) == set(model.names)
    assert min(scores[name] for name in STRONG) > 10 * max(scores[name] for name in NOISE)
    assert found.made["own_count"] == 2
    assert found.made["forwards"] == found.made["backwards"] > 0
    assert found.history[0]["alive"] == 7
    assert found.history[-1]["alive"] == 2
    assert not hasattr(model, "lpfs_gates")


def test_a_penalty_keeps_those_that_are_left(looked):
    _, found = looked("group_lasso", penalty=0.2, must_keep=("slot",))
    assert set(STRONG) | {"slot"} <= set(found.kept)
    assert set(found.dropped) & set(NOISE)
    assert found.made["penalty"] == pytest.approx(0.2)
    _, all_of_them = looked("group_lasso", penalty=0.0)
    assert not all_of_them.dropped
    with pytest.raises(SearchError, match="group_lasso keeps no field at penalty=1000"):
        looked("group_lasso", penalty=1000.0)


def test_a_field_that_must_be_kept_counts(looked):
    _, found = looked("group_lasso", keep=2, must_keep=("slot",))
    assert "slot" in found.kept
    assert len(found.kept) == 2


def test_a_search_that_is_killed_goes_on_bit_by_bit(same_after_a_kill):
    same_after_a_kill("group_lasso", Columns, keep=3)


def test_wishes_that_it_cannot_answer(looked):
    with pytest.raises(InputError, match="group_lasso .* say keep=K or penalty=λ"):
        check_search("group_lasso", {}, Wish(), ("a", "b"), 100)
    with pytest.raises(InputError, match="say keep=K or penalty=λ"):
        looked("group_lasso", max_auc_loss=0.1)
    with pytest.raises(InputError, match="in DeepFM"):
        looked("group_lasso", "deepfm", keep=2)
    with pytest.raises(InputError, match="unknown key 'alpha'"):
        looked("group_lasso", keep=2, alpha=1)
