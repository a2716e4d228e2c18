"""AutoFIS: multipliers on crosses, moved by generalised regularized dual averaging."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lpfs.errors import InputError
from lpfs.methods.autofis import AutoFISOptions, Multipliers
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.group_sparsity import first_layer
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import STRONG
from tests.helpers.searches import assert_same_weights, killed_after, without_time


def made(options=AutoFISOptions(), steps=10):  # noqa: B008
    model = Case("dlrm_cross").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    task = SearchTask(model, optimizer, [], None, SelectionTarget(keep=2), steps)
    return model, optimizer, Multipliers(task, model, options, SearchCost())


def test_steps_are_the_formula():
    lr, c, mu = 0.5, 0.2, 0.7
    model, optimizer, driver = made(AutoFISOptions(lr, c, mu))
    state = State(model, optimizer, Training(), 10)
    draw = np.random.default_rng(0)
    total = np.zeros(len(model.names))
    zeros = 0
    for step in range(1, 11):
        slope = draw.normal(size=len(total))
        driver.alpha.grad = torch.tensor(slope, dtype=torch.float32)
        driver.within_step(state)
        total += lr * slope
        cut = c * lr**0.5 * (step * lr) ** mu
        expected = np.sign(1 - total) * np.maximum(np.abs(1 - total) - cut, 0)
        np.testing.assert_allclose(driver.alpha.detach().numpy(), expected, atol=1e-5)
        assert not driver.alpha.grad.any()
        zeros += (expected == 0).sum()
    assert zeros > 0
    scores = np.array(list(driver.scores().values()))
    alpha = driver.alpha.detach().numpy()
    np.testing.assert_allclose(scores[alpha != 0], np.abs(alpha)[alpha != 0], atol=1e-6)
    assert (scores[alpha == 0] <= 0).all()


def test_without_c_a_multiplier_without_gradient_is_zero_at_the_end():
    model, optimizer, driver = made()
    for _ in range(10):
        assert (driver.alpha > 0).all()
        driver.alpha.grad = torch.zeros(len(model.names))
        driver.within_step(State(model, optimizer, Training(), 10))
    assert not driver.alpha.any()


def test_multipliers_are_folded_into_the_columns_of_their_parts():
    model, optimizer, driver = made()
    batch = batch_of(MIXED)
    model(batch).sum().backward()
    optimizer.step()
    with torch.no_grad():
        driver.alpha.copy_(torch.tensor([0.5, 0.0, -2.0, 1.0]).repeat(len(model.names))[: len(model.names)])
        model.crosses.gate = lambda: driver.alpha
        expected = model(batch)
        model.crosses.gate = None
        before = optimizer.state[model.top[0].weight]["sum"].clone()
        driver.fold_into(first_layer(model, "autofis"), optimizer)
        torch.testing.assert_close(model(batch), expected)
    after = optimizer.state[model.top[0].weight]["sum"]
    assert torch.equal(after[:, :4], before[:, :4] / 0.25)
    assert not after[:, 4:8].any()
    assert torch.equal(after[:, 12:16], before[:, 12:16])


def test_parts_of_the_planted_fields_rank_above_noise(run_search):
    """The token of the numbers has a bias, so that its cross with a field holds what the field says alone."""
    model, found = run_search("autofis", "dlrm_cross", keep=2)
    assert set(found.kept) == {f"{name}*dense" for name in STRONG}
    noise = ("site", "slot", "site*slot")
    assert max(found.made["scores"][name] for name in noise) < 0.5 * min(
        found.made["scores"][name] for name in found.kept
    )
    assert set(found.made["scores"]) == set(model.names)
    assert 0 <= found.made["own_count"] <= len(model.names)
    assert model.crosses.gate is None


def test_multipliers_are_updated_by_holdout_rows_alone(log):
    """With rows of their own, what the weights learn from says nothing about α."""
    torch.manual_seed(0)
    model = make_model("dlrm_cross", log.schema, dim=4, hidden=[8])
    optimizer = make_optimizer(Training(lr=0.01), model.parameters())
    rows = log.part(1000, 1200)
    stream = log.part(0, 1000).stream(50, shuffle=True)
    task = SearchTask(model, optimizer, stream, None, SelectionTarget(keep=2), 3, holdout=rows.stream(200))
    cost = SearchCost()
    driver = Multipliers(task, model, AutoFISOptions(lr=0.5), cost)
    batch = next(iter(rows.stream(200)))
    model.crosses.gate = lambda: driver.alpha
    state = State(model, optimizer, Training(), 3)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels[:, 0])
    (expected,) = torch.autograd.grad(loss, [driver.alpha])
    driver.alpha.grad = torch.full_like(driver.alpha, 7.0)  # of the weights' batch
    driver.fetch(state)
    driver.within_step(state)
    torch.testing.assert_close(driver.total, 0.5 * expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert cost.to_dict()["backwards"] == 200
    model.crosses.gate = None


@pytest.mark.parametrize("has_holdout", [False, True])
def test_a_killed_search_resumes_bit_for_bit(run_search, log, tmp_path, has_holdout):
    def run(folder, **settings):
        rows = log.part(1000, 1200).stream(64, shuffle=True, seed=5) if has_holdout else None
        return run_search("autofis", "dlrm_cross", keep=3, holdout=rows, folder=tmp_path / folder, **settings)

    model, whole = run("whole")
    with killed_after(Multipliers, 60):
        run("killed")
    resumed, selection = run("killed", resume=True)
    assert without_time(selection) == without_time(whole)
    assert_same_weights(resumed, model)


def test_models_without_crosses_and_invalid_options(run_search):
    with pytest.raises(InputError, match="autofis .*MLP .*dlrm_cross"):
        run_search("autofis", keep=2)
    with pytest.raises(InputError, match="c must be a number > 0, found 0"):
        make_method("autofis", {"c": 0})
