from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rowzoo import ENGINES, ids_of, look, plain_of
from torch import nn

from lpfs.embeddings._torch import use_backend
from lpfs.embeddings.row_grad import RowParameter, merged_row_grads
from lpfs.embeddings.table import Table
from lpfs.errors import InputError, StateError

SIZES = (7, 300, 1, 40)


def dense(weight: RowParameter) -> torch.Tensor:
    """The gradient of all rows; no row may be in it twice."""
    out = torch.zeros_like(weight)
    pieces = merged_row_grads(weight)
    rows = torch.cat([each.rows for each in pieces]) if pieces else torch.empty(0)
    assert len(rows.unique()) == len(rows)
    for each in pieces:
        out[each.rows] = each.values
    return out


def whole(*shape: int, seed: int = 3) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def table_of_whole_numbers(sizes: tuple[int, ...], dim: int, **how) -> Table:
    table = Table(sizes, dim, **how)
    with torch.no_grad():
        table.weight.copy_(whole(*table.weight.shape, seed=1))
    return table


@pytest.mark.parametrize("engine", ENGINES)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 9, 70, 1000]), min_size=1, max_size=5).map(tuple),
    dim=st.sampled_from([1, 3, 8, 16, 17, 24]),
    rows=st.sampled_from([0, 1, 2, 33, 200]),
    kind=st.sampled_from([torch.int32, torch.int64]),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_an_embedding(engine, sizes, dim, rows, kind, gated, seed):
    table = table_of_whole_numbers(sizes, dim)
    plain = plain_of(table)
    ids, grad = ids_of(sizes, rows, seed, kind), whole(rows, len(sizes), dim, seed=seed)
    gate = 2.0 ** torch.randint(-2, 3, (len(sizes),)) * (torch.arange(len(sizes)) % 3 != 1) if gated else None
    mine, theirs = (None if gate is None else gate.clone().requires_grad_() for _ in range(2))
    with use_backend(engine):
        out = table(ids, mine)
        out.backward(grad)
    expected = look(plain, table, ids, theirs)
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert table.weight.grad is None
    assert torch.equal(dense(table.weight), plain.weight.grad)
    if gated:
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_gradient_of_a_dead_gate_is_not_zero(engine):
    table = table_of_whole_numbers((3, 5), 4)
    gate = torch.zeros(2, requires_grad=True)
    ids, grad = torch.tensor([[0, 1], [2, 1], [0, 4]]), whole(3, 2, 4)
    with use_backend(engine):
        table(ids.int(), gate).backward(grad)
    brute = [sum(float(table.rows(f)[ids[b, f]] @ grad[b, f]) for b in range(3)) for f in range(2)]
    assert gate.grad.tolist() == brute
    assert all(brute)
    assert not dense(table.weight).any()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mean", [False, True])
