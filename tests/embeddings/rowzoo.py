"""What the tests of tables share: the engines there are here, and lookups that torch would do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lpfs.embeddings._torch import use_backend
from lpfs.embeddings.table import Table
from lpfs.errors import MissingPackageError


def _there(name: str) -> bool:
    try:
        with use_backend(name):
            return name != "triton" or torch.cuda.is_available()
    except MissingPackageError:
        return False


ENGINES = [name for name in ("torch", "numba") if _there(name)]


def ids_of(sizes: tuple[int, ...], rows: int, seed: int = 0, kind: torch.dtype = torch.int32) -> Tensor:
    """Ids of which the small ones come often."""
    random = torch.Generator().manual_seed(seed)
    columns = [(size * torch.rand(rows, generator=random) ** 3).to(kind) for size in sizes]
    return torch.stack(columns, 1) if columns else torch.empty(rows, 0, dtype=kind)


def plain_of(table: Table, sparse: bool = False) -> nn.Embedding:
    """The same rows in an ordinary table of torch."""
    return nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False, sparse=sparse)


def look(plain: nn.Embedding, table: Table, ids: Tensor, gate: Tensor | None = None) -> Tensor:
    """What ``table(ids, gate)`` must be."""
    out = plain(ids.long() + table.starts[: table.fields])
    return out if gate is None else out * gate[:, None]
