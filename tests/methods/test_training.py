"""Centered embeddings, holdout rows, and the training of masks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lpfs
from lpfs.embeddings.row_grad import row_parameters
from lpfs.errors import InputError, LpfsError
from lpfs.methods.base import SearchCost, SearchTask, rank_fields
from lpfs.methods.masks import NAME, apply_mask
from lpfs.methods.registry import make_method
from lpfs.methods.shufflegate import ShuffleGate, ShuffleGateOptions
from lpfs.methods.stochastic_gates import STG, STGOptions
from lpfs.methods.target import SelectionTarget
from lpfs.methods.training import (
    HoldoutBatches,
    MaskTraining,
    center_embeddings,
    holdout_batches,
    holdout_grads,
    rank_selected_first,
    train_only,
)
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import bce_loss, make_optimizer
from tests.helpers.known_truth import SMALL
from tests.helpers.searches import FixedMask, short_search


def made(log, name, **options):
    torch.manual_seed(0)
    model = make_model(name, log.schema, **options)
    with torch.no_grad():
        model.inputs.table.weight += 0.3  # a mean that is worth moving
    return model


@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {}), ("dlrm", {}), ("wide_deep", {}), ("mlp", {"silent": ["ad"]})]
)
def test_centering_removes_the_mean_and_keeps_the_logits(log, name, options):
    model = made(log, name, **options).double()
    before = copy.deepcopy(model)
    stream = log.stream(64, fields=model.reads.names)
    assert center_embeddings(model, stream, rows=10**9)
    batch = next(iter(log.stream(200, fields=model.reads.names)))
    assert torch.allclose(model(batch), before(batch), rtol=1e-6, atol=1e-7)
    rows = torch.cat([model.inputs(batch) for batch in stream])
    part = [model.inputs.slots.index(value) for value in model.inputs.names[: model.inputs.ids]]
    means = rows.mean(0)[part, : model.inputs.dim].detach()
    assert part
    assert means.abs().max() < 1e-6


def test_centering_changes_only_the_table_and_the_bias(log):
    model = made(log, "mlp")
    before = copy.deepcopy(model.state_dict())
    center_embeddings(model, log.stream(64))
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "inputs.table.weight",
        "top.0.bias",
    }


@pytest.mark.parametrize(
    ("name", "options"), [("deepfm", {}), ("fm", {}), ("dcnv2", {}), ("dlrm", {"interaction": "dot"})]
)
def test_models_that_multiply_embeddings_are_not_centered(log, name, options):
    model = made(log, name, **options)
    before = copy.deepcopy(model.state_dict())
    assert not center_embeddings(model, log.stream(64))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_stream_keeps_its_position(log):
    stream, other = (log.stream(64, shuffle=True, seed=3) for _ in range(2))
    for batch in (stream, other):
        for number, _ in enumerate(batch):
            if number == 2:
                break
    state = stream.state_dict()
    center_embeddings(made(log, "mlp"), stream, rows=100)
    assert stream.state_dict() == state
    stream.load_state_dict(state)
    other.load_state_dict(state)
    assert torch.equal(next(iter(stream)).ids, next(iter(other)).ids)


def test_holdout_rows_give_gates_a_gradient_and_no_other_parameter(log):
    model = made(log, "mlp")
    gates = lpfs.attach(model, steps=100)
    optimizer = make_optimizer(Training(), gates.model_parameters())
    batch = next(iter(log.stream(64)))
    expected = torch.autograd.grad(bce_loss(model(batch)[:, None], batch.labels[:, :1]), [gates.x])[0]
    model.zero_grad()
    for parameter in model.parameters():
        if hasattr(parameter, "row_grads"):
            parameter.row_grads.clear()
    (found,) = holdout_grads(State(model, optimizer, Training()), batch, [gates.x])
    assert torch.equal(found, expected)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(getattr(parameter, "row_grads", None) for parameter in model.parameters())


def test_holdout_rows_repeat_and_resume(log):
    size = len(log.stream(512))
    rows = HoldoutBatches(log.stream(512, shuffle=True, seed=1))
    for _ in range(size + 1):
        rows.next()
    state = rows.state_dict()
    expected = [rows.next() for _ in range(size)]
    again = HoldoutBatches(log.stream(512, shuffle=True, seed=1))
    again.load_state_dict(state)
    for value in expected:
        assert torch.equal(value.labels, again.next().labels)
    with pytest.raises(InputError, match="no batch"):
        HoldoutBatches(iter(())).next()


def task_of(log, **how):
    model = make_model("mlp", log.schema, **SMALL)
    optimizer = make_optimizer(Training(), model.parameters())
    given = {"valid": log.part(1000, 1200).stream(4096)} | how
    return SearchTask(model, optimizer, log.part(0, 1000).stream(64), target=SelectionTarget(keep=2), steps=10, **given)


def test_a_search_without_a_seed_has_seed_zero():
    task = SearchTask(None, None, [], None, SelectionTarget(keep=1), 10)
    assert rank_fields(task, "x", {"a": 1.0, "b": 2.0}).made["seed"] == 0


def test_holdout_rows_have_the_batch_size_of_the_training(log):
    holdout = HoldoutBatches(holdout_batches(task_of(log, seed=3), "x"))
    sizes = [len(holdout.next()) for _ in range(9)]
    assert sizes == [64, 64, 64, 8, 64, 64, 64, 8, 64]  # 200 rows
    holdout.close()
    own = HoldoutBatches(holdout_batches(task_of(log, holdout=log.part(0, 100).stream(10)), "x"))
    assert own.batches.dataset.rows == 100  # rows that were set apart go before those of valid
    own.close()


def test_holdout_rows_resume_in_any_pass(log):
    for turns in (3, 4, 6):  # within a pass, at its end, in the next
        one, two = (HoldoutBatches(holdout_batches(task_of(log), "x")) for _ in range(2))
        for _ in range(turns):
            one.next()
        two.load_state_dict(one.state_dict())
        for _ in range(5):
            assert torch.equal(one.next().ids, two.next().ids)
        one.close()
        two.close()


def test_holdout_rows_that_are_not_a_stream(log):
    batches = list(log.part(1000, 1200).stream(100))
    holdout = HoldoutBatches(holdout_batches(task_of(log, valid=batches), "x"))
    assert [id(holdout.next()) for _ in range(3)] == [id(batches[0]), id(batches[1]), id(batches[0])]
    assert holdout.state_dict() == {}
    with pytest.raises(InputError, match="resume needs holdout rows"):
        holdout.load_state_dict({})
    used = HoldoutBatches(iter(batches))
    for _ in batches:
        used.next()
    with pytest.raises(InputError, match="no batch"):
        used.next()


@pytest.mark.parametrize("kind", ["field", "token"])
def test_a_step_on_holdout_rows_changes_only_the_mask(log, kind):
    task = task_of(log)
    names = tuple(task.model.sites())
    mask = ShuffleGate(names, 10, 0, ShuffleGateOptions()) if kind == "token" else STG(names, 10, 0, STGOptions())
    parameter = next(mask.parameters())
    with apply_mask(task.model, mask, "x"):
        cost = SearchCost()
        driver = MaskTraining(mask, torch.optim.SGD(mask.parameters(), lr=1.0), cost, holdout_batches(task, "x"), 2)
        state = State(task.model, task.optimizer, Training())
        driver.on_begin(state)
        assert not parameter.requires_grad
        before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
        driver.fetch(state)
        driver.within_step(state)
        assert torch.equal(parameter, before[f"{NAME}.{next(iter(dict(mask.named_parameters())))}"])  # every second
        state.step = 1
        driver.fetch(state)
        driver.within_step(state)
        driver.holdout.close()
        moved = [name for name, tensor in task.model.state_dict().items() if not torch.equal(tensor, before[name])]
        assert moved == [f"{NAME}.{name}" for name, _ in mask.named_parameters()]
        assert all(parameter.grad is None for parameter in task.model.parameters())
        assert not any(parameter.row_grads for parameter in row_parameters(task.model.parameters()))
    assert all(parameter.requires_grad for parameter in task.model.parameters())
    assert (cost.forwards, cost.backwards) == (64, 64)


def test_the_step_of_a_mask_follows_the_training(log):
    task = task_of(log)
    mask = STG(tuple(task.model.sites()), 10, 0, STGOptions())
    driver = MaskTraining(mask, torch.optim.SGD(mask.parameters(), lr=1.0), SearchCost())
    state = State(task.model, task.optimizer, Training(), step=4)
    driver.on_begin(state)  # it goes on from a checkpoint
    assert mask.step == 4
    state.step = 5
    driver.after_step(state)
    assert mask.step == 5


def test_requires_grad_is_restored():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), STG(("a",), 1, 0, STGOptions())])
    model[1].requires_grad_(False)
    with train_only(model, model[2].parameters()):
        assert [parameter.requires_grad for parameter in model.parameters()] == [False] * 4 + [True]
    with pytest.raises(ZeroDivisionError), train_only(model, model[2].parameters()):
        raise ZeroDivisionError
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, False, False, True]


def test_a_mask_of_ones_does_not_change_the_training(log):
    """Weights trained under a mask of ones that cannot move are those of plain training."""
    plain, masked = (task_of(log) for _ in range(2))
    masked.model.load_state_dict(plain.model.state_dict())
    fit(plain.model, plain.stream, plain.optimizer, steps=8, quiet=True)
    names = tuple(masked.model.sites())
    with apply_mask(masked.model, FixedMask(names, [1.0] * len(names)), "x"):
        fit(masked.model, masked.stream, masked.optimizer, steps=8, quiet=True)
    mine, theirs = plain.model.state_dict(), masked.model.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_rows_are_counted_forward_and_backward(log):
    _, found = short_search(log, "mlp", "stg")
    assert (found.made["forwards"], found.made["backwards"]) == (5 * 64, 5 * 64)
    _, found = short_search(log, "mlp", "shufflegate")
    assert (found.made["forwards"], found.made["backwards"]) == (10 * 64 - 56, 10 * 64 - 56)  # a held batch has 8 rows
    _, found = short_search(log, "mlp", "permutation", repeats=2)
    assert (found.made["forwards"], found.made["backwards"]) == ((1 + 2 * 7) * 1200, 0)  # validation and search rows
    _, found = short_search(log, "mlp", "lpfs++", steps=60, keep=None, max_auc_loss=0.49)
    looks = len(found.made["curve"]) + 1 + len(found.made["reference"])
    steps = 2 * (60 * 64 - 3 * 24)  # a batch in sixteen has 40 rows
    assert (found.made["forwards"], found.made["backwards"]) == (steps + looks * 200, steps)


def test_seconds_before_a_resume_count():
    cost = SearchCost()
    cost.load_state_dict({"seconds": 100.0, "forwards": 7, "backwards": 3})
    with cost:
        cost.add(forwards=1)
    assert 100.0 <= cost.to_dict()["seconds"] == round(cost.state_dict()["seconds"], 3) < 110.0
    assert (cost.forwards, cost.backwards) == (8, 3)


def test_the_history_records_the_search(log):
    _, found = short_search(log, "mlp", "stg", steps=6)
    assert [record["step"] for record in found.history] == [1, 2, 3, 4, 5, 6]
    assert set(found.history[0]) == {"step", "loss", "alive", "gates"}
    assert found.history[-1]["gates"] == pytest.approx(list(found.made["scores"].values()), abs=1e-6)
    assert all(record["alive"] == 7 and 0 < record["loss"] < 5 for record in found.history)
    assert found.made["own_count"] == 7


def test_a_mask_is_trained_on_holdout_rows(log):
    """The weights see the search's rows, the mask the held-out ones, as the gates of LPFS do."""
    _, found = short_search(log, "mlp", "stg", holdout=log.part(0, 200).stream(40))
    assert (found.made["forwards"], found.made["backwards"]) == (5 * (64 + 40), 5 * (64 + 40))


