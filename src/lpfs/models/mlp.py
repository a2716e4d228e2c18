"""MLP, the default model of ``select``, and its relatives with linear weights or dot products: WideDeep, DeepFM, FM."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.models.base import Model
from lpfs.models.inputs import Inputs, Pooling
from lpfs.models.layers import Layout, dense_layers
from lpfs.schema import Schema


class MLP(Model):
    r"""Dense layers on the concatenation of all embeddings; numeric fields have embeddings too.

    .. math:: y = \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        hidden: widths of the hidden layers.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        silent: parts replaced by zeros (see :class:`Model`).
    """

    wide = False  # whether a field has linear weights too

    def __init__(
        self,
        schema: Schema,
        *,
        dim: int = 16,
        hidden: Sequence[int] = (256, 128),
        pooling: Pooling = "mean",
        silent: Sequence[str] = (),
    ) -> None:
        super().__init__(schema, silent, {"dim": dim, "hidden": hidden, "pooling": pooling})
        wide = self.outputs_count if self.wide else 0
        self.inputs = Inputs(self.reads, self.reads.names, dim, wide=wide, pooling=pooling, slots=self.slots())
        self.top = dense_layers(len(schema) * dim, hidden, self.outputs_count)

    def outputs(self, batch: Batch) -> Tensor:
        out: Tensor = self.top(self.inputs(batch).flatten(1))
        return out

    def entrance(self) -> str | None:
        return "top.0"

    def dense_path(self) -> str | None:
        return None if self.wide else "top"

    def layout(self) -> Layout:
        return {**super().layout(), "top.0.weight": {1: [(name, self.inputs.dim) for name in self.slots()]}}


class WideDeep(MLP):
    r"""Wide & Deep (Cheng et al. 2016); one gate multiplies the wide weight and the embedding of a field.

    .. math:: y = \sum_i g_i w_i + \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    The arguments are those of :class:`MLP`.
    """

    wide = True

    def outputs(self, batch: Batch) -> Tensor:
        return self.combine(*self.inputs(batch).split((self.inputs.dim, self.outputs_count), -1))

    def combine(self, tokens: Tensor, wide: Tensor) -> Tensor:
        """Return logits (B, 1 + tasks) for embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
        out: Tensor = self.top(tokens.flatten(1))
        return out + wide.sum(1)


class DeepFM(WideDeep):
    r"""DeepFM (Guo et al. 2017): Wide & Deep plus the dot products of all pairs.

    .. math:: y = \sum_i g_i w_i + \sum_{i<j} \langle g_i e_i, g_j e_j\rangle
              + \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    The arguments are those of :class:`MLP`; tasks share the dot products.
    """

    def entrance(self) -> str | None:
        return None  # the dot products use the embeddings too

    def combine(self, tokens: Tensor, wide: Tensor) -> Tensor:
        return super().combine(tokens, wide) + pairwise_interactions(tokens)


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
        wide, slots = self.outputs_count, self.slots()
        self.inputs = Inputs(self.reads, self.reads.names, dim, wide=wide, pooling=pooling, slots=slots)
        self.bias = nn.Parameter(torch.zeros(self.outputs_count))

    def outputs(self, batch: Batch) -> Tensor:
        tokens, wide = self.inputs(batch).split((self.inputs.dim, self.outputs_count), -1)
        out: Tensor = wide.sum(1) + pairwise_interactions(tokens) + self.bias
        return out


def pairwise_interactions(tokens: Tensor) -> Tensor:
    r"""Return the sum of ⟨e_i, e_j⟩ over all pairs as (B, 1), for embeddings (B, N, D).

    .. math:: \sum_{i<j} \langle e_i, e_j\rangle
              = \tfrac12 \sum_d \Big[\big(\sum_i e_{id}\big)^2 - \sum_i e_{id}^2\Big]
    """
    return 0.5 * (tokens.sum(1).square() - tokens.square().sum(1)).sum(1, keepdim=True)
