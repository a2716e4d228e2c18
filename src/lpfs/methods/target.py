"""SelectionTarget: what a search is for. Costs: what each field costs, alone and in shared upstream calls."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lpfs._text import describe_target
from lpfs._validation import check_int, check_name, is_number
from lpfs.data.fields import load_toml
from lpfs.errors import FieldError, InputError
from lpfs.schema import Schema

if TYPE_CHECKING:
    from lpfs.models.base import Model

TargetKind = Literal["keep", "penalty", "budget", "max_auc_loss"]
TARGET_KINDS: tuple[TargetKind, ...] = ("keep", "penalty", "budget", "max_auc_loss")
MAX_AUC_LOSS = 0.5  # of max_auc_loss: a model without any field has AUC .5
DEFAULT_AUC_LOSS = 0.001  # max_auc_loss of a target that gives none of the four


@dataclass(frozen=True)
class SelectionTarget:
    """How many fields to keep: exactly one of the first four, or none, which allows a small AUC loss.

    Args:
        keep: number of fields to keep.
        penalty: fixed λ, as in the paper.
        budget: upper limit of the total cost of the kept fields, see ``costs``.
        max_auc_loss: keep as few fields as possible with a validation AUC at most this much below that of all.
        must_keep: fields that are always kept; they count towards ``keep`` and ``budget``.
        costs: cost of each field, required by ``budget``; with ``keep`` they weight λ.
    """

    keep: int | None = None
    penalty: float | None = None
    budget: float | None = None
    max_auc_loss: float | None = None
    must_keep: tuple[str, ...] = ()
    costs: Costs | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "must_keep", tuple(dict.fromkeys(self.must_keep)))
        kinds = [kind for kind in TARGET_KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise InputError(f"give one of {', '.join(TARGET_KINDS)}; found {' and '.join(kinds)}")
        if not kinds:
            object.__setattr__(self, "max_auc_loss", DEFAULT_AUC_LOSS)
        for kind in TARGET_KINDS[1:]:
            value = getattr(self, kind)
            if value is not None and not (is_number(value) and 0 <= value < math.inf):
                raise InputError(f"{kind} must be a number >= 0, found {value!r}")
        if self.max_auc_loss is not None and self.max_auc_loss >= MAX_AUC_LOSS:
            given = f"max_auc_loss must be a number below {MAX_AUC_LOSS}, found {self.max_auc_loss!r}"
            raise InputError(f"{given}; it is a difference of two AUCs, such as 0.001")
        if self.keep is not None:
            object.__setattr__(self, "keep", check_int("keep", self.keep))
        if self.budget is not None and self.costs is None:
            raise InputError("a budget needs the cost of each field: give costs=, or --costs FILE")

    @property
    def kind(self) -> TargetKind:
        """Which of the four is given."""
        return next(kind for kind in TARGET_KINDS if getattr(self, kind) is not None)

    def describe(self) -> str:
        """Return the target in words.

        >>> SelectionTarget(keep=20).describe()
        'keep exactly 20 fields'
        """
        unit = "" if self.costs is None else self.costs.unit
        return describe_target(self.keep, self.penalty, self.budget, self.max_auc_loss, unit)

    def for_model(self, model: Model) -> SelectionTarget:
        """Return the target with the costs of the model's parts instead of those of the fields."""
        if self.costs is None:
            return self
        fields = model.fields_of_parts()
        return replace(self, costs=self.costs.of_parts({name: fields[name] for name in model.names}))

    def permanent(self, names: Sequence[str]) -> set[str]:
        """Return the fields that are never dropped: those that must be kept, and those without a cost beside others."""
        weights = [] if self.costs is None else self.costs.weights(names, names)
        free = [name for name, cost in zip(names, weights, strict=False) if cost == 0 and any(weights)]
        return {*self.must_keep, *free}

    def check(self, names: Sequence[str]) -> None:
        """Raise InputError if the target cannot be reached with these fields."""
        if self.keep is not None and not 1 <= self.keep <= len(names):
            raise InputError(f"keep must be between 1 and the {len(names)} fields, found {self.keep}")
        for name in self.must_keep:
            check_name(name, names, "field", "must_keep", FieldError)
        if self.keep is not None and len(self.must_keep) > self.keep:
            raise InputError(f"keep={self.keep}, but {len(self.must_keep)} fields must be kept; increase keep")
        if self.costs is not None:
            self.costs.check(names)
            permanent = self.permanent(names)
            if self.keep is not None and len(permanent) > self.keep:
                raise InputError(
                    f"keep={self.keep}, but {len(permanent)} fields must be kept or have no cost, and a field "
                    "without a cost is never dropped; give these fields a small cost, or increase keep"
                )
        if self.budget is not None and self.costs is not None:
            minimum = self.costs.total(self.must_keep) if self.must_keep else self.costs.cheapest(names)
            if self.budget < minimum:
                cause = "the fields that must be kept cost" if self.must_keep else "the cheapest field costs"
                raise InputError(f"a budget of {self.budget:g} is too small: {cause} {minimum:g}")


