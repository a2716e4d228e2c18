from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.embeddings.optim import Adagrad
from lpfs.embeddings.table import Table
from lpfs.errors import DeviceMemoryError, InputError
from lpfs.models import MODELS, make_model
from lpfs.schema import Field, Schema
from lpfs.train.callbacks import Callback
from lpfs.train.config import Training
from lpfs.train.evaluate import evaluate
from lpfs.train.fit import fit, save_result
from lpfs.train.fit_fleet import fit_fleet, plan_rounds
from lpfs.train.fleet import Fleet, FleetStream, stack_tables, supports_fleet
from lpfs.train.step import OPTIMIZERS, make_optimizer

SCHEMA = Schema(
    (
        *(Field("user", cardinality=20), Field("age", "numeric"), Field("item", cardinality=50)),
        *(Field("tags", "multi", cardinality=9), Field("prices", "numeric", dim=2), Field("hour", cardinality=7)),
    )
)
KEPT = [SCHEMA.names, ("user", "item", "tags"), ("user", "age"), ("prices", "hour"), ("item", "tags", "hour")]
STACKED = ("mlp", "wide_deep", "fm", "deepfm", "dcnv2", "dlrm")


class Batches(list):
    schema = SCHEMA
    batch_size = 32


def make_batches(seed: int, count: int = 12, rows: int = 32) -> Batches:
    random = torch.Generator().manual_seed(seed)
    batches = Batches()
    for _ in range(count):
        ids = torch.stack([torch.randint(0, size, (rows,), generator=random) for size in (20, 50, 7)], 1).int()
        missing = torch.rand(rows, 3, generator=random) < 0.1
        dense = torch.randn(rows, 3, generator=random).masked_fill(missing, 0.0)
        tags = torch.randint(0, 9, (2 * rows,), generator=random).int()
        odds = (ids[:, :1] - 10) / 5 + dense[:, :1]
        labels = (torch.rand(rows, 1, generator=random) < odds.sigmoid()).float()
        bags = {"tags": (tags, 2 * torch.arange(rows, dtype=torch.int32))}
        batches.append(Batch(ids, dense, labels, missing, bags))
    return batches


def selected(batches, kept):
    return [batch.select(SCHEMA, kept) for batch in batches]


def replicas(name="mlp", kept=KEPT, dtype=torch.float32, **options):
    models = []
    for seed, fields in enumerate(kept):
        torch.manual_seed(seed)
        models.append(make_model(name, SCHEMA.subset(fields), **options).to(dtype))
    return models


def assert_close(models, others, tolerance):
    for replica, (model, other) in enumerate(zip(models, others, strict=True)):
        for name, weight in model.state_dict().items():
            close = torch.allclose(weight, other.state_dict()[name], rtol=tolerance, atol=tolerance)
            assert close, f"replica {replica}: {name}"


def assert_equal(models, others):
    for model, other in zip(models, others, strict=True):
        assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    "optimizer",
    ["adagrad", *(pytest.param(name, marks=pytest.mark.long) for name in ("rowwise-adagrad", "adam", "sgd"))],
)
def test_replicas_of_different_fields_equal_the_models_trained_alone(optimizer):
    models, batches = replicas(), make_batches(0)
    singles = copy.deepcopy(models)
    for single, kept in zip(singles, KEPT, strict=True):
        fit(single, selected(batches, kept), optimizer, steps=200, quiet=True)
    fit_fleet(models, batches, optimizer=optimizer, steps=200, quiet=True)
    assert_close(models, singles, 1e-3)


@pytest.mark.parametrize("name", STACKED)
def test_every_model_of_float64_is_equal_to_ten_digits(name):
    # a first step of Adagrad is the sign of the gradient: in float32 the rounding of a gradient near 0 can change it
    models, batches = replicas(name, dtype=torch.float64), make_batches(1)
    singles = copy.deepcopy(models)
    for single, kept in zip(singles, KEPT, strict=True):
        fit(single, selected(batches, kept), steps=20, quiet=True)
    fit_fleet(models, batches, steps=20, quiet=True)
    assert_close(models, singles, 1e-6)


