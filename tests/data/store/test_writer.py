import errno
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpfs.data.dataset import Dataset
from lpfs.data.store.columns import FolderWriter
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, FieldError, LockedError, StateError
from lpfs.schema import Field, Schema
from tests.helpers.datasets import SCHEMA, make_columns, make_dataset

ONE_FIELD = Schema((Field("a", cardinality=4),), label="y")


def write_two_rows(out: Path, **changes: object) -> None:
    columns = {"ids": {"a": np.array([1, 2])}, "labels": {"y": np.array([0, 1])}, **changes}
    with DatasetWriter(out, ONE_FIELD, fingerprint="1") as writer:
        writer.day("d").append(**columns)


def write_with(
    out: Path, action: Callable[[DatasetWriter], object], schema: Schema = ONE_FIELD, **options: Any
) -> None:
    """Call ``action`` inside the block of a writer."""
    with DatasetWriter(out, schema, fingerprint="1", **options) as writer:
        action(writer)


def is_empty(folder: Path) -> bool:
    return list(folder.iterdir()) == []


def test_the_directory_appears_only_at_the_end(tmp_path):
    out = tmp_path / "deep" / "log"
    with DatasetWriter(out, ONE_FIELD, fingerprint="1") as writer:
        writer.day("d").append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["log"]
    assert Dataset(out).rows == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_leaves_nothing(tmp_path, error):
    def fail(writer: DatasetWriter) -> None:
        writer.day("d").append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
        raise error

    with pytest.raises(error):
        write_with(tmp_path / "log", fail)
    assert is_empty(tmp_path)


