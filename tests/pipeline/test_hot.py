"""Hot start: what it begins with, which rows it trains on, what it leaves."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from known_truth import TINY, known_truth

from lpfs.models import make_model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import plan_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.stages import SHRINK_FACTOR, evaluate_split, hot_start, reinitialized, shrink_and_perturb, train
from lpfs.pipeline.tell import Console
from lpfs.train.fit import fit


@pytest.fixture
def work(tmp_path):
    log = known_truth(tmp_path / "log", rows=1800)
    settings = Settings(keep=3, **TINY)
    return plan_run(settings, log, tmp_path / "run", False, Console(quiet=True))


@pytest.fixture
def pruned(work):
    """A model as a search may leave it."""
    torch.manual_seed(5)
    model = make_model("mlp", work.schema, **TINY["model_options"])
    optimizer = work.optimizer(model)
    fit(model, work.stream(work.parts.early, model.reads.names, train=True), optimizer, steps=100, quiet=True)
    return SimpleNamespace(model=model, optimizer=optimizer)


def states(model):
    return {name: each.clone() for name, each in model.state_dict().items()}


def same(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def trained_on(monkeypatch):
    """Write down which rows and which model the hot start trains."""
    real, calls = train, []

    def spy(work, model, optimizer, part, *rest):
        calls.append((part, states(model), copy.deepcopy(optimizer.state_dict())))
        return real(work, model, optimizer, part, *rest)

    monkeypatch.setattr(stages, "train", spy)
    return calls


def test_it_goes_on_with_a_copy_and_its_optimizer(work, pruned, monkeypatch):
    calls, before = trained_on(monkeypatch), states(pruned.model)
    model, watch = hot_start(work, pruned)
    part, began, state = calls[0]
    assert same(began, before)
    assert str(state) == str(pruned.optimizer.state_dict())
    assert same(states(pruned.model), before)
    assert part.span == work.parts.search.span  # the latest: these rows have an order
    assert watch.shrink_factor == 1.0
    assert watch.points[0] == (0, evaluate_split(work, pruned.model, work.parts.valid).auc)
    assert evaluate_split(work, model, work.parts.valid).auc == watch.best[1] >= watch.points[0][1]


def test_rows_that_nothing_orders_are_all_trained_on(work, pruned, monkeypatch):
    work.parts.train.settings = {**work.parts.train.settings, "options": {"shuffle": True}}
    assert work.parts.dealt
    calls = trained_on(monkeypatch)
    hot_start(work, pruned)
    assert calls[0][0].span == work.parts.train.span


def test_a_model_that_knows_its_rows_by_heart_is_shrunk(work, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)
    calls, before = trained_on(monkeypatch), states(pruned.model)
    model, watch = hot_start(work, pruned)
    part, began, _ = calls[0]
    fresh = states(reinitialized(work, pruned.model))
    assert all(
        torch.allclose(began[n], SHRINK_FACTOR * before[n] + (1 - SHRINK_FACTOR) * fresh[n]) for n in before
    )
    assert part.span == work.parts.train.span
    assert watch.shrink_factor == SHRINK_FACTOR
    assert same(states(pruned.model), before)
    start = evaluate_split(work, pruned.model, work.parts.valid).auc
    assert watch.points[0] == (0, start)
    assert evaluate_split(work, model, work.parts.valid).auc == watch.best[1] >= start


def test_a_shrunk_model_that_does_not_come_back_leaves_the_pruned_one(work, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)

    def ruined(work, model):
        model, optimizer = shrink_and_perturb(work, model)
        with torch.no_grad():
            model.top[-1].weight.mul_(-1000.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-9
        return model, optimizer

    monkeypatch.setattr(stages, "shrink_and_perturb", ruined)
    model, watch = hot_start(work, pruned)
    assert watch.best[0] == 0
    assert same(states(model), states(pruned.model))


def test_a_log_that_is_gone_through_once_is_never_known_by_heart(work, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)
    work.recipe = type(work.recipe)(**{**json.loads(json.dumps(work.recipe.to_json())), "shuffle": False})
    assert hot_start(work, pruned)[1].shrink_factor == 1.0