def test_rejected_fields_are_ranked_by_their_mean_score():
    scores, own = torch.tensor([0.9, -2.0, -2.3, 0.2, -2.1]), torch.tensor([True, False, False, True, False])
    found = rank_selected_first(scores, own, torch.tensor([1.0, -0.7, -0.1, 0.5, -0.4], dtype=torch.float64))
    assert found.argsort(descending=True).tolist() == [0, 3, 2, 4, 1]
    assert torch.equal(found[own], scores[own])
    none = rank_selected_first(scores, torch.zeros(5, dtype=torch.bool), torch.arange(5.0))
    assert none.argsort().tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(rank_selected_first(scores, torch.ones(5, dtype=torch.bool), scores), scores)


def test_a_task_continues_an_older_search_only_on_request(log, tmp_path):
    task_of(log, folder=tmp_path, training=Training(quiet=True)).fit(steps=2)
    with pytest.raises(InputError, match="contains a run.*resume=True"):
        task_of(log, folder=tmp_path, training=Training(quiet=True)).fit(steps=2)
    task_of(log, folder=tmp_path, training=Training(quiet=True), resume=True).fit(steps=2)


def test_a_ranking_checks_its_target_before_it_scores(log):
    task = task_of(log)
    method = make_method("permutation")
    method.score = lambda *_: pytest.fail("fields were scored")
    for target, message in ((SelectionTarget(keep=99), "99"), (SelectionTarget(keep=2, must_keep=("usr",)), "usr")):
        task.target = target
        with pytest.raises(LpfsError, match=message):
            method.search(task)
