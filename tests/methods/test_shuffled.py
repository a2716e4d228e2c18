"""A field that is shuffled keeps its values and loses its meaning; the others do not move."""

from __future__ import annotations

import torch
from clicks import MIXED, batch_of
from hypothesis import given
from hypothesis import strategies as st

from lpfs.methods.shuffled import shuffled

BATCH = batch_of(MIXED, rows=9)


def rows_of(batch, field):
    """What a batch holds of a field, a value a row."""
    ids = [each.name for each in MIXED if each.kind == "categorical"]
    if field.kind == "categorical":
        return batch.ids[:, ids.index(field.name)].tolist()
    if field.kind == "multi":
        values, offsets = batch.bags[field.name]
        ends = [*offsets.tolist()[1:], len(values)]
        return [values[first:end].tolist() for first, end in zip(offsets.tolist(), ends, strict=True)]
    numbers = [each for each in MIXED if each.kind == "numeric"]
    first = sum(each.dim for each in numbers[: numbers.index(field)])
    own = slice(first, first + field.dim)
    return list(zip(batch.dense[:, own].tolist(), batch.missing[:, own].tolist(), strict=True))


@given(st.sets(st.sampled_from(MIXED.names)), st.permutations(range(9)))
def test_only_the_named_fields_move_and_they_move_whole(names, order):
    before = {each.name: rows_of(BATCH, each) for each in MIXED}
    found = shuffled(BATCH, MIXED, sorted(names), torch.tensor(order))
    for each in MIXED:
        expected = [before[each.name][row] for row in order] if each.name in names else before[each.name]
        assert rows_of(found, each) == expected
    assert found.labels is BATCH.labels
    assert {each.name: rows_of(BATCH, each) for each in MIXED} == before  # the batch itself is left alone


def test_numbers_without_a_mask_of_missing_ones():
    batch = batch_of(MIXED, rows=4, missing=False)
    found = shuffled(batch, MIXED, ["three"], torch.tensor([3, 2, 1, 0]))
    assert found.missing is None
    assert torch.equal(found.dense[:, 1:4], batch.dense[[3, 2, 1, 0], 1:4])
    assert torch.equal(found.dense[:, [0, 4]], batch.dense[:, [0, 4]])
