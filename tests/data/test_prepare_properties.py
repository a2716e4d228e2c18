"""prepare on arbitrary logs: equal to a plain Python implementation; damaged input raises only our errors."""

import contextlib
import io
import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from lpfs.data.fields import read_fields
from lpfs.data.prepare import prepare
from lpfs.errors import LpfsError

ROWS = st.tuples(
    st.integers(0, 1),
    st.integers(1, 4),
    st.sampled_from([None, "a", "b", "B", "é", "007", "7", "7.0", " a"]),
    st.one_of(st.none(), st.integers(-5, 2**40)),
)


def reference_dataset(log, min_count, max_values):
    """Return {day: (labels, ids, numbers)}; all days but the last are training days."""
    days = sorted({row[1] for row in log})
    train = [row for row in log if row[1] in days[: max(1, len(days) - 1)]]
    counts = Counter(row[2] for row in train if row[2] is not None)
    kept = sorted((value for value in counts if counts[value] >= min_count), key=lambda value: (-counts[value], value))
    ids = {value: index + 2 for index, value in enumerate(kept[:max_values])}

    def signed_log1p(x):
        return math.copysign(math.log1p(abs(x)), x)

    present_values = [signed_log1p(row[3]) for row in train if row[3] is not None]
    mean = float(np.mean(present_values)) if present_values else 0.0
    spread = float(np.std(present_values)) if len(set(present_values)) > 1 else 1.0
    result = {}
    for day in days:
        day_rows = [row for row in log if row[1] == day]
        result[str(day)] = (
            [row[0] for row in day_rows],
            [0 if row[2] is None else ids.get(row[2], 1) for row in day_rows],
            [math.nan if row[3] is None else (signed_log1p(row[3]) - mean) / spread for row in day_rows],
        )
    return result


@pytest.mark.long
@pytest.mark.parametrize("form", ["table", "csv"])
@given(log=st.lists(ROWS, min_size=1, max_size=40), min_count=st.integers(1, 3), max_values=st.integers(1, 6))
def test_labels_ids_and_numbers_equal_the_reference(form, log, min_count, max_values):
    names = {"click": pl.Int64, "day": pl.Int64, "ad": pl.String, "n": pl.Int64}
    frame = pl.DataFrame(log, schema=names, orient="row")
    fields = {"ad": {"kind": "categorical", "min_count": min_count, "max_values": max_values}, "n": "numeric"}
    with tempfile.TemporaryDirectory() as directory:
        source = frame
        if form == "csv":
            source = Path(directory) / "log.csv"
            frame.write_csv(source)
        out = Path(directory) / "out"
        dataset = prepare(source, out, label="click", time="day", fields=fields, keep_all=True, quiet=True)
        expected = reference_dataset(log, min_count, max_values)
        assert dataset.days() == tuple(expected)
        for index, (labels, ids, numbers) in enumerate(expected.values()):
            batch = next(iter(dataset.days(index, index + 1).stream(100)))
            assert batch.labels[:, 0].tolist() == labels
            assert batch.ids[:, 0].tolist() == ids
            present = ~np.isnan(numbers)
            missing = np.zeros(len(labels), bool) if batch.missing is None else batch.missing[:, 0].numpy()
            assert (missing == ~present).all()
            np.testing.assert_allclose(batch.dense[:, 0].numpy()[present], np.array(numbers)[present], 1e-4, 1e-4)


LOG = b'click,ad,n,day\n1,a,1.5,2020-01-01\n0,b,,2020-01-02\n0,"c,""d",7,2020-01-02\n'
DAMAGES = st.lists(
    st.tuples(
        st.integers(0, 300), st.integers(0, 5), st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"\n", b","]))
    ),
    max_size=4,
)
fuzz_settings = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def damaged(data, damages):
    result = bytearray(data)
    for position, removed, inserted in damages:
        position = position % (len(result) + 1)
        result[position : position + removed] = inserted
    return bytes(result)


def attempt(data, **options):
    """Prepare bytes in an empty directory; no other file than the output may appear in it."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "log").write_bytes(data)
        outputs = set()
        with contextlib.suppress(LpfsError):
            prepare(directory / "log", directory / "out", label="click", quiet=True, **options)
            outputs = {"out"}
        assert {path.name for path in directory.iterdir()} == {"log"} | outputs


@given(DAMAGES)
@fuzz_settings
def test_damaged_csv(damages):
    attempt(damaged(LOG, damages), keep_all=True)


@given(st.lists(st.lists(st.text(max_size=6), min_size=3, max_size=3), min_size=1, max_size=6))
@fuzz_settings
def test_any_text_in_any_cell(rows):
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    lines = [f"{index % 2},{row}" for index, row in enumerate(quoted)]
    attempt(("click,a,b,c\n" + "\n".join(lines) + "\n").encode("utf-8", "replace"), keep_all=True, parts=1)


@given(st.binary(max_size=200))
@fuzz_settings
def test_any_bytes(data):
    attempt(data)


@given(DAMAGES)
@fuzz_settings
def test_damaged_parquet(damages):
    buffer = io.BytesIO()
    pl.read_csv(LOG).write_parquet(buffer, compression="uncompressed")
    attempt(damaged(buffer.getvalue(), damages), keep_all=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
option_names = st.sampled_from(
    ["kind", "group", "cost", "separator", "hash", "bins", "width", "dim", "max_values", "x"]
)
kinds = st.sampled_from(["numeric", "categorical", "multi", "ignore"])


@given(st.dictionaries(st.sampled_from(["ad", "n", "day"]), st.dictionaries(option_names, json_values, max_size=3)))
@fuzz_settings
def test_any_options_of_fields(fields):
    attempt(LOG, keep_all=True, fields=fields)


@given(
    st.dictionaries(
        st.sampled_from(["ad", "n", "day"]),
        st.fixed_dictionaries({"kind": kinds}, optional={"separator": st.text(min_size=1, max_size=2)}),
    )
)
@fuzz_settings
def test_any_kind_for_any_column(fields):
    attempt(LOG, keep_all=True, parts=1, fields=fields)


@given(st.binary(max_size=60))
@fuzz_settings
def test_any_toml(data):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "fields.toml"
        path.write_bytes(data)
        with contextlib.suppress(LpfsError):
            read_fields(path)
