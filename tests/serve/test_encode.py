"""Requests become the same batches as the rows of a stream, whatever was asked before, and row by row."""

from __future__ import annotations

import polars as pl
import pytest
import torch

from lpfs.data.prepare import prepare
from lpfs.data.raw_rows import RawRowEncoder
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
    assert_same(encoder.encode(table)[0], expected)
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
    assert_same(encoder.encode(frame, {"age"})[0], batch)
    with pytest.raises(RefusedRowsError, match="field 'age'"):
        encoder.encode(frame)


def test_the_memory_is_bounded(dataset):
    encoder = RequestEncoder(RawRowEncoder(dataset))
    encoder.memo_limit = 5
    for number in range(23):
        encoder.encode([{**ROW, "tags": [f"new {number}"]}, {**ROW, "tags": ["long" * 100]}])
        assert len(encoder.memos["tags"]) <= 5
    assert all(len(key[0]) < 100 for key in encoder.memos["tags"])


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
    assert_same(encoder.encode([{**rows[0], "text": "\0 null"}])[0], encoder.encode([rows[4]])[0])


@pytest.mark.parametrize("value", [float("inf"), 10**400, 2**63, -0.0, 1e-300, 3, True, None, "2.5", "w1"])
def test_numbers_and_integers_are_those_of_the_stream(encoder, value):
    for name in ("price", "age", "code"):
        row = {**ROW, name: value}
        expected = encoder.encoder.encode([row])
        if expected.refused:
            with pytest.raises(RefusedRowsError, match=name):
                encoder.encode([row])
        else:
            assert_same(encoder.encode([row])[0], expected.batch)


def test_negative_integers_have_ids_of_their_own(tmp_path):
    table = raw_table().with_columns(code=-pl.col("code"))  # Python's hashes of -1 and -2 are equal
    fields = {"code": "categorical", "price": "numeric", "tags": "multi"}
    prepare(table, tmp_path / "data", label="click", fields=fields, min_count=1, quiet=True)
    raw, rows = RawRowEncoder(tmp_path / "data"), [{**ROW, "code": code} for code in (-1, -2, 0, None, 5)]
    assert_same(RequestEncoder(raw).encode(rows)[0], raw.encode(rows).batch)
