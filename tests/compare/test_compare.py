"""compare from the command line: results, missing runs only, methods that fail, tuning, invalid input."""

from __future__ import annotations

import csv
import json
import shutil

import pytest

import lpfs
from lpfs.compare.compare import compare
from lpfs.compare.run_dir import read_kinds
from lpfs.compare.runner import Runner
from lpfs.errors import InputError
from lpfs.pipeline import stages
from tests.helpers.comparisons import PLAN, QUICK, SINGLE, TINY, read_results

pytestmark = pytest.mark.long  # whole runs


@pytest.fixture
def counted(monkeypatch):
    """Count trainings and searches."""
    counts = {"pretrain": 0, "search": 0, "train": 0}

    def counting(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(stages, "search_fields", counting("search", stages.search_fields))
    monkeypatch.setattr(stages, "retrain", counting("train", stages.retrain))
    monkeypatch.setattr(stages, "pretrain", counting("pretrain", stages.pretrain))
    return counts


def test_a_second_call_does_no_runs_and_prints_the_result(run, log, compared, counted):
    before = {path: path.stat().st_mtime_ns for path in (compared / "results").iterdir()}
    assert len(before) == 2 * (1 + 2 * 2)
    code, out, err = run("compare", log, *PLAN, *TINY, "--out", compared, "--json")
    assert code == 0, err
    assert counted == {"pretrain": 0, "search": 0, "train": 0}
    assert {path: path.stat().st_mtime_ns for path in (compared / "results").iterdir()} == before
    assert "10 runs, 10 of them done already" in err
    assert "\033" not in err
    values = json.loads(out)
    assert values["sizes"] == [4, 8]
    assert set(values["methods"]) == {"lpfs++", "permutation"}
    assert values["best"] == next(iter(values["methods"]))
    for name, method in values["methods"].items():
        assert method["area"]["value"] == pytest.approx(
            sum(method["sizes"][size]["auc"]["value"] for size in ("4", "8")) / 2 / 0.5 - 1
        )
        assert (method["differences"] == {}) == (name == values["best"] == "lpfs++")
        assert method["sizes"]["4"]["recall"] <= 4 / 15
        assert sum(method["sizes"]["8"]["kept_by_kind"].values()) == 8
        assert 0 <= method["overlap"] <= 1
        assert method["search"]["epochs"] > 0
        assert method["trials"] == 1
    assert values["kinds"] == {"main": 11, "pair": 4, "copy": 4, "correlated": 3, "noise": 9}
    assert values["folder"] == str(compared)


def test_tables_agree_with_the_results(compared):
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
    assert "## Kinds of the kept fields" in text
    assert f"| {whole['best']} | {whole['methods'][whole['best']]['area']['value']:.4f} |" in text


def results_in_order(folder, rows):
    known = {(record["method"], record["keep"], record["seed"]): record for record in read_results(folder)}
    return [known[row["method"], int(row["keep"]), int(row["seed"])] for row in rows]


def test_a_ranking_is_computed_once_for_all_sizes(compared):
    names = {path.name for path in (compared / "searches").iterdir()}
    rankings = sorted(name for name in names if name.startswith("permutation-"))  # with a digest of its options
    assert [name.rsplit("-", 1)[1] for name in rankings] == ["s0.json", "s1.json"]
    assert {name for name in names if name.startswith("lpfs")} == {
        f"lpfs++-s{seed}-k{size}.json" for seed in (0, 1) for size in (4, 8)
    }
    for seed in (0, 1):
        kept = {record["keep"]: record["kept"] for record in read_results(compared)
                if (record["method"], record["seed"]) == ("permutation", seed)}  # fmt: skip
        scores = json.loads((compared / "searches" / rankings[seed]).read_text())["scores"]
        for size in (4, 8):
            assert min(scores[name] for name in kept[size]) >= max(
                value for name, value in scores.items() if name not in kept[size]
            )


def test_networks_that_judge_are_trained_once_per_seed(compared):
    for seed in ("0", "1"):
        assert len(list((compared / "seeds" / seed / "judges-4-120").glob("network-*/checkpoints/*"))) == 4
    details = [json.loads(path.read_text())["details"] for path in (compared / "searches").glob("lpfs++*")]
    assert len(details) == 4  # two K of two seeds
    assert all("exchanged" in values for values in details)


def test_missing_runs_are_done_and_give_the_same_results(run, compared, counted):
    before = read_results(compared)
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
    assert counted == {"pretrain": 1, "search": 1, "train": 1}  # the pretrained model is loaded
    assert read_results(compared) == before
    assert not any((compared / "locks").iterdir())
    assert not any((compared / "work").iterdir())


@pytest.mark.parametrize(
    "pattern",
    ["results/lpfs++-k4-s1.json", "trained/*.npy", "labels.npy", "plan.json", "config.json", "seeds/0/cost.json"],
)
def test_a_damaged_file_is_named_and_refused(run, compared, tmp_path, pattern):
    shutil.copytree(compared, tmp_path / "cmp")
    path = next((tmp_path / "cmp").glob(pattern))
    data = bytearray(path.read_bytes())
    position = data.rindex(b"0", 0, -50) if path.suffix == ".json" else len(data) - 3
    data[position] ^= 1
    path.write_bytes(data)
    code, _, err = run("compare", "--out", tmp_path / "cmp", "--tables-only")
    assert code == 1
    assert f"{path} " in err
    assert "damaged" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("folder", ["searches", "trained"])
def test_a_damaged_search_is_not_a_failure_of_its_method(run, compared, tmp_path, folder):
    shutil.copytree(compared, tmp_path / "cmp")
    (tmp_path / "cmp" / "results" / "lpfs++-k4-s1.json").unlink()
    for path in (tmp_path / "cmp" / folder).glob("*-s1*.json"):
        path.write_text(path.read_text()[:-20])
    code, _, err = run("compare", "--out", tmp_path / "cmp")
    assert code == 1
    assert f"/{folder}/" in err
    assert "not JSON" in err
    assert not (tmp_path / "cmp" / "results" / "lpfs++-k4-s1.json").exists()


@pytest.mark.parametrize("content", ["{", "3", '{"fields": [{"name": 1}]}', "[" * 100_000])
def test_a_truth_of_another_type_is_one_line(tmp_path, content):
    (tmp_path / "truth.json").write_text(content)
    with pytest.raises(InputError, match=r"truth\.json.*lpfs simulate"):
        read_kinds(tmp_path / "truth.json")


def test_tables_of_the_results_so_far(run, compared, tmp_path):
    shutil.copytree(compared, tmp_path / "cmp")
    for path in (tmp_path / "cmp" / "results").glob("*-s1.json"):
        path.unlink()
    code, out, err = run("compare", "--out", tmp_path / "cmp", "--tables-only", "--json")
    assert (code, json.loads(out)["seeds"]) == (0, [0])
    assert "one seed" in err
    shutil.rmtree(tmp_path / "cmp" / "results")
    code, out, _ = run("compare", "--out", tmp_path / "cmp", "--tables-only", "--json")
    assert (code, json.loads(out)["best"], json.loads(out)["methods"]) == (0, None, {})


def test_a_directory_that_another_process_prepares_is_accepted(log, fakes, tmp_path):
    fakes("one")
    for name in ("locks", ".data.tmp"):
        (tmp_path / "cmp" / name).mkdir(parents=True)
    assert compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **QUICK).best == "one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": [2, 99]}, "keep must be between 1 and the 31 fields, found 99"),
        ({"keep": 2, "must_keep": ("nosuch",)}, "nosuch"),
        ({"keep": [1, 3], "must_keep": ("f00", "f01")}, "keep=1, but 2 fields must be kept"),
    ],
)
def test_impossible_targets_raise_before_training_and_leave_no_files(log, fakes, tmp_path, counted, changes, message):
    fakes("one")
    with pytest.raises(InputError, match=message):
        compare(log, tmp_path / "cmp", methods="one", seeds=1, **{**QUICK, **changes})
    assert not any(counted.values())
    comparison = compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **{**QUICK, "batch_size": 32})
    assert comparison.best == "one"


