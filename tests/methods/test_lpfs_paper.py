"""LPFS and LPFS++ as the paper writes them."""

from __future__ import annotations

import pytest
import torch

from lpfs.gates.functions import gate_function
from lpfs.methods.lpfs_paper import LPFSPlusPlusPaperOptions, paper_schedule
from lpfs.methods.registry import make_method


@pytest.mark.parametrize(("name", "lr"), [("lpfs++", 0.01), ("lpfs", 0.005)])
def test_the_curves_are_those_of_the_paper_over_the_steps_of_a_search(name, lr):
    schedule = paper_schedule(gate_function(name), 10_000, 1e-5)
    assert schedule.epsilon(0) == pytest.approx(0.1)
    assert schedule.epsilon(10_000) == pytest.approx(1e-5)
    assert schedule.epsilon(5000) == pytest.approx(1e-3, rel=0.01)  # exponential
    assert schedule.lr(0) == pytest.approx(lr)
    assert schedule.lr(10_000) == pytest.approx(lr * 0.05)
    short = paper_schedule(gate_function(name), 1000, 1e-4)
    assert short.epsilon(1000) == pytest.approx(1e-4)
    assert short.total_lr(1000) == pytest.approx(schedule.total_lr(10_000), rel=0.01)


def test_an_absolute_schedule_is_used_as_it_is():
    options = LPFSPlusPlusPaperOptions(schedule="terabyte")
    assert options.for_steps(1000) == options
    written = LPFSPlusPlusPaperOptions(final_epsilon=1e-4).for_steps(1000)
    assert written.schedule.epsilon(1000) == pytest.approx(1e-4)


@pytest.mark.parametrize("name", ["lpfs++_paper", "lpfs_paper"])
def test_what_is_as_written(name):
    method = make_method(name)
    options = method.options
    assert (options.rescale, options.prox, options.centre, options.final_epsilon) == ("off", "l1", False, 1e-5)
    assert options.function.name == name.removesuffix("_paper")
    assert method.single_pass  # one pass, gates on the rows of the weights
    assert not make_method(name.removesuffix("_paper")).single_pass


def test_embeddings_are_not_centered_and_gates_are_found(run_search, pretrained, monkeypatch):
    calls = []
    monkeypatch.setattr("lpfs.methods.lpfs.center_embeddings", lambda *_: calls.append(1))
    model, found = run_search("lpfs++_paper", keep=3, steps=150)
    assert not calls
    assert len(found.kept) == 3
    assert found.made["method"] == "lpfs++_paper"
    assert found.history[-1]["epsilon"] == pytest.approx(1e-5, rel=0.01)
    assert torch.equal(model.lpfs_gates.x != 0, torch.tensor([n in found.kept for n in model.lpfs_gates.names]))
    run_search("lpfs++", keep=3, steps=60)
    assert calls
