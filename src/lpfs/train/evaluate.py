"""evaluate: how good a model is on a stream, per task and per day.

What the loop and evaluation share: a model's logits and labels of a batch, on its device and in one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.data.reader import rank_range
from lpfs.data.stream import Stream
from lpfs.errors import InputError, NonFiniteError
from lpfs.schema import known_keys
from lpfs.train.distributed.group import RankGroup, current_group
from lpfs.train.distributed.reduce import broadcast_buffers
from lpfs.train.metrics import Scores, scores

Precision = Literal["float32", "tf32", "bfloat16"]
Weights: TypeAlias = Callable[[Batch], Tensor]


def device_of(model: nn.Module) -> torch.device:
    """Return where a model lives: the device of its first parameter or buffer."""
    for each in (*model.parameters(), *model.buffers()):
        return each.device
    return torch.device("cpu")


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the model's device."""
    return batch if batch.labels.device == device else batch.to(device, non_blocking=True)


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a model runs."""
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def matmul_precision(precision: Precision, device: torch.device) -> Iterator[None]:
    """Within this block a GPU multiplies float32 matrices in TF32, with fewer bits, where that is asked for."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def predict_batch(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return float32 logits (B, T) and the labels (B, T) they are for; (B,) logits are for the first label."""
    logits = model(batch)
    labels = batch.labels
    if not isinstance(logits, Tensor):
        raise InputError(f"a model must return logits (B,) or (B, T), found {type(logits).__name__}")
    if logits.shape == labels.shape[:1]:
        logits, labels = logits[:, None], labels[:, :1]
    if logits.shape != labels.shape:
        raise InputError(
            f"a model must return logits (B,) or (B, T), here {tuple(labels.shape[:1])} or "
            f"{tuple(labels.shape)}; found {tuple(logits.shape)}"
        )
    return logits.float(), labels


def sample_weights(weights: Weights, batch: Batch) -> Tensor:
    """Return the sample weights (B,) of a batch."""
    found = weights(batch)
    if not isinstance(found, Tensor) or found.shape != batch.labels.shape[:1]:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"weights must give a tensor of shape ({len(batch)},) for a batch, found {what}")
    return found.to(batch.labels.device, torch.float32)


