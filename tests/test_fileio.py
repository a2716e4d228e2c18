"""Atomic writes, checksums and staging directories: a file or directory is complete or absent."""

from __future__ import annotations

import json
import os
import stat
import warnings

import numpy as np
import pytest

from lpfs import _fileio
from lpfs._fileio import (
    CHECKSUM_BYTES,
    StagingDirectory,
    check_output_dir,
    file_checksum,
    fsync_tree,
    json_checksum,
    open_atomic,
    read_json,
    remove_temporary_files,
    safe_child,
    write_array_atomic,
    write_json,
    write_json_atomic,
    write_text_atomic,
)
from lpfs.errors import DataError, LockedError
from tests.helpers.kills import killed_at


def test_files_are_replaced_and_nothing_is_left_beside_them(tmp_path):
    path = tmp_path / "new" / "a.json"
    write_text_atomic(path, "old\r\n")
    assert path.read_bytes() == b"old\r\n"
    write_json_atomic(path, {"λ": np.float32(0.5), "path": tmp_path})
    assert read_json(path) == {"λ": 0.5, "path": str(tmp_path)}
    assert path.read_text("utf-8").startswith('{\n "λ": 0.5')
    write_array_atomic(path.with_suffix(".npy"), np.arange(3))
    assert np.load(path.with_suffix(".npy")).tolist() == [0, 1, 2]
    assert sorted(os.listdir(path.parent)) == ["a.json", "a.npy"]
    assert read_json(tmp_path / "missing.json") is None


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_text_atomic(path, "old")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json_atomic(path, {"auc": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        write_text_atomic(path, "\ud800")

    def fail_while_writing():
        with open_atomic(path) as file:
            file.write(b"new")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_while_writing()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]
    write_json_atomic(path, {"auc": float("nan")}, allow_nan=True)
    assert "NaN" in path.read_text()


def test_checksums(tmp_path):
    assert json_checksum({"a": 1, "b": 2}) == json_checksum({"b": 2, "a": 1}) != json_checksum({"a": 1, "b": 3})
    data = tmp_path / "a.bin"
    data.write_bytes(b"123456789")
    assert file_checksum(data) == "cbf43926"  # the check value of CRC-32
    data.write_bytes(b"")
    assert file_checksum(data) == "00000000"
    data.write_bytes(b"\1" * CHECKSUM_BYTES)
    first = file_checksum(data)
    data.write_bytes(b"\1" * CHECKSUM_BYTES + b"123456789")
    assert file_checksum(data) == first + "cbf43926", "one for each MiB"
    write_json(tmp_path / "a.json", {"λ": 1})
    assert json.loads((tmp_path / "a.json").read_text("ascii")) == {"λ": 1}


def test_a_staging_directory_becomes_the_output(tmp_path):
    out = tmp_path / "deep" / "data"
    staging = StagingDirectory(out)
    assert staging.path.parent == out.parent
    (staging.path / "sub").mkdir()
    (staging.path / "sub" / "dataset.json").write_text("{}")
    fsync_tree(staging.path)
    assert not out.exists()
    staging.commit()
    staging.discard()
    assert (out / "sub" / "dataset.json").exists()
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~_umask()
    assert os.listdir(out.parent) == ["data"]


def _umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_a_discarded_staging_directory_leaves_the_output(tmp_path):
    out = tmp_path / "data"
    staging = StagingDirectory(out)
    staging.discard()
    assert os.listdir(tmp_path) == []
    out.mkdir()
    (out / "dataset.json").write_text("old")
    staging = StagingDirectory(out, replace=True)
    (staging.path / "dataset.json").write_text("new")
    assert (out / "dataset.json").read_text() == "old"
    staging.commit()
    assert (out / "dataset.json").read_text() == "new"
    staging.discard()
    assert os.listdir(tmp_path) == ["data"]


def test_other_directories_are_not_replaced(tmp_path):
    out = tmp_path / "data"
    check_output_dir(out, replace=False)
    out.mkdir()
    check_output_dir(out, replace=False)
    (out / "thesis.txt").write_text("")
    with pytest.raises(DataError, match=r"not empty.*--replace"):
        check_output_dir(out, replace=False)
    with pytest.raises(DataError, match=r"dataset\.json.*not replaced"):
        StagingDirectory(out, replace=True)
    check_output_dir(out, replace=True, markers=["thesis.txt"])
    with pytest.raises(DataError, match="not a directory"):
        check_output_dir(out / "thesis.txt", replace=True)


def test_staging_directories_of_killed_processes_are_removed(tmp_path):
    out = tmp_path / "data"
    assert killed_at(4, tmp_path, lambda: (StagingDirectory(out).path / "dataset.json").write_text("")) is True
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lpfs-lock", ".tmp"]
    other = StagingDirectory(tmp_path / "data.lpfs-x")
    living = StagingDirectory(out)
    assert {path.name for path in tmp_path.iterdir()} >= {living.path.name, other.path.name}
    living.discard()
    other.discard()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "a/../../x",
        "/etc/x",
        "..",
        ".",
        "",
        "a//b",
        "a/",
        "./a",
        "C:/x",
        "C:x",
        "a\\b",
        "a\0b",
        "a\x1b[2J",
        None,
        3,
    ],
)
def test_names_that_leave_a_folder_are_refused(tmp_path, name):
    with pytest.raises(DataError, match="only names of files inside the folder"):
        safe_child(tmp_path, name)