def test_invalid_input_changes_no_existing_files(log, fakes, tmp_path, counted):
    fakes("one")
    data = tmp_path / "cmp" / "data"
    lpfs.simulate(data, "small", rows=2000, days=4)  # a Dataset of the user, at the path of the data of a comparison
    with pytest.raises(InputError, match="found 99"):
        compare(data, tmp_path / "cmp", methods="one", keep=[2, 99], seeds=1, **QUICK)
    assert (data / "dataset.json").is_file()
    compare(data, tmp_path / "cmp", methods="one", keep=2, seeds=1, **QUICK)
    before = (tmp_path / "cmp" / "plan.json").read_bytes()
    with pytest.raises(InputError, match="found 99"):
        compare(data, tmp_path / "cmp", methods="one", keep=[2, 99], seeds=1, **QUICK)
    assert (tmp_path / "cmp" / "plan.json").read_bytes() == before
    assert compare(data, tmp_path / "cmp", **QUICK).best == "one"  # with the sizes of the first call


def test_rows_of_one_class_raise_and_leave_no_files(fakes, tmp_path):
    fakes("one")
    rows = [
        f"{day},{number % 7},{int(day < 3 and number % 5 == 0)},{(day + number) % 4}"
        for day in range(4)
        for number in range(300)
    ]
    table = tmp_path / "log.csv"
    table.write_text("\n".join(["day,field,click,other", *rows]) + "\n")
    options = {"methods": "one", "keep": 1, "seeds": 1, "label": "click", **QUICK}
    with pytest.raises(InputError, match="one class"):
        compare(table, tmp_path / "cmp", time="day", **options)
    assert compare(table, tmp_path / "cmp", time="other", **options).best == "one"


