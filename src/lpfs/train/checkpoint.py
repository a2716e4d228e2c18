"""Checkpoints: the whole state of a run in a directory that is either complete or absent.

A checkpoint is a directory ``step-000000001000`` with ``tensors.safetensors``, ``state.json`` and ``checkpoint.json``,
which has size and SHA-256 of the other two and a checksum of itself. It is written under a temporary name, flushed to
disk, then renamed: a killed process or a full disk leaves older checkpoints intact. No file can execute code.

Several ranks write in parallel, each some rows of every large tensor, ``tensors-00000-of-00004.safetensors`` …; any
number of ranks can read the result. ``torch.distributed.checkpoint`` has pickled metadata and no checksums.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

import lpfs
from lpfs._fileio import fsync_path, json_checksum, parse_json, read_json, safe_child, write_json
from lpfs._validation import check_name
from lpfs.data.reader import rank_range
from lpfs.errors import CheckpointError, InputError, LpfsError
from lpfs.train.callbacks import State
from lpfs.train.config import FINAL_CONTENTS
from lpfs.train.distributed.group import RankGroup, current_group
from lpfs.train.evaluate import Batches, Metrics
from lpfs.train.step import Stepper
from lpfs.train.tensor_io import NonzeroRows, flatten_state, map_tensors, read_tensors, restore_state, write_tensors

FORMAT = "lpfs-checkpoint"
VERSION, SPLIT_VERSION = 3, 4  # written by one rank, by several ranks
TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "checkpoint.json"
TENSOR_FILES = re.compile(r"tensors(-\d{5}-of-\d{5})?\.safetensors")
MIN_SPLIT_BYTES = 1 << 16  # size of a tensor from which its rows are split over the ranks
DAMAGE = (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)  # of a file
COUNTERS = ("step", "rows", "best_step", "waiting", "stop")  # fields of State that are saved


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged and an older one is used."""


