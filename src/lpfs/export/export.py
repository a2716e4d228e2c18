"""export: a model as one file that serves without lpfs, checked before it is kept."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from lpfs.data.batches.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.format import sync
from lpfs.errors import CheckpointError, DataError, InputError
from lpfs.export.onnx_graph import apart, older
from lpfs.export.raw import some_rows
from lpfs.models.base import Model
from lpfs.serialization import load, load_extra, refuse_gates

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

    def told(self) -> str:
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
    batch = _rows(model, data, rows)
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
                sync(each)
                each.replace(out if each == file else out.parent / each.name)
            sync(out.parent)
            for each in older(out):
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
    model, extra = load(run / "model"), load_extra(run / "model")
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
    from lpfs.export import onnx_file

    large = apart(model, out)
    built = onnx_file.build(model, data, None if large is None else file.with_name(large))
    onnx_file.write(built, model, data, file)
    parity, name = onnx_file.check(built, model, data, batch, file)
    return Exported(out, "onnx", parity.rows, parity.max_logit_change, parity.bound, name)


def _torch(model: Model, data: Dataset | None, batch: Batch, file: Path, out: Path) -> Exported:
    from lpfs.export import torch_export

    torch_export.write(model, data, file)
    parity = torch_export.check(model, batch, file)
    return Exported(out, "torch", parity.rows, parity.max_logit_change, parity.bound, f"torch {torch.__version__}")


def _check_model(model: Model) -> None:
    if not isinstance(model, Model):
        raise InputError(f"export writes models of lpfs.models, found {type(model).__name__}")
    refuse_gates(model)
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


def _rows(model: Model, data: Dataset | None, rows: Batch | int | None) -> Batch:
    if isinstance(rows, Batch):
        batch = rows.to("cpu")
    elif data is None:
        raise InputError("a file is checked on real rows before it is kept: give dataset=, or a Batch as rows=")
    elif rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InputError(f"rows must be a Batch or a whole number of at least 1, found {rows!r}")
    else:
        batch = some_rows(data, model.reads, ROWS if rows is None else rows)
    model.check(batch)
    if not len(batch):
        raise InputError("there are no rows to check the file on")
    return batch
