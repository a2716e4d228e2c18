"""Commands in several processes, as torchrun starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lpfs import cli
from tests.helpers.known_truth import known_truth
from tests.helpers.ranked import ended, start

pytestmark = pytest.mark.long  # whole runs

ROOT = Path(__file__).parents[2]
SMALL = ["--model-option", "dim=4", "--model-option", "hidden=8", "--device", "cpu"]
STEPS = ["--pretrain-steps", "60", "--search-steps", "60", *SMALL]
LPFS = [sys.executable, "-m", "lpfs"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "log"
    known_truth(folder)
    return str(folder)


def run(*arguments: str, world: int = 2, **environment: str) -> list[tuple[int, str, str]]:
    results = ended(start([*LPFS, *map(str, arguments)], world, **environment))
    assert all("Traceback" not in err for _, _, err in results), results
    return results


def test_train_prints_and_writes_once(log, tmp_path):
    out = tmp_path / "two"
    first, second = run("train", log, "--steps", "40", "--json", *SMALL, "--out", out)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert (second[1], second[2]) == ("", "")
    record = json.loads(first[1])
    assert "trained 40 steps" in first[2]
    assert cli.run(["train", log, "--steps", "40", "--quiet", *SMALL, "--out", str(tmp_path / "one")]) == 0
    plain = json.loads((tmp_path / "one" / "model" / "model.json").read_text())["extra"]["metrics"]
    assert record["metrics"]["tasks"]["click"]["auc"] == pytest.approx(plain["tasks"]["click"]["auc"], abs=1e-3)


def test_restart_by_torchrun_resumes(log, tmp_path):
    """The same command, which would be refused in a folder that holds a run."""
    out = tmp_path / "again"
    command = ["train", log, "--steps", "20", *SMALL, "--out", out]
    assert cli.run([*map(str, command), "--quiet"]) == 0
    model = (out / "model" / "model.safetensors").read_bytes()
    assert [code for code, _, _ in run(*command)] == [1, 1]
    results = run(*command, TORCHELASTIC_RESTART_COUNT="1")
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    assert "restarted by torchrun" in results[0][2]
    assert "from step 20" in results[0][2]
    assert (out / "model" / "model.safetensors").read_bytes() == model


def test_error_is_printed_once(log, tmp_path):
    results = run("search", tmp_path / "none", log, "--keep", "3", "--out", tmp_path / "out")
    assert [code for code, _, _ in results] == [1, 1]
    assert sum("lpfs: error:" in err for _, _, err in results) == 1


def test_other_commands_run_on_rank_0(log, tmp_path):
    results = run("methods", "--json")
    assert [code for code, _, _ in results] == [0, 0]
    assert (bool(results[0][1]), bool(results[1][1])) == (True, False)


@pytest.mark.long
def test_select_and_compare(log, tmp_path):
    """All of it in two processes, against one."""
    two, one = tmp_path / "two", tmp_path / "one"
    options = ["--keep", "2", *STEPS]
    results = run("select", log, *options, "--out", two)
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    assert results[1][2] == ""
    assert cli.run(["select", log, *options, "--quiet", "--out", str(one)]) == 0
    kept = [(path / "kept_fields.txt").read_text() for path in (one, two)]
    assert kept[0] == kept[1]
    assert (two / "report.html").exists()

    plan = ["--methods", "lpfs++,random", "--keep", "2", "--seeds", "2"]
    results = run("compare", log, *plan, *STEPS, "--out", tmp_path / "compared")
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    values = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert values
    records = [json.loads(path.read_text()) for path in (tmp_path / "compared" / "results").glob("*.json")]
    assert [record["status"] for record in records] == ["done"] * 6


@pytest.mark.long
@pytest.mark.campaign
def test_killed_rank_is_named_and_the_run_resumes(tmp_path):
    """A rank that hangs is in benchmarks/results/kill_rank.json."""
    out = tmp_path / "kills.json"
    command = [sys.executable, ROOT / "benchmarks" / "kill_rank.py", "--limit", "15", "--ways", "kill"]
    ran = subprocess.run([*command, "--out", out], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for trial in json.loads(out.read_text())["trials"]:
        assert "rank 1" in trial["named"]
        assert trial["same_end"]
        assert trial["seconds_until_restarted"] < 120
        assert trial["checkpoints"]["whole"] == trial["checkpoints"]["saved"]
        assert trial["checkpoints"]["saved"][-1] == 70
