"""Requests become the same batches as the rows of a stream, whatever was asked before, and row by row."""

from __future__ import annotations

import polars as pl
import pytest
import torch

from lpfs.data.prepare import prepare
from lpfs.online.rows import RawRowEncoder
from lpfs.serve.encode import RefusedRowsError, RequestEncoder
from tests.helpers.bundles import raw_table

ROW = {"text": "w1", "code": 3, "price": 2.5, "age": 40.0, "tags": ["w1", "w2"]}


@pytest.fixture
def encoder(dataset):
    return RequestEncoder(RawRowEncoder(dataset))


def assert_same(batch, expected):
    assert torch.equal(batch.ids, expected.ids)
    assert torch.equal(batch.dense, expected.dense)
    missing = torch.zeros_like(batch.dense, dtype=torch.bool)
    assert torch.equal(*(missing if part.missing is None else part.missing for part in (batch, expected)))
    for name, (values, offsets) in expected.bags.items():
        assert torch.equal(batch.bags[name][0], values)
        assert torch.equal(batch.bags[name][1], offsets)


def test_the_batch_is_that_of_the_stream_at_first_and_from_memory(dataset, encoder):
    table = raw_table(5).drop("click")
    rows = table.to_dicts()
    expected = RawRowEncoder(dataset).encode(rows).batch
    for _ in range(2):
        assert_same(encoder.encode(rows)[0], expected)
    assert_same(encoder.encode_frame(table)[0], expected)
    for number, row in enumerate(rows[:20]):
        assert torch.equal(encoder.encode([row])[0].ids[0], expected.ids[number])


def test_a_row_does_not_depend_on_its_neighbours(encoder):
    rows = [{**ROW, "code": value, "price": value} for value in (1, 1.0, 7, 2.0)]
    alone = [RequestEncoder(encoder.encoder).encode([row])[0] for row in rows]
    for fresh in (encoder, encoder):
        together = fresh.encode(rows)[0]
        assert torch.equal(together.ids, torch.cat([batch.ids for batch in alone]))
        assert torch.equal(together.dense, torch.cat([batch.dense for batch in alone]))
    for value in (1, True, 1.5):
        with pytest.raises(RefusedRowsError, match="row 1, field 'text': .* held String in training"):
            encoder.encode([ROW, {**ROW, "text": value}])


def test_refused_rows_are_named_with_their_field_and_the_others_are_remembered(encoder):
    rows = [ROW, {**ROW, "price": "cheap"}, {**ROW, "tags": [["x"]]}, {"text": "w1"}, 7]
    for _ in range(2):
        with pytest.raises(RefusedRowsError) as caught:
            encoder.encode(rows)
        named = [(row.row, row.field) for row in caught.value.refused]
        assert named == [(1, "price"), (2, "tags"), (3, "code"), (4, "")]
    assert "'cheap' is not a number" in caught.value.refused[0].reason
    assert len(encoder.encode([ROW])[0]) == 1


def test_unseen_values_are_counted_and_other_fields_ignored(encoder):
    _, unseen, _ = encoder.encode([{**ROW, "text": "never", "tags": ["w1", "never", "nor this"], "other": object()}])
    assert unseen == 3


def test_an_absent_field_is_null_only_where_it_may_be(encoder):
    row = {name: value for name, value in ROW.items() if name != "age"}
    with pytest.raises(RefusedRowsError, match="field 'age': the field is absent"):
        encoder.encode([row])
    batch, _, absent = encoder.encode([row], {"age"})
    assert absent == {"age"}
    assert_same(batch, encoder.encode([{**row, "age": None}])[0])
    frame = pl.DataFrame([row])
    assert_same(encoder.encode_frame(frame, {"age"})[0], batch)
    with pytest.raises(RefusedRowsError, match="field 'age'"):
        encoder.encode_frame(frame)


def test_the_memory_is_bounded(dataset):
    encoder = RequestEncoder(RawRowEncoder(dataset))
    memo = next(memo for memo in encoder._bags if memo.name == "tags")
    memo._limit = 5
    for number in range(23):
        encoder.encode([{**ROW, "tags": [f"new {number}"]}, {**ROW, "tags": ["long" * 100]}])
        assert len(memo._codes) <= 5
    assert all(len(key[0]) < 100 for key in memo._codes)


def test_marks_of_missing_values(tmp_path):
    table = raw_table()
    fields = {"code": "categorical", "price": "numeric", "tags": "multi"}
    prepare(table, tmp_path / "data", label="click", fields=fields, min_count=1, missing=["w3", "-"], quiet=True)
    raw = RawRowEncoder(tmp_path / "data")
    rows = [{**ROW, "text": text} for text in ("w1", "w3", "-", None, "unseen", "")]
    expected = raw.encode(rows).batch
    encoder = RequestEncoder(raw)
    assert_same(encoder.encode(rows)[0], expected)
    for number, row in enumerate(rows):
        assert torch.equal(encoder.encode([row])[0].ids[0], expected.ids[number])
    assert_same(encoder.encode([{**rows[0], "text": "\0 null"}])[0], encoder.encode([rows[3]])[0])
