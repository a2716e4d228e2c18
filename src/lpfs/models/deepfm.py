"""DeepFM: a factorisation machine and a multilayer perceptron over the same embeddings."""

from __future__ import annotations

from torch import Tensor

from lpfs.models.second_order import all_pairs
from lpfs.models.wide_deep import WideDeep


class DeepFM(WideDeep):
    r"""DeepFM (Guo et al. 2017): Wide & Deep, and the products of all pairs.

    .. math:: y = \sum_i g_i w_i + \sum_{i<j} \langle g_i e_i, g_j e_j\rangle
              + \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    Arguments are those of :class:`WideDeep`; tasks share the products.
    """

    def entrance(self) -> str | None:
        """Return None: the products of embeddings read them too."""
        return None

    def combine(self, tokens: Tensor, wide: Tensor) -> Tensor:
        """Return logits (B, 1 + tasks) for embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
        return super().combine(tokens, wide) + all_pairs(tokens)
