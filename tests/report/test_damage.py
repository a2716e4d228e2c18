"""Damaged, hostile and hand-edited result files: one line that names the file, or the same page as before."""

from __future__ import annotations

import copy
import json
import random
import shutil

import polars as pl
import pytest

from lpfs import cli
from lpfs._fileio import write_json_atomic
from lpfs.errors import InputError
from lpfs.pipeline.results import read_record, write_record
from lpfs.report import report
from lpfs.schema import Selection
from tests.helpers import hostile
from tests.helpers.judged import judged_record
from tests.report.test_read import RECORD

FIELDS = ["a", "b", "c", "d"]


@pytest.fixture
def run_dir(tmp_path):
    """A run as ``select`` writes it: selection.json, kept_fields.txt, history.parquet."""
    record = {**hostile.selection_record(FIELDS), "sites": {}}
    history = hostile.search_history(FIELDS, 30)
    selection = Selection(tuple(record["kept"]), tuple(record["dropped"]), record["gates"], history=history)
    (tmp_path / "run").mkdir()
    write_record(tmp_path / "run", record, selection)
    return tmp_path / "run"


def flip_bit(path, position):
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["selection.json", "history.parquet", "kept_fields.txt"])
def test_a_flipped_bit_is_named_or_changes_nothing(run_dir, name):
    page, path = report(run_dir).read_bytes(), run_dir / name
    data, rng, messages = path.read_bytes(), random.Random(0), []
    for position in rng.sample(range(8 * len(data)), min(150, 8 * len(data))):
        flip_bit(path, position)
        try:
            assert report(run_dir).read_bytes() == page
        except InputError as error:
            messages.append(str(error))
        path.write_bytes(data)
    assert len(messages) > 0.8 * min(150, 8 * len(data))
    assert all(str(path) in message and "\n" not in message for message in messages)
    for size in (0, 1, len(data) // 2, len(data) - 2):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match=name):
            report(run_dir)


@pytest.mark.parametrize("name", ["selection.json", "history.parquet"])
def test_prune_refuses_a_damaged_run(run_dir, name):
    assert read_record(run_dir)[0].kept == ("a", "b")
    flip_bit(run_dir / name, 8 * 200)
    with pytest.raises(InputError, match=rf"{name}.*damaged|{name}.*not JSON"):
        read_record(run_dir)
    (run_dir / name).unlink()
    with pytest.raises(InputError, match=name):
        read_record(run_dir)


def test_names_of_files_never_leave_the_directory(run_dir):
    record = json.loads((run_dir / "selection.json").read_text())
    for name in ("../run/history.parquet", str(run_dir / "history.parquet"), "..", ""):
        values = {key: value for key, value in record.items() if key != "checksum"}
        write_json_atomic(run_dir / "selection.json", {**values, "files": {name: "00000000"}})
        with pytest.raises(InputError, match="only names of files inside the folder"):
            report(run_dir)


@pytest.mark.parametrize("name", ["g[1]", "a[", "g*", "{x}", "g?"])
def test_the_directory_is_not_a_glob_pattern(run_dir, name):
    other = run_dir.with_name("g1")
    shutil.copytree(run_dir, other)
    pl.DataFrame({"step": [77_777], "loss": [0.5]}).write_parquet(other / "history.parquet")
    run_dir = run_dir.rename(run_dir.with_name(name))
    assert "77,777" not in report(run_dir).read_text()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1", b"text"])
def test_a_history_that_is_not_parquet(make_run_dir, content):
    run_dir = make_run_dir(FIELDS)
    (run_dir / "history.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"history\.parquet"):
        report(run_dir)


def test_a_history_with_other_types(make_run_dir):
    run_dir = make_run_dir(FIELDS)
    for columns in ({"step": ["x"]}, {"step": [1], "loss": ["x"]}, {"step": [1], "gate:a": [["x"]]}, {"step": [None]}):
        pl.DataFrame(columns).write_parquet(run_dir / "history.parquet")
        with pytest.raises(InputError, match="history.parquet"):
            report(run_dir)


def test_a_panic_of_polars_is_one_line(make_run_dir, monkeypatch):
    def panic(source):
        raise pl.exceptions.PanicException("index out of bounds\nat page.rs")

    run_dir = make_run_dir(FIELDS)
    monkeypatch.setattr(pl, "read_parquet", panic)
    with pytest.raises(InputError, match=r"history\.parquet.*index out of bounds\)"):
        report(run_dir)


def paths_of(values, path=()):
    """Yield the path of every value inside JSON values."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from paths_of(value, (*path, key))


@pytest.mark.parametrize("name", ["selection.json", "comparison.json"])
def test_any_value_of_another_type_is_one_line_or_a_page(tmp_path, name):
    difference = {"value": 0.1, "seeds": {"low": 0.0, "high": 0.2}, "rows": None, "verdict": "ahead"}
    method = {**RECORD["methods"]["m"], "area": {"value": 0.3}, "differences": {"best": difference}}
    comparison = {**RECORD, "methods": {"m": {**method, "sizes": {"2": {"differences": {"best": difference}}}}}}
    complete = judged_record(FIELDS[:2], 1) if name == "selection.json" else comparison
    values = ["x", None, [], {}, True, -1, 1e300, float("inf"), [[]], {"x": {"y": [None]}}]
    rng, messages = random.Random(0), []
    for path in paths_of(complete):
        for value in rng.sample(values, 3):
            record = copy.deepcopy(complete)
            parent = record
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
            (tmp_path / name).write_text(json.dumps(record))
            try:
                report(tmp_path)
            except InputError as error:
                messages.append(str(error))
    assert len(messages) > 80
    assert all(str(tmp_path / name) in message and "\n" not in message for message in messages)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict", "loss"), 1e300),
        (("verdict", "kind"), "excellent"),
        (("verdict", "checks", 0, "rows"), -1),
        (("curve", "points", 1, "auc"), 1.5),
        (("curve", "points", 1, "fields"), -3),
        (("curve", "points"), {}),
        (("fields", "a", "missing"), 2.0),
        (("fields", "a", "substitutes"), ["b"]),
        (("fields", "a", "loss_if_removed"), {"low": 0.0}),
        (("groups",), [["a", 1]]),
        (("warnings",), [{"kind": "leak"}]),
        (("metrics", "pruned", "auc_low"), -0.1),
        (("savings", "kept", "rows_per_second_low"), -5.0),
        (("cost",), {"kept": 1.0}),
    ],
)
def test_values_out_of_bounds_are_refused_in_one_line(tmp_path, path, value):
    record = judged_record(FIELDS)
    parent = record
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    (tmp_path / "selection.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"selection\.json cannot be used: the key '") as caught:
        report(tmp_path)
    assert str(path[0]) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_message_names_key_value_and_type(tmp_path, capsys):
    record = hostile.selection_record(FIELDS)
    record["metrics"]["pruned"]["auc"] = "high"
    (tmp_path / "selection.json").write_text(json.dumps(record))
    assert cli.run(["report", str(tmp_path)]) == 1
    assert "'metrics.pruned.auc' must be a number, found 'high'" in capsys.readouterr().err
    (tmp_path / "comparison.json").write_text(json.dumps({**RECORD, "plan": {**RECORD["plan"], "keep": [2, "3"]}}))
    assert cli.run(["report", str(tmp_path)]) == 1
    assert "'plan.keep[1]' must be an integer, found '3'" in capsys.readouterr().err
