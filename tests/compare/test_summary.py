"""From results to tables: made results whose differences are known."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan, RunSpec
from lpfs.compare.run_dir import ResultStore, put, put_scores
from lpfs.compare.runner import measure
from lpfs.compare.statistics import paired_difference, summarize
from lpfs.compare.summary import LoadedResults, kept_as_asked, median_cost, method, search_costs, source_versions
from lpfs.compare.tables import mixed_versions_note
from lpfs.errors import InputError
from lpfs.train.metrics import auc, logloss

ROWS = 800


@pytest.fixture
def store(tmp_path):
    """Scores whose AUC rises with a strength that a test chooses."""
    store = ResultStore(tmp_path)
    draw = np.random.default_rng(0)
    labels = (draw.random(ROWS) < 0.4).astype(np.float32)
    put_scores(store.labels, labels)
    noise = draw.normal(size=ROWS)

    def add(name, keep, seed, strength, kept=("a",), seconds=1.0, once=False):
        luck = np.random.default_rng([seed, 7]).normal(size=ROWS)
        scores = (strength * labels + noise + 0.1 * luck).astype(np.float32)
        trained = f"{name}-{keep}-{seed}"
        put_scores(store.folder / "trained" / f"{trained}.npy", scores)
        judged = {"auc": auc(scores, labels), "logloss": logloss(scores, labels)}
        record = {
            "method": name, "keep": keep, "seed": seed, "status": "done", "kept": list(kept), "trained": trained,
            "test": judged, "validation": judged, "train_seconds": 1.0, "options": {}, "tried": [{}],
            "search": {"seconds": seconds, "memory": 10, "first": False, "interrupted": False, "once": once},
        }  # fmt: skip
        put(store.result(RunSpec(name, keep, seed)), record)
        put(store.seed(seed) / "cost.json", {"seconds": 4.0, "memory": 20, "first": seed == 0, "passes": 2.0})

    store.add = add
    return store


def test_a_clear_difference_is_beyond_noise_and_a_small_one_is_not(store):
    for seed in range(3):
        for keep in (2, 4):
            store.add("lpfs++", keep, seed, 1.0)
            store.add("far", keep, seed, 0.4)
            store.add("near", keep, seed, 1.0 + (0.005, -0.01, 0.002)[seed])
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    far, near = (method(loaded, name, "lpfs++", areas, {}) for name in ("far", "near"))
    for key in ("best", "lpfs++"):
        assert far["against"][key]["verdict"] == "behind"
        assert near["against"][key]["verdict"] == "level"
    found = far["sizes"]["2"]["against"]["best"]
    assert found["value"] == pytest.approx(
        np.mean(
            [loaded.series("far", 2)[seed].value - loaded.series("lpfs++", 2)[seed].value for seed in range(3)]
        )
    )
    assert found["seeds"]["high"] < 0
    assert found["rows"]["high"] < 0
    assert "verdict" not in far["area"]  # only a difference is beyond noise or not
    assert "verdict" not in far["sizes"]["2"]["auc"]
    lost = far["sizes"]["2"]["logloss"]
    assert lost["seeds"]["low"] < lost["value"] < lost["seeds"]["high"]
    assert lost["rows"]["low"] < lost["value"] < lost["rows"]["high"]
    own = method(loaded, "lpfs++", "lpfs++", areas, {})
    assert own["against"] == {}
    assert own["area"]["value"] == pytest.approx(
        np.mean([2 * own["sizes"][size]["auc"]["value"] - 1 for size in ("2", "4")])
    )
    # drawing rows for an area is drawing them for the AUCs that it is made of
    slow = np.mean([2 * np.mean([loaded.series("far", keep)[0].drawn for keep in (2, 4)], axis=0) - 1], axis=0)
    assert np.allclose(areas["far"][0].drawn, slow)


def test_a_seed_without_all_sizes_has_no_area(store):
    store.add("one", 2, 0, 1.0)
    store.add("one", 4, 0, 1.0)
    store.add("one", 2, 1, 1.0)
    loaded = LoadedResults(store)
    assert list(loaded.areas("one")) == [0]
    assert summarize(loaded.areas("one"))["seeds"] is None
    assert paired_difference(loaded.areas("one"), {}) is None


def test_the_cost_is_told_in_epochs_and_once_where_it_is(store):
    for seed in range(2):
        for keep in (2, 4):
            store.add("gates", keep, seed, 1.0, seconds=3.0)
            store.add("ranking", keep, seed, 1.0, seconds=5.0, once=True)
    loaded = LoadedResults(store)
    gates, ranking = search_costs(loaded, "gates"), search_costs(loaded, "ranking")
    assert (gates["seconds"], gates["epochs"], gates["memory_ratio"], gates["once"]) == (3.0, 1.5, 0.5, False)
    assert (ranking["epochs"], ranking["once"]) == (2.5, True)


def test_the_first_of_a_process_counts_only_where_it_is_all():
    first, later, unknown = ({"s": value, "first": value == 9.0} for value in (9.0, 2.0, None))
    assert median_cost([first, later, unknown], "s") == 2.0
    assert median_cost([first, unknown], "s") == 9.0
    assert median_cost([unknown], "s") is None


def test_labels_that_are_no_clicks_leave_the_rows_out(store):
    store.add("one", 2, 0, 1.0)
    store.add("one", 2, 1, 1.0)
    put_scores(store.labels, np.full(ROWS, 0.5, np.float32))
    found = summarize(LoadedResults(store).series("one", 2))
    assert found["rows"] is None
    assert found["seeds"] is not None


def test_who_keeps_more_than_asked_is_told_apart():
    assert kept_as_asked([{"kept": ["a"], "keep": 2}])
    assert not kept_as_asked([{"kept": ["a"], "keep": 2}, {"kept": ["a", "b", "c"], "keep": 2}])


def test_a_plan():
    plan = ComparisonPlan("permutation", 5, 2)
    assert (
        plan
        == ComparisonPlan.from_json(plan.to_json())
        == ComparisonPlan(["permutation", "permutation"], [5, 5], 2)
    )
    assert plan.jobs(3, 9) == [
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
    assert [each["strength"] for each in given] == pytest.approx(
        [1.0, 0.3, 3.0, 0.1, 10.0]
    )  # factors on what is given
    twice = ComparisonPlan("lpfs++", 5, tune=5, options={"lpfs++": {"lr": 0.02}}).trial_settings("lpfs++")
    assert len({json.dumps(each, sort_keys=True) for each in twice}) == len(twice) == 4
    with pytest.raises(InputError, match="tune must be a whole number >= 0, found -1"):
        ComparisonPlan("lpfs", 5, tune=-1)
    with pytest.raises(InputError, match="there is no method 'lasso'"):
        ComparisonPlan("lasso", 5)


def test_memory_is_what_was_in_use_at_most():
    with measure(torch.device("cpu")) as cost:
        held = np.ones(8_000_000)
        del held
    assert cost.seconds > 0
    if cost.memory is None:
        pytest.skip("this system does not tell the peak of a process's memory")
    assert 50e6 < cost.memory < 200e6


def test_less_logloss_is_ahead(store):
    for seed in range(3):
        store.add("lpfs++", 2, seed, 1.0)
        store.add("far", 2, seed, 0.4)
    loaded = LoadedResults(store)
    areas = {name: loaded.areas(name) for name in loaded.methods}
    far = method(loaded, "far", "lpfs++", areas, {})["sizes"]["2"]
    means = {name: np.mean([each.value for each in loaded.series(name, 2, "logloss").values()]) for name in areas}
    found = far["logloss_against"]["lpfs++"]
    assert found["value"] == pytest.approx(means["far"] - means["lpfs++"])
    assert found["verdict"] == ("behind" if found["value"] > 0 else "ahead")


def test_which_code_made_what():
    done = [
        {"method": "one", "code": "a", "search": {"code": "a"}},
        {"method": "two", "code": "a", "search": {"code": "b"}},
        {"method": "all fields", "code": "a"},
        {"method": "old"},
    ]
    assert source_versions(done) == {
        "a": {"search": ["one"], "trained": ["all fields", "one", "two"]},
        "b": {"search": ["two"], "trained": []},
        "not written down": {"search": [], "trained": ["old"]},
    }
    told = mixed_versions_note({"code": source_versions(done), "versions": {"code": "a"}})
    assert told == ["tables made by code a; searches by code a: one; b: two; not written down: -"]
    assert mixed_versions_note({"code": source_versions(done[:1]), "versions": {"code": "a"}}) == []
    assert mixed_versions_note({"code": source_versions(done[:1]), "versions": {"code": "b"}}) != []
