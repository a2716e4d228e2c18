import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made import SCHEMA, columns, make

from lpfs.data import stream as stream_module
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.data.stream import Stream
from lpfs.errors import DataError, FieldError, InputError
from lpfs.schema import Field, Schema

DAYS = (40, 1, 59)
ORDERS = {"time": {}, "uniform": {"shuffle": True}, "windowed": {"shuffle": True, "memory": 2000}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return make(tmp_path_factory.mktemp("stream") / "log", DAYS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(stream_module, "CHUNK", 1)
    monkeypatch.setattr(stream_module, "MIN_CHUNK_ROWS", 13)


def rows(batches) -> list[int]:
    return [int(row) for batch in batches for row in batch.ids[:, 0]]


def same(a: Batch, b: Batch) -> bool:
    tensors = [(a.ids, b.ids), (a.dense, b.dense), (a.labels, b.labels)]
    assert (a.missing is None) == (b.missing is None)
    if a.missing is not None and b.missing is not None:
        tensors.append((a.missing, b.missing))
    assert set(a.bags) == set(b.bags)
    for name in a.bags:
        tensors += list(zip(a.bags[name], b.bags[name], strict=True))
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in tensors)


def check(batch: Batch) -> None:
    """Compare a batch with what was written for its rows."""
    for at, row in enumerate(batch.ids[:, 0].tolist()):
        made = columns(row, row + 1)
        assert batch.ids[at].tolist() == [row, row % 5]
        wanted = [0.0 if row % 7 == 3 else row * 0.5, row, row + 1, row + 2]
        assert batch.dense[at].tolist() == wanted
        assert batch.missing is not None
        assert batch.missing[at].tolist() == [row % 7 == 3, False, False, False]
        assert batch.labels[at].tolist() == [row % 2, row % 3 / 2]
        values, offsets = batch.bags["bag"]
        ends = [*offsets.tolist(), len(values)]
        assert values[ends[at] : ends[at + 1]].tolist() == made["bags"]["bag"][0].tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [1, 7, 100, 1000])
