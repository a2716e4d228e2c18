"""The Spark engine makes the very Dataset of the embedded one (make test-spark; needs java 17)."""

import os
import sys

import pytest

pytest.importorskip("ibis")
pytest.importorskip("pyspark")

from logs import prepared, same_files, written

import lpfs
from lpfs.cli import run
from lpfs.errors import DataError

# pyspark and ibis call what newer pandas and sqlglot call old
pytestmark = [pytest.mark.spark, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def session():
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
    }
    builder = SparkSession.builder.master("local[1]").appName("lpfs tests")
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    yield made
    made.stop()


def test_a_log_of_every_kind_of_column(tmp_path, session):
    source = written(tmp_path / "log", "csv", files=2)
    options = {"time": "day", "negatives": 0.5, "seed": 3}
    one = prepared(source, tmp_path / "one", "embedded", block=1 << 11, **options)
    two = prepared(source, tmp_path / "two", "spark", block=1 << 11, **options)
    assert one.fingerprint == two.fingerprint
    assert {field.kind for field in two.schema} == {"categorical", "numeric", "multi"}
    assert same_files(tmp_path / "one", tmp_path / "two") > 40
    assert session.range(1).count() == 1  # a session that was there goes on


def test_a_simulated_log(tmp_path):
    """Ten days, categorical, numeric, hashed, bags, missing values; Parquet, a file a day."""
    lpfs.simulate(tmp_path / "raw", "small", rows=3000, days=4, format="parquet")
    options = {"label": "click", "parts": "files", "fields": {"f00": {"kind": "categorical", "hash": 100}}}
    one = lpfs.prepare(tmp_path / "raw/log", tmp_path / "one", quiet=True, **options)
    two = lpfs.prepare(tmp_path / "raw/log", tmp_path / "two", quiet=True, engine="spark", **options)
    assert one.fingerprint == two.fingerprint
    assert two.rows == 3000
    assert same_files(tmp_path / "one", tmp_path / "two") > 100


def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("LPFS_SHARED", str(tmp_path / "shared"))
    source = written(tmp_path / "log", "csv", files=2)
    told = [*map(str, [source, "--label", "click", "--time", "day", "--hash", 40, "--quiet"])]
    for engine in ("embedded", "spark"):
        assert run(["prepare", *told, "--engine", engine, "--out", str(tmp_path / engine)]) == 0
    same_files(tmp_path / "embedded", tmp_path / "spark")
    assert not list((tmp_path / "shared").iterdir())


def test_what_a_worker_finds_wrong_is_said_here(tmp_path):
    source = written(tmp_path / "log", "csv", files=2)
    with (source / "part_1.csv").open("a") as file:
        file.write("7,5,train,a,u,1,ff,1,1,t,1,x\n")
    with pytest.raises(DataError, match=r"^\S+part_1.csv, line 502: label 'click' must be 0 or 1, found '7'"):
        prepared(source, tmp_path / "out", "spark", time="day")
    assert not (tmp_path / "out").exists()
