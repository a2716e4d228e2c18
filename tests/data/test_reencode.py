"""New rows, encoded exactly as those of a Dataset; an error names the columns that do not fit."""

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.reencode import RowEncoder, encode_rows
from lpfs.data.simulate import simulate
from lpfs.errors import DataError, FieldError, InputError

FIELDS = {
    "ad": "categorical",
    "code": "categorical",
    "rate": "categorical",
    "hex": {"kind": "categorical", "hexadecimal": True},
    "text_hash": {"kind": "categorical", "hash": 7},
    "number_hash": {"kind": "categorical", "hash": 7},
    "flag": "categorical",
    "price": "numeric",
    "plain": {"kind": "numeric", "transform": "none"},
    "binned": {"kind": "numeric", "bins": 4},
    "vector": {"kind": "numeric", "width": 2, "transform": "none"},
    "bag": "multi",
    "tags": {"kind": "multi", "separator": "|"},
    "bag_hash": {"kind": "multi", "hash": 5},
}
OPTIONS = {"label": "click", "quiet": True, "keep_all": True}
QUIET = {"quiet": True}


def table(rows=60, seed=0):
    """Rows with a column for every way of encoding, some of them missing."""
    rng = np.random.default_rng(seed)

    def with_missing(values):
        return [None if rng.random() < 0.15 else value for value in values]

    columns = {
        "click": rng.integers(0, 2, rows).tolist(),
        "ad": with_missing(f"a{n}" for n in rng.zipf(1.5, rows) % 30),
        "code": with_missing(rng.integers(-5, 20, rows).tolist()),
        "rate": with_missing((rng.integers(0, 9, rows) / 4).tolist()),
        "hex": with_missing(f"{n:08x}" for n in rng.integers(0, 2**32, rows) % 9 * 400_000_000),
        "text_hash": with_missing(f"t{n}" for n in rng.integers(0, 40, rows)),
        "number_hash": with_missing(rng.integers(-9, 99, rows).tolist()),
        "flag": with_missing((rng.random(rows) < 0.5).tolist()),
        "price": with_missing(rng.lognormal(2, 3, rows).tolist()),
        "plain": with_missing(rng.normal(3, 2, rows).tolist()),
        "binned": with_missing(rng.normal(size=rows).tolist()),
        "vector": with_missing(rng.normal(size=(rows, 2)).tolist()),
        "bag": with_missing([f"b{n}" for n in rng.integers(0, 9, rng.integers(0, 4))] for _ in range(rows)),
        "tags": with_missing("|".join(f"g{n}" for n in rng.integers(0, 9, rng.integers(1, 4))) for _ in range(rows)),
        "bag_hash": with_missing(rng.integers(0, 99, rng.integers(0, 4)).tolist() for _ in range(rows)),
    }
    types = {"vector": pl.List(pl.Float64), "bag": pl.List(pl.String), "bag_hash": pl.List(pl.Int64)}
    return pl.DataFrame(columns, schema_overrides=types)


def everything(dataset):
    return next(iter(dataset.stream(dataset.rows)))


def assert_same(batch, expected):
    """Assert that two batches are bitwise identical."""
    assert batch.ids.equal(expected.ids)
    assert batch.dense.view(torch.int32).equal(expected.dense.view(torch.int32))
    assert batch.labels.equal(expected.labels)
    assert (batch.missing is None) == (expected.missing is None)
    assert batch.missing is None or batch.missing.equal(expected.missing)
    assert batch.bags.keys() == expected.bags.keys()
    for name, (values, offsets) in expected.bags.items():
        assert batch.bags[name][0].equal(values)
        assert batch.bags[name][1].equal(offsets)
        assert batch.bags[name][1].dtype == offsets.dtype


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    return prepare(table(), folder / "log", fields=FIELDS, parts=3, **OPTIONS)


