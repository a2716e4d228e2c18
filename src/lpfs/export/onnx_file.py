"""An ONNX file: raw values in, probabilities out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lpfs
from lpfs.data.batches.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.errors import ExactnessError
from lpfs.export.preprocessing import Column
from lpfs.export.dense import logits
from lpfs.export.fields import columns_of
from lpfs.export.onnx_graph import Graph
from lpfs.export.onnx_models import Encoded, encoded
from lpfs.export.parity import Parity, compare, onnx_runtime, same_ids
from lpfs.export.raw import encoded_again, feeds_of
from lpfs.models.base import Model
from lpfs.models.registry import name_of

ABOUT = (
    "A click model of lpfs. Inputs take raw values, one a field (metadata 'inputs' says which and how); "
    "'logit' and 'probability' come out."
)


@dataclass(frozen=True)
class Built:
    """The graph of a model, and the columns that it reads."""

    graph: Graph
    columns: list[Column]
    encoded: Encoded
    rate: float | None


def build(model: Model, dataset: Dataset | None, large: Path | None = None) -> Built:
    """Return a model as a graph, with the preprocessing that a Dataset knows; large weights may go to a file."""
    graph = Graph(large)
    columns = columns_of(model.reads, dataset)
    given = encoded(graph, columns)
    tasks = 1 + len(model.schema.tasks)
    both = logits(graph, model, given)  # (B, 1 + tasks)
    shape: list[int | str] = ["B", tasks] if tasks > 1 else ["B"]
    main = graph.add("Gather", both, graph.constant(np.array(0)), axis=1)
    graph.add("Identity", both if tasks > 1 else main, out="logit")
    graph.add("Sigmoid", "logit", out="probability")
    of = ", ".join((model.schema.label, *model.schema.tasks))
    graph.give_out("probability", shape, f"of {of}, as the model was trained")
    graph.give_out("logit", shape, f"of {of}: log(p / (1 - p))")
    rate = negative_rate(dataset)
    if rate is not None:
        moved = graph.add("Add", main, graph.constant(np.array(math.log(rate), np.float32)))
        graph.add("Sigmoid", moved, out="corrected_probability")
        about = f"of {model.schema.label} before negatives were down-sampled to a share of {rate:g}"
        graph.give_out("corrected_probability", ["B"], about)
    return Built(graph, columns, given, rate)


def negative_rate(dataset: Dataset | None) -> float | None:
    """Return the share of negatives that a Dataset kept; None if it is unknown, not one number, or all of them."""
    rates = set() if dataset is None else {day.negative_rate for day in dataset.table}
    rate = rates.pop() if len(rates) == 1 else 1.0
    return rate if 0.0 < rate < 1.0 else None


def write(built: Built, model: Model, dataset: Dataset | None, file: Path) -> None:
    """Write the graph with its metadata."""
    proto = built.graph.model(ABOUT)
    told: dict[str, Any] = {
        "inputs": [each.about() for each in built.columns],
        "schema": model.reads.to_json(),
        "model": {"name": name_of(model), "config": model.config, "silent": list(model.silent)},
        "data": None if dataset is None else {"fingerprint": dataset.fingerprint},
        "negative_rate": built.rate,
    }
    props = {f"lpfs.{key}": json.dumps(value) for key, value in told.items()}
    built.graph.onnx.helper.set_model_props(proto, {"lpfs.version": lpfs.__version__, **props})
    with file.open("wb") as out:
        out.write(proto.SerializeToString())


def check(built: Built, model: Model, dataset: Dataset | None, batch: Batch, file: Path) -> tuple[Parity, str]:
    """Run the file on rows and on every value of every vocabulary; raise ExactnessError where it differs."""
    run, name = onnx_runtime(file)
    feeds = feeds_of(built.columns, batch)
    if dataset is not None:
        batch = encoded_again(built.columns, feeds, batch, dataset)
    found = {key: torch.from_numpy(np.array(each)) for key, each in run(feeds).items()}
    parity = compare(model, batch, found["logit"])
    main = found["logit"][:, 0] if model.schema.tasks else found["logit"]
    _same("probability", torch.sigmoid(found["logit"].double()), found["probability"])
    if built.rate is not None:
        moved = main.double() + math.log(built.rate)
        _same("corrected_probability", torch.sigmoid(moved), found["corrected_probability"])
    for each in built.columns:
        _check_values(built, each)
    return parity, name


def _same(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if found.shape != expected.shape or not torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6):
        raise ExactnessError(f"the file's {name!r} is not the sigmoid of its logits; nothing was written")


def _check_values(built: Built, column: Column) -> None:
    """Ask the file for the id of every value of a field, of missing, of an unseen one, and of none in a bag."""
    raw, ids = column.examples()
    if not len(ids):
        return
    name = column.field.name
    part = built.graph.part(built.encoded.ids[name], built.graph.onnx.TensorProto.INT64)
    run, _ = onnx_runtime(part.SerializeToString())
    [found] = run({column.input: raw[None] if column.multi else raw}).values()
    same_ids(name, ids, found.reshape(-1), raw)
