"""Sources that change, disappear or are not files: one error that names the file, and nothing is written."""

import os
import signal
import socket

import polars as pl
import pytest

from lpfs.data import prepare as prepare_module
from lpfs.data.engines.base import LocalEngine
from lpfs.data.planning import plan_log
from lpfs.data.prepare import prepare, run_plan
from lpfs.data.sources import find_files
from lpfs.errors import DataError

FRAME = pl.DataFrame({"click": [0, 1] * 20, "ad": ["a", "b", "c", "d"] * 10, "price": range(40)})
OTHER = FRAME.with_columns(ad=pl.col("ad").str.to_uppercase())
STEPS = ("fingerprint", "assign_days", "observe", "encode")


def write(frame, path):
    frame.write_parquet(path) if path.suffix == ".parquet" else frame.write_csv(path)


def overwrite(path):
    """Replace the content by other content of the same size, in place; keep the time of the last change."""
    status, size = path.stat(), path.stat().st_size
    other = path.with_suffix(".other" + path.suffix)
    write(OTHER, other)
    data = other.read_bytes()
    other.unlink()
    assert len(data) == size
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap(path):
    """Replace the file by another one, as a log rotation does."""
    other = path.with_suffix(".other" + path.suffix)
    write(FRAME.head(30), other)
    other.replace(path)


def append(path):
    with path.open("ab") as file:
        file.write(b"1,z,7\n")


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("change", [overwrite, swap, append, os.unlink], ids=lambda change: change.__name__)
def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, name, step, change):
    path = tmp_path / name
    write(FRAME, path)
    original = getattr(LocalEngine, step)

    def changed_afterwards(self, *arguments):
        result = original(self, *arguments)
        result = iter(list(result)) if step == "encode" else result
        change(path)
        return result

    monkeypatch.setattr(LocalEngine, step, changed_afterwards)
    with pytest.raises(DataError, match=f"{name}: (changed while|cannot be read: No such file)") as caught:
        prepare(path, tmp_path / "out", label="click", parts=2, quiet=True)
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == [name] * path.exists()


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
@pytest.mark.parametrize("change", [overwrite, swap, os.unlink], ids=lambda change: change.__name__)
def test_a_source_that_changes_after_the_plan_is_refused(tmp_path, name, change):
    path = tmp_path / name
    write(FRAME, path)
    prepare(path, tmp_path / "out", label="click", parts=2, quiet=True)
    plan = plan_log(path, label="click", parts=2)
    change(path)
    for out in ("out", "new"):
        with pytest.raises(DataError, match=f"{name}: (changed while|cannot be read: No such file)"):
            run_plan(plan, tmp_path / out, replace=True)
    assert not (tmp_path / "new").exists()
    assert prepare_module.Dataset(tmp_path / "out").rows == FRAME.height


@pytest.mark.parametrize("name", ["log.csv", "log.parquet"])
def test_a_source_deleted_between_two_reads_of_the_plan(tmp_path, monkeypatch, name):
    path = tmp_path / name
    write(FRAME, path)

    def find_and_delete(source):
        files = find_files(source)
        path.unlink()
        return files

    monkeypatch.setattr("lpfs.data.sources.find_files", find_and_delete)
    monkeypatch.setattr("lpfs.data.sources._is_parquet", lambda file: name.endswith("parquet"))
    with pytest.raises(DataError, match=f"{name}: cannot be read: No such file"):
        prepare(path, tmp_path / "out", label="click", quiet=True)


def make_special(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.chdir(path.parent)  # the address of a socket may have 107 characters
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "directory"])
@pytest.mark.parametrize("source", ["log.csv", ".", "*.csv"])
def test_pipes_sockets_devices_and_directories_are_not_read(tmp_path, monkeypatch, kind, source):
    monkeypatch.chdir(tmp_path)
    make_special(tmp_path / "log.csv", kind)
    write(FRAME, tmp_path / "other.csv")
    if kind == "directory" and source != ".":  # a directory is a source; a pattern does not match it
        write(FRAME, tmp_path / "log.csv" / "part.csv")
        assert prepare(tmp_path / source, tmp_path / "out", label="click", parts=2, quiet=True).rows == FRAME.height
        return
    signal.alarm(20)  # ends the process if a pipe is opened, which waits for a writer
    try:
        with pytest.raises(DataError, match=f"log.csv is a (named )?{kind}, not a regular file"):
            prepare(tmp_path / source, tmp_path / "out", label="click", parts=2, quiet=True)
    finally:
        signal.alarm(0)
    assert not (tmp_path / "out").exists()


def test_a_pipe_as_the_file_of_fields_or_a_broken_link_in_a_directory(tmp_path):
    write(FRAME, tmp_path / "log.csv")
    os.mkfifo(tmp_path / "fields.toml")
    with pytest.raises(DataError, match="fields.toml is a named pipe"):
        prepare(tmp_path / "log.csv", tmp_path / "out", label="click", fields=tmp_path / "fields.toml", quiet=True)
    (tmp_path / "day_2.csv").symlink_to("nowhere")
    with pytest.raises(DataError, match="day_2.csv: cannot be read: No such file"):
        prepare(tmp_path, tmp_path / "out", label="click", quiet=True)