def test_the_same_rows_are_encoded_bitwise_identically(reference, tmp_path):
    again = prepare(table(), tmp_path / "again", like=reference.path, parts=3, **QUIET)
    assert_same(everything(again), everything(reference))
    assert again.schema == reference.schema
    assert again.days() == reference.days()
    for name in reference.schema.names:
        first, second = reference.vocabulary(name), again.vocabulary(name)
        assert (first is None) == (second is None)
        assert first is None or list(first) == list(second)
    assert again.settings["fields"] == reference.settings["fields"]
    assert again.settings["like"] == {"name": "log", "fingerprint": reference.fingerprint}
    assert again.settings["unlabelled"] is False
    assert again.settings["train_days"] == []


def test_rows_in_memory_are_encoded_as_prepare_stores_them(reference):
    assert_same(encode_rows(reference, table()), everything(reference))
    assert_same(encode_rows(reference.path, table().lazy()), everything(reference))


def test_other_rows_fit_nothing(reference, tmp_path):
    rows = table(40, seed=9)
    stored = everything(prepare(rows, tmp_path / "new", like=reference, parts=1, **QUIET))
    assert_same(encode_rows(reference, rows), stored)
    names = [field.name for field in reference.schema if field.kind == "categorical"]
    ads = ["", "?", *reference.vocabulary("ad")]
    encoded = [ads[index] for index in stored.ids[:, names.index("ad")].tolist()]
    assert encoded == [("" if ad is None else ad if ad in ads else "?") for ad in rows["ad"]]
    assert "?" in encoded
    scale = reference.settings["fields"]["plain"]
    plain = (rows["plain"].to_numpy() - scale["mean"][0]) / scale["deviation"][0]
    present = ~np.isnan(plain)
    assert stored.dense[:, 1].numpy()[present].tolist() == plain[present].astype(np.float32).tolist()


@given(st.lists(st.integers(0, 59), min_size=1, max_size=20))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_encoding_of_a_row_does_not_depend_on_other_rows(reference, rows):
    whole = everything(reference)
    batch = encode_rows(reference, table()[rows])
    assert batch.ids.equal(whole.ids[rows])
    assert batch.dense.view(torch.int32).equal(whole.dense[rows].view(torch.int32))
    missing = torch.zeros_like(batch.dense, dtype=torch.bool) if batch.missing is None else batch.missing
    assert missing.equal(whole.missing[rows])
    for name, (values, offsets) in whole.bags.items():
        ends = [*offsets.tolist(), len(values)]
        expected = [values[ends[row] : ends[row + 1]] for row in rows]
        assert batch.bags[name][0].equal(torch.cat(expected))
        assert batch.bags[name][1].tolist() == np.cumsum([0, *map(len, expected)])[:-1].tolist()


texts = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=3)
numbers = st.none() | st.floats(width=64)
wholes = st.none() | st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(texts, numbers, wholes, wholes), min_size=2, max_size=12), st.integers(2, 5))
@settings(max_examples=40)
def test_any_values_survive_storing(tmp_path_factory, cells, bins):
    columns = dict(zip("tnwh", map(list, zip(*cells, strict=True)), strict=True))
    types = {"t": pl.String, "n": pl.Float64, "w": pl.Int64, "h": pl.Int64}
    frame = pl.DataFrame({**columns, "b": columns["n"]}, schema_overrides={**types, "b": pl.Float64})
    frame = frame.with_columns(click=pl.Series([index % 2 for index in range(len(cells))]))
    fields = {"t": "categorical", "n": "numeric", "w": "categorical", "h": {"kind": "categorical", "hash": 11}}
    folder = tmp_path_factory.mktemp("any")
    dataset = prepare(
        frame, folder / "log", fields={**fields, "b": {"kind": "numeric", "bins": bins}}, parts=1, **OPTIONS
    )
    assert_same(encode_rows(dataset.path, frame), everything(dataset))


def test_pandas_and_a_dict(reference):
    rows = table().drop("bag", "bag_hash", "vector", "flag")
    kept = [name for name in reference.schema.names if name in rows.columns]
    expected = encode_rows(reference, rows, kept)
    assert_same(encode_rows(reference, rows.to_dict(as_series=False), kept), expected)
    frame = pd.DataFrame(rows.drop("code", "number_hash").to_dict(as_series=False))
    kept = [name for name in kept if name in frame.columns]
    assert_same(encode_rows(reference, frame, kept), encode_rows(reference, rows, kept))


