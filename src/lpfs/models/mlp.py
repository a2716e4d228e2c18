"""MLP: a multilayer perceptron on the concatenated embeddings; the default model of ``select``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
        self.inputs = Inputs(self.reads, self.reads.names, dim, pooling=pooling, slots=self.slots())
        self.top = dense_layers(len(schema) * dim, hidden, self.outputs_count)

    def outputs(self, batch: Batch) -> Tensor:
        """Return logits (B, 1 + tasks)."""
        out: Tensor = self.top(self.inputs(batch).flatten(1))
        return out

    def entrance(self) -> str | None:
        """Return the path of the first dense layer."""
        return "top.0"

    def layout(self) -> Layout:
        """Return which rows and columns belong to which field."""
        return {**super().layout(), "top.0.weight": {1: [(name, self.inputs.dim) for name in self.slots()]}}
