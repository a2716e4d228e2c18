"""Helpers for tests of searches: comparing selections, and killing a search in the middle."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lpfs.methods.masks import FieldMask
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from tests.helpers.known_truth import SMALL


class KilledError(Exception):
    """Ends a search in the middle."""


@contextmanager
def killed_after(callback, step):
    """Expect the search in the block to be killed by this callback class after a step."""
    after_step = callback.after_step

    def kill(self, state):
        after_step(self, state)
        if state.step == step:
            raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "after_step", kill)
        with pytest.raises(KilledError):
            yield


def without_time(selection):
    """Return a selection as JSON values, without the seconds that it took."""
    values = selection.to_json()
    return {**values, "made": {name: value for name, value in values["made"].items() if name != "seconds"}}


def assert_same_weights(first, second):
    """Assert that two models have bitwise identical state."""
    ours, theirs = first.state_dict(), second.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class FixedMask(FieldMask):
    """A mask with given factors; counts its calls."""

    def __init__(self, names, values):
        super().__init__(names, 1, 0)
        self.values = nn.Parameter(torch.tensor(values))
        self.calls = 0

    def forward(self):
        self.calls += 1
        return self.values


def short_search(log, backbone, method, **settings):
    """Search for two fields in a few steps with an untrained model; return the model and the selection."""
    torch.manual_seed(0)
    model = make_model(backbone, log.schema, **SMALL)
    valid = log.part(1000, 1200).stream(100)
    defaults = {"keep": 2, "steps": 5, "valid": valid, "config": Training(quiet=True)}
    return model, search(model, log.part(0, 1000).stream(64), method, **(defaults | settings))
