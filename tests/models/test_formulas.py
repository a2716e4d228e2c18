"""Every model against its formula, written out field by field and pair by pair in float64."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from lpfs.models import MODELS
from lpfs.models.dlrm import part_name
from tests.helpers.clicks import CASES, IDS, MIXED, NUMBERS, TASKS, batch_of


def rows_of(inputs) -> dict:
    """Return the rows of each field in the table."""
    if inputs.table is None:
        return {}
    names = inputs.names[: len(inputs.table.sizes)]
    return {name: inputs.table.rows(number) for number, name in enumerate(names)}


def embeddings(model, inputs, batch, gates) -> dict:
    """Return the gated embedding (B, width) of each field, computed one row at a time."""
    schema, tables, result = model.schema, rows_of(inputs), {}
    ids = [field.name for field in schema if field.kind == "categorical"]
    column = 0
    columns = {}
    for field in schema:
        if field.kind == "numeric":
            columns[field.name] = range(column, column + field.dim)
            column += field.dim
    start = 0
    for name in inputs.names:
        kind = schema[name].kind if name in schema.names else "token"
        if name in ids:
            value = torch.stack([tables[name][int(row[ids.index(name)])] for row in batch.ids])
        elif name in tables:
            values, offsets = batch.bags[name]
            ends = [*offsets.tolist()[1:], len(values)]
            bags = [tables[name][values[a:b].long()] for a, b in zip(offsets.tolist(), ends, strict=True)]
            mean = inputs.table.mean
            value = torch.stack([bag.sum(0) / (max(1, len(bag)) if mean else 1) for bag in bags])
        elif kind == "numeric":
            width = schema[name].dim
            weight, absent = (
                tensor.detach()[start : start + width] for tensor in (inputs.numbers.weight, inputs.numbers.missing)
            )
            value = torch.zeros(len(batch), inputs.width, dtype=torch.float64)
            for k, column in enumerate(columns[name]):
                value += batch.dense[:, column, None] * weight[k] + batch.missing[:, column, None] * absent[k]
            start += width
        else:
            both = torch.cat([batch.dense, batch.missing.float()], 1).double()
            value = inputs.numbers.bottom(both).detach()
        result[name] = value * gates[name]
    return result


def mlp(model, e, batch, gates):
    return model.top(torch.cat([e[name] for name in model.slots()], 1))


def fm(model, e, batch, gates):
    d = model.config["dim"]
    out = torch.zeros(len(batch), model.outputs_count, dtype=torch.float64) + model.bias
    for embedding in e.values():
        out = out + embedding[:, d:]
    for one, two in combinations(e.values(), 2):
        out = out + (one[:, :d] * two[:, :d]).sum(1, keepdim=True)
    return out


def wide_deep(model, e, batch, gates):
    d = model.config["dim"]
    out = model.top(torch.cat([e[name][:, :d] for name in model.slots()], 1))
    return out + sum(embedding[:, d:] for embedding in e.values())


def deepfm(model, e, batch, gates):
    d = model.config["dim"]
    pairs = sum((one[:, :d] * two[:, :d]).sum(1, keepdim=True) for one, two in combinations(e.values(), 2))
    return wide_deep(model, e, batch, gates) + pairs


def dcnv2(model, e, batch, gates):
    start = x = torch.cat([e[name] for name in model.slots()], 1)
    for layer in model.crosses:
        if model.config["rank"]:
            w, b = layer[1].weight @ layer[0].weight, layer[1].bias
        else:
            w, b = layer.weight, layer.bias
        x = start * (x @ w.T + b) + x
    if model.config["structure"] == "parallel":
        return model.top(start) + x @ model.beside.weight.T
    return model.top(x)


def dlrm(model, e, batch, gates):
    if model.config["interaction"] == "concat":
        return mlp(model, e, batch, gates)
    dots = [(one * two).sum(1, keepdim=True) for one, two in combinations(e.values(), 2)]
    token = model.config["token"]
    return model.top(torch.cat([*([e[token]] if token in e else []), *dots], 1))


def dlrm_cross(model, e, batch, gates):
    pieces = [e[name] * gates[part_name([name])] for name in e]
    pieces += [e[one] * e[two] * gates[part_name([one, two])] for one, two in combinations(e, 2)]
    return model.top(torch.cat(pieces, 1))


def user_item(model, e, batch, gates):
    group = {name: model.schema[name].group for name in model.names}
    users = [name for name in model.names if group[name] == "user"]
    items = [name for name in model.names if group[name] == "item"]
    e = {**e, **embeddings(model, model.others, batch, gates), **embeddings(model, model.numbers, batch, gates)}
    rest = [name for name in model.names if group[name] not in ("user", "item")]
    rest.sort(key=lambda name: model.schema[name].kind == "numeric")
    shared = model.top(torch.cat([*(e[u] * e[i] for u in users for i in items), *(e[name] for name in rest)], 1))
    return torch.cat([head(shared) for head in model.heads], 1)


FORMULAS = {
    function.__name__: function for function in (mlp, fm, wide_deep, deepfm, dcnv2, dlrm, dlrm_cross, user_item)
}


def test_every_model_has_a_formula():
    assert set(FORMULAS) == set(MODELS)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("schema", [MIXED, TASKS, IDS, NUMBERS], ids=["mixed", "tasks", "ids", "numbers"])
def test_a_model_equals_its_formula(case, schema):
    model, batch = case.make(schema).double(), batch_of(schema)
    generator = torch.Generator().manual_seed(7)
    values = (torch.rand(len(model.names), generator=generator, dtype=torch.float64) * 2 - 1).tolist()
    gates = dict(zip(model.names, values, strict=True))
    modules: dict[str, list[float]] = {}
    for name, site in model.sites().items():
        modules.setdefault(site.module, []).append(gates[name])
    for path, module_gates in modules.items():
        values = torch.tensor(module_gates, dtype=torch.float64)
        model.get_submodule(path).gate = lambda values=values: values
    with torch.no_grad():
        ungated = dict.fromkeys(model.inputs.names, 1.0) if case.name == "dlrm_cross" else gates
        e = embeddings(model, model.inputs, batch, ungated)
        expected = FORMULAS[case.name](model, e, batch, gates)
        logits = model(batch)
    expected = expected if schema.tasks else expected[:, 0]
    scale = float(expected.abs().max())
    assert math.isfinite(scale)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12 * max(1.0, scale))
