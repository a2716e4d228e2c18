"""prepare: a raw log in, a Dataset out."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lpfs.data.dataset import Dataset
from lpfs.data.engines import make_engine
from lpfs.data.planning import PreparePlan, field_table_compact, plan_log
from lpfs.data.progress import Reporter
from lpfs.data.reencode import Like, ReencodePlan, _report_new_rows, encoder_settings, plan_like
from lpfs.data.remote import as_url
from lpfs.data.store.location import check_remote_target, dataset_exists, upload_dataset
from lpfs.data.store.temporary import check_target
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, InputError
from lpfs.schema import Schema

if TYPE_CHECKING:
    from lpfs.data.days import DayAssigner
    from lpfs.data.encoders.base import Encoder
    from lpfs.data.engines.base import Encoded, Engine


VERSION = 2  # of what prepare does with the same source and options; part of the fingerprint


def prepare(
    source: Any,
    out: str | os.PathLike[str],
    *,
    label: str | None = None,
    time: str | None = None,
    fields: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    preset: str | None = None,
    like: Like | None = None,
    fields_only: Sequence[str] | None = None,
    engine: str = "embedded",
    replace: bool = False,
    quiet: bool = False,
    **options: Any,
) -> Dataset:
    """Turn a raw log into a Dataset, or reuse the one that the same source and options made.

    Args:
        source: a CSV, TSV or Parquet file (.gz and .zst too), a folder or a pattern of them, a list of
            those, or a polars, pandas or Arrow table.
        out: the folder to make; a URL (``s3://…``) for a place of an object store.
        label: column of the clicks, 0 or 1.
        time: column that orders the rows by day: dates, timestamps or day numbers. Without it a single
            column of timestamps is taken if there is one, else the row order is cut into ``parts``.
        fields: corrections of what is found: {column: kind} or {column: {option: value}}, or the path of a
            TOML file; the options are those of ``FieldPlan``.
        preset: ``criteo-terabyte``, ``criteo-kaggle`` or ``avazu``.
        like: a Dataset (or its path) whose vocabularies, scales, bins and hashes to use as they are: nothing is
            learned. The label may be absent; labels are 0 then, and ``settings["unlabelled"]`` is true.
        fields_only: with ``like``, only these of its fields; the columns of the others need not be there.
        engine: ``embedded``: this process; ``spark``: a cluster, see docs/scale.md. Both make the same Dataset.
        replace: put the result in the place of another Dataset at ``out``.
        quiet: print nothing.
        options: any of ``Options``: ``parts``, ``shuffle``, ``split``, ``negatives``, ``min_count``, ``bins`` …

    Raises:
        DataError: the source cannot be used, with the file, the line or column and the value. Nothing is
            written then.

    """
    reporter = Reporter(quiet=quiet)
    given = {"label": label, "time": time, "fields": fields, "preset": preset, **options}
    job = plan_source(source, like=like, fields_only=fields_only, **given)
    reporter.table(job.title, *field_table_compact(job))
    return run_plan(job, out, engine=engine, replace=replace, reporter=reporter)


def plan_source(
    source: Any, *, like: Like | None = None, fields_only: Sequence[str] | None = None, **given: Any
) -> PreparePlan:
    """Plan to learn from a source, or to encode it as another one was."""
    if like is not None:
        return plan_like(source, like, fields_only=fields_only, **given)
    if fields_only is not None:
        raise InputError("fields_only goes with like; to leave columns out set their kind to 'ignore' in fields")
    return plan_log(source, **given)


def run_plan(
    job: PreparePlan,
    out: str | os.PathLike[str],
    *,
    engine: str = "embedded",
    replace: bool = False,
    reporter: Reporter | None = None,
) -> Dataset:
    """Do a planned job: read days, count training values, encode all rows."""
    reporter, url, begin = reporter or Reporter(quiet=True), as_url(out), monotonic()

    def check() -> None:
        if url is None:
            check_target(Path(os.path.abspath(out)), replace=replace)
        else:
            check_remote_target(url, replace=replace)

    old = _open_existing(out)
    if old is None:  # before a large source is read for its fingerprint
        check()
    with make_engine(engine, job, reporter) as worker:
        mark = fingerprint(job, worker.fingerprint())
        if old is not None and old.fingerprint == mark:
            reporter.say(f"{url or out}: made before from the same source and options; reused")
            return old
        check()
        if url is None:
            result = _build_dataset(job, worker, Path(out), mark, replace, reporter)
        else:
            with tempfile.TemporaryDirectory(prefix="lpfs-") as aside:
                _build_dataset(job, worker, Path(aside) / "dataset", mark, False, reporter)
                upload_dataset(Path(aside) / "dataset", url, replace=replace)
            result = Dataset(url)
    _report_result(result, monotonic() - begin, reporter)
    return result


def _build_dataset(
    job: PreparePlan, worker: Engine, out: Path, mark: str, replace: bool, reporter: Reporter
) -> Dataset:
    """Have an engine find the days, learn from the training ones and encode all."""
    from lpfs.data.fit_encoders import select_encoders, training_days

    options, clock = job.options, worker.assign_days()
    unknown = set(options.negatives) - set(clock.days) if isinstance(options.negatives, Mapping) else set()
    if unknown:
        raise DataError(f"negatives: there is no day {min(unknown)!r}; there are {', '.join(clock.days[:10])}")
    encoders: Sequence[Encoder]
    if isinstance(job, ReencodePlan):
        encoders, found = job.encoders, job.settings()
        _report_new_rows(job, reporter)
    else:
        train = training_days(clock, options)
        encoders, dropped = select_encoders(job, worker.observe(clock, set(range(train))), reporter)
        found = {
            "train_days": clock.days[:train],
            "dropped": {} if options.keep_all else dropped,
            "ignored": {each.name: each.why for each in job.plans if each.kind == "ignore"},
        }
    settings = {
        "made_by": "prepare",
        "options": options.to_json(),
        "sources": [Path(file).name for file in job.source.files],
        "fields": encoder_settings(encoders),
        "unlabelled": not job.labelled,
        **({"split": clock.roles} if clock.roles else {}),
        **found,
    }
    _write_rows(job, clock, encoders, worker.encode(clock, encoders), out, mark, settings, replace)
    return Dataset(out)


def _report_result(dataset: Dataset, seconds: float, reporter: Reporter) -> None:
    """Say what was made."""
    days, kinds = dataset.days(), Counter(field.kind for field in dataset.schema)
    positives = sum(day.positives for day in dataset.table)
    fields = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    span = f"{len(days)} days ({days[0]} to {days[-1]})" if len(days) > 1 else f"one day ({days[0]})"
    labels = f"{positives:,} positive ({positives / dataset.rows:.2%})"
    if dataset.settings["unlabelled"]:
        labels = "no labels"
    reporter.say(f"{dataset.path}: {dataset.rows:,} rows, {labels}, {span}, fields: {fields}; {seconds:,.1f} s")


def _write_rows(
    job: PreparePlan,
    clock: DayAssigner,
    encoders: Sequence[Encoder],
    rows: Iterable[tuple[int, Encoded]],
    out: Path,
    mark: str,
    settings: dict[str, Any],
    replace: bool,
) -> None:
    """Write encoded rows, each lot with its day, into a new Dataset."""
    options = job.options
    schema = Schema(tuple(each.field for each in encoders), options.label, options.tasks)
    with DatasetWriter(out, schema, fingerprint=mark, settings=settings, replace=replace) as writer:
        for each in encoders:
            values = each.values_to_store()
            if values is not None:
                writer.vocabulary(each.name, values, **each.metadata())
        days = [writer.day(day, negative_rate=options.negative_rate(day)) for day in clock.days]
        for day, lot in rows:
            days[day].append(**lot)
        for each_day in days:
            if not each_day.rows:
                raise DataError(f"day {each_day.name!r}: no row is left; keep a larger share of the negatives")


def fingerprint(job: PreparePlan, source: list[list[Any]]) -> str:
    """Identify a source by the names, sizes and hashes of its files, and what is done with it."""
    content = {
        "prepare": VERSION,
        "source": source,
        "options": job.options.to_json(),
        "fields": [{**asdict(each), "why": None} for each in job.plans],
    }
    if isinstance(job, ReencodePlan):
        content["like"] = job.like.fingerprint
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _open_existing(out: str | os.PathLike[str]) -> Dataset | None:
    """Return the Dataset at a place, if there is a whole one."""
    try:
        return Dataset(out) if dataset_exists(out) else None
    except (DataError, OSError):
        return None
