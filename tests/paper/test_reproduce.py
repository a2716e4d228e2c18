"""lpfs reproduce: every experiment at a tiny size, through the command line."""

from __future__ import annotations

import json
import struct

import pytest

import lpfs
from lpfs import cli
from lpfs.compare.locks import LockedError
from lpfs.paper.registry import EXPERIMENTS
from lpfs.paper.source import given, simulated
from lpfs.paper.trials import waited
from lpfs.paper.verb import reproduce

TINY = ["--rows", "1500", "--steps", "60", "--seeds", "1"]
# what makes the larger ones small: fewer sizes, methods or values than the experiment has
SMALLER = {
    "epsilon": {"FLOORS": (1e-4, 1e-5), "REACHED": (0.5, 1.0)},
    "alpha": {"ALPHAS": (10.0, 100.0), "SHARES": (0.3,)},
    "zero_gates": {"ALPHAS": (10.0, 100.0)},
    "l0_prox": {"SOFT": (0.03, 2.0), "HARD": (0.05, 1.3)},
    "gate_functions": {"FUNCTIONS": {"lpfs": None, "gaussian": None, "lpfs-noise": None}},
    "hot_start": {"METHODS": ("lpfs++", "lpfs", "random", "stg", "oracle")},
    "robustness": {"METHODS": ("lpfs++", "random")},
    "complexity": {"SIZES": (27, 392), "PAIRS": 3, "WARM": 1},
    "terabyte": {"SIZES": (10, 26), "METHODS": ("lpfs++", "random")},
    "terabyte_cross": {"SIZES": {False: (30,)}, "METHODS": ("lpfs++", "group_lasso")},
    "industrial": {"SHARES": (0.5,), "METHODS": ("lpfs++", "group_lasso")},
}
QUICK = ("gates", "distribution", "hot-start", "complexity")
CLICKS = ("terabyte", "terabyte-cross", "complexity")  # of their rows few are clicks: they need more of them


@pytest.fixture
def run(capsys):
    """Runs a command; gives its exit code and what it printed."""

    def call(*arguments):
        capsys.readouterr()
        code = cli.run([str(each) for each in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


@pytest.fixture
def smaller(monkeypatch):
    """Every experiment with little to do."""
    for module, values in SMALLER.items():
        for name, value in values.items():
            monkeypatch.setattr(f"lpfs.paper.{module}.{name}", value)
    monkeypatch.setattr("lpfs.paper.trials.TRIES", 2)


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """One folder for all, as a user has it."""
    return tmp_path_factory.mktemp("paper")


def once(run, name, out, *more):
    size = ["--rows", "20000", *TINY[2:]] if name in CLICKS else TINY
    code, told, err = run("reproduce", name, *size, *more, "--out", out, "--json")
    assert code == 0, err
    return json.loads(told), err


def picture(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.long) for each in EXPERIMENTS]
)
def test_every_experiment_writes_what_it_says(run, smaller, out, name):
    found, err = once(run, name, out)
    written = json.loads((out / f"{name}.json").read_text("utf-8"))
    assert written == {key: value for key, value in found.items() if key not in ("path", "figure")}
    assert (written["format"], written["experiment"]) == ("lpfs-paper", name)
    assert written["claim"] == EXPERIMENTS[name].claim
    assert f"the paper: {written['claim']}" in err
    assert written["seed"] == 0
    assert not written["full"]
    assert written["versions"]["lpfs"] == lpfs.__version__
    if EXPERIMENTS[name].preset is None:
        assert written["data"]["kind"] == "none"
    else:
        assert (written["data"]["kind"], written["data"]["preset"]) == ("simulated", EXPERIMENTS[name].preset[0])
        assert written["data"]["fingerprint"]
        assert f"simulated: the preset {EXPERIMENTS[name].preset[0]!r}" in err
    assert written["command"].startswith(f"lpfs reproduce {name} --rows")
    assert all(len(each) == 3 for each in written["table"])
    assert all(each[0] in err for each in written["table"])
    assert picture(out / f"{name}.png") > (300, 200)
    page = (out / f"{name}.html").read_text("utf-8")
    assert "img-src data:" in page
    assert page.count("<img ") == 1
    assert page.count("<tr>") >= 1 + len(written["table"])


def test_a_second_call_trains_nothing(run, smaller, out, monkeypatch):
    first, _ = once(run, "distribution", out)
    monkeypatch.setattr("lpfs.pipeline.stages.search_fields", None)
    monkeypatch.setattr("lpfs.pipeline.stages.train", None)
    again, _ = once(run, "distribution", out)
    assert again["ours"] == first["ours"]
    assert again["seconds"] >= first["seconds"]  # of both calls together


def test_the_list(run):
    code, told, err = run("reproduce")
    assert (code, err) == (0, "")
    assert [line for line in told.splitlines() if not line.startswith(" ")] == list(EXPERIMENTS)
    code, told, _ = run("reproduce", "--json")
    assert [each["name"] for each in json.loads(told)] == list(EXPERIMENTS)


