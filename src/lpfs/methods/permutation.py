"""Permutation importance of the CTR model itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.base import Count, MethodOptions, RankingMethod, SearchCost, SearchTask
from lpfs.methods.masks import TokenMask, apply_mask, check_maskable
from lpfs.methods.sampling import field_used_twice, iterate_unseen, shuffled_batches, unseen_batches
from lpfs.models.base import Model
from lpfs.train.evaluate import evaluate

TARGET_ROWS = 20_000  # rows that a field is shuffled on, over all repeats
MAX_REPEATS = 20


@dataclass(frozen=True)
class PermutationOptions(MethodOptions):
    """How many times each field is shuffled, and on how many rows besides the validation rows.

    ``repeats`` None: until 20,000 rows are shuffled, at most 20 times. ``rows`` None: all rows of the search that the
    model was not trained on.
    """

    repeats: Count | None = None
    rows: Count | None = None

    def repeats_for(self, rows: int) -> int:
        """Return how many times each field is shuffled on a number of rows.

        >>> [PermutationOptions().repeats_for(rows) for rows in (100, 6_000, 1_000_000)]
        [20, 4, 1]
        """
        return min(MAX_REPEATS, -(-TARGET_ROWS // rows)) if self.repeats is None else self.repeats


class Permutation(RankingMethod):
    r"""AUC that the CTR model loses on held-out rows if a field is shuffled over the rows of a batch.

    .. math:: \text{score}_n = \mathrm{AUC} - \overline{\mathrm{AUC}_{\pi(n)}}

    Breiman, Random Forests, 2001; Fisher et al., All Models are Wrong, but Many are Useful, 2019. As in the LPFS paper,
    fields are shuffled inside the mini-batch. All rows that the model was not trained on are used: the validation rows
    and the search rows; if these are few, each field is shuffled several times. In a model of crosses a part is
    shuffled where the rest of the model uses it: shuffling the fields of a cross would change every other part that
    uses them.
    """

    Options = PermutationOptions
    options: PermutationOptions
    trial_options = ({"repeats": 1}, {"repeats": 3}, {"repeats": 10}, {"repeats": 30})

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        if task.valid is None:
            raise InputError("permutation is measured on held-out rows: give valid=")
        fields, scores = model.fields_of_parts(), dict[str, float]()
        mask = ShuffledPart(model.names) if field_used_twice(model) else None
        masked = nullcontext() if mask is None else apply_mask(check_maskable(model, self.name), mask, self.name)
        with masked:
            rows = UnseenBatches(task, task.valid, self.options.rows)
            full = evaluate(model, rows)
            cost.add(forwards=full.main.rows)
            if full.auc is None:
                raise InputError("the held-out rows have only one class, so they have no AUC; give rows with both")
            repeats = self.options.repeats_for(full.main.rows)
            for number, name in enumerate(model.names):
                lost = 0.0
                for repeat in range(repeats):
                    seed = (task.seed * 1_000_003 + number) * 1009 + repeat
                    generator = torch.Generator().manual_seed(seed)
                    if mask is None:
                        metrics = evaluate(model, shuffled_batches(rows, model.reads, fields[name], generator))
                    else:
                        mask.part, mask.draw = number, generator
                        metrics = evaluate(model, rows)
                    cost.add(forwards=metrics.main.rows)
                    lost += full.auc - (metrics.auc if metrics.auc is not None else full.auc)
                scores[name] = lost / repeats
        return scores, {"repeats": repeats, "rows": full.main.rows}


class UnseenBatches:
    """The validation rows and the other rows that the model was not trained on, at most ``rows`` of these."""

    def __init__(self, task: SearchTask, valid: Iterable[Batch], rows: int | None) -> None:
        self.task, self.valid = task, valid
        self.rows = sys.maxsize if rows is None else rows

    def __iter__(self) -> Iterator[Batch]:
        yield from self.valid
        if unseen_batches(self.task):  # an empty list: only validation rows
            yield from iterate_unseen(self.task, self.rows)


class ShuffledPart(TokenMask):
    """A mask that takes the embeddings of one part from other rows; of no part while ``part`` is None."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, steps=0, seed=0)
        self.part: int | None = None

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        if self.part not in (parts := numbers.tolist()):
            return tokens
        column, shuffled = parts.index(self.part), tokens.clone()
        order = torch.randperm(len(tokens), generator=self.draw).to(tokens.device)
        shuffled[:, column] = tokens[order, column]
        return shuffled
