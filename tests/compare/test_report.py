"""The page of a real comparison: written at the end, by lpfs report again, and never at its expense."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

from lpfs import cli
from lpfs.report.compared import of_compare, read_comparison


@pytest.fixture(scope="session")
def values(compared):
    return json.loads((compared / "comparison.json").read_text("utf-8"))


def test_compare_leaves_a_report_of_what_it_found(compared, values):
    text = (compared / "report.html").read_text("utf-8")
    best = next(name for name in values["methods"] if name == values["best"])
    assert f"{best} is best on average over 2 numbers of fields" in text
    found = read_comparison(compared)
    assert found.methods == tuple(values["methods"])
    assert found.keeps == (4, 8)
    assert len(found.fields) == 31
    assert found.all_fields == values["all_fields"]["auc"]["value"]
    assert {each.method for each in found.results} == {"lpfs++", "permutation"}
    assert all(len(each.kept) == each.keep and each.seconds for each in found.results)


def test_differences_are_those_of_the_comparison(values):
    found = of_compare(values)
    other = next(name for name in values["methods"] if name != values["best"])
    against = values["methods"][other]["against"]["best"]
    area, *sizes = found.differences
    assert (area.method, area.other, area.keep) == (other, values["best"], None)
    assert (area.mean, area.low) == (against["value"], against["seeds"]["low"])
    assert area.rows == (against["rows"]["low"], against["rows"]["high"])
    assert [each.keep for each in sizes] == [4, 8]
    assert {each.said for each in found.differences} <= {"ahead", "behind", "level"}
    assert found.measures[other]["Area"] == values["methods"][other]["area"]["value"]


def test_the_command_on_the_page_is_one_that_can_be_run(run, compared, values):
    command = of_compare(values, "cmp").said["command"]
    words = shlex.split(command)
    assert words[:2] == ["lpfs", "compare"]
    assert words[-2:] == ["--out", "cmp"]
    words[-1] = str(compared)
    code, _, err = run(*words[1:])
    assert (code, "10 runs, 10 of them done already" in err) == (0, True), err


def test_a_method_that_fails_and_one_that_knows_the_truth(run, log, tmp_path):
    asked = ["--methods", "oracle,random,autofis", "--keep", "4", "--seeds", "1"]
    tiny = ["--pretrain-steps", "20", "--search-steps", "20", "--batch-size", "64", "--model-option", "dim=2"]
    code, _, err = run("compare", log, *asked, *tiny, "--out", tmp_path / "cmp")
    assert code == 0, err
    assert f"open {tmp_path / 'cmp' / 'report.html'}" in err
    found = read_comparison(tmp_path / "cmp")
    assert found.aside == ("oracle",)
    assert found.fair == ("random",)
    assert found.failed["autofis"].startswith("1 of 1 runs: autofis chooses crosses")
    assert {each.said for each in found.differences} == {"unknown"}
    text = (tmp_path / "cmp" / "report.html").read_text("utf-8")
    assert "random is best on average" in text
    assert "With one seed the luck of the training is not known" in text


def test_report_reads_the_folder_of_a_comparison(run, compared, tmp_path):
    code, _, err = run("report", compared, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert (tmp_path / "page.html").read_text("utf-8") == (compared / "report.html").read_text("utf-8")


def test_a_report_that_fails_does_not_lose_the_comparison(compared, tmp_path, monkeypatch, capsys):
    def broken(found):
        raise RuntimeError("no page")

    shutil.copytree(compared, tmp_path / "cmp", ignore=shutil.ignore_patterns("report.html"))
    monkeypatch.setattr("lpfs.report.versus.comparison_page", broken)
    assert cli.run(["compare", "--out", str(tmp_path / "cmp")]) == 0
    assert not (tmp_path / "cmp" / "report.html").exists()
    assert (tmp_path / "cmp" / "comparison.json").exists()
    assert "the report could not be written (no page)" in capsys.readouterr().err


def test_a_damaged_comparison_is_told(tmp_path, values, run):
    (tmp_path / "comparison.json").write_text(json.dumps({"format": "lpfs-comparison", "results": []}))
    code, _, err = run("report", tmp_path)
    assert code == 1
    assert "cannot be read as a comparison" in err