def test_dot_products_are_stacked():
    models, batches = replicas("dlrm", dtype=torch.float64, interaction="dot"), make_batches(1)
    models = [models[0], *replicas("dlrm", [SCHEMA.names], torch.float64, interaction="dot")]
    singles = copy.deepcopy(models)
    for single in singles:
        fit(single, batches, steps=20, quiet=True)
    fit_fleet(models, batches, steps=20, quiet=True)
    assert_close(models, singles, 1e-6)


@pytest.mark.parametrize("name", ["mlp", "dcnv2"])
def test_bfloat16_is_supported(name):
    models, batches = replicas(name), make_batches(1)
    initial, singles = copy.deepcopy(models), copy.deepcopy(models)
    for single, kept in zip(singles, KEPT, strict=True):
        fit(single, selected(batches, kept), "sgd", steps=10, precision="bfloat16", quiet=True)
    fit_fleet(models, batches, optimizer="sgd", steps=10, precision="bfloat16", quiet=True)
    assert_close(models, singles, 1e-2)
    for model, single, start in zip(models, singles, initial, strict=True):
        weight, other, before = (next(net.top.parameters()).detach() for net in (model, single, start))
        assert (weight - other).norm() < 0.05 * (other - before).norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("graph", [False, True])
def test_a_fleet_on_a_gpu_equals_single_training(graph):
    kept = [("user", "age", "tags"), ("user", "item"), ("user", "age", "tags"), ("prices", "hour")]
    batches = Batches(batch.to("cuda") for batch in make_batches(1))
    schema = SCHEMA
    models = [model.cuda() for model in replicas(kept=kept)]
    singles = copy.deepcopy(models)
    for single, fields in zip(singles, kept, strict=True):
        fit(single, [batch.select(schema, fields) for batch in batches], "sgd", steps=100, graph=graph, quiet=True)
    fit_fleet(models, batches, schema=schema, optimizer="sgd", steps=100, graph=graph, quiet=True)
    assert_close(models, singles, 1e-4)


def test_supports_fleet_names_the_models_that_vmap_supports():
    assert [name for name in MODELS if supports_fleet(make_model(name, SCHEMA))] == list(STACKED)
    with torch.device("meta"):
        assert supports_fleet(make_model("mlp", SCHEMA))
    assert not supports_fleet(torch.nn.Linear(2, 1))
    with pytest.raises(InputError, match="replicas of DLRMCross cannot be stacked"):
        Fleet([make_model("dlrm_cross", SCHEMA)], SCHEMA)


def test_a_stacked_table_is_bit_equal_to_its_tables():
    tables = [Table([20, 7], 4), Table([5, 30], 4)]
    stacked = stack_tables(tables)
    ids = torch.stack([torch.randint(0, size, (40,)) for size in (20, 7, 5, 30)], 1).int()
    factor = torch.randn(40, 4, 4)
    optimizers = [Adagrad(table.parameters()) for table in (*tables, stacked)]
    for _ in range(3):
        out = stacked(ids)
        pieces = torch.cat([tables[0](ids[:, :2]), tables[1](ids[:, 2:])], 1)
        assert torch.equal(out, pieces)
        (out * factor).sum().backward()
        (pieces * factor).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(stacked.weight, torch.cat([table.weight for table in tables]))


def test_the_parameters_of_a_replica_are_those_of_its_model():
    models = replicas()
    fleet = Fleet(models, SCHEMA)
    for replica, model in enumerate(models):
        state = fleet.replica_state(replica)
        assert set(state) == set(model.state_dict())
        assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())
    torch.manual_seed(9)
    other = make_model("mlp", SCHEMA.subset(KEPT[4]))
    fleet.load_replica(4, other.state_dict())
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in fleet.replica_state(4).items())
    assert all(torch.equal(weight, models[1].state_dict()[name]) for name, weight in fleet.replica_state(1).items())


