"""Days of rows: by row order, at random, by a split column, by a time column."""

from itertools import chain

import numpy as np
import polars as pl
import pytest
from hypothesis import given, strategies as st

from lpfs.data.days import DayByColumn, DayByOrder, make_day_assigner
from lpfs.data.prepare import prepare
from lpfs.data.sources.base import Chunk, TableSource
from lpfs.errors import DataError, InputError

OPTIONS = {"label": "click", "quiet": True, "keep_all": True}


def sorted_table(rows=200):
    """A table sorted by its label, with the number of the row in a column."""
    return pl.DataFrame(
        {"click": [0] * (rows // 2) + [1] * (rows - rows // 2), "row": [f"r{index}" for index in range(rows)]}
    )


def rows_of(dataset):
    """The rows of each day, by their column ``row``."""
    values = np.array(["", "?", *dataset.vocabulary("row")])
    stream = [dataset.days(index, index + 1) for index in range(len(dataset.days()))]
    return [[int(values[i][1:]) for i in next(iter(day.stream(day.rows))).ids[:, 0].tolist()] for day in stream]


def assigned(assigner, rows, chunk):
    """The part of each row, and whether rows of a part came in order, when read in chunks."""
    parts = np.full(rows, -1)
    assigner.start_at()
    for start in range(0, rows, chunk):
        frame = pl.DataFrame({"x": range(start, min(start + chunk, rows))})
        for day, rows_of_day in assigner.assign(Chunk(frame, 0, str, 0)):
            rows_of_day = np.arange(frame.height) if rows_of_day is None else rows_of_day
            assert (np.diff(rows_of_day) > 0).all()
            assert (parts[start + rows_of_day] == -1).all()
            parts[start + rows_of_day] = day
    return parts


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5), st.integers(1, 99))
def test_parts_are_equal_and_do_not_depend_on_chunks(rows, parts, seed, chunk):
    assigner = DayByOrder(rows, parts, seed)
    whole = assigned(assigner, rows, rows)
    sizes = np.bincount(whole, minlength=len(assigner.days))
    assert len(sizes) == len(assigner.days)
    assert sizes.max() - sizes.min() <= 1
    assert assigned(assigner, rows, chunk).tolist() == whole.tolist()


def test_shuffle_splits_a_table_sorted_by_label_at_random(tmp_path):
    options = {**OPTIONS, "parts": 4, "train": 4}
    in_order = prepare(sorted_table(), tmp_path / "in_order", **options)
    assert [day.positives for day in in_order.table] == [0, 0, 50, 50]
    shuffled = prepare(sorted_table(), tmp_path / "shuffled", shuffle=True, **options)
    assert [day.rows for day in shuffled.table] == [50] * 4
    assert all(10 < day.positives < 40 for day in shuffled.table)
    days = rows_of(shuffled)
    assert sorted(chain(*days)) == list(range(200))
    assert all(day == sorted(day) for day in days)
    other = prepare(sorted_table(), tmp_path / "other", shuffle=True, seed=1, **options)
    assert rows_of(other) != days
    assert len({in_order.fingerprint, shuffled.fingerprint, other.fingerprint}) == 3


def test_shuffling_is_the_same_from_every_source(tmp_path, monkeypatch):
    options = {**OPTIONS, "parts": 3, "train": 3, "shuffle": True, "fields": {"row": "categorical"}}
    sorted_table().write_csv(tmp_path / "log.csv")
    sorted_table().write_parquet(tmp_path / "log.parquet")
    expected = rows_of(prepare(tmp_path / "log.csv", tmp_path / "csv", **options))
    monkeypatch.setattr("lpfs.data.sources.parquet.ROWS", 7)
    assert rows_of(prepare(tmp_path / "log.parquet", tmp_path / "parquet", **options)) == expected


def test_shuffle_with_a_time_column_is_an_error(tmp_path):
    table = sorted_table(4).with_columns(at=pl.Series(["2020-01-01", "2020-01-02"] * 2))
    with pytest.raises(InputError, match="shuffle must be left out: column 'at' orders the rows"):
        prepare(table, tmp_path / "out", time="at", shuffle=True, **OPTIONS)
    with pytest.raises(InputError, match="shuffle: column 'at' holds times.*give parts to leave the time out"):
        prepare(table, tmp_path / "out", shuffle=True, **OPTIONS)
    assert prepare(table, tmp_path / "out", shuffle=True, parts=2, **OPTIONS).days() == ("part_0", "part_1")
    with pytest.raises(InputError, match="shuffle must be left out when a day is a file"):
        prepare(table, tmp_path / "files", shuffle=True, parts="files", **OPTIONS)
    with pytest.raises(InputError, match="shuffle must be true or false, found 1"):
        prepare(table, tmp_path / "files", shuffle=1, **OPTIONS)


def with_split(words, **columns):
    rows = len(words)
    table = {"click": [index % 2 for index in range(rows)], "row": [f"r{index}" for index in range(rows)]}
    return pl.DataFrame({**table, "fold": words, **columns})


def test_a_split_column_makes_train_valid_and_test(tmp_path):
    words = ["test", "Train", "dev", "train", " TRAIN", "validation", "training", "holdout"]
    dataset = prepare(with_split(words), tmp_path / "out", split="fold", parts=2, **OPTIONS)
    assert dataset.days() == ("part_0", "part_1", "valid", "test")
    assert dataset.settings["split"] == {"train": ["part_0", "part_1"], "valid": ["valid"], "test": ["test"]}
    assert dataset.settings["train_days"] == ["part_0", "part_1"]
    assert dataset.schema.names == ("row",)
    # vocabularies are fitted on the training rows 1, 3, 4 and 6 only; other values are unseen
    assert sorted(dataset.vocabulary("row")) == ["r1", "r3", "r4", "r6"]
    assert [day.rows for day in dataset.table] == [2, 2, 2, 2]
    holdout = next(iter(dataset.days(2).stream(9)))
    assert holdout.ids[:, 0].tolist() == [1] * 4
    assert holdout.labels[:, 0].tolist() == [0, 1, 0, 1]  # rows 2 and 5, then 0 and 7


