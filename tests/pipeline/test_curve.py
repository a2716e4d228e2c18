"""The curve of select: the chain of sets, the recommended number of fields, the check of the allowance, and retries."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from lpfs._fileio import read_json
from lpfs.data.batch import RowBlock
from lpfs.pipeline import allowance as allowance_module, curve as curve_module, select as select_module
from lpfs.pipeline.allowance import Allowance, next_size
from lpfs.pipeline.curve import (
    JudgedRows,
    _sample_negatives,
    chain_sets,
    count_evaluations,
    eliminate,
    find_substitutes,
    recommend,
)
from lpfs.pipeline.select import select
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
    assert curve["networks"] == curve["folds"] == 5
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


# ------------------------------------------------------------------------------------------------ rows


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
