"""The same promises on a GPU; skipped where there is none. Needs pytest and torch alone (no other fixture)."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from planted import VALUES, Planted
from torch import nn
from torch.nn import functional
from zoo import INPUTS, Plain, Stacked, batch, set_gates, whole_weights

import lpfs
from lpfs.gates.functions import FUNCTIONS
from lpfs.gates.sites import Site

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def on_gpu(data):
    return tuple(each.cuda() for each in data)


@pytest.mark.parametrize("gate", sorted(FUNCTIONS))
@pytest.mark.parametrize("when", ["attach there", "move after"])
def test_predictions_are_bit_identical_right_after(gate, when):
    model = Plain().cuda()
    before = model(*on_gpu(batch()))
    if when == "move after":
        model.cpu()
    gates = lpfs.attach(model, model.fields, gate=gate)
    model.cuda()
    assert gates.x.is_cuda
    assert torch.equal(model(*on_gpu(batch())), before)
    assert torch.equal(gates(), torch.ones_like(gates.x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorb_and_prune(dtype):
    model = Plain().to("cuda", dtype)
    gates = lpfs.attach(model, {name: model.fields[name] for name in ("user", "item", "city")})
    with torch.no_grad():
        gates.x.copy_(torch.tensor([0.0, -0.731, 0.123]))
    data = on_gpu(batch(dtype))
    before = model(*data)
    selection = lpfs.absorb(model)
    assert torch.equal(model(*data), before)
    pruned = lpfs.prune(model, selection, batch=data, inputs=INPUTS)
    assert torch.equal(pruned.model(*data), before)
    assert pruned.certificate.certified


def test_every_kind_of_field_where_arithmetic_is_exact():
    model = whole_weights(Plain()).double().cuda()
    set_gates(lpfs.attach(model, model.fields, reader=model.top[0]), [0.0, -2.0, 0.5, 4.0, -0.25, 0.0])
    data = on_gpu(batch(torch.float64, whole=True))
    before = model(*data)
    selection = lpfs.absorb(model)
    assert torch.equal(model(*data), before)
    pruned = lpfs.prune(model, selection, batch=data, inputs=INPUTS, cut=True)
    assert torch.equal(pruned.model(*data), before)


def test_a_search_finds_the_true_fields_and_resumes():
    torch.manual_seed(0)
    log, steps = Planted(0), 600
    model = Stacked(log.size, rows=VALUES, hidden=32).cuda()
    nn.init.normal_(model.table.rows.weight, std=0.1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)

    def step(*movers) -> None:
        ids, clicks = on_gpu(log.batch())
        model.zero_grad()
        functional.binary_cross_entropy_with_logits(model(ids), clicks).backward()
        for each in movers:
            each.step()

    for _ in range(600):
        step(optimizer)
    sites = {f"f{n}": Site("table", index=n) for n in range(log.size)}
    gates = lpfs.attach(model, sites, steps=steps)
    prox = gates.optimizer(keep=15)
    for _ in range(300):
        step(optimizer, prox, gates)
    saved = copy.deepcopy((gates.state_dict(), prox.state_dict()))
    gates.load_state_dict(saved[0])
    prox.load_state_dict(saved[1])
    for _ in range(300):
        step(optimizer, prox, gates)
    assert len(gates.kept) == 15
    assert sum(int(name[1:]) < 15 for name in gates.kept) >= 13


@pytest.mark.filterwarnings("ignore")
def test_autocast_and_compile():
    model = Plain().cuda()
    data = on_gpu(batch())
    with torch.autocast("cuda", torch.bfloat16):
        before = model(*data)
        gates = lpfs.attach(model, model.fields)
        assert torch.equal(model(*data), before)
    compiled = torch.compile(model)
    torch.testing.assert_close(compiled(*data), model(*data), rtol=1e-3, atol=1e-4)
    compiled(*data).sum().backward()
    assert bool(torch.isfinite(gates.x.grad).all())


def made_search(steps: int = 300, free: bool | None = None):
    """Gates that a quadratic pulls at, in static tensors, so that a whole step can be captured."""
    gates = lpfs.Gates([f"f{n}" for n in range(27)], lpfs.gate_function("lpfs++"), steps).cuda()
    gates.branch_free = free
    prox = gates.optimizer(keep=13)
    importance = torch.linspace(0.001, 0.1, 27, device="cuda")
    gates.x.grad = torch.zeros_like(gates.x)

    def step() -> None:
        gates.x.grad.zero_()
        (0.5 * importance * (1 - gates()) ** 2).sum().backward()
        prox.step()
        gates.step()

    return gates, prox, step


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_asks_the_device_nothing():
    gates, _, step = made_search(free=True)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gates.status().step == 51


@pytest.mark.parametrize("free", [None, True])
def test_a_step_can_be_captured_in_a_graph(free):
    eager, _, step = made_search()
    for _ in range(300):
        step()
    gates, _, step = made_search(free=free)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(200):
        graph.replay()
    for _ in range(97):
        step()  # and on, eagerly
    assert gates.status().step == 300
    assert torch.equal(gates.x, eager.x)
    assert len(gates.kept) == 13


def test_a_gradient_that_is_not_finite_is_told_later():
    gates, prox, step = made_search(free=True)
    step()
    before = gates.x.detach().clone()
    gates.x.grad.fill_(float("nan"))
    prox.step()
    assert torch.equal(gates.x, before)
    with pytest.raises(lpfs.errors.NonFiniteError):
        gates.status()


def test_a_search_goes_on_on_the_cpu():
    gates, prox, step = made_search(free=True)
    for _ in range(150):
        step()
    gates.branch_free = None
    gates.cpu()
    assert prox.stepper is None
    assert prox.param_groups[0]["lr"] == gates.schedule.lr(150)
    gates.x.grad = torch.zeros(27)
    prox.load_state_dict(prox.state_dict())
    prox.step()
    gates.step()
    assert gates.status().step == 151