class Checkpoints:
    """The checkpoints of one run, oldest first; the last ``keep`` are kept."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, including damaged ones, in order."""
        paths = [path for path in self.folder.glob("step-*") if not path.is_symlink()]  # a link may lead elsewhere
        names = [path.name.removeprefix("step-") for path in paths]
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, step: int) -> Path:
        """Return the directory of a checkpoint."""
        return self.folder / f"step-{step:012d}"

    def save(self, step: int, state: dict[str, Any], ranks: RankGroup | None = None) -> Path:
        """Write a checkpoint, then remove the oldest ones."""
        out, ranks = self.path(step), ranks or RankGroup()
        values, tensors = flatten_state(state, sparse=True)
        staging = self.folder / f".{out.name}.tmp"

        def create_staging() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".step-*.tmp"):  # of killed processes
                shutil.rmtree(path, ignore_errors=True)
            staging.mkdir()

        def commit() -> None:
            write_manifest(staging, step, values, files)
            if out.exists():  # a damaged checkpoint that was skipped, or one that holds more than the last one must
                shutil.rmtree(out)
            staging.rename(out)
            fsync_path(self.folder)
            self._remove_old(step)

        try:
            ranks.run_on_leader(create_staging, "creating a checkpoint directory")
            files = write_rank_part(staging, tensors, ranks)
            ranks.run_on_leader(commit, "writing a checkpoint")
        except (OSError, LpfsError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            if isinstance(error, LpfsError):
                raise
            raise CheckpointError(
                f"cannot write checkpoint {out}: {error.strerror or error}; the older checkpoints are intact. "
                "Free some space, then resume with resume=True"
            ) from error
        return out

    def load(self, step: int) -> dict[str, Any]:
        """Return the state in one checkpoint, or raise CheckpointError if it is damaged."""
        try:
            return read_checkpoint(self.path(step))
        except DAMAGE as error:
            raise CheckpointError(f"checkpoint {self.path(step)} is damaged: {error}") from error

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the newest intact checkpoint; warn about every damaged one that is skipped."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, self.load(step)
            except CheckpointError as error:
                warnings.warn(f"{error}; the previous checkpoint is used", CheckpointWarning, stacklevel=2)
        if steps:
            advice = "remove the directory to start from the beginning"
            raise CheckpointError(f"all {len(steps)} checkpoints in {self.folder} are damaged; {advice}")
        return None

    def _remove_old(self, step: int) -> None:
        """Remove all but the last ones; the manifest goes first, so that a partial checkpoint is never loaded."""
        for removed in [saved for saved in self.steps() if saved <= step][: -self.keep]:
            (self.path(removed) / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(self.path(removed), ignore_errors=True)


def write_rank_part(folder: Path, tensors: Mapping[str, Tensor | NonzeroRows], ranks: RankGroup) -> dict[str, Any]:
    """Write this rank's rows of some tensors; return sizes and checksums of the files of all ranks."""
    if not ranks.is_distributed:
        return {TENSORS: write_tensors(folder / TENSORS, tensors)}
    name = f"tensors-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
    try:
        entry: dict[str, Any] = {name: write_tensors(folder / name, rank_rows(tensors, ranks.rank, ranks.world))}
    except OSError as error:
        entry = {"error": f"rank {ranks.rank}: {error.strerror}; all ranks must see the directory of the run"}
    files: dict[str, Any] = {}
    for rank_entry in ranks.gather_values(entry, "writing a checkpoint"):
        if "error" in rank_entry:
            raise OSError(rank_entry["error"])
        files |= rank_entry
    return files


def rank_rows(tensors: Mapping[str, Tensor | NonzeroRows], rank: int, world: int) -> dict[str, Tensor]:
    """Return a rank's rows of every large tensor; rank 0 has the small ones."""
    rows = {}
    for name, stored in tensors.items():
        tensor = stored if isinstance(stored, Tensor) else stored.select()
        if tensor.ndim and len(tensor) >= world and tensor.nbytes >= MIN_SPLIT_BYTES:
            rows[name] = tensor[slice(*rank_range(0, len(tensor), rank, world))]
        elif rank == 0:
            rows[name] = tensor
    return rows


def write_manifest(folder: Path, step: int, values: Any, files: dict[str, Any]) -> None:
    """Write ``state.json`` and ``checkpoint.json`` beside the tensors of a state, and flush them to disk."""
    text = json.dumps(values, allow_nan=False).encode()
    (folder / STATE).write_bytes(text)
    manifest = {
        "format": FORMAT,
        "version": VERSION if TENSORS in files else SPLIT_VERSION,
        "lpfs": lpfs.__version__,
        "step": step,
        "files": {**files, STATE: {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}},
    }
    write_json(folder / MANIFEST, {**manifest, "checksum": json_checksum(manifest)})
    for path in (folder / STATE, folder / MANIFEST, folder):
        fsync_path(path)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of ``checkpoint.json``; raise ValueError if it is damaged."""
    manifest: dict[str, Any] = read_json(safe_child(folder, MANIFEST), verify=False)
    checksum = manifest.pop("checksum", None)
    if manifest.get("format") != FORMAT or manifest.get("version") not in (VERSION, SPLIT_VERSION):
        known = f"{FORMAT} {VERSION} or {SPLIT_VERSION} of lpfs {lpfs.__version__}"
        raise ValueError(f"{MANIFEST} does not have the format {known}")
    if json_checksum(manifest) != checksum:
        raise ValueError(f"the checksum of {MANIFEST} does not match")
    return manifest


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state in a checkpoint; damage raises ValueError, LookupError or OSError."""
    files = read_manifest(folder)["files"]
    if STATE not in files:
        raise ValueError(f"{MANIFEST} does not name {STATE}")
    for name, entry in files.items():
        if name != STATE and not TENSOR_FILES.fullmatch(name):
            raise ValueError(f"{MANIFEST} names the file {name[:200]!r}, which a checkpoint does not have")
        path = safe_child(folder, name)
        if (size := path.stat().st_size) != entry["bytes"] or not path.is_file():
            raise ValueError(f"{name} has {size} bytes instead of {entry['bytes']}, or is not a regular file")
    text = (folder / STATE).read_bytes()
    if hashlib.sha256(text).hexdigest() != files[STATE]["sha256"]:
        raise ValueError(f"the checksum of {STATE} does not match")
    parts: dict[str, list[Tensor]] = {}
    for file in sorted(set(files) - {STATE}):
        try:
            for name, tensor in read_tensors(folder / file, files[file]["sha256"]).items():
                parts.setdefault(name, []).append(tensor)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
    tensors = {name: rows[0] if len(rows) == 1 else torch.cat(rows) for name, rows in parts.items()}
    state = restore_state(parse_json(text), tensors)
    if not isinstance(state, dict):
        raise ValueError(f"{STATE} must be an object, found {type(state).__name__}")
    return state


@runtime_checkable
class Resumable(Protocol):
    """Batches whose position can be saved, such as ``Stream``."""

    def __len__(self) -> int: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position."""


def take_snapshot(
    stepper: Stepper,
    stream: Batches,
    valid: Batches | None,
    log: int | None,
    best: Mapping[str, Any] | None,
    content: str = "all",
) -> dict[str, Any]:
    """Return everything that the next step depends on, or the result at the end.

    Args:
        stepper, stream, valid: of the run.
        log: length of the log file.
        best: states of the best model and its optimizer, if it is not the current one.
        content: of the last checkpoint; ``all`` before.
    """
    state = stepper.state
    stepper.collect()
    optimizer = state.optimizer.state_dict() if content in ("all", "result") else None
    return {
        "final": content,
        "best_state": best,
        "config": state.config.to_json(),
        "counters": {name: getattr(state, name) for name in COUNTERS},
        "metrics": None if state.metrics is None else state.metrics.to_json(),
        "best": None if state.best is None else state.best.to_json(),
        "loss": {"total": stepper.total, "count": stepper.count},
        "model": None if content == "none" else dict(state.model.state_dict()),
        "optimizer": {"class": type(state.optimizer).__name__, "state": optimizer},
        "rates": list(stepper.rates),
        "callbacks": [{"class": type(hook).__name__, "state": hook.state_dict()} for hook in stepper.callbacks],
        "stream": _stream_position(stream),
        "valid": _stream_position(valid),
        "random": current_group().gather_values(random_state(), "gathering random states"),
        "log": log,
    }


def restore_snapshot(saved: Mapping[str, Any], stepper: Stepper, stream: Batches, valid: Batches | None) -> None:
    """Restore the state of a run; everything that can be compared is checked before anything changes."""
    try:
        _check_counters(saved)
        _restore_snapshot(saved, stepper, stream, valid)
    except (LpfsError, torch.OutOfMemoryError):
        raise
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"the newest checkpoint cannot be restored ({reason}); remove it to resume from the previous one"
        ) from error


def _check_counters(saved: Mapping[str, Any]) -> None:
    """Raise TypeError if a counter, or the position in the log, is not an integer >= 0 or None."""
    counters = {**saved["counters"], "log": saved["log"], "evaluated": int(saved["evaluated"])}
    if sorted(counters) != sorted((*COUNTERS, "log", "evaluated")):
        raise TypeError(f"found the counters {sorted(counters)}")
    for name, value in counters.items():
        valid = isinstance(value, str) if name == "stop" else type(value) is int and value >= 0
        if not valid and (value is not None or name in ("step", "rows", "waiting")):
            raise TypeError(f"{name!r} is {str(value)[:80]!r}")


def _restore_snapshot(saved: Mapping[str, Any], stepper: Stepper, stream: Batches, valid: Batches | None) -> None:
    state = stepper.state
    state.config.check_same(saved["config"])
    _check_equal("optimizer", saved["optimizer"]["class"], type(state.optimizer).__name__)
    callbacks = [type(callback).__name__ for callback in stepper.callbacks]
    _check_equal("callbacks", [entry["class"] for entry in saved["callbacks"]], callbacks)
    content = saved.get("final", "all")
    check_name(content, FINAL_CONTENTS, "content of a last checkpoint")
    states, best = final_states(saved, content), saved["best_state"]
    for entry in (states, best or {}):
        if entry:
            _check_model(entry["model"], state.model.state_dict())
        if "optimizer" in entry:
            groups = entry["optimizer"]["param_groups"], state.optimizer.param_groups
            counts = ([len(group["params"]) for group in side] for side in groups)
            _check_equal("numbers of parameters in the groups of the optimizer", *counts)
    counters = saved["counters"]
    has_best = best is not None or state.config.keep != "best" or counters["best_step"] in (None, counters["step"])
    if content == "all" and not has_best:
        raise ValueError(f"the best model, of step {counters['best_step']}, is missing")
    _restore_position(stream, saved["stream"], "stream")
    if valid is not None and saved["valid"] is not None:
        _restore_position(valid, saved["valid"], "valid")
    load_states(state, states)
    stepper.rates[:] = saved["rates"]
    for callback, entry in zip(stepper.callbacks, saved["callbacks"], strict=True):
        callback.load_state_dict(entry["state"])
    for name in COUNTERS:
        setattr(state, name, counters[name])
    state.metrics = None if saved["metrics"] is None else Metrics.from_json(saved["metrics"])
    state.best = None if saved["best"] is None else Metrics.from_json(saved["best"])
    stepper.total, stepper.count = saved["loss"]["total"], saved["loss"]["count"]
    ranks = current_group()
    if ranks.rank < len(saved["random"]):
        restore_random(saved["random"][ranks.rank])
    else:  # a rank that did not exist before gets a new random stream
        seed_rank(state.config.seed, ranks.rank, state.step)


def final_states(saved: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return the states of model and optimizer in a checkpoint, of which the last one of a run may lack some."""
    states = {} if content == "none" else {"model": saved["model"]}
    return states if content in ("none", "model") else {**states, "optimizer": saved["optimizer"]["state"]}


def load_states(state: State, states: Mapping[str, Any]) -> None:
    """Load the states of model and optimizer, as far as they are given."""
    if "model" in states:
        state.model.load_state_dict(states["model"])
    if "optimizer" in states:
        state.optimizer.load_state_dict(states["optimizer"])


def _check_equal(name: str, saved: Any, current: Any) -> None:
    if saved != current:
        raise InputError(f"the run was started with {name} {saved!r} and cannot resume with {current!r}")


def _check_model(saved: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    """Raise InputError with the first name, dtype or shape in which two state dicts differ."""
    for name in [*saved, *model]:
        if name not in saved or name not in model:
            owner = "the model" if name in model else "the checkpoint"
            raise InputError(f"this is not the model of the run: only {owner} has {name!r}")
        current, expected = (
            f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            for value in (model[name], saved[name])
        )
        if current != expected:
            raise InputError(f"this is not the model of the run: {name!r} is {current}, the checkpoint has {expected}")


def _stream_position(stream: Batches | None) -> dict[str, Any] | None:
    """Return position and batch size of a stream; None if it is not resumable."""
    if not isinstance(stream, Resumable):
        return None
    rows = getattr(stream, "step_rows", getattr(stream, "batch_size", None))  # of all ranks, whose number may change
    settings = {"batch_size": rows, "drop_last": getattr(stream, "drop_last", None), "length": len(stream)}
    return {**settings, "position": stream.state_dict()}


def _restore_position(stream: Batches, saved: Mapping[str, Any] | None, name: str) -> None:
    if saved is None or not isinstance(stream, Resumable):
        raise InputError(f"resume needs a {name} with state_dict, load_state_dict and a length; use lpfs.Stream")
    for key, value in (_stream_position(stream) or {}).items():
        if key != "position":
            _check_equal(f"a {name} of {key}", saved.get(key), value)
    stream.load_state_dict(saved["position"])


def map_weights(model: nn.Module, folder: Path) -> None:
    """Map the weights of a finished model from the last checkpoint in a folder, so that they need no memory.

    The values do not change. Weights on a GPU and those in the files of several ranks stay as they are. Weights that
    are used are read into memory; mapping them again releases it.
    """
    checkpoints = Checkpoints(folder)
    path = checkpoints.path(checkpoints.steps()[-1]) / TENSORS
    tensors = map_tensors(path) if path.is_file() else {}
    for name, weight in model.named_parameters():
        mapped = tensors.get(f"model.{name}")
        if mapped is not None and weight.device.type == "cpu":
            weight.data = mapped


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load the state of an optimizer from the last checkpoint in a folder, of a run that was not resumed."""
    checkpoints = Checkpoints(folder)
    optimizer.load_state_dict(checkpoints.load(checkpoints.steps()[-1])["optimizer"]["state"])


def seed_all(seed: int) -> None:
    """Seed the generators of torch, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_rank(seed: int | None, rank: int, step: int = 0) -> None:
    """Seed the generators of one rank: rank 0 like a single process, every other rank differently."""
    if seed is not None:
        seed_all(seed + 1_000_003 * rank + (10_007 * step if rank else 0))


def random_state() -> dict[str, Any]:
    """Return the state of the generators of torch, CUDA, numpy and Python."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    cuda = []
    if torch.cuda.is_available():  # with several ranks, only the GPU of this rank
        cuda = [torch.cuda.get_rng_state()] if current_group().is_distributed else torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def restore_random(saved: Mapping[str, Any]) -> None:
    """Restore the state of all generators."""
    torch.set_rng_state(saved["torch"])
    if current_group().is_distributed and len(saved["cuda"]) == 1:
        torch.cuda.set_rng_state(saved["cuda"][0])
    elif not current_group().is_distributed and len(saved["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    random.setstate(saved["python"])


def share_random() -> None:
    """Give all ranks the random state of rank 0."""
    ranks = current_group()
    if ranks.is_distributed:
        restore_random(ranks.gather_values(random_state(), "gathering random states")[0])
