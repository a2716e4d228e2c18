"""lpfs reproduce: every experiment at a tiny size, through the command line."""

from __future__ import annotations

import json
import struct

import pytest

import lpfs
from lpfs._fileio import read_json
from lpfs.errors import LockedError
from lpfs.paper.context import open_given, simulate_preset
from lpfs.paper.registry import EXPERIMENTS
from lpfs.paper.reproduce import load_function, reproduce
from lpfs.paper.trials import retry_while_locked
from lpfs.pipeline import stages
from lpfs.train.fit_fleet import fit_fleet

pytestmark = pytest.mark.long  # whole runs

TINY = ["--rows", "1500", "--steps", "60", "--seeds", "1"]
# fewer sizes, methods or values than the experiments have, by module of lpfs.paper
SMALLER = {
    "ablations": {
        "ALPHAS": (10.0, 100.0),
        "ALPHA_SHARES": (0.3,),
        "FINAL_EPSILONS": (1e-4, 1e-5),
        "DECAY_FRACTIONS": (0.5, 1.0),
        "L1_PENALTIES": (0.03, 2.0),
        "L0_FACTORS": (0.05, 1.3),
        "ROBUSTNESS_METHODS": ("lpfs++", "random"),
    },
    "gate_experiments": {"FUNCTIONS": {"lpfs": None, "gaussian": None, "lpfs-noise": None}},
    "cost_experiments": {
        "METHODS": ("lpfs++", "lpfs", "random", "stg", "oracle"),
        "GATE_COUNTS": (27, 392),
        "TIMED_STEPS": 3,
        "WARMUP_STEPS": 1,
    },
    "comparisons": {
        "TERABYTE_SIZES": (10, 26),
        "TERABYTE_METHODS": ("lpfs++", "random"),
        "CROSS_SIZES": {False: (30,)},
        "CROSS_METHODS": ("lpfs++", "group_lasso"),
        "INDUSTRIAL_SHARES": (0.5,),
        "INDUSTRIAL_METHODS": ("lpfs++", "group_lasso"),
    },
    "trials": {"MAX_PENALTY_TRIALS": 2},
}
QUICK = ("gates", "distribution", "hot-start", "complexity")
FEW_CLICKS = ("terabyte", "terabyte-cross", "complexity")  # logs with few positive rows, which need more rows


def test_kept_fields_are_trained_together(smaller, tmp_path, monkeypatch):
    sizes = []

    def record(models, *args, **options):
        sizes.append(len(models))
        return fit_fleet(models, *args, **options)

    monkeypatch.setattr(stages, "fit_fleet", record)
    options = {"rows": 1500, "steps": 60, "seeds": 2, "quiet": True}
    together = reproduce("gate-functions", tmp_path / "fleet", fleet=True, **options).values["measured"]
    assert max(sizes) > 4
    single = reproduce("gate-functions", tmp_path / "single", **options).values["measured"]
    for name, values in single["by_function"].items():
        assert together["by_function"][name]["kept"] == values["kept"]
        assert together["by_function"][name]["by_seed"] == pytest.approx(values["by_seed"], abs=0.02)


@pytest.fixture
def smaller(monkeypatch):
    """Make every experiment small."""
    for module, values in SMALLER.items():
        for name, value in values.items():
            monkeypatch.setattr(f"lpfs.paper.{module}.{name}", value)


@pytest.fixture(scope="session")
def out(tmp_path_factory):
    """One directory for all experiments, as a user has it."""
    return tmp_path_factory.mktemp("paper")


def run_json(run, name, out, *more):
    size = ["--rows", "20000", *TINY[2:]] if name in FEW_CLICKS else TINY
    code, printed, err = run("reproduce", name, *size, *more, "--out", out, "--json")
    assert code == 0, err
    return json.loads(printed), err


def picture_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in EXPERIMENTS]
)
def test_every_experiment_writes_its_files(run, smaller, out, name):
    printed, err = run_json(run, name, out)
    written = read_json(out / f"{name}.json", allow_nan=True)
    assert written == {key: value for key, value in printed.items() if key not in ("path", "figure")}
    assert (written["format"], written["experiment"]) == ("lpfs-paper", name)
    assert written["claim"] == EXPERIMENTS[name].claim
    assert f"the paper: {written['claim']}" in err
    assert written["seed"] == 0
    assert not written["full"]
    assert written["versions"]["lpfs"] == lpfs.__version__
    if EXPERIMENTS[name].presets is None:
        assert written["data"]["kind"] == "none"
    else:
        assert (written["data"]["kind"], written["data"]["preset"]) == ("simulated", EXPERIMENTS[name].presets[0])
        assert written["data"]["fingerprint"]
        assert f"simulated: preset {EXPERIMENTS[name].presets[0]!r}" in err
    assert written["command"].startswith(f"lpfs reproduce {name} --rows")
    assert all(len(row) == 3 for row in written["table"])
    assert all(row[0] in err for row in written["table"])
    assert picture_size(out / f"{name}.png") > (300, 200)
    page = (out / f"{name}.html").read_text("utf-8")
    assert "img-src data:" in page
    assert page.count("<img ") == 1
    assert page.count("<tr>") >= 1 + len(written["table"])


def test_a_second_call_trains_nothing(run, smaller, out, monkeypatch):
    first, _ = run_json(run, "distribution", out)
    monkeypatch.setattr("lpfs.pipeline.stages.search_fields", None)
    monkeypatch.setattr("lpfs.pipeline.stages.train", None)
    again, _ = run_json(run, "distribution", out)
    assert again["measured"] == first["measured"]
    assert again["seconds"] >= first["seconds"]  # of both calls together


