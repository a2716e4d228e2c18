"""Rows of the search period as plain columns, for methods that look at a log and not at a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lpfs.data.batch import Batch
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.methods.ranking import need_number
from lpfs.methods.task import Task
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.checkpoint import Resumable

Reals: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """R rows, column by column.

    Args:
        labels: (R,) of the main task, 0 or 1.
        ids: of each categorical field (R,).
        numbers: of each numeric field (R, width); not a number where one is missing.
        bags: of each multi field its ids, row after row, and how many each row has (R,).

    """

    labels: Reals
    ids: Mapping[str, Ints]
    numbers: Mapping[str, Reals]
    bags: Mapping[str, tuple[Ints, Ints]]

    def __len__(self) -> int:
        return len(self.labels)


def model_of(task: Task, method: str) -> Model:
    """Return the model of a task, which must be one of ours: it knows which fields there are and where."""
    if not isinstance(task.model, Model):
        raise InputError(f"{method} asks a model of lpfs.models for its fields; this one is not")
    return task.model


def ranked_model(task: Task, method: str) -> Model:
    """Return the model whose parts are to be ranked; refuse at once what a ranking cannot answer."""
    model = model_of(task, method)
    need_number(method, task.wish)
    task.wish.check(model.names)
    return model


def unlearnt(task: Task) -> Iterable[Batch]:
    """Return the batches that the model has not learnt from: the held-out ones, or those of the search period."""
    return task.stream if task.held is None else task.held


def batches_of(task: Task, most: int) -> Iterator[Batch]:
    """Yield batches that the model has not learnt from, once through; the stream is left where it was.

    Where these have more than ``most`` rows,
    others are left out in between, evenly, so that those taken come from all of the period.
    """
    stream = unlearnt(task)
    begin = stream.state_dict() if isinstance(stream, Resumable) else None
    wanted = every = 1
    if isinstance(stream, Stream):
        wanted, every = (-(-rows // stream.batch_size) for rows in (most, stream.dataset.rows))
    rows = 0
    try:
        for number, batch in enumerate(stream):
            if wanted >= every or number * wanted // every > (number - 1) * wanted // every:
                rows += len(batch)
                yield batch
            if rows >= most:
                break
    finally:
        if begin is not None and isinstance(stream, Resumable):
            stream.load_state_dict(begin)
    if not rows:
        raise InputError("the stream gave no batch; is it a generator that is used up?")


def sample(task: Task, method: str, most: int) -> Rows:
    """Return rows of the search period, once through or until ``most``; both classes must be there."""
    model = model_of(task, method)
    refuse_crosses(model, method)
    pieces = [columns(batch, model.reads) for batch in batches_of(task, most)]
    labels = np.concatenate([each.labels for each in pieces])
    if labels.min() == labels.max():
        raise InputError(f"{method}: the {len(labels)} rows hold one class only, so that nothing tells them apart")

    def joined(kind: str, name: str) -> Any:
        return np.concatenate([getattr(each, kind)[name] for each in pieces])

    return Rows(
        labels,
        {name: joined("ids", name) for name in pieces[0].ids},
        {name: joined("numbers", name) for name in pieces[0].numbers},
        {
            name: tuple(np.concatenate([each.bags[name][part] for each in pieces]) for part in range(2))  # type: ignore[misc]
            for name in pieces[0].bags
        },
    )


def columns(batch: Batch, schema: Schema) -> Rows:
    """Return the rows of a batch that holds these fields."""
    batch = batch.to("cpu")
    dense = batch.dense.double()
    if batch.missing is not None:
        dense = dense.masked_fill(batch.missing, float("nan"))
    ids: dict[str, Ints] = {}
    numbers: dict[str, Reals] = {}
    bags: dict[str, tuple[Ints, Ints]] = {}
    column = at = 0
    for each in schema:
        if each.kind == "numeric":
            numbers[each.name] = dense[:, at : at + each.dim].numpy()
            at += each.dim
        elif each.kind == "multi":
            values, offsets = (tensor.long().numpy() for tensor in batch.bags[each.name])
            bags[each.name] = values, np.diff(offsets, append=len(values))
        else:
            ids[each.name] = batch.ids[:, column].long().numpy()
            column += 1
    return Rows(batch.labels[:, 0].double().numpy(), ids, numbers, bags)


def of_parts(model: Model, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a model's parts: a token of several fields has the sum of theirs."""
    fields = model.fields_of_parts()
    return {name: sum(scores[field] for field in fields[name]) for name in model.names}


def field_read_twice(model: Model) -> str | None:
    """Return a field that several parts of a model read, as those of a model of crosses do; None without one."""
    fields = model.fields_of_parts()
    read = Counter(name for part in model.names for name in fields[part])
    return next((name for name, count in read.items() if count > 1), None)


def refuse_crosses(model: Model, method: str) -> None:
    """Refuse a model of crosses: what fields say one by one is not what they say together."""
    twice = field_read_twice(model)
    if twice is not None:
        raise InputError(
            f"{method} looks at fields, and {type(model).__name__} has crosses of them (field {twice!r} is in "
            "several parts); choose a backbone without crosses, or a method that looks at the model"
        )
