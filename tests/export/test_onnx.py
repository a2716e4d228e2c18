"""An ONNX file predicts what the model predicts, from raw values."""

from __future__ import annotations

import json
import math

import numpy as np
import onnx
import pytest
import rawlog
import torch
from clicks import CASES, MIXED, SCHEMAS, Case, batch_of, some_gates, whole_numbers
from zoo import set_gates

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

cases = pytest.mark.parametrize("case", CASES, ids=str)
ONCE = {"dcnv2": {"layers": 1}}  # three layers of whole numbers leave what float32 holds exactly
SMALL_CASES = [*(Case(name) for name in MODELS), Case("dlrm", {"interaction": "dot"})]


def of_batch(model, batch, about):
    """A batch as a file takes it that knows no vocabularies."""
    numbers = batch.dense.masked_fill(batch.missing, math.nan) if batch.missing is not None else batch.dense
    result, ids, at = {}, 0, 0
    for each, field in zip(about, model.reads, strict=True):
        assert each["field"] == field.name
        if field.kind == "numeric":
            own = numbers[:, at : at + field.dim].numpy()
            at += field.dim
            result[each["input"]] = own[:, 0] if field.dim == 1 else own
        elif field.kind == "multi":
            result[each["input"]] = padded(*batch.bags[field.name])
        else:
            result[each["input"]] = batch.ids[:, ids].numpy().astype(np.int64)
            ids += 1
    return result


def run(path, model, batch):
    opened, about = rawlog.session(path)
    return torch.from_numpy(opened.run(["logit"], of_batch(model, batch, about))[0])


def test_every_registered_model_has_its_function():
    assert set(BUILDERS) == set(MODELS)


@cases
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_every_model_is_exact_where_arithmetic_is(tmp_path, case, schema):
    """Weights and inputs of small whole numbers: no order of sums changes a bit."""
    model = whole_numbers(case.make(schema, **ONCE.get(case.name, {})))
    done = export(model, tmp_path / "m.onnx", rows=batch_of(schema))
    assert done.checked_with.startswith("onnxruntime")
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
    opened, about = rawlog.session(tmp_path / "m.onnx")
    assert [each["field"] for each in about] == list(small.reads.names)
    assert [each.name for each in opened.get_inputs()] != []


def test_a_model_of_which_only_one_kind_of_input_is_left(tmp_path):
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
    opened, about = rawlog.session(tmp_path / "m.onnx")
    fed = of_batch(model, batch, about)
    none = {name: value[:0] for name, value in fed.items()}
    assert opened.run(["probability"], none)[0].shape == (0,)
    inputs = {each["field"]: each["input"] for each in about}
    fed |= {inputs[name]: np.zeros((len(batch), 0), np.int64) for name in ("a bag", "dense")}
    assert np.isfinite(opened.run(["probability"], fed)[0]).all()


@pytest.mark.parametrize("case", SMALL_CASES, ids=str)
def test_raw_rows_give_what_encode_rows_and_the_model_give(tmp_path, dataset, case):
    """Rows that the Dataset never saw: new values, longer bags."""
    model = case.make(dataset.schema)
    done = export(model, tmp_path / "m.onnx", dataset=dataset)
    assert done.rows == dataset.rows > 1000
    assert done.max_logit_change <= done.bound < 1e-4
    rows = rawlog.table(300, seed=9, more=5)
    batch = encode_rows(dataset, rows)
    expected = model(batch).detach()
    opened, about = rawlog.session(done)
    probability, logit, corrected = opened.run(None, rawlog.feeds(rows, about))
    np.testing.assert_allclose(logit, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(probability, torch.sigmoid(expected), rtol=0, atol=1e-5)
    np.testing.assert_allclose(corrected, torch.sigmoid(expected + math.log(0.5)), rtol=0, atol=1e-5)
    assert expected.std() > 1e-3


@pytest.mark.parametrize("name", rawlog.FIELDS)
def test_every_field_alone_is_encoded_to_the_last_bit(tmp_path, dataset, name):
    """One field, whole weights: a wrong id or a number that is off would show."""
    model = make_model("fm", dataset.schema.subset([name]), dim=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-9, 10, weight.shape))
        if model.inputs.table is not None:  # every id its own logit
            model.inputs.table.weight.copy_(torch.arange(len(model.inputs.table.weight))[:, None] % 97)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    rows = rawlog.table(400, seed=3, more=5)
    expected = model(encode_rows(dataset, rows, [name])).detach()
    opened, about = rawlog.session(tmp_path / "m.onnx")
    found = torch.from_numpy(opened.run(["logit"], rawlog.feeds(rows, about))[0])
    if name in ("tiny", "price", "vector"):  # log and log1p may differ in the last of 53 bits, before 24 are kept
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert len(expected.unique()) > 3