@dataclass(frozen=True)
class SharedCost:
    """A cost that is paid once if any of its fields is kept."""

    cost: float
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Costs:
    """Cost of a set of fields: the sum over its fields, plus each shared cost that any of them needs.

    >>> costs = Costs({"age": 1.0, "city": 1.0, "item": 2.0}, {"profile": SharedCost(3.0, ("age", "city"))})
    >>> costs.total(["age", "item"]), costs.total(["age", "city"]), costs.total(["item"])
    (6.0, 5.0, 2.0)
    """

    fields: Mapping[str, float]
    groups: Mapping[str, SharedCost] = field(default_factory=dict)
    unit: str = ""

    def __post_init__(self) -> None:
        groups = ((f"group {name}", group.cost) for name, group in self.groups.items())
        for name, cost in [*self.fields.items(), *groups]:
            if not is_number(cost) or not 0 <= cost < math.inf:
                raise InputError(f"costs: {name!r} must be a number >= 0, found {cost!r}")

    def total(self, kept: Sequence[str]) -> float:
        """Return the cost of these fields together."""
        chosen = set(kept)
        separate = math.fsum(self.fields.get(name, 0.0) for name in kept)
        return separate + math.fsum(group.cost for group in self.groups.values() if chosen & set(group.fields))

    def weights(self, names: Sequence[str], alive: Sequence[str]) -> list[float]:
        """Return the weight of each field: its cost, and its share of each shared cost among the fields alive."""
        alive_names = set(alive)
        weights = [float(self.fields.get(name, 0.0)) for name in names]
        for group in self.groups.values():
            members = set(group.fields)
            share = group.cost / max(1, len(members & alive_names))
            weights = [cost + share if name in members else cost for name, cost in zip(names, weights, strict=True)]
        return weights

    def cheapest(self, names: Sequence[str]) -> float:
        """Return the cost of the cheapest field alone."""
        return min(self.total([name]) for name in names)

    def check(self, names: Sequence[str]) -> None:
        """Raise InputError if a cost is of an unknown field, or a field has no cost."""
        grouped = [name for group in self.groups.values() for name in group.fields]
        for name in (*self.fields, *grouped):
            check_name(name, names, "field", "costs", FieldError)
        missing = [name for name in names if name not in self.fields and name not in grouped]
        if missing:
            others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
            raise InputError(f"costs: field {missing[0]!r}{others} has no cost; give it one, or give a default")

    def of_parts(self, parts: Mapping[str, Sequence[str]]) -> Costs:
        """Return the costs of parts of a model: a field is paid once if any part that uses it is kept.

        >>> costs = Costs({"a": 1.0, "b": 2.0}).of_parts({"a": ["a"], "b": ["b"], "a*b": ["a", "b"]})
        >>> costs.total(["a"]), costs.total(["a*b"]), costs.total(["a", "a*b"])
        (1.0, 3.0, 3.0)
        """
        if all(tuple(fields) == (name,) for name, fields in parts.items()):
            return self

        def parts_using(fields: Sequence[str]) -> tuple[str, ...]:
            return tuple(part for part, inputs in parts.items() if set(inputs) & set(fields))

        groups = {f"field {name}": SharedCost(cost, parts_using([name])) for name, cost in self.fields.items()}
        groups |= {name: SharedCost(group.cost, parts_using(group.fields)) for name, group in self.groups.items()}
        return Costs({}, groups, self.unit)

    @classmethod
    def load(cls, path: str | os.PathLike[str], schema: Schema) -> Costs:
        """Read a TOML file: ``unit``, ``default``, ``[fields]`` name = cost, ``[groups.X]`` cost and fields."""
        return cls.build(load_toml(Path(path)), schema)

    @classmethod
    def build(cls, values: Mapping[str, Any], schema: Schema) -> Costs:
        """Return costs from plain values; an unknown key is an error."""
        for name in values:
            check_name(name, ("unit", "default", "fields", "groups"), "key", "costs")
        for name in ("fields", "groups"):
            if not isinstance(values.get(name, {}), Mapping):
                raise InputError(f"costs: {name} must be a table, found {values[name]!r}")
        groups = {}
        for name, group in values.get("groups", {}).items():
            if not isinstance(group, Mapping) or set(group) != {"cost", "fields"}:
                raise InputError(f"costs: group {name!r} needs the keys cost and fields, found {group!r}")
            if not isinstance(group["fields"], list | tuple) or not group["fields"]:
                raise InputError(f"costs: the fields of group {name!r} must be a list, found {group['fields']!r}")
            groups[name] = SharedCost(group["cost"], tuple(group["fields"]))
        fields = dict(values.get("fields", {}))
        if "default" in values:
            fields = {**dict.fromkeys(schema.names, values["default"]), **fields}
        costs = cls(fields, groups, str(values.get("unit", "")))
        costs.check(schema.names)
        return costs


def complexity_costs(
    schema: Schema, dim: int = 16, compute: float = 1.0, width: float = 1.0, keys: float = 1.0
) -> Costs:
    r"""Return FSCD's complexity of each field: γ1·o + γ2·d + γ3·n, each term scaled to a mean of 1.

    o is the cost of computing the field (``Field.cost``), d the width of its embedding, n the number of its ids.
    """
    fields = list(schema)
    columns = [
        [field.cost for field in fields],
        [float(dim if field.kind != "numeric" else field.dim) for field in fields],
        [float(field.cardinality) for field in fields],
    ]
    total = [0.0] * len(fields)
    for factor, values in zip((compute, width, keys), columns, strict=True):
        mean = math.fsum(values) / max(1, len(values))
        if mean > 0:
            total = [cost + factor * value / mean for cost, value in zip(total, values, strict=True)]
    return Costs(dict(zip(schema.names, total, strict=True)), unit="FSCD complexity")
