"""Datasets from somebody else: names that leave the folder, forged sizes and types, damaged columns."""

import json
import os
import zlib

import numpy as np
import pytest

from lpfs._fileio import CHECKSUM_BYTES, json_checksum
from lpfs.data.dataset import Dataset
from lpfs.data.store import columns
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError
from lpfs.schema import Field, Schema
from tests.helpers.datasets import update_checksums

fsspec = pytest.importorskip("fsspec")

SCHEMA = Schema(
    (Field("ad", cardinality=300), Field("price", "numeric"), Field("tags", "multi", cardinality=9)), "click"
)


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LPFS_CACHE", str(tmp_path / "cache"))


def write_dataset(out, rows=40):
    numbers = np.arange(rows)
    with DatasetWriter(out, SCHEMA, fingerprint="1") as writer:
        for day in range(2):
            writer.day(f"day {day}").append(
                ids={"ad": numbers * 7 % 300},
                dense={"price": np.where(numbers % 5, numbers, np.nan)},
                bags={"tags": (np.arange(2 * rows) % 9, np.full(rows, 2))},
                labels={"click": numbers % 2},
            )
        writer.vocabulary("ad", [f"ad{number}" for number in range(298)])
        writer.attach("note.json", {"a": 1})
    return Dataset(out)


@pytest.fixture
def dataset(tmp_path):
    return write_dataset(tmp_path / "log")


def read_manifest(dataset):
    return json.loads((dataset.path / "dataset.json").read_text())


def forge(dataset, values):
    """Write a manifest with a valid checksum."""
    values.pop("checksum", None)
    (dataset.path / "dataset.json").write_text(json.dumps({**values, "checksum": json_checksum(values)}))


def hostile_entry(data=b"{}"):
    return {"bytes": len(data), "checksum": f"{zlib.crc32(data):08x}"}


NAMES = [
    "../evil.json",
    "/tmp/lpfs-evil.json",
    "days/../../evil.json",
    "evil.pth",
    "days/0000/evil.pth",
    "a\\b.json",
    "",
    ".",
]


@pytest.mark.parametrize("name", NAMES)
def test_only_names_of_the_layout_are_opened(dataset, name):
    (dataset.path.parent / "evil.json").write_text("{}")
    values = read_manifest(dataset)
    values["files"][name] = hostile_entry()
    forge(dataset, values)
    with pytest.raises(DataError, match="name"):
        Dataset(dataset.path)


@pytest.mark.parametrize("name", NAMES)
def test_a_remote_dataset_writes_only_into_its_cache(dataset, store, name, tmp_path):
    values = read_manifest(dataset)
    values["files"][name] = hostile_entry()
    forge(dataset, values)
    store.put(str(dataset.path), "/evil", recursive=True)
    store.pipe("/evil/evil.json", b"{}")
    store.pipe(f"/evil/{name}" if name else "/evil/empty", b"{}")
    with pytest.raises(DataError, match="name"):
        Dataset("memory://evil")
    assert not any(path.name.startswith("evil") for path in tmp_path.rglob("*"))


def test_a_folder_does_not_redirect_to_a_url(dataset, store):
    store.put(str(dataset.path), "/evil", recursive=True)
    (dataset.path / "remote.json").write_text(json.dumps({"url": "memory://evil"}))
    for path in dataset.path.rglob("*.npy"):
        path.unlink()
    with pytest.raises(DataError, match="missing"):
        Dataset(dataset.path)
    assert not list(dataset.path.rglob("*.npy"))


def test_a_link_out_of_the_folder_is_refused(dataset, tmp_path):
    (dataset.path / "note.json").rename(tmp_path / "note.json")
    (dataset.path / "note.json").symlink_to(tmp_path / "note.json")
    with pytest.raises(DataError, match="leaves"):
        Dataset(dataset.path)


@pytest.mark.parametrize("text", ["{", "3", '{"url": 3}', "{}"])
def test_a_damaged_cache_is_reported(dataset, store, text):
    store.put(str(dataset.path), "/data", recursive=True)
    cached = Dataset("memory://data").path
    (cached / "remote.json").write_text(text)
    with pytest.raises(DataError, match=r"remote\.json"):
        Dataset(cached)


