"""Whole runs of select on small logs: every backbone, every target, resuming, and what a run reads and writes."""

from __future__ import annotations

import json
import random
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import polars as pl
import pytest
import torch

import lpfs
from lpfs._console import Console
from lpfs._fileio import read_json
from lpfs.data.dataset import Dataset
from lpfs.errors import DataError, FieldError, InputError
from lpfs.methods.gate_fleet import GateFleet
from lpfs.models import MODELS, make_model, registered_name
from lpfs.pipeline import data as data_module, plan as plan_module, select as select_module, stages
from lpfs.pipeline.allowance import Allowance
from lpfs.pipeline.plan import make_target
from lpfs.pipeline.results import steps_saved
from lpfs.pipeline.select import select
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import split_dataset
from lpfs.pipeline.verdict import format_auc
from lpfs.report import report
from lpfs.schema import Selection
from lpfs.serialization import load, save
from lpfs.train.fleet import Fleet
from lpfs.train.step import Stepper
from tests.helpers.known_truth import FIELDS, STRONG, TINY, known_truth

NAMES = tuple(field.name for field in FIELDS)
ROWS = 3000
# Parts of a record that do not depend on the clock.
COMPARED = ("kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "model", "made", "hot_start")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log", rows=ROWS)


@pytest.fixture(scope="module")
def kept_three(log, tmp_path_factory):
    return select(log, tmp_path_factory.mktemp("three") / "run", keep=3, device="cpu", **TINY, quiet=True)


def read_record(outcome):
    record = read_json(outcome.folder / "selection.json", allow_nan=True)
    assert set(record.pop("files")) <= {"history.parquet", "kept_fields.txt"}
    return record


def comparable(outcome):
    record = read_record(outcome)
    record["made"].pop("seconds")
    return {name: record.get(name) for name in COMPARED}


