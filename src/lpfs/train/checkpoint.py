"""Checkpoints: the whole state of a run in a folder, there completely or not at all.

A checkpoint is a folder ``step-000000001000`` of three files: ``tensors.safetensors``, ``state.json`` and
``checkpoint.json``, which holds size and SHA-256 of the other two and a checksum of its own. It is filled aside,
put on the disk, then renamed: a kill or a full disk at any moment leaves the older ones as they were. Nothing
in here runs code that a file brings along.

Several ranks write side by side, each a part of the rows of every large tensor,
``tensors-00000-of-00004.safetensors`` …; the whole is read back by any number of ranks.
``torch.distributed.checkpoint`` would do that too, but keeps its directory in a pickle, and has no checksums.

The whole state of a run as one nested value, and back: what a checkpoint holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

import lpfs
from lpfs._fileio import fsync_path, json_checksum, write_json
from lpfs.data.batch import Batch
from lpfs.data.reader import rank_range
from lpfs.errors import CheckpointError, InputError, LpfsError
from lpfs.train.distributed.group import RankGroup, current_group
from lpfs.train.evaluate import Metrics
from lpfs.train.step import Stepper
from lpfs.train.tensor_io import flatten_state, read_tensors, restore_state, write_tensors

FORMAT, VERSION, SPLIT = "lpfs-checkpoint", 1, 2  # the second, of several ranks
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "checkpoint.json"
LARGE = 1 << 16  # bytes of a tensor from which on several ranks share it


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged and an older one is used."""


