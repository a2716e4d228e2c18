import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from made import SCHEMA, make

from lpfs._fileio import json_checksum
from lpfs.data.dataset import Dataset
from lpfs.errors import DataError, FieldError, InputError


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    return make(tmp_path / "log")


def first_rows(dataset: Dataset) -> tuple[int, int]:
    rows = [int(row) for batch in dataset.stream(7) for row in batch.ids[:, 0]]
    assert rows == list(range(rows[0], rows[-1] + 1))
    return rows[0], rows[-1] + 1


def test_what_it_says_of_itself(dataset):
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
    assert first_rows(dataset.days(1, 3)) == (40, 100)
    assert first_rows(dataset.days(2)) == (41, 100)
    assert first_rows(dataset.days(-1)) == (41, 100)
    assert first_rows(dataset.days(0, -1)) == (0, 41)
    assert dataset.days(1, 3).days() == ("day 1", "day 2")
    assert dataset.days(1, 3).days(0, 1).days() == ("day 1",)
    with pytest.raises(InputError, match="there are 3"):
        dataset.days(3, 5)


def test_parts_and_splits(dataset):
    train, valid, test = dataset.split(0.7, 0.1, 0.2)
    assert [first_rows(part) for part in (train, valid, test)] == [(0, 70), (70, 80), (80, 100)]
    assert train.days() == ("day 0", "day 1", "day 2")
    assert [first_rows(part) for part in dataset.split(days=(1, 2))] == [(0, 40), (40, 41), (41, 100)]
    assert first_rows(dataset.days(2).part(3, 9)) == (44, 50)
    assert first_rows(train.days(2, 3)) == (41, 70)
    assert first_rows(dataset.days(1, 3).split(0.5, 0.5)[1]) == (70, 100)


@pytest.mark.parametrize(
    "cut",
    [
        lambda it: it.split(),
        lambda it: it.split(0.5, 0.5, days=(1,)),
        lambda it: it.split(0.5, 0.4),
        lambda it: it.split(1.5, -0.5),
        lambda it: it.split(0.999, 0.001),
        lambda it: it.split(days=(2, 1)),
        lambda it: it.split(days=(0,)),
        lambda it: it.split(days=(9,)),
        lambda it: it.part(5, 5),
        lambda it: it.part(0, 101),
        lambda it: it.attached("truth.json"),
    ],
)
def test_wrong_cuts_are_refused(dataset, cut):
    with pytest.raises(InputError):
        cut(dataset)


def test_vocabularies_may_be_absent(dataset):
    assert dataset.vocabulary("row") is None
    assert dataset.vocabulary_about("row") == {}
    with pytest.raises(FieldError, match="no field 'nope'"):
        dataset.vocabulary("nope")


def every_file(dataset: Dataset) -> list[Path]:
    return sorted(path for path in dataset.path.rglob("*") if path.is_file())


def test_verify_finds_any_flipped_bit(dataset):
    dataset.verify()
    for path in every_file(dataset):
        good = path.read_bytes()
        for at in {0, len(good) // 2, len(good) - 2}:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(DataError, match=r"damaged|not written by lpfs|format version"):
                dataset.verify()
        path.write_bytes(good)
    dataset.verify()


def test_opening_finds_files_that_are_cut_or_gone(dataset):
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


def test_another_version_is_named(dataset):
    rewrite(dataset, version=99, lpfs="9.9")
    with pytest.raises(DataError, match=r"version 99 \(written by lpfs '9.9'\).*reads version 1"):
        Dataset(dataset.path)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"format": "parquet"}'])
def test_foreign_json_is_no_dataset(tmp_path, text):
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(DataError, match="not written by lpfs"):
        Dataset(tmp_path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_garbage_is_damage(tmp_path, data):
    (tmp_path / "dataset.json").write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        Dataset(tmp_path)


def test_no_dataset_there(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        Dataset(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"no dataset\.json"):
        Dataset(tmp_path)


def test_columns_are_plain_npy_files(dataset):
    folder = dataset.path / "days" / "0000"
    assert np.load(folder / "f0000.npy", mmap_mode="r").tolist() == list(range(40))
    assert np.load(folder / "f0000.npy").dtype == np.uint32
    assert np.load(folder / "f0002.npy").dtype == np.uint8
    assert np.load(folder / "f0004.npy").shape == (40, 3)
    assert "f0003.missing.npy" in os.listdir(folder)
    assert "f0004.missing.npy" not in os.listdir(folder)
