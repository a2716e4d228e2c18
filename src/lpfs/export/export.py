"""export: a model as one file that serves without lpfs, checked before it is kept.

An ONNX file: raw values in, probabilities out.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

import lpfs
from lpfs._fileio import fsync_path
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.errors import CheckpointError, DataError, ExactnessError, InputError
from lpfs.export.onnx_graph import Graph, external_data_file, old_external_files
from lpfs.export.onnx_models import EncodedInputs, add_inputs, logits
from lpfs.export.parity import Parity, check_ids, check_logits, onnx_runtime, raw_inputs, reencode, sample_batch
from lpfs.export.preprocessing import InputColumn, build_columns
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.serialization import check_no_gates, load, load_metadata

Format = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
ROWS = 4096  # checked, if nothing else is said


@dataclass(frozen=True)
class Exported:
    """What was written, and how it was checked; stands for its path wherever a path is taken.

    Args:
        path: the file.
        format: ``onnx`` or ``torch``.
        rows: how many rows it was checked on.
        max_logit_change: how far its logits are from the model's.
        bound: how far rounding may move them.
        checked_with: what ran the file.

    """

    path: Path
    format: Format
    rows: int
    max_logit_change: float
    bound: float
    checked_with: str

    def __fspath__(self) -> str:
        return str(self.path)

    def __str__(self) -> str:
        return str(self.path)

    def describe(self) -> str:
        """Say in one sentence what was written and checked."""
        return (
            f"{self.path}: the logits of {self.rows:,} rows differ from the model's by at most "
            f"{self.max_logit_change:.3g} (rounding explains {self.bound:.3g}), run by {self.checked_with}"
        )


def export(
    model: Model,
    path: str | os.PathLike[str],
    *,
    dataset: Dataset | str | os.PathLike[str] | None = None,
    format: Format = "onnx",
    rows: Batch | int | None = None,
    replace: bool = False,
) -> Exported:
    """Write a model as one file; one that predicts otherwise is not kept.

    The file is written aside, read back and run on real rows; only if its logits are the model's, to rounding, is
    it renamed. The model is not changed.

    Args:
        model: one of ``lpfs.models``, without gates: absorb or detach them first.
        path: of the file.
        dataset: the Dataset that the model was trained on: its vocabularies, scales and bins become part of an
            ONNX file, and its rows are what the file is checked on. Without it the file takes ids, and ``rows``
            must be a Batch.
        format: ``onnx``: raw values in, probabilities out. ``torch``: ids in, logits out, by ``torch.export``;
            loading such a file runs pickle, so open only files that you trust.
        rows: how many rows to check, from several places of the Dataset; or a Batch of the fields that the model
            reads.
        replace: put it in the place of a file that is there.

    """
    if format not in get_args(Format):
        raise InputError(f"format must be onnx or torch, found {format!r}")
    _check_model(model)
    data = dataset if dataset is None or isinstance(dataset, Dataset) else Dataset(dataset)
    if data is not None:
        _check_fields(model, data)
    batch = _check_batch(model, data, rows)
    out = Path(path)
    if out.is_dir():
        raise InputError(f"{out} is a folder; give the path of a file")
    if out.exists() and not replace:
        raise InputError(f"{out} is there already; choose another name, or replace it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name[:80]}.", suffix=".tmp", dir=out.parent))
        try:
            file = aside / ("model" + SUFFIX[format])
            made = (_onnx if format == "onnx" else _torch)(model, data, batch, file, out)
            beside = [each for each in aside.iterdir() if each != file]
            for each in (*beside, file):  # the weights first: the file names them
                fsync_path(each)
                each.replace(out if each == file else out.parent / each.name)
            fsync_path(out.parent)
            for each in old_external_files(out):
                if each.name not in {new.name for new in beside}:
                    each.unlink()
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {out}: {error.strerror or error}; what was there before is intact"
        ) from error
    return made


def export_run(
    folder: str | os.PathLike[str],
    path: str | os.PathLike[str] | None = None,
    *,
    dataset: Dataset | str | os.PathLike[str] | None = None,
    format: Format = "onnx",
    rows: int | None = None,
    replace: bool = False,
) -> Exported:
    """Export the model of a run of ``select``, with the preprocessing of its Dataset.

    Args:
        folder: of the run; its model is in ``model``.
        path: of the file; by default ``model.onnx`` or ``model.pt2`` in the folder.
        dataset: where the Dataset is now; by default ``data`` in the folder, or where it was.
        format: as :func:`export` takes it.
        rows: how many rows to check.
        replace: put it in the place of a file that is there; without a path that is always done.

    """
    run = Path(folder)
    if format not in get_args(Format):
        raise InputError(f"format must be onnx or torch, found {format!r}")
    if not (run / "model").is_dir():
        raise InputError(f"there is no model in {run}; give the folder of a run of select, train or prune")
    model, extra = load(run / "model"), load_metadata(run / "model")
    if dataset is None:
        inside = run / "data"
        dataset = inside if (inside / "dataset.json").exists() else extra.get("data")
        if dataset is not None and not Path(dataset).exists():
            raise DataError(f"the Dataset of {run} is not at {dataset} any more; give dataset= its new place")
    if dataset is None:
        raise InputError(f"{run} does not say which Dataset its model was trained on; give dataset=")
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    known = extra.get("fingerprint")
    if known is not None and data.fingerprint != known:
        raise DataError(
            f"{data.path} is not the Dataset that the model of {run} was trained on (fingerprint "
            f"{data.fingerprint}, expected {known}); give dataset= the right one"
        )
    out = run / f"model{SUFFIX[format]}" if path is None else path
    return export(model, out, dataset=data, format=format, rows=rows, replace=replace or path is None)


def _onnx(model: Model, data: Dataset | None, batch: Batch, file: Path, out: Path) -> Exported:
    pass

    large = external_data_file(model, out)
    built = build_onnx(model, data, None if large is None else file.with_name(large))
    write_onnx(built, model, data, file)
    parity, name = check_onnx(built, model, data, batch, file)
    return Exported(out, "onnx", parity.rows, parity.max_logit_change, parity.bound, name)


def _torch(model: Model, data: Dataset | None, batch: Batch, file: Path, out: Path) -> Exported:
    from lpfs.export import torch_export

    torch_export.write_torch(model, data, file)
    parity = torch_export.check_torch(model, batch, file)
    return Exported(out, "torch", parity.rows, parity.max_logit_change, parity.bound, f"torch {torch.__version__}")


def _check_model(model: Model) -> None:
    if not isinstance(model, Model):
        raise InputError(f"export writes models of lpfs.models, found {type(model).__name__}")
    check_no_gates(model)
    if not len(model.reads):
        raise InputError("the model reads no field: there is nothing to export")
    for name, each in model.named_parameters():
        if each.dtype != torch.float32:
            raise InputError(f"export writes float32 models, {name!r} is {each.dtype}; use model.float()")


def _check_fields(model: Model, data: Dataset) -> None:
    """Refuse a Dataset whose ids are not those of the model."""
    absent = [name for name in model.reads.names if name not in data.schema.names]
    if absent:
        raise InputError(f"{data.path} has no field {absent[0]!r}, which the model reads; give its own Dataset")
    for own, other in zip(model.reads, data.schema.subset(model.reads.names), strict=True):
        for what in ("name", "kind", "dim" if own.kind == "numeric" else "cardinality"):
            if getattr(own, what) != getattr(other, what):
                raise InputError(
                    f"field {own.name!r} has {what} {getattr(own, what)!r} in the model and "
                    f"{getattr(other, what)!r} in {data.path}; give the Dataset that the model was trained on"
                )


def _check_batch(model: Model, data: Dataset | None, rows: Batch | int | None) -> Batch:
    if isinstance(rows, Batch):
        batch = rows.to("cpu")
    elif data is None:
        raise InputError("a file is checked on real rows before it is kept: give dataset=, or a Batch as rows=")
    elif rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InputError(f"rows must be a Batch or a whole number of at least 1, found {rows!r}")
    else:
        batch = sample_batch(data, model.reads, ROWS if rows is None else rows)
    model.check(batch)
    if not len(batch):
        raise InputError("there are no rows to check the file on")
    return batch


ABOUT = (
    "A click model of lpfs. Inputs take raw values, one a field (metadata 'inputs' says which and how); "
    "'logit' and 'probability' come out."
)


@dataclass(frozen=True)
class OnnxModel:
    """The graph of a model, and the columns that it reads."""

    graph: Graph
    columns: list[InputColumn]
    encoded: EncodedInputs
    rate: float | None


def build_onnx(model: Model, dataset: Dataset | None, large: Path | None = None) -> OnnxModel:
    """Return a model as a graph, with the preprocessing that a Dataset knows; large weights may go to a file."""
    graph = Graph(large)
    columns = build_columns(model.reads, dataset)
    given = add_inputs(graph, columns)
    tasks = 1 + len(model.schema.tasks)
    both = logits(graph, model, given)  # (B, 1 + tasks)
    shape: list[int | str] = ["B", tasks] if tasks > 1 else ["B"]
    main = graph.add("Gather", both, graph.constant(np.array(0)), axis=1)
    graph.add("Identity", both if tasks > 1 else main, out="logit")
    graph.add("Sigmoid", "logit", out="probability")
    of = ", ".join((model.schema.label, *model.schema.tasks))
    graph.add_output("probability", shape, f"of {of}, as the model was trained")
    graph.add_output("logit", shape, f"of {of}: log(p / (1 - p))")
    rate = negative_rate(dataset)
    if rate is not None:
        moved = graph.add("Add", main, graph.constant(np.array(math.log(rate), np.float32)))
        graph.add("Sigmoid", moved, out="corrected_probability")
        about = f"of {model.schema.label} before negatives were down-sampled to a share of {rate:g}"
        graph.add_output("corrected_probability", ["B"], about)
    return OnnxModel(graph, columns, given, rate)


def negative_rate(dataset: Dataset | None) -> float | None:
    """Return the share of negatives that a Dataset kept; None if it is unknown, not one number, or all of them."""
    rates = set() if dataset is None else {day.negative_rate for day in dataset.table}
    rate = rates.pop() if len(rates) == 1 else 1.0
    return rate if 0.0 < rate < 1.0 else None


def write_onnx(built: OnnxModel, model: Model, dataset: Dataset | None, file: Path) -> None:
    """Write the graph with its metadata."""
    proto = built.graph.model(ABOUT)
    told: dict[str, Any] = {
        "inputs": [each.metadata() for each in built.columns],
        "schema": model.reads.to_json(),
        "model": {"name": registered_name(model), "config": model.config, "silent": list(model.silent)},
        "data": None if dataset is None else {"fingerprint": dataset.fingerprint},
        "negative_rate": built.rate,
    }
    props = {f"lpfs.{key}": json.dumps(value) for key, value in told.items()}
    built.graph.onnx.helper.set_model_props(proto, {"lpfs.version": lpfs.__version__, **props})
    with file.open("wb") as out:
        out.write(proto.SerializeToString())


def check_onnx(
    built: OnnxModel, model: Model, dataset: Dataset | None, batch: Batch, file: Path
) -> tuple[Parity, str]:
    """Run the file on rows and on every value of every vocabulary; raise ExactnessError where it differs."""
    run, name = onnx_runtime(file)
    feeds = raw_inputs(built.columns, batch)
    if dataset is not None:
        batch = reencode(built.columns, feeds, batch, dataset)
    found = {key: torch.from_numpy(np.array(each)) for key, each in run(feeds).items()}
    parity = check_logits(model, batch, found["logit"])
    main = found["logit"][:, 0] if model.schema.tasks else found["logit"]
    _check_equal("probability", torch.sigmoid(found["logit"].double()), found["probability"])
    if built.rate is not None:
        moved = main.double() + math.log(built.rate)
        _check_equal("corrected_probability", torch.sigmoid(moved), found["corrected_probability"])
    for each in built.columns:
        _check_values(built, each)
    return parity, name


def _check_equal(name: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if found.shape != expected.shape or not torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6):
        raise ExactnessError(f"the file's {name!r} is not the sigmoid of its logits; nothing was written")


def _check_values(built: OnnxModel, column: InputColumn) -> None:
    """Ask the file for the id of every value of a field, of missing, of an unseen one, and of none in a bag."""
    raw, ids = column.examples()
    if not len(ids):
        return
    name = column.field.name
    part = built.graph.part(built.encoded.ids[name], built.graph.onnx.TensorProto.INT64)
    run, _ = onnx_runtime(part.SerializeToString())
    [found] = run({column.input: raw[None] if column.multi else raw}).values()
    check_ids(name, ids, found.reshape(-1), raw)
