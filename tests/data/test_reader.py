from itertools import pairwise

from hypothesis import given, strategies as st

from lpfs.data.reader import BatchPlan, ShuffleWindows, rank_range

sizes = st.integers(1, 400)
batches = st.integers(1, 40)
worlds = st.integers(1, 9)


@given(rows=sizes, batch_size=batches, world=worlds)
def test_every_row_goes_to_exactly_one_rank(rows, batch_size, world):
    plan = BatchPlan(rows, batch_size, world)
    spans = [list(plan.spans(rank)) for rank in range(world)]
    assert {len(rank_spans) for rank_spans in spans} == {len(plan)}
    positions = [row for rank_spans in spans for first, stop in rank_spans for row in range(first, stop)]
    assert sorted(positions) == list(range(rows))
    lengths = [stop - first for rank_spans in spans for first, stop in rank_spans]
    assert max(lengths) <= batch_size
    if batch_size > 1 and rows >= world:
        assert min(lengths) >= 1
    for step in zip(*spans, strict=True):
        assert max(stop - first for first, stop in step) - min(stop - first for first, stop in step) <= 1


@given(rows=sizes, batch_size=batches, world=worlds)
def test_with_drop_last_all_batches_are_full(rows, batch_size, world):
    plan = BatchPlan(rows, batch_size, world, drop_last=True)
    spans = [list(plan.spans(rank)) for rank in range(world)]
    assert {len(rank_spans) for rank_spans in spans} == {len(plan)} == {rows // (batch_size * world)}
    assert all(stop - first == batch_size for rank_spans in spans for first, stop in rank_spans)


@given(rows=sizes, batch_size=batches, world=worlds, drop=st.booleans(), data=st.data())
def test_a_pass_continues_from_any_step(rows, batch_size, world, drop, data):
    plan = BatchPlan(rows, batch_size, world, drop)
    bounds = list(plan.bounds())
    cut = data.draw(st.integers(0, len(bounds)))
    start = bounds[cut - 1][1] if cut else 0
    assert list(plan.bounds(start)) == bounds[cut:]


@given(start=st.integers(0, 50), rows=st.integers(0, 50), world=worlds)
def test_rank_ranges_are_adjacent(start, rows, world):
    edges = [rank_range(start, start + rows, rank, world) for rank in range(world)]
    assert edges[0][0] == start
    assert edges[-1][1] == start + rows
    assert all(before[1] == after[0] for before, after in pairwise(edges))


@given(rows=sizes, block=st.integers(1, 50), blocks=st.integers(1, 9), seed=st.integers(0, 5))
def test_windows_contain_every_row_once(rows, block, blocks, seed):
    windows = ShuffleWindows(rows, block, blocks, seed, 0)
    starts = windows.starts()
    ranges = [windows.window(number) for number in range(len(starts) - 1)]
    rows_seen = [row for window in ranges for first, stop in window for row in range(first, stop)]
    assert sorted(rows_seen) == list(range(rows))
    lengths = [sum(stop - first for first, stop in window) for window in ranges]
    assert [after - before for before, after in pairwise(starts)] == lengths
    assert starts[-1] == rows
    for number, length in enumerate(lengths):
        assert sorted(windows.shuffle(number, length).tolist()) == list(range(length))


def test_passes_and_seeds_give_different_orders():
    orders = [ShuffleWindows(1000, 10, 100, seed, epoch).shuffle(0, 1000) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
