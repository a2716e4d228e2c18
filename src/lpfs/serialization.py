"""A model in a folder: what it is in ``model.json``, its weights in ``model.safetensors``; no pickle.

The folder is filled aside, put on the disk, then renamed: a kill or a full disk at any moment leaves what was
there before. ``model.json`` holds a checksum of its own and one of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lpfs
from lpfs._fileio import fsync_path, json_checksum, write_json
from lpfs.errors import CheckpointError, InputError, LpfsError, StateError
from lpfs.models import make_model, registered_name
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.tensor_io import read_tensors, write_tensors

FORMAT, VERSION = "lpfs-model", 1
MANIFEST, WEIGHTS = "model.json", "model.safetensors"
KEYS = {"format", "version", "lpfs", "model", "config", "silent", "schema", "extra", "weights"}


def save(model: Model, folder: str | os.PathLike[str], **extra: Any) -> Path:
    """Write a model to a folder, in place of a model that is there; ``load`` gives it back to the last bit.

    Args:
        model: one of ``lpfs.models``, without gates: absorb or detach them first.
        folder: a new or empty one, or one that holds a saved model.
        extra: anything more to keep, as JSON: a Selection's ``to_json()``, metrics.

    """
    if not isinstance(model, Model):
        raise InputError(
            f"save writes models of lpfs.models, found {type(model).__name__}; use torch.save for others"
        )
    check_no_gates(model)
    out = Path(folder)
    about = {
        "format": FORMAT,
        "version": VERSION,
        "lpfs": lpfs.__version__,
        "model": registered_name(model),
        "config": model.config,
        "silent": list(model.silent),
        "schema": model.schema.to_json(),
        "extra": _as_json(extra),
    }
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file())):
        raise InputError(f"{out} holds something else than a saved model and is left alone; choose another place")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name[:80]}.", suffix=".tmp", dir=out.parent))
        try:
            _write_files(aside / "new", about, model)
            if out.exists():
                out.rename(aside / "old")
            (aside / "new").rename(out)
            fsync_path(out.parent)
        finally:
            if (aside / "old").exists() and not out.exists():
                (aside / "old").rename(out)
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model to {out}: {error.strerror or error}; what was there before is intact"
        ) from error
    return out


def load(folder: str | os.PathLike[str]) -> Model:
    """Return the model that ``save`` wrote, on the CPU."""
    about = _read_manifest(Path(folder))
    return _build_model(Path(folder), about, _weights(Path(folder), about))


def load_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what was saved beside a model as ``extra``."""
    return _read_manifest(Path(folder))["extra"]  # type: ignore[no-any-return]


def check_no_gates(model: Model) -> None:
    """Refuse a model that still has gates: they would be lost."""
    for path, module in model.named_modules():
        if getattr(module, "gate", None) is not None:
            raise StateError(f"the model has gates or constants of gates at {path!r}; absorb or detach them first")


def _as_json(extra: dict[str, Any]) -> Any:
    try:
        return json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"what is saved beside a model must be plain JSON values: {error}") from error


def _write_files(folder: Path, about: dict[str, Any], model: Model) -> None:
    folder.mkdir()
    tensors = {name: each.detach() for name, each in model.state_dict().items()}
    about = {**about, "weights": write_tensors(folder / WEIGHTS, tensors)}
    write_json(folder / MANIFEST, {**about, "checksum": json_checksum(about)})
    fsync_path(folder / MANIFEST)
    fsync_path(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return what ``model.json`` says, or raise CheckpointError."""
    advice = "save the model again, or use another copy of the folder"
    try:
        about = json.loads((folder / MANIFEST).read_text("utf-8"))
        if not isinstance(about, dict):
            raise ValueError(f"{MANIFEST} holds no model")
        if about.get("format") != FORMAT or about.get("version") != VERSION:
            raise ValueError(f"{MANIFEST} is not of {FORMAT} {VERSION}, which lpfs {lpfs.__version__} reads")
        checksum = about.pop("checksum", None)
        unknown, absent = sorted(set(about) - KEYS), sorted(KEYS - set(about))
        if unknown or absent:
            what = f"an unknown key {unknown[0]!r}" if unknown else f"no {absent[0]!r}"
            raise ValueError(f"{MANIFEST} has {what}")
        if json_checksum(about) != checksum:
            raise ValueError(f"the checksum of {MANIFEST} does not match")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no saved model in {folder}: {MANIFEST} is missing; {advice}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {error}; {advice}") from error
    return about


def _weights(folder: Path, about: dict[str, Any]) -> dict[str, Tensor]:
    try:
        return read_tensors(folder / WEIGHTS, about["weights"]["sha256"])
    except FileNotFoundError as error:
        raise CheckpointError(f"the model in {folder} has no {WEIGHTS}; use another copy of the folder") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"the model in {folder} is damaged: {WEIGHTS}: {error}; save it again, or use another copy"
        ) from error


def _build_model(folder: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> Model:
    try:
        schema = Schema.from_json(about["schema"])
        with torch.random.fork_rng([]):
            model = make_model(about["model"], schema, **about["config"], silent=about["silent"])
        _assign_weights(model, tensors)
    except (LpfsError, RuntimeError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the model in {folder} cannot be built by lpfs {lpfs.__version__} (saved by {about['lpfs']}): {error}"
        ) from error
    return model


def _assign_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give a model these weights, with their dtypes."""
    for name, each in model.named_parameters():
        if name in tensors:
            each.data = each.data.to(tensors[name].dtype)
    model.load_state_dict(tensors)


def find_model_dir(place: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: the one named, or ``model`` in a run."""
    folder = Path(place)
    for each in (folder, folder / "model"):
        if (each / MANIFEST).is_file():
            return each
    raise InputError(
        f"there is no model in {folder}: neither {MANIFEST} nor model/{MANIFEST} is there; give the folder of a run of "
        "select, train or prune"
    )
