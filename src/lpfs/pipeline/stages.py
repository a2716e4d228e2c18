"""The stages of a run, each in a folder of its own: what is done already is read back, not done again.

Hot start: go on from the pruned model instead of training the kept fields from scratch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.module import NAME as GATES
from lpfs.gates.prune import Pruned, prune
from lpfs.methods.registry import entry_of, options_of
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.data import (
    check_dataset_fits,
)
from lpfs.pipeline.plan import (
    RunPlan,
)
from lpfs.schema import Selection
from lpfs.serialization import find_model_dir, load
from lpfs.train.callbacks import Callback, State
from lpfs.train.evaluate import Metrics, evaluate
from lpfs.train.fit import fit

Trained = tuple[Model, torch.optim.Optimizer]


class AucHistory(Callback):
    """Writes down (step, validation AUC) of every evaluation; ``shrunk``: what is left of the weights at first."""

    shrink_factor = 1.0

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    @property
    def best(self) -> tuple[int, float]:
        """The first of the best evaluations."""
        return max(self.points, key=lambda each: each[1])

    def on_evaluate(self, state: State) -> None:
        """Write it down."""
        if state.metrics is not None and state.metrics.auc is not None:
            self.points.append((state.step, state.metrics.auc))

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a kill."""
        return {"seen": [list(each) for each in self.points]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.points = [(each[0], each[1]) for each in values["seen"]]


def new_model(work: RunPlan, seed: int) -> Model:
    """Return a model of all fields that knows nothing yet."""
    torch.manual_seed(seed)
    return make_model(work.settings.backbone, work.schema, **work.settings.model_options).to(work.device)


def train(
    work: RunPlan,
    model: Model,
    optimizer: torch.optim.Optimizer,
    part: Dataset,
    steps: int,
    name: str,
    seed: int,
    watch: AucHistory | None = None,
    calm: bool = False,
) -> Trained:
    """Train a model on some rows; its best state is kept if it is watched or sees rows several times."""
    fields = model.reads.names
    looks = work.steps.shuffle or watch is not None
    fit(
        model,
        work.stream(part, fields, train=True, seed=seed),
        optimizer,
        valid=work.stream(work.splits.valid, fields, train=False) if looks else None,
        folder=work.run_dir / name,
        resume=work.resume,
        callbacks=[] if watch is None else [watch],
        config=work.training(
            steps, seed, choose=True, watch=watch is not None, calm=calm, graph=work.use_cuda_graph
        ),
    )
    return model, optimizer


def pretrain(work: RunPlan, seed: int) -> Trained:
    """Train all fields on the early rows."""
    model = new_model(work, seed)
    name = "pretrain" if seed == work.settings.seed else f"pretrain-{seed}"
    return train(work, model, work.optimizer(model), work.splits.early, work.steps.pretrain, name, seed, calm=True)


def all_fields(work: RunPlan, pretrained: Trained) -> Model:
    """Return the model of all fields, trained on the early and the search rows as the kept ones will be.

    A log that is gone through once in time order is just gone through further.
    """
    seed = work.settings.seed
    if not work.steps.shuffle:
        model, optimizer = copy.deepcopy(pretrained)
        steps = -(-work.splits.search.rows // work.steps.batch_size)
        return train(work, model, optimizer, work.splits.search, steps, "all_fields", seed)[0]
    model = new_model(work, seed)
    return train(work, model, work.optimizer(model), work.splits.train, work.steps.train, "all_fields", seed)[0]


def search_fields(work: RunPlan, pretrained: Trained, seed: int) -> tuple[Model, torch.optim.Optimizer, Selection]:
    """Search; return the model with its gates on, its optimizer and the selection."""
    model, optimizer = pretrained
    fields = model.reads.names
    wish = work.target
    stream, held = search_streams(work, fields, seed)
    graph = work.use_cuda_graph and method_supports_cuda_graph(work.settings.method, work.settings.options)
    with scaled_learning_rate(optimizer, work.steps.lr_factor):
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
            valid=work.stream(work.splits.valid, fields, train=False),
            held=held,
            optimizer=optimizer,
            steps=work.steps.search,
            seed=seed,
            folder=work.run_dir / ("search" if seed == work.settings.seed else f"search-{seed}"),
            resume=work.resume,
            config=replace(work.training(work.steps.search, seed, choose=False, graph=graph), lr=None),
            **work.settings.options,
        )
    if not hasattr(model, GATES):
        set_gates_from_selection(model, selection)
    return model, optimizer, selection


def method_supports_cuda_graph(method: str, options: Mapping[str, Any]) -> bool:
    """Return whether a GPU can replay the steps of a search; noise on the gates is drawn by the host."""
    return entry_of(method).captured and not options_of(method, options).function.noise


def search_streams(work: RunPlan, fields: Sequence[str], seed: int) -> tuple[Stream, Stream | None]:
    """Return what the weights learn from in a search, and what gates and masks learn from where that is apart."""
    parts, how = work.splits, work.steps
    if not how.separate_gate_rows:
        return work.stream(parts.search, fields, train=True, seed=seed), None
    shuffled: dict[str, Any] = {"shuffle": True, "fields": fields, "device": work.device}
    if entry_of(work.settings.method).together:
        return parts.train.stream(how.batch_size, seed=seed, **shuffled), None
    weights = parts.early.stream(how.batch_size, seed=seed, **shuffled)
    return weights, parts.search.stream(how.gate_batch_size, seed=seed + 1, **shuffled)


@contextmanager
def scaled_learning_rate(optimizer: torch.optim.Optimizer, pace: float) -> Iterator[None]:
    """Within this block the optimizer learns faster by a factor."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * pace
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def set_gates_from_selection(model: Model, found: Selection) -> None:
    """Put gates on the model of a method that only ranks: closed ones on what it drops, open ones on the rest."""
    gates = attach(model, steps=1)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([float(name in found.kept) for name in gates.names]))


def absorb_and_prune(
    work: RunPlan, model: Model, optimizer: torch.optim.Optimizer, found: Selection
) -> tuple[Pruned, Pruned, Selection]:
    """Put the gates into the weights and remove what is dropped: by zeros (bit-equal), by cutting (rounding)."""
    batch = verification_batch(work, model)
    selection = absorb(model, optimizer, batch=batch)
    selection = replace(selection, history=found.history, made={**selection.made, **found.made})
    selection = selection.in_order(work.schema.names)
    zeros = prune(model, selection, batch=batch)
    cut = prune(model, selection, batch=batch, optimizer=optimizer, cut=True)
    return zeros, cut, selection


def verification_batch(work: RunPlan, model: Model) -> Batch:
    """Return the rows that equality is proved on: the first of the held-out ones."""
    return next(iter(work.stream(work.splits.valid, model.reads.names, train=False)))


def retrain(work: RunPlan, pruned: Model) -> Model:
    """Train the kept fields from scratch, under the protocol of all fields."""
    model, seed = reinitialized(work, pruned), work.settings.seed
    return train(work, model, work.optimizer(model), work.splits.train, work.steps.train, "retrained", seed)[0]


def reinitialized(work: RunPlan, model: Model) -> Model:
    """Return a model of the same fields and shape that knows nothing."""
    torch.manual_seed(work.settings.seed)
    return type(model)(model.schema, **model.config).to(work.device)


def evaluate_split(work: RunPlan, model: Model, part: Dataset) -> Metrics:
    """Evaluate a model on some rows."""
    return evaluate(model, work.stream(part, model.reads.names, train=False))


def serving_speed(work: RunPlan, models: dict[str, Model], repeats: int = 5) -> dict[str, float]:
    """Return rows a second of each model, in turns on the same rows, the median of several."""
    found: dict[str, list[float]] = {name: [] for name in models}
    batches = {
        name: list(_few(work.stream(work.splits.valid, model.reads.names, train=False)))
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
    from lpfs.embeddings.table import Table

    return sum(
        each.weight.numel() * each.weight.element_size() for each in model.modules() if isinstance(each, Table)
    )


def parameters(model: nn.Module) -> int:
    """Return how many numbers a model holds."""
    return sum(each.numel() for each in model.parameters())


def metrics_to_dict(metrics: Metrics) -> dict[str, Any]:
    """Return AUC and logloss of the main task, and of the others by name."""
    tasks = {name: {"auc": each.auc, "logloss": each.logloss} for name, each in metrics.tasks.items()}
    first = next(iter(tasks.values()))
    return first if len(tasks) == 1 else {**first, "tasks": tasks}


MEMORIZED_AUC_GAP = 0.1  # AUC by which a model is better on the rows it searched on than on rows that it never saw
SHRINK_FACTOR = 0.3  # what is left of the weights of such a model; the rest is drawn anew …
LR_FACTOR = 2.0  # … and learns at so many times the rate: it has a quarter of the steps
CHECK_ROWS = 50_000  # rows of the search period to judge that on


def hot_start(work: RunPlan, pruned: Pruned) -> tuple[Model, AucHistory]:
    """Go on with a copy of the pruned model for a quarter of the steps of a training from scratch; watch it.

    Its optimizer goes on too. The best state on the validation rows is left, the one it began with among them, so
    that it is never worse there than the pruned model. Rows that nothing orders are all trained on, else those of
    the search period, the latest.

    A search that goes through few rows again and again leaves a model that knows them by heart, and training
    further does not make it forget. Then its weights are shrunk towards a fresh start, and all training rows are
    trained on.
    """
    model, optimizer = copy.deepcopy((pruned.model, pruned.optimizer))
    assert isinstance(model, Model)
    assert isinstance(optimizer, torch.optim.Optimizer)
    watch = AucHistory()
    seen, held = training_auc(work, model), evaluate_split(work, model, work.splits.valid).auc
    by_heart = work.steps.shuffle and seen is not None and held is not None and seen - held > MEMORIZED_AUC_GAP
    if by_heart:
        work.console.message(
            f"the search knows its rows by heart: AUC {seen:.3f} there, {held:.3f} on held-out ones; "
            f"its weights are shrunk to {SHRINK_FACTOR:g} before they go on"
        )
        model, optimizer = shrink_and_perturb(work, model)
    part = work.splits.train if by_heart or work.splits.shuffled else work.splits.search
    train(work, model, optimizer, part, work.steps.hot_start, "hot_start", work.settings.seed, watch)
    if by_heart and held is not None:
        watch.shrink_factor = SHRINK_FACTOR
        watch.points[0] = (0, held)
        if watch.best[0] == 0:
            model = copy.deepcopy(pruned.model)
            assert isinstance(model, Model)
    return model, watch


def training_auc(work: RunPlan, model: Model) -> float | None:
    """Return the AUC on rows that the search was trained on."""
    rows = work.splits.search.rows
    return evaluate_split(work, model, work.splits.search.part(max(0, rows - CHECK_ROWS), rows)).auc


def shrink_and_perturb(work: RunPlan, model: Model) -> Trained:
    r"""Draw the weights of a model back to a fresh start, in place; return it and a new optimizer, a faster one.

    .. math:: w \leftarrow s\,w + (1 - s)\,w_0

    Ash and Adams, On Warm-Starting Neural Network Training, 2020.
    """
    fresh = reinitialized(work, model)
    with torch.no_grad():
        for mine, new in zip(model.parameters(), fresh.parameters(), strict=True):
            mine.lerp_(new, 1 - SHRINK_FACTOR)
    optimizer = work.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= LR_FACTOR
    return model, optimizer


def initial_model(work: RunPlan, seed: int) -> stages.Trained:
    """Return the model that a search starts from."""
    return stages.pretrain(work, seed) if work.settings.checkpoint is None else load_given_model(work)


def load_given_model(work: RunPlan) -> stages.Trained:
    """Return the model to start from instead of pretraining."""
    assert work.settings.checkpoint is not None
    place = find_model_dir(work.settings.checkpoint)
    model = load(place).to(work.device)
    check_dataset_fits(place, model, work.splits.train)
    dropped = [name for name in model.reads.names if name not in work.schema.names]
    if dropped:
        raise InputError(f"the model in {place} reads {dropped[0]!r}, which must be dropped: decide")
    return model, work.optimizer(model)


def as_model(model: Any) -> Model:
    """Return a model as what it is."""
    assert isinstance(model, Model)
    return model
