"""WideDeep: a linear model plus a multilayer perceptron. DeepFM: WideDeep plus a factorization machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.models.base import Model
from lpfs.models.fm import pairwise_interactions
from lpfs.models.inputs import Inputs, Pooling
from lpfs.models.layers import Layout, dense_layers
from lpfs.schema import Schema


class WideDeep(Model):
    r"""Wide & Deep (Cheng et al. 2016); one gate multiplies the wide weight and the embedding of a field.

    .. math:: y = \sum_i g_i w_i + \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    Args:
        schema: the fields, label and tasks.
        dim: width of an embedding.
        hidden: widths of the hidden layers.
        pooling: a bag is the ``mean`` or the ``sum`` of its embeddings.
        silent: parts replaced by zeros (see :class:`Model`).
    """

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
        self.inputs = Inputs(
            self.reads, self.reads.names, dim, wide=self.outputs_count, pooling=pooling, slots=self.slots()
        )
        self.top = dense_layers(len(schema) * dim, hidden, self.outputs_count)

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        tokens, wide = self.inputs(batch).split((self.inputs.dim, self.outputs_count), -1)
        return self.combine(tokens, wide)

    def combine(self, tokens: Tensor, wide: Tensor) -> Tensor:
        """Return logits (B, 1 + tasks) for embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
        out: Tensor = self.top(tokens.flatten(1))
        return out + wide.sum(1)

    def entrance(self) -> str | None:
        """Return the path of the first dense layer."""
        return "top.0"

    def layout(self) -> Layout:
        """Return which rows and columns belong to which field."""
        return {**super().layout(), "top.0.weight": {1: [(name, self.inputs.dim) for name in self.slots()]}}


class DeepFM(WideDeep):
    r"""DeepFM (Guo et al. 2017): Wide & Deep plus the dot products of all pairs.

    .. math:: y = \sum_i g_i w_i + \sum_{i<j} \langle g_i e_i, g_j e_j\rangle
              + \mathrm{top}([g_1 e_1, \dots, g_N e_N])

    The arguments are those of :class:`WideDeep`; tasks share the dot products.
    """

    def entrance(self) -> str | None:
        """Return None: the dot products use the embeddings too."""
        return None

    def combine(self, tokens: Tensor, wide: Tensor) -> Tensor:
        """Return logits (B, 1 + tasks) for embeddings (B, N, D) and wide weights (B, N, 1 + tasks)."""
        return super().combine(tokens, wide) + pairwise_interactions(tokens)
