"""The nouns: Field and Schema say what goes in, Selection says what stays."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from lpfs.errors import FieldError, InputError

Kind = Literal["categorical", "numeric", "multi", "cross"]
Group = Literal["user", "item", "combine", "context"]
KINDS: tuple[str, ...] = ("categorical", "numeric", "multi", "cross")
GROUPS: tuple[str, ...] = ("user", "item", "combine", "context")


@dataclass(frozen=True)
class Field:
    """One selectable input of a model.

    Args:
        name: the column it comes from, any text.
        kind: ``categorical`` (one id a row), ``numeric`` (numbers), ``multi`` (a bag of ids), ``cross``.
        cardinality: how many ids there are, special ones included (0 for numeric).
        dim: width: of the embedding, or of the numbers of a numeric field.
        group: ``user``, ``item``, ``combine`` or ``context``.
        cost: what serving the field costs, in any unit.

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
        if self.kind not in KINDS:
            raise FieldError(f"field {self.name!r}: kind must be one of {', '.join(KINDS)}, found {self.kind!r}")
        if self.group not in GROUPS:
            raise FieldError(
                f"field {self.name!r}: group must be one of {', '.join(GROUPS)}, found {self.group!r}"
            )
        if self.cardinality < 0 or self.dim < 1:
            raise FieldError(
                f"field {self.name!r}: cardinality must be >= 0 and dim >= 1, "
                f"found {self.cardinality} and {self.dim}"
            )
        if not 0.0 <= self.cost < float("inf"):
            raise FieldError(f"field {self.name!r}: cost must be a number >= 0, found {self.cost!r}")


@dataclass(frozen=True)
class Schema:
    """The fields in order, the label, and the extra tasks.

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
        seen: set[str] = set()
        for each in self.fields:
            if each.name in seen:
                raise FieldError(f"field {each.name!r} is named twice in the schema")
            seen.add(each.name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields, in order."""
        return tuple(each.name for each in self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __getitem__(self, name: str) -> Field:
        for each in self.fields:
            if each.name == name:
                return each
        raise FieldError(f"no field {name!r} in the schema; it has {', '.join(map(repr, self.names))}")

    def subset(self, names: Sequence[str]) -> Schema:
        """Return the schema with only these fields, in the schema's order."""
        wanted = {self[name].name for name in names}
        return Schema(tuple(each for each in self.fields if each.name in wanted), self.label, self.tasks)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        return {
            "fields": [asdict(each) for each in self.fields],
            "label": self.label,
            "tasks": list(self.tasks),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Schema:
        """Build a schema from what ``to_json`` gave; an unknown key is an error."""
        values = known_keys(cls, values)
        return cls(
            tuple(Field(**known_keys(Field, each)) for each in values["fields"]),
            values.get("label", "label"),
            tuple(values.get("tasks", ())),
        )


@dataclass(frozen=True)
class Selection:
    """The answer of a search: which fields stay, which go, and how that was found.

    ``gates`` holds the final gate of every field, signs included; a dropped field has exactly 0.0.
    ``sites`` says where each field enters the model (paths of modules), so that ``prune`` can work on a
    model that was loaded again later. ``history`` holds what was recorded during the search and ``made``
    how it was made: method, seed, configuration, fingerprints.
    """

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    gates: Mapping[str, float] = field(default_factory=dict)
    sites: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)
    history: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    made: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", tuple(self.kept))
        object.__setattr__(self, "dropped", tuple(self.dropped))
        object.__setattr__(self, "history", tuple(self.history))
        both = set(self.kept) & set(self.dropped)
        if both or len(set(self.names)) != len(self.names):
            raise FieldError(f"a field can be kept or dropped, once: {sorted(both) or self.names}")

    @property
    def names(self) -> tuple[str, ...]:
        """All fields, kept ones first."""
        return self.kept + self.dropped

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        return {
            "kept": list(self.kept),
            "dropped": list(self.dropped),
            "gates": dict(self.gates),
            "sites": {name: [dict(each) for each in sites] for name, sites in self.sites.items()},
            "history": [dict(each) for each in self.history],
            "made": dict(self.made),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Selection:
        """Build a selection from what ``to_json`` gave; an unknown key is an error."""
        return cls(**known_keys(cls, values))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the selection as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, ensure_ascii=False) + "\n", "utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Selection:
        """Read what ``save`` wrote, or the selection out of the ``selection.json`` of a run, which says more."""
        values = json.loads(Path(path).read_text("utf-8"))
        own = {each.name for each in fields(cls)}
        if not isinstance(values, dict) or not {"kept", "dropped"} <= set(values):
            raise InputError(f"{os.fspath(path)} holds no selection: there is no kept and dropped in it")
        return cls.from_json({name: value for name, value in values.items() if name in own})

    def plot(self) -> Any:
        """Return a matplotlib figure: histogram and trajectories of the gates; :mod:`lpfs.plots` has more."""
        from lpfs.plots import overview

        return overview(self)

    def _repr_html_(self) -> str:
        from lpfs.cards import selection_card

        return selection_card(self)

    def in_order(self, names: Sequence[str]) -> Selection:
        """Return the same selection with its fields in the order of ``names``, others after them."""
        place = {name: number for number, name in enumerate(names)}
        was = list(self.gates)
        now = sorted(was, key=lambda name: place.get(name, len(place)))
        taken = [was.index(name) for name in now]
        return replace(
            self,
            kept=tuple(sorted(self.kept, key=lambda name: place.get(name, len(place)))),
            dropped=tuple(sorted(self.dropped, key=lambda name: place.get(name, len(place)))),
            gates={name: self.gates[name] for name in now},
            history=tuple(
                {**each, "gates": [each["gates"][number] for number in taken]} if "gates" in each else each
                for each in self.history
            ),
        )


def known_keys(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` as keyword arguments of a dataclass; refuse a key it does not have."""
    names = {each.name for each in fields(cls)}
    unknown = sorted(set(values) - names)
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r} for {cls.__name__}; it knows {', '.join(sorted(names))}")
    needed = {each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING}
    absent = sorted(needed - set(values))
    if absent:
        raise InputError(f"{cls.__name__} needs {absent[0]!r}; found {sorted(values)}")
    return dict(values)
