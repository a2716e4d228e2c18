"""The presets: small, terabyte, industrial, industrial-small.

What a simulated log is made of: one line a field, with its role in the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from lpfs.errors import InputError
from lpfs.schema import Field, Group, Kind, Schema

Role = Literal["main", "pair", "copy", "correlated", "noise"]


@dataclass(frozen=True)
class FieldSpec:
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
    def is_first_of_pair(self) -> bool:
        """Whether a term of the logit is its own: a main effect, or the first field of a pair."""
        return self.role == "main" or (self.role == "pair" and self.name < str(self.partner))

    def field(self) -> Field:
        """Return the field of the schema; two special ids come before the values."""
        if self.kind == "numeric":
            return Field(self.name, "numeric", 0, self.width, self.group)
        return Field(self.name, self.kind, self.values + 2, 1, self.group)


@dataclass(frozen=True)
class TaskSpec:
    """An auxiliary label: some of the click's effects and some of its own; ``after`` needs a click first."""

    name: str
    base_rate: float
    share: float  # of the click's own logit
    after: bool = False


@dataclass(frozen=True)
class SimulationSpec:
    """All that a simulated log is drawn from, besides the seed."""

    preset: str
    specs: tuple[FieldSpec, ...]
    days: int
    rows: int
    base_rate: float
    label: str = "click"
    tasks: tuple[TaskSpec, ...] = ()

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


def drift_factors(drift: str, days: int) -> list[float]:
    """Return what a field's effect is multiplied with on each day.

    >>> strength("in", 6)
    [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
    """
    if drift == "steady":
        return [1.0] * days
    begin, end = days / 3, days * 2 / 3
    rising = [min(1.0, max(0.0, (day + 0.5 - begin) / (end - begin))) for day in range(days)]
    return rising if drift == "in" else [1.0 - value for value in rising]


ROWS = {"small": 100_000, "terabyte": 2_000_000, "industrial": 200_000, "industrial-small": 200_000}
DAYS = {"small": 10, "terabyte": 24, "industrial": 9, "industrial-small": 9}
PRESETS = tuple(ROWS)

TASKS = (
    TaskSpec("long_view", 0.15, 0.6),
    TaskSpec("like", 0.05, 0.5),
    TaskSpec("share", 0.02, 0.3),
    TaskSpec("follow", 0.02, 0.4),
    TaskSpec("purchase", 0.2, 0.5, after=True),
)


