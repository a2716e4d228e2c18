import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from lpfs._fileio import json_checksum
from lpfs.data.dataset import Dataset
from lpfs.data.simulate import simulate
from lpfs.data.store import columns
from lpfs.errors import DataError, FieldError, InputError
from tests.helpers.datasets import SCHEMA, make_dataset


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make_dataset(tmp_path / "log")


def row_range(dataset: Dataset) -> tuple[int, int]:
    rows = [int(row) for batch in dataset.stream(7) for row in batch.ids[:, 0]]
    assert rows == list(range(rows[0], rows[-1] + 1))
    return rows[0], rows[-1] + 1


def test_attributes_describe_the_dataset(dataset):
    assert dataset.schema == SCHEMA
    assert (dataset.rows, len(dataset), dataset.fingerprint) == (100, 100, "made")
    assert dataset.settings == {"by": "tests"}
    assert dataset.days() == ("day 0", "day 1", "day 2")
    assert [(day.rows, day.positives, day.negative_rate) for day in dataset.table] == [
        (40, 20, 0.5),
        (1, 0, 0.5),
        (59, 30, 0.5),
    ]
    assert "100 rows, 5 fields, days day 0 to day 2" in repr(dataset)
    assert pickle.loads(pickle.dumps(dataset)).rows == 100


def test_days(dataset):
    assert row_range(dataset.days(1, 3)) == (40, 100)
    assert row_range(dataset.days(2)) == (41, 100)
    assert row_range(dataset.days(-1)) == (41, 100)
    assert row_range(dataset.days(0, -1)) == (0, 41)
    assert dataset.days(1, 3).days() == ("day 1", "day 2")
    assert dataset.days(1, 3).days(0, 1).days() == ("day 1",)
    with pytest.raises(InputError, match="there are 3"):
        dataset.days(3, 5)


def test_parts_and_splits(dataset):
    train, valid, test = dataset.split(0.7, 0.1, 0.2)
    assert [row_range(part) for part in (train, valid, test)] == [(0, 70), (70, 80), (80, 100)]
    assert train.days() == ("day 0", "day 1", "day 2")
    assert [row_range(part) for part in dataset.split(days=(1, 2))] == [(0, 40), (40, 41), (41, 100)]
    assert row_range(dataset.days(2).part(3, 9)) == (44, 50)
    assert row_range(train.days(2, 3)) == (41, 70)
    assert row_range(dataset.days(1, 3).split(0.5, 0.5)[1]) == (70, 100)


@pytest.mark.parametrize(
    "operation",
    [
        lambda dataset: dataset.split(),
        lambda dataset: dataset.split(0.5, 0.5, days=(1,)),
        lambda dataset: dataset.split(0.5, 0.4),
        lambda dataset: dataset.split(1.5, -0.5),
        lambda dataset: dataset.split(0.999, 0.001),
        lambda dataset: dataset.split(days=(2, 1)),
        lambda dataset: dataset.split(days=(0,)),
        lambda dataset: dataset.split(days=(9,)),
        lambda dataset: dataset.part(5, 5),
        lambda dataset: dataset.part(0, 101),
        lambda dataset: dataset.attached("truth.json"),
    ],
)
def test_invalid_parts_raise(dataset, operation):
    with pytest.raises(InputError):
        operation(dataset)


def count_labels(dataset: Dataset) -> tuple[int, int]:
    positives = sum(int(batch.labels[:, 0].count_nonzero()) for batch in dataset.stream(64, fields=[]))
    return positives, dataset.rows - positives


def test_label_counts_equal_a_count_over_the_rows(tmp_path):
    """Complete days, days cut at both ends, and a part inside one day."""
    dataset = simulate(tmp_path / "log", "small", rows=1003, days=4)
    views = [
        dataset,
        *dataset.split(0.5, 0.25, 0.25),
        *dataset.split(0.7, 0.1, 0.2),
        *dataset.split(days=(1, 3)),
        dataset.days(1, 3).part(10, 300),
        dataset.part(300, 310),
        dataset.part(7, 8),
    ]
    for view in views:
        assert view.label_counts() == count_labels(view)
    assert sum(view.label_counts()[0] for view in dataset.split(0.7, 0.1, 0.2)) == dataset.label_counts()[0]


