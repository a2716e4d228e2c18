"""Counting values chunk by chunk."""

import numpy as np
import polars as pl

from lpfs.data.encoders.vocabulary import ValueCounter


def test_counter_merges_chunks(monkeypatch):
    rng = np.random.default_rng(0)
    values = pl.Series([f"v{i}" for i in (rng.random(5000) ** 3 * 800).astype(int)])
    counter = ValueCounter()
    for start in range(0, 5000, 333):
        counter.add(values.slice(start, 333))
        counter._merge()
    expected = values.value_counts(name="n").sort("n", values.name, descending=[True, False])
    assert counter.result()["count"].to_list() == expected["n"].to_list()
    assert counter.result()["value"].to_list() == expected[values.name].to_list()
