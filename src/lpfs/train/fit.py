"""Run: what happens around the steps: evaluation, early stop, log, checkpoints, going on after a kill.

fit: the one training loop. Pretraining, search, hot start and retraining are all this loop.

lpfs.fit(model, dataset.stream(512), epochs=1, valid=held_out.stream(4096), folder="runs/first")
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs.data.batch import Batch
from lpfs.errors import CheckpointError, InputError, StateError
from lpfs.schema import known_keys
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import (
    Checkpoints,
    CheckpointWarning,
    Resumable,
    random_state,
    restore_random,
    restore_snapshot,
    seed_rank,
    take_snapshot,
)
from lpfs.train.config import Training, lr_factor
from lpfs.train.cuda_graph import GraphStepper
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import broadcast_buffers, check_parameters_equal, rank_batches
from lpfs.train.evaluate import Metrics, Weights, evaluate, matmul_precision
from lpfs.train.loggers import JsonLinesLogger, Logger, LoggerList, MLflowLogger, ProgressBar, TensorBoardLogger
from lpfs.train.step import Stepper, convert_out_of_memory, make_optimizer

LOG_FILE, CHECKPOINTS, TENSORBOARD_DIR = "metrics.jsonl", "checkpoints", "tensorboard"


class TrainingRun:
    """One run of the loop, with or without a folder."""

    def __init__(
        self,
        stepper: Stepper,
        stream: Iterable[Batch],
        valid: Iterable[Batch] | None,
        folder: Path | None,
        loggers: Sequence[Logger],
    ) -> None:
        self.stepper, self.stream, self.valid, self.folder = stepper, stream, valid, folder
        self.state, self.config = stepper.state, stepper.state.config
        self.state.note = self._write
        self.ranks = stepper.ranks
        self.progress = ProgressBar(quiet=self.config.quiet or not self.ranks.is_leader, more=stepper.describe)
        self.log = LoggerList(loggers)
        self.checkpoints: Checkpoints | None = None
        if folder is not None:
            self.checkpoints = Checkpoints(folder / CHECKPOINTS, self.config.keep_checkpoints)
        self._loggers = loggers
        self._length = len(stream) if isinstance(stream, Sized) else None
        # the best model and its optimizer, where there is no folder to keep them in
        self._best: dict[str, Any] | None = None
        self._evaluated = self._saved = -1

    def open(self, *, resume: bool) -> int | None:
        """Begin, or go on from the newest checkpoint; return its step."""
        found = self._load_latest(resume)
        if found is None:
            seed_rank(self.config.seed, self.ranks.rank)
        else:
            restore_snapshot(found[1], self.stepper, self.stream, self.valid)
            self._saved = self.state.step
            self._evaluated = self.state.step if found[1]["evaluated"] else -1
            self.progress.message(f"going on from step {found[0]:,}")
        check_parameters_equal(self.ranks, self.state.model)
        self._open_log(0 if found is None else found[1]["log"])
        for each in self.stepper.callbacks:
            each.on_begin(self.state)
        self.progress.begin(self.state)
        if found is None and self.config.evaluate_first and self.valid is not None:
            self._evaluate(self.valid)
            if self.checkpoints is not None and self._best_now():
                self._save(self.checkpoints)
        return None if found is None else found[0]

    def _load_latest(self, resume: bool) -> tuple[int, dict[str, Any]] | None:
        """Return the newest checkpoint to go on from, the same one on every rank."""
        folder, checkpoints = self.folder, self.checkpoints
        if folder is None or checkpoints is None:
            return None
        found: list[tuple[int, dict[str, Any]]] = []

        def newest() -> int | None:
            if not resume and (checkpoints.steps() or (folder / LOG_FILE).exists()):
                raise InputError(f"{folder} holds a run already; go on with resume=True, or choose another")
            latest = checkpoints.latest() if resume else None
            found.extend([] if latest is None else [latest])
            return None if latest is None else latest[0]

        step = self.ranks.run_on_leader(newest, "looking for a checkpoint")
        if step is None:
            return None
        return found[0] if found else (step, checkpoints.load(step))

    def _open_log(self, position: int | None) -> None:
        folder, settings, boards = self.folder, self.config.to_json(), list[Logger]()
        lines = None
        if not self.ranks.is_leader:
            return
        if folder is not None:
            if self.config.tensorboard:
                boards.append(TensorBoardLogger(folder / TENSORBOARD_DIR, self.state.step, settings))
            try:
                lines = JsonLinesLogger(folder / LOG_FILE, position)
            except OSError as error:
                warnings.warn(f"{folder / LOG_FILE} cannot be written: {error}", stacklevel=2)
        if self.config.mlflow:
            boards.append(MLflowLogger("fit" if folder is None else folder.name, settings))
        self.log = LoggerList([*boards, *self._loggers], lines)

    def done(self) -> bool:
        """Say whether training ends here."""
        return bool(self.state.stop) or (self.state.steps is not None and self.state.step >= self.state.steps)

    def after_step(self) -> None:
        """Log, evaluate and save where it is time to; a checkpoint comes last, when the step is complete."""
        state, config = self.state, self.config
        if state.step % config.log_every == 0:
            self._log_loss()
        if self.valid is not None and self._is_due(config.evaluate_every):
            self._evaluate(self.valid)
        if self.checkpoints is not None and (self._is_due(config.checkpoint_every) or self._best_now()):
            self._save(self.checkpoints)
        self.progress.update(state)

    def _is_due(self, every: int | None) -> bool:
        every = self._length if every is None else every
        return every is not None and self.state.step % every == 0

    def _best_now(self) -> bool:
        return self.config.keep == "best" and self.state.best_step == self.state.step

    def _log_loss(self) -> None:
        self.stepper.check(self._position)
        self.progress.loss = self.stepper.mean()
        self._write("train", {"loss": self.progress.loss, "lr": float(self.state.optimizer.param_groups[0]["lr"])})

    def _position(self) -> str:
        return f"step {self.state.step:,}"

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        record = {"kind": kind, "step": self.state.step, "rows": self.state.rows, **values}
        self.log.write({**record, "rows_per_second": round(self.progress.rate(self.state), 1)})

    def _evaluate(self, valid: Iterable[Batch]) -> None:
        state, config = self.state, self.config
        with convert_out_of_memory(getattr(valid, "batch_size", 0) or 1):
            state.metrics = evaluate(state.model, valid, weights=self.stepper.weights, precision=config.precision)
        self._evaluated = state.step
        if state.best is None or self._value(state.metrics) > self._value(state.best) + config.min_delta:
            state.best, state.best_step, state.waiting = state.metrics, state.step, 0
            if config.keep == "best" and self.checkpoints is None:
                self._best = copy.deepcopy(
                    {"model": dict(state.model.state_dict()), "optimizer": state.optimizer.state_dict()}
                )
        else:
            state.waiting += 1
        if config.patience is not None and state.waiting >= config.patience:
            state.stop = f"no better {config.monitor} in {state.waiting} evaluations"
        self._write("evaluate", state.metrics.to_json())
        for each in self.stepper.callbacks:
            each.on_evaluate(state)

    def _value(self, metrics: Metrics) -> float:
        """Return what is compared, the more the better; an AUC that is not defined is the worst."""
        if self.config.monitor == "logloss":
            return -metrics.logloss
        return -1.0 if metrics.auc is None else metrics.auc

    def _save(self, checkpoints: Checkpoints) -> None:
        state = self.state
        self.stepper.check(self._position)
        self.stepper.check_parameters()
        check_parameters_equal(self.ranks, state.model)
        broadcast_buffers(state.model)
        saved = take_snapshot(self.stepper, self.stream, self.valid, self.log.position())
        saved["evaluated"] = self._evaluated == state.step
        needs = [] if state.best_step is None or self.config.keep == "last" else [state.best_step]
        path = checkpoints.save(state.step, saved, needs, self.ranks)
        self._saved = state.step
        for each in self.stepper.callbacks:
            each.on_checkpoint(state, path)

    def finish(self) -> None:
        """Evaluate and save a last time, then leave the model behind that is wanted."""
        state = self.state
        if self.valid is not None and self._evaluated != state.step:
            self._evaluate(self.valid)
        if self.checkpoints is not None and self._saved != state.step:
            self._save(self.checkpoints)
        if self.config.keep == "best" and state.best_step not in (None, state.step):
            self._load_best()
        for each in self.stepper.callbacks:
            each.on_end(state)
        if self.ranks.is_distributed:  # from here on all draw alike again
            restore_random(self.ranks.gather_values(random_state(), "collecting generators")[0])
        self.progress.end(state)

    def _load_best(self) -> None:
        best = self._best
        if self.checkpoints is not None and self.state.best_step is not None:
            try:
                saved = self.checkpoints.load(self.state.best_step)
                best = {"model": saved["model"], "optimizer": saved["optimizer"]["state"]}
            except CheckpointError as error:
                warnings.warn(
                    f"{error}; the last model is left instead of the best", CheckpointWarning, stacklevel=2
                )
        if best is not None:
            self.state.model.load_state_dict(best["model"])
            if self.config.keep_optimizer == "best":
                self.state.optimizer.load_state_dict(best["optimizer"])
            self.stepper.finish()  # with the rates that the optimizer came with, not those of that step

    def close(self) -> None:
        """Let go of the files and the bar."""
        self.progress.close()
        self.log.close()

    def position(self, size: int) -> str:
        """Say which batch is being trained on."""
        step = self.state.step
        text = f"step {step + 1:,}"
        if self._length:
            text += f" (pass {step // self._length + 1}, batch {step % self._length + 1} of {self._length:,})"
        if isinstance(self.stream, Resumable):
            last = self.stream.state_dict().get("position")
            if isinstance(last, int):
                text += f", rows {last - size:,} to {last:,} of the stream's order"
        return text


@dataclass(frozen=True)
class Trained:
    """How a call of ``fit`` ended.

    Args:
        steps: steps in all, those before a resume too.
        rows: rows trained on.
        metrics: the last evaluation; None without ``valid``.
        best: the best one, and ``best_step`` when it was.
        stopped: why training ended before its time; empty if it did not.
        resumed: the step of the checkpoint it went on from; None if it began at the beginning.

    """

    steps: int
    rows: int
    metrics: Metrics | None
    best: Metrics | None
    best_step: int | None
    stopped: str
    resumed: int | None


def fit(
    model: nn.Module,
    stream: Iterable[Batch],
    optimizer: str | torch.optim.Optimizer | None = None,
    *,
    valid: Iterable[Batch] | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    parameters: Iterable[nn.Parameter] | None = None,
    weights: Weights | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[Logger] = (),
    config: Training | None = None,
    **settings: Any,
) -> Trained:
    """Train a model in place on the batches of a stream, to predict their labels.

    Args:
        model: maps a Batch to logits (B,), for the label, or (B, T), for the label and the tasks.
        stream: a ``Stream``, or any batches; gone through again and again until the steps are done. Several ranks
            share every batch of a ``Stream``; any other batches are taken as this rank's part.
        optimizer: ``adagrad``, ``rowwise-adagrad``, ``adam``, ``sgd``, or an optimizer of your own, which then has
            its own learning rate.
        valid: batches to evaluate on now and then.
        folder: where ``metrics.jsonl`` and the checkpoints go; without it nothing is written.
        resume: go on from the newest whole checkpoint in ``folder``, bit by bit as if nothing had happened;
            begin at the beginning if there is none.
        parameters: what a named optimizer moves; by default all of the model's.
        weights: batch -> sample weights (B,).
        callbacks: hooks into the loop, see :class:`Callback`.
        loggers: functions that are handed every record of the log; one that fails never stops training.
        config: the settings, see :class:`Training`.
        settings: single settings, which go before those of ``config``; an unknown one is an error.

    """
    config = replace(config or Training(), **known_keys(Training, settings))
    if isinstance(optimizer, str):
        config = replace(config, optimizer=optimizer)  # type: ignore[arg-type]
    _check_arguments(config, valid, folder, resume, optimizer)
    _check_distributed(model, config)
    if isinstance(optimizer, torch.optim.Optimizer):
        chosen = optimizer
    else:
        chosen = make_optimizer(config, model.parameters() if parameters is None else parameters)
    steps = total_steps(config, stream)
    state = State(model, chosen, config, steps)
    factor = lr_factor(config.schedule, config.schedule_steps or steps, config.rise)
    make = GraphStepper if config.graph else Stepper
    stepper = make(state, callbacks, factor, weights)
    given, stream = stream, rank_batches(stream)
    run = TrainingRun(stepper, stream, valid, None if folder is None else Path(folder), loggers)
    try:
        resumed = run.open(resume=resume)
        try:
            with matmul_precision(config.precision, stepper.device):
                _training_loop(run, stream)
        finally:
            stepper.finish()
        run.finish()
    finally:
        run.close()
        if given is not stream and isinstance(given, Resumable) and isinstance(stream, Resumable):
            given.load_state_dict(stream.state_dict())
    return Trained(state.step, state.rows, state.metrics, state.best, state.best_step, state.stop, resumed)


def _training_loop(run: TrainingRun, stream: Iterable[Batch]) -> None:
    """Take steps until they are done or something says stop."""
    state = run.state
    state.model.train()
    passes, limit = 0, state.config.epochs or 1
    while not run.done() and (state.steps is not None or passes < limit):
        before = state.step
        for batch in stream:
            with convert_out_of_memory(len(batch)):
                run.stepper.take(batch, partial(run.position, len(batch)))
            run.after_step()
            if run.done():
                break
        else:
            passes += 1
            if state.step == before:
                raise InputError("the stream gave no batch in a pass; is it a generator that is used up?")


def _check_distributed(model: nn.Module, config: Training) -> None:
    """Refuse what the ranks cannot share in the way they do."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise StateError(
            "fit adds the gradients of the ranks up itself, those by rows of tables too: give it the model "
            "inside, model.module"
        )
    if config.graph and current_group().is_distributed:
        raise InputError("graph=True captures the step of one process: leave it out where several train together")


def total_steps(config: Training, stream: Iterable[Batch]) -> int | None:
    """Return how many steps there will be; None for passes over a stream of unknown length."""
    if config.steps is not None:
        return config.steps
    return (config.epochs or 1) * len(stream) if isinstance(stream, Sized) else None


def _check_arguments(
    config: Training,
    valid: Iterable[Batch] | None,
    folder: str | os.PathLike[str] | None,
    resume: bool,
    optimizer: object,
) -> None:
    """Refuse wishes that cannot be met, before anything is touched."""
    if valid is None and (config.patience is not None or config.keep == "best"):
        raise InputError("early stopping and keep='best' need something to evaluate on: give valid=")
    if folder is None and (resume or config.tensorboard):
        raise InputError(f"{'resume' if resume else 'tensorboard'}=True needs the folder of the run: give folder=")
    own = isinstance(optimizer, torch.optim.Optimizer)
    if own and config.lr is not None:
        raise InputError("the optimizer given has its own learning rate; leave out lr=")
    if optimizer is not None and not own and not isinstance(optimizer, str):
        raise InputError(f"optimizer must be the name of one or a torch optimizer, found {optimizer!r}")
