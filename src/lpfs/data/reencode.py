"""Other rows, encoded exactly as those of a Dataset were: nothing is learned, all is taken from it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lpfs.data.dataset import Dataset
from lpfs.data.fields import check_columns, suggestion
from lpfs.data.plan.job import Job, make_options
from lpfs.data.progress import Reporter
from lpfs.data.raw.files import open_source
from lpfs.errors import DataError, FieldError, InputError, MissingPackageError

if TYPE_CHECKING:
    import polars as pl

    from lpfs.data.encoders.base import Encoder
    from lpfs.data.sources.base import Source

Like = Dataset | str | os.PathLike[str]
TAKEN = ("label", "tasks", "header", "separator", "missing", "positive")  # options that hold for new rows too
LEARNED = ("tasks", "fields", "preset", "train", "min_count", "max_values", "hash", "bins", "keep_all")


@dataclass(frozen=True, kw_only=True)
class NewRows(Job):
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


def plan_like(source: Any, like: Like, *, fields_only: Sequence[str] | None = None, **given: Any) -> NewRows:
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
    for name in LEARNED:
        if name in given:
            raise InputError(f"like takes everything that is learned from the other Dataset; leave out {name!r}")
    like = opened(like)
    encoders = restored(like, fields_only)
    old = like.settings["options"]
    if given.get("label", old["label"]) != old["label"]:
        raise InputError(
            f"label: it is {old['label']!r} in {like.path}, found {given['label']!r}; rename the column"
        )
    options = make_options({**{name: old[name] for name in TAKEN}, **given})
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
    refuse_misfit(like.path, table.files[0], absent, first_retyped(table, there, options.missing), extra)
    plans = tuple(each.plan for each in encoders)
    return NewRows(table, options, plans, labelled, like=like, encoders=encoders, extra=extra)


def opened(like: Like) -> Dataset:
    """Return the Dataset, if it says how its rows were encoded."""
    dataset = like if isinstance(like, Dataset) else Dataset(like)
    if dataset.settings.get("made_by") != "prepare":
        raise DataError(f"{dataset.path} was not made by prepare: it does not say how raw values become ids")
    return dataset


def restored(like: Dataset, fields: Sequence[str] | None) -> tuple[Encoder, ...]:
    """Return the encoders of a Dataset, of some fields only where they are named, in its order."""
    try:
        from lpfs.data.encode.restore import restore
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
    encoders = tuple(restore(settings[field.name], like.vocabulary(field.name)) for field in schema)
    for field, encoder in zip(schema, encoders, strict=True):
        if encoder.field != field:
            raise DataError(f"{like.path}: field {field.name!r} is not what its settings say; prepare it again")
    return encoders


def unknown_columns(like: Dataset, names: Iterable[str], roles: Iterable[str | None]) -> tuple[str, ...]:
    """Return the columns that a Dataset has never seen; those it dropped or ignored it knows."""
    options = like.settings["options"]
    known = {*like.schema.names, *like.settings["dropped"], *like.settings["ignored"], *roles, options["time"]}
    return tuple(name for name in names if name not in known)


def first_retyped(source: Source, encoders: Sequence[Encoder], missing: Sequence[str]) -> dict[str, str]:
    """Return the retyped columns of a source, as its first chunk shows them."""
    from lpfs.data.raw.cast import mark_missing

    for chunk in source.chunks([each.name for each in encoders]) if encoders else ():
        if chunk.frame.height:
            return retyped(encoders, mark_missing(chunk.frame, missing), chunk.place)
    return {}


def retyped(encoders: Iterable[Encoder], frame: pl.DataFrame, where: Callable[[int], str]) -> dict[str, str]:
    """Return the columns whose values cannot be those of the field, with the reason."""
    reasons = {}
    for each in encoders:
        try:
            each.encode(frame[each.name], where)
        except DataError as error:
            reasons[each.name] = str(error).partition(";")[0]
    return reasons


def refuse_misfit(
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


def of_fields(encoders: Iterable[Encoder]) -> dict[str, dict[str, Any]]:
    """Return plan and learned values of each field, from which ``restored`` makes its encoder again."""
    return {each.name: {**asdict(each.plan), **each.about()} for each in encoders}


def tell_new_rows(job: NewRows, reporter: Reporter) -> None:
    """Say which columns are not used, and whether there are labels."""
    if job.extra:
        reporter.say(f"not used, {job.like.path} does not have them: {', '.join(map(repr, job.extra))}")
    if not job.labelled:
        near = suggestion(job.options.label, job.extra)
        reporter.say(f"no label {job.options.label!r}{near}: labels are 0 and mean nothing")