@dataclass(frozen=True)
class Metrics:
    """What ``evaluate`` found: the scores of every task, the main one first, and those of every day.

    A metric is None where it is not defined; :class:`Scores` says when.
    """

    tasks: Mapping[str, Scores]
    days: Mapping[str, Mapping[str, Scores]] = field(default_factory=dict)

    @property
    def main(self) -> Scores:
        """The scores of the main task."""
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
        return {
            "tasks": {name: each.to_json() for name, each in self.tasks.items()},
            "days": {day: {name: each.to_json() for name, each in of.items()} for day, of in self.days.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Metrics:
        """Build metrics from what ``to_json`` gave; an unknown key is an error."""
        values = known_keys(cls, values)
        days = {day: _read(of) for day, of in values.get("days", {}).items()}
        return cls(_read(values["tasks"]), days)

    def __str__(self) -> str:
        lines = [f"{'':<20}{'rows':>12}{'auc':>10}{'logloss':>10}{'accuracy':>10}{'entropy':>10}{'calib.':>10}"]
        lines += [_line(name, each) for name, each in self.tasks.items()]
        for day, tasks in self.days.items():
            lines += [_line(f"{day}, {name}" if len(tasks) > 1 else day, each) for name, each in tasks.items()]
        return "\n".join(lines)


def _read(tasks: Mapping[str, Any]) -> dict[str, Scores]:
    return {name: Scores(**known_keys(Scores, each)) for name, each in tasks.items()}


def _line(name: str, found: Scores) -> str:
    values = (found.auc, found.logloss, found.accuracy, found.entropy, found.calibration)
    return f"{name[:19]:<20}{found.rows:>12,}" + "".join(f"{'-' if v is None else f'{v:.5f}':>10}" for v in values)


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
        stream: a ``Stream``, or any batches. Days are told apart where it is a ``Stream`` in time order that
            covers more than one. Several ranks share a ``Stream``, and each returns the metrics of all of it; any
            other batches each goes through by itself.
        weights: batch -> sample weights (B,).
        negative_rate: share of the negatives that was kept, for the corrected calibration; by default what
            the Dataset knows, if it is the same for all its days.
        precision: ``bfloat16`` runs the model under autocast.

    """
    found = predictions(model, stream, weights=weights, precision=precision)
    z, y, w = found.logits, found.labels, found.weights
    rate = negative_rate_of(stream) if negative_rate is None else negative_rate
    names = task_names(stream, z.shape[1])

    def part(rows: slice) -> dict[str, Scores]:
        own = None if w is None else w[rows]
        return {name: scores(z[rows, t], y[rows, t], own, rate) for t, name in enumerate(names)}

    spans = _rows_by_day(stream, found.first, len(z))
    return Metrics(part(slice(None)), {name: part(rows) for name, rows in spans if has_weight(w, rows)})


@dataclass(frozen=True)
class Predictions:
    """What a model says to every row of a stream, in the order of the stream.

    Args:
        logits: (rows, T), all of them finite.
        labels: (rows, T).
        weights: (rows,), where there are some.
        first: position in the stream of the first row.

    """

    logits: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None
    first: int


def predictions(
    model: nn.Module,
    stream: Iterable[Batch],
    *,
    weights: Weights | None = None,
    precision: Precision = "float32",
) -> Predictions:
    """Return logits and labels over one pass of a stream; the model is not changed. See :func:`evaluate`."""
    _check_labelled(stream)
    device = device_of(model)
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = []
    first = 0
    ranks = current_group()
    own = _rank_batches(stream, ranks)
    if own is not None:
        broadcast_buffers(model)
    with eval_mode(model), torch.no_grad():
        for batch in stream if own is None else own:
            if own is None and not parts and isinstance(stream, Stream):
                first = stream.state_dict()["position"] - len(batch)
            batch = on_device(batch, device)
            with autocast(precision, device):
                logits, labels = predict_batch(model, batch)
            weight = None if weights is None else sample_weights(weights, batch).cpu()
            parts.append((logits.cpu(), labels.cpu(), weight))
    if not parts and own is None:
        raise InputError("nothing to evaluate: the stream gave no batch")
    weighed = [torch.cat([z, y, *([] if w is None else [w[:, None]])], 1) for z, y, w in parts]
    rows = torch.cat(weighed) if weighed else torch.empty(0, 0)
    if own is not None:
        rows = ranks.concat(rows, "gathering predictions")
    tasks = rows.shape[1] // 2
    z, y = rows[:, :tasks].numpy(), rows[:, tasks : 2 * tasks].numpy()
    w = None if weights is None else rows[:, -1].numpy()
    broken = np.flatnonzero(~np.isfinite(z).all(1))
    if broken.size:
        raise NonFiniteError(f"evaluation: the model's logit of row {first + int(broken[0])} is not finite")
    return Predictions(z, y, w, first)


def _rank_batches(stream: Iterable[Batch], ranks: RankGroup) -> Iterator[Batch] | None:
    """Return the batches of this rank of a stream that all ranks have; None where each goes through all of it.

    They are whole batches of the stream, one rank's after another's: every logit is that of one process, bit by
    bit.
    """
    if not ranks.is_distributed or not isinstance(stream, Stream) or stream.order != "time" or stream.world > 1:
        return None
    if stream.state_dict()["position"] or not len(stream):
        return None
    return stream.slice(*rank_range(0, len(stream), ranks.rank, ranks.world))


def _check_labelled(stream: Iterable[Batch]) -> None:
    """Refuse rows of a log that had no label: they all say 0."""
    if isinstance(stream, Stream) and stream.dataset.settings.get("unlabelled"):
        raise InputError(
            f"the rows of {stream.dataset.path} have no label {stream.schema.label!r}: "
            "there is nothing to compare with"
        )


def has_weight(weights: npt.NDArray[Any] | None, rows: slice) -> bool:
    """Say whether a part has any weight at all."""
    return weights is None or bool(weights[rows].any())


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within this block the model is in evaluation mode; then every module is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def task_names(stream: Iterable[Batch], count: int) -> list[str]:
    """Return the names of the first tasks of a stream."""
    schema = getattr(stream, "schema", None)
    known = ["label"] if schema is None else [schema.label, *schema.tasks]
    return (known + [f"task {number}" for number in range(len(known), count)])[:count]


def negative_rate_of(stream: Iterable[Batch]) -> float | None:
    """Return the share of negatives kept in a stream's Dataset, if all its days have the same."""
    if not isinstance(stream, Stream):
        return None
    rates = {day.negative_rate for day in stream.dataset.table}
    return rates.pop() if len(rates) == 1 else None


def _rows_by_day(stream: Iterable[Batch], first: int, rows: int) -> list[tuple[str, slice]]:
    """Return the rows of each day among ``rows`` rows from position ``first`` on, if there are several days."""
    if not isinstance(stream, Stream) or stream.order != "time" or stream.world > 1:
        return []
    dataset = stream.dataset
    starts = dataset.reader(dataset.schema).starts
    begin = dataset.span[0] + first
    spans = []
    for day in dataset.table:
        low = max(starts[day.index] - begin, 0)
        high = min(starts[day.index + 1] - begin, rows)
        if low < high:
            spans.append((day.name, slice(low, high)))
    return spans if len(spans) > 1 else []
