"""The Dataset of a run, and whether a saved model and a Dataset fit each other."""

from __future__ import annotations

import polars as pl
import pytest

from lpfs._console import Console
from lpfs.data.prepare import prepare
from lpfs.errors import DataError, InputError
from lpfs.models import make_model
from lpfs.pipeline.data import (
    check_dataset_fits,
    dataset_for_model,
    is_dataset,
    prepare_dataset,
    settings_for_model,
    training_dataset,
)
from lpfs.pipeline.results import data_reference
from lpfs.pipeline.settings import Settings
from lpfs.serialization import load_saved, save
from tests.helpers.known_truth import SMALL, known_truth

CONSOLE = Console(quiet=True)
CSV = Settings(label="click")


def make_table(rows=400, offset=0):
    numbers = range(offset, offset + rows)
    return pl.DataFrame(
        {
            "click": [int(n % 3 == 0) for n in numbers],
            "day": [n * 10 // rows for n in range(rows)],
            "user": [f"u{n % 7}" for n in numbers],
            "ad": [f"a{n % 5}" for n in numbers],
        }
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare(make_table(), tmp_path_factory.mktemp("data") / "data", label="click", time="day", quiet=True)


@pytest.fixture
def saved(dataset, tmp_path):
    model = make_model("mlp", dataset.schema, **SMALL)
    return load_saved(save(model, tmp_path / "trained" / "model", **data_reference(dataset)))


def test_given_dataset_is_used_as_it_is(dataset, tmp_path):
    assert prepare_dataset(dataset, CSV, tmp_path, CONSOLE) is dataset
    by_path = prepare_dataset(None, CSV.updated(source=(str(dataset.path),)), tmp_path, CONSOLE)
    assert by_path.fingerprint == dataset.fingerprint
    assert is_dataset([str(dataset.path)])
    assert not is_dataset([str(dataset.path), str(dataset.path)])
    assert not list(tmp_path.iterdir())


def test_log_is_prepared_in_the_run_directory(tmp_path):
    make_table().write_csv(tmp_path / "log.csv")
    settings = CSV.updated(source=(str(tmp_path / "log.csv"),), time="day")
    prepared = prepare_dataset(None, settings, tmp_path / "run", CONSOLE)
    assert prepared.path == tmp_path / "run" / "data"
    assert len(prepared.days()) == 10
    (tmp_path / "log.csv").unlink()
    resumed = prepare_dataset(None, settings, tmp_path / "run", CONSOLE, resume=True)
    assert resumed.fingerprint == prepared.fingerprint
    with pytest.raises(InputError, match="no log.*files, a table, or the directory of a Dataset"):
        prepare_dataset(None, CSV, tmp_path / "other", CONSOLE)


def test_rows_without_a_time_column_are_split_at_random(tmp_path):
    """The Dataset equals one that was prepared with these options."""
    table = make_table().drop("day")
    prepared = prepare_dataset(table, CSV, tmp_path / "run", CONSOLE)
    options = {"shuffle": True, "parts": 20, "train": 18, "bins": "auto"}
    expected = prepare(table, tmp_path / "expected", label="click", quiet=True, **options)
    assert prepared.fingerprint == expected.fingerprint
    assert prepared.settings == expected.settings
    with_parts = prepare_dataset(table, CSV.updated(prepare={"parts": 4}), tmp_path / "parts", CONSOLE)
    assert with_parts.settings["options"]["shuffle"] is True
    assert len(with_parts.days()) == 4
    ordered = prepare_dataset(table, CSV.updated(prepare={"shuffle": False}), tmp_path / "ordered", CONSOLE)
    assert not ordered.settings["options"]["shuffle"]


def test_bins_depend_on_the_backbone(tmp_path):
    table = make_table().drop("day").with_columns(price=pl.int_range(400) % 97 / 7)
    kinds = {
        model: prepare_dataset(table, CSV.updated(model=model), tmp_path / model, CONSOLE).schema["price"].kind
        for model in ("mlp", "dlrm")
    }
    assert kinds == {"mlp": "categorical", "dlrm": "numeric"}


def test_log_is_encoded_like_the_rows_of_the_model(dataset, saved, tmp_path):
    table = make_table(offset=3).with_columns(new=pl.lit("x"))
    settings = Settings(label="click", time="day")
    prepared = prepare_dataset(table, settings, tmp_path / "run", CONSOLE, saved=saved)
    assert prepared.schema.names == dataset.schema.names
    assert prepared.settings["like"]["fingerprint"] == dataset.fingerprint
    check_dataset_fits(saved, prepared)


def test_rows_for_a_model_come_from_a_dataset_or_from_a_log(dataset, saved, tmp_path):
    out = tmp_path / "rows"
    assert dataset_for_model(saved, [str(dataset.path)], out).fingerprint == dataset.fingerprint
    assert not out.exists()
    make_table(rows=50).write_csv(tmp_path / "log.csv")
    for like in (None, dataset.path):
        rows = dataset_for_model(saved, [str(tmp_path / "log.csv")], out, like=like, quiet=True)
        assert rows.rows == 50
        assert rows.schema.names == dataset.schema.names


def test_training_dataset_is_found_beside_the_model_or_at_its_old_place(dataset, saved, tmp_path):
    assert training_dataset(saved).fingerprint == dataset.fingerprint
    other = prepare(make_table(rows=90), tmp_path / "trained" / "data", label="click", time="day", quiet=True)
    assert other.fingerprint != dataset.fingerprint
    assert training_dataset(saved).fingerprint == dataset.fingerprint  # the fingerprint decides
    moved = load_saved(save(saved.model, tmp_path / "moved" / "model", data="/nowhere", fingerprint="x"))
    with pytest.raises(DataError, match="/nowhere.*--like"):
        training_dataset(moved)


def test_dataset_that_does_not_fit_the_model_raises_an_error(dataset, saved, tmp_path):
    tables = {
        "'ad'": make_table().drop("ad"),
        "user.*ids": make_table().with_columns(user=pl.int_range(400).cast(pl.String)),
        "other vocabularies.*--like": make_table().with_columns(user=pl.concat_str(pl.lit("x"), "user")),
    }
    for number, (message, table) in enumerate(tables.items()):
        other = prepare(table, tmp_path / str(number), label="click", time="day", min_count=1, quiet=True)
        with pytest.raises(DataError, match=message):
            check_dataset_fits(saved, other)


def test_settings_take_the_backbone_of_the_saved_model(saved):
    settings = settings_for_model(Settings(), saved)
    assert settings.model == "mlp"
    assert (settings.model_options["dim"], settings.model_options["hidden"]) == (4, [8])
    assert settings_for_model(Settings(model="mlp", model_options={"hidden": (8,)}), saved) == settings
    for changes, message in (
        ({"model": "fm"}, "'mlp', not 'fm'.*--model"),
        ({"model_options": {"dim": 3}}, "dim=4, not 3"),
        ({"must_drop": ("ad",)}, "must_drop.*'ad'"),
    ):
        with pytest.raises(InputError, match=message):
            settings_for_model(Settings(**changes), saved)


def test_model_without_a_fingerprint_fits_any_dataset_with_its_fields(tmp_path):
    log = known_truth(tmp_path / "log")
    saved = load_saved(save(make_model("mlp", log.schema, **SMALL), tmp_path / "model"))
    check_dataset_fits(saved, log)
