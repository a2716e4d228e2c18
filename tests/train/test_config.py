"""Settings of training and learning-rate schedules."""

from __future__ import annotations

import json

import pytest

from lpfs.errors import InputError
from lpfs.train.config import SCHEDULES, Training, lr_factor


def test_json_in_and_out():
    config = Training(steps=10, task_weights=[1, 2], clip=1.0, schedule="rise")
    assert config.task_weights == (1.0, 2.0)
    assert Training.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_an_unknown_key_is_an_error():
    with pytest.raises(InputError, match="unknown key 'learning_rate' for Training"):
        Training.from_json({"learning_rate": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "lion"}, "optimizer must be one of adagrad, rowwise-adagrad, adam, sgd; found 'lion'"),
        ({"schedule": "up"}, "schedule must be one of"),
        ({"precision": "half"}, "precision must be one of"),
        ({"monitor": "loss"}, "monitor must be one of"),
        ({"keep": "all"}, "keep must be one of last, best"),
        ({"steps": 1, "epochs": 1}, "steps and epochs"),
        ({"steps": 0}, "steps must be an integer >= 1, found 0"),
        ({"epochs": 1.5}, "epochs must be an integer"),
        ({"log_every": None}, "log_every must be an integer"),
        ({"patience": True}, "patience must be an integer"),
        ({"lr": 0.0}, "lr must be a number > 0"),
        ({"clip": float("inf")}, "clip must be a number > 0"),
        ({"min_delta": -1.0}, "min_delta must be a number >= 0"),
        ({"task_weights": (1.0, -1.0)}, "task_weights must be numbers >= 0"),
    ],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Training(**settings)


def test_resume_refuses_settings_that_change_the_computation():
    config = Training(steps=10, lr=0.1)
    Training(steps=20, lr=0.1, quiet=True).check_same(config.to_json())
    with pytest.raises(InputError, match=r"lr=0.1.*0.2.*another directory"):
        Training(steps=10, lr=0.2).check_same(config.to_json())


def test_rise_is_exponential():
    factor = lr_factor("rise", 1000)
    rates = [0.01 * factor(step) for step in range(0, 1001, 100)]
    assert rates[0] == 0.01
    assert rates[-1] == pytest.approx(0.1)
    ratios = {round(after / before, 9) for before, after in zip(rates[:-1], rates[1:], strict=True)}
    assert len(ratios) == 1
    assert factor(10_000) == factor(1000)


def test_other_schedules():
    assert {lr_factor("constant", None)(step) for step in (0, 1, 999)} == {1.0}
    assert [lr_factor("warmup", 4)(step) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [lr_factor("linear", 4)(step) for step in range(6)] == [1, 0.75, 0.5, 0.25, 0, 0]
    cosine = lr_factor("cosine", 4)
    assert (cosine(0), cosine(2), cosine(4), cosine(9)) == (1.0, pytest.approx(0.5), 0.0, 0.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_have_no_state(name):
    one, two = lr_factor(name, 50), lr_factor(name, 50)
    later = [two(step) for step in reversed(range(80))]
    assert [one(step) for step in range(80)] == later[::-1]


def test_unknown_schedule_and_unknown_length():
    with pytest.raises(InputError, match="'exponential'.*constant, rise"):
        lr_factor("exponential", 10)
    with pytest.raises(InputError, match="'rise'.*schedule_steps"):
        lr_factor("rise", None)