def test_list_of_experiments(run):
    code, printed, err = run("reproduce")
    assert (code, err) == (0, "")
    assert [line for line in printed.splitlines() if not line.startswith(" ")] == list(EXPERIMENTS)
    code, printed, _ = run("reproduce", "--json")
    assert [experiment["name"] for experiment in json.loads(printed)] == list(EXPERIMENTS)


def test_invalid_input(run, tmp_path):
    code, _, err = run("reproduce", "terabite", "--out", tmp_path / "x")
    assert code == 2
    assert "did you mean 'terabyte'?" in err
    code, _, err = run("reproduce", "epsilon", "--data", tmp_path, "--out", tmp_path / "x")
    assert code == 1
    assert "Dataset" in err
    assert "day_0" in err
    code, _, err = run("reproduce", "gates", "--seeds", "0", "--out", tmp_path / "x")
    assert (code, "seeds must be an integer >= 1, found 0" in err) == (1, True)
    code, _, err = run("reproduce", "gates", "--data", tmp_path, "--out", tmp_path / "x")
    assert (code, "needs no data" in err) == (1, True)
    code, _, err = run("reproduce", "epsilon", "--data", tmp_path, "--rows", "10", "--out", tmp_path / "x")
    assert (code, "rows is the size of a simulated log" in err) == (1, True)
    code, _, err = run("reproduce", "epsilon", "--steps", "49", "--out", tmp_path / "x")
    assert (code, "steps must be an integer >= 50, found 49" in err) == (1, True)
    assert not (tmp_path / "x").exists()


def test_raw_files_and_simulated_logs_have_separate_directories(tmp_path):
    for number in range(2):
        lpfs.simulate(tmp_path / f"raw{number}", "terabyte", rows=3000, days=3, seed=number, format="csv")
    out = tmp_path / "data"
    simulate_preset("small", 1500, 0, out / "small-1500-0")
    logs = [open_given(tmp_path / f"raw{number}" / "log", out, quiet=True) for number in (0, 1, 0)]
    assert [log.to_json()["description"].partition(",")[0] for log in logs] == ["real: log"] * 3
    assert logs[0].dataset.fingerprint == logs[2].dataset.fingerprint != logs[1].dataset.fingerprint
    assert logs[0].dataset.path == logs[2].dataset.path
    assert simulate_preset("small", 1000, 0, out / "small-1000-0").dataset.rows == 1000


@pytest.mark.long
def test_a_given_log_is_real(run, smaller, tmp_path):
    lpfs.simulate(tmp_path / "log", "small", rows=1500)
    experiment = reproduce("distribution", tmp_path / "out", data=tmp_path / "log", steps=60, quiet=True)
    assert experiment.values["data"]["kind"] == "real"
    assert experiment.values["data"]["description"] == "real: log, 1,500 rows, 31 fields"
    assert experiment.values["command"] == "lpfs reproduce distribution --data log --steps 60"
    code, _, err = run("reproduce", "robustness", "--data", tmp_path / "log", *TINY[2:], "--out", tmp_path / "out")
    assert code == 0, err
    code, _, err = run("reproduce", "industrial", "--data", tmp_path / "log", *TINY[2:], "--out", tmp_path / "out")
    assert code == 0, err  # this one has user and item fields


@pytest.mark.long
def test_criteo_files(smaller, tmp_path):
    days = lpfs.simulate(tmp_path / "raw", "terabyte", rows=40_000, days=4, format="csv")
    assert [day.name for day in days] == ["day_0", "day_1", "day_2", "day_3"]
    experiment = reproduce("terabyte", tmp_path / "out", data=tmp_path / "raw" / "log", steps=60, seeds=1, quiet=True)
    assert experiment.values["data"]["kind"] == "real"
    assert experiment.values["data"]["days"] == 4
    assert 4000 < experiment.values["data"]["rows"] < 10_000  # one in eight of the negatives
    assert set(experiment.values["measured"]["masks"]) == {"10", "26"}
    with pytest.raises(lpfs.errors.InputError, match="industrial needs user and item fields"):
        reproduce("industrial", tmp_path / "out", data=tmp_path / "raw" / "log", steps=60, seeds=1, quiet=True)


def test_results_that_hold_at_any_size(out, run, smaller):
    values = {
        name: run_json(run, name, out)[0]["measured"] for name in ("gates", "distribution", "hot-start", "complexity")
    }
    slopes = [point["slope_at_0"] for point in values["gates"]["lpfs"]["by_epsilon"]]
    assert slopes == [0, 0, 0, 0]
    gates = values["distribution"]["lpfs++: gate"]
    assert gates["zeros"] == values["distribution"]["fields"] - values["distribution"]["keep"]
    assert gates["near_zero"] == 0
    for method in ("lpfs", "lpfs++"):
        aucs = values["hot-start"]["by_method"][method]
        assert abs(aucs["after"] - aucs["before"]) < 1e-6
    assert set(values["hot-start"]["by_method"]) == {"lpfs", "lpfs++", "random", "stg"}
    assert values["complexity"]["bytes"]["392"]["x"] == 4 * 392
    assert values["complexity"]["bytes"]["392"]["x_and_optimizer"] == 16 * 392


def test_every_experiment_has_a_function():
    for name, experiment in EXPERIMENTS.items():
        assert load_function(experiment).__name__ == name.replace("-", "_")
        assert experiment.summary


def test_retry_while_locked_waits_for_another_process(monkeypatch):
    monkeypatch.setattr("lpfs.paper.trials.POLL_SECONDS", 0.0)
    calls = []

    def work():
        calls.append(1)
        if len(calls) < 3:
            raise LockedError("train-a")
        return "result"

    assert retry_while_locked(work) == "result"
    assert len(calls) == 3
