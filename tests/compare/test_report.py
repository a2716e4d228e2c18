"""The report of a comparison: written at its end and by lpfs report; an error in it loses no results."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

from lpfs import cli
from lpfs.report.comparison_data import from_record, read_comparison


@pytest.fixture(scope="session")
def values(compared):
    return json.loads((compared / "comparison.json").read_text("utf-8"))


def test_compare_writes_a_report(compared, values):
    text = (compared / "report.html").read_text("utf-8")
    best = next(name for name in values["methods"] if name == values["best"])
    assert f"{best} is best on average over 2 numbers of fields" in text
    report = read_comparison(compared)
    assert report.methods == tuple(values["methods"])
    assert report.keeps == (4, 8)
    assert len(report.fields) == 31
    assert report.all_fields == values["all_fields"]["auc"]["value"]
    assert {result.method for result in report.results} == {"lpfs++", "permutation"}
    assert all(len(result.kept) == result.keep and result.seconds for result in report.results)


def test_differences_are_those_of_the_comparison(values):
    report = from_record(values)
    other = next(name for name in values["methods"] if name != values["best"])
    against = values["methods"][other]["differences"]["best"]
    area, *sizes = report.differences
    assert (area.method, area.other, area.keep) == (other, values["best"], None)
    assert (area.mean, area.low) == (against["value"], against["seeds"]["low"])
    assert area.rows == (against["rows"]["low"], against["rows"]["high"])
    assert [difference.keep for difference in sizes] == [4, 8]
    assert {difference.final_verdict for difference in report.differences} <= {"ahead", "behind", "level"}
    assert report.measures[other]["Area"] == values["methods"][other]["area"]["value"]


def test_the_command_in_the_report_can_be_run(run, compared, values):
    command = from_record(values, "cmp").record["command"]
    words = shlex.split(command)
    assert words[:2] == ["lpfs", "compare"]
    assert words[-2:] == ["--out", "cmp"]
    words[-1] = str(compared)
    code, _, err = run(*words[1:])
    assert (code, "10 runs, 10 of them done already" in err) == (0, True), err


@pytest.mark.long
def test_failed_and_unranked_methods(run, log, tmp_path):
    plan = ["--methods", "oracle,random,autofis", "--keep", "4", "--seeds", "1"]
    tiny = ["--pretrain-steps", "20", "--search-steps", "20", "--batch-size", "64", "--model-option", "dim=2"]
    code, _, err = run("compare", log, *plan, *tiny, "--out", tmp_path / "cmp")
    assert code == 0, err
    assert f"open {tmp_path / 'cmp' / 'report.html'}" in err
    report = read_comparison(tmp_path / "cmp")
    assert report.unranked == ("oracle",)
    assert report.ranked_methods == ("random",)
    assert "autofis" in report.failed["autofis"]
    assert "dlrm_cross" in report.failed["autofis"]
    assert {difference.final_verdict for difference in report.differences} == {"unknown"}
    text = (tmp_path / "cmp" / "report.html").read_text("utf-8")
    assert "no other method has a result" in text


def test_lpfs_report_writes_the_same_page(run, compared, tmp_path):
    code, _, err = run("report", compared, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert (tmp_path / "page.html").read_text("utf-8") == (compared / "report.html").read_text("utf-8")


def test_an_error_in_the_report_does_not_lose_the_comparison(compared, tmp_path, monkeypatch, capsys):
    def broken(comparison):
        raise RuntimeError("no page")

    shutil.copytree(compared, tmp_path / "cmp", ignore=shutil.ignore_patterns("report.html"))
    monkeypatch.setattr("lpfs.report.build.comparison_context", broken)
    assert cli.run(["compare", "--out", str(tmp_path / "cmp")]) == 0
    assert not (tmp_path / "cmp" / "report.html").exists()
    assert (tmp_path / "cmp" / "comparison.json").exists()
    assert "no page" in capsys.readouterr().err


def test_a_damaged_comparison_is_an_error(tmp_path, values, run):
    (tmp_path / "comparison.json").write_text(json.dumps({"format": "lpfs-comparison", "results": []}))
    code, _, err = run("report", tmp_path)
    assert code == 1
    assert "comparison.json is not a comparison: the key 'best' is missing" in err
