"""SHARK and SFS: first-order scores against gradients of single rows, and against gates."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.methods.registry import make_method
from lpfs.methods.saliency import CapturedEmbeddings
from lpfs.methods.search import search
from lpfs.train.config import Training
from tests.helpers.clicks import CASES, SCHEMAS, Case, batch_of
from tests.helpers.known_truth import NOISE, STRONG


def loss(model, batch, rows=slice(None)):
    logits = model(batch)
    losses = binary_cross_entropy_with_logits(logits.reshape(len(batch), -1), batch.labels, reduction="none")
    return losses[rows].sum(1)


@pytest.mark.parametrize("schema", ["mixed", "tasks"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sfs_is_the_gradient_of_a_gate(case, schema):
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
    captured = CapturedEmbeddings(model)
    with captured.capture():
        values = [captured.values(batch) for batch in batches]
        means = {path: torch.cat([value[path] for value in values]).mean(0) for path in values[0]}
        total = dict.fromkeys(model.names, 0.0)
        for batch in batches:
            for row in range(len(batch)):
                own = loss(model, batch, slice(row, row + 1)).sum()  # one row's loss, and nobody else's
                paths = list(captured.leaves)
                slopes = torch.autograd.grad(own, [captured.leaves[path] for path in paths])
                stacked = captured._stack(dict(zip(paths, slopes, strict=True)))
                here = captured._stack(dict(captured.leaves))
                for part, (path, slot) in captured.slots.items():
                    away = means[path][slot] - here[path][row, slot]
                    total[part] += abs(float(stacked[path][row, slot] @ away.detach())) / 24
    assert found["scores"] == pytest.approx(total, rel=1e-3, abs=1e-6)
    assert (found["forwards"], found["backwards"], found["rows"]) == (48, 24, 24)


def test_captured_values_are_the_embeddings_of_the_parts(log):
    schema = SCHEMAS["ids"]
    model = Case("mlp").make(schema, silent=("y",))
    batch = batch_of(schema).select(schema, ["x", "z"])
    captured = CapturedEmbeddings(model)
    with captured.capture():
        found = captured.values(batch)["inputs"]
    assert captured.slots == {"x": ("inputs", 0), "z": ("inputs", 2)}
    for name, column in (("x", 0), ("z", 1)):
        own = model.inputs.table.rows(column)[batch.ids[:, column].long()]
        assert torch.equal(found[:, captured.slots[name][1]], own)


@pytest.mark.parametrize("method", ["shark", "sfs"])
@pytest.mark.parametrize("backbone", ["mlp", "deepfm"])
def test_the_planted_fields_are_found_and_hooks_are_removed(run_search, pretrained, method, backbone):
    model, found = run_search(method, backbone, keep=2)
    assert set(found.kept) == set(STRONG)
    assert set(found.made["scores"]) == set(model.names)
    assert min(found.made["scores"][name] for name in STRONG) > max(found.made["scores"][name] for name in NOISE)
    before = pretrained(backbone)[0].state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(not module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None and not getattr(parameter, "row_grads", ()) for parameter in model.parameters())
    again = run_search(method, backbone, keep=2)[1]
    assert again.made["scores"] == found.made["scores"]


def test_sfs_scores_sum_to_one_over_the_given_batches(run_search):
    _, found = run_search("sfs", keep=2, batches=3)
    assert sum(found.made["scores"].values()) == pytest.approx(1.0)
    assert (found.made["batches"], found.made["backwards"]) == (3, 192)


def test_task_weights_change_the_scores(log):
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
def test_invalid_models_streams_and_options(method):
    with pytest.raises(InputError, match=f"{method} needs a model of lpfs.models, found Linear"):
        search(nn.Linear(2, 1), [], method, keep=1)
    with pytest.raises(InputError, match="no batch"):
        search(Case("mlp").make(SCHEMAS["ids"]), [], method, keep=1)
    name = {"shark": "rows", "sfs": "batches"}[method]
    with pytest.raises(InputError, match=f"{name} must be an integer >= 1, found 0"):
        make_method(method, {name: 0})
