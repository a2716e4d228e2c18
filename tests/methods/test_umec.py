"""UMEC: the smallest groups of the first layer are squeezed out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lpfs.errors import InputError
from lpfs.methods.base import SearchTask
from lpfs.methods.group_sparsity import first_layer
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.methods.umec import BudgetConstraint, UMECOptions
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer
from tests.helpers.clicks import MIXED, Case
from tests.helpers.known_truth import STRONG


def test_steps_are_the_formula():
    """The saddle point's steps, written out in numpy: groups, s, y and z."""
    model = Case("mlp").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    layer = first_layer(model, "umec")
    steps, keep, total = 40, 3, 9
    driver = BudgetConstraint(
        SearchTask(model, optimizer, [], None, SelectionTarget(keep=keep), steps), layer, UMECOptions(4.0, 50.0, 20.0)
    )
    state = State(model, optimizer, Training(), steps)
    groups = [block.numpy().astype(np.float64) for block in layer.weight.detach().clone().split(4, 1)]
    unit = np.mean([(block**2).sum() for block in groups])
    s = y = z = 0.0
    for _ in range(steps):
        driver.within_step(state)
        energy = np.array([(block**2).sum() for block in groups]) / unit
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


def test_the_planted_fields_are_found_and_the_other_columns_are_zero(run_search):
    model, found = run_search("umec", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    energies = dict(zip(model.names, first_layer(model, "umec").energies().tolist(), strict=True))
    assert {name for name, energy in energies.items() if energy > 0} == set(STRONG)
    assert set(found.made["scores"]) == set(model.names)
    assert found.made["own_count"] in (2, 3)
    assert found.history[-1]["alive"] == found.made["own_count"]


def test_a_field_that_must_be_kept_is_never_shrunk(run_search):
    model, found = run_search("umec", keep=2, must_keep=("slot",))
    assert "slot" in found.kept
    norm = first_layer(model, "umec").energies()[model.names.index("slot")]
    assert norm > 0.1


def test_nothing_to_drop(run_search):
    _, found = run_search("umec", keep=7, steps=20)
    assert found.dropped == ()
    assert found.made["own_count"] == 7


def test_invalid_options_and_models(run_search):
    with pytest.raises(InputError, match="y_rate must be a number > 0, found 0"):
        make_method("umec", {"y_rate": 0})
    with pytest.raises(InputError, match="umec .*WideDeep"):
        run_search("umec", "wide_deep", keep=2)
