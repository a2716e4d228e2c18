"""A run directory is started once; only files of a run are replaced, and only after the checks of the new run."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch

from lpfs._fileio import is_run, json_checksum
from lpfs.errors import InputError
from lpfs.export import export_run
from lpfs.pipeline import run_dir as run_dir_module
from lpfs.pipeline.results import read_record
from lpfs.pipeline.run_dir import locked_run, log_run, mlflow_run, recover_run, starting_run
from lpfs.pipeline.settings import Settings
from lpfs.report import report
from lpfs.serialization import find_model_dir
from tests.helpers.kills import killed_at

SETTINGS = Settings(source=("clicks.csv",), label="click", keep=3)


def start(run_dir, settings=SETTINGS, *, resume=False, replace=False, inputs=()):
    with starting_run(run_dir, settings, resume=resume, replace=replace, inputs=inputs):
        pass


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_new_run_saves_its_settings(tmp_path):
    start(tmp_path / "run")
    assert is_run(tmp_path / "run")
    assert Settings.load(tmp_path / "run") == SETTINGS
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved.pop("checksum") == json_checksum(saved)
    assert saved == json.loads(json.dumps({"format": "lpfs-run", **SETTINGS.to_json(), "threads": 1}))
    assert names_in(tmp_path / "run") == ["config.json"]


def test_run_is_started_once_and_resumed_with_the_same_settings(tmp_path):
    run = tmp_path / "run"
    start(run, resume=True)  # there is nothing to resume: the run is started
    start(run)  # nothing was trained: the run is started again
    (run / "pretrain").mkdir()
    with pytest.raises(InputError, match=r"contains a run.*--resume.*--replace"):
        start(run)
    start(run, resume=True)
    with pytest.raises(InputError, match=r"keep=3.*\b4\b.*same settings.*another directory"):
        start(run, SETTINGS.updated(keep=4), resume=True)
    start(run, SETTINGS.updated(keep=4), replace=True)
    assert not (run / "pretrain").exists()
    assert Settings.load(run).keep == 4


def test_run_is_resumed_on_as_many_threads(tmp_path):
    torch.set_num_threads(2)
    start(tmp_path / "run")
    torch.set_num_threads(1)
    start(tmp_path / "run", resume=True)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("config", ["{}", "[]", "no JSON", json.dumps({"keep": 3})])
@pytest.mark.parametrize("replace", [False, True])
def test_directory_that_is_not_a_run_is_never_changed(tmp_path, config, replace):
    (tmp_path / "config.json").write_text(config)
    (tmp_path / ".git").mkdir()
    with pytest.raises(InputError, match="not empty and is not a run; choose another directory"):
        start(tmp_path, replace=replace)
    assert (tmp_path / "config.json").read_text() == config
    assert names_in(tmp_path) == [".git", "config.json"]


def test_file_is_not_a_run_directory(tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(InputError, match="is not a run"):
        start(tmp_path / "notes.txt", replace=True)


def test_replacing_removes_only_files_of_a_run(tmp_path):
    start(tmp_path)
    for name in ("search-3", "try-2", "pretrain-fleet", "search-fleet"):
        (tmp_path / name).mkdir()
    (tmp_path / "selection.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("text")
    start(tmp_path, SETTINGS.updated(keep=5), replace=True)
    assert names_in(tmp_path) == ["config.json", "notes.txt"]
    assert Settings.load(tmp_path).keep == 5


def test_failed_start_restores_the_replaced_run(tmp_path):
    start(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "kept_fields.txt").write_text("a\n")

    def fail():
        with starting_run(tmp_path, SETTINGS.updated(label="clik"), resume=False, replace=True):
            (tmp_path / "data").mkdir()
            raise RuntimeError("no such label")

    with pytest.raises(RuntimeError, match="no such label"):
        fail()
    assert names_in(tmp_path) == ["config.json", "kept_fields.txt", "model"]
    assert Settings.load(tmp_path) == SETTINGS


def test_a_run_is_complete_after_a_kill_at_any_moment_of_its_replacement(tmp_path):
    run, new = tmp_path / "run", SETTINGS.updated(keep=4)
    old_files = ["config.json", "data", "kept_fields.txt", "model", "notes.txt", "search-3"]

    def replace():
        with locked_run(run, print), starting_run(run, new, resume=False, replace=True):
            (run / ".data.lpfs-x.tmp").mkdir()
            (run / ".data.lpfs-x.tmp").rename(run / "data")
            (run / "data" / "dataset.json").write_text("new")

    def fail():
        with suppress(RuntimeError), locked_run(run, print), starting_run(run, new, resume=False, replace=True):
            (run / "data").mkdir()
            raise RuntimeError

    kept = []
    for work in (replace, fail):
        number, is_killed = 0, True
        while is_killed:
            number += 1
            shutil.rmtree(run, ignore_errors=True)
            start(run)
            for name in ("data", "model", "search-3"):
                (run / name).mkdir()
            (run / "kept_fields.txt").write_text("old")
            (run / "notes.txt").write_text("text")
            is_killed = killed_at(number, run, work)
            left, messages = names_in(run), []
            for _ in range(2):
                recover_run(run, messages.append)
                with locked_run(run, messages.append):  # as select --resume does
                    pass
            is_old = Settings.load(run) == SETTINGS
            assert names_in(run) == (old_files if is_old else ["config.json", "data", "notes.txt"]), left
            assert (len(messages), ".replaced" in left) in ((0, False), (1, False), (1, True)), left
            assert all(str(run) in message and "restored" in message for message in messages)
            kept.append(is_old)
        assert number > 12
    assert kept[0]
    assert kept[-1]
    assert False in kept


def test_kill_before_the_configuration_is_written_leaves_an_empty_directory(tmp_path):
    run = tmp_path / "run"

    def begin():
        with locked_run(run, print):
            start(run)

    number = 1
    while killed_at(number, run, begin):
        begin()
        assert names_in(run) == ["config.json"], number
        shutil.rmtree(run)
        number += 1
    assert number > 3


def test_links_of_a_foreign_directory_are_not_restored(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "thesis.txt").write_text("text")
    (tmp_path / "run").mkdir()
    for name in (".replaced", ".moving", ".removed"):
        (tmp_path / "run" / name).symlink_to(victim)
        recover_run(tmp_path / "run", pytest.fail)
        with locked_run(tmp_path / "run", pytest.fail):
            pass
        assert names_in(victim) == ["thesis.txt"]


@pytest.mark.parametrize("as_source", [True, False])
def test_input_inside_a_run_is_not_replaced(tmp_path, as_source):
    start(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    settings = SETTINGS.updated(source=(str(data),)) if as_source else SETTINGS
    with pytest.raises(InputError, match=f"{data} is inside {tmp_path}.*choose another directory"):
        start(tmp_path, settings, replace=True, inputs=() if as_source else (data,))
    assert data.is_dir()


class FakeMlflow:
    """Records the calls that a run makes."""

    def __init__(self):
        self.calls, self.metrics = [], {}

    @contextmanager
    def start_run(self, **options):
        self.calls.append(options["run_name"])
        yield
        self.calls.append("end")

    def log_params(self, values):
        self.calls.append("params")

    def log_metrics(self, values):
        self.metrics |= values

    def log_artifact(self, path):
        self.calls.append(path.rpartition("/")[2])

    def log_artifacts(self, path, name):
        self.calls.append(name)


RECORD = {"kept": ["a"], "dropped": ["b", "c"], "metrics": {"pruned": {"auc": 0.75}}, "savings": {}}


def test_mlflow_run_logs_the_record_and_the_files(tmp_path, monkeypatch):
    mlflow = FakeMlflow()
    monkeypatch.setattr(run_dir_module, "need_mlflow", lambda: mlflow)
    (tmp_path / "report.html").write_text("")
    with mlflow_run(SETTINGS.updated(mlflow=True), tmp_path) as module:
        log_run(module, tmp_path, RECORD)
    assert mlflow.calls == [tmp_path.name, "params", "report.html", "model", "end"]
    assert mlflow.metrics == {"test/pruned/auc": 0.75, "fields/kept": 1.0, "fields/dropped": 2.0}


def test_run_without_mlflow_starts_none(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir_module, "need_mlflow", lambda: pytest.fail("mlflow was imported"))
    with mlflow_run(SETTINGS, tmp_path) as module:
        assert module is None


def test_failure_of_mlflow_is_a_warning(tmp_path):
    def fail(_):
        raise OSError("server is gone")

    with pytest.warns(UserWarning, match="complete.*MLflow.*server is gone"):
        log_run(SimpleNamespace(log_metrics=fail), tmp_path, RECORD)


def test_failed_start_leaves_no_file_of_the_new_run(tmp_path):
    start(tmp_path)
    (tmp_path / "pretrain").mkdir()

    def fail():
        with starting_run(tmp_path, SETTINGS.updated(keep=4), resume=False, replace=True):
            (tmp_path / "log.txt").write_text("new")
            (tmp_path / "search-2").mkdir()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert names_in(tmp_path) == ["config.json", "pretrain"]
    assert Settings.load(tmp_path) == SETTINGS


def test_commands_say_how_to_finish_a_killed_run(tmp_path):
    run_dir = tmp_path / "my run"
    start(run_dir)
    for read in (report, export_run, find_model_dir, read_record):
        with pytest.raises(InputError, match=f"not finished; .*lpfs select --resume --out '{run_dir}'"):
            read(run_dir)
    (run_dir / "model").mkdir()  # of train
    with pytest.raises(InputError, match="pass a directory that select, search or compare wrote"):
        report(run_dir)


def test_directory_without_a_configuration_is_no_run(tmp_path):
    assert is_run(tmp_path) is False
    (tmp_path / "config.json").write_text("no JSON")
    assert is_run(tmp_path) is False


def test_run_can_be_logged_inside_another_mlflow_run(tmp_path, monkeypatch):
    """mlflow raises an error for a second active run unless it is nested."""

    class ActiveMlflow(FakeMlflow):
        def start_run(self, **options):
            assert options.get("nested")
            return super().start_run(**options)

    mlflow = ActiveMlflow()
    monkeypatch.setattr(run_dir_module, "need_mlflow", lambda: mlflow)
    with mlflow_run(SETTINGS.updated(mlflow=True), tmp_path / "inner"):
        pass
    assert mlflow.calls == ["inner", "params", "end"]
