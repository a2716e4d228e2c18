"""train, search and prune, one at a time: each reads the directory that the one before has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from lpfs._console import Console
from lpfs._fileio import read_json
from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.models import make_model
from lpfs.pipeline import plan as plan_module
from lpfs.pipeline.plan import build_plan
from lpfs.pipeline.results import data_reference, write_record
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.single_stage import _plan_all_rows, run_prune, run_search_stage, run_train
from lpfs.pipeline.splits import split_dataset
from lpfs.pipeline.stages import set_gates_from_selection
from lpfs.schema import Selection
from lpfs.serialization import load, load_metadata, save
from tests.helpers.known_truth import STRONG, TINY, known_truth

NEW = {"resume": False, "replace": False, "quiet": True}
SEARCH = {"lr": 0.05, "search_steps": 120, "keep": 3}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("stage") / "log", rows=3000)


@pytest.fixture(scope="module")
def trained(log, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    return run_train(Settings(source=(str(log.path),), **TINY), run_dir, rows="early", **NEW)


@pytest.fixture(scope="module")
def searched(log, trained, tmp_path_factory):
    """The result of a search, and the paths from which checkpoints were loaded."""
    loaded, original = [], plan_module.load_saved

    def counted(path):
        loaded.append(path)
        return original(path)

    settings = Settings(source=(str(log.path),), checkpoint=trained["folder"], **SEARCH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "load_saved", counted)
        result = run_search_stage(settings, tmp_path_factory.mktemp("searched") / "run", **NEW)
    return result, loaded


def test_train_saves_a_model_of_all_fields(log, trained):
    assert (trained["steps"], trained["rows"]) == (150, split_dataset(log).early.rows)
    assert trained["fingerprint"] == log.fingerprint
    model_dir = Path(trained["model"])
    assert set(load(model_dir).names) == set(log.schema.names)
    metadata = load_metadata(model_dir)
    assert (metadata["data"], metadata["metrics"]) == (str(log.path), trained["metrics"])


def test_run_is_not_resumed_on_other_rows(log, trained):
    settings, run_dir = Settings(source=(str(log.path),), **TINY), Path(trained["folder"])
    with pytest.raises(InputError, match="--rows early.*train"):
        run_train(settings, run_dir, rows="train", resume=True, replace=False, quiet=True)
    again = run_train(settings, run_dir, rows="early", resume=True, replace=False, quiet=True)
    assert again["metrics"] == trained["metrics"]


def test_search_writes_the_record_that_it_returns(searched, trained):
    result, loaded = searched
    assert loaded == [Path(trained["model"])]  # once
    run_dir = Path(result["folder"])
    record = read_json(run_dir / "selection.json")
    assert set(record.pop("files")) == {"history.parquet", "kept_fields.txt"}
    assert {"folder": str(run_dir), **record} == result
    assert set(STRONG) < set(record["kept"])
    assert record["validation"].keys() == {"all_fields", "gated"}
    assert (run_dir / "kept_fields.txt").read_text().split() == record["kept"]
    assert set(load(run_dir / "model").names) == set(record["fields"])  # absorbed, not pruned


def test_rows_are_checked_before_training(tmp_path):
    log = known_truth(tmp_path / "log", rows=600, label=lambda row: float(row < 480 and row % 2))
    settings = Settings(source=(str(log.path),), pretrain_steps=1, device="cpu")
    with pytest.raises(InputError, match="test rows.*one class.*give more rows"):
        run_train(settings, tmp_path / "run", **NEW)


@pytest.fixture
def absorbed(tmp_path):
    """Return a directory as a search writes it, of an untrained model of which two fields are kept."""
    log = known_truth(tmp_path / "log", rows=120)
    model, kept = make_model("mlp", log.schema, dim=2, hidden=(4,)), ("user", "ad")
    set_gates_from_selection(model, Selection(kept, tuple(set(log.schema.names) - set(kept))))
    selection = absorb(model).in_order(log.schema.names)
    save(model, tmp_path / "searched" / "model", **data_reference(log))
    write_record(tmp_path / "searched", {**selection.to_json(), "seed": 3}, selection)
    return tmp_path / "searched"


@pytest.mark.parametrize(("cut", "name"), [(True, "cut"), (False, "zeros")])
def test_prune_saves_the_kept_fields_and_their_certificate(absorbed, tmp_path, cut, name):
    result = run_prune(absorbed, [], tmp_path / "small", cut=cut, quiet=True)
    assert result["certificates"].keys() == {name}
    assert (result["kept"], result["seed"]) == (["user", "ad"], 3)
    assert load(tmp_path / "small" / "model").reads.names == ("user", "ad")
    assert load_metadata(tmp_path / "small" / "model")["data"] == str(tmp_path / "log")


def test_search_needs_a_trained_model(log, tmp_path):
    with pytest.raises(InputError, match="trained model.*lpfs train"):
        run_search_stage(Settings(source=(str(log.path),), keep=3), tmp_path / "run", **NEW)


def test_search_on_all_rows_has_its_own_directory(log, trained, tmp_path):
    settings = Settings(source=(str(log.path),), checkpoint=trained["folder"], **SEARCH)
    result = run_search_stage(settings, tmp_path / "run", rows="all", **NEW)
    assert result["splits"]["train"]["rows"] == 2700
    assert (tmp_path / "run" / "all" / "search").is_dir()
    with pytest.raises(InputError, match="--rows all.*search"):
        run_search_stage(settings, tmp_path / "run", resume=True, replace=False, quiet=True)


@pytest.mark.parametrize("cut", [True, False])
def test_prune_writes_the_smaller_model(log, searched, tmp_path, cut):
    result, _ = searched
    data = [] if cut else [str(log.path)]
    pruned = run_prune(Path(result["folder"]), data, tmp_path / "small", cut=cut, quiet=True)
    record = read_json(tmp_path / "small" / "selection.json")
    assert set(record.pop("files")) == {"kept_fields.txt"}
    assert {"folder": str(tmp_path / "small"), **record} == pruned
    assert (record["kept"], record["made"]) == (result["kept"], result["made"])
    certificate = record["certificates"]["cut" if cut else "zeros"]
    assert certificate["certified"] is True
    assert record["max_logit_change"] == certificate["max_logit_change"] <= certificate["bound"]
    assert record["savings"]["kept"]["table_bytes"] < record["savings"]["all_fields"]["table_bytes"]
    assert load(tmp_path / "small" / "model").reads.names == tuple(record["kept"])


def test_prune_raises_on_a_pruned_model_and_on_occupied_directories(searched, tmp_path):
    search_dir = Path(searched[0]["folder"])
    with pytest.raises(InputError, match="contains the model to prune; choose another directory"):
        run_prune(search_dir, [], search_dir, replace=True, quiet=True)
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(InputError, match="not empty; choose another directory.*--replace"):
        run_prune(search_dir, [], tmp_path, replace=True, quiet=True)
    small = tmp_path / "small"
    run_prune(search_dir, [], small, quiet=True)
    run_prune(search_dir, [], small, replace=True, quiet=True)
    with pytest.raises(InputError, match="pruned already"):
        run_prune(small, [], tmp_path / "smaller", quiet=True)


@pytest.mark.parametrize(("steps", "repeated"), [(None, True), (20, False)])
def test_rows_are_shuffled_if_a_search_on_all_rows_repeats_them(log, tmp_path, steps, repeated):
    settings = Settings(source=(str(log.path),), keep=3, batch_size=64, search_steps=steps, device="cpu")
    plan = _plan_all_rows(build_plan(settings, log, tmp_path, Console(quiet=True)))
    assert not plan.splits.shuffled  # these rows are in time order
    assert plan.steps.shuffle is plan.steps.separate_gate_rows is repeated
