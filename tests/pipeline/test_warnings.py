"""Warnings name a field that predicts suspiciously well, and fields that are the same column."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from lpfs.pipeline import warnings as module
from lpfs.pipeline.field_counts import bin_numbers
from lpfs.pipeline.select import select
from lpfs.pipeline.splits import split_dataset
from lpfs.pipeline.warnings import (
    FieldValues,
    leak_warnings,
    memorized_warning,
    ordered,
    pair_leaks,
    partition_digest,
    same_column_warnings,
    seeds_warning,
    weak_reference_warning,
)
from tests.helpers.known_truth import TINY, known_truth

BANK = Path(__file__).parents[3] / "shared" / "data" / "bank_marketing.parquet"


def make_table(rows=3000, seed=0):
    """Return a table whose clicks depend on user, ad and age only, and the random generator."""
    rng = np.random.default_rng(seed)
    user, ad, noise = rng.integers(6, size=rows), rng.integers(5, size=rows), rng.integers(9, size=rows)
    age = rng.normal(size=rows)
    logit = 1.5 * (user % 2) + 1.5 * (ad % 2) - 1.5 + 0.8 * age
    click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    columns = {"click": click, "user": [f"u{v}" for v in user], "ad": [f"a{v}" for v in ad], "age": age}
    return pl.DataFrame({**columns, "noise": [f"n{v}" for v in noise]}), rng


def run(table, out, **changes):
    settings = {"label": "click", "keep": 3, **TINY, "finish": "none", "quiet": True, **changes}
    outcome = select(table, out, **settings)
    assert outcome.record["warnings"] == list(outcome.warnings)
    return outcome


def test_ordinary_table_has_no_warnings(tmp_path):
    assert run(make_table()[0], tmp_path / "run").warnings == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["id", "number", "bag"])
def test_leaking_field_is_reported(tmp_path, capsys, kind):
    table, rng = make_table()
    leak = table["click"].to_numpy() ^ (rng.random(len(table)) < 0.02)  # known only after the click
    values = {
        "id": [f"v{v}" for v in leak],
        "number": leak + 0.3 * rng.normal(size=len(table)),
        "bag": [f"x|y{v}|z" for v in leak],
    }
    options = {"prepare": {"fields": {"after": {"kind": "multi", "separator": "|"}}}} if kind == "bag" else {}
    table = table.with_columns(pl.Series("after", values[kind]))
    (warning,) = run(table, tmp_path / "run", quiet=False, **options).warnings
    assert (warning["kind"], warning["fields"]) == ("leak", ["after"])
    assert warning["auc"] > 0.9
    assert warning["shuffled"] < warning["all_fields"]
    printed = next(line for line in capsys.readouterr().err.splitlines() if "warning:" in line)
    assert all(text in printed for text in ("'after'", f"{warning['auc']:.3f}", "--must-drop after"))


def test_duplicate_columns_are_reported(tmp_path):
    table = make_table()[0].with_columns(client=pl.col("user").str.replace("u", "client "), negative=-3 * pl.col("age"))
    must_keep = ("user", "client", "age", "negative")
    warnings = run(table, tmp_path / "run", must_keep=must_keep, keep=4, prepare={"keep_all": True}).warnings
    assert sorted(warning["fields"] for warning in warnings) == [["age", "negative"], ["user", "client"]]
    assert {warning["kind"] for warning in warnings} == {"same column"}
    assert "--must-drop client" in next(warning["text"] for warning in warnings if "user" in warning["fields"])


def test_error_costs_only_the_warnings(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ZeroDivisionError("an error in the warnings")

    monkeypatch.setattr(module, "read_fields", fail)
    outcome = run(make_table()[0], tmp_path / "run", quiet=False)
    assert outcome.warnings == []
    assert len(outcome.kept) == 3
    assert "ZeroDivisionError: an error in the warnings" in capsys.readouterr().err


def test_no_leak_is_reported_with_few_positive_rows(tmp_path, monkeypatch):
    table = make_table()[0].with_columns(after=pl.col("click").cast(pl.String))
    monkeypatch.setattr(module, "MIN_POSITIVES", 1000)
    assert run(table, tmp_path / "run").warnings == []


@pytest.mark.parametrize(
    ("full_auc", "alone", "without", "reported"),
    [
        (0.9, {"a": 0.7, "b": 0.7}, {"a": 0.85, "b": 0.9}, []),
        (0.9, {"a": 0.85, "b": 0.7}, {"a": 0.85, "b": 0.9}, ["a"]),  # nearly as good as all fields
        (0.9, {"a": 0.7, "b": 0.7}, {"a": 0.7, "b": 0.9}, ["a"]),  # the model depends on it
        (0.9, {"a": 0.7, "b": 0.7}, {"a": 0.7, "b": 0.86}, ["a"]),  # five times as much as on the next field
        (0.9, {"a": 0.7, "b": 0.7}, {"a": 0.7, "b": 0.84}, []),  # a strong field
        (0.9, dict.fromkeys("abc", 0.7), {"a": 0.7, "b": 0.84, "c": 0.9}, []),  # also if a third field is useless
        (0.999, {"a": 0.96, "b": 0.951}, {"a": 0.99, "b": 0.99}, ["a", "b"]),  # nearly certain
        (0.7, dict.fromkeys("abcd", 0.8), dict.fromkeys("abcd", 0.8), []),  # the model of all fields is weak
        (0.7, {**dict.fromkeys("abcd", 0.8), "a": 0.96}, dict.fromkeys("abcd", 0.8), ["a"]),
        (0.7, {"a": 0.95, "b": 0.6}, {"a": 0.7, "b": 0.7}, []),  # not above 0.95
        (0.69, {"a": 0.67, "b": 0.55}, {"a": 0.51, "b": 0.68}, []),  # one strong field of a weak log
        (0.55, {"a": 0.55, "b": 0.5}, {"a": 0.5, "b": 0.55}, []),  # nothing predicts the label
    ],
)
def test_which_fields_are_reported_as_leaks(full_auc, alone, without, reported):
    assert [warning["fields"] for warning in leak_warnings(full_auc, alone, without)] == [[name] for name in reported]


def leaking_pairs(first, second, labels):
    rows = np.arange(len(labels))
    values = {"one": [FieldValues(np.asarray(first), rows)], "two": [FieldValues(np.asarray(second), rows)]}
    return [leak["fields"] for leak in pair_leaks(values, np.asarray(labels, np.float64), 0)]


def test_two_fields_that_determine_the_label_together_are_reported():
    rows = np.arange(384)
    first, second = rows // 2 % 8, rows // 16 % 8  # each of the 64 pairs in six rows, three of each half
    assert leaking_pairs(first, second, (first + second) % 2) == [["one", "two"]]
    assert leaking_pairs(first, second, first % 2 ^ (rows % 5 == 0)) == []
    assert leaking_pairs(first[:192], second[:192], (first + second)[:192] % 2) == []  # too few rows of each pair


def test_pairs_of_the_30_fields_that_predict_best_are_examined(monkeypatch):
    """Without validation rows of both classes this is the AUC of each field alone on the training rows."""
    labels, examined = np.arange(200) % 2, []
    names = [f"f{number}" for number in range(40)]
    monkeypatch.setattr(module, "read_fields", lambda rows, fields: ({name: [] for name in fields}, labels))
    monkeypatch.setattr(module, "evaluate", lambda model, stream: SimpleNamespace(auc=None))
    monkeypatch.setattr(module, "pair_leaks", lambda values, labels, first: examined.extend(values) or [])
    rows = SimpleNamespace(rows=200, part=lambda *_: rows, stream=lambda *_, **__: [])
    plan = SimpleNamespace(splits=SimpleNamespace(train=rows, valid=rows), device="cpu")
    facts = {"total": (200, 100), "present": (200, 100)}
    counted = {name: {**facts, "alone": 0.5 + number / 1000} for number, name in enumerate(names)}
    model = SimpleNamespace(reads=SimpleNamespace(names=names))
    assert module._find_leaks(plan, model, [], counted) == ([], [])
    assert examined == names[:9:-1]


def test_pair_of_values_that_only_one_half_of_the_rows_has():
    first, second = np.arange(400) // 2 % 2, np.arange(400) // 4 % 2
    first[-1] = second[-1] = 2
    labels = first ^ second
    assert leaking_pairs(first, second, labels) == [["one", "two"]]


def digest_of(values, numeric=False):
    values = np.asarray(values)
    raw = values.astype(np.float64) if numeric else None
    return partition_digest([FieldValues(values.astype(np.int64), np.arange(len(values)), raw)])


def test_digest_does_not_depend_on_the_names_of_values():
    digest = digest_of([1, 2, 1, 3, 2, 1])
    assert digest == digest_of([7, 0, 7, 1, 0, 7])
    assert digest == digest_of([0.5, 0.1, 0.5, 0.9, 0.1, 0.5], numeric=True)
    assert digest != digest_of([7, 0, 7, 1, 0, 0])
    assert digest_of([1, 1, 1, 1]) is None  # a single value
    assert digest_of([1, 2, 3, 4]) is None  # another value in every row


def test_digest_of_numbers_depends_on_their_ranks():
    numbers = np.random.default_rng(0).normal(size=50)
    digest = digest_of(numbers, numeric=True)
    assert digest == digest_of(np.exp(numbers), numeric=True)
    assert digest == digest_of(-numbers, numeric=True)
    assert digest != digest_of(np.roll(numbers, 1), numeric=True)


def test_digest_of_bags_depends_on_their_rows():
    ids = np.array([1, 2, 1, 2])
    first, second = (partition_digest([FieldValues(ids, np.array(rows))]) for rows in ([0, 0, 1, 2], [0, 1, 1, 2]))
    assert first is not None
    assert first != second


def test_validation_rows_are_binned_like_training_rows():
    edges = np.array([0.0, 1.0])
    raw = np.array([-5.0, 0.5, np.nan, 9.0])
    valid = FieldValues(np.zeros(4, np.int64), np.arange(4), raw, np.array([3.0]))
    train = FieldValues(np.zeros(1, np.int64), np.arange(1), np.zeros(1), edges)
    assert valid.ids_binned_like(train).tolist() == bin_numbers(raw, edges).tolist() == [1, 2, 0, 3]


@pytest.mark.skipif(not BANK.exists(), reason="bank_marketing.parquet is missing")
def test_duration_of_the_call_leaks_in_the_bank_table(tmp_path):
    outcome = run(BANK, tmp_path / "run", label="label", keep=5)
    assert [warning["fields"] for warning in outcome.warnings if warning["kind"] == "leak"] == [["duration"]]
    assert "duration" in outcome.kept


def test_columns_that_cannot_be_compared_are_not_called_the_same():
    """Constants, and ids that differ in every row."""
    columns = {
        "constant": np.zeros(10),
        "other constant": np.full(10, 3),
        "row number": np.arange(10),
        "hash": np.arange(10)[::-1],
        "user": np.arange(10) % 3,
        "user name": np.arange(10) % 3 + 5,
    }
    rows = np.arange(10)
    fields = {name: [FieldValues(ids.astype(np.int64), rows)] for name, ids in columns.items()}
    assert [warning["fields"] for warning in same_column_warnings(fields, 10)] == [["user", "user name"]]


def test_numbers_of_rows_are_those_of_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "select.md").read_text("utf-8")
    assert f"On the validation rows, if they have {module.MIN_POSITIVES} of each class" in text


def test_seeds_that_disagree_are_reported():
    chosen_in = {"a": 3, "b": 3, "c": 1, "d": 2, "e": 0}
    (warning,) = seeds_warning(chosen_in, ["a", "b", "d"], 3, [0.71, 0.74, 0.72])
    assert warning["fields"] == ["c", "d"]
    assert "c 1/3, d 2/3" in warning["text"]
    assert "from 0.710 to 0.740" in warning["text"]
    (warning,) = seeds_warning({"a": 2, "b": 1}, ["a"], 2, [0.71, 0.74])
    assert all(text in warning["text"] for text in ("b 1/2", "from 0.710 to 0.740"))
    assert seeds_warning({**chosen_in, "c": 0, "d": 3}, ["a", "b", "d"], 3, []) == []
    assert seeds_warning({"a": 1, "b": 0}, ["a"], 1, []) == []


def test_warnings_are_ordered_by_their_weight():
    kinds = [warning["kind"] for warning in ordered([{"kind": kind} for kind in reversed(module.KINDS)])]
    assert kinds == list(module.KINDS)


@pytest.mark.parametrize(
    ("train_auc", "train_loss", "is_reported"), [(0.76, 0.45, False), (0.9, 0.4, True), (0.8, 0.2, True)]
)
def test_memorized_rows_are_reported(tmp_path, monkeypatch, train_auc, train_loss, is_reported):
    log = known_truth(tmp_path / "log", rows=1200)
    plan = SimpleNamespace(splits=split_dataset(log))
    monkeypatch.setattr(module.stages, "evaluate_split", lambda *_: SimpleNamespace(auc=train_auc, logloss=train_loss))
    warnings = memorized_warning(plan, None, {"auc": 0.75, "logloss": 0.5})
    assert [warning["kind"] for warning in warnings] == ["memorized"] * is_reported
    assert all("0.500 and 0.750 on validation rows" in warning["text"] for warning in warnings)


@pytest.mark.parametrize(
    ("positives", "logloss", "is_reported"), [(250, 0.5, False), (250, 0.6, True), (10, 2.0, False)]
)
def test_a_reference_that_is_worse_than_a_constant_is_reported(positives, logloss, is_reported):
    """A quarter of positives: the logloss of a constant prediction is .562."""
    warnings = weak_reference_warning({"rows": 1000, "positives": positives, "logloss": logloss})
    assert [warning["kind"] for warning in warnings] == ["memorized"] * is_reported
    assert all("0.600, above 0.562" in warning["text"] for warning in warnings)
