"""Random orders that are never made."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lpfs.data.hashing import shuffled_positions


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_it_is_a_permutation_whatever_the_size(size, seed):
    assert sorted(shuffled_positions(np.arange(size), size, seed).tolist()) == list(range(size))


@given(st.integers(2, 500), st.integers(0, 9), st.data())
def test_a_place_depends_on_its_number_alone(size, seed, data):
    whole = shuffled_positions(np.arange(size), size, seed)
    some = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
    assert shuffled_positions(some, size, seed).tolist() == whole[some].tolist()


def test_every_order_is_equally_likely():
    counts = Counter(tuple(shuffled_positions(range(4), 4, seed).tolist()) for seed in range(4800))
    assert len(counts) == 24
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 50  # chi-square, 23 degrees of freedom


def test_seeds_differ():
    first, second = (shuffled_positions(np.arange(1000), 1000, seed) for seed in (0, 1))
    assert np.count_nonzero(first == second) < 20
