"""A small log with known field effects, and the settings of a small run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lpfs.data.dataset import Dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.schema import Field, Schema

# not in the order of the models, which is ids, bags, numbers
FIELDS = (
    Field("price", "numeric", group="item"),
    Field("user", cardinality=8, group="user"),
    Field("tags", "multi", cardinality=6, group="item"),
    Field("site", cardinality=5),
    Field("age", "numeric", group="user"),
    Field("ad", cardinality=6, group="item"),
    Field("slot", cardinality=4, group="combine"),
)
STRONG = ("user", "ad")  # then tags and age; price, site and slot have no effect
NOISE = ("price", "site", "slot")
STEPS = {"model_options": {"dim": 4, "hidden": [8]}, "lr": 0.05, "pretrain_steps": 150, "search_steps": 120}
TINY = {**STEPS, "curve": False}
SMALL = {"dim": 4, "hidden": (8,)}


def known_truth(
    out: Path,
    rows: int = 1200,
    days: int = 6,
    seed: int = 0,
    last: int = 0,
    settings: Mapping[str, Any] | None = None,
    label: Callable[[int], float] | None = None,
) -> Dataset:
    """Write a log whose clicks depend on user and ad, and slightly on a tag and age.

    ``last`` is the seed of the last day; ``label`` gives the label of a row instead.
    """
    rng = np.random.default_rng(seed)
    schema = Schema(FIELDS, label="click")
    with DatasetWriter(out, schema, fingerprint=f"known truth {seed} {last}", settings=dict(settings or {})) as writer:
        edges = [rows * day // days for day in range(days + 1)]
        for number in range(days):
            size = edges[number + 1] - edges[number]
            rng = rng if number < days - 1 else np.random.default_rng([seed, last])
            ids = {
                field.name: rng.integers(field.cardinality, size=size)
                for field in FIELDS
                if field.kind == "categorical"
            }
            lengths = rng.integers(4, size=size)
            tags = rng.integers(6, size=lengths.sum())
            tagged = np.array([2 in bag for bag in np.split(tags, lengths.cumsum()[:-1])])
            dense = {"price": rng.normal(size=size), "age": rng.normal(size=size)}
            logit = 3.0 * (ids["user"] % 2) + 3.0 * (ids["ad"] % 2) - 3.0 + 0.7 * tagged + 0.4 * dense["age"]
            click = (rng.random(size) < 1 / (1 + np.exp(-logit))).astype(np.float32)
            if label is not None:
                click = np.array([label(edges[number] + row) for row in range(size)], np.float32)
            day = writer.day(f"day {number}")
            day.append(ids=ids, bags={"tags": (tags, lengths)}, dense=dense, labels={"click": click})
    return Dataset(out)
