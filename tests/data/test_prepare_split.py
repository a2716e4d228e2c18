"""Days without a time: rows dealt at random, and tables that bring their own split."""

from itertools import chain

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpfs.data.days import DayByOrder, make_day_assigner
from lpfs.data.prepare import prepare
from lpfs.data.sources.base import Chunk, TableSource
from lpfs.errors import DataError, InputError

GIVEN = {"label": "click", "quiet": True, "keep_all": True}


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


def assigned(clock, rows, chunk):
    """The part of each row, and whether rows of a part came in order, when read in chunks."""
    parts = np.full(rows, -1)
    clock.begin()
    for start in range(0, rows, chunk):
        frame = pl.DataFrame({"x": range(start, min(start + chunk, rows))})
        for day, some in clock.assign(Chunk(frame, 0, str, 0)):
            some = np.arange(frame.height) if some is None else some
            assert (np.diff(some) > 0).all()
            assert (parts[start + some] == -1).all()
            parts[start + some] = day
    return parts


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 5), st.integers(1, 99))
def test_parts_are_equal_and_do_not_depend_on_chunks(rows, parts, seed, chunk):
    clock = DayByOrder(rows, parts, seed)
    whole = assigned(clock, rows, rows)
    sizes = np.bincount(whole, minlength=len(clock.days))
    assert len(sizes) == len(clock.days)
    assert sizes.max() - sizes.min() <= 1
    assert assigned(clock, rows, chunk).tolist() == whole.tolist()


def test_a_table_sorted_by_label_is_dealt_at_random(tmp_path):
    given = {**GIVEN, "parts": 4, "train": 4}
    cut = prepare(sorted_table(), tmp_path / "cut", **given)
    assert [day.positives for day in cut.table] == [0, 0, 50, 50]
    dealt = prepare(sorted_table(), tmp_path / "dealt", shuffle=True, **given)
    assert [day.rows for day in dealt.table] == [50] * 4
    assert all(10 < day.positives < 40 for day in dealt.table)
    days = rows_of(dealt)
    assert sorted(chain(*days)) == list(range(200))
    assert all(day == sorted(day) for day in days)
    other = prepare(sorted_table(), tmp_path / "other", shuffle=True, seed=1, **given)
    assert rows_of(other) != days
    assert len({cut.fingerprint, dealt.fingerprint, other.fingerprint}) == 3


def test_shuffling_is_the_same_from_every_source(tmp_path, monkeypatch):
    given = {**GIVEN, "parts": 3, "train": 3, "shuffle": True, "fields": {"row": "categorical"}}
    sorted_table().write_csv(tmp_path / "log.csv")
    sorted_table().write_parquet(tmp_path / "log.parquet")
    expected = rows_of(prepare(tmp_path / "log.csv", tmp_path / "csv", **given))
    monkeypatch.setattr("lpfs.data.sources.base.ROWS", 7)
    assert rows_of(prepare(tmp_path / "log.parquet", tmp_path / "parquet", **given)) == expected


def test_shuffle_is_refused_where_a_time_orders_the_rows(tmp_path):
    table = sorted_table(4).with_columns(at=pl.Series(["2020-01-01", "2020-01-02"] * 2))
    with pytest.raises(InputError, match="shuffle must be left out: column 'at' orders the rows"):
        prepare(table, tmp_path / "out", time="at", shuffle=True, **GIVEN)
    with pytest.raises(InputError, match="shuffle: column 'at' holds times.*give parts to leave the time out"):
        prepare(table, tmp_path / "out", shuffle=True, **GIVEN)
    assert prepare(table, tmp_path / "out", shuffle=True, parts=2, **GIVEN).days() == ("part_0", "part_1")
    with pytest.raises(InputError, match="shuffle must be left out when a day is a file"):
        prepare(table, tmp_path / "files", shuffle=True, parts="files", **GIVEN)
    with pytest.raises(InputError, match="shuffle must be true or false, found 1"):
        prepare(table, tmp_path / "files", shuffle=1, **GIVEN)


def with_split(words, **columns):
    rows = len(words)
    table = {"click": [index % 2 for index in range(rows)], "row": [f"r{index}" for index in range(rows)]}
    return pl.DataFrame({**table, "fold": words, **columns})


def test_a_split_column_makes_train_valid_and_test(tmp_path):
    words = ["test", "Train", "dev", "train", " TRAIN", "validation", "training", "holdout"]
    dataset = prepare(with_split(words), tmp_path / "out", split="fold", parts=2, **GIVEN)
    assert dataset.days() == ("part_0", "part_1", "valid", "test")
    assert dataset.settings["split"] == {"train": ["part_0", "part_1"], "valid": ["valid"], "test": ["test"]}
    assert dataset.settings["train_days"] == ["part_0", "part_1"]
    assert dataset.schema.names == ("row",)
    # vocabularies come from the training rows 1, 3, 4 and 6 alone; the others are unseen
    assert sorted(dataset.vocabulary("row")) == ["r1", "r3", "r4", "r6"]
    assert [day.rows for day in dataset.table] == [2, 2, 2, 2]
    held_out = next(iter(dataset.days(2).stream(9)))
    assert held_out.ids[:, 0].tolist() == [1] * 4
    assert held_out.labels[:, 0].tolist() == [0, 1, 0, 1]  # rows 2 and 5, then 0 and 7


