"""UMEC: the smallest groups of the first layer are squeezed out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from clicks import MIXED, Case
from known_truth import STRONG

from lpfs.errors import InputError
from lpfs.methods.first_layer import first_layer
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.task import Task
from lpfs.methods.umec import Budget, Options
from lpfs.methods.wish import Wish
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer


def test_steps_are_the_formula():
    """The saddle point's steps, written out in numpy: groups, s, y and z."""
    model = Case("mlp").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    layer = first_layer(model, "umec")
    steps, keep, total = 40, 3, 9
    driver = Budget(Task(model, optimizer, [], None, Wish(keep=keep), steps), layer, Options(4.0, 50.0, 20.0))
    state = State(model, optimizer, Training(), steps)
    groups = [each.numpy().astype(np.float64) for each in layer.weight.detach().clone().split(4, 1)]
    unit = np.mean([(each**2).sum() for each in groups])
    s = y = z = 0.0
    for _ in range(steps):
        driver.within_step(state)
        energy = np.array([(each**2).sum() for each in groups]) / unit
        order, count = np.argsort(energy), math.ceil(s)
        squeezed = energy[order[:count]].sum() / total
        following = energy[order[count]]
        for number in order[:count]:
            groups[number] = groups[number] / (1 + 2 * 0.05 * y)
        s, y, z = (
            min(max(s + total * 4.0 / steps * (z - y * following), 0.0), total - keep),
            y + 50.0 / steps * squeezed,
            max(0.0, z + 20.0 / steps * (1 - s / total - keep / total)),
        )
        assert [float(driver.s), float(driver.y), float(driver.z)] == pytest.approx([s, y, z], rel=1e-3)
    assert s > 2
    for found, expected in zip(layer.weight.detach().split(4, 1), groups, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-6)


def test_the_planted_fields_are_found_and_the_rest_is_gone(looked):
    model, found = looked("umec", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    energies = dict(zip(model.names, first_layer(model, "umec").energies().tolist(), strict=True))
    assert {name for name, energy in energies.items() if energy > 0} == set(STRONG)
    assert set(found.made["scores"]) == set(model.names)
    assert found.made["own_count"] in (2, 3)
    assert found.history[-1]["alive"] == found.made["own_count"]


def test_a_field_that_must_be_kept_is_never_squeezed(looked):
    model, found = looked("umec", keep=2, must_keep=("slot",))
    assert "slot" in found.kept
    norm = first_layer(model, "umec").energies()[model.names.index("slot")]
    assert norm > 0.1


def test_a_search_that_is_killed_goes_on_bit_by_bit(same_after_a_kill):
    same_after_a_kill("umec", Budget, keep=3)


def test_nothing_to_drop(looked):
    _, found = looked("umec", keep=7, steps=20)
    assert found.dropped == ()
    assert found.made["own_count"] == 7


def test_refusals(looked):
    with pytest.raises(InputError, match="umec ranks fields.*say keep=K"):
        check_search("umec", {}, Wish(penalty=0.1), ("a", "b"), 100)
    with pytest.raises(InputError, match="say keep=K"):
        looked("umec", penalty=0.1)
    with pytest.raises(InputError, match="y_rate must be a number > 0, found 0"):
        check_method("umec", {"y_rate": 0})
    with pytest.raises(InputError, match="in WideDeep"):
        looked("umec", "wide_deep", keep=2)
