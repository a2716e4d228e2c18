"""Method: the contract of every search method; what it is given, and how scores become a Selection."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, get_args, get_type_hints

import torch
from torch import Tensor, nn

from lpfs._validation import check_options, is_number
from lpfs.data.batch import Batch
from lpfs.errors import InputError, SearchError
from lpfs.methods.target import SelectionTarget, TargetKind
from lpfs.models.base import Model
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State
from lpfs.train.checkpoint import Resumable
from lpfs.train.config import Training
from lpfs.train.fit import fit

HISTORY_RECORDS = 200  # records in the history of a search


@dataclass(frozen=True)
class RowFold:
    """The rows of one network of a cross-fitted search.

    Args:
        stream: batches of the rows that its weights are trained on.
        holdout: batches of the other rows, which it is blind to.
    """

    stream: Iterable[Batch]
    holdout: Iterable[Batch]


@dataclass
class SearchTask:
    """One search: the model, the rows, the target.

    Args:
        model: pretrained; trained further in place.
        optimizer: optimizer of the model's parameters.
        stream: batches of the search rows.
        valid: validation batches, on which every choice is made.
        target: what to search for.
        steps: number of steps of the search.
        seed: seed of everything random.
        folder: directory of checkpoints and logs; None: none are written.
        resume: continue from the last checkpoint there.
        training: settings of the training loop.
        holdout: batches of rows that the weights are not trained on, for gates and masks. None: the rows of
            ``stream`` are new at every step, so gates and masks are trained on them too.
        early: batches of the rows that the model was pretrained on, for methods that pretrain a network of their own.
        early_steps: number of steps of such a pretraining.
        folds: rows of the networks of a cross-fitted search, instead of ``holdout``; see ``cross_fitting``.
        judges: rows of the networks that judge exchanges of fields after the search; see ``subset_elimination``.
        judges_folder: directory of these networks, which all searches from the same model share: the first one trains
            them. None: that of the search.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: Iterable[Batch]
    valid: Iterable[Batch] | None
    target: SelectionTarget
    steps: int
    seed: int = 0
    folder: Path | None = None
    resume: bool = False
    training: Training = field(default_factory=Training)
    holdout: Iterable[Batch] | None = None
    early: Iterable[Batch] | None = None
    early_steps: int = 0
    folds: Sequence[RowFold] = ()
    judges: Sequence[RowFold] = ()
    judges_folder: Path | None = None

    def fit(
        self,
        *callbacks: Callback,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        stream: Iterable[Batch] | None = None,
        steps: int | None = None,
        subfolder: str = "",
        **settings: Any,
    ) -> None:
        """Train on the search rows with the callbacks of the method; other arguments replace those of the task."""
        fit(
            model or self.model,
            self.stream if stream is None else stream,
            optimizer or self.optimizer,
            folder=None if self.folder is None else self.folder / subfolder,
            resume=self.resume,
            callbacks=list(callbacks),
            config=replace(self.training, steps=steps or self.steps, epochs=None, lr=None, **settings),
        )


