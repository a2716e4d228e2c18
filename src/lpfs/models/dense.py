"""The dense part of a model: Linear and ReLU in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lpfs.errors import InputError


def dense_layers(width: int, hidden: Sequence[int], out: int) -> nn.Sequential:
    """Return Linear-ReLU-…-Linear from ``width`` over ``hidden`` to ``out``; the last has no activation.

    >>> dense_layers(8, (4,), 1)
    Sequential(
      (0): Linear(in_features=8, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=1, bias=True)
    )
    """
    if width < 1:
        raise InputError("nothing that reaches the prediction is left: the dense part would read no columns")
    if any(not isinstance(each, int) or each < 1 for each in hidden):
        raise InputError(f"hidden widths must be whole numbers of at least 1, found {list(hidden)}")
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, out))