def test_names_inside_a_folder_are_paths(tmp_path):
    assert safe_child(tmp_path, "days/0000/y0000.npy") == tmp_path / "days" / "0000" / "y0000.npy"
    (tmp_path / "inside").symlink_to(tmp_path / "a")
    assert safe_child(tmp_path, "inside") == tmp_path / "inside"
    (tmp_path / "outside").symlink_to(tmp_path.parent)
    with pytest.raises(DataError, match="leaves"):
        safe_child(tmp_path, "outside/x")


def test_one_process_at_a_time_writes_to_an_output(tmp_path):
    out = tmp_path / "data"
    with StagingDirectory(out), pytest.raises(LockedError, match=f"{out}.*pid {os.getpid()} "):
        StagingDirectory(out)


@pytest.mark.parametrize("exchange", [True, False])
def test_a_process_killed_at_any_moment_leaves_the_old_or_the_new_output(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(_fileio, "exchange_paths", lambda first, second: False)
    out = tmp_path / "data"

    def write(text):
        with StagingDirectory(out, replace=True) as staging:
            (staging / "dataset.json").write_text(text)

    texts, number, is_killed = [], 0, True
    while is_killed:
        number += 1
        write("old")
        is_killed = killed_at(number, tmp_path, lambda: write("new"))
        if not exchange:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                was_missing = not out.exists()
                StagingDirectory(out, replace=True).discard()
            assert [str(warning.message).startswith(f"{out} is restored") for warning in caught] == [True] * was_missing
        texts.append((out / "dataset.json").read_text())
    assert number > 5
    assert texts == ["old"] * texts.count("old") + ["new"] * texts.count("new")
    assert texts[-1] == "new"
    write("last")
    assert os.listdir(tmp_path) == ["data"]


def test_a_link_to_a_directory_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "dataset.json").write_text("old")
    (tmp_path / "data").symlink_to("target")
    with StagingDirectory(tmp_path / "data", replace=True) as staging:
        (staging / "dataset.json").write_text("new")
    assert [(tmp_path / name / "dataset.json").read_text() for name in ("data", "target")] == ["new", "old"]
    assert sorted(os.listdir(tmp_path)) == ["data", "target"]


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    assert killed_at(3, tmp_path, lambda: write_text_atomic(tmp_path / "a.txt", "text")) is True
    (tmp_path / ".bashrc").write_text("")
    assert len(os.listdir(tmp_path)) == 2
    remove_temporary_files(tmp_path)
    assert os.listdir(tmp_path) == [".bashrc"]
