"""Permutation importance of the CTR model itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lpfs._validation import check_options
from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.base import RankingMethod, SearchCost, SearchTask
from lpfs.methods.masks import TokenMask, apply_mask, check_maskable
from lpfs.methods.sampling import field_used_twice, iterate_unseen, shuffle_fields
from lpfs.models.base import Model
from lpfs.train.evaluate import evaluate

TARGET_ROWS = 20_000  # rows that a field is shuffled on, over all repeats
MAX_REPEATS = 20


@dataclass(frozen=True)
class PermutationOptions:
    """How many times each field is shuffled; None: until 20,000 rows are shuffled, at most 20 times."""

    repeats: int | None = None

    def __post_init__(self) -> None:
        if self.repeats is not None:
            check_options(self, count=("repeats",))

    def repeats_for(self, rows: int) -> int:
        """Return how many times each field is shuffled on a number of rows.

        >>> [PermutationOptions().repeats_for(rows) for rows in (100, 6_000, 1_000_000)]
        [20, 4, 1]
        """
        return min(MAX_REPEATS, -(-TARGET_ROWS // rows)) if self.repeats is None else self.repeats


class Permutation(RankingMethod):
    r"""AUC that the CTR model loses on held-out rows if a field is shuffled over the rows of a batch.

    .. math:: \text{score}_n = \mathrm{AUC} - \overline{\mathrm{AUC}_{\pi(n)}}

    Breiman, Random Forests, 2001; Fisher et al., All Models are Wrong, but Many are Useful, 2019. As in the LPFS
    paper, fields are shuffled inside the mini-batch. If there are few validation rows, other held-out rows are
    used too, and if these are few as well, each field is shuffled several times. In a model of crosses a part is
    shuffled where the rest of the model uses it: shuffling the fields of a cross would change every other part
    that uses them.
    """

    Options = PermutationOptions
    options: PermutationOptions
    trial_options = ({"repeats": 1}, {"repeats": 3}, {"repeats": 10}, {"repeats": 30})

    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the mean loss of AUC for every part."""
        if task.valid is None:
            raise InputError("permutation is measured on held-out rows: give valid=")
        fields = model.fields_of_parts()
        scores: dict[str, float] = {}
        mask = ShuffledPart(model.names) if field_used_twice(model) else None
        masked = nullcontext() if mask is None else apply_mask(check_maskable(model, self.name), mask, self.name)
        with masked:
            rows = UnseenBatches(task, task.valid)
            full = evaluate(model, rows)
            cost.add_evaluation(full)
            if full.auc is None:
                raise InputError("the held-out rows have only one class, so they have no AUC; give rows with both")
            repeats = self.options.repeats_for(full.main.rows)
            for number, name in enumerate(model.names):
                lost = 0.0
                for repeat in range(repeats):
                    seed = (task.seed * 1_000_003 + number) * 1009 + repeat
                    generator = torch.Generator().manual_seed(seed)
                    batches: Iterable[Batch] = rows
                    if mask is None:
                        batches = _ShuffledBatches(rows, model, fields[name], generator)
                    else:
                        mask.part, mask.draw = number, generator
                    metrics = evaluate(model, batches)
                    cost.add_evaluation(metrics)
                    lost += full.auc - (metrics.auc if metrics.auc is not None else full.auc)
                scores[name] = lost / repeats
        return scores, {"repeats": repeats}


class UnseenBatches:
    """The validation rows, and other holdout rows if the validation rows are fewer than ``TARGET_ROWS``."""

    def __init__(self, task: SearchTask, valid: Iterable[Batch]) -> None:
        self.valid = valid
        valid_rows = TARGET_ROWS if task.holdout is None else sum(map(len, islice(valid, TARGET_ROWS)))
        missing = TARGET_ROWS - valid_rows
        self.others = list(iterate_unseen(task, missing)) if missing > 0 else []

    def __iter__(self) -> Iterator[Batch]:
        yield from self.valid
        yield from self.others


class _ShuffledBatches:
    """Batches with some fields shuffled."""

    def __init__(self, rows: UnseenBatches, model: Model, names: tuple[str, ...], generator: torch.Generator) -> None:
        self.rows, self.model, self.names, self.generator = rows, model, names, generator

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.rows:
            order = torch.randperm(len(batch), generator=self.generator).to(batch.labels.device)
            yield shuffle_fields(batch, self.model.reads, self.names, order)


class ShuffledPart(TokenMask):
    """A mask that takes the embeddings of one part from other rows; of no part while ``part`` is None."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names, steps=0, seed=0)
        self.part: int | None = None

    def forward(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        """Return the embeddings (B, P, D), those of the part from shuffled rows."""
        columns = [] if self.part is None else (numbers == self.part).nonzero().flatten().tolist()
        if not columns:
            return tokens
        order = torch.randperm(len(tokens), generator=self.draw).to(tokens.device)
        shuffled = tokens.clone()
        shuffled[:, columns[0]] = tokens[order, columns[0]]
        return shuffled
