"""A log read in pieces, in any order, gives the very Dataset that is made chunk after chunk."""

import sys

import pytest
from logs import FIELDS, HereEngine, prepared, same_files, written

from lpfs.data import prepare as verb
from lpfs.data.engines import make_engine
from lpfs.data.planning import plan_log
from lpfs.data.prepare import plan_source, prepare
from lpfs.data.progress import Reporter
from lpfs.data.sources import open_source
from lpfs.data.sources.base import Piece
from lpfs.errors import DataError, InputError, MissingPackageError

LAID_OUT = {
    "days": {"time": "day"},
    "days, half of the negatives": {"time": "day", "negatives": 0.5, "seed": 3},
    "days by name": {"time": "day", "time_format": "name", "fields": {**FIELDS, "role": "ignore"}},
    "files": {"parts": "files", "train": 2},
    "files, some negatives": {"parts": "files", "negatives": {"part_1": 0.3}},
    "row order": {"parts": 7},
    "row order, some negatives": {"parts": 7, "negatives": 0.4},
    "dealt": {"parts": 4, "shuffle": True, "negatives": 0.6, "seed": 1},
    "split": {"split": "role", "parts": 3, "negatives": 0.5},
    "split and days": {"split": "role", "time": "day"},
    "hashed": {"time": "day", "hash": 30, "bins": "auto", "keep_all": True},
}


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(verb, "make_engine", lambda name, job, reporter: engine_of(name, job, reporter))


def engine_of(name, job, reporter):
    return HereEngine(job, reporter) if name == "here" else make_engine(name, job, reporter)


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("options", LAID_OUT.values(), ids=LAID_OUT)
def test_the_same_dataset(tmp_path, here, options, form):
    source = written(tmp_path / "log", form)
    block = 512 if form == "csv" else None
    one = prepared(source, tmp_path / "one", "embedded", block=block, **options)
    two = prepared(source, tmp_path / "two", "here", block=block, **options)
    assert one.fingerprint == two.fingerprint
    assert same_files(tmp_path / "one", tmp_path / "two") > 20
    if "keep_all" not in options:
        assert set(two.settings["dropped"]) >= {"twin", "same"}


def test_new_rows_are_encoded_in_pieces_too(tmp_path, here):
    source = written(tmp_path / "log", "csv")
    like = prepared(source, tmp_path / "like", "embedded", time="day")
    for engine in ("embedded", "here"):
        job = plan_source(source, like=like)
        verb.run_plan(job, tmp_path / engine, engine=engine)
    same_files(tmp_path / "embedded", tmp_path / "here")


def test_one_column_of_two_types(tmp_path, here):
    import polars as pl

    folder = tmp_path / "log"
    folder.mkdir()
    for index, codes in enumerate(([1, 2, 2, 3], [2.0, 3.0, None, 4.5])):
        pl.DataFrame({"click": [0, 1, 0, 1], "code": codes}).write_parquet(folder / f"{index}.parquet")
    fields = {"code": {"kind": "categorical", "min_count": 2}}
    for engine in ("embedded", "here"):
        made = prepared(folder, tmp_path / engine, engine, parts=2, train=2, fields=fields)
        assert made.vocabulary("code").tolist() == [2.0, 3.0]  # 3 is written once as a whole number
    same_files(tmp_path / "embedded", tmp_path / "here")


def test_a_piece_without_a_value_has_no_type(tmp_path, here):
    (tmp_path / "log.csv").write_text("click,code\n" + "0,\n" * 40 + "0,ff\n1,a\n" * 40)
    fields = {"code": {"kind": "categorical", "hexadecimal": True}}
    for engine in ("embedded", "here"):
        made = prepared(tmp_path / "log.csv", tmp_path / engine, engine, block=10, parts=1, fields=fields)
        assert made.vocabulary("code").tolist() == [10, 255]
    same_files(tmp_path / "embedded", tmp_path / "here")


def test_values_that_are_all_too_rare_have_one(tmp_path, here):
    (tmp_path / "log.csv").write_text("click,code,n\n" + "".join(f"{n % 2},{n:x},{n % 3}\n" for n in range(40)))
    fields = {"code": {"kind": "categorical", "hexadecimal": True, "min_count": 2}}
    for engine in ("embedded", "here"):
        made = prepared(tmp_path / "log.csv", tmp_path / engine, engine, block=20, parts=1, fields=fields)
        assert made.vocabulary("code").dtype == "uint32"
        assert made.vocabulary_about("code")["values_seen"] == 40
    same_files(tmp_path / "embedded", tmp_path / "here")


def test_pieces_have_the_chunks_of_the_whole(tmp_path):
    source = open_source(written(tmp_path / "log", "csv"))
    source.block = 300
    pieces = [piece for index in range(3) for piece in source.pieces(index)]
    assert len(pieces) > 10
    assert pieces[1] == Piece(0, 8, 16)
    assert pieces[-1].stop is None
    whole = [chunk.frame for chunk in source.chunks(source.names)]
    apart = [chunk.frame for piece in pieces for chunk in source.piece(source.names, piece)]
    assert len(whole) > 50
    assert [each.rows() for each in whole] == [each.rows() for each in apart]


def test_packed_and_quoted_files_are_one_piece(tmp_path):
    import gzip

    plain = "click,ad\n" + "0,a\n1,b\n" * 500
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(plain.encode()))
    (tmp_path / "b.csv").write_text(plain + '1,"b\nc"\n')
    (tmp_path / "c.csv").write_text(plain)
    source = open_source(tmp_path)
    source.block = 100
    assert [len(source.pieces(index)) for index in range(3)] == [1, 1, 6]


def test_an_error_in_a_later_piece_says_from_where_it_counts(tmp_path):
    (tmp_path / "log.csv").write_text("click,ad\n" + "0,a\n" * 500 + "broken\n")
    source = open_source(tmp_path / "log.csv")
    source.block = 100
    last = source.pieces(0)[-1]
    assert last == Piece(0, 16)
    with pytest.raises(DataError, match=r"log.csv, from the line of byte 1,600 on, line 104: 1 columns"):
        list(source.piece(["ad"], last))


def test_spark_that_is_not_installed(tmp_path, monkeypatch):
    source = written(tmp_path / "log", "csv")
    monkeypatch.setitem(sys.modules, "ibis", None)
    monkeypatch.delitem(sys.modules, "lpfs.data.engines.spark", raising=False)
    with pytest.raises(MissingPackageError, match=r"needs pyspark and ibis .*pip install 'lpfs\[spark\]'"):
        prepared(source, tmp_path / "out", "spark", time="day")


def test_what_pieces_cannot_do(tmp_path, here):
    source = written(tmp_path / "log", "csv")
    with pytest.raises(InputError, match="ordered"):
        prepared(source, tmp_path / "out", "here", time="day", ordered=True)
    job = plan_log({"click": [0, 1], "ad": ["a", "b"]}, label="click")
    with pytest.raises(InputError, match="only files"):
        HereEngine(job, Reporter(quiet=True))
    with pytest.raises(InputError, match="no engine 'flink'; there are embedded, spark"):
        prepare(source, tmp_path / "out", label="click", engine="flink", quiet=True)
