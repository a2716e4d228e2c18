"""FairFS: the penalty on attributions, and scores along the path to a row's mean embedding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lpfs.errors import InputError
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.fairfs import AttributionPenalty, EmbeddingPath
from lpfs.methods.masks import apply_mask
from lpfs.methods.registry import make_method
from lpfs.methods.target import SelectionTarget
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.evaluate import predict_batch
from lpfs.train.step import bce_loss
from tests.helpers.clicks import MIXED, Case, batch_of
from tests.helpers.known_truth import NOISE, STRONG


def loss_of(model, batch):
    logits, labels = predict_batch(model, batch)
    return bce_loss(logits, labels, None)


def test_the_penalty_is_the_formula():
    """Rows one at a time: I_b is the sum over fields of gradient times distance to the mean of the row."""
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    path = EmbeddingPath(model.names)
    with apply_mask(model, path, "fairfs"):
        state = State(model, None, Training(), 10)
        state.loss = loss_of(model, batch)
        plain = float(state.loss.detach())
        embeddings = path.tokens.detach()
        AttributionPenalty(10, path, 3.0).before_backward(state)
        state.loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    leaf = embeddings.clone().requires_grad_()
    logits = model.top(leaf.flatten(1))
    labels = batch.labels
    (grad,) = torch.autograd.grad(bce_loss(logits, labels, None), [leaf])
    mean = embeddings.mean(1, keepdim=True)
    attributions = [float((grad[row] * (embeddings[row] - mean[row])).sum()) for row in range(len(embeddings))]
    expected = plain + 3.0 * torch.tensor(attributions).norm()
    assert float(state.loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert {name.partition(".")[0] for name in grads} == {"inputs", "top"}  # the penalty reaches all weights


def test_scores_are_integrated_gradients():
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    task = SearchTask(model, None, [], [batch], SelectionTarget(keep=2), 1)
    method, path = make_method("fairfs", {"points": 3}), EmbeddingPath(model.names)
    with apply_mask(model, path, "fairfs"):
        scores, rows = method.score(task, model, path, SearchCost())
    with torch.no_grad():
        embeddings = model.inputs(batch)
    direction = embeddings - embeddings.mean(1, keepdim=True)
    total = torch.zeros(len(model.names))
    for point in range(4):
        leaf = (embeddings - point / 3 * direction).requires_grad_()
        loss = bce_loss(model.top(leaf.flatten(1)), batch.labels, None) * len(batch)
        (grad,) = torch.autograd.grad(loss, [leaf])
        total += (grad * direction / 3).sum((0, 2))
    expected = dict(zip(model.inputs.slots, (total / (4 * len(batch))).abs().tolist(), strict=True))
    assert rows == len(batch)
    assert dict(zip(path.names, scores.tolist(), strict=True)) == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_planted_fields_are_found_by_a_network_of_its_own(log, pretrained):
    model, optimizer = pretrained("mlp")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    valid = log.part(1000, 1200).stream(4096)
    task = SearchTask(
        model,
        optimizer,
        log.part(800, 1000).stream(64),
        valid,
        SelectionTarget(keep=2),
        20,
        training=Training(quiet=True),
        early=log.part(0, 800).stream(64, shuffle=True),
        early_steps=200,
    )
    attributions = {}
    for strength in (0.0, 30.0):
        found = make_method("fairfs", {"strength": strength}).search(task)
        attributions[strength] = found.history[-1]["attribution"]
        assert found.made["steps"] == 200
        assert found.made["rows"] == 400
        if strength == 0.0:
            assert set(found.kept) == set(STRONG)
            assert min(found.made["scores"][name] for name in STRONG) > max(
                found.made["scores"][name] for name in NOISE
            )
    assert attributions[30.0] < 0.5 * attributions[0.0]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    again = make_method("fairfs").search(replace(task, early=None))
    assert again.made["steps"] == 20


def test_models_without_one_module_of_fields_are_refused(run_search):
    with pytest.raises(InputError, match="fairfs"):
        run_search("fairfs", "dlrm_cross", keep=2)