def test_each_replica_can_have_its_own_rows_and_learning_rate():
    kept = [SCHEMA.names, ("user", "item"), SCHEMA.names, ("item", "hour")]
    rates, sources = [0.01, 0.05, 0.05, 0.01], [0, 1, 1, 0]
    models, streams = replicas(kept=kept, dtype=torch.float64), [make_batches(2), make_batches(3)]
    singles = copy.deepcopy(models)
    for single, fields, rate, source in zip(singles, kept, rates, sources, strict=True):
        fit(single, selected(streams[source], fields), steps=30, lr=rate, quiet=True)
    fit_fleet(models, streams, sources=sources, rates=rates, steps=30, quiet=True)
    assert_close(models, singles, 1e-6)


def test_masks_of_all_replicas_are_gates_of_the_single_models():
    batches, kept = make_batches(0), [SCHEMA.names, ("user", "age"), SCHEMA.names, ("tags", "hour"), ("age", "prices")]
    models, singles = (replicas(kept=kept, dtype=torch.float64) for _ in range(2))
    masks = [[1, 0, 1, 1, 0, 1], [0, 1, 7, 7, 7, 7], [0, 1, 1, 0, 1, 0], [2, 3, 7, 7, 7, 7], [1, 0, 7, 7, 7, 7]]
    masks = torch.tensor(masks, dtype=torch.float64)
    assert Fleet(models, SCHEMA).members == [[0, 2], [1, 3, 4]]

    class Masks(Callback):
        def on_begin(self, state):
            state.model.set_gates(lambda: masks)

        def on_end(self, state):
            state.model.set_gates(None)

    fit_fleet(models, batches, schema=SCHEMA, steps=60, callbacks=[Masks()], quiet=True)
    for single, fields, mask in zip(singles, kept, masks, strict=True):
        single.inputs.gate = lambda factors=mask[: len(fields)]: factors  # noqa: B008
        fit(single, selected(batches, fields), steps=60, quiet=True)
        single.inputs.gate = None
    assert_close(models, singles, 1e-8)


def test_a_mask_over_the_stack_is_a_gate_of_the_single_model():
    models, batches = replicas(kept=[SCHEMA.names] * 3, dtype=torch.float64), make_batches(4)
    singles = copy.deepcopy(models)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 0, 1]], dtype=torch.float64)

    class Mask(Callback):
        def on_begin(self, state):
            state.model.stacks[0].gate = lambda: mask

    for single, row in zip(singles, mask, strict=True):
        single.inputs.gate = lambda row=row: row
        fit(single, batches, steps=20, quiet=True)
    fit_fleet(models, batches, steps=20, quiet=True, callbacks=[Mask()])
    assert_close(models, singles, 1e-6)


def test_metrics_best_state_and_early_stop_of_every_replica_are_those_of_single_training():
    models, batches, valid = replicas(dtype=torch.float64), make_batches(5), make_batches(6, count=5)
    singles, settings = copy.deepcopy(models), {"steps": 60, "evaluate_every": 6, "lr": 0.1, "quiet": True}
    settings |= {"keep": "best", "patience": 3}
    expected = [
        fit(single, selected(batches, kept), valid=selected(valid, kept), **settings)
        for single, kept in zip(singles, KEPT, strict=True)
    ]
    results = fit_fleet(models, batches, valid=valid, **settings)
    assert [result.best_step for result in results] == [result.best_step for result in expected]
    assert [result.steps for result in results] == [result.steps for result in expected]
    assert [result.rows for result in results] == [result.rows for result in expected]
    assert [result.stopped for result in results] == [result.stopped for result in expected]
    assert len({result.steps for result in results}) > 1  # the replicas do not stop at the same step
    for result, other in zip(results, expected, strict=True):
        assert result.best.auc == pytest.approx(other.best.auc, abs=1e-6)
        assert result.metrics.logloss == pytest.approx(other.metrics.logloss, abs=1e-6)
    assert_close(models, singles, 1e-6)


