"""train, search, prune, evaluate, export as single commands, and rows that do not fit a model."""

from __future__ import annotations

import json
import shutil

import pytest

from lpfs import cli
from lpfs.serialization import load
from tests.cli.conftest import COLUMNS


@pytest.fixture(scope="module")
def searched(trained, tmp_path_factory):
    """The folder of a search from the trained model."""
    out = tmp_path_factory.mktemp("found") / "found"
    arguments = ["search", trained, trained / "data", "--keep", "2", "--search-steps", "60", "-q", "--out", out]
    assert cli.run([str(argument) for argument in arguments]) == 0
    return out


def test_train_saves_a_model_and_evaluates_it_on_the_last_days(run, clicks, trained, tmp_path):
    assert load(trained / "model").reads.names == ("user", "ad", "site", "noise", "price")
    options = ["--steps", "60", "--model", "fm", "--must-drop", "noise,price", "--json"]
    code, out, err = run("train", clicks, *COLUMNS, *options, "--out", tmp_path / "fm")
    assert code == 0, err
    record = json.loads(out)
    assert record["metrics"]["tasks"]["click"]["rows"] == 120  # a fifth of the rows: the last day has few positives
    assert record["metrics"]["tasks"]["click"]["auc"] > 0.6
    assert (record["rows"], record["steps"]) == (360, 60)
    assert load(record["model"]).reads.names == ("user", "ad", "site")
    assert "on the test rows" in err
    again = run("train", "--resume", "--out", tmp_path / "fm", "--json", "-q")
    assert json.loads(again[1])["metrics"] == record["metrics"]
    code, _, err = run("train", "--resume", "--rows", "early", "--out", tmp_path / "fm")
    assert code == 1
    assert "--rows train and cannot be resumed with early" in err


def test_search_from_a_model_equals_select_from_it(run, trained, searched, tmp_path):
    answer = json.loads((searched / "selection.json").read_text())
    assert (searched / "kept_fields.txt").read_text().split() == answer["kept"]
    assert len(answer["kept"]) == 2
    assert load(searched / "model").reads.names == ("user", "ad", "site", "noise", "price")
    options = ["--keep", "2", "--search-steps", "60", "--finish", "none", "--json", "-q"]
    code, out, err = run("select", trained / "data", "--checkpoint", trained, *options, "--out", tmp_path / "run")
    assert code == 0, err
    whole = json.loads(out)
    assert whole["kept"] == answer["kept"]
    assert whole["gates"] == answer["gates"]


def test_search_on_all_rows_of_a_log(run, trained, clicks, tmp_path):
    options = ["--rows", "all", "--keep", "2", "--search-steps", "80", "--json", "--out", tmp_path / "found"]
    code, out, err = run("search", trained, clicks, *options)
    assert code == 0, err
    assert len(json.loads(out)["kept"]) == 2
    assert "Fields, encoded as in" in err
    assert "next: lpfs prune" in err
    again = run("search", trained, "--resume", *options[:2], *options[6:], "-q")
    assert json.loads(again[1])["gates"] == json.loads(out)["gates"]


def test_model_of_a_ranking_method_can_be_pruned(run, trained, tmp_path):
    options = ["--keep", "2", "--method", "permutation", "--json", "-q", "--out", tmp_path / "found"]
    code, out, err = run("search", trained, trained / "data", *options)
    assert code == 0, err
    record = json.loads(out)
    assert record["kept"] == ["user", "ad"]
    assert record["gates"] == {"user": 1.0, "ad": 1.0, "site": 0.0, "noise": 0.0, "price": 0.0}
    code, out, err = run("prune", tmp_path / "found", "--json", "-q", "--out", tmp_path / "small")
    assert code == 0, err
    assert json.loads(out)["certificates"]["cut"]["certified"] is True


