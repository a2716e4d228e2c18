"""select: the whole job in small, through every backbone and every way to say what is wanted."""

from __future__ import annotations

import json
import random
import re

import polars as pl
import pytest
import torch
from known_truth import FIELDS, STRONG, TINY, known_truth

import lpfs
from lpfs.errors import DataError, FieldError, InputError
from lpfs.models import MODELS, make_model, registered_name
from lpfs.pipeline import stages
from lpfs.pipeline import stages as hot
from lpfs.pipeline.plan import default_auc_loss
from lpfs.pipeline.results import parse_field_list, steps_saved
from lpfs.pipeline.select import select
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import split_dataset
from lpfs.schema import Selection
from lpfs.serialization import load, save

NAMES = tuple(each.name for each in FIELDS)
SMALL = TINY["model_options"]
ROWS = 3000
# all but what differs from run to run on the clock
SAME = ("kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "model", "made", "hot_start")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log", rows=ROWS)


@pytest.fixture(scope="module")
def kept_three(log, tmp_path_factory):
    return select(log, tmp_path_factory.mktemp("three") / "run", keep=3, **TINY, quiet=True)


def answer(outcome):
    return json.loads((outcome.folder / "selection.json").read_text())


def same(outcome):
    found = answer(outcome)
    found["made"].pop("seconds")
    return {name: found.get(name) for name in SAME}


def in_order(names):
    return list(names) == sorted(names, key=NAMES.index)


def test_the_answer(kept_three, log):
    found = answer(kept_three)
    assert set(found) == {
        *(
            "method",
            "fields",
            "kept",
            "dropped",
            "gates",
            "metrics",
            "validation",
            "max_logit_change",
            "certificates",
        ),
        *("model", "chosen_in", "savings", "seconds", "seed", "configuration", "recipe", "periods"),
        *("fingerprint", "versions", "sites", "made", "hot_start", "hints"),
    }
    assert found["kept"] == list(kept_three.kept)
    assert set(STRONG) < set(found["kept"])
    assert len(found["kept"]) == 3
    assert set(found["kept"]) | set(found["dropped"]) == set(NAMES)
    assert in_order(found["kept"])
    assert in_order(found["dropped"])
    assert in_order(found["gates"])
    assert (kept_three.folder / "kept_fields.txt").read_text().split() == found["kept"]
    assert all((found["gates"][name] == 0.0) == (name in found["dropped"]) for name in NAMES)
    assert found["metrics"].keys() == {"all_fields", "gated", "pruned", "hot_start", "retrained"}
    assert all(each.keys() == {"auc", "logloss"} for each in found["metrics"].values())
    assert all(0.6 < each["auc"] <= 1 for each in found["metrics"].values())
    assert (found["method"], found["seed"], found["fingerprint"]) == ("lpfs++", 0, log.fingerprint)
    assert found["configuration"]["keep"] == 3
    assert found["versions"].keys() == {"lpfs", "code", "torch", "numpy", "python"}
    assert found["periods"]["test"]["rows"] == 500
    stages = {"prepare", "pretrain", "all_fields", "search", "prune", "retrain", "hot_start"}
    assert found["seconds"].keys() == stages
    assert found["savings"]["kept"]["table_bytes"] < found["savings"]["all_fields"]["table_bytes"]


def test_the_report_is_written_at_the_end(kept_three):
    text = (kept_three.folder / "report.html").read_text("utf-8")
    assert f"3 of {len(NAMES)} fields are enough" in text
    assert all(f'<bdi class="name">{name}</bdi>' in text for name in NAMES)
    facts = answer(kept_three)["fields"]
    assert list(facts) == list(NAMES)
    assert facts[NAMES[0]].keys() == {"kind", "group", "cardinality", "cost"}
    assert "fields kept" in kept_three._repr_html_()
    assert re.fullmatch(
        r"Outcome\(3 of \d+ fields kept, test AUC 0\.\d{4} \(0\.\d{4} with all fields\), in .+\)", repr(kept_three)
    )
    assert len(kept_three.plot().axes[0].texts) == 5


def test_a_report_that_fails_does_not_lose_the_run(log, tmp_path, monkeypatch, capsys):
    def broken(run):
        raise RuntimeError("no page")

    monkeypatch.setattr("lpfs.report.selection.selection_page", broken)
    found = select(log, tmp_path / "run", keep=3, finish="none", pretrain_steps=60, search_steps=60, seed=1)
    assert len(found.kept) == 3
    assert (tmp_path / "run" / "selection.json").exists()
    assert not (tmp_path / "run" / "report.html").exists()
    assert "the report could not be written (no page); the run is complete" in capsys.readouterr().err


