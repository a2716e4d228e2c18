"""Simulate to files, prepare, stream: labels and ids agree with the simulated Dataset."""

import numpy as np
import pytest
import torch

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import prepare
from lpfs.data.simulate import simulate
from lpfs.data.simulate_spec import preset_spec
from lpfs.data.simulate_world import _scrambled_id

SEED, ROWS, DAYS = 3, 4000, 4


def whole(dataset: Dataset) -> Batch:
    (batch,) = dataset.stream(dataset.rows)
    return batch


def ids_of(dataset: Dataset, batch: Batch, name: str) -> np.ndarray:
    """Return the ids of a categorical field, or all ids of a bag."""
    if dataset.schema[name].kind == "multi":
        return batch.bags[name][0].numpy()
    names = [field.name for field in dataset.schema if field.kind == "categorical"]
    return batch.ids[:, names.index(name)].numpy()


def same_values(simulated: np.ndarray, prepared: np.ndarray) -> None:
    """Check that ids differ by their names only; values not seen in training share id 1."""
    assert ((simulated == 0) == (prepared == 0)).all(), "missing stays missing"
    pairs = np.unique(np.stack([simulated, prepared], 1), axis=0)
    assert len(np.unique(pairs[:, 0])) == len(pairs), "one value, one id"
    known = pairs[pairs[:, 1] != 1]
    assert len(np.unique(known[:, 1])) == len(known), "one id, one value"


def same_numbers(simulated: torch.Tensor, prepared: torch.Tensor) -> None:
    """Check that numbers differ by centre and scale only."""
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
    made = prepare(tmp_path / "raw" / "log", tmp_path / "made", min_count=1, keep_all=True, quiet=True, **options)
    assert [day.rows for day in made.table] == [day.rows for day in direct.table]
    assert [day.positives for day in made.table] == [day.positives for day in direct.table]
    assert set(made.schema.names) == set(direct.schema.names)
    here, there = whole(direct), whole(made)
    assert torch.equal(here.labels, there.labels)
    assert (tmp_path / "raw" / "truth.json").read_bytes() == (tmp_path / "direct" / "truth.json").read_bytes()
    specs = {spec.name: spec for spec in preset_spec(preset, ROWS, DAYS, SEED).specs}
    numbers = [field.name for field in direct.schema if field.kind == "numeric"]
    prepared_numbers = [field.name for field in made.schema if field.kind == "numeric"]
    for field in direct.schema:
        assert made.schema[field.name].kind == field.kind, field.name
        if field.kind == "numeric":
            a, b = numbers.index(field.name), prepared_numbers.index(field.name)
            assert here.missing is not None
            assert there.missing is not None
            assert torch.equal(here.missing[:, a], there.missing[:, b])
            known = ~here.missing[:, a]
            same_numbers(here.dense[known, a], there.dense[known, b])
            continue
        simulated, prepared = ids_of(direct, here, field.name), ids_of(made, there, field.name)
        if field.kind == "multi":
            a, b = here.bags[field.name][1], there.bags[field.name][1]
            assert torch.equal(a, b)
        same_values(simulated, prepared)
        raw = _scrambled_id(specs[field.name], np.arange(direct.schema[field.name].cardinality))
        vocabulary = made.vocabulary(field.name)
        assert vocabulary is not None
        spelled = [value[-8:] if isinstance(value, str) else f"{value:08x}" for value in vocabulary]
        for mine, its in zip(simulated[:200].tolist(), prepared[:200].tolist(), strict=True):
            if its > 1:
                assert spelled[its - 2] == f"{raw[mine - 2]:08x}"
