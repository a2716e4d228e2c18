from __future__ import annotations

import json

import polars as pl
import pytest

from tests.helpers import hostile


def write_history(path, history, fields):
    """Write history.parquet; Parquet is UTF-8, so a name with a lone surrogate has no column."""
    frame = pl.DataFrame([{key: value for key, value in record.items() if key != "gates"} for record in history])
    columns = {
        f"gate:{name}": [record["gates"][number] for record in history]
        for number, name in enumerate(fields)
        if name.encode("utf-8", "ignore").decode() == name
    }
    frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()}).write_parquet(path)


@pytest.fixture
def make_run_dir(tmp_path):
    """Write the run directory of some fields, with a history of ``records`` records."""

    def make(fields, records=20, name="run", **sections):
        run_dir = tmp_path / name
        run_dir.mkdir()
        record = hostile.selection_record(fields, **sections)
        (run_dir / "selection.json").write_text(json.dumps(record), "utf-8")
        if records:
            write_history(run_dir / "history.parquet", hostile.search_history(fields, records), fields)
        return run_dir

    return make
