"""Chance that does not depend on chunks: a pure function of a row's number and the seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Marks = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 6  # of the Feistel network; four do for large numbers
LEAST = 4  # bits of half a number; with fewer, some orders would come more often than others


def mix(values: Any, seed: int) -> Marks:
    """Return well-mixed 64-bit numbers of whole numbers (splitmix64): the same on every machine."""
    with np.errstate(over="ignore"):
        x = np.asarray(values).astype(np.uint64) + np.uint64(seed % 2**64) * GOLDEN + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Marks = x ^ (x >> np.uint64(31))
    return result


def shuffled(numbers: Any, size: int, seed: int) -> Marks:
    """Return the places of numbers below ``size`` in a random order of all of them, without making that order.

    A Feistel network permutes the numbers of 2k bits, 4ᵏ >= size: (l, r) -> (r, l ^ f(r)). A number that lands
    beyond ``size`` is sent on until it does not, so that what is left is a permutation of 0 … size - 1.

    >>> sorted(shuffled(range(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(LEAST, (int(size).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = [int(key) for key in mix(np.arange(ROUNDS), seed)]
    places: Marks = np.array(numbers, np.uint64)
    beyond = np.arange(len(places))
    while len(beyond):
        left, right = places[beyond] >> half, places[beyond] & low
        for key in keys:
            left, right = right, left ^ (mix(right, key) & low)
        places[beyond] = (left << half) | right
        beyond = beyond[places[beyond] >= size]
    return places