def preset_spec(preset: str, rows: int | None, days: int | None, seed: int) -> SimulationSpec:
    """Return what a preset asks for, its fields in an order that says nothing about their roles."""
    if preset not in PRESETS:
        raise InputError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    rows = ROWS[preset] if rows is None else rows
    days = DAYS[preset] if days is None else days
    for name, value in (("rows", rows), ("days", days)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number >= 1, found {value!r}")
    days = min(days, rows)
    rng = np.random.default_rng([seed, 1])
    if preset == "small":
        return SimulationSpec(preset, _scale_effects(small(rng), 2.2), days, rows, 0.2)
    if preset == "terabyte":
        return SimulationSpec(preset, _scale_effects(terabyte(rng), 1.4), days, rows, 0.033, label="label")
    sizes = (250, 46, 96, 25) if preset == "industrial" else (40, 8, 16, 5)
    return SimulationSpec(preset, _scale_effects(industrial(sizes, rng), 1.5), days, rows, 0.04, tasks=TASKS)


def _scale_effects(specs: Sequence[FieldSpec], spread: float) -> tuple[FieldSpec, ...]:
    """Return the fields with effects in the same proportions that make a logit of this standard deviation."""
    factor = spread / sum(spec.effect**2 for spec in specs if spec.is_first_of_pair) ** 0.5
    return tuple(replace(spec, effect=round(spec.effect * factor, 4)) for spec in specs)


def small(rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return 31 fields with everything in it that a quick demonstration can find."""
    specs = [
        FieldSpec("m0", role="main", effect=0.9, values=12, zipf=0.7),
        FieldSpec("m1", role="main", effect=0.7, values=20, missing=0.05),
        FieldSpec("m2", role="main", effect=0.5, values=30),
        FieldSpec("m3", role="main", effect=0.35, values=10),
        FieldSpec("m4", role="main", effect=0.25, values=8),
        FieldSpec("m5", role="main", effect=0.5, values=16, drift="in"),
        FieldSpec("m6", role="main", effect=0.5, values=16, drift="out"),
        FieldSpec("m7", role="main", effect=0.6, values=24),
        FieldSpec("n0", "numeric", role="main", effect=0.7),
        FieldSpec("n1", "numeric", role="main", effect=0.4, missing=0.1),
        FieldSpec("b0", "multi", role="main", effect=0.5, values=20),
        *field_pair("p0", "p1", 0.8, 4),
        *field_pair("p2", "p3", 0.6, 6),
    ]
    specs += noisy_copies(specs, ("m0", "m1", "n0", "m5"), 0.85)
    specs += correlated_fields("m7", 3, (10, 40, 200), 0.7)
    sizes = (3, 10, 50, 300, 2000, 10_000)
    specs += [FieldSpec("", values=size, missing=0.1 * (at % 2)) for at, size in enumerate(sizes)]
    specs += [FieldSpec("", "numeric"), FieldSpec("", "numeric", missing=0.2), FieldSpec("", "multi", values=500)]
    groups: tuple[Group, ...] = ("user", "item", "combine", "context")
    specs = [replace(spec, group=groups[at % 4]) for at, spec in enumerate(specs)]
    return _anonymized(specs, rng, [f"f{at:02d}" for at in range(len(specs))])


def terabyte(rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return I1 … I13 and C1 … C26, five million values in all, most fields of little use."""
    numbers = [
        FieldSpec("n0", "numeric", role="main", effect=0.5, missing=0.05),
        FieldSpec("n1", "numeric", role="main", effect=0.35, missing=0.2),
        FieldSpec("n2", "numeric", role="main", effect=0.2),
        FieldSpec("n3", "numeric", role="main", effect=0.4, drift="in", missing=0.1),
    ]
    numbers += noisy_copies(numbers, ("n0", "n1", "n2"), 0.8)
    missing = (0.0, 0.05, 0.2, 0.4, 0.75, 0.0)
    numbers += [FieldSpec("", "numeric", missing=share) for share in missing]
    ids = [
        FieldSpec("m0", role="main", effect=0.7, values=60),
        FieldSpec("m1", role="main", effect=0.5, values=300, missing=0.03),
        FieldSpec("m2", role="main", effect=0.4, values=2000),
        FieldSpec("m3", role="main", effect=0.3, values=20),
        FieldSpec("m4", role="main", effect=0.5, values=200, drift="out"),
        FieldSpec("m5", role="main", effect=0.5, values=500, drift="in"),
        FieldSpec("m6", role="main", effect=0.2, values=12),
        *field_pair("p0", "p1", 0.6, 32),
        *field_pair("p2", "p3", 0.4, 64),
    ]
    ids += noisy_copies(ids, ("m0", "m1", "m4"), 0.85)
    ids += correlated_fields("m3", 3, (50, 1000, 30_000), 0.7)
    sizes = (3, 100, 7000, 40_000, 150_000, 300_000, 500_000, 1_000_000, 3_000_000)
    ids += [FieldSpec("", values=size, missing=0.4 * (at % 3 == 1)) for at, size in enumerate(sizes)]
    return (
        *_anonymized(numbers, rng, [f"I{at}" for at in range(1, 14)]),
        *_anonymized(ids, rng, [f"C{at}" for at in range(1, 27)]),
    )


def industrial(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return user, item and combine fields and continuous inputs of width 1 to 128; one in six is true."""
    found: list[FieldSpec] = []
    for group, count in zip(("user", "item", "combine"), sizes, strict=False):
        tag, fifth = group[0], max(1, count // 10)
        specs = [
            FieldSpec(
                f"{tag}m{at}",
                "multi" if at % 8 == 7 else "categorical",
                role="main",
                effect=0.6 * 0.93**at,
                values=int(rng.choice((8, 20, 60, 200))),
                missing=0.05 * (at % 3 == 0),
                drift={2: "in", 3: "out"}.get(at % 6, "steady"),
            )
            for at in range(fifth)
        ]
        for at in range(max(1, count // 40)):
            specs += field_pair(f"{tag}p{at}", f"{tag}q{at}", 0.5 * 0.9**at, 16)
        specs += noisy_copies(specs, [spec.name for spec in specs[:fifth] if spec.kind != "multi"][::2], 0.85)
        specs += correlated_fields(specs[0].name, max(1, count // 16), (30, 300, 3000), 0.7)
        left = count - len(specs)
        specs += [
            FieldSpec("", "multi" if at % 12 == 5 else "categorical", values=int(10 ** rng.uniform(0.5, 5.0)))
            for at in range(left)
        ]
        specs = [replace(spec, group=group) for spec in specs]  # type: ignore[arg-type]
        found += _anonymized(specs, rng, [f"{group}_{at:03d}" for at in range(count)])
    widths = np.rint(np.geomspace(1, 128, sizes[3])).astype(int).tolist()
    true = max(1, sizes[3] // 4)
    numbers = [
        FieldSpec("", "numeric", role="main" if at % 4 == 0 and at // 4 < true else "noise", width=width)
        for at, width in enumerate(widths)
    ]
    numbers = [replace(spec, effect=0.3 if spec.true else 0.0) for spec in numbers]
    return (*found, *_anonymized(numbers, rng, [f"dense_{at:02d}" for at in range(sizes[3])]))


def field_pair(first: str, second: str, effect: float, values: int) -> list[FieldSpec]:
    """Return two fields that matter only together."""
    return [
        FieldSpec(first, role="pair", effect=effect, values=values, zipf=0.6, partner=second),
        FieldSpec(second, role="pair", effect=effect, values=values, zipf=0.6, partner=first),
    ]


def noisy_copies(specs: Sequence[FieldSpec], names: Sequence[str], likeness: float) -> list[FieldSpec]:
    """Return a noisy copy of each of these fields."""
    known = {spec.name: spec for spec in specs}
    plain = {"role": "copy", "effect": 0.0, "drift": "steady", "missing": 0.0, "likeness": likeness}
    return [replace(known[name], name="", source=name, **plain) for name in names]  # type: ignore[arg-type]


def correlated_fields(name: str, count: int, sizes: Sequence[int], likeness: float) -> list[FieldSpec]:
    """Return fields that share a hidden cause with a true one."""
    return [
        FieldSpec("", role="correlated", values=sizes[at % len(sizes)], source=name, likeness=likeness)
        for at in range(count)
    ]


def _anonymized(
    specs: Sequence[FieldSpec], rng: np.random.Generator, names: Sequence[str]
) -> tuple[FieldSpec, ...]:
    """Return the fields in random order under new names, so that neither tells a role."""
    order = [specs[at] for at in rng.permutation(len(specs))]
    new = {spec.name: name for spec, name in zip(order, names, strict=True) if spec.name}
    return tuple(
        replace(spec, name=name, source=new.get(spec.source or ""), partner=new.get(spec.partner or ""))
        for spec, name in zip(order, names, strict=True)
    )
