"""Random permutations that are never built, splitmix64, and the hash table from keys to ids."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lpfs.data.hashing import HashTable, shuffled_positions, splitmix64


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_positions_are_a_permutation_for_every_size(size, seed):
    assert sorted(shuffled_positions(np.arange(size), size, seed).tolist()) == list(range(size))


@given(st.integers(2, 500), st.integers(0, 9), st.data())
def test_a_position_depends_on_its_number_only(size, seed, data):
    whole = shuffled_positions(np.arange(size), size, seed)
    numbers = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
    assert shuffled_positions(numbers, size, seed).tolist() == whole[numbers].tolist()


@pytest.mark.long
@pytest.mark.campaign
def test_all_permutations_are_equally_likely():
    counts = Counter(tuple(shuffled_positions(range(4), 4, seed).tolist()) for seed in range(2400))
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 50  # chi-square, 23 degrees of freedom


def test_seeds_give_different_permutations():
    first, second = (shuffled_positions(np.arange(1000), 1000, seed) for seed in (0, 1))
    assert np.count_nonzero(first == second) < 20


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 1000, 50_000])
@pytest.mark.parametrize("spread", [1, 2**40, 2**63])
def test_hash_table_equals_a_dict(size, spread):
    rng = np.random.default_rng(size)
    keys = np.unique(rng.integers(0, max(spread, 2 * size), size, dtype=np.uint64))
    rng.shuffle(keys)
    table = {key: index + 2 for index, key in enumerate(keys.tolist())}
    queries = np.concatenate([keys, rng.integers(0, max(spread, 2 * size) + 1, 500, dtype=np.uint64)])
    lookup = HashTable(keys, 2)
    expected = [table.get(key, 1) for key in queries.tolist()]
    assert lookup(queries).tolist() == expected
    assert [lookup.find(key) for key in queries.tolist()] == expected
    assert [lookup(queries[row : row + 1]).tolist() for row in range(50)] == [[number] for number in expected[:50]]


def test_splitmix64_is_fixed_and_uniform():
    assert splitmix64([0, 1], 0).tolist() == [16294208416658607535, 10451216379200822465]
    fractions = splitmix64(np.arange(100_000), 5).astype(float) / 2**64
    assert abs(fractions.mean() - 0.5) < 0.01
