"""Rows are encoded with the hash table and the memory as without them, whatever came before, and row by row."""

from __future__ import annotations

import polars as pl
import pytest
import torch

from lpfs.data.prepare import prepare
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import InputError
from tests.helpers.bundles import prepare_dataset, raw_table

ROW = {"text": "w1", "code": 3, "price": 2.5, "age": 40.0, "tags": ["w1", "w2"]}


def with_lookup(like):
    encoder = RawRowEncoder(like)
    encoder.build_lookup()
    return encoder


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return prepare_dataset(tmp_path_factory.mktemp("rows") / "data")


@pytest.fixture
def encoder(dataset):
    return with_lookup(dataset)


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
        assert_same(encoder.encode(rows).batch, expected)
    assert_same(encoder.encode(table).batch, expected)
    for number, row in enumerate(rows[:20]):
        assert torch.equal(encoder.encode([row]).batch.ids[0], expected.ids[number])


def test_a_row_does_not_depend_on_its_neighbours(encoder):
    rows = [{**ROW, "code": value, "price": value} for value in (1, 1.0, 7, 2.0)]
    alone = [with_lookup(encoder.like).encode([row]).batch for row in rows]
    for fresh in (encoder, encoder):
        together = fresh.encode(rows).batch
        assert torch.equal(together.ids, torch.cat([batch.ids for batch in alone]))
        assert torch.equal(together.dense, torch.cat([batch.dense for batch in alone]))
    for value in (1, True, 1.5):
        with pytest.raises(InputError, match="row 1, field 'text': .* held String in training"):
            encoder.encode([ROW, {**ROW, "text": value}]).require_all("rows")


def test_refused_rows_are_named_with_their_field_and_the_others_are_remembered(encoder):
    rows = [ROW, {**ROW, "price": "cheap"}, {**ROW, "tags": [["x"]]}, {"text": "w1"}, 7]
    for _ in range(2):
        encoded = encoder.encode(rows)
        named = [(row.row, row.field) for row in encoded.refused]
        assert named == [(1, "price"), (2, "tags"), (3, "code"), (4, "")]
        assert encoded.accepted.tolist() == [0]
    assert "'cheap' is not a number" in encoded.refused[0].reason
    assert len(encoder.encode([ROW]).batch) == 1


def test_unseen_values_are_counted_and_other_fields_ignored(encoder):
    rows = [{**ROW, "text": "never", "tags": ["w1", "never", "nor this"], "other": object()}]
    assert encoder.encode(rows).unseen == {"text": 1, "tags": 2}


def test_an_absent_field_is_null_only_where_it_may_be(encoder):
    row = {name: value for name, value in ROW.items() if name != "age"}
    for rows in ([row], pl.DataFrame([row])):
        [refused] = encoder.encode(rows).refused
        assert str(refused).startswith("row 0, field 'age': the field is absent")
        encoded = encoder.encode(rows, optional={"age", "text"})
        assert not encoded.refused
        assert encoded.absent == {"age"}
        assert_same(encoded.batch, encoder.encode([{**row, "age": None}]).batch)


def test_the_memory_is_bounded(dataset):
    encoder = with_lookup(dataset)
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
    encoder = with_lookup(tmp_path / "data")
    assert_same(encoder.encode(rows).batch, expected)
    for number, row in enumerate(rows):
        assert torch.equal(encoder.encode([row]).batch.ids[0], expected.ids[number])
    assert_same(encoder.encode([{**rows[0], "text": "\0 null"}]).batch, encoder.encode([rows[4]]).batch)


@pytest.mark.parametrize("value", [float("inf"), 10**400, 2**63, -0.0, 1e-300, 3, True, None, "2.5", "w1"])
def test_numbers_and_integers_are_those_of_the_stream(dataset, encoder, value):
    for name in ("price", "age", "code"):
        row = {**ROW, name: value}
        expected, encoded = RawRowEncoder(dataset).encode([row]), encoder.encode([row])
        assert encoded.refused == expected.refused
        assert_same(encoded.batch, expected.batch)


def test_negative_integers_have_ids_of_their_own(tmp_path):
    table = raw_table().with_columns(code=-pl.col("code"))  # Python's hashes of -1 and -2 are equal
    fields = {"code": "categorical", "price": "numeric", "tags": "multi"}
    prepare(table, tmp_path / "data", label="click", fields=fields, min_count=1, quiet=True)
    raw, rows = RawRowEncoder(tmp_path / "data"), [{**ROW, "code": code} for code in (-1, -2, 0, None, 5)]
    assert_same(with_lookup(tmp_path / "data").encode(rows).batch, raw.encode(rows).batch)


@pytest.mark.parametrize(
    "label", [[0, 1, 1, 0], [0.0, 1.0, 1.0, 0.0], [False, True, True, False], ["0", "1", "yes", "no"]]
)
def test_labels_are_read_alike(dataset, encoder, label):
    rows = [{**row, "click": value} for row, value in zip(raw_table(7).head(4).to_dicts(), label, strict=True)]
    encoded = encoder.encode(rows, labelled=True)
    assert encoded.batch.labels[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]
    rows[2]["click"] = 7
    for expected in (RawRowEncoder(dataset).encode(rows, labelled=True), encoder.encode(rows, labelled=True)):
        assert [(row.row, row.field) for row in expected.refused] == [(2, "click")]


def test_hashed_values_vectors_and_the_order_of_fields(tmp_path):
    other = raw_table(1)  # equal columns would be dropped
    table = raw_table().with_columns(
        other["text"].alias("hashed"),
        other["code"].alias("number"),
        other["price"].alias("first"),
        vector=pl.concat_list(pl.col("age"), pl.col("age") / 2),
    )
    names = ["first", "hashed", "vector", "text", "price", "number", "age", "tags", "code", "click"]
    fields = {
        **{"hashed": {"kind": "categorical", "hash": 50}, "number": {"kind": "categorical", "hash": 5}},
        **{"first": "numeric", "vector": "numeric", "code": "categorical", "price": "numeric", "tags": "multi"},
        "age": {"kind": "numeric", "bins": 8},
    }
    prepare(table.select(names), tmp_path / "data", label="click", fields=fields, min_count=1, quiet=True)
    rows, raw, encoder = table.to_dicts(), RawRowEncoder(tmp_path / "data"), with_lookup(tmp_path / "data")
    for chosen in (raw.schema.names, ["text", "code"], ["vector", "text"], ["first", "price"], ["age"], ["tags"]):
        expected = raw.subset(chosen).encode(rows, labelled=True).batch
        part = encoder.subset(chosen)
        for _ in range(2):
            batch = part.encode(rows, labelled=True).batch
            assert_same(batch, expected)
            assert torch.equal(batch.labels, expected.labels)
            assert (batch.ids.dtype, batch.dense.dtype) == (expected.ids.dtype, expected.dense.dtype)
