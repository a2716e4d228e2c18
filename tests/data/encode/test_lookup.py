"""The hash table from keys to ids, and the mixing of numbers."""

import numpy as np
import pytest

from lpfs.data.hashing import HashTable, splitmix64


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 1000, 50_000])
@pytest.mark.parametrize("spread", [1, 2**40, 2**63])
def test_lookup_is_a_dict(size, spread):
    rng = np.random.default_rng(size)
    keys = np.unique(rng.integers(0, max(spread, 2 * size), size, dtype=np.uint64))
    rng.shuffle(keys)
    table = {key: index + 2 for index, key in enumerate(keys.tolist())}
    asked = np.concatenate([keys, rng.integers(0, max(spread, 2 * size) + 1, 500, dtype=np.uint64)])
    assert HashTable(keys, 2)(asked).tolist() == [table.get(key, 1) for key in asked.tolist()]


def test_mixing_is_the_same_everywhere():
    assert splitmix64([0, 1], 0).tolist() == [16294208416658607535, 10451216379200822465]
    marks = splitmix64(np.arange(100_000), 5).astype(float) / 2**64
    assert abs(marks.mean() - 0.5) < 0.01
