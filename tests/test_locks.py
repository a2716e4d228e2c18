"""A lock has one holder; the kernel releases it when the holder ends in any way."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from lpfs import _locks
from lpfs._locks import FileLock
from lpfs.errors import LockedError

HOLD = "import sys, time; from pathlib import Path; from lpfs._locks import FileLock\n"
HOLD += "lock = FileLock(Path(sys.argv[1]), 'run'); print('locked', flush=True); time.sleep(60)"


def test_a_lock_has_one_holder_which_is_named(tmp_path):
    path = tmp_path / "a.lock"
    with FileLock(path, "a"):
        holder = json.loads(path.read_text())
        assert (holder["pid"], holder["host"]) == (os.getpid(), socket.gethostname())
        with pytest.raises(LockedError, match="run 7") as refusal:
            FileLock(path, "run 7")
        assert f"pid {holder['pid']} on {holder['host']}, since {holder['started']}" in str(refusal.value)
        with FileLock(tmp_path / "b.lock", "b"):
            pass
    with FileLock(path, "a"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_lock_is_released_if_the_work_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt), FileLock(tmp_path / "new" / "a.lock", "a"):
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())  # nor is the directory of the lock left


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    path = tmp_path / "a.lock"
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(LockedError, match=f"pid {process.pid} "):
        FileLock(path, "a")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert path.exists()
    with FileLock(path, "a"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_lock_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(_locks, "POLL_SECONDS", 0.0)
    path, calls = tmp_path / "a.lock", []
    first = FileLock(path, "a")
    monkeypatch.setattr(_locks.time, "sleep", lambda seconds: first.release())
    with FileLock(path, "a", on_wait=lambda: calls.append("waiting")) as second:
        assert second.is_exclusive
    assert calls == ["waiting"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"pid": "x"}', '{"pid": 1, "host": "\\u001b[2J", "started": []}']
)
def test_a_damaged_holder_is_not_printed(tmp_path, text):
    path = tmp_path / "a.lock"
    with FileLock(path, "a"):
        path.write_text(text)
        with pytest.raises(LockedError, match="another lpfs process") as refusal:
            FileLock(path, "a")
    assert "\033" not in str(refusal.value)


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "thesis.txt").write_text("text")
    (tmp_path / "a.lock").symlink_to("thesis.txt")
    with pytest.raises(OSError, match=r"a\.lock"):
        FileLock(tmp_path / "a.lock", "a")
    assert (tmp_path / "thesis.txt").read_text() == "text"


def test_without_locks_of_the_file_system_work_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(_locks, "fcntl", None)
    with FileLock(tmp_path / "a.lock", "a") as lock, FileLock(tmp_path / "a.lock", "a"):
        assert not lock.is_exclusive
