"""Under torch.compile."""

from __future__ import annotations

import pytest
import torch

import lpfs
from lpfs.errors import StateError
from tests.helpers.zoo import Plain, batch, set_gates


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
