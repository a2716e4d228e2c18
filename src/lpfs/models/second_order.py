"""What factorisation machines add up: linear weights and products of all pairs."""

from __future__ import annotations

from torch import Tensor


def all_pairs(tokens: Tensor) -> Tensor:
    r"""Return the sum over all pairs of ⟨e_i, e_j⟩ as (B, 1), for embeddings (B, N, D).

    .. math:: \sum_{i<j} \langle e_i, e_j\rangle
              = \tfrac12 \sum_d \Big[\big(\sum_i e_{id}\big)^2 - \sum_i e_{id}^2\Big]
    """
    return 0.5 * (tokens.sum(1).square() - tokens.square().sum(1)).sum(1, keepdim=True)
