"""Simulator: draw the rows of a simulated log from a SimulationSpec and a seed.

Rows are drawn in blocks with one random stream each, so they do not depend on the chunk size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.simulate_spec import FieldSpec, SimulationSpec, drift_factors
from lpfs.data.store.format import FIRST_ID, MISSING_ID

BLOCK_ROWS = 1 << 14  # rows drawn from one random stream; chunks consist of blocks
CALIBRATION_ROWS = 40_000  # rows that determine the intercepts and the scales
LOG_COUNT_MEAN, LOG_COUNT_STD = 1.5, 1.0  # of the logarithm of a count
MAX_BAG_LENGTH = 20

Reals = npt.NDArray[np.float64]
Array = npt.NDArray[Any]
Bag = tuple[Array, Array]  # values, lengths


@dataclass(frozen=True)
class SimulatedRows:
    """Simulated rows as columns.

    Args:
        ids: (n,) values from 0 of each categorical field; -1 if missing.
        numbers: (n,) counts or (n, w) numbers of each numeric field; NaN if missing.
        bags: values and lengths of each multi field.
        labels: (n,) bool of the click and of each task.
        logit: (n,) true logit of the click.
    """

    ids: dict[str, Array]
    numbers: dict[str, Array]
    bags: dict[str, Bag]
    labels: dict[str, Array]
    logit: Reals


class Simulator:
    """Draw blocks of rows.

    The logit of a click on day t is b(t) + Σ w·m(t)·e(value) over the main effects, where e has mean 0 and
    variance 1, + Σ w·s(value)·s'(value') over the pairs, where s and s' are ±1 with probability ½ each. For every
    value of one field of a pair, the other makes the term +w or -w equally often, so neither field has an effect
    of its own.
    """

    def __init__(self, spec: SimulationSpec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        rng = np.random.default_rng([seed, 2])
        self.value_effects = {field.name: draw_effects(field, rng) for field in spec.specs}
        self._terms = [field.name for field in spec.specs if field.is_first_of_pair]
        self._fields = {field.name: field for field in spec.specs}
        self.weights = {name: self._fields[name].effect for name in self._terms}
        self.drift = {name: drift_factors(self._fields[name].drift, spec.days) for name in self._terms}
        task_effects = rng.normal(size=(len(self._terms), len(spec.tasks)))
        click = np.array(list(self.weights.values()))[:, None]
        share = np.array([task.share for task in spec.tasks])
        self.task_weights: Reals = share * click + (1 - share) * (click * task_effects)  # (terms, tasks)
        self._term_scales: dict[str, tuple[float, float]] = {}  # mean and standard deviation of each term
        self._count_scales: dict[str, tuple[float, float]] = {}  # the same of log1p of each count
        self._calibrate()

    def _calibrate(self) -> None:
        """Compute scales and intercepts from rows that are not part of the log."""
        draws = [self._draw(CALIBRATION_ROWS // 4, np.random.default_rng([self.seed, 3, part])) for part in range(4)]
        for field in self.spec.specs:
            if field.kind == "numeric" and field.width == 1:
                logs = np.log1p(np.concatenate([numbers[field.name] for _, numbers, _ in draws]))
                self._count_scales[field.name] = float(np.nanmean(logs)), float(np.nanstd(logs))
        effects = [self._effects(*draw) for draw in draws]
        for index, name in enumerate(self._terms):
            column = np.concatenate([part[:, index] for part in effects])
            self._term_scales[name] = float(column.mean()), float(column.std()) or 1.0
        terms = np.concatenate([self._scale(part) for part in effects])
        self.intercepts: list[float] = []
        self.task_intercepts: list[list[float]] = []
        rate_factors = np.random.default_rng([self.seed, 4]).uniform(0.9, 1.1, self.spec.days)
        for day in range(self.spec.days):
            score, tasks = self._scores(terms, day)
            self.intercepts.append(fit_intercept(score, self.spec.base_rate * rate_factors[day]))
            self.task_intercepts.append(
                [fit_intercept(tasks[:, index], task.base_rate) for index, task in enumerate(self.spec.tasks)]
            )

    def block(self, day: int, number: int, rows: int) -> SimulatedRows:
        """Return the first ``rows`` rows of a block of a day."""
        rng = np.random.default_rng([self.seed, 5, day, number])
        ids, numbers, bags = self._draw(rows, rng)
        terms = self._scale(self._effects(ids, numbers, bags))
        score, tasks = self._scores(terms, day)
        logit = score + self.intercepts[day]
        labels = {self.spec.label: rng.random(rows) < sigmoid(logit)}
        for index, task in enumerate(self.spec.tasks):
            positive = rng.random(rows) < sigmoid(tasks[:, index] + self.task_intercepts[day][index])
            labels[task.name] = positive & labels[self.spec.label] if task.after else positive
        return SimulatedRows(ids, numbers, bags, labels, logit)

    def _draw(self, rows: int, rng: np.random.Generator) -> tuple[dict[str, Array], dict[str, Array], dict[str, Bag]]:
        """Draw the values of all fields: first the independent ones, then those that depend on another field."""
        ids: dict[str, Array] = {}
        numbers: dict[str, Array] = {}
        bags: dict[str, Bag] = {}
        causes: dict[str, Array] = {}
        sources = {field.source for field in self.spec.specs if field.role == "correlated"}
        for field in sorted(self.spec.specs, key=lambda field: field.role in ("copy", "correlated")):
            if field.kind == "multi":
                lengths = np.minimum(rng.geometric(1 / (1 + field.length), rows) - 1, MAX_BAG_LENGTH)
                bags[field.name] = draw_zipf(rng.random(int(lengths.sum())), field), lengths
                continue
            dependent = field.role in ("copy", "correlated")
            follows = rng.random(rows) < field.likeness if dependent else np.zeros(rows, np.bool_)
            if field.kind == "numeric":
                values = draw_counts(rng, rows) if field.width == 1 else draw_vectors(rng, rows, field.width)
                if dependent:
                    source = numbers[str(field.source)]
                    missing = np.isnan(source) if source.ndim == 1 else np.isnan(source).any(1)
                    copied = follows & ~missing
                    values[copied] = source[copied]
                if field.missing:
                    values[rng.random(rows) < field.missing] = np.nan
                numbers[field.name] = values
                continue
            uniform = rng.random(rows)
            if field.name in sources:
                causes[field.name] = rng.random(rows)
                uniform = np.where(rng.random(rows) < 0.8, causes[field.name], uniform)
            if field.role == "correlated":
                uniform = np.where(follows, causes[str(field.source)], uniform)
            values = draw_zipf(uniform, field)
            if field.role == "copy":
                source = ids[str(field.source)]
                values = np.where(follows & (source >= 0), source, values)
            if field.missing:
                values[rng.random(rows) < field.missing] = -1
            ids[field.name] = values
        return ids, numbers, bags

    def _effects(self, ids: dict[str, Array], numbers: dict[str, Array], bags: dict[str, Bag]) -> Reals:
        """Return the unscaled terms of the logit, (rows, terms); a missing value adds 0."""
        columns = []
        for name in self._terms:
            field, effects = self._fields[name], self.value_effects[name]
            if field.role == "pair":
                partner = str(field.partner)
                columns.append(effects[ids[name]] * self.value_effects[partner][ids[partner]])
            elif field.kind == "categorical":
                columns.append(np.where(ids[name] < 0, 0.0, effects[ids[name]]))
            elif field.kind == "multi":
                values, lengths = bags[name]
                row = np.repeat(np.arange(len(lengths)), lengths)
                total = np.bincount(row, effects[values], len(lengths))
                columns.append(total / np.maximum(lengths, 1))
            else:
                standardized = self.standardize(name, numbers[name]).reshape(len(numbers[name]), -1)
                columns.append(np.nan_to_num(np.clip(standardized, -3, 3) @ effects))
        return np.stack(columns, 1)

    def standardize(self, name: str, values: Array) -> Array:
        """Return the numbers as model inputs: counts as standardized log1p, other numbers unchanged."""
        if name not in self._count_scales:
            return values
        mean, std = self._count_scales[name]
        return (np.log1p(values) - mean) / std

    def _scale(self, effects: Reals) -> Reals:
        scales = np.array([self._term_scales[name] for name in self._terms])
        return np.asarray((effects - scales[:, 0]) / scales[:, 1])

    def _scores(self, terms: Reals, day: int) -> tuple[Reals, Reals]:
        """Return the logits of the click and of the tasks on a day, without intercepts."""
        drift = np.array([self.drift[name][day] for name in self._terms])
        weights = np.array(list(self.weights.values()))
        return terms @ (weights * drift), terms @ (self.task_weights * drift[:, None])


def draw_effects(field: FieldSpec, rng: np.random.Generator) -> Array:
    """Return the effect of each value: mean 0 and variance 1 under the frequencies; signs for a pair."""
    if not field.true:
        return np.empty(0)
    if field.kind == "numeric":
        direction = rng.normal(size=field.width)
        return np.asarray(direction / np.linalg.norm(direction))
    if field.role == "pair":
        flips = rng.random(field.values // 2) < 0.5
        return np.asarray(np.repeat(np.where(flips, 1.0, -1.0), 2) * np.tile([1.0, -1.0], field.values // 2))
    effects, weight = rng.normal(size=field.values), frequencies(field)
    effects -= effects @ weight
    return np.asarray(effects / np.sqrt(effects**2 @ weight))


def frequencies(field: FieldSpec) -> Reals:
    """Return the probability of each value."""
    return np.asarray(np.diff(_zipf_cdf(np.arange(field.values + 1), field)))


def _zipf_cdf(values: Array, field: FieldSpec) -> Array:
    """Return the fraction of rows with a smaller value: a power law on 1 … n + 1."""
    power = 1.0 - field.zipf
    return np.asarray(((values + 1.0) ** power - 1.0) / ((field.values + 1.0) ** power - 1.0))


def draw_zipf(uniform: Array, field: FieldSpec) -> Array:
    """Return values from uniform numbers, the most frequent value first.

    The values 2k and 2k + 1 of a field of a pair are equally frequent and have opposite signs.
    """
    values = field.values // 2 if field.role == "pair" else field.values
    power = 1.0 - field.zipf
    if field.role == "pair":
        uniform = uniform * 2
        odd = uniform >= 1.0
        uniform = uniform - odd
    positions = (uniform * ((values + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0
    result = np.clip(positions.astype(np.int64), 0, values - 1)
    return np.asarray(result * 2 + odd) if field.role == "pair" else result


def draw_counts(rng: np.random.Generator, rows: int) -> Array:
    """Return counts with a long tail, similar to the integers of click logs."""
    return np.floor(np.exp(LOG_COUNT_MEAN + LOG_COUNT_STD * rng.standard_normal(rows)))


def draw_vectors(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Return vectors of independent standard normal numbers."""
    return rng.standard_normal((rows, width), dtype=np.float32)


