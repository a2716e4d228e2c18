"""World: from a plan and a seed to rows, the same whatever the size of the chunks.

How values are drawn and what they add: frequencies, effects, counts.

Blocks joined into chunks, and what is written of them: ids for a Dataset, raw values for a log.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.simulate_spec import FieldSpec, SimulationSpec, drift_factors
from lpfs.data.store.format import FIRST_ID

Reals = npt.NDArray[np.float64]
Array = npt.NDArray[Any]
CENTRE, SPREAD = 1.5, 1.0  # of the logarithm of a count


def value_effects(spec: FieldSpec, rng: np.random.Generator) -> Array:
    """Return the effect of each value: mean 0 and variance 1 under the frequencies; of a pair, signs."""
    if not spec.true:
        return np.empty(0)
    if spec.kind == "numeric":
        direction = rng.normal(size=spec.width)
        return np.asarray(direction / np.linalg.norm(direction))
    if spec.role == "pair":
        flips = rng.random(spec.values // 2) < 0.5
        return np.asarray(np.repeat(np.where(flips, 1.0, -1.0), 2) * np.tile([1.0, -1.0], spec.values // 2))
    effects, weight = rng.normal(size=spec.values), frequencies(spec)
    effects -= effects @ weight
    return np.asarray(effects / np.sqrt(effects**2 @ weight))


def _zipf_cdf(values: Array | float, spec: FieldSpec) -> Any:
    """Return the share of rows with a value below this one: a power law on 1 … n + 1."""
    power = 1.0 - spec.zipf
    return ((np.asarray(values) + 1.0) ** power - 1.0) / ((spec.values + 1.0) ** power - 1.0)


def frequencies(spec: FieldSpec) -> Reals:
    """Return the probability of each value."""
    return np.asarray(np.diff(_zipf_cdf(np.arange(spec.values + 1), spec)))


def draw_zipf(uniform: Array, spec: FieldSpec) -> Array:
    """Return values, the most frequent first, from uniform numbers.

    The two values 2k and 2k + 1 of a pair's field are equally frequent and have opposite signs.
    """
    values = spec.values // 2 if spec.role == "pair" else spec.values
    power = 1.0 - spec.zipf
    if spec.role == "pair":
        uniform = uniform * 2
        odd = uniform >= 1.0
        uniform = uniform - odd
    drawn = (uniform * ((values + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0
    found = np.clip(drawn.astype(np.int64), 0, values - 1)
    return np.asarray(found * 2 + odd) if spec.role == "pair" else found


def draw_counts(rng: np.random.Generator, rows: int) -> Array:
    """Return counts with a long tail, as the integers of click logs."""
    return np.floor(np.exp(CENTRE + SPREAD * rng.standard_normal(rows)))


def draw_vectors(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Return vectors of independent numbers."""
    return rng.standard_normal((rows, width), dtype=np.float32)


BLOCK = 1 << 14  # rows drawn from one random stream; chunks are made of blocks
CALIBRATION_ROWS = 40_000  # rows that set the intercepts and the scales

Bag = tuple[Array, Array]  # values, lengths


@dataclass(frozen=True)
class SimulatedRows:
    """Simulated rows: values from 0 (-1: missing), counts and numbers (NaN: missing), bags, labels, truth."""

    ids: dict[str, Array]
    numbers: dict[str, Array]
    bags: dict[str, Bag]
    labels: dict[str, Array]
    logit: Reals


