"""The table of fields, as a person sees it."""

import polars as pl

from lpfs.data.planning import field_table, field_table_compact, plan_log

WIDE = pl.DataFrame(
    {"click": [0, 1] * 50, **{f"x{at}": [0.5, at] * 50 for at in range(400)}, "ad": ["a", "b"] * 50}
)


def test_like_columns_are_one_line_and_programs_get_them_all():
    header, rows = field_table_compact(plan_log(WIDE, label="click"))
    assert header == ["column", "kind", "why"]
    assert [row[0] for row in rows] == ["click", "x0 … x399 (400 columns)", "ad"]
    assert rows[1][1:] == ("numeric", "numbers, 2 values in 100 rows")
    assert len(field_table(plan_log(WIDE, label="click"))) == 402


def test_a_column_that_differs_has_its_own_line():
    fields = {"x7": "categorical", "x9": {"group": "item", "cost": 2.0}}
    header, rows = field_table_compact(plan_log(WIDE, label="click", fields=fields))
    assert header == ["column", "kind", "group", "options", "why"]
    assert [row[0] for row in rows][1:5] == ["x0 … x6 (7 columns)", "x7", "x8", "x9"]
    assert ("x9", "numeric", "item", "cost=2.0", "numbers, 2 values in 100 rows") in rows
    assert ("x7", "categorical", "context", "", "given") in rows
