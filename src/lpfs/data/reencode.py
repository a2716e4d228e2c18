"""Other rows, encoded exactly as those of a Dataset: plans for ``prepare(like=…)``, and RowEncoder for tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lpfs._console import Console
from lpfs._validation import did_you_mean
from lpfs.data.batch import Bag, Batch, RowBlock
from lpfs.data.dataset import Dataset
from lpfs.data.fields import check_columns
from lpfs.data.planning import PreparePlan, build_options
from lpfs.data.sources import open_source
from lpfs.errors import DataError, FieldError, InputError, MissingPackageError
from lpfs.schema import Schema

if TYPE_CHECKING:
    import polars as pl

    from lpfs.data.encoders.base import Encoder, RowLocator
    from lpfs.data.sources.base import Source
    from lpfs.data.store.format import AnyArray

Like = Dataset | str | os.PathLike[str]
INHERITED_OPTIONS = ("label", "tasks", "header", "separator", "missing", "positive")  # taken from the reference
FITTING_OPTIONS = ("tasks", "fields", "preset", "train", "min_count", "max_values", "hash", "bins", "keep_all")


@dataclass(frozen=True, kw_only=True)
class ReencodePlan(PreparePlan):
    """A plan without fitting: new rows, encoded as those of a reference Dataset.

    Args:
        like: the reference, source of vocabularies, scales, bins and hashes.
        encoders: of its fields, or of the requested ones.
        extra: columns of the source that the reference does not have.
    """

    like: Dataset
    encoders: tuple[Encoder, ...]
    extra: tuple[str, ...]

    @property
    def title(self) -> str:
        """Heading of the table of fields."""
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

    Args:
        source: as in ``prepare``. Label and tasks may be absent, all together.
        like: a Dataset that ``prepare`` made, or its path.
        fields_only: encode only these of its fields; the columns of the others may be absent.
        options: those of ``prepare`` that do not concern fitting: ``time``, ``parts``, ``split``, ``negatives`` …

    Raises:
        DataError: the source does not fit; names the missing and retyped columns.
    """
    options = {name: value for name, value in options.items() if value is not None}
    for name in FITTING_OPTIONS:
        if name in options:
            raise InputError(f"with like, everything that is fitted comes from the other Dataset; leave out {name!r}")
    like = open_reference(like)
    encoders = reference_encoders(like, fields_only)
    reference = like.settings["options"]
    if options.get("label", reference["label"]) != reference["label"]:
        raise InputError(
            f"label: it is {reference['label']!r} in {like.path}, found {options['label']!r}; rename the column"
        )
    settings = build_options({**{name: reference[name] for name in INHERITED_OPTIONS}, **options})
    table = open_source(source, separator=settings.separator, header=settings.header)
    if settings.time is None and reference["time"] in table.names and not {"parts", "shuffle"} & set(options):
        time_format = settings.time_format or reference["time_format"]
        settings = replace(settings, time=reference["time"], time_format=time_format)
    for option, column in (("time", settings.time), ("split", settings.split)):
        if column is not None:
            check_columns([column], table.names, option)
    targets = (settings.label, *settings.tasks)
    labelled = any(name in table.names for name in targets)
    if not labelled and settings.negatives != 1.0:
        raise InputError(f"negatives: without the label {settings.label!r} negatives are unknown; leave negatives out")
    extra = unknown_columns(like, table.names, (*targets, settings.time, settings.split))
    present = [encoder for encoder in encoders if encoder.name in table.names]
    required = [*(encoder.name for encoder in encoders), *(targets if labelled else ())]
    missing = [name for name in required if name not in table.names]
    retyped = find_retyped_in_source(table, present, settings.missing)
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
    try:
        from lpfs.data.encoders import restore_encoder
    except ImportError as error:
        raise MissingPackageError(f"encoding rows needs polars ({error}); install: pip install polars") from None
    names = like.schema.names if fields is None else tuple(fields)
    for name in names:
        if name not in like.schema.names:
            raise FieldError(f"{like.path} has no field {name!r}{did_you_mean(name, like.schema.names)}")
    if not names:
        raise InputError("no field is requested; name at least one")
    schema = like.schema.subset(names)
    settings = like.settings["fields"]
    encoders = tuple(restore_encoder(settings[field.name], like.vocabulary(field.name)) for field in schema)
    for field, encoder in zip(schema, encoders, strict=True):
        if encoder.field != field:
            raise DataError(
                f"{like.path}: field {field.name!r} does not match its stored settings; prepare the log again"
            )
    return encoders


def unknown_columns(like: Dataset, names: Iterable[str], roles: Iterable[str | None]) -> tuple[str, ...]:
    """Return the columns that the log of a Dataset did not have; ``roles`` are label, time and split columns."""
    options = like.settings["options"]
    known = {*like.schema.names, *like.settings["dropped"], *like.settings["ignored"], *roles, options["time"]}
    return tuple(name for name in names if name not in known)


