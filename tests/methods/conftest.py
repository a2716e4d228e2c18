from __future__ import annotations

import copy

import pytest
import torch

from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer
from tests.helpers.known_truth import SMALL, known_truth

QUIET = Training(quiet=True, checkpoint_every=25)


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log")


@pytest.fixture(scope="session")
def pretrained(log):
    """Returns a model and its optimizer by the name of the model, trained a little, always the same."""
    cached = {}

    def get(name):
        if name not in cached:
            torch.manual_seed(0)
            model = make_model(name, log.schema, **{k: v for k, v in SMALL.items() if name != "fm" or k == "dim"})
            optimizer = make_optimizer(Training(lr=0.05), model.parameters())
            fit(model, log.part(0, 1000).stream(64, shuffle=True), optimizer, steps=200, quiet=True)
            cached[name] = model, optimizer
        return copy.deepcopy(cached[name])

    return get


@pytest.fixture(scope="session")
def run_search(log, pretrained):
    """Searches with a method on the log; returns the model and the Selection."""

    def run(method, backbone="mlp", steps=100, **settings):
        model, optimizer = pretrained(backbone)
        defaults = {"optimizer": optimizer, "valid": log.part(1000, 1200).stream(4096), "config": QUIET}
        stream = log.part(0, 1000).stream(64, shuffle=True)
        return model, search(model, stream, method, steps=steps, **{**defaults, **settings})

    return run
