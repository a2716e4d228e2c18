import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from lpfs.data import reader as reader_module, stream as stream_module
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store import columns as columns_module
from lpfs.data.store.writer import DatasetWriter
from lpfs.data.stream import Stream, prefetch
from lpfs.errors import DataError, FieldError, InputError
from lpfs.schema import Field, Schema
from tests.helpers.datasets import SCHEMA, make_columns, make_dataset, update_checksums

DAYS = (40, 1, 59)
ORDERS = {"time": {}, "uniform": {"shuffle": True}, "windowed": {"shuffle": True, "memory": 2000}}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("stream") / "log", DAYS)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(stream_module, "CHUNK_BYTES", 1)
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
    """Compare a batch with the values that were written for its rows."""
    for index, row in enumerate(batch.ids[:, 0].tolist()):
        assert batch.ids[index].tolist() == [row, row % 5]
        assert batch.dense[index].tolist() == [0.0 if row % 7 == 3 else row * 0.5, row, row + 1, row + 2]
        assert batch.missing is not None
        assert batch.missing[index].tolist() == [row % 7 == 3, False, False, False]
        assert batch.labels[index].tolist() == [row % 2, row % 3 / 2]
        values, offsets = batch.bags["bag"]
        ends = [*offsets.tolist(), len(values)]
        bag, _ = make_columns(row, row + 1)["bags"]["bag"]
        assert values[ends[index] : ends[index + 1]].tolist() == bag.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("batch_size", [1, 7, 100, 1000])
