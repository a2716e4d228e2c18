"""evaluate: the metrics of a model on a stream, per task and per day; predictions of a model on its device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lpfs._text import escape_unprintable
from lpfs._validation import check_keys
from lpfs.data.batch import Batch
from lpfs.data.reader import rank_range
from lpfs.data.stream import Stream
from lpfs.errors import InputError, NonFiniteError
from lpfs.train.distributed.group import RankGroup, current_group
from lpfs.train.distributed.reduce import broadcast_buffers
from lpfs.train.metrics import Scores, scores

Precision = Literal["float32", "tf32", "bfloat16"]
Batches: TypeAlias = Iterable[Batch]
Weights: TypeAlias = Callable[[Batch], Tensor]
MIN_PARALLEL_TASKS = 8  # tasks, such as the replicas of a fleet, from which they are scored on several threads


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model: that of its first parameter or buffer."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on a device."""
    return batch if batch.labels.device == device else batch.to(device, non_blocking=True)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager in which a model runs with this precision."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else nullcontext()


@contextmanager
def matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Use TF32 for float32 matrix products on a GPU while the block runs, if ``precision`` is ``tf32``."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)


def predict_batch(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return logits (B, T), in float32 or float64, and their labels (B, T); logits (B,) belong to the first label."""
    logits, labels = model(batch), batch.labels
    if not isinstance(logits, Tensor):
        raise InputError(f"a model must return logits (B,) or (B, T), found {type(logits).__name__}")
    if logits.shape == labels.shape[:1]:
        logits, labels = logits[:, None], labels[:, :1]
    if logits.shape != labels.shape:
        raise InputError(
            f"a model must return logits (B,) or (B, T), in this case {tuple(labels.shape[:1])} or "
            f"{tuple(labels.shape)}; found {tuple(logits.shape)}"
        )
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(dtype), labels.to(dtype)


def sample_weights(weights: Weights, batch: Batch) -> Tensor:
    """Return the sample weights (B,) of a batch."""
    values = weights(batch)
    if not isinstance(values, Tensor) or values.shape != batch.labels.shape[:1]:
        found = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InputError(f"weights must return a tensor of shape ({len(batch)},) for this batch, found {found}")
    return values.to(batch.labels.device, torch.float32)


@dataclass(frozen=True)
class Metrics:
    """The result of ``evaluate``: the scores of every task, the main one first, in total and per day.

    A metric is None if it is not defined; see :class:`Scores`.
    """

    tasks: Mapping[str, Scores]
    days: Mapping[str, Mapping[str, Scores]] = field(default_factory=dict)

    @property
    def main(self) -> Scores:
        """Scores of the main task."""
        return next(iter(self.tasks.values()))

    @property
    def auc(self) -> float | None:
        """AUC of the main task; None with one class."""
        return self.main.auc

    @property
    def logloss(self) -> float:
        """Logloss of the main task."""
        return self.main.logloss

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Metrics:
        """Build metrics from the values of ``to_json``; an unknown key is an error."""

        def read(tasks: Mapping[str, Any]) -> dict[str, Scores]:
            return {name: Scores(**check_keys(Scores, task)) for name, task in tasks.items()}

        values = check_keys(cls, values)
        return cls(read(values["tasks"]), {day: read(tasks) for day, tasks in values.get("days", {}).items()})

    def __str__(self) -> str:
        lines = [f"{'':<20}{'rows':>12}{'auc':>10}{'logloss':>10}{'accuracy':>10}{'entropy':>10}{'calib.':>10}"]
        lines += [_line(name, task) for name, task in self.tasks.items()]
        for day, tasks in self.days.items():
            lines += [_line(f"{day}, {name}" if len(tasks) > 1 else day, task) for name, task in tasks.items()]
        return "\n".join(lines)


def _line(name: str, task: Scores) -> str:
    values = (task.auc, task.logloss, task.accuracy, task.entropy, task.calibration)
    return f"{escape_unprintable(name)[:19]:<20}{task.rows:>12,}" + "".join(
        f"{'-' if v is None else f'{v:.5f}':>10}" for v in values
    )


def evaluate(
    model: nn.Module,
    stream: Iterable[Batch],
    *,
    weights: Weights | None = None,
    negative_rate: float | None = None,
    precision: Precision = "float32",
) -> Metrics:
    """Return the metrics of a model over one pass of a stream; the model is not changed.

    Args:
        model: maps a Batch to logits (B,) or (B, T).
        stream: a ``Stream``, or any batches. For a ``Stream`` in time order over more than one day, the metrics of
            each day are returned too. Several ranks split a ``Stream``, and each returns the metrics of all
            rows; of any other batches every rank evaluates all.
        weights: batch -> sample weights (B,).
        negative_rate: fraction of the negatives that was kept, for the corrected calibration; default: that of the
            Dataset, if it is the same for all its days.
        precision: ``bfloat16`` runs the model under autocast.
    """
    predicted = predictions(model, stream, weights=weights, precision=precision)
    z, y, w = predicted.logits, predicted.labels, predicted.weights
    if negative_rate is None and isinstance(stream, Stream):
        rates = {day.negative_rate for day in stream.dataset.table}
        negative_rate = rates.pop() if len(rates) == 1 else None
    names = task_names(stream, z.shape[1])

    def score_rows(rows: slice) -> dict[str, Scores]:
        row_weights = None if w is None else w[rows]

        def score_task(task: int) -> Scores:
            return scores(z[rows, task], y[rows, task], row_weights, negative_rate)

        if len(names) < MIN_PARALLEL_TASKS:
            return {name: score_task(task) for task, name in enumerate(names)}
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # numpy sorts without the interpreter lock
            return dict(zip(names, pool.map(score_task, range(len(names))), strict=True))

    days = _rows_by_day(stream, predicted.first, len(z))
    day_scores = {day: score_rows(rows) for day, rows in days if w is None or w[rows].any()}
    return Metrics(score_rows(slice(None)), day_scores)


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model for all rows of a stream, in the order of the stream."""

    logits: npt.NDArray[np.float32]  # (rows, T), all finite
    labels: npt.NDArray[np.float32]  # (rows, T)
    weights: npt.NDArray[np.float32] | None  # (rows,)
    first: int  # position of the first row in the stream


def predictions(
    model: nn.Module, stream: Iterable[Batch], *, weights: Weights | None = None, precision: Precision = "float32"
) -> Predictions:
    """Return logits and labels over one pass of a stream; the model is not changed. See :func:`evaluate`."""
    if isinstance(stream, Stream) and stream.dataset.settings.get("unlabelled"):  # the labels would all be 0
        raise InputError(
            f"the rows of {stream.dataset.path} have no label {stream.schema.label!r} to compare with; "
            "evaluate on rows with labels"
        )
    device, ranks = device_of(model), current_group()
    parts: list[Tensor] = []  # by batch: logits, labels, weights as the columns of one tensor
    first = 0
    rank_batches = _rank_batches(stream, ranks)
    if rank_batches is not None:
        broadcast_buffers(model)
    with eval_mode(model), torch.no_grad():
        for batch in stream if rank_batches is None else rank_batches:
            if rank_batches is None and not parts and isinstance(stream, Stream):
                first = stream.state_dict()["position"] - len(batch)
            batch = on_device(batch, device)
            with autocast(precision, device):
                logits, labels = predict_batch(model, batch)
            columns = [] if weights is None else [sample_weights(weights, batch)[:, None]]
            parts.append(torch.cat([column.cpu() for column in (logits, labels, *columns)], 1))
    if not parts and rank_batches is None:
        raise InputError("the stream to evaluate gave no batch; create it again if it is a generator")
    rows = torch.cat(parts) if parts else torch.empty(0, 0)
    if rank_batches is not None:
        rows = ranks.concat(rows, "gathering predictions")
    tasks = rows.shape[1] // 2
    z, y = rows[:, :tasks].numpy(), rows[:, tasks : 2 * tasks].numpy()
    w = None if weights is None else rows[:, -1].numpy()
    nonfinite = np.flatnonzero(~np.isfinite(z).all(1))
    if nonfinite.size:
        row = first + int(nonfinite[0])
        raise NonFiniteError(f"evaluation: the logit of row {row} is not finite; check the model and this row")
    return Predictions(z, y, w, first)


def _rank_batches(stream: Batches, ranks: RankGroup) -> Iterator[Batch] | None:
    """Return the batches of a stream that this rank evaluates; None if every rank evaluates all batches.

    The ranks take consecutive ranges of whole batches, so that the logits are bitwise those of a single process.
    """
    if not ranks.is_distributed or not isinstance(stream, Stream) or stream.order != "time" or stream.world > 1:
        return None
    if stream.state_dict()["position"] or not len(stream):
        return None
    return stream.slice(*rank_range(0, len(stream), ranks.rank, ranks.world))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode while the block runs; then restore the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def task_names(stream: Batches, count: int) -> list[str]:
    """Return the names of the first tasks of a stream."""
    schema = getattr(stream, "schema", None)
    known = ["label"] if schema is None else [schema.label, *schema.tasks]
    return (known + [f"task {number}" for number in range(len(known), count)])[:count]


def _rows_by_day(stream: Batches, first: int, rows: int) -> list[tuple[str, slice]]:
    """Return the rows of each day among ``rows`` rows from position ``first``; empty for a single day."""
    if not isinstance(stream, Stream) or stream.order != "time" or stream.world > 1:
        return []
    dataset = stream.dataset
    starts = [start - dataset.span[0] - first for start in dataset.reader(dataset.schema).starts]
    spans = [(day.name, max(starts[day.index], 0), min(starts[day.index + 1], rows)) for day in dataset.table]
    days = [(name, slice(start, stop)) for name, start, stop in spans if start < stop]
    return days if len(days) > 1 else []