class Simulator:
    """Draw blocks of rows.

    The logit of a click on day t is b(t) + Σ w·m(t)·e(value) over main effects, e of mean 0 and variance 1,
    + Σ w·s(value)·s'(value') over the pairs, s and s' being ±1 with probability ½ each: whatever the value of
    one of them, the other makes the term +w or -w equally often, so neither has any effect of its own.
    """

    def __init__(self, plan: SimulationSpec, seed: int) -> None:
        self.plan, self.seed = plan, seed
        self._tables: dict[str, Array] = {}
        rng = np.random.default_rng([seed, 2])
        for spec in plan.specs:
            self._tables[spec.name] = value_effects(spec, rng)
        self._terms = [spec.name for spec in plan.specs if spec.is_first_of_pair]
        specs = {spec.name: spec for spec in plan.specs}
        self.weights = {name: specs[name].effect for name in self._terms}
        self.strength = {name: drift_factors(specs[name].drift, plan.days) for name in self._terms}
        mix = rng.normal(size=(len(self._terms), len(plan.tasks)))
        own = np.array(list(self.weights.values()))[:, None] * mix
        share = np.array([task.share for task in plan.tasks])
        click = np.array(list(self.weights.values()))[:, None]
        self.task_weights: Reals = share * click + (1 - share) * own  # (terms, tasks)
        self._scale: dict[str, tuple[float, float]] = {}
        self._standard: dict[str, tuple[float, float]] = {}
        self._calibrate()

    def _calibrate(self) -> None:
        """Set scales and intercepts from rows that are drawn for nothing else."""
        draws = [
            self._draw(CALIBRATION_ROWS // 4, np.random.default_rng([self.seed, 3, part])) for part in range(4)
        ]
        for spec in self.plan.specs:
            if spec.kind == "numeric" and spec.width == 1:
                logs = np.log1p(np.concatenate([numbers[spec.name] for _, numbers, _ in draws]))
                self._standard[spec.name] = float(np.nanmean(logs)), float(np.nanstd(logs))
        raw = [self._effects(*draw) for draw in draws]
        for at, name in enumerate(self._terms):
            column = np.concatenate([part[:, at] for part in raw])
            self._scale[name] = float(column.mean()), float(column.std()) or 1.0
        terms = np.concatenate([self._scaled(part) for part in raw])
        self.intercepts: list[float] = []
        self.task_intercepts: list[list[float]] = []
        wobble = np.random.default_rng([self.seed, 4]).uniform(0.9, 1.1, self.plan.days)
        for day in range(self.plan.days):
            score, tasks = self._scores(terms, day)
            self.intercepts.append(intercept(score, self.plan.base_rate * wobble[day]))
            self.task_intercepts.append(
                [intercept(tasks[:, at], task.base_rate) for at, task in enumerate(self.plan.tasks)]
            )

    def block(self, day: int, number: int, rows: int) -> SimulatedRows:
        """Return the first ``rows`` rows of a block of a day."""
        rng = np.random.default_rng([self.seed, 5, day, number])
        ids, numbers, bags = self._draw(rows, rng)
        terms = self._scaled(self._effects(ids, numbers, bags))
        score, tasks = self._scores(terms, day)
        logit = score + self.intercepts[day]
        labels = {self.plan.label: rng.random(rows) < sigmoid(logit)}
        for at, task in enumerate(self.plan.tasks):
            hit = rng.random(rows) < sigmoid(tasks[:, at] + self.task_intercepts[day][at])
            labels[task.name] = hit & labels[self.plan.label] if task.after else hit
        return SimulatedRows(ids, numbers, bags, labels, logit)

    def _draw(
        self, rows: int, rng: np.random.Generator
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Bag]]:
        """Draw the values of all fields: independent ones first, then those that follow another."""
        ids: dict[str, Array] = {}
        numbers: dict[str, Array] = {}
        bags: dict[str, Bag] = {}
        causes: dict[str, Array] = {}
        shared = {spec.source for spec in self.plan.specs if spec.role == "correlated"}
        for spec in sorted(self.plan.specs, key=lambda each: each.role in ("copy", "correlated")):
            if spec.kind == "multi":
                lengths = np.minimum(rng.geometric(1 / (1 + spec.length), rows) - 1, 20)
                bags[spec.name] = draw_zipf(rng.random(int(lengths.sum())), spec), lengths
                continue
            follows = spec.role in ("copy", "correlated")
            follow = rng.random(rows) < spec.likeness if follows else np.zeros(rows, np.bool_)
            if spec.kind == "numeric":
                values = draw_counts(rng, rows) if spec.width == 1 else draw_vectors(rng, rows, spec.width)
                if follows:
                    copied = numbers[str(spec.source)]
                    fill = np.isnan(copied) if copied.ndim == 1 else np.isnan(copied).any(1)
                    use = follow & ~fill
                    values[use] = copied[use]
                if spec.missing:
                    values[rng.random(rows) < spec.missing] = np.nan
                numbers[spec.name] = values
                continue
            uniform = rng.random(rows)
            if spec.name in shared:
                causes[spec.name] = rng.random(rows)
                uniform = np.where(rng.random(rows) < 0.8, causes[spec.name], uniform)
            if spec.role == "correlated":
                uniform = np.where(follow, causes[str(spec.source)], uniform)
            drawn = draw_zipf(uniform, spec)
            if spec.role == "copy":
                copied = ids[str(spec.source)]
                drawn = np.where(follow & (copied >= 0), copied, drawn)
            if spec.missing:
                drawn[rng.random(rows) < spec.missing] = -1
            ids[spec.name] = drawn
        return ids, numbers, bags

    def _effects(self, ids: dict[str, Array], numbers: dict[str, Array], bags: dict[str, Bag]) -> Reals:
        """Return what each term adds before it is scaled, (rows, terms); a missing value adds nothing."""
        specs = {spec.name: spec for spec in self.plan.specs}
        columns = []
        for name in self._terms:
            spec, effects = specs[name], self._tables[name]
            if spec.role == "pair":
                other = str(spec.partner)
                columns.append(effects[ids[name]] * self._tables[other][ids[other]])
            elif spec.kind == "categorical":
                columns.append(np.where(ids[name] < 0, 0.0, effects[ids[name]]))
            elif spec.kind == "multi":
                values, lengths = bags[name]
                owner = np.repeat(np.arange(len(lengths)), lengths)
                total = np.bincount(owner, effects[values], len(lengths))
                columns.append(total / np.maximum(lengths, 1))
            else:
                standard = self.standardised(name, numbers[name]).reshape(len(numbers[name]), -1)
                columns.append(np.nan_to_num(np.clip(standard, -3, 3) @ effects))
        return np.stack(columns, 1)

    def standardised(self, name: str, values: Array) -> Array:
        """Return the numbers a model gets: counts as standardised log1p, anything else as it is."""
        if name not in self._standard:
            return values
        centre, spread = self._standard[name]
        return (np.log1p(values) - centre) / spread

    def _scaled(self, effects: Reals) -> Reals:
        scales = np.array([self._scale[name] for name in self._terms])
        return np.asarray((effects - scales[:, 0]) / scales[:, 1])

    def _scores(self, terms: Reals, day: int) -> tuple[Reals, Reals]:
        now = np.array([self.strength[name][day] for name in self._terms])
        weights = np.array(list(self.weights.values()))
        return terms @ (weights * now), terms @ (self.task_weights * now[:, None])


