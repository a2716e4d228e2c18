"""Simulate to files, prepare, stream: labels and ids agree with the simulated Dataset."""

import numpy as np
import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import scramble_ids, simulate
from lpfs.data.simulate_spec import preset_spec

SEED, ROWS, DAYS = 3, 4000, 4


def all_rows(dataset: Dataset) -> Batch:
    (batch,) = dataset.stream(dataset.rows)
    return batch


def field_ids(dataset: Dataset, batch: Batch, name: str) -> np.ndarray:
    """Return the ids of a categorical field, or all ids of a bag."""
    if dataset.schema[name].kind == "multi":
        return batch.bags[name][0].numpy()
    names = [field.name for field in dataset.schema if field.kind == "categorical"]
    return batch.ids[:, names.index(name)].numpy()


def assert_same_values(simulated: np.ndarray, prepared: np.ndarray) -> None:
    """Assert that ids are equal up to a renaming; values not seen in training share id 1."""
    assert ((simulated == 0) == (prepared == 0)).all(), "missing stays missing"
    pairs = np.unique(np.stack([simulated, prepared], 1), axis=0)
    assert len(np.unique(pairs[:, 0])) == len(pairs), "one value, one id"
    known = pairs[pairs[:, 1] != 1]
    assert len(np.unique(known[:, 1])) == len(known), "one id, one value"


def assert_same_numbers(simulated: torch.Tensor, prepared: torch.Tensor) -> None:
    """Assert that numbers are equal up to shift and scale."""
    a, b = simulated.double(), prepared.double()
    slope = ((a - a.mean()) * (b - b.mean())).sum() / ((a - a.mean()) ** 2).sum()
    assert slope > 0
    assert torch.allclose(b, b.mean() + slope * (a - a.mean()), atol=1e-4)


@pytest.mark.parametrize(
    ("preset", "form", "options"),
    [
        ("terabyte", "csv", {"preset": "criteo-terabyte"}),
        ("small", "csv", {"label": "click", "time": "day"}),
        ("small", "parquet", {"label": "click", "time": "day"}),
    ],
)
def test_prepared_files_equal_the_simulated_dataset(tmp_path, preset, form, options):
    direct = simulate(tmp_path / "direct", preset, rows=ROWS, days=DAYS, seed=SEED)
    simulate(tmp_path / "raw", preset, rows=ROWS, days=DAYS, seed=SEED, format=form)
    prepared_dataset = prepare(
        tmp_path / "raw" / "log", tmp_path / "prepared", min_count=1, keep_all=True, quiet=True, **options
    )
    assert [day.rows for day in prepared_dataset.table] == [day.rows for day in direct.table]
    assert [day.positives for day in prepared_dataset.table] == [day.positives for day in direct.table]
    assert set(prepared_dataset.schema.names) == set(direct.schema.names)
    expected, batch = all_rows(direct), all_rows(prepared_dataset)
    assert torch.equal(expected.labels, batch.labels)
    assert (tmp_path / "raw" / "truth.json").read_bytes() == (tmp_path / "direct" / "truth.json").read_bytes()
    specs = {spec.name: spec for spec in preset_spec(preset, ROWS, DAYS, SEED).specs}
    numbers = [field.name for field in direct.schema if field.kind == "numeric"]
    prepared_numbers = [field.name for field in prepared_dataset.schema if field.kind == "numeric"]
    for field in direct.schema:
        assert prepared_dataset.schema[field.name].kind == field.kind, field.name
        if field.kind == "numeric":
            a, b = numbers.index(field.name), prepared_numbers.index(field.name)
            assert expected.missing is not None
            assert batch.missing is not None
            assert torch.equal(expected.missing[:, a], batch.missing[:, b])
            known = ~expected.missing[:, a]
            assert_same_numbers(expected.dense[known, a], batch.dense[known, b])
            continue
        simulated, prepared = (field_ids(direct, expected, field.name), field_ids(prepared_dataset, batch, field.name))
        if field.kind == "multi":
            a, b = expected.bags[field.name][1], batch.bags[field.name][1]
            assert torch.equal(a, b)
        assert_same_values(simulated, prepared)
        raw = scramble_ids(specs[field.name], np.arange(direct.schema[field.name].cardinality))
        vocabulary = prepared_dataset.vocabulary(field.name)
        assert vocabulary is not None
        spelled = [value[-8:] if isinstance(value, str) else f"{value:08x}" for value in vocabulary]
        for simulated_id, prepared_id in zip(simulated[:200].tolist(), prepared[:200].tolist(), strict=True):
            if prepared_id > 1:
                assert spelled[prepared_id - 2] == f"{raw[simulated_id - 2]:08x}"