def test_numbers_that_are_not_finite_are_missing(tmp_path, dataset):
    model = make_model("fm", dataset.schema.subset(["price", "level"]), dim=2)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    opened, _ = rawlog.session(tmp_path / "m.onnx")
    fed = {name: np.array([np.nan, np.inf, -np.inf, 1e300]) for name in ("price", "level")}
    [logit] = opened.run(["logit"], fed)
    assert logit[0] == logit[1] == logit[2] != logit[3]
    assert np.isfinite(logit).all()


def test_marks_of_missing_values_in_the_log_are_missing_in_the_file(tmp_path):
    data = rawlog.prepared(tmp_path / "data", rows=300, missing=["?", "none"])
    model = make_model("fm", data.schema.subset(["city"]), dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    opened, _ = rawlog.session(tmp_path / "m.onnx")
    [logit] = opened.run(["logit"], {"city": np.array(["", "?", "none", "never seen", "city 1"], object)})
    assert logit[0] == logit[1] == logit[2]
    assert len(set(logit.tolist())) == 3


def test_an_empty_text_that_is_a_value_is_not_taken_for_missing(tmp_path):
    rows = rawlog.table(300, seed=0).select("click", "city")
    rows = rows.with_columns(city=rows["city"].replace("city 1", ""))
    data = lpfs.prepare(rows, tmp_path / "data", label="click", shuffle=True, quiet=True)
    assert "" in data.vocabulary("city")
    model = make_model("fm", data.schema, dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    opened, [about] = rawlog.session(tmp_path / "m.onnx")
    assert about["missing"] == "<missing>"
    [logit] = opened.run(["logit"], {"city": np.array(["", "<missing>"], object)})
    both = rows.head(2).with_columns(city=rawlog.pl.Series(["", None]))
    np.testing.assert_array_equal(logit, model(encode_rows(data, both)).detach())


def test_tasks_have_a_column_each_and_the_first_is_corrected(tmp_path):
    rows = rawlog.table(400, seed=0).with_columns(buy=rawlog.pl.Series(np.arange(400) % 2))
    fields = {**rawlog.FIELDS}
    data = lpfs.prepare(
        rows, tmp_path / "d", label="click", tasks=["buy"], fields=fields, shuffle=True, negatives=0.25, quiet=True
    )
    model = make_model("mlp", data.schema, dim=4)
    export(model, tmp_path / "m.onnx", dataset=data)
    opened, about = rawlog.session(tmp_path / "m.onnx")
    probability, logit, corrected = opened.run(None, rawlog.feeds(rows, about))
    assert probability.shape == logit.shape == (400, 2)
    np.testing.assert_allclose(corrected, 1 / (1 + np.exp(-logit[:, 0] - math.log(0.25))), rtol=1e-5)


def test_without_down_sampling_nothing_is_corrected(tmp_path):
    data = rawlog.prepared(tmp_path / "data", rows=300, negatives=1.0)
    model = make_model("fm", data.schema, dim=2)
    export(model, tmp_path / "m.onnx", dataset=data)
    opened, _ = rawlog.session(tmp_path / "m.onnx")
    assert [each.name for each in opened.get_outputs()] == ["probability", "logit"]


def test_a_simulated_log_takes_ids(tmp_path):
    data = lpfs.simulate(tmp_path / "data", "small", rows=2000)
    model = make_model("mlp", data.schema, dim=4)
    done = export(model, tmp_path / "m.onnx", dataset=data, rows=1200)
    assert done.rows == 1200
    _, about = rawlog.session(done)
    assert all(each["takes"].startswith(("ids from 0", "numbers as the Dataset")) for each in about)


def test_an_id_that_a_field_does_not_have_is_an_error_and_no_other_fields_row(tmp_path):
    model, batch = Case("mlp").make(MIXED), batch_of(MIXED)
    export(model, tmp_path / "m.onnx", rows=batch)
    opened, about = rawlog.session(tmp_path / "m.onnx")
    fed = of_batch(model, batch, about)
    for each in about:
        cardinality = MIXED[each["field"]].cardinality
        if cardinality:
            for wrong in (cardinality, -1 if each["kind"] == "categorical" else -2):
                bad = fed[each["input"]].copy()
                bad.flat[0] = wrong
                with pytest.raises(Exception, match="out of data bounds"):
                    opened.run(["logit"], {**fed, each["input"]: bad})


@pytest.mark.parametrize("name", ["mlp", "fm"])
def test_odd_names_are_mapped_and_the_file_says_how(tmp_path, name):
    odd = ["a.b", "a_b", "", "é", "logit", "7", "x/y", "a b", "probability", "bias", "B"]
    schema = Schema(tuple(Field(name or "\n", cardinality=3) for name in odd))
    model = make_model(name, schema, dim=2)
    export(model, tmp_path / "m.onnx", rows=batch_of(schema))
    opened, about = rawlog.session(tmp_path / "m.onnx")
    names = [each.name for each in opened.get_inputs()]
    assert [each["input"] for each in about] == names
    assert [each["field"] for each in about] == list(schema.names)
    assert len(set(names)) == len(odd)
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert names[1] == "a_b"
    assert not set(names) & {"logit", "probability"}


@pytest.mark.parametrize(
    "values", [[-7, 3, 5, 2**62], [0.5, -2.25, 1e9], ["a", "é"]], ids=["whole", "fraction", "text"]
)
def test_hashed_ids_are_what_the_file_says(tmp_path, values):
    """The formulas in the metadata, against what encode_rows does."""
    rows = rawlog.pl.DataFrame({"click": [0, 1] * 60, "x": (values * 120)[:120], "y": [1.0, 2.0, 3.0] * 40})
    fields = {"x": {"kind": "categorical", "hash": 11}, "y": "numeric"}
    data = lpfs.prepare(rows, tmp_path / "d", label="click", fields=fields, shuffle=True, quiet=True)
    export(make_model("fm", data.schema, dim=2), tmp_path / "m.onnx", dataset=data)
    told = rawlog.session(tmp_path / "m.onnx")[1][0]["takes"]
    found = encode_rows(data, rows, ["x"]).ids[: len(values), 0].tolist()
    if isinstance(values[0], str):
        assert "BLAKE2b(UTF-8) of 8 bytes, little endian, modulo 11" in told
        assert found == [rawlog.hashed_id(each, 11) for each in values]
    elif isinstance(values[0], int):
        assert "2 + the value (a negative one plus 2**64) modulo 11" in told
        assert found == [2 + each % 2**64 % 11 for each in values]
    else:
        assert "2 + the 64 bits of the float64 modulo 11" in told
        assert found == [2 + int(np.float64(each).view(np.uint64)) % 11 for each in values]


def test_the_file_says_what_it_is(tmp_path, dataset):
    model = make_model("dcnv2", dataset.schema, dim=2, layers=1)
    export(model, tmp_path / "m.onnx", dataset=dataset)
    opened, about = rawlog.session(tmp_path / "m.onnx")
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    told = opened.get_modelmeta().custom_metadata_map
    assert told["lpfs.version"] == lpfs.__version__
    assert Schema.from_json(json.loads(told["lpfs.schema"])) == dataset.schema
    assert json.loads(told["lpfs.data"]) == {"fingerprint": dataset.fingerprint}
    assert json.loads(told["lpfs.model"])["name"] == "dcnv2"
    assert json.loads(told["lpfs.negative_rate"]) == 0.5
    by_field = {each["field"]: each for each in about}
    assert by_field["city"]["missing"] == ""
    assert by_field["nums"]["pad"] == 2**63 - 1
    assert by_field["hashed"]["hash_modulo"] == 50
    assert "int(text, 16)" in by_field["code"]["takes"]