def test_batches_contain_the_written_values(dataset, order, batch_size):
    stream = dataset.stream(batch_size, **ORDERS[order])
    assert stream.order == order
    batches = list(stream)
    assert len(batches) == len(stream) == -(-100 // batch_size)
    assert [len(batch) for batch in batches[:-1]] == [batch_size] * (len(batches) - 1)
    for batch in batches:
        assert (batch.ids.dtype, batch.dense.dtype, batch.labels.dtype) == (torch.int32, torch.float32, torch.float32)
        assert batch.ids.is_contiguous()
        assert batch.dense.is_contiguous()
        check(batch)
    assert sorted(rows(batches)) == list(range(100))
    assert (rows(batches) == list(range(100))) == (order == "time")


@pytest.mark.parametrize("order", ["uniform", "windowed"])
def test_orders_differ_by_pass_and_seed_and_are_reproducible(dataset, order):
    def passes(seed: int) -> list[list[int]]:
        stream = dataset.stream(16, seed=seed, **ORDERS[order])
        return [rows(stream), rows(stream)]

    first, second = passes(0)
    assert first != second
    assert passes(0) == [first, second]
    assert passes(1)[0] not in (first, second)


@settings(deadline=None, max_examples=60)
@given(
    order=st.sampled_from(list(ORDERS)), batch_size=st.integers(1, 40), world=st.integers(1, 6), drop_last=st.booleans()
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
def test_a_resumed_stream_is_bitwise_identical(dataset, order, batch_size, world, prefetch, data):
    def new_stream() -> Stream:
        return dataset.stream(batch_size, rank=world - 1, world=world, prefetch=prefetch, seed=3, **ORDERS[order])

    whole = new_stream()
    expected = [*whole, *whole]
    cut = data.draw(st.integers(0, len(expected)))
    stopped, count = new_stream(), 0
    state = stopped.state_dict()
    for _ in range(2):
        for _ in stopped:
            if count == cut:
                break
            count += 1
            state = stopped.state_dict()
        if count == cut:
            break
    resumed = new_stream()
    resumed.load_state_dict(state)
    assert resumed.state_dict()["epoch"] in (state["epoch"], state["epoch"] + 1)
    remaining = list(resumed)
    if count + len(remaining) < len(expected):
        remaining += list(resumed)
    assert len(remaining) >= len(expected) - cut
    for actual, batch in zip(remaining, expected[cut:], strict=False):
        assert same(actual, batch)


@pytest.mark.parametrize("order", ORDERS)
def test_resuming_with_other_ranks_and_batch_sizes_loses_no_row(dataset, order):
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
def test_shared_batches_equal_those_of_one_process(dataset, order, batch_size, world):
    """The concatenated parts are the batches of one process, except that the last two may be split differently."""
    plain = dataset.stream(batch_size, seed=3, **ORDERS[order])
    first = next(iter(plain))
    plain.load_state_dict({**plain.state_dict(), "position": 2 * len(first) if len(first) < 50 else 0})
    shares = [list(plain.share(rank, world)) for rank in range(world)]
    wholes = list(plain)
    assert {len(share) for share in shares} == {len(wholes)}
    for number, whole in enumerate(wholes[:-2]):
        parts = [share[number] for share in shares]
        assert rows(parts) == rows([whole])
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    together = [part for parts in zip(*shares, strict=True) for part in parts]
    assert rows(together) == rows(wholes)
    assert all(len(part) > 0 for part in together)
    for part in together:
        check(part)


def test_sharing_too_few_rows_raises(dataset):
    with pytest.raises(InputError, match="batch_size 5 with 100 rows is too small for 3 ranks.*larger batch_size"):
        dataset.stream(5).share(0, 3)


@pytest.mark.parametrize("batch_size", [7, 30, 100])
def test_a_slice_contains_the_same_batches_and_keeps_the_position(dataset, batch_size):
    stream = dataset.part(3, 90).stream(batch_size, fields=SCHEMA.names)
    wholes = list(stream)
    for first, stop in ((0, len(wholes)), (1, 3), (2, 2), (len(wholes) - 1, len(wholes))):
        parts = list(stream.slice(first, stop))
        assert len(parts) == len(wholes[first:stop])
        assert all(same(a, b) for a, b in zip(parts, wholes[first:stop], strict=True))
    assert stream.state_dict()["position"] == 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_that_are_not_needed_are_not_kept_in_memory(dataset, monkeypatch, prefetch):
    """The batches are the same, also beyond the number of rows that was announced, and after a resume."""
    monkeypatch.setattr(reader_module, "READ_ROWS", 17)
    options = {"shuffle": True, "seed": 3, "prefetch": prefetch}
    usual, limited = dataset.stream(5, **options), dataset.stream(5, **options, max_rows=20)
    first = list(usual)
    batches = iter(limited)
    assert all(same(batch, next(batches)) for batch in first[:4])
    assert limited._resident is None
    assert len(limited._partial.resident) == 20 + (prefetch + 2) * 13 < len(usual._resident) == dataset.rows
    position = limited.state_dict()
    assert all(same(batch, other) for batch, other in zip(first[4:], batches, strict=True))
    resumed = dataset.stream(5, **options, max_rows=20)
    resumed.load_state_dict(position)
    assert all(same(batch, other) for batch, other in zip(first[4:], resumed, strict=True))
    assert all(same(batch, other) for batch, other in zip(usual, limited, strict=True))  # the second pass
    with pytest.raises(InputError, match="max_rows"):
        dataset.stream(5, max_rows=0)


def test_a_pass_left_early_starts_over(dataset):
    stream = dataset.stream(10)
    for batch in stream:
        assert rows([batch])[0] == 0
        break
    assert rows(stream) == list(range(100))
    assert stream.state_dict()["epoch"] == 1


def test_the_state_of_another_stream_raises(dataset):
    state = dataset.stream(10).state_dict()
    with pytest.raises(InputError, match="span"):
        dataset.days(1).stream(10).load_state_dict(state)
    with pytest.raises(InputError, match="order 'time', this one has 'uniform'"):
        dataset.stream(10, shuffle=True).load_state_dict(state)
    with pytest.raises(InputError, match="seed"):
        dataset.stream(10, shuffle=True, seed=1).load_state_dict(dataset.stream(10, shuffle=True).state_dict())
    with pytest.raises(InputError, match="keys"):
        dataset.stream(10).load_state_dict({})
    with pytest.raises(InputError, match="invalid position.*row 101 of 100"):
        dataset.stream(10).load_state_dict({**state, "position": 101})


@pytest.mark.parametrize("order", ORDERS)
def test_a_subset_of_fields_reads_only_its_files_in_the_same_order(tmp_path, order):
    dataset = make_dataset(tmp_path / "log", DAYS)
    every = list(dataset.stream(8, **ORDERS[order]))
    for path in dataset.path.rglob("f000[124]*"):
        path.unlink()
    stream = dataset.stream(8, fields=["x", "row"], **ORDERS[order])
    assert stream.schema.names == ("row", "x")
    for part, whole in zip(stream, every, strict=True):
        assert torch.equal(part.ids, whole.ids[:, :1])
        assert torch.equal(part.dense, whole.dense[:, :1])
        assert not part.bags


def test_missing_is_none_without_missing_numbers(dataset):
    (batch,) = dataset.stream(100, fields=["wide"])
    assert batch.missing is None
    assert batch.ids.shape == (100, 0)
    (batch,) = dataset.days(1, 2).stream(100, fields=["x"])
    assert batch.missing is not None, "all days have the mask if one day needs it"


def test_unknown_fields_raise(dataset):
    with pytest.raises(FieldError, match="no field 'nope'"):
        dataset.stream(10, fields=["nope"])


@pytest.mark.parametrize(
    "arguments",
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
def test_invalid_arguments_raise(dataset, arguments):
    with pytest.raises(InputError):
        dataset.stream(**{"batch_size": 4, **arguments})


def column_file(dataset: Dataset, name: str) -> Path:
    return dataset.path / "days" / "0002" / f"f{SCHEMA.index(name):04d}.npy"


@pytest.fixture
def one_file_per_column(monkeypatch):
    monkeypatch.setattr(columns_module, "PACKED_BYTES", 0)


@pytest.mark.usefixtures("one_file_per_column")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_id_out_of_range_raises(tmp_path, order, prefetch):
    dataset = make_dataset(tmp_path / "log", DAYS)
    path = column_file(dataset, "tiny")
    data = bytearray(path.read_bytes())
    data[-1] = 200
    path.write_bytes(data)
    update_checksums(dataset.path)
    with pytest.raises(DataError, match=r"'day 2': field 'tiny' has id 200, but its cardinality is 5"):
        list(Dataset(dataset.path).stream(10, prefetch=prefetch, **ORDERS[order]))
    assert not prefetch_threads()


@pytest.mark.usefixtures("one_file_per_column")
def test_an_id_out_of_range_in_a_bag_raises(tmp_path):
    dataset = make_dataset(tmp_path / "log", DAYS)
    path = column_file(dataset, "bag")
    data = bytearray(path.read_bytes())
    data[-1] = 50
    path.write_bytes(data)
    update_checksums(dataset.path)
    with pytest.raises(DataError, match="field 'bag' has id 50"):
        list(Dataset(dataset.path).stream(10))


@pytest.mark.usefixtures("one_file_per_column")
def test_truncated_and_deleted_files_raise(tmp_path):
    dataset = make_dataset(tmp_path / "log", DAYS)
    path = column_file(dataset, "x")
    os.truncate(path, 150)
    with pytest.raises(DataError, match="ends early"):
        list(dataset.stream(10))
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(dataset.stream(10))


@pytest.mark.usefixtures("one_file_per_column")
def test_invalid_offsets_raise(tmp_path):
    dataset = make_dataset(tmp_path / "log", (3,))
    path = dataset.path / "days" / "0000" / "f0001.offsets.npy"
    data = bytearray(path.read_bytes())
    data[-8:] = (10**12).to_bytes(8, "little")
    path.write_bytes(data)
    update_checksums(dataset.path)
    with pytest.raises(DataError, match="damaged: items"):
        list(Dataset(dataset.path).stream(10))


def test_one_row_and_many_ranks(tmp_path):
    dataset = make_dataset(tmp_path / "log", (1,))
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


def test_batches_can_be_moved(dataset):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
def test_cuda_without_a_gpu_raises(dataset):
    with pytest.raises(InputError, match="finds no CUDA"):
        dataset.stream(4, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("order", ORDERS)
def test_batches_on_cuda_equal_those_on_the_cpu(dataset, order):
    on_gpu = dataset.stream(9, device="cuda", **ORDERS[order])
    for cuda, cpu in zip(on_gpu, dataset.stream(9, **ORDERS[order]), strict=True):
        assert cuda.ids.device.type == "cuda"
        assert same(cuda.to("cpu"), cpu)
    (batch,) = dataset.stream(100)
    assert batch.pin_memory().ids.is_pinned()


def test_the_shuffle_is_windowed_only_if_the_rows_do_not_fit(tmp_path):
    dataset = make_dataset(tmp_path / "log", (3000,), chunk=1000)
    seen = rows(dataset.stream(100, shuffle=True, memory=40_000))
    uniform = rows(dataset.stream(100, shuffle=True))
    assert sorted(seen) == sorted(uniform) == list(range(3000))
    assert dataset.stream(100, shuffle=True, memory=40_000).order == "windowed"


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lpfs-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 3, 100])
def test_prefetch_yields_all_items_in_order(depth):
    assert list(prefetch(range(50), depth)) == list(range(50))
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetch_raises_an_error_after_the_items_before_it(depth):
    def items():
        yield 1
        yield 2
        raise KeyError("broken")

    received = []
    with pytest.raises(KeyError, match="broken"):
        received.extend(prefetch(items(), depth))
    assert received == [1, 2]
    assert not prefetch_threads()


def test_prefetch_ends_its_thread_when_the_consumer_stops():
    produced = []

    def endless():
        while True:
            produced.append(1)
            yield 1

    for item in prefetch(endless(), 2):
        assert item == 1
        break
    assert not prefetch_threads()
    count = len(produced)
    time.sleep(0.01)
    assert len(produced) == count <= 5


def test_prefetch_ends_its_thread_when_it_is_deleted():
    items = prefetch(iter(range(1000)), 2)
    next(items)
    assert prefetch_threads()
    del items
    assert not prefetch_threads()


def test_prefetch_runs_ahead():
    produced: list[int] = []

    def items():
        for number in range(10):
            produced.append(number)
            yield number

    ahead = prefetch(items(), 3)
    next(ahead)
    deadline = time.monotonic() + 5
    while len(produced) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(produced) >= 4
    ahead.close()
