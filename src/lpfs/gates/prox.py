"""The proximal steps in closed form: pure functions.

The proximal step of a penalty p with threshold is argmin over x of ½(x - x̃)² + p(x), where x̃ is the point the
momentum step has reached.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_threshold(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Return argmin_z ½(z - x)² + t·|z|: x moved by t towards zero, and exactly zero where it would cross.

    A threshold of 0 returns x to the last bit, one of ``inf`` returns zeros.

    >>> soft_threshold(torch.tensor([1.0, -0.25, -1.0]), 0.5)
    tensor([ 0.5000,  0.0000, -0.5000])
    """
    return x - _clamp(x, threshold)


def soft_threshold_(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Move x by t towards zero, in place: :func:`soft_threshold` to the last bit."""
    return x.sub_(_clamp(x, threshold))


def positive_threshold(x: Tensor, threshold: Tensor | float) -> Tensor:
    """Return argmin over z >= 0 of ½(z - x)² + t·z: max(x - t, 0).

    >>> positive_threshold(torch.tensor([1.0, 0.25, -1.0]), 0.5)
    tensor([0.5000, 0.0000, 0.0000])
    """
    return soft_threshold(x, threshold).clamp_(min=0)


def hard_threshold(x: Tensor, penalty: Tensor | float) -> Tensor:
    """Return argmin_z ½(z - x)² + p·[z ≠ 0]: x where |x| > √(2p), else exactly zero.

    >>> hard_threshold(torch.tensor([1.0, -0.25]), 0.125)
    tensor([1., 0.])
    """
    cut = torch.as_tensor(2 * penalty, dtype=x.dtype, device=x.device).sqrt()
    return torch.where(x.abs() > cut, x, torch.zeros_like(x))


def _clamp(x: Tensor, bound: Tensor | float) -> Tensor:
    if isinstance(bound, Tensor):
        return torch.clamp(x, -bound, bound)
    return x.clamp(-bound, bound)
