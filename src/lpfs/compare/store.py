"""Store: the folder of a comparison; every file in it is there whole or not at all.

::

    config.json, plan.json     what was asked for
    data/                      the Dataset, where the source was a log
    seeds/0/pretrain/          the model that every search of a seed begins with, and cost.json
    searches/                  what each search found; a ranking once for all K
    trained/                   a set of fields trained from scratch: JSON, and its scores on the test rows
    labels.npy                 the test rows' labels
    results/                   one JSON a method, K and seed
    claims/, work/             what is being done just now

"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lpfs.compare.plan import Job, plain

Record = dict[str, Any]
Scores = npt.NDArray[np.float32]


class Store:
    """Reads and writes the files of a comparison."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.labels = folder / "labels.npy"

    def seed(self, seed: int) -> Path:
        """Return the folder of a seed's pretrained model."""
        return self.folder / "seeds" / str(seed)

    def work(self, name: str) -> Path:
        """Return the folder of something that is being trained."""
        return self.folder / "work" / name

    def result(self, job: Job) -> Path:
        """Return the file of a result."""
        return self.folder / "results" / f"{job.name}.json"

    def search(self, method: str, options: Mapping[str, Any], seed: int, keep: int | None) -> Path:
        """Return the file of a search; without ``keep``, of a ranking that serves every K."""
        size = "" if keep is None else f"-k{keep}"
        return self.folder / "searches" / f"{search_name(method, options)}-s{seed}{size}.json"

    def trained(self, fields: Iterable[str], seed: int) -> Path:
        """Return the file of a set of fields trained from scratch; its scores are beside it as ``.npy``."""
        return self.folder / "trained" / f"{digest(sorted(fields))}-s{seed}.json"

    def results(self) -> list[Record]:
        """Return every result there is."""
        found = [read(path) for path in sorted((self.folder / "results").glob("*.json"))]
        return [each for each in found if each is not None]


def search_name(method: str, options: Mapping[str, Any]) -> str:
    """Return what the files of a method's search are called; settings other than its defaults are marked."""
    return plain(method) + (f"-{digest(dict(options))[:8]}" if options else "")


def digest(values: Any) -> str:
    """Return a short name that no other values have."""
    text = json.dumps(values, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read(path: Path) -> Record | None:
    """Return what a JSON file holds; None where it is not there."""
    try:
        found: Record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    return found


def put_text(path: Path, text: str) -> None:
    """Write a file aside, under a name of its own, then put it in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with aside.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def put(path: Path, values: Record) -> None:
    """Write JSON; a number that is none is an error."""
    put_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False, default=_plain) + "\n")


def put_scores(path: Path, values: Scores) -> None:
    """Write an array of numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{uuid.uuid4().hex}.new")
    try:
        with aside.open("wb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
