"""A file is checked before it is kept; a failed export changes nothing."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from lpfs.data.reencode import encode_rows
from lpfs.errors import (
    CheckpointError,
    DataError,
    ExactnessError,
    InputError,
    MissingPackageError,
    NonFiniteError,
    StateError,
)
from lpfs.export import onnx_graph, onnx_models, torch_export
from lpfs.export.export import export, export_run
from lpfs.export.onnx_graph import Graph
from lpfs.export.parity import check_logits
from lpfs.export.preprocessing import VocabularyColumn
from lpfs.gates.attach import attach
from lpfs.models import make_model
from lpfs.schema import Field, Schema
from lpfs.serialization import save
from tests.helpers import raw_log
from tests.helpers.clicks import MIXED, Case, batch_of

formats = pytest.mark.parametrize("format", ["onnx", "torch"])


@pytest.fixture
def small(dataset):
    return make_model("mlp", dataset.schema, dim=2, hidden=[4])


def assert_export_raises(tmp_path, error, match, model, **options) -> None:
    """A failed export raises and leaves the directory and an existing file unchanged."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    (out / "old").write_bytes(b"before")
    with pytest.raises(error, match=match):
        export(model, out / "new", **options)
    with pytest.raises(error, match=match):
        export(model, out / "old", **options, replace=True)
    assert [path.name for path in out.iterdir()] == ["old"]
    assert (out / "old").read_bytes() == b"before"


def shifted_mlp(graph, model, encoded):
    """Build an MLP whose logits are slightly too large."""
    return graph.add("Add", onnx_models.mlp(graph, model, encoded), np.float32(1e-5))