def test_the_pruned_model_is_the_gated_one(kept_three):
    found = answer(kept_three)
    for name in ("auc", "logloss"):
        assert found["metrics"]["pruned"][name] == pytest.approx(found["metrics"]["gated"][name], abs=1e-6)
    zeros, cut = found["certificates"]["zeros"], found["certificates"]["cut"]
    assert zeros["max_logit_change"] == zeros["bound"] == 0.0
    assert 0 < cut["bound"] < 1e-3
    assert found["max_logit_change"] == cut["max_logit_change"] <= cut["bound"]
    assert zeros["certified"] is cut["certified"] is True
    assert sorted(zeros["checked"]) == sorted(cut["checked"]) == sorted(found["dropped"])


def test_the_hot_start_leaves_the_pruned_model_alone_and_tells_what_it_saved(kept_three):
    found = answer(kept_three)
    hot, recipe = found["hot_start"], found["recipe"]
    assert (hot["steps"], hot["retrain_steps"]) == (recipe["hot"], recipe["train"])
    assert hot["validation"][0] == [0, found["validation"]["pruned"]["auc"]]
    steps, aucs = zip(*hot["validation"], strict=True)
    assert len(steps) >= 20
    assert steps[-1] == hot["steps"]
    assert aucs[steps.index(hot["kept_step"])] == max(aucs) == found["validation"]["hot_start"]["auc"]
    assert hot["retrain_auc"] == found["validation"]["retrained"]["auc"]
    again = steps_saved(hot["validation"], hot["retrain_auc"], recipe["train"])
    assert (hot["level_at"], hot["steps_saved"]) == (again["level_at"], again["steps_saved"])


def test_a_hot_start_is_never_worse_than_the_model_it_starts_from(log, tmp_path, monkeypatch):
    """With a rate that ruins the model its first state is kept, to the last bit."""
    real = hot.hot_start

    def ruined(work, pruned):
        for group in pruned.optimizer.param_groups:
            group["lr"] = 1000.0
        return real(work, pruned)

    monkeypatch.setattr(hot, "hot_start", ruined)
    found = select(log, tmp_path / "run", keep=3, **TINY, finish="hot", quiet=True)
    told = answer(found)
    assert told["metrics"]["hot_start"] == told["metrics"]["pruned"]
    assert told["validation"]["hot_start"] == told["validation"]["pruned"]
    steps = [each.name for each in (tmp_path / "run" / "hot_start" / "checkpoints").iterdir()]
    assert "step-000000000000" in steps


def test_the_model_that_is_left_is_the_best_on_validation_rows(kept_three, log):
    found = answer(kept_three)
    scores = {name: each["auc"] for name, each in found["validation"].items() if name != "all_fields"}
    assert scores[found["model"]] == max(scores.values())
    model = load(kept_three.folder / "model")
    assert model.reads.names == tuple(found["kept"])
    test = split_dataset(log).test
    for batch in test.stream(64, fields=model.reads.names):
        assert torch.equal(model(batch), kept_three.model(batch))
    judged = lpfs.evaluate(model, test.stream(4096, fields=model.reads.names))
    assert judged.auc == found["metrics"][found["model"]]["auc"]


def test_the_history_of_the_search(kept_three):
    frame = pl.read_parquet(kept_three.folder / "history.parquet")
    assert frame.columns == ["step", "loss", "alive", "penalty", "epsilon", "lr", *(f"gate:{n}" for n in NAMES)]
    assert frame["step"].to_list() == list(range(1, 121))
    assert (frame["alive"][0], frame["alive"][-1]) == (7, 3)
    gates = answer(kept_three)["gates"]
    assert [frame[f"gate:{name}"][-1] for name in NAMES] == pytest.approx([gates[n] for n in NAMES], abs=1e-6)


def test_a_selection_reads_the_answer_of_a_run(kept_three, tmp_path):
    selection = Selection.load(kept_three.folder / "selection.json")
    assert (selection.kept, selection.dropped) == (kept_three.selection.kept, kept_three.selection.dropped)
    assert dict(selection.gates) == dict(kept_three.selection.gates)
    with pytest.raises(InputError, match="unknown key"):
        Selection.from_json(answer(kept_three))
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match="holds no selection"):
        Selection.load(tmp_path / "other.json")


