"""lpfs select: results, repeated and resumed runs, invalid input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import get_args

import pytest

from lpfs._locks import FileLock
from lpfs.cli.app import STASH_DIRS
from lpfs.cli.options import build_settings, parse_value
from lpfs.pipeline.run_dir import MOVING_DIR, STASH_DIR
from lpfs.pipeline.settings import Settings
from tests.cli.conftest import COLUMNS, MODEL_OPTIONS, TINY

REPRODUCIBLE = ("method", "kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "model", "made")


def read_record(folder):
    return json.loads((folder / "selection.json").read_text())


def reproducible(folder):
    """What must be the same in two runs."""
    record = read_record(folder)
    record["made"].pop("seconds")
    return {name: record[name] for name in REPRODUCIBLE}


def test_results_are_in_the_directory_and_on_standard_output(run, clicks, selected, tmp_path):
    assert (selected / "kept_fields.txt").read_text() == "user\nad\n"
    record = read_record(selected)
    assert sorted(record["dropped"]) == ["noise", "price", "site"]
    assert record["configuration"]["model_options"] == {"dim": 4, "hidden": [8]}
    code, out, err = run("select", clicks, *COLUMNS, "--keep", "2", *TINY, "--json", "--out", tmp_path / "run")
    assert code == 0
    printed = json.loads(out)
    assert printed["kept"] == ["user", "ad"]
    assert printed["metrics"] == record["metrics"]
    assert set(printed["metrics"]) == {"all_fields", "gated", "pruned", "hot_start", "retrained"}
    assert printed["folder"] == str(tmp_path / "run")
    assert "configuration" not in printed
    assert record["verdict"]["text"] in err.splitlines()
    assert printed["verdict"] == record["verdict"]
    assert "\033" not in err


def test_repeat_from_the_configuration(run, selected, tmp_path):
    code, out, err = run("select", "--config", selected / "config.json", "--out", tmp_path / "again", "-q")
    assert (code, out, err) == (0, "", "")
    kept = (tmp_path / "again" / "kept_fields.txt").read_bytes()
    assert kept == (selected / "kept_fields.txt").read_bytes()
    assert reproducible(selected) == reproducible(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (selected / "config.json").read_bytes()


@pytest.mark.long
def test_repeat_from_another_working_directory(run, clicks, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "clicks.csv").write_bytes(clicks.read_bytes())
    (tmp_path / "here" / "costs.toml").write_text("default = 1.0\n")
    (tmp_path / "here" / "fields.toml").write_text('[site]\nkind = "ignore"\n')
    monkeypatch.chdir(tmp_path / "here")
    more = ["--budget", "2", "--costs", "costs.toml", "--fields", "fields.toml", "--finish", "none", "-q"]
    code, _, err = run("select", "clicks.csv", *COLUMNS, *TINY, *more, "--out", "run")
    assert code == 0, err
    monkeypatch.chdir(tmp_path / "there")
    code, _, err = run("select", "--config", "../here/run", "--out", "again", "-q")
    assert code == 0, err
    assert reproducible(tmp_path / "here/run") == reproducible(tmp_path / "there/again")
    code, _, err = run(
        "train", "../here/clicks.csv", *COLUMNS, *MODEL_OPTIONS, "--steps", "60", "-q", "--out", "trained"
    )
    assert code == 0, err
    code, _, err = run(
        "search", "trained", "trained/data", "--keep", "2", "--search-steps", "60", "-q", "--out", "found"
    )
    assert code == 0, err
    assert Settings.load("found").checkpoint == str(tmp_path / "there" / "trained")


def test_options_override_the_configuration(run, selected, tmp_path):
    options = ["--keep", "1", "--finish", "none", "--method", "lpfs", "--must-keep", "site", "--epsilon", "0.2"]
    code, out, _ = run("select", "--config", selected, *options, "--out", tmp_path / "one", "--json", "-q")
    assert code == 0
    assert json.loads(out)["kept"] == ["site"]
    assert set(json.loads(out)["metrics"]) == {"all_fields", "gated", "pruned"}
    settings = Settings.load(tmp_path / "one")
    assert (settings.keep, settings.finish, settings.method, settings.label) == (1, "none", "lpfs", "click")
    assert settings.options == {"epsilon": 0.2}


@pytest.mark.long
def test_killed_run_resumes_with_the_same_result(run, clicks, tmp_path):
    steps = ["--pretrain-steps", "60", "--search-steps", "1500", *MODEL_OPTIONS, "--finish", "hot"]
    arguments = ["select", str(clicks), *COLUMNS, "--keep", "2", *steps]
    assert run(*arguments, "--out", tmp_path / "whole", "-q")[0] == 0
    place = tmp_path / "killed"
    command = [sys.executable, "-m", "lpfs", *arguments, "--out", str(place), "-q"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for _ in range(6000):
        if list(place.glob("search/checkpoints/step-*")) or process.poll() is not None:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (place / "selection.json").exists()
    code, _, err = run(*arguments, "--out", place)
    assert code == 1
    assert "--resume" in err
    code, _, err = run("select", "--resume", "--keep", "3", "--out", place)
    assert code == 1
    assert "keep=2 and cannot be resumed with 3" in err
    code, _, err = run("select", "--resume", "--out", place)
    assert code == 0
    assert err.count("from step 60\n") == 1  # pretraining was complete
    assert re.search(r"from step (500|1,000|1,500)\n", err)  # the search was not
    assert (place / "kept_fields.txt").read_bytes() == (tmp_path / "whole" / "kept_fields.txt").read_bytes()
    assert reproducible(tmp_path / "whole") == reproducible(place)


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_prints_how_to_resume(clicks, tmp_path, number, code):
    place = tmp_path / "run"
    arguments = [
        "select",
        str(clicks),
        *COLUMNS,
        *MODEL_OPTIONS,
        "--pretrain-steps",
        "1000000",
        "-q",
        "--out",
        str(place),
    ]
    process = subprocess.Popen([sys.executable, "-m", "lpfs", *arguments], stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if (place / "pretrain" / "metrics.jsonl").exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.strip().startswith("lpfs: error: interrupted")
    assert err.strip().endswith(f"lpfs select --resume --out {place}")


@pytest.mark.long
def test_several_seeds_costs_and_dropped_fields(run, clicks, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('unit = "ms"\ndefault = 1.0\n[fields]\nuser = 2.0\n')
    options = ["--budget", "3", "--costs", costs, "--seeds", "2", "--must-drop", "price,noise", "--finish", "none"]
    code, out, err = run("select", clicks, *COLUMNS, *options, *TINY, "--json", "--out", tmp_path / "run")
    assert code == 0, err
    record = json.loads(out)
    assert set(record["kept"]) | set(record["dropped"]) == {"user", "ad", "site"}
    assert sum({"user": 2, "ad": 1, "site": 1}[name] for name in record["kept"]) <= 3
    assert "not kept in all 2 searches" in err


@pytest.mark.long
def test_log_of_two_tasks(run, clicks, tmp_path):
    lines = clicks.read_text().splitlines()
    bought = [f"{int(line[0]) * (number % 3 == 0)},{line}" for number, line in enumerate(lines[1:])]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([f"buy,{lines[0]}", *bought]) + "\n")
    place = tmp_path / "run"
    code, out, err = run("select", log, *COLUMNS, "--task", "buy", "--keep", "2", *TINY, "--json", "--out", place)
    assert code == 0, err
    record = json.loads(out)
    assert len(record["kept"]) == 2
    assert all(set(metrics["tasks"]) == {"click", "buy"} for metrics in record["metrics"].values())
    assert "AUC of every task on the test rows" in err
    code, out, err = run("evaluate", place, place / "data", "--days", "test", "--json")
    assert code == 0, err
    by_task = json.loads(out)["metrics"]["tasks"]
    assert {name: metrics["auc"] for name, metrics in by_task.items()} == {
        name: metrics["auc"] for name, metrics in record["metrics"][record["model"]]["tasks"].items()
    }
    for form in ("onnx", "torch"):
        code, _, err = run("export", place, "--format", form)
        assert code == 0, err
        assert "differ from the model's by at most" in err


def test_rows_without_an_order_are_split_at_random(run, clicks, tmp_path):
    code, out, err = run("select", clicks, "--label", "click", "--keep", "2", *TINY, "--finish", "none",
                         "--must-drop", "day", "--json", "-q", "--out", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert len(json.loads(out)["kept"]) == 2
    dataset = json.loads((tmp_path / "run" / "data" / "dataset.json").read_text())
    assert dataset["settings"]["options"]["shuffle"] is True


def test_detected_time_column_orders_the_rows(run, clicks, tmp_path):
    lines = clicks.read_text().replace("click,day", "click,when").splitlines()
    dated = [lines[0]]
    for line in lines[1:]:
        click, day, rest = line.split(",", 2)
        dated.append(f"{click},2024-03-0{int(day) + 1} 12:00:00,{rest}")
    (tmp_path / "dated.csv").write_text("\n".join(dated) + "\n")
    options = ["--label", "click", "--keep", "2", *TINY, "--finish", "none", "-q", "--out", tmp_path / "run"]
    code, _, err = run("select", tmp_path / "dated.csv", *options)
    assert code == 0, err
    dataset = json.loads((tmp_path / "run" / "data" / "dataset.json").read_text())
    assert (dataset["settings"]["options"]["time"], dataset["settings"]["options"]["shuffle"]) == ("when", False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--kep", "2"], 2, "--keep"),
        (["--keep", "two"], 2, "'two' is not a valid integer"),
        (["--method", "lpfs+"], 2, "did you mean 'lpfs++'?"),
        (["--model", "mpl"], 2, "did you mean 'mlp'?"),
        (["--method-option", "beta"], 2, "'beta' is not of the form name=value"),
        (["--method-option", "momentun=0.5"], 1, "unknown key 'momentun'"),
        (["--model-option", "deep=4"], 1, "'deep'"),
        (["--device", "tpu9"], 1, "unknown device 'tpu9'"),
        (["--device", "cuda:77"], 1, "'cuda:77' does not exist"),
        (["--keep", "2", "--penalty", "1"], 1, "found keep and penalty"),
        (["--keep", "9"], 1, "keep must be between 1 and the 5 fields, found 9"),
        (["--must-keep", "usr"], 1, "must_keep: there is no field 'usr' (did you mean 'user'?)"),
        (["--must-drop", "usr,ad"], 1, "must_drop: there is no field 'usr' (did you mean 'user'?)"),
        (["--must-drop", "ad", "--must-keep", "ad"], 1, "'ad' is in must_keep and in must_drop"),
        (["--label", "clik"], 1, "label: no column 'clik' (did you mean 'click'?)"),
        (["--time", "dya"], 1, "time: no column 'dya' (did you mean 'day'?)"),
        (["--split", "sit"], 1, "split: no column 'sit' (did you mean 'site'?)"),
        (["--budget", "3"], 1, "costs="),
        (["--budget", "3", "--costs", "none.toml"], 1, "none.toml: cannot be read"),
        (["--config", "nowhere"], 1, "no configuration nowhere"),
        (["--checkpoint", "nowhere"], 1, "nowhere"),
        (["--model-option", "dim=x"], 1, "'dim': 'x'"),
    ],
)
def test_invalid_input(run, clicks, tmp_path, arguments, code, message):
    status, out, err = run("select", clicks, *COLUMNS, "--out", tmp_path / "run", "-q", *arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) <= (4 if code == 2 else 1)
    assert not (tmp_path / "run" / "pretrain").exists()


@pytest.mark.long
def test_run_with_invalid_settings_can_be_started_again_in_its_directory(run, clicks, tmp_path):
    arguments = ["select", clicks, *COLUMNS, *TINY, "--finish", "none", "--out", tmp_path / "run"]
    assert run(*arguments, "--keep", "2", "--must-keep", "usr")[0] == 1
    code, _, err = run(*arguments, "--keep", "2", "--must-keep", "user")
    assert code == 0, err
    assert "reused" in err
    code, _, err = run(*arguments, "--keep", "2", "--must-keep", "user")
    assert code == 1
    assert "contains a run" in err
    assert run(*arguments, "--keep", "1", "--replace", "-q")[0] == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    code, _, err = run(*arguments[:-1], tmp_path / "other", "--replace")
    assert code == 1
    assert "is not a run" in err


def test_missing_source_is_wrong_usage(run, tmp_path):
    code, _, err = run("select", "--keep", "2", "--out", tmp_path / "run")
    assert code == 2
    assert "Missing argument" in err


def test_copied_names_are_those_of_the_library():
    from lpfs.cli import data, options
    from lpfs.data.planning import PRESETS
    from lpfs.data.simulate_spec import PRESETS as SIMULATED_PRESETS
    from lpfs.gates.schedule import Preset
    from lpfs.train.evaluate import Precision
    from lpfs.train.step import OPTIMIZERS

    assert set(options.PRESETS) == set(PRESETS)
    assert set(data.SIMULATED_PRESETS) == set(SIMULATED_PRESETS)
    assert set(options.SCHEDULES) == set(get_args(Preset))
    assert set(options.PRECISIONS) == set(get_args(Precision))
    assert set(options.OPTIMIZERS) == set(OPTIMIZERS)


def test_values_of_options():
    assert [parse_value(text) for text in ("3", "0.5", "64,32", "true", "rms", "a,b")] == [
        3, 0.5, [64, 32], True, "rms", "a,b",
    ]  # fmt: skip


@pytest.mark.parametrize(("word", "value"), [("auto", None), ("on", True), ("off", False)])
def test_graph_option_is_a_setting(tmp_path, word, value):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Settings(source=("clicks.csv",), graph=not value).to_json()))
    assert build_settings(["clicks.csv"], tmp_path / "run", resume=False, graph=word).graph is value
    assert build_settings([], tmp_path / "run", resume=False, config=config, graph=word).graph is value
    assert build_settings([], tmp_path / "run", resume=False, config=config).graph is (not value)


@pytest.mark.parametrize("value", [True, False])
def test_fleet_option_is_a_setting(tmp_path, value):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(Settings(source=("clicks.csv",), fleet=not value).to_json()))
    assert build_settings(["clicks.csv"], tmp_path / "run", resume=False).fleet is None
    assert build_settings([], tmp_path / "run", resume=False, config=config, fleet=value).fleet is value
    assert build_settings([], tmp_path / "run", resume=False, config=config).fleet is (not value)


def test_run_in_the_stash_of_a_killed_replacement_is_restored_by_any_command(run, selected, tmp_path):
    assert STASH_DIRS == (MOVING_DIR, STASH_DIR)
    shutil.copytree(selected, tmp_path / ".moving")
    code, _, err = run("report", tmp_path)
    assert code == 0, err
    assert f"{tmp_path}: " in err
    assert "older run is restored" in err
    assert (tmp_path / "kept_fields.txt").read_bytes() == (selected / "kept_fields.txt").read_bytes()


@pytest.mark.parametrize("action", ["--resume", "--replace"])
def test_run_in_the_stash_of_a_killed_replacement_is_restored(run, clicks, selected, tmp_path, action):
    out = tmp_path / "run"
    (out / ".replaced").mkdir(parents=True)
    shutil.copytree(selected, out / ".replaced", dirs_exist_ok=True)
    arguments = [] if action == "--resume" else [clicks, *COLUMNS, "--keep", "2", *TINY]
    code, _, err = run("select", *arguments, action, "--out", out)
    assert code == 0, err
    assert err.count(f"{out}: ") >= 1
    assert "older run is restored" in err
    assert not (out / ".replaced").exists()
    assert reproducible(out) == reproducible(selected)


def test_a_directory_in_use_is_refused_and_the_process_is_named(run, clicks, trained, tmp_path):
    out, found = tmp_path / "out", tmp_path / "found"
    assert run("search", trained, trained / "data", "--keep", "2", "--search-steps", "60", "--out", found)[0] == 0
    commands = {
        "select": [clicks, *COLUMNS, "--keep", "2", *TINY],
        "train": [clicks, *COLUMNS, "--steps", "5"],
        "search": [trained, trained / "data", "--keep", "2"],
        "prune": [found],
        "prepare": [clicks, *COLUMNS],
    }
    for name, arguments in commands.items():
        with FileLock(tmp_path / ".out.lpfs-lock" if name == "prepare" else out / ".lock", out):
            code, _, err = run(name, *arguments, "--out", out)
        assert code == 1, name
        assert f"{out} is in use" in err
        assert f"pid {os.getpid()} on {socket.gethostname()}, since " in err
        assert not out.exists()


@pytest.mark.long
def test_only_one_of_two_processes_continues_a_run(clicks, selected, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(selected, out)
    for name in ("search", "retrained", "hot_start", "model"):
        shutil.rmtree(out / name)
    command = [sys.executable, "-m", "lpfs", "select", "--resume", "--out", str(out)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], errors
    (refused,) = [number for number, process in enumerate(processes) if process.returncode]
    assert f"pid {processes[1 - refused].pid} on " in errors[refused]
    assert reproducible(out) == reproducible(selected)
