"""The record and the files of a run, and the lines that are printed."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
from hypothesis import given, strategies as st

from lpfs._console import Console
from lpfs.errors import InputError
from lpfs.pipeline import results as module
from lpfs.pipeline.results import (
    Outcome,
    _describe_hot_start,
    _describe_stop,
    describe_kept,
    format_field_list,
    print_results,
    read_record,
    steps_saved,
    versions,
    with_record,
    write_history,
    write_record,
)
from lpfs.schema import Selection

POINTS = [(0, 0.7), (50, 0.74), (100, 0.72), (150, 0.75), (200, 0.71)]


@pytest.mark.parametrize(
    ("retrain_auc", "matched_at", "saved"),
    [
        (0.7, 0, 400),
        (0.7004, 0, 400),
        (0.7006, 50, 350),
        (0.73, 150, 250),  # neither the single high value at 50 counts nor the low one after the best
        (0.7504, 150, 250),
        (0.7506, None, 0),
        (None, None, 0),
    ],
)
def test_steps_saved(retrain_auc, matched_at, saved):
    result = steps_saved(POINTS, retrain_auc, 400, 0.3)
    assert (result["matched_at"], result["steps_saved"]) == (matched_at, saved)
    assert (result["steps"], result["retrain_steps"], result["kept_step"], result["auc"]) == (200, 400, 150, 0.75)
    assert (result["retrain_auc"], result["tolerance"], result["shrink_factor"]) == (retrain_auc, 0.0005, 0.3)
    assert result["validation"] == [list(point) for point in POINTS]
    (line,) = _describe_hot_start(result)
    assert (f"{saved:,} steps saved" if saved else "saved no steps") in line


def test_hot_start_that_only_gets_worse_keeps_its_initial_state():
    result = steps_saved([(0, 0.7), (50, 0.7), (100, 0.6)], 0.8, 400)
    assert (result["kept_step"], result["auc"], result["steps_saved"]) == (0, 0.7, 0)
    (line,) = _describe_hot_start(result)
    assert all(text in line for text in ("no steps", "0.7000 after 0", "0.8000 after 400"))
    assert _describe_hot_start({}) == []


def test_lines_state_the_loss_and_what_fewer_fields_would_lose():
    curve = [{"alive": n, "auc": 0.8, "loss": 0.0031 if n == 12 else 0.02, "step": 1} for n in (20, 15, 12, 6)]
    end = {"loss": 0.0004, "allowed": 0.001, "alive": 15, "auc": 0.8, "step": 9}
    selection = Selection(tuple(f"f{n}" for n in range(15)), ("x",), made={"curve": curve, "end": end})
    first, second = _describe_stop(selection)
    assert all(text in first for text in ("15 fields", "0.0004 of", "0.0010 was allowed"))
    assert second.endswith("0.0031 with 12, 0.0200 with 6")
    (line,) = _describe_stop(Selection(("a",), (), made={"curve": [], "end": {**end, "loss": -0.01}}))
    assert "1 field loses nothing" in line


def test_line_states_the_cost_of_a_budget():
    selection = Selection(("a",), (), made={"cost": 2.5, "budget": 3.0, "unit": "ms"})
    assert _describe_stop(selection) == ["cost 2.5 of at most 3 ms"]
    assert _describe_stop(Selection(("a",), ())) == []


def test_long_lists_of_names_are_shortened():
    kept = tuple(f"f{number}" for number in range(14))
    assert describe_kept(Selection(kept[:2], ("x",))).endswith("f0, f1")
    assert describe_kept(Selection(kept, ())).endswith("f11 and 2 more")


def make_outcome(**changes):
    """Return an outcome without metrics."""
    size = {"table_bytes": 1000, "rows_per_second": 10}
    values = {
        **{"selection": Selection(("a", "b"), ("c",)), "metrics": {"pruned": {"auc": 0.7, "logloss": 0.5}}},
        **{"choices": {}, "certificates": {}, "max_logit_change": None, "model": None, "chosen": "pruned"},
        **{"chosen_in": {}, "savings": {"all_fields": size, "kept": size}, "seconds": {}, "folder": Path("run")},
    }
    return Outcome(**{**values, **changes})


def plan_of_searches(count, console=None):
    splits = SimpleNamespace(few_labels=lambda: None)
    return SimpleNamespace(settings=SimpleNamespace(seeds=count, finds_count=False), splits=splits, console=console)


@pytest.mark.parametrize(
    ("searches", "chosen_in", "expected"),
    [
        (1, {"a": 1, "b": 1, "c": 0}, None),
        (2, {"a": 2, "b": 1, "c": 0}, "not kept in all 2 searches: b 1/2"),
        (3, {"a": 3, "b": 3, "c": 0}, "not kept in all 3 searches: none"),
    ],
)
def test_fields_that_only_some_searches_kept_are_printed(monkeypatch, searches, chosen_in, expected):
    monkeypatch.setattr(module, "describe_allowance", lambda verdict: "0.01 is allowed")
    stream = io.StringIO()
    outcome = make_outcome(chosen_in=chosen_in, verdict={"text": "2 of 3 fields are enough"})
    print_results(outcome, plan_of_searches(searches, Console(stream=stream)))
    printed = [line.strip() for line in stream.getvalue().splitlines()]
    assert "kept: a, b" in printed
    assert [line for line in printed if "searches" in line] == ([expected] if expected else [])


def test_record_has_milliseconds_and_the_facts_of_every_field(monkeypatch):
    verdict = {"kind": "enough", "text": "enough", "checks": [], "allowed": 0.01}
    monkeypatch.setattr(module, "judge", lambda outcome, plan: verdict)
    monkeypatch.setattr(
        module, "build_record", lambda plan, selection, **given: {"fields": {"a": {"cost": 1}}, **given}
    )
    facts = {"a": {"missing": 0.1}, "b": {"missing": 0.2}}
    record = with_record(make_outcome(seconds={"search": 1.23456}, field_facts=facts), plan_of_searches(1)).record
    assert record["seconds"] == {"search": 1.235}
    assert record["fields"] == {"a": {"cost": 1, "missing": 0.1}, "b": {"missing": 0.2}}


def test_history_has_one_column_per_gate(tmp_path):
    history = [{"step": 1, "loss": 0.5, "gates": [1.0, 0.5]}, {"step": 2, "loss": 0.4, "gates": [0.9, 0.0]}]
    selection = Selection(("b",), ("a",), {"b": 0.9, "a": 0.0}, history=history).in_order(["a", "b"])
    write_history(tmp_path / "history.parquet", selection)
    frame = pl.read_parquet(tmp_path / "history.parquet")
    assert frame.columns == ["step", "loss", "gate:a", "gate:b"]
    assert frame["gate:b"].to_list() == [1.0, 0.9]
    assert frame["gate:a"].to_list() == [0.5, 0.0]
    write_history(tmp_path / "none.parquet", Selection(("a",), ()))
    assert not (tmp_path / "none.parquet").exists()


def test_record_is_read_back(tmp_path):
    selection = Selection(("b",), ("a",), {"b": 0.9, "a": 0.0}, made={"method": "lpfs"})
    write_record(tmp_path, {**selection.to_json(), "seed": 3}, selection)
    again, record = read_record(tmp_path)
    assert (again.kept, again.dropped, dict(again.gates)) == (("b",), ("a",), {"b": 0.9, "a": 0.0})
    assert record["seed"] == 3
    assert (tmp_path / "kept_fields.txt").read_text() == "b\n"


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"kept": ["a"]})])
def test_invalid_record_raises_an_error(tmp_path, text):
    with pytest.raises(InputError, match=r"no selection\.json in .*directory of a search"):
        read_record(tmp_path)
    (tmp_path / "selection.json").write_text(text)
    with pytest.raises(InputError, match=r"selection\.json .*; search again"):
        read_record(tmp_path)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_any_name_in_the_list_of_fields_is_read_back(names):
    text = format_field_list(names)
    assert [json.loads(line) if line.startswith('"') else line for line in text.splitlines()] == names
    assert len(text.splitlines()) == text.count("\n") == len(names)


def test_only_unusual_names_are_quoted_in_the_list_of_fields():
    assert format_field_list(["user", "a b", "Größe", 'the "x"']) == 'user\na b\nGröße\nthe "x"\n'
    assert format_field_list(['"x"', "", " a"]) == '"\\"x\\""\n""\n" a"\n'


def test_selection_is_reordered_with_its_gates():
    selection = Selection(("c", "a*b", "a"), ("d", "b"), {"c": 1.0, "a*b": 1.0, "a": 2.0, "d": 0.0, "b": 0.0})
    ordered = selection.in_order(["a", "b", "c", "d"])
    assert ordered.kept == ("a", "c", "a*b")
    assert ordered.dropped == ("b", "d")
    assert dict(ordered.gates) == dict(selection.gates)
    assert list(ordered.gates) == ["a", "b", "c", "d", "a*b"]


def test_stop_lists_only_smaller_sizes_from_the_whole_curve():
    curve = [{"alive": n, "auc": 0.8, "loss": n / 1000, "step": 1} for n in range(20, 0, -1)]
    end = {"loss": 0.0004, "allowed": 0.001, "alive": 17, "auc": 0.8, "step": 9}
    selection = Selection(tuple(f"f{n}" for n in range(17)), ("x",), made={"curve": curve, "end": end})
    line = _describe_stop(selection)[1]
    assert [int(size) for size in re.findall(r"with (\d+)", line)] == [16, 12, 8, 4]
    assert "0.0160 with 16, 0.0120 with 12" in line


def test_versions_identify_the_code_that_made_a_result():
    values = versions()
    assert values.keys() == {"lpfs", "code", "torch", "numpy", "python"}
    assert all(values.values())
    assert re.fullmatch("[0-9a-f]{12}", values["code"])


def test_record_with_an_undefined_metric_is_written(tmp_path):
    """A finished run does not fail because one of its numbers is NaN."""
    selection = Selection(("b",), ("a",), {"b": 0.9, "a": 0.0})
    write_record(tmp_path, {**selection.to_json(), "metrics": {"pruned": {"logloss": math.nan}}}, selection)
    assert math.isnan(json.loads((tmp_path / "selection.json").read_text())["metrics"]["pruned"]["logloss"])
