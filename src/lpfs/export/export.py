"""Write a model as one file, and keep the file only if it predicts what the model predicts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import lpfs
from lpfs._fileio import fsync_path, no_result_error
from lpfs._validation import check_int, check_name
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.errors import CheckpointError, DataError, ExactnessError, InputError
from lpfs.export.onnx_graph import Graph, external_data_file, old_external_files
from lpfs.export.onnx_models import add_inputs, add_logits
from lpfs.export.parity import check_ids, check_logits, onnx_runtime, raw_inputs, reencode, sample_batch
from lpfs.export.preprocessing import InputColumn, build_columns
from lpfs.export.torch_export import write_torch
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

    def __str__(self) -> str:
        return str(self.path)

    __fspath__ = __str__

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
    check_name(format, SUFFIX, "format")
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
        with TemporaryDirectory(".tmp", f".{out.name[:80]}.", out.parent, ignore_cleanup_errors=True) as staging:
            file = Path(staging, f"model{SUFFIX[format]}")
            if format == "torch":
                result = write_torch(model, data, batch, file)
            else:
                result = _write_onnx(model, data, batch, file, out.name)
            external = [path for path in file.parent.iterdir() if path != file]
            for path in (*external, file):  # weights first: the model file refers to them
                fsync_path(path)
                path.replace(out if path == file else out.parent / path.name)
            fsync_path(out.parent)
            for old in old_external_files(out):
                if old.name not in {path.name for path in external}:
                    old.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write {out}: {error.strerror or error}; an existing file was not changed"
        ) from error
    return Exported(out, format, len(batch), *result)


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
    check_name(format, SUFFIX, "format")
    run_dir = Path(folder)
    if not (run_dir / "model").is_dir():
        advice = "give the directory of a run of select, train or prune"
        raise no_result_error(run_dir, f"{run_dir} has no model", advice)
    model, metadata = load(run_dir / "model"), load_metadata(run_dir / "model")
    if dataset is None:
        inside = run_dir / "data"
        dataset = inside if (inside / "dataset.json").exists() else metadata.get("data")
        if not isinstance(dataset, str | Path):
            raise InputError(f"{run_dir} does not record which Dataset its model was trained on; give dataset=")
        if not Path(dataset).exists():
            raise DataError(f"the Dataset of {run_dir} is no longer at {dataset}; give its new path as dataset=")
    data = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
    expected = metadata.get("fingerprint")
    if expected is not None and data.fingerprint != expected:
        raise DataError(
            f"{data.path} is not the Dataset that the model of {run_dir} was trained on (fingerprint "
            f"{data.fingerprint}, expected {expected}); give the right one as dataset="
        )
    out = run_dir / f"model{SUFFIX[format]}" if path is None else path
    return export(model, out, dataset=data, format=format, rows=rows, replace=replace or path is None)


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
    for name in model.reads.names:
        check_name(name, data.schema.names, "field", f"{data.path} is not the Dataset that the model was trained on")
    for field, stored in zip(model.reads, data.schema.subset(model.reads.names), strict=True):
        for attribute in ("name", "kind", "dim" if field.kind == "numeric" else "cardinality"):
            expected, actual = getattr(field, attribute), getattr(stored, attribute)
            if expected != actual:
                raise InputError(
                    f"field {field.name!r} has {attribute} {expected!r} in the model and {actual!r} in {data.path}; "
                    "give the Dataset that the model was trained on"
                )


def _check_batch(model: Model, data: Dataset | None, rows: Batch | int | None) -> Batch:
    """Return the rows that the file is checked on."""
    if isinstance(rows, Batch):
        batch = rows.to("cpu")
    elif data is None:
        raise InputError("a file is checked on real rows before it is kept: give dataset=, or a Batch as rows=")
    else:
        batch = sample_batch(data, model.reads, CHECKED_ROWS if rows is None else check_int("rows", rows, 1))
    model.check(batch)
    if not len(batch):
        raise InputError("there are no rows to check the file on; give at least one")
    return batch


def _write_onnx(model: Model, data: Dataset | None, batch: Batch, file: Path, name: str) -> tuple[float, float, str]:
    """Write a file and return the result of its check: largest difference of a logit, its bound, and the runtime.

    ``name`` is the final name of the file.
    """
    external = external_data_file(model, name)
    graph = Graph(None if external is None else file.with_name(external))
    columns = build_columns(model.reads, data)
    encoded = add_inputs(graph, columns)
    rate = get_negative_rate(data)
    _add_outputs(graph, model, add_logits(graph, model, encoded), rate)
    metadata: dict[str, Any] = {
        "inputs": [column.metadata() for column in columns],
        "schema": model.reads.to_json(),
        "model": {"name": registered_name(model), "config": model.config, "silent": list(model.silent)},
        "data": None if data is None else {"fingerprint": data.fingerprint},
        "negative_rate": rate,
    }
    properties = {f"lpfs.{key}": json.dumps(value) for key, value in metadata.items()}
    proto = graph.to_model(ONNX_DESCRIPTION)
    graph.onnx.helper.set_model_props(proto, {"lpfs.version": lpfs.__version__, **properties})
    file.write_bytes(proto.SerializeToString())
    result = _check_rows(file, columns, model, data, batch, rate)
    for column in columns:
        _check_column(graph, column, encoded.ids)
    return result


def _add_outputs(graph: Graph, model: Model, logits: str, negative_rate: float | None) -> None:
    """Declare the outputs; ``logits`` are (B, 1 + tasks)."""
    tasks = 1 + len(model.schema.tasks)
    shape: list[int | str] = ["B", tasks] if tasks > 1 else ["B"]
    main = graph.add("Gather", logits, 0, axis=1)
    graph.add("Identity", logits if tasks > 1 else main, out="logit")
    graph.add("Sigmoid", "logit", out="probability")
    labels = ", ".join((model.schema.label, *model.schema.tasks))
    graph.add_output("probability", shape, f"of {labels}, as the model was trained")
    graph.add_output("logit", shape, f"of {labels}: log(p / (1 - p))")
    if negative_rate is not None:
        shifted = graph.add("Add", main, np.float32(math.log(negative_rate)))
        graph.add("Sigmoid", shifted, out="corrected_probability")
        description = f"of {model.schema.label} before negatives were down-sampled to a fraction of {negative_rate:g}"
        graph.add_output("corrected_probability", ["B"], description)


def get_negative_rate(dataset: Dataset | None) -> float | None:
    """Return the fraction of negatives that a Dataset kept; None if unknown, not the same every day, or 1."""
    rates = set() if dataset is None else {day.negative_rate for day in dataset.table}
    rate = rates.pop() if len(rates) == 1 else 1.0
    return rate if 0.0 < rate < 1.0 else None


def _check_rows(
    file: Path, columns: list[InputColumn], model: Model, data: Dataset | None, batch: Batch, rate: float | None
) -> tuple[float, float, str]:
    """Run the file on rows; raise ExactnessError if an output differs from the model's."""
    run, runtime = onnx_runtime(str(file))
    feeds = raw_inputs(columns, batch)
    if data is not None:
        batch = reencode(columns, feeds, batch, data)
    outputs = {name: torch.from_numpy(np.array(value)) for name, value in run(feeds).items()}
    logit = outputs["logit"]
    change, bound = check_logits(model, batch, logit)
    _check_sigmoid("probability", logit.double(), outputs)
    if rate is not None:
        main = logit[:, 0] if model.schema.tasks else logit
        _check_sigmoid("corrected_probability", main.double() + math.log(rate), outputs)
    return change, bound, runtime


def _check_sigmoid(name: str, logits: Tensor, outputs: dict[str, Tensor]) -> None:
    expected, output = torch.sigmoid(logits), outputs[name]
    if output.shape != expected.shape or not torch.allclose(output.double(), expected, rtol=1e-5, atol=1e-6):
        raise ExactnessError(f"output {name!r} of the file is not the sigmoid of its logits; nothing was written")


def _check_column(graph: Graph, column: InputColumn, encoded: dict[str, str]) -> None:
    """Run the encoding of one field on every value, a missing and an unseen one, and padding in a bag."""
    values, ids = column.examples()
    if len(ids):
        part = graph.subgraph(encoded[column.field.name], graph.onnx.TensorProto.INT64)
        run, _ = onnx_runtime(part.SerializeToString())
        [file_ids] = run({column.input: values[None] if column.multi else values}).values()
        check_ids(column.field.name, ids, file_ids.reshape(-1), values)