def mark_long(values, fast):
    """Return the values as parameters; those that are not ``fast`` are marked as long."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.long) for value in values]


def is_ordered(names):
    return list(names) == sorted(names, key=NAMES.index)


def test_record_of_a_run(kept_three, log):
    record = read_record(kept_three)
    assert set(record) == {
        *("method", "fields", "kept", "dropped", "gates", "metrics", "validation", "max_logit_change"),
        *("certificates", "model", "chosen_in", "savings", "seconds", "seed", "configuration", "steps", "splits"),
        *("fingerprint", "versions", "sites", "made", "hot_start", "warnings", "verdict"),
    }
    assert record["kept"] == list(kept_three.kept)
    assert set(STRONG) < set(record["kept"])
    assert len(record["kept"]) == 3
    assert set(record["kept"]) | set(record["dropped"]) == set(NAMES)
    assert all(is_ordered(record[name]) for name in ("kept", "dropped", "gates"))
    assert (kept_three.folder / "kept_fields.txt").read_text().split() == record["kept"]
    assert all((record["gates"][name] == 0.0) == (name in record["dropped"]) for name in NAMES)
    assert list(record["metrics"]) == ["all_fields", "gated", "pruned", "hot_start", "retrained"]
    keys = {"auc", "logloss", "auc_low", "auc_high", "rows", "positives"}
    assert all(scores.keys() == keys for name in ("metrics", "validation") for scores in record[name].values())
    assert all(scores["auc_low"] < scores["auc"] < scores["auc_high"] for scores in record["metrics"].values())
    assert all(0.6 < scores["auc"] <= 1 for scores in record["metrics"].values())
    assert (record["method"], record["seed"], record["fingerprint"]) == ("lpfs++", 0, log.fingerprint)
    assert record["configuration"]["keep"] == 3
    assert record["versions"].keys() == {"lpfs", "code", "torch", "numpy", "python"}
    assert record["splits"]["test"]["rows"] == 500
    names = {"prepare", "pretrain", "all_fields", "search", "prune", "retrain", "hot_start", "warnings"}
    assert record["seconds"].keys() == names
    assert record["savings"]["kept"]["table_bytes"] < record["savings"]["all_fields"]["table_bytes"]
    assert list(record["fields"]) == list(NAMES)
    assert record["fields"][NAMES[0]].keys() == {
        *("kind", "group", "cardinality", "cost", "missing", "distinct", "drift")
    }


def test_record_in_memory_equals_the_file(kept_three):
    assert kept_three.record == read_record(kept_three)


def test_report_is_built_from_memory(log, kept_three, tmp_path, monkeypatch):
    """The page is written without reading a file of the run, and equals the one built from the files."""
    text = (kept_three.folder / "report.html").read_text("utf-8")
    assert report(kept_three.folder, tmp_path / "report.html").read_text("utf-8") == text
    assert all(f'<bdi class="name">{name}</bdi>' in text for name in NAMES)
    monkeypatch.setattr("lpfs.report.build.read_selection", lambda path: pytest.fail("the run was read"))
    short = {**TINY, "pretrain_steps": 60, "search_steps": 60, "finish": "none"}
    assert (select(log, tmp_path / "run", keep=3, **short, quiet=True).folder / "report.html").exists()


def test_outcome_is_displayed(kept_three):
    assert "fields kept" in kept_three._repr_html_()
    assert repr(kept_three).startswith(f"Outcome({kept_three.verdict['text']!r}, in ")
    assert len(kept_three.plot().axes[0].texts) == 5


def test_run_is_complete_if_the_report_fails(log, tmp_path, monkeypatch, capsys):
    def fail(run):
        raise RuntimeError("no page")

    monkeypatch.setattr("lpfs.report.build.selection_context", fail)
    outcome = select(log, tmp_path / "run", keep=3, finish="none", pretrain_steps=60, search_steps=60, seed=1)
    assert len(outcome.kept) == 3
    assert (tmp_path / "run" / "selection.json").exists()
    assert not (tmp_path / "run" / "report.html").exists()
    message = capsys.readouterr().err
    assert "no page" in message
    assert f"lpfs report {tmp_path / 'run'}" in message


def test_pruned_model_equals_the_gated_one(kept_three):
    record = read_record(kept_three)
    for name in ("auc", "logloss"):
        assert record["metrics"]["pruned"][name] == pytest.approx(record["metrics"]["gated"][name], abs=1e-6)
    zeros, cut = record["certificates"]["zeros"], record["certificates"]["cut"]
    assert zeros["max_logit_change"] == zeros["bound"] == 0.0
    assert 0 < cut["bound"] < 1e-3
    assert record["max_logit_change"] == cut["max_logit_change"] <= cut["bound"]
    assert zeros["certified"] is cut["certified"] is True
    assert sorted(zeros["checked"]) == sorted(cut["checked"]) == sorted(record["dropped"])


def test_hot_start_starts_from_the_pruned_model_and_records_the_steps_saved(kept_three):
    record = read_record(kept_three)
    hot_start, steps = record["hot_start"], record["steps"]
    assert (hot_start["steps"], hot_start["retrain_steps"]) == (steps["hot_start"], steps["train"])
    assert hot_start["validation"][0] == [0, record["validation"]["pruned"]["auc"]]
    points, aucs = zip(*hot_start["validation"], strict=True)
    assert len(points) >= 20
    assert points[-1] == hot_start["steps"]
    assert aucs[points.index(hot_start["kept_step"])] == max(aucs) == record["validation"]["hot_start"]["auc"]
    assert hot_start["retrain_auc"] == record["validation"]["retrained"]["auc"]
    assert hot_start == steps_saved(
        hot_start["validation"], hot_start["retrain_auc"], steps["train"], hot_start["shrink_factor"]
    )


def test_models_are_released_as_soon_as_they_are_not_needed(log, tmp_path, monkeypatch):
    """Training from scratch starts without the tables of all fields and without the optimizer of the pruned model."""
    references, alive = [], []
    pretrain, retrain, hot_start = stages.initial_model, stages.retrain, stages.hot_start

    def remember(plan, seed):
        trained = pretrain(plan, seed)
        references.extend(weakref.ref(part) for part in (trained[0], trained[0].inputs.table.weight, trained[1]))
        return trained

    def check(plan, pruned):
        alive.append([reference() is not None for reference in references])
        return retrain(plan, pruned)

    def share(plan, pruned):
        states = [state["sum"].data_ptr() for state in pruned.optimizer.state.values()]
        references.append(weakref.ref(pruned.optimizer))
        model, history = hot_start(plan, pruned)
        assert pruned.model is not model
        assert states == [state["sum"].data_ptr() for state in pruned.optimizer.state.values()]
        return model, history

    for name, function in (("initial_model", remember), ("retrain", check), ("hot_start", share)):
        monkeypatch.setattr(stages, name, function)
    record = select(log, tmp_path / "run", keep=3, **TINY, quiet=True).record
    assert alive == [[False, False, False, False]]
    assert record["metrics"]["hot_start"] is not None


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({"pruned": (0.7, 0.3), "hot_start": (0.7, 0.3), "retrained": (0.6, 0.2)}, "pruned"),
        ({"pruned": (0.7, 0.3), "hot_start": (0.8, 0.3), "retrained": (0.8, 0.3)}, "retrained"),
        ({"pruned": (0.7, 0.3), "hot_start": (0.8, 0.2), "retrained": (0.8, 0.3)}, "hot_start"),
        ({"pruned": (None, 0.3), "hot_start": (None, 0.2)}, "hot_start"),
    ],
)
def test_best_model_has_the_highest_auc_then_the_lowest_logloss(scores, best):
    choices = {name: {"auc": auc, "logloss": logloss} for name, (auc, logloss) in scores.items()}
    assert select_module._best_model(choices) == best


def test_hot_start_is_never_worse_than_its_initial_state(log, tmp_path, monkeypatch):
    """With a learning rate that ruins the model the initial state is kept, bit for bit."""
    original = stages.hot_start

    def ruined(plan, pruned):
        for group in pruned.optimizer.param_groups:
            group["lr"] = 1000.0
        return original(plan, pruned)

    monkeypatch.setattr(stages, "hot_start", ruined)
    record = select(log, tmp_path / "run", keep=3, **TINY, finish="hot", quiet=True).record
    assert record["metrics"]["hot_start"] == record["metrics"]["pruned"]
    assert record["validation"]["hot_start"] == record["validation"]["pruned"]


def test_saved_model_is_the_best_on_validation_rows(kept_three, log):
    record = read_record(kept_three)
    aucs = {name: scores["auc"] for name, scores in record["validation"].items() if name != "all_fields"}
    assert aucs[record["model"]] == max(aucs.values())
    model = load(kept_three.folder / "model")
    assert model.reads.names == tuple(record["kept"])
    test = split_dataset(log).test
    for batch in test.stream(64, fields=model.reads.names):
        assert torch.equal(model(batch), kept_three.model(batch))
    metrics = lpfs.evaluate(model, test.stream(4096, fields=model.reads.names))
    assert metrics.auc == record["metrics"][record["model"]]["auc"]


def fake_stages(monkeypatch, recommended):
    """Replace the stages before the search; the search raises, with its plan as the argument."""

    class Curve:
        problem = None

        def __init__(self, plan, pretrained):
            pass

        def recommend(self, allowance):
            return recommended

        def release(self):
            pass

    def search(plan, *_):
        raise InterruptedError(plan)

    monkeypatch.setattr(stages, "initial_model", lambda plan, seed: (SimpleNamespace(names=NAMES), "optimizer"))
    monkeypatch.setattr(stages, "all_fields", lambda plan, trained: "all fields")
    monkeypatch.setattr(stages, "release_weights", lambda plan, full: None)
    monkeypatch.setattr(stages, "valid_metrics", lambda plan, model: {})
    monkeypatch.setattr(Allowance, "of_run", lambda *_: Allowance(0.01, "given", 0.001, 50))
    monkeypatch.setattr(select_module, "CurveStage", Curve)
    monkeypatch.setattr(select_module, "_search_until_allowed", search)


class Timer:
    """Keeps the headings of the stages."""

    def __init__(self):
        self.headings = []

    def stage(self, name, heading):
        self.headings.append(heading)
        return nullcontext()


@pytest.mark.parametrize(("recommended", "keep"), [(None, len(NAMES)), (2, 2)])
@pytest.mark.parametrize(("saved", "action"), [(None, "pretrain all"), ("model", "load the trained model of all")])
def test_search_starts_with_the_recommended_fields(tmp_path, monkeypatch, recommended, keep, saved, action):
    """All fields are searched for if no smaller set is recommended."""
    fake_stages(monkeypatch, recommended)
    timer, searched = Timer(), []
    plan = SimpleNamespace(
        settings=Settings(),
        console=Console(quiet=True),
        free_memory=lambda: None,
        saved_model=saved,
        schema=NAMES,
        run_dir=tmp_path,
        for_search=lambda run_dir, seed, keep: searched.append(keep),
    )
    with pytest.raises(InterruptedError):
        select_module._run_stages(plan, timer)
    assert searched == [keep]
    assert timer.headings[0] == f"{action} {len(NAMES)} fields"


@pytest.mark.parametrize(("finds_count", "kept"), [(True, [2, 3, 4]), (False, [2])])
def test_more_fields_are_searched_for_until_the_allowance_holds(tmp_path, monkeypatch, finds_count, kept):
    """Only if the number of fields depends on the allowance; every check is then printed, and headings are added."""
    plans, printed = [], []
    console = SimpleNamespace(stages=7, message=printed.append)

    def planned(run_dir, seed, keep):
        settings = SimpleNamespace(finish="hot", seed=0)
        return SimpleNamespace(run_dir=run_dir, keep=keep, settings=settings, console=console, for_search=planned)

    def search(plan, timer, trained):
        plans.append(plan)
        selection = SimpleNamespace(kept=NAMES[: plan.keep], names=NAMES)
        return SimpleNamespace(selection=selection, choices={"pruned": "scores"}, chosen="pruned")

    class Checked(Allowance):
        def check(self, full, scores, fields):
            return {"fields": fields, "loss": 0.1, "upper": 0.2, "rows": 9, "holds": fields == 4}

    monkeypatch.setattr(select_module, "_search", search)
    allowance = Checked(0.01, "given", 0.001, 50, finds_count)
    last, found, checks = select_module._search_until_allowed(planned(tmp_path, 0, 2), None, (), None, allowance)
    assert [plan.keep for plan in plans] == kept == [check["fields"] for check in checks]
    assert [plan.run_dir for plan in plans[1:]] == [tmp_path / f"try-{number}" for number in range(2, len(kept) + 1)]
    assert last is plans[-1]
    assert len(found.selection.kept) == kept[-1]
    assert console.stages == 7 + 3 * (len(kept) - 1)  # search, prune and hot start of every further search
    assert [line.split()[0] for line in printed] == [str(count) for count in kept] * finds_count


def test_record_of_a_run_is_logged_to_mlflow(log, tmp_path, monkeypatch):
    logged, record = [], {"kept": ["user"]}

    @contextmanager
    def started(settings, run_dir):
        yield "mlflow"

    monkeypatch.setattr(select_module, "mlflow_run", started)
    monkeypatch.setattr(select_module, "log_run", lambda *arguments: logged.append(arguments))
    monkeypatch.setattr(select_module, "_run_stages", lambda plan, timer: "outcome")
    monkeypatch.setattr(select_module.results, "with_record", lambda outcome, plan: SimpleNamespace(record=record))
    monkeypatch.setattr(select_module, "_write_results", lambda outcome, plan: None)
    select(log, tmp_path / "run", keep=3, device="cpu", **TINY, quiet=True)
    assert logged == [("mlflow", tmp_path / "run", record)]


def test_history_of_the_search(kept_three):
    frame = pl.read_parquet(kept_three.folder / "history.parquet")
    assert frame.columns == ["step", "loss", "alive", "penalty", "epsilon", "lr", *(f"gate:{n}" for n in NAMES)]
    assert frame["step"].to_list() == list(range(1, 121))
    assert (frame["alive"][0], frame["alive"][-1]) == (7, 3)
    gates = read_record(kept_three)["gates"]
    assert [frame[f"gate:{name}"][-1] for name in NAMES] == pytest.approx([gates[n] for n in NAMES], abs=1e-6)


def test_selection_is_loaded_from_the_record(kept_three, tmp_path):
    selection = Selection.load(kept_three.folder / "selection.json")
    assert (selection.kept, selection.dropped) == (kept_three.selection.kept, kept_three.selection.dropped)
    assert dict(selection.gates) == dict(kept_three.selection.gates)
    with pytest.raises(InputError, match="unknown key"):
        Selection.from_json(read_record(kept_three))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="is not a selection"):
        Selection.load(tmp_path / "other.json")


def test_saved_settings_repeat_the_run(kept_three, log, tmp_path):
    again = select(log, tmp_path / "again", settings=Settings.load(kept_three.folder), quiet=True)
    assert comparable(again) == comparable(kept_three)
    assert (again.folder / "kept_fields.txt").read_bytes() == (kept_three.folder / "kept_fields.txt").read_bytes()


@pytest.mark.parametrize("name", mark_long(sorted(MODELS), ("mlp", "fm", "dlrm")))
def test_every_backbone_is_pruned_with_a_certificate(log, tmp_path, name):
    model_options = {"dim": 4}
    if name != "fm":
        model_options["hidden"] = [8]
    if name == "user_item":
        model_options["head"] = [8]
    if name.startswith("dlrm"):
        model_options["bottom"] = [4]
    options = {"model": name, "model_options": model_options, "finish": "none", "quiet": True}
    options["level"] = "cross" if name == "dlrm_cross" else "field"
    if name == "user_item":
        options["search_steps"] = 600  # one field of a user-item pair is useless without the other
    outcome = select(log, tmp_path / "run", keep=2, **{**TINY, **options})
    assert len(outcome.kept) == 2
    assert set(outcome.metrics) == {"all_fields", "gated", "pruned"}
    zeros, cut = outcome.certificates["zeros"], outcome.certificates["cut"]
    assert zeros["certified"] is cut["certified"] is True
    assert zeros["max_logit_change"] == 0.0
    assert cut["max_logit_change"] <= cut["bound"]
    for metric in ("auc", "logloss"):
        assert outcome.metrics["pruned"][metric] == pytest.approx(outcome.metrics["gated"][metric], abs=1e-6)
    model = load(tmp_path / "run" / "model")
    assert registered_name(model) == name
    assert set(model.names) == set(outcome.kept)


@pytest.mark.long
def test_user_item_model_needs_fields_of_both_groups(log, tmp_path):
    """UserItem uses user fields only in products with item fields."""
    options = {**TINY, "model": "user_item", "model_options": {"dim": 4, "hidden": [8], "head": [4]}}
    options |= {"finish": "none", "quiet": True}
    with pytest.raises(InputError, match="group item.*2 kept fields.*user.*must_keep"):
        select(log, tmp_path / "none", keep=2, must_keep=("user", "age"), **options)
    with pytest.raises(InputError, match="group user.*group item"):
        select(log, tmp_path / "dropped", keep=2, must_drop=("price", "tags", "ad"), **options)
    outcome = select(log, tmp_path / "run", keep=3, must_keep=("user", "age", "slot"), **options)
    assert set(outcome.kept) == {"user", "age", "slot"}
    assert outcome.model.reads.names == ("slot",)
    warning = outcome.warnings[0]
    assert (warning["kind"], set(warning["fields"])) == ("not read", {"user", "age"})
    assert all(text in warning["text"] for text in ("group item", "--must-keep"))


@pytest.mark.long
def test_dlrm_cross_has_gates_on_crosses_with_and_without_level(log, tmp_path):
    options = {**TINY, "model_options": {"dim": 4, "hidden": [8], "bottom": [4]}, "finish": "none", "quiet": True}
    first = select(log, tmp_path / "model", keep=4, model="dlrm_cross", **options)
    second = select(log, tmp_path / "level", keep=4, level="cross", **options)
    assert len(first.selection.names) == 21
    assert first.kept == second.kept


@pytest.mark.long
def test_crosses_with_a_budget_and_a_field_that_must_be_kept(log, tmp_path):
    options = {**TINY, "model_options": {"dim": 4, "hidden": [8], "bottom": [4]}, "finish": "none", "quiet": True}
    target = {"budget": 6.0, "costs": "complexity", "must_keep": "site"}
    outcome = select(log, tmp_path / "run", level="cross", **target, **options)
    assert "site" in outcome.kept
    assert outcome.selection.made["cost"] <= 6.0


def test_default_target_allows_a_small_loss_and_prints_it(log, tmp_path, capsys):
    settings = {"finish": "hot", "must_keep": ("slot",), "must_drop": ("price",)}
    outcome = select(log, tmp_path / "run", **TINY, **settings)
    printed = capsys.readouterr().err
    allowed = make_target(Settings(), log.schema, split_dataset(log).valid).max_auc_loss
    assert 0.001 < allowed < 0.02  # a quarter of the standard error on a few hundred rows
    assert f"at most {allowed:g} of AUC" in printed
    assert "allowed loss of AUC: " in printed
    assert outcome.verdict["allowed"] == outcome.allowed > 0
    assert {"slot", *STRONG} <= set(outcome.kept)
    assert "price" not in outcome.selection.names
    assert outcome.hot_start == {}
    assert "hot_start" not in outcome.record


@pytest.mark.long
@pytest.mark.parametrize("method", ["lpfs++", "permutation"])
def test_last_day_does_not_influence_the_result(log, tmp_path, method):
    """Two logs that differ only in the last day give the same fields and the same model."""
    other = known_truth(tmp_path / "other", rows=ROWS, last=1)
    first, second = (
        select(dataset, tmp_path / name, keep=3, method=method, **TINY, quiet=True)
        for name, dataset in (("first", log), ("second", other))
    )
    assert first.metrics != second.metrics
    assert {**comparable(first), "metrics": None} == {**comparable(second), "metrics": None}
    weights, other_weights = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert set(STRONG) < set(first.kept)


@pytest.mark.long
def test_several_seeds_count_how_often_a_field_is_kept(log, tmp_path, capsys):
    outcome = select(log, tmp_path / "run", keep=3, seeds=3, **TINY, finish="none")
    assert sum(outcome.chosen_in.values()) == 9
    assert all(outcome.chosen_in[name] >= 1 for name in outcome.kept)
    assert all(outcome.chosen_in[name] == 3 for name in STRONG)
    assert "not kept in all 3 searches" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"search", "search-1", "search-2", "pretrain-2"}


@pytest.mark.long
@pytest.mark.parametrize("stage", ["pretrain", "search"])
def test_other_seeds_are_trained_together_and_resumed(log, tmp_path, monkeypatch, stage):
    """The first seed, which gives the result, is that of a run without a fleet."""
    options = {"keep": 3, "seeds": 4, **TINY, "finish": "none", "curve": False, "quiet": True}
    single = select(log, tmp_path / "single", **options)
    whole = select(log, tmp_path / "whole", fleet=True, **options)
    assert comparable(whole) == comparable(single)
    assert sum(whole.chosen_in.values()) == 12
    assert all(whole.chosen_in[name] == 4 for name in STRONG)
    assert whole.seed_aucs == pytest.approx(single.seed_aucs, abs=0.03)
    assert not (tmp_path / "whole" / "pretrain-fleet").exists()

    after_step, name = Stepper.count_step, "killed"

    def kill(self, rows):
        after_step(self, rows)
        is_search = any(isinstance(callback, GateFleet) for callback in self.callbacks)
        if isinstance(self.state.model, Fleet) and self.state.step == 30 and is_search == (stage == "search"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "count_step", kill)
        with pytest.raises(KeyboardInterrupt):
            select(log, tmp_path / name, fleet=True, **options)
    assert (tmp_path / name / "pretrain-fleet" / "seeds.json").exists() == (stage == "pretrain")
    assert (tmp_path / name / "search-fleet" / "fleet.json").exists() == (stage == "search")
    resumed = select(log, tmp_path / name, settings=Settings.load(tmp_path / name), resume=True, quiet=True)
    assert resumed.chosen_in == whole.chosen_in
    assert resumed.seed_aucs == whole.seed_aucs


@pytest.fixture(scope="module")
def checkpoint(log, tmp_path_factory):
    """A trained factorization machine of six of the seven fields."""
    torch.manual_seed(3)
    model = make_model("fm", log.schema.subset([name for name in NAMES if name != "price"]), dim=3)
    stream = log.days(0, 4).stream(64, shuffle=True, fields=model.reads.names)
    lpfs.fit(model, stream, lr=0.05, steps=300, quiet=True)
    return save(model, tmp_path_factory.mktemp("checkpoint") / "model", fingerprint=log.fingerprint)


def test_run_from_a_checkpoint_loads_it_once(log, checkpoint, tmp_path, monkeypatch):
    loaded = []

    def counted(path):
        loaded.append(path)
        return original(path)

    original = plan_module.load_saved
    monkeypatch.setattr(plan_module, "load_saved", counted)
    options = {name: value for name, value in TINY.items() if name != "model_options"}
    outcome = select(log, tmp_path / "run", keep=3, checkpoint=str(checkpoint), seeds=2, **options, quiet=True)
    assert loaded == [checkpoint]
    assert set(STRONG) < set(outcome.kept)
    assert sum(outcome.chosen_in.values()) == 6
    assert "price" not in outcome.selection.names
    assert not list((tmp_path / "run").glob("pretrain*"))
    for model in (outcome.model, load(tmp_path / "run" / "model")):
        assert registered_name(model) == "fm"
        assert model.config["dim"] == 3
    settings = Settings.load(tmp_path / "run")
    assert (settings.model, settings.model_options["dim"]) == ("fm", 3)
    ids = sum(log.schema[name].cardinality for name in ("user", "site", "ad", "slot", "tags"))
    assert outcome.savings["all_fields"]["table_bytes"] == 4 * ids * (3 + 1)  # the same backbone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "mlp"}, "'fm', not 'mlp'.*--model"),
        ({"model_options": {"dim": 4}}, "dim=3, not 4"),
        ({"must_drop": "ad"}, "must_drop.*'ad'"),
        ({"must_keep": "price"}, "'price'"),
    ],
)
def test_settings_that_contradict_the_checkpoint_raise_an_error(log, checkpoint, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        select(log, tmp_path / "run", keep=2, checkpoint=str(checkpoint), **changes, quiet=True)
    assert not (tmp_path / "run" / "all_fields").exists()


def test_large_log_is_read_once_in_time_order(log, tmp_path):
    """There are enough rows for all steps, so training on all fields continues from the pretrained model."""
    steps = {**TINY, "pretrain_steps": 200, "batch_size": 8, "search_steps": 60}
    record = select(log, tmp_path / "run", keep=3, **steps, quiet=True).record
    assert record["steps"]["shuffle"] is False
    assert len(record["kept"]) == 3
    assert '"kind": "evaluate"' not in (tmp_path / "run" / "all_fields" / "metrics.jsonl").read_text()
    assert len(record["hot_start"]["validation"]) >= 20


STAGES = ("all_fields", "search_fields", "absorb_and_prune", "retrain", "hot_start", "serving_speed")


@pytest.mark.parametrize("stage", mark_long(STAGES, ("search_fields",)))
def test_failed_run_is_resumed_at_its_stage(log, kept_three, tmp_path, monkeypatch, stage):
    def fail(*_, **__):
        raise OSError("disk error")

    with monkeypatch.context() as patch:
        patch.setattr(stages, stage, fail)
        with pytest.raises(OSError, match="disk error"):
            select(log, tmp_path / "run", keep=3, **TINY, quiet=True)
    assert not (tmp_path / "run" / "selection.json").exists()
    with pytest.raises(InputError, match="--resume"):
        select(log, tmp_path / "run", keep=3, **TINY, quiet=True)
    outcome = select(log, tmp_path / "run", keep=3, **TINY, quiet=True, resume=True)
    assert comparable(outcome) == comparable(kept_three)


@pytest.mark.long
@pytest.mark.parametrize("name", mark_long(["mlp", "user_item"], ["mlp"]))
def test_every_task_is_evaluated_and_the_first_one_decides(tmp_path, capsys, name):
    log = lpfs.simulate(tmp_path / "log", "industrial-small", rows=4000)
    tasks = [log.schema.label, *log.schema.tasks]
    assert len(tasks) == 6
    model_options = {**TINY["model_options"], **({"head": [4]} if name == "user_item" else {})}
    outcome = select(log, tmp_path / "run", keep=8, **{**TINY, "model": name, "model_options": model_options})
    record = outcome.record
    for part in ("metrics", "validation"):
        for scores in record[part].values():
            assert list(scores["tasks"]) == tasks
            assert scores["tasks"]["click"] == {name: value for name, value in scores.items() if name != "tasks"}
    for task in tasks:
        gated, pruned = (record["metrics"][model]["tasks"][task]["logloss"] for model in ("gated", "pruned"))
        assert pruned == pytest.approx(gated, abs=1e-6)
    aucs = {model: record["validation"][model]["auc"] for model in ("pruned", "hot_start", "retrained")}
    assert aucs[record["model"]] == max(aucs.values())
    assert aucs["hot_start"] >= aucs["pruned"]
    assert record["hot_start"]["retrain_auc"] == aucs["retrained"]
    lines = capsys.readouterr().err.splitlines()
    start = next(number for number, line in enumerate(lines) if "every task" in line)
    assert [line.split()[0] for line in lines[start + 1 : start + 8]] == ["task", *tasks]
    assert lines[start + 4].endswith(format_auc(record["metrics"]["retrained"]["tasks"]["like"]))
    model = load(outcome.folder / "model")
    metrics = lpfs.evaluate(model, split_dataset(log).test.stream(4096, fields=model.reads.names))
    for task in tasks:
        assert metrics.tasks[task].auc == record["metrics"][record["model"]]["tasks"][task]["auc"]


def make_table(rows=1800, seed=1):
    """Return a table in memory whose order has no meaning."""
    rng = random.Random(seed)
    lines = []
    for row in range(rows):
        user, ad, noise = (rng.randrange(size) for size in (6, 5, 8))
        click = rng.random() < 0.05 + 0.45 * (user % 2) + 0.45 * (ad % 2)
        lines.append({"click": int(click), "noise": f"n{noise}", "user": f"u{user}", "ad": f"a{ad}", "row": row})
    return pl.DataFrame(lines)


@pytest.mark.long
def test_table_without_time_is_planned_once_and_split_at_random(tmp_path, monkeypatch):
    planned = []

    def counted(source, **options):
        planned.append(source)
        return original(source, **options)

    original = data_module.plan_source
    monkeypatch.setattr(data_module, "plan_source", counted)
    options = {"label": "click", "keep": 2, **TINY, "finish": "none", "quiet": True}
    first, second = (select(make_table().drop("row"), tmp_path / name, **options) for name in ("one", "two"))
    assert len(planned) == 2
    assert first.kept == ("user", "ad")
    assert comparable(first) == comparable(second)
    assert Dataset(tmp_path / "one" / "data").settings["options"]["shuffle"] is True


def test_labels_are_not_streamed_before_training(tmp_path, monkeypatch):
    """The classes of every split are counted without a stream of labels."""
    streamed = []

    def recorded(self, *args, fields=None, **options):
        streamed.append(fields)
        return original(self, *args, fields=fields, **options)

    original = Dataset.stream
    monkeypatch.setattr(Dataset, "stream", recorded)

    def stop(*_):
        raise OSError("training starts")

    monkeypatch.setattr(stages, "pretrain", stop)
    with pytest.raises(OSError, match="training starts"):
        select(make_table().drop("row"), tmp_path / "run", label="click", **TINY, quiet=True)
    assert streamed == []


@pytest.mark.long
def test_run_on_a_dataset_object_is_repeated_from_its_configuration(tmp_path):
    dataset = lpfs.prepare(make_table().drop("row"), tmp_path / "data", label="click", quiet=True)
    options = {"keep": 2, **TINY, "finish": "none", "quiet": True}
    first = select(dataset, tmp_path / "first", **options)
    settings = Settings.load(tmp_path / "first")
    assert settings.source == (str(tmp_path / "data"),)
    assert comparable(select(None, tmp_path / "again", settings=settings, quiet=True)) == comparable(first)
    part = select(dataset.part(0, 1500), tmp_path / "part", **options)
    assert Settings.load(part.folder).source == ()  # the configuration cannot name a part of a Dataset


def test_field_names_may_contain_line_breaks(tmp_path):
    table = make_table().drop("row").rename({"user": "user\nof the\r\nsite", "ad": " ad"})
    outcome = select(table, tmp_path / "run", label="click", keep=2, **TINY, finish="none", quiet=True)
    assert set(outcome.kept) == {"user\nof the\r\nsite", " ad"}
    text = (tmp_path / "run" / "kept_fields.txt").read_text()
    assert text.splitlines() == ['"user\\nof the\\r\\nsite"', '" ad"']
    assert tuple(map(json.loads, text.splitlines())) == outcome.kept


def test_split_column_is_respected(tmp_path):
    fold = pl.when(pl.col("row") % 6 == 0).then(pl.lit("test")).otherwise(pl.lit("train")).alias("fold")
    options = {"label": "click", "split": "fold", "keep": 2, **TINY, "finish": "none", "quiet": True}
    outcome = select(make_table().with_columns(fold).drop("row"), tmp_path / "run", **options)
    splits = outcome.record["splits"]
    assert outcome.kept == ("user", "ad")
    assert splits["test"] == {"rows": 300, "days": ["test", "test"], "positives": 139}
    assert sum(splits[name]["rows"] for name in ("early", "search", "valid")) == 1500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": 2, "search_steps": 49}, "at least 50 steps"),
        ({"search_steps": 10}, "at least 50 steps"),
        ({"keep": 2, "options": {"alpha": "x"}}, "alpha .*'x'"),
        ({"keep": 2, "options": {"rescale": "x"}}, "rescale .*'x'"),
        ({"keep": 2, "method": "lpfs", "options": {"alpha": 1.0}}, "alpha"),
        ({"keep": 2, "method": "permutation", "options": {"repeats": 0}}, "repeats .*0"),
        ({"method": "permutation"}, "permutation .*keep=K"),
        ({"keep": 8}, "keep .*7 fields.*8"),
        ({"keep": 30, "level": "cross", "model_options": {}}, "keep .*21 fields.*30"),
        ({"keep": 2, "model": "dlrm", "model_options": {}, "must_keep": ("age",)}, "'age'"),
        ({"keep": 2, "must_drop": ("usr",)}, "did you mean 'user'"),
        ({"keep": 1, "must_drop": NAMES}, "must_drop .*at least one field"),
        ({"keep": 2, "optimizer": "adamw"}, "optimizer .*'adamw'"),
        ({"keep": 2, "precision": "half"}, "precision .*'half'"),
        ({"keep": 2, "lr": -1.0}, "lr .*> 0.*-1"),
        ({"keep": 2, "batch_size": 0}, "batch_size .*0"),
        ({"keep": 2, "model": "mpl"}, "'mpl'.*mlp"),
        ({"keep": 2, "model": "dlrm_cross", "level": "field"}, "level='cross'"),
        ({"keep": 2, "model": "deepfm", "method": "group_lasso"}, "group_lasso .*mlp"),
        ({"keep": 2, "method": "autofis"}, "autofis .*dlrm_cross"),
        ({"keep": 2, "graph": True, "device": "cpu"}, "graph=True.*CPU.*leave graph out"),
        ({"budget": 1.0}, "give costs="),
        ({"budget": 0.01, "costs": "complexity"}, "cheapest field costs"),
    ],
)
def test_errors_are_raised_before_training(log, tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        select(log, tmp_path / "run", **{**TINY, **changes}, quiet=True)
    assert not [path for path in (tmp_path / "run").glob("*") if path.name != "config.json"]


def test_rows_without_a_label_raise_an_error(log, tmp_path):
    unlabelled = known_truth(tmp_path / "log", settings={"unlabelled": True})
    with pytest.raises(DataError, match="without a label"):
        select(unlabelled, tmp_path / "run", keep=2, **TINY, quiet=True)
    model = make_model("mlp", log.schema, **TINY["model_options"])
    with pytest.raises(InputError, match="'click'"):
        lpfs.evaluate(model, unlabelled.stream(64))


def test_split_with_one_class_raises_an_error(tmp_path):
    table = make_table().with_columns(click=pl.when(pl.col("row") < 1440).then(pl.col("click")).otherwise(0))
    prepare = {"parts": 6, "shuffle": False}
    with pytest.raises(InputError, match=r"test rows \(360\).*one class.*0 positive.*give more rows"):
        select(table, tmp_path / "run", label="click", keep=1, prepare=prepare, quiet=True)
    with pytest.raises(FieldError, match="did you mean 'click'"):
        select(table, tmp_path / "two", label="clik", keep=1, quiet=True)


def test_fields_are_counted_by_the_searches_that_kept_them(kept_three):
    chosen_in = read_record(kept_three)["chosen_in"]
    assert chosen_in == {name: int(name in kept_three.kept) for name in NAMES}


def test_result_is_printed_unless_quiet(log, kept_three, capsys):
    plan = SimpleNamespace(run_dir=kept_three.folder, dataset=log, console=Console(), settings=Settings())
    select_module._write_results(kept_three, plan)
    text = capsys.readouterr().err
    assert kept_three.verdict["text"] in text
    assert format_auc(kept_three.metrics["pruned"]) in text
    assert str(kept_three.folder) in text


@pytest.mark.parametrize("resume", [False, True])
def test_resumed_run_uses_the_rows_that_it_has_prepared(log, tmp_path, monkeypatch, resume):
    """A new run in the directory of another one is an error, so that no result is continued by accident."""
    run, given = tmp_path / "run", {}
    settings = {"keep": 3, **TINY, "quiet": True, **({"resume": True} if resume else {})}

    def stop(*_, **options):
        given.update(options)
        raise InputError("stop")

    monkeypatch.setattr(select_module, "prepare_dataset", stop)
    with pytest.raises(InputError, match="stop"):
        select(log, run, **settings)
    (run / "pretrain").mkdir(exist_ok=True)
    with pytest.raises(InputError, match="stop" if resume else "contains a run.*--resume"):
        select(log, run, **settings)
    assert given["resume"] is resume
