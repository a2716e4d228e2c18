"""Save and load a model as a directory: ``model.json`` describes it, ``model.safetensors`` has its weights.

Nothing is pickled. The directory is written under a temporary name, flushed to disk, then renamed: a killed
process or a full disk leaves the previous model intact. ``model.json`` has checksums of itself and of the weights.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import lpfs
from lpfs._fileio import StagingDirectory, fsync_path, json_checksum, no_result_error, read_json, safe_child, write_json
from lpfs._validation import check_json
from lpfs.errors import CheckpointError, InputError, LpfsError, StateError
from lpfs.models import make_model, registered_name
from lpfs.models.base import Model
from lpfs.schema import Schema
from lpfs.train.tensor_io import DTYPES, read_header, read_tensors, write_tensors

FORMAT, VERSION = "lpfs-model", 1
ADVICE = "save the model again, or use another copy of the directory"
MANIFEST, WEIGHTS = "model.json", "model.safetensors"
SCHEMA = {  # of model.json, besides its checksum
    **{"format": str, "version": int, "lpfs": str, "model": str, "config": dict, "silent": list[str]},
    **{"schema": dict, "extra": dict, "weights": {"bytes": int, "sha256": str}},
}
# what model.json may declare beyond the number of stored weights, before a model is built from it
MAX_CONFIG, MAX_COLUMNS, MAX_PAIRS = 1 << 12, 1 << 20, 1 << 16
PAIR_MODELS = ("dlrm", "dlrm_cross", "user_item")  # these list pairs of fields


class SkipRandomValues(TorchFunctionMode):
    """Does not fill new weights with random numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.uniform_, torch.Tensor.normal_):
            return args[0]
        return func(*args, **(kwargs or {}))


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


def load_into(folder: Path, allocate: Callable[..., torch.Tensor]) -> Model:
    """Return the model that ``save`` wrote, with its weights in memory of ``allocate(shape, dtype=…)``."""
    return _build_model(folder, _read_manifest(folder), allocate)


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
        manifest: dict[str, Any] = read_json(safe_child(folder, MANIFEST), verify=False)
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise ValueError(f"it does not have the format {FORMAT} {VERSION} of lpfs {lpfs.__version__}")
        checksum = manifest.pop("checksum", None)
        if different := sorted(set(manifest) ^ set(SCHEMA)):
            problem = "an unknown key" if different[0] in manifest else "no"
            raise ValueError(f"it has {problem} {different[0]!r}")
        if json_checksum(manifest) != checksum:
            raise ValueError("its checksum does not match")
        check_json(manifest, SCHEMA)
    except FileNotFoundError as error:
        raise CheckpointError(f"no saved model in {folder}: {MANIFEST} is missing; {ADVICE}") from error
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {MANIFEST}: {error}; {ADVICE}") from error
    return manifest


def _build_model(folder: Path, manifest: dict[str, Any], allocate: Callable[..., torch.Tensor] = torch.empty) -> Model:
    """Return the model; its shapes are compared with the stored ones before memory for its weights is allocated."""
    try:
        path = safe_child(folder, WEIGHTS)
        header = read_header(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"the model in {folder} has no {WEIGHTS}; use another copy of the directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {WEIGHTS}: {error}; {ADVICE}") from error
    try:
        schema = Schema.from_json(manifest["schema"])
        arguments = {**manifest["config"], "silent": manifest["silent"]}
        _check_sizes(manifest["model"], schema, arguments, header)
        with torch.device("meta"):
            shapes = make_model(manifest["model"], schema, **arguments).state_dict()
        _check_shapes(shapes, header)
    except (LpfsError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"the model in {folder} (of lpfs {manifest['lpfs']}) is damaged or cannot be built by lpfs "
            f"{lpfs.__version__}: {MANIFEST}: {error}; {ADVICE}"
        ) from error
    try:
        tensors = read_tensors(path, str(manifest["weights"].get("sha256")), allocate)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the model in {folder} is damaged: {WEIGHTS}: {error}; {ADVICE}") from error
    with torch.random.fork_rng([]), SkipRandomValues():  # every weight is replaced: most of the time was for these
        model = make_model(manifest["model"], schema, **arguments)
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name]
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])
    return model


def _check_sizes(name: str, schema: Schema, config: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Raise InputError if a model would be larger than the stored weights can be: building it takes memory."""
    weights = sum(math.prod(entry["shape"]) for entry in header.values())
    columns = sum(field.dim for field in schema if field.kind == "numeric")
    pairs = len(schema) * (len(schema) - 1) // 2 if name in PAIR_MODELS else 0
    for subject, size, limit in (
        ("columns of numbers", columns, MAX_COLUMNS),
        ("pairs of fields", pairs, MAX_PAIRS),
        ("as a size in its config", max(_integers(config), default=0), MAX_CONFIG),
    ):
        if size > max(limit, weights):
            raise InputError(f"the model has {size} {subject}, but {WEIGHTS} has only {weights} numbers")


def _integers(value: Any) -> Iterable[int]:
    """Yield the integers in nested JSON values."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _integers(item)


def _check_shapes(state: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> None:
    """Raise InputError with the first name, shape or type in which stored weights differ from those of the model."""
    for name in [*state, *header]:
        if name not in state or name not in header:
            raise InputError(f"only {WEIGHTS if name in header else 'the model'} has the weight {name!r}")
        shape, dtype = header[name]["shape"], DTYPES[header[name]["dtype"]]
        if list(state[name].shape) != shape or not dtype.is_floating_point:
            expected = f"{list(state[name].shape)} of a floating-point type"
            raise InputError(f"the weight {name!r} must be {expected}, {WEIGHTS} has {shape} of {dtype}")


def find_model_dir(path: str | os.PathLike[str]) -> Path:
    """Return the directory of a saved model: the given one, or ``model`` inside a run directory."""
    folder = Path(path)
    for candidate in (folder, folder / "model"):
        if (candidate / MANIFEST).is_file():
            return candidate
    problem = f"no model in {folder}: neither {MANIFEST} nor model/{MANIFEST} exists"
    raise no_result_error(folder, problem, "give the directory of a run of select, train or prune")
