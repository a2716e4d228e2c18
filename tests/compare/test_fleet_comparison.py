from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lpfs
from lpfs import cli
from lpfs._fileio import read_json
from lpfs.compare import runner
from lpfs.compare.run_dir import ResultStore
from lpfs.errors import InputError, NonFiniteError, SearchError
from lpfs.methods import gate_fleet
from lpfs.methods.gate_fleet import GateFleet
from lpfs.methods.lpfs import LPFSPlusPlus
from lpfs.pipeline import plan as plan_module, stages
from lpfs.train.callbacks import Callback
from lpfs.train.fit_fleet import fit_fleet
from tests.helpers.comparisons import PLAN, QUICK, TINY, read_results


@pytest.mark.long
def test_a_fleet_gives_the_results_of_single_runs(log, compared, tmp_path, monkeypatch):
    trained = []

    def record(models, *args, **options):
        trained.extend(models)
        return fit_fleet(models, *args, **options)

    monkeypatch.setattr(stages, "fit_fleet", record)
    assert cli.run(["compare", str(log), *PLAN, *TINY, "--fleet", "--out", str(tmp_path / "cmp"), "-q"]) == 0
    assert len(trained) > 6
    results, expected = read_results(tmp_path / "cmp"), read_results(compared)
    for result, other in zip(results, expected, strict=True):
        assert {name: result[name] for name in ("method", "keep", "seed", "kept", "trained")} == {
            name: other[name] for name in ("method", "keep", "seed", "kept", "trained")
        }
        for rows in ("test", "validation"):
            assert result[rows]["logloss"] == pytest.approx(other[rows]["logloss"], abs=1e-4)
            assert result[rows]["auc"] == pytest.approx(other[rows]["auc"], abs=1e-3)
    assert not list((tmp_path / "cmp" / "work").iterdir())


def log_fields(log):
    return lpfs.Dataset(log).schema.names


class Interrupt(Callback):
    def after_step(self, state):
        if state.step == 12:
            raise KeyboardInterrupt


@pytest.mark.long
def test_an_interrupted_fleet_is_resumed(log, tmp_path, monkeypatch):
    options = {"methods": ["permutation"], "keep": [4, 8], "seeds": 1, "fleet": True, **QUICK}
    lpfs.compare(log, tmp_path / "whole", **options)
    steps = []
    with monkeypatch.context() as patch:
        patch.setattr(stages, "fit_fleet", lambda *args, **kw: fit_fleet(*args, callbacks=[Interrupt()], **kw))
        with pytest.raises(KeyboardInterrupt):
            lpfs.compare(log, tmp_path / "cmp", **options)
    assert list((tmp_path / "cmp" / "work").glob("fleet-*"))

    class Count(Callback):
        def after_step(self, state):
            steps.append(state.step)

    # the callbacks of a run are part of its checkpoints: continue with one of the same class
    Count.__name__ = "Interrupt"
    monkeypatch.setattr(stages, "fit_fleet", lambda *args, **kw: fit_fleet(*args, callbacks=[Count()], **kw))
    lpfs.compare(log, tmp_path / "cmp", **options)
    assert steps
    assert read_results(tmp_path / "cmp") == read_results(tmp_path / "whole")


@pytest.mark.long
def test_a_killed_fleet_of_searches_is_resumed(log, tmp_path, monkeypatch):
    """Also if a method is added that has its own searches."""
    options = {"methods": ["lpfs++", "lpfs"], "keep": [4, 8], "seeds": 2, "fleet": True, **QUICK}
    lpfs.compare(log, tmp_path / "whole", **options)
    within_step, steps = GateFleet.within_step, []

    def update(self, state):
        steps.append(state.step)
        if len(steps) == 30:
            raise KeyboardInterrupt
        within_step(self, state)

    monkeypatch.setattr(GateFleet, "within_step", update)
    with pytest.raises(KeyboardInterrupt):
        lpfs.compare(log, tmp_path / "cmp", **options)
    (killed,) = (tmp_path / "cmp" / "work").glob("fleet-*")
    assert len(read_json(killed / "members.json")["members"]) == 8
    lpfs.compare(log, tmp_path / "cmp", **{**options, "methods": ["lpfs++", "lpfs", "permutation"]})
    assert len(steps) == 30 + 50  # a search of so few steps has no checkpoint but the last one
    results = [result for result in read_results(tmp_path / "cmp") if result["method"] != "permutation"]
    expected = read_results(tmp_path / "whole")
    names = ("method", "keep", "seed", "status", "kept")
    assert [[result[name] for name in names] for result in results] == [
        [result[name] for name in names] for result in expected
    ]
    assert not list((tmp_path / "cmp" / "work").iterdir())


