"""The curve of select: the chain of sets, the recommended number of fields, the check of the allowance, and retries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lpfs._console import Console
from lpfs._fileio import read_json
from lpfs.data.batch import RowBlock
from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.methods.target import SelectionTarget
from lpfs.models import make_model
from lpfs.pipeline import (
    allowance as allowance_module,
    curve as curve_module,
    plan as plan_module,
    select as select_module,
    stages,
)
from lpfs.pipeline.allowance import SMALLEST, Allowance, next_size
from lpfs.pipeline.curve import (
    CurveStage,
    FieldCurve,
    JudgedRows,
    Network,
    _sample_negatives,
    _share,
    _similar_pairs,
    chain_sets,
    count_evaluations,
    eliminate,
    find_substitutes,
    make_networks,
    recommend,
)
from lpfs.pipeline.plan import build_plan
from lpfs.pipeline.select import select
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.stages import RowScores
from lpfs.schema import Field, Schema
from lpfs.train import fit as fit_module
from lpfs.train.evaluate import Predictions
from lpfs.train.intervals import PairedDifference
from tests.helpers.commands import run  # noqa: F401
from tests.helpers.known_truth import FIELDS, NOISE, STEPS, STRONG, known_truth

NAMES = tuple(field.name for field in FIELDS)
ROWS = 6000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("log") / "log", rows=ROWS)


@pytest.fixture(scope="module")
def outcome(log, tmp_path_factory):
    """Without a target: the curve decides how many fields are kept."""
    return select(log, tmp_path_factory.mktemp("curve") / "run", **STEPS, quiet=True)


def additive(values, shared=(), rows=64, noise=0.0):
    """Return losses of subsets: a field saves its value; of ``shared`` fields only the first one present does."""
    values, extra = np.array(values, float), noise * np.random.default_rng(0).normal(size=rows)

    def losses(subsets):
        saved = subsets @ np.where(np.isin(np.arange(len(values)), shared), 0.0, values)
        saved = saved + (subsets[:, list(shared)].any(1) * values[shared[0]] if len(shared) else 0.0)
        return 10.0 - saved[:, None] * (1 + extra)

    return losses


# ------------------------------------------------------------------------------------------------ the chain


def test_elimination_removes_the_weakest_first_and_passes_through_the_kept_set():
    values = [3.0, 0.1, 2.0, 0.2, 1.0]
    assert eliminate(additive(values), 5, [range(5)]) == [1, 3, 4, 2, 0]
    order = eliminate(additive(values), 5, [[0, 4], [1, 2, 3]])
    assert order == [4, 0, 1, 3, 2]
    sets = chain_sets(order)
    assert sets.sum(1).tolist() == [5, 4, 3, 2, 1, 0]
    assert sets[2].nonzero()[0].tolist() == [1, 2, 3]
    assert (sets[:-1] >= sets[1:]).all()


def test_two_copies_of_a_column_are_not_removed_together():
    """Above 50 fields a quarter is removed at once, but never all copies of a strong column."""
    values = np.full(80, 0.01)
    values[[10, 20]] = 5.0
    order = eliminate(additive(values, shared=(10, 20), noise=0.01), 80, [range(80)])
    assert sorted(order) == list(range(80))
    assert order[-1] in (10, 20)
    calls = []
    losses = additive(values)
    eliminate(lambda subsets: calls.append(len(subsets)) or losses(subsets), 80, [range(80)])
    assert sum(calls) < 1.2 * count_evaluations(80) + 200 < 80 * 81 / 2


def test_equal_fields_are_removed_by_price():
    losses = additive([1.0, 1.0, 1.0, 5.0], noise=0.1)
    assert eliminate(losses, 4, [range(4)], [1.0, 9.0, 2.0, 99.0])[0] == 1


# ------------------------------------------------------------------------------------------------ recommended K


def difference(value, error=0.001):
    return PairedDifference(value, error)


def test_recommended_number_is_the_last_before_the_first_failure():
    losses = [difference(value) for value in (0.0, 0.0, 0.004, 0.0, 0.02, 0.4)]
    assert recommend(losses, 0.01, [0.0] * 6) == 2
    assert recommend(losses, 0.004, [0.0] * 6) == 4  # the set of 2 would pass, but 3 fields fail
    assert recommend(losses, 0.001, [0.0] * 6) is None
    assert recommend(losses, 1.0, [0.0] * 6) == 1
    assert recommend(losses, 1.0, [0.0] * 6, minimum=3) == 3
    assert recommend([*losses[:1], difference(math.nan), *losses[2:]], 0.01, [0.0] * 6) is None


def test_sets_that_the_validation_rows_would_refuse_are_not_recommended():
    losses = [difference(value, 0.0) for value in (0.0, 0.0, 0.008, 0.009, 0.3)]
    assert recommend(losses, 0.01, [0.0] * 5) == 1
    assert recommend(losses, 0.01, [0.004] * 5) == 3
    assert recommend(losses, 0.01, [0.1] * 5) == 1  # these rows cannot decide anything, so they do not count


def test_recommended_fields_of_a_log_with_known_truth(outcome):
    curve = outcome.record["curve"]
    last = [point["removed"] for point in curve["points"] if point["fields"] < 2]
    assert set(last) == set(STRONG)
    assert 2 <= curve["recommended"] <= len(NAMES) - len(NOISE)
    assert set(STRONG) <= set(outcome.kept)
    assert outcome.checks[0]["fields"] == curve["recommended"]
    assert outcome.checks[-1]["fields"] == len(outcome.kept)
    assert outcome.record["configuration"]["keep"] is None


# ------------------------------------------------------------------------------------------------ the record


def test_points_of_the_curve(outcome):
    curve = outcome.record["curve"]
    points = curve["points"]
    assert [point["fields"] for point in points] == list(range(len(NAMES), -1, -1))
    assert points[0]["removed"] is None
    assert sorted(point["removed"] for point in points[1:]) == sorted(NAMES)
    assert points[0]["loss"] == points[0]["low"] == points[0]["high"] == 0.0
    assert points[-1]["auc"] == pytest.approx(0.5)
    for point in points:
        assert point["low"] <= point["loss"] <= point["high"]
        assert point["auc"] + point["loss"] == pytest.approx(points[0]["auc"])
    removed = [point["removed"] for point in points[1:]]
    assert set(removed[len(NAMES) - len(curve["kept"]) :]) == set(curve["kept"]) == set(outcome.kept)
    assert curve["networks"] == 5
    assert curve["positives"] < curve["rows"]
    assert outcome.record["seconds"]["curve"] > 0


def test_values_of_fields(outcome):
    fields = outcome.record["fields"]
    for name in NAMES:
        kept = name in outcome.kept
        assert (fields[name]["loss_if_removed_from_kept"] is None) != kept
        assert (fields[name]["gain_if_added_to_kept"] is None) == kept
        assert len(fields[name]["substitutes"]) <= 3
        assert all(0 < entry["share"] <= 1 for entry in fields[name]["substitutes"])
    for name in STRONG:
        assert fields[name]["loss_if_removed"]["low"] > 0.01
        assert fields[name]["auc_alone"] > 0.6
    for name in NOISE:
        assert fields[name]["loss_if_removed"]["low"] < 0.005
        assert abs(fields[name]["auc_alone"] - 0.5) < 0.06
    assert outcome.record["groups"] == []


@pytest.mark.long
def test_curve_passes_through_the_kept_set_of_any_target(log, tmp_path):
    done = select(log, tmp_path / "run", keep=3, must_keep=["site"], **STEPS, quiet=True, finish="none")
    curve = done.record["curve"]
    assert curve["recommended"] is None
    assert "site" in curve["kept"]
    assert {point["removed"] for point in curve["points"][-3:]} == set(done.kept)
    assert curve["points"][-1]["removed"] == "site"  # what must be kept is removed last
    assert len(done.checks) == 1


def test_substitutes_and_groups():
    """0 and 1 are copies, 2 is different; each copy covers the whole of the other one."""
    names = ("a", "copy", "other")
    substitutes, groups = find_substitutes(additive([1.0, 1.0, 2.0], shared=(0, 1), noise=0.1), names)
    assert groups == [["a", "copy"]]
    assert substitutes["a"][0] == {"name": "copy", "share": 1.0}
    assert substitutes["copy"][0]["name"] == "a"
    assert substitutes["other"] == []


def test_a_share_that_noise_explains_is_none():
    """The worth is beyond noise in all three; what the other field takes of it is not, in the second."""
    rng = np.random.default_rng(0)
    worth, noise = 0.1 + rng.normal(size=4000) * 0.5, rng.normal(size=4000)
    rest = worth - 0.02 - (noise - noise.mean())
    assert _share(0.5 * worth, worth) == pytest.approx(0.5)
    assert rest.mean() < 0.9 * worth.mean()
    assert _share(rest, worth) == 0.0
    assert _share(-worth, worth) == 1.0


def test_pairs_that_are_examined_have_two_fields():
    """Six fields, of which each is compared with the four that are most similar to it."""
    gains = np.random.default_rng(0).normal(size=(6, 100))
    gains[5] = gains[0] + 0.1 * gains[5]
    pairs = _similar_pairs(gains)
    assert (0, 5) in pairs
    assert all(first < second for first, second in pairs)
    assert all(sum(part in pair for pair in pairs) >= 4 for part in range(6))


# ----------------------------------------------------------------------------------------- a curve without training


class Effects:
    """A network whose logit is the sum of the effects of the fields that are present, times their ids (-1 or 1)."""

    def __init__(self, effects):
        self.effects, self.trained = np.array(effects, np.float32), []
        self.model = SimpleNamespace(logits_of_rows=self.logits_of_rows)

    def logits_of_rows(self, rows, subsets):
        return subsets @ torch.from_numpy(self.effects[:, None] * rows.ids.T.astype(np.float32))

    def train(self, plan, phase, steps, *, final_if_due):
        assert not final_if_due  # these tables are small
        self.trained.append((phase, steps))


def judged_rows(effects, count, seed, positives=None):
    """Return rows of ids -1 and 1 whose labels follow from the effects, or of which the first ones are positive."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([-1, 1], size=(count, len(effects)))
    labels = (rng.random(count) < 1 / (1 + np.exp(-ids @ np.array(effects)))).astype(np.float64)
    labels = labels if positives is None else (np.arange(count) < positives).astype(np.float64)
    block = RowBlock(ids, np.zeros((count, 0), np.float32), labels[:, None].astype(np.float32))
    return JudgedRows(block, labels, np.ones(count), np.zeros(count, np.int64))


