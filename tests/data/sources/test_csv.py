"""Parsing of text blocks."""

import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from lpfs.data.sources.csv import CsvSource, Dialect, parse
from lpfs.errors import DataError

NAMES = ("a", "b", "c")
cells = st.one_of(st.text('x" ', max_size=4), st.sampled_from(['"x"', '"x,y"', '"x""y"', '"x\ny"', '""']))


def parsed(block, columns):
    try:
        result = parse(block, NAMES, columns, Dialect(), file="log", first=1, last=True)
    except DataError as error:
        return str(error)
    return result.frame, [result.locate(row) for row in range(result.frame.height)]


@given(st.lists(st.lists(cells, min_size=3, max_size=3), min_size=1, max_size=4), st.permutations(NAMES), st.data())
@settings(max_examples=300)
def test_rows_do_not_depend_on_the_columns_read(rows, names, data):
    block = "".join(",".join(row) + "\n" for row in rows).encode()
    columns = names[: data.draw(st.integers(1, 3))]
    whole, part = parsed(block, NAMES), parsed(block, columns)
    if isinstance(whole, str):
        assert part == whole
        return
    assert isinstance(part[0], pl.DataFrame)
    assert part[0].equals(whole[0].select(columns))
    assert part[1] == whole[1]


@pytest.mark.parametrize("block", [6, 9, 1 << 24])
def test_a_byte_order_mark_is_removed_at_the_start_of_the_file_only(tmp_path, block):
    path = tmp_path / "log.csv"
    path.write_bytes("\ufeffad,b\n\ufeffx,1\ny,2\n\ufeffz,3\n".encode())
    source = CsvSource([path])
    source.block = block
    assert source.names == ("ad", "b")
    values = [value for chunk in source.chunks(["ad"]) for value in chunk.frame["ad"]]
    assert values == ["\ufeffx", "y", "\ufeffz"]


@pytest.mark.parametrize("end", ["", "\n", "\nx,y,z"])
@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("rows", [["1,2", "1,2,3,"], ["1,2,3,", "1,2"], ["1,2,3", "1", "1,2,3,,"]])
def test_a_short_row_is_an_error_even_if_a_long_row_has_the_missing_separator(rows, quote, end):
    text = "\n".join(["x,y,z", *rows]) + end
    block = text.replace("x", f"{quote}x{quote}").encode()
    with pytest.raises(DataError, match="log, line [23]: [1-4] columns, expected 3"):
        parse(block, NAMES, NAMES, Dialect(), file="log", first=1, last=True)