def test_the_metrics_of_a_fleet_are_exact():
    models, valid = replicas(), make_batches(6, count=3)
    fleet = Fleet(models, SCHEMA)
    metrics = fleet.split_metrics(evaluate(fleet, FleetStream(fleet, [valid])))
    for model, kept, found in zip(models, KEPT, metrics, strict=True):
        single = evaluate(model, selected(valid, kept))
        assert found.main.rows == single.main.rows
        assert found.auc == pytest.approx(single.auc, abs=1e-3)
        assert found.logloss == pytest.approx(single.logloss, abs=1e-6)


class StopError(Exception):
    pass


class StopAt(Callback):
    """Ends the run with an error after this many steps of all rounds."""

    def __init__(self, left=-1):
        self.left = left

    def after_step(self, state):
        self.left -= 1
        if self.left == 0:
            raise StopError


@pytest.mark.parametrize(("stop", "content"), [(5, "all"), (17, "all"), (20, "model"), (33, "all"), (33, "model")])
def test_a_killed_run_resumes_bit_for_bit(data, tmp_path, stop, content):
    kept = [("user", "item", "x"), ("user",), ("item",), ("user", "x"), ("user", "item", "x")]

    def train(name, stop=-1, **options):
        models = []
        for seed, fields in enumerate(kept):
            torch.manual_seed(seed)
            models.append(make_model("mlp", data.schema.subset(fields), hidden=[8]))
        streams = [data.stream(32, shuffle=True, seed=seed) for seed in (1, 2)]
        settings = {"steps": 20, "evaluate_every": 6, "checkpoint_every": 4, "keep": "best", "quiet": True}
        settings["final_checkpoint"] = content
        settings |= {"sources": [0, 1, 0, 1, 0], "valid": data.stream(100), "memory": 200_000, **options}
        results = fit_fleet(models, streams, folder=tmp_path / name, callbacks=[StopAt(stop)], **settings)
        return models, results

    expected, results = train("whole")
    assert len(json.loads((tmp_path / "whole" / "fleet.json").read_text())["rounds"]) == 2
    with pytest.raises(StopError):
        train("killed", stop)
    models, resumed = train("killed", resume=True)
    assert_equal(models, expected)
    assert [result.best for result in resumed] == [result.best for result in results]
    with pytest.raises(InputError, match="contains a run"):
        train("killed")


@pytest.mark.parametrize("name", ["adagrad", "rowwise-adagrad", "adam", "sgd"])
def test_replicas_continue_with_the_optimizers_of_their_models(name):
    models, batches = replicas(kept=KEPT[:3], dtype=torch.float64), make_batches(8)
    config = Training(optimizer=name, lr=0.03, steps=15, quiet=True)
    optimizers = [make_optimizer(config, model.parameters()) for model in models]
    for model, optimizer, kept in zip(models, optimizers, KEPT, strict=False):
        fit(model, selected(batches, kept), optimizer, steps=5, quiet=True)
    singles = [copy.deepcopy(pair) for pair in zip(models, optimizers, strict=True)]
    for _ in range(2):  # the second call starts where the first ended
        fit_fleet(models, batches, optimizers=optimizers, config=replace(config, lr=None))
        for (model, optimizer), kept in zip(singles, KEPT, strict=False):
            fit(model, selected(batches, kept), optimizer, config=replace(config, lr=None))
    assert_close(models, [model for model, _ in singles], 1e-6)
    for optimizer, (_, single) in zip(optimizers, singles, strict=True):
        ours, theirs = (each.state_dict()["state"] for each in (optimizer, single))
        assert all(ours[number].keys() == state.keys() for number, state in theirs.items())
        for number, state in theirs.items():
            assert all(torch.allclose(ours[number][key], value, atol=1e-8) for key, value in state.items())


