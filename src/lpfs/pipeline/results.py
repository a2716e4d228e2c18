"""Outcome: the answer of a run, and the files it leaves.

kept_fields.txt: a field a line.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import lpfs
from lpfs.data.dataset import Dataset
from lpfs.errors import InputError
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import (
    RunPlan,
)
from lpfs.pipeline.stages import parameters, table_bytes
from lpfs.pipeline.tell import Console
from lpfs.schema import Selection

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def format_field_list(names: Iterable[str]) -> str:
    r"""Return names one a line; one that a line cannot hold as it is becomes a JSON string.

    That is a name with a line break in it, with a blank at an end, with a quotation mark in front, or without a
    letter.

    >>> listed(["user", "two\nlines"])
    'user\n"two\\nlines"\n'
    """
    return "".join(f"{name if _needs_no_quotes(name) else json.dumps(name)}\n" for name in names)


def parse_field_list(text: str) -> tuple[str, ...]:
    r"""Return the names that ``listed`` wrote.

    >>> names_in('user\n"two\\nlines"\n')
    ('user', 'two\nlines')
    """
    return tuple(json.loads(line) if line.startswith('"') else line for line in text.splitlines())


def _needs_no_quotes(name: str) -> bool:
    return name.splitlines() == [name] and name == name.strip() and not name.startswith('"')


Row = dict[str, Any]
TOLERANCE = 0.0005  # of validation AUC, within which two trainings are level


@dataclass(frozen=True)
class Outcome:
    """What ``select`` found.

    Args:
        selection: kept and dropped fields, gates, how it was made.
        metrics: of all_fields, pruned, hot_start and retrained, on the test rows: auc and logloss.
        choices: the same on the validation rows, where choices are made.
        max_logit_change: between the gated and the pruned model, on held-out rows.
        model: the one that was left to deploy, and ``chosen`` which of the trainings it is.
        chosen_in: in how many of the searches each field was kept.
        savings: table bytes, parameters and rows a second of all fields and of the model left.
        seconds: of every stage.
        folder: where everything is.
        hot_start: how soon the pruned model, trained on, was level with the kept fields trained from scratch.
        hints: what to look at: fields that may leak, kept fields that are one column.

    """

    selection: Selection
    metrics: Mapping[str, Row]
    choices: Mapping[str, Row]
    certificates: Mapping[str, Row]
    max_logit_change: float | None
    model: Model
    chosen: str
    chosen_in: Mapping[str, int]
    savings: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]
    folder: Path
    hot_start: Mapping[str, Any] = field(default_factory=dict)
    hints: Sequence[Row] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        """The fields that stay."""
        return self.selection.kept

    def __repr__(self) -> str:
        before, after = (self.metrics.get(name, {}).get("auc") for name in ("all_fields", self.chosen))
        told = "" if before is None or after is None else f", test AUC {after:.4f} ({before:.4f} with all fields)"
        return (
            f"Outcome({len(self.kept)} of {len(self.selection.names)} fields kept{told}, in {str(self.folder)!r})"
        )

    def plot(self) -> Figure:
        """Return a figure: the AUC of the models against all fields; ``selection.plot()`` draws the gates."""
        from lpfs.plots import quality

        return quality(self.metrics, LABELS)

    def _repr_html_(self) -> str:
        from lpfs.cards import outcome_card

        return outcome_card(self.selection, self.metrics, LABELS, self.folder)


@cache
def source_digest() -> str:
    """Return a digest of this package's source: which state of the code a result was made by."""
    found = hashlib.sha256()
    root = Path(lpfs.__file__).parent
    for each in sorted(root.rglob("*.py")):
        found.update(each.relative_to(root).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return the versions that a result was made with."""
    import numpy

    return {
        "lpfs": lpfs.__version__,
        "code": source_digest(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def write_results(outcome: Outcome, work: RunPlan, fingerprint: str) -> None:
    """Write selection.json, kept_fields.txt and history.parquet."""
    folder, selection = outcome.folder, outcome.selection
    values = {
        "method": work.settings.method,
        "fields": field_facts(work),
        "kept": list(selection.kept),
        "dropped": list(selection.dropped),
        "gates": dict(selection.gates),
        "metrics": dict(outcome.metrics),
        "validation": dict(outcome.choices),
        "max_logit_change": outcome.max_logit_change,
        "certificates": dict(outcome.certificates),
        "model": outcome.chosen,
        "chosen_in": dict(outcome.chosen_in),
        "savings": {name: dict(each) for name, each in outcome.savings.items()},
        "seconds": {name: round(each, 3) for name, each in outcome.seconds.items()},
        "hints": list(outcome.hints),
        "seed": work.settings.seed,
        "configuration": work.settings.to_json(),
        "recipe": work.steps.to_json(),
        "periods": work.splits.to_json(),
        "fingerprint": fingerprint,
        "versions": versions(),
        "sites": {name: [dict(each) for each in sites] for name, sites in selection.sites.items()},
        "made": dict(selection.made),
        **({"hot_start": dict(outcome.hot_start)} if outcome.hot_start else {}),
    }
    text = json.dumps(values, indent=1, ensure_ascii=False, default=_plain)
    put(folder / "selection.json", text + "\n")
    put(folder / "kept_fields.txt", format_field_list(selection.kept))
    write_history(folder / "history.parquet", selection)


def field_facts(work: RunPlan) -> dict[str, Row]:
    """Return what is known of each field: kind, group, ids, and its cost with its share of group costs."""
    names, costs = work.schema.names, work.target.costs
    paid = [each.cost for each in work.schema] if costs is None else costs.weights(names, names)
    return {
        each.name: {"kind": each.kind, "group": each.group, "cardinality": each.cardinality, "cost": cost}
        for each, cost in zip(work.schema, paid, strict=True)
    }


def put(path: Path, text: str) -> None:
    """Write a file aside, then put it in its place."""
    aside = path.with_name(path.name + ".new")
    aside.write_text(text, "utf-8")
    aside.replace(path)


def write_history(path: Path, selection: Selection) -> None:
    """Write the history of the search: a row a record, the gates in one column a field."""
    import polars as pl

    if not selection.history:
        return
    names = list(selection.gates)
    plain = [{key: value for key, value in each.items() if key != "gates"} for each in selection.history]
    frame = pl.DataFrame(plain)
    if "gates" in selection.history[0]:
        values = [each["gates"] for each in selection.history]
        gates = pl.DataFrame(values, schema=[f"gate:{name}" for name in names], orient="row")
        frame = pl.concat([frame, gates], how="horizontal")
    aside = path.with_name(path.name + ".new")
    frame.write_parquet(aside)
    aside.replace(path)


def steps_saved(seen: Sequence[tuple[int, float]], level: float | None, steps: int) -> dict[str, Any]:
    """Return when a training was level with another one of ``steps`` steps, and how many steps that saves.

    ``seen`` are (step, validation AUC), ``level`` is the AUC that the other one reached. Level is the first look
    from which on, up to the best one, which is kept, no look is below ``level`` - ``TOLERANCE``: a single lucky
    look does not count. Where there is none, nothing is saved.

    >>> steps_saved([(0, 0.74), (50, 0.70), (100, 0.74), (150, 0.75), (200, 0.69)], 0.74, 400)["steps_saved"]
    300
    """
    kept = max(range(len(seen)), key=lambda look: seen[look][1])
    at = None
    for step, auc in reversed(seen[: kept + 1]):
        if level is None or auc < level - TOLERANCE:
            break
        at = step
    return {
        "steps": seen[-1][0],
        "kept_step": seen[kept][0],
        "auc": seen[kept][1],
        "retrain_steps": steps,
        "retrain_auc": level,
        "tolerance": TOLERANCE,
        "level_at": at,
        "steps_saved": 0 if at is None else max(0, steps - at),
        "validation": [list(each) for each in seen],
    }


def savings(full: Model, small: Model, speed: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return what is saved: table bytes, parameters, rows a second."""
    return {
        name: {
            "table_bytes": table_bytes(model),
            "parameters": parameters(model),
            "rows_per_second": round(speed[name]),
        }
        for name, model in (("all_fields", full), ("kept", small))
    }


def print_results(outcome: Outcome, work: RunPlan) -> None:
    """End with an answer that can be read at a glance."""
    tell, selection, savings = work.console, outcome.selection, outcome.savings
    total = len(selection.names)
    tell.message("")
    rows = [[LABELS[name], _auc(each["auc"]), f"{each['logloss']:.5f}"] for name, each in outcome.metrics.items()]
    tell.table(f"{len(selection.kept)} of {total} fields kept", ["on the test rows", "AUC", "logloss"], rows)
    _print_tasks(tell, outcome.metrics)
    before, after = savings["all_fields"], savings["kept"]
    tell.message(
        f"  tables {_size(before['table_bytes'])} -> {_size(after['table_bytes'])}, serving "
        f"{before['rows_per_second']:,.0f} -> {after['rows_per_second']:,.0f} rows/s"
    )
    for line in (*_describe_stop(selection), *_describe_hot_start(outcome.hot_start)):
        tell.message(f"  {line}")
    change = outcome.max_logit_change
    if change is not None:
        tell.message(f"  removing the dropped fields moved no prediction by more than {change:.2g}")
    listed = ", ".join(selection.kept[:12]) + (
        f" and {len(selection.kept) - 12} more" if len(selection.kept) > 12 else ""
    )
    tell.message(f"  kept: {listed}")
    if len(outcome.chosen_in) and work.settings.seeds > 1:
        unsure = [f"{name} {count}/{work.settings.seeds}" for name, count in outcome.chosen_in.items()
                  if 0 < count < work.settings.seeds]  # fmt: skip
        tell.message(f"  not in every one of {work.settings.seeds} searches: {', '.join(unsure[:12]) or 'none'}")
    for hint in outcome.hints:
        tell.message(f"  hint: {hint['text']}")
    tell.message(
        f"  {outcome.folder}: selection.json, kept_fields.txt, history.parquet, model/ ({outcome.chosen})"
    )


def _print_tasks(tell: Console, metrics: Mapping[str, Row]) -> None:
    """Show the AUC of every task, where there are several."""
    tasks = next(iter(metrics.values())).get("tasks", ())
    if tasks:
        rows = [[name, *(_auc(each["tasks"][name]["auc"]) for each in metrics.values())] for name in tasks]
        tell.table("AUC of every task on the test rows", ["task", *(LABELS[name] for name in metrics)], rows)


def _describe_stop(selection: Selection) -> list[str]:
    """Say what a search decided that was not told how many fields to keep, and what further cuts would cost."""
    made, count = selection.made, len(selection.kept)
    if made.get("end"):
        end = made["end"]
        lose = "field loses" if count == 1 else "fields lose"
        lines = [
            f"{count} {lose} {_loss(end['loss'])} of validation AUC against all fields trained as long; "
            f"{_loss(end['allowed'])} was allowed"
        ]
        further = {each["alive"]: each["loss"] for each in made["curve"] if each["alive"] < count}
        some = sorted(further, reverse=True)[:: max(1, len(further) // 4)][:4]
        if some:
            seen = ", ".join(f"with {alive} {_loss(further[alive])}" for alive in some)
            lines.append(f"further cuts would lose more, as seen on the way: {seen}")
        return lines
    if "budget" in made:
        return [f"cost {made['cost']:g} of at most {made['budget']:g} {made['unit']}".rstrip()]
    return []


def _describe_hot_start(found: Mapping[str, Any]) -> list[str]:
    """Say how many steps the hot start saved, or that it saved nothing."""
    if not found:
        return []
    if found["level_at"] is not None:
        return [
            f"the hot start was level with training from scratch ({found['retrain_steps']:,} steps) after "
            f"{found['level_at']:,}: {found['steps_saved']:,} saved (validation AUC within {found['tolerance']:g})"
        ]
    level, steps = found["retrain_auc"], found["retrain_steps"]
    reached = f"its validation AUC was {found['auc']:.5f} at best, after {found['kept_step']:,} steps"
    against = "" if level is None else f"; from scratch it is {level:.5f} after {steps:,}"
    return [f"the hot start saved nothing: {reached}{against}"]


def _auc(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"


def _loss(value: float) -> str:
    return "nothing" if value <= 0 else f"{value:.5f}"


LABELS = {
    "all_fields": "all fields",
    "gated": "with gates, after the search",
    "pruned": "pruned",
    "hot_start": "pruned, trained on",
    "retrained": "kept fields from scratch",
}


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def validate(work: RunPlan, model: Model) -> dict[str, Any]:
    """Return AUC and logloss on the rows where choices are made."""
    return stages.metrics_to_dict(stages.evaluate_split(work, model, work.splits.valid))


def total_logit_change(*changes: float | None) -> float | None:
    """Return how far the logits moved at most, over several steps; None where one was not looked at."""
    known = [each for each in changes if each is not None]
    return sum(known) if len(known) == len(changes) else None


def certificate_record(certificate: Any) -> dict[str, Any]:
    """Return a certificate as plain values."""
    return {
        "max_logit_change": certificate.max_logit_change,
        "bound": certificate.bound,
        "certified": certificate.certified,
        "checked": list(certificate.checked),
    }


def describe_target(wish: Wish) -> str:
    """Say what is looked for."""
    if wish.keep is not None:
        return f"keep exactly {wish.keep}"
    if wish.penalty is not None:
        return f"a fixed penalty of {wish.penalty:g}"
    if wish.budget is not None:
        return f"a budget of {wish.budget:g} {wish.costs.unit if wish.costs else ''}".rstrip()
    return f"as few as cost at most {wish.max_auc_loss:g} AUC"


RECORD_FILE = "selection.json"


def data_reference(dataset: Dataset) -> dict[str, str]:
    """Return what a saved model remembers of its data, so that other rows can be encoded like it."""
    return {"data": os.path.abspath(dataset.path), "fingerprint": dataset.fingerprint}


def write_record(folder: Path, values: dict[str, Any], selection: Selection) -> None:
    """Write selection.json and kept_fields.txt."""
    more = selection.to_json()
    text = json.dumps({**values, "sites": more["sites"], "made": more["made"]}, indent=1, ensure_ascii=False)
    put(folder / RECORD_FILE, text + "\n")
    put(folder / "kept_fields.txt", format_field_list(selection.kept))


def read_record(folder: Path) -> tuple[Selection, dict[str, Any]]:
    """Return the selection that a search left, and what else it said."""
    try:
        values = json.loads((folder / RECORD_FILE).read_text("utf-8"))
        parts = {name: values[name] for name in ("kept", "dropped", "gates", "sites", "made")}
    except FileNotFoundError:
        raise InputError(f"there is no {RECORD_FILE} in {folder}: is it the folder of a search?") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / RECORD_FILE} holds no selection ({error}); search again") from None
    values.pop("sites")
    values.pop("made")
    return Selection(**parts), values


def print_kept(tell: Console, selection: Selection) -> None:
    """Say which fields stay."""
    some = ", ".join(selection.kept[:12]) + (
        f" and {len(selection.kept) - 12} more" if len(selection.kept) > 12 else ""
    )
    tell.message(f"{len(selection.kept)} of {len(selection.names)} kept: {some}")