class SearchCost(Callback):
    """Seconds and rows, forward and backward, that a search takes; as a callback it counts the steps.

    Without a training loop, ``with cost:`` measures the seconds. A resumed search counts from its checkpoint on.

    >>> cost = SearchCost()
    >>> with cost:
    ...     cost.add(forwards=512)
    >>> cost.to_dict()["forwards"], cost.to_dict()["backwards"]
    (512, 0)
    """

    def __init__(self) -> None:
        self.forwards, self.backwards = 0, 0
        self._seconds = 0.0  # of the finished measurements
        self._started: float | None = None

    def __enter__(self) -> SearchCost:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._seconds, self._started = self.seconds, None

    @property
    def seconds(self) -> float:
        """Seconds until now."""
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def add(self, *, forwards: int = 0, backwards: int = 0) -> None:
        """Count rows that went through the model outside of the steps."""
        self.forwards += forwards
        self.backwards += backwards

    def add_cost(self, other: SearchCost, share: float = 1.0) -> None:
        """Count the rows of another measurement too, and a share of its seconds."""
        self.add(forwards=other.forwards, backwards=other.backwards)
        self._seconds += share * other.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of ``Selection.made``."""
        return {"seconds": round(self.seconds, 3), "forwards": self.forwards, "backwards": self.backwards}

    def on_begin(self, state: State) -> None:
        self.__enter__()

    def after_step(self, state: State) -> None:
        if state.batch is not None:
            self.add(forwards=len(state.batch), backwards=len(state.batch))

    def on_end(self, state: State) -> None:
        self.__exit__()

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "forwards": self.forwards, "backwards": self.backwards}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        self._seconds, self.forwards, self.backwards = values["seconds"], values["forwards"], values["backwards"]


class HistoryCallback(Callback):
    """A callback that keeps the history of a search: at most about ``HISTORY_RECORDS`` records.

    ``saved`` names further attributes that checkpoints contain: tensors, which are restored in place, or plain values.
    """

    saved: ClassVar[tuple[str, ...]] = ()

    def __init__(self, steps: int) -> None:
        self.steps, self.record_every = steps, max(1, steps // HISTORY_RECORDS)
        self.history: list[dict[str, Any]] = []

    def should_record(self, step: int) -> bool:
        """Return whether this step gets a record; the last one always does."""
        return step % self.record_every == 0 or step == self.steps

    def record(self, state: State, **values: Any) -> None:
        """Append a record: step, loss, and these values."""
        loss = float("nan") if state.loss is None else float(state.loss.detach())
        self.history.append({"step": state.step, "loss": loss, **values})

    def state_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("history", *self.saved)}
        return {name: v.detach().clone() if isinstance(v, Tensor) else copy.copy(v) for name, v in values.items()}

    @torch.no_grad()
    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        for name in ("history", *self.saved):
            current = getattr(self, name)
            if isinstance(current, Tensor):
                current.copy_(values[name])
            else:
                setattr(self, name, copy.copy(values[name]))


Positive: TypeAlias = Annotated[float, "positive"]
NonNegative: TypeAlias = Annotated[float, "non_negative"]
Fraction: TypeAlias = Annotated[float, "fraction"]
Count: TypeAlias = Annotated[int, "count"]


@dataclass(frozen=True)
class MethodOptions:
    """Options of a method; each is checked by its annotation: one of the above, float, or bool; or None."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value = getattr(self, name)
            if type(None) in get_args(hint):
                if value is None:
                    continue
                hint = get_args(hint)[0]
            for kind in getattr(hint, "__metadata__", ()):
                check_options(self, **{kind: (name,)})
            if (hint is bool and not isinstance(value, bool)) or (hint is float and not is_number(value)):
                raise InputError(f"{name} must be {'true or false' if hint is bool else 'a number'}, found {value!r}")


class Method(ABC):
    """A search method. The class says what it supports; :meth:`search` does it.

    Attributes:
        Options: frozen dataclass of its options, which checks itself.
        targets: kinds of SelectionTarget it supports.
        trial_options: option sets that ``compare --tune`` tries after the defaults, in this order.
        distributed: whether several processes can share its search, each with a shard of every batch.
        uses_all_rows: whether it searches on all training rows of a small table, whose rows repeat: it trains
            no gates or masks that need rows of their own.
        single_pass: whether it reads the search rows once at the learning rate of pretraining, in smaller batches if
            there are few rows: it shrinks weights, which must not be those of memorized rows.
        pretrains: whether it pretrains a network of its own on the rows of pretraining, ``SearchTask.early``.
        search_per_k: whether another K needs another search; otherwise the K best of one ranking are kept.
        cuda_graph: whether a step of its search can be captured as a CUDA graph.
        folds: number of folds of the search rows of a small table, whose rows repeat; 0: it does not use folds.
        judges: number of such folds, and of networks, that judge exchanges of fields after the search; 0: none.
        fleet: whether its searches for several K and with several seeds can be trained together; see ``gate_fleet``.

    Args:
        name: the name it is registered under.
        options: its options; by default ``Options()``.
    """

    Options: ClassVar[type] = MethodOptions
    targets: ClassVar[tuple[TargetKind, ...]] = ("keep",)
    trial_options: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    distributed: ClassVar[bool] = False
    uses_all_rows: ClassVar[bool] = False
    single_pass: ClassVar[bool] = False
    pretrains: ClassVar[bool] = False
    search_per_k: bool = False
    cuda_graph: bool = False
    folds: int = 0
    judges: int = 0
    fleet: bool = False

    def __init__(self, name: str, options: Any = None) -> None:
        self.name, self.options = name, self.Options() if options is None else options

    def check(self, target: SelectionTarget, names: Sequence[str], steps: int) -> None:
        """Raise InputError if a search cannot start, before any training.

        Args:
            target: what to search for.
            names: fields, or parts of the model, to select from.
            steps: number of steps of the search.
        """
        if target.kind not in self.targets:
            supported = " or ".join(f"{kind}={'K' if kind == 'keep' else '…'}" for kind in self.targets)
            value = getattr(target, target.kind)
            raise InputError(f"{self.name} does not support {target.kind}={value:g}; give {supported}")
        target.check(names)

    def check_model(self, model: nn.Module) -> None:  # noqa: B027 (optional)
        """Raise InputError if the method is not defined on this model, which may be on the meta device."""

    @abstractmethod
    def search(self, task: SearchTask) -> Selection:
        """Search, and return the selection; gates that the method attaches stay on the model."""