@pytest.mark.parametrize("packed_bytes", [0, 1 << 16])
def test_a_flipped_bit_of_any_column_is_detected_when_it_is_read(tmp_path, monkeypatch, packed_bytes):
    monkeypatch.setattr(columns, "PACKED_BYTES", packed_bytes)
    dataset = write_dataset(tmp_path / "log")
    good_rows = [tensor.tolist() for batch in dataset.stream(7) for tensor in (batch.ids, batch.dense, batch.labels)]
    for path in sorted(dataset.path.rglob("*.npy")):
        good = path.read_bytes()
        for place in (128, len(good) // 2, len(good) - 1):
            damaged = bytearray(good)
            damaged[place] ^= 16
            path.write_bytes(damaged)
            opened = Dataset(dataset.path)
            with pytest.raises(DataError, match=rf"{path.name} is damaged: its checksum"):
                opened.vocabulary("ad") if path.parent.name == "vocab" else list(opened.stream(7, shuffle=True))
        path.write_bytes(good)
    opened = Dataset(dataset.path)
    assert [t.tolist() for batch in opened.stream(7) for t in (batch.ids, batch.dense, batch.labels)] == good_rows


def test_each_part_of_a_long_column_is_checked_when_it_is_read(tmp_path):
    rows = 3 * CHECKSUM_BYTES // 4
    with DatasetWriter(tmp_path / "log", Schema((Field("price", "numeric"),), "click"), fingerprint="1") as writer:
        writer.day("d").append(dense={"price": np.arange(rows)}, labels={"click": np.arange(rows) % 2})
    path = tmp_path / "log" / "days" / "0000" / "f0000.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    dataset = Dataset(tmp_path / "log")
    for _ in range(2):
        prices = [batch.dense[:, 0] for batch in dataset.part(1000, rows // 2).stream(5000)]
        assert np.concatenate(prices).tolist() == list(range(1000, rows // 2))
    with pytest.raises(DataError, match=r"f0000\.npy is damaged: its checksum"):
        list(dataset.part(rows - 10, rows).stream(5))
    with pytest.raises(DataError, match=r"f0000\.npy is damaged: its checksum"):
        dataset.verify()


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("f0000", {"items": 10**15}),
        ("f0000", {"items": -1}),
        ("f0000", {"items": 40.0}),
        ("f0000", {"start": 0}),
        ("f0000", {"start": 10**15}),
        ("f0000", {"start": "128"}),
        ("f0000", {"dtype": "|O"}),
        ("f0000", {"dtype": "<u4,<u4"}),
        ("f0001.missing", {"dtype": "|O"}),
        ("f0001.missing", {"dtype": "<f8", "items": 5}),
        ("f0001.missing", {"items": 1}),
        ("f0002.offsets", {"items": 3}),
        ("y0000", {"items": 39}),
    ],
)
def test_columns_that_do_not_fit_their_file_are_refused(dataset, column, change):
    values = read_manifest(dataset)
    values["days"][0]["columns"][column].update(change)
    forge(dataset, values)
    with pytest.raises(DataError, match="damaged"):
        Dataset(dataset.path)


def test_a_day_cannot_claim_more_rows_than_its_files_hold(dataset):
    values = read_manifest(dataset)
    values["days"][0]["rows"] = 10**12
    for entry in values["days"][0]["columns"].values():
        entry["items"] = 10**12
    forge(dataset, values)
    with pytest.raises(DataError, match="needs 1000000000000 items"):
        Dataset(dataset.path)
    values["files"]["days/0000/columns.npy"]["bytes"] = 10**15
    forge(dataset, values)
    with pytest.raises(DataError, match="bytes instead of 1000000000000000"):
        Dataset(dataset.path)


def test_invalid_offsets_and_text_are_refused(dataset):
    entry = read_manifest(dataset)["days"][0]["columns"]["f0002.offsets"]
    path = dataset.path / "days" / "0000" / "columns.npy"
    data = bytearray(path.read_bytes())
    data[entry["start"] + 16 : entry["start"] + 24] = (70).to_bytes(8, "little")  # more than the next offset
    path.write_bytes(data)
    path = dataset.path / "vocab" / "columns.npy"
    path.write_bytes(path.read_bytes().replace(b"ad0", b"\xff\xff\xff", 1))
    update_checksums(dataset.path)
    opened = Dataset(dataset.path)
    with pytest.raises(DataError, match="damaged"):
        list(opened.stream(10))
    with pytest.raises(DataError, match="damaged"):
        opened.vocabulary("ad")


def test_a_wide_dataset_has_few_files_and_few_syncs(tmp_path, monkeypatch):
    schema = Schema(tuple(Field(f"c{index}", cardinality=5) for index in range(300)), "click")
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with DatasetWriter(tmp_path / "wide", schema, fingerprint="1") as writer:
        for day in range(4):
            ids = {field.name: np.full(3, (index + day) % 5) for index, field in enumerate(schema)}
            writer.day(f"day {day}").append(ids=ids, labels={"click": np.zeros(3)})
        for name in schema.names:
            writer.vocabulary(name, [name])
    files = [path for path in (tmp_path / "wide").rglob("*") if path.is_file()]
    assert len(files) == 7, "dataset.json, schema.json, the vocabularies and four days"
    assert len(synced) < 20
    dataset = Dataset(tmp_path / "wide")
    assert dataset.vocabulary("c299") == ["c299"]
    (batch,) = dataset.days(2, 3).stream(10)
    assert batch.ids[0].tolist() == [(index + 2) % 5 for index in range(300)]
