"""Masks on a GPU, eager and captured as CUDA graphs; skipped without one. Needs only pytest, torch and numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "train"))

from lpfs.methods.base import SearchCost
from lpfs.methods.masks import NAME
from lpfs.methods.registry import METHODS as REGISTERED, make_method
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import GraphStepper, make_optimizer
from tests.helpers.known_truth import SMALL, STRONG, known_truth
from tests.helpers.searches import killed_after

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

METHODS = [
    "shufflegate",
    "autofield",
    "adafs",
    "optfs",
    "fscd",
    "stg",
    "hard_concrete",
    "variational_dropout",
    "cold_se",
]
# ShuffleGate: λ of the public code is 0.1 on the mean over nine fields; the default, for more fields, cannot tell weak
# from strong. AutoField: 30 updates in 300 steps do not tell them apart for every seed; more and smaller ones do.
OPTIONS = {"shufflegate": {"strength": 0.01}, "autofield": {"every": 1, "lr": 0.0003}}

CASES = [(method, name) for method in METHODS for name in ("mlp", "wide_deep")]
CASES += [(method, "user_item") for method in METHODS if method not in ("adafs", "cold_se")]
GATES = ("lpfs", "lpfs++", "lpfs_paper", "lpfs++_paper")  # see tests/pipeline/test_stages.py
CAPTURED = sorted({name for name in REGISTERED if make_method(name).cuda_graph} - {*GATES})


@pytest.mark.parametrize(("method", "name"), CASES)
def test_masks_are_trained_on_a_gpu(tmp_path, method, name):
    log = known_truth(tmp_path / "log", rows=9000)
    torch.manual_seed(0)
    model = make_model(name, log.schema, **SMALL).cuda()
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    rows, valid = log.part(0, 7500), log.part(7500, 9000)
    fit(model, rows.stream(64, device="cuda"), optimizer, steps=20, quiet=True)
    how = {"valid": valid.stream(4096, device="cuda"), "optimizer": optimizer, "config": Training(quiet=True)}
    how |= OPTIONS.get(method, {})
    found = search(model, rows.stream(64, shuffle=True, device="cuda"), method, keep=3, steps=300, **how)
    assert not hasattr(model, NAME)
    assert set(found.made["scores"]) == set(log.schema.names)
    assert method in ("adafs", "cold_se", "optfs") or set(STRONG) <= set(found.kept)
    assert all(parameter.is_cuda for parameter in model.parameters())


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log", rows=9000)


@pytest.fixture
def captures(monkeypatch):
    """The variants of steps that were captured."""
    counted = []
    capture = GraphStepper._capture

    def count(self, batch, position):
        counted.append(tuple(callback.variant(self.state) for callback in self.callbacks))
        return capture(self, batch, position)

    monkeypatch.setattr(GraphStepper, "_capture", count)
    return counted


def run_search(log, method, *, graph, holdout=False, optimizer="sgd", steps=60, **settings):
    """Search; SGD, because Adagrad amplifies rounding at the start."""
    names = [field.name for field in log.schema]
    torch.manual_seed(0)
    name = "dlrm_cross" if method == "autofis" else "mlp"
    model = make_model(name, log.schema.subset(names), **SMALL).cuda()
    config = Training(lr=0.05, optimizer=optimizer, quiet=True)
    trained = make_optimizer(config, model.parameters())
    rows = {"fields": names, "device": "cuda"}
    fit(model, log.part(0, 6000).stream(64, **rows), trained, steps=20, quiet=True)
    settings["valid"] = log.part(7500, 9000).stream(4096, **rows)
    if holdout:
        settings["holdout"] = log.part(6000, 7480).stream(64, shuffle=True, seed=5, **rows)  # its last batch is smaller
    stream = log.part(0, 6000).stream(64, shuffle=True, **rows)
    config = Training(quiet=True, graph=graph, checkpoint_every=10)
    options = {"optimizer": trained, "keep": 2, "steps": steps, "config": config, **settings}
    return model, search(model, stream, method, **{**OPTIONS.get(method, {}), **options})


@pytest.mark.parametrize("holdout", [False, True], ids=["same-rows", "holdout"])
@pytest.mark.parametrize("method", CAPTURED)
def test_captured_search_is_the_eager_one(log, captures, method, holdout):
    """Random numbers are the same, so scores agree until rounding errors have grown."""
    _, eager = run_search(log, method, graph=False, holdout=holdout)
    assert not captures
    _, captured = run_search(log, method, graph=True, holdout=holdout)
    assert captures
    assert captured.made["forwards"] == eager.made["forwards"]
    if method == "subset_elimination":  # its scores are ranks
        assert captured.kept == eager.kept
        return
    eager_scores, captured_scores = (found.made["scores"] for found in (eager, captured))
    scale = max(abs(score) for score in eager_scores.values())
    differences = {name: abs(score - eager_scores[name]) / scale for name, score in captured_scores.items()}
    assert max(differences.values()) < 0.02, differences
    assert captured.history[-1]["loss"] == pytest.approx(eager.history[-1]["loss"], rel=1e-3)


def test_steps_with_and_without_an_update_have_graphs_of_their_own(log, captures):
    run_search(log, "autofield", graph=True, every=5)
    assert {True, False} == {variant[1] for variant in captures}
    assert len(captures) <= 4  # each at most once more, after the holdout rows have got their memory


@pytest.mark.parametrize("method", CAPTURED)
def test_captured_search_resumes(log, tmp_path, method):
    whole_model, whole = run_search(log, method, graph=True, folder=tmp_path / "whole")
    with killed_after(SearchCost, 33):
        run_search(log, method, graph=True, folder=tmp_path / "killed")
    torch.manual_seed(1)
    model, resumed = run_search(log, method, graph=True, folder=tmp_path / "killed", resume=True)
    assert resumed.kept == whole.kept
    for weight, expected in zip(model.parameters(), whole_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
    assert resumed.made["scores"] == pytest.approx(whole.made["scores"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("method", ["shufflegate", "stg", "hard_concrete", "group_lasso", "umec", "fscd"])
def test_captured_search_finds_the_strong_fields(log, method):
    _, found = run_search(log, method, graph=True, optimizer="adagrad", steps=300)
    assert set(found.kept) == set(STRONG)