def flat(frame):
    """The columns that a text file can hold."""
    return frame.drop("bag", "bag_hash", "vector")


@pytest.mark.parametrize("trained", ["csv", "table"])
def test_text_files_and_typed_tables_agree(tmp_path, trained):
    """Integers, floats and text get the same ids from a text file and from a table, also if hashed."""
    frame = flat(table()).drop("flag", "rate")
    frame.write_csv(tmp_path / "log.csv")
    sources = {"csv": tmp_path / "log.csv", "table": frame}
    fields = {name: FIELDS[name] for name in frame.columns if name in FIELDS}
    dataset = prepare(sources.pop(trained), tmp_path / "old", fields=fields, parts=1, **OPTIONS)
    [other] = sources.values()
    again = prepare(other, tmp_path / "new", like=dataset, parts=1, **QUIET)
    assert_same(everything(again), everything(dataset))


def test_missing_columns_are_named_with_the_nearest(reference, tmp_path):
    bad = table().rename({"ad": "AD", "price": "prise"}).drop("code").with_columns(other=1)
    message = (
        r"the table does not fit .*log: missing: 'ad' \(did you mean 'AD'\?\), 'code', "
        r"'price' \(did you mean 'prise'\?\); not used: 'AD', 'prise', 'other'"
    )
    with pytest.raises(DataError, match=message):
        prepare(bad, tmp_path / "new", like=reference, **QUIET)
    with pytest.raises(DataError, match=message):
        encode_rows(reference, bad)
    assert not (tmp_path / "new").exists()


def floats(name):
    return pl.col(name).cast(pl.Float64)


RETYPED = {
    "numbers as text": (pl.lit("cheap").alias("price"), "'price' .*'cheap' is not a number"),
    "numbers as dates": (pl.lit("2020-01-01").str.to_date().alias("plain"), "'plain' .*Date is not a number"),
    "bins as lists": (pl.col("bag").alias("binned"), "'binned' .*is not a number"),
    "text as fractions": (pl.lit(1.0).alias("ad"), "'ad' .*holds Float64 and held String in training"),
    "text as truths": (pl.lit(True).alias("ad"), "'ad' .*holds Boolean and held String"),
    "codes as dates": (pl.lit("2020-01-01").str.to_date().alias("code"), "'code' .*holds Date and held Int64"),
    "codes as lists": (pl.col("bag").alias("code"), "'code' .*holds List.String. and held Int64"),
    "truths as numbers": (pl.lit(1).alias("flag"), "'flag' .*holds Int.* and held Boolean"),
    "hashed text as fractions": (pl.lit(1.5).alias("text_hash"), "'text_hash' .*holds Float64 and held String"),
    "hashed numbers as words": (pl.lit("x").alias("number_hash"), "'number_hash' .*'x' is not an integer"),
    "hashed numbers as fractions": (pl.lit(1.5).alias("number_hash"), "'number_hash' .*1.5 is not an integer"),
    "hashed numbers as truths": (pl.lit(True).alias("number_hash"), "'number_hash' .*holds Boolean"),
    "vectors as text": (pl.lit("1;2").alias("vector"), "'vector' .*not lists of 2 numbers"),
    "vectors of three": (pl.lit([1.0, 2.0, 3.0]).alias("vector"), "'vector' .*3 numbers, expected 2"),
    "lists as text": (pl.lit("b1").alias("bag"), "'bag' .*not lists"),
    "lists of fractions": (pl.lit([0.5]).alias("bag"), "'bag' .*holds Float64 and held String"),
    "hexadecimal as words": (pl.lit("zz").alias("hex"), "'hex' .*'zz' is not a hexadecimal number"),
}


