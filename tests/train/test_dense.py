"""Fused dense layers, loss and updates on a GPU against plain torch. The tests with CUDA need only pytest and torch."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from lpfs._imports import fused_kernels_enabled
from lpfs.train import dense
from lpfs.train.step import bce_loss


@pytest.fixture(autouse=True)
def enabled(monkeypatch):
    monkeypatch.setattr(dense, "fused_kernels_enabled", lambda: True)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))


@pytest.mark.parametrize(("value", "expected"), [(None, True), ("1", True), ("0", False)])
def test_fused_kernels_are_the_default(monkeypatch, value, expected):
    monkeypatch.delenv("LPFS_FUSED_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("LPFS_FUSED_KERNELS", value)
    assert fused_kernels_enabled.__wrapped__() is expected


def test_layers_are_fused_only_while_the_block_runs():
    net, x = make_net(), torch.randn(5, 40)
    expected = net(x)
    with dense.fused_layers(nn.ModuleList([net])):
        assert type(net) is not nn.Sequential
        assert torch.equal(net(x), expected)  # on a CPU nothing changes
    assert type(net) is nn.Sequential


def test_layers_with_hooks_or_other_modules_are_not_fused():
    hooked, other, bare = make_net(), nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 3, False))
    hooked[1].register_forward_hook(lambda module, arguments, output: output * 2)
    nets = nn.ModuleList([hooked, other, bare, nn.Sequential(), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())])
    with dense.fused_layers(nets):
        assert all(type(net) is nn.Sequential for net in nets)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 70, 3000])
def test_fused_layers_give_the_gradients_of_torch(rows):
    results = []
    x = torch.randn(rows, 40, device="cuda", dtype=torch.float64)
    for dtype, fused in ((torch.float64, False), (torch.float32, True)):
        net, values = copy.deepcopy(make_net()).to("cuda", dtype), x.to(dtype, copy=True).requires_grad_()
        if fused:
            with dense.fused_layers(net):
                out = net(values)
                assert "LinearReLU" in type(out.grad_fn).__name__
        else:
            out = net(values)
        out.sigmoid().sum().backward()
        results.append([out.detach(), values.grad, *(weight.grad for weight in net.parameters())])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5 * rows**0.5)


@needs_cuda
@pytest.mark.parametrize("shape", [(7, 1), (600, 3), (5000, 1)])
def test_the_loss_and_its_gradient(shape):
    source = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=source).mul(8).cuda()
    labels = torch.rand(shape, generator=source).round().cuda()
    logits = values.clone().requires_grad_()
    loss = bce_loss(logits, labels)
    loss.backward()
    exact = values.double().requires_grad_()
    expected = binary_cross_entropy_with_logits(exact, labels.double(), reduction="none").mean(0).sum()
    expected.backward()
    assert type(loss.grad_fn).__name__ == "BinaryCrossEntropyBackward"
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-9)


@needs_cuda
def test_layers_and_loss_can_be_differentiated_twice():
    """As a penalty on the gradient of the inputs needs, which FairFS has."""
    results = []
    x = torch.randn(70, 40, device="cuda", dtype=torch.float64)
    labels = torch.rand(70, 1, device="cuda").round()
    for dtype, fused in ((torch.float64, False), (torch.float32, True)):
        net, values = copy.deepcopy(make_net()).to("cuda", dtype), x.to(dtype, copy=True).requires_grad_()
        with dense.fused_layers(net) if fused else nullcontext():
            loss = bce_loss(net(values), labels.to(dtype))
        assert fused == (type(loss.grad_fn).__name__ == "BinaryCrossEntropyBackward")
        (grad,) = torch.autograd.grad(loss, [values], create_graph=True)
        (loss + 100 * (grad * values.detach()).sum(1).square().sum()).backward()
        results.append([grad.detach(), *(weight.grad for weight in net.parameters())])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-3, atol=1e-5)


@needs_cuda
@pytest.mark.parametrize("count", [1, 6, 9])
def test_updates_of_whole_parameters(count):
    from lpfs.embeddings import _triton

    shapes = [(5,), (300, 7), (1,), (1300,), (2, 3, 4), (64, 64), (10,), (11,), (1 << 21,)][:count]
    torch.manual_seed(0)
    weights, totals, grads = ([torch.rand(shape, device="cuda") for shape in shapes] for _ in range(3))
    expected = []
    for weight, total, grad in zip(weights, totals, grads, strict=True):
        new = total.double() + grad.double() ** 2
        expected.append((weight.double() - 0.05 * grad.double() / (new.sqrt() + 1e-10), new))
    _triton.dense_adagrad(weights, totals, grads, torch.tensor(0.05, device="cuda"), 1e-10)
    for weight, total, (new_weight, new_total) in zip(weights, totals, expected, strict=True):
        torch.testing.assert_close(weight.double(), new_weight, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(total.double(), new_total, rtol=1e-6, atol=1e-7)
