"""Rows of a Dataset as raw values again: what the file is fed with when it is checked.

Parity: a file that is kept predicts what the model predicts; one that does not is refused.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.format import AnyArray
from lpfs.errors import ExactnessError, NonFiniteError
from lpfs.export.onnx_graph import need_onnx
from lpfs.export.preprocessing import PAD_ID, IdColumn, InputColumn, NumericColumn, VocabularyColumn, as_whole
from lpfs.gates.logits import logits_of, max_change
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.evaluate import device_of

ULP_BOUND = 16  # in the last place, by which any order of sums may move a logit
OWN_ULP = 8  # how many times the model's own rounding another order of sums may move a logit
Run = Callable[[dict[str, AnyArray]], dict[str, AnyArray]]


@dataclass(frozen=True)
class Parity:
    """How far the logits of a file are from those of the model, on how many rows, and how far they may be."""

    rows: int
    max_logit_change: float
    bound: float


def check_logits(model: Model, batch: Batch, found: Tensor) -> Parity:
    """Return the parity of logits with those of the model for a batch, or raise ExactnessError.

    Both sum the same float32 products in different orders. That moves a logit by some units in its last place, and
    by more where many or large terms cancel. Up to ``UNITS`` units of the largest logit (at least 1) are rounding;
    beyond, the model's own distance from itself in float64 says what is: the file may be ``OWN`` times as far.
    """
    batch = batch.to(device_of(model))
    [expected] = logits_of(model, batch)
    if not bool(torch.isfinite(expected).all()):
        row = int((~torch.isfinite(expected)).reshape(len(batch), -1).any(1).nonzero()[0])
        raise NonFiniteError(f"the model's logit of row {row} of those checked is not finite; nothing was written")
    found = found.to(expected.device)
    worst = max_change([expected], [found])
    bound = ULP_BOUND * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
    if bound < worst < float("inf"):
        [exact] = logits_of(copy.deepcopy(model).double(), batch)
        bound = max(bound, OWN_ULP * max_change([exact], [expected]))
    if not worst <= bound:
        raise ExactnessError(
            f"the file predicts something else than the model: a logit of {len(batch):,} rows moves by "
            f"{worst:.3g}, rounding explains {bound:.3g}; nothing was written; report it, please"
        )
    return Parity(len(batch), worst, bound)


def check_ids(name: str, expected: AnyArray, found: AnyArray, raw: AnyArray) -> None:
    """Refuse ids that a field's raw values should not have."""
    wrong = np.flatnonzero(expected != found)
    if wrong.size:
        at = int(wrong[0])
        raise ExactnessError(
            f"field {name!r}: the file gives {raw[at]!r:.60} the id {found[at]}, the Dataset {expected[at]} "
            f"({wrong.size:,} of {len(expected):,} values differ); nothing was written"
        )


