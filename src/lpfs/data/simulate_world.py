"""Simulator: draw the rows of a simulated log from a SimulationSpec and a seed; the best scores on them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lpfs.data.simulate_spec import DEPENDENT_ROLES, FieldSpec, SimulationSpec, drift_factors
from lpfs.data.store.format import FIRST_ID, MISSING_ID

BLOCK_ROWS = 1 << 14  # rows drawn from one random stream; chunks consist of blocks
CALIBRATION_ROWS = 40_000  # rows that determine the intercepts and the scales
LOG_COUNT_MEAN, LOG_COUNT_STD = 1.5, 1.0  # of the logarithm of a count
MAX_BAG_LENGTH = 20
LOGIT_BINS = 20_000  # bins of the logit from -20 to 20

Reals = npt.NDArray[np.float64]
Array = npt.NDArray[Any]
Bag = tuple[Array, Array]  # values, lengths


class SimulatedRows(NamedTuple):
    """Simulated rows as columns."""

    ids: dict[str, Array]  # (n,) values from 0 of each categorical field; -1 if missing
    numbers: dict[str, Array]  # (n,) counts or (n, w) numbers of each numeric field; NaN if missing
    bags: dict[str, Bag]  # of each multi field
    labels: dict[str, Array]  # (n,) bool of the click and of each task
    logit: Reals  # (n,) true logit of the click


def concat_rows(parts: Sequence[Any]) -> Any:
    """Concatenate SimulatedRows, or parts of them: dictionaries and tuples of arrays."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], dict):
        return {name: concat_rows([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], tuple):
        arrays = map(concat_rows, zip(*parts, strict=True))
        return SimulatedRows(*arrays) if isinstance(parts[0], SimulatedRows) else tuple(arrays)
    return np.concatenate(parts)


class Simulator:
    """Draw blocks of rows.

    The logit of a click on day t is b(t) + Σ w·m(t)·e(value) over the main effects, where e has mean 0 and variance 1,
    + Σ w·s(value)·s'(value') over the pairs, where s and s' are ±1 with probability ½ each. For every value of one
    field of a pair, the other makes the term +w or -w equally often, so neither field has an effect of its own.
    """

    def __init__(self, spec: SimulationSpec, seed: int) -> None:
        self.spec, self.seed = spec, seed
        rng = np.random.default_rng([seed, 2])
        coarse = [field for field in spec.specs if field.role == "coarse"]
        self.value_effects = {
            field.name: draw_effects(field, rng, [part for part in coarse if part.source == field.name])
            for field in spec.specs
        }
        self._terms = [field for field in spec.specs if field.is_first_of_pair]
        self.weights = {field.name: field.effect for field in self._terms}
        self.drift = {field.name: drift_factors(field.drift, spec.days) for field in self._terms}
        task_effects = rng.normal(size=(len(self._terms), len(spec.tasks)))
        click = np.array(list(self.weights.values()))[:, None]
        share = np.array([task.share for task in spec.tasks])
        self.task_weights: Reals = share * click + (1 - share) * (click * task_effects)  # (terms, tasks)
        self._count_scales: dict[str, tuple[float, float]] = {}  # mean and standard deviation of log1p of each count
        self._calibrate()

    def _calibrate(self) -> None:
        """Compute scales and intercepts from rows that are not part of the log."""
        draws = [self._draw(CALIBRATION_ROWS // 4, np.random.default_rng([self.seed, 3, part])) for part in range(4)]
        for field in self.spec.specs:
            if field.kind == "numeric" and field.width == 1:
                logs = np.log1p(np.concatenate([numbers[field.name] for _, numbers, _ in draws]))
                self._count_scales[field.name] = float(np.nanmean(logs)), float(np.nanstd(logs))
        effects = np.concatenate([self._effects(*draw) for draw in draws])
        columns = np.ascontiguousarray(effects.T)
        self._term_scales: Reals = np.array([(column.mean(), column.std() or 1.0) for column in columns])
        terms = self._scale(effects)
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
        values = self._draw(rows, rng, day)
        score, tasks = self._scores(self._scale(self._effects(*values)), day)
        logit = score + self.intercepts[day]
        labels = {self.spec.label: rng.random(rows) < sigmoid(logit)}
        for index, task in enumerate(self.spec.tasks):
            positive = rng.random(rows) < sigmoid(tasks[:, index] + self.task_intercepts[day][index])
            labels[task.name] = positive & labels[self.spec.label] if task.after else positive
        return SimulatedRows(*values, labels, logit)

    def chunks(self, day: int, rows: int, size: int) -> Iterator[SimulatedRows]:
        """Yield the rows of a day, about ``size`` at a time; the rows do not depend on ``size``."""
        block_rows = [min(BLOCK_ROWS, rows - first) for first in range(0, rows, BLOCK_ROWS)]
        step = max(1, size // BLOCK_ROWS)
        for first in range(0, len(block_rows), step):
            blocks = enumerate(block_rows[first : first + step], first)
            yield concat_rows([self.block(day, number, count) for number, count in blocks])

    def writer_columns(self, block: SimulatedRows) -> dict[str, Any]:
        """Return the arguments of ``DayWriter.append``."""
        return {
            "ids": {name: _to_ids(values) for name, values in block.ids.items()},
            "dense": {name: self.standardize(name, values) for name, values in block.numbers.items()},
            "bags": {name: bag_to_ids(*bag) for name, bag in block.bags.items()},
            "labels": block.labels,
        }

    def _draw(
        self, rows: int, rng: np.random.Generator, day: int | None = None
    ) -> tuple[dict[str, Array], dict[str, Array], dict[str, Bag]]:
        """Draw the values of all fields: first the independent ones, then those that depend on another field.

        Without a day, ids that turn over are those of random days.
        """
        ids: dict[str, Array] = {}
        numbers: dict[str, Array] = {}
        bags: dict[str, Bag] = {}
        causes: dict[str, Array] = {}
        sources = {field.source for field in self.spec.specs if field.role == "correlated"}
        for field in sorted(self.spec.specs, key=lambda field: field.role in DEPENDENT_ROLES):
            if field.role == "coarse":
                source = ids[str(field.source)]
                ids[field.name] = np.where(source < 0, -1, source % field.values)
                continue
            if field.role == "sum":
                numbers[field.name] = numbers[str(field.source)] + numbers[str(field.second)]
                continue
            if field.kind == "multi":
                lengths = np.minimum(rng.geometric(1 / (1 + field.length), rows) - 1, MAX_BAG_LENGTH)
                bags[field.name] = draw_zipf(rng.random(int(lengths.sum())), field), lengths
                continue
            dependent = field.role in ("copy", "correlated")
            follows = rng.random(rows) < field.likeness if dependent else np.zeros(rows, np.bool_)
            if field.kind == "numeric":
                if field.width == 1:  # counts with a long tail, similar to the integers of click logs
                    values = np.floor(np.exp(LOG_COUNT_MEAN + LOG_COUNT_STD * rng.standard_normal(rows)))
                else:
                    values = rng.standard_normal((rows, field.width), dtype=np.float32)
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
            if field.active:
                days = rng.integers(self.spec.days, size=rows) if day is None else np.full(rows, day)
                values = current_ids(draw_zipf(uniform, replace(field, values=field.active)), days, field)
            else:
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
        for field in self._terms:
            name, effects = field.name, self.value_effects[field.name]
            if field.role == "pair":
                partner = str(field.partner)
                columns.append(effects[ids[name]] * self.value_effects[partner][ids[partner]])
            elif field.kind == "categorical":
                columns.append(np.where(ids[name] < 0, 0.0, effects[ids[name]]))
            elif field.kind == "multi":
                values, lengths = bags[name]
                row = np.repeat(np.arange(len(lengths)), lengths)
                columns.append(np.bincount(row, effects[values], len(lengths)) / np.maximum(lengths, 1))
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
        return np.asarray((effects - self._term_scales[:, 0]) / self._term_scales[:, 1])

    def _scores(self, terms: Reals, day: int) -> tuple[Reals, Reals]:
        """Return the logits of the click and of the tasks on a day, without intercepts."""
        drift = np.array([factors[day] for factors in self.drift.values()])
        weights = np.array(list(self.weights.values()))
        return terms @ (weights * drift), terms @ (self.task_weights * drift[:, None])


def current_ids(slots: Array, days: Array, field: FieldSpec) -> Array:
    """Return the ids that are in use on these days, from numbers below ``active`` (frequent ones first).

    Each of them is a slot, whose id is replaced every 1 / turnover days; an id keeps its frequency while it is in use.

    >>> field = FieldSpec("item", values=8, active=2, turnover=0.5)
    >>> current_ids(np.array([0, 1, 0, 1]), np.array([0, 0, 2, 2]), field).tolist()
    [0, 1, 2, 3]
    """
    phase = (slots * 0.6180339887498949) % 1.0
    generation = np.floor(days * field.turnover + phase).astype(np.int64)
    return np.asarray(np.minimum(slots + field.active * generation, field.values - 1))


def draw_effects(field: FieldSpec, rng: np.random.Generator, groups: Sequence[FieldSpec] = ()) -> Array:
    """Return the effect of each value: mean 0 and variance 1 under the frequencies; signs for a pair.

    ``groups`` are the coarse fields of the values: each carries its ``likeness`` as a share of the variance.
    """
    if not field.true:
        return np.empty(0)
    if field.kind == "numeric":
        direction = rng.normal(size=field.width)
        return np.asarray(direction / np.linalg.norm(direction))
    if field.role == "pair":
        flips = rng.random(field.values // 2) < 0.5
        return np.asarray(np.repeat(np.where(flips, 1.0, -1.0), 2) * np.tile([1.0, -1.0], field.values // 2))
    effects, weight = rng.normal(size=field.values), frequencies(field)
    if groups:
        effects *= np.sqrt(1 - sum(group.likeness for group in groups))
        for group in groups:
            effects += np.sqrt(group.likeness) * rng.normal(size=group.values)[np.arange(field.values) % group.values]
    effects -= effects @ weight
    return np.asarray(effects / np.sqrt(effects**2 @ weight))


def frequencies(field: FieldSpec) -> Reals:
    """Return the probability of each value: a power law on 1 … n + 1; over all days for ids that turn over."""
    if field.active:
        once = frequencies(replace(field, values=field.active, active=0))
        return np.tile(once, field.values // field.active) / (field.values // field.active)
    powers = np.arange(1.0, field.values + 2.0) ** (1.0 - field.zipf)
    return np.asarray(np.diff((powers - 1.0) / ((field.values + 1.0) ** (1.0 - field.zipf) - 1.0)))


def draw_zipf(uniform: Array, field: FieldSpec) -> Array:
    """Return values from uniform numbers, the most frequent value first.

    The values 2k and 2k + 1 of a field of a pair are equally frequent and have opposite signs.
    """
    if field.role == "pair":
        odd = uniform * 2 >= 1.0
        half = replace(field, role="noise", values=field.values // 2)
        return np.asarray(draw_zipf(uniform * 2 - odd, half) * 2 + odd)
    power = 1.0 - field.zipf
    positions = (uniform * ((field.values + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power) - 1.0
    return np.asarray(np.clip(positions.astype(np.int64), 0, field.values - 1))


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


def _to_ids(values: Array) -> Array:
    return np.where(values < 0, MISSING_ID, values + FIRST_ID)


def bag_to_ids(values: Array, lengths: Array) -> Bag:
    """Return ids and lengths of bags; an empty bag gets the id of a missing value, as in ``prepare``."""
    ends, empty = np.cumsum(lengths), lengths == 0
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


class BestPossibleScores:
    """AUC and logloss of a model that knows the probability of every click, by day.

    AUC = Σ p(i)·(1 - p(j)) over rows i above j (ties count half), divided by Σ p · Σ (1 - p). It does not use
    the labels, so it has no sampling noise. Logits are counted in bins of 0.002, so that memory does not grow with
    the number of rows.
    """

    def __init__(self, days: int) -> None:
        self._clicks = np.zeros((days, LOGIT_BINS))
        self._others = np.zeros((days, LOGIT_BINS))
        self._loss = np.zeros(days)

    def add(self, day: int, logit: Reals) -> None:
        """Add rows of a day, in fixed blocks so that the sums do not depend on the chunks."""
        for block in np.split(logit, range(BLOCK_ROWS, len(logit), BLOCK_ROWS)):
            probability = sigmoid(block)
            bins = np.clip((block + 20.0) * (LOGIT_BINS / 40.0), 0, LOGIT_BINS - 1).astype(np.int64)
            self._clicks[day] += np.bincount(bins, probability, LOGIT_BINS)
            self._others[day] += np.bincount(bins, 1.0 - probability, LOGIT_BINS)
            self._loss[day] += float((np.logaddexp(0.0, block) - probability * block).sum())

    def to_json(self) -> dict[str, Any]:
        """Return the scores over all rows and of each day."""
        rows = (self._clicks + self._others).sum(1)
        return {
            "auc": _binned_auc(self._clicks.sum(0), self._others.sum(0)),
            "logloss": float(self._loss.sum() / rows.sum()),
            "auc_by_day": list(map(_binned_auc, self._clicks, self._others)),
            "logloss_by_day": (self._loss / rows).tolist(),
            "click_rate_by_day": (self._clicks.sum(1) / rows).tolist(),
        }


def _binned_auc(clicks: Reals, others: Reals) -> float:
    """Return the AUC of binned scores; ``clicks`` and ``others`` are the weights per bin."""
    below = np.cumsum(others) - others / 2
    return float(clicks @ below / (clicks.sum() * others.sum()))
