from __future__ import annotations

import json

import pytest

from lpfs.errors import InputError
from lpfs.train.config import Training


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
        ({"steps": 1, "epochs": 1}, "not by both"),
        ({"steps": 0}, "steps must be a whole number >= 1, found 0"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"log_every": None}, "log_every must be a whole number"),
        ({"patience": True}, "patience must be a whole number"),
        ({"lr": 0.0}, "lr must be a number > 0"),
        ({"clip": float("inf")}, "clip must be a number > 0"),
        ({"min_delta": -1.0}, "min_delta must be a number >= 0"),
        ({"task_weights": (1.0, -1.0)}, "task_weights must be numbers >= 0"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Training(**settings)


def test_a_run_goes_on_only_with_what_computes_the_same():
    config = Training(steps=10, lr=0.1)
    Training(steps=20, lr=0.1, quiet=True).check_same(config.to_json())
    with pytest.raises(InputError, match=r"begun with lr=0.1 and cannot go on with 0.2"):
        Training(steps=10, lr=0.2).check_same(config.to_json())
