"""Rows that fit a saved model: encoded as those it was trained on, or refused with the fields by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import plan_source, prepare
from lpfs.data.reencode import check_columns_fit
from lpfs.data.store.location import dataset_exists
from lpfs.errors import DataError, InputError
from lpfs.models import registered_name
from lpfs.models.base import Model
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import (
    SHUFFLED_PARTS,
    TEST_PARTS,
)
from lpfs.schema import Field
from lpfs.serialization import find_model_dir, load, load_metadata

ABOUT = "model.json"


def settings_for_model(settings: Settings) -> Settings:
    """Return settings whose backbone is that of the trained model they start from; refuse those of another."""
    if settings.checkpoint is None:
        return settings
    place = find_model_dir(settings.checkpoint)
    model = load(place)
    own = {"model": registered_name(model), "model_options": json.loads(json.dumps(model.config))}
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
    return len(source) == 1 and dataset_exists(source[0])


def dataset_for_model(
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
        check_dataset_fits(folder, model, data)
        return data
    old = training_dataset(folder) if like is None else Dataset(like)
    check_dataset_fits(folder, model, old)
    return prepare(
        list(source), out, like=old, fields_only=model.reads.names, replace=True, quiet=quiet, **options
    )


def training_dataset(folder: Path) -> Dataset:
    """Return the Dataset that a saved model was trained on."""
    extra = load_metadata(folder)
    places = [folder.parent / "data", *([Path(extra["data"])] if "data" in extra else [])]
    for place in places:
        if dataset_exists(place):
            found = Dataset(place)
            if extra.get("fingerprint", found.fingerprint) == found.fingerprint:
                return found
    raise DataError(
        f"the Dataset that the model in {folder} was trained on is not there any more ({places[-1]}); its "
        "vocabularies are needed to read raw values: say where it is with --like"
    )


def check_dataset_fits(folder: Path, model: Model, data: Dataset) -> None:
    """Refuse a Dataset with missing or retyped fields, or with other ids, than the model was trained on."""
    names, needed = data.schema.names, model.reads
    missing = [name for name in needed.names if name not in names]
    retyped = {
        each.name: f"{_describe_field(data.schema[each.name])} instead of {_describe_field(each)}"
        for each in needed
        if each.name in names and _describe_field(each) != _describe_field(data.schema[each.name])
    }
    extra = [name for name in names if name not in model.schema.names]
    check_columns_fit(f"the model in {folder}", str(data.path), missing, retyped, extra)
    known = load_metadata(folder).get("fingerprint")
    if known not in (None, data.fingerprint, _reference_fingerprint(data.settings)):
        raise DataError(
            f"{data.path} has the fields of the model in {folder}, but their ids come from other vocabularies; "
            "encode the log as the model's was: lpfs prepare … --like, or give the raw files"
        )


def _reference_fingerprint(settings: Mapping[str, Any]) -> str | None:
    """Return the fingerprint of the Dataset whose encoding was taken."""
    found: str | None = settings.get("like", {}).get("fingerprint")
    return found


def _describe_field(field: Field) -> str:
    """Describe what of a field a model depends on."""
    if field.kind == "numeric":
        return "numeric" if field.dim == 1 else f"numeric of {field.dim} columns"
    return f"{field.kind} with {field.cardinality:,} ids"


MODELS_WITH_NUMERIC_INPUT = (
    "dlrm",
    "dlrm_cross",
    "user_item",
)  # backbones with a way of their own to read numbers


def prepare_dataset(source: Any, wanted: Settings, folder: Path, quiet: bool, resume: bool = False) -> Dataset:
    """Return the Dataset: the one given, or one made of the log and kept with the run.

    Where a trained model is given, a log is encoded as the model's was. Rows that nothing orders are dealt to the
    days at random. A run that goes on has its data already.
    """
    if isinstance(source, Dataset):
        return source
    if resume and (folder / "data" / "dataset.json").exists():
        return Dataset(folder / "data")
    if source is None:
        if not wanted.source:
            raise InputError("give the log to select from: files, a table, or the folder of a Dataset")
        if is_dataset(wanted.source):
            return Dataset(wanted.source[0])
        source = list(wanted.source) if len(wanted.source) > 1 else wanted.source[0]
    options = {**wanted.prepare, "label": wanted.label, "time": wanted.time, "split": wanted.split}
    if wanted.checkpoint is not None:
        place = find_model_dir(wanted.checkpoint)
        options |= {"like": training_dataset(place), "fields_only": load(place).reads.names}
    elif wanted.backbone not in MODELS_WITH_NUMERIC_INPUT:
        options.setdefault("bins", "auto")
    if not {"shuffle", "preset"} & set(options):
        found = plan_source(source, **options).options
        if found.time is None and found.parts != "files":
            options["shuffle"] = True
            if "parts" not in options:
                options |= {
                    "parts": SHUFFLED_PARTS,
                    "train": SHUFFLED_PARTS if wanted.split else SHUFFLED_PARTS - TEST_PARTS,
                }
    return prepare(source, folder / "data", quiet=quiet, replace=True, **options)
