"""Embedding tables for many fields, gradients by rows, and optimizers with row updates, on CPU and GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lpfs._imports import lazy_exports

if TYPE_CHECKING:
    from lpfs.embeddings.optim import SGD, Adagrad, Adam, RowWiseAdagrad
    from lpfs.embeddings.table import Table

__all__ = ["SGD", "Adagrad", "Adam", "RowWiseAdagrad", "Table"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"Table": "table", "SGD": "optim", "Adagrad": "optim", "Adam": "optim", "RowWiseAdagrad": "optim"}
)
