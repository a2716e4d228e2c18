"""AutoFIS: multipliers on crosses, moved by generalised regularized dual averaging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clicks import MIXED, Case, batch_of
from known_truth import STRONG

from lpfs.errors import InputError
from lpfs.methods.autofis import Multipliers, Options
from lpfs.methods.effort import Effort
from lpfs.methods.first_layer import first_layer
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import make_optimizer


def made(options=Options(), steps=10):  # noqa: B008
    model = Case("dlrm_cross").make(MIXED)
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    task = Task(model, optimizer, [], None, Wish(keep=2), steps)
    return model, optimizer, Multipliers(task, model, options, Effort())


def test_steps_are_the_formula():
    lr, c, mu = 0.5, 0.2, 0.7
    model, optimizer, driver = made(Options(lr, c, mu))
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


def test_without_c_a_multiplier_that_nothing_holds_is_zero_at_the_end():
    model, optimizer, driver = made()
    for _ in range(10):
        assert (driver.alpha > 0).all()
        driver.alpha.grad = torch.zeros(len(model.names))
        driver.within_step(State(model, optimizer, Training(), 10))
    assert not driver.alpha.any()


def test_multipliers_go_into_the_columns_that_read_their_parts():
    model, optimizer, driver = made()
    batch = batch_of(MIXED)
    model(batch).sum().backward()
    optimizer.step()
    with torch.no_grad():
        driver.alpha.copy_(torch.tensor([0.5, 0.0, -2.0, 1.0]).repeat(len(model.names))[: len(model.names)])
        model.crosses.gate = driver.gate
        expected = model(batch)
        model.crosses.gate = None
        before = optimizer.state[model.top[0].weight]["sum"].clone()
        driver.put_into(first_layer(model, "autofis"), optimizer)
        torch.testing.assert_close(model(batch), expected)
    after = optimizer.state[model.top[0].weight]["sum"]
    assert torch.equal(after[:, :4], before[:, :4] / 0.25)
    assert not after[:, 4:8].any()
    assert torch.equal(after[:, 12:16], before[:, 12:16])


def test_parts_of_the_planted_fields_come_before_those_of_noise(looked):
    """The token of the numbers has a bias, so that its cross with a field holds what the field says alone."""
    model, found = looked("autofis", "dlrm_cross", keep=2)
    assert set(found.kept) == {f"{name}*dense" for name in STRONG}
    noise = ("site", "slot", "site*slot")
    assert max(found.made["scores"][name] for name in noise) < 0.5 * min(
        found.made["scores"][name] for name in found.kept
    )
    assert set(found.made["scores"]) == set(model.names)
    assert 0 <= found.made["own_count"] <= len(model.names)
    assert model.crosses.gate is None


def test_multipliers_move_on_the_held_out_rows_alone(log):
    """With rows of their own, what the weights learn from says nothing about α."""
    torch.manual_seed(0)
    model = make_model("dlrm_cross", log.schema, dim=4, hidden=[8])
    optimizer = make_optimizer(Training(lr=0.01), model.parameters())
    rows = log.part(1000, 1200)
    stream = log.part(0, 1000).stream(50, shuffle=True)
    task = Task(model, optimizer, stream, None, Wish(keep=2), 3, held=rows.stream(200))
    effort = Effort()
    driver = Multipliers(task, model, Options(lr=0.5), effort)
    batch = next(iter(rows.stream(200)))
    model.crosses.gate = driver.gate
    state = State(model, optimizer, Training(), 3)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels[:, 0])
    (expected,) = torch.autograd.grad(loss, [driver.alpha])
    driver.alpha.grad = torch.full_like(driver.alpha, 7.0)  # of the weights' batch
    driver.within_step(state)
    torch.testing.assert_close(driver.total, 0.5 * expected)
    assert all(each.grad is None for each in model.parameters())
    assert effort.told()["backwards"] == 200
    model.crosses.gate = None


@pytest.mark.parametrize("apart", [False, True])
def test_a_search_that_is_killed_goes_on_bit_by_bit(same_after_a_kill, log, apart):
    held = {"held": lambda: log.part(1000, 1200).stream(64, shuffle=True, seed=5)} if apart else {}
    same_after_a_kill("autofis", Multipliers, backbone="dlrm_cross", keep=3, **held)


def test_refusals(looked):
    with pytest.raises(InputError, match="autofis ranks fields.*say keep=K"):
        check_search("autofis", {}, Wish(penalty=0.1), ("a", "b"), 100)
    with pytest.raises(InputError, match="chooses crosses of fields, and MLP has none.*use .* dlrm_cross"):
        looked("autofis", keep=2)
    with pytest.raises(InputError, match="c must be a number > 0, found 0"):
        check_method("autofis", {"c": 0})
