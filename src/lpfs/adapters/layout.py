"""Which numbers of a weight stay when fields leave, told by the shapes of the weight before and after."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How the fields of a model stand beside each other.

    Args:
        widths: field -> how many columns it has in the concatenation (B, W), in the order of the columns.
        tokens: the fields of the stack (B, F, D), in order; [] where there is no such stack.

    >>> layout = Layout({"user": 2, "item": 2, "price": 1}, ("user", "item"))
    >>> layout.columns(["item", "price"])
    tensor([2, 3, 4])
    >>> layout.stays(8, 6, ["item", "price"])  # W = 5 columns and 3 others behind them
    tensor([2, 3, 4, 5, 6, 7])
    >>> layout.stays(6, 3, ["item", "price"])  # 3 numbers a token
    tensor([3, 4, 5])

    """

    widths: dict[str, int]
    tokens: tuple[str, ...]

    def columns(self, kept: Collection[str]) -> Tensor:
        """Return the columns of the concatenation that stay."""
        flags = [name in kept for name, width in self.widths.items() for _ in range(width)]
        return torch.tensor(flags, dtype=torch.bool).nonzero().flatten()

    def positions(self, kept: Collection[str]) -> Tensor:
        """Return the places in the stack that stay."""
        flags = [name in kept for name in self.tokens]
        return torch.tensor(flags, dtype=torch.bool).nonzero().flatten()

    def stays(self, before: int, after: int, kept: Collection[str]) -> Tensor | None:
        """Return which indices of a dimension of ``before`` numbers stay, where ``after`` do; None if not known.

        It is a concatenation, with or without other numbers behind it, or as many numbers for every token.
        """
        columns, width = self.columns(kept), sum(self.widths.values())
        if before >= width and before - after == width - len(columns):
            return torch.cat([columns, torch.arange(width, before)])
        positions, count = self.positions(kept), len(self.tokens)
        if count and before % count == 0 and before // count * len(positions) == after:
            each = before // count
            return (positions[:, None] * each + torch.arange(each)).flatten()
        return None
