"""Several processes on one comparison: locks, an interrupted comparison that continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lpfs.compare.locks import LockedError, WorkLocks, machine_id, process_exists
from tests.helpers.comparisons import PLAN, TINY, read_results


def start(log, out):
    command = [sys.executable, "-m", "lpfs", "compare", str(log), *PLAN, *TINY, "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_a_lock_has_one_owner(tmp_path):
    one, other = WorkLocks(tmp_path), WorkLocks(tmp_path)
    with one.acquire("a"):
        with pytest.raises(LockedError), other.acquire("a"):
            pass
        with other.acquire("b"):
            pass
    with other.acquire("a"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_lock_is_released_if_the_work_fails(tmp_path):
    locks = WorkLocks(tmp_path)
    with pytest.raises(KeyboardInterrupt), locks.acquire("a"):
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def write_lock(path, pid, machine=None):
    path.write_text(json.dumps({"machine": machine_id() if machine is None else machine, "pid": pid}))


def test_the_lock_of_a_process_that_ended_is_taken_over(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert (process_exists(os.getpid()), process_exists(gone.pid)) == (True, False)
    write_lock(tmp_path / "a.lock", gone.pid)
    with WorkLocks(tmp_path).acquire("a"):
        assert json.loads((tmp_path / "a.lock").read_text())["pid"] == os.getpid()
    write_lock(tmp_path / "a.lock", gone.pid, "another machine")  # it may still run there
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass


@pytest.mark.parametrize("text", ['{"machine": "another", "pid": 1}', "", "{", "[]"])
def test_a_lock_without_updates_is_taken_over(tmp_path, text):
    path = tmp_path / "a.lock"
    path.write_text(text)
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    with WorkLocks(tmp_path).acquire("a"), pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    assert not any(tmp_path.iterdir())


def test_only_one_process_removes_a_stale_lock(tmp_path):
    path = tmp_path / "a.lock"
    write_lock(path, 1, "another machine")
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    (tmp_path / "a.guard").touch()  # another process is removing the lock
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    assert path.exists()
    os.utime(tmp_path / "a.guard", (time.time() - 1000, time.time() - 1000))  # that process was killed
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    with WorkLocks(tmp_path).acquire("a"):
        pass


def test_an_owned_lock_is_updated(tmp_path):
    with WorkLocks(tmp_path, heartbeat=0.01).acquire("a"):
        path = tmp_path / "a.lock"
        os.utime(path, (0, 0))
        for _ in range(500):
            if path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


@pytest.mark.long
def test_two_processes_share_the_work_and_others_continue_after_an_interruption(log, compared, tmp_path):
    out = tmp_path / "cmp"
    first, second = start(log, out), start(log, out)
    for _ in range(12000):
        if len(list(out.glob("results/*.json"))) >= 2 or first.poll() is not None:
            break
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 130
    assert f"lpfs compare --out {out}" in err
    second.send_signal(signal.SIGKILL)
    errors = [err, second.communicate(timeout=120)[1]]
    left = {path.name for path in out.glob("results/*.json")}
    assert 2 <= len(left) < 10
    others = [start(log, out), start(log, out)]
    errors += [process.communicate(timeout=240)[1] for process in others]
    assert [process.returncode for process in others] == [0, 0], errors
    lines = [line for text in errors for line in text.splitlines() if line.startswith("[")]
    done = [line.split("] ")[1].split(": ")[0] for line in lines]
    assert len(done) == len(set(done))  # no run was done twice
    assert len(done) >= 8  # the interrupted processes may not have printed their last run
    assert not list((out / "locks").iterdir())
    assert read_results(out) == read_results(compared)
