"""prepare against the plainest Python that does the same, on small logs of any content."""

import math
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpfs.data.prepare import prepare

rows = st.tuples(
    st.integers(0, 1),
    st.integers(1, 4),
    st.sampled_from([None, "a", "b", "B", "é", "007", "7", "7.0", " a"]),
    st.one_of(st.none(), st.integers(-5, 2**40)),
)


def reference(log, min_count, max_values):
    """Return {day: (labels, ids, numbers)}, from the training days all but the last."""
    days = sorted({row[1] for row in log})
    train = [row for row in log if row[1] in days[: max(1, len(days) - 1)]]
    counts = Counter(row[2] for row in train if row[2] is not None)
    kept = sorted((each for each in counts if counts[each] >= min_count), key=lambda each: (-counts[each], each))
    ids = {value: at + 2 for at, value in enumerate(kept[:max_values])}

    def squeezed(x):
        return math.copysign(math.log1p(abs(x)), x)

    known = [squeezed(row[3]) for row in train if row[3] is not None]
    mean = float(np.mean(known)) if known else 0.0
    spread = float(np.std(known)) if len(set(known)) > 1 else 1.0
    result = {}
    for day in days:
        here = [row for row in log if row[1] == day]
        result[str(day)] = (
            [row[0] for row in here],
            [0 if row[2] is None else ids.get(row[2], 1) for row in here],
            [math.nan if row[3] is None else (squeezed(row[3]) - mean) / spread for row in here],
        )
    return result


@pytest.mark.parametrize("form", ["table", "csv"])
@given(log=st.lists(rows, min_size=1, max_size=40), min_count=st.integers(1, 3), max_values=st.integers(1, 6))
def test_labels_ids_and_numbers(form, log, min_count, max_values):
    names = {"click": pl.Int64, "day": pl.Int64, "ad": pl.String, "n": pl.Int64}
    frame = pl.DataFrame(log, schema=names, orient="row")
    fields = {"ad": {"kind": "categorical", "min_count": min_count, "max_values": max_values}, "n": "numeric"}
    with tempfile.TemporaryDirectory() as folder:
        source = frame
        if form == "csv":
            source = Path(folder) / "log.csv"
            frame.write_csv(source)
        out = Path(folder) / "out"
        dataset = prepare(source, out, label="click", time="day", fields=fields, keep_all=True, quiet=True)
        expected = reference(log, min_count, max_values)
        assert dataset.days() == tuple(expected)
        for at, (labels, ids, numbers) in enumerate(expected.values()):
            batch = next(iter(dataset.days(at, at + 1).stream(100)))
            assert batch.labels[:, 0].tolist() == labels
            assert batch.ids[:, 0].tolist() == ids
            there = ~np.isnan(numbers)
            marked = np.zeros(len(labels), bool) if batch.missing is None else batch.missing[:, 0].numpy()
            assert (marked == ~there).all()
            np.testing.assert_allclose(batch.dense[:, 0].numpy()[there], np.array(numbers)[there], 1e-4, 1e-4)
