"""Checkpoints: the whole state of a run in a folder, there completely or not at all.

A checkpoint is a folder ``step-000000001000`` of three files: ``tensors.safetensors``, ``state.json`` and
``checkpoint.json``, which holds size and SHA-256 of the other two and a checksum of its own. It is filled aside,
put on the disk, then renamed: a kill or a full disk at any moment leaves the older ones as they were. Nothing
in here runs code that a file brings along.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lpfs
from lpfs.data.store.format import json_checksum, sync, write_json
from lpfs.errors import CheckpointError, LpfsError
from lpfs.train.codec import pack, unpack
from lpfs.train.tensorfile import read_tensors, write_tensors

FORMAT, VERSION = "lpfs-checkpoint", 1
TENSORS, STATE, SEAL = "tensors.safetensors", "state.json", "checkpoint.json"


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

    def save(self, step: int, state: dict[str, Any], needs: Sequence[int] = ()) -> Path:
        """Write a checkpoint, then remove the oldest, except those of steps that a kept one needs."""
        out = self.path(step)
        aside = self.folder / f".{out.name}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            aside.mkdir()
            write_checkpoint(aside, step, state, needs)
            if out.exists():  # a damaged one that was passed over
                shutil.rmtree(out)
            aside.rename(out)
            sync(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise CheckpointError(
                f"cannot write checkpoint {out}: {error.strerror or error}; the older checkpoints are intact. "
                "Free some space, then go on with resume=True"
            ) from error
        except LpfsError:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._prune(step)
        return out

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


def write_checkpoint(folder: Path, step: int, state: dict[str, Any], needs: Sequence[int] = ()) -> None:
    """Fill an empty folder, and put it on the disk."""
    values, tensors = pack(state)
    files = {TENSORS: write_tensors(folder / TENSORS, tensors)}
    text = json.dumps(values, allow_nan=False).encode()
    with (folder / STATE).open("wb") as file:
        file.write(text)
    sync(folder / STATE)
    files[STATE] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    about = {"format": FORMAT, "version": VERSION, "lpfs": lpfs.__version__, "step": step}
    about.update(needs=list(needs), files=files)
    write_json(folder / SEAL, {**about, "checksum": json_checksum(about)})
    sync(folder / SEAL)
    sync(folder)


def read_seal(folder: Path) -> dict[str, Any]:
    """Return what ``checkpoint.json`` says."""
    about: dict[str, Any] = json.loads((folder / SEAL).read_text("utf-8"))
    checksum = about.pop("checksum", None)
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        raise ValueError(f"{SEAL} is not of {FORMAT} {VERSION}, which lpfs {lpfs.__version__} reads")
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
    try:
        tensors = read_tensors(folder / TENSORS, about["files"][TENSORS]["sha256"])
    except ValueError as error:
        raise ValueError(f"{TENSORS}: {error}") from error
    state: dict[str, Any] = unpack(json.loads(text), tensors)
    return state