def test_wrong_dense_part_raises(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(onnx_models.BUILDERS, "mlp", shifted_mlp)
    assert_export_raises(tmp_path, ExactnessError, "predictions differ.*nothing was written", small, dataset=dataset)


def test_wrong_scale_raises(tmp_path, dataset, small, monkeypatch):
    original = Graph.add

    def broken(self, op, *inputs, **options):
        return original(self, "Identity" if op == "Sign" else op, *inputs, **options)

    monkeypatch.setattr(Graph, "add", broken)
    assert_export_raises(tmp_path, ExactnessError, "predictions differ", small, dataset=dataset)


@pytest.mark.parametrize("name", ["city", "nums"])
def test_wrong_id_of_a_value_in_no_row_raises(tmp_path, dataset, small, monkeypatch, name):
    original = VocabularyColumn.keys

    def broken(self):
        keys, ids = original(self)
        if self.field.name == name:
            ids[[-3, -4]] = ids[[-4, -3]]
        return keys, ids

    monkeypatch.setattr(VocabularyColumn, "keys", broken)
    rare = torch.full((1,), 2, dtype=torch.int32)
    batch = next(iter(dataset.stream(1)))
    batch = replace(batch, ids=batch.ids * 0, bags=dict.fromkeys(batch.bags, (rare, rare * 0)))
    match = f"field '{name}': the file gives .* the id .*2 of .* values differ"
    assert_export_raises(tmp_path, ExactnessError, match, small, dataset=dataset, rows=batch)


def test_wrong_side_of_a_bin_edge_in_no_row_raises(tmp_path, dataset, small, monkeypatch):
    original = Graph.add

    def broken(self, op, *inputs, **options):
        wrong = op == "GreaterOrEqual" and "/Unsqueeze" in inputs[0]
        return original(self, "Greater" if wrong else op, *inputs, **options)

    monkeypatch.setattr(Graph, "add", broken)
    batch = next(iter(dataset.stream(1)))
    match = "field 'level': the file gives .* the id"
    assert_export_raises(
        tmp_path, ExactnessError, match, small, dataset=dataset, rows=replace(batch, ids=batch.ids * 0)
    )


def test_wrong_torch_file_raises(tmp_path, dataset, small, monkeypatch):
    original = torch_export.ExportableModel.forward

    def broken(self, ids, dense, missing, bags):
        return original(self, ids, dense, missing, bags) + 1e-5

    monkeypatch.setattr(torch_export.ExportableModel, "forward", broken)
    assert_export_raises(tmp_path, ExactnessError, "predictions differ", small, dataset=dataset, format="torch")


def test_bound_follows_the_models_own_rounding_where_large_terms_cancel():
    model, batch = Case("fm").make(MIXED), batch_of(MIXED)
    with torch.no_grad():
        model.inputs.table.weight.mul_(1e4)
    logits = model(batch).detach()
    exact = copy.deepcopy(model).double()(batch).detach().float()
    distance = (exact - logits).abs().max()
    assert distance > 0
    assert check_logits(model, batch, exact)[0] == pytest.approx(float(distance))
    with pytest.raises(ExactnessError):
        check_logits(model, batch, logits + 20 * torch.maximum(distance, 16 * 1.2e-7 * logits.abs().max()))
    with pytest.raises(ExactnessError, match="changes by inf"):
        check_logits(model, batch, logits[:, None])


@formats
def test_non_finite_model_raises(tmp_path, dataset, small, format):
    with torch.no_grad():
        small.top[0].bias[0] = float("inf")
    assert_export_raises(tmp_path, NonFiniteError, "row 0 is not finite", small, dataset=dataset, format=format)


def test_reference_runtime_is_used_without_onnxruntime(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    exported = export(small, tmp_path / "m.onnx", dataset=dataset, rows=64)
    assert exported.checked_with.startswith("onnx.reference")
    assert exported.max_logit_change <= exported.bound


def test_missing_onnx_names_the_extra(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert_export_raises(tmp_path, MissingPackageError, r"pip install 'lpfs\[onnx\]'", small, dataset=dataset)


def test_file_size_limit(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setattr(onnx_graph, "MAX_FILE_BYTES", 1000)
    assert_export_raises(tmp_path, InputError, "at most 2 GiB", small, dataset=dataset)


def test_large_weights_go_to_a_separate_file(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setattr(onnx_graph, "EXTERNAL_DATA_BYTES", 1)
    monkeypatch.setattr(onnx_graph, "MIN_EXTERNAL_BYTES", 100)
    export(small, tmp_path / "m.onnx", dataset=dataset)
    first = {path.name for path in tmp_path.iterdir()}
    assert len(first) == 2
    rows = raw_log.table(20, seed=4)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    expected = small(encode_rows(dataset, rows)).detach()
    np.testing.assert_allclose(session.run(["logit"], raw_log.feeds(rows, columns))[0], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        small.top[0].bias.add_(1.0)
    with monkeypatch.context() as patch:
        patch.setitem(onnx_models.BUILDERS, "mlp", shifted_mlp)
        with pytest.raises(ExactnessError):
            export(small, tmp_path / "m.onnx", dataset=dataset, replace=True)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == first
    with pytest.raises(InputError, match="exists already.*replace=True"):
        export(small, tmp_path / "m.onnx", dataset=dataset)
    export(small, tmp_path / "m.onnx", dataset=dataset, replace=True)
    second = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert len(second) == 2
    assert second != first


def test_wrong_arguments_raise(tmp_path, dataset, small):
    assert_export_raises(tmp_path, InputError, "no format 'pmml'.*onnx, torch", small, dataset=dataset, format="pmml")
    assert_export_raises(tmp_path, InputError, "checked on real rows", small)
    assert_export_raises(tmp_path, InputError, "rows must be .* found 0", small, dataset=dataset, rows=0)
    assert_export_raises(tmp_path, InputError, "rows must be .* found True", small, dataset=dataset, rows=True)
    assert_export_raises(
        tmp_path, InputError, "models of lpfs.models, found Linear", torch.nn.Linear(2, 1), dataset=dataset
    )
    assert_export_raises(tmp_path, InputError, "float32 models, .* is torch.float64", small.double(), dataset=dataset)
    assert_export_raises(tmp_path, InputError, "no rows", Case("mlp").make(MIXED), rows=batch_of(MIXED, rows=0))
    with pytest.raises(InputError, match="is a directory"):
        export(small.float(), tmp_path, dataset=dataset)


def test_gates_must_be_absorbed_first(tmp_path, dataset, small):
    attach(small, steps=10)
    assert_export_raises(tmp_path, StateError, "absorb or detach", small, dataset=dataset)


def test_a_dataset_with_other_ids_raises(tmp_path, dataset):
    fields = list(dataset.schema)
    other = Schema((replace(fields[0], cardinality=5), *fields[1:]), dataset.schema.label)
    assert_export_raises(
        tmp_path, InputError, "'city' has cardinality 5 in the model", make_model("mlp", other), dataset=dataset
    )
    other = Schema((*fields[1:], fields[0]), dataset.schema.label)
    assert_export_raises(
        tmp_path, InputError, "'age' has name 'age' in the model and 'city'", make_model("mlp", other), dataset=dataset
    )
    other = Schema((Field("absent", cardinality=3),))
    assert_export_raises(tmp_path, InputError, "no field 'absent'", make_model("mlp", other), dataset=dataset)


def test_unwritable_path(tmp_path, dataset, small):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot write"):
        export(small, tmp_path / "file" / "m.onnx", dataset=dataset)


@formats
def test_export_does_not_change_the_model(tmp_path, dataset, small, format):
    small.train()
    before = {name: tensor.clone() for name, tensor in small.state_dict().items()}
    exported = export(small, tmp_path / "deep" / "m", dataset=dataset.path, format=format)
    assert small.training
    assert all(torch.equal(before[name], tensor) for name, tensor in small.state_dict().items())
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["m"]
    assert str(exported) == str(tmp_path / "deep" / "m")
    assert "1,128 rows" in exported.describe()


@pytest.fixture
def run(tmp_path, small):
    data = raw_log.prepared(tmp_path / "data", rows=300)
    model = make_model("mlp", data.schema, dim=2, hidden=[4])
    save(model, tmp_path / "run" / "model", data=str(data.path), fingerprint=data.fingerprint)
    return tmp_path / "run"


@pytest.mark.long
@formats
def test_export_run_uses_the_dataset_of_the_run(run, format):
    exported = export_run(run, format=format)
    assert exported.path == run / {"onnx": "model.onnx", "torch": "model.pt2"}[format]
    assert exported.path.is_file()
    data = run.parent / "data"
    data.rename(run / "data")  # where select writes its Dataset
    assert export_run(run, run / "again", rows=50, format=format).rows == 50
    (run / "data").rename(run.parent / "elsewhere")
    with pytest.raises(DataError, match="no longer at .*dataset="):
        export_run(run, format=format)
    assert export_run(run, dataset=run.parent / "elsewhere", format=format).path.is_file()


def test_export_run_raises_on_another_dataset(run, dataset, tmp_path):
    with pytest.raises(DataError, match="is not the Dataset that the model"):
        export_run(run, dataset=dataset)
    save(make_model("mlp", MIXED), tmp_path / "bare" / "model")
    with pytest.raises(InputError, match="does not record which Dataset.*dataset="):
        export_run(tmp_path / "bare")
    with pytest.raises(InputError, match="has no model"):
        export_run(tmp_path)
    with pytest.raises(InputError, match="no format 'pmml'"):
        export_run(run, format="pmml")
