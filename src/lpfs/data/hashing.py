"""Hashing: random numbers that depend on the row number and the seed only, and a vectorized hash table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.data.store.format import UNSEEN_ID

HashValues = npt.NDArray[np.uint64]
Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.uint32]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio
MAX_KEY = 2**64 - 1
FEW_KEYS = 8  # looked up one after another, which is faster than an array of them
FEISTEL_ROUNDS = 6  # four suffice for large numbers
MIN_HALF_BITS = 4  # bits of half a number in the Feistel network; with fewer, permutations are not equally likely


def splitmix64(values: Any, seed: int) -> HashValues:
    """Return the splitmix64 hashes of integers; the same on every machine."""
    with np.errstate(over="ignore"):
        x = np.asarray(values).astype(np.uint64) + np.uint64(seed % 2**64) * GOLDEN + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: HashValues = x ^ (x >> np.uint64(31))
    return result


def shuffled_positions(numbers: Any, size: int, seed: int) -> HashValues:
    """Return the positions of numbers in a random permutation of 0 … size - 1, without building the permutation.

    A Feistel network permutes the numbers of 2k bits, 4ᵏ >= size: (l, r) -> (r, l ^ f(r)). It is applied again to
    results of ``size`` or more until they are below, which gives a permutation of 0 … size - 1.

    >>> sorted(shuffled_positions(range(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    half = np.uint64(max(MIN_HALF_BITS, (int(size).bit_length() + 1) // 2))
    low = (np.uint64(1) << half) - np.uint64(1)
    keys = [int(key) for key in splitmix64(np.arange(FEISTEL_ROUNDS), seed)]
    positions: HashValues = np.array(numbers, np.uint64)
    pending = np.arange(len(positions))
    while len(pending):
        left, right = positions[pending] >> half, positions[pending] & low
        for key in keys:
            left, right = right, left ^ (splitmix64(right, key) & low)
        positions[pending] = (left << half) | right
        pending = pending[positions[pending] >= size]
    return positions


class HashTable:
    """Hash table from 64-bit keys to ids ``first``, ``first`` + 1, …; looks up whole arrays.

    Open addressing with linear probing, at most half full. A join would build its table again for every chunk,
    and a sorted search takes twice the time.

    >>> table = HashTable(np.array([7, 9], np.uint64), first=2)
    >>> table(np.array([9, 8, 7], np.uint64)).tolist()
    [3, 1, 2]
    """

    def __init__(self, keys: Keys, first: int) -> None:
        bits = max(4, int(2 * max(1, len(keys)) - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._mask = np.int64((1 << bits) - 1)
        self._keys = np.zeros(1 << bits, np.uint64)
        self._ids = np.zeros(1 << bits, np.uint32)  # 0: empty slot
        ids = np.arange(first, first + len(keys), dtype=np.uint32)
        slots = self._slot(keys)
        while len(keys):
            empty = self._ids[slots] == 0
            self._ids[slots[empty]] = ids[empty]  # of several keys for one slot the last is stored
            stored = np.zeros(len(keys), bool)
            stored[empty] = self._ids[slots[empty]] == ids[empty]
            self._keys[slots[stored]] = keys[stored]
            keys, ids, slots = keys[~stored], ids[~stored], (slots[~stored] + 1) & self._mask

    def _slot(self, keys: Keys) -> npt.NDArray[np.int64]:
        with np.errstate(over="ignore"):
            slots: npt.NDArray[np.int64] = ((keys * GOLDEN) >> self._shift).astype(np.int64)
        return slots

    @property
    def slots(self) -> tuple[Keys, Ids, np.uint64, np.uint64]:
        """Keys and ids of all slots, shift and mask: for compiled loops that look up keys as :meth:`find` does."""
        return self._keys, self._ids, self._shift, np.uint64(self._mask)

    def find(self, key: int) -> int:
        """Return the id of one key, in a twentieth of the time that an array of one key takes."""
        slot = (key * int(GOLDEN) & MAX_KEY) >> int(self._shift)
        while (found := self._ids.item(slot)) and self._keys.item(slot) != key:
            slot = (slot + 1) & int(self._mask)
        return found or UNSEEN_ID

    def __call__(self, keys: Keys) -> Ids:
        """Return the id of each key; ``UNSEEN_ID`` for a key that is not in the table."""
        if len(keys) <= FEW_KEYS:
            return np.array([self.find(key) for key in keys.tolist()], np.uint32)
        slots = self._slot(keys)
        ids = self._ids[slots]
        pending = np.flatnonzero((self._keys[slots] != keys) & (ids != 0))
        slots = slots[pending]
        while len(pending):
            slots = (slots + 1) & self._mask
            candidates = self._ids[slots]
            ids[pending] = candidates
            occupied = (self._keys[slots] != keys[pending]) & (candidates != 0)
            pending, slots = pending[occupied], slots[occupied]
        ids[ids == 0] = UNSEEN_ID
        return ids
