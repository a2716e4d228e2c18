"""Readers are fuzzed: only our own errors come out, and nothing outside the output folder."""

import contextlib
import io
import tempfile
from pathlib import Path

import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpfs.data.fields import read_fields
from lpfs.data.prepare import prepare
from lpfs.errors import LpfsError

SEED = b'click,ad,n,day\n1,a,1.5,2020-01-01\n0,b,,2020-01-02\n0,"c,""d",7,2020-01-02\n'
ACCIDENTS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.integers(0, 5),
        st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"\n", b","])),
    ),
    max_size=4,
)
calm = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def damaged(data, accidents):
    result = bytearray(data)
    for at, cut, put in accidents:
        at = at % (len(result) + 1)
        result[at : at + cut] = put
    return bytes(result)


def attempt(data, **options):
    """Prepare bytes in a folder of their own; nothing but the output may appear in it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "log").write_bytes(data)
        made = set()
        with contextlib.suppress(LpfsError):
            prepare(folder / "log", folder / "out", label="click", quiet=True, **options)
            made = {"out"}
        assert {path.name for path in folder.iterdir()} == {"log"} | made


@given(ACCIDENTS)
@calm
def test_damaged_csv(accidents):
    attempt(damaged(SEED, accidents), keep_all=True)


@given(st.lists(st.lists(st.text(max_size=6), min_size=3, max_size=3), min_size=1, max_size=6))
@calm
def test_any_text_in_any_cell(rows):
    quoted = [",".join('"' + cell.replace('"', '""') + '"' for cell in row) for row in rows]
    lines = [f"{index % 2},{row}" for index, row in enumerate(quoted)]
    attempt(("click,a,b,c\n" + "\n".join(lines) + "\n").encode("utf-8", "replace"), keep_all=True, parts=1)


@given(st.binary(max_size=200))
@calm
def test_any_bytes(data):
    attempt(data)


@given(ACCIDENTS)
@calm
def test_damaged_parquet(accidents):
    buffer = io.BytesIO()
    pl.read_csv(SEED).write_parquet(buffer, compression="uncompressed")
    attempt(damaged(buffer.getvalue(), accidents), keep_all=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
option_names = st.sampled_from(
    ["kind", "group", "cost", "separator", "hash", "bins", "width", "dim", "max_values", "x"]
)
kinds = st.sampled_from(["numeric", "categorical", "multi", "ignore"])


@given(
    st.dictionaries(st.sampled_from(["ad", "n", "day"]), st.dictionaries(option_names, json_values, max_size=3))
)
@calm
def test_any_options_of_fields(fields):
    attempt(SEED, keep_all=True, fields=fields)


@given(
    st.dictionaries(
        st.sampled_from(["ad", "n", "day"]),
        st.fixed_dictionaries({"kind": kinds}, optional={"separator": st.text(min_size=1, max_size=2)}),
    )
)
@calm
def test_any_kind_for_any_column(fields):
    attempt(SEED, keep_all=True, parts=1, fields=fields)


@given(st.binary(max_size=60))
@calm
def test_any_toml(data):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "fields.toml"
        path.write_bytes(data)
        with contextlib.suppress(LpfsError):
            read_fields(path)
