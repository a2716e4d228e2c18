"""The Dataset of a run, and whether a saved model and a Dataset fit each other."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs.data.dataset import Dataset
from lpfs.data.prepare import plan_source, prepare, run_plan
from lpfs.data.reencode import check_columns_fit
from lpfs.data.store.location import dataset_exists
from lpfs.errors import DataError, InputError
from lpfs.models import registered_name
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import SHUFFLED_PARTS, TEST_PARTS
from lpfs.schema import Field
from lpfs.serialization import SavedModel

DATA_DIR = "data"  # of a Dataset that a run prepared itself
MODELS_WITH_NUMERIC_INPUT = ("dlrm", "dlrm_cross", "user_item")  # these use numbers as they are, without bins


def with_source(settings: Settings, source: Any) -> tuple[Settings, Any]:
    """Return settings that name the source, and the source itself only if it is a table or a Dataset in memory."""
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, Sequence) and all(isinstance(path, str | os.PathLike) for path in source):
        return settings.updated(source=tuple(os.fspath(path) for path in source)), None
    if isinstance(source, Dataset) and source.whole:  # so that the configuration names its directory
        settings = settings.updated(source=(os.fspath(source.path),))
    return settings, source


def settings_for_model(settings: Settings, saved: SavedModel) -> Settings:
    """Return settings with the backbone of a saved model; raise InputError if they contradict it."""
    name, options = registered_name(saved.model), json.loads(json.dumps(saved.model.config))
    if settings.model not in (None, name):
        raise InputError(f"the model in {saved.path} is {name!r}, not {settings.model!r}; leave --model out")
    for option, value in json.loads(json.dumps(dict(settings.model_options))).items():
        if options.get(option) != value:
            raise InputError(
                f"the model in {saved.path} has {option}={options.get(option)!r}, not {value!r}; leave the model "
                "options out"
            )
    dropped = [field for field in saved.model.reads.names if field in settings.must_drop]
    if dropped:
        raise InputError(
            f"must_drop names {dropped[0]!r}, which the model in {saved.path} uses; train a model without it first"
        )
    return settings.updated(model=name, model_options=options)


def is_dataset(source: Sequence[str]) -> bool:
    """Return whether a source is the directory of a Dataset."""
    return len(source) == 1 and dataset_exists(source[0])


def prepare_dataset(
    source: Any,
    settings: Settings,
    run_dir: Path,
    console: Console,
    *,
    saved: SavedModel | None = None,
    resume: bool = False,
) -> Dataset:
    """Return the Dataset of a run: the one given, or one prepared from the log in the run directory.

    With a saved model the log is encoded as the rows of that model were. Rows without an order (no time column,
    not one file per day) are split at random. A resumed run uses the Dataset it has prepared.
    """
    if isinstance(source, Dataset):
        return source
    out = run_dir / DATA_DIR
    if resume and (out / "dataset.json").exists():
        return Dataset(out)
    if source is None:
        if not settings.source:
            raise InputError("no log to select from; give files, a table, or the directory of a Dataset")
        if is_dataset(settings.source):
            return Dataset(settings.source[0])
        source = list(settings.source) if len(settings.source) > 1 else settings.source[0]
    options = {**settings.prepare, "label": settings.label, "time": settings.time, "split": settings.split}
    if saved is not None:
        options |= {"like": training_dataset(saved), "fields_only": saved.model.reads.names}
    elif settings.backbone not in MODELS_WITH_NUMERIC_INPUT:
        options.setdefault("bins", "auto")
    plan = plan_source(source, **options)
    if not {"shuffle", "preset"} & set(options) and plan.options.time is None and plan.options.parts != "files":
        changes: dict[str, Any] = {"shuffle": True}
        if "parts" not in options:
            train = SHUFFLED_PARTS if settings.split else SHUFFLED_PARTS - TEST_PARTS
            changes |= {"parts": SHUFFLED_PARTS, "train": train}
        plan = replace(plan, options=replace(plan.options, **changes))
    return run_plan(plan, out, replace=True, console=console)


def dataset_for_model(
    saved: SavedModel, source: Sequence[str], out: Path, *, like: Path | None = None, **options: Any
) -> Dataset:
    """Return rows that a saved model can use: a Dataset that fits it, or a log encoded as its rows were, in ``out``.

    ``like`` is the Dataset that the model was trained on, if it was moved; ``options`` are those of ``prepare``.
    """
    if is_dataset(source):
        dataset = Dataset(source[0])
        check_dataset_fits(saved, dataset)
        return dataset
    reference = training_dataset(saved) if like is None else Dataset(like)
    check_dataset_fits(saved, reference)
    fields = saved.model.reads.names
    return prepare(list(source), out, like=reference, fields_only=fields, replace=True, **options)


def training_dataset(saved: SavedModel) -> Dataset:
    """Return the Dataset that a saved model was trained on."""
    paths = [saved.path.parent / DATA_DIR]
    if isinstance(saved.metadata.get("data"), str):
        paths.append(Path(saved.metadata["data"]))
    for path in paths:
        if dataset_exists(path):
            dataset = Dataset(path)
            if saved.metadata.get("fingerprint", dataset.fingerprint) == dataset.fingerprint:
                return dataset
    raise DataError(
        f"the Dataset that the model in {saved.path} was trained on was not found at {paths[-1]}; raw values are "
        "encoded with its vocabularies, so give its new place with --like"
    )


def check_dataset_fits(saved: SavedModel, dataset: Dataset) -> None:
    """Raise DataError if fields of the model are missing or of another type, or their ids mean other values."""
    names, needed = dataset.schema.names, saved.model.reads
    missing = [name for name in needed.names if name not in names]
    retyped = {
        field.name: f"{_describe_field(dataset.schema[field.name])} instead of {_describe_field(field)}"
        for field in needed
        if field.name in names and _describe_field(field) != _describe_field(dataset.schema[field.name])
    }
    additional = [name for name in names if name not in saved.model.schema.names]
    check_columns_fit(f"the model in {saved.path}", str(dataset.path), missing, retyped, additional)
    fingerprint = saved.metadata.get("fingerprint")
    if fingerprint not in (None, dataset.fingerprint, dataset.settings.get("like", {}).get("fingerprint")):
        raise DataError(
            f"{dataset.path} has the fields of the model in {saved.path}, but their ids come from other "
            "vocabularies; encode the log as the rows of the model: lpfs prepare … --like, or give the raw files"
        )


def _describe_field(field: Field) -> str:
    """Return the properties of a field that a model depends on."""
    if field.kind == "numeric":
        return "numeric" if field.dim == 1 else f"numeric of {field.dim} columns"
    return f"{field.kind} with {field.cardinality:,} ids"
