"""The fixed list of logs behind the published comparison, and the statistics over them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import lpfs
from lpfs.data.simulate_spec import PRESETS
from tests.helpers.comparisons import QUICK

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("compare_tables"), importlib.import_module("compare_summary")
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_list_has_enough_logs_that_nothing_was_tuned_on(scripts):
    logs = scripts[0].load_logs()
    unseen = [log for log in logs.values() if log.status == "unseen"]
    assert len(unseen) >= 12
    assert len({log.seed for log in logs.values()}) >= len(unseen) + 5
    assert min(log.seed for log in logs.values()) > 9000  # seeds of earlier work are small numbers
    assert all(log.preset in PRESETS and log.rows for log in unseen)
    for family in ("small", "terabyte", "industrial-small", "catalog", "turnover", "census", "coil2000", "bank"):
        assert sum(log.family == family for log in logs.values()) >= 5
    assert {log.family for log in logs.values() if log.status == "used in development"} == {
        "census",
        "coil2000",
        "bank",
    }


def test_no_other_file_uses_the_seeds_of_the_list(scripts):
    root = BENCHMARKS.parent
    seeds = [str(log.seed) for log in scripts[0].load_logs().values()]
    files = [*root.glob("src/**/*.py"), *root.glob("tests/**/*.py"), *BENCHMARKS.glob("*.py")]
    for path in files:
        words = set(path.read_text("utf-8").replace("_", "").replace(",", " ").replace(")", " ").split())
        assert not words & set(seeds), path


def test_differences_are_tested_over_logs_and_corrected(scripts, tmp_path):
    tables, summary = scripts
    logs = [log for log in tables.load_logs().values() if log.family == "catalog"]
    for number, log in enumerate(logs):
        by_method = {
            "lpfs++": 0.80 + 0.02 * number,  # logs differ much more than methods do
            "worse": 0.78 + 0.02 * number + 0.0002 * number,
            "same": 0.80 + 0.02 * number + 0.001 * (-1) ** number,
        }
        methods = {
            name: {"sizes": {str(size): {"auc": {"by_seed": {"0": value, "1": value}}} for size in (4, 8, 17)}}
            for name, value in by_method.items()
        }
        (tmp_path / log.name).mkdir()
        values = {"methods": methods, "sizes": [4, 8, 17]}
        (tmp_path / log.name / "comparison.json").write_text(json.dumps(values))
    rows = summary.summarize(summary.read_differences(tmp_path))["differences"]
    assert {(row["method"], row["keep"]) for row in rows} == {
        (m, k) for m in ("worse", "same") for k in ("N/8", "N/4", "N/2")
    }
    for row in rows:
        assert (row["logs"], row["unseen"]) == (5, True)
        assert row["verdict"] == ("behind" if row["method"] == "worse" else "level")
        assert row["low"] < row["difference"] < row["high"]
        assert row["corrected_p"] >= row["p"]


def test_holm(scripts):
    holm = scripts[1].holm
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_committed_run_of_the_rivals_own_code_agrees_with_ours():
    """benchmarks/results/rivals_own_code.json is what docs/measured.md says."""
    values = json.loads((BENCHMARKS / "results" / "rivals_own_code.json").read_text("utf-8"))
    formulas = values["formulas"]
    assert formulas["ShuffleGate"] == {"gates": 0.0, "penalty_times_N": 0.0}
    zero = ("probability_of_an_open_gate", "gates_without_noise", "sampled_gates")
    assert all(formulas["L0_regularization"][name] < 1e-6 for name in zero)
    assert max(formulas["FairFS"][name] for name in ("gradient_of_the_penalized_loss", "scores")) < 1e-6
    assert max(formulas["UMEC"].values()) < 1e-6
    agreement = {name: (found["spearman"], 15 * found["overlap"]) for name, found in values["searches"].items()}
    assert agreement == {
        "stg": pytest.approx((0.745, 11)),
        "lassonet": pytest.approx((0.606, 12)),
        "fairfs": pytest.approx((0.752, 12)),
        "umec": pytest.approx((0.685, 11)),
    }


def test_overall_rows_are_over_all_logs_and_ranks_leave_out_the_truth(scripts, tmp_path):
    tables, summary = scripts
    logs = [log for log in tables.load_logs().values() if log.seed % 5 == 1 and log.status == "unseen"]
    assert len({log.family for log in logs}) > 2
    for number, log in enumerate(logs):
        areas = {"lpfs++": 0.5, "better": 0.6 if number % 2 else 0.4, "worse": 0.3, "oracle": 0.9}
        methods = {
            name: {
                "sizes": {str(size): {"auc": {"by_seed": {"0": area + size}}} for size in (1, 2, 3)},
                "area": {"value": area},
            }
            for name, area in areas.items()
        }
        (tmp_path / log.name).mkdir()
        values = {"methods": methods, "sizes": [1, 2, 3], "unranked": ["all", "oracle"]}
        (tmp_path / log.name / "comparison.json").write_text(json.dumps(values))
    overall = summary.summarize(summary.read_differences(tmp_path))["overall"]
    assert {(row["family"], row["logs"]) for row in overall} == {("all", len(logs))}
    assert {row["method"]: row["verdict"] for row in overall} == {"better": "level", "worse": "behind"}
    ranks = {row["method"]: row["rank"] for row in summary.mean_ranks(tmp_path)}
    assert ranks["worse"] == 3
    assert ranks["lpfs++"] + ranks["better"] == pytest.approx(3)
    assert "oracle" not in ranks


def test_searches_of_earlier_results_are_taken_over(scripts, log, tmp_path):
    tables = scripts[0]
    options = {"methods": ["permutation", "mutual_information", "lpfs"], "keep": [4], "seeds": 1, **QUICK}
    lpfs.compare(log, tmp_path / "first", **options)
    tables.copy_results(tmp_path / "results", tmp_path / "first", ["compare", "log"])
    path = tmp_path / "results" / "searches.json"
    searches = json.loads(path.read_text())
    assert set(searches) == {"lpfs-s0-k4", "permutation-s0", "mutual_information-s0"}
    kept = list(searches["lpfs-s0-k4"]["kept"])
    for search in searches.values():
        search["code"] = "earlier"
        assert "gates" not in search
    path.write_text(json.dumps(searches))
    tables.restore_searches(tmp_path / "results", tmp_path / "second", options["methods"], ["permutation"])
    values = lpfs.compare(log, tmp_path / "second", **options).values
    assert values["code"]["earlier"]["search"] == ["lpfs", "mutual_information"]
    assert sorted(name for code, names in values["code"].items() if code != "earlier" for name in names["search"]) == [
        "permutation"
    ]
    result = next(result for result in values["results"] if result["method"] == "lpfs")
    assert sorted(result["kept"]) == sorted(kept)


def test_searches_are_taken_over_from_results_without_them(scripts, log, tmp_path):
    tables = scripts[0]
    options = {"methods": ["mutual_information", "lpfs"], "keep": [2, 4], "seeds": 1, **QUICK}
    first = lpfs.compare(log, tmp_path / "first", **options).values
    tables.copy_results(tmp_path / "results", tmp_path / "first", ["compare", "log"])
    (tmp_path / "results" / "searches.json").unlink()
    tables.restore_searches(tmp_path / "results", tmp_path / "second", options["methods"], [])
    paths = sorted((tmp_path / "second" / "searches").glob("*.json"))
    assert [path.stem for path in paths] == ["lpfs-s0-k2", "lpfs-s0-k4", "mutual_information-s0"]
    before = {path: path.read_text() for path in paths}
    second = lpfs.compare(log, tmp_path / "second", **options).values
    assert {path: path.read_text() for path in paths} == before  # no search was repeated
    rows = [
        [(row["method"], row["keep"], row["kept"], row["auc"], row["search_steps"]) for row in values["results"]]
        for values in (first, second)
    ]
    assert rows[0] == rows[1]
    assert second["methods"]["lpfs"]["search"]["seconds"] is None


def test_the_committed_summary_is_that_of_the_committed_results(scripts):
    summary = scripts[1]
    committed = json.loads((BENCHMARKS / "results" / "compare_summary.json").read_text("utf-8"))
    made = summary.summary(summary.RESULTS)
    assert list(made) == list(committed)
    for name in ("overall", "differences", "auc", "ranks"):
        assert len(made[name]) == len(committed[name])
        assert all(row == pytest.approx(other) for row, other in zip(made[name], committed[name], strict=True)), name