def test_the_result_of_a_replica_is_saved_as_that_of_a_single_run(data, tmp_path):
    def run():
        torch.manual_seed(0)
        model = make_model("mlp", data.schema, hidden=[8])
        return model, Adagrad(model.parameters()), data.stream(32), data.stream(100)

    config = Training(steps=12, evaluate_every=4, keep="best", final_checkpoint="result", quiet=True)
    model, optimizer, stream, valid = run()
    (trained,) = fit_fleet([model], stream, optimizers=[optimizer], valid=valid, config=config)
    save_result(model, optimizer, trained, stream, valid, tmp_path, config)
    resumed, resumed_optimizer, stream, valid = run()
    result = fit(resumed, stream, resumed_optimizer, valid=valid, folder=tmp_path, resume=True, config=config)
    assert_equal([resumed], [model])
    assert (result.best, result.best_step, result.steps) == (trained.best, trained.best_step, 12)
    sums = [[state["sum"] for state in each.state.values()] for each in (resumed_optimizer, optimizer)]
    assert all(torch.equal(first, second) for first, second in zip(*sums, strict=True))


def test_replicas_that_do_not_fit_into_memory_are_trained_in_rounds():
    models, batches = replicas(kept=[*KEPT, *KEPT]), make_batches(0, count=4)
    together = copy.deepcopy(models)
    memory = 3_000_000
    rounds = plan_rounds(models, torch.device("cpu"), Training(), 32, memory)
    assert len(rounds) > 1
    assert sorted(replica for members in rounds for replica in members) == list(range(10))
    fit_fleet(models, batches, steps=10, memory=memory, quiet=True)
    fit_fleet(together, batches, steps=10, quiet=True)
    assert_close(models, together, 1e-4)
    with pytest.raises(DeviceMemoryError, match="one replica needs about"):
        plan_rounds(models, torch.device("cpu"), Training(), 32, 1000)


def test_wrong_arguments_are_one_clear_error():
    models, batches = replicas(), make_batches(0, count=2)
    for message, options in [
        ("does not support clip", {"clip": 1.0}),
        ("need evaluations", {"keep": "best"}),
        ("unknown key 'stepz'", {"stepz": 3}),
        ("one entry for each of the 5 models", {"rates": [0.1]}),
        ("must name each of the 1 streams", {"sources": [0, 1, 0, 0, 0]}),
    ]:
        with pytest.raises(InputError, match=message):
            fit_fleet(models, batches, quiet=True, **options)
    with pytest.raises(InputError, match="give schema="):
        fit_fleet(models, list(batches), quiet=True)
    short = make_batches(0, count=2, rows=16)
    with pytest.raises(InputError, match=r"batches of \[16, 32\] rows"):
        fit_fleet(models, [batches, short], sources=[0, 1, 0, 1, 0], quiet=True)


def test_optimizers_of_a_fleet_may_lack_states_but_not_have_other_settings():
    models = replicas(kept=[("user", "age"), ("user", "item")])
    models[0].get_parameter(next(name for name, _ in models[0].named_parameters() if "bias" in name)).requires_grad_(
        False
    )
    optimizers = [OPTIMIZERS["adam"](model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        fit(model, selected(make_batches(1), model.reads.names), optimizer, steps=2, quiet=True)
        model.requires_grad_(True)
    fit_fleet(models, make_batches(1), optimizers=optimizers, optimizer="adam", steps=3, quiet=True)
    assert all(float(state["step"]) == 5 for state in optimizers[1].state.values())
    others = [OPTIMIZERS["adam"](model.parameters(), lr=0.01, betas=(0.8, 0.99)) for model in models]
    with pytest.raises(InputError, match="betas"):
        fit_fleet(models, make_batches(1), optimizers=others, optimizer="adam", steps=1, quiet=True)
    groups = [OPTIMIZERS["adam"]([{"params": [weight]} for weight in model.parameters()]) for model in models]
    with pytest.raises(InputError, match="one group"):
        fit_fleet(models, make_batches(1), optimizers=groups, optimizer="adam", steps=1, quiet=True)


def test_kinds_are_stacked_together_only_where_outputs_cannot_depend_on_them():
    kept = [("user", "age"), ("user", "item"), ("tags", "hour")]
    assert Fleet(replicas("mlp", kept=kept), SCHEMA).members == [[0, 1, 2]]
    assert Fleet(replicas("fm", kept=kept), SCHEMA).members == [[0], [1], [2]]
