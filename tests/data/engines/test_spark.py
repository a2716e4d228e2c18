"""The Spark engine makes the same Dataset as the local engine (make test-spark; needs java 17)."""

import os
import sys

import pytest

pytest.importorskip("ibis")
pytest.importorskip("pyspark")

import lpfs
from lpfs.cli import run
from lpfs.errors import DataError
from tests.helpers.logs import assert_same_files, prepare_log, write_log

# pyspark and ibis use deprecated functions of pandas and sqlglot
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
    active = builder.getOrCreate()
    yield active
    active.stop()


def test_a_log_of_every_kind_of_column(tmp_path, session):
    source = write_log(tmp_path / "log", "csv", files=2)
    options = {"time": "day", "negatives": 0.5, "seed": 3}
    local = prepare_log(source, tmp_path / "local", "embedded", block=1 << 11, **options)
    spark = prepare_log(source, tmp_path / "spark", "spark", block=1 << 11, **options)
    assert local.fingerprint == spark.fingerprint
    assert {field.kind for field in spark.schema} == {"categorical", "numeric", "multi"}
    assert assert_same_files(tmp_path / "local", tmp_path / "spark") > 40
    assert session.range(1).count() == 1  # a session that was active before stays active


def test_a_simulated_log(tmp_path):
    """Four days, categorical, numeric, hashed, bags, missing values; Parquet, one file per day."""
    lpfs.simulate(tmp_path / "raw", "small", rows=3000, days=4, format="parquet")
    options = {"label": "click", "parts": "files", "fields": {"f00": {"kind": "categorical", "hash": 100}}}
    local = lpfs.prepare(tmp_path / "raw/log", tmp_path / "local", quiet=True, **options)
    spark = lpfs.prepare(tmp_path / "raw/log", tmp_path / "spark", quiet=True, engine="spark", **options)
    assert local.fingerprint == spark.fingerprint
    assert spark.rows == 3000
    assert assert_same_files(tmp_path / "local", tmp_path / "spark") > 100


def test_the_command_with_a_shared_directory(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("LPFS_SHARED", str(tmp_path / "shared"))
    source = write_log(tmp_path / "log", "csv", files=2)
    arguments = [*map(str, [source, "--label", "click", "--time", "day", "--hash", 40, "--quiet"])]
    for engine in ("embedded", "spark"):
        assert run(["prepare", *arguments, "--engine", engine, "--out", str(tmp_path / engine)]) == 0
    assert_same_files(tmp_path / "embedded", tmp_path / "spark")
    assert not list((tmp_path / "shared").iterdir())


def test_an_error_of_a_worker_is_raised(tmp_path):
    source = write_log(tmp_path / "log", "csv", files=2)
    with (source / "part_1.csv").open("a") as file:
        file.write("7,5,train,a,u,1,ff,1,1,t,1,x\n")
    with pytest.raises(DataError, match=r"^\S+part_1.csv, line 502: label 'click' must be 0 or 1, found '7'"):
        prepare_log(source, tmp_path / "out", "spark", time="day")
    assert not (tmp_path / "out").exists()
