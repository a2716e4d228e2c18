"""The stages of a run: pretrain, search, absorb and prune, retrain, hot start, evaluate.

Each training stage has a directory in the run directory, from which a finished or interrupted stage is resumed.
"""

from __future__ import annotations

import copy
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from lpfs._fileio import read_json, write_json_atomic
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.stream import Stream
from lpfs.embeddings.table import Table
from lpfs.errors import StateError
from lpfs.gates.absorb import absorb
from lpfs.gates.attach import attach
from lpfs.gates.module import ATTRIBUTE as GATES_ATTRIBUTE
from lpfs.gates.prune import Pruned, prune
from lpfs.methods import gate_fleet
from lpfs.methods.base import RowFold, SearchTask
from lpfs.methods.search import run_search
from lpfs.methods.subset_model import ResidentStream
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.pipeline.plan import RunPlan
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import map_weights
from lpfs.train.config import FinalCheckpoint
from lpfs.train.distributed.group import current_group
from lpfs.train.evaluate import Metrics, Predictions, evaluate, predictions, task_names
from lpfs.train.fit import CHECKPOINTS, Trained as FitResult, fit, save_result
from lpfs.train.fit_fleet import fit_fleet
from lpfs.train.intervals import PairedDifference, auc_difference, auc_interval, logloss_difference
from lpfs.train.metrics import scores

MEMORIZED_AUC_GAP = 0.1  # AUC of training rows minus that of validation rows, above which they count as memorized
SHRINK_FACTOR = 0.3  # on the weights of such a model; the rest is reinitialized
LR_FACTOR = 2.0  # on the learning rate after that, because a hot start has a quarter of the steps
CHECK_ROWS = 50_000  # last training rows, which are evaluated for it
MAX_FOLD_ROW_BYTES = 256 << 20  # of the rows of a cross-fitted search, which are in memory
MAX_FOLD_WEIGHT_BYTES = 1 << 30  # of its networks and their optimizers
SPEED_BATCHES = 4  # batches of a measurement of the serving speed

Trained = tuple[Model, torch.optim.Optimizer]


class AucHistory(Callback):
    """Records (step, validation AUC) of every evaluation; ``shrink_factor`` was applied to the initial weights."""

    shrink_factor = 1.0

    def __init__(self) -> None:
        self.points: list[tuple[int, float]] = []

    @property
    def best(self) -> tuple[int, float]:
        """The first of the best evaluations."""
        return max(self.points, key=lambda point: point[1])

    def on_evaluate(self, state: State) -> None:
        if state.metrics is not None and state.metrics.auc is not None:
            self.points.append((state.step, state.metrics.auc))

    def state_dict(self) -> dict[str, Any]:
        return {"points": [list(point) for point in self.points]}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self.points = [(step, auc) for step, auc in values["points"]]


def new_model(plan: RunPlan, seed: int) -> Model:
    """Return an untrained model of all fields."""
    torch.manual_seed(seed)
    return make_model(plan.settings.backbone, plan.schema, **plan.settings.model_options).to(plan.device)


def reinitialized(plan: RunPlan, model: Model) -> Model:
    """Return an untrained model of the same fields and sizes."""
    torch.manual_seed(plan.settings.seed)
    return model.untrained().to(plan.device)


def train(
    plan: RunPlan,
    model: Model,
    optimizer: torch.optim.Optimizer,
    rows: Dataset,
    steps: int,
    name: str,
    seed: int,
    history: AucHistory | None = None,
    keep_last_optimizer: bool = False,
    final_checkpoint: FinalCheckpoint = "model",
    final_if_due: bool = False,
) -> Trained:
    """Train a model in place; ``name`` is the directory of the stage in the run directory.

    The state with the best validation AUC is kept if rows are read more than once, or if a history records the AUC.
    A stage whose optimizer is used later needs ``final_checkpoint="result"``. A stage from which nothing is read later
    can leave out the last checkpoint with ``final_if_due``; if the run is killed, the stage is repeated.
    """
    fields, record_auc = model.reads.names, history is not None
    config = plan.training(steps, seed, keep_best=True, record_auc=record_auc, keep_last_optimizer=keep_last_optimizer)
    fit(
        model,
        plan.stream(rows, fields, train=True, seed=seed),
        optimizer,
        valid=plan.stream(plan.splits.valid, fields, train=False) if plan.steps.shuffle or record_auc else None,
        folder=plan.run_dir / name,
        resume=plan.resume,
        callbacks=[] if history is None else [history],
        config=replace(config, graph=plan.use_cuda_graph, final_checkpoint=final_checkpoint, final_if_due=final_if_due),
    )
    return model, optimizer