@pytest.mark.parametrize("case", RETYPED)
def test_retyped_columns_are_named(reference, tmp_path, case):
    change, message = RETYPED[case]
    bad = table().with_columns(change)
    with pytest.raises(DataError, match=f"does not fit .*log: retyped: {message}") as caught:
        prepare(bad, tmp_path / "new", like=reference, **QUIET)
    with pytest.raises(DataError) as other:
        encode_rows(reference, bad)
    assert str(caught.value) == str(other.value)
    assert not (tmp_path / "new").exists()


def test_missing_and_retyped_columns_are_in_one_message(reference, tmp_path):
    bad = table().drop("ad").with_columns(price=pl.lit("cheap"), plain=pl.lit("high"))
    with pytest.raises(DataError, match="missing: 'ad'; retyped: 'price' .*, 'plain' "):
        prepare(bad, tmp_path / "new", like=reference, **QUIET)


RETYPED_BUT_KNOWN = {
    "smaller integers": pl.col("code", "number_hash").cast(pl.Int8),
    "integers with missing values": floats("code"),
    "hashed integers with missing values": floats("number_hash"),
    "integers as text": pl.col("code", "number_hash").cast(pl.String),
    "numbers as text": pl.col("price", "plain", "binned").cast(pl.String),
    "a category type": pl.col("ad", "text_hash").cast(pl.Categorical),
    "an array": pl.col("vector").list.to_array(2),
}


@pytest.mark.parametrize("case", RETYPED_BUT_KNOWN)
def test_other_types_of_the_same_values_are_accepted(reference, case):
    assert_same(encode_rows(reference, table().with_columns(RETYPED_BUT_KNOWN[case])), everything(reference))


def test_columns_without_any_value_are_missing_values(reference):
    empty = table(3).with_columns(pl.lit(None).alias(name) for name in reference.schema.names)
    batch = encode_rows(reference, empty)
    assert batch.ids.unique().tolist() == [0]
    assert batch.missing.all()
    assert all(values.tolist() == [0, 0, 0] for values, _ in batch.bags.values())


def test_a_type_that_changes_between_files_is_an_error(tmp_path):
    frame = pl.DataFrame({"click": [0, 1], "ad": ["1", "2"]})
    dataset = prepare(frame, tmp_path / "old", parts=1, fields={"ad": "categorical"}, **OPTIONS)
    pl.DataFrame({"ad": [1, 2]}).write_parquet(tmp_path / "1.parquet")
    pl.DataFrame({"ad": [1.0, None]}).write_parquet(tmp_path / "2.parquet")
    with pytest.raises(DataError, match="column 'ad' holds Float64 and held String in training"):
        prepare([tmp_path / "1.parquet", tmp_path / "2.parquet"], tmp_path / "new", like=dataset, **QUIET)
    assert not (tmp_path / "new").exists()


def test_hashed_numbers_of_several_types_are_one_number(tmp_path):
    fields = {"n": {"kind": "categorical", "hash": 1000}}
    pl.DataFrame({"click": [0, 1], "n": [7, 8]}).write_parquet(tmp_path / "1.parquet")
    pl.DataFrame({"click": [0, 1], "n": [7.0, 8.5]}).write_parquet(tmp_path / "2.parquet")
    both = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    dataset = prepare(both, tmp_path / "out", parts="files", train=2, fields=fields, **OPTIONS)
    ids = everything(dataset).ids[:, 0].tolist()
    assert ids[0] == ids[2]
    assert encode_rows(dataset, {"n": [7, 8]}).ids[:, 0].tolist() == ids[:2]


def test_extra_columns_are_only_reported(reference, tmp_path, capsys):
    dataset = prepare(table().with_columns(new=1), tmp_path / "new", like=reference)
    assert f"not used, {reference.path} does not have them: 'new'" in capsys.readouterr().err
    assert list(dataset.settings["ignored"]) == ["new"]
    assert "new" not in dataset.schema.names


