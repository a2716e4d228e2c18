"""Variants of the search, paired: the same pretrained model, rows and retraining, on a fixed list of logs.

    python benchmarks/search_variants.py --jobs 16 --seconds 480 --out results.jsonl
    python benchmarks/search_variants.py --report results.jsonl --json benchmarks/results/search_variants.json

Each run is one line of JSON lines: a log, a split seed, a variant, a K; finished runs are not repeated. K is N/8, N/4
and N/2. The kept fields are trained from scratch on early and search rows and scored on rows that no variant has seen:
fresh rows with their true probabilities for simulated logs, rows held out of the training rows for real tables. The
logs are in search_logs.py; the variants that are not options of LPFS++ are written here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.stats import wilcoxon
from search_logs import LOGS, TABLE_LOGS
from torch import Tensor, nn

from lpfs._console import Console
from lpfs.data.dataset import Dataset
from lpfs.gates.sites import declared_sites, resolve_sites
from lpfs.methods import lpfs as lpfs_method, subset_elimination
from lpfs.methods.base import Count, RowFold, SearchCost, SearchTask, restore_position, top_k
from lpfs.methods.cross_fitting import FoldNetworks
from lpfs.methods.gate_search import GateSearch
from lpfs.methods.lpfs import JUDGED_EVALUATIONS, LPFSPlusPlus, LPFSPlusPlusOptions
from lpfs.methods.masks import ReplaceOutput, parts_by_module
from lpfs.methods.registry import METHODS, MethodEntry, make_method
from lpfs.methods.search import run_search
from lpfs.methods.subset_elimination import FOLD_LR_FACTOR, SubsetNetworks, eliminate, exchange, first_rows
from lpfs.methods.subset_model import ResidentStream, SubsetModel
from lpfs.methods.training import center_embeddings, holdout_grads
from lpfs.pipeline import stages
from lpfs.pipeline.curve import FieldCurve, chain_sets, make_networks
from lpfs.pipeline.plan import RunPlan, build_plan
from lpfs.pipeline.settings import Settings
from lpfs.schema import Selection
from lpfs.train.callbacks import State
from lpfs.train.evaluate import predictions
from lpfs.train.fit import fit
from lpfs.train.metrics import scores

MIN_KEEP = 2
SEEDS = 3


@dataclass(frozen=True)
class Variant:
    """A search: a method, its options, changes of the plan of its steps, and the K, as parts of the fields."""

    method: str = "variant"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[int, ...] = (8, 4, 2)
    pace: float = 1.0  # factor on the learning rate of the weights
    blocks: bool = False  # folds are consecutive rows; only on logs in time order
    all_rows: bool = False  # folds of early and search rows, and networks pretrained on the others


JUDGE = "judge"  # the job of the subset model: these variants share its networks
ALL_JUDGE = "judge, all rows"
CURVE_JUDGE = "judge of the curve"
NEAR = "judge, near K"  # networks trained from the start on subsets of about K fields, for each K
SETTLED = "settled"  # ties are broken by the gain of a field alone, or by the order of the columns
REPEATS = "repeats 4"  # searches, each on another fold of early and search rows, with weights of the others
VARIANTS: dict[str, Variant] = {
    "default": Variant("lpfs++", {"folds": 0, "judges": 0}),
    "folds 4": Variant("lpfs++", {"folds": 4}),
    "blank": Variant(options={"blank": True}, parts=(8, 4)),
    "folds 4, blank": Variant(options={"blank": True, "folds": 4}, parts=(8, 4)),
    JUDGE: Variant("subset_elimination"),
    "judges 4": Variant("lpfs++", {"judges": 4}),
    "slow weights": Variant("lpfs++", {"folds": 0}, parts=(8, 4), pace=0.3),
    "folds 4, slow weights": Variant("lpfs++", {"folds": 4}, parts=(8, 4), pace=0.3),
    "folds 4, 2 at a time": Variant(options={"folds": 4, "per_step": 2}),
    "folds 4, 2 at a time, rows 2x": Variant(options={"folds": 4, "per_step": 2, "rows": 2}, parts=(8, 4)),
    "folds 4, 1 at a time, rows 2x": Variant(options={"folds": 4, "per_step": 1, "rows": 2}, parts=(8, 4)),
    "folds 2": Variant("lpfs++", {"folds": 2}, parts=(8, 4)),
    "all folds 4": Variant("lpfs++", {"folds": 4, "judges": 0}, all_rows=True),
    ALL_JUDGE: Variant("subset_elimination", parts=(8, 4), all_rows=True),
    CURVE_JUDGE: Variant("subset_elimination"),
    "judge, slow": Variant("subset_elimination", pace=0.1),
    "judge, all rows, slow": Variant("subset_elimination", parts=(8, 4), all_rows=True, pace=0.1),
    "all folds 4, masks": Variant(options={"share": 0.5, "folds": 4}, parts=(8, 4), all_rows=True),
    "folds 4, blocks": Variant("lpfs++", {"folds": 4}, parts=(8, 4), blocks=True),
    "masks": Variant(options={"share": 0.5}, parts=(8, 4)),
    "folds 4, masks": Variant(options={"share": 0.5, "folds": 4}, parts=(8, 4)),
    "folds 4, gate rows 4x": Variant("lpfs++", {"folds": 4}, {"gate_batch_size": 2048}, parts=(8, 4)),
    "errors": Variant(options={"by_error": True}, parts=(8, 4)),
    "late batch": Variant(options={"late": 4}, parts=(8, 4)),
    REPEATS: Variant("lpfs++", {"judges": 0}),
    SETTLED: Variant("subset_elimination", pace=0.1),
    NEAR: Variant("subset_elimination", pace=0.3),
    "shufflegate": Variant("shufflegate"),
    "permutation": Variant("permutation"),
    "gbdt": Variant("gbdt"),
}
JUDGES = {  # what their results are called
    JUDGE: ", more rows at the end",
    ALL_JUDGE: " on all rows, more at the end",
    CURVE_JUDGE: " by networks of the curve",
    "judge, slow": " by slow networks",
    "judge, all rows, slow": " by slow networks on all rows",
}
JUDGED = ("default", "all folds 4")  # their sets are judged
THRESHOLDS = (0.0, 1.0, 2.0)  # standard errors beyond which a field is exchanged
BASE = "default"


# ---------------------------------------------------------------------------------------------- variants of the gates


@dataclass(frozen=True)
class VariantOptions(LPFSPlusPlusOptions):
    """Options of the changes.

    Args:
        share: smallest share of the fields that a row of the weights sees.
        by_error: whether λ of a gate is weighted by the standard deviation of its gradient.
        late: factor on the rows of the gates from the fraction ``late_start`` of the search on.
        late_start: that fraction.
        per_step: networks of a cross-fitted search that take a step and give the gradient at a time; 0: all.
        rows: factor on the rows of a step of these networks.
        blank: whether embeddings of ids that pretraining never saw start at the mean.
    """

    share: float = 1.0
    by_error: bool = False
    late: Count = 1
    late_start: float = 0.3
    per_step: int = 0
    rows: Count = 1
    blank: bool = False


class VariantMethod(LPFSPlusPlus):
    """LPFS++ with experimental changes."""

    Options = VariantOptions
    options: VariantOptions

    def search(self, task: SearchTask) -> Selection:
        if self.options.blank:
            center_embeddings(task.model, task.stream)  # type: ignore[arg-type]
            blank_untrained(task.model, task.optimizer)
        return super().search(task)

    def make_callback(self, gates: Any, prox: Any, task: SearchTask, cost: SearchCost, *rest: Any) -> GateSearch:
        networks, options = rest[1], self.options
        if options.per_step:
            for network in networks.networks:
                network.stream.batches.batch_size *= options.rows
                network.holdout.batches.batch_size *= len(networks.networks) // options.per_step
            networks.per_step = options.per_step
        return VariantSearch(options, gates, prox, task, cost, networks)


class VariantSearch(GateSearch):
    """GateSearch with random masks on the rows of the weights, weights on λ, and more rows for the gates."""

    def __init__(
        self, options: VariantOptions, gates: Any, prox: Any, task: SearchTask, cost: SearchCost, networks: Any
    ) -> None:
        super().__init__(gates, prox, task.holdout, cost, networks)
        self.options, self.mean, self.square, self.mass = options, torch.zeros_like(gates.x.data), gates.x.data * 0, 0.0
        self.masks = []
        if options.share < 1:
            models: list[nn.Module] = [task.model]
            models += [] if networks is None else [network.model for network in networks.networks]
            self.masks = [RandomMask(model, options.share) for model in models]

    def within_step(self, state: State) -> None:
        gates, networks = self.gates, self.networks
        if networks is not None:
            networks.train(gates, state.step)
        for mask in self.masks:
            mask.active = False
        if networks is not None:
            gradient = networks.gradient(gates, state.step)
        else:
            assert self.batch is not None
            (gradient,) = holdout_grads(state, self.batch, [gates.x])
            late = state.step >= self.options.late_start * gates.steps
            for _ in range(self.options.late - 1 if late else 0):
                assert self.holdout is not None
                gradient = gradient + holdout_grads(state, self.next_holdout(self.holdout), [gates.x])[0]
            gradient = gradient / (self.options.late if late else 1)
        for mask in self.masks:
            mask.active = True
        gates.x.grad = gradient
        if self.options.by_error:
            self._weight_by_error(gradient)
        self.prox.step()
        gates.step()

    def _weight_by_error(self, gradient: Tensor) -> None:
        """Set the weight of every gate on λ to the standard deviation of its gradient, between a half and two."""
        self.mean.mul_(0.98).add_(gradient, alpha=0.02)
        self.square.mul_(0.98).add_(gradient**2, alpha=0.02)
        self.mass = 0.98 * self.mass + 0.02
        deviation = (self.square / self.mass - (self.mean / self.mass) ** 2).clamp(min=0).sqrt()
        alive = self.gates.x.detach() != 0
        if bool(alive.any()) and float(deviation[alive].mean()) > 0:
            weights = (deviation / deviation[alive].mean()).clamp(0.5, 2.0)
            self.prox.param_groups[0]["weights"].copy_(torch.where(alive, weights, 1.0))

    def on_end(self, state: State) -> None:
        super().on_end(state)
        for mask in self.masks:
            mask.remove()


@torch.no_grad()
def blank_untrained(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Set the embeddings of ids that were never trained to zero, the mean of the centered embeddings."""
    weight = model.inputs.table.weight
    trained = optimizer.state[weight]["sum"].flatten(1).any(1)
    weight.data[~trained] = 0.0


