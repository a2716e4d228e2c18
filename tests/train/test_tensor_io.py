"""Nested state as JSON and tensors, and tensors in safetensors files."""

from __future__ import annotations

import hashlib
import json
import math

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from lpfs.errors import InputError
from lpfs.train.tensor_io import DTYPE_NAMES, flatten_state, read_tensors, restore_state, states_equal, write_tensors

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.sampled_from(["!tuple", "!tensor", "!items"])
NESTED = st.recursive(
    PLAIN | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(NESTED)
def test_nested_state_is_restored(value):
    values, tensors = flatten_state(value)
    back = restore_state(json.loads(json.dumps(values, allow_nan=False)), tensors)
    assert same_kinds(value, back)
    assert states_equal(value, back)


def same_kinds(one, two):
    if isinstance(one, dict):
        return list(one) == list(two) and all(same_kinds(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(two) and all(same_kinds(a, b) for a, b in zip(one, two, strict=True))
    return type(one) is type(two)


def test_tensor_names_do_not_clash():
    value = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: {"c": torch.ones(2)}, "0": {"c": torch.zeros(2)}}
    assert states_equal(restore_state(*flatten_state(value)), value)
    assert len(flatten_state(value)[1]) == 4


def test_nan_and_infinity():
    values, _ = flatten_state([math.nan, math.inf, -math.inf])
    back = restore_state(json.loads(json.dumps(values, allow_nan=False)), {})
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


def test_an_optimizer_state_is_restored():
    weight = torch.nn.Parameter(torch.randn(4))
    for optimizer in (torch.optim.Adam([weight], lr=0.1), torch.optim.Adagrad([weight], lr=0.1)):
        weight.grad = torch.randn(4)
        optimizer.step()
        state = optimizer.state_dict()
        assert states_equal(restore_state(*flatten_state(state)), state)


def test_states_equal_detects_bits_dtypes_and_keys():
    one = {"x": torch.tensor([1.0, math.nan])}
    assert states_equal(one, {"x": torch.tensor([1.0, math.nan])})
    assert not states_equal(one, {"x": torch.tensor([1.0 + 2**-23, math.nan])})
    assert not states_equal(one, {"x": torch.tensor([1.0, math.nan], dtype=torch.float64)})
    assert not states_equal(one, {"y": torch.tensor([1.0, math.nan])})
    assert not states_equal({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)})


def test_an_unsupported_value_is_named():
    with pytest.raises(InputError, match=r"callbacks\.0\.values contains a set"):
        flatten_state({"callbacks": [{"values": {1, 2}}]})


def every_dtype():
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPE_NAMES}
    tensors |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "ünïcode.ключ": torch.ones(1)}
    tensors["turned"] = torch.arange(12.0).reshape(3, 4).T
    tensors["tied"] = tensors["scalar"]
    return tensors


def test_written_tensors_are_read(tmp_path):
    path, tensors = tmp_path / "a", every_dtype()
    entry = write_tensors(path, tensors)
    assert entry == {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    back = read_tensors(path, entry["sha256"])
    assert list(back) == list(tensors)
    assert states_equal(back, tensors)


def test_files_are_compatible_with_the_safetensors_package(tmp_path):
    tensors = {name: tensor.contiguous().clone() for name, tensor in every_dtype().items()}
    write_tensors(tmp_path / "ours", tensors)
    assert states_equal(
        dict(sorted(safetensors.torch.load_file(tmp_path / "ours").items())), dict(sorted(tensors.items()))
    )
    safetensors.torch.save_file(tensors, tmp_path / "its", metadata={"by": "the package"})
    assert states_equal(dict(sorted(read_tensors(tmp_path / "its").items())), dict(sorted(tensors.items())))


def test_every_flipped_bit_and_every_truncation_is_detected(tmp_path):
    path = tmp_path / "a"
    sha = write_tensors(path, {"x": torch.arange(3.0), "y": torch.tensor([True])})["sha256"]
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError):  # noqa: PT011  any message will do
            read_tensors(path, sha)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError):  # noqa: PT011  any message will do
            read_tensors(path, sha)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match=f"{len(whole)}"):
        read_tensors(path, sha)


def test_an_unsupported_tensor_is_named(tmp_path):
    with pytest.raises(InputError, match=r"wave.*torch\.complex64"):
        write_tensors(tmp_path / "a", {"wave": torch.zeros(1, dtype=torch.complex64)})
    with pytest.raises(InputError, match="sparse"):
        write_tensors(tmp_path / "a", {"holes": torch.eye(2).to_sparse()})