def train_together(
    plan: RunPlan,
    trained: Sequence[Trained],
    rows: Dataset,
    steps: int,
    folder: Path,
    seeds: Sequence[int],
    keep_last_optimizer: bool = False,
    final_checkpoint: FinalCheckpoint = "model",
    final_if_due: bool = False,
    quiet: bool = False,
) -> list[FitResult]:
    """Train models in place as a fleet, each on the batches of its seed and as :func:`train` would, up to rounding.

    The arguments are those of :func:`train`.
    """
    used = {name for model, _ in trained for name in model.reads.names}
    fields = [name for name in plan.schema.names if name in used]
    stream_seeds = sorted(set(seeds)) if plan.steps.shuffle else [plan.settings.seed]
    config = plan.training(steps, plan.settings.seed, keep_best=True, keep_last_optimizer=keep_last_optimizer)
    return fit_fleet(
        [model for model, _ in trained],
        [plan.stream(rows, fields, train=True, seed=seed) for seed in stream_seeds],
        sources=[stream_seeds.index(seed) if plan.steps.shuffle else 0 for seed in seeds],
        optimizers=[optimizer for _, optimizer in trained],
        valid=plan.stream(plan.splits.valid, fields, train=False) if plan.steps.shuffle else None,
        folder=folder,
        resume=plan.resume,
        config=replace(
            config, graph=plan.use_cuda_graph, final_checkpoint=final_checkpoint, final_if_due=final_if_due, quiet=quiet
        ),
    )


def initial_model(plan: RunPlan, seed: int) -> Trained:
    """Return the model that a search starts from: a copy of the saved model, or a pretrained one."""
    if plan.saved_model is None:
        return pretrain(plan, seed)
    model = copy.deepcopy(plan.saved_model.model).to(plan.device)
    return model, plan.optimizer(model)


def pretrain(plan: RunPlan, seed: int) -> Trained:
    """Train all fields on the early rows."""
    model, name = new_model(plan, seed), stage_dir("pretrain", plan, seed)
    steps, rows, optimizer = plan.steps.pretrain, plan.splits.early, plan.optimizer(model)
    return train(plan, model, optimizer, rows, steps, name, seed, keep_last_optimizer=True, final_checkpoint="result")


def pretrain_together(plan: RunPlan, folders: Mapping[int, Path], work_dir: Path) -> list[int]:
    """Pretrain the models of several seeds as a fleet; :func:`pretrain` with ``resume`` then returns each of them.

    Return the seeds whose models were saved.

    Args:
        plan: the rows, steps and settings.
        folders: directory of the stage of each seed; seeds that have one are left out.
        work_dir: directory of the fleet; a killed one is resumed with the same seeds.
    """
    seeds_file, rows, steps = work_dir / "seeds.json", plan.splits.early, plan.steps.pretrain
    started = read_json(seeds_file, {"seeds": list[int]}, missing_ok=True)
    missing = [seed for seed, folder in folders.items() if not folder.exists()]
    seeds = missing if started is None else started["seeds"]
    if not set(seeds) <= set(folders):  # a killed fleet of other seeds
        shutil.rmtree(work_dir)
        seeds = missing
    if not set(seeds) & set(missing) or len(seeds) < 2:
        return []
    work_dir.mkdir(parents=True, exist_ok=True)
    write_json_atomic(seeds_file, {"seeds": seeds})
    models = [new_model(plan, seed) for seed in seeds]
    trained = [(model, plan.optimizer(model)) for model in models]
    plan = replace(plan, resume=True)
    results = train_together(
        plan, trained, rows, steps, work_dir, seeds, True, final_checkpoint="result", quiet=plan.console.quiet
    )
    for seed, (model, optimizer), result in zip(seeds, trained, results, strict=True):
        if seed in missing:
            fields = model.reads.names
            stream = plan.stream(rows, fields, train=True, seed=seed)
            valid = plan.stream(plan.splits.valid, fields, train=False) if plan.steps.shuffle else None
            config = plan.training(steps, seed, keep_best=True, keep_last_optimizer=True)
            save_result(model, optimizer, result, stream, valid, folders[seed], config)
    shutil.rmtree(work_dir, ignore_errors=True)
    return [seed for seed in seeds if seed in missing]