class RandomMask:
    """Zeroes the embeddings of random fields of every training row; the share of the others is uniform."""

    def __init__(self, model: Any, share: float) -> None:
        self.share, self.active, self.parts = share, True, len(model.sites())
        modules = parts_by_module(resolve_sites(model, declared_sites(model)), tuple(model.sites()))
        self._hooks = [
            model.get_submodule(path).register_forward_hook(ReplaceOutput(self._apply, numbers))
            for path, numbers in modules.items()
        ]

    def _apply(self, tokens: Tensor, numbers: Tensor, ids: Tensor | None) -> Tensor:
        if not self.active:
            return tokens
        share = self.share + (1 - self.share) * torch.rand(len(tokens), 1)
        return tokens * (torch.rand(len(tokens), self.parts) < share)[:, numbers, None]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def make_folds(plan: RunPlan, seed: int, fold_of: Any, count: int) -> list[RowFold]:
    """Return the rows of networks that are each blind to one fold; rows of the fold -1 are in no fold."""
    rows, folds = plan.dataset.reader(plan.schema).read([plan.splits.train.span]), []
    size = -(-plan.steps.gate_batch_size // count)
    for fold in range(count):
        others, held = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        stream = ResidentStream(rows, plan.steps.batch_size, seed + 2 * fold, plan.device, others)
        folds.append(RowFold(stream, ResidentStream(rows, size, seed + 2 * fold + 1, plan.device, held)))
    return folds


def block_folds(plan: RunPlan, model: Any, seed: int, count: int) -> list[RowFold]:
    """Return folds of consecutive search rows, so that some ids of a fold occur in no other, as in later days."""
    splits = plan.splits
    if count == 0:
        return []
    number = np.arange(splits.train.rows) - splits.early.rows
    return make_folds(plan, seed, np.where(number < 0, -1, number * count // splits.search.rows), count)


def all_row_folds(plan: RunPlan, model: Any, seed: int, count: int) -> list[RowFold]:
    """Return random folds of early and search rows."""
    rows = plan.splits.train.rows
    if count == 0:
        return []
    return make_folds(plan, seed, np.random.default_rng([seed, rows]).permutation(rows) % count, count)


class AllRowNetworks(FoldNetworks):
    """Networks that are pretrained from scratch on the rows of their folds."""

    space: ClassVar[Any] = None  # the workspace of the job

    def __init__(self, model: Any, optimizer: Any, folds: Any, config: Any, cost: Any) -> None:
        super().__init__(model, optimizer, folds, config, cost)
        for number, (network, fold) in enumerate(zip(self.networks, folds, strict=True)):
            blind, blind_optimizer = self.space.blind(number, fold)
            network.model.load_state_dict(blind.state_dict())
            network.optimizer.load_state_dict(blind_optimizer.state_dict())
            for group, same in zip(network.optimizer.param_groups, optimizer.param_groups, strict=True):
                group["lr"] = same["lr"]
            center_embeddings(network.model, fold.stream)  # type: ignore[arg-type]


class AllRowSubsetNetworks(SubsetNetworks):
    """Networks trained on subsets, pretrained from scratch on the rows of their folds."""

    def __init__(self, task: SearchTask, space: Any, cost: SearchCost, judged_rows: int) -> None:
        self.names, self.cost, self.evaluations = tuple(task.model.sites()), cost, judged_rows  # type: ignore[operator]
        self._judged = []
        for number, fold in enumerate(task.folds):
            network, optimizer = space.blind(number, fold)
            for group, same in zip(optimizer.param_groups, task.optimizer.param_groups, strict=True):
                group["lr"] = same["lr"]
            center_embeddings(network, fold.stream)
            model = SubsetModel(network)
            stream: dict[str, Any] = {"model": model, "optimizer": optimizer, "stream": fold.stream}
            task.fit(cost, **stream, subfolder=f"network-{number}", final_checkpoint="model", graph=False)
            self._judged.append((model, first_rows(fold.holdout, judged_rows // 2)))


class CurveNetworks(FieldCurve):
    """The networks of the curve of select: trained from scratch on random subsets, reading their rows about once."""

    def __init__(self, plan: RunPlan, pretrained: Any, evaluations: int) -> None:
        self.plan, self.names, self.evaluations = plan, tuple(pretrained.sites()), evaluations
        self.networks, self.steps, chain, points = make_networks(plan, pretrained)
        self.all_rows, self.phase, self._is_released = (chain, points), 0, False
        self._cache = {}
        for network in self.networks:
            network.train(plan, 0, self.steps)

    def losses_of(self, subsets: Any) -> Any:
        rows = max(2000, self.evaluations // len(subsets))
        return np.concatenate([self.losses(part.sample(rows // 2), subsets) for part in self.all_rows], 1)


RANDOM_FOLDS = stages.search_folds
METHODS["variant"] = MethodEntry("search_variants:VariantMethod", "LPFS++ with experimental changes", "-")


# ---------------------------------------------------------------------------------------------- runs


@dataclass
class Workspace:
    """The Dataset, the pretrained model and the results of one split of a log, in one process."""

    log: str
    seed: int
    plan: RunPlan
    scored: Dataset
    probabilities: Any
    cache: Path
    parts: tuple[int, ...]
    number: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.plan.schema.names)

    def keeps(self, variant: str) -> list[int]:
        parts = [part for part in VARIANTS[variant].parts if part in self.parts]
        return sorted({max(MIN_KEEP, len(self.names) // part) for part in parts})

    def folder(self) -> Path:
        self.number += 1
        return Path(tempfile.mkdtemp(dir=self.plan.run_dir.parent))

    def pretrained(self) -> stages.Trained:
        """Return the pretrained model; one process stores it for the others."""
        path = self.cache / f"{self.log}-{self.seed}.pt"
        torch.manual_seed(self.seed)
        model = stages.new_model(self.plan, self.seed)
        optimizer = self.plan.optimizer(model)
        if path.exists():
            states = torch.load(path, weights_only=False)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            return model, optimizer
        model, optimizer = stages.pretrain(replace(self.plan, run_dir=self.folder()), self.seed)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save((model.state_dict(), optimizer.state_dict()), temporary)
        temporary.rename(path)
        return model, optimizer

    def blind(self, number: int, fold: RowFold) -> stages.Trained:
        """Return a network pretrained on the rows of a fold of all rows; one process stores it for the others."""
        path = self.cache / f"{self.log}-{self.seed}-blind-{number}.pt"
        plan, seed = replace(self.plan, run_dir=self.folder()), self.seed + 100 * (number + 1)
        model = stages.new_model(plan, seed)
        optimizer = plan.optimizer(model)
        if path.exists():
            states = torch.load(path, weights_only=False)
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            return model, optimizer
        config = plan.training(plan.steps.pretrain, seed, keep_best=True, keep_last_optimizer=True)
        valid = plan.stream(plan.splits.valid, model.reads.names, train=False)
        with restore_position(fold.stream):
            fit(model, fold.stream, optimizer, valid=valid, folder=plan.run_dir, config=config)
        temporary = path.with_suffix(f".{os.getpid()}")
        torch.save((model.state_dict(), optimizer.state_dict()), temporary)
        temporary.rename(path)
        return model, optimizer

    def retrain(self, kept: Sequence[str]) -> dict[str, float]:
        """Train the kept fields from scratch; return the scores."""
        names = [name for name in self.names if name in set(kept)]
        plan = replace(self.plan, run_dir=self.folder(), schema=self.plan.schema.subset(names))
        model = stages.new_model(plan, self.seed)
        rows, steps = plan.splits.train, plan.steps.train
        stages.train(plan, model, plan.optimizer(model), rows, steps, "model", self.seed, final_checkpoint="none")
        predicted = predictions(model, plan.stream(self.scored, model.reads.names, train=False))
        z, y = predicted.logits[:, 0].astype(np.float64), predicted.labels[:, 0].astype(np.float64)
        if self.probabilities is None:
            result = scores(z, y)
        else:
            p = self.probabilities
            labels = np.concatenate([np.ones(len(z)), np.zeros(len(z))])
            result = scores(np.concatenate([z, z]), labels, np.concatenate([p, 1 - p]))
        assert result.auc is not None
        return {"auc": result.auc, "logloss": result.logloss}


@lru_cache(maxsize=1)
def workspace(log: str, seed: int, work: str, tiny: bool, parts: tuple[int, ...]) -> Workspace:
    """Write the log of a split and plan its stages."""
    folder = Path(tempfile.mkdtemp(dir=work))
    dataset, scored, probabilities = LOGS[log].make(seed, folder)
    short: dict[str, Any] = {"pretrain_steps": 100, "search_steps": 100} if tiny else {}
    settings = Settings(keep=MIN_KEEP, device="cpu", seed=seed, **short)
    (folder / "runs").mkdir()
    plan = build_plan(settings, dataset, folder / "runs" / "plan", Console(quiet=True))
    if scored is dataset:
        scored = plan.splits.test
    return Workspace(log, seed, plan, scored, probabilities, Path(work), parts)


def run_job(
    log: str, seed: int, variant: str, done: Sequence[dict[str, Any]], work: str, tiny: bool, parts: tuple[int, ...]
) -> list[Any]:
    """Do the missing runs of a variant on a split of a log; return their records."""
    torch.set_num_threads(1)
    space = workspace(log, seed, work, tiny, parts)
    setattr(subset_elimination, "SubsetModel", NearSubsetModel if variant == NEAR else SubsetModel)  # noqa: B010
    trained = {tuple(sorted(record["kept"])): record["scores"] for record in done}
    records: list[Any] = []

    def write(name: str, keep: int, kept: Iterable[str], seconds: float) -> None:
        if any(record["variant"] == name and record["keep"] == keep for record in (*done, *records)):
            return
        key = tuple(sorted(kept))
        start = time.process_time()
        if key not in trained:
            trained[key] = space.retrain(key)
        records.append(
            {
                "log": log,
                "seed": seed,
                "variant": name,
                "keep": keep,
                "fields": len(space.names),
                "scores": trained[key],
                "kept": list(key),
                "seconds": round(seconds, 2),
                "train_seconds": round(time.process_time() - start, 2),
            }
        )

    if variant in JUDGES:
        judge(space, done, write, variant)
        return records
    if variant == REPEATS:
        repeat(space, write)
        return records
    if variant == SETTLED:
        settle_sets(space, done, write)
        return records
    if variant == NEAR:
        judge_near(space, done, write)
        return records
    entry = VARIANTS[variant]
    method = make_method(entry.method, entry.options)
    stages.search_folds = all_row_folds if entry.all_rows else block_folds if entry.blocks else RANDOM_FOLDS
    AllRowNetworks.space = space
    setattr(lpfs_method, "FoldNetworks", AllRowNetworks if entry.all_rows else FoldNetworks)  # noqa: B010
    for keep in space.keeps(variant):
        if any(record["variant"] == variant and record["keep"] == keep for record in done):
            continue
        start = time.process_time()
        plan = space.plan.for_search(space.folder(), seed, method=entry.method, options=dict(entry.options), keep=keep)
        changes = {"lr_factor": plan.steps.lr_factor * entry.pace, **entry.steps}
        plan = replace(plan, steps=replace(plan.steps, **changes))
        selection = stages.search_fields(plan, space.pretrained(), seed)[2]
        seconds = time.process_time() - start
        write(variant, keep, selection.kept, seconds)
        if not method.search_per_k:
            for other in space.keeps(variant):
                write(variant, other, top_k(selection.made["scores"], other), seconds)
            break
    return records


def repeat(space: Workspace, write: Any, count: int = 4) -> None:
    """Search once on each fold of all rows, with a model pretrained on the others, and select by all searches.

    A field's share is the part of a search in which its gate was alive. ``votes``: the fields that most searches
    keep, of equals those with the largest mean share; ``mean share``: by the mean share alone.
    """
    for keep in space.keeps(REPEATS):
        start, options = time.process_time(), dict(VARIANTS[REPEATS].options)
        plan = space.plan.for_search(space.folder(), space.seed, method="lpfs++", options=options, keep=keep)
        votes, shares = np.zeros(len(space.names)), np.zeros(len(space.names))
        folds = all_row_folds(plan, stages.new_model(plan, space.seed), space.seed, count)
        for number, fold in enumerate(folds):
            trained = space.blind(number, fold)
            task, factor = stages.search_task(plan, trained, space.seed)
            fold.holdout.batch_size = plan.steps.gate_batch_size  # type: ignore[attr-defined]
            rows: dict[str, Any] = {"stream": fold.stream, "holdout": fold.holdout, "folder": space.folder() / "search"}
            with stages.scaled_learning_rate(trained[1], factor):
                selection = run_search(plan.method, replace(task, **rows))
            order = [list(trained[0].sites()).index(name) for name in space.names]
            gates = np.array([record["gates"] for record in selection.history])[:, order]
            votes += [name in selection.kept for name in space.names]
            shares += (gates != 0).mean(0) / count
        seconds = time.process_time() - start
        names = np.array(space.names)
        write(f"votes of {count}", keep, names[np.lexsort((-shares, -votes))[:keep]].tolist(), seconds)
        write(f"mean share of {count}", keep, names[np.argsort(-shares, kind="stable")[:keep]].tolist(), seconds)


def settle_sets(space: Workspace, done: Sequence[dict[str, Any]], write: Any) -> None:
    """Replace fields of the default sets by preferred ones of equal loss, as slow subset networks see it."""
    plan = space.plan.for_search(space.folder(), space.seed, method="subset_elimination", keep=space.keeps(JUDGE)[0])
    start = time.process_time()
    networks = subset_networks(space, plan, *space.pretrained(), SETTLED)
    names = list(networks.names)
    alone = networks.losses(np.eye(len(names), dtype=bool)).mean(1)
    orders = {"gain alone": np.argsort(alone, kind="stable").tolist(), "column": [names.index(n) for n in space.names]}
    seconds = time.process_time() - start
    for record in [record for record in done if record["variant"] == BASE]:
        kept = [names.index(name) for name in record["kept"]]
        for rule, order in orders.items():
            for errors in (0.0, 1.0):
                chosen = settle(networks.losses, kept, order, errors)
                name = f"default, settled by {rule} within {errors:g} errors"
                write(name, record["keep"], [names[part] for part in chosen], seconds + record["seconds"])


def settle(losses: Any, kept: Sequence[int], order: Sequence[int], errors: float) -> set[int]:
    """Exchange kept parts for parts before them in ``order`` while the loss is that of ``kept``, up to the errors."""
    rank = {part: number for number, part in enumerate(order)}
    alive = np.zeros(len(order), bool)
    alive[list(kept)] = True
    first = alive.copy()
    for back in [part for part in order if not alive[part]]:
        later = sorted((p for p in np.flatnonzero(alive).tolist() if rank[p] > rank[back]), key=rank.__getitem__)
        if not later:
            continue
        subsets = np.tile(alive, (len(later) + 1, 1))
        subsets[0] = first
        subsets[1:, back] = True
        subsets[np.arange(len(later)) + 1, later] = False
        base, *changed = losses(subsets)
        costs = np.array(changed) - base  # (parts, rows)
        fits = costs.mean(1) <= errors * costs.std(1) / math.sqrt(costs.shape[1])
        if fits.any():
            alive[later[int(np.flatnonzero(fits)[-1])]] = False
            alive[back] = True
    return set(np.flatnonzero(alive).tolist())


def subset_networks(space: Workspace, plan: RunPlan, model: Any, optimizer: Any, variant: str) -> SubsetNetworks:
    """Return networks trained on random subsets, from pretrained ones."""
    all_rows = VARIANTS[variant].all_rows
    fields, steps = model.reads.names, plan.steps
    folds = (all_row_folds if all_rows else RANDOM_FOLDS)(plan, model, space.seed, plan.method.folds)
    stream = plan.stream(plan.splits.train, fields, train=True, seed=space.seed)
    training = plan.training(steps.search, space.seed, keep_best=False)
    target = plan.target.for_model(model)
    task = SearchTask(model, optimizer, stream, None, target, steps.search, space.seed, training=training, folds=folds)
    rows = JUDGED_EVALUATIONS // len(space.names)
    factor = VARIANTS[variant].pace / (1.0 if all_rows else FOLD_LR_FACTOR)  # SubsetNetworks multiply by it
    with stages.scaled_learning_rate(optimizer, steps.lr_factor * factor):
        return (
            AllRowSubsetNetworks(task, space, SearchCost(), rows)
            if all_rows
            else SubsetNetworks(task, model, optimizer, folds, SearchCost(), rows)
        )


def better_set(losses: Any, kept: Sequence[int], other: Sequence[int], count: int, errors: float) -> Sequence[int]:
    """Return ``other`` if its held-out loss is lower than that of ``kept`` by more than the standard errors."""
    subsets = np.zeros((2, count), bool)
    subsets[0, list(kept)] = subsets[1, list(other)] = True
    first, second = losses(subsets)
    gain = first - second
    return other if gain.mean() > errors * gain.std() / math.sqrt(len(gain)) else kept


def judge(space: Workspace, done: Sequence[dict[str, Any]], write: Any, variant: str) -> None:
    """Eliminate by a subset model, and exchange fields of the sets of other variants by it."""
    start, by = time.process_time(), JUDGES[variant]
    plan = space.plan.for_search(space.folder(), space.seed, method="subset_elimination", keep=space.keeps(JUDGE)[0])
    model, optimizer = space.pretrained()
    if variant == CURVE_JUDGE:
        curve = CurveNetworks(plan, model, JUDGED_EVALUATIONS // len(space.names))
        names, losses = list(curve.names), curve.losses_of
        curve.train_on_sets(chain_sets(eliminate(losses, len(names), [list(range(len(names)))])))
    else:
        networks = subset_networks(space, plan, model, optimizer, variant)
        names, losses = list(networks.names), networks.losses
    order = eliminate(losses, len(names), [list(range(len(names)))])
    seconds = time.process_time() - start
    for keep in space.keeps(variant):
        write(f"subset elimination{by}", keep, [names[part] for part in order[-keep:]], seconds)
        for variant in JUDGED:
            found = [record for record in done if record["variant"] == variant and record["keep"] == keep]
            if not found:
                continue
            kept = [names.index(name) for name in found[0]["kept"]]
            for threshold in THRESHOLDS:
                chosen_set = better_set(losses, kept, order[-keep:], len(names), threshold)
                better = f"{variant} or elimination, beyond {threshold:g} errors{by}"
                write(better, keep, [names[part] for part in chosen_set], seconds + found[0]["seconds"])
                name = f"{variant}, exchanged beyond {threshold:g} errors{by}"
                start = time.process_time()
                chosen = set(kept)
                for pair in exchange(losses, kept, len(names), errors=threshold):
                    chosen ^= set(pair)
                spent = seconds + found[0]["seconds"] + time.process_time() - start
                write(name, keep, [names[part] for part in chosen], spent)


class NearSubsetModel(SubsetModel):
    """A subset model whose training rows see subsets of up to about 2K fields; a tenth of them sees all fields."""

    keep: ClassVar[int] = 0  # K

    def _draw(self, rows: int, device: torch.device) -> Tensor:
        parts = len(self.names)
        share = (2 * self.keep / parts * torch.rand(rows, 1, device=device)).clamp(max=1.0)
        is_full = torch.rand(rows, 1, device=device) < 0.1
        return ((torch.rand(rows, parts, device=device) < share) | is_full).float()


def judge_near(space: Workspace, done: Sequence[dict[str, Any]], write: Any) -> None:
    """Eliminate, and exchange fields of the default sets, by networks trained on subsets of about K fields only.

    They are trained from scratch on the early rows in this way, then on the search rows but one fold.
    """
    for keep in space.keeps(NEAR):
        NearSubsetModel.keep = keep
        start = time.process_time()
        plan = space.plan.for_search(space.folder(), space.seed, method="subset_elimination", keep=keep)
        model = stages.new_model(plan, space.seed)
        optimizer = plan.optimizer(model)
        subset_model = NearSubsetModel(model)
        stream = plan.stream(plan.splits.early, model.reads.names, train=True, seed=space.seed)
        config = plan.training(plan.steps.pretrain, space.seed, keep_best=False)
        torch.manual_seed(space.seed)
        fit(subset_model, stream, optimizer, config=replace(config, quiet=True))
        networks = subset_networks(space, plan, subset_model.remove(), optimizer, NEAR)
        names, losses = list(networks.names), networks.losses
        order = eliminate(losses, len(names), [list(range(len(names)))])
        seconds = time.process_time() - start
        write("subset elimination near K", keep, [names[part] for part in order[-keep:]], seconds)
        for record in done:
            if (record["variant"], record["keep"]) != (BASE, keep):
                continue
            kept = [names.index(name) for name in record["kept"]]
            for threshold in THRESHOLDS:
                better = better_set(losses, kept, order[-keep:], len(names), threshold)
                name = f"default or elimination, beyond {threshold:g} errors near K"
                write(name, keep, [names[part] for part in better], seconds + record["seconds"])
                chosen = set(better)
                for pair in exchange(losses, better, len(names), errors=threshold):
                    chosen ^= set(pair)
                name = f"default or elimination, exchanged beyond {threshold:g} errors near K"
                write(name, keep, [names[part] for part in chosen], seconds + record["seconds"])
                chosen = set(kept)
                for pair in exchange(losses, kept, len(names), errors=threshold):
                    chosen ^= set(pair)
                name = f"default, exchanged beyond {threshold:g} errors near K"
                write(name, keep, [names[part] for part in chosen], seconds + record["seconds"])


def run_all(options: argparse.Namespace) -> None:
    """Do the missing jobs, the most important variants first, until the time is over."""
    end = time.monotonic() + options.seconds
    records = read(options.out)
    variants = options.variants or list(VARIANTS)
    jobs = [
        (log, seed, variant)
        for variant in variants
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for log in (options.logs or LOGS)
    ]
    with tempfile.TemporaryDirectory() as work:
        pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
        pending: dict[Any, Any] = {}
        while jobs or pending:
            while jobs and len(pending) < options.jobs and time.monotonic() < end - options.margin:
                log, seed, variant = jobs.pop(0)
                done = [record for record in records if (record["log"], record["seed"]) == (log, seed)]
                wanted = {f"subset elimination{JUDGES[variant]}" if variant in JUDGES else variant}
                wanted = {
                    NEAR: {"subset elimination near K"},
                    REPEATS: {"votes of 4"},
                    SETTLED: {"default, settled by column within 0 errors"},
                }.get(variant, wanted)
                finished = [record for record in done if record["variant"] in wanted]
                parts = [part for part in VARIANTS[variant].parts if part in options.parts]
                if len(finished) >= len(parts) or (VARIANTS[variant].blocks and log in TABLE_LOGS):
                    continue
                job = (log, seed, variant, done, work, options.tiny, tuple(options.parts))
                pending[pool.submit(run_job, *job)] = (log, seed, variant)
            if not pending or time.monotonic() > end:
                break
            try:
                future = next(as_completed(pending, timeout=max(0.1, end - time.monotonic())))
            except TimeoutError:
                break
            log, seed, variant = pending.pop(future)
            try:
                found = future.result()
            except Exception as error:  # the other jobs go on
                print(f"{log} {seed} {variant}: {type(error).__name__}: {error}", flush=True)
                continue
            records += found
            with options.out.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
            text = ", ".join(f"{record['keep']}: {record['scores']['auc']:.4f}" for record in found[:3])
            spent = found[0]["seconds"] if found else 0.0
            print(f"{time.strftime('%H:%M:%S')} {log} {seed} {variant}: {text} ({spent:.0f} s)", flush=True)
        for process in list((pool._processes or {}).values()) if pending else []:
            process.terminate()
        pool.shutdown(wait=not pending, cancel_futures=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ---------------------------------------------------------------------------------------------- report


def report(records: list[dict[str, Any]], base: str, logs: Sequence[str]) -> dict[str, Any]:
    """Return, for every variant, the paired difference of AUC to the default, with the error over splits of logs."""
    cells = {(r["log"], r["seed"], r["keep"], r["variant"]): r for r in records}
    variants = list(dict.fromkeys(r["variant"] for r in records))
    result: dict[str, Any] = {}
    for variant in variants:
        splits: dict[tuple[str, int], list[float]] = {}
        losses: dict[tuple[str, int], list[float]] = {}
        for log, seed, keep, name in cells:
            other = cells.get((log, seed, keep, base))
            if name != variant or other is None or log not in logs:
                continue
            mine = cells[log, seed, keep, variant]
            splits.setdefault((log, seed), []).append(mine["scores"]["auc"] - other["scores"]["auc"])
            losses.setdefault((log, seed), []).append(other["scores"]["logloss"] - mine["scores"]["logloss"])
        by_log = {
            log: mean_and_error([statistics.mean(v) for (name, _), v in splits.items() if name == log])
            for log in dict.fromkeys(name for name, _ in splits)
        }
        if not splits:
            continue
        seconds = [r["seconds"] for r in records if r["variant"] == variant and r["log"] in logs]
        gains = [statistics.mean(values) for values in splits.values()]
        result[variant] = {
            "splits": len(splits),
            "auc": mean_and_error(gains),
            "signed_rank_p": round(float(wilcoxon(gains).pvalue), 4) if any(gains) else None,
            "logloss": mean_and_error([statistics.mean(values) for values in losses.values()]),
            "overlap": overlap(records, variant, logs),
            "seconds": round(statistics.mean(seconds), 1),
            "by_log": by_log,
        }
    return result


def overlap(records: list[dict[str, Any]], variant: str, logs: Sequence[str]) -> dict[str, float]:
    """Return the mean Jaccard index of the sets of two splits, by log; a simulated log has other fields each time."""
    result = {}
    for log in TABLE_LOGS:
        values = []
        rows = [r for r in records if r["log"] == log and r["variant"] == variant and log in logs]
        for number, first in enumerate(rows):
            for second in rows[number + 1 :]:
                if first["keep"] == second["keep"]:
                    a, b = set(first["kept"]), set(second["kept"])
                    values.append(len(a & b) / len(a | b))
        if values:
            result[log] = round(statistics.mean(values), 3)
    return result


def mean_and_error(values: Sequence[float]) -> list[float | None]:
    """Return the mean and its standard error; None for the error of one value."""
    error = round(statistics.stdev(values) / math.sqrt(len(values)), 5) if len(values) > 1 else None
    return [round(statistics.mean(values), 5), error]


def describe(value: Sequence[Any], digits: int = 4) -> str:
    error = "" if value[1] is None else f" ± {value[1]:.{digits}f}"
    return f"{value[0]:+.{digits}f}{error}"


def print_report(result: Mapping[str, Any]) -> None:
    for variant, row in result.items():
        gains = f"AUC {describe(row['auc'])}, logloss gain {describe(row['logloss'], 5)}"
        gains += f", p {row['signed_rank_p']}"
        print(f"{variant}: {gains}, {row['splits']} splits, {row['seconds']:.0f} s, overlap {row['overlap']}")
        print("    " + ", ".join(f"{log} {describe(value)}" for log, value in row["by_log"].items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON lines file of the runs")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    parser.add_argument("--margin", type=float, default=0.0, help="seconds before the end at which no job is started")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of splits of each log")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first split")
    parser.add_argument("--logs", nargs="*")
    parser.add_argument("--variants", nargs="*")
    parser.add_argument("--parts", nargs="*", type=int, default=[8, 4, 2], help="K, as parts of the fields")
    parser.add_argument("--tiny", action="store_true", help="100 steps, to try the script")
    parser.add_argument("--report", type=Path, help="print the differences of these runs to the default")
    parser.add_argument("--base", default=BASE)
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--command", default="python benchmarks/search_variants.py --jobs 16", help="stored in it")
    options = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"):
        os.environ[name] = "1"  # of the processes
    if options.report is None:
        run_all(options)
        options.report = options.out
    result = report(read(options.report), options.base, options.logs or list(LOGS))
    print_report(result)
    if options.json is not None:
        options.json.write_text(json.dumps({"command": options.command, "variants": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
