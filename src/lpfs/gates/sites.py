"""Where fields enter a model: Site (given by the user), ResolvedSite (stored), modules that take gates."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn
from torch.nn.functional import linear

from lpfs._validation import check_json
from lpfs.errors import AbsenceError, FieldError, InputError


@dataclass(frozen=True)
class Site:
    """One place where a field enters a model.

    Args:
        module: the module, or its path in the model, whose output is the field's embedding.
        index: for a module that returns several fields, the part of its output that is this field: a position or a
            ``slice``; without it, the whole output.
        dim: the dimension that ``index`` counts along; 1 for (B, F, D) and for a concatenation (B, F·D).
        reader: the ``nn.Linear`` whose input is this output, if there is one: ``absorb`` can multiply its columns
            by the gate, ``prune`` can remove them.
        columns: the columns of ``reader`` that the field occupies.
        rows: for one fused ``nn.Embedding`` that is called with the ids of several fields, the rows of its weight
            that only this field looks up: ``absorb`` multiplies them by the gate, ``prune`` removes them.
        table: for a module that concatenates the outputs of several tables, the ``nn.Embedding`` or
            ``nn.EmbeddingBag`` whose unchanged output this part is: ``absorb`` multiplies it by the gate.

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


@dataclass(frozen=True)
class PartWeight:
    """A slice of a weight: multiplying it by g multiplies one part of a module's output by g.

    Args:
        parameter: the weight's name, relative to the module; it may be dotted.
        dim: the dimension that the slice counts along.
        start: where the slice starts.
        stop: where it ends.
        exact: whether the output is then bitwise equal (one product per value), or equal up to rounding (sums).
    """

    parameter: str
    dim: int
    start: int
    stop: int
    exact: bool


@runtime_checkable
class TakesGates(Protocol):
    """Protocol of an ``nn.Module`` that multiplies the parts of its output by gates itself.

    ``lpfs.attach`` sets ``gate`` if a ``Site(module, index=part)`` names a part of it. ``forward`` then calls it;
    it returns the gates (parts,) in float32 with their gradient, on the device of the model's first parameter, or
    None while gates are disabled.

    Attributes:
        gate: returns the gates; None without gates.
        parts: number of parts, fields or crosses, of its output.
    """

    gate: Callable[[], Tensor | None] | None
    parts: int

    def part_weights(self, part: int) -> list[PartWeight]:
        """Return the weights to multiply by g so that this part of the output is multiplied by g; [] if none."""
        ...


class GatedLinear(nn.Linear):
    """The class of an ``nn.Linear`` while gates multiply the columns of its weight.

    If e_f are the outputs of the fields and W_f the columns that read them, Σ_f (g_f e_f) W_fᵀ = Σ_f e_f (g_f W_f)ᵀ:
    one product with the weight takes the place of one with the output of each field, and does not grow with the batch.
    """

    gate: Any  # returns the gates (in_features,), see TakesGates; None without gates
    is_flat: bool  # whether all inputs were (B, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the Linear."""
        gate = self.__dict__.get("gate")  # none if a function that replaced ``forward`` still calls this one
        if gate is not None and input.ndim != 2 and self.is_flat:
            self.is_flat = False
        factors = None if gate is None else gate()
        weight = self.weight if factors is None else self.weight * factors.to(self.weight)
        return linear(input, weight, self.bias)

    @property
    def is_exact(self) -> bool:
        """Whether the output is bitwise that of a Linear with the product as its weight, which is contiguous."""
        plain = self.weight.is_contiguous() and self.weight.storage_offset() == 0
        return plain and self.is_flat and self.gate.before is None


def gate_linear(module: nn.Linear, gate: Any) -> None:
    """Let gates multiply the columns of a Linear."""
    if not isinstance(module, GatedLinear):
        module.__class__ = GatedLinear
        assert isinstance(module, GatedLinear)
        module.is_flat = True
    module.gate = gate


def ungate_linear(module: GatedLinear) -> None:
    """Make it an ``nn.Linear`` again, unless it became another class since."""
    if type(module) is GatedLinear:
        del module.gate, module.is_flat
        module.__class__ = nn.Linear  # type: ignore[assignment]


SiteLike: TypeAlias = nn.Module | str | Site
Fields: TypeAlias = Mapping[str, SiteLike | Sequence[SiteLike]] | nn.ModuleDict | str | Sequence[str] | None


RANGE_FIELDS = ("columns", "rows")


