"""compare, from the command line: the answer, only what is missing, methods that fail, tuning, mistakes."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

import lpfs
from lpfs.compare.compare import compare
from lpfs.compare.runner import Runner
from lpfs.errors import InputError
from lpfs.pipeline import stages

SHAPE = ["--model-option", "dim=2", "--model-option", "hidden=4"]
TINY = ["--pretrain-steps", "50", "--search-steps", "120", "--batch-size", "64", *SHAPE]
ASKED = ["--methods", "lpfs++,permutation", "--keep", "4,8", "--seeds", "2"]
SAME = ("method", "keep", "seed", "status", "kept", "test", "validation", "trained", "options")
QUICK = {
    "pretrain_steps": 20,
    "search_steps": 50,
    "batch_size": 64,
    "model_options": {"dim": 2, "hidden": [4]},
    "quiet": True,
}


def results(folder):
    found = [json.loads(path.read_text()) for path in sorted((folder / "results").glob("*.json"))]
    return [{name: each.get(name) for name in SAME} for each in found]


@pytest.fixture
def counted(monkeypatch):
    """Counts what is trained and searched."""
    counts = {"pretrain": 0, "search": 0, "train": 0}

    def counting(name, function):
        def call(*given):
            counts[name] += 1
            return function(*given)

        return call

    monkeypatch.setattr(stages, "search_fields", counting("search", stages.search_fields))
    monkeypatch.setattr(stages, "retrain", counting("train", stages.retrain))
    monkeypatch.setattr(stages, "pretrain", counting("pretrain", stages.pretrain))
    return counts


def test_a_second_call_has_nothing_to_do_and_tells_the_answer(run, log, compared, counted):
    before = {path: path.stat().st_mtime_ns for path in (compared / "results").iterdir()}
    assert len(before) == 2 * (1 + 2 * 2)
    code, out, err = run("compare", log, *ASKED, *TINY, "--out", compared, "--json")
    assert code == 0, err
    assert counted == {"pretrain": 0, "search": 0, "train": 0}
    assert {path: path.stat().st_mtime_ns for path in (compared / "results").iterdir()} == before
    assert "10 runs, 10 of them done already" in err
    assert "\033" not in err
    found = json.loads(out)
    assert found["sizes"] == [4, 8]
    assert set(found["methods"]) == {"lpfs++", "permutation"}
    assert found["best"] == next(iter(found["methods"]))
    for name, each in found["methods"].items():
        assert each["area"]["value"] == pytest.approx(
            sum(each["sizes"][size]["auc"]["value"] for size in ("4", "8")) / 2 / 0.5 - 1
        )
        assert (each["against"] == {}) == (name == found["best"] == "lpfs++")
        assert each["sizes"]["4"]["recall"] <= 4 / 15
        assert sum(each["sizes"]["8"]["picks"].values()) == 8
        assert 0 <= each["overlap"] <= 1
        assert each["search"]["epochs"] > 0
        assert each["tried"] == 1
    assert found["kinds"] == {"main": 11, "pair": 4, "copy": 4, "correlated": 3, "noise": 9}
    assert found["folder"] == str(compared)


def test_the_tables_agree_with_the_results(compared):
    whole = json.loads((compared / "comparison.json").read_text())
    with (compared / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(whole["results"]) == 10
    for row, result in zip(rows, results_in_order(compared, rows), strict=True):
        assert float(row["auc"]) == result["test"]["auc"]
        assert json.loads(row["kept"]) == result["kept"]
        assert int(row["count"]) == int(row["keep"]) == len(result["kept"])
    text = (compared / "comparison.md").read_text()
    assert "## Differences to the best" in text
    assert "## What is picked" in text
    assert f"| {whole['best']} | {whole['methods'][whole['best']]['area']['value']:.4f} |" in text


def results_in_order(folder, rows):
    known = {(each["method"], each["keep"], each["seed"]): each for each in results(folder)}
    return [known[row["method"], int(row["keep"]), int(row["seed"])] for row in rows]


def test_a_ranking_is_made_once_and_cut_at_every_size(compared):
    names = {path.name for path in (compared / "searches").iterdir()}
    assert {name for name in names if name.startswith("permutation")} == {
        "permutation-s0.json",
        "permutation-s1.json",
    }
    assert {name for name in names if name.startswith("lpfs")} == {
        f"lpfs++-s{seed}-k{size}.json" for seed in (0, 1) for size in (4, 8)
    }
    for seed in (0, 1):
        kept = {each["keep"]: each["kept"] for each in results(compared)
                if (each["method"], each["seed"]) == ("permutation", seed)}  # fmt: skip
        scores = json.loads((compared / "searches" / f"permutation-s{seed}.json").read_text())["scores"]
        for size in (4, 8):
            assert min(scores[name] for name in kept[size]) >= max(
                value for name, value in scores.items() if name not in kept[size]
            )


def test_only_what_is_missing_is_done_and_gives_the_same(run, compared, counted):
    before = results(compared)
    lost = compared / "results" / "lpfs++-k4-s1.json"
    whole = json.loads(lost.read_text())
    lost.unlink()
    assert run("compare", "--out", compared, "-q") == (0, "", "")
    assert counted == {"pretrain": 0, "search": 0, "train": 0}
    assert json.loads(lost.read_text()) == whole
    lost.unlink()
    (compared / "searches" / "lpfs++-s1-k4.json").unlink()
    (compared / "trained" / f"{whole['trained']}.json").unlink()
    code, _, err = run("compare", "--out", compared)
    assert code == 0
    assert "[10/10] lpfs++, keep 4, seed 1: AUC" in err
    assert counted == {"pretrain": 1, "search": 1, "train": 1}  # the pretrained model is read back
    assert results(compared) == before
    assert not any((compared / "claims").iterdir())
    assert not any((compared / "work").iterdir())


def test_tables_of_what_is_there_so_far(run, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "cmp")
    for path in (tmp_path / "cmp" / "results").glob("*-s1.json"):
        path.unlink()
    code, out, err = run("compare", "--out", tmp_path / "cmp", "--tables-only", "--json")
    assert (code, json.loads(out)["seeds"]) == (0, [0])
    assert "one seed" in err
    shutil.rmtree(tmp_path / "cmp" / "results")
    code, out, _ = run("compare", "--out", tmp_path / "cmp", "--tables-only", "--json")
    assert (code, json.loads(out)["best"], json.loads(out)["methods"]) == (0, None, {})


def test_a_folder_in_which_another_process_prepares_is_no_strangers(log, fakes, tmp_path):
    fakes("one")
    for name in ("claims", ".data.tmp"):
        (tmp_path / "cmp" / name).mkdir(parents=True)
    assert compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **QUICK).best == "one"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"keep": [2, 99]}, "keep must be between 1 and the 31 fields, found 99"),
        ({"keep": 2, "must_keep": ("nosuch",)}, "nosuch"),
        ({"keep": [1, 3], "must_keep": ("f00", "f01")}, "keep=1, but 2 fields must be kept"),
    ],
)
def test_what_cannot_be_had_is_refused_at_once_and_leaves_nothing(log, fakes, tmp_path, counted, asked, said):
    fakes("one")
    with pytest.raises(InputError, match=said):
        compare(log, tmp_path / "cmp", methods="one", seeds=1, **{**QUICK, **asked})
    assert not any(counted.values())
    found = compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **{**QUICK, "batch_size": 32})
    assert found.best == "one"


def test_a_refusal_changes_nothing_that_was_there(log, fakes, tmp_path, counted):
    fakes("one")
    own = tmp_path / "cmp" / "data"
    lpfs.simulate(own, "small", rows=2000, days=4)  # a Dataset of the user's, where a comparison would put its own
    with pytest.raises(InputError, match="found 99"):
        compare(own, tmp_path / "cmp", methods="one", keep=[2, 99], seeds=1, **QUICK)
    assert (own / "dataset.json").is_file()
    compare(own, tmp_path / "cmp", methods="one", keep=2, seeds=1, **QUICK)
    before = (tmp_path / "cmp" / "plan.json").read_bytes()
    with pytest.raises(InputError, match="found 99"):
        compare(own, tmp_path / "cmp", methods="one", keep=[2, 99], seeds=1, **QUICK)
    assert (tmp_path / "cmp" / "plan.json").read_bytes() == before
    assert compare(own, tmp_path / "cmp", **QUICK).best == "one"  # with the sizes that it had


def test_rows_of_one_class_are_refused_and_leave_nothing(fakes, tmp_path):
    fakes("one")
    rows = [
        f"{day},{number % 7},{int(day < 3 and number % 5 == 0)},{(day + number) % 4}"
        for day in range(4)
        for number in range(300)
    ]
    table = tmp_path / "log.csv"
    table.write_text("\n".join(["day,field,click,other", *rows]) + "\n")
    asked = {"methods": "one", "keep": 1, "seeds": 1, "label": "click", **QUICK}
    with pytest.raises(InputError, match="one class"):
        compare(table, tmp_path / "cmp", time="day", **asked)
    assert compare(table, tmp_path / "cmp", time="other", **asked).best == "one"


def test_data_that_was_prepared_otherwise_is_not_taken(fakes, tmp_path):
    fakes("one")
    rows = [f"{number % 4},{number % 7},{number % 2},{number % 3 % 2}" for number in range(1200)]
    table = tmp_path / "log.csv"
    table.write_text("\n".join(["day,field,click,buy", *rows]) + "\n")
    lpfs.prepare(table, tmp_path / "cmp" / "data", label="buy", time="day", quiet=True)  # and then it was killed
    with pytest.raises(InputError, match="was prepared with label='buy', not 'click'"):
        compare(table, tmp_path / "cmp", methods="one", keep=1, seeds=1, label="click", time="day", **QUICK)
    assert (tmp_path / "cmp" / "data" / "dataset.json").is_file()


def test_the_same_fields_are_trained_once(log, fakes, tmp_path, counted):
    fakes("one")
    fakes("two")
    fakes("other", first=3)
    found = compare(log, tmp_path / "cmp", methods=["one", "two", "other"], keep=[2, 3], seeds=1, **QUICK)
    assert counted == {"pretrain": 1, "search": 3, "train": 1 + 2 + 2}
    known = {(each["method"], each["keep"], each["seed"]): each for each in found.results}
    for size in (2, 3):
        assert known["one", size, 0]["auc"] == known["two", size, 0]["auc"] != known["other", size, 0]["auc"]


def test_more_methods_sizes_and_seeds_may_be_added(log, fakes, tmp_path, counted):
    fakes("one")
    fakes("other", first=3)
    compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **QUICK)
    found = compare(log, tmp_path / "cmp", methods="other", keep=3, seeds=2, **QUICK)
    assert counted == {"pretrain": 3, "search": 3, "train": 2 + 3}  # one of the three was only read
    assert len(found.results) == 2 + 3
    assert (found.values["sizes"], found.best) == ([2, 3], None)  # none has all of the sizes
    with pytest.raises(InputError, match="begun with batch_size=64 and cannot go on with 32"):
        compare(log, tmp_path / "cmp", **{**QUICK, "batch_size": 32})
    with pytest.raises(InputError, match="begun with tune=0 and cannot go on with 2"):
        compare(log, tmp_path / "cmp", tune=2, **QUICK)
    other = lpfs.simulate(tmp_path / "log", "small", rows=2000, days=4, seed=1)
    with pytest.raises(InputError, match="begun on other data"):
        compare(other, tmp_path / "cmp", **QUICK)


def test_a_method_that_searches_for_every_size(log, fakes, tmp_path, counted):
    fakes("each", each_keep=True)
    compare(log, tmp_path / "cmp", methods="each", keep=[2, 3, 4], seeds=1, **QUICK)
    assert counted["search"] == 3


def test_scores_that_are_not_cut_are_not_taken_for_a_ranking(log, fakes, tmp_path):
    fakes("odd", how="odd")
    fakes("odd_each", how="odd", each_keep=True)
    found = compare(log, tmp_path / "cmp", methods=["odd", "odd_each"], keep=2, seeds=1, **QUICK)
    assert "odd does not keep the best of its scores" in found.methods["odd"]["failed"][0]["reason"]
    assert next(each for each in found.results if each["method"] == "odd_each")["count"] == 29
    assert found.best is None  # more than was asked for


def test_a_method_that_fails_is_recorded_and_stops_nothing(run, log, fakes, tmp_path):
    fakes("refused", how="refused")
    fakes("dead", how="dead")
    fakes("broken", how="broken")
    fakes("fine")
    options = [
        "--methods",
        "refused,dead,broken,fine",
        "--keep",
        "2",
        "--seeds",
        "1",
        *TINY,
        "--out",
        tmp_path / "cmp",
    ]
    code, out, err = run("compare", log, *options, "--json")
    assert code == 0, err
    assert json.loads(out)["best"] == "fine"
    assert "failed: refused, 1 run: fake is not defined on this model" in err
    assert "failed: dead, 1 run: every gate is at zero in step 7" in err
    assert "failed: broken, 1 run: KeyError: '=SUM(A1)|<b>'" in err
    assert r"KeyError: '=SUM(A1)\|&lt;b&gt;'" in (tmp_path / "cmp" / "comparison.md").read_text()
    before = json.loads((tmp_path / "cmp" / "results" / "dead-k2-s0.json").read_text())
    assert (before["status"], before["reason"]) == ("failed", "every gate is at zero in step 7")
    fakes("dead")
    code, _, err = run("compare", "--out", tmp_path / "cmp")
    assert (code, "5 runs, 5 of them done already" in err) == (0, True)
    code, _, err = run("compare", "--out", tmp_path / "cmp", "--retry-failed")
    assert (code, "5 runs, 2 of them done already" in err) == (0, True)
    assert json.loads((tmp_path / "cmp" / "results" / "dead-k2-s0.json").read_text())["status"] == "done"


def test_where_every_method_fails_the_command_does(run, log, fakes, tmp_path):
    fakes("dead", how="dead")
    code, _, err = run(
        "compare", log, "--methods", "dead", "--keep", "2", "--seeds", "1", *TINY, "-q", "--out", tmp_path / "c"
    )
    assert code == 1
    assert "no method came to an end; dead: every gate is at zero" in err


def test_a_full_disk_is_no_fault_of_a_method(log, fakes, tmp_path, monkeypatch):
    fakes("fine")

    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Runner, "pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        compare(log, tmp_path / "cmp", methods="fine", keep=2, seeds=1, **QUICK)
    assert [each.name for each in (tmp_path / "cmp" / "results").iterdir()] == ["all_fields-k31-s0.json"]
    assert not any((tmp_path / "cmp" / "claims").iterdir())


def test_every_method_is_tuned_with_the_same_budget(log, fakes, tmp_path):
    fakes("many", tried=[{"first": 5}, {"first": 9}, {"first": 12}])
    fakes("penalised")
    fakes("few", tried=[{"how": "dead"}])
    found = compare(log, tmp_path / "cmp", methods=["many", "penalised", "few"], keep=4, seeds=1, tune=3, **QUICK)
    assert {name: each["tried"] for name, each in found.methods.items()} == {"many": 3, "penalised": 3, "few": 2}
    record = json.loads((tmp_path / "cmp" / "results" / "many-k4-s0.json").read_text())
    assert [each["options"] for each in record["tried"]] == [{}, {"first": 5}, {"first": 9}]
    best = max(record["tried"], key=lambda each: each["validation"]["auc"])
    assert (record["options"], record["kept"], record["validation"]) == (
        best["options"],
        best["kept"],
        best["validation"],
    )
    penalised = json.loads((tmp_path / "cmp" / "results" / "penalised-k4-s0.json").read_text())
    assert [each["options"] for each in penalised["tried"]] == [{}, {"penalty": 0.15}, {"penalty": 1.5}]
    few = json.loads((tmp_path / "cmp" / "results" / "few-k4-s0.json").read_text())
    assert few["status"] == "done"
    assert few["tried"][1] == {"options": {"how": "dead"}, "reason": "every gate is at zero in step 7"}
    assert "up to 3 settings" in (tmp_path / "cmp" / "comparison.md").read_text()


def test_settings_of_single_methods(run, log, fakes, tmp_path):
    fakes("fake")
    options = ["--methods", "fake", "--method-option", "fake:first=2", "--keep", "1", "--seeds", "1", *TINY]
    assert run("compare", log, *options, "--must-drop", "f00", "-q", "--out", tmp_path / "cmp")[0] == 0
    record = json.loads((tmp_path / "cmp" / "results" / "fake-k1-s0.json").read_text())
    assert record["options"] == {"first": 2}
    assert json.loads((tmp_path / "cmp" / "comparison.json").read_text())["fields"] == 30


@pytest.mark.parametrize(("model", "level"), [("dlrm", "field"), ("dlrm_cross", "cross")])
def test_models_that_gate_more_than_fields(fakes, tmp_path, model, level):
    fakes("fake", first=2)
    data = lpfs.simulate(tmp_path / "log", "small", rows=2000, days=4)
    drop = data.schema.names[8:]
    how = {**QUICK, "model_options": {"dim": 2, "hidden": [4], "bottom": [4]}, "level": level, "model": model}
    found = compare(data, tmp_path / "cmp", methods="fake", keep=3, seeds=1, must_drop=drop, **how)
    assert found.best == "fake"
    record = next(each for each in found.results if each["method"] == "fake")
    assert record["count"] == 3
    assert (record["auc"] is not None, "reason" in record) == (True, False)


def test_a_log_and_names_that_are_no_formulas(run, fakes, tmp_path):
    fakes("fake")
    table = tmp_path / "clicks.csv"
    lines = ["click,day,=1+1,@x,a|b"]
    lines += [f"{row * 7 % 3 % 2},{row * 4 // 400},v{row % 5},w{row % 3},{row % 7}" for row in range(400)]
    table.write_text("\n".join(lines) + "\n")
    asked = ["--label", "click", "--time", "day", "--methods", "fake", "--keep", "2", "--seeds", "1", *TINY]
    code, _, err = run("compare", table, *asked, "--out", tmp_path / "cmp")
    assert code == 0, err
    assert (tmp_path / "cmp" / "data" / "dataset.json").exists()
    with (tmp_path / "cmp" / "results.csv").open(newline="") as file:
        for row in csv.reader(file):
            assert not any(cell[:1] in ("=", "+", "@") for cell in row)
    assert "What is picked" not in err
    code, _, err = run("compare", tmp_path / "other.csv", *asked, "--out", tmp_path / "cmp")
    assert (code, "begun with source=['clicks.csv'] and cannot go on with ['other.csv']" in err) == (1, True)
    table.unlink()  # what was prepared is there
    assert run("compare", "--out", tmp_path / "cmp", "-q")[0] == 0
    code, _, err = run("select", "--keep", "2", "--config", tmp_path / "cmp", "--out", tmp_path / "cmp", "-q")
    assert (code, "holds no run" in err) == (1, True)


def test_the_truth_of_a_raw_log(run, fakes, tmp_path):
    fakes("fake")
    assert (
        run("simulate", "--rows", "2000", "--days", "4", "--format", "csv", "--out", tmp_path / "raw", "-q")[0]
        == 0
    )
    asked = ["--label", "click", "--time", "day", "--methods", "fake,oracle", "--keep", "2", "--seeds", "1", *TINY]
    code, out, err = run("compare", tmp_path / "raw" / "log", *asked, "--truth", tmp_path / "raw" / "truth.json",
                         "--json", "-q", "--out", tmp_path / "cmp")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["methods"]["fake"]["sizes"]["2"]["picks"]
    assert json.loads(out)["methods"]["oracle"]["sizes"]["2"]["picks"]["noise"] == 0
    code, _, err = run("compare", "--truth", tmp_path / "nowhere.json", "--out", tmp_path / "cmp")
    assert (code, "cannot be read" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--methods", "lpfs+"], 2, "Did you mean 'lpfs++'?"),
        (["--keep", "5,ten"], 2, "'5,ten' is not a list of whole numbers"),
        (["--keep", "0"], 1, "keep must be a whole number >= 1, found 0"),
        (["--keep", "32"], 1, "keep must be between 1 and the 31 fields, found 32"),
        (["--seeds", "0"], 1, "seeds must be a whole number >= 1, found 0"),
        (["--method-option", "alpha=2"], 2, "'alpha=2' is not of the form method:name=value"),
        (["--method-option", "lpfs++:alpa=2"], 1, "unknown key 'alpa'"),
        (["--model-option", "deep=4"], 1, "unknown key 'deep' for model 'mlp'"),
        (["--tables-only"], 1, "there is no comparison in"),
    ],
)
def test_mistakes(run, log, tmp_path, arguments, code, message):
    found, out, err = run("compare", log, "--keep", "4", *TINY, "-q", "--out", tmp_path / "cmp", *arguments)
    if "--keep" in arguments:
        found, out, err = run("compare", log, *TINY, "-q", "--out", tmp_path / "cmp", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert not (tmp_path / "cmp" / "results").exists()


def test_what_is_asked_for_in_other_ways_is_refused(log, run, tmp_path):
    with pytest.raises(InputError, match="method is not a setting of compare"):
        compare(log, tmp_path / "cmp", keep=2, method="lpfs")
    with pytest.raises(InputError, match="say how many fields to keep"):
        compare(log, tmp_path / "cmp")
    code, _, err = run("compare", "--out", tmp_path / "cmp")
    assert (code, "Missing argument: the log" in err) == (2, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty and holds no comparison"):
        compare(log, tmp_path / "mine", keep=2)


def test_who_keeps_more_than_was_asked_for_is_listed_last_and_named(log, tmp_path):
    """All fields have the larger area and are no rival."""
    found = compare(log, methods=["all", "random"], keep=4, seeds=1, out=tmp_path / "cmp", **QUICK)
    assert list(found.methods) == ["random", "all"]
    assert found.best == "random"
    assert found.values["aside"] == ["all"]
    assert "; no rivals, listed last: all." in (tmp_path / "cmp" / "comparison.md").read_text()
