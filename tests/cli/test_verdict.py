"""lpfs select says what its rows can decide, warns about what makes a result doubtful, and exits accordingly."""

from __future__ import annotations

import json
import re

import numpy as np
import polars as pl
import pytest

from lpfs.cli import EXIT_ALLOWANCE
from lpfs.pipeline.allowance import Allowance
from tests.cli.conftest import MODEL_OPTIONS

STEPS = ("--pretrain-steps", "150", "--search-steps", "100", *MODEL_OPTIONS, "--finish", "none", "--no-curve")
COLUMNS = ("--label", "click", "--time", "day")


def make_table(rows=3000, days=6, rate=0.3, seed=0, labels=None):
    """Return a table whose clicks depend on user and ad, unless ``labels`` are given."""
    rng = np.random.default_rng(seed)
    user, ad, noise = rng.integers(6, size=rows), rng.integers(5, size=rows), rng.integers(9, size=rows)
    if labels is None:
        odds = np.exp(1.5 * (user % 2) + 1.5 * (ad % 2))
        labels = (rng.random(rows) < rate * odds / odds.mean()).astype(int)
    columns = {"click": labels, "day": np.arange(rows) * days // rows, "user": user, "ad": ad, "noise": noise}
    texts = {name: [f"{name}{value}" for value in columns[name]] for name in ("user", "ad", "noise")}
    return pl.DataFrame({**columns, **texts})


@pytest.fixture
def select(run, tmp_path):
    """Return a function that runs lpfs select on a table; it returns exit code, record and standard error."""

    def call(table, *options, keep=2):
        table.write_csv(tmp_path / "log.csv")
        target = () if keep is None else ("--keep", keep)
        out = tmp_path / "run"
        code, _, err = run(
            "select", tmp_path / "log.csv", *COLUMNS, *target, *STEPS, *options, "--out", out, "--replace"
        )
        written = out / "selection.json"
        return code, json.loads(written.read_text("utf-8")) if written.exists() else None, err

    return call


def warned(record, kind):
    return [warning["fields"] for warning in record["warnings"] if warning["kind"] == kind]


def last_lines(err):
    """Return the lines after the table of models."""
    return err[err.index("on the test rows") :]


def test_few_positives_are_no_verdict(select):
    code, record, err = select(make_table(rate=0.04))
    assert code == 0
    fewest = min(record["splits"][name]["positives"] for name in ("valid", "test"))
    assert 10 <= fewest < 50
    assert record["verdict"]["kind"] == "not decided"
    assert record["verdict"]["text"] in err
    assert re.fullmatch(
        rf"not decided: the \w+ rows have {fewest} positives; .*50 are needed", record["verdict"]["text"]
    )
    assert warned(record, "few positives") == [[]]
    assert f"warning: the test rows have {fewest} positives" in last_lines(err).replace("validation", "test")


def test_very_few_positives_are_refused_without_force(select):
    table = make_table(rate=0.008)
    code, record, err = select(table)
    assert (code, record) == (1, None)
    (line,) = [line for line in err.splitlines() if line.startswith("lpfs: error:")]
    assert re.search(r"the (test|validation) rows have \d positives?, .*--force", line)
    code, record, err = select(table, "--force")
    assert (code, record["verdict"]["kind"]) == (0, "not decided")
    assert record["configuration"]["force"] is True


def test_many_small_days_are_judged_together(select):
    code, record, err = select(make_table(rows=6000, days=60))
    assert code == 0
    splits = record["splits"]
    assert splits["test"]["rows"] >= 600
    assert splits["test"]["days"][0] != splits["test"]["days"][1]
    for name, label in (("valid", "validation"), ("test", "test")):
        assert splits[name]["positives"] >= 150
        counts = f"{splits[name]['rows']:,} rows, {splits[name]['positives']:,} positives"
        assert f"  {label}: {counts}, days " in err
    assert record["verdict"]["rows"] == splits["test"]["rows"]


def test_headline_has_an_interval_and_no_further_digits(select):
    code, record, err = select(make_table(rows=6000), keep=1)
    text = record["verdict"]["text"]
    assert text.startswith("1 of 3 fields costs 0.")
    value, width = re.search(r"(0\.\d+) ± (0\.\d+) of AUC \([\d,]+ rows, [\d,]+ positives\)", text).groups()
    assert len(value) == len(width) <= 5
    assert text in err.splitlines()
    assert code == 0
    aucs = re.findall(r"(0\.\d+) ± (0\.\d+)", last_lines(err))
    assert len(aucs) >= 3
    assert all(len(auc) == len(half) <= 5 for auc, half in aucs)
    assert not re.search(r"AUC.*\d\.\d{5}", last_lines(err))


def rare_at_the_end(rows=4000):
    """Return labels with 30 % positives at first and a dozen in each of the last two fifths."""
    rng = np.random.default_rng(3)
    labels = (rng.random(rows) < 0.3).astype(int)
    labels[rows // 2 :] = 0
    labels[rows // 2 :: 60] = 1
    return labels


@pytest.mark.parametrize("kind", ["one column", "two columns", "only in positives"])
def test_leak_is_found_in_training_rows(select, kind):
    """The validation rows have too few positives to show a leak; the training rows show it."""
    labels = rare_at_the_end()
    rng = np.random.default_rng(4)
    bit = rng.integers(2, size=len(labels))
    known = (labels == 1) & (rng.random(len(labels)) < 0.4)
    leaks = {
        "one column": {"status": [f"s{label}" for label in labels]},
        "two columns": {
            "left": [f"l{b}" for b in bit],
            "right": [f"r{b ^ label}" for b, label in zip(bit, labels, strict=True)],
        },
        "only in positives": {
            "receipt": [f"x{b}" if is_known else None for b, is_known in zip(bit, known, strict=True)]
        },
    }[kind]
    table = make_table(rows=len(labels), days=10, labels=labels).with_columns(
        **{k: pl.Series(v) for k, v in leaks.items()}
    )
    code, record, err = select(table)
    assert code == 0
    assert min(record["splits"][name]["positives"] for name in ("valid", "test")) < 30
    assert [sorted(fields) for fields in warned(record, "leak")] == [sorted(leaks)]
    (line,) = [line for line in last_lines(err).splitlines() if "known only after the click" in line]
    assert line.startswith("warning: ")
    assert all(f"--must-drop {name}" in line for name in leaks)


def test_near_unique_noise_is_named(select):
    table = make_table(rows=3000)
    values = np.random.default_rng(5).integers(10**6, size=len(table))
    table = table.with_columns(request=pl.Series([f"r{value}" for value in values]))
    _, record, err = select(table, "--min-count", "1", "--must-keep", "request")
    assert warned(record, "near unique") == [["request"]]
    assert "'request' (2," in last_lines(err)
    assert "kept)" in last_lines(err)
    facts = record["fields"]["request"]
    assert facts["distinct"] > 2000
    assert facts["missing"] == 0.0
    assert warned(record, "drift") == []  # named once, as near-unique
    assert record["fields"]["user"]["distinct"] == 6


def test_drift_is_named(select):
    table = make_table(rows=6000, days=6)
    browser = pl.Series([f"b{value}" for value in np.random.default_rng(6).integers(5, size=len(table))])
    table = table.with_columns(
        campaign=pl.format("c{}-{}", "day", "noise"),
        browser=pl.when(pl.col("day") >= 5).then(pl.lit("b0")).otherwise(browser),
    )
    _, record, err = select(table)
    assert sorted(name for fields in warned(record, "drift") for name in fields) == ["browser", "campaign"]
    assert record["fields"]["browser"]["drift"] > 0.25 > record["fields"]["user"]["drift"]
    assert "values that no training row has" in last_lines(err)


def test_exit_code_if_no_set_holds_the_allowance(select, monkeypatch):
    """Everything is written first; a number of fields that was given is not checked."""
    check = Allowance.check
    monkeypatch.setattr(Allowance, "check", lambda *arguments: {**check(*arguments), "holds": False})
    monkeypatch.setattr("lpfs.pipeline.select.MAX_TRIES", 1)
    code, record, err = select(make_table(), "--max-auc-loss", "0.01", keep=None)
    assert code == EXIT_ALLOWANCE == 3
    assert warned(record, "allowance") == [[]]
    assert record["verdict"]["kind"] != "enough"
    assert "no set of fields was shown to lose at most 0.0100 of AUC" in last_lines(err)
    assert select(make_table())[0] == 0


def test_help_states_the_exit_code_and_force(run):
    for command in ("select", "train", "search"):
        assert "--force" in run(command, "--help")[1]
    assert "Exit code 3" in run("select", "--help")[1]
    assert "3 allowed loss of AUC not met" in run("--help")[1]