def test_bags_are_those_of_an_embedding_bag(engine, mean):
    table = table_of_whole_numbers((9, 50, 4), 16, bags=2, mean=mean)
    ids = ids_of((50,), 30)[:, 0]
    offsets = torch.tensor([0, 4, 4, 12, 28, 30])  # 4, none, 8, 16, 2 and no ids: means are exact
    bag = nn.EmbeddingBag.from_pretrained(
        table.rows(1).clone(), freeze=False, mode="mean" if mean else "sum", include_last_offset=False
    )
    mine, theirs = (torch.tensor([4.0], requires_grad=True) for _ in range(2))
    grad = whole(6, 16) * 16
    with use_backend(engine):
        out = table.bag(0, ids, offsets, mine)
        out.backward(grad)
    expected = bag(ids.long(), offsets) * theirs
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert not out[1].any()
    assert not out[5].any()
    gradient = dense(table.weight)
    assert torch.equal(gradient[9:59], bag.weight.grad)
    assert not gradient[:9].any()
    assert not gradient[59:].any()
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mean", [False, True])
def test_all_bags_together_are_each_by_itself(engine, mean):
    table = table_of_whole_numbers((9, 50, 4, 7), 16, bags=3, mean=mean)
    several = [
        (ids_of((50,), 30)[:, 0], torch.tensor([0, 4, 4, 12, 28, 30])),
        (torch.empty(0, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)),
        (ids_of((7,), 8)[:, 0], torch.tensor([0, 0, 0, 2, 4, 8])),
    ]
    gate, apart = (torch.tensor([4.0, 0.0, -2.0], requires_grad=True) for _ in range(2))
    grad = whole(6, 3, 16) * 16
    with use_backend(engine):
        out = table.bags(several, gate)
        out.backward(grad)
        together = dense(table.weight)
        table.weight.row_grads.clear()
        expected = [table.bag(n, *each, apart[n : n + 1]) for n, each in enumerate(several)]
        torch.stack(expected, 1).backward(grad)
    assert torch.equal(out, torch.stack(expected, 1))
    assert torch.equal(together, dense(table.weight))
    assert torch.equal(gate.grad, apart.grad)
    with pytest.raises(InputError, match="expected 3 bags, found 1"):
        table.bags(several[:1])
    wrong = [several[0], several[1], (torch.tensor([7]), torch.zeros(6, dtype=torch.int64))]
    with pytest.raises(InputError, match="id 7 in row 0"):
        table.bags(wrong)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_bag_and_no_id_at_all(engine):
    table = Table((9, 50), 8, bags=1)
    with use_backend(engine):
        out = table.bag(0, torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
        out.sum().backward()
    assert torch.equal(out, torch.zeros(3, 8))
    assert not table.weight.row_grads


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", [-1, 40, 2**31 - 1])
def test_an_id_outside_its_field_is_refused(engine, wrong):
    table = Table(SIZES, 16)
    ids = ids_of(SIZES, 600)
    ids[411, 3] = wrong
    message = rf"id {wrong} in row 411, column 3 is outside its field, which has 40 ids"
    with use_backend(engine), pytest.raises(InputError, match=message):
        table(ids)
    with use_backend(engine), pytest.raises(InputError, match=r"expected ids \(B, 4\)"):
        table(ids[:, :3])


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_and_gradients_need_not_be_contiguous(engine):
    table = table_of_whole_numbers(SIZES, 16)
    ids, grad = ids_of(SIZES, 64), whole(16, 4, 64).permute(2, 1, 0)
    with use_backend(engine):
        first = table(ids)
        first.backward(grad.contiguous())
        expected = dense(table.weight)
        table.weight.row_grads.clear()
        again = table(ids.T.contiguous().T)
        again.backward(grad)
    assert torch.equal(first, again)
    assert torch.equal(dense(table.weight), expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_stays_as_it_is_while_others_are_computed(engine):
    """The search for equal ids works in memory that is used again: what was handed out is not in it."""
    table = table_of_whole_numbers(SIZES, 16)
    with use_backend(engine):
        table(ids_of(SIZES, 64, seed=1)).backward(whole(64, 4, 16))
        (piece,) = table.weight.row_grads
        kept = copy.deepcopy((piece.rows, piece.values))
        other = table_of_whole_numbers(SIZES, 16)
        for seed in range(5):
            other(ids_of(SIZES, 64, seed)).backward(whole(64, 4, 16, seed=seed))
    assert torch.equal(piece.rows, kept[0])
    assert torch.equal(piece.values, kept[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lookups", [2, 40])
def test_a_field_that_is_looked_up_again_is_summed(engine, lookups):
    table = table_of_whole_numbers((*SIZES, 30), 16, bags=1)
    plain = plain_of(table)
    with use_backend(engine):
        for number in range(lookups):
            ids, grad = ids_of(SIZES, 50, number), whole(50, 4, 16, seed=number)
            table(ids).backward(grad)
            look(plain, table, ids).backward(grad)
            if number % 2:
                bag = ids_of((30,), 8, number)[:, 0]
                table.bag(0, bag, torch.arange(8)).backward(grad[:8, 0])
                plain(bag.long() + sum(SIZES)).backward(grad[:8, 0])
        assert len(table.weight.row_grads) < 40
        assert torch.equal(dense(table.weight), plain.weight.grad)
    assert len(table.weight.row_grads) == 2  # the fields, and the bag, which have no row in common


def test_different_fields_are_not_summed():
    table = Table((5, 6, 7), 4, bags=3)
    for number in range(3):
        table.bag(number, torch.tensor([1, 1]), torch.tensor([0, 1])).sum().backward()
    before = list(table.weight.row_grads)
    assert [each is other for each, other in zip(merged_row_grads(table.weight), before, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("engine", ENGINES)
def test_other_kinds_of_numbers_work_too(engine):
    table = table_of_whole_numbers(SIZES, 16).double()
    plain = plain_of(table)
    ids, grad = ids_of(SIZES, 64), whole(64, 4, 16).double()
    gate = torch.tensor([1.0, 0.5, 2.0, 0.0], requires_grad=True)
    with use_backend(engine):
        table(ids, gate).backward(grad)
    look(plain, table, ids, gate.detach().double()).backward(grad)
    assert isinstance(table.weight, RowParameter)
    assert torch.equal(dense(table.weight), plain.weight.grad)
    assert gate.grad.dtype == torch.float32


def test_a_weight_that_would_never_train_is_refused():
    table = Table((3,), 2)
    table.load_state_dict(copy.deepcopy(table.state_dict()), assign=True)
    out = table(torch.tensor([[1]]))
    with pytest.raises(StateError, match="ordinary parameter"):
        out.sum().backward()


def test_a_frozen_table_collects_nothing_but_its_gates_do():
    table = table_of_whole_numbers((3,), 2)
    table.weight.requires_grad_(False)
    gate = torch.ones(1, requires_grad=True)
    table(torch.tensor([[1]]), gate).sum().backward()
    assert not table.weight.row_grads
    assert gate.grad.item() == table.rows(0)[1].sum().item()


def test_copies_and_what_is_printed():
    table = Table((3, 4), 2, bags=1)
    table(torch.tensor([[1]])).sum().backward()
    twin = copy.deepcopy(table)
    assert isinstance(twin.weight, RowParameter)
    assert torch.equal(twin.weight, table.weight)
    assert not twin.weight.row_grads
    assert str(table) == "Table(2 fields, 7 rows, dim=2)"
    assert list(table.state_dict()) == ["weight"]
    with pytest.raises(InputError, match="sizes of at least 1"):
        Table((3, 0), 2)
