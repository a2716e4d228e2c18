"""Plain torch: hand-written tables in a dict, a list, or one fused table; tables may be shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from lpfs.adapters.base import Adapter
from lpfs.errors import FieldError
from lpfs.gates.module import Gates
from lpfs.gates.sites import Site, SiteLike
from lpfs.gates.verification import InputPath


@dataclass(frozen=True)
class Each:
    """One module per field: an ``nn.ModuleDict``, or an ``nn.ModuleList`` with names.

    Args:
        path: path of the dict or list in the model.
        names: the fields, in the order of the list; by default the keys of a dict.
        reader: path of the ``nn.Linear`` whose input is the concatenation of these fields in order, if any.
        at: first column of the concatenation in that input.

    >>> tables = Each("emb", names=["user", "item"], reader="top.0")
    """

    path: str
    names: Sequence[str] | None = None
    reader: str | None = None
    at: int = 0

    def sites(self, model: nn.Module) -> dict[str, SiteLike]:
        """Return field -> its module."""
        children = _children(model, self.path)
        keys = [key for key in children if isinstance(key, str)]
        names = keys if self.names is None else list(self.names)
        if len(names) != len(children):
            raise FieldError(
                f"{self.path!r} has {len(children)} modules, but {len(names)} fields are named; give names= "
                "one per module, in order"
            )
        sites: dict[str, SiteLike] = {}
        column = self.at
        for name, (key, module) in zip(names, children.items(), strict=True):
            path = f"{self.path}.{key}"
            if self.reader is None:
                sites[name] = Site(path)
                continue
            width = getattr(module, "embedding_dim", getattr(module, "out_features", None))
            if width is None:
                raise FieldError(f"field {name!r}: the width of {path!r} is unknown; leave out reader= for this group")
            sites[name] = Site(path, reader=self.reader, columns=slice(column, column + width))
            column += width
        return sites


@dataclass(frozen=True)
class Fused:
    """One ``nn.Embedding`` for all fields, called once with ids to which the field's offset was added.

    The rows of field n are [Σ_{m<n} sizes_m, Σ_{m≤n} sizes_m), in the order of ``sizes``.

    Args:
        path: path of the table in the model.
        sizes: field -> its number of rows, in the order of the fields in the table.
        dim: the dimension of its output that counts fields; 1 for (B, F, D).
        reader: path of the ``nn.Linear`` whose input is the flattened output, if any.
        at: first column of the output in that input.

    >>> Fused("rows", {"user": 10, "item": 5}).rows
    {'user': (0, 10), 'item': (10, 15)}
    """

    path: str
    sizes: Mapping[str, int]
    dim: int = 1
    reader: str | None = None
    at: int = 0

    @property
    def rows(self) -> dict[str, tuple[int, int]]:
        """Field -> its first row, and the row after its last."""
        stops = accumulate(self.sizes.values())
        return {name: (stop - size, stop) for (name, size), stop in zip(self.sizes.items(), stops, strict=True)}

    def sites(self, model: nn.Module) -> dict[str, SiteLike]:
        """Return field -> its position in the output and its rows."""
        try:
            table = model.get_submodule(self.path)
        except AttributeError:
            raise FieldError(f"the model has no module {self.path!r}; give the path of the table") from None
        total = sum(self.sizes.values())
        if isinstance(table, nn.Embedding) and table.num_embeddings < total:
            raise FieldError(f"{self.path!r} has {table.num_embeddings} rows, but sizes= add up to {total}")
        width = getattr(table, "embedding_dim", 0)
        sites: dict[str, SiteLike] = {}
        for number, (name, rows) in enumerate(self.rows.items()):
            first = self.at + number * width
            columns = None if self.reader is None else slice(first, first + width)
            sites[name] = Site(self.path, number, self.dim, self.reader, columns, rows=slice(*rows))
        return sites


class Plain(Adapter):
    """A model in plain torch, described by its groups of tables.

    A field may be in several groups, for example with an embedding and a wide weight.

    Args:
        groups: the tables: :class:`Each`, :class:`Fused`, or field -> site as for ``lpfs.attach``.
        inputs: field -> where its raw value is in a batch (see :func:`lpfs.prune`).
        untie: if one module is registered under several names, give each field its own module around the same
            weight, and its own weight when gates are absorbed.

    >>> adapter = Plain(Fused("rows", {"user": 10, "item": 5}), inputs={"user": (0, 0), "item": (0, 1)})
    """

    def __init__(
        self,
        *groups: Each | Fused | Mapping[str, SiteLike],
        inputs: Mapping[str, InputPath] | None = None,
        untie: bool = False,
    ) -> None:
        self.groups, self.inputs, self.untie = groups, dict(inputs or {}), untie

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        sites: dict[str, list[SiteLike]] = {}
        for group in self.groups:
            named = dict(group) if isinstance(group, Mapping) else group.sites(model)
            for name, site in named.items():
                sites.setdefault(name, []).append(site)
        return sites

    def inputs_of_fields(self, model: nn.Module) -> dict[str, InputPath]:
        return self.inputs

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        return super().attach(model, fields, **{"untie": self.untie, **settings})

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Any:
        return super().absorb(model, optimizer, **{"untie": self.untie, **settings})


def _children(model: nn.Module, path: str) -> dict[str | int, nn.Module]:
    """Return the modules of an nn.ModuleDict by key, those of an nn.ModuleList by number."""
    try:
        container = model.get_submodule(path)
    except AttributeError:
        parent, _, name = path.rpartition(".")
        plain = getattr(model.get_submodule(parent), name, None)
        if isinstance(plain, dict | list | tuple):
            kind = "ModuleDict" if isinstance(plain, dict) else "ModuleList"
            raise FieldError(
                f"{path!r} is a {type(plain).__name__}: torch does not register the modules in it, so optimizers "
                f"and checkpoints miss them. Make it an nn.{kind}"
            ) from None
        raise FieldError(f"the model has no module {path!r}; give the path of the tables") from None
    if isinstance(container, nn.ModuleDict):
        return dict(container.items())
    if isinstance(container, nn.ModuleList):
        return dict(enumerate(container))
    raise FieldError(f"{path!r} is a {type(container).__name__}; Each needs an nn.ModuleDict or an nn.ModuleList")