def find_retyped_in_source(source: Source, encoders: Sequence[Encoder], missing: Sequence[str]) -> dict[str, str]:
    """Return the retyped columns of a source, judged by its first chunk."""
    from lpfs.data.parsing import replace_missing_marks

    for chunk in source.chunks([encoder.name for encoder in encoders]) if encoders else ():
        if chunk.frame.height:
            return find_retyped(encoders, replace_missing_marks(chunk.frame, missing), chunk.locate)
    return {}


def find_retyped(encoders: Iterable[Encoder], frame: pl.DataFrame, locate: RowLocator) -> dict[str, str]:
    """Return {column: reason} of the columns whose values cannot be encoded."""
    reasons = {}
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
    problems = []
    if missing:
        problems.append("missing: " + ", ".join(f"{name!r}{did_you_mean(name, extra)}" for name in missing))
    if retyped:
        problems.append("retyped: " + ", ".join(f"{name!r} ({reason})" for name, reason in retyped.items()))
    if not problems:
        return
    if extra:
        problems.append("not used: " + ", ".join(map(repr, extra)))
    raise DataError(f"{source} does not fit {reference}: {'; '.join(problems)}")


def encoder_settings(encoders: Iterable[Encoder]) -> dict[str, dict[str, Any]]:
    """Return the plan and the fitted values of each field, from which ``restore_encoder`` builds its encoder."""
    return {encoder.name: {**asdict(encoder.plan), **encoder.metadata()} for encoder in encoders}


class RowEncoder:
    """Encodes tables of raw rows with the vocabularies, scales, bins and hashes of a Dataset.

    Args:
        like: a Dataset that ``prepare`` made, or its path.
        fields: only these of its fields, in its order; the columns of the others may be absent.

    ``encoder(table)`` returns bit for bit the ids and numbers that ``prepare(table, out, like=…)`` stores.
    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        self.like = open_reference(like)
        self._encoders = reference_encoders(self.like, fields)
        schema = self.like.schema
        self.schema = Schema(tuple(encoder.field for encoder in self._encoders), schema.label, schema.tasks)
        self._options = build_options(self.like.settings["options"])

    def __call__(self, table: Any) -> Batch:
        """Return all rows of a polars, pandas or Arrow table, or of a dict of columns; labels are 0 if absent."""
        from lpfs.data.parsing import decode_dictionary_columns, replace_missing_marks
        from lpfs.data.passes import DayRows, encode, read_labels
        from lpfs.data.sources.base import TableSource

        source = TableSource(table)
        targets = (self.schema.label, *self.schema.tasks)
        labelled = any(name in source.names for name in targets)
        required = (*self.schema.names, *(targets if labelled else ()))
        extra = unknown_columns(self.like, source.names, targets)
        missing = [name for name in required if name not in source.names]
        check_columns_fit(self.like.path, "the table", missing, {}, extra)
        frame = decode_dictionary_columns(source.frame.select(required))
        frame = replace_missing_marks(frame, self._options.missing)
        labels = read_labels(frame, self._options, _locate_row, labelled=labelled)
        part = DayRows(((0, frame.height),), frame, labels, _locate_row)
        try:
            [(_, columns)] = encode([part], self._encoders)
        except DataError:
            retyped = find_retyped(self._encoders, frame, _locate_row)
            check_columns_fit(self.like.path, "the table", [], retyped, extra)
            raise
        return _gather_columns(self.schema, columns, labels).batch()


def encode_rows(like: Like, table: Any, fields: Sequence[str] | None = None) -> Batch:
    """Return raw rows as a Batch, encoded as those of a Dataset; for many tables create one ``RowEncoder``."""
    return RowEncoder(like, fields)(table)


def _locate_row(row: int) -> str:
    """Describe the location of a row, for messages."""
    return f"the table, row {row + 1}"


def _gather_columns(schema: Schema, columns: dict[str, dict[str, Any]], labels: dict[str, Any]) -> RowBlock:
    """Gather encoded columns as a Stream does: a missing number becomes 0.0 and is flagged in ``missing``."""
    targets = [labels[name] for name in (schema.label, *schema.tasks)]
    rows = len(targets[0])
    ids = [columns["ids"][field.name] for field in schema if field.kind == "categorical"]
    dense = [columns["dense"][field.name].reshape(rows, -1) for field in schema if field.kind == "numeric"]
    numbers: AnyArray = np.concatenate([np.empty((rows, 0), np.float32), *dense], 1)  # (n, C)
    missing = np.isnan(numbers)
    numbers[missing] = 0.0
    bags: dict[str, Bag] = {}
    for name, (values, lengths) in columns["bags"].items():
        ends = np.zeros(rows + 1, np.int64)
        np.cumsum(lengths, out=ends[1:])
        bags[name] = values.astype(np.int32), ends
    return RowBlock(
        np.stack(ids, 1).astype(np.int32) if ids else np.empty((rows, 0), np.int32),
        numbers,
        np.stack(targets, 1).astype(np.float32),
        missing if missing.any() else None,
        bags,
    )
