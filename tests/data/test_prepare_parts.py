"""The parts of prepare: lookup, moments, quantiles, blocks, what it says."""

import io
import subprocess
import sys

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lpfs.data import progress, reading
from lpfs.data.clock import ColumnClock
from lpfs.data.lookup import Lookup, mix
from lpfs.data.numeric import Moments, Quantiles
from lpfs.data.parquetcheck import check_pages, column_chunks
from lpfs.data.prepare import prepare
from lpfs.data.progress import Reporter
from lpfs.data.sources import Chunk
from lpfs.data.vocab import Counter
from lpfs.errors import DataError, MissingPackageError


@pytest.mark.parametrize("size", [0, 1, 2, 7, 8, 1000, 50_000])
@pytest.mark.parametrize("spread", [1, 2**40, 2**63])
def test_lookup_is_a_dict(size, spread):
    rng = np.random.default_rng(size)
    keys = np.unique(rng.integers(0, max(spread, 2 * size), size, dtype=np.uint64))
    rng.shuffle(keys)
    table = {key: index + 2 for index, key in enumerate(keys.tolist())}
    asked = np.concatenate([keys, rng.integers(0, max(spread, 2 * size) + 1, 500, dtype=np.uint64)])
    assert Lookup(keys, 2)(asked).tolist() == [table.get(key, 1) for key in asked.tolist()]


def test_mixing_is_the_same_everywhere():
    assert mix([0, 1], 0).tolist() == [16294208416658607535, 10451216379200822465]
    marks = mix(np.arange(100_000), 5).astype(float) / 2**64
    assert abs(marks.mean() - 0.5) < 0.01


def test_counter_merges_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    values = pl.Series([f"v{i}" for i in (rng.random(5000) ** 3 * 800).astype(int)])
    counter = Counter()
    for start in range(0, 5000, 333):
        counter.add(values.slice(start, 333))
        counter._merge()
    expected = values.value_counts(name="n").sort("n", values.name, descending=[True, False])
    assert counter.result()["count"].to_list() == expected["n"].to_list()
    assert counter.result()["value"].to_list() == expected[values.name].to_list()


def test_moments_of_chunks_are_those_of_the_whole():
    numbers = np.random.default_rng(0).normal(1e6, 3.0, (1000, 2))
    numbers[::7, 1] = np.nan
    moments = Moments(2)
    for part in np.array_split(numbers, 9):
        moments.add(part)
    np.testing.assert_allclose(moments.mean, np.nanmean(numbers, 0), rtol=1e-12)
    np.testing.assert_allclose(moments.deviation, np.nanstd(numbers, 0), rtol=1e-9)
    assert not moments.constant


