"""Settings: everything that a run of ``select`` depends on, saved with its results and read back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lpfs._fileio import RUN_CONFIG, RUN_FORMAT, read_json
from lpfs._validation import check_int, check_json, check_keys
from lpfs.data.remote import absolute_path_or_url
from lpfs.errors import InputError

Finish = Literal["both", "hot", "retrain", "none"]
LrSchedule = Literal["constant", "rise"]
Level = Literal["field", "cross"]
TARGET_FIELDS = ("keep", "penalty", "budget", "max_auc_loss")
CONFIG_FILE, FORMAT = RUN_CONFIG, RUN_FORMAT
CONFIG_KEYS = ("format", "threads")  # of config.json, besides the settings


@dataclass(frozen=True)
class Settings:
    """What to select from, the target, and how to search; None stands for a default that depends on the data.

    Args:
        source: the log: files, or the directory of a Dataset.
        label, time, split: columns of the label, of the time, of the role (train, valid, test); not needed for a
            Dataset.
        prepare: further options of ``prepare``.
        keep, penalty, budget, max_auc_loss: the target, at most one of them. Without the first three the number of
            fields is the smallest one whose loss of AUC is allowed; none: a small loss is.
        curve: train networks on random subsets of the fields, for the AUC against the number of fields.
        costs: a TOML file of costs, or ``complexity`` for those of FSCD.
        must_keep, must_drop: fields that are always kept, and fields that are never used.
        method: search method; ``options`` are its options.
        level: gates on fields, or on the fields and crosses of DLRMCross; None: as the model has them.
        model: the backbone; ``model_options`` are its options.
        checkpoint: directory of a trained model to start from instead of pretraining.
        optimizer, lr: optimizer of the model and its learning rate.
        lr_schedule: ``constant``; or ``rise``, exponentially to ten times ``lr`` during pretraining and training from
            scratch, and at that rate in the search, as in the paper's industrial experiment.
        batch_size, pretrain_steps, search_steps: rows per step, and number of steps.
        precision: ``float32`` or ``bfloat16``.
        graph: whether a training step is captured as a CUDA graph; None: if the GPU and the model allow it.
        fleet: whether models that are trained alike, such as those of several seeds, are trained together as one stack,
            with results that are equal up to rounding; None: only those from scratch, if the model supports it
            and has small tables, on a CPU for batches of at most 256 rows.
        finish: train the pruned model further (``hot``), train the kept fields from scratch (``retrain``), both or
            none.
        seed: seed of everything random.
        seeds: number of searches; the first gives the result, all of them how often each field was kept.
        force: run even if the validation or test rows have fewer than 10 positives or negatives.
        device: ``auto``, ``cpu``, ``cuda`` …
        tensorboard: write TensorBoard files into the directory of every training.
        mlflow: log to MLflow at MLFLOW_TRACKING_URI: one run, with its trainings and its files.
    """

    source: tuple[str, ...] = ()
    label: str | None = None
    time: str | None = None
    split: str | None = None
    prepare: Mapping[str, Any] = field(default_factory=dict)
    keep: int | None = None
    penalty: float | None = None
    budget: float | None = None
    max_auc_loss: float | None = None
    curve: bool = True
    costs: str | None = None
    must_keep: tuple[str, ...] = ()
    must_drop: tuple[str, ...] = ()
    method: str = "lpfs++"
    options: Mapping[str, Any] = field(default_factory=dict)
    level: Level | None = None
    model: str | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    optimizer: str = "adagrad"
    lr: float | None = None
    lr_schedule: LrSchedule = "constant"
    batch_size: int | None = None
    pretrain_steps: int | None = None
    search_steps: int | None = None
    precision: str = "float32"
    graph: bool | None = None
    fleet: bool | None = None
    finish: Finish = "both"
    seed: int = 0
    seeds: int = 1
    force: bool = False
    device: str = "auto"
    tensorboard: bool = False
    mlflow: bool = False

    def __post_init__(self) -> None:
        for name in ("source", "must_keep", "must_drop"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        for name, choices in (
            ("finish", get_args(Finish)),
            ("level", get_args(Level)),
            ("lr_schedule", get_args(LrSchedule)),
        ):
            value = getattr(self, name)
            if value not in choices and not (name == "level" and value is None):
                raise InputError(f"{name} must be one of {', '.join(choices)}; found {value!r}")
        check_int("seed", self.seed, 0)
        check_int("seeds", self.seeds, 1)
        for name in ("batch_size", "pretrain_steps", "search_steps"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if not isinstance(self.curve, bool):
            raise InputError(f"curve must be true or false, found {self.curve!r}")
        for name in ("graph", "fleet"):
            if getattr(self, name) not in (None, True, False):
                raise InputError(f"{name} must be true, false or left out; found {getattr(self, name)!r}")
        both = set(self.must_keep) & set(self.must_drop)
        if both:
            raise InputError(f"field {min(both)!r} is in must_keep and in must_drop; remove it from one of them")
        if self.level == "cross" and self.model not in (None, "dlrm_cross"):
            raise InputError(f"level='cross' needs the model dlrm_cross, found {self.model!r}")
        if self.level == "field" and self.model == "dlrm_cross":
            raise InputError(
                "dlrm_cross has gates on fields and on crosses: use level='cross' or leave level out; the model "
                "dlrm has gates on fields only"
            )

    @property
    def finds_count(self) -> bool:
        """Whether the number of fields is to be found, because no target fixes it."""
        return self.keep is None and self.penalty is None and self.budget is None

    @property
    def backbone(self) -> str:
        """Name of the model."""
        return self.model or ("dlrm_cross" if self.level == "cross" else "mlp")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, which ``from_json`` reads back."""
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Return settings from plain values; an unknown key or another type is an error."""
        check_json(values, cls)
        return cls(**values)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Settings:
        """Read the settings that a run saved, from its ``config.json`` or its directory."""
        file = Path(path)
        file = file / CONFIG_FILE if file.is_dir() else file
        try:
            values = read_json(file, advice="give the config.json of a run")
            return cls.from_json({name: value for name, value in values.items() if name not in CONFIG_KEYS})
        except FileNotFoundError:
            raise InputError(f"no configuration {file}; give the directory of a run") from None
        except InputError as error:
            raise InputError(str(error) if str(file) in str(error) else f"{file}: {error}") from None

    def updated(self, **changes: Any) -> Settings:
        """Return the settings with some of them changed; a new target replaces the old one."""
        changes = check_keys(Settings, changes)
        if any(changes.get(name) is not None for name in TARGET_FIELDS):
            changes = {**dict.fromkeys(TARGET_FIELDS), **changes}
        return replace(self, **changes) if changes else self

    def with_absolute_paths(self) -> Settings:
        """Return the settings with absolute paths, which mean the same files from any working directory."""
        prepare = dict(self.prepare)
        for name in ("fields", "like"):
            if isinstance(prepare.get(name), str):
                prepare[name] = absolute_path_or_url(prepare[name])
        return replace(
            self,
            source=tuple(map(absolute_path_or_url, self.source)),
            costs=self.costs if self.costs in (None, "complexity") else os.path.abspath(self.costs),
            checkpoint=None if self.checkpoint is None else os.path.abspath(self.checkpoint),
            prepare=prepare,
        )
