"""Loggers: metrics.jsonl, the progress display, TensorBoard and MLflow."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings

import pytest
import torch

import lpfs
from lpfs import _console
from lpfs.errors import MissingPackageError
from lpfs.gates.functions import gate_function
from lpfs.gates.module import Gates
from lpfs.methods.gate_search import GateSearch
from lpfs.train import loggers
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics
from lpfs.train.fit import fit
from lpfs.train.loggers import JsonLinesLogger, LoggerList, MLflowLogger, ProgressBar, TensorBoardLogger, metric_name
from lpfs.train.metrics import scores
from tests.helpers.tiny import log, tiny


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_after_the_checkpoint_are_truncated(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    log = JsonLinesLogger(path)
    log({"step": 1})
    position = log.position()
    log({"step": 2})
    assert lines(path) == [{"step": 1}, {"step": 2}]  # without closing: a killed process loses no line
    log.close()
    again = JsonLinesLogger(path, position)
    again({"step": 2, "again": True})
    again.close()
    assert lines(path) == [{"step": 1}, {"step": 2, "again": True}]


def test_without_a_position_lines_are_appended(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    log = JsonLinesLogger(path, None)
    log({"step": 2})
    log.close()
    assert lines(path) == [{"step": 1}, {"step": 2}]


def test_a_failing_logger_is_removed_and_the_others_continue(tmp_path):
    seen = []

    def broken(record):
        raise ConnectionError("no server")

    log = LoggerList([broken, seen.append], JsonLinesLogger(tmp_path / "metrics.jsonl"))
    with pytest.warns(UserWarning, match=r"logger function.*no server"):
        log.write({"step": 1})
    log.write({"step": 2})
    assert seen == lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert log.position() == (tmp_path / "metrics.jsonl").stat().st_size
    log.close()


def test_a_file_that_fails_has_no_position(tmp_path):
    log = LoggerList([], JsonLinesLogger(tmp_path / "metrics.jsonl"))
    log.lines.file.close()
    with pytest.warns(UserWarning, match="JsonLinesLogger"):
        log.write({"step": 1})
    assert log.position() is None
    log.close()
    assert LoggerList([]).position() is None


def test_histograms_are_not_written_as_lines(tmp_path):
    log = JsonLinesLogger(tmp_path / "metrics.jsonl")
    log({"step": 1, "alive": 3, "values": {"gates": [0.5, 1.0]}})
    log.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "alive": 3}]


class TextTerminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def state():
    layer = torch.nn.Linear(1, 1)
    return State(layer, torch.optim.SGD(layer.parameters()), Training(), steps=10)


def go(progress, state):
    progress.start(state)
    progress.loss = 0.25
    state.metrics = Metrics({"click": scores([0.0, 1.0], [0, 1])})
    for _ in range(10):
        state.step += 1
        state.rows += 100
        progress.update(state)
    progress.console.message("a word")
    progress.end(state)


def test_plain_lines_without_a_terminal(state, monkeypatch):
    monkeypatch.setattr(_console, "LINE_SECONDS", 0.0)
    out = io.StringIO()
    go(ProgressBar(stream=out), state)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 1 of 10: loss 0.25000, auc 1.00000"
    assert lines[1].startswith("step 2 of 10: loss 0.25000, auc 1.00000, ")
    assert "rows/s" in lines[1]
    assert lines[1].endswith("s left")
    assert lines[-1].startswith("trained 10 steps, 1,000 rows: loss 0.25000")
    assert "\x1b" not in out.getvalue()


def test_a_stage_that_was_complete_before_a_resume_ends_without_a_colon(state):
    out = io.StringIO()
    progress = ProgressBar(stream=out)
    state.step, state.rows = 200, 50_816
    progress.start(state)
    progress.end(state)
    assert out.getvalue() == "trained 200 steps, 50,816 rows\n"


def test_the_first_step_does_not_count_for_the_remaining_time(state, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loggers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(_console, "LINE_SECONDS", 0.0)
    out = io.StringIO()
    progress = ProgressBar(stream=out)
    progress.start(state)
    for now[0] in (30.0, 31.0):  # the first step takes 30 seconds, the second one
        state.step += 1
        state.rows += 100
        progress.update(state)
    assert out.getvalue().splitlines() == ["step 1 of 10", "step 2 of 10: 100 rows/s, 8 s left"]


def test_few_lines(state):
    out = io.StringIO()
    go(ProgressBar(stream=out), state)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["a", "trained"]


def test_a_bar_on_a_terminal(state, monkeypatch):
    monkeypatch.setattr(_console, "REFRESH_SECONDS", 0.0)
    out = TextTerminal()
    go(ProgressBar(stream=out), state)
    assert "10/10" in out.getvalue()
    assert "auc 1.00000" in out.getvalue()
    assert "a word" in out.getvalue()


def test_lines_on_a_terminal_without_rich(state, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(_console, "LINE_SECONDS", 0.0)
    out = TextTerminal()
    go(ProgressBar(stream=out), state)
    assert out.getvalue().startswith("step 1 of 10")


def test_quiet(state):
    out = TextTerminal()
    go(ProgressBar(quiet=True, stream=out), state)
    assert out.getvalue() == ""


def test_unknown_length_and_no_auc(state):
    state.steps = None
    state.metrics = Metrics({"click": scores([0.0, 1.0], [0, 0])})
    out = io.StringIO()
    progress = ProgressBar(stream=out)
    progress.start(state)
    assert progress.describe(state).startswith("auc -")
    assert "left" not in progress.describe(state)


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def test_the_number_of_live_gates_is_shown_and_logged(state):
    gates = Gates(["a", "b", "c"], gate_function("lpfs++"), steps=10)
    driver = GateSearch(gates, gates.optimizer(penalty=0.1))
    assert driver.describe(state) == ""
    seen = []
    state.note = lambda kind, values: seen.append((kind, values))
    driver.record_gates(state)
    with torch.no_grad():
        gates.x[0] = 0.0
    driver.record_gates(state)
    assert driver.describe(state) == "2 of 3 gates alive █▅"
    assert [values["alive"] for _, values in seen] == [3, 2]
    assert seen[1][1]["values"]["gates"][0] == 0.0


@pytest.mark.parametrize(("encoding", "blocks"), [("utf-8", "█▅▁"), ("ascii", "#-_")])
def test_blocks_are_replaced_if_the_terminal_cannot_encode_them(state, monkeypatch, encoding, blocks):
    monkeypatch.setattr(_console, "REFRESH_SECONDS", 0.0)
    raw = io.BytesIO()
    out = Terminal(raw, encoding=encoding)
    progress = ProgressBar(stream=out, extra_text=lambda state: "2 of 3 gates alive █▅▁")
    progress.start(state)
    progress.update(state)
    progress.end(state)
    out.flush()
    assert f"2 of 3 gates alive {blocks}" in raw.getvalue().decode(encoding)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """MLflow with a database in a directory; its own deprecation warnings are ignored."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sqlalchemy", reason="no MLflow with local storage here: pip install 'lpfs[mlflow]'")
        mlflow = pytest.importorskip("mlflow", reason="no MLflow here: pip install 'lpfs[mlflow]'")
        previous = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")
        yield mlflow
        mlflow.set_tracking_uri(previous)


