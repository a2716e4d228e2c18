"""A small Dataset of every kind of field, models of it, and bundles: what the tests of serving share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from lpfs.data import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.raw_rows import RawRowEncoder
from lpfs.models import MLP
from lpfs.online.bundle import Bundle, publish

ROWS = 200
CERTIFICATE = {"max_logit_change": 0.0, "bound": 0.0}


def raw_table(seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    words = [f"w{number}" for number in range(9)]
    return pl.DataFrame(
        {
            "click": rng.integers(0, 2, ROWS),
            "text": rng.choice(words, ROWS),
            "code": rng.integers(0, 9, ROWS),
            "price": np.round(rng.lognormal(size=ROWS), 3),
            "age": rng.integers(18, 80, ROWS).astype(float),
            "tags": [list(rng.choice(words, rng.integers(0, 4), replace=False)) for _ in range(ROWS)],
        }
    ).with_columns(
        text=pl.when(pl.int_range(ROWS) % 17 == 0).then(None).otherwise("text"),
        price=pl.when(pl.int_range(ROWS) % 13 == 0).then(None).otherwise("price"),
    )


def prepare_dataset(out: Path, rename: dict[str, str] | None = None, seed: int = 0) -> Dataset:
    """Return a Dataset of 200 rows; ``rename`` gives fields other names."""
    names = rename or {}
    fields: dict[str, Any] = {
        names.get("code", "code"): {"kind": "categorical"},
        names.get("price", "price"): {"kind": "numeric"},
        names.get("age", "age"): {"kind": "numeric", "bins": 8},
        names.get("tags", "tags"): {"kind": "multi"},
    }
    prepare(raw_table(seed).rename(names), out, label="click", fields=fields, min_count=1, quiet=True)
    return Dataset(out)


def make_model(dataset: Dataset, fields: list[str] | None = None, seed: int = 0, **config: Any) -> MLP:
    torch.manual_seed(seed)
    schema = dataset.schema.subset(fields or dataset.schema.names)
    model = MLP(schema, **{"dim": 4, "hidden": (8,), **config})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def sample_rows(names: dict[str, str] | None = None, count: int = 8) -> list[dict[str, Any]]:
    return raw_table().rename(names or {}).drop("click").head(count).to_dicts()


def publish_model(bundles: Path, dataset: Dataset, model: MLP, rows: list[dict[str, Any]], **options: Any) -> Bundle:
    arguments: dict[str, Any] = {"certificate": CERTIFICATE, "metadata": {"position": 7}, **options}
    return publish(bundles, model, RawRowEncoder(dataset), sample_rows=rows, **arguments)
