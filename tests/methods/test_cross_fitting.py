"""Cross-fitted gates: their gradient comes from networks that are blind to the rows it is computed on."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from lpfs._console import Console
from lpfs.data.simulate import simulate
from lpfs.errors import InputError, StateError
from lpfs.gates.attach import attach
from lpfs.methods.base import RowFold, SearchCost, SearchTask
from lpfs.methods.cross_fitting import FoldNetworks
from lpfs.methods.gate_search import GateSearch
from lpfs.methods.registry import make_method
from lpfs.methods.target import Costs, SelectionTarget
from lpfs.models import make_model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import build_plan
from lpfs.pipeline.settings import Settings
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import Stepper, bce_loss, make_optimizer
from tests.helpers.searches import assert_same_weights, without_time

STEPS, BATCH, FOLDS = 60, 32, 3
CONFIG = Training(quiet=True, steps=STEPS, checkpoint_every=10)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("folds") / "log", "small", rows=2000, seed=3)


def start(log):
    torch.manual_seed(0)
    model = make_model("mlp", log.schema, dim=4, hidden=(8,))
    optimizer = make_optimizer(Training(lr=0.05), model.parameters())
    fit(model, log.part(0, 500).stream(BATCH), optimizer, steps=10, quiet=True)
    return model, optimizer


def folds_of(log):
    return [
        RowFold(
            log.part(0, 600 + 100 * number).stream(BATCH), log.part(1000 + 100 * number, 1100 + 100 * number).stream(50)
        )
        for number in range(FOLDS)
    ]


def task_of(log, model, optimizer, **changes):
    values = {"target": SelectionTarget(keep=8), "folds": folds_of(log), "training": CONFIG} | changes
    valid = log.part(1500, 2000).stream(500)
    return SearchTask(model, optimizer, log.part(0, 1000).stream(BATCH), valid, steps=STEPS, **values)


def test_the_gradient_is_the_mean_over_networks_on_rows_they_are_blind_to(log):
    model, optimizer = start(log)
    networks = FoldNetworks(model, optimizer, folds_of(log), CONFIG, cost := SearchCost())
    gates = attach(model, steps=STEPS)
    networks.install(gates)
    with torch.no_grad():
        gates.x.copy_(torch.linspace(0.1, 1.0, len(gates.names)))
    before = [copy.deepcopy(network.model.state_dict()) for network in networks.networks]
    gradient = networks.gradient(gates, 0)
    expected = []
    for number, network in enumerate(networks.networks):
        batch = next(iter(log.part(1000 + 100 * number, 1100 + 100 * number).stream(50)))
        loss = bce_loss(network.model(batch)[:, None], batch.labels)
        expected.append(torch.autograd.grad(loss, [gates.x])[0])
    assert torch.equal(gradient, torch.stack(expected).mean(0))
    assert bool((gradient != 0).any())
    assert cost.forwards == cost.backwards == FOLDS * 50
    for network, state in zip(networks.networks, before, strict=True):  # the weights get no gradient
        assert all(torch.equal(state[name], value) for name, value in network.model.state_dict().items())
        assert all(parameter.requires_grad for parameter in network.model.parameters())


def test_a_network_is_trained_as_fit_trains_it(log):
    """The gates are constants of value one: the weights are those of a plain training, bit for bit."""
    model, optimizer = start(log)
    networks = FoldNetworks(model, optimizer, folds_of(log), CONFIG, SearchCost())
    plain, plain_optimizer = copy.deepcopy((model, optimizer))
    gates = attach(model, steps=STEPS)
    networks.install(gates)
    for step in range(5):
        networks.train(gates, step)
    assert gates.x.grad is None
    assert gates.x.requires_grad
    fit(plain, folds_of(log)[1].stream, plain_optimizer, steps=5, quiet=True)
    assert_same_weights(networks.networks[1].model, plain)


def test_the_model_of_the_search_gives_the_gates_no_gradient(log):
    """Whatever rows the model itself sees, the gates depend on the networks alone."""
    gates = []
    for rows in ((0, 1000), (500, 1500)):
        model, optimizer = start(log)
        task = task_of(log, model, optimizer)
        task.stream = log.part(*rows).stream(BATCH)
        selection = make_method("lpfs++", {"folds": FOLDS, "centre": False}).search(task)
        gates.append(selection.gates)
        assert selection.made["folds"] == FOLDS
        assert selection.history[-1]["holdout_loss"] > 0
    assert gates[0] == gates[1]


def test_a_killed_search_resumes_bit_for_bit(log, tmp_path, monkeypatch):
    def run(folder=None, resume=False):
        model, optimizer = start(log)
        found = make_method("lpfs++", {"folds": FOLDS}).search(
            task_of(log, model, optimizer, folder=folder, resume=resume, seed=4)
        )
        return model, found

    model, whole = run()
    count, taken = Stepper.count_step, []

    def dies(self, rows):
        count(self, rows)
        taken.append(rows)
        if len(taken) == 27 * (FOLDS + 1) + 2:  # between two networks of one step
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "count_step", dies)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    resumed, found = run(tmp_path / "run", resume=True)
    assert without_time(found) == without_time(whole)
    assert_same_weights(model, resumed)


@pytest.mark.parametrize("kind", ["budget", "max_auc_loss"])
def test_an_unknown_number_of_fields(log, kind):
    model, optimizer = start(log)
    costs = Costs(dict.fromkeys(model.sites(), 1.0))
    target = SelectionTarget(budget=9.0, costs=costs) if kind == "budget" else SelectionTarget(max_auc_loss=0.49)
    found = make_method("lpfs++", {"folds": FOLDS}).search(task_of(log, model, optimizer, target=target))
    assert 1 <= len(found.kept) <= (9 if kind == "budget" else len(costs.fields))


def test_wrong_settings_are_refused(log):
    for folds in (1, -2, 2.5):
        with pytest.raises(InputError, match="folds"):
            make_method("lpfs++", {"folds": folds})
    model, optimizer = start(log)
    attach(model, steps=STEPS)
    with pytest.raises(StateError, match="without gates"):
        make_method("lpfs++").search(task_of(log, model, optimizer))


def small_plan(log, folder, **options):
    settings = Settings(keep=8, device="cpu", pretrain_steps=20, search_steps=60, options=options)
    return build_plan(settings, log, Path(folder), Console(quiet=True))


def test_folds_of_a_table(log, tmp_path, monkeypatch):
    """Every search row is held out once, at random, and no network sees the rows that it judges."""
    plan = small_plan(log, tmp_path, folds=4)
    plan = plan.for_search(tmp_path, 0, options={"folds": 4})
    model, early = stages.new_model(plan, 0), plan.splits.early.rows
    assert plan.steps.separate_gate_rows
    folds = stages.search_folds(plan, model, 5, plan.method.folds)
    held = [fold.holdout.index for fold in folds]
    assert sorted(np.concatenate(held).tolist()) == list(range(early, plan.splits.train.rows))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for fold in folds:
        seen = set(fold.stream.index.tolist())
        assert seen | set(fold.holdout.index.tolist()) == set(range(plan.splits.train.rows))
        assert not seen & set(fold.holdout.index.tolist())
        assert len(np.unique(fold.holdout.index // (plan.splits.search.rows // 4))) > 1  # not consecutive rows
    assert stages.search_folds(plan, model, 5, 0) == []
    for limit in ("MAX_FOLD_ROW_BYTES", "MAX_FOLD_WEIGHT_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(stages, limit, 1000)
            assert stages.search_folds(plan, model, 5, plan.method.folds) == []


def test_gates_of_a_cross_fitted_search_are_absorbed_exactly(log, tmp_path):
    plan = small_plan(log, tmp_path)
    plan = plan.for_search(tmp_path, 0, options={"folds": 2})
    model, optimizer, found = stages.search_fields(plan, stages.pretrain(plan, 0), 0)
    assert found.made["folds"] == 2
    batch = next(iter(plan.stream(plan.splits.valid, log.schema.names, train=False)))
    model.eval()
    with torch.no_grad():
        before = model(batch)
    zeros, _, selection = stages.absorb_and_prune(plan, model, optimizer, found)
    with torch.no_grad():
        absorbed = model(batch)
        pruned = zeros.model.eval()(batch.select(log.schema, zeros.model.reads.names))
    assert torch.equal(pruned, absorbed)
    torch.testing.assert_close(absorbed, before)  # the gates of numbers and bags go into weights, which rounds
    assert str(zeros.certificate).startswith("certified: max |Δlogit| 0 ")
    assert len(selection.kept) == 8


def test_a_search_without_folds_has_no_networks(log):
    model, _ = start(log)
    gates = attach(model, steps=STEPS)
    assert GateSearch(gates, gates.optimizer(keep=2)).networks is None
