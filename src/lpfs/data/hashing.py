"""A hash table from 64-bit keys to ids that numpy can ask for a whole column at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lpfs.data.raw.chance import GOLDEN
from lpfs.data.store.format import UNSEEN_ID

Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.uint32]


class Lookup:
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
