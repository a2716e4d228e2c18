"""Plain torch: hand-written tables, however they are kept: a dict, a list, one fused table, shared ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from lpfs.adapters.base import Adapter
from lpfs.errors import FieldError
from lpfs.gates.leak import Where
from lpfs.gates.module import Gates
from lpfs.gates.sites import Site, SiteLike


class Tables(Protocol):
    """A group of tables of a model: where each of its fields enters."""

    def sites(self, model: nn.Module) -> dict[str, SiteLike]:
        """Return field -> its place in this group."""
        ...


@dataclass(frozen=True)
class Each:
    """A module for every field: an ``nn.ModuleDict``, or an ``nn.ModuleList`` with names.

    Args:
        path: of the dict or list in the model.
        names: the fields, in the order of the list; for a dict its keys are, unless others are given.
        reader: path of the ``nn.Linear`` that reads the concatenation of these fields in order, if one does.
        at: the first column that it occupies there.

    >>> tables = Each("emb", names=["user", "item"], reader="top.0")

    """

    path: str
    names: Sequence[str] | None = None
    reader: str | None = None
    at: int = 0

    def sites(self, model: nn.Module) -> dict[str, SiteLike]:
        """Return field -> its module."""
        keys, modules = _children(model, self.path)
        names = list(keys if self.names is None and keys else self.names or ())
        if len(names) != len(modules):
            raise FieldError(
                f"{self.path!r} holds {len(modules)} modules, but {len(names)} fields are named: give names= "
                "one for each, in order"
            )
        found: dict[str, SiteLike] = {}
        column = self.at
        for number, name in enumerate(names):
            path = f"{self.path}.{keys[number] if keys else number}"
            width = getattr(modules[number], "embedding_dim", getattr(modules[number], "out_features", None))
            if self.reader is None:
                found[name] = Site(path)
                continue
            if width is None:
                raise FieldError(f"field {name!r}: the width of {path!r} is not known; leave out reader= for it")
            found[name] = Site(path, reader=self.reader, columns=slice(column, column + width))
            column += width
        return found


@dataclass(frozen=True)
class Fused:
    """One ``nn.Embedding`` for all fields, called once with ids that were moved by offsets.

    The rows of field n are [Σ_{m<n} sizes_m, Σ_{m≤n} sizes_m), in the order given.

    Args:
        path: of the table in the model.
        sizes: field -> its number of rows, in the order in which the fields stand in the table.
        dim: the dimension of its output that counts fields; 1 for (B, F, D).
        reader: path of the ``nn.Linear`` that reads its output, flattened, if one does.
        at: the first column that it occupies there.

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
        """Field -> the first row that is its own, and the first that no longer is."""
        found, start = {}, 0
        for name, size in self.sizes.items():
            found[name] = (start, start + size)
            start += size
        return found

    def sites(self, model: nn.Module) -> dict[str, SiteLike]:
        """Return field -> its position in the output and its rows."""
        try:
            table = model.get_submodule(self.path)
        except AttributeError:
            raise FieldError(f"the model has no module {self.path!r}") from None
        total = sum(self.sizes.values())
        if isinstance(table, nn.Embedding) and table.num_embeddings < total:
            raise FieldError(f"{self.path!r} has {table.num_embeddings} rows, but the fields need {total}")
        width = getattr(table, "embedding_dim", 0)

        def site(number: int, start: int, stop: int) -> Site:
            first = self.at + number * width
            columns = None if self.reader is None else slice(first, first + width)
            return Site(self.path, number, self.dim, self.reader, columns, rows=slice(start, stop))

        return {name: site(number, *rows) for number, (name, rows) in enumerate(self.rows.items())}


class Plain(Adapter):
    """A model in plain torch, by the groups of tables that it has.

    A field that several groups name enters in all of these places: an embedding and a wide weight, say.

    Args:
        groups: the tables: :class:`Each`, :class:`Fused`, or field -> place as ``lpfs.attach`` takes it.
        inputs: field -> where its raw value is in a batch (see :func:`lpfs.prune`).
        untie: where one module is registered under several names, give each field a module of its own around the
            same weight, and each a weight of its own when gates are absorbed.

    >>> adapter = Plain(Fused("rows", {"user": 10, "item": 5}), inputs={"user": (0, 0), "item": (0, 1)})

    """

    def __init__(
        self,
        *groups: Tables | Mapping[str, SiteLike],
        inputs: Mapping[str, Where] | None = None,
        untie: bool = False,
    ) -> None:
        self.groups, self.inputs, self.untie = groups, dict(inputs or {}), untie

    def sites(self, model: nn.Module) -> dict[str, list[SiteLike]]:
        """Return field -> its place in every group that names it."""
        found: dict[str, list[SiteLike]] = {}
        for group in self.groups:
            named = dict(group) if isinstance(group, Mapping) else group.sites(model)
            for name, site in named.items():
                found.setdefault(name, []).append(site)
        return found

    def inputs_of_fields(self, model: nn.Module) -> dict[str, Where]:
        """Return what was given."""
        return self.inputs

    def attach(self, model: nn.Module, fields: Sequence[str] | None = None, **settings: Any) -> Gates:
        """Put gates on the fields of the model, in place (see :func:`lpfs.attach`)."""
        return super().attach(model, fields, **{"untie": self.untie, **settings})

    def absorb(self, model: nn.Module, optimizer: Any = None, **settings: Any) -> Any:
        """Move the gates into the weights, in place (see :func:`lpfs.absorb`)."""
        return super().absorb(model, optimizer, **{"untie": self.untie, **settings})


def _children(model: nn.Module, path: str) -> tuple[list[str], list[nn.Module]]:
    """Return the keys, none for a list, and the modules of a container."""
    try:
        holder = model.get_submodule(path)
    except AttributeError:
        parent, _, name = path.rpartition(".")
        held = getattr(model.get_submodule(parent), name, None)
        if isinstance(held, dict | list | tuple):
            kind = "ModuleDict" if isinstance(held, dict) else "ModuleList"
            raise FieldError(
                f"{path!r} is a {type(held).__name__}: torch does not see the modules in it, so no optimizer "
                f"trains them and no checkpoint holds them. Make it an nn.{kind}"
            ) from None
        raise FieldError(f"the model has no module {path!r}") from None
    if isinstance(holder, nn.ModuleDict):
        return list(holder.keys()), list(holder.values())
    if isinstance(holder, nn.ModuleList):
        return [], list(holder)
    raise FieldError(f"{path!r} is a {type(holder).__name__}; Each needs an nn.ModuleDict or an nn.ModuleList")
