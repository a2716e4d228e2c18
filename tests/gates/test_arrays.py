"""What numpy computes for a few gates on the CPU is what torch computes, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from surrogate import Surrogate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lpfs.gates.functions import FUNCTIONS, gate_function
from lpfs.gates.module import Gates
from lpfs.gates.optimizer import ProxSGD

ARRAYS = [name for name, each in FUNCTIONS.items() if each.arrays]


@pytest.mark.parametrize("gate", ARRAYS)
@pytest.mark.parametrize("tau", [2.0, 3.0])
def test_values_and_slopes_are_the_same_bits(gate, tau):
    function = FUNCTIONS[gate] if FUNCTIONS[gate].tau is None else gate_function(gate, tau=tau)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 7, 27, 400):
        for power in range(0, 50):
            epsilon = torch.tensor(0.1 * 0.82**power)
            x = torch.randn(size, generator=generator)
            x[0] = [0.0, -0.0, 1e30, float("inf"), float("nan")][power % 5]
            arrays = function.on_arrays(x.numpy(), epsilon.numpy().reshape(1))
            for tensor, array in zip(function.value_and_slope(x, epsilon), arrays, strict=True):
                assert array.dtype == np.float32
                assert np.array_equal(tensor.numpy(), array, equal_nan=True)


@pytest.mark.parametrize("gate", ARRAYS)
def test_the_gradient_is_the_same_bits(gate, monkeypatch):
    gates = Gates([str(n) for n in range(27)], gate_function(gate), 500)
    with torch.no_grad():
        gates.x.normal_()
        gates.epsilon.fill_(0.0123)
        gates.scale.fill_(1.37)
    made = []
    for by_numpy in (True, False):
        assert gates._by_numpy(gates.x)
        with monkeypatch.context() as patch:
            patch.setattr(Gates, "_by_numpy", lambda self, x, by_numpy=by_numpy: by_numpy)
            gates.x.grad = None
            values = gates()
            (values * torch.linspace(-1, 1, 27)).sum().backward()
            made.append((values.detach(), gates.x.grad, gates.values))
    assert all(torch.equal(one, two) for one, two in zip(*made, strict=True))


def test_views_follow_the_tensors():
    gates = Gates(["a", "b"], gate_function("lpfs++"), 500)
    before = gates.values
    with torch.no_grad():
        gates.x.mul_(0.5)
    halved = gates.values
    assert not torch.equal(halved, before)
    gates.x.data = torch.tensor([0.25, 0.25])
    assert not torch.equal(gates.values, halved)
    gates.epsilon = torch.tensor(0.01)
    at_epsilon = gates.values
    gates.epsilon = torch.tensor(0.1)
    assert not torch.equal(gates.values, at_epsilon)
    assert torch.equal(gates(), gates.values)
    gates.share_memory()
    with torch.no_grad():
        gates.x.fill_(1.0)
    assert torch.equal(gates.values, before)


def test_gates_may_be_called_with_another_x():
    gates = Gates(["a", "b"], gate_function("lpfs++"), 500)
    other = torch.tensor([0.5, 0.0], requires_grad=True)
    values = torch.func.functional_call(gates, {"x": other}, ())
    values.sum().backward()
    assert torch.equal(values, gates.values_of(other))
    assert other.grad.abs().min() > 0
    assert gates.x.grad is None


def test_hooks_of_others_on_a_step_are_called():
    calls = []
    x = torch.nn.Parameter(torch.ones(2))
    prox = ProxSGD([x], lr=0.1)
    x.grad = torch.ones(2)
    prox.register_step_pre_hook(lambda *_: calls.append("before"))
    prox.register_step_post_hook(lambda *_: calls.append("after"))
    prox.step()
    assert calls == ["before", "after"]
    everywhere = register_optimizer_step_pre_hook(lambda *_: calls.append("global"))
    other = ProxSGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    other.step()
    everywhere.remove()
    other.step()
    assert calls == ["before", "after", "global"]
    prox.zero_grad(set_to_none=False)
    assert torch.equal(x.grad, torch.zeros(2))
    prox.zero_grad()
    assert x.grad is None


def test_a_scheduler_may_wrap_the_step():
    search = Surrogate("graded", 5, None, 100, "lpfs++", penalty=0.1)
    torch.optim.lr_scheduler.LambdaLR(search.prox, lambda step: 1.0)
    search.run(3)
    assert search.gates.status().step == 3
