"""fit: the training loop of pretraining, search, hot start and retraining.

    lpfs.fit(model, dataset.stream(512), epochs=1, valid=holdout.stream(4096), folder="runs/first")

TrainingRun does everything around the steps: evaluation, early stopping, logging, checkpoints and resume. With
``keep="best"`` a copy of the best model is in memory, and in every checkpoint of a later step.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs._validation import check_keys
from lpfs.data.batch import Batch
from lpfs.errors import InputError, StateError
from lpfs.train.callbacks import Callback, State, ignore_record
from lpfs.train.checkpoint import (
    Checkpoints,
    Resumable,
    load_states,
    restore_snapshot,
    seed_rank,
    share_random,
    take_snapshot,
)
from lpfs.train.config import Training, lr_factor
from lpfs.train.distributed.group import current_group
from lpfs.train.distributed.reduce import broadcast_buffers, check_parameters_equal, rank_batches
from lpfs.train.evaluate import Batches, Metrics, Weights, evaluate, matmul_precision
from lpfs.train.loggers import JsonLinesLogger, Logger, LoggerList, MLflowLogger, ProgressBar, TensorBoardLogger
from lpfs.train.step import GraphStepper, Stepper, convert_out_of_memory, make_optimizer
from lpfs.train.tensor_io import flatten_state, restore_state

SECONDS_BETWEEN_INTERRUPTIONS = 3600.0  # assumed by checkpoint_seconds=None
BYTES_PER_SECOND = 200e6  # of a save, assumed before the first one
LOG_FILE, CHECKPOINTS, TENSORBOARD_DIR = "metrics.jsonl", "checkpoints", "tensorboard"


class TrainingRun:
    """One run of the training loop, with or without a directory."""

    def __init__(
        self, stepper: Stepper, stream: Batches, valid: Batches | None, folder: Path | None, loggers: Sequence[Logger]
    ) -> None:
        self.stepper, self.stream, self.valid, self.folder = stepper, stream, valid, folder
        self.state, self.config = stepper.state, stepper.state.config
        self.state.note = self._write
        self.ranks = stepper.ranks
        self.progress = ProgressBar(quiet=self.config.quiet or not self.ranks.is_leader, extra_text=stepper.describe)
        self.log, self._loggers = LoggerList(loggers), loggers
        self.checkpoints: Checkpoints | None = None
        if folder is not None:
            self.checkpoints = Checkpoints(folder / CHECKPOINTS, self.config.keep_checkpoints)
        self._length = len(stream) if isinstance(stream, Sized) else None
        self._best: dict[str, Any] | None = None  # states of the best model and its optimizer, if they are not current
        self._evaluated_step = self._saved_step = -1
        self._is_restored_result = False  # whether the run had ended and its result was restored
        self._saved_time, self._save_seconds = time.monotonic(), self._estimate_save_seconds()

    def open(self, *, resume: bool) -> int | None:
        """Start, or resume from the newest checkpoint; return the step of that checkpoint."""
        checkpoint = self._load_latest(resume)
        if checkpoint is None:
            seed_rank(self.config.seed, self.ranks.rank)
        else:
            self._restore(checkpoint[1])
            self.progress.console.message(f"resuming from step {checkpoint[0]:,}")
        check_parameters_equal(self.ranks, self.state.model)
        self._open_log(0 if checkpoint is None else checkpoint[1]["log"])
        for callback in self.stepper.callbacks:
            callback.on_begin(self.state)
        self.progress.start(self.state)
        if checkpoint is None and self.config.evaluate_first and self.valid is not None:
            self._evaluate(self.valid)
        return None if checkpoint is None else checkpoint[0]

    def _restore(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        state = self.state
        restore_snapshot(saved, self.stepper, self.stream, self.valid)
        self._saved_step = state.step
        self._evaluated_step = state.step if saved["evaluated"] else -1
        self._is_restored_result = saved.get("final", "all") != "all"
        if self._is_restored_result and not self.is_done():
            raise InputError(
                f"the run ended after {state.step:,} steps and its last checkpoint holds only its result, so it cannot "
                "be continued for more steps; start a new run in another directory"
            )
        self._best = saved["best_state"]
        if self.config.keep == "best" and state.best_step == state.step:
            self._copy_best()

    def _load_latest(self, resume: bool) -> tuple[int, dict[str, Any]] | None:
        """Return step and state of the newest checkpoint, the same one on every rank; None to start a new run."""
        folder, checkpoints = self.folder, self.checkpoints
        if folder is None or checkpoints is None:
            return None
        latest: tuple[int, dict[str, Any]] | None = None

        def load_latest() -> int | None:
            nonlocal latest
            if resume:
                latest = checkpoints.latest()
            elif checkpoints.steps() or (folder / LOG_FILE).exists():
                raise InputError(f"{folder} contains a run; use resume=True to continue it, or another directory")
            return None if latest is None else latest[0]

        step = self.ranks.run_on_leader(load_latest, "loading a checkpoint")
        return latest if step is None or latest is not None else (step, checkpoints.load(step))

    def _open_log(self, position: int | None) -> None:
        if not self.ranks.is_leader:
            return
        folder, settings, loggers, lines = self.folder, self.config.to_json(), list[Logger](), None
        if folder is not None:
            if self.config.tensorboard:
                loggers.append(TensorBoardLogger(folder / TENSORBOARD_DIR, self.state.step, settings))
            try:
                lines = JsonLinesLogger(folder / LOG_FILE, position)
            except OSError as error:
                warnings.warn(f"cannot write {folder / LOG_FILE}: {error}; training continues without it", stacklevel=2)
        if self.config.mlflow:
            loggers.append(MLflowLogger("fit" if folder is None else folder.name, settings))
        self.log = LoggerList([*loggers, *self._loggers], lines)

    def is_done(self) -> bool:
        """Return whether training ends after this step."""
        return bool(self.state.stop) or (self.state.steps is not None and self.state.step >= self.state.steps)

    def after_step(self) -> None:
        """Log, evaluate and save if they are due; the checkpoint is last, when the step is complete."""
        state, config = self.state, self.config
        if state.step % config.log_every == 0:
            self.stepper.check()
            self.progress.loss = self.stepper.mean()
            self._write("train", {"loss": self.progress.loss, "lr": float(state.optimizer.param_groups[0]["lr"])})
        if self.valid is not None and self._is_due(config.evaluate_every):
            self._evaluate(self.valid)
        if self.checkpoints is not None and not self.is_done() and self._is_save_due():
            self._save(self.checkpoints)
        self.progress.update(state)

    def _is_due(self, every: int | None) -> bool:
        every = self._length if every is None else every
        return every is not None and self.state.step % every == 0

    def _is_save_due(self) -> bool:
        """Return whether a checkpoint is due by steps, and the last one is old enough."""
        return self._is_due(self.config.checkpoint_every) and self._is_old_enough()

    def _is_old_enough(self) -> bool:
        """Return whether ``checkpoint_seconds`` have passed since the last checkpoint, the same on every rank."""
        seconds = self.config.checkpoint_seconds
        if seconds is None:
            seconds = math.sqrt(2 * self._save_seconds * SECONDS_BETWEEN_INTERRUPTIONS)
        if seconds == 0:
            return True
        return self.ranks.run_on_leader(
            lambda: time.monotonic() - self._saved_time >= seconds, "deciding whether to write a checkpoint"
        )

    def _estimate_save_seconds(self) -> float:
        states = self.state.model.state_dict(), self.state.optimizer.state_dict()
        return sum(int(tensor.nbytes) for tensor in flatten_state(states)[1].values()) / BYTES_PER_SECOND

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        record = {"kind": kind, "step": self.state.step, "rows": self.state.rows, **values}
        self.log.write({**record, "rows_per_second": round(self.progress.rate(self.state), 1)})

    def _evaluate(self, valid: Batches) -> None:
        state, config = self.state, self.config
        with convert_out_of_memory(getattr(valid, "batch_size", 0) or 1):
            state.metrics = evaluate(state.model, valid, weights=self.stepper.weights, precision=config.precision)
        self._evaluated_step = state.step
        value = partial(monitored_value, config)
        if state.best is None or value(state.metrics) > value(state.best) + config.min_delta:
            state.best, state.best_step, state.waiting = state.metrics, state.step, 0
            if config.keep == "best":
                self._copy_best()
        else:
            state.waiting += 1
        if config.patience is not None and state.waiting >= config.patience:
            state.stop = f"no better {config.monitor} in {state.waiting} evaluations"
        self._write("evaluate", state.metrics.to_json())
        for callback in self.stepper.callbacks:
            callback.on_evaluate(state)

    def _copy_best(self) -> None:
        """Keep a copy of the current model as the best one, unless training ends with it."""
        self._best, config = None, self.config
        if self.is_done():
            return
        states: dict[str, Any] = {"model": dict(self.state.model.state_dict())}
        if config.keep_optimizer == "best" and config.final_checkpoint in ("all", "result"):
            states["optimizer"] = self.state.optimizer.state_dict()
        values, tensors = flatten_state(states)
        self._best = restore_state(values, {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})

    def _save(self, checkpoints: Checkpoints, content: str = "all") -> None:
        state, start = self.state, time.monotonic()
        self.stepper.check()
        self.stepper.check_parameters()
        check_parameters_equal(self.ranks, state.model)
        broadcast_buffers(state.model)
        best = None if state.best_step == state.step else self._best
        saved = take_snapshot(self.stepper, self.stream, self.valid, self.log.position(), best, content)
        saved["evaluated"] = self._evaluated_step == state.step
        path = checkpoints.save(state.step, saved, self.ranks)
        self._saved_step, self._saved_time = state.step, time.monotonic()
        self._save_seconds = self._saved_time - start
        for callback in self.stepper.callbacks:
            callback.on_checkpoint(state, path)

    def finish(self) -> None:
        """Evaluate and save a last time, then load the best model if it is to be kept."""
        state, content = self.state, self.config.final_checkpoint
        if self.valid is not None and self._evaluated_step != state.step:
            self._evaluate(self.valid)
        if content == "all" and self.checkpoints is not None and self._saved_step != state.step and self._is_last_due():
            self._save(self.checkpoints)
        if self._best is not None and state.best_step != state.step:
            load_states(state, self._best)
            self.stepper.finish()  # restores the initial learning rates
        self._best = None
        if content != "all" and self.checkpoints is not None and not self._is_restored_result and self._is_last_due():
            self._save(self.checkpoints, content)
        for callback in self.stepper.callbacks:
            callback.on_end(state)
        share_random()
        self.progress.end(state)

    def _is_last_due(self) -> bool:
        """Return whether the last checkpoint is written."""
        return not self.config.final_if_due or self._is_old_enough()

    def position(self, size: int) -> str:
        """Return which batch of ``size`` rows is being trained on, for error messages."""
        text = f"step {self.state.step + 1:,}"
        if self._length:
            done, batch = divmod(self.state.step, self._length)
            text += f" (pass {done + 1}, batch {batch + 1} of {self._length:,})"
        if isinstance(self.stream, Resumable):
            last = self.stream.state_dict().get("position")
            if isinstance(last, int):
                text += f", rows {last - size:,} to {last:,} in the order of the stream"
        return text


def save_result(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: Trained,
    stream: Batches,
    valid: Batches | None,
    folder: Path,
    config: Training,
) -> None:
    """Write the checkpoint with which a run ends, so that ``fit`` with ``resume=True`` returns this result.

    The run was trained in another way, such as by ``fit_fleet``; the other arguments are those of ``fit``.
    """
    state = State(model, optimizer, config, config.steps, step=trained.steps, rows=trained.rows, stop=trained.stopped)
    state.metrics, state.best, state.best_step = trained.metrics, trained.best, trained.best_step
    run = TrainingRun(Stepper(state, (), lr_factor("constant", None), None), stream, valid, folder, ())
    run._evaluated_step = state.step
    assert run.checkpoints is not None
    run._save(run.checkpoints, "result")


def monitored_value(config: Training, metrics: Metrics) -> float:
    """Return the value that selects the best model, higher is better; an undefined AUC is the worst."""
    if config.monitor == "logloss":
        return -metrics.logloss
    return -1.0 if metrics.auc is None else metrics.auc


@dataclass(frozen=True)
class Trained:
    """The result of ``fit``.

    Args:
        steps: number of steps, including those before a resume.
        rows: number of rows trained on.
        metrics: the last evaluation; None without ``valid``.
        best: the best evaluation.
        best_step: the step of the best evaluation.
        stopped: the reason of an early end; empty otherwise.
        resumed: step of the checkpoint from which the run was resumed; None for a new run.
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
        stream: a ``Stream``, or any batches; iterated repeatedly until all steps are done. Several ranks split
            every batch of a ``Stream``; any other batches are used as the part of this rank.
        optimizer: ``adagrad``, ``rowwise-adagrad``, ``adam``, ``sgd``, or an optimizer object with its own
            learning rate.
        valid: batches for the evaluations.
        folder: directory for ``metrics.jsonl`` and the checkpoints; without it nothing is written.
        resume: continue from the newest intact checkpoint in ``folder``, bit for bit as without the interruption;
            start a new run if there is none.
        parameters: parameters of a named optimizer; default: all parameters of the model.
        weights: batch -> sample weights (B,).
        callbacks: hooks into the loop, see :class:`Callback`.
        loggers: functions that receive every log record; if one fails, training continues without it.
        config: the settings, see :class:`Training`.
        settings: single settings, which override those of ``config``; an unknown one is an error.
    """
    config = replace(config or Training(), **check_keys(Training, settings))
    if isinstance(optimizer, str):
        config = replace(config, optimizer=optimizer)  # type: ignore[arg-type]
    if valid is None and (config.patience is not None or config.keep == "best"):
        raise InputError("early stopping and keep='best' need evaluations; give valid=")
    if folder is None and (resume or config.tensorboard):
        raise InputError(f"{'resume' if resume else 'tensorboard'}=True needs the directory of the run; give folder=")
    if isinstance(optimizer, torch.optim.Optimizer):
        if config.lr is not None:
            raise InputError("an optimizer object has its own learning rate; leave out lr=")
    elif optimizer is not None and not isinstance(optimizer, str):
        raise InputError(f"optimizer must be a name or a torch optimizer, found {optimizer!r}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise StateError(
            "fit sums the gradients of the ranks itself, including gradients by rows; give it model.module "
            "instead of the DistributedDataParallel wrapper"
        )
    if config.graph and current_group().is_distributed:
        raise InputError("graph=True does not work with several ranks; leave it out")
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = make_optimizer(config, model.parameters() if parameters is None else parameters)
    steps = config.steps
    if steps is None and isinstance(stream, Sized):
        steps = (config.epochs or 1) * len(stream)
    state = State(model, optimizer, config, steps)
    factor = lr_factor(config.schedule, config.schedule_steps or steps, config.rise)
    stepper = (GraphStepper if config.graph else Stepper)(state, callbacks, factor, weights)
    whole_stream, stream = stream, rank_batches(stream)
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
        run.progress.close()
        run.log.close()
        state.note = ignore_record  # a reference to the run would keep model and optimizer in memory
        if whole_stream is not stream and isinstance(whole_stream, Resumable) and isinstance(stream, Resumable):
            whole_stream.load_state_dict(stream.state_dict())
    return Trained(state.step, state.rows, state.metrics, state.best, state.best_step, state.stop, resumed)


def _training_loop(run: TrainingRun, stream: Iterable[Batch]) -> None:
    """Take steps until all are done or ``state.stop`` is set."""
    state = run.state
    state.model.train()
    passes, limit = 0, state.config.epochs or 1
    while not run.is_done() and (state.steps is not None or passes < limit):
        first_step = state.step
        for batch in stream:
            with convert_out_of_memory(len(batch)):
                run.stepper.train_batch(batch, partial(run.position, len(batch)))
            run.after_step()
            if run.is_done():
                break
        else:
            passes += 1
            if state.step == first_step:
                raise InputError("the stream gave no batch in a pass; if it is a generator, use a list or a Stream")