def test_again_and_from_the_saved_settings(kept_three, log, tmp_path):
    again = select(log, tmp_path / "again", settings=Settings.load(kept_three.folder), quiet=True)
    assert same(again) == same(kept_three)
    kept = (again.folder / "kept_fields.txt").read_bytes()
    assert kept == (kept_three.folder / "kept_fields.txt").read_bytes()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_backbone_goes_through_and_is_certified(log, tmp_path, name):
    level = "cross" if name == "dlrm_cross" else "field"
    wide = {"hidden": [8]} if name != "fm" else {}
    wide = {"head": [8], **wide} if name == "user_item" else wide
    wide = {"bottom": [4], **wide} if name.startswith("dlrm") else wide
    options = {"model": name, "model_options": {"dim": 4, **wide}, "level": level}
    if name == "user_item":
        options["search_steps"] = 600  # of a pair, one without the other is worth nothing
    found = select(log, tmp_path / "run", keep=2, **{**TINY, **options}, finish="none", quiet=True)
    assert len(found.kept) == 2
    assert set(found.metrics) == {"all_fields", "gated", "pruned"}
    zeros, cut = found.certificates["zeros"], found.certificates["cut"]
    assert zeros["certified"] is cut["certified"] is True
    assert zeros["max_logit_change"] == 0.0
    assert cut["max_logit_change"] <= cut["bound"]
    for metric in ("auc", "logloss"):
        assert found.metrics["pruned"][metric] == pytest.approx(found.metrics["gated"][metric], abs=1e-6)
    model = load(tmp_path / "run" / "model")
    assert registered_name(model) == name
    assert set(model.names) == set(found.kept)


CROSSED = {"model": "user_item", "model_options": {"dim": 4, "hidden": [8], "head": [4]}}


def test_users_without_items(log, tmp_path):
    """UserItem reads users only as products with items."""
    how = {**TINY, **CROSSED, "finish": "none", "quiet": True}
    with pytest.raises(
        InputError, match="of group item no field is kept, and the 2 kept ones .*user.* name one with"
    ):
        select(log, tmp_path / "none", keep=2, must_keep=("user", "age"), **how)
    with pytest.raises(InputError, match="fields of group user and none of group item"):
        select(log, tmp_path / "dropped", keep=2, must_drop=("price", "tags", "ad"), **how)
    found = select(log, tmp_path / "run", keep=3, must_keep=("user", "age", "slot"), **how)
    assert set(found.kept) == {"user", "age", "slot"}
    assert found.model.reads.names == ("slot",)
    told = answer(found)["hints"][0]
    assert (told["kind"], set(told["fields"])) == ("not read", {"user", "age"})
    assert "name one of group item with --must-keep" in told["text"]


def test_dlrm_cross_gates_crosses_whether_that_is_said_or_not(log, tmp_path):
    how = {**TINY, "model_options": {"dim": 4, "hidden": [8], "bottom": [4]}, "finish": "none", "quiet": True}
    runs = [
        select(log, tmp_path / f"{number}", keep=4, **how, **said)
        for number, said in enumerate(({"model": "dlrm_cross"}, {"level": "cross"}))
    ]
    assert len(runs[0].selection.names) == 21
    assert runs[0].kept == runs[1].kept
    with pytest.raises(InputError, match="gates on fields and on their crosses"):
        select(log, tmp_path / "field", keep=4, model="dlrm_cross", level="field", **how)


def test_crosses_under_a_budget_with_a_field_that_must_stay(log, tmp_path):
    found = select(
        log, tmp_path / "run", level="cross", budget=6.0, costs="complexity", must_keep="site",
        **{**TINY, "model_options": {"dim": 4, "hidden": [8], "bottom": [4]}}, finish="none", quiet=True,
    )  # fmt: skip
    assert "site" in found.kept
    assert found.selection.made["cost"] <= 6.0


def test_nothing_asked_for_says_what_it_decided(log, tmp_path, capsys):
    found = select(log, tmp_path / "run", **TINY, finish="hot", must_keep=("slot",), must_drop=("price",))
    told = capsys.readouterr().err
    allowed = default_auc_loss(split_dataset(log).valid)
    assert 0.001 < allowed < 0.02  # a quarter of the standard error on a few hundred rows
    assert f"search: as few as cost at most {allowed:g} AUC" in told
    assert f"of validation AUC against all fields trained as long; {allowed:.5f} was allowed" in told
    assert {"slot", *STRONG} <= set(found.kept)
    assert "price" not in found.selection.names
    assert found.selection.made["curve"]
    assert found.hot_start == {}
    assert "hot_start" not in answer(found)


