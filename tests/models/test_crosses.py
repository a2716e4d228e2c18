"""Crosses are correct in all kernels, for any plan, and when several forwards precede one backward."""

from __future__ import annotations

import copy
import gc
import importlib.util
from itertools import combinations

import pytest
import torch

from lpfs.errors import InputError
from lpfs.models._kernels import numba_crosses, torch_crosses
from lpfs.models.crosses import Crosses, ReusableBuffer

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
KERNELS = ["torch", pytest.param("numba", marks=needs_numba)]
N, D, B = 5, 3, 130  # more rows than one block of the compiled kernel
ALL = [*((i,) for i in range(N)), *combinations(range(N), 2)]
PLANS = {
    "all": (ALL, None, None),
    "users by items": ([(i, j) for i in (0, 3) for j in (1, 2, 4)], None, None),
    "some": ([(1,), (4,), (0, 1), (0, 4), (2, 3)], None, None),
    "some in given slots": ([(1,), (2,), (0, 1), (3, 4)], [1, 2, 5, 9], 11),
    "backwards": ([(4, 0), (3, 1), (2,)], None, None),
    "none": ([], None, 2),
}
plans = pytest.mark.parametrize("plan", PLANS)


def by_hand(plan, tokens, gate=None, beside=None):
    parts, places, slots = PLANS[plan]
    places = list(range(len(parts))) if places is None else places
    pieces = [torch.zeros(len(tokens), D, dtype=tokens.dtype) for _ in range(slots or len(parts))]
    for number, (part, place) in enumerate(zip(parts, places, strict=True)):
        value = tokens[:, part[0]] if len(part) == 1 else tokens[:, part[0]] * tokens[:, part[1]]
        pieces[place] = value if gate is None else value * gate[number]
    return torch.cat(pieces if beside is None else [*pieces, beside], 1)


def crosses_of(plan, kernel="torch"):
    parts, places, slots = PLANS[plan]
    return Crosses(parts, D, places=places, slots=slots, kernel=kernel)


@plans
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("extra", [0, 4])
def test_products_and_gradients(plan, kernel, gated, extra):
    crosses = crosses_of(plan, kernel)
    tokens = torch.randn(B, N, D, requires_grad=True)
    gate = torch.randn(crosses.parts, requires_grad=True) if gated else None
    beside = torch.randn(B, extra, requires_grad=True) if extra else None
    crosses.gate = (lambda: gate) if gated else None
    out = crosses(tokens, beside)
    expected = by_hand(plan, tokens, gate, beside) + 0 * tokens.sum()  # an empty plan has a gradient too
    assert torch.equal(out, expected), "every value is one or two products, so all bits are equal"
    inputs = [tensor for tensor in (tokens, gate, beside) if tensor is not None]
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, upstream)
    expected_grads = torch.autograd.grad(expected, inputs, upstream, allow_unused=True, materialize_grads=True)
    for a, b in zip(grads, expected_grads, strict=True):
        # sums of B·D float32 terms of size about 1 in another order
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@plans
def test_gradients_match_finite_differences(plan):
    crosses = crosses_of(plan)
    tokens = torch.randn(3, N, D, dtype=torch.float64, requires_grad=True)
    gate = torch.randn(crosses.parts, dtype=torch.float64, requires_grad=True)
    beside = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def products(tokens, gate, beside):
        crosses.gate = lambda: gate
        return crosses(tokens, beside)

    assert torch.autograd.gradcheck(products, (tokens, gate, beside))


@needs_numba
def test_the_compiled_kernel_does_not_depend_on_threads():
    crosses = crosses_of("all", "numba")
    tokens, gate = torch.randn(500, N, D), torch.randn(crosses.parts)
    upstream = torch.randn(500, len(ALL) * D)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(numba_crosses.backward(crosses.plan, tokens, gate, upstream))
    finally:
        torch.set_num_threads(before)
    for token_grad, gate_grad in results[1:]:
        assert torch.equal(token_grad, results[0][0])
        assert torch.equal(gate_grad, results[0][1])


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_forwards_before_one_backward(kernel):
    crosses, weight = crosses_of("all", kernel), torch.randn(len(ALL) * D, 2, requires_grad=True)
    one, two = (torch.randn(B, N, D, requires_grad=True) for _ in range(2))
    first = crosses(one) @ weight
    second = crosses(two) @ weight
    (first.sum() + 2 * second.sum()).backward()
    grads = weight.grad.clone(), one.grad.clone(), two.grad.clone()
    for tensor in (weight, one, two):
        tensor.grad = None
    (by_hand("all", one) @ weight).sum().backward()
    (2 * (by_hand("all", two) @ weight)).sum().backward()
    for a, b in zip(grads, (weight.grad, one.grad, two.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_referenced_result_is_not_overwritten():
    crosses = crosses_of("all")
    tokens = [torch.randn(B, N, D) for _ in range(3)]
    results = [crosses(batch) for batch in tokens]
    for batch, result in zip(tokens, results, strict=True):
        assert torch.equal(result, by_hand("all", batch))
    part = crosses(tokens[0])[:, :2]  # a view refers to the memory too
    kept = part.clone()
    crosses(tokens[1])
    assert torch.equal(part, kept)


def test_memory_is_reused_in_the_next_step():
    crosses, linear = crosses_of("all"), torch.nn.Linear(len(ALL) * D, 1)
    tokens = torch.randn(B, N, D, requires_grad=True)

    def step() -> int:
        columns = crosses(tokens)
        address = columns.data_ptr()
        linear(columns).sum().backward()
        return address

    gc.collect()
    assert len({step() for _ in range(5)}) == 1
    result = crosses(tokens)
    assert step() != result.data_ptr()
    del result
    before = step()
    assert crosses(tokens[: B // 2]).data_ptr() == before  # a smaller batch, the last of a pass
    assert crosses(tokens[:2]).data_ptr() != before  # much smaller: the large memory is not kept for it
    assert torch.equal(crosses(tokens), by_hand("all", tokens))


def test_unused_slots_are_zero_in_reused_memory():
    crosses = crosses_of("some in given slots")
    for rows in (B, 7, B):
        tokens = torch.randn(rows, N, D)
        assert torch.equal(crosses(tokens), by_hand("some in given slots", tokens))


def test_buffers_are_not_copied():
    crosses = crosses_of("all")
    crosses(torch.randn(B, N, D))
    other = copy.deepcopy(crosses)
    assert crosses._buffer._cached
    assert not other._buffer._cached
    assert not ReusableBuffer()._cached


def test_tokens_that_are_not_contiguous():
    wide = torch.randn(B, N, D + 2)
    assert torch.equal(crosses_of("all")(wide[..., :D]), by_hand("all", wide[..., :D]))


def test_no_rows():
    assert crosses_of("all", "numba")(torch.zeros(0, N, D)).shape == (0, len(ALL) * D)


def test_which_kernel_runs(monkeypatch):
    large = torch.zeros(1, N, D).expand(1 << 20, N, D)
    crosses = crosses_of("all", "auto")
    monkeypatch.setattr("lpfs.models.crosses.has_numba", lambda: True)
    assert crosses._kernel_for(large) is numba_crosses
    assert crosses._kernel_for(large[:10]) is torch_crosses
    assert crosses._kernel_for(large.double()[:1]) is torch_crosses
    monkeypatch.setattr("lpfs.models.crosses.has_numba", lambda: False)
    assert crosses._kernel_for(large) is torch_crosses
    with pytest.raises(InputError, match="kernel must be"):
        Crosses(ALL, D, kernel="cobol")
