from __future__ import annotations

import json
import random

import polars as pl
import pytest
from hostile import answer


@pytest.fixture
def make_folder(tmp_path):
    """Makes the folder of a run of some fields, with a history of so many records."""

    def make(fields, records=20, name="run", **more):
        folder = tmp_path / name
        folder.mkdir()
        values = answer(fields, **more)
        (folder / "selection.json").write_text(json.dumps(values), "utf-8")
        draw = random.Random(0)
        if records:
            columns = {
                "step": [5 * (at + 1) for at in range(records)],
                "loss": [draw.random() for _ in range(records)],
                "alive": [len(fields) - at % len(fields) for at in range(records)],
                "penalty": [0.1 / (at + 1) for at in range(records)],
                "epsilon": [0.1 * 0.9**at for at in range(records)],
                "lr": [0.1] * records,
            }
            # parquet is UTF-8: a table with a lone surrogate in a column name cannot have come from anywhere
            for each in fields:
                if each.isprintable() or each.encode("utf-8", "ignore").decode() == each:
                    columns[f"gate:{each}"] = [round(draw.random(), 6) for _ in range(records)]
            pl.DataFrame(columns).write_parquet(folder / "history.parquet")
        return folder

    return make