class Checkpoints:
    """The checkpoints of one run, oldest first; the last ``keep`` stay."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Return the steps that there is a checkpoint of, whole or damaged, in order."""
        if not self.folder.is_dir():
            return []
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Return the folder of a checkpoint."""
        return self.folder / f"step-{step:012d}"

    def save(
        self, step: int, state: dict[str, Any], needs: Sequence[int] = (), ranks: RankGroup | None = None
    ) -> Path:
        """Write a checkpoint, then remove the oldest, except those of steps that a kept one needs."""
        out, ranks = self.path(step), ranks or RankGroup()
        aside = self.folder / f".{out.name}.tmp"
        try:
            ranks.run_on_leader(lambda: self._make(aside), "making room for a checkpoint")
            files = write_rank_part(aside, state, ranks)
            ranks.run_on_leader(lambda: self._put(aside, out, step, state, needs, files), "writing a checkpoint")
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {out}: {error.strerror or error}; the older checkpoints are intact. "
                "Free some space, then go on with resume=True"
            ) from error
        except LpfsError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return out

    def _make(self, aside: Path) -> None:
        """Make an empty folder to fill."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        aside.mkdir()

    def _put(
        self, aside: Path, out: Path, step: int, state: dict[str, Any], needs: Sequence[int], files: dict[str, Any]
    ) -> None:
        """Complete what was filled, and put it in its place."""
        write_manifest(aside, step, state, needs, files)
        if out.exists():  # a damaged one that was passed over
            shutil.rmtree(out)
        aside.rename(out)
        fsync_path(self.folder)
        self._prune(step)

    def load(self, step: int) -> dict[str, Any]:
        """Return the state in one checkpoint, or raise CheckpointError if it is damaged."""
        path = self.path(step)
        try:
            return read_checkpoint(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the newest checkpoint that is whole, with a warning for each damaged one passed over."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, self.load(step)
            except CheckpointError as error:
                warnings.warn(f"{error}; the one before it is used", CheckpointWarning, stacklevel=2)
        if steps:
            raise CheckpointError(
                f"none of the {len(steps)} checkpoints in {self.folder} is whole; "
                "remove the folder to start from the beginning"
            )
        return None

    def _sweep(self) -> None:
        """Remove what a killed save left behind."""
        for path in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(path, ignore_errors=True)

    def _prune(self, step: int) -> None:
        """Remove all but the last ones; a folder loses its seal first, so that half of it is never taken."""
        older = [each for each in self.steps() if each <= step]
        needed: set[int] = set()
        for each in older[-self.keep :]:
            with suppress(OSError, ValueError):
                needed.update(read_manifest(self.path(each))["needs"])
        for each in set(older[: -self.keep]) - needed:
            (self.path(each) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path(each), ignore_errors=True)


def write_rank_part(folder: Path, state: dict[str, Any], ranks: RankGroup) -> dict[str, Any]:
    """Write this rank's part of the tensors of a state; return sizes and checksums of the files of all ranks."""
    tensors = flatten_state(state)[1]
    if not ranks.is_distributed:
        return {TENSORS: write_tensors(folder / TENSORS, tensors)}
    name = f"tensors-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
    found: dict[str, Any]
    try:
        found = {name: write_tensors(folder / name, rank_rows(tensors, ranks.rank, ranks.world))}
    except OSError as error:
        found = {"error": f"rank {ranks.rank}: {error.strerror}; all ranks must see the folder of the run"}
    files: dict[str, Any] = {}
    for each in ranks.gather_values(found, "writing a checkpoint"):
        if "error" in each:
            raise OSError(each["error"])
        files |= each
    return files


def rank_rows(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """Return a rank's rows of every large tensor; rank 0 has the small ones."""
    found = {}
    for name, tensor in tensors.items():
        if is_split_over_ranks(tensor, world):
            first, stop = rank_range(0, len(tensor), rank, world)
            found[name] = tensor[first:stop]
        elif rank == 0:
            found[name] = tensor
    return found


def is_split_over_ranks(tensor: Tensor, world: int) -> bool:
    """Whether several ranks write a part of a tensor each."""
    return tensor.ndim > 0 and len(tensor) >= world and tensor.numel() * tensor.element_size() >= LARGE


def write_manifest(
    folder: Path, step: int, state: dict[str, Any], needs: Sequence[int], files: Mapping[str, Any]
) -> None:
    """Complete a folder that holds the tensors of a state, and put it on the disk."""
    values, _ = flatten_state(state)
    files = dict(files)
    text = json.dumps(values, allow_nan=False).encode()
    with (folder / STATE).open("wb") as file:
        file.write(text)
    fsync_path(folder / STATE)
    files[STATE] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    version = VERSION if TENSORS in files else SPLIT
    about = {"format": FORMAT, "version": version, "lpfs": lpfs.__version__, "step": step}
    about.update(needs=list(needs), files=files)
    write_json(folder / MANIFEST, {**about, "checksum": json_checksum(about)})
    fsync_path(folder / MANIFEST)
    fsync_path(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what ``checkpoint.json`` says."""
    about: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
    checksum = about.pop("checksum", None)
    if about.get("format") != FORMAT or about.get("version") not in (VERSION, SPLIT):
        raise ValueError(
            f"{MANIFEST} is not of {FORMAT} {VERSION} or {SPLIT}, which lpfs {lpfs.__version__} reads"
        )
    if json_checksum(about) != checksum:
        raise ValueError(f"the checksum of {MANIFEST} does not match")
    return about


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state in a checkpoint folder; anything amiss is a ValueError, a LookupError or an OSError."""
    about = read_manifest(folder)
    for name, entry in about["files"].items():
        if os.path.getsize(folder / name) != entry["bytes"]:
            raise ValueError(f"{name} has {os.path.getsize(folder / name)} bytes instead of {entry['bytes']}")
    text = (folder / STATE).read_bytes()
    if hashlib.sha256(text).hexdigest() != about["files"][STATE]["sha256"]:
        raise ValueError(f"the checksum of {STATE} does not match")
    parts: dict[str, list[Tensor]] = {}
    for file in sorted(set(about["files"]) - {STATE}):
        try:
            for name, tensor in read_tensors(folder / file, about["files"][file]["sha256"]).items():
                parts.setdefault(name, []).append(tensor)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    tensors = {name: several[0] if len(several) == 1 else torch.cat(several) for name, several in parts.items()}
    state: dict[str, Any] = restore_state(json.loads(text), tensors)
    return state


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
        "stream": _stream_position(stream),
        "valid": _stream_position(valid),
        "random": current_group().gather_values(random_state(), "collecting generators"),
        "log": log,
    }


def restore_snapshot(
    saved: Mapping[str, Any], stepper: Stepper, stream: Iterable[Batch], valid: Iterable[Batch] | None
) -> None:
    """Put a run where it was; everything that can be compared is compared before anything changes."""
    state = stepper.state
    state.config.check_same(saved["config"])
    _check_equal("optimizer", saved["optimizer"]["class"], type(state.optimizer).__name__)
    mine = [type(each).__name__ for each in stepper.callbacks]
    _check_equal("callbacks", [each["class"] for each in saved["callbacks"]], mine)
    model = state.model.state_dict()
    check_model(saved["model"], model)
    groups = saved["optimizer"]["state"]["param_groups"], state.optimizer.param_groups
    theirs, ours = ([len(group["params"]) for group in each] for each in groups)
    _check_equal("an optimizer of so many parameters a group:", theirs, ours)
    _restore_position(stream, saved["stream"], "stream")
    if valid is not None and saved["valid"] is not None:
        _restore_position(valid, saved["valid"], "valid")
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
    ranks = current_group()
    drawn = saved["random"] if isinstance(saved["random"], list) else [saved["random"]]
    if ranks.rank < len(drawn):
        restore_random(drawn[ranks.rank])
    else:  # a rank that was not there: it draws what nobody has drawn
        seed_rank(state.config.seed, ranks.rank, state.step)


def _check_equal(what: str, saved: Any, mine: Any) -> None:
    """Refuse a run that was begun with something else."""
    if saved != mine:
        raise InputError(f"the run was begun with {what} {saved!r} and cannot go on with {mine!r}")


def check_model(saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Refuse a model of other names or shapes, by the first that differs."""
    for name in [*saved, *model]:
        if name not in saved or name not in model:
            where = "the model" if name in model else "the checkpoint"
            raise InputError(f"this is not the model of the run: only {where} has {name!r}")
        mine, theirs = (_describe_value(of[name]) for of in (model, saved))
        if mine != theirs:
            raise InputError(f"this is not the model of the run: {name!r} is {mine}, the checkpoint has {theirs}")


def _describe_value(value: Any) -> str:
    """Return kind and shape of a value of a state dict."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _stream_position(stream: Iterable[Batch] | None) -> dict[str, Any] | None:
    """Return where a stream stands, and how it cuts its rows; None if it cannot tell."""
    if not isinstance(stream, Resumable):
        return None
    rows = getattr(
        stream, "step_rows", getattr(stream, "batch_size", None)
    )  # of all ranks: their number may change
    cut = {"batch_size": rows, "drop_last": getattr(stream, "drop_last", None)}
    return {**cut, "length": len(stream), "position": stream.state_dict()}


def _restore_position(stream: Iterable[Batch], saved: Mapping[str, Any] | None, name: str) -> None:
    """Put a stream where it was."""
    if saved is None or not isinstance(stream, Resumable):
        raise InputError(
            f"resume needs a {name} with state_dict, load_state_dict and a length, such as lpfs.Stream"
        )
    for key, mine in (_stream_position(stream) or {}).items():
        if key != "position":
            _check_equal(f"a {name} of {key}", saved.get(key), mine)
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
        cuda = [torch.cuda.get_rng_state()] if current_group().is_distributed else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": list(cuda),
        "numpy": [str(kind), [int(each) for each in keys], int(place), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Put every generator where it was."""
    torch.set_rng_state(saved["torch"])
    if current_group().is_distributed and len(saved["cuda"]) == 1:
        torch.cuda.set_rng_state(saved["cuda"][0])
    elif not current_group().is_distributed and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, place, has_gauss, gauss = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), place, has_gauss, gauss))
    random.setstate(saved["python"])
