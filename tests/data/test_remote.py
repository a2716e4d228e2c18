"""Logs and Datasets on an object store (fsspec's memory://) and on a web server."""

import functools
import http.server
import threading

import polars as pl
import pytest
import torch

import lpfs
from lpfs.data.dataset import Dataset
from lpfs.data.engines.base import LocalEngine
from lpfs.data.prepare import prepare
from lpfs.data.remote import absolute_path_or_url, as_url
from lpfs.data.store import columns
from lpfs.errors import DataError, MissingPackageError

fsspec = pytest.importorskip("fsspec")

OPTIONS = {"label": "click", "time": "day", "quiet": True}


@pytest.fixture(autouse=True)
def _private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LPFS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def log():
    days = [f"2014-05-0{day}" for day in (1, 2, 3) for _ in range(40)]
    ads = [f"ad{number % 7}" if number % 11 else None for number in range(120)]
    return pl.DataFrame(
        {"click": [number % 3 // 2 for number in range(120)], "day": days, "ad": ads, "price": range(120)}
    )


def rows_of(dataset):
    return [(batch.ids, batch.dense, batch.labels) for batch in dataset.stream(50)]


def equal(first, second):
    return all(torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def test_a_dataset_written_to_and_read_from_a_store(tmp_path, store, log):
    local = prepare(log, tmp_path / "local", **OPTIONS)
    remote = prepare(log, "memory://data/log", **OPTIONS)
    assert remote.fingerprint == local.fingerprint
    assert store.exists("/data/log/days/0002/columns.npy")
    assert equal(rows_of(local), rows_of(remote))
    assert remote.vocabulary("ad") == local.vocabulary("ad")
    remote.verify()
    opened = lpfs.Dataset("memory://data/log")
    assert opened.days() == local.days()
    assert opened.path == remote.path  # the cache is used again


def test_only_the_columns_read_are_downloaded(store, log, monkeypatch):
    monkeypatch.setattr(columns, "PACKED_BYTES", 0)
    prepare(log, "memory://data/log", **OPTIONS)
    opened = Dataset("memory://data/log")
    assert not (opened.path / "days").exists()
    list(opened.days(1, 2).stream(10, fields=["ad"]))
    fetched = sorted(path.relative_to(opened.path).as_posix() for path in (opened.path / "days").rglob("*.npy"))
    assert fetched == ["days/0001/f0000.npy", "days/0001/y0000.npy"]


def test_a_download_opens_as_a_dataset(store, log):
    prepare(log, "memory://data/log", **OPTIONS)
    first = Dataset("memory://data/log")
    again = Dataset(first.path)
    assert equal(rows_of(first), rows_of(again))


def test_an_existing_dataset_is_reused_or_replaced(store, log, capsys):
    prepare(log, "memory://data/log", label="click", time="day")
    prepare(log, "memory://data/log", label="click", time="day")
    assert "memory://data/log: exists already, made from the same source and options; reused" in capsys.readouterr().err
    with pytest.raises(DataError, match="memory://data/log exists and is not empty; choose another place, or"):
        prepare(log, "memory://data/log", min_count=11, **OPTIONS)
    first = Dataset("memory://data/log")
    second = prepare(log, "memory://data/log", min_count=11, replace=True, **OPTIONS)
    assert second.path != first.path
    assert Dataset("memory://data/log").fingerprint == second.fingerprint != first.fingerprint
    with pytest.raises(DataError, match="does not match the checksum in dataset.json"):
        first.vocabulary("ad")
    store.pipe("/other/thing.txt", b"mine")
    with pytest.raises(DataError, match="is not replaced"):
        prepare(log, "memory://other", replace=True, **OPTIONS)


def test_a_failure_leaves_nothing(store, log):
    with pytest.raises(DataError, match="no row is left"):
        prepare(log.with_columns(click=pl.lit(0)), "memory://data/log", negatives=1e-9, **OPTIONS)
    assert not store.exists("/data/log")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_log_in_a_store(tmp_path, store, log, form):
    (tmp_path / "log").mkdir()
    for index in range(2):
        path = tmp_path / "log" / f"part_{index}.{form}"
        part = log.slice(60 * index, 60)
        getattr(part, f"write_{form}")(path)
        store.put_file(str(path), f"/raw/{path.name}")
    store.pipe("/raw/_SUCCESS", b"")
    local = prepare(tmp_path / "log", tmp_path / "local", **OPTIONS)
    for number, source in enumerate(("memory://raw", f"memory://raw/part_*.{form}")):
        remote = prepare(source, tmp_path / f"remote{number}", **OPTIONS)
        assert remote.fingerprint == local.fingerprint
        assert equal(rows_of(local), rows_of(remote))


def test_missing_urls(tmp_path, store, log):
    with pytest.raises(DataError, match="memory://none/dataset.json: not found"):
        Dataset("memory://none")
    with pytest.raises(DataError, match="memory://none: no such file or directory"):
        prepare("memory://none", tmp_path / "out", **OPTIONS)
    with pytest.raises(DataError, match="nosuch://x/dataset.json: unknown kind of URL"):
        Dataset("nosuch://x")


def test_damage_is_detected(store, log, monkeypatch):
    monkeypatch.setattr(columns, "PACKED_BYTES", 0)
    prepare(log, "memory://data/log", **OPTIONS)
    data = bytearray(store.cat_file("/data/log/days/0001/f0000.npy"))
    data[-1] ^= 1
    store.pipe("/data/log/days/0001/f0000.npy", bytes(data))
    with pytest.raises(DataError, match="days/0001/f0000.npy does not match the checksum"):
        rows_of(Dataset("memory://data/log"))
    store.rm_file("/data/log/days/0001/f0000.npy")
    with pytest.raises(DataError, match="f0000.npy is damaged: it is missing"):
        Dataset("memory://data/log")


def test_from_a_web_server(tmp_path, log):
    pytest.importorskip("aiohttp")
    dataset = prepare(log, tmp_path / "web" / "log", **OPTIONS)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = Dataset(f"http://127.0.0.1:{server.server_port}/log")
        assert equal(rows_of(dataset), rows_of(opened))
        server.shutdown()


def test_select_and_compare_take_urls(store, log):
    from lpfs.pipeline.data import is_dataset
    from lpfs.pipeline.settings import Settings

    prepare(log, "memory://data/log", **OPTIONS)
    assert is_dataset(["memory://data/log"])
    assert not is_dataset(["memory://data"])
    assert Settings(source=("memory://data/log",)).with_absolute_paths().source == ("memory://data/log",)


def test_urls(tmp_path, monkeypatch):
    assert as_url(tmp_path) is None
    assert as_url("C:/data") is None
    assert as_url("s3:/bucket/log/") == "s3://bucket/log"
    assert as_url("file:///data/log") == "file:///data/log"
    (tmp_path / "s3:").mkdir()
    (tmp_path / "s3:" / "log").mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_url("s3:/log") is None  # a local directory of that name
    assert absolute_path_or_url("x") == str(tmp_path / "x")
    assert absolute_path_or_url("gs://b/x") == "gs://b/x"


def test_without_fsspec(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "fsspec.core", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'lpfs\[fsspec\]'"):
        Dataset("s3://bucket/log")


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_log_replaced_in_a_store_is_read_again_and_a_change_during_the_read_is_refused(
    tmp_path, store, log, form, monkeypatch
):
    def put(frame):
        frame.write_parquet(tmp_path / "log") if form == "parquet" else frame.write_csv(tmp_path / "log")
        store.pipe(f"/logs/log.{form}", (tmp_path / "log").read_bytes())
        return (tmp_path / "log").stat().st_size

    other = log.with_columns(click=1 - pl.col("click"))
    size = put(log)
    first = prepare(f"memory://logs/log.{form}", tmp_path / "first", **OPTIONS)
    assert put(other) == size
    second = prepare(f"memory://logs/log.{form}", tmp_path / "second", **OPTIONS)
    positives = [sum(day.positives for day in dataset.table) for dataset in (first, second)]
    assert positives == [log["click"].sum(), other["click"].sum()]
    assign_days = LocalEngine.assign_days
    monkeypatch.setattr(LocalEngine, "assign_days", lambda self: (put(log), assign_days(self))[1])
    with pytest.raises(DataError, match=f"memory://.*logs/log.{form}: changed while it was read"):
        prepare(f"memory://logs/log.{form}", tmp_path / "third", **OPTIONS)
    assert not (tmp_path / "third").exists()