def test_data_prepared_with_other_options_is_not_used(fakes, tmp_path):
    fakes("one")
    rows = [f"{number % 4},{number % 7},{number % 2},{number % 3 % 2}" for number in range(1200)]
    table = tmp_path / "log.csv"
    table.write_text("\n".join(["day,field,click,buy", *rows]) + "\n")
    lpfs.prepare(
        table, tmp_path / "cmp" / "data", label="buy", time="day", quiet=True
    )  # and then the process was killed
    with pytest.raises(InputError, match="was prepared with label='buy', not 'click'"):
        compare(table, tmp_path / "cmp", methods="one", keep=1, seeds=1, label="click", time="day", **QUICK)
    assert (tmp_path / "cmp" / "data" / "dataset.json").is_file()


def test_the_same_fields_are_trained_once(log, fakes, tmp_path, counted):
    fakes("one")
    fakes("two")
    fakes("other", first=3)
    comparison = compare(log, tmp_path / "cmp", methods=["one", "two", "other"], keep=[2, 3], seeds=1, **SINGLE)
    assert counted == {"pretrain": 1, "search": 3, "train": 1 + 2 + 2}
    known = {(record["method"], record["keep"], record["seed"]): record for record in comparison.results}
    for size in (2, 3):
        assert known["one", size, 0]["auc"] == known["two", size, 0]["auc"] != known["other", size, 0]["auc"]


def test_more_methods_sizes_and_seeds_may_be_added(log, fakes, tmp_path, counted):
    fakes("one")
    fakes("other", first=3)
    compare(log, tmp_path / "cmp", methods="one", keep=2, seeds=1, **SINGLE)
    comparison = compare(log, tmp_path / "cmp", methods="other", keep=3, seeds=2, **SINGLE)
    assert counted == {"pretrain": 3, "search": 3, "train": 2 + 3}  # one of them was only loaded
    assert len(comparison.results) == 2 + 3
    assert (comparison.values["sizes"], comparison.best) == ([2, 3], None)  # no method has all sizes
    with pytest.raises(InputError, match="batch_size=64 and cannot continue with 32"):
        compare(log, tmp_path / "cmp", **{**QUICK, "batch_size": 32})
    with pytest.raises(InputError, match="tune=0 and cannot continue with 2"):
        compare(log, tmp_path / "cmp", tune=2, **QUICK)
    other = lpfs.simulate(tmp_path / "log", "small", rows=2000, days=4, seed=1)
    with pytest.raises(InputError, match="started with other data"):
        compare(other, tmp_path / "cmp", **QUICK)


def test_a_method_that_searches_for_every_size(log, fakes, tmp_path, counted):
    fakes("per_k", search_per_k=True)
    compare(log, tmp_path / "cmp", methods="per_k", keep=[2, 3, 4], seeds=1, **QUICK)
    assert counted["search"] == 3


