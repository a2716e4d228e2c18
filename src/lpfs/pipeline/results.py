"""Outcome: the result of a run. The record of a run, which is written once and handed on in memory."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import lpfs
from lpfs._fileio import check_files, no_result_error, open_atomic, read_json, write_json_atomic, write_text_atomic
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError
from lpfs.gates.prune import Certificate
from lpfs.models.base import Model
from lpfs.pipeline.plan import RunPlan
from lpfs.pipeline.stages import RowScores
from lpfs.pipeline.verdict import LossOnRows, describe_allowance, format_auc, make_verdict
from lpfs.pipeline.warnings import ordered, seeds_warning, verdict_warnings
from lpfs.report.format import MODEL_LABELS, format_size
from lpfs.report.selection_data import SELECTION_SCHEMA
from lpfs.schema import Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORD_FILE, FIELDS_FILE, HISTORY_FILE = "selection.json", "kept_fields.txt", "history.parquet"
FILES_TEXT = f"{RECORD_FILE}, {FIELDS_FILE}, {HISTORY_FILE}, model/"
AUC_TOLERANCE = 0.0005  # difference of validation AUC within which two trainings count as equal
MAX_LISTED = 12  # field names in a message

Record = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """The result of ``select``.

    Args:
        selection: kept and dropped fields, gate values, how they were found.
        metrics: AUC and logloss on the test rows, of the models all_fields, gated, pruned, hot_start, retrained.
        choices: the same on the validation rows, where choices are made.
        certificates: of the model with zeros and of the model without columns.
        max_logit_change: largest difference of a logit between the gated and the pruned model.
        model, chosen: the model to deploy, and its name in ``metrics``.
        chosen_in: number of searches in which each field was kept.
        savings: table bytes, parameters and rows per second of all fields and of the model to deploy.
        seconds: duration of every stage.
        folder: directory of the run.
        hot_start: after how many steps the hot start equalled training from scratch.
        warnings: possible problems, the most serious first: few positive rows, fields that may leak the label, …
        verdict: whether the kept fields are enough, with the reasons; see ``lpfs.pipeline.verdict``.
        field_facts: further facts of each field for the record: missing share, distinct values, drift.
        seed_aucs: validation AUC after each search, if there are several.
        curve: AUC against the number of fields, values of fields and groups of fields, see :class:`FieldCurve`; None
            if it was left out.
        checks: loss of the models of each search on the validation rows, and whether the allowance holds.
        allowed, allowed_because: loss of AUC that is allowed, and why.
        record: everything above as JSON values, as in ``selection.json``.
    """

    selection: Selection
    metrics: Mapping[str, RowScores]
    choices: Mapping[str, RowScores]
    certificates: Mapping[str, Record]
    max_logit_change: float | None
    model: Model
    chosen: str
    chosen_in: Mapping[str, int]
    savings: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]
    folder: Path
    hot_start: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[Record] = ()
    verdict: Record = field(default_factory=dict)
    field_facts: Mapping[str, Record] = field(default_factory=dict)
    seed_aucs: Sequence[float] = ()
    curve: Record | None = None
    checks: Sequence[Record] = ()
    allowed: float = 0.0
    allowed_because: str = ""
    record: Record = field(default_factory=dict)

    @property
    def kept(self) -> tuple[str, ...]:
        """The kept fields."""
        return self.selection.kept

    def __repr__(self) -> str:
        return f"Outcome({self.verdict.get('text', 'no verdict')!r}, in {str(self.folder)!r})"

    def plot(self) -> Figure:
        """Return a figure of the AUC of the models; ``selection.plot()`` draws the gates."""
        from lpfs.plots import quality

        return quality(self.metrics, MODEL_LABELS)

    def _repr_html_(self) -> str:
        from lpfs.notebook import outcome_html

        return outcome_html(self.selection, self.metrics, MODEL_LABELS, self.folder, self.record)


def with_record(outcome: Outcome, plan: RunPlan) -> Outcome:
    """Return the outcome of ``select`` with its verdict, all warnings and its record."""
    verdict = judge(outcome, plan)
    warnings = ordered(
        [
            *verdict_warnings(verdict, plan.splits.few_labels(), enforced=plan.settings.finds_count),
            *outcome.warnings,
            *seeds_warning(outcome.chosen_in, outcome.kept, plan.settings.seeds, outcome.seed_aucs),
        ]
    )
    record = build_record(
        plan,
        outcome.selection,
        verdict=verdict,
        warnings=warnings,
        metrics=outcome.metrics,
        validation=outcome.choices,
        max_logit_change=outcome.max_logit_change,
        certificates=outcome.certificates,
        model=outcome.chosen,
        chosen_in=outcome.chosen_in,
        savings=outcome.savings,
        seconds={name: round(value, 3) for name, value in outcome.seconds.items()},
        **({"hot_start": outcome.hot_start} if outcome.hot_start else {}),
    )
    if outcome.curve is not None:
        record |= {"curve": outcome.curve["curve"], "groups": outcome.curve["groups"]}
    for facts in (outcome.curve["fields"] if outcome.curve else {}, outcome.field_facts):
        for name, values in facts.items():
            record["fields"].setdefault(name, {}).update(values)
    return replace(outcome, verdict=verdict, warnings=warnings, record=record)


def judge(outcome: Outcome, plan: RunPlan) -> Record:
    """Return the verdict on the model to deploy."""
    valid, test = (
        LossOnRows.of(scores["all_fields"], scores[outcome.chosen]) for scores in (outcome.choices, outcome.metrics)
    )
    return make_verdict(
        len(outcome.kept),
        len(outcome.selection.names),
        valid,
        test,
        allowed=outcome.allowed,
        because=outcome.allowed_because,
        checks=outcome.checks,
        too_few=plan.splits.few_labels(),
    )


def build_record(plan: RunPlan, selection: Selection, **results: Any) -> Record:
    """Return the record of a run: the selection, the results given, and where they come from."""
    values = selection.to_json()
    return {
        "method": plan.settings.method,
        "fields": field_facts(plan),
        **{name: values[name] for name in ("kept", "dropped", "gates")},
        **results,
        **cost_record(plan, selection),
        "seed": plan.settings.seed,
        "configuration": plan.settings.to_json(),
        "steps": plan.steps.to_json(),
        "splits": plan.splits.to_json(),
        "fingerprint": plan.dataset.fingerprint,
        "versions": versions(),
        "sites": values["sites"],
        "made": values["made"],
    }


def field_facts(plan: RunPlan) -> dict[str, Record]:
    """Return kind, group, number of ids and cost of each field; the cost includes a share of shared costs."""
    names, costs = plan.schema.names, plan.target.costs
    prices = [field.cost for field in plan.schema] if costs is None else costs.weights(names, names)
    return {
        field.name: {"kind": field.kind, "group": field.group, "cardinality": field.cardinality, "cost": price}
        for field, price in zip(plan.schema, prices, strict=True)
    }


def cost_record(plan: RunPlan, selection: Selection) -> Record:
    """Return what all fields and the kept fields cost, with its unit; empty without --costs, or for crosses."""
    costs = plan.target.costs
    if costs is None or set(selection.names) != set(plan.schema.names):
        return {}
    totals = {"all_fields": costs.total(plan.schema.names), "kept": costs.total(selection.kept)}
    return {"cost": {**totals, "unit": costs.unit}}


def certificate_record(certificate: Certificate) -> Record:
    """Return a certificate as JSON values."""
    values = {name: getattr(certificate, name) for name in ("max_logit_change", "bound", "certified")}
    return {**values, "checked": list(certificate.checked)}


def data_reference(dataset: Dataset) -> dict[str, str]:
    """Return the metadata of a saved model that locates its Dataset, so that other rows can be encoded like it."""
    return {"data": os.path.abspath(dataset.path), "fingerprint": dataset.fingerprint}


@cache
def source_digest() -> str:
    """Return a digest of the source code of this package, to record which version made a result."""
    digest = hashlib.sha256()
    root = Path(lpfs.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {
        "lpfs": lpfs.__version__,
        "code": source_digest(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def write_record(run_dir: Path, record: Record, selection: Selection) -> None:
    """Write kept_fields.txt, history.parquet if the selection has a history, and selection.json with checksums."""
    write_text_atomic(run_dir / FIELDS_FILE, format_field_list(selection.kept))
    has_history = write_history(run_dir / HISTORY_FILE, selection)
    files = (FIELDS_FILE, HISTORY_FILE) if has_history else (FIELDS_FILE,)
    write_json_atomic(run_dir / RECORD_FILE, record, allow_nan=True, files=files)


def read_record(run_dir: Path) -> tuple[Selection, Record]:
    """Return the selection that a search wrote, and its whole record; all result files must match their checksums."""
    path = run_dir / RECORD_FILE
    try:
        record = read_json(path, SELECTION_SCHEMA, allow_nan=True, advice="search again")
    except FileNotFoundError:
        raise no_result_error(run_dir, f"no {RECORD_FILE} in {run_dir}", "give the directory of a search") from None
    check_files(run_dir, record.pop("files", {}), "search again")
    try:
        values = {name: record[name] for name in ("kept", "dropped", "gates", "sites", "made")}
        return Selection.from_json(values), record
    except (InputError, KeyError) as error:
        raise InputError(f"{path} contains no selection ({error}); search again") from None


def write_history(path: Path, selection: Selection) -> bool:
    """Write the history of a search: one row per record, one column per gate; return whether it was written.

    Without polars it is left out with a warning: everything else of a run needs torch and numpy alone.
    """
    history = selection.history
    if not history:
        return False
    try:
        import polars as pl
    except ImportError:
        warnings.warn(f"{path} is left out: it needs the package polars; pip install polars", stacklevel=2)
        return False
    frame = pl.DataFrame([{key: value for key, value in record.items() if key != "gates"} for record in history])
    if "gates" in history[0]:
        names = [f"gate:{name}" for name in selection.gates]
        frame = frame.hstack(pl.DataFrame([record["gates"] for record in history], schema=names, orient="row"))
    with open_atomic(path) as file:
        frame.write_parquet(file)
    return True


def format_field_list(names: Iterable[str]) -> str:
    r"""Return one name per line; a name that is not a plain line becomes a JSON string.

    >>> format_field_list(["user", "two\nlines"])
    'user\n"two\\nlines"\n'
    """

    def is_plain(name: str) -> bool:
        return name.splitlines() == [name] and name == name.strip() and not name.startswith('"')

    return "".join(f"{name if is_plain(name) else json.dumps(name)}\n" for name in names)


def steps_saved(
    points: Sequence[tuple[int, float]], retrain_auc: float | None, retrain_steps: int, shrink_factor: float = 1.0
) -> Record:
    """Return when a hot start equalled training from scratch, and how many steps that saves.

    ``points`` are (step, validation AUC) of the hot start. It has equalled training from scratch from the first
    evaluation on after which, up to the best one, no AUC is more than ``AUC_TOLERANCE`` below ``retrain_auc``; a single
    high evaluation does not count.

    >>> points = [(0, 0.74), (50, 0.70), (100, 0.74), (150, 0.75), (200, 0.69)]
    >>> steps_saved(points, 0.74, 400)["steps_saved"]
    300
    """
    best = max(range(len(points)), key=lambda number: points[number][1])
    matched_at = None
    for step, auc in reversed(points[: best + 1]):
        if retrain_auc is None or auc < retrain_auc - AUC_TOLERANCE:
            break
        matched_at = step
    return {
        "steps": points[-1][0],
        "kept_step": points[best][0],
        "auc": points[best][1],
        "retrain_steps": retrain_steps,
        "retrain_auc": retrain_auc,
        "tolerance": AUC_TOLERANCE,
        "matched_at": matched_at,
        "steps_saved": 0 if matched_at is None else max(0, retrain_steps - matched_at),
        "validation": [list(point) for point in points],
        "shrink_factor": shrink_factor,
    }


def print_results(outcome: Outcome, plan: RunPlan) -> None:
    """Print the verdict, a table of the models, savings, the files and the warnings."""
    console, selection, savings = plan.console, outcome.selection, outcome.savings
    console.message("")
    rows = [
        [MODEL_LABELS[name], format_auc(scores), f"{scores['logloss']:.4f}"] for name, scores in outcome.metrics.items()
    ]
    console.table(outcome.verdict["text"], ["on the test rows", "AUC", "logloss"], rows)
    tasks = next(iter(outcome.metrics.values())).get("tasks", ())
    if tasks:
        header = ["task", *(MODEL_LABELS[name] for name in outcome.metrics)]
        models = outcome.metrics.values()
        rows = [[task, *(format_auc(scores["tasks"][task]) for scores in models)] for task in tasks]
        console.table("AUC of every task on the test rows", header, rows)
    console.message(f"  {describe_allowance(outcome.verdict)}")
    before, after = savings["all_fields"], savings["kept"]
    console.message(
        f"  tables {format_size(before['table_bytes'])} -> {format_size(after['table_bytes'])}, serving "
        f"{before['rows_per_second']:,.0f} -> {after['rows_per_second']:,.0f} rows/s"
    )
    for line in (*_describe_stop(selection), *_describe_exchanges(selection), *_describe_hot_start(outcome.hot_start)):
        console.message(f"  {line}")
    if outcome.max_logit_change is not None:
        console.message(f"  pruning changed no logit by more than {outcome.max_logit_change:.2g}")
    console.message(f"  kept: {_list_names(selection.kept)}")
    searches = plan.settings.seeds
    if searches > 1:
        unsure = [f"{name} {count}/{searches}" for name, count in outcome.chosen_in.items() if 0 < count < searches]
        console.message(f"  not kept in all {searches} searches: {', '.join(unsure[:MAX_LISTED]) or 'none'}")
    console.message(f"  {outcome.folder}: {FILES_TEXT} ({outcome.chosen})")
    for warning in outcome.warnings:
        console.warning(warning["text"])


def describe_kept(selection: Selection) -> str:
    """Return a line with the kept fields."""
    return f"{len(selection.kept)} of {len(selection.names)} fields kept: {_list_names(selection.kept)}"


def _describe_stop(selection: Selection) -> list[str]:
    """Describe where a search with an AUC loss or a budget stopped, and the losses that it measured on the way."""
    made, count = selection.made, len(selection.kept)
    if not made.get("end"):
        cost = "cost {cost:g} of at most {budget:g} {unit}"
        return [cost.format_map(made).rstrip()] if "budget" in made else []
    end, verb = made["end"], "field loses" if count == 1 else "fields lose"
    lines = [
        f"at the end of the search {count} {verb} {_format_loss(end['loss'])} of validation AUC against all fields "
        f"after the same training; {_format_loss(end['allowed'])} was allowed"
    ]
    fewer = {point["alive"]: point["loss"] for point in made["curve"] if point["alive"] < count}
    if fewer:
        sizes = sorted(fewer, reverse=True)[:: max(1, len(fewer) // 4)][:4]
        losses = ", ".join(f"{_format_loss(fewer[size])} with {size}" for size in sizes)
        lines.append(f"losses measured during the search with fewer fields, before they were trained further: {losses}")
    return lines


def _describe_exchanges(selection: Selection) -> list[str]:
    """Name the fields that were exchanged after the search."""
    pairs = [f"{pair['kept']} instead of {pair['dropped']}" for pair in selection.made.get("exchanged") or ()]
    return [f"exchanged after the search, because the held-out loss fell: {_list_names(pairs)}"] if pairs else []


def _describe_hot_start(hot_start: Mapping[str, Any]) -> list[str]:
    """Describe how many steps the hot start saved."""
    if not hot_start:
        return []
    text = "the hot start saved no steps: its best validation AUC was {auc:.4f} after {kept_step:,} steps"
    if hot_start["matched_at"] is not None:
        text = (
            "the hot start reached the validation AUC of training from scratch ({retrain_steps:,} steps) after "
            "{matched_at:,} steps, within {tolerance:g}: {steps_saved:,} steps saved"
        )
    elif hot_start["retrain_auc"] is not None:
        text += "; from scratch {retrain_auc:.4f} after {retrain_steps:,}"
    return [text.format_map(hot_start)]


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def _format_loss(value: float) -> str:
    return "nothing" if value <= 0 else f"{value:.4f}"
