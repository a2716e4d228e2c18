"""TensorBoard and MLflow: the real packages, with storage in a folder; skipped where they are not installed."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
from tiny import log, tiny

import lpfs
from lpfs.errors import MissingPackageError
from lpfs.train.fit import fit
from lpfs.train.loggers import MLflowLogger, TensorBoardLogger, metric_name


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """MLflow with a database in a folder; what it deprecates of its own is not ours."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("sqlalchemy", reason="no MLflow with local storage here: pip install 'lpfs[mlflow]'")
        mlflow = pytest.importorskip("mlflow", reason="no MLflow here: pip install 'lpfs[mlflow]'")
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}")
        yield mlflow
        mlflow.set_tracking_uri(before)


@pytest.fixture
def mlflow(database, tmp_path, request):
    """An experiment for every test, its files in the folder of the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = (tmp_path / "artefacts").as_uri()
        database.set_experiment(experiment_id=database.create_experiment(request.node.name, place))
        yield database


def board(folder):
    """What TensorBoard itself reads out of a folder."""
    module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'lpfs[tensorboard]'"
    )
    found = module.EventAccumulator(str(folder), {"scalars": 0, "histograms": 0})
    found.Reload()
    return found


def runs_of(mlflow, request):
    """The runs of a test, by name."""
    own = mlflow.get_experiment_by_name(request.node.name).experiment_id
    return {each.info.run_name: each for each in mlflow.MlflowClient().search_runs([own])}


def test_what_is_not_there_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[tensorboard\]'"):
        TensorBoardLogger(tmp_path, 0)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[mlflow\]'"):
        MLflowLogger("x")
    for name in ("tensorboard", "mlflow"):
        with pytest.raises(MissingPackageError, match=name):
            lpfs.select("no log is read for it", tmp_path / "run", keep=2, **{name: True})
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_given_every_number_and_the_settings(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'lpfs[tensorboard]'")
    writer = TensorBoardLogger(tmp_path, 7, {"lr": 0.1, "optimizer": "adam", "clip": None})
    writer({"kind": "train", "step": 8, "loss": 0.5, "note": "text", "flag": True})
    writer({"kind": "search", "step": 8, "alive": 3, "values": {"gates": [0.0, 0.5, 1.0, 1.0]}})
    writer({"kind": "evaluate", "step": 8, "tasks": {"click": {"auc": 0.75, "entropy": None}}})
    writer.close()
    found = board(tmp_path)
    assert set(found.Tags()["scalars"]) >= {"train/loss", "search/alive", "evaluate/tasks/click/auc"}
    assert [(each.step, each.value) for each in found.Scalars("evaluate/tasks/click/auc")] == [(8, 0.75)]
    assert found.Tags()["histograms"] == ["search/gates"]
    values = found.Histograms("search/gates")[0].histogram_value
    assert (values.num, values.min, values.max) == (4.0, 0.0, 1.0)
    told = str(found.SummaryMetadata("_hparams_/session_start_info"))
    assert "optimizer" in told
    assert "adam" in told
    assert "clip" not in told


def test_a_search_leaves_gate_histograms(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'lpfs[tensorboard]'")
    from lpfs.models import make_model

    data = log(tmp_path / "log")
    model = make_model("mlp", data.schema, dim=4, hidden=[8])
    config = lpfs.Training(tensorboard=True, quiet=True)
    lpfs.search(model, data.stream(64), keep=2, steps=60, folder=tmp_path / "run", config=config)
    found = board(tmp_path / "run" / "tensorboard")
    gates = found.Histograms("search/gates")
    assert len(gates) == 60
    assert gates[-1].histogram_value.num == 3
    assert found.Scalars("search/alive")[-1].value == 2


def test_mlflow_has_parameters_and_metrics_of_a_training(tmp_path, mlflow, request):
    data = log(tmp_path / "log")
    fit(
        tiny(),
        data.stream(64),
        "adam",
        valid=data.stream(64),
        steps=20,
        log_every=5,
        mlflow=True,
        quiet=True,
        lr=0.02,
    )
    run = runs_of(mlflow, request)["fit"]
    assert run.data.params["lr"] == "0.02"
    assert run.data.params["optimizer"] == "adam"
    assert run.info.status == "FINISHED"
    assert 0.0 < run.data.metrics["evaluate/tasks/click/auc"] < 1.0
    steps = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
    assert [each.step for each in steps] == [5, 10, 15, 20]
    assert mlflow.active_run() is None


def test_a_training_that_fails_is_a_run_that_failed(tmp_path, mlflow, request):
    def broken(batch):
        raise ValueError("no weights")

    data = log(tmp_path / "log")
    with pytest.raises(ValueError, match="no weights"):
        fit(tiny(), data.stream(64), steps=5, mlflow=True, quiet=True, weights=broken)
    assert runs_of(mlflow, request)["fit"].info.status == "FAILED"


def test_mlflow_has_a_whole_run_with_its_files_and_its_model(tmp_path, mlflow, request):
    data = log(tmp_path / "log", rows=1200, days=3, tasks=("../<b>",))
    short = {"pretrain_steps": 60, "search_steps": 60, "model_options": {"dim": 4, "hidden": [8]}}
    lpfs.select(data, tmp_path / "the run", keep=2, mlflow=True, quiet=True, finish="hot", **short)
    found = runs_of(mlflow, request)
    assert set(found) == {"the run", "pretrain", "all_fields", "search", "hot_start"}
    whole = found["the run"]
    assert found["search"].data.tags["mlflow.parentRunId"] == whole.info.run_id
    assert whole.data.params["keep"] == "2"
    assert whole.data.metrics["fields/kept"] == 2
    assert {"test/all_fields/auc", "test/hot_start/tasks/__/_b_/auc"} <= set(whole.data.metrics)
    assert found["search"].data.metrics["search/alive"] == 2
    client = mlflow.MlflowClient()
    names = {each.path for each in client.list_artifacts(whole.info.run_id)}
    assert names == {"config.json", "selection.json", "kept_fields.txt", "history.parquet", "report.html", "model"}
    taken = client.download_artifacts(whole.info.run_id, "model", str(tmp_path))
    assert lpfs.load(taken).names


def test_names_of_metrics_are_no_way_out():
    assert metric_name("a/../b//c/.") == "a/__/b/c/_"
    assert metric_name('x"><script>') == "x___script_"