@dataclass(frozen=True)
class ResolvedSite:
    """A site as paths and numbers only, so that a Selection can store it."""

    module: str
    start: int | None = None
    stop: int | None = None
    dim: int = 1
    reader: str | None = None
    columns: tuple[int, int] | None = None
    rows: tuple[int, int] | None = None
    table: str | None = None
    at_reader: bool = False  # whether the gate multiplies the columns of the reader instead of the output

    @property
    def whole(self) -> bool:
        """Whether the field is the whole output of the module."""
        return self.start is None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        pairs = {key: None if self.__dict__[key] is None else list(self.__dict__[key]) for key in RANGE_FIELDS}
        return {**self.__dict__, **pairs}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ResolvedSite:
        """Return a site from the values of ``to_json``."""
        check_json(values, cls)
        pairs = {key: tuple(values[key]) for key in RANGE_FIELDS if values.get(key) is not None}
        return cls(**{**values, **pairs})


def declared_sites(model: nn.Module, fields: str | Sequence[str] | None = None) -> Fields:
    """Return the sites that a model declares by a method ``sites()``: all, or those named.

    For a model without such a method ``fields`` is returned: then it holds patterns of paths.
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
        raise FieldError(f"the model has no field {unknown[0]!r}; its fields are {list(declared)}")
    if len(set(names)) != len(names):
        raise FieldError(f"a field is named twice: {names}")
    return {name: declared[name] for name in names}


def resolve_sites(
    model: nn.Module,
    fields: Fields,
    reader: nn.Module | str | None = None,
    replacements: Mapping[str, nn.Module] | None = None,
    *,
    at_reader: bool = False,
) -> dict[str, tuple[ResolvedSite, ...]]:
    """Return the sites of every field, checked against the model; ``replacements`` (path -> module) come later."""
    if isinstance(fields, nn.ModuleDict):
        fields = dict(fields.items())
    by_name = fields if isinstance(fields, Mapping) else match_tables(model, fields)
    if not by_name:
        raise FieldError(f"no field was given; the tables of this model are {_table_paths(model)}")
    paths = paths_by_module(model)
    places: dict[str, tuple[ResolvedSite, ...]] = {}
    for name, site_or_sites in by_name.items():
        if not isinstance(name, str) or not name:
            raise FieldError(f"the name of a field must be a non-empty string, found {name!r}")
        several: list[Any] = list(site_or_sites) if isinstance(site_or_sites, list | tuple) else [site_or_sites]
        if not several:
            raise FieldError(f"field {name!r} has no site")
        places[name] = tuple(_resolve_site(model, paths, name, site) for site in several)
    if reader is not None:
        places = _assign_columns(model, places, _module_path(model, paths, "reader", reader))
    _check_overlaps(model, places, replacements or {})
    if not at_reader:
        return places
    unread = next((name for name, several in places.items() for place in several if place.reader is None), None)
    if unread is not None:
        raise FieldError(
            f"field {unread!r} has no reader: at='reader' needs the Linear that reads it, by reader= or, for a field "
            "with several sites, by Site(…, reader=…, columns=…) for each"
        )
    _check_columns(model, places)
    return {name: tuple(replace(place, at_reader=True) for place in several) for name, several in places.items()}


def _check_columns(model: nn.Module, places: Mapping[str, tuple[ResolvedSite, ...]]) -> None:
    """Raise FieldError if two sites have the same column of a reader."""
    owners: dict[tuple[nn.Module, int], str] = {}
    for name, several in places.items():
        for place in several:
            assert place.reader is not None
            assert place.columns is not None
            reader = model.get_submodule(place.reader)
            for column in range(*place.columns):
                if (reader, column) in owners:
                    others = dict.fromkeys((owners[reader, column], name))
                    which = f"fields {' and '.join(map(repr, others))}" if len(others) > 1 else f"two sites of {name!r}"
                    raise FieldError(f"{which} have column {column} of {place.reader!r}")
                owners[reader, column] = name


def match_tables(model: nn.Module, patterns: str | Iterable[str] | None) -> dict[str, str]:
    """Return name -> path of the embedding tables whose path matches; all tables without a pattern."""
    tables = _table_paths(model)
    if patterns is None:
        return {path: path for path in tables}
    matched: dict[str, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = fnmatch.filter(tables, pattern)
        if not matches:
            raise FieldError(f"no field matched {pattern!r}; the tables of this model are {tables}")
        matched.update({path: path for path in matches})
    return matched


def paths_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return all paths of every module; a module that is registered twice has two."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


def is_inside(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is that of one of the modules, or of something in it."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def registered_paths(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return a path for every registration of a module: in a module that is itself registered twice, it has one."""
    paths: dict[nn.Module, list[str]] = {}
    seen: set[tuple[nn.Module, str]] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        if (registration := (model.get_submodule(parent), name)) not in seen:
            seen.add(registration)
            paths.setdefault(module, []).append(path)
    return paths


