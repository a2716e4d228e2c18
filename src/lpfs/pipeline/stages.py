"""The stages of a run, each in a folder of its own: what is done already is read back, not done again."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs.data.batches.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.module import NAME as GATES
from lpfs.gates.prune import Pruned, prune
from lpfs.methods.registry import entry_of, options_of
from lpfs.methods.search import search
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.models.registry import make_model
from lpfs.pipeline.splits import Periods
from lpfs.protocol.recipe import Recipe
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Teller
from lpfs.schema import Schema, Selection
from lpfs.tables.engines.choice import captures
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics, evaluate
from lpfs.train.loop import fit
from lpfs.train.distributed.group import current
from lpfs.train.step import make_optimizer

SCORED = 4096  # rows evaluated at a time
EVALUATIONS = 20  # of a training that goes through its rows several times, and of one that is watched


@dataclass
class Work:
    """One run: its data, its settings, and what it has done so far."""

    settings: Settings
    schema: Schema
    parts: Periods
    recipe: Recipe
    wish: Wish
    device: torch.device
    out: Path
    resume: bool
    tell: Teller
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str, text: str) -> Iterator[None]:
        """Say what begins and note how long it takes."""
        self.tell.stage(text)
        begin = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

    def stream(self, part: Dataset, fields: Sequence[str], *, train: bool, seed: int = 0) -> Stream:
        """Return batches of some rows: those to train on are shuffled where they are gone through again."""
        size = self.recipe.batch_size if train else SCORED
        shuffle = train and self.recipe.shuffle
        return part.stream(size, shuffle=shuffle, seed=seed, fields=fields, device=self.device)

    def training(
        self, steps: int, seed: int, *, choose: bool, watch: bool = False, calm: bool = False, graph: bool = False
    ) -> Training:
        """Return the settings of the loop.

        ``choose`` keeps the best state where rows are gone through several times; ``watch`` keeps it in any case,
        and the state that training began with counts too. ``calm`` leaves the optimizer as it is in the end, not
        as it was at the best state: Adagrad takes smaller steps then, and a search learns less by heart.
        """
        looks = watch or (choose and self.recipe.shuffle)
        return Training(
            optimizer=self.settings.optimizer,  # type: ignore[arg-type]
            steps=steps,
            seed=seed,
            precision=self.settings.precision,  # type: ignore[arg-type]
            keep="best" if looks else "last",
            evaluate_every=max(1, steps // EVALUATIONS) if looks else None,
            evaluate_first=watch,
            keep_optimizer="last" if calm else "best",
            checkpoint_every=max(1, min(steps, max(500, steps // 10))),
            graph=graph,
            check_every=1 if self.device.type == "cpu" else 50,
            tensorboard=self.settings.tensorboard,
            mlflow=self.settings.mlflow,
            quiet=self.tell.quiet,
        )

    @property
    def captured(self) -> bool:
        """Whether steps are captured as CUDA graphs: on a GPU in one process, if the settings say nothing."""
        if self.settings.graph is not None:
            return self.settings.graph
        return self.device.type == "cuda" and not current().several and captures(self.device)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a fresh optimizer."""
        chosen = Training(optimizer=self.settings.optimizer, lr=self.settings.lr)  # type: ignore[arg-type]
        return make_optimizer(chosen, model.parameters())


Trained = tuple[Model, torch.optim.Optimizer]


