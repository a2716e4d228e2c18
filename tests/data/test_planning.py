"""The table of fields, and fields.toml."""

import polars as pl

from lpfs.data.fields import FieldPlan, read_fields, to_toml
from lpfs.data.planning import field_table, field_table_compact, plan_log

WIDE = pl.DataFrame({"click": [0, 1] * 50, **{f"x{at}": [0.5, at] * 50 for at in range(400)}, "ad": ["a", "b"] * 50})


def test_similar_columns_are_merged_only_in_the_compact_table():
    header, rows = field_table_compact(plan_log(WIDE, label="click"))
    assert header == ["column", "kind", "why"]
    assert [row[0] for row in rows] == ["click", "x0 … x399 (400 columns)", "ad"]
    assert rows[1][1:] == ("numeric", "numbers, 2 values in 100 rows")
    assert len(field_table(plan_log(WIDE, label="click"))) == 402


def test_a_different_column_has_a_separate_line():
    fields = {"x7": "categorical", "x9": {"group": "item", "cost": 2.0}}
    header, rows = field_table_compact(plan_log(WIDE, label="click", fields=fields))
    assert header == ["column", "kind", "group", "options", "why"]
    assert [row[0] for row in rows][1:5] == ["x0 … x6 (7 columns)", "x7", "x8", "x9"]
    assert ("x9", "numeric", "item", "cost=2.0", "numbers, 2 values in 100 rows") in rows
    assert ("x7", "categorical", "context", "", "given") in rows


def test_fields_survive_a_round_trip_through_toml(tmp_path):
    plans = [
        FieldPlan('we"ird\n', "multi", separator="|", why="a\nreason"),
        FieldPlan("ad", hash=10, cost=2.5, group="item", hexadecimal=True),
        FieldPlan("n", "numeric", bins=4, transform="none"),
        FieldPlan("日本\u202e\x7f", "ignore"),
    ]
    (tmp_path / "fields.toml").write_text(to_toml(plans), "utf-8")
    corrections = read_fields(tmp_path / "fields.toml")
    assert [
        FieldPlan(name, **options, why=plan.why)
        for plan, (name, options) in zip(plans, corrections.items(), strict=True)
    ] == plans
