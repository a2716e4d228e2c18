"""Rows of the search as plain columns, for methods that rank fields by their values and not by the model."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lpfs._imports import import_optional
from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.methods.base import RankingMethod, SearchCost, SearchTask, restore_position
from lpfs.methods.target import SelectionTarget
from lpfs.models.base import Model
from lpfs.schema import Schema

Reals: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledRows:
    """R rows, one entry per column.

    Args:
        labels: (R,) of the main task, 0 or 1.
        ids: of each categorical field (R,).
        numbers: of each numeric field (R, width); NaN where missing.
        bags: of each multi field its ids, row after row, and their number in each row (R,).
    """

    labels: Reals
    ids: Mapping[str, Ints]
    numbers: Mapping[str, Reals]
    bags: Mapping[str, tuple[Ints, Ints]]

    def __len__(self) -> int:
        return len(self.labels)


class SampledRanking(RankingMethod):
    """A method that scores fields by a sample of rows alone; its options have ``rows``, the sample size or None."""

    uses_all_rows = True
    sklearn_module: ClassVar[str] = ""  # of scikit-learn, if the method needs one

    def check(self, target: SelectionTarget, names: Sequence[str], steps: int) -> None:
        super().check(target, names, steps)
        if self.sklearn_module:
            self.import_sklearn()

    def import_sklearn(self) -> Any:
        """Return the module of scikit-learn that the method needs, or raise MissingPackageError."""
        return import_optional(self.sklearn_module, "sklearn", self.name)

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the score of every part: a part of several fields has the sum of their scores."""
        if field := field_used_twice(model):  # scores of single fields do not tell the value of a cross
            raise InputError(
                f"{self.name} scores single fields, and {type(model).__name__} has crosses (field {field!r} is in "
                "several parts); choose a model without crosses, or a method that uses the model"
            )
        rows = sample_rows(task, model.reads, self.options.rows or sys.maxsize, self.name)
        scores, fields = self.score_fields(rows, model.reads, task.seed), model.fields_of_parts()
        return {name: sum(scores[field] for field in fields[name]) for name in model.names}, {"rows": len(rows)}

    @abstractmethod
    def score_fields(self, rows: SampledRows, schema: Schema, seed: int) -> Mapping[str, float]:
        """Return the score of every field."""


def unseen_batches(task: SearchTask) -> Iterable[Batch]:
    """Return the batches that the model is not trained on: the holdout rows, or else the search rows."""
    return task.stream if task.holdout is None else task.holdout