def test_batches_hold_what_was_written(dataset, order, batch_size):
    stream = dataset.stream(batch_size, **ORDERS[order])
    assert stream.order == order
    batches = list(stream)
    assert len(batches) == len(stream) == -(-100 // batch_size)
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        assert (batch.ids.dtype, batch.dense.dtype, batch.labels.dtype) == (
            torch.int32,
            torch.float32,
            torch.float32,
        )
        assert batch.ids.is_contiguous()
        assert batch.dense.is_contiguous()
        check(batch)
    assert sorted(rows(batches)) == list(range(100))
    assert (rows(batches) == list(range(100))) == (order == "time")


@pytest.mark.parametrize("order", ["uniform", "windowed"])
def test_passes_and_seeds_give_other_orders_again_and_again(dataset, order):
    def passes(seed: int) -> list[list[int]]:
        stream = dataset.stream(16, seed=seed, **ORDERS[order])
        return [rows(stream), rows(stream)]

    first, second = passes(0)
    assert first != second
    assert passes(0) == [first, second]
    assert passes(1)[0] not in (first, second)


@settings(deadline=None, max_examples=60)
@given(
    order=st.sampled_from(list(ORDERS)),
    batch_size=st.integers(1, 40),
    world=st.integers(1, 6),
    drop_last=st.booleans(),
)
def test_ranks_share_the_rows(dataset, order, batch_size, world, drop_last):
    parts = [
        list(dataset.stream(batch_size, rank=rank, world=world, drop_last=drop_last, prefetch=0, **ORDERS[order]))
        for rank in range(world)
    ]
    assert len({len(part) for part in parts}) == 1
    seen = [row for part in parts for row in rows(part)]
    assert len(seen) == len(set(seen))
    assert len(seen) == (100 // (batch_size * world) * batch_size * world if drop_last else 100)
    for part in parts:
        for batch in part:
            check(batch)


@settings(deadline=None, max_examples=60)
@given(
    order=st.sampled_from(list(ORDERS)),
    batch_size=st.integers(1, 40),
    world=st.integers(1, 3),
    prefetch=st.sampled_from([0, 2]),
    data=st.data(),
)
def test_a_stream_goes_on_bit_by_bit(dataset, order, batch_size, world, prefetch, data):
    def fresh() -> Stream:
        return dataset.stream(batch_size, rank=world - 1, world=world, prefetch=prefetch, seed=3, **ORDERS[order])

    whole = fresh()
    expected = [*whole, *whole]
    cut = data.draw(st.integers(0, len(expected)))
    left, state, count = fresh(), None, 0
    state = left.state_dict()
    for _ in range(2):
        for _ in left:
            if count == cut:
                break
            count += 1
            state = left.state_dict()
        if count == cut:
            break
    resumed = fresh()
    resumed.load_state_dict(state)
    assert resumed.state_dict()["epoch"] in (state["epoch"], state["epoch"] + 1)
    going_on = list(resumed)
    if count + len(going_on) < len(expected):
        going_on += list(resumed)
    assert len(going_on) >= len(expected) - cut
    for got, wanted in zip(going_on, expected[cut:], strict=False):
        assert same(got, wanted)


@pytest.mark.parametrize("order", ORDERS)
def test_other_ranks_and_batches_go_on_without_loss(dataset, order):
    one = dataset.stream(9, world=2, rank=0, **ORDERS[order])
    other = dataset.stream(9, world=2, rank=1, **ORDERS[order])
    seen = []
    for number, pair in enumerate(zip(one, other, strict=True)):
        seen += rows(pair)
        if number == 2:
            state = one.state_dict()
            break
    for rank in range(3):
        part = dataset.stream(5, world=3, rank=rank, **ORDERS[order])
        part.load_state_dict(state)
        seen += rows(part)
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("batch_size", "world"), [(8, 2), (7, 2), (7, 3), (51, 4), (100, 3)])
def test_ranks_share_every_batch_of_a_stream(dataset, order, batch_size, world):
    """Their parts, one after another, are the batches of one process; the last two may be cut otherwise."""
    plain = dataset.stream(batch_size, seed=3, **ORDERS[order])
    first = next(iter(plain))
    plain.load_state_dict({**plain.state_dict(), "position": 2 * len(first) if len(first) < 50 else 0})
    shares = [list(plain.share(rank, world)) for rank in range(world)]
    wholes = list(plain)
    assert {len(each) for each in shares} == {len(wholes)}
    for number, whole in enumerate(wholes[:-2]):
        parts = [each[number] for each in shares]
        assert rows(parts) == rows([whole])
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    together = [part for parts in zip(*shares, strict=True) for part in parts]
    assert rows(together) == rows(wholes)
    assert all(len(each) > 0 for each in together)
    for each in together:
        check(each)


def test_a_share_of_too_few_rows_is_refused(dataset):
    with pytest.raises(InputError, match="batches of 5 of 100 rows are too few for 3 ranks"):
        dataset.stream(5).share(0, 3)


@pytest.mark.parametrize("batch_size", [7, 30, 100])
def test_a_slice_is_whole_batches_and_leaves_the_stream_alone(dataset, batch_size):
    stream = dataset.part(3, 90).stream(batch_size, fields=SCHEMA.names)
    wholes = list(stream)
    for first, stop in ((0, len(wholes)), (1, 3), (2, 2), (len(wholes) - 1, len(wholes))):
        parts = list(stream.slice(first, stop))
        assert len(parts) == len(wholes[first:stop])
        assert all(same(a, b) for a, b in zip(parts, wholes[first:stop], strict=True))
    assert stream.state_dict()["position"] == 0


def test_a_pass_left_early_starts_over(dataset):
    stream = dataset.stream(10)
    for batch in stream:
        assert rows([batch])[0] == 0
        break
    assert rows(stream) == list(range(100))
    assert stream.state_dict()["epoch"] == 1


def test_a_foreign_state_is_refused(dataset):
    state = dataset.stream(10).state_dict()
    with pytest.raises(InputError, match="span"):
        dataset.days(1).stream(10).load_state_dict(state)
    with pytest.raises(InputError, match="order 'time', this one has 'uniform'"):
        dataset.stream(10, shuffle=True).load_state_dict(state)
    with pytest.raises(InputError, match="seed"):
        dataset.stream(10, shuffle=True, seed=1).load_state_dict(dataset.stream(10, shuffle=True).state_dict())
    with pytest.raises(InputError, match="keys"):
        dataset.stream(10).load_state_dict({})
    with pytest.raises(InputError, match="no such position"):
        dataset.stream(10).load_state_dict({**state, "position": 101})


@pytest.mark.parametrize("order", ORDERS)
def test_a_subset_reads_only_its_files_in_the_same_order(tmp_path, order):
    dataset = make(tmp_path / "log", DAYS)
    every = list(dataset.stream(8, **ORDERS[order]))
    for path in dataset.path.rglob("f000[124]*"):
        path.unlink()
    stream = dataset.stream(8, fields=["x", "row"], **ORDERS[order])
    assert stream.schema.names == ("row", "x")
    for part, whole in zip(stream, every, strict=True):
        assert torch.equal(part.ids, whole.ids[:, :1])
        assert torch.equal(part.dense, whole.dense[:, :1])
        assert not part.bags


def test_without_marks_missing_is_none(dataset):
    (batch,) = dataset.stream(100, fields=["wide"])
    assert batch.missing is None
    assert batch.ids.shape == (100, 0)
    (batch,) = dataset.days(1, 2).stream(100, fields=["x"])
    assert batch.missing is not None, "marks of other days count: batches must look alike on all days"


def test_unknown_fields_are_refused(dataset):
    with pytest.raises(FieldError, match="no field 'nope'"):
        dataset.stream(10, fields=["nope"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": True},
        {"world": 0},
        {"world": 2, "rank": 2},
        {"rank": -1},
        {"prefetch": -1},
        {"seed": -1},
        {"memory": 0},
        {"device": "toaster"},
    ],
)
def test_wrong_arguments_are_refused(dataset, wrong):
    with pytest.raises(InputError):
        dataset.stream(**{"batch_size": 4, **wrong})


def column_file(dataset: Dataset, name: str) -> Path:
    return dataset.path / "days" / "0002" / f"f{SCHEMA.names.index(name):04d}.npy"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_id_out_of_range_is_found(tmp_path, order, prefetch):
    dataset = make(tmp_path / "log", DAYS)
    path = column_file(dataset, "tiny")
    data = bytearray(path.read_bytes())
    data[-1] = 200
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"'day 2': field 'tiny' has id 200, but its cardinality is 5"):
        list(Dataset(dataset.path).stream(10, prefetch=prefetch, **ORDERS[order]))
    assert not [thread for thread in threading.enumerate() if thread.name == "lpfs-prefetch"]


