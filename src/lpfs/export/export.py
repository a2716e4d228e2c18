"""Write a model as one file, and keep the file only if it predicts what the model predicts."""

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
from torch import Tensor

import lpfs
from lpfs._fileio import fsync_path
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.errors import CheckpointError, DataError, ExactnessError, InputError
from lpfs.export.onnx_graph import Graph, external_data_file, old_external_files
from lpfs.export.onnx_models import EncodedInputs, add_inputs, add_logits
from lpfs.export.parity import Parity, check_ids, check_logits, onnx_runtime, raw_inputs, reencode, sample_batch
from lpfs.export.preprocessing import InputColumn, build_columns
from lpfs.export.torch_export import check_torch, write_torch
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.serialization import check_no_gates, load, load_metadata

Format = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
CHECKED_ROWS = 4096  # rows that a file is checked on by default
ONNX_DESCRIPTION = (
    "A click model of lpfs. There is one input per field; it takes raw values (metadata 'lpfs.inputs' describes "
    "them). The outputs are 'logit' and 'probability'."
)


@dataclass(frozen=True)
class Exported:
    """A written file and the result of its check; can be used wherever a path is accepted.

    Args:
        path: the file.
        format: ``onnx`` or ``torch``.
        rows: number of rows that the file was checked on.
        max_logit_change: largest absolute difference between its logits and the model's.
        bound: largest difference that rounding can explain.
        checked_with: name and version of the runtime that ran the file.
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
        """Return one sentence about the file and its check."""
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
    """Write a model as one file that is checked before it is kept.

    The file is written to a temporary directory, read back and run on real rows. It is moved to ``path`` only if
    its logits equal the model's up to rounding. The model is not changed.

    Args:
        model: one of ``lpfs.models``, without gates: absorb or detach them first.
        path: path of the file.
        dataset: the Dataset that the model was trained on. Its vocabularies, scales and bins become part of an
            ONNX file, and the file is checked on its rows. Without it the file takes ids, and ``rows`` must be a
            Batch.
        format: ``onnx``: raw values in, probabilities out. ``torch``: ids in, logits out, by ``torch.export``;
            loading such a file runs pickle, so open only files that you trust.
        rows: number of rows to check, taken from several positions of the Dataset; or a Batch of the fields that
            the model uses as inputs.
        replace: replace an existing file.
    """
    _check_format(format)
    _check_model(model)
    data = dataset if dataset is None or isinstance(dataset, Dataset) else Dataset(dataset)
    if data is not None:
        _check_fields(model, data)
    batch = _check_batch(model, data, rows)
    out = Path(path)
    if out.is_dir():
        raise InputError(f"{out} is a directory; give the path of a file")
    if out.exists() and not replace:
        raise InputError(f"{out} exists already; choose another name, or replace it with replace=True")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name[:80]}.", suffix=".tmp", dir=out.parent))
        try:
            file = staging / ("model" + SUFFIX[format])
            exported = (_export_onnx if format == "onnx" else _export_torch)(model, data, batch, file, out)
            external = [written for written in staging.iterdir() if written != file]
            for written in (*external, file):  # weights first: the model file refers to them
                fsync_path(written)
                written.replace(out if written == file else out.parent / written.name)
            fsync_path(out.parent)
            for old in old_external_files(out):
                if old.name not in {written.name for written in external}:
                    old.unlink()
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {out}: {error.strerror or error}; an existing file was not changed"
        ) from error
    return exported


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
        folder: directory of the run; its model is in ``model``.
        path: path of the file; by default ``model.onnx`` or ``model.pt2`` in the run directory.
        dataset: the Dataset, if it was moved; by default ``data`` in the run directory, or the recorded path.
        format: as in :func:`export`.
        rows: number of rows to check.
        replace: replace an existing file; the default path is always replaced.
    """
    _check_format(format)
    run_dir = Path(folder)
    if not (run_dir / "model").is_dir():
        raise InputError(f"{run_dir} has no model; give the directory of a run of select, train or prune")
    model, metadata = load(run_dir / "model"), load_metadata(run_dir / "model")
    if dataset is None:
        inside = run_dir / "data"
        dataset = inside if (inside / "dataset.json").exists() else metadata.get("data")
        if dataset is not None and not Path(dataset).exists():
            raise DataError(f"the Dataset of {run_dir} is no longer at {dataset}; give its new path as dataset=")
    if dataset is None:
        raise InputError(f"{run_dir} does not record which Dataset its model was trained on; give dataset=")
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    expected = metadata.get("fingerprint")
    if expected is not None and data.fingerprint != expected:
        raise DataError(
            f"{data.path} is not the Dataset that the model of {run_dir} was trained on (fingerprint "
            f"{data.fingerprint}, expected {expected}); give the right one as dataset="
        )
    out = run_dir / f"model{SUFFIX[format]}" if path is None else path
    return export(model, out, dataset=data, format=format, rows=rows, replace=replace or path is None)


