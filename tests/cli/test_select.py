"""lpfs select: the answer, the same answer again, going on after a kill, mistakes told before anything runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from lpfs.cli.options import parse_value
from lpfs.models import MODELS
from lpfs.pipeline.settings import Settings

LOG = ["--label", "click", "--time", "day"]
SHAPE = ["--model-option", "dim=4", "--model-option", "hidden=8"]
TINY = ["--pretrain-steps", "200", "--search-steps", "200", *SHAPE]
SAME = ("method", "kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "model", "made")


def answer(folder):
    return json.loads((folder / "selection.json").read_text())


def same(folder):
    """What two runs have in common, but for the clock."""
    found = answer(folder)
    found["made"].pop("seconds")
    return {name: found[name] for name in SAME}


def test_the_answer_is_in_the_folder_and_on_standard_output(run, clicks, selected, tmp_path):
    assert (selected / "kept_fields.txt").read_text() == "user\nad\n"
    found = answer(selected)
    assert sorted(found["dropped"]) == ["noise", "price", "site"]
    assert found["configuration"]["model_options"] == {"dim": 4, "hidden": [8]}
    code, out, err = run("select", clicks, *LOG, "--keep", "2", *TINY, "--json", "--out", tmp_path / "run")
    assert code == 0
    printed = json.loads(out)
    assert printed["kept"] == ["user", "ad"]
    assert printed["metrics"] == found["metrics"]
    assert set(printed["metrics"]) == {"all_fields", "gated", "pruned", "hot_start", "retrained"}
    assert printed["folder"] == str(tmp_path / "run")
    assert "configuration" not in printed
    assert "2 of 5 fields kept" in err
    assert "\033" not in err


def test_again_from_the_configuration(run, selected, tmp_path):
    code, out, err = run("select", "--config", selected / "config.json", "--out", tmp_path / "again", "-q")
    assert (code, out, err) == (0, "", "")
    kept = (tmp_path / "again" / "kept_fields.txt").read_bytes()
    assert kept == (selected / "kept_fields.txt").read_bytes()
    assert same(selected) == same(tmp_path / "again")
    assert (tmp_path / "again" / "config.json").read_bytes() == (selected / "config.json").read_bytes()


def test_again_from_another_folder(run, clicks, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "clicks.csv").write_bytes(clicks.read_bytes())
    (tmp_path / "here" / "costs.toml").write_text("default = 1.0\n")
    (tmp_path / "here" / "fields.toml").write_text('[site]\nkind = "ignore"\n')
    monkeypatch.chdir(tmp_path / "here")
    more = ["--budget", "2", "--costs", "costs.toml", "--fields", "fields.toml", "--finish", "none", "-q"]
    code, _, err = run("select", "clicks.csv", *LOG, *TINY, *more, "--out", "run")
    assert code == 0, err
    monkeypatch.chdir(tmp_path / "there")
    code, _, err = run("select", "--config", "../here/run", "--out", "again", "-q")
    assert code == 0, err
    assert same(tmp_path / "here/run") == same(tmp_path / "there/again")
    code, _, err = run("train", "../here/clicks.csv", *LOG, *SHAPE, "--steps", "60", "-q", "--out", "trained")
    assert code == 0, err
    code, _, err = run(
        "search", "trained", "trained/data", "--keep", "2", "--search-steps", "60", "-q", "--out", "found"
    )
    assert code == 0, err
    assert Settings.load("found").checkpoint == str(tmp_path / "there" / "trained")


def test_an_option_goes_before_the_configuration(run, selected, tmp_path):
    options = ["--keep", "1", "--finish", "none", "--method", "lpfs", "--must-keep", "site", "--epsilon", "0.2"]
    code, out, _ = run("select", "--config", selected, *options, "--out", tmp_path / "one", "--json", "-q")
    assert code == 0
    assert json.loads(out)["kept"] == ["site"]
    assert set(json.loads(out)["metrics"]) == {"all_fields", "gated", "pruned"}
    settings = Settings.load(tmp_path / "one")
    assert (settings.keep, settings.finish, settings.method, settings.label) == (1, "none", "lpfs", "click")
    assert settings.options == {"epsilon": 0.2}


def test_a_killed_run_goes_on_and_gives_the_same(run, clicks, tmp_path):
    steps = ["--pretrain-steps", "60", "--search-steps", "1500", *SHAPE, "--finish", "hot"]
    arguments = ["select", str(clicks), *LOG, "--keep", "2", *steps]
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
    assert "go on with --resume" in err
    code, _, err = run("select", "--resume", "--keep", "3", "--out", place)
    assert code == 1
    assert "was begun with keep=2 and cannot go on with 3" in err
    code, _, err = run("select", "--resume", "--out", place)
    assert code == 0
    assert err.count("going on from step 60\n") == 1  # pretrain was done
    assert re.search(r"going on from step (500|1,000|1,500)\n", err)  # the search was not
    assert (place / "kept_fields.txt").read_bytes() == (tmp_path / "whole" / "kept_fields.txt").read_bytes()
    assert same(tmp_path / "whole") == same(place)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_how_to_go_on(clicks, tmp_path, number):
    place = tmp_path / "run"
    arguments = ["select", str(clicks), *LOG, *SHAPE, "--pretrain-steps", "1000000", "-q", "--out", str(place)]
    process = subprocess.Popen([sys.executable, "-m", "lpfs", *arguments], stderr=subprocess.PIPE, text=True)
    for _ in range(1200):
        if (place / "pretrain" / "metrics.jsonl").exists() or process.poll() is not None:
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    expected = f"lpfs: error: interrupted; go on from here: lpfs select --resume --out {place}"
    assert (process.returncode, err.strip()) == (130, expected)


def test_several_seeds_costs_and_fields_left_out(run, clicks, tmp_path):
    costs = tmp_path / "costs.toml"
    costs.write_text('unit = "ms"\ndefault = 1.0\n[fields]\nuser = 2.0\n')
    options = ["--budget", "3", "--costs", costs, "--seeds", "2", "--must-drop", "price,noise", "--finish", "none"]
    code, out, err = run("select", clicks, *LOG, *options, *TINY, "--json", "--out", tmp_path / "run")
    assert code == 0, err
    found = json.loads(out)
    assert set(found["kept"]) | set(found["dropped"]) == {"user", "ad", "site"}
    assert sum({"user": 2, "ad": 1, "site": 1}[name] for name in found["kept"]) <= 3
    assert "not in every one of 2 searches" in err


def test_a_log_of_two_tasks_to_the_end(run, clicks, tmp_path):
    lines = clicks.read_text().splitlines()
    bought = [f"{int(line[0]) * (number % 3 == 0)},{line}" for number, line in enumerate(lines[1:])]
    log = tmp_path / "log.csv"
    log.write_text("\n".join([f"buy,{lines[0]}", *bought]) + "\n")
    place = tmp_path / "run"
    code, out, err = run("select", log, *LOG, "--task", "buy", "--keep", "2", *TINY, "--json", "--out", place)
    assert code == 0, err
    found = json.loads(out)
    assert len(found["kept"]) == 2
    assert all(set(each["tasks"]) == {"click", "buy"} for each in found["metrics"].values())
    assert "AUC of every task on the test rows" in err
    code, out, err = run("evaluate", place, place / "data", "--days", "last", "--json")
    assert code == 0, err
    judged = json.loads(out)["metrics"]["tasks"]
    assert {name: each["auc"] for name, each in judged.items()} == {
        name: each["auc"] for name, each in found["metrics"][found["model"]]["tasks"].items()
    }
    for form in ("onnx", "torch"):
        code, _, err = run("export", place, "--format", form)
        assert code == 0, err
        assert "differ from the model's by at most" in err


def test_rows_that_nothing_orders_are_dealt_at_random(run, clicks, tmp_path):
    code, out, err = run("select", clicks, "--label", "click", "--keep", "2", *TINY, "--finish", "none",
                         "--must-drop", "day", "--json", "-q", "--out", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert len(json.loads(out)["kept"]) == 2
    made = json.loads((tmp_path / "run" / "data" / "dataset.json").read_text())
    assert made["settings"]["options"]["shuffle"] is True


def test_a_column_of_times_that_is_found_orders_the_rows(run, clicks, tmp_path):
    lines = clicks.read_text().replace("click,day", "click,when").splitlines()
    dated = [lines[0]]
    for line in lines[1:]:
        click, day, rest = line.split(",", 2)
        dated.append(f"{click},2024-03-0{int(day) + 1} 12:00:00,{rest}")
    (tmp_path / "dated.csv").write_text("\n".join(dated) + "\n")
    options = ["--label", "click", "--keep", "2", *TINY, "--finish", "none", "-q", "--out", tmp_path / "run"]
    code, _, err = run("select", tmp_path / "dated.csv", *options)
    assert code == 0, err
    made = json.loads((tmp_path / "run" / "data" / "dataset.json").read_text())
    assert (made["settings"]["options"]["time"], made["settings"]["options"]["shuffle"]) == ("when", False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--kep", "2"], 2, "--keep"),
        (["--keep", "two"], 2, "'two' is not a valid integer"),
        (["--method", "lpfs+"], 2, "Did you mean 'lpfs++'?"),
        (["--model", "mpl"], 2, "Did you mean 'mlp'?"),
        (["--method-option", "beta"], 2, "'beta' is not of the form name=value"),
        (["--method-option", "momentun=0.5"], 1, "unknown key 'momentun'"),
        (["--model-option", "deep=4"], 1, "unknown key 'deep' for model 'mlp'"),
        (["--device", "tpu9"], 1, "there is no device 'tpu9'"),
        (["--device", "cuda:77"], 1, "GPUs here; lpfs doctor tells more"),
        (["--keep", "2", "--penalty", "1"], 1, "say what you want in one way: found keep and penalty"),
        (["--keep", "9"], 1, "keep must be between 1 and the 5 fields, found 9"),
        (["--must-keep", "usr"], 1, "must_keep: there is no field 'usr'; did you mean 'user'?"),
        (["--must-drop", "usr,ad"], 1, "must_drop: there is no field 'usr'; did you mean 'user'?"),
        (["--must-drop", "ad", "--must-keep", "ad"], 1, "'ad' must be kept and must be dropped"),
        (["--label", "clik"], 1, "label: no column 'clik' (did you mean 'click'?)"),
        (["--time", "dya"], 1, "time: no column 'dya' (did you mean 'day'?)"),
        (["--split", "sit"], 1, "split: no column 'sit' (did you mean 'site'?)"),
        (["--budget", "3"], 1, "a budget needs to know what each field costs"),
        (["--budget", "3", "--costs", "none.toml"], 1, "none.toml: cannot be read"),
        (["--config", "nowhere"], 1, "there is no configuration nowhere"),
        (["--checkpoint", "nowhere"], 1, "there is no model in nowhere"),
        (["--model-option", "dim=x"], 1, "model 'mlp' cannot be made with {'dim': 'x'}"),
    ],
)
def test_mistakes(run, clicks, tmp_path, arguments, code, message):
    found, out, err = run("select", clicks, *LOG, "--out", tmp_path / "run", "-q", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) <= (4 if code == 2 else 1)
    assert not (tmp_path / "run" / "pretrain").exists()


def test_a_refused_run_can_be_begun_again_in_its_folder(run, clicks, tmp_path):
    arguments = ["select", clicks, *LOG, *TINY, "--finish", "none", "--out", tmp_path / "run"]
    assert run(*arguments, "--keep", "2", "--must-keep", "usr")[0] == 1
    code, _, err = run(*arguments, "--keep", "2", "--must-keep", "user")
    assert code == 0, err
    assert "reused" in err
    code, _, err = run(*arguments, "--keep", "2", "--must-keep", "user")
    assert code == 1
    assert "holds a run already" in err
    assert run(*arguments, "--keep", "1", "--replace", "-q")[0] == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    code, _, err = run(*arguments[:-1], tmp_path / "other", "--replace")
    assert code == 1
    assert "holds no run" in err


def test_a_source_is_needed(run, tmp_path):
    code, _, err = run("select", "--keep", "2", "--out", tmp_path / "run")
    assert code == 2
    assert "Missing argument: the log" in err


def test_the_words_of_the_command_line_are_those_of_the_library():
    from lpfs.cli import options

    assert set(MODELS) == set(options.MODELS)


def test_values_of_options():
    assert [parse_value(text) for text in ("3", "0.5", "64,32", "true", "rms", "a,b")] == [
        3, 0.5, [64, 32], True, "rms", "a,b",
    ]  # fmt: skip