@pytest.mark.parametrize("zeros", [False, True])
def test_prune_verifies_the_small_model_which_can_be_evaluated(run, trained, searched, clicks, tmp_path, zeros):
    arguments = ["prune", searched, *(["--zeros"] if zeros else []), "--out", tmp_path / "small"]
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    record = json.loads(out)
    certificate = record["certificates"]["zeros" if zeros else "cut"]
    assert certificate["certified"] is True
    assert certificate["max_logit_change"] <= certificate["bound"]
    assert sorted(certificate["checked"]) == sorted(record["dropped"])
    assert "certified: max |Δlogit|" in err
    assert record["savings"]["kept"]["table_bytes"] < record["savings"]["all_fields"]["table_bytes"]
    small = tmp_path / "small"
    assert load(small / "model").reads.names == tuple(record["kept"])
    code, _, err = run(*arguments)
    assert code == 1
    assert "not empty" in err
    assert run(*arguments, "--replace", clicks, "-q")[0] == 0
    values = [
        json.loads(run("evaluate", folder, data, "--days", "last", "--json")[1])["metrics"]["tasks"]["click"]
        for folder, data in ((searched, trained / "data"), (small, trained / "data"), (small, clicks))
    ]
    assert values[1] == values[2]
    assert values[0]["auc"] == pytest.approx(values[1]["auc"], abs=1e-6)


def test_prune_needs_a_search(run, selected, tmp_path):
    code, _, err = run("prune", selected, "--out", tmp_path / "small")
    assert code == 1
    assert "is pruned already" in err
    code, _, err = run("prune", tmp_path, "--out", tmp_path / "small")
    assert code == 1
    assert "no selection.json" in err


def test_evaluate_prints_a_table_or_json(run, selected, clicks):
    code, out, err = run("evaluate", selected, selected / "data")
    assert code == 0
    assert out.splitlines()[0].split() == ["rows", "auc", "logloss", "accuracy", "entropy", "calib."]
    assert len(out.splitlines()) == 8  # heading, all, six days
    assert "--days test" in err
    _, out, err = run("evaluate", selected / "model", clicks, "--days", "3..last", "--json")
    record = json.loads(out)
    assert (record["days"], err) == (["3", "4", "5"], "")
    assert record["metrics"]["tasks"]["click"]["rows"] == 300
    assert run("evaluate", selected, clicks, "-q")[1:] == ("", "")


def test_evaluate_agrees_with_select(run, selected):
    answer = json.loads((selected / "selection.json").read_text())
    _, out, _ = run("evaluate", selected, selected / "data", "--days", "test", "--json")
    assert json.loads(out)["metrics"]["tasks"]["click"]["auc"] == answer["metrics"][answer["model"]]["auc"]


def test_log_that_does_not_fit_is_an_error_that_names_the_fields(run, trained, clicks, tmp_path):
    lines = clicks.read_text().splitlines()
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("\n".join([lines[0].replace("user", "usr"), *(line + "x" for line in lines[1:])]) + "\n")
    code, out, err = run("evaluate", trained, wrong)
    assert (code, out) == (1, "")
    assert "missing: 'user' (did you mean 'usr'?)" in err
    assert "retyped: 'price'" in err
    assert "not used: 'usr'" in err


def test_dataset_that_does_not_fit_is_an_error_that_names_the_fields(run, trained, clicks, tmp_path):
    text = clicks.read_text()
    other = tmp_path / "other.csv"
    other.write_text(text.replace("user", "person").replace(",a4,", ",a3,"))
    assert run("prepare", other, *COLUMNS, "--bins", "4", "--out", tmp_path / "data", "-q")[0] == 0
    for command in (["evaluate", trained], ["search", trained, "--keep", "2", "--out", tmp_path / "x"]):
        code, _, err = run(*command, tmp_path / "data")
        assert code == 1
        assert "missing: 'user'" in err
        assert "'ad' (categorical with 6 ids instead of categorical with 7 ids)" in err
        assert "'price' (categorical" in err or "'price' (numeric" in err
        assert "not used: 'person'" in err
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(text.replace(",u0,", ",zz,"))
    assert run("prepare", renamed, *COLUMNS, "--out", tmp_path / "renamed", "-q")[0] == 0
    code, _, err = run("evaluate", trained, tmp_path / "renamed")
    assert code == 1
    assert "ids come from other vocabularies" in err
    like = ["--like", trained / "data", "--out", tmp_path / "like", "-q"]
    assert run("prepare", renamed, *like)[0] == 0
    assert run("evaluate", trained, tmp_path / "like")[0] == 0