def onnx_runtime(model: bytes | str | os.PathLike[str]) -> tuple[Run, str]:
    """Return what runs an ONNX model, and its name: onnxruntime, or else the reference that onnx brings along."""
    given = model if isinstance(model, bytes) else str(Path(model))
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        return _reference(given)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]

    def run(feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return dict(zip(names, session.run(names, feeds), strict=True))

    return run, f"onnxruntime {onnxruntime.__version__}"


def _reference(model: bytes | str) -> tuple[Run, str]:
    onnx = need_onnx()
    evaluator = onnx.reference.ReferenceEvaluator(
        model if isinstance(model, str) else onnx.load_from_string(model)
    )

    def run(feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return dict(zip(evaluator.output_names, evaluator.run(None, feeds), strict=True))

    return run, f"onnx.reference {onnx.__version__}"


PIECES = 8  # places of a Dataset that rows are taken from


def sample_batch(dataset: Dataset, schema: Schema, count: int) -> Batch:
    """Return rows from several places of a Dataset, from the first to the last; all of them if there are fewer."""
    low, high = dataset.span
    reader = dataset.reader(dataset.schema.subset(schema.names))
    if high - low <= count:
        return reader.read([(low, high)]).batch()
    sizes = [count // PIECES + (number < count % PIECES) for number in range(PIECES)]
    starts = np.linspace(low, high - max(sizes), PIECES).astype(int).tolist()
    return reader.read([(start, start + size) for start, size in zip(starts, sizes, strict=True)]).batch()


def raw_inputs(columns: Sequence[InputColumn], batch: Batch) -> dict[str, AnyArray]:
    """Return raw values with the ids and numbers of a batch, by input."""
    feeds: dict[str, AnyArray] = {}
    seen = at = 0
    for each in columns:
        if isinstance(each, NumericColumn):
            numbers = batch.dense[:, at : at + each.field.dim].double().numpy()
            if batch.missing is not None:
                numbers = np.where(batch.missing[:, at : at + each.field.dim].numpy(), np.nan, numbers)
            at += each.field.dim
            raw = each.example_values(numbers)
            feeds[each.input] = raw if each.scale is not None else raw.astype(np.float32)
        elif each.multi:
            feeds[each.input] = each.example_values(padded(*batch.bags[each.field.name]))
        else:
            feeds[each.input] = each.example_values(batch.ids[:, seen].numpy())
            seen += 1
    return feeds


def padded(values: torch.Tensor, offsets: torch.Tensor) -> AnyArray:
    """Return bags as (B, L) ids, with ``PAD_ID`` after the last of each.

    >>> padded(torch.tensor([5, 6, 7]), torch.tensor([0, 2, 2]))
    array([[ 5,  6],
           [-1, -1],
           [ 7, -1]])
    """
    sizes = np.diff(offsets.numpy().astype(np.int64), append=len(values))
    out = np.full((len(sizes), max(1, int(sizes.max(initial=0)))), PAD_ID, np.int64)
    out[np.arange(out.shape[1]) < sizes[:, None]] = values.numpy()
    return out


def reencode(columns: Sequence[InputColumn], feeds: dict[str, AnyArray], batch: Batch, dataset: Dataset) -> Batch:
    """Return the batch that ``encode_rows`` makes of the raw values; its ids must be those they came from."""
    from lpfs.data.reencode import RowEncoder

    known = [
        each for each in columns if not isinstance(each, IdColumn) and getattr(each, "scale", ...) is not None
    ]
    if not known:
        return batch
    import polars as pl

    encoder = RowEncoder(dataset, [each.field.name for each in known])
    found = encoder(pl.DataFrame([as_series(each, feeds[each.input]) for each in known]))
    schema = Schema(tuple(each.field for each in columns))
    same = batch.select(schema, encoder.schema.names)
    ids = torch.equal(found.ids, same.ids)
    if not ids or any(not torch.equal(a, b) for name in found.bags for a, b in _both(found, same, name)):
        raise ExactnessError(
            f"the vocabularies of {dataset.path} do not lead back to the ids of its rows; prepare its log again"
        )
    return replace(batch, dense=found.dense, missing=found.missing) if found.dense.shape[1] else batch


def _both(found: Batch, same: Batch, name: str) -> list[tuple[Any, Any]]:
    return list(zip(found.bags[name], same.bags[name], strict=True))


def as_series(column: InputColumn, feed: AnyArray) -> Any:
    """Return the input of a column as a column of a table: null where it is missing, lists for bags."""
    import polars as pl

    name = column.field.name
    if not isinstance(column, VocabularyColumn):
        return pl.Series(name, feed) if feed.ndim == 1 else pl.Series(name, feed.tolist(), pl.List(pl.Float64))
    dtype: Any = {"text": pl.String, "fraction": pl.Float64}.get(column.sort)
    if column.sort == "whole":
        unsigned = column.values.dtype == np.uint64
        dtype, feed = (pl.UInt64, feed.view(np.uint64)) if unsigned else (pl.Int64, feed)
        missing, pad = (as_whole(np.array([each])).view(feed.dtype)[0] for each in (column.missing, column.pad))
    else:
        missing, pad = column.missing, column.pad
    if not column.multi:
        return pl.Series(name, [None if each == missing else each for each in feed.tolist()], dtype)
    rows = [[None if each == missing else each for each in row if each != pad] for row in feed.tolist()]
    return pl.Series(name, rows, pl.List(dtype))
