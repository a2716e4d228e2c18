"""A cluster engine, with pieces in any order, makes the same Dataset as the local engine, byte for byte."""

import gzip
import sys

import polars as pl
import pytest

from lpfs._console import Console
from lpfs.data import prepare as prepare_module
from lpfs.data.engines import make_engine
from lpfs.data.engines.cluster import SharedFolder
from lpfs.data.planning import plan_log
from lpfs.data.prepare import plan_source, prepare
from lpfs.data.sources import open_source
from lpfs.data.sources.base import Piece
from lpfs.errors import DataError, InputError, MissingPackageError
from tests.helpers.logs import FIELDS, InProcessEngine, assert_same_files, prepare_log, write_log

DAY_OPTIONS = {
    "days": {"time": "day"},
    "days, half of the negatives": {"time": "day", "negatives": 0.5, "seed": 3},
    "days by name": {"time": "day", "time_format": "name", "fields": {**FIELDS, "role": "ignore"}},
    "files": {"parts": "files", "train": 2},
    "files, some negatives": {"parts": "files", "negatives": {"part_1": 0.3}},
    "row order": {"parts": 7},
    "row order, some negatives": {"parts": 7, "negatives": 0.4},
    "shuffled": {"parts": 4, "shuffle": True, "negatives": 0.6, "seed": 1},
    "split": {"split": "role", "parts": 3, "negatives": 0.5},
    "split and days": {"split": "role", "time": "day"},
    "hashed": {"time": "day", "hash": 30, "bins": "auto", "keep_all": True},
}


@pytest.fixture
def in_process(monkeypatch):
    """Add the engine "in-process"."""

    def make(name, plan, console):
        return InProcessEngine(plan, console) if name == "in-process" else make_engine(name, plan, console)

    monkeypatch.setattr(prepare_module, "make_engine", make)


@pytest.mark.long
@pytest.mark.parametrize("format", ["csv", "parquet"])
@pytest.mark.parametrize("options", DAY_OPTIONS.values(), ids=DAY_OPTIONS)
def test_both_engines_make_the_same_dataset(tmp_path, in_process, options, format):
    source = write_log(tmp_path / "log", format)
    block = 512 if format == "csv" else None
    local = prepare_log(source, tmp_path / "local", "embedded", block=block, **options)
    cluster = prepare_log(source, tmp_path / "cluster", "in-process", block=block, **options)
    assert local.fingerprint == cluster.fingerprint
    assert assert_same_files(tmp_path / "local", tmp_path / "cluster") > 5
    if "keep_all" not in options:
        assert set(cluster.settings["dropped"]) >= {"duplicate", "constant"}


def test_rows_encoded_like_another_dataset(tmp_path, in_process):
    source = write_log(tmp_path / "log", "csv")
    like = prepare_log(source, tmp_path / "like", "embedded", time="day")
    for engine in ("embedded", "in-process"):
        plan = plan_source(source, like=like)
        prepare_module.run_plan(plan, tmp_path / engine, engine=engine)
    assert_same_files(tmp_path / "embedded", tmp_path / "in-process")


def test_a_column_with_two_types(tmp_path, in_process):
    folder = tmp_path / "log"
    folder.mkdir()
    for index, codes in enumerate(([1, 2, 2, 3], [2.0, 3.0, None, 4.5])):
        pl.DataFrame({"click": [0, 1, 0, 1], "code": codes}).write_parquet(folder / f"{index}.parquet")
    fields = {"code": {"kind": "categorical", "min_count": 2}}
    for engine in ("embedded", "in-process"):
        dataset = prepare_log(folder, tmp_path / engine, engine, parts=2, train=2, fields=fields)
        assert dataset.vocabulary("code").tolist() == [2.0, 3.0]  # 3 occurs once as an integer and once as a float
    assert_same_files(tmp_path / "embedded", tmp_path / "in-process")


def test_a_piece_without_values(tmp_path, in_process):
    (tmp_path / "log.csv").write_text("click,code\n" + "0,\n" * 40 + "0,ff\n1,a\n" * 40)
    fields = {"code": {"kind": "categorical", "hexadecimal": True}}
    for engine in ("embedded", "in-process"):
        dataset = prepare_log(tmp_path / "log.csv", tmp_path / engine, engine, block=10, parts=1, fields=fields)
        assert dataset.vocabulary("code").tolist() == [10, 255]
    assert_same_files(tmp_path / "embedded", tmp_path / "in-process")


