"""Centring: the mean of an embedding moves into the bias, and the model stays the same."""

from __future__ import annotations

import copy

import pytest
import torch

import lpfs
from lpfs.errors import InputError
from lpfs.methods.centre import centre
from lpfs.methods.held import Held, held_grad
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.step import bce_loss, make_optimizer


def made(log, name, **options):
    torch.manual_seed(0)
    model = make_model(name, log.schema, **options)
    with torch.no_grad():
        model.inputs.table.weight += 0.3  # a mean that is worth moving
    return model


@pytest.mark.parametrize(
    ("name", "options"), [("mlp", {}), ("dlrm", {}), ("wide_deep", {}), ("mlp", {"silent": ["ad"]})]
)
def test_the_mean_is_gone_and_the_logits_stay(log, name, options):
    model = made(log, name, **options).double()
    before = copy.deepcopy(model)
    stream = log.stream(64, fields=model.reads.names)
    assert centre(model, stream, rows=10**9)
    batch = next(iter(log.stream(200, fields=model.reads.names)))
    assert torch.allclose(model(batch), before(batch), rtol=1e-6, atol=1e-7)
    rows = torch.cat([model.inputs(each) for each in stream])
    part = [model.inputs.slots.index(each) for each in model.inputs.names[: model.inputs.ids]]
    means = rows.mean(0)[part, : model.inputs.dim].detach()
    assert part
    assert means.abs().max() < 1e-6


def test_the_rest_of_the_model_is_not_touched(log):
    model = made(log, "mlp")
    before = copy.deepcopy(model.state_dict())
    centre(model, log.stream(64))
    after = model.state_dict()
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "inputs.table.weight",
        "top.0.bias",
    }


@pytest.mark.parametrize(
    ("name", "options"), [("deepfm", {}), ("fm", {}), ("dcnv2", {}), ("dlrm", {"interaction": "dot"})]
)
def test_where_embeddings_are_multiplied_nothing_moves(log, name, options):
    model = made(log, name, **options)
    before = copy.deepcopy(model.state_dict())
    assert not centre(model, log.stream(64))
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_the_stream_is_left_where_it_was(log):
    stream, other = (log.stream(64, shuffle=True, seed=3) for _ in range(2))
    for each in (stream, other):
        for number, _ in enumerate(each):
            if number == 2:
                break
    state = stream.state_dict()
    centre(made(log, "mlp"), stream, rows=100)
    assert stream.state_dict() == state
    stream.load_state_dict(state)
    other.load_state_dict(state)
    assert torch.equal(next(iter(stream)).ids, next(iter(other)).ids)


def test_held_rows_move_gates_by_their_own_gradient_and_nothing_else(log):
    model = made(log, "mlp")
    gates = lpfs.attach(model, steps=100)
    optimizer = make_optimizer(Training(), gates.model_parameters())
    batch = next(iter(log.stream(64)))
    expected = torch.autograd.grad(bce_loss(model(batch)[:, None], batch.labels[:, :1]), [gates.x])[0]
    model.zero_grad()
    for each in model.parameters():
        if hasattr(each, "row_grads"):
            each.row_grads.clear()
    found = held_grad(State(model, optimizer, Training()), batch, gates.x, gates.model_parameters())
    assert torch.equal(found, expected)
    assert all(each.requires_grad for each in model.parameters())
    assert all(each.grad is None for each in model.parameters())
    assert not any(getattr(each, "row_grads", None) for each in model.parameters())


def test_held_rows_go_round_and_can_be_put_back(log):
    size = len(log.stream(512))
    rows = Held(log.stream(512, shuffle=True, seed=1))
    for _ in range(size + 1):
        rows.next()
    state = rows.state_dict()
    expected = [rows.next() for _ in range(size)]
    again = Held(log.stream(512, shuffle=True, seed=1))
    again.load_state_dict(state)
    for each in expected:
        assert torch.equal(each.labels, again.next().labels)
    with pytest.raises(InputError, match="gave no batch"):
        Held(iter(())).next()
