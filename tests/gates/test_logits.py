from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lpfs.errors import InputError
from lpfs.gates.verification import compute_logits, max_abs_difference, rounding_bound


class Echo(nn.Module):
    """Returns what it is told, and remembers how it was called."""

    def __init__(self, output=None) -> None:
        super().__init__()
        self.output, self.calls = output, []
        self.child = nn.Dropout()

    def forward(self, *args):
        self.calls.append((args, self.training, torch.is_grad_enabled()))
        return args[0] if self.output is None else self.output


def test_a_model_is_run_in_eval_mode_and_its_modes_are_restored():
    model = Echo()
    model.child.eval()
    (result,) = compute_logits(model, torch.ones(2))
    assert result.tolist() == [1.0, 1.0]
    assert model.calls[0][1:] == (False, False)
    assert model.training
    assert not model.child.training


def test_modes_are_restored_after_an_error():
    class Broken(nn.Module):
        def forward(self, batch):
            raise RuntimeError("no")

    model = Broken()
    with pytest.raises(RuntimeError, match="no"):
        compute_logits(model, 1)
    assert model.training


def test_how_a_model_is_called():
    model, one, two = Echo(), torch.ones(1), torch.zeros(1)
    compute_logits(model, (one, two))
    compute_logits(model, [one])
    compute_logits(Echo(one), {"a": one})
    assert [len(args) for args, _, _ in model.calls] == [2, 1]
    (result,) = compute_logits(model, {"x": two}, call=lambda model, batch: model(batch["x"]))
    assert result is two


def test_tensors_are_found_in_tuples_and_dicts():
    output = {"click": torch.ones(1), "more": (torch.zeros(1), [torch.tensor([1])], "text")}
    assert [each.tolist() for each in compute_logits(Echo(output), 1)] == [[1.0], [0.0]]
    with pytest.raises(InputError, match="returned dict without any float tensor"):
        compute_logits(Echo({"click": torch.tensor([1])}), 1)


def test_max_change():
    a = [torch.tensor([1.0, 2.0]), torch.tensor([[0.0]])]
    assert max_abs_difference(a, a) == 0.0
    assert max_abs_difference(a, [torch.tensor([1.0, 2.5]), torch.tensor([[0.0]])]) == 0.5
    assert max_abs_difference(a, a[:1]) == math.inf
    assert max_abs_difference(a, [torch.tensor([1.0]), torch.tensor([[0.0]])]) == math.inf
    odd = [torch.tensor([math.nan, math.inf, 1.0])]
    assert max_abs_difference(odd, [torch.tensor([math.nan, math.inf, 1.0])]) == 0.0
    assert max_abs_difference(odd, [torch.tensor([math.nan, -math.inf, 1.0])]) == math.inf
    assert max_abs_difference(odd, [torch.tensor([0.0, math.inf, 1.0])]) == math.inf
    assert max_abs_difference([torch.tensor([0.0])], [torch.tensor([-0.0])]) == 0.0


def test_the_rounding_bound_follows_size_and_dtype():
    assert rounding_bound([torch.tensor([0.5])]) == pytest.approx(1000 * 2**-23)
    assert rounding_bound([torch.tensor([4.0])]) == pytest.approx(4000 * 2**-23)
    assert rounding_bound([torch.tensor([1.0], dtype=torch.bfloat16)]) == pytest.approx(0.1)
    assert rounding_bound([torch.tensor([math.nan])]) == pytest.approx(1000 * 2**-23)