def sigmoid(logit: Reals) -> Reals:
    """Return the probability of a logit."""
    return np.asarray(1.0 / (1.0 + np.exp(-logit)))


def fit_intercept(score: Reals, rate: float) -> float:
    """Return the intercept with which the mean probability of the scores is ``rate``."""
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(score + middle).mean() < rate else (low, middle)
    return low


def iter_chunks(simulator: Simulator, day: int, rows: int, chunk: int) -> Iterator[SimulatedRows]:
    """Yield the rows of a day, about ``chunk`` at a time; the rows do not depend on ``chunk``."""
    count = -(-rows // BLOCK_ROWS)
    step = max(1, chunk // BLOCK_ROWS)
    for first in range(0, count, step):
        numbers = range(first, min(first + step, count))
        yield concat_blocks(
            [simulator.block(day, number, min(BLOCK_ROWS, rows - number * BLOCK_ROWS)) for number in numbers]
        )


def concat_blocks(blocks: Sequence[SimulatedRows]) -> SimulatedRows:
    """Return the rows of several blocks."""
    if len(blocks) == 1:
        return blocks[0]
    first, concat = blocks[0], np.concatenate
    return SimulatedRows(
        {name: concat([block.ids[name] for block in blocks]) for name in first.ids},
        {name: concat([block.numbers[name] for block in blocks]) for name in first.numbers},
        {
            name: (concat([block.bags[name][0] for block in blocks]), concat([block.bags[name][1] for block in blocks]))
            for name in first.bags
        },
        {name: concat([block.labels[name] for block in blocks]) for name in first.labels},
        concat([block.logit for block in blocks]),
    )


def writer_columns(simulator: Simulator, block: SimulatedRows) -> dict[str, Any]:
    """Return the arguments of ``DayWriter.append``."""
    return {
        "ids": {name: _to_ids(values) for name, values in block.ids.items()},
        "dense": {name: simulator.standardize(name, values) for name, values in block.numbers.items()},
        "bags": {name: bag_to_ids(*bag) for name, bag in block.bags.items()},
        "labels": block.labels,
    }


def _to_ids(values: Array) -> Array:
    return np.where(values < 0, MISSING_ID, values + FIRST_ID)


def bag_to_ids(values: Array, lengths: Array) -> Bag:
    """Return ids and lengths of bags; an empty bag gets the id of a missing value, as in ``prepare``."""
    ends = np.cumsum(lengths)
    empty = lengths == 0
    return np.insert(_to_ids(values), ends[empty], MISSING_ID), np.where(empty, 1, lengths)


def scramble_ids(field: FieldSpec, values: Array) -> Array:
    """Return a 32-bit number for each value that does not reveal its rank; different values stay different.

    Each step (xor with a shift, multiplication by an odd number) is invertible, so there are no collisions.
    """
    mixed = (values.astype(np.uint64) + np.uint64(zlib.crc32(field.name.encode()))) & np.uint64(0xFFFFFFFF)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed ^= mixed >> np.uint64(shift)
        mixed = (mixed * np.uint64(factor)) & np.uint64(0xFFFFFFFF)
    return np.asarray(mixed ^ (mixed >> np.uint64(16)), np.uint32)