class Watch(Callback):
    """Writes down (step, validation AUC) of every evaluation; ``shrunk``: what is left of the weights at first."""

    shrunk = 1.0

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    @property
    def best(self) -> tuple[int, float]:
        """The first of the best evaluations."""
        return max(self.seen, key=lambda each: each[1])

    def on_evaluate(self, state: State) -> None:
        """Write it down."""
        if state.metrics is not None and state.metrics.auc is not None:
            self.seen.append((state.step, state.metrics.auc))

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {"seen": [list(each) for each in self.seen]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.seen = [(each[0], each[1]) for each in values["seen"]]


def fresh(work: Work, seed: int) -> Model:
    """Return a model of all fields that knows nothing yet."""
    torch.manual_seed(seed)
    return make_model(work.settings.backbone, work.schema, **work.settings.model_options).to(work.device)


def train(
    work: Work,
    model: Model,
    optimizer: torch.optim.Optimizer,
    part: Dataset,
    steps: int,
    name: str,
    seed: int,
    watch: Watch | None = None,
    calm: bool = False,
) -> Trained:
    """Train a model on some rows; its best state is kept if it is watched or sees rows several times."""
    fields = model.reads.names
    looks = work.recipe.shuffle or watch is not None
    fit(
        model,
        work.stream(part, fields, train=True, seed=seed),
        optimizer,
        valid=work.stream(work.parts.valid, fields, train=False) if looks else None,
        folder=work.out / name,
        resume=work.resume,
        callbacks=[] if watch is None else [watch],
        config=work.training(steps, seed, choose=True, watch=watch is not None, calm=calm, graph=work.captured),
    )
    return model, optimizer


def pretrain(work: Work, seed: int) -> Trained:
    """Train all fields on the early rows."""
    model = fresh(work, seed)
    name = "pretrain" if seed == work.settings.seed else f"pretrain-{seed}"
    return train(work, model, work.optimizer(model), work.parts.early, work.recipe.pretrain, name, seed, calm=True)


def all_fields(work: Work, pretrained: Trained) -> Model:
    """Return the model of all fields, trained on the early and the search rows as the kept ones will be.

    A log that is gone through once in time order is just gone through further.
    """
    seed = work.settings.seed
    if not work.recipe.shuffle:
        model, optimizer = copy.deepcopy(pretrained)
        steps = -(-work.parts.search.rows // work.recipe.batch_size)
        return train(work, model, optimizer, work.parts.search, steps, "all_fields", seed)[0]
    model = fresh(work, seed)
    return train(work, model, work.optimizer(model), work.parts.train, work.recipe.train, "all_fields", seed)[0]


def find(work: Work, pretrained: Trained, seed: int) -> tuple[Model, torch.optim.Optimizer, Selection]:
    """Search; return the model with its gates on, its optimizer and the selection."""
    model, optimizer = pretrained
    fields = model.reads.names
    wish = work.wish
    stream, held = search_streams(work, fields, seed)
    graph = work.captured and can_be_captured(work.settings.method, work.settings.options)
    with learning(optimizer, work.recipe.pace):
        selection = search(
            model,
            stream,
            work.settings.method,
            keep=wish.keep,
            penalty=wish.penalty,
            budget=wish.budget,
            max_auc_loss=wish.max_auc_loss,
            must_keep=wish.must_keep,
            costs=wish.costs,
            valid=work.stream(work.parts.valid, fields, train=False),
            held=held,
            optimizer=optimizer,
            steps=work.recipe.search,
            seed=seed,
            folder=work.out / ("search" if seed == work.settings.seed else f"search-{seed}"),
            resume=work.resume,
            config=replace(work.training(work.recipe.search, seed, choose=False, graph=graph), lr=None),
            **work.settings.options,
        )
    if not hasattr(model, GATES):
        close(model, selection)
    return model, optimizer, selection


def can_be_captured(method: str, options: Mapping[str, Any]) -> bool:
    """Return whether a GPU can replay the steps of a search; noise on the gates is drawn by the host."""
    return entry_of(method).captured and not options_of(method, options).function.noise


def search_streams(work: Work, fields: Sequence[str], seed: int) -> tuple[Stream, Stream | None]:
    """Return what the weights learn from in a search, and what gates and masks learn from where that is apart."""
    parts, how = work.parts, work.recipe
    if not how.apart:
        return work.stream(parts.search, fields, train=True, seed=seed), None
    shuffled: dict[str, Any] = {"shuffle": True, "fields": fields, "device": work.device}
    if entry_of(work.settings.method).together:
        return parts.train.stream(how.batch_size, seed=seed, **shuffled), None
    weights = parts.early.stream(how.batch_size, seed=seed, **shuffled)
    return weights, parts.search.stream(how.held, seed=seed + 1, **shuffled)


@contextmanager
def learning(optimizer: torch.optim.Optimizer, pace: float) -> Iterator[None]:
    """Within this block the optimizer learns faster by a factor."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * pace
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def close(model: Model, found: Selection) -> None:
    """Put gates on the model of a method that only ranks: closed ones on what it drops, open ones on the rest."""
    gates = attach(model, steps=1)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([float(name in found.kept) for name in gates.names]))


def shrink(
    work: Work, model: Model, optimizer: torch.optim.Optimizer, found: Selection
) -> tuple[Pruned, Pruned, Selection]:
    """Put the gates into the weights and remove what is dropped: by zeros (bit-equal), by cutting (rounding)."""
    batch = proof(work, model)
    selection = absorb(model, optimizer, batch=batch)
    selection = replace(selection, history=found.history, made={**selection.made, **found.made})
    selection = selection.in_order(work.schema.names)
    zeros = prune(model, selection, batch=batch)
    cut = prune(model, selection, batch=batch, optimizer=optimizer, cut=True)
    return zeros, cut, selection


def proof(work: Work, model: Model) -> Batch:
    """Return the rows that equality is proved on: the first of the held-out ones."""
    return next(iter(work.stream(work.parts.valid, model.reads.names, train=False)))


def retrain(work: Work, pruned: Model) -> Model:
    """Train the kept fields from scratch, under the protocol of all fields."""
    model, seed = anew(work, pruned), work.settings.seed
    return train(work, model, work.optimizer(model), work.parts.train, work.recipe.train, "retrained", seed)[0]


def anew(work: Work, model: Model) -> Model:
    """Return a model of the same fields and shape that knows nothing."""
    torch.manual_seed(work.settings.seed)
    return type(model)(model.schema, **model.config).to(work.device)


def judge(work: Work, model: Model, part: Dataset) -> Metrics:
    """Evaluate a model on some rows."""
    return evaluate(model, work.stream(part, model.reads.names, train=False))


def serving_speed(work: Work, models: dict[str, Model], repeats: int = 5) -> dict[str, float]:
    """Return rows a second of each model, in turns on the same rows, the median of several."""
    found: dict[str, list[float]] = {name: [] for name in models}
    batches = {
        name: list(_few(work.stream(work.parts.valid, model.reads.names, train=False)))
        for name, model in models.items()
    }
    for turn in range(repeats + 1):
        for name, model in models.items():
            model.eval()
            begin = time.perf_counter()
            with torch.no_grad():
                for batch in batches[name]:
                    model(batch)
                if work.device.type == "cuda":
                    torch.cuda.synchronize()
            if turn:  # the first turn warms up
                found[name].append(sum(map(len, batches[name])) / (time.perf_counter() - begin))
    return {name: sorted(each)[len(each) // 2] for name, each in found.items()}


def _few(stream: Stream, most: int = 4) -> Iterator[Batch]:
    for number, batch in enumerate(stream):
        if number == most:
            return
        yield batch


def table_bytes(model: nn.Module) -> int:
    """Return the bytes of the tables of a model."""
    from lpfs.tables.table import Table

    return sum(
        each.weight.numel() * each.weight.element_size() for each in model.modules() if isinstance(each, Table)
    )


def parameters(model: nn.Module) -> int:
    """Return how many numbers a model holds."""
    return sum(each.numel() for each in model.parameters())


def brief(metrics: Metrics) -> dict[str, Any]:
    """Return AUC and logloss of the main task, and of the others by name."""
    tasks = {name: {"auc": each.auc, "logloss": each.logloss} for name, each in metrics.tasks.items()}
    first = next(iter(tasks.values()))
    return first if len(tasks) == 1 else {**first, "tasks": tasks}
