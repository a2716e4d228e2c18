"""The matrix X that models of DeepCTR-Torch read: a module that it goes through, other values in its columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lpfs.gates.leak import other_values

INPUTS = "lpfs_inputs"


class Through:
    """Before the model's forward: X goes through a module, on which gates of its columns can be."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, model: nn.Module, args: Any) -> Any:
        """Return the arguments with X replaced."""
        return (self.module(args[0]), *args[1:])


class OtherColumns:
    """Returns X with other values in some columns, for the leak check."""

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        self.spans = spans

    def __call__(self, batch: Tensor) -> Tensor:
        """Return a changed copy; the batch itself where its columns have one value only."""
        result = batch.clone()
        for start, stop in self.spans:
            others = other_values(batch[:, start:stop], 1)
            if others is not None:
                result[:, start:stop] = others
        return batch if torch.equal(result, batch) else result
