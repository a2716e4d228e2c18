"""Rows that fit a saved model: encoded as those it was trained on, or refused with the fields by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.data.reencode import refuse_misfit
from lpfs.data.prepare import prepare
from lpfs.data.store.location import has_dataset
from lpfs.errors import DataError, InputError
from lpfs.models.base import Model
from lpfs.models.registry import name_of
from lpfs.pipeline.settings import Settings
from lpfs.serialization import load, load_extra
from lpfs.schema import Field

ABOUT = "model.json"


def model_folder(place: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: the one named, or ``model`` in a run."""
    folder = Path(place)
    for each in (folder, folder / "model"):
        if (each / ABOUT).is_file():
            return each
    raise InputError(
        f"there is no model in {folder}: neither {ABOUT} nor model/{ABOUT} is there; give the folder of a run of "
        "select, train or prune"
    )


def as_trained(settings: Settings) -> Settings:
    """Return settings whose backbone is that of the trained model they start from; refuse those of another."""
    if settings.checkpoint is None:
        return settings
    place = model_folder(settings.checkpoint)
    model = load(place)
    own = {"model": name_of(model), "model_options": json.loads(json.dumps(model.config))}
    if settings.model not in (None, own["model"]):
        raise InputError(
            f"the model in {place} is of {own['model']!r}, not of {settings.model!r}; leave --model out"
        )
    for name, value in json.loads(json.dumps(dict(settings.model_options))).items():
        if own["model_options"].get(name) != value:
            raise InputError(
                f"the model in {place} has {name}={own['model_options'].get(name)!r} and cannot have {value!r}; "
                "leave the options of the model out"
            )
    return settings.updated(**own)


def is_dataset(source: Sequence[str]) -> bool:
    """Say whether a source is the folder of a Dataset."""
    return len(source) == 1 and has_dataset(source[0])


def rows_for(
    folder: Path,
    model: Model,
    source: Sequence[str],
    out: Path,
    *,
    like: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **options: Any,
) -> Dataset:
    """Return rows that a model can read: a Dataset that fits it, or a log encoded as the model's was.

    Args:
        folder: of the saved model.
        model: what was loaded from it.
        source: files, or the folder of a Dataset.
        out: where a log's Dataset goes.
        like: the Dataset that the model was trained on, where it is not where it was.
        quiet: print nothing.
        options: of ``prepare``, those that learn nothing.

    """
    if is_dataset(source):
        data = Dataset(source[0])
        check_fits(folder, model, data)
        return data
    old = trained_on(folder) if like is None else Dataset(like)
    check_fits(folder, model, old)
    return prepare(
        list(source), out, like=old, fields_only=model.reads.names, replace=True, quiet=quiet, **options
    )


def trained_on(folder: Path) -> Dataset:
    """Return the Dataset that a saved model was trained on."""
    extra = load_extra(folder)
    places = [folder.parent / "data", *([Path(extra["data"])] if "data" in extra else [])]
    for place in places:
        if has_dataset(place):
            found = Dataset(place)
            if extra.get("fingerprint", found.fingerprint) == found.fingerprint:
                return found
    raise DataError(
        f"the Dataset that the model in {folder} was trained on is not there any more ({places[-1]}); its "
        "vocabularies are needed to read raw values: say where it is with --like"
    )


def check_fits(folder: Path, model: Model, data: Dataset) -> None:
    """Refuse a Dataset with missing or retyped fields, or with other ids, than the model was trained on."""
    names, needed = data.schema.names, model.reads
    missing = [name for name in needed.names if name not in names]
    retyped = {
        each.name: f"{told(data.schema[each.name])} instead of {told(each)}"
        for each in needed
        if each.name in names and told(each) != told(data.schema[each.name])
    }
    extra = [name for name in names if name not in model.schema.names]
    refuse_misfit(f"the model in {folder}", str(data.path), missing, retyped, extra)
    known = load_extra(folder).get("fingerprint")
    if known not in (None, data.fingerprint, encoded_as(data.settings)):
        raise DataError(
            f"{data.path} has the fields of the model in {folder}, but their ids come from other vocabularies; "
            "encode the log as the model's was: lpfs prepare … --like, or give the raw files"
        )


def encoded_as(settings: Mapping[str, Any]) -> str | None:
    """Return the fingerprint of the Dataset whose encoding was taken."""
    found: str | None = settings.get("like", {}).get("fingerprint")
    return found


def told(field: Field) -> str:
    """Describe what of a field a model depends on."""
    if field.kind == "numeric":
        return "numeric" if field.dim == 1 else f"numeric of {field.dim} columns"
    return f"{field.kind} with {field.cardinality:,} ids"