EFFECTS = (2.0, 0.0, 1.0, 0.5)


@pytest.fixture
def make_curve(monkeypatch):
    """Return a function that returns the curve of fields a, b, c, d with known effects, from rows of both halves."""

    def make(rows=2000, curve=FieldCurve, must_keep=(), positives=None):
        halves = [judged_rows(EFFECTS, rows, seed, positives) for seed in (0, 1)]
        monkeypatch.setattr(curve_module, "make_networks", lambda plan, model: ([Effects(EFFECTS)], 50, *halves))
        plan = SimpleNamespace(
            target=SelectionTarget(keep=3, must_keep=must_keep),
            steps=SimpleNamespace(batch_size=64, search=1000, separate_gate_rows=False, gate_batch_size=512),
            device="cpu",
            has_large_tables=False,
        )
        return curve(plan, SimpleNamespace(sites=lambda: dict.fromkeys("abcd")))

    return make


def test_evaluations_are_in_proportion_to_the_rows_of_a_search(make_curve):
    """1.5 for each of 64,000 rows: 40 % for the chain of 10 sets, 40 % for 20 points, 20 % for pairs."""
    curve = make_curve(rows=20_000)
    assert len(curve.chain_rows) == pytest.approx(0.4 * 96_000 / 10, abs=2)
    assert len(curve.rows) == pytest.approx(0.4 * 96_000 / 20, abs=2)
    assert len(curve.pair_rows) == pytest.approx(500, abs=2)  # never fewer


