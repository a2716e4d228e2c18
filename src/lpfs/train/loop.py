"""fit: the one training loop. Pretraining, search, hot start and retraining are all this loop.

lpfs.fit(model, dataset.stream(512), epochs=1, valid=held_out.stream(4096), folder="runs/first")
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lpfs.data.batches.batch import Batch
from lpfs.errors import InputError, StateError
from lpfs.schema import known_keys
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.evaluate import Metrics
from lpfs.train.cuda_graph import GraphStepper
from lpfs.train.log import Logger
from lpfs.train.predict import Weights, matmuls
from lpfs.train.distributed.group import current
from lpfs.train.fit import Run
from lpfs.train.schedule import make_schedule
from lpfs.train.sharing import shared
from lpfs.train.snapshot import Resumable
from lpfs.train.step import Stepper, make_optimizer, memory_told


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
    check_wanted(config, valid, folder, resume, optimizer)
    refuse_unshared(model, config)
    if isinstance(optimizer, torch.optim.Optimizer):
        chosen = optimizer
    else:
        chosen = make_optimizer(config, model.parameters() if parameters is None else parameters)
    steps = total_steps(config, stream)
    state = State(model, chosen, config, steps)
    factor = make_schedule(config.schedule, config.schedule_steps or steps, config.rise)
    make = GraphStepper if config.graph else Stepper
    stepper = make(state, callbacks, factor, weights)
    given, stream = stream, shared(stream)
    run = Run(stepper, stream, valid, None if folder is None else Path(folder), loggers)
    try:
        resumed = run.open(resume=resume)
        try:
            with matmuls(config.precision, stepper.device):
                train(run, stream)
        finally:
            stepper.finish()
        run.finish()
    finally:
        run.close()
        if given is not stream and isinstance(given, Resumable) and isinstance(stream, Resumable):
            given.load_state_dict(stream.state_dict())
    return Trained(state.step, state.rows, state.metrics, state.best, state.best_step, state.stop, resumed)


def train(run: Run, stream: Iterable[Batch]) -> None:
    """Take steps until they are done or something says stop."""
    state = run.state
    state.model.train()
    passes, limit = 0, state.config.epochs or 1
    while not run.done() and (state.steps is not None or passes < limit):
        before = state.step
        for batch in stream:
            with memory_told(len(batch)):
                run.stepper.take(batch, partial(run.position, len(batch)))
            run.after_step()
            if run.done():
                break
        else:
            passes += 1
            if state.step == before:
                raise InputError("the stream gave no batch in a pass; is it a generator that is used up?")


def refuse_unshared(model: nn.Module, config: Training) -> None:
    """Refuse what the ranks cannot share in the way they do."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise StateError(
            "fit adds the gradients of the ranks up itself, those by rows of tables too: give it the model "
            "inside, model.module"
        )
    if config.graph and current().several:
        raise InputError("graph=True captures the step of one process: leave it out where several train together")


def total_steps(config: Training, stream: Iterable[Batch]) -> int | None:
    """Return how many steps there will be; None for passes over a stream of unknown length."""
    if config.steps is not None:
        return config.steps
    return (config.epochs or 1) * len(stream) if isinstance(stream, Sized) else None


def check_wanted(
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
