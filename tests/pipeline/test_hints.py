"""Hints: a field that says too much is named, and so are two fields that are one column."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from known_truth import TINY

from lpfs.pipeline import hints as module
from lpfs.pipeline.hints import FieldValues, bin_numbers, leaks, partition_digest
from lpfs.pipeline.select import select

BANK = Path(__file__).parents[3] / "shared" / "data" / "bank_marketing.parquet"


def table(rows=3000, seed=0):
    """Clicks that depend on user, ad and a number; nothing else."""
    draw = np.random.default_rng(seed)
    user, ad, noise = draw.integers(6, size=rows), draw.integers(5, size=rows), draw.integers(9, size=rows)
    age = draw.normal(size=rows)
    logit = 1.5 * (user % 2) + 1.5 * (ad % 2) - 1.5 + 0.8 * age
    click = (draw.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    columns = {"click": click, "user": [f"u{v}" for v in user], "ad": [f"a{v}" for v in ad], "age": age}
    return pl.DataFrame({**columns, "noise": [f"n{v}" for v in noise]}), draw


def selected(rows, out, **how):
    found = select(rows, out, **{"label": "click", "keep": 3, **TINY, "finish": "none", "quiet": True, **how})
    return found, json.loads((found.folder / "selection.json").read_text())["hints"]


def test_nothing_is_said_where_nothing_is_suspicious(tmp_path):
    found, told = selected(table()[0], tmp_path / "run")
    assert list(found.hints) == told == []


@pytest.mark.parametrize("kind", ["id", "number", "bag"])
def test_a_leaking_field_is_named(tmp_path, capsys, kind):
    rows, draw = table()
    known = rows["click"].to_numpy() ^ (draw.random(len(rows)) < 0.02)  # known only after the click
    values = {
        "id": [f"v{v}" for v in known],
        "number": known + 0.3 * draw.normal(size=len(rows)),
        "bag": [f"x|y{v}|z" for v in known],
    }
    how = {"prepare": {"fields": {"after": {"kind": "multi", "separator": "|"}}}} if kind == "bag" else {}
    rows = rows.with_columns(pl.Series("after", values[kind]))
    _, told = selected(rows, tmp_path / "run", quiet=False, **how)
    assert [(each["kind"], each["fields"]) for each in told] == [("leak", ["after"])]
    assert told[0]["auc"] > 0.9
    assert told[0]["shuffled"] < told[0]["all_fields"]
    err = capsys.readouterr().err
    assert "hint: 'after' alone has a validation AUC of 0.9" in err
    assert "leave it out: --must-drop after" in err


def test_two_fields_that_are_one_column_are_named(tmp_path):
    rows, _ = table()
    rows = rows.with_columns(client=pl.col("user").str.replace("u", "client "), old=-3 * pl.col("age"))
    how = {"must_keep": ("user", "client", "age", "old"), "keep": 4, "prepare": {"keep_all": True}}
    _, told = selected(rows, tmp_path / "run", **how)
    assert sorted(each["fields"] for each in told) == [["age", "old"], ["user", "client"]]
    assert {each["kind"] for each in told} == {"same column"}
    assert "--must-drop client" in next(each["text"] for each in told if "user" in each["fields"])


def test_what_goes_wrong_costs_the_hints_alone(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise ZeroDivisionError("of all things")

    monkeypatch.setattr(module, "read_fields", fails)
    found, told = selected(table()[0], tmp_path / "run", quiet=False)
    assert list(found.hints) == told == []
    assert "no hints this time: ZeroDivisionError: of all things" in capsys.readouterr().err
    assert len(found.kept) == 3


def test_nothing_is_said_of_leaks_on_a_handful_of_clicks(tmp_path, monkeypatch):
    rows = table()[0]
    rows = rows.with_columns(after=pl.col("click").cast(pl.String))
    monkeypatch.setattr(module, "MIN_POSITIVES", 1000)
    assert selected(rows, tmp_path / "run")[1] == []


def test_when_a_field_says_too_much():
    def named(together, alone, without):
        return [each["fields"][0] for each in leaks(together, alone, without)]

    calm = {"a": 0.7, "b": 0.7}
    assert named(0.9, calm, {"a": 0.85, "b": 0.9}) == []
    assert named(0.9, {"a": 0.85, "b": 0.7}, {"a": 0.85, "b": 0.9}) == ["a"]  # nearly as well as all
    assert named(0.9, calm, {"a": 0.7, "b": 0.9}) == ["a"]  # the model hangs on it
    assert named(0.999, {"a": 0.96, "b": 0.951}, {"a": 0.99, "b": 0.99}) == ["a", "b"]  # nearly everything
    many = dict.fromkeys("abcd", 0.8)
    assert named(0.7, many, many) == []  # the model of all fields is poor
    assert named(0.7, {**many, "a": 0.96}, many) == ["a"]
    assert named(0.55, {"a": 0.55, "b": 0.5}, {"a": 0.5, "b": 0.55}) == []  # nobody says anything


def column(values, raw=False):
    values = np.asarray(values)
    rows = np.arange(len(values))
    return [FieldValues(values.astype(np.int64), rows, values.astype(np.float64) if raw else None)]


def test_a_column_under_other_names():
    first = partition_digest(column([1, 2, 1, 3, 2, 1]))
    assert first == partition_digest(column([7, 0, 7, 1, 0, 7]))
    assert first == partition_digest(column([0.5, 0.1, 0.5, 0.9, 0.1, 0.5], raw=True))
    assert first != partition_digest(column([7, 0, 7, 1, 0, 0]))
    assert partition_digest(column([1, 1, 1, 1])) is None  # one value everywhere
    assert partition_digest(column([1, 2, 3, 4])) is None  # another one in every row
    draw = np.random.default_rng(0).normal(size=50)
    assert partition_digest(column(draw, raw=True)) == partition_digest(column(np.exp(draw), raw=True))
    assert partition_digest(column(draw, raw=True)) == partition_digest(column(-draw, raw=True))
    assert partition_digest(column(draw, raw=True)) != partition_digest(column(np.roll(draw, 1), raw=True))
    ids = np.array([1, 2, 1, 2])
    bag, other = (partition_digest([FieldValues(ids, np.array(rows))]) for rows in ([0, 0, 1, 2], [0, 1, 1, 2]))
    assert bag is not None
    assert bag != other


def test_bins_are_those_learned():
    edges = np.array([0.0, 1.0])
    raw = np.array([-5.0, 0.5, np.nan, 9.0])
    now = FieldValues(np.zeros(4, np.int64), np.arange(4), raw, np.array([3.0]))
    before = FieldValues(np.zeros(1, np.int64), np.arange(1), np.zeros(1), edges)
    assert now.binned_like(before).ids.tolist() == bin_numbers(raw, edges).tolist() == [1, 2, 0, 3]


@pytest.mark.skipif(not BANK.exists(), reason="the table is not here")
def test_the_duration_of_the_call_of_the_bank(tmp_path):
    found, told = selected(BANK, tmp_path / "run", label="label", keep=5)
    leaking = [each for each in told if each["kind"] == "leak"]
    assert [each["fields"] for each in leaking] == [["duration"]]
    assert "duration" in found.kept
