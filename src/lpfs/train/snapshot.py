"""The whole state of a run as one nested value, and back: what a checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from lpfs.data.batches.batch import Batch
from lpfs.errors import InputError
from lpfs.train.evaluate import Metrics
from lpfs.train.distributed.group import current
from lpfs.train.step import Stepper

COUNTERS = ("step", "rows", "best_step", "waiting", "stop")


@runtime_checkable
class Resumable(Protocol):
    """Batches whose position can be saved, as ``Stream`` gives them."""

    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position."""
        ...


def take_snapshot(
    stepper: Stepper, stream: Iterable[Batch], valid: Iterable[Batch] | None, log: int | None
) -> dict[str, Any]:
    """Return everything that the next step depends on, and the length of the log."""
    state = stepper.state
    stepper.collect()
    return {
        "config": state.config.to_json(),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "metrics": None if state.metrics is None else state.metrics.to_json(),
        "best": None if state.best is None else state.best.to_json(),
        "loss": {"total": stepper.total, "count": stepper.count},
        "model": dict(state.model.state_dict()),
        "optimizer": {"class": type(state.optimizer).__name__, "state": state.optimizer.state_dict()},
        "rates": list(stepper.rates),
        "callbacks": [{"class": type(each).__name__, "state": each.state_dict()} for each in stepper.callbacks],
        "stream": position_of(stream),
        "valid": position_of(valid),
        "random": current().collect(random_state(), "collecting generators"),
        "log": log,
    }


def restore_snapshot(
    saved: Mapping[str, Any], stepper: Stepper, stream: Iterable[Batch], valid: Iterable[Batch] | None
) -> None:
    """Put a run where it was; everything that can be compared is compared before anything changes."""
    state = stepper.state
    state.config.check_same(saved["config"])
    same("optimizer", saved["optimizer"]["class"], type(state.optimizer).__name__)
    mine = [type(each).__name__ for each in stepper.callbacks]
    same("callbacks", [each["class"] for each in saved["callbacks"]], mine)
    model = state.model.state_dict()
    check_model(saved["model"], model)
    groups = saved["optimizer"]["state"]["param_groups"], state.optimizer.param_groups
    theirs, ours = ([len(group["params"]) for group in each] for each in groups)
    same("an optimizer of so many parameters a group:", theirs, ours)
    place(stream, saved["stream"], "stream")
    if valid is not None and saved["valid"] is not None:
        place(valid, saved["valid"], "valid")
    state.model.load_state_dict(saved["model"])
    state.optimizer.load_state_dict(saved["optimizer"]["state"])
    stepper.rates[:] = saved["rates"]
    for callback, each in zip(stepper.callbacks, saved["callbacks"], strict=True):
        callback.load_state_dict(each["state"])
    for name in COUNTERS:
        setattr(state, name, saved["counters"][name])
    state.metrics = None if saved["metrics"] is None else Metrics.from_json(saved["metrics"])
    state.best = None if saved["best"] is None else Metrics.from_json(saved["best"])
    stepper.total, stepper.count = saved["loss"]["total"], saved["loss"]["count"]
    ranks = current()
    drawn = saved["random"] if isinstance(saved["random"], list) else [saved["random"]]
    if ranks.rank < len(drawn):
        restore_random(drawn[ranks.rank])
    else:  # a rank that was not there: it draws what nobody has drawn
        seed_rank(state.config.seed, ranks.rank, state.step)


def same(what: str, saved: Any, mine: Any) -> None:
    """Refuse a run that was begun with something else."""
    if saved != mine:
        raise InputError(f"the run was begun with {what} {saved!r} and cannot go on with {mine!r}")


def check_model(saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a model of other names or shapes, by the first that differs."""
    for name in [*saved, *model]:
        if name not in saved or name not in model:
            where = "the model" if name in model else "the checkpoint"
            raise InputError(f"this is not the model of the run: only {where} has {name!r}")
        mine, theirs = (describe(of[name]) for of in (model, saved))
        if mine != theirs:
            raise InputError(f"this is not the model of the run: {name!r} is {mine}, the checkpoint has {theirs}")


def describe(value: Any) -> str:
    """Return kind and shape of a value of a state dict."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def position_of(stream: Iterable[Batch] | None) -> dict[str, Any] | None:
    """Return where a stream stands, and how it cuts its rows; None if it cannot tell."""
    if not isinstance(stream, Resumable):
        return None
    rows = getattr(
        stream, "step_rows", getattr(stream, "batch_size", None)
    )  # of all ranks: their number may change
    cut = {"batch_size": rows, "drop_last": getattr(stream, "drop_last", None)}
    return {**cut, "length": len(stream), "position": stream.state_dict()}


def place(stream: Iterable[Batch], saved: Mapping[str, Any] | None, name: str) -> None:
    """Put a stream where it was."""
    if saved is None or not isinstance(stream, Resumable):
        raise InputError(
            f"resume needs a {name} with state_dict, load_state_dict and a length, such as lpfs.Stream"
        )
    for key, mine in (position_of(stream) or {}).items():
        if key != "position":
            same(f"a {name} of {key}", saved.get(key), mine)
    stream.load_state_dict(saved["position"])


def seed_all(seed: int) -> None:
    """Seed every generator that a model may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_rank(seed: int | None, rank: int, step: int = 0) -> None:
    """Seed the generators of one rank: rank 0 as one process would be, the others each in its own way."""
    if seed is not None:
        seed_all(seed + 1_000_003 * rank + (10_007 * step if rank else 0))


def random_state() -> dict[str, Any]:
    """Return the state of every generator that a model may draw from."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = []
    if torch.cuda.is_available():  # several ranks have a GPU each, and leave those of the others alone
        cuda = [torch.cuda.get_rng_state()] if current().several else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "numpy": [str(kind), [int(each) for each in keys], int(place), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Put every generator where it was."""
    torch.set_rng_state(saved["torch"])
    if current().several and len(saved["cuda"]) == 1:
        torch.cuda.set_rng_state(saved["cuda"][0])
    elif not current().several and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), place, has_gauss, gauss))
    random.setstate(saved["python"])
