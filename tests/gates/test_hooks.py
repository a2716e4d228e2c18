"""The product of a module's output and its gate: values, gradients, and where the fast path does not apply."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lpfs

D = 4


class Strided(nn.Module):
    """A table whose output has the dimensions of its memory in another order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 9))

    def forward(self, ids):
        return self.weight[:, ids].T


class Constant(nn.Module):
    """An output that requires no gradient."""

    def forward(self, ids):
        return ids[:, None].float().expand(-1, D)


class Net(nn.Module):
    def __init__(self, calls=1):
        super().__init__()
        self.calls = calls
        self.fields = nn.ModuleDict({"table": nn.Embedding(9, D), "strided": Strided(), "constant": Constant()})
        self.top = nn.Linear(3 * calls * D, 1)

    def forward(self, ids):
        parts = [module(ids + shift) for shift in range(self.calls) for module in self.fields.values()]
        return torch.tanh(self.top(torch.cat(parts, 1))).squeeze(1)


def set_x(gates, values):
    with torch.no_grad():
        gates.x.copy_(torch.tensor(values))


def make(calls=1):
    torch.manual_seed(0)
    model = Net(calls)
    gates = lpfs.attach(model, model.fields, steps=100)
    set_x(gates, [0.7, -0.4, 0.0])
    return model, gates


def plain_gradients(model, gates, ids, weight=1.0):
    """Return the gradients of the plain expression in autograd: of x, and of the parameters of the model."""
    x = gates.x.detach().clone().requires_grad_()
    values = gates.function.value(x, gates.epsilon, gates.norm * gates.scale)
    with gates.disabled():
        parts = [
            module(ids + shift) * values[number]
            for shift in range(model.calls)
            for number, module in enumerate(model.fields.values())
        ]
    loss = weight * torch.tanh(model.top(torch.cat(parts, 1))).square().sum()
    parameters = gates.model_parameters()
    return loss, torch.autograd.grad(loss, [x, *parameters])


def gradients(gates):
    return [gates.x.grad, *(parameter.grad for parameter in gates.model_parameters())]


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_gradients_are_those_of_the_plain_expression(rows, calls):
    model, gates = make(calls)
    ids = torch.arange(rows)
    loss = model(ids).square().sum()
    loss.backward()
    expected, expected_gradients = plain_gradients(model, gates, ids)
    assert torch.equal(loss, expected)
    for gradient, other in zip(gradients(gates), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, other)


def test_the_graph_can_be_used_twice_and_gradients_are_accumulated():
    model, gates = make()
    first, second = torch.arange(5), torch.arange(3, 8)
    loss = model(first).square().sum()
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients(gates)]
    loss.backward()
    assert all(torch.equal(2 * a, b) for a, b in zip(once, gradients(gates), strict=True))
    model(second).square().sum().backward()
    other = plain_gradients(model, gates, second)[1]
    for a, b, gradient in zip(once, other, gradients(gates), strict=True):
        torch.testing.assert_close(gradient, 2 * a + b)


def test_one_backward_pass_of_two_forward_passes_with_other_gates_between():
    model, gates = make()
    ids = torch.arange(5)
    loss = model(ids).square().sum()
    expected = plain_gradients(model, gates, ids)[1]
    set_x(gates, [0.3, 0.9, 1.0])
    other = plain_gradients(model, gates, ids, 0.5)[1]
    (loss + 0.5 * model(ids).square().sum()).backward()
    for gradient, a, b in zip(gradients(gates), expected, other, strict=True):
        torch.testing.assert_close(gradient, a + b)


def test_second_derivatives_with_respect_to_a_table():
    model, gates = make()
    ids = torch.arange(5)
    weight = model.fields["table"].weight
    (gradient,) = torch.autograd.grad(model(ids).square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), weight)
    with gates.disabled():
        gates_now = gates.values
        parts = [module(ids) * gate for module, gate in zip(model.fields.values(), gates_now, strict=True)]
    loss = torch.tanh(model.top(torch.cat(parts, 1))).square().sum()
    (expected,) = torch.autograd.grad(loss, weight, create_graph=True)
    (expected_second,) = torch.autograd.grad(expected.square().sum(), weight)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(second, expected_second)


def test_no_gradients_are_recorded_where_they_are_off():
    model, gates = make()
    ids = torch.arange(5)
    expected = model(ids)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            output = model(ids)
        assert not output.requires_grad
        assert torch.equal(output, expected)
    gates.x.requires_grad_(False)
    model(ids).sum().backward()
    assert gates.x.grad is None
    assert gates.live is None


def test_outputs_of_other_dtypes_keep_theirs():
    model, gates = make()
    ids = torch.arange(5)
    with gates.disabled():
        single = model.fields["table"](ids) * gates.values[0]
    model.fields["table"].double()
    seen = []
    model.fields["table"].register_forward_hook(lambda module, args, output: seen.append(output))
    model.top.double()
    model(ids)
    assert seen[0].dtype == torch.float64
    torch.testing.assert_close(seen[0].float(), single)
