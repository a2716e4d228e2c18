"""Where fields enter a model: what the user writes (Site) and what lpfs remembers (Place)."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from lpfs.errors import AbsenceError, FieldError, InputError
from lpfs.gates.parts import TakesGates
from lpfs.schema import known_keys


@dataclass(frozen=True)
class Site:
    """One place where a field enters a model.

    Args:
        module: the module, or its path in the model, whose output is the field's embedding.
        index: for a module that returns several fields, which part of its output is this one: a position or a
            ``slice``; without it, the whole output is.
        dim: the dimension that ``index`` counts along; 1 for (B, F, D) and for a concatenation (B, F·D).
        reader: the ``nn.Linear`` that reads this output directly, if there is one: ``absorb`` can put the gate
            into its columns, ``prune`` can cut them.
        columns: the columns of ``reader`` that the field occupies.
        rows: for one fused ``nn.Embedding`` that is called with the ids of several fields at once, the rows of
            its weight that this field alone looks up: ``absorb`` puts the gate into them, ``prune`` removes them.
        table: for a module that puts the outputs of several tables side by side, the ``nn.Embedding`` or
            ``nn.EmbeddingBag`` whose output this part is, and nothing else: ``absorb`` puts the gate into it.

    >>> Site("embeddings", index=3)                       # field 3 of (B, F, D)
    Site(module='embeddings', index=3, dim=1, reader=None, columns=None, rows=None, table=None)

    """

    module: nn.Module | str
    index: int | slice | None = None
    dim: int = 1
    reader: nn.Module | str | None = None
    columns: slice | None = None
    rows: slice | None = None
    table: nn.Module | str | None = None


SiteLike: TypeAlias = nn.Module | str | Site
Fields: TypeAlias = Mapping[str, SiteLike | Sequence[SiteLike]] | nn.ModuleDict | str | Sequence[str] | None


PAIRS = ("columns", "rows")


@dataclass(frozen=True)
class Place:
    """A site by paths and numbers alone: it outlives the process, inside a Selection."""

    module: str
    start: int | None = None
    stop: int | None = None
    dim: int = 1
    reader: str | None = None
    columns: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    table: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the field is the module's whole output."""
        return self.start is None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        pairs = {key: None if self.__dict__[key] is None else list(self.__dict__[key]) for key in PAIRS}
        return {**self.__dict__, **pairs}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Place:
        """Build a place from what ``to_json`` gave."""
        values = known_keys(cls, values)
        pairs = {key: tuple(values[key]) for key in PAIRS if values.get(key) is not None}
        return cls(**{**values, **pairs})


def declared_sites(model: nn.Module, fields: str | Sequence[str] | None = None) -> Fields:
    """Return the sites that a model declares by a method ``sites()``: all, or those named.

    A model without such a method gets ``fields`` back: they are patterns of paths then.
    """
    method = getattr(type(model), "sites", None)
    if not callable(method):
        return fields
    declared: dict[str, SiteLike | Sequence[SiteLike]] = dict(method(model))
    if fields is None:
        return declared
    names = [fields] if isinstance(fields, str) else list(fields)
    unknown = [name for name in names if name not in declared]
    if unknown:
        raise FieldError(f"the model declares no field {unknown[0]!r}; its fields are {list(declared)}")
    if len(set(names)) != len(names):
        raise FieldError(f"a field is named twice: {names}")
    return {name: declared[name] for name in names}


def find_places(
    model: nn.Module,
    fields: Fields,
    reader: nn.Module | str | None = None,
    twins: Mapping[str, nn.Module] | None = None,
) -> dict[str, tuple[Place, ...]]:
    """Resolve what the user wrote to places in the model, and check all of it; ``twins`` will replace modules."""
    if isinstance(fields, nn.ModuleDict):
        fields = dict(fields.items())
    wanted = fields if isinstance(fields, Mapping) else match_tables(model, fields)
    if not wanted:
        raise FieldError(f"no field was given; the tables of this model are {_tables(model)}")
    paths = paths_by_module(model)
    places: dict[str, tuple[Place, ...]] = {}
    for name, given in wanted.items():
        if not isinstance(name, str) or not name:
            raise FieldError(f"a field needs a name, found {name!r}")
        several: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
        if not several:
            raise FieldError(f"field {name!r} has no site")
        places[name] = tuple(_place(model, paths, name, each) for each in several)
    if reader is not None:
        places = _columns_in_order(model, places, _path(model, paths, "reader", reader))
    _refuse_overlaps(model, places, twins or {})
    return places