def _table_paths(model: nn.Module) -> list[str]:
    paths = {path for several in registered_paths(model).values() for path in several}
    return [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if path in paths and isinstance(module, nn.Embedding | nn.EmbeddingBag)
    ]


def _module_path(model: nn.Module, paths: dict[nn.Module, list[str]], name: str, module: nn.Module | str) -> str:
    if isinstance(module, str):
        try:
            model.get_submodule(module)
        except AttributeError:
            raise FieldError(
                f"field {name!r}: the model has no module {module!r}; its tables are {_table_paths(model)}"
            ) from None
        return module
    if not isinstance(module, nn.Module):
        raise FieldError(f"field {name!r}: expected a module, a path or a Site, found {module!r}")
    if module not in paths:
        raise FieldError(f"field {name!r}: this {type(module).__name__} is not part of the model")
    return paths[module][0]


def _resolve_site(model: nn.Module, paths: dict[nn.Module, list[str]], name: str, value: SiteLike) -> ResolvedSite:
    site = value if isinstance(value, Site) else Site(value)
    path = _module_path(model, paths, name, site.module)
    if isinstance(model.get_submodule(path), nn.ModuleDict | nn.ModuleList):
        raise FieldError(f"field {name!r}: {path!r} is a container that is never called; give the modules inside it")
    if not isinstance(site.index, int | slice | None) or not isinstance(site.dim, int):
        raise FieldError(f"field {name!r}: index must be a position or a slice, found {site.index!r}, {site.dim!r}")
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
        raise FieldError(f"field {name!r}: {path!r} has {module.parts} parts, but the field is at [{start}:{stop}]")
    reader = None if site.reader is None else _module_path(model, paths, name, site.reader)
    columns: tuple[int, int] | None = None
    if reader is not None:
        linear = check_reader(model, name, reader)
        if site.columns is None:
            raise FieldError(f"field {name!r}: reader= needs the columns that the field occupies: columns=slice(a, b)")
        columns = (site.columns.start or 0, site.columns.stop or 0)
        if not 0 <= columns[0] < columns[1] <= linear.in_features:
            raise FieldError(
                f"field {name!r}: columns {columns} do not fit the {linear.in_features} columns of {reader!r}"
            )
    table = None if site.table is None else _table_path(model, _module_path(model, paths, name, site.table), name, site)
    return ResolvedSite(path, start, stop, site.dim, reader, columns, _row_range(module, name, site), table)


def _table_path(model: nn.Module, path: str, name: str, site: Site) -> str:
    """Return the path of the table that is a part of an output, after checking it."""
    kind = type(model.get_submodule(path))
    if kind not in (nn.Embedding, nn.EmbeddingBag) or site.index is None or site.rows is not None:
        raise FieldError(
            f"field {name!r}: table= is an nn.Embedding or nn.EmbeddingBag that gives a part, index=…, of the "
            f"output of another module, without rows=; found {kind.__name__}, index={site.index}, rows={site.rows}"
        )
    return path


def _row_range(module: nn.Module, name: str, site: Site) -> tuple[int, int] | None:
    """Return the rows of a fused table that belong to the field, after checking them."""
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
            f"field {name!r}: {site.rows} is outside the {module.num_embeddings} rows of the table; give slice(a, b)"
        )
    return start, stop


def check_reader(model: nn.Module, name: str, path: str) -> nn.Linear:
    """Return the Linear at this path; raise an error if it is another layer."""
    reader = model.get_submodule(path)
    if type(reader) in (nn.Linear, GatedLinear):
        assert isinstance(reader, nn.Linear)
        return reader
    kind = type(reader).__name__
    if zero_is_a_value(reader):
        raise AbsenceError(
            f"field {name!r} is an input of {path!r}, a {kind}: this layer treats a zero as a value, not as "
            "absence, so that columns cannot be removed. Omit reader=; prune then passes zeros, which is exact"
        )
    raise InputError(f"field {name!r}: the reader {path!r} must be an nn.Linear, found {kind}")


def zero_is_a_value(module: nn.Module) -> bool:
    """Return whether a layer treats a zero as a value, not as absence: normalization, attention."""
    layers = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    return isinstance(module, layers) or type(module).__name__.rstrip("123d").endswith(("Norm", "Attention"))


