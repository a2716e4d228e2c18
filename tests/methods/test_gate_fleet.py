"""Gate searches that are trained together, against single ones."""

from __future__ import annotations

import copy

import pytest
import torch

from lpfs.data.simulate import simulate
from lpfs.errors import InputError
from lpfs.gates import host
from lpfs.gates.functions import FUNCTIONS
from lpfs.methods import gate_fleet
from lpfs.methods.base import RowFold, SearchTask
from lpfs.methods.gate_fleet import GateFleet, search_together
from lpfs.methods.lpfs import LPFSPlusPlus
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.fit_fleet import fit_fleet
from lpfs.train.step import make_optimizer
from tests.helpers import recorded_graph
from tests.helpers.searches import assert_same_weights, killed_after

STEPS, RMS = 120, {"rescale": "rms"}
SIZES = [(0, 4), (0, 9), (1, 4), (1, 20)]  # seed and K of every search
STACKED = {"mlp": {"hidden": (8,)}, "wide_deep": {"hidden": (8,)}, "fm": {}, "deepfm": {"hidden": (8,)}}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return simulate(tmp_path_factory.mktemp("fleet") / "log", "small", rows=2000, seed=3)


def pretrained(log, seed, backbone="mlp", optimizer="adagrad", dtype=torch.float64, fields=None, **options):
    torch.manual_seed(seed)
    model = make_model(
        backbone, log.schema.subset(fields or log.schema.names), dim=4, **(STACKED.get(backbone, {}) | options)
    ).to(dtype)
    trained = make_optimizer(Training(lr=0.05, optimizer=optimizer), model.parameters())
    stream = log.part(0, 1000).stream(64, shuffle=True, seed=seed, fields=fields)
    fit(model, stream, trained, steps=20, quiet=True)
    return model, trained


def task_of(log, seed, keep, start, *, holdout=True, judges=0, must_keep=(), folder=None, **training):
    model, optimizer = copy.deepcopy(start)
    rows = {"shuffle": True, "fields": model.reads.names}
    training = {"quiet": True, "checkpoint_every": 20, **training}
    parts = [(1000 + 250 * number, 1250 + 250 * number) for number in range(judges)]
    folds = [RowFold(log.part(*part).stream(32), log.part(*part).stream(100)) for part in parts]
    held = log.part(1000, 1800).stream(96, seed=seed + 9, **rows) if holdout else None  # its last batch is smaller
    return SearchTask(
        *(model, optimizer, log.part(0, 1000).stream(64, seed=seed, **rows), None),
        *(SelectionTarget(keep=keep, must_keep=must_keep), STEPS, seed, folder),
        training=Training(**training),
        holdout=held,
        judges=folds,
    )


def tasks_of(log, sizes=SIZES, backbone="mlp", optimizer="adagrad", model_options=None, **options):
    starts = {
        seed: pretrained(log, seed, backbone, optimizer, **(model_options or {})) for seed in {s for s, _ in sizes}
    }
    return [task_of(log, seed, keep, starts[seed], optimizer=optimizer, **options) for seed, keep in sizes]


def assert_same_search(ours, theirs, tolerance):
    assert ours.kept == theirs.kept
    assert list(ours.gates.values()) == pytest.approx(list(theirs.gates.values()), rel=tolerance, abs=tolerance)
    assert {name: ours.made[name] for name in ("forwards", "backwards", "keep", "seed", "steps")} == {
        name: theirs.made[name] for name in ("forwards", "backwards", "keep", "seed", "steps")
    }
    for record, expected in zip(ours.history, theirs.history, strict=True):
        for name in ("step", "alive", "penalty", "epsilon", "lr", "gates"):
            assert record[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), (record["step"], name)


