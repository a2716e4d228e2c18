"""Run: what happens around the steps: evaluation, early stop, log, checkpoints, going on after a kill."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

from lpfs.data.batches.batch import Batch
from lpfs.errors import CheckpointError, InputError
from lpfs.train.boards import MLflow, TensorBoard
from lpfs.train.checkpoint import Checkpoints, CheckpointWarning
from lpfs.train.evaluate import Metrics, evaluate
from lpfs.train.log import JsonLines, Log, Logger
from lpfs.train.loggers import Progress
from lpfs.train.distributed.reduce import refuse_difference
from lpfs.train.sharing import take_buffers
from lpfs.train.snapshot import Resumable, random_state, restore_random, restore_snapshot, seed_rank, take_snapshot
from lpfs.train.step import Stepper, memory_told

LINES, CHECKPOINTS, BOARD = "metrics.jsonl", "checkpoints", "tensorboard"


class Run:
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
        self.progress = Progress(quiet=self.config.quiet or not self.ranks.leads, more=stepper.describe)
        self.log = Log(loggers)
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
        found = self._found(resume)
        if found is None:
            seed_rank(self.config.seed, self.ranks.rank)
        else:
            restore_snapshot(found[1], self.stepper, self.stream, self.valid)
            self._saved = self.state.step
            self._evaluated = self.state.step if found[1]["evaluated"] else -1
            self.progress.say(f"going on from step {found[0]:,}")
        refuse_difference(self.ranks, self.state.model)
        self._open_log(0 if found is None else found[1]["log"])
        for each in self.stepper.callbacks:
            each.on_begin(self.state)
        self.progress.begin(self.state)
        if found is None and self.config.evaluate_first and self.valid is not None:
            self._evaluate(self.valid)
            if self.checkpoints is not None and self._best_now():
                self._save(self.checkpoints)
        return None if found is None else found[0]

    def _found(self, resume: bool) -> tuple[int, dict[str, Any]] | None:
        """Return the newest checkpoint to go on from, the same one on every rank."""
        folder, checkpoints = self.folder, self.checkpoints
        if folder is None or checkpoints is None:
            return None
        found: list[tuple[int, dict[str, Any]]] = []

        def newest() -> int | None:
            if not resume and (checkpoints.steps() or (folder / LINES).exists()):
                raise InputError(f"{folder} holds a run already; go on with resume=True, or choose another")
            latest = checkpoints.latest() if resume else None
            found.extend([] if latest is None else [latest])
            return None if latest is None else latest[0]

        step = self.ranks.agree(newest, "looking for a checkpoint")
        if step is None:
            return None
        return found[0] if found else (step, checkpoints.load(step))

    def _open_log(self, position: int | None) -> None:
        folder, settings, boards = self.folder, self.config.to_json(), list[Logger]()
        lines = None
        if not self.ranks.leads:
            return
        if folder is not None:
            if self.config.tensorboard:
                boards.append(TensorBoard(folder / BOARD, self.state.step, settings))
            try:
                lines = JsonLines(folder / LINES, position)
            except OSError as error:
                warnings.warn(f"{folder / LINES} cannot be written: {error}", stacklevel=2)
        if self.config.mlflow:
            boards.append(MLflow("fit" if folder is None else folder.name, settings))
        self.log = Log([*boards, *self._loggers], lines)

    def done(self) -> bool:
        """Say whether training ends here."""
        return bool(self.state.stop) or (self.state.steps is not None and self.state.step >= self.state.steps)

    def after_step(self) -> None:
        """Log, evaluate and save where it is time to; a checkpoint comes last, when the step is complete."""
        state, config = self.state, self.config
        if state.step % config.log_every == 0:
            self._log_loss()
        if self.valid is not None and self._due(config.evaluate_every):
            self._evaluate(self.valid)
        if self.checkpoints is not None and (self._due(config.checkpoint_every) or self._best_now()):
            self._save(self.checkpoints)
        self.progress.update(state)

    def _due(self, every: int | None) -> bool:
        every = self._length if every is None else every
        return every is not None and self.state.step % every == 0

    def _best_now(self) -> bool:
        return self.config.keep == "best" and self.state.best_step == self.state.step

    def _log_loss(self) -> None:
        self.stepper.check(self._here)
        self.progress.loss = self.stepper.mean()
        self._write("train", {"loss": self.progress.loss, "lr": float(self.state.optimizer.param_groups[0]["lr"])})

    def _here(self) -> str:
        return f"step {self.state.step:,}"

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        record = {"kind": kind, "step": self.state.step, "rows": self.state.rows, **values}
        self.log.write({**record, "rows_per_second": round(self.progress.rate(self.state), 1)})

    def _evaluate(self, valid: Iterable[Batch]) -> None:
        state, config = self.state, self.config
        with memory_told(getattr(valid, "batch_size", 0) or 1):
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
        self.stepper.check(self._here)
        self.stepper.check_parameters()
        refuse_difference(self.ranks, state.model)
        take_buffers(state.model)
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
        if self.ranks.several:  # from here on all draw alike again
            restore_random(self.ranks.collect(random_state(), "collecting generators")[0])
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
