"""The curve: AUC and logloss against the number of fields, from networks that predict with any subset of the fields.

The networks (:class:`SubsetModel`) never see the rows that they judge. Of these rows, in alternating blocks, one half
fixes a chain of sets by backward elimination, the other half judges the sets of the chain. From them come the
recommended number of fields, what every field is worth, its substitutes, and fields that carry the same information.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lpfs.data.batch import Batch, RowBlock
from lpfs.methods.subset_elimination import Bools, Floats, Losses, count_evaluations, eliminate
from lpfs.methods.subset_model import ResidentStream, SubsetModel
from lpfs.methods.training import center_embeddings
from lpfs.models.base import Model
from lpfs.pipeline.allowance import Allowance
from lpfs.pipeline.plan import RunPlan
from lpfs.train.checkpoint import load_optimizer, map_weights, random_state, restore_random
from lpfs.train.distributed.group import current_group
from lpfs.train.fit import CHECKPOINTS, fit
from lpfs.train.intervals import Z_950, Interval, PairedDifference, auc_difference, auc_influence
from lpfs.train.metrics import row_losses

FOLDS = 5  # networks of a small table, each blind to one fold
NETWORK_SHARE = 1 / 10  # steps of the first phase of such a network, of those of a search
MIN_NETWORK_STEPS = 100  # of any network, unless a search has fewer
NETWORK_BATCH_SIZE = 256
MIN_PASSES = 0.5  # of such a network over its rows; larger tables have one network, as a log has
NETWORK_LR_FACTOR = 4.0  # on its learning rate, because it has few steps
FINE_TUNING_LR_FACTOR = 2.0  # on that of the pretrained model, if it is trained further
JUDGED_SHARE = 0.45  # of the search rows, the last ones, of a log that is read once; the others are trained on
CHAIN_PHASES = (0.8, 0.4)  # steps of the phases on the sets of a chain, of those of the first phase
BLOCK_ROWS = 100  # consecutive rows that fix the chain or judge together; such blocks alternate
READ_RANGES = 16  # ranges of the search rows that are read if they are too many
READ_BYTES = 256 << 20  # of the rows that are read to judge
NEGATIVES_PER_POSITIVE = 4  # further negatives hardly make an AUC more precise
EVALUATIONS_PER_ROW = 1.5  # evaluations of a row with a subset, per row that a search trains on
CHAIN_SHARE, POINTS_SHARE, PAIRS_SHARE = 0.4, 0.4, 0.2  # of these evaluations
MIN_ROWS, MIN_POSITIVES = 500, 20  # rows of a sample; positives and negatives, below which nothing is judged
SUBSTITUTES, CANDIDATES = 3, 4  # substitutes that are reported per field, and examined
SAME_SHARE = 0.9  # share of the information of each of two fields that the other one has, if both have the same

Ints = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True)
class JudgedRows:
    """Rows that networks judge.

    Args:
        rows, labels: the rows and their main labels (n,).
        weights: (n,) that undo the sampling of negatives.
        folds: (n,) number of the network that is blind to each row.
    """

    rows: RowBlock
    labels: Floats
    weights: Floats
    folds: Ints

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def positives(self) -> int:
        """Number of rows with a positive label."""
        return int(np.count_nonzero(self.labels))

    def take(self, index: Ints) -> JudgedRows:
        """Return the rows at ``index``."""
        return JudgedRows(self.rows.take(index), self.labels[index], self.weights[index], self.folds[index])

    def sample(self, count: int) -> JudgedRows:
        """Return about ``count`` rows, evenly spaced among the positives and among the negatives."""
        if count >= len(self):
            return self
        return self.take(np.sort(np.concatenate([_spaced(part, count / len(self)) for part in _classes(self.labels)])))


def _classes(labels: Floats) -> tuple[Ints, Ints]:
    return np.flatnonzero(labels > 0), np.flatnonzero(labels == 0)


def _spaced(index: Ints, share: float) -> Ints:
    """Return this share of the entries, evenly spaced; all of them if it is at least 1."""
    count = min(len(index), math.ceil(share * len(index)))
    return index[np.arange(count) * len(index) // max(1, count)]


# --------------------------------------------------------------------------------------------- networks and rows


@dataclass(frozen=True)
class Network:
    """A network in training: ``batches(phase)`` are the rows that it is trained on, ``name`` its directory."""

    model: SubsetModel
    optimizer: torch.optim.Optimizer
    batches: Callable[[int], Iterable[Batch]]
    name: str

    def train(self, plan: RunPlan, phase: int, steps: int, *, final_if_due: bool = False) -> None:
        """Train; every phase has its directory in ``curve``, from which it is resumed."""
        config = plan.training(steps, plan.settings.seed + phase, keep_best=False)
        config = replace(config, mlflow=False, tensorboard=False, final_if_due=final_if_due)
        batches, folder = self.batches(phase), self._folder(plan, phase)
        fit(self.model, batches, self.optimizer, folder=folder, resume=plan.resume, config=config)

    def release(self, plan: RunPlan, phase: int) -> None:
        """Release the memory of a trained network: its weights are mapped from the last checkpoint of a phase."""
        map_weights(self.model, self._folder(plan, phase) / CHECKPOINTS)
        self.optimizer.state.clear()

    def restore(self, plan: RunPlan, phase: int) -> None:
        """Restore the state of the optimizer after :meth:`release`, so that the network can be trained further."""
        load_optimizer(self.optimizer, self._folder(plan, phase) / CHECKPOINTS)

    def _folder(self, plan: RunPlan, phase: int) -> Path:
        return plan.run_dir / "curve" / f"{self.name}-{phase}"


def make_networks(plan: RunPlan, pretrained: Model) -> tuple[list[Network], int, JudgedRows, JudgedRows]:
    """Return networks, the steps of their first phase, the rows that fix the chain, and the rows that judge its sets.

    A small table has one network for each fold of the training rows, trained from scratch on the other folds. A log
    that is read once has one network: the pretrained model, fine-tuned on the first search rows, which it has not seen,
    judges the others. Any other log has one network that is trained from scratch on the early rows and judges the
    search rows. It reads its rows once: one that reads them again memorizes the values of all fields together, and
    fewer fields seem to be better than all.
    """
    splits, search_steps, seed = plan.splits, plan.steps.search, plan.settings.seed
    fields, batch_size = pretrained.reads.names, max(plan.steps.batch_size, NETWORK_BATCH_SIZE)
    reader = plan.dataset.reader(plan.dataset.schema.subset(fields))
    steps = min(search_steps, max(MIN_NETWORK_STEPS, round(NETWORK_SHARE * search_steps)))
    is_small = splits.train.rows * reader.row_bytes <= READ_BYTES and plan.steps.shuffle
    networks = []
    if is_small and steps * batch_size >= MIN_PASSES * splits.train.rows:
        rows = reader.read([splits.train.span])
        folds = np.arange(len(rows)) // _block_rows(len(rows)) // 2 % FOLDS
        for fold in range(FOLDS):
            others = rows.take(np.flatnonzero(folds != fold))

            def fold_batches(phase: int, others: RowBlock = others) -> Iterable[Batch]:
                return ResidentStream(others, batch_size, seed + phase, plan.device)

            model = _untrained(plan, pretrained, fold)
            networks.append(_network(plan, model, NETWORK_LR_FACTOR, fold_batches, f"network-{fold}"))
    else:
        rows_to_train, judged_rows = splits.early, splits.search
        fine_tunes = plan.saved_model is None and not plan.steps.shuffle
        if fine_tunes:
            rows_to_train, judged_rows = splits.search.split(1 - JUDGED_SHARE, JUDGED_SHARE)
            model, batch_size = copy.deepcopy(pretrained), plan.steps.batch_size
            center_embeddings(model, plan.stream(rows_to_train, fields, train=True, seed=seed))
        else:
            model = _untrained(plan, pretrained, 0)
        ends = np.cumsum([0.0, 1.0, *CHAIN_PHASES])
        ends = (ends / ends[-1] * rows_to_train.rows).astype(int)
        steps = max(1, min(search_steps, ends[1] // batch_size))

        def batches(phase: int) -> Iterable[Batch]:
            rows = rows_to_train.part(int(ends[phase]), int(ends[phase + 1]))
            return rows.stream(
                batch_size, shuffle=plan.steps.shuffle, seed=seed + phase, fields=fields, device=plan.device
            )

        factor = FINE_TUNING_LR_FACTOR if fine_tunes else NETWORK_LR_FACTOR
        networks.append(_network(plan, model, factor, batches, "network"))
        first, stop = judged_rows.span
        share = min(1.0, READ_BYTES / (judged_rows.rows * reader.row_bytes))
        edges = [first + (stop - first) * number // READ_RANGES for number in range(READ_RANGES + 1)]
        ranges = [(low, low + math.ceil((high - low) * share)) for low, high in pairwise(edges) if low < high]
        rows = reader.read(ranges)
        folds = np.zeros(len(rows), np.int64)
    judged = JudgedRows(rows, rows.labels[:, 0].astype(np.float64), np.ones(len(rows)), folds)
    half = np.arange(len(rows)) // _block_rows(len(rows)) % 2
    chain, points = (_sample_negatives(judged.take(np.flatnonzero(half == part))) for part in (0, 1))
    return networks, steps, chain, points


def _block_rows(rows: int) -> int:
    """Return the number of rows of a block: every fold of a small table has two blocks or more of each half."""
    return max(1, min(BLOCK_ROWS, rows // (4 * FOLDS)))


def _untrained(plan: RunPlan, model: Model, fold: int) -> Model:
    torch.manual_seed(plan.settings.seed + fold)
    return model.untrained().to(plan.device)


def _network(
    plan: RunPlan, model: Model, lr_factor: float, batches: Callable[[int], Iterable[Batch]], name: str
) -> Network:
    optimizer = plan.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= lr_factor
    return Network(SubsetModel(model), optimizer, batches, name)


def _sample_negatives(rows: JudgedRows) -> JudgedRows:
    """Return all positives and a few negatives of each; the weights of these make up for the others."""
    positives, negatives = _classes(rows.labels)
    sampled = _spaced(negatives, NEGATIVES_PER_POSITIVE * len(positives) / max(1, len(negatives)))
    index = np.sort(np.concatenate([positives, sampled]))
    factor = np.where(rows.labels[index] > 0, 1.0, len(negatives) / max(1, len(sampled)))
    taken = rows.take(index)
    return replace(taken, weights=taken.weights * factor)


# --------------------------------------------------------------------------------------------- the chain of sets


def chain_sets(order: Sequence[int]) -> Bools:
    """Return the sets (N + 1, N) of a chain, from all parts to none.

    >>> chain_sets([1, 0]).tolist()
    [[True, True], [True, False], [False, False]]
    """
    sets = np.ones((len(order) + 1, len(order)), bool)
    for number, part in enumerate(order):
        sets[number + 1 :, part] = False
    return sets


def recommend(
    differences: Sequence[PairedDifference], allowed: float, later_errors: Sequence[float], minimum: int = 1
) -> int | None:
    """Return the smallest number of fields whose loss is below ``allowed`` at 95 %, from large to small; None: no set.

    Each set is tested at 5 %, and the first one that fails ends the sequence, so that the probability of any false
    acceptance is at most 5 %. A set that the later check on other rows would probably refuse fails, too.

    Args:
        differences: loss of the sets with N, N - 1, …, 0 fields.
        allowed: the allowed loss.
        later_errors: standard error of each loss in the later check.
        minimum: smallest number of fields.
    """
    total, accepted = len(differences) - 1, None
    for number in range(1, total - minimum + 1):
        loss = differences[number]
        margin = Z_950 * later_errors[number]
        expected = loss.value + margin if margin <= allowed else loss.value
        if not (loss.upper <= allowed and expected <= allowed):
            break
        accepted = total - number
    return accepted


# --------------------------------------------------------------------------------------------- the curve of a run


class FieldCurve:
    """The networks of a run and the rows that they judge; made before the search, which changes the pretrained model.

    Args:
        plan: the run.
        pretrained: the model that the search starts from; it is copied.
    """

    def __init__(self, plan: RunPlan, pretrained: Model) -> None:
        start = time.perf_counter()
        self.plan, self.names = plan, tuple(pretrained.sites())
        self.target = plan.target.for_model(pretrained)
        self.must_keep = self.target.permanent(self.names)
        self.networks, self.steps, chain, points = make_networks(plan, pretrained)
        self.phase, self._is_released = 0, False
        steps, count = plan.steps, len(self.names)
        rows_per_step = steps.batch_size + (steps.gate_batch_size if steps.separate_gate_rows else 0)
        evaluations = EVALUATIONS_PER_ROW * steps.search * rows_per_step
        # twice as many positives as each network needs, because a sample has not the same number for all
        minimum = max(MIN_ROWS, 2 * MIN_POSITIVES * (1 + NEGATIVES_PER_POSITIVE) * len(self.networks))
        self.chain_rows = chain.sample(max(minimum, round(CHAIN_SHARE * evaluations / count_evaluations(count))))
        self.pair_rows = chain.sample(max(MIN_ROWS, round(PAIRS_SHARE * evaluations / (3 * CANDIDATES * count))))
        self.rows = points.sample(max(minimum, round(POINTS_SHARE * evaluations / (5 * count))))
        self.order: list[int] | None = None  # of the removal of parts
        self._cache: dict[bytes, npt.NDArray[np.float32]] = {}
        for network in self.networks if self.problem() is None else ():
            network.train(plan, 0, self.steps, final_if_due=plan.has_large_tables and plan.settings.finds_count)
        self.seconds = time.perf_counter() - start

    def problem(self) -> str | None:
        """Return why the rows cannot judge; None if they can."""
        for rows in (self.chain_rows, self.rows):
            for number in range(len(self.networks)):
                labels = rows.labels[rows.folds == number]
                count = min(np.count_nonzero(labels), np.count_nonzero(labels == 0))
                if count < MIN_POSITIVES:
                    return f"{count} rows of a class are too few to judge on; {MIN_POSITIVES} of each are needed"
        return None

    def logits(self, rows: JudgedRows, subsets: Bools) -> npt.NDArray[np.float32]:
        """Return the logits (S, n) of rows for subsets (S, N), of every row by the network that is blind to it."""
        out = np.empty((len(subsets), len(rows)), np.float32)
        matrix = torch.from_numpy(subsets.astype(np.float32))
        for number, network in enumerate(self.networks):
            index = np.flatnonzero(rows.folds == number)
            if len(index):
                out[:, index] = network.model.logits_of_rows(rows.rows.take(index), matrix).numpy()
                out[np.ix_(~subsets.any(1), index)] = out[~subsets.any(1), index[0]][:, None]  # equal without rounding
        return out

    def losses(self, rows: JudgedRows, subsets: Bools) -> Floats:
        """Return the weighted logloss (S, n) of every row for every subset; its mean over rows is the logloss."""
        return _weighted_losses(self.logits(rows, subsets), rows)

    def judge(self, subsets: Bools) -> npt.NDArray[np.float32]:
        """Return the logits (S, n) of the judging rows; a subset is evaluated once."""
        keys = [subset.tobytes() for subset in subsets]
        new = {key: subset for key, subset in zip(keys, subsets, strict=True) if key not in self._cache}
        if new:
            self._cache.update(zip(new, self.logits(self.rows, np.stack(list(new.values()))), strict=True))
        return np.stack([self._cache[key] for key in keys])

    def loss(self, first: npt.NDArray[np.float32], second: npt.NDArray[np.float32]) -> PairedDifference:
        """Return the loss of AUC on the judging rows from one set to another."""
        return auc_difference(first, second, self.rows.labels, folds=self._folds)  # type: ignore[arg-type]

    @property
    def _folds(self) -> Ints | None:
        return self.rows.folds if len(self.networks) > 1 else None

    def auc(self, logits: npt.NDArray[np.float32]) -> float:
        """Return the AUC on the judging rows; the mean over folds, weighted by rows."""
        folds = [self.rows.folds == number for number in range(len(self.networks))]
        values = [auc_influence(logits[fold].astype(np.float64), self.rows.labels[fold])[0] for fold in folds]
        return float(np.average(values, weights=[fold.sum() for fold in folds]))

    def eliminate(self, kept: Sequence[str]) -> list[int]:
        """Return the order in which backward elimination removes the parts; the chain passes through the kept set.

        If a chain is fixed already, its order among the dropped and among the kept parts stays.
        """
        groups: tuple[list[int], ...] = ([], [], [])
        for number, name in enumerate(self.names):
            groups[(name in kept) + (name in kept and name in self.must_keep)].append(number)
        if self.order is not None:
            rank = {part: number for number, part in enumerate(self.order)}
            return [part for group in groups for part in sorted(group, key=rank.__getitem__)]
        costs = self.target.costs
        prices = None if costs is None else costs.weights(self.names, self.names)
        return eliminate(lambda subsets: self.losses(self.chain_rows, subsets), len(self.names), groups, prices)

    def train_on_sets(self, sets: Bools) -> None:
        """Train the networks further, mostly on the sets that will be judged.

        All subsets share the weights, so that a small set would seem to lose more than if it were trained alone.
        """
        steps = max(1, round(CHAIN_PHASES[min(self.phase, len(CHAIN_PHASES) - 1)] * self.steps))
        self._cache.clear()
        for network in self.networks:
            if self._is_released:
                network.restore(self.plan, self.phase)
            network.model.chain = torch.from_numpy(sets.astype(np.float32)).to(self.plan.device)
            network.train(self.plan, self.phase + 1, steps, final_if_due=self._is_released)
        self.phase += 1

    def release(self) -> None:
        """Release the memory of networks with large tables until the curve is completed after the search."""
        if self.plan.has_large_tables:
            self._is_released = True
            for network in self.networks:
                network.release(self.plan, self.phase)

    def recommend(self, allowance: Allowance) -> int | None:
        """Fix the chain; return the smallest number of fields whose loss is within the allowance, None if no set is."""
        start = time.perf_counter()
        self.order = self.eliminate(self.names)
        self.train_on_sets(chain_sets(self.order))
        logits = self.judge(chain_sets(self.order))
        losses = [self.loss(logits[0], values) for values in logits]
        scale = math.sqrt(self.rows.positives / max(1, allowance.positives))
        later = [math.hypot(allowance.se_training, loss.se_rows * scale) for loss in losses]
        self.seconds += time.perf_counter() - start
        return recommend(losses, allowance.allowed, later, max(1, len(self.must_keep)))

    def to_record(self, kept: Sequence[str], recommended: int | None, allowed: float) -> dict[str, Any]:
        """Return the curve through the kept set, the values of every field and groups of fields, as JSON values."""
        start = time.perf_counter()
        names, rows, order = self.names, self.rows, self.eliminate(kept)
        is_kept = np.array([name in set(kept) for name in names])
        single, sets = np.eye(len(names), dtype=bool), chain_sets(order)
        if order != self.order:
            self.train_on_sets(np.concatenate([sets, sets, ~single, is_kept ^ single, single]))
        points, fields = self._points(order), self._field_values(is_kept)
        substitutes, groups = find_substitutes(lambda subsets: self.losses(self.pair_rows, subsets), names)
        self.seconds += time.perf_counter() - start
        return {
            "curve": {
                "points": points,
                "kept": [name for name in names if name in set(kept)],
                "recommended": recommended,
                "allowed": allowed,
                "rows": len(rows),
                "positives": rows.positives,
                "networks": len(self.networks),
                "seconds": round(self.seconds, 3),
            },
            "fields": {name: {**fields[name], "substitutes": substitutes[name]} for name in names},
            "groups": groups,
        }

    def _points(self, order: Sequence[int]) -> list[dict[str, Any]]:
        """Return the points of the curve, from all fields to none."""
        logits = self.judge(chain_sets(order))
        loglosses = [float(_weighted_losses(values, self.rows).mean()) for values in logits]
        all_auc, points = self.auc(logits[0]), []
        for number, values in enumerate(logits):
            loss = self.loss(logits[0], values)
            point: dict[str, Any] = {
                "fields": len(order) - number,
                "removed": None if number == 0 else self.names[order[number - 1]],
                "auc": all_auc - loss.value,
                "logloss": loglosses[number],
                "loss": loss.value,
                "low": loss.interval.low,
                "high": loss.interval.high,
                "upper": loss.upper,
                "logloss_loss": loglosses[number] - loglosses[0],
            }
            points.append(point)
        return points

    def _field_values(self, is_kept: Bools) -> dict[str, dict[str, Any]]:
        """Return what every field is worth: in the set of all fields, for the kept set, and alone."""
        single = np.eye(len(self.names), dtype=bool)
        all_fields, kept = self.judge(np.stack([np.ones_like(is_kept), is_kept]))
        values = {}
        without, changed, alone = self.judge(~single), self.judge(is_kept ^ single), self.judge(single)
        for number, name in enumerate(self.names):
            in_kept = bool(is_kept[number])
            first, second = (kept, changed[number]) if in_kept else (changed[number], kept)
            change = _to_json(self.loss(first, second).interval)
            values[name] = {
                "loss_if_removed": _to_json(self.loss(all_fields, without[number]).interval),
                "loss_if_removed_from_kept": change if in_kept else None,
                "gain_if_added_to_kept": None if in_kept else change,
                "auc_alone": self.auc(alone[number]),
            }
        return values


class CurveStage:
    """The curve of a run, computed on the leader; every rank gets its results.

    Attributes:
        problem: why the rows cannot judge; None if they can.
    """

    def __init__(self, plan: RunPlan, pretrained: Model) -> None:
        self._curve: FieldCurve | None = None

        def build() -> str | None:
            if len(pretrained.sites()) < 2:
                return "there is one field only"
            self._curve = FieldCurve(plan, pretrained)
            return self._curve.problem()

        self.problem = self._on_leader(build)

    def recommend(self, allowance: Allowance) -> int | None:
        """See :meth:`FieldCurve.recommend`."""
        return self._on_leader(lambda: self._require().recommend(allowance))

    def release(self) -> None:
        """See :meth:`FieldCurve.release`."""
        self._on_leader(lambda: self._require().release())

    def to_record(self, kept: Sequence[str], recommended: int | None, allowed: float) -> dict[str, Any]:
        """See :meth:`FieldCurve.to_record`."""
        return self._on_leader(lambda: self._require().to_record(kept, recommended, allowed))

    def _require(self) -> FieldCurve:
        assert self._curve is not None
        return self._curve

    @staticmethod
    def _on_leader(function: Callable[[], T]) -> T:
        """Return the value of a function of the leader; the random numbers of the stages that follow do not change."""
        state = random_state()
        try:
            return current_group().run_on_leader(function, "computing the curve")
        finally:
            restore_random(state)


def _weighted_losses(logits: npt.NDArray[np.float32], rows: JudgedRows) -> Floats:
    losses: Floats = row_losses(logits.astype(np.float64), rows.labels) * (rows.weights / rows.weights.mean())
    return losses


def _to_json(interval: Interval) -> dict[str, float]:
    return {"value": interval.value, "low": interval.low, "high": interval.high}


# --------------------------------------------------------------------------------------------- substitutes and groups


def find_substitutes(losses: Losses, names: Sequence[str]) -> tuple[dict[str, list[dict[str, Any]]], list[list[str]]]:
    r"""Return the best substitutes of every field, and groups of fields that carry the same information.

    Two fields carry the same information if, of what each of them gains alone, nothing is left beside the other one.
    k is a substitute of n by the share of the value of n that k covers,

    .. math:: I_{nk} = L(A \setminus nk) - L(A \setminus n) - L(A \setminus k) + L(A), \qquad
              \mathrm{share} = \frac{I_{nk}}{L(A \setminus nk) - L(A \setminus k)}

    where A are all fields without the others of the group of n. Only pairs whose predictions alone are similar are
    examined.
    """
    count = len(names)
    cache: dict[frozenset[int], Floats] = {}

    def losses_without(*removed: frozenset[int]) -> list[Floats]:
        """Return the loss of every row without these parts."""
        new = [parts for parts in dict.fromkeys(removed) if parts not in cache]
        if new:
            subsets = np.array([[part not in parts for part in range(count)] for parts in new])
            cache.update(zip(new, losses(subsets), strict=True))
        return [cache[parts] for parts in removed]

    every = frozenset(range(count))
    nothing, *alone = losses_without(every, *(every - {part} for part in range(count)))
    gains = nothing - np.stack(alone)  # (N, rows): what each field gains alone
    pairs = _similar_pairs(gains)
    together = dict(zip(pairs, losses_without(*(every - set(pair) for pair in pairs)), strict=True))
    same = []
    for (first, second), loss in together.items():
        shares = [_share(alone[other] - loss, gains[part]) for part, other in ((first, second), (second, first))]
        if min(shares) >= SAME_SHARE:
            same.append((first, second))
    group_of = _components(same, count)
    sets: dict[tuple[int, int], tuple[frozenset[int], ...]] = {}
    for pair in pairs:
        for n, k in (pair, pair[::-1]):
            context = group_of[n] - {n, k}
            sets[n, k] = (context, context | {n}, context | {k}, context | {n, k})
    losses_without(*(removed for several in sets.values() for removed in several))
    substitutes: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for (n, k), several in sets.items():
        context_loss, without_n, without_k, without_both = losses_without(*several)
        share = _share(without_n - context_loss, without_both - without_k)
        if share > 0:
            substitutes[names[n]].append({"name": names[k], "share": round(share, 4)})
    for entries in substitutes.values():
        entries.sort(key=lambda entry: -entry["share"])
        del entries[SUBSTITUTES:]
    groups = sorted({tuple(sorted(group)) for group in group_of if len(group) > 1})
    return substitutes, [[names[part] for part in group] for group in groups]


def _share(rest: Floats, worth: Floats) -> float:
    """Return the share of a worth that is gone if ``rest`` is left of it, in [0, 1]; 0 if worth or loss is noise."""
    for values in (worth, worth - rest):
        if values.mean() <= Z_950 * values.std() / math.sqrt(len(values)):
            return 0.0
    return float(min(1.0, 1 - rest.mean() / worth.mean()))


def _similar_pairs(gains: Floats) -> list[tuple[int, int]]:
    """Return pairs of fields whose predictions alone help in the same rows, a few for every field."""
    centered = gains - gains.mean(1, keepdims=True)
    norms = np.sqrt((centered**2).sum(1))
    similarity = np.abs(centered @ centered.T) / np.maximum(np.outer(norms, norms), 1e-30)
    np.fill_diagonal(similarity, -1.0)
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, : min(CANDIDATES, len(gains) - 1)]
    return sorted({(min(n, int(k)), max(n, int(k))) for n, near in enumerate(nearest) for k in near})


def _components(pairs: Sequence[tuple[int, int]], count: int) -> list[frozenset[int]]:
    """Return the connected component of every part.

    >>> [sorted(group) for group in _components([(0, 2)], 3)]
    [[0, 2], [1], [0, 2]]
    """
    group_of = [frozenset([part]) for part in range(count)]
    for first, second in pairs:
        joined = group_of[first] | group_of[second]
        for part in joined:
            group_of[part] = joined
    return group_of