def output_width(module: nn.Module) -> int | None:
    """Return the width of a module's output; None if its type does not determine it."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return module.embedding_dim
    if isinstance(module, nn.Linear):
        return module.out_features
    if type(module) is nn.Sequential:
        for layer in reversed(module):
            width = output_width(layer)
            if width is not None:
                return width
    return None


def _assign_columns(
    model: nn.Module, places: dict[str, tuple[ResolvedSite, ...]], reader: str
) -> dict[str, tuple[ResolvedSite, ...]]:
    """Assign every field its columns of the Linear that reads the concatenation, in the given order."""
    from lpfs.gates.prune import Zeros  # which imports this file

    linear = check_reader(model, next(iter(places)), reader)
    at, result = 0, {}
    for name, (first, *others) in places.items():
        module = model.get_submodule(first.module)
        if isinstance(module, Zeros):
            raise FieldError(
                f"field {name!r} was dropped by prune: {first.module!r} is a {type(module).__name__} module, without "
                f"weights. Omit it; if {reader!r} still has its columns, as after cut=False, give the other fields as "
                "Site(…, reader=…, columns=slice(a, b))"
            )
        width = output_width(module) if first.whole else None
        if width is None:
            raise FieldError(f"field {name!r}: its width is unknown; use Site(…, reader=…, columns=slice(a, b)) for it")
        place = ResolvedSite(first.module, first.start, first.stop, first.dim, reader, (at, at + width))
        result[name] = (place, *others)
        at += width
    if at != linear.in_features:
        raise FieldError(
            f"the fields have {at} columns in total, but {reader!r} has {linear.in_features}; "
            "use Site(…, reader=…, columns=slice(a, b)) if there are other inputs between them"
        )
    return result


def _check_overlaps(
    model: nn.Module, places: dict[str, tuple[ResolvedSite, ...]], replacements: Mapping[str, nn.Module]
) -> None:
    """Raise FieldError if two gates are on one output: a module named twice, or slices that overlap."""
    seen: dict[nn.Module, list[tuple[str, ResolvedSite]]] = {}
    for name, several in places.items():
        for place in several:
            module = replacements.get(place.module) or model.get_submodule(place.module)
            for other, there in seen.setdefault(module, []):
                if place.whole or there.whole:
                    raise FieldError(
                        f"fields {other!r} and {name!r} are both the output of {place.module!r}: a module can have "
                        "one gate, because its calls cannot be distinguished. Give each field a separate module (they "
                        "may share one weight), or name the parts of the output with Site(…, index=…)"
                        if other != name
                        else f"field {name!r} names {place.module!r} twice"
                    )
                if place.dim != there.dim:
                    raise FieldError(f"the parts of {place.module!r} must all use the same dim")
                if set(range(place.start or 0, place.stop or 0)) & set(range(there.start or 0, there.stop or 0)):
                    raise FieldError(f"fields {other!r} and {name!r} overlap in the output of {place.module!r}")
                if place.rows and there.rows and place.rows[0] < there.rows[1] and there.rows[0] < place.rows[1]:
                    raise FieldError(
                        f"fields {other!r} and {name!r} share rows of {place.module!r}, {there.rows} and "
                        f"{place.rows}: omit rows= for both; their gates then remain as constants"
                    )
                if place.table is not None and place.table == there.table:
                    raise FieldError(
                        f"fields {other!r} and {name!r} share the table {place.table!r}: omit table= for "
                        "both; their gates then remain as constants"
                    )
            seen[module].append((name, place))


def takes_gates(module: nn.Module) -> bool:
    """Return whether a module multiplies by gates itself."""
    return isinstance(module, TakesGates)


def part_slices(module: nn.Module, part: int) -> list[PartWeight]:
    """Return the weights of a part, after checking that the slices exist; [] if a weight is parametrized."""
    assert isinstance(module, TakesGates)
    slices = list(module.part_weights(part))
    for piece in slices:
        try:
            weight = module.get_parameter(piece.parameter)
        except AttributeError:
            return []  # the weight is the result of a parametrization
        inside = 0 <= piece.dim < weight.ndim and 0 <= piece.start < piece.stop <= weight.shape[piece.dim]
        if not inside:
            raise InputError(
                f"part_weights({part}) of {type(module).__name__} names [{piece.start}:{piece.stop}] along dim "
                f"{piece.dim} of {piece.parameter!r}, which has shape {tuple(weight.shape)}"
            )
    return slices


def find_overlap(module: nn.Module, parts: set[int]) -> tuple[int, int, str] | None:
    """Return two parts whose slices overlap, one of them in ``parts``, and the weight; None if none do."""
    assert isinstance(module, TakesGates)
    by_weight: dict[int, list[tuple[int, PartWeight]]] = {}
    for part in range(module.parts):
        for piece in part_slices(module, part):
            weight = module.get_parameter(piece.parameter)
            by_weight.setdefault(id(weight), []).append((part, piece))
    for pieces in by_weight.values():
        for (first, a), (second, b) in combinations(pieces, 2):
            disjoint = a.dim == b.dim and (a.stop <= b.start or b.stop <= a.start)
            if not disjoint and parts & {first, second}:
                return first, second, a.parameter
    return None