# ------------------------------------------------------------------------------------------- arguments


def _check_format(format: str) -> None:
    if format not in get_args(Format):
        raise InputError(f"format must be onnx or torch, found {format!r}")


def _check_model(model: Model) -> None:
    if not isinstance(model, Model):
        raise InputError(f"export writes models of lpfs.models, found {type(model).__name__}")
    check_no_gates(model)
    if not len(model.reads):
        raise InputError("the model has no input field; there is nothing to export")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise InputError(f"export writes float32 models, {name!r} is {parameter.dtype}; use model.float()")


def _check_fields(model: Model, data: Dataset) -> None:
    """Raise InputError if the ids of the Dataset are not those of the model."""
    absent = [name for name in model.reads.names if name not in data.schema.names]
    if absent:
        raise InputError(
            f"{data.path} has no field {absent[0]!r}, an input of the model; give the Dataset that the model was "
            "trained on"
        )
    for field, stored in zip(model.reads, data.schema.subset(model.reads.names), strict=True):
        for attribute in ("name", "kind", "dim" if field.kind == "numeric" else "cardinality"):
            if getattr(field, attribute) != getattr(stored, attribute):
                raise InputError(
                    f"field {field.name!r} has {attribute} {getattr(field, attribute)!r} in the model and "
                    f"{getattr(stored, attribute)!r} in {data.path}; give the Dataset that the model was "
                    "trained on"
                )


def _check_batch(model: Model, data: Dataset | None, rows: Batch | int | None) -> Batch:
    """Return the rows that the file is checked on."""
    if isinstance(rows, Batch):
        batch = rows.to("cpu")
    elif data is None:
        raise InputError("a file is checked on real rows before it is kept: give dataset=, or a Batch as rows=")
    elif rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InputError(f"rows must be a Batch or an integer of at least 1, found {rows!r}")
    else:
        batch = sample_batch(data, model.reads, CHECKED_ROWS if rows is None else rows)
    model.check(batch)
    if not len(batch):
        raise InputError("there are no rows to check the file on; give at least one")
    return batch


# --------------------------------------------------------------------------------------------- formats


def _export_torch(model: Model, data: Dataset | None, batch: Batch, file: Path, out: Path) -> Exported:
    write_torch(model, data, file)
    parity = check_torch(model, batch, file)
    return Exported(out, "torch", parity.rows, parity.max_logit_change, parity.bound, f"torch {torch.__version__}")


def _export_onnx(model: Model, data: Dataset | None, batch: Batch, file: Path, out: Path) -> Exported:
    external = external_data_file(model, out)
    built = build_onnx(model, data, None if external is None else file.with_name(external))
    write_onnx(built, model, data, file)
    parity, runtime = check_onnx(built, model, data, batch, file)
    return Exported(out, "onnx", parity.rows, parity.max_logit_change, parity.bound, runtime)


@dataclass(frozen=True)
class OnnxModel:
    """The graph of a model and the input columns of the graph."""

    graph: Graph
    columns: list[InputColumn]
    encoded: EncodedInputs
    negative_rate: float | None


