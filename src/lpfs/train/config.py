"""Training: every setting of the loop, checked when it is made.

Learning rates by name: a factor on the starting rate, a pure function of the training step.

A schedule has no state of its own, so there is nothing to save but the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from lpfs.errors import InputError
from lpfs.schema import known_keys
from lpfs.train.evaluate import Precision

ScheduleName = Literal["constant", "rise", "warmup", "linear", "cosine"]
Factor: TypeAlias = Callable[[int], float]
SCHEDULES: tuple[str, ...] = ("constant", "rise", "warmup", "linear", "cosine")


def lr_factor(name: ScheduleName, over: int | None, rise: float = 10.0) -> Factor:
    """Return the factor on the learning rate at a step; ``over`` is the number of steps it moves for.

    - ``constant``: 1.
    - ``rise``: from 1 exponentially to ``rise``, then constant: the paper's industrial rate, .01 to .1.
    - ``warmup``: linearly from 1/over to 1, then constant.
    - ``linear``, ``cosine``: from 1 down to 0.

    >>> [round(0.01 * make_schedule("rise", 100)(step), 4) for step in (0, 50, 100, 1000)]
    [0.01, 0.0316, 0.1, 0.1]
    """
    if name not in SCHEDULES:
        raise InputError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    if name == "constant":
        return lambda step: 1.0
    if over is None or over < 1:
        raise InputError(f"schedule {name!r} must know over how many steps it moves: give schedule_steps")
    if name == "rise":
        power = math.log(rise)
        return lambda step: math.exp(power * min(1.0, step / over))
    if name == "warmup":
        return lambda step: min(1.0, (step + 1) / over)
    if name == "linear":
        return lambda step: max(0.0, 1 - step / over)
    return lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / over))


# What may be different when a run goes on: how long, what is shown and kept, never what is computed; a captured
# step computes the same, and another machine may not be able to capture.
CHANGEABLE_ON_RESUME = frozenset(
    {
        *("steps", "epochs", "quiet", "tensorboard", "mlflow", "keep_checkpoints", "checkpoint_every"),
        *("check_every", "graph"),
    }
)


@dataclass(frozen=True)
class Training:
    """Settings of ``fit``; the defaults are the paper's where it says something.

    Args:
        optimizer: ``adagrad``, ``rowwise-adagrad`` (one sum a row of a table), ``adam`` or ``sgd``.
        lr: learning rate at the start; .001 for Adam, .01 for the others by default.
        schedule: ``constant``, ``rise`` (the paper's industrial rise to ``rise`` times the start), ``warmup``,
            ``linear`` or ``cosine``.
        schedule_steps: over how many steps the schedule moves; by default over all of them.
        rise: how many times its start the rate of ``rise`` ends at.
        steps: how many steps in all; instead of ``epochs``.
        epochs: how many passes over the stream; 1 by default.
        task_weights: a factor on the loss of each task; 1 by default.
        clip: largest norm of the gradient of all parameters together; None: not clipped.
        precision: ``float32``; ``tf32``, which on a GPU multiplies matrices with fewer bits; or ``bfloat16`` for
            autocast.
        graph: on a GPU, capture a step once as a CUDA graph and replay it: faster for small batches. Batches of
            another size, and models with bags, run as they do without.
        seed: of torch, numpy and Python, set when the run begins; None leaves the generators alone.
        evaluate_every: steps between evaluations; by default at the end of every pass. Always at the end.
        evaluate_first: evaluate before the first step too, so that the model as it came can be the best one.
        monitor: ``auc`` or ``logloss`` of the main task decides which model is best.
        keep: leave the ``last`` or the ``best`` model behind.
        keep_optimizer: with the best model leave its optimizer as it was then (``best``) or as it is (``last``).
        patience: stop after this many evaluations in a row without a new best one.
        min_delta: by how much an evaluation must be better to count.
        checkpoint_every: steps between checkpoints; by default at the end of every pass. Always at the end.
        keep_checkpoints: how many checkpoints stay, the best one apart.
        log_every: steps between lines of the training loss.
        check_every: steps between looks at whether the loss is finite. More than 1 saves waiting for a GPU,
            but then parameters have moved when it is noticed.
        tensorboard: write TensorBoard files into the run's folder too.
        mlflow: log to MLflow too, where MLFLOW_TRACKING_URI says, inside of the run that is active.
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
    keep_checkpoints: int = 2
    log_every: int = 100
    check_every: int = 1
    tensorboard: bool = False
    mlflow: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.task_weights is not None:
            object.__setattr__(self, "task_weights", tuple(float(each) for each in self.task_weights))
        choices: dict[str, tuple[str, ...]] = {
            "optimizer": ("adagrad", "rowwise-adagrad", "adam", "sgd"),
            "schedule": SCHEDULES,
            "precision": ("float32", "tf32", "bfloat16"),
            "monitor": ("auc", "logloss"),
            "keep": ("last", "best"),
            "keep_optimizer": ("last", "best"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InputError(f"{name} must be one of {', '.join(known)}; found {getattr(self, name)!r}")
        if self.steps is not None and self.epochs is not None:
            raise InputError("say how long to train by steps or by epochs, not by both")
        for name in COUNTS:
            value = getattr(self, name)
            if value is None and name in OPTIONAL_COUNTS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number >= 1, found {value!r}")
        for name in ("lr", "clip", "rise"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{name} must be a number > 0, found {value!r}")
        if not (self.min_delta >= 0 and math.isfinite(self.min_delta)):
            raise InputError(f"min_delta must be a number >= 0, found {self.min_delta!r}")
        if not all(each >= 0 and math.isfinite(each) for each in self.task_weights or ()):
            raise InputError(f"task_weights must be numbers >= 0, found {self.task_weights!r}")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        values = asdict(self)
        return {**values, "task_weights": None if self.task_weights is None else list(self.task_weights)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Training:
        """Build settings from plain values; an unknown key is an error."""
        return cls(**known_keys(cls, values))

    def check_same(self, saved: Mapping[str, Any]) -> None:
        """Refuse to go on with a run under settings that compute something else."""
        begun = {**Training().to_json(), **saved}  # a setting that was not there yet had its default
        for name, value in self.to_json().items():
            if name not in CHANGEABLE_ON_RESUME and begun[name] != value:
                raise InputError(
                    f"the run was begun with {name}={begun[name]!r} and cannot go on with {value!r}; "
                    "use the same settings, or begin a new run in another folder"
                )


OPTIONAL_COUNTS = ("steps", "epochs", "schedule_steps", "evaluate_every", "patience", "checkpoint_every")
COUNTS = (*OPTIONAL_COUNTS, "keep_checkpoints", "log_every", "check_every")
