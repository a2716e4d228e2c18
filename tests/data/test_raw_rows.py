"""RawRowEncoder: the same ids as prepare, refused rows, counts of unseen values, subsets, saved folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from lpfs.data import Dataset
from lpfs.data.batch import Batch
from lpfs.data.prepare import prepare
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.errors import InputError

ROWS = 300


def raw_table(seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    words = [f"w{n}" for n in range(12)]
    return pl.DataFrame(
        {
            "day": np.repeat([1, 2, 3], ROWS // 3),
            "click": rng.integers(0, 2, ROWS),
            "text": rng.choice(words, ROWS),
            "code": rng.integers(0, 9, ROWS),
            "price": np.round(rng.lognormal(size=ROWS), 3),
            "age": rng.integers(18, 80, ROWS).astype(float),
            "hashed": rng.choice(words, ROWS),
            "tags": [list(rng.choice(words, rng.integers(0, 4), replace=False)) for _ in range(ROWS)],
        }
    ).with_columns(
        text=pl.when(pl.int_range(ROWS) % 17 == 0).then(None).otherwise("text"),
        price=pl.when(pl.int_range(ROWS) % 13 == 0).then(None).otherwise("price"),
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("online") / "data"
    fields = {
        "code": {"kind": "categorical"},
        "price": {"kind": "numeric"},
        "age": {"kind": "numeric", "bins": 8},
        "hashed": {"kind": "categorical", "hash": 50},
        "tags": {"kind": "multi"},
    }
    prepare(raw_table(), out, label="click", time="day", fields=fields, train=2)
    return Dataset(out)


def assert_equal(left: Batch, right: Batch) -> None:
    assert torch.equal(left.ids, right.ids)
    assert torch.equal(left.dense, right.dense)
    assert torch.equal(left.labels, right.labels)
    assert left.bags.keys() == right.bags.keys()
    for name, (values, offsets) in left.bags.items():
        assert torch.equal(values, right.bags[name][0])
        assert torch.equal(offsets, right.bags[name][1])


@pytest.mark.parametrize("as_rows", [True, False])
def test_same_batch_as_prepare(dataset: Dataset, as_rows: bool) -> None:
    table = raw_table()
    encoded = RawRowEncoder(dataset).encode(table.to_dicts() if as_rows else table, labelled=True)
    [expected] = dataset.stream(ROWS)
    assert_equal(encoded.batch, expected)
    assert not encoded.refused
    assert encoded.accepted.tolist() == list(range(ROWS))


def test_one_row_at_a_time_equals_all(dataset: Dataset) -> None:
    encoder, rows = RawRowEncoder(dataset), raw_table(1).head(20).to_dicts()
    together = encoder.encode(rows, labelled=True).batch
    for index, row in enumerate(rows):
        assert torch.equal(encoder.encode([row], labelled=True).batch.ids[0], together.ids[index])


def test_refused_rows_are_named_and_the_others_encoded(dataset: Dataset) -> None:
    encoder, rows = RawRowEncoder(dataset), raw_table().head(8).to_dicts()
    expected = encoder.encode([rows[0], rows[7]], labelled=True).batch
    rows[1]["price"] = "cheap"
    rows[2]["click"] = 7
    del rows[3]["text"]
    rows[4]["code"] = {"nested": 1}
    rows[5]["tags"] = [["deep"]]
    rows[6] = 5  # type: ignore[call-overload]
    encoded = encoder.encode(rows, labelled=True)
    assert [(item.row, item.field) for item in encoded.refused] == [
        (1, "price"), (2, "click"), (3, "text"), (4, "code"), (5, "tags"), (6, "")
    ]  # fmt: skip
    assert encoded.accepted.tolist() == [0, 7]
    assert_equal(encoded.batch, expected)
    assert "'cheap' is not a number" in encoded.refused[0].reason


def test_all_rows_refused_gives_an_empty_batch(dataset: Dataset) -> None:
    rows = [{**row, "price": "x"} for row in raw_table().head(3).to_dicts()]
    encoded = RawRowEncoder(dataset).encode(rows)
    assert len(encoded.batch) == 0
    assert len(encoded.refused) == 3


def test_unseen_values_are_counted(dataset: Dataset) -> None:
    rows = raw_table().head(4).to_dicts()
    rows[0]["text"] = rows[1]["text"] = "never seen"
    rows[2]["code"] = 10**30
    rows[3]["tags"] = ["new", "newer", "w1"]
    assert RawRowEncoder(dataset).encode(rows).unseen == {"text": 2, "code": 1, "tags": 2}


def test_mixed_types_read_as_text_read_alike(dataset: Dataset) -> None:
    rows = raw_table().head(6).to_dicts()
    expected = RawRowEncoder(dataset).encode(rows).batch
    rows[1]["code"] = str(rows[1]["code"])
    rows[2]["price"] = str(rows[2]["price"])
    rows[3]["age"] = int(rows[3]["age"])
    assert_equal(RawRowEncoder(dataset).encode(rows).batch, expected)


def test_a_row_does_not_depend_on_the_others(dataset: Dataset) -> None:
    encoder, row = RawRowEncoder(dataset), raw_table().row(1, named=True)
    rows = [
        {**row, "code": code, "tags": tags, "price": price}
        for code in (1, "1", None, 1.0)
        for tags in (["w1"], None, [], "w1", ["w1", 3])
        for price in (1, 2.5, "3", None)
    ]
    together, alone = encoder.encode(rows), [encoder.encode([row]) for row in rows]
    assert [item.row for item in together.refused] == [at for at, one in enumerate(alone) if one.refused]
    values, offsets = together.batch.bags["tags"]
    bags = torch.tensor_split(values, offsets[1:].long())
    for number, at in enumerate(together.accepted.tolist()):
        batch = alone[at].batch
        assert torch.equal(batch.ids[0], together.batch.ids[number])
        assert torch.equal(batch.dense[0], together.batch.dense[number])
        assert torch.equal(batch.bags["tags"][0], bags[number])


def test_subset_needs_only_its_columns_and_survives_saving(dataset: Dataset, tmp_path: Path) -> None:
    table, names = raw_table(), ["price", "text", "tags"]
    part = RawRowEncoder(dataset).subset(names)
    assert part.schema.names == ("text", "price", "tags")
    expected = part.encode(table.select(names)).batch
    part.save(tmp_path / "encoder")
    loaded = RawRowEncoder(tmp_path / "encoder")
    assert loaded.schema == part.schema
    assert_equal(loaded.encode(table.select(names)).batch, expected)
    assert_equal(loaded.encode(table.select(names).to_dicts()).batch, expected)
    refused = loaded.encode(table.select("price", "tags")).refused
    assert [(item.row, item.field) for item in refused] == [(row, "text") for row in range(ROWS)]


def test_rows_must_be_a_list(dataset: Dataset) -> None:
    with pytest.raises(InputError, match="must be a list of objects"):
        RawRowEncoder(dataset).encode({"text": "w1"})  # type: ignore[arg-type]
