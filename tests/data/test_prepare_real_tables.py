"""Real tables, one command each, with the expected kinds. Skipped where the files are absent."""

from pathlib import Path

import polars as pl
import pytest

from lpfs.cli import run
from lpfs.data.dataset import Dataset

TABLES = Path(__file__).resolve().parents[3] / "shared" / "data"
LABELS = {
    "bank_marketing": "label",
    "census_income_kdd": "label",
    "coil2000": "label",
    "open_bandit_bts_all": "click",
    "open_bandit_random_all": "click",
}
KINDS = {
    "bank_marketing": {"age": "numeric", "duration": "numeric", "job": "categorical", "euribor3m": "numeric"},
    "census_income_kdd": {
        "age": "numeric",
        "industry_code": "categorical",
        "wage_per_hour": "numeric",
        "weeks_worked": "numeric",
        "year": "categorical",
    },
    "coil2000": {"v1": "categorical", "v47": "categorical"},
    "open_bandit_bts_all": {"item_id": "categorical", "position": "categorical", "propensity_score": "numeric"},
    "open_bandit_random_all": {"item_id": "categorical", "user_feature_0": "categorical"},
}


@pytest.mark.parametrize("name", LABELS)
def test_one_command_prepares_a_real_table(tmp_path, name):
    source = TABLES / f"{name}.parquet"
    if not source.exists():
        pytest.skip(f"{source.name} is absent")
    out = tmp_path / "out"
    assert run(["prepare", str(source), "--label", LABELS[name], "--out", str(out), "--quiet"]) == 0
    dataset = Dataset(out)
    frame = pl.read_parquet(source)
    assert dataset.rows == frame.height
    assert sum(day.positives for day in dataset.table) == frame[LABELS[name]].sum()
    assert {field: dataset.schema[field].kind for field in KINDS[name]} == KINDS[name]
    assert not {"split", "timestamp", LABELS[name]} & set(dataset.schema.names)
    assert dataset.days()[0] == ("2019-11-24" if "bandit" in name else "part_0")


def test_a_published_split_as_time_column(tmp_path):
    source = TABLES / "coil2000.parquet"
    if not source.exists():
        pytest.skip(f"{source.name} is absent")
    options = ["--label", "label", "--time", "split", "--out", str(tmp_path / "out"), "--quiet"]
    assert run(["prepare", str(source), *options]) == 0
    assert Dataset(tmp_path / "out").days() == ("train", "test")
