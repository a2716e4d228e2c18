"""Inferred kinds of columns."""

import datetime

import polars as pl
import pytest

from lpfs.data.infer import infer
from lpfs.data.planning import plan_log

ROWS = 2000
CASES = {
    "text": ([f"v{i % 300}" for i in range(ROWS)], "categorical"),
    "few integers": ([i % 20 for i in range(ROWS)], "categorical"),
    "few integers as text": ([str(i % 20) for i in range(ROWS)], "categorical"),
    "many integers": ([i * i % 997 for i in range(ROWS)], "numeric"),
    "many integers as text": ([str(i * i % 997) for i in range(ROWS)], "numeric"),
    "codes with missing values": ([None if i % 3 == 0 else float(i % 5) for i in range(ROWS)], "categorical"),
    "counts as floats": ([float(i % 3) for i in range(ROWS)], "numeric"),
    "floats": ([i / 7 for i in range(ROWS)], "numeric"),
    "floats as text with missing values": (["NA" if i % 9 == 0 else f"{i / 7:.3f}" for i in range(ROWS)], "numeric"),
    "leading zeros": ([f"{i % 700:05d}" for i in range(ROWS)], "categorical"),
    "ad_id": ([i * i % 997 for i in range(ROWS)], "categorical"),
    "userId": ([i * i % 997 for i in range(ROWS)], "categorical"),
    "zip": ([10000 + i % 900 for i in range(ROWS)], "categorical"),
    "long": ([2**53 + i % 700 for i in range(ROWS)], "categorical"),
    "long as text": ([str(2**53 + i % 700) for i in range(ROWS)], "categorical"),
    "longer than any integer": ([f"9{i % 700:030d}" for i in range(ROWS)], "categorical"),
    "long in every row": ([str(2**60 + i * 7919 % ROWS) for i in range(ROWS)], "ignore"),
    "click_id": ([i * 7919 % ROWS for i in range(ROWS)], "ignore"),
    "a zero late": ([f"{1000 + i % 700}" for i in range(ROWS - 1)] + ["0012"], "categorical"),
    "ts": ([1_700_000_000 + i * 60 for i in range(ROWS)], "ignore"),
    "created_at": ([str(1_700_000_000_000 + i * 60) for i in range(ROWS)], "ignore"),
    "big amounts": ([1_700_000_000 + i * i for i in range(ROWS - 1)] + [7], "numeric"),
    "with a comma": ([f"{at},{at % 90 + 10}" for at in range(ROWS)], "ignore"),
    "paid": ([i * i % 997 for i in range(ROWS)], "numeric"),
    "row number": (list(range(ROWS)), "ignore"),
    "row name": ([f"row{i}" for i in range(ROWS)], "ignore"),
    "true/false": ([i % 2 == 0 for i in range(ROWS)], "categorical"),
    "timestamp": ([f"2020-01-{1 + i % 28:02d} 10:00:00" for i in range(ROWS)], "ignore"),
    "date": ([f"2020-01-{1 + i % 28:02d}" for i in range(ROWS)], "ignore"),
    "time of day": ([datetime.time(row % 24) for row in range(ROWS)], "ignore"),
    "split": (["train" if i < 1500 else "test" for i in range(ROWS)], "ignore"),
    "genres": (["|".join(c for k, c in enumerate("abcdef") if i >> k & 1) or "g" for i in range(ROWS)], "multi"),
    "two by two": ([f"{i % 40}|{i % 30}" for i in range(ROWS)], "categorical"),
    "list": ([["a"] * (i % 3) for i in range(ROWS)], "multi"),
    "vector": ([[0.5, i / 3] for i in range(ROWS)], "numeric"),
    "ragged vector": ([[0.5] * (1 + i % 2) for i in range(ROWS)], "ignore"),
    "struct": ([{"x": i} for i in range(ROWS)], "ignore"),
    "blob": ([b"x"] * ROWS, "ignore"),
    "empty": ([None] * ROWS, "categorical"),
    "all text null": (pl.Series([None] * ROWS, dtype=pl.String), "categorical"),
    "one nan": ([float("nan")] * ROWS, "numeric"),
    "texts for missing values": (["NA"] * ROWS, "categorical"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kind_of_a_column(name):
    values, kind = CASES[name]
    plan = infer(pl.Series(name, values), typed="as text" not in name)
    assert plan.kind == kind, plan.why
    assert plan.why


def test_a_time_of_day_does_not_order_the_rows():
    times = [datetime.time(row % 24) for row in range(48)]
    frame = pl.DataFrame({"click": [0, 1] * 24, "user": ["a", "b", "c"] * 16, "t": times})
    plan = plan_log(frame, label="click")
    assert plan.options.time is None
    assert plan.plans[1].why.startswith("a time of day without a date")


def test_kinds_from_few_rows():
    assert infer(pl.Series("n", [1, 2, 3])).kind == "numeric"
    assert infer(pl.Series("n", [1, 2, 1])).kind == "categorical"
    assert infer(pl.Series("name", ["x", "y", "z"])).kind == "categorical"
    assert infer(pl.Series("id", [1, 2, 3])).kind == "categorical"