@pytest.fixture
def mlflow(database, tmp_path, request):
    """An experiment for every test, with its files in the directory of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = (tmp_path / "artefacts").as_uri()
        database.set_experiment(experiment_id=database.create_experiment(request.node.name, place))
        yield database


def board(folder):
    """Read a directory with TensorBoard."""
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'lpfs[tensorboard]'"
    )
    events = module.EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
    events.Reload()
    return events


def runs_of(mlflow, request):
    """Return the MLflow runs of a test by name."""
    experiment = mlflow.get_experiment_by_name(request.node.name).experiment_id
    return {run.info.run_name: run for run in mlflow.MlflowClient().search_runs([experiment])}


def test_a_missing_package_is_named_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[tensorboard\]'"):
        TensorBoardLogger(tmp_path, 0)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[mlflow\]'"):
        MLflowLogger("x")
    for name in ("tensorboard", "mlflow"):
        with pytest.raises(MissingPackageError, match=name):
            lpfs.select("no log is read for it", tmp_path / "run", keep=2, **{name: True})
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_numbers_histograms_and_settings(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'lpfs[tensorboard]'")
    writer = TensorBoardLogger(tmp_path, 7, {"lr": 0.1, "optimizer": "adam", "clip": None})
    writer({"kind": "train", "step": 8, "loss": 0.5, "note": "text", "flag": True})
    writer({"kind": "search", "step": 8, "alive": 3, "values": {"gates": [0.0, 0.5, 1.0, 1.0]}})
    writer({"kind": "evaluate", "step": 8, "tasks": {"click": {"auc": 0.75, "entropy": None}}})
    writer.close()
    events = board(tmp_path)
    assert set(events.Tags()["scalars"]) >= {"train/loss", "search/alive", "evaluate/tasks/click/auc"}
    assert [(event.step, event.value) for event in events.Scalars("evaluate/tasks/click/auc")] == [(8, 0.75)]
    assert events.Tags()["histograms"] == ["search/gates"]
    values = events.Histograms("search/gates")[0].histogram_value
    assert (values.num, values.min, values.max) == (4.0, 0.0, 1.0)
    parameters = str(events.SummaryMetadata("_hparams_/session_start_info"))
    assert "optimizer" in parameters
    assert "adam" in parameters
    assert "clip" not in parameters


def test_a_search_logs_gate_histograms(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'lpfs[tensorboard]'")
    from lpfs.models import make_model

    data = log(tmp_path / "log")
    model = make_model("mlp", data.schema, dim=4, hidden=[8])
    config = lpfs.Training(tensorboard=True, quiet=True)
    lpfs.search(model, data.stream(64), keep=2, steps=60, folder=tmp_path / "run", config=config)
    events = board(tmp_path / "run" / "tensorboard")
    gates = events.Histograms("search/gates")
    assert len(gates) == 60
    assert gates[-1].histogram_value.num == 3
    assert events.Scalars("search/alive")[-1].value == 2


def test_mlflow_has_parameters_and_metrics_of_a_training(tmp_path, mlflow, request):
    data = log(tmp_path / "log")
    fit(tiny(), data.stream(64), "adam", valid=data.stream(64), steps=20, log_every=5, mlflow=True, quiet=True, lr=0.02)
    run = runs_of(mlflow, request)["fit"]
    assert run.data.params["lr"] == "0.02"
    assert run.data.params["optimizer"] == "adam"
    assert run.info.status == "FINISHED"
    assert 0.0 < run.data.metrics["evaluate/tasks/click/auc"] < 1.0
    steps = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [metric.step for metric in steps] == [5, 10, 15, 20]
    assert mlflow.active_run() is None


def test_a_failed_training_is_a_failed_run(tmp_path, mlflow, request):
    def broken(batch):
        raise ValueError("no weights")

    data = log(tmp_path / "log")
    with pytest.raises(ValueError, match="no weights"):
        fit(tiny(), data.stream(64), steps=5, mlflow=True, quiet=True, weights=broken)
    assert runs_of(mlflow, request)["fit"].info.status == "FAILED"


@pytest.mark.long
def test_mlflow_has_a_whole_run_with_its_files_and_its_model(tmp_path, mlflow, request):
    data = log(tmp_path / "log", rows=1200, days=3, tasks=("../<b>",))
    short = {"pretrain_steps": 60, "search_steps": 60, "model_options": {"dim": 4, "hidden": [8]}}
    lpfs.select(data, tmp_path / "the run", keep=2, mlflow=True, quiet=True, finish="hot", **short)
    runs = runs_of(mlflow, request)
    judges = {f"network-{number}" for number in range(4)}
    assert set(runs) == {"the run", "pretrain", "all_fields", "search", "hot_start", *judges}
    run = runs["the run"]
    assert runs["search"].data.tags["mlflow.parentRunId"] == run.info.run_id
    assert run.data.params["keep"] == "2"
    assert run.data.metrics["fields/kept"] == 2
    assert {"test/all_fields/auc", "test/hot_start/tasks/__/_b_/auc"} <= set(run.data.metrics)
    assert runs["search"].data.metrics["search/alive"] == 2
    client = mlflow.MlflowClient()
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"config.json", "selection.json", "kept_fields.txt", "history.parquet", "report.html", "model"}
    path = client.download_artifacts(run.info.run_id, "model", str(tmp_path))
    assert lpfs.load(path).names


def test_metric_names_are_safe_paths():
    assert metric_name("a/../b//c/.") == "a/__/b/c/_"
    assert metric_name('x"><script>') == "x___script_"
