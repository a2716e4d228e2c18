"""Settings: everything a run of ``select`` depends on, saved beside its answer and read back for the next."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lpfs.data.remote import absolute_path_or_url
from lpfs.errors import InputError
from lpfs.schema import known_keys

Finish = Literal["both", "hot", "retrain", "none"]
Level = Literal["field", "cross"]


@dataclass(frozen=True)
class Settings:
    """What to select from, what is wanted, and how it is done; None stands for a default found from the data.

    Args:
        source: the log: files, or the folder of a Dataset.
        label, time, split: columns of the clicks, of the time, of train / test; not needed for a Dataset.
        prepare: further options of ``prepare``.
        keep, penalty, budget, max_auc_loss: what is wanted, in one way; none: a small AUC loss.
        costs: a TOML file of costs, or ``complexity`` for FSCD's.
        must_keep, must_drop: fields that stay, and fields that are never looked at.
        method: how to search; ``options`` are its settings.
        level: gates on fields, or on the fields and crosses of DLRMCross, which has no others; None: as the model.
        model: the backbone; ``model_options`` are its settings.
        checkpoint: the folder of a trained model to start from instead of pretraining.
        optimizer, lr: of the model.
        batch_size, pretrain_steps, search_steps: how long.
        precision: ``float32`` or ``bfloat16``.
        graph: whether a GPU captures a step once as a CUDA graph and replays it; None: where it can.
        finish: go on from the pruned model (``hot``), train the kept fields from scratch (``retrain``), both or
            none.
        seed: of everything that is drawn.
        seeds: how many searches; the first gives the answer, all of them how often each field was chosen.
        device: ``auto``, ``cpu``, ``cuda`` …
        tensorboard: write TensorBoard files into the folder of every training.
        mlflow: log to MLflow, where MLFLOW_TRACKING_URI says: one run, its trainings in it, the files it leaves.

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
    batch_size: int | None = None
    pretrain_steps: int | None = None
    search_steps: int | None = None
    precision: str = "float32"
    graph: bool | None = None
    finish: Finish = "both"
    seed: int = 0
    seeds: int = 1
    device: str = "auto"
    tensorboard: bool = False
    mlflow: bool = False

    def __post_init__(self) -> None:
        for name in ("source", "must_keep", "must_drop"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        choices = {"finish": ("both", "hot", "retrain", "none"), "level": ("field", "cross")}
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known and not (name == "level" and value is None):
                raise InputError(f"{name} must be one of {', '.join(known)}; found {value!r}")
        for name, least in (("seed", 0), ("seeds", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"{name} must be a whole number >= {least}, found {value!r}")
        if self.graph not in (None, True, False):
            raise InputError(f"graph must be true, false or left out; found {self.graph!r}")
        both = set(self.must_keep) & set(self.must_drop)
        if both:
            raise InputError(f"field {min(both)!r} must be kept and must be dropped: decide")
        if self.level == "cross" and self.model not in (None, "dlrm_cross"):
            raise InputError(f"level='cross' gates the crosses of dlrm_cross, not of {self.model!r}")
        if self.level == "field" and self.model == "dlrm_cross":
            raise InputError(
                "dlrm_cross has gates on fields and on their crosses: say level='cross', or nothing; dlrm is the "
                "model with gates on fields alone"
            )

    @property
    def backbone(self) -> str:
        """The name of the model."""
        return self.model or ("dlrm_cross" if self.level == "cross" else "mlp")

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_json`` reads them back."""
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Build settings from plain values; an unknown key is an error."""
        return cls(**known_keys(cls, values))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Settings:
        """Read the settings that a run saved: its ``config.json``, or the folder of the run."""
        place = Path(path)
        place = place / CONFIG if place.is_dir() else place
        try:
            values = json.loads(place.read_text("utf-8"))
        except FileNotFoundError:
            raise InputError(f"there is no configuration {place}") from None
        except ValueError as error:
            raise InputError(f"{place} is not JSON: {error}") from None
        if isinstance(values, dict):
            values.pop("format", None)
        return cls.from_json(values)

    def updated(self, **given: Any) -> Settings:
        """Return the settings with those given in place of the old ones; a new wish takes the place of the old."""
        given = known_keys(Settings, given)
        if any(given.get(name) is not None for name in TARGET_FIELDS):
            given = {**dict.fromkeys(TARGET_FIELDS), **given}
        return replace(self, **given) if given else self

    def with_absolute_paths(self) -> Settings:
        """Return the settings with absolute paths, so that they mean the same files from any folder."""
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


TARGET_FIELDS = ("keep", "penalty", "budget", "max_auc_loss")
CONFIG, FORMAT = "config.json", "lpfs-run"
