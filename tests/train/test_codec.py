from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lpfs.errors import InputError
from lpfs.train.tensor_io import flatten_state, restore_state, states_equal

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.sampled_from(["!tuple", "!tensor", "!items"])
NESTED = st.recursive(
    PLAIN | st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(NESTED)
def test_anything_nested_comes_back_as_it_was(value):
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


def test_names_that_would_clash_do_not():
    value = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, 0: {"c": torch.ones(2)}, "0": {"c": torch.zeros(2)}}
    assert states_equal(restore_state(*flatten_state(value)), value)
    assert len(flatten_state(value)[1]) == 4


def test_numbers_without_a_spelling_in_json():
    values, _ = flatten_state([math.nan, math.inf, -math.inf])
    back = restore_state(json.loads(json.dumps(values, allow_nan=False)), {})
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf]


def test_an_optimizer_state_survives():
    weight = torch.nn.Parameter(torch.randn(4))
    for optimizer in (torch.optim.Adam([weight], lr=0.1), torch.optim.Adagrad([weight], lr=0.1)):
        weight.grad = torch.randn(4)
        optimizer.step()
        state = optimizer.state_dict()
        assert states_equal(restore_state(*flatten_state(state)), state)


def test_equal_sees_one_bit_a_type_and_a_key():
    one = {"x": torch.tensor([1.0, math.nan])}
    assert states_equal(one, {"x": torch.tensor([1.0, math.nan])})
    assert not states_equal(one, {"x": torch.tensor([1.0 + 2**-23, math.nan])})
    assert not states_equal(one, {"x": torch.tensor([1.0, math.nan], dtype=torch.float64)})
    assert not states_equal(one, {"y": torch.tensor([1.0, math.nan])})
    assert not states_equal({"x": torch.tensor(0.0)}, {"x": torch.tensor(-0.0)})


def test_what_cannot_be_kept_is_named():
    with pytest.raises(InputError, match=r"callbacks\.0\.made holds a set, which a checkpoint cannot keep"):
        flatten_state({"callbacks": [{"made": {1, 2}}]})