def test_the_label_may_be_absent(reference, tmp_path, capsys):
    dataset = prepare(table().rename({"click": "clicks"}), tmp_path / "new", like=reference)
    output = capsys.readouterr().err
    assert "no label 'click' (did you mean 'clicks'?): labels are stored as 0" in output
    assert "60 rows, no labels, " in output
    assert dataset.settings["unlabelled"] is True
    assert everything(dataset).labels.tolist() == [[0.0]] * 60
    assert everything(dataset).ids.equal(everything(reference).ids)
    assert encode_rows(reference, table().drop("click")).labels.tolist() == [[0.0]] * 60
    with pytest.raises(
        InputError, match="negatives: without the label 'click' negatives are unknown; leave negatives out"
    ):
        prepare(table().drop("click"), tmp_path / "no", like=reference, negatives=0.5, **QUIET)


def test_label_and_tasks_must_be_absent_together(tmp_path):
    frame = pl.DataFrame({"click": ["y", "n", "y"], "buy": [0, 1, 0], "ad": ["a", "b", "?"]})
    options = {**OPTIONS, "positive": "y", "tasks": ["buy"], "missing": ["?"], "parts": 1}
    dataset = prepare(frame, tmp_path / "old", fields={"ad": "categorical"}, **options)
    expected = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    assert encode_rows(dataset, frame).labels.tolist() == expected
    again = prepare(frame, tmp_path / "new", like=dataset, parts=1, **QUIET)
    assert_same(everything(again), everything(dataset))
    assert again.schema.tasks == ("buy",)
    for name in ("click", "buy"):
        with pytest.raises(DataError, match=f"missing: '{name}'"):
            encode_rows(dataset, frame.drop(name))
        with pytest.raises(DataError, match=f"missing: '{name}'"):
            prepare(frame.drop(name), tmp_path / "no", like=dataset, **QUIET)
    unlabelled = encode_rows(dataset, frame.select("ad"))
    assert unlabelled.labels.tolist() == [[0.0, 0.0]] * 3
    assert unlabelled.ids[:, 0].tolist() == [2, 3, 0]  # the text for missing values is that of the reference


def test_only_some_fields(reference, tmp_path):
    kept = ["price", "bag", "ad"]
    rows = table().select("click", "ad", "price", "bag")
    dataset = prepare(rows, tmp_path / "new", like=reference, fields_only=kept, parts=3, **QUIET)
    assert dataset.schema == reference.schema.subset(kept)
    expected = next(iter(reference.stream(60, fields=kept)))
    assert_same(everything(dataset), expected)
    assert_same(encode_rows(reference, rows, kept), expected)
    with pytest.raises(FieldError, match="no field 'prise' \\(did you mean 'price'\\?\\)"):
        encode_rows(reference, rows, ["prise"])
    with pytest.raises(InputError, match="no field is requested"):
        prepare(rows, tmp_path / "no", like=reference, fields_only=[], **QUIET)
    with pytest.raises(InputError, match="fields_only goes with like"):
        prepare(rows, tmp_path / "no", fields_only=kept, **OPTIONS)


def test_a_reencoded_dataset_can_be_a_reference(reference, tmp_path):
    first = prepare(
        table(), tmp_path / "1", like=reference, fields_only=["ad", "number_hash", "binned"], parts=3, **QUIET
    )
    second = prepare(table(), tmp_path / "2", like=first, parts=3, **QUIET)
    assert_same(everything(second), everything(first))


def test_fitting_options_with_like_are_errors(reference, tmp_path):
    for name, value in {"bins": 5, "train": 1, "fields": {}, "preset": "avazu", "hash": 3, "tasks": ["x"]}.items():
        with pytest.raises(InputError, match=f"leave out '{name}'"):
            prepare(table(), tmp_path / "new", like=reference, **{name: value}, **QUIET)
    with pytest.raises(InputError, match="label: it is 'click' in .*log, found 'ad'"):
        prepare(table(), tmp_path / "new", like=reference, label="ad", **QUIET)
    with pytest.raises(InputError, match="no option 'part' \\(did you mean 'parts'"):
        prepare(table(), tmp_path / "new", like=reference, part=3, **QUIET)