def test_quantiles_keep_a_bounded_sample_that_chunks_do_not_change(monkeypatch):
    monkeypatch.setattr("lpfs.data.numeric.SAMPLED", 500)
    numbers = np.random.default_rng(0).random(20_000)
    whole, cut = Quantiles(3), Quantiles(3)
    whole.add(numbers)
    for part in np.array_split(numbers, 33):
        cut.add(part)
        assert len(cut._values) <= 2 * 500
    assert whole.edges(4).tolist() == cut.edges(4).tolist()
    assert np.abs(whole.edges(4) - [0.25, 0.5, 0.75]).max() < 0.1
    assert Quantiles(0).edges(5).tolist() == []


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST", 100)
    monkeypatch.setattr("lpfs.data.csvsource.HEAD", 100)
    path = tmp_path / "log.csv"
    path.write_text("click,ad\n1," + "x" * 500)
    original = reading.Blocks.__init__
    monkeypatch.setattr(reading.Blocks, "__init__", lambda self, *a, **k: original(self, *a, **{**k, "size": 64}))
    with pytest.raises(DataError, match="a line is longer than"):
        prepare(path, tmp_path / "out", label="click", quiet=True)
    path.write_text("x" * 500)
    with pytest.raises(DataError, match="a line is longer than"):
        prepare(path, tmp_path / "out", label="click", quiet=True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def chunks():
    for _ in range(3):
        yield Chunk(pl.DataFrame({"x": [1, 2]}), 0, str, 10)


def test_plain_lines_a_bar_or_nothing(monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    plain, terminal, quiet = io.StringIO(), Terminal(), io.StringIO()
    assert len(list(Reporter(stream=plain).track(chunks(), "counting", 30))) == 3
    assert "counting: 2 rows" in plain.getvalue()
    assert "s left" in plain.getvalue()
    assert "counting: 6 rows in" in plain.getvalue()
    assert len(list(Reporter(stream=terminal).track(chunks(), "counting", 30))) == 3
    assert "100 %" in terminal.getvalue()
    assert "rows/s" in terminal.getvalue()
    silent = Reporter(quiet=True, stream=quiet)
    assert len(list(silent.track(chunks(), "counting", 30))) == 3
    silent.table("t", ["a"], [["b"]])
    assert quiet.getvalue() == ""
    for stream in (plain, terminal):
        with Reporter(stream=stream).counting("simulating") as told:
            told(5, 10)
            told(10, 10)
        assert "simulating" in stream.getvalue()


def test_nothing_moves_the_cursor(monkeypatch):
    stream = io.StringIO()
    Reporter(stream=stream).table("Fields", ["column"], [["\x1b[31mred\r[bold]x[/bold]"]])
    assert "\x1b" not in stream.getvalue()
    assert "[bold]x[/bold]" in stream.getvalue()
    monkeypatch.setitem(sys.modules, "rich.table", None)
    Reporter(stream=stream).table("Fields", ["column"], [["plain"]])
    assert stream.getvalue().endswith("column\nplain\n")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = tmp_path / "log.csv.zst"
    path.write_bytes(reading.ZSTD + b"rest")
    if sys.version_info < (3, 14):
        monkeypatch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(MissingPackageError, match="pip install zstandard"):
            prepare(path, tmp_path / "out", label="click", quiet=True)
    script = (
        "import sys; sys.modules['polars'] = None\n"
        "from lpfs.cli import call; sys.exit(call(['prepare', 'x', '--label', 'y', '--out', 'z']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install polars" in done.stderr


def test_a_date_that_no_calendar_has():
    clock = ColumnClock("when", None)
    frame = pl.DataFrame({"when": pl.Series([2**30, 0], dtype=pl.Int32).cast(pl.Date)})
    with pytest.raises(DataError, match="cannot be"):
        clock.look(Chunk(frame, 0, str, 0), ordered=False)


def test_a_table_that_is_no_table(tmp_path):
    class Odd:
        columns = ("a", "a")

        def to_numpy(self):
            raise NotImplementedError

    with pytest.raises(DataError, match="two columns of the table are named 'a'"):
        prepare(Odd(), tmp_path / "out", label="a", quiet=True)
    with pytest.raises(DataError, match="the table cannot be read"):
        prepare({"a": [1], "b": [1, 2]}, tmp_path / "out", label="a", quiet=True)
    with pytest.raises(DataError, match="has no name"):
        prepare({"": [1]}, tmp_path / "out", label="a", quiet=True)


def test_pandas_without_arrow(tmp_path, monkeypatch):
    frame = pd.DataFrame({"click": [0, 1], "n": [1.5, 2.5], 3: [1, 2]})

    def refuse(self, requested_schema=None):
        raise ImportError("pyarrow")

    monkeypatch.setattr(pd.DataFrame, "__arrow_c_stream__", refuse)
    dataset = prepare(frame, tmp_path / "out", label="click", parts=1, quiet=True)
    assert dataset.schema.names == ("n", "3")


@pytest.mark.parametrize("compression", ["uncompressed", "zstd", "snappy", "gzip", "brotli", "lz4"])
@pytest.mark.parametrize("writer", ["polars", "arrow", "arrow v2"])
def test_pages_of_whole_files_pass(tmp_path, compression, writer):
    frame = pl.DataFrame({"click": [0, 1] * 500, "t": [f"v{i}" for i in range(1000)], "l": [[1, 2], None] * 500})
    path = tmp_path / "log.parquet"
    if writer == "polars":
        frame.write_parquet(path, compression=compression, row_group_size=300, data_page_size=500)
    else:
        arrow = pa.table(frame.to_dict(as_series=False))
        version = "2.0" if writer == "arrow v2" else "1.0"
        plain = {"uncompressed": "none"}.get(compression, compression)
        pq.write_table(arrow, path, compression=plain, data_page_version=version, data_page_size=500)
    with path.open("rb") as file:
        chunks = len(column_chunks(file))
    assert chunks >= 3
    assert check_pages(path) >= 1.5 * chunks


def test_a_damaged_count_in_a_page_header(tmp_path):
    path = tmp_path / "log.parquet"
    pl.DataFrame({"click": [0, 1, 0, 1, 1]}).write_parquet(path, compression="uncompressed", statistics=False)
    data = path.read_bytes()
    found = 0
    for at in range(4, len(data) - 8):  # 5 values, zigzag, become -33
        if data[at - 1 : at + 1] == b"\x15\x0a":
            path.write_bytes(data[:at] + b"\x41" + data[at + 1 :])
            try:
                check_pages(path)
            except DataError as error:
                assert "has a damaged page at byte" in str(error)  # noqa: PT017
                found += 1
    assert found
    path.write_bytes(b"PAR1")
    check_pages(path)
