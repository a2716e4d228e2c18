"""Backward elimination by a subset model: the field whose removal costs the least on held-out rows is dropped first."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lpfs._validation import check_int
from lpfs.data.batch import Batch
from lpfs.errors import InputError
from lpfs.methods.base import (
    Count,
    Method,
    MethodOptions,
    RowFold,
    SearchCost,
    SearchTask,
    rank_fields,
    restore_position,
)
from lpfs.methods.masks import check_maskable
from lpfs.methods.subset_model import SubsetModel
from lpfs.methods.training import center_embeddings, holdout_batches
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.metrics import row_losses

ONE_BY_ONE = 50  # from this number of fields on one field is removed at a time, above it up to a quarter
FOLD_LR_FACTOR = 0.1  # on the learning rate of a search: faster networks, whose rows repeat, memorize frequent ids
EXCHANGED = 3  # fields of each side that an exchange chooses from
MIN_JUDGED_ROWS = 2000  # rows on which a subset is evaluated, at least, if the log has them

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Losses = Callable[[Bools], Floats]  # subsets (S, N) -> weighted logloss of every row (S, n)


@dataclass(frozen=True)
class SubsetEliminationOptions(MethodOptions):
    """``folds``: networks of a small table, each blind to a fold; ``evaluations``: of a row with a subset, about.

    The evaluations are divided equally between the removals, so that more rows judge when fewer fields are left.
    """

    folds: int = 4
    evaluations: Count = 8_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_int("folds", self.folds, 0) == 1:
            raise InputError("folds must be 0, for none, or at least 2, found 1")


class SubsetNetworks:
    """Networks trained on random subsets of their fields, and rows that each of them is blind to.

    The networks are copies of a model, which is not trained. With folds there is one for each; otherwise one is trained
    on the rows of the task and judges its holdout or validation rows.

    Args:
        task: the search.
        model, optimizer: what they start from.
        folds: rows of every network; none: those of the task.
        cost: counts the rows.
        evaluations: of a row with a subset, for each comparison of subsets; the fewer there are, the more rows.
    """

    def __init__(
        self,
        task: SearchTask,
        model: Model,
        optimizer: torch.optim.Optimizer,
        folds: Sequence[RowFold],
        cost: SearchCost,
        evaluations: int,
    ) -> None:
        self.names, self.cost, self.evaluations = tuple(model.sites()), cost, evaluations
        factor = FOLD_LR_FACTOR if folds else 1.0
        folds = folds or [RowFold(task.stream, holdout_batches(task, "subset_elimination"))]
        self._judged: list[tuple[SubsetModel, list[Batch]]] = []
        for number, fold in enumerate(folds):
            network, network_optimizer = copy.deepcopy((model, optimizer))
            for group in network_optimizer.param_groups:
                group["lr"] *= factor
            center_embeddings(network, fold.stream)
            subset_model = SubsetModel(network)
            copied: dict[str, Any] = {"model": subset_model, "optimizer": network_optimizer, "stream": fold.stream}
            network_cost = SearchCost()  # of its own, because the network may be that of an earlier search
            with restore_position(fold.stream):
                task.fit(network_cost, **copied, subfolder=f"network-{number}", final_checkpoint="model")
            cost.add_cost(network_cost)
            rows = max(MIN_JUDGED_ROWS, evaluations // 2)
            self._judged.append((subset_model, first_rows(fold.holdout, -(-rows // len(folds)))))

    def losses(self, subsets: Bools) -> Floats:
        """Return the logloss (S, n) of judging rows for subsets (S, N), by the network that is blind to each row."""
        matrix, losses = torch.from_numpy(subsets.astype(np.float32)), []
        rows = max(MIN_JUDGED_ROWS, self.evaluations // len(subsets))
        for model, batches in self._judged:
            for batch in until_rows(batches, -(-rows // len(self._judged))):
                logits = model.logits(batch, matrix).double().cpu().numpy()
                losses.append(row_losses(logits, batch.labels[:, 0].double().cpu().numpy()))
                self.cost.add(forwards=len(batch) * len(subsets))
        return np.concatenate(losses, 1)


def first_rows(batches: Iterable[Batch], rows: int) -> list[Batch]:
    """Return batches with about the first ``rows`` rows."""
    with restore_position(batches):
        return list(until_rows(batches, rows))


def until_rows(batches: Iterable[Batch], rows: int) -> Iterator[Batch]:
    """Yield batches until they have ``rows`` rows or more."""
    for batch in batches:
        yield batch
        rows -= len(batch)
        if rows <= 0:
            break


class SubsetElimination(Method):
    r"""Backward elimination by the held-out loss of a network that predicts from any subset of the fields.

    .. math:: S \leftarrow S \setminus \arg\min_{n \in S} L(S \setminus n), \qquad S = \{1, \dots, N\} \text{ at first}

    The network (:class:`~lpfs.methods.subset_model.SubsetModel`) is trained on random subsets, so that one training
    serves the whole elimination. The score of a field is the share of the fields that are removed before it.
    """

    Options = SubsetEliminationOptions
    options: SubsetEliminationOptions
    cuda_graph = True
    trial_options = ({"folds": 2}, {"folds": 8}, {"evaluations": 2_000_000}, {"evaluations": 30_000_000})

    def __init__(self, name: str, options: SubsetEliminationOptions | None = None) -> None:
        super().__init__(name, options)
        self.folds = self.options.folds

    def search(self, task: SearchTask) -> Selection:
        """Train the networks; return the K fields that are removed last."""
        model = check_maskable(task.model, self.name)
        names = tuple(model.sites())
        self.check(task.target, names, task.steps)
        cost = SearchCost()
        evaluations = self.options.evaluations // len(names)
        networks = SubsetNetworks(task, model, task.optimizer, task.folds, cost, evaluations)
        must_keep = set(task.target.must_keep)
        groups = [[n for n, name in enumerate(names) if (name in must_keep) == forced] for forced in (False, True)]
        with cost:
            order = eliminate(networks.losses, len(names), groups)
        scores = {names[part]: number / len(names) for number, part in enumerate(order)}
        return rank_fields(task, self.name, {name: scores[name] for name in names}, steps=task.steps, **cost.to_dict())


def eliminate(
    losses: Losses, count: int, groups: Sequence[Sequence[int]], prices: Sequence[float] | None = None
) -> list[int]:
    """Return the order in which backward elimination removes ``count`` parts, one group after another.

    The part whose removal costs the least is removed; of those within one standard error of it the most expensive, if
    there are ``prices``. With many parts several are removed at once: a quarter, or fewer if together they cost more
    than one by one, as two copies of a column do.
    """
    alive, order = np.ones(count, bool), list[int]()
    for group in groups:
        left = list(group)
        while left:
            subsets = np.tile(alive, (len(left) + 1, 1))
            subsets[np.arange(len(left)) + 1, left] = False
            base, *without = losses(subsets) if len(left) > 1 else np.zeros((2, 1))
            costs = np.array(without) - base  # (parts left, rows)
            mean, error = costs.mean(1), costs.std(1) / math.sqrt(costs.shape[1])
            ranked = [left[number] for number in np.argsort(mean, kind="stable")]
            total = int(alive.sum())
            size = min(len(left), max(1, min(total // 4, total - ONE_BY_ONE)))
            single = dict(zip(left, np.maximum(mean, 0.0), strict=True))
            while size > 1:
                trial = alive.copy()
                trial[ranked[:size]] = False
                together = losses(np.stack([alive, trial]))
                cost = together[1] - together[0]
                limit = sum(single[part] for part in ranked[:size]) + cost.std() / math.sqrt(len(cost))
                if cost.mean() <= limit:
                    break
                size //= 2
            removed = ranked[:size]
            if prices is not None and size == 1:
                best = int(np.argmin(mean))
                close = [part for part, value in zip(left, mean, strict=True) if value <= mean[best] + error[best]]
                removed = [max(close, key=lambda part: prices[part])]
            for part in removed:
                alive[part] = False
                left.remove(part)
            order += removed
    return order


def exchange(
    losses: Losses, kept: Sequence[int], count: int, fixed: Collection[int] = (), errors: float = 0.0
) -> list[tuple[int, int]]:
    """Exchange a kept for a dropped part while the held-out loss falls; return the exchanges (dropped, kept) in order.

    Candidates are the kept parts that cost least to remove and the dropped ones that gain most, of ``count`` in all;
    the parts in ``fixed`` stay where they are. There are at most as many exchanges as kept parts, each of which lowers
    the loss by more than ``errors`` standard errors.
    """
    alive, exchanges = np.zeros(count, bool), list[tuple[int, int]]()
    alive[list(kept)] = True
    free = [part for part in range(count) if part not in set(fixed)]
    for _ in kept:
        single = np.tile(alive, (len(free), 1))
        single[np.arange(len(free)), free] ^= True
        change = dict(zip(free, losses(single).mean(1), strict=True)) if free else {}
        out, back = (
            sorted((x for x in free if alive[x] == is_kept), key=change.__getitem__) for is_kept in (True, False)
        )
        pairs = [(one, other) for one in out[:EXCHANGED] for other in back[:EXCHANGED]]
        if not pairs:
            break
        subsets = np.tile(alive, (len(pairs) + 1, 1))
        for number, pair in enumerate(pairs):
            subsets[number + 1, list(pair)] ^= True
        base, *exchanged = losses(subsets)
        gains = base - np.array(exchanged)  # (pairs, rows)
        sure = gains.mean(1) - errors * gains.std(1) / math.sqrt(gains.shape[1])
        best = int(np.argmax(sure))
        if sure[best] <= 0:
            break
        alive[list(pairs[best])] ^= True
        exchanges.append(pairs[best])
    return exchanges


def count_evaluations(count: int) -> int:
    """Return about how many subsets an elimination of ``count`` parts evaluates."""
    total = 0
    while count > ONE_BY_ONE:
        total += count
        count -= max(1, min(count // 4, count - ONE_BY_ONE))
    return total + count * (count + 1) // 2