def test_seconds_of_a_curve_include_the_training_of_its_networks(make_curve, monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(curve_module.time, "perf_counter", lambda: next(clock))
    assert make_curve().seconds == 2.5


@pytest.mark.parametrize(("positives", "expected"), [(19, "19 "), (1981, "19 "), (20, None), (1980, None)])
def test_rows_need_both_classes_to_judge(make_curve, positives, expected):
    problems = [
        make_curve(rows=2000, positives=positives).problem(),
        make_curve(rows=2000, positives=positives, curve=CurveStage).problem,
    ]
    assert problems[0] == problems[1]
    assert (problems[0] or "").startswith(expected or "")
    assert (problems[0] is None) == (expected is None)


def test_many_fields_leave_enough_rows_of_both_classes_for_every_network(tmp_path):
    """With 70 fields few evaluations are left for each set, and the rows are shared by five networks."""
    count, rng = 70, np.random.default_rng(0)
    schema = Schema(tuple(Field(f"f{n}", cardinality=6) for n in range(count)), label="click")
    with DatasetWriter(tmp_path / "log", schema, fingerprint="wide", settings={"options": {"shuffle": True}}) as writer:
        for part in range(20):
            ids = {field.name: rng.integers(2, 6, 600) for field in schema}
            writer.day(f"part_{part:02d}").append(ids=ids, labels={"click": rng.random(600) < 0.14})
    settings = Settings(
        keep=3, device="cpu", model_options={"dim": 2, "hidden": (4,)}, pretrain_steps=10, search_steps=60
    )
    plan = build_plan(settings, Dataset(tmp_path / "log"), tmp_path / "run", Console(quiet=True))
    curve = FieldCurve(plan, stages.new_model(plan, 0))
    assert len(curve.networks) == 5
    assert curve.problem() is None


def test_no_network_is_trained_if_the_rows_cannot_judge(make_curve):
    curve = make_curve(rows=2000, positives=19)
    assert curve.problem() is not None
    assert curve.networks[0].trained == []


def test_sets_are_judged_again_after_further_training(make_curve):
    curve, every = make_curve(), np.ones((1, 4), bool)
    before = curve.judge(every)
    assert np.array_equal(curve.judge(every), before)
    curve.networks[0].effects *= 2
    curve.train_on_sets(every)
    assert np.array_equal(curve.judge(every), 2 * before)
    assert curve.networks[0].trained == [(0, 50), (1, 40)]  # four fifths of the steps of the first phase


@pytest.mark.parametrize(("must_keep", "count"), [((), 1), (("b", "d"), 2)])
def test_fields_that_must_be_kept_are_always_recommended(make_curve, must_keep, count):
    curve = make_curve(must_keep=must_keep)
    assert curve.recommend(Allowance(1.0, "given", 0.0, 500)) == count
    assert {curve.names[part] for part in curve.order[-count:]} == set(must_keep or "a")


def test_points_of_known_effects(make_curve):
    points = make_curve().to_record(["a", "c"], None, 0.01)["curve"]["points"]
    assert [point["removed"] for point in points] == [None, "b", "d", "c", "a"]
    assert points[-1]["auc"] == pytest.approx(0.5)
    for point in points:
        assert point["auc"] == pytest.approx(points[0]["auc"] - point["loss"])


def test_every_phase_of_a_network_has_its_seed_and_directory(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(curve_module, "fit", lambda *arguments, **options: given.append((arguments[1], options)))
    log, settings = known_truth(tmp_path / "log"), Settings(keep=3, seed=7, device="cpu")
    plan = build_plan(settings, log, tmp_path / "run", Console(quiet=True))
    for phase in (0, 2):
        Network(None, None, lambda phase: f"rows of phase {phase}", "network-1").train(plan, phase, 30)
    assert [batches for batches, _ in given] == ["rows of phase 0", "rows of phase 2"]
    assert [(options["config"].seed, options["config"].steps) for _, options in given] == [(7, 30), (9, 30)]
    assert [options["folder"].name for _, options in given] == ["network-1-0", "network-1-2"]


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize(("is_saved", "lr_factor"), [(False, 2.0), (True, 4.0)])
def test_network_of_a_log_reads_its_rows_once(tmp_path, is_saved, lr_factor):
    """The phases share the rows in proportion to their steps. A saved model is not fine-tuned: it may know the rows."""
    log = known_truth(tmp_path / "log", rows=6000)
    plan = build_plan(Settings(keep=3, batch_size=16, device="cpu"), log, tmp_path / "run", Console(quiet=True))
    plan = replace(plan, steps=replace(plan.steps, shuffle=False), saved_model="saved" if is_saved else None)
    model = make_model("mlp", log.schema, dim=2, hidden=(4,))
    (network,), steps, chain, points = make_networks(plan, model)
    rows = plan.splits.early.rows if is_saved else 0.55 * plan.splits.search.rows
    read = [sum(map(len, network.batches(phase))) for phase in range(3)]
    assert read == pytest.approx([rows * share / 2.2 for share in (1.0, 0.8, 0.4)], abs=2)
    assert steps == read[0] // (256 if is_saved else 16)
    usual = plan.optimizer(model).param_groups[0]["lr"]
    assert network.optimizer.param_groups[0]["lr"] == pytest.approx(lr_factor * usual)
    assert len(chain) + len(points) <= plan.splits.search.rows


def test_sampled_negatives_keep_the_logloss():
    labels = (np.arange(1000) % 50 == 0).astype(np.float64)
    block = RowBlock(np.zeros((1000, 1), np.int32), np.zeros((1000, 0), np.float32), labels[:, None].astype(np.float32))
    rows = JudgedRows(block, labels, np.ones(1000), np.zeros(1000, np.int64))
    sampled = _sample_negatives(rows)
    assert sampled.positives == 20
    assert len(sampled) == 100
    assert sampled.weights.sum() == pytest.approx(1000)
    assert len(sampled.sample(50)) == 50
    assert sampled.sample(50).positives == 10


@pytest.mark.long
@pytest.mark.parametrize("steps", [400, 30])
def test_networks_never_see_the_rows_that_they_judge(log, tmp_path, monkeypatch, steps):
    """A row that is judged is not in any batch of its network: its ids, numbers and label together are unique."""
    seen = []

    class Recording(curve_module.SubsetModel):
        def forward(self, batch):
            if self.training:
                self.__dict__.setdefault("rows_seen", set()).update(keys(batch.dense, batch.ids))
            return super().forward(batch)

    def keys(dense, ids):
        return {(*map(float, numbers), *map(int, values)) for numbers, values in zip(dense, ids, strict=True)}

    def record(self, *arguments):
        values = to_record(self, *arguments)
        for rows in (self.chain_rows, self.rows):
            for number, network in enumerate(self.networks):
                index = np.flatnonzero(rows.folds == number)
                part = rows.rows.take(index)
                seen.append((len(network.model.rows_seen), len(index)))
                assert not network.model.rows_seen & keys(part.dense, part.ids)
        return values

    to_record = curve_module.FieldCurve.to_record
    monkeypatch.setattr(curve_module, "SubsetModel", Recording)
    monkeypatch.setattr(curve_module.FieldCurve, "to_record", record)
    if steps == 30:  # one network
        monkeypatch.setattr(curve_module, "MIN_PASSES", 100.0)
    select(log, tmp_path / "run", keep=3, **{**STEPS, "search_steps": max(60, steps)}, quiet=True, finish="none")
    assert len(seen) == (2 if steps == 30 else 10)
    assert all(min(counts) > 50 for counts in seen)


# ------------------------------------------------------------------------------------------------ allowance


def scores(logits, labels):
    predicted = Predictions(np.array(logits, np.float32)[:, None], np.array(labels, np.float32)[:, None], None, 0)
    return RowScores(predicted, ["click"])


def allowance_of(full, pretrained, **settings):
    return Allowance.of_run(SimpleNamespace(settings=Settings(**settings)), full, pretrained)


def test_default_allowance_is_one_percent_of_the_gain_if_the_rows_can_decide_it():
    rng = np.random.default_rng(0)
    labels = np.arange(4000) % 2
    logits = labels + rng.normal(size=4000)
    full, near, far = (scores(logits + noise * rng.normal(size=4000), labels) for noise in (0.0, 0.01, 1.0))
    allowance = allowance_of(full, near)
    assert allowance.allowed == pytest.approx(0.01 * (full["auc"] - 0.5))
    assert (allowance.positives, allowance.finds_count) == (2000, True)
    assert all(text in allowance.describe() for text in (f"{allowance.allowed:.4f}", "1 %"))
    coarse = allowance_of(full, far)
    assert coarse.because == SMALLEST
    assert coarse.allowed == pytest.approx((1.645 + 0.842) * coarse.se_training)
    assert coarse.allowed > allowance.allowed
    given = allowance_of(full, near, max_auc_loss=0.02)
    assert (given.allowed, given.because) == (0.02, "given")


def test_fields_that_predict_worse_than_chance_have_no_gain_to_lose():
    labels = np.arange(4000) % 2
    wrong = scores(-labels, labels)
    assert wrong["auc"] == 0.0
    assert allowance_of(wrong, wrong).allowed == 0.0


def test_allowance_holds_up_to_its_limit():
    rng = np.random.default_rng(0)
    labels = np.arange(500) % 2
    full, kept = (scores(labels + rng.normal(size=500), labels) for _ in range(2))
    upper = full.loss_to(kept).upper
    for allowed, holds in ((upper, True), (upper - 1e-9, False)):
        check = Allowance(allowed, "given", 0.001, 250).check(full, kept, 3)
        assert (check["fields"], check["upper"], check["holds"]) == (3, upper, holds)
        assert (check["rows"], check["positives"]) == (500, 250)


def test_next_size_grows_by_a_quarter():
    assert [next_size(size, 100) for size in (1, 4, 5, 40, 99, 100)] == [2, 5, 7, 50, 100, 100]


@pytest.mark.long
def test_searches_again_until_the_allowance_holds(log, tmp_path, monkeypatch):
    """The first two checks fail: the fields grow, each search has its own directory, the last result is returned."""
    sizes = []

    def check(self, *arguments):
        fields = arguments[-1]
        sizes.append(fields)
        return {"fields": fields, "loss": 0.1, "upper": 0.2, "rows": 9, "positives": 3, "holds": len(sizes) == 3}

    monkeypatch.setattr(Allowance, "check", check)
    monkeypatch.setattr(curve_module.FieldCurve, "recommend", lambda self, allowance: 2)
    done = select(log, tmp_path / "run", **STEPS, quiet=True, finish="none")
    assert sizes == [2, 3, 4] == [entry["fields"] for entry in done.checks]
    assert [entry["holds"] for entry in done.checks] == [False, False, True]
    assert len(done.kept) == 4
    assert {path.name for path in done.folder.glob("try-*")} == {"try-2", "try-3"}
    assert done.record["verdict"]["checks"] == [dict(entry) for entry in done.checks]
    again = select(log, tmp_path / "run", **STEPS, quiet=True, finish="none", replace=True)
    assert sizes[3:] == [2, 3, 4, 5, 7]  # no check holds: five searches at most
    assert not any(entry["holds"] for entry in again.checks)


def test_a_given_number_of_fields_is_checked_once(log, tmp_path, monkeypatch):
    monkeypatch.setattr(allowance_module, "GAIN_SHARE", 0.0)
    monkeypatch.setattr(allowance_module, "Z_POWER", -10.0)
    done = select(log, tmp_path / "run", keep=1, curve=False, **STEPS, quiet=True, finish="none")
    assert len(done.checks) == 1
    assert not done.checks[0]["holds"]
    assert len(done.kept) == 1
    assert done.curve is None


@pytest.mark.long
@pytest.mark.parametrize("method", ["permutation", "lpfs++"])
def test_any_method_searches_without_a_number_of_fields(log, tmp_path, method):
    done = select(log, tmp_path / "run", method=method, must_keep=["slot"], **STEPS, quiet=True, finish="none")
    assert {"slot", *STRONG} <= set(done.kept)
    assert done.record["curve"]["recommended"] is not None


@pytest.mark.long
@pytest.mark.parametrize(
    "model", ["dlrm_cross", "user_item", *(pytest.param(name, marks=pytest.mark.long) for name in ("dlrm", "deepfm"))]
)
def test_models_with_other_parts(log, tmp_path, model):
    options = {"dim": 4, "hidden": [8]}
    steps = {**STEPS, "model_options": options, "pretrain_steps": 60, "search_steps": 60}
    done = select(log, tmp_path / "run", keep=4, model=model, **steps, quiet=True, finish="none")
    points = done.record["curve"]["points"]
    assert points[0]["fields"] == len(done.selection.names)
    assert {point["removed"] for point in points[-4:]} == set(done.kept)


def test_rows_without_enough_positives_leave_the_curve_out(tmp_path, capfd):
    log = known_truth(tmp_path / "log", rows=1500, label=lambda row: float(row % 40 == 0))
    done = select(log, tmp_path / "run", keep=3, **STEPS, finish="none", force=True)
    assert done.curve is None
    assert "curve" not in done.record
    assert "the curve is left out: " in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------ resume, command line


@pytest.mark.long
def test_killed_run_resumes_with_the_same_curve(log, outcome, tmp_path, monkeypatch):
    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(select_module, "_search", killed)
        with pytest.raises(KeyboardInterrupt):
            select(log, tmp_path / "run", **STEPS, quiet=True)
    done = select(log, tmp_path / "run", **STEPS, quiet=True, resume=True)
    first, second = ({**record["curve"], "seconds": 0} for record in (outcome.record, done.record))
    assert first == second
    assert done.kept == outcome.kept
    assert done.record["verdict"]["checks"] == outcome.record["verdict"]["checks"]
    assert done.record["fields"] == outcome.record["fields"]


@pytest.mark.long
@pytest.mark.parametrize("keep", [None, 3])
@pytest.mark.parametrize("stage", ["_search", "_write_results"])
def test_run_with_large_tables_writes_less_and_ends_the_same(log, outcome, tmp_path, monkeypatch, keep, stage):
    """Models are mapped from checkpoints, short stages are not saved; the results are equal, also after a kill."""

    def killed(*arguments):
        raise KeyboardInterrupt

    settings = {**STEPS, "keep": keep, "quiet": True}
    usual = outcome if keep is None else select(log, tmp_path / "usual", **settings)
    monkeypatch.setattr(plan_module, "LARGE_TABLES", 0)
    monkeypatch.setattr(fit_module, "SECONDS_BETWEEN_INTERRUPTIONS", 1e12)
    with monkeypatch.context() as patch:
        patch.setattr(select_module, stage, killed)
        with pytest.raises(KeyboardInterrupt):
            select(log, tmp_path / "run", **settings)
    saved = {path.parent.parent.name for path in (tmp_path / "run").glob("**/checkpoints/step-*")}
    assert {"pretrain", "all_fields", f"network-0-{int(keep is None)}"} <= saved
    assert not saved & {"retrained", "hot_start", "network-0-2", f"network-0-{int(keep is not None)}"}
    done = select(log, tmp_path / "run", **settings, resume=True)
    for key in ("kept", "gates", "metrics", "validation", "fields", "hot_start", "model"):
        assert usual.record[key] == done.record[key]
    first, second = ({**record["curve"], "seconds": 0} for record in (usual.record, done.record))
    assert first == second
    assert all(torch.equal(value, done.model.state_dict()[name]) for name, value in usual.model.state_dict().items())


@pytest.mark.long
def test_a_given_number_of_fields_is_found_the_same_without_the_curve(log, tmp_path):
    steps = {**STEPS, "pretrain_steps": 60, "search_steps": 60}
    records = [
        select(log, tmp_path / str(curve), keep=3, curve=curve, **steps, quiet=True).record for curve in (True, False)
    ]
    for key in ("kept", "gates", "metrics", "validation", "hot_start"):
        assert records[0][key] == records[1][key]


@pytest.mark.long
def test_no_curve_on_the_command_line(log, tmp_path, run):  # noqa: F811
    words = ["--pretrain-steps", 60, "--search-steps", 60, "--model-option", "dim=4", "--finish", "none", "--json"]
    code, out, _ = run("select", log.path, "--out", tmp_path / "run", "--no-curve", "--keep", 3, *words)
    assert code == 0
    assert "curve" not in json.loads(out)
    assert "curve" not in read_json(tmp_path / "run" / "selection.json", allow_nan=True)
    assert read_json(tmp_path / "run" / "config.json")["curve"] is False
    assert not (tmp_path / "run" / "curve").exists()
    code, out, err = run("select", log.path, "--out", tmp_path / "other", "--max-auc-loss", 0.3, *words)
    record = json.loads(out)
    assert code == 0
    assert record["curve"]["allowed"] == 0.3
    assert len(record["kept"]) == record["curve"]["recommended"] < 4
    assert "fields are recommended" in err