def test_a_method_that_does_not_keep_its_top_scores_fails(log, fakes, tmp_path):
    fakes("odd", failure="inverted")
    fakes("odd_each", failure="inverted", search_per_k=True)
    comparison = compare(log, tmp_path / "cmp", methods=["odd", "odd_each"], keep=2, seeds=1, **QUICK)
    assert "search_per_k" in comparison.methods["odd"]["failed"][0]["reason"]
    assert next(result for result in comparison.results if result["method"] == "odd_each")["count"] == 29
    assert comparison.best is None  # it kept more than K


def test_a_method_that_fails_is_recorded_and_others_continue(run, log, fakes, tmp_path):
    fakes("refused", failure="refused")
    fakes("dead", failure="dead")
    fakes("broken", failure="broken")
    fakes("fine")
    options = ["--methods", "refused,dead,broken,fine", "--keep", "2", "--seeds", "1", *TINY, "--out", tmp_path / "cmp"]
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


def test_the_command_fails_if_every_method_fails(run, log, fakes, tmp_path):
    fakes("dead", failure="dead")
    code, _, err = run(
        "compare", log, "--methods", "dead", "--keep", "2", "--seeds", "1", *TINY, "-q", "--out", tmp_path / "c"
    )
    assert code == 1
    assert "dead: every gate is at zero" in err


def test_a_full_disk_is_not_recorded_as_a_failure_of_the_method(log, fakes, tmp_path, monkeypatch):
    fakes("fine")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Runner, "pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        compare(log, tmp_path / "cmp", methods="fine", keep=2, seeds=1, **SINGLE)
    assert [path.name for path in (tmp_path / "cmp" / "results").iterdir()] == ["all_fields-k31-s0.json"]
    assert not any((tmp_path / "cmp" / "locks").iterdir())


def test_every_method_is_tuned_with_the_same_budget(log, fakes, tmp_path):
    fakes("many", trial_options=[{"first": 5}, {"first": 9}, {"first": 12}])
    fakes("penalised")
    fakes("few", trial_options=[{"failure": "dead"}])
    comparison = compare(log, tmp_path / "cmp", methods=["many", "penalised", "few"], keep=4, seeds=1, tune=3, **QUICK)
    assert {name: method["trials"] for name, method in comparison.methods.items()} == {
        "many": 3,
        "penalised": 3,
        "few": 2,
    }
    record = json.loads((tmp_path / "cmp" / "results" / "many-k4-s0.json").read_text())
    assert [trial["options"] for trial in record["trials"]] == [{}, {"first": 5}, {"first": 9}]
    best = max(record["trials"], key=lambda trial: trial["validation"]["auc"])
    assert (record["options"], record["kept"], record["validation"]) == (
        best["options"],
        best["kept"],
        best["validation"],
    )
    penalised = json.loads((tmp_path / "cmp" / "results" / "penalised-k4-s0.json").read_text())
    assert [trial["options"] for trial in penalised["trials"]] == [{}, {"penalty": 0.15}, {"penalty": 1.5}]
    few = json.loads((tmp_path / "cmp" / "results" / "few-k4-s0.json").read_text())
    assert few["status"] == "done"
    assert few["trials"][1] == {"options": {"failure": "dead"}, "reason": "every gate is at zero in step 7"}
    assert "up to 3 option sets" in (tmp_path / "cmp" / "comparison.md").read_text()


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
    changes = {**QUICK, "model_options": {"dim": 2, "hidden": [4], "bottom": [4]}, "level": level, "model": model}
    comparison = compare(data, tmp_path / "cmp", methods="fake", keep=3, seeds=1, must_drop=drop, **changes)
    assert comparison.best == "fake"
    record = next(result for result in comparison.results if result["method"] == "fake")
    assert record["count"] == 3
    assert (record["auc"] is not None, "reason" in record) == (True, False)