def test_the_last_day_decides_nothing(log, tmp_path):
    """Two logs that differ in the last day alone give the same fields and the same model."""
    other = known_truth(tmp_path / "other", rows=ROWS, last=1)
    for method in ("lpfs++", "permutation"):
        runs = [
            select(each, tmp_path / f"{method}{n}", keep=3, method=method, **TINY, quiet=True)
            for n, each in enumerate((log, other))
        ]
        first, second = (answer(each) for each in runs)
        assert first["metrics"] != second["metrics"]
        for metric in ("auc", "logloss"):
            expected = pytest.approx(first["metrics"]["gated"][metric], abs=1e-6)
            assert first["metrics"]["pruned"][metric] == expected
        assert {**same(runs[0]), "metrics": None} == {**same(runs[1]), "metrics": None}
        mine, theirs = (each.model.state_dict() for each in runs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert set(STRONG) < set(first["kept"])


def test_several_seeds(log, tmp_path, capsys):
    found = select(log, tmp_path / "run", keep=3, seeds=3, **TINY, finish="none")
    assert sum(found.chosen_in.values()) == 9
    assert all(found.chosen_in[name] >= 1 for name in found.kept)
    assert all(found.chosen_in[name] == 3 for name in STRONG)
    assert "not in every one of 3 searches" in capsys.readouterr().err
    assert {each.name for each in (tmp_path / "run").iterdir()} >= {"search", "search-1", "search-2", "pretrain-2"}


@pytest.fixture(scope="module")
def checkpoint(log, tmp_path_factory):
    """A factorisation machine of six of the seven fields, trained elsewhere."""
    torch.manual_seed(3)
    model = make_model("fm", log.schema.subset([name for name in NAMES if name != "price"]), dim=3)
    lpfs.fit(
        model, log.days(0, 4).stream(64, shuffle=True, fields=model.reads.names), lr=0.05, steps=300, quiet=True
    )
    return save(model, tmp_path_factory.mktemp("given") / "model", fingerprint=log.fingerprint)


def test_from_a_trained_model(log, checkpoint, tmp_path):
    options = {name: value for name, value in TINY.items() if name != "model_options"}
    found = select(log, tmp_path / "run", keep=3, checkpoint=str(checkpoint), seeds=2, **options, quiet=True)
    assert set(STRONG) < set(found.kept)
    assert "price" not in found.selection.names
    assert not list((tmp_path / "run").glob("pretrain*"))
    for each in (found.model, load(tmp_path / "run" / "model")):
        assert registered_name(each) == "fm"
        assert each.config["dim"] == 3
    settings = Settings.load(tmp_path / "run")
    assert (settings.model, settings.model_options["dim"]) == ("fm", 3)
    ids = sum(log.schema[name].cardinality for name in ("user", "site", "ad", "slot", "tags"))
    assert found.savings["all_fields"]["table_bytes"] == 4 * ids * (3 + 1)  # all fields of the same backbone


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "mlp"}, "is of 'fm', not of 'mlp'"),
        ({"model_options": {"dim": 4}}, "has dim=3 and cannot have 4"),
        ({"must_drop": "ad"}, "reads 'ad', which must be dropped"),
        ({"must_keep": "price"}, "no field 'price'"),
    ],
)
def test_a_trained_model_that_is_not_what_was_said(log, checkpoint, tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        select(log, tmp_path / "run", keep=2, checkpoint=str(checkpoint), **given, quiet=True)
    assert not (tmp_path / "run" / "all_fields").exists()


def test_a_log_that_is_gone_through_once(log, tmp_path):
    """Enough rows for the steps: time order, no repetition; all fields just go on."""
    once = {**TINY, "pretrain_steps": 250, "batch_size": 8, "search_steps": 60}
    found = select(log, tmp_path / "run", keep=3, **once, quiet=True)
    told = answer(found)
    assert told["recipe"]["shuffle"] is False
    assert len(found.kept) == 3
    lines = (tmp_path / "run" / "all_fields" / "metrics.jsonl").read_text()
    assert '"kind": "evaluate"' not in lines
    assert len(told["hot_start"]["validation"]) >= 20


@pytest.mark.parametrize("stage", ["all_fields", "find", "shrink", "retrain", "hot_start", "serving_speed"])
def test_a_run_that_fails_goes_on_from_its_stage(log, kept_three, tmp_path, monkeypatch, stage):
    def fails(*_, **__):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(hot if stage == "hot_start" else stages, stage, fails)
        with pytest.raises(OSError, match="the disk is gone"):
            select(log, tmp_path / "run", keep=3, **TINY, quiet=True)
    assert not (tmp_path / "run" / "selection.json").exists()
    with pytest.raises(InputError, match="holds a run already"):
        select(log, tmp_path / "run", keep=3, **TINY, quiet=True)
    found = select(log, tmp_path / "run", keep=3, **TINY, quiet=True, resume=True)
    assert same(found) == same(kept_three)


@pytest.mark.parametrize("name", ["mlp", "user_item"])
def test_a_log_of_several_tasks(tmp_path, capsys, name):
    """Every task is trained, judged and told; the first one decides."""
    log = lpfs.simulate(tmp_path / "log", "industrial-small", rows=4000)
    tasks = [log.schema.label, *log.schema.tasks]
    assert len(tasks) == 6
    wide = {"head": [4]} if name == "user_item" else {}
    how = {**TINY, "model": name, "model_options": {**SMALL, **wide}}
    found = select(log, tmp_path / "run", keep=8, **how)
    told = answer(found)
    assert set(found.metrics) == {"all_fields", "gated", "pruned", "hot_start", "retrained"}
    for part in ("metrics", "validation"):
        for each in told[part].values():
            assert list(each["tasks"]) == tasks
            assert each["tasks"]["click"] == {"auc": each["auc"], "logloss": each["logloss"]}
    for task in tasks:
        before, after = (told["metrics"][each]["tasks"][task] for each in ("gated", "pruned"))
        assert after["logloss"] == pytest.approx(before["logloss"], abs=1e-6)
    main = {each: told["validation"][each]["auc"] for each in ("pruned", "hot_start", "retrained")}
    assert main[told["model"]] == max(main.values())
    assert main["hot_start"] >= main["pruned"]
    assert told["hot_start"]["retrain_auc"] == main["retrained"]
    lines = capsys.readouterr().err.splitlines()
    at = lines.index("AUC of every task on the test rows")
    assert [line.split()[0] for line in lines[at + 1 : at + 8]] == ["task", *tasks]
    auc = told["metrics"]["retrained"]["tasks"]["like"]["auc"]
    assert lines[at + 4].split()[-1] == f"{auc:.5f}"
    model = load(found.folder / "model")
    judged = lpfs.evaluate(model, split_dataset(log).test.stream(4096, fields=model.reads.names))
    for task in tasks:
        assert judged.tasks[task].auc == told["metrics"][told["model"]]["tasks"][task]["auc"]


def table(rows=1800, seed=1):
    """A table in memory, in an order that means nothing."""
    draw = random.Random(seed)
    lines = []
    for row in range(rows):
        user, ad, noise = (draw.randrange(size) for size in (6, 5, 8))
        click = draw.random() < 0.05 + 0.45 * (user % 2) + 0.45 * (ad % 2)
        lines.append({"click": int(click), "noise": f"n{noise}", "user": f"u{user}", "ad": f"a{ad}", "row": row})
    return pl.DataFrame(lines)


def test_a_table_without_time_is_dealt_at_random_by_seed(tmp_path):
    runs = [
        select(table().drop("row"), tmp_path / f"{n}", label="click", keep=2, **TINY, finish="none", quiet=True)
        for n in range(2)
    ]
    assert runs[0].kept == ("user", "ad")
    assert same(runs[0]) == same(runs[1])
    made = lpfs.Dataset(tmp_path / "0" / "data")
    assert made.settings["options"]["shuffle"] is True


def test_a_run_from_a_dataset_object_can_be_run_again_from_its_configuration(tmp_path):
    made = lpfs.prepare(table().drop("row"), tmp_path / "data", label="click", quiet=True)
    given = {"keep": 2, **TINY, "finish": "none", "quiet": True}
    first = select(made, tmp_path / "first", **given)
    wanted = Settings.load(tmp_path / "first")
    assert wanted.source == (str(tmp_path / "data"),)
    assert same(select(None, tmp_path / "again", settings=wanted, quiet=True)) == same(first)
    part = select(made.part(0, 1500), tmp_path / "part", **given)
    assert Settings.load(part.folder).source == ()  # no configuration can say which rows


def test_names_that_hold_line_breaks(tmp_path):
    rows = table().drop("row").rename({"user": "user\nof the\r\nsite", "ad": " ad"})
    found = select(rows, tmp_path / "run", label="click", keep=2, **TINY, finish="none", quiet=True)
    assert set(found.kept) == {"user\nof the\r\nsite", " ad"}
    text = (tmp_path / "run" / "kept_fields.txt").read_text()
    assert text.splitlines() == ['"user\\nof the\\r\\nsite"', '" ad"']
    assert parse_field_list(text) == found.kept


def test_a_column_of_splits_is_honoured(tmp_path):
    rows = table()
    part = pl.when(pl.col("row") % 6 == 0).then(pl.lit("test")).otherwise(pl.lit("train")).alias("fold")
    found = select(
        rows.with_columns(part).drop("row"), tmp_path / "run", label="click", split="fold", keep=2, **TINY,
        finish="none", quiet=True,
    )  # fmt: skip
    told = answer(found)["periods"]
    assert found.kept == ("user", "ad")
    assert told["test"] == {"rows": 300, "days": ["test", "test"]}
    assert sum(told[name]["rows"] for name in ("early", "search", "valid")) == 1500


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"keep": 2, "search_steps": 49}, "at least 50 steps"),
        ({"search_steps": 10}, "at least 50 steps"),
        ({"keep": 2, "options": {"alpha": "x"}}, "alpha must be a number, found 'x'"),
        ({"keep": 2, "options": {"rescale": "x"}}, "rescale must be"),
        ({"keep": 2, "method": "lpfs", "options": {"alpha": 1.0}}, "has no alpha"),
        ({"keep": 2, "method": "permutation", "options": {"repeats": 0}}, "repeats must be"),
        ({"method": "permutation"}, "say keep=K"),
        ({"keep": 8}, "between 1 and the 7 fields"),
        ({"keep": 30, "level": "cross", "model_options": {}}, "between 1 and the 21 fields"),
        ({"keep": 2, "model": "dlrm", "model_options": {}, "must_keep": ("age",)}, "no field 'age'"),
        ({"keep": 2, "must_drop": ("usr",)}, "did you mean 'user'"),
        ({"keep": 1, "must_drop": NAMES}, "nothing is left"),
        ({"keep": 2, "optimizer": "adamw"}, "optimizer must be one of"),
        ({"keep": 2, "precision": "half"}, "precision must be one of"),
        ({"keep": 2, "lr": -1.0}, "lr must be a number > 0"),
        ({"keep": 2, "batch_size": 0}, "batch_size must be"),
        ({"keep": 2, "model": "mpl"}, "no model 'mpl'"),
        ({"keep": 2, "model": "deepfm", "method": "group_lasso"}, "group_lasso judges a field by its columns"),
        ({"keep": 2, "method": "autofis"}, "autofis chooses crosses of fields"),
        ({"budget": 1.0}, "give costs="),
        ({"budget": 0.01, "costs": "complexity"}, "even the cheapest field costs"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(log, tmp_path, given, message):
    with pytest.raises(InputError, match=message):
        select(log, tmp_path / "run", **{**TINY, **given}, quiet=True)
    assert not [each for each in (tmp_path / "run").glob("*") if each.name != "config.json"]


def test_rows_without_a_label_are_refused(log, tmp_path):
    unlabelled = known_truth(tmp_path / "log", settings={"unlabelled": True})
    with pytest.raises(DataError, match="without a label"):
        select(unlabelled, tmp_path / "run", keep=2, **TINY, quiet=True)
    model = make_model("mlp", log.schema, **SMALL)
    with pytest.raises(InputError, match="have no label 'click'"):
        lpfs.evaluate(model, unlabelled.stream(64))


def test_rows_of_one_class_are_refused(tmp_path):
    rows = table().with_columns(click=pl.when(pl.col("row") < 1500).then(pl.col("click")).otherwise(0))
    with pytest.raises(InputError, match=r"the test rows \(300\) hold one class only \(0 positive\)"):
        select(rows, tmp_path / "run", label="click", keep=1, prepare={"parts": 6, "shuffle": False}, quiet=True)
    with pytest.raises(FieldError, match="did you mean 'click'"):
        select(rows, tmp_path / "two", label="clik", keep=1, quiet=True)