def test_the_time_column_of_the_reference_is_used_if_present(tmp_path):
    frame = pl.DataFrame({"click": [0, 1, 0], "ad": ["a", "b", "c"], "at": ["01.02.20", "02.02.20", "03.02.20"]})
    dataset = prepare(frame, tmp_path / "old", time="at", time_format="%d.%m.%y", **OPTIONS)
    new = frame.with_columns(at=pl.Series(["05.02.20", "04.02.20", "05.02.20"]))
    timed = prepare(new, tmp_path / "1", like=dataset, **QUIET)
    assert [(day.name, day.rows) for day in timed.table] == [("2020-02-04", 1), ("2020-02-05", 2)]
    assert prepare(new, tmp_path / "2", like=dataset, parts=1, **QUIET).days() == ("part_0",)
    assert prepare(new.drop("at"), tmp_path / "3", like=dataset, parts=2, **QUIET).days() == ("part_0", "part_1")
    named = new.with_columns(fold=pl.Series(["test", "test", "valid"]))
    split = prepare(named, tmp_path / "4", like=dataset, split="fold", **QUIET)
    assert split.settings["split"] == {"train": [], "valid": ["valid"], "test": ["test"]}
    with pytest.raises(FieldError, match="time: no column 'when'"):
        prepare(new, tmp_path / "5", like=dataset, time="when", **QUIET)


def test_the_layout_of_text_files_is_kept(tmp_path):
    (tmp_path / "log.txt").write_text("1\ta\n0\tb\n")
    (tmp_path / "new.txt").write_text("0\tb\n1\tc\n")
    dataset = prepare(
        tmp_path / "log.txt", tmp_path / "old", header=["click", "ad"], separator="\t", parts=1, **OPTIONS
    )
    again = prepare(tmp_path / "new.txt", tmp_path / "new", like=dataset, parts=1, **QUIET)
    assert everything(again).ids[:, 0].tolist() == [3, 1]
    assert everything(again).labels[:, 0].tolist() == [0, 1]


def test_the_same_call_reuses_and_another_one_does_not(reference, tmp_path, capsys):
    first = prepare(table(), tmp_path / "new", like=reference)
    capsys.readouterr()
    assert prepare(table(), tmp_path / "new", like=reference).fingerprint == first.fingerprint
    assert "reused" in capsys.readouterr().err
    assert (
        prepare(table(), tmp_path / "a", like=reference, fields_only=["ad"], **QUIET).fingerprint != first.fingerprint
    )
    other = prepare(table(50), tmp_path / "other", fields=FIELDS, parts=3, **OPTIONS)
    assert prepare(table(), tmp_path / "b", like=other, **QUIET).fingerprint != first.fingerprint


def test_datasets_without_stored_encoders_are_errors(reference, tmp_path):
    dataset = simulate(tmp_path / "simulated", "small", rows=200)
    with pytest.raises(DataError, match="was not made by prepare"):
        encode_rows(dataset, table())
    with pytest.raises(DataError, match="no Dataset at .*nowhere"):
        encode_rows(tmp_path / "nowhere", table())
    incomplete = Dataset(reference.path)
    for field, key in (("ad", "raw_type"), ("text_hash", "value_type")):
        del incomplete.settings["fields"][field][key]
        with pytest.raises(DataError, match=f"field '{field}': '{key}' is not stored.* prepare its log again"):
            encode_rows(incomplete, table(), [field])
    assert_same(encode_rows(incomplete, table(), ["code"]), next(iter(reference.stream(60, fields=["code"]))))
    incomplete.settings["fields"]["binned"]["edges"] = [0.0]
    with pytest.raises(DataError, match="field 'binned' does not match .* prepare the log again"):
        encode_rows(incomplete, table(), ["binned"])


def test_an_encoder_can_be_used_repeatedly(reference):
    encoder = RowEncoder(reference)
    assert encoder.schema == reference.schema
    for rows in (table()[:7], table()[7:]):
        assert_same(encoder(rows), encode_rows(reference, rows))
    with pytest.raises(DataError, match="the table is empty"):
        encoder(table()[:0])
    with pytest.raises(DataError, match="the table, row 2: label 'click' must be 0 or 1, found 5"):
        encoder(table(3).with_columns(click=pl.Series([0, 5, 1])))