def build_onnx(model: Model, dataset: Dataset | None, external_file: Path | None = None) -> OnnxModel:
    """Return a model as a graph with the preprocessing of a Dataset; large weights may go to a separate file."""
    graph = Graph(external_file)
    columns = build_columns(model.reads, dataset)
    encoded = add_inputs(graph, columns)
    tasks = 1 + len(model.schema.tasks)
    all_logits = add_logits(graph, model, encoded)  # (B, 1 + tasks)
    shape: list[int | str] = ["B", tasks] if tasks > 1 else ["B"]
    main = graph.add("Gather", all_logits, graph.constant(np.array(0)), axis=1)
    graph.add("Identity", all_logits if tasks > 1 else main, out="logit")
    graph.add("Sigmoid", "logit", out="probability")
    labels = ", ".join((model.schema.label, *model.schema.tasks))
    graph.add_output("probability", shape, f"of {labels}, as the model was trained")
    graph.add_output("logit", shape, f"of {labels}: log(p / (1 - p))")
    rate = get_negative_rate(dataset)
    if rate is not None:
        shifted = graph.add("Add", main, graph.constant(np.array(math.log(rate), np.float32)))
        graph.add("Sigmoid", shifted, out="corrected_probability")
        description = f"of {model.schema.label} before negatives were down-sampled to a fraction of {rate:g}"
        graph.add_output("corrected_probability", ["B"], description)
    return OnnxModel(graph, columns, encoded, rate)


def get_negative_rate(dataset: Dataset | None) -> float | None:
    """Return the fraction of negatives that a Dataset kept; None if unknown, not the same every day, or 1."""
    rates = set() if dataset is None else {day.negative_rate for day in dataset.table}
    rate = rates.pop() if len(rates) == 1 else 1.0
    return rate if 0.0 < rate < 1.0 else None


def write_onnx(built: OnnxModel, model: Model, dataset: Dataset | None, file: Path) -> None:
    """Write the graph with its metadata."""
    proto = built.graph.to_model(ONNX_DESCRIPTION)
    metadata: dict[str, Any] = {
        "inputs": [column.metadata() for column in built.columns],
        "schema": model.reads.to_json(),
        "model": {"name": registered_name(model), "config": model.config, "silent": list(model.silent)},
        "data": None if dataset is None else {"fingerprint": dataset.fingerprint},
        "negative_rate": built.negative_rate,
    }
    properties = {f"lpfs.{key}": json.dumps(value) for key, value in metadata.items()}
    built.graph.onnx.helper.set_model_props(proto, {"lpfs.version": lpfs.__version__, **properties})
    file.write_bytes(proto.SerializeToString())


def check_onnx(built: OnnxModel, model: Model, dataset: Dataset | None, batch: Batch, file: Path) -> tuple[Parity, str]:
    """Run the file on rows and on every value of every vocabulary; raise ExactnessError where it differs."""
    run, runtime = onnx_runtime(file)
    feeds = raw_inputs(built.columns, batch)
    if dataset is not None:
        batch = reencode(built.columns, feeds, batch, dataset)
    outputs = {name: torch.from_numpy(np.array(value)) for name, value in run(feeds).items()}
    logit = outputs["logit"]
    parity = check_logits(model, batch, logit)
    _check_sigmoid("probability", logit.double(), outputs)
    if built.negative_rate is not None:
        main = logit[:, 0] if model.schema.tasks else logit
        _check_sigmoid("corrected_probability", main.double() + math.log(built.negative_rate), outputs)
    for column in built.columns:
        _check_column(built, column)
    return parity, runtime


def _check_sigmoid(name: str, logits: Tensor, outputs: dict[str, Tensor]) -> None:
    expected, output = torch.sigmoid(logits), outputs[name]
    if output.shape != expected.shape or not torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6):
        raise ExactnessError(f"output {name!r} of the file is not the sigmoid of its logits; nothing was written")


def _check_column(built: OnnxModel, column: InputColumn) -> None:
    """Run the encoding of one field on every value, a missing and an unseen one, and padding in a bag."""
    values, ids = column.examples()
    if not len(ids):
        return
    name = column.field.name
    part = built.graph.subgraph(built.encoded.ids[name], built.graph.onnx.TensorProto.INT64)
    run, _ = onnx_runtime(part.SerializeToString())
    [found] = run({column.input: values[None] if column.multi else values}).values()
    check_ids(name, ids, found.reshape(-1), values)