def all_fields(plan: RunPlan, pretrained: Trained) -> Model:
    """Return the model of all fields, trained on early and search rows as the kept fields will be.

    A log that is read once in time order continues from the pretrained model.
    """
    seed, rows, steps = plan.settings.seed, plan.splits.train, plan.steps.train
    if plan.steps.shuffle:
        model = new_model(plan, seed)
        optimizer = plan.optimizer(model)
    else:
        model, optimizer = copy.deepcopy(pretrained)
        rows = plan.splits.search
        steps = -(-rows.rows // plan.steps.batch_size)
    train(plan, model, optimizer, rows, steps, "all_fields", seed)
    release_weights(plan, model)
    return model


def release_weights(plan: RunPlan, full: Model) -> None:
    """Release the memory of the model of all fields, which is evaluated again after the search."""
    map_weights(full, plan.run_dir / "all_fields" / CHECKPOINTS)


def search_fields(plan: RunPlan, pretrained: Trained, seed: int) -> tuple[Model, torch.optim.Optimizer, Selection]:
    """Search for the fields to keep; return the model with its gates, its optimizer and the selection."""
    model, optimizer = pretrained
    task, lr_factor = search_task(plan, pretrained, seed)
    with scaled_learning_rate(optimizer, lr_factor):
        selection = run_search(plan.method, task)
    if not hasattr(model, GATES_ATTRIBUTE):
        set_gates_from_selection(model, selection)
    return model, optimizer, selection


def search_together(
    plans: Sequence[RunPlan], trained: Sequence[Trained], seeds: Sequence[int], folder: Path, *, quiet: bool
) -> list[Selection]:
    """Search with several plans and seeds as a fleet, each as :func:`search_fields` would; return the selections.

    The plans have the same rows and steps and, as their methods, those whose ``fleet`` is true. The models get factors
    from their gates. The fleet has its own directory.
    """
    tasks, shared = list[SearchTask](), dict[tuple[int, int], SearchTask]()
    with ExitStack() as stack:
        for plan, pair, seed in zip(plans, trained, seeds, strict=True):
            task, lr_factor = shared.get((seed, plan.method.judges)), plan.search_lr_factor
            if task is None:  # rows are read once per seed
                task, lr_factor = search_task(plan, pair, seed)
                shared[seed, plan.method.judges] = task
            model, optimizer = pair
            run_dir = plan.run_dir / stage_dir("search", plan, seed)
            tasks.append(
                replace(task, model=model, optimizer=optimizer, target=plan.target.for_model(model), folder=run_dir)
            )
            stack.enter_context(scaled_learning_rate(optimizer, lr_factor))
        graph = all(plan.use_cuda_graph and plan.method.cuda_graph for plan in plans)
        methods, settings = [plan.method for plan in plans], dict[str, Any](graph=graph, quiet=quiet)
        return gate_fleet.search_together(methods, tasks, folder, resume=plans[0].resume, **settings)


def search_task(plan: RunPlan, pretrained: Trained, seed: int) -> tuple[SearchTask, float]:
    """Return the search of a plan, and the factor on the learning rate during it."""
    model, optimizer = pretrained
    fields, method = model.reads.names, plan.method
    early = plan.stream(plan.splits.early, fields, train=True, seed=seed) if method.pretrains else None
    pretrain_steps = plan.steps.pretrain
    if method.single_pass:
        plan = replace(plan, steps=plan.steps.single_pass(plan.splits.search.rows))
    stream, holdout = search_streams(plan, fields, seed)
    folds = search_folds(plan, model, seed, method.folds)
    judges = search_folds(plan, model, seed, 0 if current_group().is_distributed else method.judges)
    if folds:
        stream, holdout = plan.stream(plan.splits.train, fields, train=True, seed=seed), None
    training, folder = plan.training(plan.steps.search, seed, keep_best=False), plan.judges_dir
    task = SearchTask(
        model,
        optimizer,
        stream,
        valid=plan.stream(plan.splits.valid, fields, train=False),
        target=plan.target.for_model(model),
        steps=plan.steps.search,
        seed=seed,
        folder=plan.run_dir / stage_dir("search", plan, seed),
        resume=plan.resume,
        training=replace(training, graph=plan.use_cuda_graph and method.cuda_graph),
        holdout=holdout,
        early=early,
        early_steps=pretrain_steps,
        folds=folds,
        judges=judges,
        judges_folder=None if folder is None else folder / f"judges-{len(judges)}-{plan.steps.search}",
    )
    return task, plan.search_lr_factor


def stage_dir(name: str, plan: RunPlan, seed: int) -> str:
    """Return the directory of a stage in the run directory."""
    return name if seed == plan.settings.seed else f"{name}-{seed}"


def search_streams(plan: RunPlan, fields: Sequence[str], seed: int) -> tuple[Stream, Stream | None]:
    """Return the rows that the weights are trained on, and separate rows of the gates or masks, if any."""
    splits, steps = plan.splits, plan.steps
    if not steps.separate_gate_rows:
        return plan.stream(splits.search, fields, train=True, seed=seed), None
    shuffled: dict[str, Any] = {"shuffle": True, "fields": fields, "device": plan.device}
    if plan.method.uses_all_rows:
        return splits.train.stream(steps.batch_size, seed=seed, **shuffled), None
    max_rows = steps.search * steps.batch_size
    weight_rows = splits.early.stream(steps.batch_size, seed=seed, max_rows=max_rows, **shuffled)
    return weight_rows, splits.search.stream(steps.gate_batch_size, seed=seed + 1, **shuffled)


def search_folds(plan: RunPlan, model: Model, seed: int, count: int) -> list[RowFold]:
    """Return the rows of ``count`` cross-fitted networks; none if every row is read once.

    Every search row is in one fold, at random, so that the ids of a day are in all of them. If rows or networks need
    too much memory, there are no folds, and gates have rows of their own.
    """
    splits, steps = plan.splits, plan.steps
    if not steps.separate_gate_rows or count == 0:
        return []
    reader = plan.dataset.reader(plan.dataset.schema.subset(model.reads.names))
    weight_bytes = 2 * sum(parameter.nbytes for parameter in model.parameters())  # with the state of the optimizer
    if splits.train.rows * reader.row_bytes > MAX_FOLD_ROW_BYTES or count * weight_bytes > MAX_FOLD_WEIGHT_BYTES:
        return []
    rows = reader.read([splits.train.span])
    order = np.random.default_rng([seed, len(rows)]).permutation(splits.search.rows)
    fold_of = np.full(len(rows), -1)
    fold_of[len(rows) - len(order) + order] = np.arange(len(order)) % count
    gate_batch_size = -(-steps.gate_batch_size // count)
    folds = []
    for fold in range(count):
        others, held = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        stream = ResidentStream(rows, steps.batch_size, seed + 2 * fold, plan.device, others)
        folds.append(RowFold(stream, ResidentStream(rows, gate_batch_size, seed + 2 * fold + 1, plan.device, held)))
    return folds


@contextmanager
def scaled_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimizer while the block runs."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def set_gates_from_selection(model: Model, selection: Selection) -> None:
    """Attach gates for a method that only ranks fields: 1 for kept fields, 0 for dropped ones."""
    gates = attach(model, steps=1)
    with torch.no_grad():
        gates.x.copy_(torch.tensor([float(name in selection.kept) for name in gates.names]))


def absorb_gates(plan: RunPlan, model: Model, optimizer: torch.optim.Optimizer, found: Selection) -> Selection:
    """Fold the gates into the weights, in place; return the selection with the history of its search."""
    selection = absorb(model, optimizer, batch=verification_batch(plan, model))
    selection = replace(selection, history=found.history, made={**selection.made, **found.made})
    return selection.in_order(plan.schema.names)


def absorb_and_prune(
    plan: RunPlan, model: Model, optimizer: torch.optim.Optimizer, found: Selection, *, keep_zeros: bool = True
) -> tuple[Pruned, Pruned, Selection]:
    """Fold the gates into the weights and remove the dropped fields.

    Return the model with zeros in place of the dropped fields (bit-equal), the model without their columns (equal
    up to rounding), and the selection. The first is needed for its certificate; without ``keep_zeros`` its tables are
    released.
    """
    selection = absorb_gates(plan, model, optimizer, found)
    plan.free_memory()  # the copy on which absorb was verified
    batch = verification_batch(plan, model)
    zeros = prune(model, selection, batch=batch)
    if not keep_zeros:
        zeros = replace(zeros, model=nn.Identity())
        plan.free_memory()
    cut = prune(model, selection, batch=batch, optimizer=optimizer, cut=True)
    return zeros, cut, selection


def verification_batch(plan: RunPlan, model: Model) -> Batch:
    """Return the rows on which logits are compared: the first validation batch."""
    return next(iter(plan.stream(plan.splits.valid, model.reads.names, train=False)))


def pruned_model(pruned: Pruned) -> Model:
    """Return the model of ``prune``, which is one of ``lpfs.models`` if its input was."""
    if not isinstance(pruned.model, Model):
        raise StateError(f"the pruned model is a {type(pruned.model).__name__}, not one of lpfs.models")
    return pruned.model


def retrain(plan: RunPlan, pruned: Model) -> Model:
    """Train the kept fields from scratch, on the same rows and for as many steps as all fields."""
    model, seed, rows = reinitialized(plan, pruned), plan.settings.seed, plan.splits.train
    optimizer, is_large = plan.optimizer(model), plan.has_large_tables
    return train(plan, model, optimizer, rows, plan.steps.train, "retrained", seed, final_if_due=is_large)[0]


def hot_start(plan: RunPlan, pruned: Pruned) -> tuple[Model, AucHistory]:
    """Train a copy of the pruned model further, for a quarter of the steps of a training from scratch.

    The optimizer continues with its state. The best state on the validation rows is kept, including the initial
    one, so the result is never worse there than the pruned model. Rows that were split at random are all trained
    on, otherwise those of the search period, which are the latest.

    A search that reads few rows many times memorizes them, and further training does not undo that. The weights
    are then shrunk towards a new initialization, and all training rows are trained on.

    The state of the optimizer, as large as the model, is not copied: it is that of the new model from now on.
    """
    if not isinstance(pruned.optimizer, torch.optim.Optimizer):
        raise StateError("a hot start needs the optimizer of the pruned model: prune(…, optimizer=optimizer)")
    states = [tensor for state in pruned.optimizer.state.values() for tensor in state.values()]
    used = {id(tensor): tensor for tensor in states}  # what deepcopy takes for copied already
    model, optimizer = copy.deepcopy((pruned_model(pruned), pruned.optimizer), used)
    history = AucHistory()
    search = plan.splits.search
    search_auc = evaluate_split(plan, model, search.part(max(0, search.rows - CHECK_ROWS), search.rows)).auc
    valid_auc = evaluate_split(plan, model, plan.splits.valid).auc
    memorized = False
    if plan.steps.shuffle and search_auc is not None and valid_auc is not None:
        memorized = search_auc - valid_auc > MEMORIZED_AUC_GAP
    if memorized:
        plan.console.message(
            f"the search has memorized its rows (AUC {search_auc:.3f} there, {valid_auc:.3f} on validation rows), "
            f"so its weights are multiplied by {SHRINK_FACTOR:g} and partly reinitialized before the hot start"
        )
        model, optimizer = shrink_and_perturb(plan, model)
    rows = plan.splits.train if memorized or plan.splits.shuffled else search
    seed, is_large = plan.settings.seed, plan.has_large_tables
    train(plan, model, optimizer, rows, plan.steps.hot_start, "hot_start", seed, history, final_if_due=is_large)
    if memorized and valid_auc is not None:
        history.shrink_factor = SHRINK_FACTOR
        history.points[0] = (0, valid_auc)
        if history.best[0] == 0:
            model = copy.deepcopy(pruned_model(pruned))
    return model, history


def shrink_and_perturb(plan: RunPlan, model: Model) -> Trained:
    r"""Move the weights of a model towards a new initialization, in place; return it with a new optimizer.

    .. math:: w \leftarrow s\,w + (1 - s)\,w_0

    Ash and Adams, On Warm-Starting Neural Network Training, 2020.
    """
    with torch.no_grad():
        for weight, initial in zip(model.parameters(), reinitialized(plan, model).parameters(), strict=True):
            weight.lerp_(initial, 1 - SHRINK_FACTOR)
    optimizer = plan.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= LR_FACTOR
    return model, optimizer


def evaluate_split(plan: RunPlan, model: Model, rows: Dataset) -> Metrics:
    """Evaluate a model on some rows."""
    return evaluate(model, plan.stream(rows, model.reads.names, train=False))


class RowScores(dict[str, Any]):
    """AUC with its 95 % interval, logloss, rows and positives of a model on some rows, as JSON values.

    The main task stands at the top; with several tasks each one is in ``tasks``. ``logits`` and ``labels`` (B,) of the
    main task are kept, so that two models can be compared row by row without another evaluation.
    """

    def __init__(self, predicted: Predictions, tasks: Sequence[str]) -> None:
        scores = {
            name: _score_task(predicted.logits[:, number], predicted.labels[:, number])
            for number, name in enumerate(tasks)
        }
        super().__init__(scores[tasks[0]] if len(tasks) == 1 else {**scores[tasks[0]], "tasks": scores})
        self.logits, self.labels = (
            np.asarray(values[:, 0], np.float64) for values in (predicted.logits, predicted.labels)
        )

    def loss_to(self, other: RowScores) -> PairedDifference:
        """Return the paired loss of AUC from this model to another one on the same rows."""
        return auc_difference(self.logits, other.logits, self.labels)

    def logloss_to(self, other: RowScores) -> PairedDifference:
        """Return the paired loss in logloss from this model to another one on the same rows."""
        return logloss_difference(self.logits, other.logits, self.labels)


def _score_task(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> dict[str, Any]:
    interval = auc_interval(logits.astype(np.float64), labels.astype(np.float64))
    task, is_defined = scores(logits, labels), not math.isnan(interval.value)
    return {
        "auc": task.auc,
        "logloss": task.logloss,
        "auc_low": interval.low if is_defined else None,
        "auc_high": interval.high if is_defined else None,
        "rows": task.rows,
        "positives": round(task.positives),
    }


def score_rows(plan: RunPlan, model: Model, rows: Dataset) -> RowScores:
    """Evaluate a model on some rows and keep its predictions."""
    stream = plan.stream(rows, model.reads.names, train=False)
    predicted = predictions(model, stream)
    return RowScores(predicted, task_names(stream, predicted.logits.shape[1]))


def test_metrics(plan: RunPlan, model: Model) -> RowScores:
    """Return the scores on the test rows."""
    return score_rows(plan, model, plan.splits.test)


def valid_metrics(plan: RunPlan, model: Model) -> RowScores:
    """Return the scores on the validation rows, on which choices are made."""
    return score_rows(plan, model, plan.splits.valid)


def serving_speed(plan: RunPlan, models: Mapping[str, Model], repeats: int = 5) -> dict[str, dict[str, int]]:
    """Return the rows per second of each model, measured in turns on the same rows: median, lowest and highest."""
    speeds: dict[str, list[float]] = {name: [] for name in models}
    streams = {name: plan.stream(plan.splits.valid, model.reads.names, train=False) for name, model in models.items()}
    batches = {name: list(islice(stream, SPEED_BATCHES)) for name, stream in streams.items()}
    for repeat in range(repeats + 1):
        for name, model in models.items():
            model.eval()
            start = time.perf_counter()
            with torch.no_grad():
                for batch in batches[name]:
                    model(batch)
                if plan.device.type == "cuda":
                    torch.cuda.synchronize()
            if repeat:  # the first turn is a warm-up
                speeds[name].append(sum(map(len, batches[name])) / (time.perf_counter() - start))
    return {
        name: {
            "rows_per_second": round(statistics.median_high(values)),
            "rows_per_second_low": round(min(values)),
            "rows_per_second_high": round(max(values)),
        }
        for name, values in speeds.items()
    }


def model_size(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the embedding tables and the number of parameters."""
    tables = [module.weight for module in model.modules() if isinstance(module, Table)]
    return {
        "table_bytes": sum(weight.numel() * weight.element_size() for weight in tables),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
