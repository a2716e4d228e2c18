"""An ONNX file takes raw values and predicts what the model predicts."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import torch

import lpfs
from lpfs.data.reencode import encode_rows
from lpfs.export.export import export
from lpfs.export.onnx_models import BUILDERS
from lpfs.export.parity import padded
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.prune import prune
from lpfs.models import MODELS, make_model
from lpfs.schema import Field, Schema
from tests.helpers import raw_log
from tests.helpers.clicks import CASES, MIXED, SCHEMAS, Case, batch_of, some_gates, whole_numbers
from tests.helpers.zoo import set_gates

cases = pytest.mark.parametrize("case", CASES, ids=str)
ONCE = {"dcnv2": {"layers": 1}}  # three layers of integers exceed the exact range of float32
SMALL_CASES = [*(Case(name) for name in MODELS), Case("dlrm", {"interaction": "dot"})]


def batch_inputs(model, batch, columns):
    """Return a batch as the inputs of a file without vocabularies."""
    numbers = batch.dense.masked_fill(batch.missing, math.nan) if batch.missing is not None else batch.dense
    result, id_column, dense_column = {}, 0, 0
    for column, field in zip(columns, model.reads, strict=True):
        assert column["field"] == field.name
        if field.kind == "numeric":
            values = numbers[:, dense_column : dense_column + field.dim].numpy()
            dense_column += field.dim
            result[column["input"]] = values[:, 0] if field.dim == 1 else values
        elif field.kind == "multi":
            result[column["input"]] = padded(*batch.bags[field.name])
        else:
            result[column["input"]] = batch.ids[:, id_column].numpy().astype(np.int64)
            id_column += 1
    return result


def run(path, model, batch):
    session, columns = raw_log.session(path)
    return torch.from_numpy(session.run(["logit"], batch_inputs(model, batch, columns))[0])


def test_every_registered_model_has_a_builder():
    assert set(BUILDERS) == set(MODELS)


@cases
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_model_is_bit_equal_in_exact_arithmetic(tmp_path, case, schema):
    """With small integer weights and inputs no order of sums changes a bit."""
    model = whole_numbers(case.make(schema, **ONCE.get(case.name, {})))
    exported = export(model, tmp_path / "m.onnx", rows=batch_of(schema))
    assert exported.checked_with.startswith("onnxruntime")
    for rows in (1, 2, 40):
        other = batch_of(schema, whole=True, rows=rows, seed=rows)
        logits = model(other)
        assert torch.equal(run(tmp_path / "m.onnx", model, other), logits)
    assert (logits != logits[:1]).any()


@cases
@pytest.mark.parametrize("cut", [False, True], ids=["zeros", "cut"])
def test_pruned_models(tmp_path, case, cut):
    model, batch = whole_numbers(case.make(MIXED, **ONCE.get(case.name, {}))), batch_of(MIXED, whole=True)
    gates = attach(model, steps=10)
    set_gates(gates, some_gates(len(gates.names)))
    before = model(batch)
    small = prune(model, absorb(model, batch=batch), batch=batch, cut=cut).model
    assert len(small.names) < len(model.names)
    assert bool(small.silent) != cut
    narrow = model.narrow(batch, small)
    export(small, tmp_path / "m.onnx", rows=narrow)
    assert torch.equal(run(tmp_path / "m.onnx", small, narrow), before)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    assert [column["field"] for column in columns] == list(small.reads.names)
    assert [value.name for value in session.get_inputs()] != []


def test_model_with_one_kind_of_input_left(tmp_path):
    model = Case("user_item").make(MIXED)
    for kept in (["n2"], ["weight"], ["dense"]):
        silent = [name for name in model.names if name not in kept]
        small = whole_numbers(Case("user_item").make(MIXED, silent=silent))
        batch = model.narrow(batch_of(MIXED, whole=True), small)
        export(small, tmp_path / "m.onnx", rows=batch, replace=True)
        assert torch.equal(run(tmp_path / "m.onnx", small, batch), small(batch))


def test_an_empty_batch_and_bags_without_values(tmp_path):
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    export(model, tmp_path / "m.onnx", rows=batch)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    feeds = batch_inputs(model, batch, columns)
    empty = {name: value[:0] for name, value in feeds.items()}
    assert session.run(["probability"], empty)[0].shape == (0,)
    inputs = {column["field"]: column["input"] for column in columns}
    feeds |= {inputs[name]: np.zeros((len(batch), 0), np.int64) for name in ("a bag", "dense")}
    assert np.isfinite(session.run(["probability"], feeds)[0]).all()


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_raw_rows_give_the_logits_of_encode_rows_and_the_model(tmp_path, dataset, case):
    """Rows outside the Dataset, with new values and longer bags."""
    model = case.make(dataset.schema)
    exported = export(model, tmp_path / "m.onnx", dataset=dataset)
    assert exported.rows == dataset.rows > 1000
    assert exported.max_logit_change <= exported.bound < 1e-4
    rows = raw_log.table(300, seed=9, more=5)
    batch = encode_rows(dataset, rows)
    expected = model(batch).detach()
    session, columns = raw_log.session(exported)
    probability, logit, corrected = session.run(None, raw_log.feeds(rows, columns))
    np.testing.assert_allclose(logit, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(probability, torch.sigmoid(expected), rtol=0, atol=1e-5)
    np.testing.assert_allclose(corrected, torch.sigmoid(expected + math.log(0.5)), rtol=0, atol=1e-5)
    assert expected.std() > 1e-3


@pytest.mark.parametrize("name", raw_log.FIELDS)
def test_single_field_is_encoded_exactly(tmp_path, dataset, name):
    """With one field and integer weights every wrong id or number changes the logit."""
    model = make_model("fm", dataset.schema.subset([name]), dim=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-9, 10, weight.shape))
        if model.inputs.table is not None:  # a different logit for every id
            model.inputs.table.weight.copy_(torch.arange(len(model.inputs.table.weight))[:, None] % 97)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    rows = raw_log.table(400, seed=3, more=5)
    expected = model(encode_rows(dataset, rows, [name])).detach()
    session, columns = raw_log.session(tmp_path / "m.onnx")
    logits = torch.from_numpy(session.run(["logit"], raw_log.feeds(rows, columns))[0])
    if name in (
        "tiny",
        "price",
        "vector",
    ):  # log and log1p may differ in the last bit of float64, before rounding to float32
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-5)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)
    assert len(expected.unique()) > 3


def test_non_finite_numbers_are_missing(tmp_path, dataset):
    model = make_model("fm", dataset.schema.subset(["price", "level"]), dim=2)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    session, _ = raw_log.session(tmp_path / "m.onnx")
    feeds = {name: np.array([np.nan, np.inf, -np.inf, 1e300]) for name in ("price", "level")}
    [logit] = session.run(["logit"], feeds)
    assert logit[0] == logit[1] == logit[2] != logit[3]
    assert np.isfinite(logit).all()


def test_missing_texts_of_the_log_are_missing_in_the_file(tmp_path):
    data = raw_log.prepared(tmp_path / "data", rows=300, missing=["?", "none"])
    model = make_model("fm", data.schema.subset(["city"]), dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    session, _ = raw_log.session(tmp_path / "m.onnx")
    [logit] = session.run(["logit"], {"city": np.array(["", "?", "none", "never seen", "city 1"], object)})
    assert logit[0] == logit[1] == logit[2]
    assert len(set(logit.tolist())) == 3


def test_empty_text_in_the_vocabulary_does_not_mean_missing(tmp_path):
    rows = raw_log.table(300, seed=0).select("click", "city")
    rows = rows.with_columns(city=rows["city"].replace("city 1", ""))
    data = lpfs.prepare(rows, tmp_path / "data", label="click", shuffle=True, quiet=True)
    assert "" in data.vocabulary("city")
    model = make_model("fm", data.schema, dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    session, [column] = raw_log.session(tmp_path / "m.onnx")
    assert column["missing"] == "<missing>"
    [logit] = session.run(["logit"], {"city": np.array(["", "<missing>"], object)})
    both = rows.head(2).with_columns(city=raw_log.pl.Series(["", None]))
    np.testing.assert_array_equal(logit, model(encode_rows(data, both)).detach())


def test_one_column_per_task_and_the_first_is_corrected(tmp_path):
    rows = raw_log.table(400, seed=0).with_columns(buy=raw_log.pl.Series(np.arange(400) % 2))
    fields = {**raw_log.FIELDS}
    data = lpfs.prepare(
        rows, tmp_path / "d", label="click", tasks=["buy"], fields=fields, shuffle=True, negatives=0.25, quiet=True
    )
    model = make_model("mlp", data.schema, dim=4)
    export(model, tmp_path / "m.onnx", dataset=data)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    probability, logit, corrected = session.run(None, raw_log.feeds(rows, columns))
    assert probability.shape == logit.shape == (400, 2)
    np.testing.assert_allclose(corrected, 1 / (1 + np.exp(-logit[:, 0] - math.log(0.25))), rtol=1e-5)


def test_without_down_sampling_nothing_is_corrected(tmp_path):
    data = raw_log.prepared(tmp_path / "data", rows=300, negatives=1.0)
    model = make_model("fm", data.schema, dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    session, _ = raw_log.session(tmp_path / "m.onnx")
    assert [value.name for value in session.get_outputs()] == ["probability", "logit"]


def test_a_simulated_log_takes_ids(tmp_path):
    data = lpfs.simulate(tmp_path / "data", "small", rows=2000)
    model = make_model("mlp", data.schema, dim=4)
    exported = export(model, tmp_path / "m.onnx", dataset=data, rows=1200)
    assert exported.rows == 1200
    _, columns = raw_log.session(exported)
    assert all(column["takes"].startswith(("ids from 0", "numbers as the Dataset")) for column in columns)


def test_id_out_of_range_is_an_error(tmp_path):
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    export(model, tmp_path / "m.onnx", rows=batch)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    feeds = batch_inputs(model, batch, columns)
    for column in columns:
        cardinality = MIXED[column["field"]].cardinality
        if cardinality:
            for wrong in (cardinality, -1 if column["kind"] == "categorical" else -2):
                bad = feeds[column["input"]].copy()
                bad.flat[0] = wrong
                with pytest.raises(Exception, match="out of data bounds"):
                    session.run(["logit"], {**feeds, column["input"]: bad})


@pytest.mark.parametrize("name", ["mlp", "fm"])
def test_unusual_names_are_mapped_and_recorded(tmp_path, name):
    odd = ["a.b", "a_b", "", "é", "logit", "7", "x/y", "a b", "probability", "bias", "B"]
    schema = Schema(tuple(Field(name or "\n", cardinality=3) for name in odd))
    model = make_model(name, schema, dim=2)
    export(model, tmp_path / "m.onnx", rows=batch_of(schema))
    session, columns = raw_log.session(tmp_path / "m.onnx")
    names = [value.name for value in session.get_inputs()]
    assert [column["input"] for column in columns] == names
    assert [column["field"] for column in columns] == list(schema.names)
    assert len(set(names)) == len(odd)
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert names[1] == "a_b"
    assert not set(names) & {"logit", "probability"}


@pytest.mark.parametrize("values", [[-7, 3, 5, 2**62], [0.5, -2.25, 1e9], ["a", "é"]], ids=["integer", "float", "text"])
def test_hash_formula_in_the_metadata_gives_the_ids_of_encode_rows(tmp_path, values):
    """The formula in the metadata gives the ids of encode_rows."""
    rows = raw_log.pl.DataFrame({"click": [0, 1] * 60, "x": (values * 120)[:120], "y": [1.0, 2.0, 3.0] * 40})
    fields = {"x": {"kind": "categorical", "hash": 11}, "y": "numeric"}
    data = lpfs.prepare(rows, tmp_path / "d", label="click", fields=fields, shuffle=True, quiet=True)
    export(make_model("fm", data.schema, dim=2), tmp_path / "m.onnx", dataset=data)
    description = raw_log.session(tmp_path / "m.onnx")[1][0]["takes"]
    ids = encode_rows(data, rows, ["x"]).ids[: len(values), 0].tolist()
    if isinstance(values[0], str):
        assert "BLAKE2b(UTF-8) of 8 bytes, little endian, modulo 11" in description
        assert ids == [raw_log.hashed_id(value, 11) for value in values]
    elif isinstance(values[0], int):
        assert "2 + the value (a negative one plus 2**64) modulo 11" in description
        assert ids == [2 + value % 2**64 % 11 for value in values]
    else:
        assert "2 + the 64 bits of the float64 modulo 11" in description
        assert ids == [2 + int(np.float64(value).view(np.uint64)) % 11 for value in values]


def test_metadata(tmp_path, dataset):
    model = make_model("dcnv2", dataset.schema, dim=2, layers=1)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    session, columns = raw_log.session(tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    metadata = session.get_modelmeta().custom_metadata_map
    assert metadata["lpfs.version"] == lpfs.__version__
    assert Schema.from_json(json.loads(metadata["lpfs.schema"])) == dataset.schema
    assert json.loads(metadata["lpfs.data"]) == {"fingerprint": dataset.fingerprint}
    assert json.loads(metadata["lpfs.model"])["name"] == "dcnv2"
    assert json.loads(metadata["lpfs.negative_rate"]) == 0.5
    by_field = {column["field"]: column for column in columns}
    assert by_field["city"]["missing"] == ""
    assert by_field["nums"]["pad"] == 2**63 - 1
    assert by_field["hashed"]["hash_modulo"] == 50
    assert "int(text, 16)" in by_field["code"]["takes"]
