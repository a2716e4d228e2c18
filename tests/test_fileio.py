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
    check_files,
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
from lpfs.errors import DataError, InputError, LockedError
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
    assert read_json(tmp_path / "missing.json", missing_ok=True) is None


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


SCHEMA = {"seed": int, "rate?": float, "fields": [{"name": str}]}
NOT_JSON = [
    (b"", "not JSON"),
    (b'{"seed": 1', "not JSON"),
    (b'{"seed": "\xff"}', "not JSON.*0xff"),
    (b"\xef\xbb\xbf{}", "not JSON"),
    (b"3", "an object, found 3"),
    (b"[" * 100_000, "nested more than 100"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested more than 100"),
    (b"[" * 101 + b"]" * 101, "nested more than 100"),
    (b'{"seed": 1, "seed": 2}', "'seed' occurs twice"),
    (b'{"seed": NaN}', "NaN"),
    (b'{"seed": 1e999}', "1e999"),
    (b'{"seed": %s}' % (b"9" * 5000), "integer of 5000 digits"),
    (b'{"fields": []}', "'seed' is missing.*an integer"),
    (b'{"seed": 1e30, "fields": []}', "'seed' must be an integer, found 1e\\+30"),
    (b'{"seed": 99999999999999999999, "fields": []}', "'seed' must be an integer, found 9999"),
    (b'{"seed": true, "fields": []}', "'seed' must be an integer, found True"),
    (b'{"seed": 1, "rate": "x", "fields": []}', "'rate' must be a number, found 'x'"),
    (b'{"seed": 1, "fields": {"name": 1}}', "'fields' must be a list"),
    (b'{"seed": 1, "fields": [{"name": "a"}, {"name": 2}]}', r"'fields\[1\]\.name' must be text, found 2"),
    (b'{"seed": 1, "fields": [], "checksum": "00000000"}', "damaged.*checksum"),
    (b'{"seed": 1, "fields": [], "checksum": [1]}', "damaged.*checksum"),
]


@pytest.mark.parametrize(("data", "message"), NOT_JSON, ids=range(len(NOT_JSON)))
def test_a_json_file_that_cannot_be_used_is_one_line(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        read_json(path, SCHEMA, advice="make it again")
    text = str(caught.value)
    assert text.startswith(str(path))
    assert text.endswith("; make it again")
    assert "\n" not in text
    assert len(text) < len(str(path)) + 250


def test_only_regular_files_of_a_moderate_size_are_read(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        read_json(path)
    write_json_atomic(path, {"a": 1})
    with pytest.raises(InputError, match=r"a\.json.* bytes.*at most 5"):
        read_json(path, max_bytes=5)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InputError, match="not a regular file"):
            read_json(other)


def test_any_single_bit_of_a_json_file_is_protected(tmp_path):
    path, values = (
        tmp_path / "a.json",
        {"name": "ü", "numbers": [0.1, -3, 2**100, None, True], "x": {"y": float("inf")}},
    )
    write_json_atomic(path, values, allow_nan=True)
    data = path.read_bytes()
    for position in range(0, 8 * len(data), 3):
        damaged = bytearray(data)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            read = read_json(path, allow_nan=True)
        except InputError:
            continue
        assert {name: read[name] for name in values} == values  # white space, or the name of the key "checksum"


def test_checksums_of_other_files(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"123")
    write_json_atomic(tmp_path / "a.json", {"seed": 1}, files=["data.bin"])
    values = read_json(tmp_path / "a.json")
    assert values == {"seed": 1, "files": {"data.bin": file_checksum(tmp_path / "data.bin")}}
    check_files(tmp_path, values["files"], "make it again")
    (tmp_path / "data.bin").write_bytes(b"124")
    with pytest.raises(InputError, match=r"data\.bin is damaged.*make it again"):
        check_files(tmp_path, values["files"], "make it again")
    (tmp_path / "data.bin").unlink()
    with pytest.raises(InputError, match=r"data\.bin cannot be read.*make it again"):
        check_files(tmp_path, values["files"], "make it again")


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