def test_scales_come_from_the_training_rows(tmp_path):
    table = with_split(["train", "test", "train", "train"], price=[1.0, 1e6, 2.0, 4.0])
    dataset = prepare(
        table, tmp_path / "out", split="fold", fields={"price": {"kind": "numeric", "transform": "none"}}, **OPTIONS
    )
    assert dataset.settings["fields"]["price"]["mean"] == [pytest.approx(7 / 3)]
    assert dataset.settings["split"]["valid"] == []


def test_train_counts_within_the_training_days(tmp_path):
    table = with_split(["train"] * 4 + ["test"])
    dataset = prepare(table, tmp_path / "out", split="fold", parts=4, train=3, **OPTIONS)
    assert dataset.settings["train_days"] == ["part_0", "part_1", "part_2"]
    with pytest.raises(DataError, match="train: 5 training days, but there are 4"):
        prepare(table, tmp_path / "no", split="fold", parts=4, train=5, **OPTIONS)


def test_only_training_rows_need_a_time(tmp_path):
    days = ["2020-01-02", "2020-01-01", None, "2020-01-01", "2020-01-03"]
    table = with_split(["train", "train", "test", "train", "valid"], at=days)
    for index, time in enumerate(({"time": "at"}, {})):  # a single timestamp column is detected
        dataset = prepare(table, tmp_path / str(index), split="fold", **time, **OPTIONS)
        assert dataset.days() == ("2020-01-01", "2020-01-02", "valid", "test")
        assert [day.rows for day in dataset.table] == [2, 1, 1, 1]


def test_training_rows_are_split_at_random(tmp_path):
    table = with_split(["test" if index % 5 == 0 else "train" for index in range(100)])
    options = {**OPTIONS, "split": "fold", "parts": 4, "shuffle": True}
    dataset = prepare(table, tmp_path / "out", **options)
    assert [day.rows for day in dataset.table] == [20, 20, 20, 20, 20]
    days = rows_of(dataset.days(0, 4))
    assert sorted(chain(*days)) == [index for index in range(100) if index % 5]
    assert max(days[0]) > 50


@given(st.lists(st.sampled_from(["train", "valid", "test"]), min_size=1, max_size=60), st.integers(1, 20))
def test_the_split_does_not_depend_on_chunks(words, chunk):
    table = pl.DataFrame({"fold": words})
    options = {"time": None, "format": None, "parts": 3, "ordered": False, "split": "fold", "shuffle": 1}
    assigner = make_day_assigner(TableSource(table), progress=iter, **options)
    assigned_days = []
    for size in (len(words), chunk):
        assigner.start_at()
        parts = np.full(len(words), -1)
        for start in range(0, len(words), size):
            for day, rows in assigner.assign(Chunk(table[start : start + size], 0, str, 0)):
                parts[start + rows] = day
        assigned_days.append(parts.tolist())
    assert assigned_days[0] == assigned_days[1]
    roles = ["train" if assigner.days[day].startswith("part") else assigner.days[day] for day in assigned_days[0]]
    assert roles == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([0, 1, 1], "the table, row 1: the split column 'fold' holds '0', '1'; .*train, .*valid, .*test"),
        ([True, False, True], "holds 'true', 'false'"),
        (["train", "b", "test"], "the table, row 2: the split column 'fold' holds 'train', 'b', 'test'"),
        (["train", None, "test"], "row 2: the split column 'fold' is missing"),
        (["test", "test", "valid"], "the split column 'fold': no row is for training"),
        ([["train"], ["test"], ["test"]], "cannot name a split"),
    ],
)
def test_invalid_split_columns_are_errors(tmp_path, words, message):
    with pytest.raises(DataError, match=message):
        prepare(with_split(words), tmp_path / "out", split="fold", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_options_that_exclude_a_split_column(tmp_path):
    table = with_split(["train", "train", "test"], when=["a", "test", "b"])
    for options, message in [
        ({"split": "click"}, "split must be a separate column"),
        ({"split": "fold", "time": "fold"}, "split must be a separate column"),
        ({"split": "fold", "parts": "files"}, "split must be left out when a day is a file"),
        ({"split": "flod"}, "split: no column 'flod' \\(did you mean 'fold'"),
        ({"split": "fold", "fields": {"fold": "categorical"}}, "'fold' is the split column, and cannot be a field"),
        ({"split": "fold", "time": "when"}, "column 'when' and the split column 'fold' both name a day 'test'"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare(table, tmp_path / "out", **options, **OPTIONS)
    dataset = prepare(table, tmp_path / "out", time="fold", fields={"when": "ignore"}, **OPTIONS)
    assert dataset.days() == ("train", "test")


def test_a_date_out_of_range_is_an_error():
    assigner = DayByColumn("when", None)
    frame = pl.DataFrame({"when": pl.Series([2**30, 0], dtype=pl.Int32).cast(pl.Date)})
    with pytest.raises(DataError, match="column 'when' holds an invalid value"):
        assigner.scan(Chunk(frame, 0, str, 0), ordered=False)
