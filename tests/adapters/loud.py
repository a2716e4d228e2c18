"""Weights that are heard: both libraries start with tables near 1e-4, where a wrong model is right to rounding."""

from __future__ import annotations

import torch
from torch import nn


def loud(model: nn.Module) -> nn.Module:
    """Draw every weight anew, large enough that each of them counts, biases too; in place."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in dict.fromkeys(model.parameters()):
            weight.copy_(0.25 * torch.randn(weight.shape, generator=random))
    return model