def test_an_id_out_of_range_in_a_bag_is_found(tmp_path):
    dataset = make(tmp_path / "log", DAYS)
    path = column_file(dataset, "bag")
    data = bytearray(path.read_bytes())
    data[-1] = 50
    path.write_bytes(data)
    with pytest.raises(DataError, match="field 'bag' has id 50"):
        list(dataset.stream(10))


def test_files_that_vanish_or_shrink_are_errors(tmp_path):
    dataset = make(tmp_path / "log", DAYS)
    path = column_file(dataset, "x")
    os.truncate(path, 150)
    with pytest.raises(DataError, match="ends early"):
        list(dataset.stream(10))
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(dataset.stream(10))


def test_offsets_that_lie_are_errors(tmp_path):
    dataset = make(tmp_path / "log", (3,))
    path = dataset.path / "days" / "0000" / "f0001.offsets.npy"
    data = bytearray(path.read_bytes())
    data[-8:] = (10**12).to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged"):
        list(dataset.stream(10))


def test_one_row_and_many_ranks(tmp_path):
    dataset = make(tmp_path / "log", (1,))
    sizes = [[len(batch) for batch in dataset.stream(4, world=3, rank=rank)] for rank in range(3)]
    assert sorted(sizes) == [[0], [0], [1]]
    for order in ORDERS.values():
        assert rows(dataset.stream(4, **order)) == [0]


def test_a_dataset_without_numbers_or_ids(tmp_path):
    schema = Schema((Field("only", "numeric", dim=2),), label="y")
    with DatasetWriter(tmp_path / "log", schema, fingerprint="1") as writer:
        writer.day("d").append(dense={"only": np.ones((3, 2))}, labels={"y": np.zeros(3)})
    (batch,) = Dataset(tmp_path / "log").stream(5)
    assert (batch.ids.shape, batch.dense.shape, batch.missing, len(batch)) == ((3, 0), (3, 2), None, 3)


def test_batches_move(dataset):
    (batch,) = dataset.stream(100, device="cpu")
    assert same(batch, batch.to("cpu"))
    check(batch)
    meta = batch.to("meta")
    assert meta.ids.device.type == "meta"
    assert meta.bags["bag"][0].device.type == "meta"


def test_bags_fit_embedding_bag(dataset):
    table = torch.nn.EmbeddingBag(50, 2, mode="sum")
    for batch in dataset.stream(9):
        assert table(*batch.bags["bag"]).shape == (len(batch), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_is_asked_for_in_vain(dataset):
    with pytest.raises(InputError, match="finds no CUDA"):
        dataset.stream(4, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("order", ORDERS)
def test_batches_on_cuda_equal_those_on_the_cpu(dataset, order):
    on_gpu = dataset.stream(9, device="cuda", **ORDERS[order])
    for there, here in zip(on_gpu, dataset.stream(9, **ORDERS[order]), strict=True):
        assert there.ids.device.type == "cuda"
        assert same(there.to("cpu"), here)
    (batch,) = dataset.stream(100)
    assert batch.pin_memory().ids.is_pinned()


def test_the_window_keeps_neighbours_together_only_when_it_must(tmp_path):
    dataset = make(tmp_path / "log", (3000,), chunk=1000)
    seen = rows(dataset.stream(100, shuffle=True, memory=40_000))
    uniform = rows(dataset.stream(100, shuffle=True))
    assert sorted(seen) == sorted(uniform) == list(range(3000))
    assert dataset.stream(100, shuffle=True, memory=40_000).order == "windowed"
