"""What a step on the CPU reads as arrays, and the torch functions that numba compiles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from lpfs._imports import has_numba
from lpfs.gates import host


@pytest.mark.skipif(not has_numba(), reason="needs numba")
def test_smaller_and_larger_of_two_numbers_are_those_of_torch():
    import numba

    host._define_torch_functions()
    both = numba.njit(lambda a, b: (torch.minimum(a, b), torch.maximum(a, b)))  # no cache: always from this source
    for a, b in ((1.0, 2.0), (2.0, -1.0)):
        assert both(a, b) == (min(a, b), max(a, b))


def test_only_float32_vectors_on_the_cpu_are_read_as_arrays():
    class Subclass(torch.Tensor):
        pass

    x = torch.ones(3)
    assert host.is_plain(x)
    assert host.is_plain(torch.nn.Parameter(x))
    others = (x.double(), x[:, None], x.sum(), torch.empty(3, device="meta"), x.as_subclass(Subclass))
    assert not any(host.is_plain(other) for other in others)


@pytest.mark.parametrize(
    ("owner", "name", "value"), [(torch.compiler, "is_compiling", True), (torch._C, "_get_tracing_state", object())]
)
def test_nothing_is_read_as_an_array_while_torch_is_tracing(monkeypatch, owner, name, value):
    monkeypatch.setattr(owner, name, lambda: value)
    assert not host.is_plain(torch.ones(3))


def test_arrays_follow_their_tensors():
    arrays, first, second = host.Arrays(), torch.arange(4.0), torch.zeros(2)
    made = arrays(first, second)
    assert [array.tolist() for array in made] == [[0.0, 1.0, 2.0, 3.0], [0.0, 0.0]]
    first[0] = 5.0
    assert made[0][0] == 5.0
    assert arrays(first, second) is made  # made once
    assert arrays(first[:2], second)[0].tolist() == [5.0, 1.0]  # other tensor at the same address
    moved = arrays(first, torch.ones(2))
    assert moved[1].tolist() == [1.0, 1.0]
    copied = pickle.loads(pickle.dumps(arrays))
    assert np.array_equal(copied(first)[0], first.numpy())
