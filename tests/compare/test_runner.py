"""Several processes on one comparison, and an interrupted comparison that continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import lpfs
from lpfs._locks import FileLock
from lpfs.compare.run_dir import ResultStore
from lpfs.data.simulate import true_probabilities
from lpfs.train.metrics import auc, logloss
from tests.helpers.comparisons import PLAN, QUICK, TINY, read_results


def start(log, out):
    command = [sys.executable, "-m", "lpfs", "compare", str(log), *PLAN, *TINY, "--no-fleet", "--out", str(out)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)


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


def test_leftovers_of_killed_processes_are_removed_unless_one_works(tmp_path):
    store = ResultStore(tmp_path)
    (tmp_path / "locks" / "train-a-s0.lock").touch()  # as kill -9 leaves it
    (tmp_path / "work" / "a-s0").mkdir(parents=True)
    code = "import sys; from lpfs._locks import FileLock; from pathlib import Path; FileLock(Path(sys.argv[1]), 'b'); "
    code += "print('held', flush=True); sys.stdin.read()"
    lock = tmp_path / "locks" / "train-b-s0.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    store.remove_leftovers()
    assert (tmp_path / "work" / "a-s0").exists()
    holder.communicate()
    store.remove_leftovers()
    assert list((tmp_path / "locks").iterdir()) == list((tmp_path / "work").iterdir()) == []
    with FileLock(lock, "b"):
        assert lock.exists()


@pytest.mark.long
def test_test_rows_of_a_simulated_log_are_scored_against_their_probabilities(tmp_path):
    dataset = lpfs.simulate(tmp_path / "log", "small", rows=3000, seed=5)
    found = lpfs.compare(dataset, tmp_path / "cmp", methods="random", keep=4, seeds=1, **QUICK)
    labels = np.load(tmp_path / "cmp" / "labels.npy")
    assert found.values["test_labels"] == "true probabilities"
    assert labels == pytest.approx(true_probabilities(dataset)[-len(labels) :])
    assert len(np.unique(labels)) > 2
    record = next(record for record in found.results if record["method"] == "random")
    (path,) = (tmp_path / "cmp" / "results").glob("random-*.json")
    logits = np.load(tmp_path / "cmp" / "trained" / f"{json.loads(path.read_text())['trained']}.npy")
    assert record["auc"] == pytest.approx(auc(logits, labels))
    assert record["logloss"] == pytest.approx(logloss(logits, labels), rel=1e-6)
    assert record["own_count"] is None
    assert record["search_code"] == record["trained_code"] != ""
