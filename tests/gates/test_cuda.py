"""The same tests on a GPU; skipped without one. Needs only pytest and torch; run it from the root directory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import lpfs
from lpfs import FUNCTIONS, Keep, Site
from tests.helpers.planted import VALUES, Planted
from tests.helpers.zoo import INPUTS, Plain, Stacked, batch, set_gates, whole_weights

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


def make_search(steps: int = 300, gate: str = "lpfs++", fused: bool | None = None, kind: str = "graded", **settings):
    """Gates with a quadratic loss in static tensors, so that a whole step can be captured."""
    gates = lpfs.Gates([f"f{n}" for n in range(27)], lpfs.gate_function(gate), steps)
    gates.fused = fused
    gates.cuda()
    prox = gates.optimizer(**{"keep": 13, **settings})
    weight = {"graded": torch.linspace(0.001, 0.1, 27), "useless": torch.zeros(27)}[kind].cuda()
    gates.x.grad = torch.zeros_like(gates.x)

    def step() -> None:
        gates.x.grad.zero_()
        (0.5 * weight * (1 - gates()) ** 2).sum().backward()
        prox.step()
        gates.step()

    return gates, prox, step


def copy_state(source, target) -> None:
    """Give a search the state of another one."""
    target[0].load_state_dict(copy.deepcopy(source[0].state_dict()))
    target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))


@pytest.mark.parametrize("gate", ["lpfs", "lpfs++"])
@pytest.mark.parametrize("kind", ["graded", "useless"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prox": "l1", "must_keep": ["f0", "f5"]},
        {"momentum": 0.0},
        {"threshold": "momentum", "costs": [1.0 + n for n in range(27)]},
        {"control": Keep(13, travel=0.4, begin=0.2, least=4.0, ahead=0.0)},
        {"control": Keep(13, travel=2.0, freeze=0.85)},  # no time to spare: λ hurries, gates are pushed
        {"keep": None, "penalty": 0.05, "must_keep": ["f0"]},  # f0 stays alive without a gradient, too
    ],
)
def test_triton_takes_the_steps_of_torch_from_the_first_to_the_last(gate, kind, settings):
    """Every step starts from the same state: values, gradient, proximal step, control law."""
    pytest.importorskip("triton")
    torch_search = make_search(150, gate, False, kind, **settings)
    triton_search = make_search(150, gate, None, kind, **settings)
    assert torch_search[0]._kernels() is None
    assert triton_search[0]._kernels() is not None
    assert triton_search[1].param_groups[0]["fused"]
    restored = frozen = 0
    for _ in range(150):
        before = torch_search[0].control.clone()
        torch_search[2]()
        triton_search[2]()
        one, two = torch_search[0], triton_search[0]
        assert torch.equal(one.x == 0, two.x == 0)
        assert torch.equal(one.dead, two.dead)
        assert torch.equal(one.steps_done, two.steps_done)
        assert torch.equal(one.epsilon, two.epsilon)
        torch.testing.assert_close(two.x, one.x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(two.previous_x, one.previous_x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(two.scale, one.scale, rtol=1e-6, atol=0)
        torch.testing.assert_close(two.control, one.control, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(two.penalty_now, one.penalty_now, rtol=1e-6, atol=0)
        torch.testing.assert_close(two.lr_now, one.lr_now, rtol=1e-12, atol=0)
        if settings.get("momentum") != 0.0:
            buffers = [search[1].state[search[0].x]["momentum_buffer"] for search in (torch_search, triton_search)]
            torch.testing.assert_close(*buffers, rtol=1e-5, atol=1e-6)
        restored += bool(0 < one.control[0] < before[0])
        frozen += bool(one.control[1])
        copy_state(torch_search, triton_search)
    if "penalty" not in settings:
        assert frozen > 5
        assert len(torch_search[0].kept) == 13
    if kind == "useless" and not settings:
        assert restored


@pytest.mark.parametrize("rescale", ["epsilon", "rms", "off"])
def test_triton_rescales_as_torch(rescale):
    pytest.importorskip("triton")
    scales = []
    for fused in (False, None):
        gates = lpfs.Gates([f"f{n}" for n in range(5)], lpfs.gate_function("lpfs++"), 700, rescale=rescale)
        gates.fused = fused
        gates.cuda()
        gates.optimizer(penalty=0.0)
        with torch.no_grad():
            gates.x.copy_(torch.tensor([1.0, 0.5, 0.0, -0.3, 2.0]))
        for _ in range(700):
            gates.step()
        scales.append(gates.scale)
    torch.testing.assert_close(*scales)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("fused", [None, False])
def test_a_step_needs_no_synchronization(fused):
    gates, _, step = make_search(fused=fused)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert gates.status().step == 51


@pytest.mark.parametrize("fused", [None, False])
def test_a_step_can_be_captured_in_a_graph(fused):
    eager, _, step = make_search(fused=fused)
    for _ in range(300):
        step()
    gates, _, step = make_search(fused=fused)
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
        step()  # and the rest eagerly
    assert gates.status().step == 300
    assert torch.equal(gates.x, eager.x)
    assert len(gates.kept) == 13


@pytest.mark.parametrize("fused", [None, False])
def test_a_gradient_that_is_not_finite_is_reported_later(fused):
    gates, prox, step = make_search(fused=fused)
    step()
    before = gates.x.detach().clone()
    gates.x.grad.fill_(float("nan"))
    prox.step()
    assert torch.equal(gates.x, before)
    with pytest.raises(lpfs.errors.NonFiniteError):
        gates.status()


def test_a_search_continues_on_the_cpu():
    gates, prox, step = make_search()
    for _ in range(150):
        step()
    gates.cpu()
    group = prox.param_groups[0]
    assert not group["capturable"]
    assert group["lr"] is gates.lr_now
    assert float(group["lr"]) == gates.schedule.lr(150)
    gates.x.grad = torch.zeros(27)
    prox.step()
    gates.step()
    assert gates.status().step == 151
