"""Save and load a model as a directory: ``model.json`` describes it, ``model.safetensors`` has its weights.

Nothing is pickled. The directory is written under a temporary name, flushed to disk, then renamed: a killed
process or a full disk leaves the previous model intact. ``model.json`` has checksums of itself and of the weights.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs._fileio import StagingDirectory, fsync_path, json_checksum, read_json, write_json
from lpfs._validation import check_json
from lpfs.errors import CheckpointError, InputError, LpfsError, StateError
from lpfs.models import make_model, registered_name
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.tensor_io import read_tensors, write_tensors

FORMAT, VERSION = "lpfs-model", 1
ADVICE = "save the model again, or use another copy of the directory"
MANIFEST, WEIGHTS = "model.json", "model.safetensors"
SCHEMA = {  # of model.json, besides its checksum
    **{"format": str, "version": int, "lpfs": str, "model": str, "config": dict, "silent": list[str]},
    **{"schema": dict, "extra": dict, "weights": {"bytes": int, "sha256": str}},
}


@dataclass(frozen=True)
class SavedModel:
    """A model that was read from a directory, with the values that were saved as ``extra``."""

    model: Model
    metadata: dict[str, Any]
    path: Path


def save(model: Model, folder: str | os.PathLike[str], **extra: Any) -> Path:
    """Write a model to a directory, replacing a saved model there; ``load`` restores it bit for bit.

    Args:
        model: a model of ``lpfs.models`` without gates; absorb or detach them first.
        folder: a new or empty directory, or one with a saved model.
        extra: JSON values to store with the model, such as ``selection.to_json()`` or metrics.
    """
    if not isinstance(model, Model):
        raise InputError(
            f"lpfs.save supports models of lpfs.models, found {type(model).__name__}; use torch.save for others"
        )
    check_no_gates(model)
    try:
        extra = json.loads(json.dumps(extra, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(f"values saved with a model must be plain JSON values: {error}") from error
    out = Path(folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "lpfs": lpfs.__version__,
        "model": registered_name(model),
        "config": model.config,
        "silent": list(model.silent),
        "schema": model.schema.to_json(),
        "extra": extra,
    }
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file())):
        raise InputError(f"{out} exists and is not a saved model; choose another directory")
    try:
        with StagingDirectory(out, replace=True, markers=(MANIFEST,)) as staging:
            tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
            manifest["weights"] = write_tensors(staging / WEIGHTS, tensors)
            write_json(staging / MANIFEST, {**manifest, "checksum": json_checksum(manifest)})
            fsync_path(staging / MANIFEST)
            fsync_path(staging)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model to {out}: {error.strerror or error}; the previous content is intact"
        ) from error
    return out


def load(folder: str | os.PathLike[str]) -> Model:
    """Return the model that ``save`` wrote, on the CPU."""
    return load_saved(folder).model


def load_saved(folder: str | os.PathLike[str]) -> SavedModel:
    """Return the model that ``save`` wrote, on the CPU, with the values saved as ``extra``."""
    path = Path(folder)
    manifest = _read_manifest(path)
    return SavedModel(_build_model(path, manifest), manifest["extra"], path)


def load_metadata(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the values that were saved with a model as ``extra``, without reading its weights."""
    return _read_manifest(Path(folder))["extra"]  # type: ignore[no-any-return]


def check_no_gates(model: Model) -> None:
    """Raise StateError if the model has gates, which would not be saved."""
    for path, module in model.named_modules():
        if getattr(module, "gate", None) is not None:
            raise StateError(f"the model has gates or gate constants at {path!r}; absorb or detach them first")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the content of ``model.json``; raise CheckpointError if it is missing or damaged."""
    try:
        manifest: dict[str, Any] = read_json(folder / MANIFEST, verify=False)
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise ValueError(f"{MANIFEST} does not have the format {FORMAT} {VERSION} of lpfs {lpfs.__version__}")
        checksum = manifest.pop("checksum", None)
        if different := sorted(set(manifest) ^ set(SCHEMA)):
            problem = "an unknown key" if different[0] in manifest else "no"
            raise ValueError(f"{MANIFEST} has {problem} {different[0]!r}")
        if json_checksum(manifest) != checksum:
            raise ValueError(f"the checksum of {MANIFEST} does not match")
        check_json(manifest, SCHEMA)
    except FileNotFoundError as error:
        raise CheckpointError(f"no saved model in {folder}: {MANIFEST} is missing; {ADVICE}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {error}; {ADVICE}") from error
    return manifest


def _build_model(folder: Path, manifest: dict[str, Any]) -> Model:
    try:
        tensors = read_tensors(folder / WEIGHTS, manifest["weights"]["sha256"])
    except FileNotFoundError as error:
        raise CheckpointError(f"the model in {folder} has no {WEIGHTS}; use another copy of the directory") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {WEIGHTS}: {error}; {ADVICE}") from error
    try:
        schema = Schema.from_json(manifest["schema"])
        with torch.random.fork_rng([]):
            model = make_model(manifest["model"], schema, **manifest["config"], silent=manifest["silent"])
        for name, parameter in model.named_parameters():
            if name in tensors:
                parameter.data = parameter.data.to(tensors[name].dtype)
        model.load_state_dict(tensors)
    except (LpfsError, RuntimeError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"the model in {folder} (of lpfs {manifest['lpfs']}) cannot be built by lpfs {lpfs.__version__}: {error}"
        ) from error
    return model


def find_model_dir(path: str | os.PathLike[str]) -> Path:
    """Return the directory of a saved model: the given one, or ``model`` inside a run directory."""
    folder = Path(path)
    for candidate in (folder, folder / "model"):
        if (candidate / MANIFEST).is_file():
            return candidate
    raise InputError(
        f"no model in {folder}: neither {MANIFEST} nor model/{MANIFEST} exists; give the directory of a run of "
        "select, train or prune"
    )