def test_mistakes_are_told(run, tmp_path):
    code, _, err = run("reproduce", "terabite", "--out", tmp_path / "x")
    assert code == 2
    assert "Did you mean 'terabyte'?" in err
    code, _, err = run("reproduce", "epsilon", "--data", tmp_path, "--out", tmp_path / "x")
    assert code == 1
    assert "neither the folder of a Dataset, nor one with day_0" in err
    code, _, err = run("reproduce", "gates", "--seeds", "0", "--out", tmp_path / "x")
    assert (code, "seeds must be a whole number >= 1, found 0" in err) == (1, True)
    code, _, err = run("reproduce", "gates", "--data", tmp_path, "--out", tmp_path / "x")
    assert (code, "gates needs no data" in err) == (1, True)
    code, _, err = run("reproduce", "epsilon", "--data", tmp_path, "--rows", "10", "--out", tmp_path / "x")
    assert (code, "rows is the size of a simulated log" in err) == (1, True)
    code, _, err = run("reproduce", "epsilon", "--steps", "49", "--out", tmp_path / "x")
    assert (code, "steps must be at least 50" in err) == (1, True)
    assert not (tmp_path / "x").exists()


def test_raw_files_and_simulated_logs_have_folders_of_their_own(tmp_path):
    for number in range(2):
        lpfs.simulate(tmp_path / f"raw{number}", "terabyte", rows=3000, days=3, seed=number, format="csv")
    out = tmp_path / "data"
    simulated("small", 1500, 0, out / "small-1500-0")
    logs = [given(tmp_path / f"raw{number}" / "log", out, quiet=True) for number in (0, 1, 0)]
    assert [each.about()["said"].partition(",")[0] for each in logs] == ["real: log"] * 3
    assert logs[0].data.fingerprint == logs[2].data.fingerprint != logs[1].data.fingerprint
    assert logs[0].data.path == logs[2].data.path
    assert simulated("small", 1000, 0, out / "small-1000-0").data.rows == 1000


@pytest.mark.long
def test_a_log_of_ones_own_is_called_real(run, smaller, tmp_path):
    lpfs.simulate(tmp_path / "log", "small", rows=1500)
    found = reproduce("distribution", tmp_path / "out", data=tmp_path / "log", steps=60, quiet=True)
    assert found.values["data"]["kind"] == "real"
    assert found.values["data"]["said"] == "real: log, 1,500 rows, 31 fields"
    assert found.values["command"] == "lpfs reproduce distribution --data log --steps 60"
    code, _, err = run("reproduce", "robustness", "--data", tmp_path / "log", *TINY[2:], "--out", tmp_path / "out")
    assert code == 0, err
    code, _, err = run("reproduce", "industrial", "--data", tmp_path / "log", *TINY[2:], "--out", tmp_path / "out")
    assert code == 0, err  # this one has user and item fields


@pytest.mark.long
def test_the_files_of_criteo_are_prepared_as_such(smaller, tmp_path):
    days = lpfs.simulate(tmp_path / "raw", "terabyte", rows=40_000, days=4, format="csv")
    assert [each.name for each in days] == ["day_0", "day_1", "day_2", "day_3"]
    found = reproduce("terabyte", tmp_path / "out", data=tmp_path / "raw" / "log", steps=60, seeds=1, quiet=True)
    assert found.values["data"]["kind"] == "real"
    assert found.values["data"]["days"] == 4
    assert 4000 < found.values["data"]["rows"] < 10_000  # one in eight of the negatives
    assert set(found.values["ours"]["masks"]) == {"10", "26"}
    with pytest.raises(lpfs.errors.InputError, match="industrial needs user and item fields"):
        reproduce("industrial", tmp_path / "out", data=tmp_path / "raw" / "log", steps=60, seeds=1, quiet=True)


def test_what_single_experiments_found(out, run, smaller):
    """Facts that hold at any size."""
    values = {
        name: once(run, name, out)[0]["ours"] for name in ("gates", "distribution", "hot-start", "complexity")
    }
    slopes = [each["slope_at_0"] for each in values["gates"]["lpfs"]["by_epsilon"]]
    assert slopes == [0, 0, 0, 0]
    gates = values["distribution"]["lpfs++: gate"]
    assert gates["zero"] == values["distribution"]["of"] - values["distribution"]["keep"]
    assert gates["near"] == 0
    for method in ("lpfs", "lpfs++"):
        told = values["hot-start"]["by_method"][method]
        assert abs(told["after"] - told["before"]) < 1e-6
    assert set(values["hot-start"]["by_method"]) == {"lpfs", "lpfs++", "random", "stg"}
    assert values["complexity"]["bytes"]["392"]["x"] == 4 * 392
    assert values["complexity"]["bytes"]["392"]["moving"] == 16 * 392


def test_every_experiment_has_its_file():
    for name, entry in EXPERIMENTS.items():
        assert entry.module == f"lpfs.paper.{name.replace('-', '_')}"
        assert entry.summary


def test_what_another_process_is_making_is_waited_for(monkeypatch):
    monkeypatch.setattr("lpfs.paper.trials.PAUSE", 0.0)
    asked = []

    def make():
        asked.append(1)
        if len(asked) < 3:
            raise LockedError("train-a")
        return "made"

    assert waited(make) == "made"
    assert len(asked) == 3
