"""Other rows, encoded exactly as those of a Dataset: plans for ``prepare(like=…)``, and RowEncoder for tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lpfs._console import Console
from lpfs._validation import check_name, did_you_mean
from lpfs.data.batch import Batch, RowBlock, bag_offsets
from lpfs.data.dataset import Dataset
from lpfs.data.planning import PreparePlan, build_options, check_row_columns
from lpfs.data.sources import open_source
from lpfs.errors import DataError, FieldError, InputError
from lpfs.schema import Schema

if TYPE_CHECKING:
    import polars as pl

    from lpfs.data.encoders.base import Encoder, RowLocator
    from lpfs.data.store.format import AnyArray

Like = Dataset | str | os.PathLike[str]
INHERITED_OPTIONS = (
    "label",
    "tasks",
    "header",
    "separator",
    "strip",
    "missing",
    "positive",
)  # taken from the reference
FITTING_OPTIONS = (
    *("tasks", "fields", "kind", "preset", "train"),
    *("min_count", "max_values", "hash", "bins", "decimal", "keep_all"),
)


@dataclass(frozen=True, kw_only=True)
class ReencodePlan(PreparePlan):
    """A plan without fitting: new rows, encoded as those of a reference Dataset."""

    like: Dataset  # the reference, source of vocabularies, scales, bins and hashes
    encoders: tuple[Encoder, ...]  # of its fields, or of the requested ones
    extra: tuple[str, ...]  # columns of the source that the reference does not have

    @property
    def title(self) -> str:
        return f"Fields, encoded as in {self.like.path}"

    def settings(self) -> dict[str, Any]:
        """Return the settings of the new Dataset that describe where its encoding comes from."""
        return {
            "like": {"name": self.like.path.name, "fingerprint": self.like.fingerprint},
            "train_days": [],
            "dropped": {},
            "ignored": dict.fromkeys(self.extra, "not in the Dataset whose encoding was taken"),
        }

    def report(self, console: Console) -> None:
        """Report unused columns and missing labels."""
        if self.extra:
            console.message(f"not used, {self.like.path} does not have them: {', '.join(map(repr, self.extra))}")
        if not self.labelled:
            hint = did_you_mean(self.options.label, self.extra)
            console.message(f"no label {self.options.label!r}{hint}: labels are stored as 0 and are not valid")


def plan_like(source: Any, like: Like, *, fields_only: Sequence[str] | None = None, **options: Any) -> ReencodePlan:
    """Plan to encode a source as a Dataset was encoded; reads the first rows only and writes nothing.

    The arguments are those of ``prepare`` that do not concern fitting: ``time``, ``parts``, ``split``, ``negatives`` …
    Label and tasks may be absent, all together. A source that does not fit raises DataError, which names all missing
    and retyped columns.
    """
    options = {name: value for name, value in options.items() if value is not None}
    for name in FITTING_OPTIONS:
        if name in options:
            raise InputError(f"with like, everything that is fitted comes from the other Dataset; leave out {name!r}")
    like = open_reference(like)
    encoders = reference_encoders(like, fields_only)
    reference = {"strip": False, **like.settings["options"]}  # older Datasets have no such option
    for name in ("label", "time", "time_format", *INHERITED_OPTIONS):
        if name not in reference:
            raise DataError(f"{like.path / 'dataset.json'} is damaged: option {name!r} is missing; prepare it again")
    label = reference["label"]
    if options.get("label", label) != label:
        raise InputError(f"label: it is {label!r} in {like.path}, found {options['label']!r}; rename the column")
    settings = build_options({**{name: reference[name] for name in INHERITED_OPTIONS}, **options})
    table = open_source(source, separator=settings.separator, header=settings.header, strip=settings.strip)
    if settings.time is None and reference["time"] in table.names and not {"parts", "shuffle"} & set(options):
        time_format = settings.time_format or reference["time_format"]
        settings = replace(settings, time=reference["time"], time_format=time_format)
    check_row_columns(settings, table)
    targets = (settings.label, *settings.tasks)
    labelled = any(name in table.names for name in targets)
    if not labelled and settings.negatives != 1.0:
        raise InputError(f"negatives: without the label {settings.label!r} negatives are unknown; leave negatives out")
    extra = unknown_columns(like, table.names, (*targets, settings.time, settings.split))
    required = [*(encoder.name for encoder in encoders), *(targets if labelled else ())]
    missing = [name for name in required if name not in table.names]
    present = [encoder for encoder in encoders if encoder.name in table.names]
    chunks = table.chunks([encoder.name for encoder in present]) if present else ()
    chunk = next((chunk for chunk in chunks if chunk.frame.height), None)
    retyped = {} if chunk is None else find_retyped(present, chunk.frame, settings.missing, chunk.locate)
    check_columns_fit(like.path, table.files[0], missing, retyped, extra)
    plans = tuple(encoder.plan for encoder in encoders)
    return ReencodePlan(table, settings, plans, labelled, like=like, encoders=encoders, extra=extra)


def open_reference(like: Like) -> Dataset:
    """Open a Dataset; raise DataError if it does not store how its rows were encoded."""
    dataset = like if isinstance(like, Dataset) else Dataset(like)
    if dataset.settings.get("made_by") != "prepare":
        raise DataError(f"{dataset.path} was not made by prepare: it does not say how raw values become ids")
    return dataset


def reference_encoders(like: Dataset, fields: Sequence[str] | None) -> tuple[Encoder, ...]:
    """Return the encoders of a Dataset, or only those of some fields, in its order."""
    from lpfs.data.encoders import restore_encoder  # imports polars

    names = like.schema.names if fields is None else tuple(fields)
    for name in names:
        check_name(name, like.schema.names, "field", context=str(like.path), error=FieldError)
    if not names:
        raise InputError("no field is requested; name at least one")
    schema = like.schema.subset(names)
    settings = like.settings.get("fields")
    if not isinstance(settings, dict) or not set(names) <= set(settings):
        raise DataError(f"{like.path} does not store how its fields were encoded; prepare the log again")
    encoders = tuple(restore_encoder(settings[field.name], like.vocabulary(field.name)) for field in schema)
    for field, encoder in zip(schema, encoders, strict=True):
        if encoder.field != field:
            raise DataError(f"{like.path}: field {field.name!r} does not match its settings; prepare the log again")
    return encoders


def unknown_columns(like: Dataset, names: Iterable[str], roles: Iterable[str | None]) -> tuple[str, ...]:
    """Return the columns that the log of a Dataset did not have; ``roles`` are label, time and split columns."""
    options = like.settings["options"]
    known = {*like.schema.names, *like.settings["dropped"], *like.settings["ignored"], *roles, options["time"]}
    return tuple(name for name in names if name not in known)


def find_retyped(
    encoders: Iterable[Encoder], frame: pl.DataFrame, missing: Sequence[str], locate: RowLocator
) -> dict[str, str]:
    """Return {column: reason} of the columns whose values cannot be encoded; ``missing`` are texts for no value."""
    from lpfs.data.parsing import replace_missing_marks

    frame, reasons = replace_missing_marks(frame, missing), {}
    for encoder in encoders:
        try:
            encoder.encode(frame[encoder.name], locate)
        except DataError as error:
            reasons[encoder.name] = str(error).partition(";")[0]
    return reasons


def check_columns_fit(
    reference: object, source: str, missing: Sequence[str], retyped: Mapping[str, str], extra: Sequence[str]
) -> None:
    """Raise DataError if columns are missing or retyped, with all their names; extra ones are only mentioned."""
    columns = {
        "missing": [f"{name!r}{did_you_mean(name, extra)}" for name in missing],
        "retyped": [f"{name!r} ({reason})" for name, reason in retyped.items()],
        "not used": [repr(name) for name in extra],
    }
    if missing or retyped:
        problems = "; ".join(f"{problem}: {', '.join(names)}" for problem, names in columns.items() if names)
        raise DataError(f"{source} does not fit {reference}: {problems}")


class RowEncoder:
    """Encodes tables of raw rows with the vocabularies, scales, bins and hashes of a Dataset.

    Args:
        like: a Dataset that ``prepare`` made, or its path.
        fields: only these of its fields, in its order; the columns of the others may be absent.

    ``encoder(table)`` returns bit for bit the ids and numbers that ``prepare(table, out, like=…)`` stores.
    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        self.like = open_reference(like)
        self.encoders = reference_encoders(self.like, fields)
        schema = self.like.schema
        self.schema = Schema(tuple(encoder.field for encoder in self.encoders), schema.label, schema.tasks)
        self.options = build_options(self.like.settings["options"])

    def clean(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Return a raw table with null for every missing value, as ``prepare`` reads it."""
        from lpfs.data.parsing import decode_dictionary_columns, replace_missing_marks, strip_blanks

        frame = decode_dictionary_columns(frame)
        return replace_missing_marks(strip_blanks(frame) if self.options.strip else frame, self.options.missing)

    def __call__(self, table: Any) -> Batch:
        """Return all rows of a polars, pandas or Arrow table, or of a dict of columns; labels are 0 if absent."""
        from lpfs.data.passes import DayRows, encode, read_labels
        from lpfs.data.sources.base import TableSource, row_locator

        source, locate = TableSource(table), row_locator("the table")
        targets = (self.schema.label, *self.schema.tasks)
        labelled = any(name in source.names for name in targets)
        required = (*self.schema.names, *(targets if labelled else ()))
        extra = unknown_columns(self.like, source.names, targets)
        missing = [name for name in required if name not in source.names]
        check_columns_fit(self.like.path, "the table", missing, {}, extra)
        frame = self.clean(source.frame.select(required))
        labels = read_labels(frame, self.options, locate, labelled=labelled)
        part = DayRows(((0, frame.height),), frame, labels, locate)
        try:
            [(_, columns)] = encode([part], self.encoders)
        except DataError:
            retyped = find_retyped(self.encoders, frame, (), locate)
            check_columns_fit(self.like.path, "the table", [], retyped, extra)
            raise
        return gather_columns(self.schema, columns, labels).batch()


def encode_rows(like: Like, table: Any, fields: Sequence[str] | None = None) -> Batch:
    """Return raw rows as a Batch, encoded as those of a Dataset; for many tables create one ``RowEncoder``."""
    return RowEncoder(like, fields)(table)


def gather_columns(schema: Schema, columns: dict[str, dict[str, Any]], labels: dict[str, Any]) -> RowBlock:
    """Gather encoded columns as a Stream does: a missing number becomes 0.0 and is flagged in ``missing``."""
    if unknown := {schema.label, *schema.tasks} - labels.keys():
        raise DataError(f"the schema names the label {min(unknown)!r}, the settings {sorted(labels)}; prepare it again")
    targets = [labels[name] for name in (schema.label, *schema.tasks)]
    rows = len(targets[0])
    categorical = [field.name for field in schema if field.kind == "categorical"]
    ids = np.empty((rows, len(categorical)), np.int32)
    for number, name in enumerate(categorical):
        ids[:, number] = columns["ids"][name]
    dense = [columns["dense"][field.name].reshape(rows, field.dim) for field in schema if field.kind == "numeric"]
    numbers: AnyArray = np.concatenate([np.empty((rows, 0), np.float32), *dense], 1)  # (n, C)
    missing = np.isnan(numbers)
    numbers[missing] = 0.0
    bags = {
        name: (values.astype(np.int32), bag_offsets(lengths)) for name, (values, lengths) in columns["bags"].items()
    }
    return RowBlock(ids, numbers, np.stack(targets, 1).astype(np.float32), missing if missing.any() else None, bags)
