"""FM: a factorization machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs, Pooling
from lpfs.schema import Schema


def pairwise_interactions(tokens: Tensor) -> Tensor:
    r"""Return the sum of ⟨e_i, e_j⟩ over all pairs as (B, 1), for embeddings (B, N, D).

    .. math:: \sum_{i<j} \langle e_i, e_j\rangle
              = \tfrac12 \sum_d \Big[\big(\sum_i e_{id}\big)^2 - \sum_i e_{id}^2\Big]
    """
    return 0.5 * (tokens.sum(1).square() - tokens.square().sum(1)).sum(1, keepdim=True)


class FM(Model):
    r"""Factorization machine (Rendle 2010); one gate multiplies the weight and the embedding of a field.

    .. math:: y_t = b_t + \sum_i g_i w_{it} + \sum_{i<j} \langle g_i e_i, g_j e_j\rangle

    Each task has its own linear weights; tasks share the dot products.

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    def __init__(self, schema: Schema, *, dim: int = 16, pooling: Pooling = "mean", silent: Sequence[str] = ()) -> None:
        super().__init__(schema, silent, {"dim": dim, "pooling": pooling})
        self.inputs = Inputs(
            self.reads, self.reads.names, dim, wide=self.outputs_count, pooling=pooling, slots=self.slots()
        )
        self.bias = nn.Parameter(torch.zeros(self.outputs_count))

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        tokens, wide = self.inputs(batch).split((self.inputs.dim, self.outputs_count), -1)
        out: Tensor = wide.sum(1) + pairwise_interactions(tokens) + self.bias
        return out
