"""Other rows, encoded exactly as those of a Dataset were: nothing is learned, all is taken from it.

RowEncoder: a table of raw rows in memory -> a Batch, as prepare would encode them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lpfs.data.batch import Bag, Batch, RowBlock
from lpfs.data.dataset import Dataset
from lpfs.data.fields import check_columns, suggestion
from lpfs.data.planning import PreparePlan, build_options
from lpfs.data.progress import Reporter
from lpfs.data.sources import open_source
from lpfs.errors import DataError, FieldError, InputError, MissingPackageError
from lpfs.schema import Schema

if TYPE_CHECKING:
    import polars as pl

    from lpfs.data.encoders.base import Encoder
    from lpfs.data.sources.base import Source
    from lpfs.data.store.format import AnyArray


Like = Dataset | str | os.PathLike[str]
INHERITED_OPTIONS = (
    "label",
    "tasks",
    "header",
    "separator",
    "missing",
    "positive",
)  # options that hold for new rows too
FITTING_OPTIONS = ("tasks", "fields", "preset", "train", "min_count", "max_values", "hash", "bins", "keep_all")


@dataclass(frozen=True, kw_only=True)
class ReencodePlan(PreparePlan):
    """A job that learns nothing: new rows for an old model.

    Args:
        like: where vocabularies, scales, bins and hashes come from.
        encoders: of its fields, or of those that are asked for.
        extra: columns of the source that are not in it at all.

    """

    like: Dataset
    encoders: tuple[Encoder, ...]
    extra: tuple[str, ...]

    @property
    def title(self) -> str:
        """Heading of the table of fields."""
        return f"Fields, encoded as in {self.like.path}"

    def settings(self) -> dict[str, Any]:
        """Return what the new Dataset says about where its encoding comes from."""
        return {
            "like": {"name": self.like.path.name, "fingerprint": self.like.fingerprint},
            "train_days": [],
            "dropped": {},
            "ignored": dict.fromkeys(self.extra, "not in the Dataset whose encoding was taken"),
        }


def plan_like(source: Any, like: Like, *, fields_only: Sequence[str] | None = None, **given: Any) -> ReencodePlan:
    """Look at the first rows and see whether they fit a Dataset; writes nothing.

    Args:
        source: as ``prepare`` takes it. Label and tasks may be absent, all together.
        like: a Dataset that ``prepare`` made, or its path.
        fields_only: encode only these of its fields; the columns of the others need not be there.
        given: options of ``prepare`` that learn nothing: ``time``, ``parts``, ``split``, ``negatives`` …

    Raises:
        DataError: the source does not fit; names the missing and retyped columns.

    """
    given = {name: value for name, value in given.items() if value is not None}
    for name in FITTING_OPTIONS:
        if name in given:
            raise InputError(f"like takes everything that is learned from the other Dataset; leave out {name!r}")
    like = open_reference(like)
    encoders = reference_encoders(like, fields_only)
    old = like.settings["options"]
    if given.get("label", old["label"]) != old["label"]:
        raise InputError(
            f"label: it is {old['label']!r} in {like.path}, found {given['label']!r}; rename the column"
        )
    options = build_options({**{name: old[name] for name in INHERITED_OPTIONS}, **given})
    table = open_source(source, separator=options.separator, header=options.header)
    if options.time is None and old["time"] in table.names and not {"parts", "shuffle"} & set(given):
        options = replace(options, time=old["time"], time_format=options.time_format or old["time_format"])
    for what, column in (("time", options.time), ("split", options.split)):
        if column is not None:
            check_columns([column], table.names, what)
    targets = (options.label, *options.tasks)
    labelled = any(name in table.names for name in targets)
    if not labelled and options.negatives != 1.0:
        raise InputError(f"negatives: without the label {options.label!r} none can be told; leave negatives out")

    extra = unknown_columns(like, table.names, (*targets, options.time, options.split))
    there = [each for each in encoders if each.name in table.names]
    wanted = [*(each.name for each in encoders), *(targets if labelled else ())]
    absent = [name for name in wanted if name not in table.names]
    check_columns_fit(
        like.path, table.files[0], absent, find_retyped_in_source(table, there, options.missing), extra
    )
    plans = tuple(each.plan for each in encoders)
    return ReencodePlan(table, options, plans, labelled, like=like, encoders=encoders, extra=extra)


def open_reference(like: Like) -> Dataset:
    """Return the Dataset, if it says how its rows were encoded."""
    dataset = like if isinstance(like, Dataset) else Dataset(like)
    if dataset.settings.get("made_by") != "prepare":
        raise DataError(f"{dataset.path} was not made by prepare: it does not say how raw values become ids")
    return dataset


def reference_encoders(like: Dataset, fields: Sequence[str] | None) -> tuple[Encoder, ...]:
    """Return the encoders of a Dataset, of some fields only where they are named, in its order."""
    try:
        from lpfs.data.encoders import restore_encoder
    except ImportError as error:
        raise MissingPackageError(f"encoding rows needs polars ({error}); install: pip install polars") from None
    names = like.schema.names if fields is None else tuple(fields)
    for name in names:
        if name not in like.schema.names:
            raise FieldError(f"{like.path} has no field {name!r}{suggestion(name, like.schema.names)}")
    if not names:
        raise InputError("no field is asked for; name at least one")
    schema = like.schema.subset(names)
    settings = like.settings["fields"]
    encoders = tuple(restore_encoder(settings[field.name], like.vocabulary(field.name)) for field in schema)
    for field, encoder in zip(schema, encoders, strict=True):
        if encoder.field != field:
            raise DataError(f"{like.path}: field {field.name!r} is not what its settings say; prepare it again")
    return encoders


def unknown_columns(like: Dataset, names: Iterable[str], roles: Iterable[str | None]) -> tuple[str, ...]:
    """Return the columns that a Dataset has never seen; those it dropped or ignored it knows."""
    options = like.settings["options"]
    known = {*like.schema.names, *like.settings["dropped"], *like.settings["ignored"], *roles, options["time"]}
    return tuple(name for name in names if name not in known)


def find_retyped_in_source(source: Source, encoders: Sequence[Encoder], missing: Sequence[str]) -> dict[str, str]:
    """Return the retyped columns of a source, as its first chunk shows them."""
    from lpfs.data.parsing import replace_missing_marks

    for chunk in source.chunks([each.name for each in encoders]) if encoders else ():
        if chunk.frame.height:
            return find_retyped(encoders, replace_missing_marks(chunk.frame, missing), chunk.locate)
    return {}


def find_retyped(encoders: Iterable[Encoder], frame: pl.DataFrame, where: Callable[[int], str]) -> dict[str, str]:
    """Return the columns whose values cannot be those of the field, with the reason."""
    reasons = {}
    for each in encoders:
        try:
            each.encode(frame[each.name], where)
        except DataError as error:
            reasons[each.name] = str(error).partition(";")[0]
    return reasons


def check_columns_fit(
    what: object, where: str, missing: Sequence[str], retyped: Mapping[str, str], extra: Sequence[str]
) -> None:
    """Refuse a table with missing or retyped columns, all of them by name; extra ones are only told."""
    problems = []
    if missing:
        problems.append("missing: " + ", ".join(f"{name!r}{suggestion(name, extra)}" for name in missing))
    if retyped:
        problems.append("retyped: " + ", ".join(f"{name!r} ({reason})" for name, reason in retyped.items()))
    if not problems:
        return
    if extra:
        problems.append("not used: " + ", ".join(map(repr, extra)))
    raise DataError(f"{where} does not fit {what}: {'; '.join(problems)}")


def encoder_settings(encoders: Iterable[Encoder]) -> dict[str, dict[str, Any]]:
    """Return plan and learned values of each field, from which ``restored`` makes its encoder again."""
    return {each.name: {**asdict(each.plan), **each.metadata()} for each in encoders}


def _report_new_rows(job: ReencodePlan, reporter: Reporter) -> None:
    """Say which columns are not used, and whether there are labels."""
    if job.extra:
        reporter.say(f"not used, {job.like.path} does not have them: {', '.join(map(repr, job.extra))}")
    if not job.labelled:
        near = suggestion(job.options.label, job.extra)
        reporter.say(f"no label {job.options.label!r}{near}: labels are 0 and mean nothing")


class RowEncoder:
    """Encodes tables of raw rows with the vocabularies, scales, bins and hashes of a Dataset; make it once.

    Args:
        like: a Dataset that ``prepare`` made, or its path.
        fields: only these of its fields, in its order; the columns of the others need not be there.

    ``encoder(table)`` gives the ids and numbers, bit by bit, that ``prepare(table, out, like=…)`` stores.

    """

    def __init__(self, like: Like, fields: Sequence[str] | None = None) -> None:
        self.like = open_reference(like)
        self._encoders = reference_encoders(self.like, fields)
        whole = self.like.schema
        self.schema = Schema(tuple(each.field for each in self._encoders), whole.label, whole.tasks)
        self._options = build_options(self.like.settings["options"])

    def __call__(self, table: Any) -> Batch:
        """Return all rows of a polars, pandas or Arrow table, or of a dict of columns; labels are 0 if absent."""
        from lpfs.data.parsing import decode_dictionary_columns, replace_missing_marks
        from lpfs.data.passes import DayRows, encode, read_labels
        from lpfs.data.sources.base import TableSource

        source = TableSource(table)
        targets = (self.schema.label, *self.schema.tasks)
        labelled = any(name in source.names for name in targets)
        wanted = (*self.schema.names, *(targets if labelled else ()))
        extra = unknown_columns(self.like, source.names, targets)
        absent = [name for name in wanted if name not in source.names]
        check_columns_fit(self.like.path, "the table", absent, {}, extra)
        frame = replace_missing_marks(
            decode_dictionary_columns(source.frame.select(wanted)), self._options.missing
        )
        labels = read_labels(frame, self._options, _locate_row, labelled=labelled)
        part = DayRows(((0, frame.height),), frame, labels, _locate_row)
        try:
            [(_, columns)] = encode([part], self._encoders)
        except DataError:
            check_columns_fit(
                self.like.path, "the table", [], find_retyped(self._encoders, frame, _locate_row), extra
            )
            raise
        return _gather_columns(self.schema, columns, labels).batch()


def encode_rows(like: Like, table: Any, fields: Sequence[str] | None = None) -> Batch:
    """Return raw rows as a Batch, encoded as those of a Dataset were; for many tables make a ``RowEncoder``."""
    return RowEncoder(like, fields)(table)


def _locate_row(row: int) -> str:
    """Say where a row is, for messages."""
    return f"the table, row {row + 1}"


def _gather_columns(schema: Schema, columns: dict[str, dict[str, Any]], labels: dict[str, Any]) -> RowBlock:
    """Gather encoded columns as a Stream would: a missing number reads 0.0, marked where any is missing."""
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
