"""How values are drawn and what they add: frequencies, effects, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.simulation.spec import Spec

Reals = npt.NDArray[np.float64]
Array = npt.NDArray[Any]
CENTRE, SPREAD = 1.5, 1.0  # of the logarithm of a count


def table(spec: Spec, rng: np.random.Generator) -> Array:
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


def edge(values: Array | float, spec: Spec) -> Any:
    """Return the share of rows with a value below this one: a power law on 1 … n + 1."""
    power = 1.0 - spec.zipf
    return ((np.asarray(values) + 1.0) ** power - 1.0) / ((spec.values + 1.0) ** power - 1.0)


def frequencies(spec: Spec) -> Reals:
    """Return the probability of each value."""
    return np.asarray(np.diff(edge(np.arange(spec.values + 1), spec)))


def zipf(uniform: Array, spec: Spec) -> Array:
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


def counts(rng: np.random.Generator, rows: int) -> Array:
    """Return counts with a long tail, as the integers of click logs."""
    return np.floor(np.exp(CENTRE + SPREAD * rng.standard_normal(rows)))


def vectors(rng: np.random.Generator, rows: int, width: int) -> Array:
    """Return vectors of independent numbers."""
    return rng.standard_normal((rows, width), dtype=np.float32)
