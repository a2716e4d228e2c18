"""Compare a file with the model: raw rows for the file, its runtime, and the bounds on logits and ids."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.store.format import AnyArray
from lpfs.errors import ExactnessError, NonFiniteError
from lpfs.export.onnx_graph import import_onnx
from lpfs.export.preprocessing import PAD_ID, IdColumn, InputColumn, NumericColumn, VocabularyColumn, as_int64
from lpfs.gates.verification import compute_logits, max_abs_difference
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.evaluate import device_of

ULP_BOUND = 16  # units in the last place by which another order of sums may change a logit
OWN_ULP = 8  # allowed change as a multiple of the model's own distance from float64
SAMPLED_RANGES = 8  # ranges of a Dataset that rows are sampled from
OnnxRunner = Callable[[dict[str, AnyArray]], dict[str, AnyArray]]


def check_logits(model: Model, batch: Batch, logits: Tensor) -> tuple[float, float]:
    """Return the largest difference to the model's logits and its bound; raise ExactnessError if it is exceeded.

    Both sum the same float32 products in different orders. That changes a logit by some units in its last place,
    and by more where many or large terms cancel. Up to ``ULP_BOUND`` units of the largest logit (at least 1) count
    as rounding. Beyond that, the bound is ``OWN_ULP`` times the model's own distance from itself in float64.
    """
    batch = batch.to(device_of(model))
    [expected] = compute_logits(model, batch)
    if not bool(torch.isfinite(expected).all()):
        row = int((~torch.isfinite(expected)).reshape(len(batch), -1).any(1).nonzero()[0])
        raise NonFiniteError(f"the model's logit of checked row {row} is not finite; nothing was written")
    change = max_abs_difference([expected], [logits.to(expected.device)])
    bound = ULP_BOUND * torch.finfo(expected.dtype).eps * max(1.0, float(expected.abs().max()))
    if bound < change < float("inf"):
        [exact] = compute_logits(copy.deepcopy(model).double(), batch)
        bound = max(bound, OWN_ULP * max_abs_difference([exact], [expected]))
    if not change <= bound:
        raise ExactnessError(
            f"the file's predictions differ from the model's: on {len(batch):,} rows a logit changes by "
            f"{change:.3g}, rounding explains {bound:.3g}; nothing was written; please report this as a bug"
        )
    return change, bound


def check_ids(name: str, expected: AnyArray, actual: AnyArray, values: AnyArray) -> None:
    """Raise ExactnessError if raw values of a field have other ids in the file than in the Dataset."""
    wrong = np.flatnonzero(expected != actual)
    if wrong.size:
        first = int(wrong[0])
        raise ExactnessError(
            f"field {name!r}: the file gives {values[first]!r:.60} the id {actual[first]}, the Dataset "
            f"{expected[first]} ({wrong.size:,} of {len(expected):,} values differ); nothing was written"
        )


def onnx_runtime(model: bytes | str) -> tuple[OnnxRunner, str]:
    """Return a function that runs an ONNX model or file, and its name: onnxruntime, else the reference of onnx."""
    try:
        onnxruntime = import_module("onnxruntime")
    except ImportError:
        onnx = import_onnx()
        session = onnx.reference.ReferenceEvaluator(model)
        names, runtime = session.output_names, f"onnx.reference {onnx.__version__}"
    else:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        runtime = f"onnxruntime {onnxruntime.__version__}"
    return lambda feeds: dict(zip(names, session.run(None, feeds), strict=True)), runtime


def sample_batch(dataset: Dataset, schema: Schema, count: int) -> Batch:
    """Return rows from several ranges of a Dataset, from the first to the last row; all if there are fewer."""
    low, high = dataset.span
    reader = dataset.reader(dataset.schema.subset(schema.names))
    if high - low <= count:
        return reader.read([(low, high)]).batch()
    sizes = [count // SAMPLED_RANGES + (number < count % SAMPLED_RANGES) for number in range(SAMPLED_RANGES)]
    starts = np.linspace(low, high - max(sizes), SAMPLED_RANGES).astype(int).tolist()
    return reader.read([(start, start + size) for start, size in zip(starts, sizes, strict=True)]).batch()


def raw_inputs(columns: Sequence[InputColumn], batch: Batch) -> dict[str, AnyArray]:
    """Return input -> raw values that have the ids and numbers of a batch."""
    feeds: dict[str, AnyArray] = {}
    id_column = dense_column = 0
    for column in columns:
        if isinstance(column, NumericColumn):
            stop = dense_column + column.field.dim
            numbers = batch.dense[:, dense_column:stop].double().numpy()
            if batch.missing is not None:
                numbers = np.where(batch.missing[:, dense_column:stop].numpy(), np.nan, numbers)
            dense_column = stop
            values = column.example_values(numbers)
            feeds[column.input] = values if column.scale is not None else values.astype(np.float32)
        elif column.multi:
            feeds[column.input] = column.example_values(padded(*batch.bags[column.field.name]))
        else:
            feeds[column.input] = column.example_values(batch.ids[:, id_column].numpy())
            id_column += 1
    return feeds


def padded(values: Tensor, offsets: Tensor) -> AnyArray:
    """Return bags as ids (B, L), each padded with ``PAD_ID``.

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
    """Return the batch that ``encode_rows`` makes of the raw values; raise ExactnessError if its ids differ."""
    from lpfs.data.reencode import RowEncoder

    raw = [column for column in columns if not isinstance(column, IdColumn)]
    encoded = [column for column in raw if not isinstance(column, NumericColumn) or column.scale is not None]
    if not encoded:
        return batch
    import polars as pl

    encoder = RowEncoder(dataset, [column.field.name for column in encoded])
    result = encoder(pl.DataFrame([as_series(column, feeds[column.input]) for column in encoded]))
    expected = batch.select(Schema(tuple(column.field for column in columns)), encoder.schema.names)
    pairs = [(result.ids, expected.ids)]
    for name in result.bags:
        pairs += zip(result.bags[name], expected.bags[name], strict=True)
    if not all(torch.equal(first, second) for first, second in pairs):
        raise ExactnessError(
            f"the vocabularies of {dataset.path} do not reproduce the ids of its rows; prepare the log again"
        )
    return replace(batch, dense=result.dense, missing=result.missing) if result.dense.shape[1] else batch


def as_series(column: InputColumn, feed: AnyArray) -> Any:
    """Return the input of a column as a polars Series: null where it is missing, lists for bags."""
    import polars as pl

    name = column.field.name
    if not isinstance(column, VocabularyColumn):
        return pl.Series(name, feed) if feed.ndim == 1 else pl.Series(name, feed.tolist(), pl.List(pl.Float64))
    missing, pad, _ = column.special
    dtype: Any = {"text": pl.String, "float": pl.Float64, "integer": pl.Int64}[column.value_type]
    if column.value_type == "integer" and column.values.dtype == np.uint64:
        dtype, feed = pl.UInt64, feed.view(np.uint64)
        missing, pad = (int(as_int64(np.array([value])).view(np.uint64)[0]) for value in (missing, pad))
    if not column.multi:
        return pl.Series(name, [None if value == missing else value for value in feed.tolist()], dtype)
    rows = [[None if value == missing else value for value in row if value != pad] for row in feed.tolist()]
    return pl.Series(name, rows, pl.List(dtype))
