"""SHARK and SFS: what a gradient says of each part, against one row at a time and against small changes."""

from __future__ import annotations

import pytest
import torch
from clicks import CASES, SCHEMAS, Case, batch_of
from known_truth import NOISE, STRONG
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.methods.captured import Captured
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.search import search
from lpfs.methods.wish import Wish
from lpfs.train.config import Training


def loss(model, batch, rows=slice(None)):
    logits = model(batch)
    losses = binary_cross_entropy_with_logits(logits.reshape(len(batch), -1), batch.labels, reduction="none")
    return losses[rows].sum(1)


@pytest.mark.parametrize("schema", ["mixed", "tasks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sfs_is_the_slope_by_a_gate_on_every_model(case, schema):
    """The gates of attach are the masks: x is 1 for all of them, so their slopes are in the same proportions."""
    schema = SCHEMAS[schema]
    model = case.make(schema)
    batches = [batch_of(schema, seed=seed) for seed in (1, 2, 3)]
    found = search(model, batches, "sfs", keep=1).made["scores"]
    gates = attach(model, gate="lpfs", steps=10, rescale="off")
    slopes = torch.zeros(len(model.names))
    for batch in batches:
        gates.x.grad = None
        loss(model, batch).mean().backward()
        slopes += gates.x.grad.abs()
    expected = dict(zip(gates.names, (slopes / slopes.sum()).tolist(), strict=True))
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", ["mlp", "wide_deep", "dlrm_cross", "user_item"])
def test_shark_is_the_formula_row_by_row(name):
    schema = SCHEMAS["tasks"]
    model = Case(name).make(schema)
    batches = [batch_of(schema, seed=seed) for seed in (1, 2)]
    found = search(model, batches, "shark", keep=1).made
    captured = Captured(model)
    with captured.watching():
        values = [captured.values(batch) for batch in batches]
        means = {path: torch.cat([each[path] for each in values]).mean(0) for path in values[0]}
        total = dict.fromkeys(model.names, 0.0)
        for batch in batches:
            for row in range(len(batch)):
                own = loss(model, batch, slice(row, row + 1)).sum()  # one row's loss, and nobody else's
                paths = list(captured.caught)
                slopes = torch.autograd.grad(own, [captured.caught[path] for path in paths])
                stacked = captured._stacked(dict(zip(paths, slopes, strict=True)))
                here = captured._stacked(dict(captured.caught))
                for part, (path, slot) in captured.slots.items():
                    away = means[path][slot] - here[path][row, slot]
                    total[part] += abs(float(stacked[path][row, slot] @ away.detach())) / 24
    assert found["scores"] == pytest.approx(total, rel=1e-3, abs=1e-6)
    assert (found["forwards"], found["backwards"], found["rows"]) == (48, 24, 24)


def test_what_is_caught_are_the_parts(log):
    schema = SCHEMAS["ids"]
    model = Case("mlp").make(schema, silent=("y",))
    batch = batch_of(schema).select(schema, ["x", "z"])
    captured = Captured(model)
    with captured.watching():
        found = captured.values(batch)["inputs"]
    assert captured.slots == {"x": ("inputs", 0), "z": ("inputs", 2)}
    for name, column in (("x", 0), ("z", 1)):
        own = model.inputs.table.rows(column)[batch.ids[:, column].long()]
        assert torch.equal(found[:, captured.slots[name][1]], own)


@pytest.mark.parametrize("method", ["shark", "sfs"])
@pytest.mark.parametrize("backbone", ["mlp", "deepfm"])
def test_the_planted_fields_are_found_and_nothing_is_left_behind(looked, ready, method, backbone):
    model, found = looked(method, backbone, keep=2)
    assert set(found.kept) == set(STRONG)
    assert set(found.made["scores"]) == set(model.names)
    assert min(found.made["scores"][name] for name in STRONG) > max(found.made["scores"][name] for name in NOISE)
    before = ready(backbone)[0].state_dict()
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())
    assert all(not each._forward_hooks for each in model.modules())
    assert all(each.grad is None and not getattr(each, "row_grads", ()) for each in model.parameters())
    again = looked(method, backbone, keep=2)[1]
    assert again.made["scores"] == found.made["scores"]


def test_sfs_adds_up_to_one_and_stops_in_time(looked):
    _, found = looked("sfs", keep=2, batches=3)
    assert sum(found.made["scores"].values()) == pytest.approx(1.0)
    assert (found.made["batches"], found.made["backwards"]) == (3, 192)


def test_task_weights_count(log):
    schema = SCHEMAS["tasks"]
    model = Case("mlp").make(schema)
    batches = [batch_of(schema)]
    plain = search(model, batches, "shark", keep=1).made["scores"]
    config = Training(task_weights=(2.0, 0.0, 0.0))
    main = search(model, batches, "shark", keep=1, config=config).made["scores"]
    assert main != pytest.approx(plain)
    assert search(model, batches, "shark", keep=1, config=Training(task_weights=(1, 1, 1))).made[
        "scores"
    ] == pytest.approx(plain)


@pytest.mark.parametrize("method", ["shark", "sfs"])
def test_refusals(method, log):
    with pytest.raises(InputError, match=f"{method} ranks fields.*say keep=K"):
        check_search(method, {}, Wish(penalty=0.1), ("a", "b"), 100)
    with pytest.raises(InputError, match="a model of lpfs.models for its fields; this one is not"):
        search(nn.Linear(2, 1), [], method, keep=1)
    with pytest.raises(InputError, match="the stream gave no batch"):
        search(Case("mlp").make(SCHEMAS["ids"]), [], method, keep=1)
    name = {"shark": "rows", "sfs": "batches"}[method]
    with pytest.raises(InputError, match=f"{name} must be a whole number >= 1, found 0"):
        check_method(method, {name: 0})
