"""Several at one comparison: claims, a stop and going on, two processes at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lpfs.compare.locks import LockedError, WorkLocks, alive, machine

SHAPE = ["--model-option", "dim=2", "--model-option", "hidden=4"]
TINY = ["--pretrain-steps", "50", "--search-steps", "120", "--batch-size", "64", *SHAPE]
ASKED = ["--methods", "lpfs++,permutation", "--keep", "4,8", "--seeds", "2"]
SAME = ("method", "keep", "seed", "status", "kept", "test", "validation", "trained", "options")


def results(folder):
    found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    return [{name: each.get(name) for name in SAME} for each in found]


def start(log, out):
    command = [sys.executable, "-m", "lpfs", "compare", str(log), *ASKED, *TINY, "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


def test_a_claim_is_held_by_one(tmp_path):
    one, other = WorkLocks(tmp_path), WorkLocks(tmp_path)
    with one.acquire("a"):
        with pytest.raises(LockedError), other.acquire("a"):
            pass
        with other.acquire("b"):
            pass
    with other.acquire("a"):
        pass
    assert not any(tmp_path.iterdir())


def test_a_claim_is_let_go_when_its_work_fails(tmp_path):
    claims = WorkLocks(tmp_path)
    with pytest.raises(KeyboardInterrupt), claims.acquire("a"):
        raise KeyboardInterrupt
    assert not any(tmp_path.iterdir())


def claim_of(path, pid, where=None):
    path.write_text(json.dumps({"machine": machine() if where is None else where, "pid": pid}))


def test_the_claim_of_a_process_that_is_gone_is_taken_over(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert (alive(os.getpid()), alive(gone.pid)) == (True, False)
    claim_of(tmp_path / "a.claim", gone.pid)
    with WorkLocks(tmp_path).acquire("a"):
        assert json.loads((tmp_path / "a.claim").read_text())["pid"] == os.getpid()
    claim_of(tmp_path / "a.claim", gone.pid, "another machine")  # there it may well be alive
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass


@pytest.mark.parametrize("text", ['{"machine": "another", "pid": 1}', "", "{", "[]"])
def test_a_claim_that_nobody_touches_is_taken_over(tmp_path, text):
    path = tmp_path / "a.claim"
    path.write_text(text)
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    with WorkLocks(tmp_path).acquire("a"), pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    assert not any(tmp_path.iterdir())


def test_who_clears_a_stale_claim_does_not_clear_a_fresh_one(tmp_path):
    path = tmp_path / "a.claim"
    claim_of(path, 1, "another machine")
    os.utime(path, (time.time() - 1000, time.time() - 1000))
    (tmp_path / "a.guard").touch()  # somebody is clearing it just now
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    assert path.exists()
    os.utime(tmp_path / "a.guard", (time.time() - 1000, time.time() - 1000))  # no: was killed over it
    with pytest.raises(LockedError), WorkLocks(tmp_path).acquire("a"):
        pass
    with WorkLocks(tmp_path).acquire("a"):
        pass


def test_a_claim_that_is_held_is_touched(tmp_path):
    with WorkLocks(tmp_path, touch=0.01).acquire("a"):
        path = tmp_path / "a.claim"
        os.utime(path, (0, 0))
        for _ in range(500):
            if path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime > 0


@pytest.mark.long
def test_two_processes_share_the_work_and_a_third_goes_on_after_a_stop(log, compared, tmp_path):
    out = tmp_path / "cmp"
    first, second = start(log, out), start(log, out)
    for _ in range(12000):
        if len(list(out.glob("results/*.json"))) >= 2 or first.poll() is not None:
            break
        time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    _, told = first.communicate(timeout=120)
    assert first.returncode == 130
    assert f"interrupted; go on from here: lpfs compare --out {out}" in told
    second.send_signal(signal.SIGKILL)
    _, told_second = second.communicate(timeout=120)
    left = {path.name for path in out.glob("results/*.json")}
    assert 2 <= len(left) < 10
    third, fourth = start(log, out), start(log, out)
    told_third, told_fourth = (each.communicate(timeout=240)[1] for each in (third, fourth))
    assert (third.returncode, fourth.returncode) == (0, 0), (told_third, told_fourth)
    said = [line.split("] ")[1].split(": ")[0] for text in (told, told_second, told_third, told_fourth)
            for line in text.splitlines() if line.startswith("[")]  # fmt: skip
    assert len(said) == len(set(said))  # no run was done twice
    assert len(said) >= 8  # those that were stopped may not have told their last
    assert not list((out / "claims").iterdir())
    assert results(out) == results(compared)
