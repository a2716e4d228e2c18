"""A hash table from 64-bit keys to ids that numpy can ask for a whole column at once.

Chance that does not depend on chunks: a pure function of a row's number and the seed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.store.format import UNSEEN_ID

HashValues = npt.NDArray[np.uint64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 6  # of the Feistel network; four do for large numbers
LEAST = 4  # bits of half a number; with fewer, some orders would come more often than others


def splitmix64(values: Any, seed: int) -> HashValues:
    """Return well-mixed 64-bit numbers of whole numbers (splitmix64): the same on every machine."""
    with np.errstate(over="ignore"):
        x = np.asarray(values).astype(np.uint64) + np.uint64(seed % 2**64) * GOLDEN + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: HashValues = x ^ (x >> np.uint64(31))
    return result


def shuffled_positions(numbers: Any, size: int, seed: int) -> HashValues:
    """Return the places of numbers below ``size`` in a random order of all of them, without making that order.

    A Feistel network permutes the numbers of 2k bits, 4ᵏ >= size: (l, r) -> (r, l ^ f(r)). A number that lands
    beyond ``size`` is sent on until it does not, so that what is left is a permutation of 0 … size - 1.

    >>> sorted(shuffled(range(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(LEAST, (int(size).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = [int(key) for key in splitmix64(np.arange(ROUNDS), seed)]
    places: HashValues = np.array(numbers, np.uint64)
    beyond = np.arange(len(places))
    while len(beyond):
        left, right = places[beyond] >> half, places[beyond] & low
        for key in keys:
            left, right = right, left ^ (splitmix64(right, key) & low)
        places[beyond] = (left << half) | right
        beyond = beyond[places[beyond] >= size]
    return places


Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.uint32]


class HashTable:
    """Open addressing with linear probing at most half full; built once, asked for every chunk.

    A join would build its table again for every chunk, and a sorted search takes twice the time.

    >>> table = Lookup(np.array([7, 9], np.uint64), first=2)
    >>> table(np.array([9, 8, 7], np.uint64)).tolist()
    [3, 1, 2]
    """

    def __init__(self, keys: Keys, first: int) -> None:
        bits = max(4, int(2 * max(1, len(keys)) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)
        self._keys = np.zeros(1 << bits, np.uint64)
        self._ids = np.zeros(1 << bits, np.uint32)  # 0 marks a free slot
        ids = np.arange(first, first + len(keys), dtype=np.uint32)
        slots = self._slot(keys)
        while len(keys):
            free = self._ids[slots] == 0
            at = slots[free]
            self._ids[at] = ids[free]  # of several for one slot the last stays
            won = np.zeros(len(keys), bool)
            won[free] = self._ids[at] == ids[free]
            self._keys[slots[won]] = keys[won]
            keys, ids, slots = keys[~won], ids[~won], (slots[~won] + 1) & self._mask

    def _slot(self, keys: Keys) -> npt.NDArray[np.int64]:
        with np.errstate(over="ignore"):
            slots: npt.NDArray[np.int64] = ((keys * GOLDEN) >> self._shift).astype(np.int64)
        return slots

    def __call__(self, keys: Keys) -> Ids:
        """Return the id of each key; ``UNSEEN_ID`` where there is none."""
        slots = self._slot(keys)
        ids = self._ids[slots]
        wrong = np.flatnonzero((self._keys[slots] != keys) & (ids != 0))
        slots = slots[wrong]
        while len(wrong):
            slots = (slots + 1) & self._mask
            found = self._ids[slots]
            ids[wrong] = found
            again = (self._keys[slots] != keys[wrong]) & (found != 0)
            wrong, slots = wrong[again], slots[again]
        ids[ids == 0] = UNSEEN_ID
        return ids
