"""Permutation importance of the CTR model itself: how much AUC is lost when a field is shuffled on held-out rows.

Breiman, Random Forests, 2001; Fisher et al., All Models are Wrong, but Many are Useful, 2019. The LPFS paper
shuffles inside the mini-batch, and so does this. Where the validation rows are few, others that are held out of
the training are taken too, and where these are few as well, each field is shuffled several times. In a model of
crosses a part is shuffled where the rest of the model reads it: to shuffle the fields of a cross would take every
other part of theirs along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.checks import check_numbers
from lpfs.methods.effort import Effort
from lpfs.methods.masks import TokenMask, check_wearer, worn
from lpfs.methods.ranking import need_number, ranked
from lpfs.methods.sample import batches_of, field_read_twice
from lpfs.methods.shuffled import shuffled
from lpfs.methods.task import Task
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.schema import Selection, known_keys
from lpfs.train.evaluate import evaluate

ENOUGH = 20_000  # rows that a field is shuffled on
MOST = 20  # times that it is shuffled, however few there are


@dataclass(frozen=True)
class Options:
    """Settings: how many times each field is shuffled; None: until 20,000 rows were, 20 times at most."""

    repeats: int | None = None

    def __post_init__(self) -> None:
        if self.repeats is not None:
            check_numbers(self, whole=("repeats",))

    def times(self, rows: int) -> int:
        """Return how many times each field is shuffled on so many rows.

        >>> [Options().times(rows) for rows in (100, 6_000, 1_000_000)]
        [20, 4, 1]
        """
        return min(MOST, -(-ENOUGH // rows)) if self.repeats is None else self.repeats


def check(options: Options, wish: Wish, names: Sequence[str], steps: int) -> None:
    """Refuse a search that could not be begun, before anything is trained for it."""
    need_number("permutation", wish)


def search(task: Task) -> Selection:
    """Return the fields whose shuffling costs the most AUC on the held-out rows; the model is not trained."""
    options = Options(**known_keys(Options, task.options))
    model = task.model
    if not isinstance(model, Model):
        raise InputError("permutation shuffles the fields of a model of lpfs.models; this one is not")
    if task.valid is None:
        raise InputError("permutation is judged on held-out rows: give valid=")
    fields, effort = model.fields_of_parts(), Effort()
    scores: dict[str, float] = {}
    parts = ShuffledPart(model.names) if field_read_twice(model) else None
    wearing = nullcontext() if parts is None else worn(check_wearer(model, "permutation"), parts, "permutation")
    with effort, wearing:
        rows = HeldOut(task, task.valid)
        whole = evaluate(model, rows)
        effort.evaluated(whole)
        if whole.auc is None:
            raise InputError("the held-out rows hold one class only, so that there is no AUC to lose")
        repeats = options.times(whole.main.rows)
        for number, name in enumerate(model.names):
            lost = 0.0
            for repeat in range(repeats):
                draw = torch.Generator().manual_seed((task.seed * 1_000_003 + number) * 1009 + repeat)
                if parts is not None:
                    parts.part, parts.draw = number, draw
                found = evaluate(model, _Shuffled(rows, model, fields[name], draw) if parts is None else rows)
                effort.evaluated(found)
                lost += whole.auc - (found.auc if found.auc is not None else whole.auc)
            scores[name] = lost / repeats
    return ranked(task, "permutation", scores, steps=0, repeats=repeats, **effort.told())


class HeldOut:
    """The validation rows, and others that are held out where those are fewer than are enough."""

    def __init__(self, task: Task, valid: Iterable[Batch]) -> None:
        self.valid = valid
        missing = 0 if task.held is None else ENOUGH - sum(len(batch) for batch in islice(valid, ENOUGH))
        self.more = list(batches_of(task, missing)) if missing > 0 else []

    def __iter__(self) -> Iterator[Batch]:
        yield from self.valid
        yield from self.more


class _Shuffled:
    """The held-out batches with some fields shuffled."""

    def __init__(self, rows: HeldOut, model: Model, names: tuple[str, ...], draw: torch.Generator) -> None:
        self.rows, self.model, self.names, self.draw = rows, model, names, draw

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.rows:
            order = torch.randperm(len(batch), generator=self.draw).to(batch.labels.device)
            yield shuffled(batch, self.model.reads, self.names, order)


class ShuffledPart(TokenMask):
    """One part of a model with the embeddings of other rows; none while ``part`` is None."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, steps=0, seed=0)
        self.part: int | None = None

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the embeddings (B, P, D), those of the part from rows in another order."""
        place = [] if self.part is None else (numbers == self.part).nonzero().flatten().tolist()
        if not place:
            return tokens
        order = torch.randperm(len(tokens), generator=self.draw).to(tokens.device)
        out = tokens.clone()
        out[:, place[0]] = tokens[order, place[0]]
        return out