def test_scales_come_from_the_training_rows(tmp_path):
    table = with_split(["train", "test", "train", "train"], price=[1.0, 1e6, 2.0, 4.0])
    dataset = prepare(
        table, tmp_path / "out", split="fold", fields={"price": {"kind": "numeric", "transform": "none"}}, **GIVEN
    )
    assert dataset.settings["fields"]["price"]["mean"] == [pytest.approx(7 / 3)]
    assert dataset.settings["split"]["valid"] == []


def test_train_counts_within_the_training_days(tmp_path):
    table = with_split(["train"] * 4 + ["test"])
    dataset = prepare(table, tmp_path / "out", split="fold", parts=4, train=3, **GIVEN)
    assert dataset.settings["train_days"] == ["part_0", "part_1", "part_2"]
    with pytest.raises(DataError, match="train: 5 training days, but there are 4"):
        prepare(table, tmp_path / "no", split="fold", parts=4, train=5, **GIVEN)


def test_training_rows_go_by_time_and_the_others_need_none(tmp_path):
    days = ["2020-01-02", "2020-01-01", None, "2020-01-01", "2020-01-03"]
    table = with_split(["train", "train", "test", "train", "valid"], at=days)
    for index, time in enumerate(({"time": "at"}, {})):  # a single column of times is found
        dataset = prepare(table, tmp_path / str(index), split="fold", **time, **GIVEN)
        assert dataset.days() == ("2020-01-01", "2020-01-02", "valid", "test")
        assert [day.rows for day in dataset.table] == [2, 1, 1, 1]


def test_training_rows_are_dealt_at_random(tmp_path):
    table = with_split(["test" if index % 5 == 0 else "train" for index in range(100)])
    given = {**GIVEN, "split": "fold", "parts": 4, "shuffle": True}
    dataset = prepare(table, tmp_path / "out", **given)
    assert [day.rows for day in dataset.table] == [20, 20, 20, 20, 20]
    days = rows_of(dataset.days(0, 4))
    assert sorted(chain(*days)) == [index for index in range(100) if index % 5]
    assert max(days[0]) > 50


@given(st.lists(st.sampled_from(["train", "valid", "test"]), min_size=1, max_size=60), st.integers(1, 20))
def test_the_split_does_not_depend_on_chunks(words, chunk):
    table = pl.DataFrame({"fold": words})
    options = {"time": None, "format": None, "parts": 3, "ordered": False, "split": "fold", "shuffle": 1}
    clock = make_day_assigner(TableSource(table), progress=iter, **options)
    found = []
    for size in (len(words), chunk):
        clock.start_at()
        parts = np.full(len(words), -1)
        for start in range(0, len(words), size):
            for day, rows in clock.assign(Chunk(table[start : start + size], 0, str, 0)):
                parts[start + rows] = day
        found.append(parts.tolist())
    assert found[0] == found[1]
    roles = ["train" if clock.days[day].startswith("part") else clock.days[day] for day in found[0]]
    assert roles == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([0, 1, 1], "the table, row 1: the split column 'fold' holds '0', '1'; it must name the parts: train"),
        ([True, False, True], "holds 'true', 'false'; it must name"),
        (["train", "b", "test"], "the table, row 2: the split column 'fold' holds 'train', 'b', 'test'"),
        (["train", None, "test"], "row 2: the split column 'fold' is missing"),
        (["test", "test", "valid"], "the split column 'fold': no row is for training"),
        ([["train"], ["test"], ["test"]], "cannot name a split"),
    ],
)
def test_other_splits_are_refused(tmp_path, words, message):
    with pytest.raises(DataError, match=message):
        prepare(with_split(words), tmp_path / "out", split="fold", **GIVEN)
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_go_with_a_split(tmp_path):
    table = with_split(["train", "train", "test"], when=["a", "test", "b"])
    for options, message in [
        ({"split": "click"}, "split must be a column of its own"),
        ({"split": "fold", "time": "fold"}, "split must be a column of its own"),
        ({"split": "fold", "parts": "files"}, "split must be left out when a day is a file"),
        ({"split": "flod"}, "split: no column 'flod' \\(did you mean 'fold'"),
        (
            {"split": "fold", "fields": {"fold": "categorical"}},
            "'fold' is the split column, and cannot be a field",
        ),
        ({"split": "fold", "time": "when"}, "column 'when' names a day 'test', as does the split column 'fold'"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare(table, tmp_path / "out", **options, **GIVEN)
    still = prepare(table, tmp_path / "out", time="fold", fields={"when": "ignore"}, **GIVEN)
    assert still.days() == ("train", "test")
