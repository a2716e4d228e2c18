"""The presets: small, terabyte, industrial, industrial-small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lpfs.data.simulation.spec import Plan, Spec, Task
from lpfs.errors import InputError
from lpfs.schema import Group

ROWS = {"small": 100_000, "terabyte": 2_000_000, "industrial": 200_000, "industrial-small": 200_000}
DAYS = {"small": 10, "terabyte": 24, "industrial": 9, "industrial-small": 9}
PRESETS = tuple(ROWS)

TASKS = (
    Task("long_view", 0.15, 0.6),
    Task("like", 0.05, 0.5),
    Task("share", 0.02, 0.3),
    Task("follow", 0.02, 0.4),
    Task("purchase", 0.2, 0.5, after=True),
)


def plan(preset: str, rows: int | None, days: int | None, seed: int) -> Plan:
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
        return Plan(preset, scaled(small(rng), 2.2), days, rows, 0.2)
    if preset == "terabyte":
        return Plan(preset, scaled(terabyte(rng), 1.4), days, rows, 0.033, label="label")
    sizes = (250, 46, 96, 25) if preset == "industrial" else (40, 8, 16, 5)
    return Plan(preset, scaled(industrial(sizes, rng), 1.5), days, rows, 0.04, tasks=TASKS)


def scaled(specs: Sequence[Spec], spread: float) -> tuple[Spec, ...]:
    """Return the fields with effects in the same proportions that make a logit of this standard deviation."""
    factor = spread / sum(spec.effect**2 for spec in specs if spec.leads) ** 0.5
    return tuple(replace(spec, effect=round(spec.effect * factor, 4)) for spec in specs)


def small(rng: np.random.Generator) -> tuple[Spec, ...]:
    """Return 31 fields with everything in it that a quick demonstration can find."""
    specs = [
        Spec("m0", role="main", effect=0.9, values=12, zipf=0.7),
        Spec("m1", role="main", effect=0.7, values=20, missing=0.05),
        Spec("m2", role="main", effect=0.5, values=30),
        Spec("m3", role="main", effect=0.35, values=10),
        Spec("m4", role="main", effect=0.25, values=8),
        Spec("m5", role="main", effect=0.5, values=16, drift="in"),
        Spec("m6", role="main", effect=0.5, values=16, drift="out"),
        Spec("m7", role="main", effect=0.6, values=24),
        Spec("n0", "numeric", role="main", effect=0.7),
        Spec("n1", "numeric", role="main", effect=0.4, missing=0.1),
        Spec("b0", "multi", role="main", effect=0.5, values=20),
        *pair("p0", "p1", 0.8, 4),
        *pair("p2", "p3", 0.6, 6),
    ]
    specs += copies(specs, ("m0", "m1", "n0", "m5"), 0.85)
    specs += relatives("m7", 3, (10, 40, 200), 0.7)
    sizes = (3, 10, 50, 300, 2000, 10_000)
    specs += [Spec("", values=size, missing=0.1 * (at % 2)) for at, size in enumerate(sizes)]
    specs += [Spec("", "numeric"), Spec("", "numeric", missing=0.2), Spec("", "multi", values=500)]
    groups: tuple[Group, ...] = ("user", "item", "combine", "context")
    specs = [replace(spec, group=groups[at % 4]) for at, spec in enumerate(specs)]
    return shuffled(specs, rng, [f"f{at:02d}" for at in range(len(specs))])


def terabyte(rng: np.random.Generator) -> tuple[Spec, ...]:
    """Return I1 … I13 and C1 … C26, five million values in all, most fields of little use."""
    numbers = [
        Spec("n0", "numeric", role="main", effect=0.5, missing=0.05),
        Spec("n1", "numeric", role="main", effect=0.35, missing=0.2),
        Spec("n2", "numeric", role="main", effect=0.2),
        Spec("n3", "numeric", role="main", effect=0.4, drift="in", missing=0.1),
    ]
    numbers += copies(numbers, ("n0", "n1", "n2"), 0.8)
    missing = (0.0, 0.05, 0.2, 0.4, 0.75, 0.0)
    numbers += [Spec("", "numeric", missing=share) for share in missing]
    ids = [
        Spec("m0", role="main", effect=0.7, values=60),
        Spec("m1", role="main", effect=0.5, values=300, missing=0.03),
        Spec("m2", role="main", effect=0.4, values=2000),
        Spec("m3", role="main", effect=0.3, values=20),
        Spec("m4", role="main", effect=0.5, values=200, drift="out"),
        Spec("m5", role="main", effect=0.5, values=500, drift="in"),
        Spec("m6", role="main", effect=0.2, values=12),
        *pair("p0", "p1", 0.6, 32),
        *pair("p2", "p3", 0.4, 64),
    ]
    ids += copies(ids, ("m0", "m1", "m4"), 0.85)
    ids += relatives("m3", 3, (50, 1000, 30_000), 0.7)
    sizes = (3, 100, 7000, 40_000, 150_000, 300_000, 500_000, 1_000_000, 3_000_000)
    ids += [Spec("", values=size, missing=0.4 * (at % 3 == 1)) for at, size in enumerate(sizes)]
    return (
        *shuffled(numbers, rng, [f"I{at}" for at in range(1, 14)]),
        *shuffled(ids, rng, [f"C{at}" for at in range(1, 27)]),
    )


def industrial(sizes: tuple[int, int, int, int], rng: np.random.Generator) -> tuple[Spec, ...]:
    """Return user, item and combine fields and continuous inputs of width 1 to 128; one in six is true."""
    found: list[Spec] = []
    for group, count in zip(("user", "item", "combine"), sizes, strict=False):
        tag, fifth = group[0], max(1, count // 10)
        specs = [
            Spec(
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
            specs += pair(f"{tag}p{at}", f"{tag}q{at}", 0.5 * 0.9**at, 16)
        specs += copies(specs, [spec.name for spec in specs[:fifth] if spec.kind != "multi"][::2], 0.85)
        specs += relatives(specs[0].name, max(1, count // 16), (30, 300, 3000), 0.7)
        left = count - len(specs)
        specs += [
            Spec("", "multi" if at % 12 == 5 else "categorical", values=int(10 ** rng.uniform(0.5, 5.0)))
            for at in range(left)
        ]
        specs = [replace(spec, group=group) for spec in specs]  # type: ignore[arg-type]
        found += shuffled(specs, rng, [f"{group}_{at:03d}" for at in range(count)])
    widths = np.rint(np.geomspace(1, 128, sizes[3])).astype(int).tolist()
    true = max(1, sizes[3] // 4)
    numbers = [
        Spec("", "numeric", role="main" if at % 4 == 0 and at // 4 < true else "noise", width=width)
        for at, width in enumerate(widths)
    ]
    numbers = [replace(spec, effect=0.3 if spec.true else 0.0) for spec in numbers]
    return (*found, *shuffled(numbers, rng, [f"dense_{at:02d}" for at in range(sizes[3])]))


def pair(first: str, second: str, effect: float, values: int) -> list[Spec]:
    """Return two fields that matter only together."""
    return [
        Spec(first, role="pair", effect=effect, values=values, zipf=0.6, partner=second),
        Spec(second, role="pair", effect=effect, values=values, zipf=0.6, partner=first),
    ]


def copies(specs: Sequence[Spec], names: Sequence[str], likeness: float) -> list[Spec]:
    """Return a noisy copy of each of these fields."""
    known = {spec.name: spec for spec in specs}
    plain = {"role": "copy", "effect": 0.0, "drift": "steady", "missing": 0.0, "likeness": likeness}
    return [replace(known[name], name="", source=name, **plain) for name in names]  # type: ignore[arg-type]


def relatives(name: str, count: int, sizes: Sequence[int], likeness: float) -> list[Spec]:
    """Return fields that share a hidden cause with a true one."""
    return [
        Spec("", role="correlated", values=sizes[at % len(sizes)], source=name, likeness=likeness)
        for at in range(count)
    ]


def shuffled(specs: Sequence[Spec], rng: np.random.Generator, names: Sequence[str]) -> tuple[Spec, ...]:
    """Return the fields in random order under new names, so that neither tells a role."""
    order = [specs[at] for at in rng.permutation(len(specs))]
    new = {spec.name: name for spec, name in zip(order, names, strict=True) if spec.name}
    return tuple(
        replace(spec, name=name, source=new.get(spec.source or ""), partner=new.get(spec.partner or ""))
        for spec, name in zip(order, names, strict=True)
    )
