"""Values of a raw log."""

import polars as pl
import pytest

from lpfs.data.parsing import cast_column
from lpfs.errors import DataError


@pytest.mark.parametrize("unit", ["ms", "us"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_time_that_cannot_be_written_is_refused_before_polars_panics(unit, sign, capfd):
    ticks = {"ms": 10**3, "us": 10**6}[unit]
    last = pl.Series("t", [None, sign * 8 * 10**12 * ticks], pl.Int64).cast(pl.Datetime(unit))
    assert cast_column(last, pl.String)[1].lstrip("+-").startswith("25")
    beyond = pl.Series("t", [None, sign * (2**63 - 1)], pl.Int64).cast(pl.Datetime(unit))
    with pytest.raises(DataError, match="'t' holds an invalid value: a date"):
        cast_column(beyond, pl.String)
    days = pl.Series("t", [sign * (2**31 - 1)], pl.Int32).cast(pl.Date)
    with pytest.raises(DataError, match="'t' holds an invalid value: a date"):
        cast_column(days, pl.String)
    assert capfd.readouterr().err == ""