def test_a_column_with_only_rare_values(tmp_path, in_process):
    (tmp_path / "log.csv").write_text("click,code,n\n" + "".join(f"{n % 2},{n:x},{n % 3}\n" for n in range(40)))
    fields = {"code": {"kind": "categorical", "hexadecimal": True, "min_count": 2}}
    for engine in ("embedded", "in-process"):
        dataset = prepare_log(tmp_path / "log.csv", tmp_path / engine, engine, block=20, parts=1, fields=fields)
        assert dataset.vocabulary("code").dtype == "uint32"
        assert dataset.vocabulary_about("code")["values_seen"] == 40
    assert_same_files(tmp_path / "embedded", tmp_path / "in-process")


def test_pieces_consist_of_the_chunks_of_the_source(tmp_path):
    source = open_source(write_log(tmp_path / "log", "csv"))
    source.block = 300
    pieces = [piece for index in range(3) for piece in source.pieces(index)]
    assert len(pieces) > 10
    assert pieces[1] == Piece(0, 8, 16)
    assert pieces[-1].stop is None
    chunks = [chunk.frame for chunk in source.chunks(source.names)]
    piece_chunks = [chunk.frame for piece in pieces for chunk in source.piece(source.names, piece)]
    assert len(chunks) > 50
    assert [frame.rows() for frame in chunks] == [frame.rows() for frame in piece_chunks]


def test_compressed_and_quoted_files_are_one_piece(tmp_path):
    plain = "click,ad\n" + "0,a\n1,b\n" * 500
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(plain.encode()))
    (tmp_path / "b.csv").write_text(plain + '1,"b\nc"\n')
    (tmp_path / "c.csv").write_text(plain)
    source = open_source(tmp_path)
    source.block = 100
    assert [len(source.pieces(index)) for index in range(3)] == [1, 1, 6]


def test_an_error_in_a_later_piece_names_the_byte_its_lines_count_from(tmp_path):
    (tmp_path / "log.csv").write_text("click,ad\n" + "0,a\n" * 500 + "broken\n")
    source = open_source(tmp_path / "log.csv")
    source.block = 100
    last = source.pieces(0)[-1]
    assert last == Piece(0, 16)
    with pytest.raises(DataError, match=r"log.csv, .*byte 1,600.*line 104: 1 columns"):
        list(source.piece(["ad"], last))


def test_spark_is_not_installed(tmp_path, monkeypatch):
    source = write_log(tmp_path / "log", "csv")
    monkeypatch.setitem(sys.modules, "ibis", None)
    monkeypatch.delitem(sys.modules, "lpfs.data.engines.spark", raising=False)
    with pytest.raises(MissingPackageError, match=r"needs pyspark and ibis .*pip install 'lpfs\[spark\]'"):
        prepare_log(source, tmp_path / "out", "spark", time="day")


def test_invalid_uses_of_a_cluster_engine_raise(tmp_path, in_process):
    source = write_log(tmp_path / "log", "csv")
    with pytest.raises(InputError, match="ordered.*embedded"):
        prepare_log(source, tmp_path / "out", "in-process", time="day", ordered=True)
    plan = plan_log({"click": [0, 1], "ad": ["a", "b"]}, label="click")
    with pytest.raises(InputError, match="can only read files.*embedded"):
        InProcessEngine(plan, Console(quiet=True))
    with pytest.raises(InputError, match="unknown engine 'flink'.*embedded, spark"):
        prepare(source, tmp_path / "out", label="click", engine="flink", quiet=True)


@pytest.mark.parametrize("kind", ["directory", "store"])
def test_a_shared_folder_returns_values_in_order_and_is_removed(tmp_path, kind):
    parent = "memory://shared/" if kind == "store" else str(tmp_path / "all")
    first, second = SharedFolder.create_in(parent), SharedFolder.create_in(parent)
    names = first.write_all(lambda count: ({"number": number} for number in range(count)), 3)
    name = second.write("value of the second")
    first.write("never read")
    assert [first.pop(name) for name in names] == [{"number": 0}, {"number": 1}, {"number": 2}]
    with pytest.raises((OSError, ValueError)):
        first.pop(names[0])
    first.remove()
    first.remove()
    assert second.pop(name) == "value of the second"
    second.remove()
