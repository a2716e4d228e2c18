"""Job: what an experiment is given, and Found: what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpfs.data.dataset import Dataset
from lpfs.errors import InputError
from lpfs.paper.source import Log
from lpfs.pipeline.tell import Console

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Scale:
    """How large an experiment is; None: as ``select`` finds it from the data.

    Args:
        rows: of the simulated log.
        model, model_options: the backbone.
        batch_size, pretrain, search: rows in a step, steps of pretraining and of a search.
        seeds: how many.

    """

    rows: int | None = None
    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    pretrain: int | None = None
    search: int | None = None
    seeds: int = 3

    def settings(self) -> dict[str, Any]:
        """Return what ``select`` and ``compare`` are told."""
        return {
            "model": self.model,
            "model_options": dict(self.model_options),
            "batch_size": self.batch_size,
            "pretrain_steps": self.pretrain,
            "search_steps": self.search,
        }

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass
class Job:
    """One experiment: its data, its size, its seed, and where it may leave things.

    Args:
        source: the log; None for an experiment that needs none.
        folder: where it works; what is there is not done again.
        scale: how large.
        seed: the first.
        full: whether it is the real thing, or small.
        tell: says how it goes.

    """

    source: Log | None
    folder: Path
    scale: Scale
    seed: int
    full: bool
    console: Console

    @property
    def log(self) -> Dataset:
        """The data of an experiment that needs some."""
        if self.source is None:
            raise InputError("this experiment needs a log")
        return self.source.data

    @property
    def seeds(self) -> range:
        """The seeds."""
        return range(self.seed, self.seed + self.scale.seeds)

    @property
    def truth(self) -> Path | None:
        """Where the truth of a simulated log is."""
        return None if self.source is None else self.source.truth

    @property
    def kinds(self) -> dict[str, str]:
        """What is true of the fields of a simulated log; empty for a real one."""
        return {} if self.source is None else self.source.kinds

    @property
    def real(self) -> bool:
        """Whether the log is the user's own."""
        return self.source is not None and self.source.preset is None


@dataclass(frozen=True)
class Found:
    """What an experiment found.

    Args:
        ours: numbers, as plain JSON values.
        paper: the paper's own.
        rows: what was measured, what the paper says of it, what was found here.
        draw: draws on a figure.
        size: of the figure, in inches.

    """

    ours: Mapping[str, Any]
    paper: Mapping[str, Any]
    rows: Sequence[tuple[str, str, str]]
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (9.0, 3.6)
