"""SimulationSpec: the fields, roles and effects of a simulated log; the presets of ``simulate``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from lpfs._validation import check_int
from lpfs.data.store.format import FIRST_ID
from lpfs.errors import InputError
from lpfs.schema import Field, Group, Kind, Schema

# a separate effect; an effect only with the partner; a noisy copy of the source; a hidden cause shared with it; the
# group of the source, such as the genre of an item; the sum of the source and another number; none
Role = Literal["main", "pair", "copy", "correlated", "coarse", "sum", "noise"]
DEPENDENT_ROLES = ("copy", "correlated", "coarse", "sum")  # of fields whose values depend on other fields

# default numbers of rows and days
ROWS = {
    **{"small": 100_000, "terabyte": 2_000_000, "industrial": 200_000, "industrial-small": 200_000},
    **{"catalog": 200_000, "turnover": 200_000},
}
DAYS = {"small": 10, "terabyte": 24, "industrial": 9, "industrial-small": 9, "catalog": 20, "turnover": 20}
PRESETS = tuple(ROWS)


@dataclass(frozen=True)
class FieldSpec:
    """One simulated field."""

    name: str
    kind: Kind = "categorical"  # or numeric or multi
    role: Role = "noise"
    effect: float = 0.0  # standard deviation of its term in the logit; for a pair, of the common term
    values: int = 0  # number of distinct values, without the special ids
    zipf: float = 1.1  # exponent of the frequencies of the values
    width: int = 1  # number of values per row of a numeric field
    missing: float = 0.0  # fraction of missing values
    length: float = 3.0  # mean number of values in a bag
    likeness: float = 0.0  # fraction of rows in which a copy equals its source, or a correlated field follows the cause
    source: str | None = None  # the field that is copied, or that shares the hidden cause
    partner: str | None = None  # the other field of a pair
    drift: str = "steady"  # or "in" (the effect grows from 0 over the days) or "out" (it declines to 0)
    group: Group = "context"
    second: str | None = None  # the other number of a sum
    active: int = 0  # number of ids in use on a day; 0: all values, always
    turnover: float = 0.0  # fraction of these ids that new ones replace from one day to the next

    @property
    def true(self) -> bool:
        """Whether the click depends on the field."""
        return self.role in ("main", "pair")

    @property
    def is_first_of_pair(self) -> bool:
        """Whether the field stands for a term of the logit: a main effect, or the first field of a pair."""
        return self.role == "main" or (self.role == "pair" and self.name < str(self.partner))

    def to_json(self) -> dict[str, Any]:
        """Return plain values; properties that most fields do not have are left out."""
        values = asdict(self)
        return {name: value for name, value in values.items() if name not in RARE or value != getattr(FieldSpec, name)}

    def field(self) -> Field:
        """Return the field of the schema; the ids of the values follow the special ids."""
        if self.kind == "numeric":
            return Field(self.name, "numeric", 0, self.width, self.group)
        return Field(self.name, self.kind, self.values + FIRST_ID, 1, self.group)


RARE = ("second", "active", "turnover")


@dataclass(frozen=True)
class TaskSpec:
    """An additional label with a mixture of the effects of the click and of separate effects."""

    name: str
    base_rate: float
    share: float  # weight of the effects of the click in the mixture
    after: bool = False  # positive only if the click is


@dataclass(frozen=True)
class SimulationSpec:
    """The complete description of a simulated log, except for the seed."""

    preset: str
    specs: tuple[FieldSpec, ...]
    days: int
    rows: int
    base_rate: float
    label: str = "click"
    tasks: tuple[TaskSpec, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "specs": [spec.to_json() for spec in self.specs]}

    def schema(self) -> Schema:
        """Return the schema of the Dataset."""
        names = tuple(task.name for task in self.tasks)
        return Schema(tuple(spec.field() for spec in self.specs), self.label, names)

    def day_rows(self) -> list[int]:
        """Return the number of rows of each day; they differ by at most one."""
        return [self.rows * (day + 1) // self.days - self.rows * day // self.days for day in range(self.days)]


def drift_factors(drift: str, days: int) -> list[float]:
    """Return the factor of a field's effect on each day.

    >>> drift_factors("in", 6)
    [0.0, 0.0, 0.25, 0.75, 1.0, 1.0]
    """
    if drift == "steady":
        return [1.0] * days
    start, stop = days / 3, days * 2 / 3
    rising = [min(1.0, max(0.0, (day + 0.5 - start) / (stop - start))) for day in range(days)]
    return rising if drift == "in" else [1.0 - value for value in rising]


TASKS = (
    TaskSpec("long_view", 0.15, 0.6),
    TaskSpec("like", 0.05, 0.5),
    TaskSpec("share", 0.02, 0.3),
    TaskSpec("follow", 0.02, 0.4),
    TaskSpec("purchase", 0.2, 0.5, after=True),
)


def preset_spec(preset: str, rows: int | None, days: int | None, seed: int) -> SimulationSpec:
    """Return the spec of a preset; names and order of the fields do not depend on their roles."""
    if preset not in PRESETS:
        raise InputError(f"unknown preset {preset!r}; choose one of {', '.join(PRESETS)}")
    rows = ROWS[preset] if rows is None else check_int("rows", rows, 1)
    days = min(rows, DAYS[preset] if days is None else check_int("days", days, 1))
    rng = np.random.default_rng([seed, 1])
    if preset == "small":
        return SimulationSpec(preset, _scale_effects(small(rng), 2.2), days, rows, 0.2)
    if preset == "terabyte":
        return SimulationSpec(preset, _scale_effects(terabyte(rng), 1.4), days, rows, 0.033, label="label")
    if preset in ("catalog", "turnover"):
        specs = catalog(rng, days if preset == "turnover" else 0)
        return SimulationSpec(preset, _scale_effects(specs, 1.8), days, rows, 0.15)
    sizes = (250, 46, 96, 25) if preset == "industrial" else (40, 8, 16, 5)
    return SimulationSpec(preset, _scale_effects(industrial(sizes, rng), 1.5), days, rows, 0.04, tasks=TASKS)


def _scale_effects(specs: Sequence[FieldSpec], std: float) -> tuple[FieldSpec, ...]:
    """Return the fields with effects scaled so that the logit has the standard deviation ``std``."""
    factor = std / sum(spec.effect**2 for spec in specs if spec.is_first_of_pair) ** 0.5
    return tuple(replace(spec, effect=round(spec.effect * factor, 4)) for spec in specs)


def small(rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return the 31 fields of a quick demonstration, with every role and kind."""
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
    specs += [FieldSpec("", values=size, missing=0.1 * (index % 2)) for index, size in enumerate(sizes)]
    specs += [FieldSpec("", "numeric"), FieldSpec("", "numeric", missing=0.2), FieldSpec("", "multi", values=500)]
    groups: tuple[Group, ...] = ("user", "item", "combine", "context")
    specs = [replace(spec, group=groups[index % 4]) for index, spec in enumerate(specs)]
    return _anonymized(specs, rng, [f"f{index:02d}" for index in range(len(specs))])


