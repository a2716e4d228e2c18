"""prepare and simulate: options, messages, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import lpfs
from lpfs.data.dataset import Dataset
from lpfs.data.engines.base import LocalEngine

CSV = "click,ad,price,day\n1,a,1.5,1\n0,b,2.5,1\n0,a,3.5,2\n1,c,,2\n"


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(CSV)
    return path


def test_prepare_prints_the_fields_and_the_dataset(run, log, tmp_path):
    code, out, err = run("prepare", log, "--label", "click", "--time", "day", "--out", tmp_path / "out")
    assert (code, out) == (0, "")
    assert "categorical" in err
    assert "4 rows, 2 positive (50.00%)" in err
    assert Dataset(tmp_path / "out").days() == ("1", "2")
    code, out, err = run("prepare", log, "--label", "click", "--time", "day", "--out", tmp_path / "out")
    assert code == 0
    assert "reused" in err


def test_quiet_and_json(run, log, tmp_path):
    arguments = ["prepare", log, "--label", "click", "--out", tmp_path / "out", "--parts", "2", "--quiet", "--json"]
    code, out, err = run(*arguments, "--keep-all")
    assert (code, err) == (0, "")
    values = json.loads(out)
    assert values["rows"] == 4
    assert [day["name"] for day in values["days"]] == ["part_0", "part_1"]
    assert {field["name"] for field in values["fields"]} == {"ad", "price", "day"}


def test_dry_run_and_written_fields(run, log, tmp_path):
    toml = tmp_path / "fields.toml"
    arguments = ["prepare", log, "--label", "click", "--out", tmp_path / "out"]
    code, out, _ = run(*arguments, "--dry-run", "--json", "--write-fields", toml)
    assert code == 0
    assert {row["column"]: row["kind"] for row in json.loads(out)}["ad"] == "categorical"
    assert not (tmp_path / "out").exists()
    assert run("prepare", log, "--label", "click", "--dry-run")[0] == 0
    assert run("prepare", log, "--label", "click")[0] == 2
    toml.write_text(toml.read_text().replace('kind = "numeric"', 'kind = "ignore"'))
    code, out, _ = run(*arguments, "--fields", toml, "--json", "--keep-all")
    assert code == 0
    assert "price" in json.loads(out)["ignored"]


def test_options_reach_prepare(run, log, tmp_path):
    options = ["--time", "day", "--ordered", "--train", "2", "--negatives", "0.9", "--seed", "3", "--min-count", "1"]
    options += ["--max-values", "5", "--bins", "2", "--separator", ",", "--missing", "?", "--keep-all"]
    code, _, err = run("prepare", log, "--label", "click", "--out", tmp_path / "out", *options)
    assert code == 0, err
    saved = Dataset(tmp_path / "out").settings["options"]
    assert (saved["seed"], saved["negatives"], saved["bins"], saved["missing"]) == (3, 0.9, 2, ["?"])
    code, _, err = run("prepare", log, "--label", "click", "--out", tmp_path / "out", "--hash", "7", "--replace")
    assert code == 0, err


def test_shuffle_and_split(run, tmp_path):
    rows = [f"{i % 2},a{i % 3},{'test' if i % 4 == 0 else 'train'}" for i in range(16)]
    (tmp_path / "log.csv").write_text("\n".join(["click,ad,fold", *rows]) + "\n")
    options = ["--label", "click", "--split", "fold", "--shuffle", "--seed", "2", "--parts", "3", "-q", "--json"]
    code, out, err = run("prepare", tmp_path / "log.csv", "--out", tmp_path / "out", *options)
    assert code == 0, err
    days = {day["name"]: day["rows"] for day in json.loads(out)["days"]}
    assert days == {"part_0": 4, "part_1": 4, "part_2": 4, "test": 4}
    dataset = Dataset(tmp_path / "out")
    assert dataset.settings["split"]["test"] == ["test"]
    assert dataset.settings["options"]["shuffle"] is True
    code, out, _ = run("prepare", tmp_path / "log.csv", *options[:4], "--dry-run", "--json")
    assert {row["column"]: row["kind"] for row in json.loads(out)}["fold"] == "split"


def test_rows_encoded_like_another_dataset(run, log, tmp_path):
    old = ["prepare", log, "--label", "click", "--time", "day", "--train", "2", "-q"]
    assert run(*old, "--out", tmp_path / "old")[0] == 0
    new = tmp_path / "new.csv"
    new.write_text("ad,price,more\nb,2.5,1\nz,9,1\n")
    arguments = ["prepare", new, "--like", tmp_path / "old", "--parts", "1"]
    code, out, err = run(*arguments, "--out", tmp_path / "new", "--json")
    assert code == 0, err
    assert "Fields, encoded as in" in err
    assert "not used" in err
    assert "no label 'click'" in err
    assert json.loads(out)["ignored"] == {"more": "not in the Dataset whose encoding was taken"}
    batch = next(iter(Dataset(tmp_path / "new").stream(2)))
    assert batch.ids[:, 0].tolist() == [3, 1]
    new.write_text("ad\nb\n")
    code, _, err = run(*arguments, "--out", tmp_path / "one", "--only", "ad", "-q")
    assert (code, err) == (0, "")
    assert Dataset(tmp_path / "one").schema.names == ("ad",)
    code, _, err = run(*arguments, "--out", tmp_path / "two", "-q")
    assert code == 1
    assert "missing: 'price'" in err
    assert run(*arguments, "--out", tmp_path / "two", "--bins", "3")[0] == 1
    assert run(*old, "--only", "ad", "--out", tmp_path / "two")[0] == 1
    assert not (tmp_path / "two").exists()


def test_tab_and_no_header(run, tmp_path):
    (tmp_path / "log.txt").write_text("1\ta\n0\tb\n")
    options = ["--label", "column_1", "--separator", "\\t", "--no-header", "--parts", "1", "-q"]
    assert run("prepare", tmp_path / "log.txt", *options, "--out", tmp_path / "out")[0] == 0
    assert Dataset(tmp_path / "out").schema.names == ("column_2",)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--lable", "click"], 2, "--label"),
        (["--label", "click", "--preset", "criteo-terabite"], 2, "did you mean 'criteo-terabyte'?"),
        (["--label", "click", "--parts", "x"], 2, "neither an integer nor 'files'"),
        (["--label", "click", "--seed", "x"], 2, "seed"),
        (["--label", "clik"], 1, "did you mean 'click'?"),
        (["--label", "ad"], 1, "found 'a'"),
        ([], 1, "label"),
        (["--label", "click", "--negatives", "7"], 1, "negatives must be"),
        (["--label", "click", "--negatives", "0"], 1, "negatives must be"),
        (["--label", "click", "--hash", "0"], 1, "hash must be"),
        (["--label", "click", "--bins", "0"], 1, "bins must be"),
        (["--label", "click", "--train", "0"], 1, "train must be"),
        (["--label", "click", "--min-count", "0"], 1, "min_count must be"),
        (["--label", "click", "--max-values", "0"], 1, "max_values"),
        (["--label", "click", "--fields", "none.toml"], 1, "none.toml"),
        (["--label", "click", "--write-fields", "/nowhere/x.toml"], 1, "/nowhere/x.toml"),
    ],
)
def test_invalid_input(run, log, tmp_path, arguments, code, message):
    status, out, err = run("prepare", log, "--out", tmp_path / "out", *arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) <= (4 if code == 2 else 50)
    assert not (tmp_path / "out").exists()
    if code == 1:
        assert err.splitlines()[-1].startswith("lpfs: error:")


def test_a_pipe_and_a_log_that_changes_are_refused_in_one_line(run, log, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.csv")
    status, _, err = run("prepare", tmp_path / "pipe.csv", "--label", "click", "--out", tmp_path / "out", "-q")
    assert (status, len(err.strip().splitlines())) == (1, 1)
    assert "pipe.csv is a named pipe" in err
    identify = LocalEngine.fingerprint
    monkeypatch.setattr(LocalEngine, "fingerprint", lambda self: (identify(self), log.write_text(CSV + CSV[19:]))[0])
    status, _, err = run("prepare", log, "--label", "click", "--out", tmp_path / "out", "-q")
    assert (status, len(err.strip().splitlines())) == (1, 1)
    assert "log.csv: changed while it was read" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.csv", "pipe.csv"]


def test_other_errors_are_one_line(run, monkeypatch, log, tmp_path):
    for error, code, message in [
        (OSError(28, "No space left on device"), 1, "No space left on device; free some space"),
        (PermissionError(13, "Permission denied", "/x"), 1, "/x: Permission denied"),
        (KeyboardInterrupt(), 130, "interrupted; "),
        (MemoryError(), 1, "out of memory"),
    ]:

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr("lpfs.data.prepare.run_plan", fail)
        status, _, err = run("prepare", log, "--label", "click", "--out", tmp_path / "out", "-q")
        assert status == code
        assert err.strip().startswith("lpfs: error:")
        assert message in err
        assert len(err.strip().splitlines()) == 1


def test_simulate(run, tmp_path):
    code, out, err = run("simulate", "--rows", "500", "--days", "2", "--out", tmp_path / "a", "--json")
    assert code == 0
    assert "truth.json" in err
    assert json.loads(out)["rows"] == 500
    code, out, _ = run("simulate", "--rows", "500", "--format", "csv", "--out", tmp_path / "b", "--json", "-q")
    assert code == 0
    assert len(json.loads(out)["files"]) == 10
    assert run("simulate", "--preset", "smal", "--out", tmp_path / "c")[0] == 2
    assert run("simulate", "--rows", "-5", "--out", tmp_path / "c")[0] == 1
    assert not (tmp_path / "c").exists()


def test_help_version_and_module(run):
    assert run("--help")[0] == 0
    assert "simulate" in run("--help")[1]
    assert lpfs.__version__ in run("--version")[1]
    code, _, err = run("prepre")
    assert code == 2
    assert "prepare" in err
    done = subprocess.run([sys.executable, "-m", "lpfs", "--version"], capture_output=True, text=True, check=True)
    assert lpfs.__version__ in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_simulation_leaves_no_files(tmp_path, number, code):
    command = [sys.executable, "-m", "lpfs", "simulate", "--preset", "terabyte", "--rows", "50000000", "--quiet"]
    process = subprocess.Popen([*command, "--out", tmp_path / "log"], stderr=subprocess.PIPE, text=True)
    for _ in range(600):
        if list(tmp_path.glob(".log.lpfs-*/days/0000")):
            break
        time.sleep(0.1)
    assert list(tmp_path.iterdir()) != []
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "lpfs: error: interrupted; no files were written\n")
    assert list(tmp_path.iterdir()) == []
