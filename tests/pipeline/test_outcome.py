"""What a run says in the end."""

from __future__ import annotations

import io

import polars as pl
import pytest

from lpfs.pipeline.results import _describe_hot_start, _describe_stop, steps_saved, write_history
from lpfs.pipeline.tell import Console
from lpfs.schema import Selection

LOOKS = [(0, 0.7), (50, 0.74), (100, 0.72), (150, 0.75), (200, 0.71)]


@pytest.mark.parametrize(
    ("level", "at", "saved"),
    [
        (0.7, 0, 400),
        (0.7004, 0, 400),
        (0.7006, 50, 350),
        (0.73, 150, 250),  # a lucky look at 50 does not count, and what comes after the best one does not matter
        (0.7504, 150, 250),
        (0.7506, None, 0),
        (None, None, 0),
    ],
)
def test_steps_saved(level, at, saved):
    found = steps_saved(LOOKS, level, 400)
    assert (found["level_at"], found["steps_saved"]) == (at, saved)
    assert (found["steps"], found["retrain_steps"], found["kept_step"], found["auc"]) == (200, 400, 150, 0.75)
    assert (found["retrain_auc"], found["tolerance"]) == (level, 0.0005)
    assert found["validation"] == [list(each) for each in LOOKS]
    line = _describe_hot_start(found)[0]
    assert f"{saved:,} saved (validation AUC within 0.0005)" in line if saved else "saved nothing" in line
    assert _describe_hot_start({}) == []


def test_a_hot_start_that_only_gets_worse_keeps_its_start():
    found = steps_saved([(0, 0.7), (50, 0.7), (100, 0.6)], 0.8, 400)
    assert (found["kept_step"], found["auc"], found["steps_saved"]) == (0, 0.7, 0)
    assert _describe_hot_start(found) == [
        "the hot start saved nothing: its validation AUC was 0.70000 at best, after 0 steps; from scratch it is "
        "0.80000 after 400"
    ]


def test_what_was_decided_and_what_further_cuts_would_cost():
    curve = [{"alive": n, "auc": 0.8, "loss": 0.0031 if n == 12 else 0.02, "step": 1} for n in (20, 15, 12, 6)]
    end = {"loss": 0.0004, "allowed": 0.001, "alive": 15, "auc": 0.8, "step": 9}
    selection = Selection(tuple(f"f{n}" for n in range(15)), ("x",), made={"curve": curve, "end": end})
    first, second = _describe_stop(selection)
    assert first.startswith("15 fields lose 0.00040 of validation AUC")
    assert first.endswith("0.00100 was allowed")
    assert second.endswith("with 12 0.00310, with 6 0.02000")
    better = Selection(("a",), (), made={"curve": [], "end": {**end, "loss": -0.01}})
    assert _describe_stop(better) == [
        "1 field loses nothing of validation AUC against all fields trained as long; 0.00100 was allowed"
    ]
    assert _describe_stop(Selection(("a",), (), made={"cost": 2.5, "budget": 3.0, "unit": "ms"})) == [
        "cost 2.5 of at most 3 ms"
    ]
    assert _describe_stop(Selection(("a",), ())) == []


def test_the_history_has_a_column_a_field_under_its_own_name(tmp_path):
    history = [{"step": 1, "loss": 0.5, "gates": [1.0, 0.5]}, {"step": 2, "loss": 0.4, "gates": [0.9, 0.0]}]
    selection = Selection(("b",), ("a",), {"b": 0.9, "a": 0.0}, history=history).in_order(["a", "b"])
    write_history(tmp_path / "history.parquet", selection)
    frame = pl.read_parquet(tmp_path / "history.parquet")
    assert frame.columns == ["step", "loss", "gate:a", "gate:b"]
    assert frame["gate:b"].to_list() == [1.0, 0.9]
    assert frame["gate:a"].to_list() == [0.5, 0.0]
    write_history(tmp_path / "none.parquet", Selection(("a",), ()))
    assert not (tmp_path / "none.parquet").exists()


def test_tables_are_told_with_numbers_to_the_right():
    out = io.StringIO()
    tell = Console(stream=out, stages=2)
    tell.heading("prepare")
    tell.table("title", ["what", "AUC"], [["a", "0.5"], ["longer", "0.75"]])
    assert out.getvalue().splitlines() == [
        "1/2 prepare",
        "title",
        "  what     AUC",
        "  a        0.5",
        "  longer  0.75",
    ]
    quiet = Console(stream=out, quiet=True)
    quiet.table("x", ["y"], [])
    quiet.message("z")
    assert "z" not in out.getvalue()


def test_a_selection_in_another_order_is_the_same_selection():
    selection = Selection(("c", "a*b", "a"), ("d", "b"), {"c": 1.0, "a*b": 1.0, "a": 2.0, "d": 0.0, "b": 0.0})
    ordered = selection.in_order(["a", "b", "c", "d"])
    assert ordered.kept == ("a", "c", "a*b")
    assert ordered.dropped == ("b", "d")
    assert dict(ordered.gates) == dict(selection.gates)
    assert list(ordered.gates) == ["a", "b", "c", "d", "a*b"]
