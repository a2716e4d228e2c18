"""Days of rows."""

import polars as pl
import pytest

from lpfs.data.days import DayByColumn
from lpfs.data.sources.base import Chunk
from lpfs.errors import DataError


def test_a_date_that_no_calendar_has():
    clock = DayByColumn("when", None)
    frame = pl.DataFrame({"when": pl.Series([2**30, 0], dtype=pl.Int32).cast(pl.Date)})
    with pytest.raises(DataError, match="cannot be"):
        clock.scan(Chunk(frame, 0, str, 0), ordered=False)
