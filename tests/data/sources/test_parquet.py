"""Page headers of Parquet files."""

import subprocess
import sys

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lpfs.data.sources.parquet import ParquetSource, check_pages, row_groups
from lpfs.errors import DataError


@pytest.mark.parametrize("compression", ["uncompressed", "zstd", "snappy", "gzip", "brotli", "lz4"])
@pytest.mark.parametrize("writer", ["polars", "arrow", "arrow v2"])
def test_intact_files_pass(tmp_path, compression, writer):
    frame = pl.DataFrame({"click": [0, 1] * 500, "t": [f"v{i}" for i in range(1000)], "l": [[1, 2], None] * 500})
    path = tmp_path / "log.parquet"
    if writer == "polars":
        frame.write_parquet(path, compression=compression, row_group_size=300, data_page_size=500)
    else:
        arrow = pa.table(frame.to_dict(as_series=False))
        version = "2.0" if writer == "arrow v2" else "1.0"
        codec = {"uncompressed": "none"}.get(compression, compression)
        pq.write_table(arrow, path, compression=codec, data_page_version=version, data_page_size=500)
    with path.open("rb") as file:
        groups = row_groups(file)
    chunks = sum(len(group[1]) for group in groups)
    assert chunks >= 3
    pages, largest = check_pages(path)
    assert pages >= 1.5 * chunks
    assert largest == max(group[3] for group in groups) == (300 if writer == "polars" else 1000)


def test_a_damaged_count_in_a_page_header_is_an_error(tmp_path):
    path = tmp_path / "log.parquet"
    pl.DataFrame({"click": [0, 1, 0, 1, 1]}).write_parquet(path, compression="uncompressed", statistics=False)
    data = path.read_bytes()
    errors = 0
    for position in range(4, len(data) - 8):  # the count 5, zigzag-encoded, becomes -33
        if data[position - 1 : position + 1] == b"\x15\x0a":
            path.write_bytes(data[:position] + b"\x41" + data[position + 1 :])
            try:
                check_pages(path)
            except DataError as error:
                assert "has a damaged page at byte" in str(error)  # noqa: PT017
                errors += 1
    assert errors
    path.write_bytes(b"PAR1")
    check_pages(path)


@pytest.mark.parametrize("group", [7, 100, 250, 1000])
def test_chunks_do_not_depend_on_row_groups_and_slices(tmp_path, monkeypatch, group):
    monkeypatch.setattr("lpfs.data.sources.parquet.ROWS", 50)
    monkeypatch.setattr("lpfs.data.sources.parquet.SLICE_CELLS", 50 * 3 * 2)
    lists = [[i, None][: i % 3] for i in range(1000)]
    columns = {"click": [0, 1] * 500, "ad": [f"v{i % 30}" for i in range(1000)], "tags": lists}
    frame = pl.DataFrame(columns, schema_overrides={"tags": pl.List(pl.Int64)})
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=group, data_page_size=300)
    chunks = list(ParquetSource([tmp_path / "log.parquet"]).chunks(frame.columns))
    assert [chunk.frame.height for chunk in chunks] == [50] * 20
    assert pl.concat([chunk.frame for chunk in chunks]).equals(frame)
    assert [chunk.locate(3).rpartition(" ")[2] for chunk in chunks] == [str(50 * i + 4) for i in range(20)]


MEMORY = """
import sys, pathlib, resource
import polars as pl
from lpfs.data.sources.parquet import ParquetSource
source = ParquetSource([pathlib.Path(sys.argv[1])])
print(sum(chunk.frame.height for chunk in source.chunks(source.names)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


@pytest.mark.long
def test_memory_does_not_grow_with_the_row_group(tmp_path):
    rows = 2_000_000
    columns = {f"c{i}": pl.select(pl.int_range(rows) * (i + 3) % 50_021).to_series() for i in range(12)}
    frame = pl.DataFrame(columns).with_columns(pl.col("c0", "c1", "c2", "c3").cast(pl.String))
    megabytes = {}
    for group in (1 << 16, rows):
        frame.write_parquet(tmp_path / "log.parquet", row_group_size=group)
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "log.parquet")]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(output[0]) == rows
        megabytes[group] = int(output[1])
    assert megabytes[rows] < megabytes[1 << 16] + 150
