"""What is read from the folder of a run, and the words made of it."""

from __future__ import annotations

import json

import hostile
import pytest

from lpfs import cli
from lpfs.cli.options import build_settings
from lpfs.errors import InputError
from lpfs.pipeline.settings import Settings
from lpfs.report.command import command_of
from lpfs.report.compared import read_comparison
from lpfs.report.comparison import Comparison
from lpfs.report.run import make_run, read_run
from lpfs.report.verb import report, try_report
from lpfs.report.words import answer


def test_a_run_is_read(make_folder):
    run = read_run(make_folder(["a", "b", "c"], kept=2, records=500))
    assert run.kept == ("a", "b")
    assert [each.cardinality for each in run.rows] == [10, 11, 12]
    assert sum(each.memory for each in run.rows) == pytest.approx(1000)
    assert [each.chosen for each in run.rows] == [1, 1, 0]
    assert len(run.history.steps) == 500
    assert set(run.history.gates) == {"a", "b", "c"}


def test_long_histories_are_thinned_from_the_first_to_the_last(make_folder):
    history = read_run(make_folder([f"f{n}" for n in range(600)], records=400)).history
    assert len(history.steps) == 250
    assert (history.steps[0], history.steps[-1]) == (5, 2000)


def test_scores_of_a_method_that_ranks():
    said = {
        "kept": ["a"],
        "dropped": ["b"],
        "gates": {"a": 1.0, "b": 0.0},
        "made": {"scores": {"a": 0.2, "b": -0.1}},
    }
    assert [each.score for each in make_run(said).rows] == [0.2, -0.1]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (0.8, 0.79, "the test AUC falls by 0.0100, from 0.8000 to 0.7900."),
        (0.8, 0.8, "the test AUC stays at 0.8000."),
        (0.8, 0.81, "the test AUC rises by 0.0100, from 0.8000 to 0.8100."),
    ],
)
def test_the_answer_is_a_sentence(before, after, told):
    metrics = {"all_fields": {"auc": before}, "pruned": {"auc": after}}
    run = make_run({"kept": ["a"], "dropped": ["b"], "metrics": metrics, "model": "pruned"})
    assert answer(run) == f"1 of 2 fields is enough: {told}"
    assert answer(make_run({"kept": ["a", "b"], "dropped": []})) == "2 of 2 fields are enough."


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        report(tmp_path / "none")
    with pytest.raises(InputError, match="is it the folder of a run"):
        report(tmp_path)
    (tmp_path / "selection.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        report(tmp_path)
    (tmp_path / "selection.json").write_text("[]")
    with pytest.raises(InputError, match="no kept and dropped"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(InputError, match="no list of results"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"results": [{"method": "a"}]}')
    with pytest.raises(InputError, match="cannot be read as a comparison"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"results": []}')
    with pytest.raises(InputError, match="at least one result"):
        report(tmp_path)


def test_a_report_that_fails_is_told_and_no_more(tmp_path):
    said = []
    try_report(tmp_path, said.append)
    assert "could not be written" in said[0]
    assert "the run is complete" in said[0]


def test_a_comparison_may_say_more_than_is_shown(tmp_path):
    one = {"method": "m", "keep": 2, "seed": 0, "auc": 0.7, "kept": ["a", "b"], "peak": 3}
    failed = {**one, "method": "n", "auc": None, "kept": None}
    (tmp_path / "comparison.json").write_text(json.dumps({"results": [one, failed], "tuned": 3}))
    found = read_comparison(tmp_path)
    assert found.methods == ("m",)
    assert found.fields == ("a", "b")
    assert found.said["tuned"] == 3
    assert isinstance(found, Comparison)
    assert report(tmp_path) == tmp_path / "report.html"


SETTINGS = [
    Settings(source=("a b.csv",), label="click", keep=3),
    Settings(
        source=("x", "y"), label="-c", time="$(id)", budget=2.5, costs="c.toml", must_keep=("u", "v w"), seeds=3
    ),
    Settings(
        source=("x",),
        max_auc_loss=0.002,
        method="lpfs",
        options={"alpha": 20.0, "schedule": "terabyte", "rescale": "rms"},
        model="deepfm",
        model_options={"dim": 8, "hidden": [64, 32]},
        prepare={"header": False, "separator": "\t", "missing": ["?", "x"], "parts": 5, "keep_all": True},
        finish="hot",
        seed=4,
        lr=0.1,
        device="cpu",
    ),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_command_gives_the_same_settings(settings, monkeypatch, tmp_path):
    import shlex

    from lpfs.cli import select as command

    seen = []

    def stop(source, out, *, resume, config=None, **given):
        seen.append(build_settings(source, out, resume=resume, config=config, **given))
        raise InputError("enough")

    monkeypatch.setattr(command, "build_settings", stop)
    words = shlex.split(command_of(settings.to_json(), str(tmp_path / "out")))
    assert words[:2] == ["lpfs", "select"]
    cli.run(words[1:])
    assert json.loads(json.dumps(seen[0].to_json())) == json.loads(json.dumps(settings.to_json()))


def test_names_that_a_command_line_cannot_say_are_left_to_the_configuration():
    asked = {"source": ["x"], "must_keep": ["a,b"], "keep": 3}
    assert command_of(asked) == "lpfs select --config config.json --out run"


def test_a_table_in_memory_has_no_command(make_folder):
    assert command_of({"source": []}) is None
    path = report(make_folder(["a", "b"], configuration={"source": [], "keep": 1}))
    assert "The table was in memory" in path.read_text("utf-8")


def test_the_command_line(make_folder, capsys):
    folder = make_folder(hostile.names(20))
    assert cli.run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"open {folder / 'report.html'}\n"
    out = folder.parent / "elsewhere.html"
    assert cli.run(["report", str(folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out), "bytes": out.stat().st_size}
    assert cli.run(["report", str(folder), "--out", str(folder)]) == 1
    assert "is a folder" in capsys.readouterr().err
    assert cli.run(["report", str(folder / "none")]) == 1