def test_a_log_whose_column_names_look_like_formulas(run, fakes, tmp_path):
    fakes("fake")
    table = tmp_path / "clicks.csv"
    lines = ["click,day,=1+1,@x,a|b"]
    lines += [f"{row * 7 % 3 % 2},{row * 4 // 400},v{row % 5},w{row % 3},{row % 7}" for row in range(400)]
    table.write_text("\n".join(lines) + "\n")
    options = ["--label", "click", "--time", "day", "--methods", "fake", "--keep", "2", "--seeds", "1", *TINY]
    code, _, err = run("compare", table, *options, "--out", tmp_path / "cmp")
    assert code == 0, err
    assert (tmp_path / "cmp" / "data" / "dataset.json").exists()
    with (tmp_path / "cmp" / "results.csv").open(newline="") as file:
        for row in csv.reader(file):
            assert not any(cell[:1] in ("=", "+", "@") for cell in row)
    assert "Kinds of the kept fields" not in err
    code, _, err = run("compare", tmp_path / "other.csv", *options, "--out", tmp_path / "cmp")
    assert (code, "source=['clicks.csv'] and cannot continue with ['other.csv']" in err) == (1, True)
    table.unlink()  # the prepared data is used
    assert run("compare", "--out", tmp_path / "cmp", "-q")[0] == 0
    code, _, err = run("select", "--keep", "2", "--config", tmp_path / "cmp", "--out", tmp_path / "cmp", "-q")
    assert (code, "is not a run" in err) == (1, True)


def test_truth_of_a_raw_log(run, fakes, tmp_path):
    fakes("fake")
    assert run("simulate", "--rows", "2000", "--days", "4", "--format", "csv", "--out", tmp_path / "raw", "-q")[0] == 0
    options = ["--label", "click", "--time", "day", "--methods", "fake,oracle", "--keep", "2", "--seeds", "1", *TINY]
    code, out, err = run("compare", tmp_path / "raw" / "log", *options, "--truth", tmp_path / "raw" / "truth.json",
                         "--json", "-q", "--out", tmp_path / "cmp")  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["methods"]["fake"]["sizes"]["2"]["kept_by_kind"]
    assert json.loads(out)["methods"]["oracle"]["sizes"]["2"]["kept_by_kind"]["noise"] == 0
    code, _, err = run("compare", "--truth", tmp_path / "nowhere.json", "--out", tmp_path / "cmp")
    assert (code, "nowhere.json" in err, err.count("\n")) == (1, True, 1)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--methods", "lpfs+"], 2, "did you mean 'lpfs++'?"),
        (["--keep", "5,ten"], 2, "'5,ten'"),
        (["--keep", "0"], 1, "keep must be an integer >= 1, found 0"),
        (["--keep", "32"], 1, "keep must be between 1 and the 31 fields, found 32"),
        (["--seeds", "0"], 1, "seeds must be an integer >= 1, found 0"),
        (["--method-option", "alpha=2"], 2, "'alpha=2' is not of the form method:name=value"),
        (["--method-option", "lpfs++:alpa=2"], 1, "unknown key 'alpa'"),
        (["--model-option", "deep=4"], 1, "'deep'"),
        (["--tables-only"], 1, "no comparison in"),
    ],
)
def test_invalid_input(run, log, tmp_path, arguments, code, message):
    exit_code, out, err = run("compare", log, "--keep", "4", *TINY, "-q", "--out", tmp_path / "cmp", *arguments)
    if "--keep" in arguments:
        exit_code, out, err = run("compare", log, *TINY, "-q", "--out", tmp_path / "cmp", *arguments)
    assert (exit_code, out) == (code, "")
    assert message in err
    assert not (tmp_path / "cmp" / "results").exists()


def test_reserved_settings_and_other_directories_raise(log, run, tmp_path):
    with pytest.raises(InputError, match="method is not a setting of compare"):
        compare(log, tmp_path / "cmp", keep=2, method="lpfs")
    with pytest.raises(InputError, match="keep="):
        compare(log, tmp_path / "cmp")
    code, _, err = run("compare", "--out", tmp_path / "cmp")
    assert (code, "Missing argument" in err and "Dataset" in err) == (2, True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty and contains no comparison"):
        compare(log, tmp_path / "mine", keep=2)


def test_a_method_that_keeps_more_than_k_is_listed_last_and_not_ranked(log, tmp_path):
    """All fields have the larger area, but keep more than K."""
    comparison = compare(log, methods=["all", "random"], keep=4, seeds=1, out=tmp_path / "cmp", **QUICK)
    assert list(comparison.methods) == ["random", "all"]
    assert comparison.best == "random"
    assert comparison.values["unranked"] == ["all"]
    assert "; not ranked, listed last: all." in (tmp_path / "cmp" / "comparison.md").read_text()
