"""Costs: what each field costs to serve, alone and through an upstream call that several fields share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpfs.data.fields import load_toml
from lpfs.errors import InputError
from lpfs.methods.known import known
from lpfs.schema import Schema


@dataclass(frozen=True)
class Shared:
    """A cost that is paid once while any of its fields is kept."""

    cost: float
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Costs:
    """What a set of fields costs: the sum of its fields, and each shared cost that any of them needs.

    >>> costs = Costs({"age": 1.0, "city": 1.0, "item": 2.0}, {"profile": Shared(3.0, ("age", "city"))})
    >>> costs.total(["age", "item"]), costs.total(["age", "city"]), costs.total(["item"])
    (6.0, 5.0, 2.0)
    """

    fields: Mapping[str, float]
    groups: Mapping[str, Shared] = field(default_factory=dict)
    unit: str = ""

    def __post_init__(self) -> None:
        every = [*self.fields.items(), *((f"group {name}", each.cost) for name, each in self.groups.items())]
        for name, cost in every:
            number = isinstance(cost, int | float) and not isinstance(cost, bool)
            if not number or not 0 <= cost < math.inf:
                raise InputError(f"costs: {name!r} must be a number >= 0, found {cost!r}")

    def total(self, kept: Sequence[str]) -> float:
        """Return what these fields cost together."""
        chosen = set(kept)
        alone = math.fsum(self.fields.get(name, 0.0) for name in kept)
        return alone + math.fsum(each.cost for each in self.groups.values() if chosen & set(each.fields))

    def weights(self, names: Sequence[str], alive: Sequence[str]) -> list[float]:
        """Return what each field stands for: its own cost, and its share of what the fields alive pay together."""
        living = set(alive)
        result = [float(self.fields.get(name, 0.0)) for name in names]
        for each in self.groups.values():
            members = set(each.fields)
            share = each.cost / max(1, len(members & living))
            result = [cost + share if name in members else cost for name, cost in zip(names, result, strict=True)]
        return result

    def cheapest(self, names: Sequence[str]) -> float:
        """Return the cost of the cheapest field alone."""
        return min(self.total([name]) for name in names)

    def check(self, names: Sequence[str]) -> None:
        """Refuse costs of fields that are not there, and costs that leave a field out."""
        groups = [name for each in self.groups.values() for name in each.fields]
        for name in (*self.fields, *groups):
            known(name, names, "costs")
        absent = [name for name in names if name not in self.fields and name not in groups]
        if absent:
            others = f" (and {len(absent) - 1} others)" if len(absent) > 1 else ""
            raise InputError(f"costs: field {absent[0]!r}{others} has no cost; give it one, or give a default")

    def of_parts(self, parts: Mapping[str, Sequence[str]]) -> Costs:
        """Return the costs of parts of a model: a field is paid once while any part that reads it is kept.

        >>> costs = Costs({"a": 1.0, "b": 2.0}).of_parts({"a": ["a"], "b": ["b"], "a*b": ["a", "b"]})
        >>> costs.total(["a"]), costs.total(["a*b"]), costs.total(["a", "a*b"])
        (1.0, 3.0, 3.0)
        """
        if all(tuple(fields) == (name,) for name, fields in parts.items()):
            return self

        def readers(fields: Sequence[str]) -> tuple[str, ...]:
            return tuple(part for part, read in parts.items() if set(read) & set(fields))

        groups = {f"field {name}": Shared(cost, readers([name])) for name, cost in self.fields.items()}
        groups |= {name: Shared(each.cost, readers(each.fields)) for name, each in self.groups.items()}
        return Costs({}, groups, self.unit)

    @classmethod
    def load(cls, path: str | os.PathLike[str], schema: Schema) -> Costs:
        """Read a TOML file: ``unit``, ``default``, ``[fields]`` name = cost, ``[groups.X]`` cost and fields."""
        return cls.of(load_toml(Path(path)), schema)

    @classmethod
    def of(cls, values: Mapping[str, Any], schema: Schema) -> Costs:
        """Build costs from plain values; an unknown key is an error."""
        unknown = sorted(set(values) - {"unit", "default", "fields", "groups"})
        if unknown:
            raise InputError(f"costs: unknown key {unknown[0]!r}; it knows unit, default, fields, groups")
        for name in ("fields", "groups"):
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f"costs: {name} must be a table, found {values[name]!r}")
        groups = {}
        for name, each in values.get("groups", {}).items():
            if not isinstance(each, Mapping) or set(each) != {"cost", "fields"}:
                raise InputError(f"costs: group {name!r} needs a cost and fields, found {each!r}")
            if not isinstance(each["fields"], list | tuple) or not each["fields"]:
                raise InputError(f"costs: the fields of group {name!r} must be a list, found {each['fields']!r}")
            groups[name] = Shared(each["cost"], tuple(each["fields"]))
        fields = dict(values.get("fields", {}))
        if "default" in values:
            fields = {**dict.fromkeys(schema.names, values["default"]), **fields}
        result = cls(fields, groups, str(values.get("unit", "")))
        result.check(schema.names)
        return result


def complexity(
    schema: Schema, dim: int = 16, compute: float = 1.0, width: float = 1.0, keys: float = 1.0
) -> Costs:
    r"""Return FSCD's complexity of each field: γ1·o + γ2·d + γ3·n, each scaled to a mean of 1.

    o is the cost of computing the field (``Field.cost``), d the width of its embedding, n the number of its ids.
    """
    fields = list(schema)
    columns = [
        [each.cost for each in fields],
        [float(dim if each.kind != "numeric" else each.dim) for each in fields],
        [float(each.cardinality) for each in fields],
    ]
    total = [0.0] * len(fields)
    for factor, values in zip((compute, width, keys), columns, strict=True):
        mean = math.fsum(values) / max(1, len(values))
        if mean > 0:
            total = [cost + factor * value / mean for cost, value in zip(total, values, strict=True)]
    return Costs(dict(zip(schema.names, total, strict=True)), unit="FSCD complexity")