class RankingMethod(Method):
    """A method that scores the parts of a model, without training, and keeps the K best."""

    def search(self, task: SearchTask) -> Selection:
        """Return the K parts with the highest scores; the model is not trained."""
        model = require_model(task.model, self.name)
        self.check(task.target, model.names, task.steps)
        with SearchCost() as cost:
            scores, facts = self.score(task, model, cost)
        return rank_fields(task, self.name, scores, steps=0, **facts, **cost.to_dict())

    @abstractmethod
    def score(self, task: SearchTask, model: Model, cost: SearchCost) -> tuple[dict[str, float], dict[str, Any]]:
        """Return the score of every part, higher is better, and further entries of ``Selection.made``."""


def require_model(model: nn.Module, method: str) -> Model:
    """Return a model of lpfs.models; raise InputError for any other."""
    if not isinstance(model, Model):
        raise InputError(f"{method} needs a model of lpfs.models, found {type(model).__name__}")
    return model


@contextmanager
def restore_position(stream: Iterable[Batch]) -> Iterator[None]:
    """Set a resumable stream back to its position at the end of the block."""
    position = stream.state_dict() if isinstance(stream, Resumable) else None
    try:
        yield
    finally:
        if position is not None and isinstance(stream, Resumable):
            stream.load_state_dict(position)


def select_by_scores(
    task: SearchTask, method: str, scores: Mapping[str, float], selected: Collection[str] | None, **facts: Any
) -> Selection:
    """Return the K best, or, if the target has no K, the parts that the method itself selects (None: it only ranks)."""
    if selected is not None:
        facts = {"own_count": len(selected), **facts}
    if selected is None or task.target.keep is not None:
        return rank_fields(task, method, scores, **facts)
    chosen = {*selected, *task.target.must_keep}
    if not chosen:
        raise SearchError(f"{method} keeps no field at penalty={task.target.penalty:g}; give a smaller one, or keep=K")
    return _make_selection(task, method, scores, chosen, {"penalty": task.target.penalty, **facts})


def rank_fields(task: SearchTask, method: str, scores: Mapping[str, float], **facts: Any) -> Selection:
    """Return the selection of the K highest scores.

    Fields of ``must_keep`` come first; ties keep their order.

    Args:
        task: the search; its target has a K.
        method: name of the method.
        scores: score of every part, higher is better.
        facts: further entries of ``Selection.made``; ``history`` is that of the selection.
    """
    target = task.target
    target.check(list(scores))
    if target.keep is None:
        raise InputError(f"{method} ranks fields, which needs their number: give keep=K")
    chosen = set(top_k(scores, target.keep, target.must_keep))
    return _make_selection(task, method, scores, chosen, {"keep": target.keep, **facts})


def _make_selection(
    task: SearchTask, method: str, scores: Mapping[str, float], chosen: Collection[str], facts: dict[str, Any]
) -> Selection:
    return Selection(
        kept=tuple(name for name in scores if name in chosen),
        dropped=tuple(name for name in scores if name not in chosen),
        gates={name: float(name in chosen) for name in scores},
        history=facts.pop("history", ()),
        made={"method": method, "scores": dict(scores), "seed": task.seed, **facts},
    )


def top_k(scores: Mapping[str, float], keep: int, must_keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the fields of the ``keep`` highest scores, in the order of ``scores``.

    >>> top_k({"a": 0.1, "b": 0.3, "c": 0.2}, 2, must_keep=["a"])
    ('a', 'b')
    """
    chosen = set(sorted(scores, key=lambda name: (name not in must_keep, -scores[name]))[:keep])
    return tuple(name for name in scores if name in chosen)
