"""From results to the summary: synthetic results with known differences."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lpfs._fileio import file_checksum, write_array_atomic, write_json_atomic
from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan, RunSpec
from lpfs.compare.run_dir import ResultStore
from lpfs.compare.runner import measure
from lpfs.compare.statistics import paired_difference, summarize
from lpfs.compare.summary import (
    LoadedResults,
    flatten_record,
    kind_metrics,
    median_cost,
    search_costs,
    source_versions,
    summarize_method,
)
from lpfs.compare.tables import CSV_COLUMNS, mixed_versions_note
from lpfs.errors import InputError, LpfsError
from lpfs.train.metrics import auc, logloss

ROWS = 800


@pytest.fixture
def store(tmp_path):
    """A store to which a test adds results whose AUC increases with their strength."""
    store = ResultStore(tmp_path)
    draw = np.random.default_rng(0)
    labels = (draw.random(ROWS) < 0.4).astype(np.float32)
    write_array_atomic(store.labels, labels)
    noise = draw.normal(size=ROWS)

    def add(name, keep, seed, strength, kept=("a",), seconds=1.0, shared=False, **search):
        training_noise = np.random.default_rng([seed, 7]).normal(size=ROWS)
        scores = (strength * labels + noise + 0.1 * training_noise).astype(np.float32)
        trained = f"{name}-{keep}-{seed}"
        write_array_atomic(store.directory / "trained" / f"{trained}.npy", scores)
        metrics = {"auc": auc(scores, labels), "logloss": logloss(scores, labels)}
        record = {
            "method": name, "keep": keep, "seed": seed, "status": "done", "kept": list(kept), "trained": trained,
            "test": metrics, "validation": metrics, "train_seconds": 1.0, "options": {}, "trials": [{}],
            "search": {"seconds": seconds, "memory": 10, "first_in_process": False, "interrupted": False,
                       "shared_by_all_k": shared, **search},
            "labels": file_checksum(store.labels),
            "files": {f"{trained}.npy": file_checksum(store.directory / "trained" / f"{trained}.npy")},
        }  # fmt: skip
        write_json_atomic(store.result(RunSpec(name, keep, seed)), record)
        write_json_atomic(
            store.seed(seed) / "cost.json", {"seconds": 4.0, "memory": 20, "first_in_process": seed == 0, "passes": 2.0}
        )

    store.add = add
    return store


def test_a_large_difference_is_significant_and_a_small_one_is_not(store):
    for seed in range(3):
        for keep in (2, 4):
            store.add("lpfs++", keep, seed, 1.0)
            store.add("far", keep, seed, 0.4)
            store.add("near", keep, seed, 1.0 + (0.005, -0.01, 0.002)[seed])
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    far, near = (summarize_method(loaded, name, "lpfs++", areas, {}) for name in ("far", "near"))
    for key in ("best", "lpfs++"):
        assert far["differences"][key]["verdict"] == "behind"
        assert near["differences"][key]["verdict"] == "level"
    difference = far["sizes"]["2"]["differences"]["best"]
    assert difference["value"] == pytest.approx(
        np.mean([loaded.series("far", 2)[seed].value - loaded.series("lpfs++", 2)[seed].value for seed in range(3)])
    )
    assert difference["seeds"]["high"] < 0
    assert difference["rows"]["high"] < 0
    assert "verdict" not in far["area"]  # only differences have one
    assert "verdict" not in far["sizes"]["2"]["auc"]
    lost = far["sizes"]["2"]["logloss"]
    assert lost["seeds"]["low"] < lost["value"] < lost["seeds"]["high"]
    assert lost["rows"]["low"] < lost["value"] < lost["rows"]["high"]
    best = summarize_method(loaded, "lpfs++", "lpfs++", areas, {})
    assert best["differences"] == {}
    assert best["area"]["value"] == pytest.approx(
        np.mean([2 * best["sizes"][size]["auc"]["value"] - 1 for size in ("2", "4")])
    )
    # the draws of an area are those of its AUCs
    slow = np.mean([2 * np.mean([loaded.series("far", keep)[0].draws for keep in (2, 4)], axis=0) - 1], axis=0)
    assert np.allclose(areas["far"][0].draws, slow)


def test_a_seed_without_all_sizes_has_no_area(store):
    store.add("one", 2, 0, 1.0)
    store.add("one", 4, 0, 1.0)
    store.add("one", 2, 1, 1.0)
    loaded = LoadedResults(store)
    assert list(loaded.areas("one")) == [0]
    assert summarize(loaded.areas("one"))["seeds"] is None
    assert paired_difference(loaded.areas("one"), {}) is None


def test_cost_of_a_search_in_epochs_of_pretraining(store):
    for seed in range(2):
        for keep in (2, 4):
            store.add("gates", keep, seed, 1.0, seconds=3.0)
            store.add("ranking", keep, seed, 1.0, seconds=5.0, shared=True)
    loaded = LoadedResults(store)
    gates, ranking = search_costs(loaded, "gates"), search_costs(loaded, "ranking")
    assert (gates["seconds"], gates["epochs"], gates["memory_ratio"], gates["shared_by_all_k"]) == (
        3.0,
        1.5,
        0.5,
        False,
    )
    assert (ranking["epochs"], ranking["shared_by_all_k"]) == (2.5, True)


def test_results_say_the_own_count_steps_rows_and_code_of_a_search(store):
    details = {"own_count": 3, "steps": 200, "forwards": 12_800, "backwards": 6400}
    for seed in range(2):
        store.add("gates", 2, seed, 1.0, details={**details, "own_count": 3 + seed}, code="abc")
        store.add("ranking", 2, seed, 1.0, details={"steps": 0, "forwards": 100, "backwards": 0})
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    gates = summarize_method(loaded, "gates", "gates", areas, {})["search"]
    ranking = summarize_method(loaded, "ranking", "gates", areas, {})["search"]
    assert [gates[name] for name in ("own_count", "steps", "rows_forward", "rows_backward")] == [3.5, 200, 12_800, 6400]
    assert (ranking["own_count"], ranking["steps"], ranking["rows_forward"]) == (None, 0, 100)
    row = flatten_record(loaded.of("gates")[1], {})
    assert (row["own_count"], row["search_steps"], row["rows_forward"], row["rows_backward"]) == (4, 200, 12_800, 6400)
    assert (row["search_code"], row["trained_code"]) == ("abc", None)
    assert set(CSV_COLUMNS) >= set(row) - {"kept", "options"}


def test_the_first_cost_of_a_process_counts_only_without_others():
    first, later, unknown = ({"s": value, "first_in_process": value == 9.0} for value in (9.0, 2.0, None))
    assert median_cost([first, later, unknown], "s") == 2.0
    assert median_cost([first, unknown], "s") == 9.0
    assert median_cost([unknown], "s") is None


def test_probabilities_have_an_interval_over_rows(store):
    write_array_atomic(store.labels, np.linspace(0.1, 0.6, ROWS))
    store.add("one", 2, 0, 1.0)
    store.add("one", 2, 1, 1.0)
    summary = summarize(LoadedResults(store).series("one", 2))
    assert summary["rows"]["high"] > summary["rows"]["low"]
    assert summary["seeds"] is not None


def test_metrics_of_a_known_truth():
    kinds = {"a": "main", "b": "main", "c": "pair", "d": "copy", "e": "noise"}
    assert kind_metrics([{"kept": ["b", "d", "e"]}], kinds) == {
        "recall": pytest.approx(1 / 3),
        "false_positives": 2,
        "kept_by_kind": {"main": 1, "pair": 0, "copy": 1, "noise": 1},
    }
    assert kind_metrics([{"kept": ["b", "x"]}], kinds) == {}


def test_plan():
    plan = ComparisonPlan("permutation", 5, 2)
    assert plan == ComparisonPlan.from_json(plan.to_json()) == ComparisonPlan(["permutation", "permutation"], [5, 5], 2)
    assert plan.runs(3, 9) == [
        RunSpec(ALL_FIELDS, 9, 3),
        RunSpec("permutation", 5, 3),
        RunSpec(ALL_FIELDS, 9, 4),
        RunSpec("permutation", 5, 4),
    ]
    assert {"lpfs++", "lpfs", "permutation"} <= set(ComparisonPlan("all", 5).methods)
    assert ComparisonPlan("lpfs++", 5, tune=2, options={"lpfs++": {"tau": 3.0}}).trial_settings("lpfs++")[0] == {
        "tau": 3.0
    }
    given = ComparisonPlan("shufflegate", 5, tune=5, options={"shufflegate": {"strength": 1.0}}).trial_settings(
        "shufflegate"
    )
    assert [options["strength"] for options in given] == pytest.approx(
        [1.0, 0.3, 3.0, 0.1, 10.0]
    )  # factors on the given value
    twice = ComparisonPlan("lpfs++", 5, tune=5, options={"lpfs++": {"lr": 0.02}}).trial_settings("lpfs++")
    assert len({json.dumps(options, sort_keys=True) for options in twice}) == len(twice) == 4
    with pytest.raises(InputError, match="tune must be an integer >= 0, found -1"):
        ComparisonPlan("lpfs", 5, tune=-1)
    with pytest.raises(InputError, match="there is no method 'lasso'"):
        ComparisonPlan("lasso", 5)


def test_memory_is_the_peak_above_the_start():
    with measure(torch.device("cpu")) as cost:
        array = np.ones(8_000_000)
        del array
    assert cost.seconds > 0
    if cost.memory is None:
        pytest.skip("this system does not report the peak memory of a process")
    assert 50e6 < cost.memory < 200e6


def test_a_lower_logloss_is_ahead(store):
    for seed in range(3):
        store.add("lpfs++", 2, seed, 1.0)
        store.add("far", 2, seed, 0.4)
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    far = summarize_method(loaded, "far", "lpfs++", areas, {})["sizes"]["2"]
    means = {name: np.mean([point.value for point in loaded.series(name, 2, "logloss").values()]) for name in areas}
    difference = far["logloss_differences"]["lpfs++"]
    assert difference["value"] == pytest.approx(means["far"] - means["lpfs++"])
    assert difference["verdict"] == ("behind" if difference["value"] > 0 else "ahead")


def test_versions_of_the_code_are_listed():
    done = [
        {"method": "one", "code": "a", "search": {"code": "a"}},
        {"method": "two", "code": "a", "search": {"code": "b"}},
        {"method": "all fields", "code": "a"},
        {"method": "old"},
    ]
    assert source_versions(done) == {
        "a": {"search": ["one"], "trained": ["all fields", "one", "two"]},
        "b": {"search": ["two"], "trained": []},
        "not recorded": {"search": [], "trained": ["old"]},
    }
    note = mixed_versions_note({"code": source_versions(done), "versions": {"code": "a"}})
    assert note == ["tables made by code a; searches by code a: one; b: two; not recorded: -"]
    assert mixed_versions_note({"code": source_versions(done[:1]), "versions": {"code": "a"}}) == []
    assert mixed_versions_note({"code": source_versions(done[:1]), "versions": {"code": "b"}}) != []


@pytest.mark.parametrize("name", ["results/one-k2-s0.json", "trained/one-2-0.npy", "labels.npy", "seeds/0/cost.json"])
def test_a_damaged_file_is_named(store, name):
    store.add("one", 2, 0, 1.0)
    LoadedResults(store)
    path = store.directory / name
    data = bytearray(path.read_bytes())
    data[data.index(b"0,") if path.suffix == ".json" else -3] ^= 1
    path.write_bytes(data)
    with pytest.raises(LpfsError, match=f"{name}.*damaged"):
        LoadedResults(store)
