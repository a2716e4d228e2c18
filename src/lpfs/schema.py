"""Field and Schema describe the inputs of a model; Selection records which fields a search kept."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from lpfs._fileio import read_json, write_json_atomic
from lpfs._validation import check_json
from lpfs.errors import FieldError, InputError

Kind = Literal["categorical", "numeric", "multi", "cross"]
Group = Literal["user", "item", "combine", "context"]
KINDS: tuple[str, ...] = ("categorical", "numeric", "multi", "cross")
GROUPS: tuple[str, ...] = ("user", "item", "combine", "context")
MAX_SIZE = 2**63  # of a tensor


@dataclass(frozen=True)
class Field:
    """One selectable input of a model.

    Args:
        name: name of the source column; any non-empty text.
        kind: ``categorical`` (one id per row), ``numeric`` (numbers), ``multi`` (a bag of ids) or ``cross``.
        cardinality: number of ids, including the special ids (0 for numeric fields).
        dim: embedding width, or the number of values per row of a numeric field.
        group: ``user``, ``item``, ``combine`` or ``context``.
        cost: cost of serving the field, in any unit.
    """

    name: str
    kind: Kind = "categorical"
    cardinality: int = 0
    dim: int = 1
    group: Group = "context"
    cost: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise FieldError(f"a field needs a name, found {self.name!r}")
        for name, value, choices in (("kind", self.kind, KINDS), ("group", self.group, GROUPS)):
            if value not in choices:
                raise FieldError(f"field {self.name!r}: {name} must be one of {', '.join(choices)}, found {value!r}")
        for name, size, minimum in (("cardinality", self.cardinality, 0), ("dim", self.dim, 1)):
            if isinstance(size, bool) or not isinstance(size, Integral) or not minimum <= size < MAX_SIZE:
                expected = f"an integer from {minimum} to {MAX_SIZE - 1}"
                raise FieldError(f"field {self.name!r}: {name} must be {expected}, found {size!r}")
        if isinstance(self.cost, bool) or not isinstance(self.cost, Real) or not 0.0 <= self.cost < float("inf"):
            raise FieldError(f"field {self.name!r}: cost must be a number >= 0, found {self.cost!r}")


@dataclass(frozen=True)
class Schema:
    """The fields in order, the label, and the additional tasks.

    >>> schema = Schema((Field("user", cardinality=10), Field("item", cardinality=5)), label="click")
    >>> schema.names
    ('user', 'item')
    >>> Schema.from_json(schema.to_json()) == schema
    True
    """

    fields: tuple[Field, ...]
    label: str = "label"
    tasks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", tuple(self.fields))
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for name, count in Counter(self.names).items():
            if count > 1:
                raise FieldError(f"field {name!r} occurs twice in the schema; give every field its own name")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        return self.fields[self.index(name)]

    def index(self, name: str) -> int:
        """Return the position of a field; raise FieldError if there is none of this name."""
        if not isinstance(name, str) or name not in self._positions:
            raise FieldError(f"no field {name!r} in the schema; it has {', '.join(map(repr, self.names))}")
        return self._positions[name]

    def subset(self, names: Sequence[str]) -> Schema:
        """Return the schema with only these fields, in the schema's order."""
        kept = {self[name].name for name in names}
        return Schema(tuple(field for field in self.fields if field.name in kept), self.label, self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that ``from_json`` can read."""
        return {"fields": [asdict(field) for field in self.fields], "label": self.label, "tasks": list(self.tasks)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Schema:
        """Build a schema from the result of ``to_json``; raise InputError for an unknown key or another type."""
        check_json(values, cls)
        return cls(**{**values, "fields": tuple(Field(**record) for record in values["fields"])})


@dataclass(frozen=True)
class Selection:
    """The result of a search: the kept fields, the dropped fields, and how they were found.

    Args:
        kept: names of the kept fields.
        dropped: names of the dropped fields.
        gates: the final signed gate value of every field; exactly 0.0 for a dropped field.
        sites: where each field enters the model (module paths), so that ``prune`` also works on a model that is
            loaded later.
        history: values recorded during the search.
        made: provenance: method, seed, configuration, fingerprints.
    """

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    gates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sites: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict, repr=False)
    history: Sequence[Mapping[str, Any]] = dataclasses.field(default=(), repr=False)
    made: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", tuple(self.kept))
        object.__setattr__(self, "dropped", tuple(self.dropped))
        object.__setattr__(self, "history", tuple(self.history))
        both = set(self.kept) & set(self.dropped)
        if both or len(set(self.names)) != len(self.names):
            raise FieldError(f"a field must be either kept or dropped, once; found {sorted(both) or self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all fields, the kept ones first."""
        return self.kept + self.dropped

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that ``from_json`` can read."""
        return {
            "kept": list(self.kept),
            "dropped": list(self.dropped),
            "gates": dict(self.gates),
            "sites": {name: [dict(site) for site in sites] for name, sites in self.sites.items()},
            "history": [dict(record) for record in self.history],
            "made": dict(self.made),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Selection:
        """Build a selection from the result of ``to_json``; raise InputError for an unknown key or another type."""
        check_json(values, cls)
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the selection as JSON, with a checksum."""
        write_json_atomic(Path(path), self.to_json(), allow_nan=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read a file written by ``save``, or the ``selection.json`` of a run (other keys are ignored)."""
        advice = "give the selection.json of a run, or a file written by Selection.save"
        values = read_json(Path(path), advice=advice, allow_nan=True)
        names = {attribute.name for attribute in fields(cls)}
        try:
            return cls.from_json({name: value for name, value in values.items() if name in names})
        except InputError as error:
            raise InputError(f"{os.fspath(path)} is not a selection: {error}; {advice}") from None

    def plot(self) -> Any:
        """Return a matplotlib figure with the histogram and the trajectories of the gates (:mod:`lpfs.plots`)."""
        from lpfs.plots import overview

        return overview(self)

    def _repr_html_(self) -> str:
        from lpfs.notebook import selection_html

        return selection_html(self)

    def in_order(self, names: Sequence[str]) -> Selection:
        """Return the selection with its fields in the order of ``names``; fields not in ``names`` come last."""
        position = {name: index for index, name in enumerate(names)}

        def sort(fields: Iterable[str]) -> tuple[str, ...]:
            return tuple(sorted(fields, key=lambda name: position.get(name, len(position))))

        gates = {name: self.gates[name] for name in sort(self.gates)}
        indices = [list(self.gates).index(name) for name in gates]
        history = [
            {**record, "gates": [record["gates"][index] for index in indices]} if "gates" in record else record
            for record in self.history
        ]
        return replace(self, kept=sort(self.kept), dropped=sort(self.dropped), gates=gates, history=history)