def test_label_counts_read_only_the_labels_of_cut_days(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "PACKED_BYTES", 0)
    dataset = make_dataset(tmp_path / "log")
    for path in dataset.path.rglob("*.npy"):
        if path.name != "y0000.npy" or path.parent.name == "0001":
            path.unlink()
    assert dataset.part(10, 50).label_counts() == (20, 20)
    for path in dataset.path.rglob("*.npy"):
        path.unlink()
    assert dataset.label_counts() == (50, 50)
    assert dataset.part(10, 50).label_counts() == (20, 20), "cached, also for an equal view"


def test_vocabularies_may_be_absent(dataset):
    assert dataset.vocabulary("row") is None
    assert dataset.vocabulary_about("row") == {}
    with pytest.raises(FieldError, match="no field 'nope'"):
        dataset.vocabulary("nope")


def every_file(dataset: Dataset) -> list[Path]:
    return sorted(path for path in dataset.path.rglob("*") if path.is_file())


def test_verify_detects_any_flipped_bit(dataset):
    dataset.verify()
    for path in every_file(dataset):
        good = path.read_bytes()
        for index in {0, len(good) // 2, len(good) - 2}:
            path.write_bytes(good[:index] + bytes([good[index] ^ 1]) + good[index + 1 :])
            with pytest.raises(DataError, match=r"damaged|not written by lpfs|format version"):
                dataset.verify()
        path.write_bytes(good)
    dataset.verify()


def test_opening_detects_truncated_and_missing_files(dataset):
    for path in every_file(dataset):
        good = path.read_bytes()
        path.write_bytes(good[:-2])
        with pytest.raises(DataError, match="damaged"):
            Dataset(dataset.path)
        path.unlink()
        with pytest.raises(DataError, match=r"damaged|no dataset\.json"):
            Dataset(dataset.path)
        path.write_bytes(good)
    assert Dataset(dataset.path).rows == 100


def rewrite(dataset: Dataset, **changes: object) -> None:
    path = dataset.path / "dataset.json"
    values = {**json.loads(path.read_text()), **changes}
    del values["checksum"]
    path.write_text(json.dumps({**values, "checksum": json_checksum(values)}))


def test_another_format_version_is_named(dataset):
    rewrite(dataset, version=99, lpfs="9.9")
    with pytest.raises(DataError, match=r"version 99 \(written by lpfs '9.9'\).*reads version 2"):
        Dataset(dataset.path)


@pytest.mark.parametrize("positives", [-1, 41, 1.5, None, "2"])
def test_an_invalid_number_of_positives_is_damage(dataset, positives):
    days = json.loads((dataset.path / "dataset.json").read_text())["days"]
    days[0]["positives"] = positives
    rewrite(dataset, days=days)
    with pytest.raises(DataError, match=r"damaged: day 'day 0' has .* positives in 40 rows"):
        Dataset(dataset.path)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"format": "parquet"}'])
def test_other_json_is_not_a_dataset(tmp_path, text):
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match="not written by lpfs"):
        Dataset(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_invalid_json_is_reported_as_damage(tmp_path, data):
    (tmp_path / "dataset.json").write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        Dataset(tmp_path)


def test_a_directory_without_a_dataset(tmp_path):
    with pytest.raises(DataError, match="not a directory"):
        Dataset(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no dataset\.json"):
        Dataset(tmp_path)


def test_long_columns_are_plain_npy_files(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "PACKED_BYTES", 0)
    dataset = make_dataset(tmp_path / "log")
    folder = dataset.path / "days" / "0000"
    assert np.load(folder / "f0000.npy", mmap_mode="r").tolist() == list(range(40))
    assert np.load(folder / "f0000.npy").dtype == np.uint32
    assert np.load(folder / "f0002.npy").dtype == np.uint8
    assert np.load(folder / "f0004.npy").shape == (40, 3)
    assert "f0003.missing.npy" in os.listdir(folder)
    assert "f0004.missing.npy" not in os.listdir(folder)


def test_short_columns_share_a_file(dataset):
    folder = dataset.path / "days" / "0000"
    assert os.listdir(folder) == ["columns.npy"]
    day = json.loads((dataset.path / "dataset.json").read_text())["days"][0]["columns"]
    entry = day["f0000"]
    ids = np.memmap(folder / "columns.npy", entry["dtype"], "r", entry["start"], entry["items"])
    assert ids.tolist() == list(range(40))
    assert np.load(folder / "columns.npy").dtype == np.uint8
    assert all(entry["start"] % 8 == 0 for entry in day.values())
