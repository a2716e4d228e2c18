"""The plan of a run: target, device, training settings, and the plan of another search on the same rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lpfs._console import Console
from lpfs.errors import DataError, FieldError, InputError
from lpfs.models import make_model
from lpfs.pipeline import plan as plan_module
from lpfs.pipeline.plan import StageTimer, build_plan, check_settings, load_costs, make_target, resolve_device
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import split_dataset
from lpfs.serialization import SavedModel
from tests.helpers.known_truth import FIELDS, TINY, known_truth

CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("plan") / "log", rows=1800)


@pytest.fixture
def plan(log, tmp_path):
    return build_plan(Settings(keep=3, must_keep=("site",), device="cpu", **TINY), log, tmp_path / "run", CONSOLE)


def test_plan_holds_everything_that_the_stages_need(plan, log, tmp_path):
    assert plan.schema == log.schema
    assert plan.dataset is log
    assert (plan.target.keep, plan.target.must_keep) == (3, ("site",))
    assert (plan.steps.pretrain, plan.steps.search) == (150, 120)
    assert plan.method.name == "lpfs++"
    assert next(plan.meta_model().parameters()).device.type == "meta"
    plan.check()
    assert not list(tmp_path.iterdir())  # planning writes nothing


def test_dropped_fields_are_not_in_the_plan(log, tmp_path):
    plan = build_plan(Settings(must_drop=("ad", "tags")), log, tmp_path, CONSOLE)
    assert plan.schema.names == ("price", "user", "site", "age", "slot")
    with pytest.raises(FieldError, match="must_drop.*'add'.*did you mean 'ad'"):
        build_plan(Settings(must_drop=("add",)), log, tmp_path, CONSOLE)
    with pytest.raises(InputError, match="at least one field"):
        build_plan(Settings(must_drop=tuple(field.name for field in FIELDS)), log, tmp_path, CONSOLE)


def test_rows_without_a_label_cannot_be_planned(tmp_path):
    unlabelled = known_truth(tmp_path / "log", settings={"unlabelled": True})
    with pytest.raises(DataError, match="without a label"):
        build_plan(Settings(), unlabelled, tmp_path, CONSOLE)


def test_plan_of_another_search_changes_only_what_is_given(plan, tmp_path):
    other = plan.for_search(tmp_path / "other", 7)
    assert (other.settings.seed, other.run_dir) == (7, tmp_path / "other")
    assert other.target is plan.target
    assert other.splits is plan.splits
    assert other.resume is False
    changed = plan.for_search(tmp_path, 0, method="lpfs", options={"gate": "lpfs"}, penalty=0.1, resume=True)
    assert (changed.method.name, changed.settings.options, changed.resume) == ("lpfs", {"gate": "lpfs"}, True)
    assert (changed.target.kind, changed.target.penalty, changed.target.must_keep) == ("penalty", 0.1, ("site",))
    assert (changed.settings.keep, changed.settings.penalty) == (None, 0.1)
    assert plan.for_search(tmp_path, 0, keep=5).target.keep == 5


def test_best_state_is_kept_if_rows_repeat_or_the_auc_is_recorded(plan):
    assert plan.steps.shuffle
    last = plan.training(100, 0, keep_best=False)
    assert (last.keep, last.evaluate_every, last.evaluate_first) == ("last", None, False)
    best = plan.training(100, 0, keep_best=True, keep_last_optimizer=True)
    assert (best.keep, best.evaluate_every, best.evaluate_first, best.keep_optimizer) == ("best", 5, False, "last")
    recorded = plan.training(100, 0, keep_best=False, record_auc=True)
    assert (recorded.keep, recorded.evaluate_first, recorded.keep_optimizer) == ("best", True, "best")
    assert (best.quiet, best.check_every, best.checkpoint_every) == (True, 1, 100)
    long = plan.training(20_000, 0, keep_best=True)
    assert (long.checkpoint_every, long.checkpoint_seconds) == (500, None)


def test_steps_on_the_cpu_are_not_captured(plan):
    assert plan.use_cuda_graph is False


def test_steps_on_a_gpu_are_captured_if_all_parts_support_it(plan, monkeypatch):
    plan = replace(plan, device=torch.device("cuda"))
    for supported in (True, False):
        monkeypatch.setattr(plan_module, "supports_cuda_graph", lambda device, supported=supported: supported)
        assert plan.use_cuda_graph is supported
    asked = replace(plan, settings=plan.settings.updated(graph=True))
    assert asked.use_cuda_graph is True


def test_target_of_the_settings_is_used(log):
    valid = split_dataset(log).valid
    for name, value in (("keep", 3), ("penalty", 0.1), ("max_auc_loss", 0.2)):
        target = make_target(Settings(**{name: value}), log.schema, valid)
        assert (target.kind, getattr(target, name)) == (name, value)


def test_default_target_depends_on_the_number_of_validation_rows(tmp_path):
    """The allowed loss is a quarter of the standard error of the AUC, and at least 0.001."""

    def default_loss(rows):
        log = known_truth(tmp_path / str(rows), rows=rows, label=lambda row: float(row % 2))
        return make_target(Settings(), log.schema, log).max_auc_loss

    loss = default_loss(100)
    assert loss == pytest.approx(0.25 * 0.0487, abs=2e-4)
    assert default_loss(400) == pytest.approx(loss / 2, rel=0.02)
    assert default_loss(40_000) == 0.001


def test_costs_of_the_settings(log, tmp_path):
    assert load_costs(Settings(), log.schema) is None
    small, large = (
        load_costs(Settings(costs="complexity", model_options={"dim": dim, "hidden": [8]}), log.schema)
        for dim in (2, 16)
    )
    assert small.total(["user"]) != large.total(["user"])
    (tmp_path / "costs.toml").write_text('unit = "ms"\ndefault = 2.0\n')
    costs = load_costs(Settings(costs=str(tmp_path / "costs.toml")), log.schema)
    assert (costs.total(["user", "ad"]), costs.unit) == (4.0, "ms")


def test_names_of_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("auto") == resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(InputError, match="'gpu'.*cpu, cuda"):
        resolve_device("gpu")
    with pytest.raises(InputError, match="'cuda:1'.*1 GPUs.*lpfs doctor"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("cuda")


def test_checked_settings_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings, saved = check_settings(Settings(source=("log.csv",), device="cpu"))
    assert settings.source == (str(tmp_path / "log.csv"),)
    assert saved is None


def test_rows_of_one_class_raise_an_error(tmp_path):
    log = known_truth(tmp_path / "log", rows=600, label=lambda row: float(row < 480 and row % 2))
    with pytest.raises(InputError, match=r"test rows \(120\).*one class.*0 positive.*give more rows"):
        split_dataset(log).check_labels(force=True)


def test_timer_adds_the_seconds_of_a_stage():
    timer = StageTimer(CONSOLE)
    with timer.stage("search", "search"):
        pass
    first = timer.seconds["search"]
    with timer.stage("search", "search again"):
        pass
    assert timer.seconds["search"] > first > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"optimizer": "adagard"}, "adagard"), ({"lr": -1.0}, "lr.*-1"), ({"precision": "f8"}, "f8")],
)
def test_settings_of_the_training_are_checked_before_the_data_is_read(changes, message):
    with pytest.raises(InputError, match=message):
        check_settings(Settings(source=("missing.csv",), device="cpu", **changes))


def test_saved_model_of_other_vocabularies_cannot_be_planned(log, tmp_path):
    model = make_model("mlp", log.schema, dim=2, hidden=(4,))
    saved = SavedModel(model, {"fingerprint": log.fingerprint}, tmp_path / "model")
    assert build_plan(Settings(keep=3), log, tmp_path, CONSOLE, saved=saved).saved_model is saved
    other = SavedModel(model, {"fingerprint": "other"}, tmp_path / "model")
    with pytest.raises(DataError, match="vocabularies"):
        build_plan(Settings(keep=3), log, tmp_path, CONSOLE, saved=other)