def match_tables(model: nn.Module, patterns: str | Iterable[str] | None) -> dict[str, str]:
    """Return name -> path of the embedding tables whose path matches; all of them without a pattern."""
    tables = _tables(model)
    if patterns is None:
        return {path: path for path in tables}
    matched: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = fnmatch.filter(tables, pattern)
        if not found:
            raise FieldError(f"no field matched {pattern!r}; the tables of this model are {tables}")
        matched.update({path: path for path in found})
    return matched


def paths_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every path of every module: several where one module is registered twice."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def _tables(model: nn.Module) -> list[str]:
    return [path for path, each in model.named_modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]


def _path(model: nn.Module, paths: dict[nn.Module, list[str]], name: str, module: nn.Module | str) -> str:
    if isinstance(module, str):
        try:
            model.get_submodule(module)
        except AttributeError:
            raise FieldError(
                f"field {name!r}: the model has no module {module!r}; its tables are {_tables(model)}"
            ) from None
        return module
    if not isinstance(module, nn.Module):
        raise FieldError(f"field {name!r}: expected a module, a path or a Site, found {module!r}")
    if module not in paths:
        raise FieldError(f"field {name!r}: this {type(module).__name__} is not part of the model")
    return paths[module][0]


def _place(model: nn.Module, paths: dict[nn.Module, list[str]], name: str, given: SiteLike) -> Place:
    site = given if isinstance(given, Site) else Site(given)
    path = _path(model, paths, name, site.module)
    if isinstance(model.get_submodule(path), nn.ModuleDict | nn.ModuleList):
        raise FieldError(f"field {name!r}: {path!r} is a container that never runs; give the modules inside it")
    if not isinstance(site.index, int | slice | None) or not isinstance(site.dim, int):
        raise FieldError(
            f"field {name!r}: index must be a position or a slice, found {site.index!r}, {site.dim!r}"
        )
    start: int | None = None
    stop: int | None = None
    if isinstance(site.index, slice):
        start, stop = site.index.start or 0, site.index.stop
        if site.index.step not in (None, 1) or stop is None or not 0 <= start < stop:
            raise FieldError(f"field {name!r}: a slice needs 0 <= start < stop and no step, found {site.index}")
    elif site.index is not None:
        start, stop = site.index, site.index + 1
        if start < 0:
            raise FieldError(f"field {name!r}: an index counts from 0, found {start}")
    module = model.get_submodule(path)
    if stop is not None and isinstance(module, TakesGates) and stop > module.parts:
        raise FieldError(
            f"field {name!r}: {path!r} has {module.parts} parts, but the field is at [{start}:{stop}]"
        )
    reader = None if site.reader is None else _path(model, paths, name, site.reader)
    columns: tuple[int, int] | None = None
    if reader is not None:
        linear = check_reader(model, name, reader)
        if site.columns is None:
            raise FieldError(f"field {name!r}: say which columns of its reader it occupies: columns=slice(a, b)")
        columns = (site.columns.start or 0, site.columns.stop or 0)
        if not 0 <= columns[0] < columns[1] <= linear.in_features:
            raise FieldError(
                f"field {name!r}: columns {columns} do not fit the {linear.in_features} columns of {reader!r}"
            )
    table = None if site.table is None else _table(model, _path(model, paths, name, site.table), name, site)
    return Place(path, start, stop, site.dim, reader, columns, _rows(module, name, site), table)


def _table(model: nn.Module, path: str, name: str, site: Site) -> str:
    """Return the path of the table that a part of an output comes from, checked."""
    kind = type(model.get_submodule(path))
    if kind not in (nn.Embedding, nn.EmbeddingBag) or site.index is None or site.rows is not None:
        raise FieldError(
            f"field {name!r}: table= is an nn.Embedding or nn.EmbeddingBag that gives a part, index=…, of the "
            f"output of another module, without rows=; found {kind.__name__}, index={site.index}, rows={site.rows}"
        )
    return path


