"""Helpers for tests of embedding tables: the available backends, ids, and lookups with torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpfs.embeddings._backends import use_backend
from lpfs.embeddings.table import Table
from lpfs.errors import MissingPackageError


def _is_available(name: str) -> bool:
    try:
        with use_backend(name):
            return name != "triton" or torch.cuda.is_available()
    except MissingPackageError:
        return False


BACKENDS = [name for name in ("torch", "numba") if _is_available(name)]


def random_ids(sizes: tuple[int, ...], rows: int, seed: int = 0, kind: torch.dtype = torch.int32) -> Tensor:
    """Return random ids; small ids are more frequent."""
    random = torch.Generator().manual_seed(seed)
    columns = [(size * torch.rand(rows, generator=random) ** 3).to(kind) for size in sizes]
    return torch.stack(columns, 1) if columns else torch.empty(rows, 0, dtype=kind)


def as_embedding(table: Table, sparse: bool = False) -> nn.Embedding:
    """Return the same rows as an ``nn.Embedding``."""
    return nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False, sparse=sparse)


def torch_lookup(plain: nn.Embedding, table: Table, ids: Tensor, gate: Tensor | None = None) -> Tensor:
    """Return what ``table(ids, gate)`` must be."""
    out = plain(ids.long() + table.starts[: table.fields])
    return out if gate is None else out * gate[:, None]
