from __future__ import annotations

import copy

import pytest
import torch
from known_truth import SMALL, known_truth

from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.callbacks import Callback
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

QUIET = Training(quiet=True, checkpoint_every=25)


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="session")
def ready(log):
    """Gives model and optimizer by the name of the model, trained a little, always the same."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model = make_model(name, log.schema, **{k: v for k, v in SMALL.items() if name != "fm" or k == "dim"})
            optimizer = make_optimizer(Training(lr=0.05), model.parameters())
            fit(model, log.part(0, 1000).stream(64, shuffle=True), optimizer, steps=200, quiet=True)
            made[name] = model, optimizer
        return copy.deepcopy(made[name])

    return get


@pytest.fixture(scope="session")
def looked(log, ready):
    """Searches with a method on the log; gives the model and the Selection."""

    def look(method, backbone="mlp", steps=100, **how):
        model, optimizer = ready(backbone)
        if callable(how.get("held")):  # each search has a stream of its own
            how["held"] = how["held"]()
        how = {"optimizer": optimizer, "valid": log.part(1000, 1200).stream(4096), "config": QUIET, **how}
        return model, search(model, log.part(0, 1000).stream(64, shuffle=True), method, steps=steps, **how)

    return look


class KilledError(Exception):
    """What ends a search in the middle."""


@pytest.fixture
def same_after_a_kill(looked, monkeypatch, tmp_path):
    """Checks that a search killed between two checkpoints goes on to the same end, bit by bit."""

    def check(method, driver: type[Callback], **how):
        model, whole = looked(method, folder=tmp_path / "whole", **how)
        real = driver.after_step

        def dies(self, state):
            real(self, state)
            if state.step == 60:
                raise KilledError

        with monkeypatch.context() as patch:
            patch.setattr(driver, "after_step", dies)
            with pytest.raises(KilledError):
                looked(method, folder=tmp_path / "killed", **how)
        again, resumed = looked(method, folder=tmp_path / "killed", resume=True, **how)
        assert timeless(resumed) == timeless(whole)
        mine, theirs = model.state_dict(), again.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)

    return check


def timeless(selection):
    """A selection as values, without the seconds that it took."""
    values = selection.to_json()
    return {**values, "made": {name: each for name, each in values["made"].items() if name != "seconds"}}
