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
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import STRONG


def test_steps_are_the_formula():
    """The steps written out in numpy: s and z until N - K groups are chosen, then y and the groups."""
    model = Case("mlp").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    layer = first_layer(model, "umec")
    steps, keep, total = 40, 3, 9
    options = UMECOptions(6.0, 500.0, 8.0)
    stream = [batch_of(MIXED)]
    task = SearchTask(model, optimizer, stream, None, SelectionTarget(keep=keep), steps)
    scales = layer.scales(model, stream).double().numpy() ** 2
    driver = BudgetConstraint(task, layer, options)
    state = State(model, optimizer, Training(), steps)
    groups = [block.numpy().astype(np.float64) for block in layer.weight.detach().clone().split(4, 1)]
    unit = np.mean([(block**2).sum() * scale for block, scale in zip(groups, scales, strict=True)])
    s = y = z = 0.0
    shrinkage, reached = 1.0, None
    for step in range(steps):
        driver.within_step(state)
        energy = np.array([(block**2).sum() * scale for block, scale in zip(groups, scales, strict=True)]) / unit
        order, count = np.argsort(energy), math.ceil(s)
        is_counted = count >= total - keep
        reached = step if is_counted and reached is None else reached
        factor = 1 / (1 + 2 * 0.05 * y)
        for number in order[:count]:
            groups[number] = groups[number] * factor
        squeezed = energy[order[:count]].sum() / total * factor**2  # after the step
        shrinkage *= factor
        excess = 1 - s / total - keep / total
        s = total - keep if is_counted else min(s + total * 6.0 / steps * (z - y * energy[order[count]]), total - keep)
        y += 500.0 / steps * squeezed * (is_counted and shrinkage >= 0.01)
        z = max(0.0, z + 8.0 / steps * excess)
        assert [float(driver.s), float(driver.y), float(driver.z)] == pytest.approx([s, y, z], rel=1e-3)
    assert reached is not None
    assert reached <= 0.3 * steps
    assert shrinkage < 0.01
    for found, expected in zip(layer.weight.detach().split(4, 1), groups, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("rates", [{}, {"s_rate": 0.5}, {"s_rate": 30.0}])
def test_the_number_of_groups_is_reached_in_three_tenths_and_then_they_shrink(run_search, rates):
    _, found = run_search("umec", keep=2, steps=200, **rates)
    reached = next(record["step"] for record in found.history if record["alive"] == 2)
    assert reached <= 0.3 * 200 + 2
    assert all(record["y"] == 0 for record in found.history if record["step"] < reached)
    assert found.made["shrinkage"] < 0.01


def test_the_planted_fields_are_found_and_the_other_columns_are_zero(run_search):
    model, found = run_search("umec", keep=2, steps=200)
    assert set(found.kept) == set(STRONG)
    energies = dict(zip(model.names, first_layer(model, "umec").energies().tolist(), strict=True))
    assert {name for name, energy in energies.items() if energy > 0} == set(STRONG)
    assert set(found.made["scores"]) == set(model.names)
    assert found.made["own_count"] == 2
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
