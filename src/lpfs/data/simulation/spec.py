"""What a simulated log is made of: one line a field, with its role in the truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lpfs.schema import Field, Group, Kind, Schema

Role = Literal["main", "pair", "copy", "correlated", "noise"]


@dataclass(frozen=True)
class Spec:
    """One simulated field.

    Args:
        name: of the field.
        kind: ``categorical``, ``numeric`` or ``multi``.
        role: ``main`` (an effect of its own), ``pair`` (an effect only together with ``partner``), ``copy``
            (a noisy copy of ``source``), ``correlated`` (shares a hidden cause with ``source``), ``noise``.
        effect: standard deviation of what it adds to the logit; of a pair, of what both add together.
        values: how many different values there are, without the special ids.
        zipf: exponent of the frequencies of the values.
        width: of a numeric field.
        missing: share of missing values.
        length: mean number of values in a bag.
        likeness: share of rows in which a copy follows its source, or a correlated field the hidden cause.
        source: field that is copied, or that shares the hidden cause.
        partner: the other field of a pair.
        drift: ``steady``, ``in`` (the effect fades in over the days) or ``out``.
        group: ``user``, ``item``, ``combine`` or ``context``.

    """

    name: str
    kind: Kind = "categorical"
    role: Role = "noise"
    effect: float = 0.0
    values: int = 0
    zipf: float = 1.1
    width: int = 1
    missing: float = 0.0
    length: float = 3.0
    likeness: float = 0.0
    source: str | None = None
    partner: str | None = None
    drift: str = "steady"
    group: Group = "context"

    @property
    def true(self) -> bool:
        """Whether the click depends on it."""
        return self.role in ("main", "pair")

    @property
    def leads(self) -> bool:
        """Whether a term of the logit is its own: a main effect, or the first field of a pair."""
        return self.role == "main" or (self.role == "pair" and self.name < str(self.partner))

    def field(self) -> Field:
        """Return the field of the schema; two special ids come before the values."""
        if self.kind == "numeric":
            return Field(self.name, "numeric", 0, self.width, self.group)
        return Field(self.name, self.kind, self.values + 2, 1, self.group)


@dataclass(frozen=True)
class Task:
    """An auxiliary label: some of the click's effects and some of its own; ``after`` needs a click first."""

    name: str
    base_rate: float
    share: float  # of the click's own logit
    after: bool = False


@dataclass(frozen=True)
class Plan:
    """All that a simulated log is drawn from, besides the seed."""

    preset: str
    specs: tuple[Spec, ...]
    days: int
    rows: int
    base_rate: float
    label: str = "click"
    tasks: tuple[Task, ...] = ()

    def schema(self) -> Schema:
        """Return the schema of the Dataset."""
        names = tuple(task.name for task in self.tasks)
        return Schema(tuple(spec.field() for spec in self.specs), self.label, names)

    def day_rows(self) -> list[int]:
        """Return how many rows each day has; they differ by one at most."""
        return [self.rows * (day + 1) // self.days - self.rows * day // self.days for day in range(self.days)]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def strength(drift: str, days: int) -> list[float]:
    """Return what a field's effect is multiplied with on each day.

    >>> strength("in", 6)
    [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
    """
    if drift == "steady":
        return [1.0] * days
    begin, end = days / 3, days * 2 / 3
    rising = [min(1.0, max(0.0, (day + 0.5 - begin) / (end - begin))) for day in range(days)]
    return rising if drift == "in" else [1.0 - value for value in rising]