@pytest.mark.parametrize("holdout", [True, False])
@pytest.mark.parametrize(
    ("method", "options"),
    [("lpfs++", {}), *(pytest.param(*pair, marks=pytest.mark.long) for pair in (("lpfs", {}), ("lpfs++", RMS)))],
)
def test_searches_of_several_k_and_seeds_equal_single_ones(log, method, options, holdout):
    chosen = make_method(method, options)
    tasks, others = (tasks_of(log, holdout=holdout) for _ in range(2))
    together = search_together([chosen] * len(tasks), tasks)
    for found, task, other, (_, keep) in zip(together, tasks, others, SIZES, strict=True):
        expected = chosen.search(other)
        assert len(found.kept) == keep
        assert_same_search(found, expected, 1e-4)
        batch = next(iter(log.part(1500, 2000).stream(500)))
        with torch.no_grad():  # the factors are still on the model
            torch.testing.assert_close(task.model(batch), other.model(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("backbone", [*STACKED, "dcnv2", "dlrm"])
def test_every_backbone_of_a_fleet(log, backbone):
    options = {"optimizer": "sgd", "backbone": backbone}
    tasks, others = (tasks_of(log, SIZES[1:3], **options) for _ in range(2))
    for found, other in zip(search_together([make_method("lpfs++")] * 2, tasks), others, strict=True):
        assert_same_search(found, make_method("lpfs++").search(other), 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("gate", FUNCTIONS)
def test_every_gate_function(log, gate):
    methods = [make_method("lpfs++", {"gate": gate}), make_method("lpfs")]  # two methods in one fleet
    tasks, others = (tasks_of(log, SIZES[1:3]) for _ in range(2))
    for found, method, other in zip(search_together(methods, tasks), methods, others, strict=True):
        assert_same_search(found, method.search(other), 1e-3)


def test_must_keep_and_judges(log, tmp_path):
    names = log.schema.names[-2:]
    options = {"must_keep": names, "judges": 2, "model_options": {"dtype": torch.float32}, "optimizer": "sgd"}
    tasks, others = (tasks_of(log, SIZES[:2], **options) for _ in range(2))
    methods = [make_method("lpfs++", {"judges": 2})] * 2
    for found, method, other in zip(search_together(methods, tasks), methods, others, strict=True):
        expected = method.search(other)
        assert set(names) <= set(found.kept)
        assert (found.kept, found.made["exchanged"]) == (expected.kept, expected.made["exchanged"])
        assert found.made["forwards"] == expected.made["forwards"]


@pytest.mark.parametrize("stop", [7, *(pytest.param(stop, marks=pytest.mark.long) for stop in (50, 119))])
def test_a_killed_fleet_resumes_bit_for_bit(log, tmp_path, stop):
    methods = [make_method("lpfs++")] * len(SIZES)
    whole_tasks, killed_tasks, tasks = (tasks_of(log, model_options={"dtype": torch.float32}) for _ in range(3))
    whole = search_together(methods, whole_tasks, tmp_path / "whole")
    with killed_after(GateFleet, stop):
        search_together(methods, killed_tasks, tmp_path / "killed")
    for found in (search_together(methods, tasks, tmp_path / "killed", resume=True), whole):
        for ours, theirs, task, other in zip(found, whole, tasks, whole_tasks, strict=True):
            assert (ours.kept, ours.gates) == (theirs.kept, theirs.gates)
            assert [record["gates"] for record in ours.history] == [record["gates"] for record in theirs.history]
            assert ours.made["forwards"] == theirs.made["forwards"]
            assert_same_weights(task.model, other.model)
    ended = tasks_of(log, model_options={"dtype": torch.float32})
    again = search_together(methods, ended, tmp_path / "killed", resume=True)  # a finished fleet
    assert [found.gates for found in again] == [found.gates for found in whole]
    assert [found.made["forwards"] for found in again] == [found.made["forwards"] for found in whole]


@pytest.mark.long
def test_a_fleet_that_does_not_fit_into_memory_is_trained_in_rounds(log, tmp_path, monkeypatch):
    methods = [make_method("lpfs++")] * len(SIZES)
    whole = search_together(methods, tasks_of(log))
    monkeypatch.setattr(gate_fleet, "fit_fleet", lambda *args, **options: fit_fleet(*args, memory=2_000_000, **options))
    with killed_after(GateFleet, 30):
        search_together(methods, tasks_of(log), tmp_path)
    found = search_together(methods, tasks_of(log), tmp_path, resume=True)
    assert (tmp_path / "round-001").exists()
    for ours, theirs in zip(found, whole, strict=True):
        assert_same_search(ours, theirs, 1e-6)


@pytest.mark.parametrize("holdout", [True, False])
def test_a_captured_fleet_is_the_eager_one(log, monkeypatch, holdout):
    """The operations of a GPU, which read no value and allocate the same memory in every step."""
    recorded_graph.install(monkeypatch)
    monkeypatch.setattr(host, "is_plain", lambda x: False)
    replays, replay, start = [], recorded_graph.RecordedGraph.replay, LPFSPlusPlus.start

    def start_on_device(self, task, cost):
        search, copies = start(self, task, cost)
        search.gates._device_ops = search.prox.param_groups[0]["capturable"] = True
        return search, copies

    def count(self):
        replays.append(len(self.calls))
        replay(self)

    monkeypatch.setattr(LPFSPlusPlus, "start", start_on_device)
    monkeypatch.setattr(recorded_graph.RecordedGraph, "replay", count)
    fields = [field.name for field in log.schema if field.kind != "multi"]
    options = {"optimizer": "sgd", "holdout": holdout, "model_options": {"dtype": torch.float32, "fields": fields}}
    methods = [make_method("lpfs++"), make_method("lpfs", {"rescale": "rms"})]
    eager, captured = (
        search_together(methods, tasks_of(log, SIZES[1:3], graph=graph, **options)) for graph in (False, True)
    )
    assert len(replays) > STEPS // 2
    for ours, theirs in zip(captured, eager, strict=True):
        assert_same_search(ours, theirs, 1e-3)


def test_what_cannot_be_trained_together_is_an_error(log):
    tasks = tasks_of(log, SIZES[:2])
    assert make_method("lpfs").fleet
    assert not make_method("lpfs++_paper").fleet
    assert not make_method("lpfs++", {"folds": 2}).fleet
    tasks[1].target = SelectionTarget(max_auc_loss=0.1)
    tasks[1].valid = log.part(1800, 2000).stream(100)
    with pytest.raises(InputError, match="only searches for a given number of fields"):
        search_together([make_method("lpfs++")] * 2, tasks)
    tasks = tasks_of(log, SIZES[:2])
    with pytest.raises(InputError, match="methods whose ``fleet`` is true"):
        search_together([make_method("lpfs++"), make_method("lpfs++_paper")], tasks)
    tasks = tasks_of(log, [(0, 4), (1, 4)])
    tasks[1].holdout = None
    with pytest.raises(InputError, match="rows of their own for the gates in all or in none"):
        search_together([make_method("lpfs++")] * 2, tasks)
    (task,) = tasks_of(log, [(0, 40)])
    with pytest.raises(InputError, match="keep must be between 1 and the 31 fields, found 40"):
        search_together([make_method("lpfs++")], [task])
    tasks = tasks_of(log, SIZES[:2])
    tasks[1].optimizer = make_optimizer(Training(optimizer="sgd"), tasks[1].model.parameters())
    with pytest.raises(InputError, match="must be those of the settings, 'adagrad'"):
        search_together([make_method("lpfs++")] * 2, tasks)
