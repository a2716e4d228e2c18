from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from lpfs.data.batch import Batch
from lpfs.embeddings._backends import use_backend
from lpfs.embeddings.row_grad import RowParameter, merged_row_grads
from lpfs.embeddings.table import Table
from lpfs.errors import InputError, StateError
from lpfs.train.step import clone_batch
from tests.helpers.embeddings import BACKENDS, as_embedding, random_ids, torch_lookup

SIZES = (7, 300, 1, 40)


def dense(weight: RowParameter) -> torch.Tensor:
    """Return the gradient of all rows and check that no row is duplicated."""
    out = torch.zeros_like(weight)
    pieces = merged_row_grads(weight)
    rows = torch.cat([piece.rows for piece in pieces]) if pieces else torch.empty(0)
    assert len(rows.unique()) == len(rows)
    for piece in pieces:
        out[piece.rows] = piece.values
    return out


def integers(*shape: int, seed: int = 3) -> torch.Tensor:
    """Return small integers as floats: their sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def integer_table(sizes: tuple[int, ...], dim: int, **options) -> Table:
    table = Table(sizes, dim, **options)
    with torch.no_grad():
        table.weight.copy_(integers(*table.weight.shape, seed=1))
    return table


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 9, 70, 1000]), min_size=1, max_size=5).map(tuple),
    dim=st.sampled_from([1, 3, 8, 16, 17, 24]),
    rows=st.sampled_from([0, 1, 2, 33, 200]),
    kind=st.sampled_from([torch.int32, torch.int64]),
    gates=st.sampled_from(["none", "constant", "trained"]),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_an_embedding(backend, sizes, dim, rows, kind, gates, seed):
    table = integer_table(sizes, dim)
    plain = as_embedding(table)
    ids, grad = random_ids(sizes, rows, seed, kind), integers(rows, len(sizes), dim, seed=seed)
    gate = 2.0 ** torch.randint(-2, 3, (len(sizes),)) * (torch.arange(len(sizes)) % 3 != seed % 3)
    mine, theirs = (None if gates == "none" else gate.clone().requires_grad_(gates == "trained") for _ in range(2))
    table.skips_zero_gates = True
    with use_backend(backend):
        out = table(ids, mine)
        out.permute(2, 1, 0).contiguous().backward(grad.permute(2, 1, 0))
    if gates == "constant":
        fields = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        touched = {int(fields[row]) for piece in table.weight.row_grads for row in piece.rows}
        assert touched <= set(gate.nonzero()[:, 0].tolist())
    expected = torch_lookup(plain, table, ids, theirs)
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert table.weight.grad is None
    assert torch.equal(dense(table.weight), plain.weight.grad)
    if gates == "trained":
        assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_dead_gate_is_not_zero(backend):
    table = integer_table((3, 5), 4)
    gate = torch.zeros(2, requires_grad=True)
    ids, grad = torch.tensor([[0, 1], [2, 1], [0, 4]]), integers(3, 2, 4)
    with use_backend(backend):
        table(ids.int(), gate).backward(grad)
    brute = [sum(float(table.rows(f)[ids[b, f]] @ grad[b, f]) for b in range(3)) for f in range(2)]
    assert gate.grad.tolist() == brute
    assert all(brute)
    assert not dense(table.weight).any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [False, True])
def test_bags_are_those_of_an_embedding_bag(backend, mean):
    table = integer_table((9, 50, 4), 16, bags=2, mean=mean)
    ids = random_ids((50,), 30)[:, 0]
    offsets = torch.tensor([0, 4, 4, 12, 28, 30])  # 4, none, 8, 16, 2 and no ids: means are exact
    bag = nn.EmbeddingBag.from_pretrained(
        table.rows(1).clone(), freeze=False, mode="mean" if mean else "sum", include_last_offset=False
    )
    mine, theirs = (torch.tensor([4.0], requires_grad=True) for _ in range(2))
    grad = integers(6, 16) * 16
    with use_backend(backend):
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_padded_bags_are_the_same_bags(backend, mean, gated):
    table = integer_table((9, 50, 4, 7), 16, bags=3, mean=mean)
    all_bags = [
        (random_ids((50,), 30)[:, 0], torch.tensor([0, 4, 4, 12, 28, 30])),
        (random_ids((4,), 2)[:, 0], torch.tensor([0, 0, 0, 0, 2, 2])),
        (random_ids((7,), 8)[:, 0], torch.tensor([0, 0, 0, 2, 4, 8])),
    ]
    batch = Batch(
        torch.zeros(6, 1), torch.zeros(6, 0), torch.zeros(6, 1), None, dict(zip("abc", all_bags, strict=True))
    )
    padded = list(clone_batch(batch, torch.device("cpu")).bags.values())
    assert [len(ids) for ids, _ in padded] == [64] * 3
    assert [offsets[-1] for _, offsets in padded] == [30, 2, 8]
    gate, other = (torch.tensor([4.0, 0.0, -2.0], requires_grad=True) if gated else None for _ in range(2))
    grad = integers(6, 3, 16) * 16
    with use_backend(backend):
        expected = table.bags(all_bags, gate)
        expected.backward(grad)
        gradient = dense(table.weight)
        rows = {int(row) for piece in table.weight.row_grads for row in piece.compact().rows}
        table.weight.row_grads.clear()
        out = table.bags(padded, other, padded=True)
        out.backward(grad)
    assert torch.equal(out, expected)
    assert torch.equal(dense(table.weight), gradient)
    assert {int(row) for piece in table.weight.row_grads for row in piece.compact().rows} == rows
    assert not gated or torch.equal(other.grad, gate.grad)
    for rows, is_padded in itertools.product((0, 3, 5, 6), (False, True)):
        bags = dict(zip("abc", padded if is_padded else all_bags, strict=True))
        head = Batch(batch.ids, batch.dense, batch.labels, None, bags, is_padded).head(rows)
        assert torch.equal(table.bags(list(head.bags.values()), padded=is_padded), table.bags(all_bags)[:rows])
    padded[1][0][1] = 4
    with use_backend(backend):
        assert table.bags(padded, other, padded=True).isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mean", [False, True])
def test_all_bags_give_the_result_of_single_bags(backend, mean):
    table = integer_table((9, 50, 4, 7), 16, bags=3, mean=mean)
    all_bags = [
        (random_ids((50,), 30)[:, 0], torch.tensor([0, 4, 4, 12, 28, 30])),
        (torch.empty(0, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)),
        (random_ids((7,), 8)[:, 0], torch.tensor([0, 0, 0, 2, 4, 8])),
    ]
    gate, apart = (torch.tensor([4.0, 0.0, -2.0], requires_grad=True) for _ in range(2))
    grad = integers(6, 3, 16) * 16
    with use_backend(backend):
        out = table.bags(all_bags, gate)
        out.backward(grad)
        together = dense(table.weight)
        table.weight.row_grads.clear()
        expected = [table.bag(n, *each, apart[n : n + 1]) for n, each in enumerate(all_bags)]
        torch.stack(expected, 1).backward(grad)
    assert torch.equal(out, torch.stack(expected, 1))
    assert torch.equal(together, dense(table.weight))
    assert torch.equal(gate.grad, apart.grad)
    with pytest.raises(InputError, match="expected 3 bags, found 1"):
        table.bags(all_bags[:1])
    wrong = [all_bags[0], all_bags[1], (torch.tensor([7]), torch.zeros(6, dtype=torch.int64))]
    with pytest.raises(InputError, match="id 7 in row 0"):
        table.bags(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_bag_and_no_id_at_all(backend):
    table = Table((9, 50), 8, bags=1)
    with use_backend(backend):
        out = table.bag(0, torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
        out.sum().backward()
    assert torch.equal(out, torch.zeros(3, 8))
    assert not table.weight.row_grads


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [-1, 40, 2**31 - 1])
def test_an_id_outside_its_field_is_refused(backend, wrong):
    table = Table(SIZES, 16)
    ids = random_ids(SIZES, 600)
    ids[411, 3] = wrong
    message = rf"id {wrong} in row 411, column 3 is outside its field, which has 40 ids"
    with use_backend(backend), pytest.raises(InputError, match=message):
        table(ids)
    with use_backend(backend), pytest.raises(InputError, match=r"expected ids \(B, 4\)"):
        table(ids[:, :3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_and_gradients_need_not_be_contiguous(backend):
    table = integer_table(SIZES, 16)
    ids, grad = random_ids(SIZES, 64), integers(16, 4, 64).permute(2, 1, 0)
    with use_backend(backend):
        first = table(ids)
        first.backward(grad.contiguous())
        expected = dense(table.weight)
        table.weight.row_grads.clear()
        again = table(ids.T.contiguous().T)
        again.backward(grad)
    assert torch.equal(first, again)
    assert torch.equal(dense(table.weight), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_returned_gradient_is_not_overwritten(backend):
    """The buffers of the search for equal ids are reused; returned gradients must not share them."""
    table = integer_table(SIZES, 16)
    with use_backend(backend):
        table(random_ids(SIZES, 64, seed=1)).backward(integers(64, 4, 16))
        (piece,) = table.weight.row_grads
        kept = copy.deepcopy((piece.rows, piece.values))
        other = integer_table(SIZES, 16)
        for seed in range(5):
            other(random_ids(SIZES, 64, seed)).backward(integers(64, 4, 16, seed=seed))
    assert torch.equal(piece.rows, kept[0])
    assert torch.equal(piece.values, kept[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lookups", [2, 40])
def test_a_field_that_is_looked_up_again_is_summed(backend, lookups):
    table = integer_table((*SIZES, 30), 16, bags=1)
    plain = as_embedding(table)
    with use_backend(backend):
        for number in range(lookups):
            ids, grad = random_ids(SIZES, 50, number), integers(50, 4, 16, seed=number)
            table(ids).backward(grad)
            torch_lookup(plain, table, ids).backward(grad)
            if number % 2:
                bag = random_ids((30,), 8, number)[:, 0]
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
    assert all(new is old for new, old in zip(merged_row_grads(table.weight), before, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_tables_work(backend):
    table = integer_table(SIZES, 16).double()
    plain = as_embedding(table)
    ids, grad = random_ids(SIZES, 64), integers(64, 4, 16).double()
    gate = torch.tensor([1.0, 0.5, 2.0, 0.0], requires_grad=True)
    with use_backend(backend):
        table(ids, gate).backward(grad)
    torch_lookup(plain, table, ids, gate.detach().double()).backward(grad)
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
    table = integer_table((3,), 2)
    table.weight.requires_grad_(False)
    gate = torch.ones(1, requires_grad=True)
    table(torch.tensor([[1]]), gate).sum().backward()
    assert not table.weight.row_grads
    assert gate.grad.item() == table.rows(0)[1].sum().item()


def test_copy_and_repr():
    table = Table((3, 4), 2, bags=1)
    table(torch.tensor([[1]])).sum().backward()
    other = copy.deepcopy(table)
    assert isinstance(other.weight, RowParameter)
    assert torch.equal(other.weight, table.weight)
    assert not other.weight.row_grads
    assert str(table) == "Table(2 fields, 7 rows, dim=2)"
    assert list(table.state_dict()) == ["weight"]
    with pytest.raises(InputError, match=r"at least 1.*\[3, 0\]"):
        Table((3, 0), 2)


def test_embeddings_of_width_one():
    """The wide part of a model has one weight per id."""
    table = Table([4, 3], 1)
    ids = torch.tensor([[3, 0], [1, 2]])
    assert torch.equal(table(ids)[:, :, 0], table.weight[ids + torch.tensor([0, 4])][:, :, 0])
