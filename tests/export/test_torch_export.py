"""A file of torch.export takes ids and gives the model's logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lpfs.export.export import export
from lpfs.export.torch_export import export_inputs
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.schema import Schema
from tests.helpers.clicks import CASES, MIXED, SCHEMAS, Case, batch_of, some_gates, whole_numbers
from tests.helpers.zoo import set_gates


def load_program(path):
    return torch.export.load(path).module()


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_model_on_batches_of_other_sizes(tmp_path, case):
    model = case.make(MIXED)
    export(model, tmp_path / "m.pt2", rows=batch_of(MIXED), format="torch")
    program = load_program(tmp_path / "m.pt2")
    for rows in (0, 1, 33):
        batch = batch_of(MIXED, rows=rows, seed=rows)
        torch.testing.assert_close(program(*export_inputs(model, batch)), model(batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("schema", ["tasks", "ids", "numbers"])
def test_other_schemas(tmp_path, schema):
    model, batch = Case("deepfm").make(SCHEMAS[schema]), batch_of(SCHEMAS[schema], missing=False)
    export(model, tmp_path / "m.pt2", rows=batch, format="torch")
    torch.testing.assert_close(load_program(tmp_path / "m.pt2")(*export_inputs(model, batch)), model(batch))


@pytest.mark.long
@pytest.mark.parametrize("cut", [False, True], ids=["zeros", "cut"])
@pytest.mark.parametrize("name", ["mlp", "dlrm_cross", "user_item"])
def test_pruned_models(tmp_path, name, cut):
    model, batch = whole_numbers(Case(name).make(MIXED)), batch_of(MIXED, whole=True)
    gates = attach(model, steps=10)
    set_gates(gates, some_gates(len(gates.names)))
    before = model(batch)
    small = prune(model, absorb(model, batch=batch), batch=batch, cut=cut).model
    narrow = model.narrow(batch, small)
    export(small, tmp_path / "m.pt2", rows=narrow, format="torch")
    assert torch.equal(load_program(tmp_path / "m.pt2")(*export_inputs(small, narrow)), before)


def test_empty_bags_and_ids_out_of_range(tmp_path):
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    export(model, tmp_path / "m.pt2", rows=batch, format="torch")
    program = load_program(tmp_path / "m.pt2")
    empty = replace(batch, bags={name: (values[:0], offsets * 0) for name, (values, offsets) in batch.bags.items()})
    torch.testing.assert_close(program(*export_inputs(model, empty)), model(empty))
    ids = batch.ids.clone()
    ids[3, 0] = MIXED["a.b"].cardinality  # the first row of the next field in the table
    with pytest.raises(IndexError):
        program(*export_inputs(model, replace(batch, ids=ids)))


def test_metadata(tmp_path, dataset):
    model = Case("mlp").make(dataset.schema)
    export(model, tmp_path / "m.pt2", dataset=dataset, format="torch")
    extra = {"lpfs.json": ""}
    torch.export.load(tmp_path / "m.pt2", extra_files=extra)
    metadata = json.loads(extra["lpfs.json"])
    assert Schema.from_json(metadata["schema"]) == dataset.schema
    assert metadata["fingerprint"] == dataset.fingerprint
    assert metadata["bags"] == ["tags é", "nums", "fractions", "hashed bag"]