def _rows(module: nn.Module, name: str, site: Site) -> tuple[int, int] | None:
    """Return the rows of a fused table that are the field's, checked against it."""
    if site.rows is None:
        return None
    if not isinstance(module, nn.Embedding) or site.index is None:
        raise FieldError(
            f"field {name!r}: rows= is for a part, index=…, of the output of one nn.Embedding, found "
            f"{type(module).__name__} and index={site.index}"
        )
    start, stop = site.rows.start or 0, site.rows.stop
    if site.rows.step not in (None, 1) or stop is None or not 0 <= start < stop <= module.num_embeddings:
        raise FieldError(
            f"field {name!r}: {site.rows} are no rows of a table of {module.num_embeddings}; give slice(a, b)"
        )
    return start, stop


def check_reader(model: nn.Module, name: str, path: str) -> nn.Linear:
    """Return the Linear at this path; say why anything else cannot stand there."""
    reader = model.get_submodule(path)
    if type(reader) is nn.Linear:
        return reader
    kind = type(reader).__name__
    if is_not_absence(reader):
        raise AbsenceError(
            f"field {name!r} is read by {path!r}, a {kind}: there a zero is a value like any other and not "
            "absence, so its columns cannot be cut. Leave out reader=; prune then feeds zeros, which is exact"
        )
    raise InputError(f"field {name!r}: the reader {path!r} must be an nn.Linear, found {kind}")


def is_not_absence(module: nn.Module) -> bool:
    """Whether a zero is a value like any other for this layer: normalisation, attention."""
    layers = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return isinstance(module, layers) or type(module).__name__.rstrip("123d").endswith(("Norm", "Attention"))


def width_of(module: nn.Module) -> int | None:
    """Return how wide a module's output is, where its type tells."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features
    if type(module) is nn.Sequential:
        for each in reversed(module):
            width = width_of(each)
            if width is not None:
                return width
    return None


def _columns_in_order(
    model: nn.Module, places: dict[str, tuple[Place, ...]], reader: str
) -> dict[str, tuple[Place, ...]]:
    """Give every field its columns of one Linear that reads the concatenation, in the order given."""
    linear = check_reader(model, next(iter(places)), reader)
    at, result = 0, {}
    for name, (first, *others) in places.items():
        width = width_of(model.get_submodule(first.module)) if first.whole else None
        if width is None:
            raise FieldError(
                f"field {name!r}: its width is not known; use Site(…, reader=…, columns=slice(a, b)) for it"
            )
        place = Place(first.module, first.start, first.stop, first.dim, reader, (at, at + width))
        result[name] = (place, *others)
        at += width
    if at != linear.in_features:
        raise FieldError(
            f"the fields are {at} wide together, but {reader!r} reads {linear.in_features} columns; "
            "use Site(…, reader=…, columns=slice(a, b)) where other inputs stand between them"
        )
    return result


def _refuse_overlaps(
    model: nn.Module, places: dict[str, tuple[Place, ...]], twins: Mapping[str, nn.Module]
) -> None:
    """Refuse two gates on one output: a module named twice, or slices that overlap."""
    seen: dict[nn.Module, list[tuple[str, Place]]] = {}
    for name, several in places.items():
        for place in several:
            module = twins.get(place.module) or model.get_submodule(place.module)
            for other, there in seen.setdefault(module, []):
                if place.whole or there.whole:
                    raise FieldError(
                        f"fields {other!r} and {name!r} are both the output of {place.module!r}: one gate a "
                        "module. Calls of one module cannot be told apart: give each field a module of its own "
                        "(they may share one weight), or name the parts of the output with Site(…, index=…)"
                        if other != name
                        else f"field {name!r} names {place.module!r} twice"
                    )
                if place.dim != there.dim:
                    raise FieldError(f"the parts of {place.module!r} must all count along one dim")
                if set(range(place.start or 0, place.stop or 0)) & set(range(there.start or 0, there.stop or 0)):
                    raise FieldError(f"fields {other!r} and {name!r} overlap in the output of {place.module!r}")
                if place.rows and there.rows and place.rows[0] < there.rows[1] and there.rows[0] < place.rows[1]:
                    raise FieldError(
                        f"fields {other!r} and {name!r} share rows of {place.module!r}, {there.rows} and "
                        f"{place.rows}: leave out rows= for both; their gates stay as constants then"
                    )
                if place.table is not None and place.table == there.table:
                    raise FieldError(
                        f"fields {other!r} and {name!r} share the table {place.table!r}: leave out table= for "
                        "both; their gates stay as constants then"
                    )
            seen[module].append((name, place))
