"""Checkpoints: the whole state of a run in a folder, there completely or not at all.

A checkpoint is a folder ``step-000000001000`` of three files: ``tensors.safetensors``, ``state.json`` and
``checkpoint.json``, which holds size and SHA-256 of the other two and a checksum of its own. It is filled aside,
put on the disk, then renamed: a kill or a full disk at any moment leaves the older ones as they were. Nothing
in here runs code that a file brings along.

Several ranks write side by side, each a part of the rows of every large tensor,
``tensors-00000-of-00004.safetensors`` …; the whole is read back by any number of ranks.
``torch.distributed.checkpoint`` would do that too, but keeps its directory in a pickle, and has no checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lpfs
from lpfs.data.batches.order import share
from lpfs.data.store.format import json_checksum, sync, write_json
from lpfs.errors import CheckpointError, LpfsError
from lpfs.train.codec import pack, unpack
from lpfs.train.distributed.group import Ranks
from lpfs.train.tensor_io import read_tensors, write_tensors

FORMAT, VERSION, SPLIT = "lpfs-checkpoint", 1, 2  # the second, of several ranks
TENSORS, STATE, SEAL = "tensors.safetensors", "state.json", "checkpoint.json"
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
        self, step: int, state: dict[str, Any], needs: Sequence[int] = (), ranks: Ranks | None = None
    ) -> Path:
        """Write a checkpoint, then remove the oldest, except those of steps that a kept one needs."""
        out, ranks = self.path(step), ranks or Ranks()
        aside = self.folder / f".{out.name}.tmp"
        try:
            ranks.agree(lambda: self._make(aside), "making room for a checkpoint")
            files = write_parts(aside, state, ranks)
            ranks.agree(lambda: self._put(aside, out, step, state, needs, files), "writing a checkpoint")
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
        write_seal(aside, step, state, needs, files)
        if out.exists():  # a damaged one that was passed over
            shutil.rmtree(out)
        aside.rename(out)
        sync(self.folder)
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
                needed.update(read_seal(self.path(each))["needs"])
        for each in set(older[: -self.keep]) - needed:
            (self.path(each) / SEAL).unlink(missing_ok=True)
            shutil.rmtree(self.path(each), ignore_errors=True)


def write_parts(folder: Path, state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Write this rank's part of the tensors of a state; return sizes and checksums of the files of all ranks."""
    tensors = pack(state)[1]
    if not ranks.several:
        return {TENSORS: write_tensors(folder / TENSORS, tensors)}
    name = f"tensors-{ranks.rank:05d}-of-{ranks.world:05d}.safetensors"
    found: dict[str, Any]
    try:
        found = {name: write_tensors(folder / name, own_rows(tensors, ranks.rank, ranks.world))}
    except OSError as error:
        found = {"error": f"rank {ranks.rank}: {error.strerror}; all ranks must see the folder of the run"}
    files: dict[str, Any] = {}
    for each in ranks.collect(found, "writing a checkpoint"):
        if "error" in each:
            raise OSError(each["error"])
        files |= each
    return files


def own_rows(tensors: Mapping[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """Return a rank's rows of every large tensor; rank 0 has the small ones."""
    found = {}
    for name, tensor in tensors.items():
        if shared_out(tensor, world):
            first, stop = share(0, len(tensor), rank, world)
            found[name] = tensor[first:stop]
        elif rank == 0:
            found[name] = tensor
    return found


def shared_out(tensor: Tensor, world: int) -> bool:
    """Whether several ranks write a part of a tensor each."""
    return tensor.ndim > 0 and len(tensor) >= world and tensor.numel() * tensor.element_size() >= LARGE


def write_seal(
    folder: Path, step: int, state: dict[str, Any], needs: Sequence[int], files: Mapping[str, Any]
) -> None:
    """Complete a folder that holds the tensors of a state, and put it on the disk."""
    values, _ = pack(state)
    files = dict(files)
    text = json.dumps(values, allow_nan=False).encode()
    with (folder / STATE).open("wb") as file:
        file.write(text)
    sync(folder / STATE)
    files[STATE] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    version = VERSION if TENSORS in files else SPLIT
    about = {"format": FORMAT, "version": version, "lpfs": lpfs.__version__, "step": step}
    about.update(needs=list(needs), files=files)
    write_json(folder / SEAL, {**about, "checksum": json_checksum(about)})
    sync(folder / SEAL)
    sync(folder)


def read_seal(folder: Path) -> dict[str, Any]:
    """Return what ``checkpoint.json`` says."""
    about: dict[str, Any] = json.loads((folder / SEAL).read_text("utf-8"))
    checksum = about.pop("checksum", None)
    if about.get("format") != FORMAT or about.get("version") not in (VERSION, SPLIT):
        raise ValueError(f"{SEAL} is not of {FORMAT} {VERSION} or {SPLIT}, which lpfs {lpfs.__version__} reads")
    if json_checksum(about) != checksum:
        raise ValueError(f"the checksum of {SEAL} does not match")
    return about


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Return the state in a checkpoint folder; anything amiss is a ValueError, a LookupError or an OSError."""
    about = read_seal(folder)
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
    state: dict[str, Any] = unpack(json.loads(text), tensors)
    return state