def sigmoid(logit: Reals) -> Reals:
    """Return the probability that belongs to a logit."""
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))


def intercept(score: Reals, rate: float) -> float:
    """Return what to add to the scores so that the mean probability is ``rate``."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(score + middle).mean() < rate else (low, middle)
    return low


SEPARATOR = "|"  # between the values of a bag in a text file


def chunks(world: Simulator, day: int, rows: int, chunk: int) -> Iterator[SimulatedRows]:
    """Yield the rows of a day, about ``chunk`` at a time; which rows they are does not depend on it."""
    count = -(-rows // BLOCK)
    several = max(1, chunk // BLOCK)
    for first in range(0, count, several):
        numbers = range(first, min(first + several, count))
        yield concat_blocks([world.block(day, at, min(BLOCK, rows - at * BLOCK)) for at in numbers])


def concat_blocks(blocks: Sequence[SimulatedRows]) -> SimulatedRows:
    """Return the rows of several blocks as one."""
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    together = np.concatenate
    return SimulatedRows(
        {name: together([each.ids[name] for each in blocks]) for name in first.ids},
        {name: together([each.numbers[name] for each in blocks]) for name in first.numbers},
        {
            name: (
                together([each.bags[name][0] for each in blocks]),
                together([each.bags[name][1] for each in blocks]),
            )
            for name in first.bags
        },
        {name: together([each.labels[name] for each in blocks]) for name in first.labels},
        together([each.logit for each in blocks]),
    )


def writer_columns(world: Simulator, block: SimulatedRows) -> dict[str, Any]:
    """Return the arguments of ``DayWriter.append``."""
    return {
        "ids": {name: encoded(values) for name, values in block.ids.items()},
        "dense": {name: world.standardised(name, values) for name, values in block.numbers.items()},
        "bags": {name: encoded_bag(*bag) for name, bag in block.bags.items()},
        "labels": block.labels,
    }


def encoded(values: Array) -> Array:
    """Return the ids of values: missing is 0, the first value comes after the special ids."""
    return np.where(values < 0, 0, values + FIRST_ID)


def encoded_bag(values: Array, lengths: Array) -> tuple[Array, Array]:
    """Return the ids of a bag; an empty one holds the id of a missing value, as ``prepare`` has it."""
    ends = np.cumsum(lengths)
    empty = lengths == 0
    return np.insert(encoded(values), ends[empty], 0), np.where(empty, 1, lengths)


def _scrambled_id(spec: FieldSpec, values: Array) -> Array:
    """Return a 32-bit number for each value that tells nothing about it; different values stay different.

    Each step (xor with a shift, multiplication by an odd number) can be undone, so no two values meet.
    """
    mixed = (values.astype(np.uint64) + np.uint64(zlib.crc32(spec.name.encode()))) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed ^= mixed >> np.uint64(shift)
        mixed = (mixed * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return np.asarray(mixed ^ (mixed >> np.uint64(16)), np.uint32)