KILLED = """
import sys, time, numpy as np
from lpfs.data import DatasetWriter
from lpfs.schema import Field, Schema
with DatasetWriter(sys.argv[1], Schema((Field("a", cardinality=4),), label="y"), fingerprint="1") as writer:
    writer.day("d").append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_run_leaves_no_partial_dataset_and_the_next_run_cleans_up(tmp_path):
    out = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        leftover = next(path for path in tmp_path.iterdir() if path.is_dir())
        write_two_rows(tmp_path / "other")
        with pytest.raises(LockedError, match=f"pid {process.pid} "):
            write_two_rows(out)
        assert leftover.exists(), "the directory of a running writer was removed"
        process.send_signal(signal.SIGKILL)
    assert not out.exists()
    assert leftover.exists()
    write_two_rows(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "other"]
    Dataset(out).verify()


def test_a_full_disk_is_a_data_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self: object, values: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FolderWriter, "close", full)
    with pytest.raises(DataError, match=r"No space left on device.*free some space"):
        write_two_rows(tmp_path / "log")
    assert is_empty(tmp_path)


def test_an_existing_dataset_is_only_changed_with_replace(tmp_path):
    out = tmp_path / "log"
    write_two_rows(out)
    with pytest.raises(DataError, match="not empty"):
        write_two_rows(out)
    with DatasetWriter(out, ONE_FIELD, fingerprint="2", replace=True) as writer:
        writer.day("d").append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
    assert (Dataset(out).fingerprint, Dataset(out).rows) == ("2", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_other_files_are_never_replaced(tmp_path):
    out = tmp_path / "log"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="choose another"):
        write_with(out, print, replace=True)
    assert (out / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="not a (folder|directory)"):
        write_two_rows(tmp_path / "file")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ids": {"a": np.array([1, 4])}}, "id 4, but its cardinality is 4"),
        ({"ids": {"a": np.array([-1, 1])}}, "negative"),
        ({"ids": {"a": np.array([0.5, 1])}}, "integers"),
        ({"ids": {"a": np.array([1])}}, "one value for each of 2 rows"),
        ({"ids": {}}, "'a' is missing"),
        ({"ids": {"a": np.array([1, 2]), "b": np.array([1, 2])}}, "'b' is not in the schema"),
        ({"ids": {}, "dense": {"a": np.array([1.0, 2.0])}}, "is categorical, but was passed as another kind"),
        ({"labels": {"y": np.array([0.0, np.nan])}}, "label 'y' must be a finite number"),
        ({"labels": {}}, "label 'y' is missing"),
    ],
)
def test_invalid_columns_raise(tmp_path, values, message):
    with pytest.raises((DataError, FieldError), match=message):
        write_two_rows(tmp_path / "log", **values)
    assert is_empty(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": {"x": np.array([1.0, np.inf]), "wide": np.ones((2, 3))}}, "infinite"),
        ({"dense": {"x": np.ones(2), "wide": np.ones((2, 4))}}, "2 rows of 3 numbers"),
        ({"bags": {"bag": (np.array([2, 3]), np.array([1, 0]))}}, "lengths"),
        ({"bags": {"bag": (np.array([2]), np.array([-1, 2]))}}, "lengths >= 0"),
    ],
)
def test_invalid_numbers_and_bags_raise(tmp_path, change, message):
    columns = {**make_columns(0, 2), **change}
    with pytest.raises(DataError, match=message):
        write_with(tmp_path / "log", lambda writer: writer.day("d").append(**columns), SCHEMA)
    assert is_empty(tmp_path)


def test_an_append_that_raises_writes_nothing(tmp_path):
    with DatasetWriter(tmp_path / "log", SCHEMA, fingerprint="1") as writer:
        day = writer.day("d")
        day.append(**make_columns(0, 3))
        invalid = {"labels": {"click": np.array([0, 1]), "like": np.array([np.nan, 0])}}
        with pytest.raises(DataError):
            day.append(**{**make_columns(3, 5), **invalid})
        day.append(**make_columns(3, 5))
    (batch,) = Dataset(tmp_path / "log").stream(10)
    assert batch.ids[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_the_final_schema_may_omit_fields(tmp_path):
    open_schema = Schema((Field("constant"), Field("a"), Field("b")), label="y")
    with DatasetWriter(tmp_path / "log", open_schema, fingerprint="1") as writer:
        day = writer.day("d")
        for first in (0, 300):
            values = np.arange(first, first + 10)
            day.append(ids={"constant": values * 0, "a": values, "b": values % 3}, labels={"y": values % 2})
        for name in open_schema.names:
            writer.vocabulary(name, [name], note=name)
        writer.schema = Schema((Field("b", cardinality=3), Field("a", cardinality=310)), label="y")
    dataset = Dataset(tmp_path / "log")
    dataset.verify()
    (batch,) = dataset.stream(100)
    assert batch.ids[-1].tolist() == [0, 309]
    assert dataset.vocabulary("a") == ["a"]
    assert dataset.vocabulary_about("b") == {"note": "b"}
    manifest = json.loads((tmp_path / "log" / "dataset.json").read_text())
    assert sorted(manifest["vocabularies"]["columns"]) == ["v0000", "v0000.ends", "v0001", "v0001.ends"]
    assert sorted(manifest["days"][0]["columns"]) == ["f0000", "f0001", "y0000"]


def test_a_final_schema_that_does_not_fit_raises(tmp_path):
    for fields, message in (
        ((Field("a", cardinality=2),), "id 2"),
        ((Field("a", "numeric"),), "written as categorical, but the final schema says numeric"),
        ((Field("z", cardinality=2),), "no field 'z'"),
    ):

        def change(writer: DatasetWriter, final: Schema) -> None:
            writer.day("d").append(ids={"a": np.array([1, 2])}, labels={"y": np.array([0, 1])})
            writer.schema = final

        final = Schema(fields, label="y")
        with pytest.raises((DataError, FieldError), match=message):
            write_with(tmp_path / "log", lambda writer, final=final: change(writer, final), Schema((Field("a"),), "y"))
    assert is_empty(tmp_path)


def test_names_with_paths_create_no_files_outside(tmp_path):
    names = ["../../up", 'a "b"\n', "/etc/passwd", "ünï", " ", "NUL\0"]
    schema = Schema(tuple(Field(name, cardinality=3) for name in names), label="../y")
    with DatasetWriter(tmp_path / "log", schema, fingerprint="1") as writer:
        day = writer.day("../../day")
        day.append(ids={name: np.array([2]) for name in names}, labels={"../y": np.array([1])})
        writer.vocabulary(names[0], ["../"])
    assert [path.name for path in tmp_path.iterdir()] == ["log"]
    dataset = Dataset(tmp_path / "log")
    assert (dataset.schema.names, dataset.days()) == (tuple(names), ("../../day",))


def test_wrong_use_raises(tmp_path):
    writer = DatasetWriter(tmp_path / "log", ONE_FIELD, fingerprint="1")
    with pytest.raises(StateError, match="with"):
        writer.day("d")
    with pytest.raises(FieldError, match="cross"):
        DatasetWriter(tmp_path / "log", Schema((Field("a", "cross"),)), fingerprint="1")
    for message, action in (
        ("twice", lambda writer: [writer.day("d"), writer.day("d")]),
        ("no rows", lambda writer: writer.day("d")),
        ("negative_rate", lambda writer: writer.day("d", negative_rate=0.0)),
        ("plain name", lambda writer: writer.attach("../truth.json", {})),
    ):
        with pytest.raises(DataError, match=message):
            write_with(tmp_path / "log", action)
    with DatasetWriter(tmp_path / "log", ONE_FIELD, fingerprint="1") as writer:
        day = writer.day("d")
        day.append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
    with pytest.raises(StateError, match="closed"):
        day.append(ids={"a": np.array([1])}, labels={"y": np.array([0])})
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_days_can_be_written_in_parallel(tmp_path):
    with DatasetWriter(tmp_path / "log", ONE_FIELD, fingerprint="1") as writer:
        days = [writer.day(name) for name in ("one", "two")]
        for value in (1, 2):
            for day in days:
                day.append(ids={"a": np.array([value])}, labels={"y": np.array([0])})
    (batch,) = Dataset(tmp_path / "log").stream(10)
    assert batch.ids[:, 0].tolist() == [1, 2, 1, 2]


def test_files_do_not_depend_on_the_chunks(tmp_path):
    small, large = make_dataset(tmp_path / "small", chunk=3), make_dataset(tmp_path / "large", chunk=1000)
    for path in (tmp_path / "small").rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (tmp_path / "large" / path.relative_to(small.path)).read_bytes()
    assert large.rows == 100
