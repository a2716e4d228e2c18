"""Training: the settings of the training loop; learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from lpfs._validation import check_int, check_keys, check_name, check_options
from lpfs.errors import InputError
from lpfs.train.evaluate import Precision

ScheduleName = Literal["constant", "rise", "warmup", "linear", "cosine"]
Factor: TypeAlias = Callable[[int], float]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
FinalCheckpoint = Literal["all", "result", "model", "none"]
FINAL_CONTENTS: tuple[str, ...] = get_args(FinalCheckpoint)

# settings that are positive integers, and those of them that may be None
OPTIONAL_COUNTS = ("steps", "epochs", "schedule_steps", "evaluate_every", "patience", "checkpoint_every")
COUNTS = (*OPTIONAL_COUNTS, "keep_checkpoints", "log_every", "check_every")
# settings that may change on resume, because they do not change what is computed
CHANGEABLE_ON_RESUME = {"steps", "epochs", "check_every", "checkpoint_every", "keep_checkpoints", "graph"}
CHANGEABLE_ON_RESUME |= {"checkpoint_seconds", "final_checkpoint", "final_if_due", "quiet", "tensorboard", "mlflow"}


def lr_factor(name: ScheduleName, over: int | None, rise: float = 10.0) -> Factor:
    """Return the factor of the learning rate as a function of the step; it changes during ``over`` steps.

    - ``constant``: 1.
    - ``rise``: from 1 exponentially to ``rise``, then constant; the paper uses 0.01 to 0.1 on the industrial log.
    - ``warmup``: linearly from 1/over to 1, then constant.
    - ``linear``, ``cosine``: from 1 down to 0.

    >>> [round(0.01 * lr_factor("rise", 100)(step), 4) for step in (0, 50, 100, 1000)]
    [0.01, 0.0316, 0.1, 0.1]
    """
    check_name(name, SCHEDULES, "schedule")
    if name == "constant":
        return lambda step: 1.0
    if over is None or over < 1:
        raise InputError(f"schedule {name!r} needs a number of steps; give schedule_steps")
    if name == "rise":
        return lambda step: math.exp(math.log(rise) * min(1.0, step / over))
    if name == "warmup":
        return lambda step: min(1.0, (step + 1) / over)
    if name == "linear":
        return lambda step: max(0.0, 1 - step / over)
    return lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / over))


@dataclass(frozen=True)
class Training:
    """Settings of ``fit``; defaults follow the LPFS paper where it gives a value.

    Args:
        optimizer: ``adagrad``, ``rowwise-adagrad`` (one accumulator per row of a table), ``adam`` or ``sgd``.
        lr: initial learning rate; default 0.001 for Adam, 0.01 for the others.
        schedule: ``constant``, ``rise`` (exponentially to ``rise`` times the initial rate), ``warmup``,
            ``linear`` or ``cosine``.
        schedule_steps: number of steps of the schedule; default all steps.
        rise: final factor of the learning rate of ``rise``.
        steps: total number of steps; alternative to ``epochs``.
        epochs: number of passes over the stream; default 1.
        task_weights: factor of the loss of each task; default 1.
        clip: maximum norm of the gradient of all parameters; None for no clipping.
        precision: ``float32``; ``tf32`` for matrix products with fewer bits on a GPU; ``bfloat16`` for autocast.
        graph: on a GPU, capture a step once as a CUDA graph and replay it, which is faster for small batches.
            Batches of another size run without the graph. Bags are padded, so that their sums may differ by rounding.
        seed: seed of torch, numpy and Python, set at the start of a run; None to leave the generators unchanged.
        evaluate_every: steps between evaluations; default one pass. The end of training is always evaluated.
        evaluate_first: evaluate before the first step too, so that the initial model can be the best one.
        monitor: ``auc`` or ``logloss`` of the main task selects the best model.
        keep: return with the ``last`` or the ``best`` model.
        keep_optimizer: with the best model, restore its optimizer state too (``best``) or keep the current (``last``).
        patience: stop after this many consecutive evaluations without a new best one.
        min_delta: minimum improvement of a new best evaluation.
        checkpoint_every: steps between checkpoints; default one pass. The end of training is always saved.
        checkpoint_seconds: minimum seconds between two checkpoints; earlier ones are left out. None: √(2·d·3600), where
            d is the duration of the last save. It minimizes the time lost to saves and to interruptions if one comes
            every hour (Young, A First Order Approximation to the Optimum Checkpoint Interval, 1974).
        final_checkpoint: content of the last checkpoint: ``all``; ``result``, the returned model and optimizer;
            ``model``, the returned model alone; ``none``, only metrics and callbacks. Resuming a finished run returns
            this content again; only with ``all`` can it be continued for more steps.
        final_if_due: leave out the last checkpoint if ``checkpoint_seconds`` have not passed since the one before it,
            or since the start; resuming the finished run repeats these steps.
        keep_checkpoints: number of checkpoints to keep.
        log_every: steps between log records of the training loss.
        check_every: steps between checks that the loss is finite. More than 1 avoids synchronization with a GPU,
            but parameters may have changed before a non-finite loss is detected.
        tensorboard: write TensorBoard files into the directory of the run.
        mlflow: log to MLflow (MLFLOW_TRACKING_URI) as a child of the active run.
        quiet: print nothing.
    """

    optimizer: Literal["adagrad", "rowwise-adagrad", "adam", "sgd"] = "adagrad"
    lr: float | None = None
    schedule: ScheduleName = "constant"
    schedule_steps: int | None = None
    rise: float = 10.0
    steps: int | None = None
    epochs: int | None = None
    task_weights: tuple[float, ...] | None = None
    clip: float | None = None
    precision: Precision = "float32"
    graph: bool = False
    seed: int | None = 0
    evaluate_every: int | None = None
    evaluate_first: bool = False
    monitor: Literal["auc", "logloss"] = "auc"
    keep: Literal["last", "best"] = "last"
    keep_optimizer: Literal["last", "best"] = "best"
    patience: int | None = None
    min_delta: float = 0.0
    checkpoint_every: int | None = None
    checkpoint_seconds: float | None = 0.0
    final_checkpoint: FinalCheckpoint = "all"
    final_if_due: bool = False
    keep_checkpoints: int = 2
    log_every: int = 100
    check_every: int = 1
    tensorboard: bool = False
    mlflow: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.task_weights is not None:
            object.__setattr__(self, "task_weights", tuple(float(weight) for weight in self.task_weights))
        for name, hint in get_type_hints(Training).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                raise InputError(f"{name} must be one of {', '.join(get_args(hint))}; found {getattr(self, name)!r}")
        if self.steps is not None and self.epochs is not None:
            raise InputError("steps and epochs are both given; give only one of them")
        for name in COUNTS:
            if getattr(self, name) is not None or name not in OPTIONAL_COUNTS:
                object.__setattr__(self, name, check_int(name, getattr(self, name), 1))
        positive = [name for name in ("lr", "clip", "rise") if getattr(self, name) is not None]
        seconds = [] if self.checkpoint_seconds is None else ["checkpoint_seconds"]
        check_options(self, positive=positive, non_negative=["min_delta", *seconds])
        if not all(weight >= 0 and math.isfinite(weight) for weight in self.task_weights or ()):
            raise InputError(f"task_weights must be numbers >= 0, found {self.task_weights!r}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        return {**asdict(self), "task_weights": None if self.task_weights is None else list(self.task_weights)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Training:
        """Build settings from plain values; an unknown key is an error."""
        return cls(**check_keys(cls, values))

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """Raise InputError if a run cannot resume with these settings because they change the computation."""
        for name, value in self.to_json().items():
            if name not in CHANGEABLE_ON_RESUME and saved.get(name) != value:
                raise InputError(
                    f"the run was started with {name}={saved.get(name)!r} and cannot resume with {value!r}; "
                    "use the same settings, or start a new run in another directory"
                )
