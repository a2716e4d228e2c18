"""What is checked before a file is kept, and what is refused."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace

import numpy as np
import pytest
import rawlog
import torch
from clicks import MIXED, Case, batch_of

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

formats = pytest.mark.parametrize("format", ["onnx", "torch"])


@pytest.fixture
def small(dataset):
    return make_model("mlp", dataset.schema, dim=2, hidden=[4])


def refused(tmp_path, error, match, model, **options) -> None:
    """An export that fails leaves the folder as it was, with the file that was there."""
    out = tmp_path / "out"
    out.mkdir(exist_ok=True)
    (out / "old").write_bytes(b"before")
    with pytest.raises(error, match=match):
        export(model, out / "new", **options)
    with pytest.raises(error, match=match):
        export(model, out / "old", **options, replace=True)
    assert [each.name for each in out.iterdir()] == ["old"]
    assert (out / "old").read_bytes() == b"before"


def moved(graph, model, given):
    """A planted mismatch: an MLP whose logits are a little too large."""
    return graph.add("Add", onnx_models.mlp(graph, model, given), graph.constant(np.array(1e-5, np.float32)))


def test_a_planted_mismatch_of_the_dense_part_is_refused(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(onnx_models.BUILDERS, "mlp", moved)
    refused(tmp_path, ExactnessError, "predicts something else.*nothing was written", small, dataset=dataset)


def test_a_planted_mismatch_of_the_scale_is_refused(tmp_path, dataset, small, monkeypatch):
    right = Graph.add

    def planted(self, op, *inputs, **options):
        return right(self, "Identity" if op == "Sign" else op, *inputs, **options)

    monkeypatch.setattr(Graph, "add", planted)
    refused(tmp_path, ExactnessError, "predicts something else", small, dataset=dataset)


@pytest.mark.parametrize("name", ["city", "nums"])
def test_one_wrong_value_of_a_vocabulary_is_refused_though_no_row_has_it(
    tmp_path, dataset, small, monkeypatch, name
):
    right = VocabularyColumn.keys

    def planted(self):
        keys, ids = right(self)
        if self.field.name == name:
            ids[[-3, -4]] = ids[[-4, -3]]
        return keys, ids

    monkeypatch.setattr(VocabularyColumn, "keys", planted)
    rare = torch.full((1,), 2, dtype=torch.int32)
    batch = next(iter(dataset.stream(1)))
    batch = replace(batch, ids=batch.ids * 0, bags=dict.fromkeys(batch.bags, (rare, rare * 0)))
    match = f"field '{name}': the file gives .* the id .*2 of .* values differ"
    refused(tmp_path, ExactnessError, match, small, dataset=dataset, rows=batch)


def test_an_edge_on_the_wrong_side_is_refused_though_no_row_is_there(tmp_path, dataset, small, monkeypatch):
    right = Graph.add

    def planted(self, op, *inputs, **options):
        wrong = op == "GreaterOrEqual" and "/Unsqueeze" in inputs[0]
        return right(self, "Greater" if wrong else op, *inputs, **options)

    monkeypatch.setattr(Graph, "add", planted)
    batch = next(iter(dataset.stream(1)))
    match = "field 'level': the file gives .* the id"
    refused(tmp_path, ExactnessError, match, small, dataset=dataset, rows=replace(batch, ids=batch.ids * 0))


def test_a_planted_mismatch_of_a_torch_file_is_refused(tmp_path, dataset, small, monkeypatch):
    right = torch_export.ExportableModel.forward

    def planted(self, ids, dense, missing, bags):
        return right(self, ids, dense, missing, bags) + 1e-5

    monkeypatch.setattr(torch_export.ExportableModel, "forward", planted)
    refused(tmp_path, ExactnessError, "predicts something else", small, dataset=dataset, format="torch")


def test_rounding_is_judged_by_the_models_own_where_large_terms_cancel():
    model, batch = Case("fm").make(MIXED), batch_of(MIXED)
    with torch.no_grad():
        model.inputs.table.weight.mul_(1e4)
    logits = model(batch).detach()
    exact = copy.deepcopy(model).double()(batch).detach().float()
    far = (exact - logits).abs().max()
    assert far > 0
    assert check_logits(model, batch, exact).max_logit_change == pytest.approx(float(far))
    with pytest.raises(ExactnessError):
        check_logits(model, batch, logits + 20 * torch.maximum(far, 16 * 1.2e-7 * logits.abs().max()))
    with pytest.raises(ExactnessError, match="moves by inf"):
        check_logits(model, batch, logits[:, None])


@formats
def test_a_model_that_is_broken_is_refused(tmp_path, dataset, small, format):
    with torch.no_grad():
        small.top[0].bias[0] = float("inf")
    refused(tmp_path, NonFiniteError, "logit of row 0 .* not finite", small, dataset=dataset, format=format)


def test_without_onnxruntime_the_reference_of_onnx_runs_the_file(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = export(small, tmp_path / "m.onnx", dataset=dataset, rows=64)
    assert done.checked_with.startswith("onnx.reference")
    assert done.max_logit_change <= done.bound


def test_without_onnx_the_error_says_what_to_install(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    refused(tmp_path, MissingPackageError, r"pip install 'lpfs\[onnx\]'", small, dataset=dataset)


def test_what_no_file_can_hold_is_refused(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setattr(onnx_graph, "MAX_FILE_BYTES", 1000)
    refused(tmp_path, InputError, "at most 2 GiB", small, dataset=dataset)


def test_large_weights_go_to_a_file_beside(tmp_path, dataset, small, monkeypatch):
    monkeypatch.setattr(onnx_graph, "EXTERNAL_DATA_BYTES", 1)
    monkeypatch.setattr(onnx_graph, "LEAST", 100)
    export(small, tmp_path / "m.onnx", dataset=dataset)
    first = {each.name for each in tmp_path.iterdir()}
    assert len(first) == 2
    rows = rawlog.table(20, seed=4)
    opened, about = rawlog.session(tmp_path / "m.onnx")
    expected = small(encode_rows(dataset, rows)).detach()
    np.testing.assert_allclose(opened.run(["logit"], rawlog.feeds(rows, about))[0], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        small.top[0].bias.add_(1.0)
    with monkeypatch.context() as patch:
        patch.setitem(onnx_models.BUILDERS, "mlp", moved)
        with pytest.raises(ExactnessError):
            export(small, tmp_path / "m.onnx", dataset=dataset, replace=True)
    assert {each.name for each in tmp_path.iterdir() if each.is_file()} == first
    with pytest.raises(InputError, match="is there already"):
        export(small, tmp_path / "m.onnx", dataset=dataset)
    export(small, tmp_path / "m.onnx", dataset=dataset, replace=True)
    second = {each.name for each in tmp_path.iterdir() if each.is_file()}
    assert len(second) == 2
    assert second != first


def test_wrong_arguments_are_refused(tmp_path, dataset, small):
    refused(
        tmp_path, InputError, "format must be onnx or torch, found 'pmml'", small, dataset=dataset, format="pmml"
    )
    refused(tmp_path, InputError, "checked on real rows", small)
    refused(tmp_path, InputError, "rows must be .* found 0", small, dataset=dataset, rows=0)
    refused(tmp_path, InputError, "rows must be .* found True", small, dataset=dataset, rows=True)
    refused(tmp_path, InputError, "models of lpfs.models, found Linear", torch.nn.Linear(2, 1), dataset=dataset)
    refused(tmp_path, InputError, "float32 models, .* is torch.float64", small.double(), dataset=dataset)
    refused(tmp_path, InputError, "no rows", Case("mlp").make(MIXED), rows=batch_of(MIXED, rows=0))
    with pytest.raises(InputError, match="is a folder"):
        export(small.float(), tmp_path, dataset=dataset)


def test_gates_must_be_absorbed_first(tmp_path, dataset, small):
    attach(small, steps=10)
    refused(tmp_path, StateError, "absorb or detach", small, dataset=dataset)


def test_a_dataset_with_other_ids_is_refused(tmp_path, dataset):
    fields = list(dataset.schema)
    other = Schema((replace(fields[0], cardinality=5), *fields[1:]), dataset.schema.label)
    refused(
        tmp_path, InputError, "'city' has cardinality 5 in the model", make_model("mlp", other), dataset=dataset
    )
    other = Schema((*fields[1:], fields[0]), dataset.schema.label)
    refused(
        tmp_path,
        InputError,
        "'age' has name 'age' in the model and 'city'",
        make_model("mlp", other),
        dataset=dataset,
    )
    other = Schema((Field("nobody", cardinality=3),))
    refused(tmp_path, InputError, "no field 'nobody'", make_model("mlp", other), dataset=dataset)


def test_a_place_that_cannot_be_written_is_one_error(tmp_path, dataset, small):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="cannot write"):
        export(small, tmp_path / "file" / "m.onnx", dataset=dataset)


@formats
def test_exporting_changes_nothing_in_the_model(tmp_path, dataset, small, format):
    small.train()
    before = {name: each.clone() for name, each in small.state_dict().items()}
    done = export(small, tmp_path / "deep" / "m", dataset=dataset.path, format=format)
    assert small.training
    assert all(torch.equal(before[name], each) for name, each in small.state_dict().items())
    assert [each.name for each in (tmp_path / "deep").iterdir()] == ["m"]
    assert str(done) == str(tmp_path / "deep" / "m")
    assert "1,128 rows" in done.describe()


@pytest.fixture
def run(tmp_path, small):
    data = rawlog.prepared(tmp_path / "data", rows=300)
    model = make_model("mlp", data.schema, dim=2, hidden=[4])
    save(model, tmp_path / "run" / "model", data=str(data.path), fingerprint=data.fingerprint)
    return tmp_path / "run"


@formats
def test_the_model_of_a_run_is_exported_with_its_own_dataset(run, format):
    done = export_run(run, format=format)
    assert done.path == run / {"onnx": "model.onnx", "torch": "model.pt2"}[format]
    assert done.path.is_file()
    data = run.parent / "data"
    data.rename(run / "data")  # where select puts what it prepares
    assert export_run(run, run / "again", rows=50, format=format).rows == 50
    (run / "data").rename(run.parent / "elsewhere")
    with pytest.raises(DataError, match="is not at .* any more; give dataset="):
        export_run(run, format=format)
    assert export_run(run, dataset=run.parent / "elsewhere", format=format).path.is_file()


def test_another_dataset_than_that_of_the_run_is_refused(run, dataset, tmp_path):
    with pytest.raises(DataError, match="is not the Dataset that the model"):
        export_run(run, dataset=dataset)
    save(make_model("mlp", MIXED), tmp_path / "bare" / "model")
    with pytest.raises(InputError, match="does not say which Dataset"):
        export_run(tmp_path / "bare")
    with pytest.raises(InputError, match="there is no model in"):
        export_run(tmp_path)
    with pytest.raises(InputError, match="format must be"):
        export_run(run, format="pmml")
