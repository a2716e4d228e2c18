"""Outcome: the answer of a run, and the files it leaves."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lpfs
from lpfs.models.model import Model
from lpfs.protocol.stages import Work, parameters, table_bytes
from lpfs.schema import Selection

Row = dict[str, Any]


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
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kept(self) -> tuple[str, ...]:
        """The fields that stay."""
        return self.selection.kept


def versions() -> dict[str, str]:
    """Return the versions that a result was made with."""
    import numpy
    import torch

    return {
        "lpfs": lpfs.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def write(outcome: Outcome, work: Work, fingerprint: str) -> None:
    """Write selection.json, kept_fields.txt and history.parquet."""
    folder, selection = outcome.folder, outcome.selection
    values = {
        "method": work.settings.method,
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
        "seed": work.settings.seed,
        "configuration": work.settings.to_json(),
        "recipe": work.recipe.to_json(),
        "periods": work.parts.to_json(),
        "fingerprint": fingerprint,
        "versions": versions(),
        "sites": {name: [dict(each) for each in sites] for name, sites in selection.sites.items()},
        "made": dict(selection.made),
        **outcome.extra,
    }
    text = json.dumps(values, indent=1, ensure_ascii=False, default=_plain)
    put(folder / "selection.json", text + "\n")
    put(folder / "kept_fields.txt", "".join(f"{name}\n" for name in selection.kept))
    write_history(folder / "history.parquet", selection)


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


def show(outcome: Outcome, work: Work) -> None:
    """End with an answer that can be read at a glance."""
    tell, selection, savings = work.tell, outcome.selection, outcome.savings
    total = len(selection.names)
    tell.say("")
    rows = [
        [LABELS[name], f"{each['auc']:.5f}" if each["auc"] is not None else "-", f"{each['logloss']:.5f}"]
        for name, each in outcome.metrics.items()
    ]
    tell.table(f"{len(selection.kept)} of {total} fields kept", ["on the test rows", "AUC", "logloss"], rows)
    before, after = savings["all_fields"], savings["kept"]
    tell.say(
        f"  tables {_size(before['table_bytes'])} -> {_size(after['table_bytes'])}, serving "
        f"{before['rows_per_second']:,.0f} -> {after['rows_per_second']:,.0f} rows/s"
    )
    change = outcome.max_logit_change
    tell.say(
        f"  removing the dropped fields moved no prediction by more than {0.0 if change is None else change:.2g}"
    )
    listed = ", ".join(selection.kept[:12]) + (
        f" and {len(selection.kept) - 12} more" if len(selection.kept) > 12 else ""
    )
    tell.say(f"  kept: {listed}")
    if len(outcome.chosen_in) and work.settings.seeds > 1:
        unsure = [f"{name} {count}/{work.settings.seeds}" for name, count in outcome.chosen_in.items()
                  if 0 < count < work.settings.seeds]  # fmt: skip
        tell.say(f"  not in every one of {work.settings.seeds} searches: {', '.join(unsure[:12]) or 'none'}")
    tell.say(f"  {outcome.folder}: selection.json, kept_fields.txt, history.parquet, model/ ({outcome.chosen})")


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