def iterate_unseen(task: SearchTask, max_rows: int) -> Iterator[Batch]:
    """Yield batches that the model is not trained on, in one pass; the stream is set back to its position.

    If there are more than ``max_rows`` rows, batches are skipped evenly, so that the sample covers the whole period.
    """
    stream = unseen_batches(task)
    taken = total = 1
    if isinstance(stream, Stream):
        taken, total = (-(-rows // stream.batch_size) for rows in (max_rows, stream.dataset.rows))
    rows = 0
    with restore_position(stream):
        for number, batch in enumerate(stream):
            if taken >= total or number * taken // total > (number - 1) * taken // total:
                rows += len(batch)
                yield batch
            if rows >= max_rows:
                break
    if not rows:
        raise InputError("the stream gave no batch; give a stream or a list, not an exhausted generator")


def sample_rows(task: SearchTask, schema: Schema, max_rows: int, method: str) -> SampledRows:
    """Return at most about ``max_rows`` rows; raise InputError if they have only one class."""
    pieces = [batch_columns(batch, schema) for batch in iterate_unseen(task, max_rows)]
    labels = np.concatenate([piece.labels for piece in pieces])
    if labels.min() == labels.max():
        raise InputError(f"{method}: the {len(labels)} rows have only one class; search on rows with both")
    ids = {name: np.concatenate([piece.ids[name] for piece in pieces]) for name in pieces[0].ids}
    numbers = {name: np.concatenate([piece.numbers[name] for piece in pieces]) for name in pieces[0].numbers}
    bags: dict[str, Any] = {
        name: tuple(map(np.concatenate, zip(*(piece.bags[name] for piece in pieces), strict=True)))
        for name in pieces[0].bags
    }
    return SampledRows(labels, ids, numbers, bags)


def batch_columns(batch: Batch, schema: Schema) -> SampledRows:
    """Return the rows of a batch with these fields."""
    batch = batch.to("cpu")
    dense = batch.dense.double()
    if batch.missing is not None:
        dense = dense.masked_fill(batch.missing, float("nan"))
    ids: dict[str, Ints] = {}
    numbers: dict[str, Reals] = {}
    bags: dict[str, tuple[Ints, Ints]] = {}
    id_column = dense_column = 0
    for field in schema:
        if field.kind == "numeric":
            numbers[field.name] = dense[:, dense_column : dense_column + field.dim].numpy()
            dense_column += field.dim
        elif field.kind == "multi":
            values, offsets = (tensor.long().numpy() for tensor in batch.bags[field.name])
            bags[field.name] = values, np.diff(offsets, append=len(values))
        else:
            ids[field.name] = batch.ids[:, id_column].long().numpy()
            id_column += 1
    return SampledRows(batch.labels[:, 0].double().numpy(), ids, numbers, bags)


def field_used_twice(model: Model) -> str | None:
    """Return a field that several parts of a model use, as in a model of crosses; None if there is none."""
    fields = model.fields_of_parts()
    counts = Counter(name for part in model.names for name in fields[part])
    return next((name for name, count in counts.items() if count > 1), None)


def shuffled_batches(
    batches: Iterable[Batch], schema: Schema, names: Sequence[str], generator: torch.Generator
) -> Iterator[Batch]:
    """Yield batches with some fields shuffled within each batch."""
    for batch in batches:
        order = torch.randperm(len(batch), generator=generator).to(batch.labels.device)
        yield shuffle_fields(batch, schema, names, order)


def shuffle_fields(batch: Batch, schema: Schema, names: Sequence[str], order: Tensor) -> Batch:
    """Return the batch with the values of these fields taken from the rows in ``order`` (B,).

    The fields keep their distribution and lose their relation to the label. Bags move as a whole.
    """
    ids, dense, missing, bags = batch.ids, batch.dense, batch.missing, dict(batch.bags)
    column = number = 0
    for field in schema:
        if field.name in names:
            if field.kind == "categorical":
                ids = ids.clone() if ids is batch.ids else ids
                ids[:, column] = batch.ids[order, column]
            elif field.kind == "multi":
                bags[field.name] = _reorder_bags(*batch.bags[field.name], order)
            else:
                columns = slice(number, number + field.dim)
                dense = dense.clone() if dense is batch.dense else dense
                dense[:, columns] = batch.dense[order, columns]
                if missing is not None and batch.missing is not None:
                    missing = missing.clone() if missing is batch.missing else missing
                    missing[:, columns] = batch.missing[order, columns]
        column += field.kind == "categorical"
        number += field.dim if field.kind == "numeric" else 0
    return replace(batch, ids=ids, dense=dense, missing=missing, bags=bags)


def _reorder_bags(values: Tensor, offsets: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bags in another order.

    >>> _reorder_bags(torch.tensor([7, 8, 9]), torch.tensor([0, 2]), torch.tensor([1, 0]))
    (tensor([9, 7, 8]), tensor([0, 1]))
    """
    starts = offsets.long()
    sizes = torch.diff(starts, append=starts.new_tensor([len(values)]))[order]
    first = sizes.cumsum(0) - sizes
    within = torch.arange(len(values), device=values.device) - first.repeat_interleave(sizes)
    return values[starts[order].repeat_interleave(sizes) + within], first.to(offsets.dtype)
