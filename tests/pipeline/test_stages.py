"""The stages of a run: which rows they read, what they train and what they leave unchanged."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lpfs
from lpfs._console import Console
from lpfs.errors import InputError, StateError
from lpfs.methods.registry import METHODS, make_method
from lpfs.models import make_model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import build_plan
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.stages import (
    SHRINK_FACTOR,
    AucHistory,
    evaluate_split,
    hot_start,
    initial_model,
    model_size,
    new_model,
    reinitialized,
    scaled_learning_rate,
    search_streams,
    serving_speed,
    shrink_and_perturb,
    train,
    verification_batch,
)
from lpfs.schema import Schema
from lpfs.serialization import SavedModel
from lpfs.train.fit import fit
from tests.helpers.known_truth import FIELDS, TINY, known_truth

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return known_truth(tmp_path_factory.mktemp("stages") / "log", rows=1800)


@pytest.fixture
def plan(log, tmp_path):
    return build_plan(Settings(keep=3, device="cpu", **TINY), log, tmp_path / "run", Console(quiet=True))


@pytest.fixture
def pruned(plan):
    """A trained model in place of a pruned one."""
    torch.manual_seed(5)
    model = make_model("mlp", plan.schema, **TINY["model_options"])
    optimizer = plan.optimizer(model)
    fit(model, plan.stream(plan.splits.early, model.reads.names, train=True), optimizer, steps=100, quiet=True)
    return SimpleNamespace(model=model, optimizer=optimizer)


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal_weights(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


class Rows:
    """Rows of a split that return their name and the batch size."""

    def __init__(self, name):
        self.name = name

    def stream(self, batch_size, **_):
        return self.name, batch_size


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("lpfs++", (("early", 64), ("search", 512))),
        ("stg", (("early", 64), ("search", 512))),
        ("gbdt", (("train", 64), None)),
    ],
)
def test_rows_of_a_search_depend_on_the_method_if_they_repeat(method, expected):
    plan = SimpleNamespace(
        splits=SimpleNamespace(**{name: Rows(name) for name in ("early", "search", "train")}),
        steps=SimpleNamespace(separate_gate_rows=True, search=9, batch_size=64, gate_batch_size=512),
        device="cpu",
        method=make_method(method),
        stream=lambda rows, fields, train, seed: (rows.name, train),
    )
    assert search_streams(plan, ("a",), 0) == expected
    plan.steps.separate_gate_rows = False
    assert search_streams(plan, ("a",), 0) == (("search", True), None)


def test_learning_rate_is_restored_after_an_error():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)

    def fail():
        with scaled_learning_rate(optimizer, 3.0):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.3)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_search_starts_from_a_copy_of_the_saved_model(plan, pruned, tmp_path):
    plan = replace(plan, saved_model=SavedModel(pruned.model, {}, tmp_path))
    before = weights_of(pruned.model)
    model, _ = initial_model(plan, seed=0)
    assert equal_weights(weights_of(model), before)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert equal_weights(weights_of(initial_model(plan, seed=1)[0]), before)


def test_serving_speed_is_measured_for_each_model(plan, pruned):
    speeds = serving_speed(plan, {"all_fields": pruned.model, "kept": pruned.model}, repeats=1)
    assert speeds.keys() == {"all_fields", "kept"}
    for speed in speeds.values():
        assert 0 < speed["rows_per_second_low"] <= speed["rows_per_second"] <= speed["rows_per_second_high"]


def record_training(monkeypatch):
    """Record the rows, the weights and the optimizer that the hot start trains."""
    calls = []

    def recorded(plan, model, optimizer, rows, *rest, **options):
        calls.append((rows, weights_of(model), copy.deepcopy(optimizer.state_dict())))
        return train(plan, model, optimizer, rows, *rest, **options)

    monkeypatch.setattr(stages, "train", recorded)
    return calls


def test_hot_start_continues_with_a_copy_and_the_state_of_the_optimizer(plan, pruned, monkeypatch):
    calls, before, state = record_training(monkeypatch), weights_of(pruned.model), str(pruned.optimizer.state_dict())
    model, history = hot_start(plan, pruned)
    rows, initial, optimizer_state = calls[0]
    assert equal_weights(initial, before)
    assert str(optimizer_state) == state
    assert equal_weights(weights_of(pruned.model), before)
    assert rows.span == plan.splits.search.span  # the latest rows, because these are ordered in time
    assert history.shrink_factor == 1.0
    assert history.points[0] == (0, evaluate_split(plan, pruned.model, plan.splits.valid).auc)
    assert evaluate_split(plan, model, plan.splits.valid).auc == history.best[1] >= history.points[0][1]


def test_hot_start_needs_the_optimizer(plan, pruned):
    with pytest.raises(StateError, match=r"prune\(…, optimizer=optimizer\)"):
        hot_start(plan, SimpleNamespace(model=pruned.model, optimizer=None))


def test_hot_start_uses_all_training_rows_of_a_random_split(plan, pruned, monkeypatch):
    monkeypatch.setattr("lpfs.pipeline.splits.is_shuffled", lambda rows: True)
    calls = record_training(monkeypatch)
    hot_start(plan, pruned)
    assert calls[0][0].span == plan.splits.train.span


def test_model_that_memorized_its_rows_is_shrunk(plan, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)
    calls, before = record_training(monkeypatch), weights_of(pruned.model)
    model, history = hot_start(plan, pruned)
    rows, initial, _ = calls[0]
    untrained = weights_of(reinitialized(plan, pruned.model))
    for name, weight in before.items():
        expected = SHRINK_FACTOR * weight + (1 - SHRINK_FACTOR) * untrained[name]
        torch.testing.assert_close(initial[name], expected)
    assert rows.span == plan.splits.train.span
    assert history.shrink_factor == SHRINK_FACTOR
    assert equal_weights(weights_of(pruned.model), before)
    pruned_auc = evaluate_split(plan, pruned.model, plan.splits.valid).auc
    assert history.points[0] == (0, pruned_auc)
    assert evaluate_split(plan, model, plan.splits.valid).auc == history.best[1] >= pruned_auc


def test_pruned_model_is_returned_if_a_shrunk_one_stays_worse(plan, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)

    def ruined(plan, model):
        model, optimizer = shrink_and_perturb(plan, model)
        with torch.no_grad():
            model.top[-1].weight.mul_(-1000.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-9
        return model, optimizer

    monkeypatch.setattr(stages, "shrink_and_perturb", ruined)
    model, history = hot_start(plan, pruned)
    assert history.best[0] == 0
    assert equal_weights(weights_of(model), weights_of(pruned.model))


def test_log_that_is_read_once_is_never_memorized(plan, pruned, monkeypatch):
    monkeypatch.setattr(stages, "MEMORIZED_AUC_GAP", -1.0)
    plan = replace(plan, steps=replace(plan.steps, shuffle=False))
    assert hot_start(plan, pruned)[1].shrink_factor == 1.0


def test_methods_that_train_a_network_are_captured_as_cuda_graphs():
    assert not make_method("lpfs++", {"noise": 0.1}).cuda_graph  # noise is drawn on the host
    assert not make_method("lpfs", {"gate": "lpfs-noise"}).cuda_graph
    gated = {"lpfs", "lpfs++", "lpfs_paper", "lpfs++_paper"}
    masked = {"shufflegate", "leap", "autofield", "adafs", "optfs", "fscd", "stg", "hard_concrete", "cold_se"}
    masked |= {"variational_dropout", "fairfs", "autofis", "group_lasso", "umec", "lassonet", "subset_elimination"}
    assert {name for name in METHODS if make_method(name).cuda_graph} == gated | masked


def test_run_resumes_with_or_without_cuda_graphs():
    """A captured step computes the same, so a run may be resumed where steps cannot be captured."""
    saved = lpfs.Training(graph=True, lr=0.1).to_json()
    lpfs.Training(graph=False, lr=0.1).check_same(saved)
    with pytest.raises(InputError, match="lr"):
        lpfs.Training(graph=False, lr=0.2).check_same(saved)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return lpfs.simulate(tmp_path_factory.mktemp("graph") / "log", "small", rows=20_000)


@needs_gpu
@pytest.mark.parametrize("method", ["lpfs++", "lpfs"])
@pytest.mark.parametrize("batch_size", [64, 16])  # search rows repeat, and do not
def test_captured_run_is_as_good_as_an_eager_one(tmp_path, simulated, method, batch_size):
    options = {"model_options": {"dim": 4, "hidden": (16,)}, "pretrain_steps": 300, "search_steps": 400}
    options |= {"batch_size": batch_size, "device": "cuda", "quiet": True}
    records = []
    for graph in (None, False):
        out = tmp_path / str(graph)
        record = lpfs.select(simulated, keep=8, method=method, out=out, graph=graph, **options).record
        assert len(record["kept"]) == 8
        assert all(record["gates"][name] == 0.0 for name in record["dropped"])
        assert record["max_logit_change"] <= 1e-4
        records.append(record)
    captured, eager = records
    assert len(set(captured["kept"]) & set(eager["kept"])) >= 6
    for name in ("all_fields", "retrained"):
        assert captured["metrics"][name]["auc"] == pytest.approx(eager["metrics"][name]["auc"], abs=0.02)


@needs_gpu
def test_captured_gates_are_trained_on_the_same_holdout_rows(simulated):
    """Captured and eager gates agree until rounding errors have grown."""
    names = [field.name for field in simulated.schema if field.kind != "multi"]
    gates, forwards = [], []
    for graph in (False, True):
        torch.manual_seed(0)
        model = lpfs.make_model("mlp", simulated.schema.subset(names), dim=4, hidden=(16,)).cuda()
        options = {"fields": names, "device": "cuda", "shuffle": True}
        config = lpfs.Training(quiet=True, graph=graph, lr=0.01)
        stream = simulated.part(0, 12_000).stream(64, seed=1, **options)
        holdout = simulated.part(12_000, 16_030).stream(512, seed=2, **options)  # its last batch is smaller
        valid = simulated.part(16_030, 20_000).stream(4096, **options)
        rows = {"holdout": holdout, "valid": valid}
        selection = lpfs.search(model, stream, penalty=1e-4, steps=60, config=config, **rows)
        gates.append(torch.tensor([selection.gates[name] for name in names]))
        forwards.append(selection.made["forwards"])
    torch.testing.assert_close(*gates, rtol=1e-3, atol=1e-4)
    assert forwards[0] == forwards[1] > 60 * (64 + 450)
    assert len(set(gates[0].tolist())) > len(names) // 2  # gates have changed


def test_rows_that_repeat_are_shuffled_in_a_search():
    options = []
    rows = SimpleNamespace(stream=lambda batch_size, **given: options.append(given))
    plan = SimpleNamespace(
        splits=SimpleNamespace(early=rows, search=rows, train=rows),
        steps=SimpleNamespace(separate_gate_rows=True, search=9, batch_size=64, gate_batch_size=512),
        device="cpu",
        method=make_method("lpfs++"),
    )
    search_streams(plan, ("a",), 3)
    assert [(given["shuffle"], given["seed"], given["fields"]) for given in options] == [
        (True, 3, ("a",)),
        (True, 4, ("a",)),
    ]
    assert [given.get("max_rows") for given in options] == [9 * 64, None]  # the weights may not need all rows


def test_models_are_trained_in_batches_of_the_plan_and_verified_on_the_first_validation_rows(plan, monkeypatch):
    given = {}
    monkeypatch.setattr(stages, "fit", lambda model, stream, optimizer, **options: given.update(stream=stream))
    model = new_model(plan, 0)
    train(plan, model, plan.optimizer(model), plan.splits.early, 10, "pretrain", 0)
    first = next(iter(given["stream"])).ids
    in_order = next(iter(plan.splits.early.stream(plan.steps.batch_size, fields=model.reads.names))).ids
    assert len(first) == len(in_order) == plan.steps.batch_size
    assert not torch.equal(first, in_order)  # rows that repeat are shuffled
    checked = verification_batch(plan, model)
    expected = next(iter(plan.splits.valid.stream(plan.splits.valid.rows, fields=model.reads.names)))
    assert torch.equal(checked.ids, expected.ids)
    assert torch.equal(checked.labels, expected.labels)


def test_only_a_history_evaluates_the_initial_state(plan, monkeypatch):
    """A hot start can end where it starts; other trainings never keep their initial state."""
    given = []
    monkeypatch.setattr(stages, "fit", lambda model, stream, optimizer, **options: given.append(options))
    model, history = new_model(plan, 0), AucHistory()
    for callback in (history, None):
        train(plan, model, plan.optimizer(model), plan.splits.early, 10, "hot_start", 0, callback)
    assert [options["config"].evaluate_first for options in given] == [True, False]
    assert [options["callbacks"] for options in given] == [[history], []]
    plan = replace(plan, steps=replace(plan.steps, shuffle=False))
    train(plan, model, plan.optimizer(model), plan.splits.early, 10, "pretrain", 0)
    assert given[-1]["valid"] is None  # a log that is read once is not evaluated


def test_size_of_a_model_is_that_of_its_tables_and_parameters():
    model = make_model("mlp", Schema(FIELDS), dim=4, hidden=(8,))
    size, values = model_size(model), sum(weight.numel() for weight in model.parameters())
    rows = sum(field.cardinality for field in FIELDS if field.kind != "numeric")
    assert size["parameters"] == values
    assert rows * 4 * 4 <= size["table_bytes"] < values * 4  # dim 4, float32; numbers have tables of their own
    assert model_size(model.half())["table_bytes"] == size["table_bytes"] / 2


def test_history_of_a_hot_start_survives_a_resume():
    history, resumed = AucHistory(), AucHistory()
    history.points = [(0, 0.7), (5, 0.8), (10, 0.8)]
    resumed.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert resumed.points == history.points
    assert resumed.best == (5, 0.8)


def test_shrunk_model_is_trained_at_twice_the_learning_rate(plan):
    model = new_model(plan, 0)
    usual = [group["lr"] for group in plan.optimizer(model).param_groups]
    _, optimizer = shrink_and_perturb(plan, model)
    assert [group["lr"] for group in optimizer.param_groups] == [2 * lr for lr in usual]


def test_warm_up_is_not_part_of_the_serving_speed(plan, monkeypatch):
    """The clock runs 100 seconds in the first turn, then one, two and four seconds."""
    now, turns = [0.0], [0]

    class Slow:
        reads = plan.schema

        def eval(self):
            turns[0] += 1

        def __call__(self, batch):
            now[0] += (100.0, 1.0, 2.0, 4.0)[turns[0] - 1]

    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    speeds = serving_speed(plan, {"kept": Slow()}, repeats=3)
    assert turns == [4]
    rows = plan.splits.valid.rows  # one batch
    assert speeds["kept"] == {
        "rows_per_second": round(rows / 2),
        "rows_per_second_low": round(rows / 4),
        "rows_per_second_high": rows,
    }


def test_the_learning_rate_rises_in_pretraining_and_stays_high_in_the_search(plan, monkeypatch):
    assert plan.training(100, 0, keep_best=True).schedule == "constant"
    assert plan.search_lr_factor == plan.steps.lr_factor
    risen = replace(plan, settings=plan.settings.updated(lr_schedule="rise"))
    assert risen.training(100, 0, keep_best=True).schedule == "rise"
    assert risen.training(100, 0, keep_best=False).schedule == "constant"
    assert risen.search_lr_factor == 10 * plan.steps.lr_factor
    rates = []
    monkeypatch.setattr(stages, "run_search", lambda method, task: rates.append(task.optimizer.param_groups[0]["lr"]))
    monkeypatch.setattr(stages, "set_gates_from_selection", lambda model, selection: None)
    model = new_model(plan, 0)
    for given in (plan, risen):
        stages.search_fields(given, (model, given.optimizer(model)), 0)
    assert rates[1] == pytest.approx(10 * rates[0])
    with pytest.raises(InputError, match="lr_schedule must be one of constant, rise"):
        plan.settings.updated(lr_schedule="fall")


@pytest.mark.parametrize(("method", "separate"), [("lpfs++", True), ("group_lasso", False), ("lpfs++_paper", False)])
def test_a_method_of_a_single_pass_reads_the_search_rows_once(plan, monkeypatch, method, separate):
    tasks = []
    monkeypatch.setattr(stages, "run_search", lambda method, task: tasks.append(task))
    monkeypatch.setattr(stages, "set_gates_from_selection", lambda model, selection: None)
    given = plan.for_search(plan.run_dir, 0, method=method)
    model = new_model(plan, 0)
    stages.search_fields(given, (model, given.optimizer(model)), 0)
    (task,) = tasks
    assert (task.holdout is not None) == (separate and plan.steps.separate_gate_rows)
    if not separate:
        assert task.stream.dataset.span == plan.splits.search.span
        assert task.steps * task.stream.batch_size < plan.splits.search.rows + task.stream.batch_size
        assert task.early is None
    lassonet = plan.for_search(plan.run_dir, 0, method="lassonet")
    stages.search_fields(lassonet, (model, lassonet.optimizer(model)), 0)
    assert tasks[-1].early.dataset.span == plan.splits.early.span
    assert tasks[-1].early_steps == plan.steps.pretrain
