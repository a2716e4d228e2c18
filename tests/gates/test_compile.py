"""Under torch.compile."""

from __future__ import annotations

import copy

import pytest
import torch

import lpfs
from lpfs.errors import StateError
from tests.helpers.zoo import GATES, Plain, batch, gated, set_gates


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own, about itself
def test_a_compiled_model_gives_the_same_values_and_gradients_and_follows_its_gates():
    model = Plain()
    before = model(*batch())
    gates = lpfs.attach(model, model.fields)
    compiled = torch.compile(model)
    # compiled kernels may fuse a product and a sum into one rounding: some units in the last place
    torch.testing.assert_close(compiled(*batch()), before, rtol=1e-5, atol=1e-6)
    for values in ([1.0] * 6, [0.0, -2.0, 0.5, 1.0, 1.0, 4.0]):
        set_gates(gates, values)
        grads = []
        for each in (model, compiled):
            model.zero_grad()
            each(*batch()).sum().backward()
            grads.append(gates.x.grad.clone())
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(compiled(*batch()), model(*batch()), rtol=1e-5, atol=1e-5)
        gates.norm.mul_(torch.tensor([abs(each) or 1.0 for each in values]))
    with pytest.raises(StateError, match="before torch.compile"):
        lpfs.absorb(compiled)


@pytest.fixture
def default_compiler():
    """The compiler as in a new process."""
    torch._dynamo.reset()
    torch._dynamo.config.skip_nnmodule_hook_guards = True
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("default_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_of_a_model_without_gates_does_not_run_for_one_with_gates_or_constants():
    plain = Plain()
    compiled = torch.compile(plain, backend="eager")
    before = compiled(*batch())
    model = gated(copy.deepcopy(plain))
    assert torch.equal(torch.compile(model, backend="eager")(*batch()), model(*batch()))
    assert torch.equal(compiled(*batch()), before)
    selection = lpfs.absorb(model, constants=True, partial=True)
    assert torch.equal(torch.compile(model, backend="eager")(*batch()), model(*batch()))
    assert selection.gates["item"] == GATES[1]
    constant = Plain(branch=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh()))
    other = copy.deepcopy(constant)
    torch.compile(constant, backend="eager")(*batch())
    lpfs.absorb(gated(other), partial=True)
    after = torch.compile(other, backend="eager")(*batch())
    assert torch.equal(after, other(*batch()))
    assert not torch.equal(after, constant(*batch()))


@pytest.mark.usefixtures("default_compiler")
@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compiled_in_place_after_gates_are_attached_not_before():
    model = Plain()
    model.compile(backend="eager")
    with pytest.raises(StateError, match=r"before model.compile\(\)"):
        lpfs.attach(model, model.fields)
    model = gated(Plain())
    expected = model(*batch())
    model.compile(backend="eager")
    assert torch.equal(model(*batch()), expected)
    selection = lpfs.absorb(model, partial=True)
    torch.testing.assert_close(model(*batch()), expected)
    new = Plain()
    new.compile(backend="eager")
    with pytest.raises(StateError, match=r"before model.compile\(\)"):
        lpfs.restore(new, selection)
