"""Records read from memory and from disk: both give the same page; command lines; errors."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest

import lpfs.report
from lpfs import cli
from lpfs._text import quote_command
from lpfs.cli.options import build_settings
from lpfs.errors import InputError
from lpfs.pipeline.results import write_history
from lpfs.pipeline.settings import Settings
from lpfs.report import Comparison, build_report, report, write_report_safely
from lpfs.report.comparison_data import read_comparison
from lpfs.report.format import command_line
from lpfs.report.selection import selection_context
from lpfs.report.selection_data import from_record, history_from_records, read_history, read_selection
from lpfs.schema import Selection
from tests.helpers import hostile


def test_a_run_is_read(make_run_dir):
    selection = read_selection(make_run_dir(["a", "b", "c"], kept=2, records=500))
    assert selection.kept == ("a", "b")
    assert [row.cardinality for row in selection.rows] == [10, 11, 12]
    assert sum(row.table_bytes for row in selection.rows) == pytest.approx(1000)
    assert [row.chosen for row in selection.rows] == [1, 1, 0]
    assert len(selection.history.steps) == 500
    assert set(selection.history.gates) == {"a", "b", "c"}


def test_long_histories_are_thinned_from_the_first_to_the_last_record(make_run_dir):
    history = read_selection(make_run_dir([f"f{number}" for number in range(600)], records=400)).history
    assert len(history.steps) == 250
    assert (history.steps[0], history.steps[-1]) == (5, 2000)


@pytest.mark.parametrize(("fields", "records"), [(hostile.names(30), 60), ([f"f{n}" for n in range(1200)], 130)])
def test_the_page_in_memory_equals_the_page_from_the_directory(tmp_path, fields, records):
    record, history = hostile.selection_record(fields), hostile.search_history(fields, records)
    history[1]["penalty"] = float("nan")
    record["gates"] = dict(reversed(record["gates"].items()))
    run_dir = tmp_path / "a run"
    run_dir.mkdir()
    (run_dir / "selection.json").write_text(json.dumps(record), "utf-8")
    kept, dropped = tuple(record["kept"]), tuple(record["dropped"])
    write_history(run_dir / "history.parquet", Selection(kept, dropped, record["gates"], history=history))
    from_disk = report(run_dir).read_bytes()
    assert build_report(record, history, name="a run").encode() == from_disk
    messages = []
    (run_dir / "report.html").unlink()
    write_report_safely(record, history, run_dir / "report.html", messages.append)
    assert (run_dir / "report.html").read_bytes() == from_disk
    assert messages == [f"  {quote_command('open', run_dir / 'report.html')}"]
    assert history_from_records(history, list(record["gates"])) == read_history(run_dir / "history.parquet")


def test_a_history_without_gates_and_no_history(make_run_dir):
    history = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4}]
    assert history_from_records(history, ["a"]).gates == {}
    assert history_from_records((), ["a"]) is None
    record = hostile.selection_record(["a", "b"])
    assert "trajectories" not in selection_context(from_record(record, history_from_records(history, ["a"])))["charts"]
    assert build_report(record).encode() == report(make_run_dir(["a", "b"], records=0)).read_bytes()


def test_a_comparison_in_memory_equals_the_page_from_the_directory(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(RECORD))
    assert build_report(RECORD, name=tmp_path.name).encode() == report(tmp_path).read_bytes()


RECORD = {
    "format": "lpfs-comparison",
    "results": [
        {"method": "m", "keep": 2, "seed": 0, "auc": 0.7, "kept": ["a", "b"], "status": "done"},
        {"method": "n", "keep": 2, "seed": 0, "status": "failed", "reason": "<no memory>"},
        {"method": "all fields", "keep": 3, "seed": 0, "auc": 0.8, "kept": ["c", "a", "b"], "status": "done"},
    ],
    "all_fields": {"auc": {"value": 0.8}},
    "methods": {
        "m": {
            "differences": {},
            "sizes": {},
            "area": None,
            "overlap": None,
            "search": {"epochs": 1.5, "memory_ratio": None},
        }
    },
    "best": "m",
    "plan": {"methods": ["m", "n"], "keep": [2], "seeds": 1, "tune": 0, "options": {"m": {"alpha": 2.0}}},
    "settings": {"source": ["log.csv"]},
    "steps": {},
    "fingerprint": "00",
    "versions": {},
    "seeds": [0],
}


def test_the_record_of_compare(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps(RECORD))
    comparison = read_comparison(tmp_path)
    assert (comparison.methods, comparison.fields) == (("m",), ("c", "a", "b"))
    assert comparison.failed == {"n": "1 of 1 runs: <no memory>"}
    words = shlex.split(comparison.record["command"])
    assert words[:4] == ["lpfs", "compare", "log.csv", "--methods"]
    assert "m:alpha=2.0" in words


def test_scores_of_a_ranking_method():
    record = {"kept": ["a"], "dropped": ["b"], "gates": {"a": 1.0, "b": 0.0}, "made": {"scores": {"a": 0.2, "b": -0.1}}}
    assert [row.score for row in from_record(record).rows] == [0.2, -0.1]


@pytest.mark.parametrize(
    ("before", "after", "numbers"),
    [(0.8, 0.79, ("0.0100", "0.8000", "0.7900")), (0.8, 0.8, ("0.8000",)), (0.8, 0.81, ("0.0100", "0.8000", "0.8100"))],
)
def test_the_headline_has_the_change_of_auc(before, after, numbers):
    metrics = {"all_fields": {"auc": before}, "pruned": {"auc": after}}
    record = {"kept": ["a"], "dropped": ["b"], "metrics": metrics, "model": "pruned"}
    headline = selection_context(from_record(record))["headline"]
    assert headline.startswith("1 of 2 fields kept: the test AUC")
    assert all(number in headline for number in numbers)
    headline = selection_context(from_record({"kept": ["a", "b"], "dropped": []}))["headline"]
    assert headline == "2 of 2 fields kept."


def test_unreadable_directories(tmp_path):
    with pytest.raises(InputError, match="none"):
        report(tmp_path / "none")
    with pytest.raises(InputError, match=r"no selection\.json.*select, search or compare"):
        report(tmp_path)
    (tmp_path / "selection.json").write_text("{")
    with pytest.raises(InputError, match=r"selection\.json .*not JSON.*line 1"):
        report(tmp_path)
    (tmp_path / "selection.json").write_text("[]")
    with pytest.raises(InputError, match=r"selection\.json.*an object, found \[\]"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text("{}")
    with pytest.raises(InputError, match="'results'"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"results": [{"method": "a"}]}')
    with pytest.raises(InputError, match=r"comparison\.json.*results\[0\].*'auc'"):
        report(tmp_path)
    (tmp_path / "comparison.json").write_text('{"results": []}')
    with pytest.raises(InputError, match="'results' is empty"):
        report(tmp_path)


def test_a_failed_report_is_only_a_message(tmp_path):
    messages = []
    write_report_safely({"dropped": []}, (), tmp_path / "report.html", messages.append)
    assert "'kept'" in messages[0]
    assert f"lpfs report {tmp_path}" in messages[0]
    assert not (tmp_path / "report.html").exists()


def test_a_comparison_may_have_more_keys_than_are_shown(tmp_path):
    result = {"method": "m", "keep": 2, "seed": 0, "auc": 0.7, "kept": ["a", "b"], "peak": 3}
    failed = {**result, "method": "n", "auc": None, "kept": None}
    (tmp_path / "comparison.json").write_text(json.dumps({"results": [result, failed], "tuned": 3}))
    comparison = read_comparison(tmp_path)
    assert comparison.methods == ("m",)
    assert comparison.fields == ("a", "b")
    assert comparison.record["tuned"] == 3
    assert isinstance(comparison, Comparison)
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
        prepare={"header": False, "separator": "\t", "missing": ["?", "x"], "parts": 5, "keep_all": True,
                 "strip": True, "decimal": ",", "kind": ["the price=numeric", "a=b=ignore"]},
        graph=False,
        tensorboard=True,
        mlflow=True,
        finish="hot",
        seed=4,
        lr=0.1,
        device="cpu",
    ),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_command_line_gives_the_same_settings(settings, monkeypatch, tmp_path):
    from lpfs.cli import select as module

    calls = []

    def stop(source, out, *, resume, config=None, **options):
        calls.append(build_settings(source, out, resume=resume, config=config, **options))
        raise InputError("stop here")

    monkeypatch.setattr(module, "build_settings", stop)
    words = shlex.split(command_line(settings.to_json(), str(tmp_path / "out")))
    assert words[:2] == ["lpfs", "select"]
    cli.run(words[1:])
    assert json.loads(json.dumps(calls[0].to_json())) == json.loads(json.dumps(settings.to_json()))


def test_the_report_of_a_run_has_its_directory_in_the_command(make_run_dir):
    run_dir = make_run_dir(["a", "b"], configuration={"source": ["my log.csv"], "keep": 1})
    moved = run_dir.rename(run_dir.parent / "my run")
    assert "lpfs select &#39;my log.csv&#39; --keep 1 --out &#39;my run&#39;" in report(moved).read_text("utf-8")


def test_names_that_no_command_line_can_contain_need_the_configuration_file():
    settings = {"source": ["x"], "must_keep": ["a,b"], "keep": 3}
    assert command_line(settings) == "lpfs select --config config.json --out run"
    assert command_line(settings, command="compare") is None


def test_a_table_in_memory_has_no_command(make_run_dir):
    assert command_line({"source": []}) is None
    path = report(make_run_dir(["a", "b"], configuration={"source": [], "keep": 1}))
    assert "lpfs.select(table, …)" in path.read_text("utf-8")


def test_the_command(make_run_dir, capsys):
    run_dir = make_run_dir(hostile.names(20))
    assert cli.run(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"open {run_dir / 'report.html'}\n"
    out = run_dir.parent / "elsewhere.html"
    assert cli.run(["report", str(run_dir), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(out), "bytes": out.stat().st_size}
    assert cli.run(["report", str(run_dir), "--out", str(run_dir)]) == 1
    assert str(run_dir / "report.html") in capsys.readouterr().err
    assert cli.run(["report", str(run_dir / "none")]) == 1


def test_the_report_imports_only_shared_modules():
    allowed = {"errors", "_text", "_fileio", "_validation", "_imports", "report", "__version__"}
    imported = set()
    for path in Path(lpfs.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lpfs":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                imported |= {name.split(".")[1] for name in names}
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names if alias.name.startswith("lpfs")}
    assert imported <= allowed
