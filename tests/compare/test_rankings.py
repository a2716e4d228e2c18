"""Every method is in METHODS as what it is: one search for every K, or one for each."""

from __future__ import annotations

import pytest
import torch
from known_truth import TINY, known_truth

import lpfs
from lpfs.errors import InputError, MissingPackageError
from lpfs.methods.registry import METHODS, each_keep, entry_of, options_of, settings_to_try
from lpfs.models import make_model


def test_what_only_some_settings_need():
    assert not each_keep("adafs", {})
    assert each_keep("adafs", {"hard": True})  # K is part of the network
    assert each_keep("lpfs++", {})


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log", rows=1200)


def scores(name, log, keep):
    torch.manual_seed(0)
    model = make_model("mlp", log.schema, **TINY["model_options"])
    early, late = log.split(0.8, 0.2)
    found = lpfs.search(model, early.stream(64), name, keep=keep, valid=late.stream(512), steps=60, seed=1)
    return found, found.made.get("scores")


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_that_is_searched_once_gives_the_same_scores_for_every_size(name, log):
    if entry_of(name).each_keep:
        pytest.skip("searches anew for every K")
    try:
        (few, first), (many, second) = scores(name, log, 2), scores(name, log, 4)
    except (InputError, MissingPackageError) as error:
        pytest.skip(str(error))  # not on this model, not on this data, not on this machine
    assert first == second, f"{name} depends on K: it needs each_keep=True in METHODS"
    assert set(few.kept) < set(many.kept), f"{name} does not cut its scores: it needs each_keep=True in METHODS"


@pytest.mark.parametrize("name", list(METHODS))
def test_what_is_tried_are_settings_that_there_are(name):
    found = settings_to_try(name, 9)
    assert found[0] == {}
    assert len({str(options_of(name, each)) for each in found}) == len(found)