def terabyte(rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return I1 … I13 and C1 … C26 with five million values in total; most fields have little or no effect."""
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
    ids += [FieldSpec("", values=size, missing=0.4 * (index % 3 == 1)) for index, size in enumerate(sizes)]
    return (
        *_anonymized(numbers, rng, [f"I{index}" for index in range(1, 14)]),
        *_anonymized(ids, rng, [f"C{index}" for index in range(1, 27)]),
    )


def industrial(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> tuple[FieldSpec, ...]:
    """Return user, item and combine fields and numeric fields of width 1 to 128; one in six is true."""
    fields: list[FieldSpec] = []
    for group, count in zip(("user", "item", "combine"), sizes, strict=False):
        tag, main_count = group[0], max(1, count // 10)
        specs = [
            FieldSpec(
                f"{tag}m{index}",
                "multi" if index % 8 == 7 else "categorical",
                role="main",
                effect=0.6 * 0.93**index,
                values=int(rng.choice((8, 20, 60, 200))),
                missing=0.05 * (index % 3 == 0),
                drift={2: "in", 3: "out"}.get(index % 6, "steady"),
            )
            for index in range(main_count)
        ]
        for index in range(max(1, count // 40)):
            specs += field_pair(f"{tag}p{index}", f"{tag}q{index}", 0.5 * 0.9**index, 16)
        specs += noisy_copies(specs, [spec.name for spec in specs[:main_count] if spec.kind != "multi"][::2], 0.85)
        specs += correlated_fields(specs[0].name, max(1, count // 16), (30, 300, 3000), 0.7)
        specs += [
            FieldSpec("", "multi" if index % 12 == 5 else "categorical", values=int(10 ** rng.uniform(0.5, 5.0)))
            for index in range(count - len(specs))
        ]
        specs = [replace(spec, group=group) for spec in specs]  # type: ignore[arg-type]
        fields += _anonymized(specs, rng, [f"{group}_{index:03d}" for index in range(count)])
    widths = np.rint(np.geomspace(1, 128, sizes[3])).astype(int).tolist()
    numbers = [FieldSpec("", "numeric", width=width) for width in widths]
    for index in range(0, 4 * max(1, sizes[3] // 4), 4):
        numbers[index] = replace(numbers[index], role="main", effect=0.3)
    return (*fields, *_anonymized(numbers, rng, [f"dense_{index:02d}" for index in range(sizes[3])]))


def catalog(rng: np.random.Generator, days: int) -> tuple[FieldSpec, ...]:
    """Return 34 fields in which ids with thousands of values matter, with five kinds of redundancy.

    Genre and brand are groups of the item and carry parts of its effect, region is a group of the city; two numbers
    are sums of others; some fields are copied or correlated. With ``days`` above 0 the ids of users, items and queries
    turn over: ids disappear, and new ones with other effects take their place.
    """
    specs = [
        turning_over(FieldSpec("user", role="main", effect=0.6, values=3000, zipf=1.02, group="user"), 0.02, days),
        turning_over(FieldSpec("item", role="main", effect=0.8, values=1500, zipf=1.05, group="item"), 0.08, days),
        turning_over(FieldSpec("query", role="main", effect=0.4, values=4000, zipf=1.1), 0.05, days),
        FieldSpec("city", role="main", effect=0.35, values=200, group="user"),
        FieldSpec("device", role="main", effect=0.3, values=30, missing=0.05),
        FieldSpec("hour", role="main", effect=0.25, values=24),
        FieldSpec("trend", role="main", effect=0.3, values=40, drift="in"),
        FieldSpec("n0", "numeric", role="main", effect=0.4),
        FieldSpec("n1", "numeric", role="main", effect=0.3, missing=0.1),
        FieldSpec("n2", "numeric", role="main", effect=0.2),
        FieldSpec("b0", "multi", role="main", effect=0.3, values=60, group="item"),
        *field_pair("p0", "p1", 0.5, 16),
        FieldSpec("genre", role="coarse", values=20, source="item", likeness=0.4, group="item"),
        FieldSpec("brand", role="coarse", values=130, source="item", likeness=0.3, group="item"),
        FieldSpec("region", role="coarse", values=12, source="city", likeness=0.5, group="user"),
        FieldSpec("m0", "numeric"),
        FieldSpec("", "numeric", role="sum", source="n0", second="n1", group="combine"),
        FieldSpec("", "numeric", role="sum", source="n2", second="m0", group="combine"),
    ]
    specs += noisy_copies(specs, ("device", "n0", "hour", "user"), 0.85)
    specs += correlated_fields("city", 2, (60, 2000), 0.7)
    sizes = (3, 40, 500, 3000, 20_000)
    specs += [FieldSpec("", values=size, missing=0.1 * (index % 2)) for index, size in enumerate(sizes)]
    specs += [turning_over(FieldSpec("", values=2000), 0.08, days)]
    specs += [FieldSpec("", "numeric"), FieldSpec("", "multi", values=200)]
    specs += [FieldSpec("", "numeric", missing=0.3)]
    return _anonymized(specs, rng, [f"f{index:02d}" for index in range(len(specs))])


def turning_over(spec: FieldSpec, turnover: float, days: int) -> FieldSpec:
    """Return the field with ids of which a fraction is replaced every day; unchanged without days."""
    if not days:
        return spec
    generations = 1 + math.ceil(turnover * (days - 1) + 1)
    return replace(spec, active=spec.values, values=spec.values * generations, turnover=turnover)


def field_pair(first: str, second: str, effect: float, values: int) -> list[FieldSpec]:
    """Return two fields that have an effect only in combination."""
    return [
        FieldSpec(first, role="pair", effect=effect, values=values, zipf=0.6, partner=second),
        FieldSpec(second, role="pair", effect=effect, values=values, zipf=0.6, partner=first),
    ]


def noisy_copies(specs: Sequence[FieldSpec], names: Sequence[str], likeness: float) -> list[FieldSpec]:
    """Return a noisy copy of each of these fields."""
    by_name = {spec.name: spec for spec in specs}
    return [
        replace(
            by_name[name], name="", source=name, role="copy", effect=0.0, drift="steady", missing=0.0, likeness=likeness
        )
        for name in names
    ]


def correlated_fields(name: str, count: int, sizes: Sequence[int], likeness: float) -> list[FieldSpec]:
    """Return fields that share a hidden cause with the field ``name``."""
    return [
        FieldSpec("", role="correlated", values=sizes[index % len(sizes)], source=name, likeness=likeness)
        for index in range(count)
    ]


def _anonymized(specs: Sequence[FieldSpec], rng: np.random.Generator, names: Sequence[str]) -> tuple[FieldSpec, ...]:
    """Return the fields in random order with new names, so that neither reveals a role."""
    order = [specs[index] for index in rng.permutation(len(specs))]
    new = {spec.name: name for spec, name in zip(order, names, strict=True) if spec.name}
    return tuple(
        replace(
            spec,
            name=name,
            source=new.get(spec.source or ""),
            partner=new.get(spec.partner or ""),
            second=new.get(spec.second or ""),
        )
        for spec, name in zip(order, names, strict=True)
    )
