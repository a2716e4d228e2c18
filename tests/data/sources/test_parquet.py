"""Page headers of Parquet files."""

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lpfs.data.sources.parquet import check_pages, column_chunks
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
        chunks = len(column_chunks(file))
    assert chunks >= 3
    assert check_pages(path) >= 1.5 * chunks


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