def test_moved_training_dataset(run, trained, clicks, tmp_path):
    shutil.copytree(trained / "model", tmp_path / "model")
    about = json.loads((tmp_path / "model" / "model.json").read_text())
    assert about["extra"]["data"] == str(trained / "data")
    shutil.copytree(trained / "data", tmp_path / "there")
    moved = trained.parent / "moved"
    shutil.move(trained / "data", moved)
    try:
        code, _, err = run("evaluate", tmp_path / "model", clicks)
        assert code == 1
        assert "--like" in err
        assert run("evaluate", tmp_path / "model", clicks, "--like", tmp_path / "there")[0] == 0
    finally:
        shutil.move(moved, trained / "data")


def test_invalid_input(run, trained, clicks, tmp_path):
    unlabelled = tmp_path / "unlabelled.csv"
    unlabelled.write_text("\n".join(line.split(",", 1)[1] for line in clicks.read_text().splitlines()) + "\n")
    for arguments, code, message in [
        (["evaluate", trained, unlabelled], 1, "have no label 'click'"),
        (["evaluate", trained, clicks, "--days", "7"], 2, "no day '7'; the days are 0 to 5"),
        (["evaluate", trained, clicks, "--days", "5..1"], 2, "'5..1'"),
        (["evaluate", tmp_path, clicks], 1, "no model in"),
        (["evaluate", trained, tmp_path / "none.csv"], 1, "none.csv"),
        (["search", trained, clicks, "--must-drop", "ad", "--out", tmp_path / "x"], 1, "must_drop names 'ad'"),
        (["train", clicks, *COLUMNS, "--batch-size", "0", "--out", tmp_path / "y"], 1, "batch_size must be"),
        (["train", "--out", tmp_path / "y"], 2, "Missing argument"),
        (["export", tmp_path, "--format", "onx", "--out", tmp_path / "f"], 2, "did you mean 'onnx'?"),
    ]:
        status, out, err = run(*arguments)
        assert (status, out) == (code, "")
        assert message in err


@pytest.mark.parametrize("form", ["onnx", "torch"])
def test_export(run, selected, tmp_path, form):
    code, out, err = run("export", selected, "--format", form, "--out", tmp_path / "model.bin", "--json")
    assert code == 0, err
    record = json.loads(out)
    assert (record["format"], record["path"]) == (form, str(tmp_path / "model.bin"))
    assert record["max_logit_change"] <= record["bound"]
    assert (tmp_path / "model.bin").stat().st_size > 0
    assert "differ from the model's by at most" in err
    code, _, err = run("export", tmp_path, "--format", form)
    assert code == 1
    assert "no model" in err
    assert str(tmp_path) in err


def test_a_pruned_model_is_replaced_completely_or_not_at_all(run, searched, tmp_path, monkeypatch):
    out = tmp_path / "small"

    def read_files():
        return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    assert run("prune", searched, "--out", out)[0] == 0
    old = read_files()
    with monkeypatch.context() as patch:
        patch.setattr(
            "lpfs.pipeline.results.write_history", lambda *arguments: (_ for _ in ()).throw(OSError(5, "I/O"))
        )
        code, _, err = run("prune", searched, "--zeros", "--replace", "--out", out)
    assert (code, "I/O" in err) == (1, True)
    assert read_files() == old
    code, _, err = run("prune", searched, "--zeros", "--replace", "--out", out)
    assert code == 0, err
    assert read_files().keys() == old.keys()
    assert read_files() != old
