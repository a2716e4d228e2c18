"""prepare(): a raw log in, a Dataset out."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from lpfs._console import Console
from lpfs._fileio import check_output_dir
from lpfs.data.dataset import Dataset
from lpfs.data.engines import make_engine
from lpfs.data.planning import PreparePlan, field_table_compact, plan_log
from lpfs.data.reencode import Like, ReencodePlan, plan_like
from lpfs.data.remote import as_url
from lpfs.data.store.location import check_remote_target, dataset_exists, upload_dataset
from lpfs.data.store.writer import DatasetWriter
from lpfs.errors import DataError, InputError
from lpfs.schema import Schema

if TYPE_CHECKING:
    from lpfs.data.encoders.base import Encoder
    from lpfs.data.engines.base import Engine

VERSION = 5  # version of what prepare does with a source and its options; part of the fingerprint


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
    """Turn a raw log into a Dataset, or reuse the Dataset that the same source and options produced before.

    Args:
        source: a CSV, TSV or Parquet file (also .gz and .zst), a directory or a glob pattern of them, a list of
            those, or a polars, pandas or Arrow table.
        out: directory to create; a URL (``s3://…``) for an object store.
        label: label column, 0 or 1.
        time: column that orders the rows by day: dates, timestamps or day numbers. Without it, a single
            timestamp column is used if there is one; otherwise the row order is split into ``parts``.
        fields: corrections of the inferred fields: {column: kind} or {column: {option: value}}, or the path of
            a TOML file; the options are those of ``FieldPlan``.
        preset: ``criteo-terabyte``, ``criteo-kaggle`` or ``avazu``.
        like: a Dataset (or its path) whose vocabularies, scales, bins and hashes are used unchanged; nothing is
            fitted. The label may be absent: labels are 0 then, and ``settings["unlabelled"]`` is true.
        fields_only: with ``like``, use only these of its fields; the columns of the others may be absent.
        engine: ``embedded`` (this process) or ``spark`` (a cluster, see docs/scale.md), with the same result.
        replace: replace another Dataset at ``out``.
        quiet: print nothing.
        options: any of ``PrepareOptions``: ``parts``, ``shuffle``, ``split``, ``negatives``, ``min_count``,
            ``bins`` …

    Raises:
        DataError: the source cannot be used; names the file, the line or column, and the value. Nothing is
            written in that case.
    """
    options = {"label": label, "time": time, "fields": fields, "preset": preset, **options}
    plan = plan_source(source, like=like, fields_only=fields_only, **options)
    return run_plan(plan, out, engine=engine, replace=replace, console=Console(quiet=quiet))


def plan_source(
    source: Any, *, like: Like | None = None, fields_only: Sequence[str] | None = None, **options: Any
) -> PreparePlan:
    """Plan how a source is prepared: with encoders fitted on it, or with those of the Dataset ``like``."""
    if like is not None:
        return plan_like(source, like, fields_only=fields_only, **options)
    if fields_only is not None:
        raise InputError("fields_only goes with like; to leave columns out set their kind to 'ignore' in fields")
    return plan_log(source, **options)


def run_plan(
    plan: PreparePlan,
    out: str | os.PathLike[str],
    *,
    engine: str = "embedded",
    replace: bool = False,
    console: Console | None = None,
) -> Dataset:
    """Print the fields and execute a plan: assign days, fit encoders on training days, encode and write rows."""
    from lpfs.data.diagnose import find_unreadable_dates

    console, url, start = console or Console(quiet=True), as_url(out), monotonic()
    console.table(plan.title, *field_table_compact(plan), numeric=False)
    for finding in find_unreadable_dates(plan):
        console.message(f"column {finding.column!r}: {finding.text}; it does not order the rows ({finding.flag})")

    def check_output() -> None:
        if url is None:
            check_output_dir(Path(os.path.abspath(out)), replace=replace)
        else:
            check_remote_target(url, replace=replace)

    existing = None
    with suppress(DataError, OSError):  # an incomplete Dataset
        existing = Dataset(out) if dataset_exists(out) else None
    if existing is None:  # fail before a large source is read for its fingerprint
        check_output()
    with plan.source.explain_errors(), make_engine(engine, plan, console) as worker:
        digest = fingerprint(plan, worker.fingerprint())
        plan.source.check_unchanged()
        if existing is not None and existing.fingerprint == digest:
            console.message(f"{url or out}: exists already, made from the same source and options; reused")
            return existing
        check_output()
        if url is None:
            dataset = _build_dataset(plan, worker, Path(out), digest, replace, console)
        else:
            with tempfile.TemporaryDirectory(prefix="lpfs-") as staging:
                _build_dataset(plan, worker, Path(staging) / "dataset", digest, False, console)
                upload_dataset(Path(staging) / "dataset", url, replace=replace)
            dataset = Dataset(url)
    _report_result(dataset, monotonic() - start, console)
    return dataset


def _build_dataset(
    plan: PreparePlan, engine: Engine, out: Path, digest: str, replace: bool, console: Console
) -> Dataset:
    """Assign days, fit the encoders (unless the plan brings them) and write all rows to ``out``."""
    from lpfs.data.fit_encoders import select_encoders, training_days
    from lpfs.data.integers import decide_integers

    options, assigner = plan.options, engine.assign_days()
    unknown = set(options.negatives) - set(assigner.days) if isinstance(options.negatives, Mapping) else set()
    if unknown:
        raise DataError(f"negatives: no such day {min(unknown)!r}; the days are {', '.join(assigner.days[:10])}")
    encoders: Sequence[Encoder]
    if isinstance(plan, ReencodePlan):
        encoders, fit_settings = plan.encoders, plan.settings()
        plan.report(console)
    else:
        train = training_days(assigner, options)
        plan = engine.plan = decide_integers(plan, assigner, set(range(train)), console)
        encoders, dropped = select_encoders(plan, engine.observe(assigner, set(range(train))), console)
        fit_settings = {
            "train_days": assigner.days[:train],
            "dropped": {} if options.keep_all else dropped,
            "ignored": {field.name: field.why for field in plan.plans if field.kind == "ignore"},
        }
    settings = {
        "made_by": "prepare",
        "options": options.to_json(),
        "sources": [Path(file).name for file in plan.source.files],
        "fields": {encoder.name: {**vars(encoder.plan), **encoder.metadata()} for encoder in encoders},
        "unlabelled": not plan.labelled,
        **({"split": assigner.roles} if assigner.roles else {}),
        **fit_settings,
    }
    schema = Schema(tuple(encoder.field for encoder in encoders), options.label, options.tasks)
    with DatasetWriter(out, schema, fingerprint=digest, settings=settings, replace=replace) as writer:
        for encoder in encoders:
            values = encoder.values_to_store()
            if values is not None:
                writer.vocabulary(encoder.name, values, **encoder.metadata())
        days = [writer.day(day, negative_rate=options.negative_rate(day)) for day in assigner.days]
        for index, columns in engine.encode(assigner, encoders):
            days[index].append(**columns)
        for day in days:
            if not day.rows:
                raise DataError(f"day {day.name!r}: no row is left; keep a larger share of the negatives")
        plan.source.check_unchanged()  # before the Dataset is complete: its fingerprint is that of the source
    return Dataset(out)


def _report_result(dataset: Dataset, seconds: float, console: Console) -> None:
    """Print rows, labels, days and fields of a new Dataset."""
    days, kinds = dataset.days(), Counter(field.kind for field in dataset.schema)
    positives = sum(day.positives for day in dataset.table)
    fields = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    span = f"{len(days)} days ({days[0]} to {days[-1]})" if len(days) > 1 else f"one day ({days[0]})"
    share = f"{positives:,} positive ({positives / dataset.rows:.2%})"
    labels = "no labels" if dataset.settings["unlabelled"] else share
    console.message(f"{dataset.path}: {dataset.rows:,} rows, {labels}, {span}, fields: {fields}; {seconds:,.1f} s")


def fingerprint(plan: PreparePlan, source: list[list[Any]]) -> str:
    """Return a digest of the names, sizes and hashes of the files of a source, and of everything done with it."""
    content = {
        "prepare": VERSION,
        "source": source,
        "options": plan.options.to_json(),
        "fields": [{**vars(field), "why": None, "by_label": field.decided_by_label} for field in plan.plans],
    }
    if isinstance(plan, ReencodePlan):
        content["like"] = plan.like.fingerprint
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
