"""Parsing of text blocks."""

import polars as pl
from hypothesis import given, settings, strategies as st

from lpfs.data.sources.csv import Dialect, parse
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