@pytest.mark.long
def test_searches_that_fail_together_are_done_one_by_one(log, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise SearchError("not all gates are clear of zero")

    monkeypatch.setattr(gate_fleet, "fit_fleet", fail)
    options = {"methods": ["lpfs++"], "keep": [4, 8], "seeds": 1, "fleet": True, **QUICK, "quiet": False}
    comparison = lpfs.compare(log, tmp_path / "cmp", **options)
    assert {result["status"] for result in comparison.results} == {"done"}
    output = capsys.readouterr()
    assert "searches are done one by one: not all gates are clear of zero" in output.err + output.out


@pytest.mark.long
def test_a_search_that_cannot_start_does_not_stop_the_others(log, tmp_path):
    options = {"methods": ["lpfs++", "lpfs"], "keep": [4, 8], "seeds": 1, "fleet": True, **QUICK}
    check = LPFSPlusPlus.check

    def refuse(self, target, names, steps):
        if self.name == "lpfs" and target.keep == 8:
            raise InputError("refused")
        check(self, target, names, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LPFSPlusPlus, "check", refuse)
        comparison = lpfs.compare(log, tmp_path / "cmp", must_keep=log_fields(log)[-2:], **options)
    assert all(set(log_fields(log)[-2:]) <= set(result["kept"]) for result in comparison.results if "kept" in result)
    failed = [(result["method"], result["keep"]) for result in comparison.results if result["status"] == "failed"]
    assert failed == [("lpfs", 8)]


@pytest.mark.long
def test_models_that_cannot_be_stacked_are_trained_one_by_one(log, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_module, "supports_fleet", lambda model: False)
    options = {"methods": ["permutation"], "keep": [4], "seeds": 1, "fleet": True, **QUICK, "quiet": False}
    comparison = lpfs.compare(log, tmp_path / "cmp", **options)
    assert {result["status"] for result in comparison.results} == {"done"}
    output = capsys.readouterr()
    assert "cannot be trained together" in output.err + output.out


@pytest.mark.long
def test_a_fleet_that_fails_leaves_the_runs_to_single_training(log, tmp_path, monkeypatch, capsys):
    def fail(*args, **options):
        raise NonFiniteError("the loss is not finite")

    monkeypatch.setattr(stages, "fit_fleet", fail)
    options = {"methods": ["permutation"], "keep": [4], "seeds": 1, "fleet": True, **QUICK, "quiet": False}
    comparison = lpfs.compare(log, tmp_path / "cmp", **options)
    assert {result["status"] for result in comparison.results} == {"done"}
    output = capsys.readouterr()
    assert "trained one by one: the loss is not finite" in output.err + output.out


@pytest.mark.long
def test_searches_are_counted_and_a_killed_fleet_is_resumed_as_it_was(log, tmp_path, monkeypatch, capsys):
    """A method that is added later, or by another process, does not change the fleet that was killed."""
    options = {"keep": [4, 8], "seeds": 1, "fleet": True, **QUICK, "quiet": False}
    with monkeypatch.context() as patch:
        patch.setattr(stages, "fit_fleet", lambda *args, **kw: fit_fleet(*args, callbacks=[Interrupt()], **kw))
        with pytest.raises(KeyboardInterrupt):
            lpfs.compare(log, tmp_path / "cmp", methods=["permutation"], **options)
    output = capsys.readouterr()
    assert "[1/1] search with permutation, keep 4, seed 0: fields found" in output.err + output.out
    (killed,) = (tmp_path / "cmp" / "work").glob("fleet-*")
    folders = []

    def record(models, *args, **keywords):
        folders.append((keywords["folder"].name, len(models)))
        return fit_fleet(models, *args, callbacks=[] if len(folders) > 1 else [Nothing()], **keywords)

    class Nothing(Callback):
        pass

    Nothing.__name__ = "Interrupt"
    monkeypatch.setattr(stages, "fit_fleet", record)
    comparison = lpfs.compare(log, tmp_path / "cmp", methods=["permutation", "random"], **options)
    assert folders[0] == (killed.name, 3)  # two sizes, and all fields
    assert [count for _, count in folders[1:]] == [2]
    assert {result["status"] for result in comparison.results} == {"done"}
    output = capsys.readouterr()
    assert "[2/2] search with random" in output.err + output.out
    assert "trained " in output.err + output.out  # the progress of the fleet


@pytest.mark.long
def test_searches_of_other_processes_are_waited_for(log, tmp_path, monkeypatch):
    """Nothing of them is trained one by one."""
    options = {"methods": ["permutation"], "keep": [4, 8], "seeds": 1, "fleet": True, **QUICK}
    lock = ResultStore(tmp_path / "cmp").lock("search-permutation-s0")
    lock.__enter__()
    waits = []

    def end_of_the_other_search(seconds):
        waits.append(seconds)
        lock.__exit__(None, None, None)

    monkeypatch.setattr(runner.time, "sleep", end_of_the_other_search)
    monkeypatch.setattr(runner.Runner, "from_scratch", None)
    sizes = []

    def record(models, *args, **keywords):
        sizes.append(len(models))
        return fit_fleet(models, *args, **keywords)

    monkeypatch.setattr(stages, "fit_fleet", record)
    comparison = lpfs.compare(log, tmp_path / "cmp", **{**options, "seeds": 2})
    assert waits
    assert {result["status"] for result in comparison.results} == {"done"}
    assert sum(sizes) == 2 + 6  # models of all fields to search from, and those of the kept fields


@pytest.mark.parametrize(
    ("device", "batch_size", "supported", "fleet", "expected"),
    [
        ("cuda", 1024, True, None, True),
        ("cuda", 64, False, None, False),
        ("cpu", 256, True, None, True),
        ("cpu", 257, True, None, False),
        ("cpu", 257, True, True, True),
        ("cuda", 64, True, False, False),
    ],
)
def test_a_fleet_is_the_default_where_it_is_faster(
    log, tmp_path, monkeypatch, device, batch_size, supported, fleet, expected
):
    asked = []
    monkeypatch.setattr(plan_module, "supports_fleet", lambda model: supported)
    build = runner.build_plan
    monkeypatch.setattr(
        runner, "build_plan", lambda *args, **kw: replace(build(*args, **kw), device=torch.device(device))
    )
    monkeypatch.setattr(runner, "run_missing", lambda *args, **options: asked.append(options["fleet"]))
    options = {**QUICK, "batch_size": batch_size}
    lpfs.compare(log, tmp_path / "cmp", methods=["permutation"], keep=[4], seeds=1, fleet=fleet, **options)
    assert asked == [expected]
