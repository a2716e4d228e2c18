"""The context of ``selection.html``: headline, fields, trajectories, quality, certificate, savings, provenance."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lpfs._text import describe_target
from lpfs.report.charts import TITLES, selection_charts
from lpfs.report.format import (
    MODEL_LABELS,
    command_line,
    format_change,
    format_count,
    format_decimals,
    format_delta,
    format_duration,
    format_number,
    format_size,
)
from lpfs.report.selection_data import (
    Cell,
    FieldRow,
    ReportTable,
    SearchHistory,
    SelectionReport,
    Tile,
    evenly_spaced,
    text_cell,
)

HISTORY_ROWS = 12  # records of the history in its table
MODELS = {name: label.capitalize() for name, label in MODEL_LABELS.items()}
REMOVALS = {"zeros": "Dropped fields set to zero", "cut": "Their columns removed from the network"}
SAVINGS: dict[str, tuple[str, Callable[[float | None], str], bool]] = {  # title, format, larger is better
    "table_bytes": ("Embedding tables", format_size, False),
    "parameters": ("Parameters", format_number, False),
    "rows_per_second": ("Rows served per second", format_number, True),
}
SPLITS = {
    "early": "Pretraining",
    "search": "Search",
    "valid": "Validation (choices)",
    "test": "Test (evaluated once)",
    "train": "Pretraining and search",
}


def selection_context(selection: SelectionReport) -> dict[str, Any]:
    """Return the context of ``selection.html``."""
    charts = selection_charts(selection)
    return {
        "name": selection.name,
        "record": selection.record,
        "headline": _headline(selection),
        "target": _target(selection),
        "tiles": _summary_tiles(selection),
        "fields": _field_table(selection),
        "has_negative_gates": any((row.gate or 0.0) < 0 for row in selection.rows),
        "charts": charts,
        "tracks": [(name, title) for name, (title, _) in TITLES.items() if f"track-{name}" in charts],
        "history_table": None if selection.history is None else _history_table(selection.history),
        "quality": _quality_table(selection),
        **_certificates(selection),
        "savings": _savings_table(selection),
        **_provenance(selection),
    }


def _auc_before_after(selection: SelectionReport) -> tuple[float, float, str] | None:
    """Return the AUC of all fields and of the kept fields, and the rows on which they were measured."""
    test = selection.section("metrics")
    metrics = test or selection.section("validation")
    final = metrics.get(str(selection.record.get("model"))) or metrics.get("gated")
    before, after = _metric(metrics.get("all_fields")), _metric(final)
    return None if before is None or after is None else (before, after, "test" if test else "holdout")


def _metric(metrics: Mapping[str, Any] | None, name: str = "auc") -> float | None:
    return None if not metrics else metrics.get(name)


def _headline(selection: SelectionReport) -> str:
    """Return the result in one sentence: how many fields are enough, and the change of AUC."""
    kept, aucs = len(selection.kept), _auc_before_after(selection)
    start = f"{kept:,} of {format_count(len(selection.rows), 'field')} {'is' if kept == 1 else 'are'} enough"
    if aucs is None:
        return f"{start}."
    before, after, rows = aucs
    delta = round(after - before, 4)
    if delta == 0:
        return f"{start}: the {rows} AUC stays at {after:.4f}."
    verb = "rises" if delta > 0 else "falls"
    return f"{start}: the {rows} AUC {verb} by {abs(delta):.4f}, from {before:.4f} to {after:.4f}."


def _target(selection: SelectionReport) -> str:
    """Return the target of the search in words; empty if the record has no configuration."""
    settings, made = selection.section("configuration"), selection.section("made")
    if not settings:
        return ""
    target = {name: settings.get(name) for name in ("keep", "penalty", "budget")}
    allowed = settings.get("max_auc_loss") or (made.get("end") or {}).get("allowed", 0.001)
    return describe_target(**target, max_auc_loss=allowed, unit=str(made.get("unit") or ""))


def _summary_tiles(selection: SelectionReport) -> list[Tile]:
    total, kept, savings = len(selection.rows), len(selection.kept), _savings(selection)
    tiles = [Tile("Fields kept", f"{kept:,}", f"of {total:,}, {total - kept:,} dropped")]
    aucs = _auc_before_after(selection)
    if aucs is not None:
        before, after, rows = aucs
        delta = round(after - before, 4)
        text = f"{format_delta(delta)} against all fields"
        tiles.append(Tile(f"{rows.capitalize()} AUC", f"{after:.4f}", text, delta >= 0))
    for title, key in (("Tables", "table_bytes"), ("Parameters", "parameters")):
        if key in savings:
            (before, after), format_value = savings[key], SAVINGS[key][1]
            text = f"{format_change(before, after)}, from {format_value(before)}"
            tiles.append(Tile(title, format_value(after), text, after <= before))
    logit_change = selection.record.get("max_logit_change")
    if logit_change is not None:
        tiles.append(Tile("Largest logit change", format_number(logit_change, 2), "by removing the fields"))
    return tiles


def _field_table(selection: SelectionReport) -> ReportTable:
    rows, seeds = selection.rows, selection.section("configuration").get("seeds") or 1
    scored = any(row.score is not None for row in rows)
    max_gate = max((abs(row.gate or 0.0) for row in rows), default=1.0) or 1.0
    header = ["Field", "Kept", "Gate", *(["Score"] if scored else []), "Group", "Kind", "Cardinality", "Cost"]
    cells = [_field_cells(row, max_gate, scored, seeds) for row in rows]
    styles = ["kept" if row.kept else "dropped" for row in rows]
    return ReportTable([*header, "Memory", f"Chosen in {seeds}"], cells, "fields", "fields", styles)


def _field_cells(row: FieldRow, max_gate: float, scored: bool, seeds: int) -> list[Cell]:
    gate, state = row.gate, "kept" if row.kept else "dropped"
    style = "off" if not gate else "negative" if gate < 0 else ""
    gate_text = "–" if gate is None else f"{gate:.3f}" if gate else "0"
    return [
        text_cell(row.name, kind="field"),
        text_cell(state, value=float(row.kept), kind="pill", style="yes" if row.kept else "no"),
        Cell(gate_text, gate, kind="bar_before", style=style, share=abs(gate or 0.0) / max_gate),
        *([Cell(format_number(row.score), row.score)] if scored else []),
        text_cell(row.group or "–"),
        text_cell(row.kind or "–"),
        Cell(format_number(row.cardinality), row.cardinality),
        Cell(format_number(row.cost), row.cost),
        Cell(format_size(row.table_bytes), row.table_bytes),
        Cell("–" if row.chosen is None else f"{row.chosen} of {seeds}", row.chosen),
    ]


def _history_table(history: SearchHistory) -> ReportTable:
    names = [name for name in TITLES if name in history.tracks]
    rows = [
        [Cell(f"{history.steps[row]:,}"), *(Cell(format_number(history.tracks[name][row])) for name in names)]
        for row in evenly_spaced(range(len(history.steps)), HISTORY_ROWS)
    ]
    return ReportTable(["Step", *(TITLES[name][0] for name in names)], rows)


def _quality_table(selection: SelectionReport) -> ReportTable | None:
    test, valid = selection.section("metrics"), selection.section("validation")
    if not test and not valid:
        return None
    base, rows, task_rows = _metric(test.get("all_fields")), [], []
    for name, label in MODELS.items():
        if name in test or name in valid:
            auc, logloss = _metric(test.get(name)), _metric(test.get(name), "logloss")
            delta = format_delta(None if auc is None or base is None else auc - base)
            texts = [format_decimals(auc), "" if name == "all_fields" else delta, format_decimals(logloss)]
            badge = "saved in model/" if name == selection.record.get("model") else ""
            cells = [Cell(text) for text in (*texts, format_decimals(_metric(valid.get(name))))]
            rows.append([text_cell(label, badge=badge), *cells])
            for task, metrics in list((test.get(name) or {}).get("tasks", {}).items())[1:]:  # the first is the label
                texts = [format_decimals(metrics.get("auc")), "", format_number(metrics.get("logloss"), 5), ""]
                task_rows.append([text_cell(f"{label}, {task}"), *map(Cell, texts)])
    return ReportTable(["Model", "Test AUC", "vs all fields", "Logloss", "Validation AUC"], [*rows, *task_rows])


def _certificates(selection: SelectionReport) -> dict[str, Any]:
    """Return the table of the certificates, and how many dropped fields they checked in words; empty if none."""
    rows, checked = [], 0
    for name, certificate in selection.section("certificates").items():
        change, certified = certificate["max_logit_change"], certificate.get("certified")
        state = "not certified" if not certified else "bit-equal" if change == 0 else "certified"
        numbers = [Cell(format_number(value, 2)) for value in (change, certificate["bound"])]
        pill = text_cell(state, kind="pill", style="yes" if certified else "no")
        rows.append([text_cell(REMOVALS.get(name, name)), *numbers, pill])
        checked = max(checked, len(certificate.get("checked") or ()))
    return {
        "certificates": ReportTable(["Removal", "max |Δ logit|", "bound", ""], rows) if rows else None,
        "certified_fields": format_count(checked, "dropped field") if checked else "",
    }


def _savings(selection: SelectionReport) -> dict[str, tuple[float, float]]:
    """Return the measured values of ``SAVINGS``, with all fields and with the kept ones."""
    before, after = (selection.section("savings").get(name) or {} for name in ("all_fields", "kept"))
    pairs: dict[str, tuple[Any, Any]] = {key: (before.get(key), after.get(key)) for key in SAVINGS}
    return {key: pair for key, pair in pairs.items() if None not in pair}


def _savings_table(selection: SelectionReport) -> ReportTable | None:
    if not selection.section("savings"):
        return None
    rows = []
    for key, (before, after) in _savings(selection).items():
        title, format_value, larger_is_better = SAVINGS[key]
        better = after >= before if larger_is_better else after <= before
        bars = [
            Cell(format_value(value), kind="bar_after", style=style, share=value / (max(before, after) or 1))
            for value, style in ((before, "off"), (after, "" if better else "negative"))
        ]
        rows.append([text_cell(title), *bars, Cell(format_change(before, after))])
    return ReportTable(["", "All fields", "Kept", ""], rows)


def _provenance(selection: SelectionReport) -> dict[str, Any]:
    settings, splits = selection.section("configuration"), selection.section("splits")
    seconds = selection.section("seconds")
    split_rows = []
    for name, split in splits.items():
        days = " to ".join(map(str, dict.fromkeys(split["days"])))
        split_rows.append([text_cell(SPLITS.get(name, name)), Cell(f"{split['rows']:,}"), text_cell(days)])
    times = {name.replace("_", " ").capitalize(): value for name, value in seconds.items()}
    times["Total"] = sum(seconds.values())
    time_rows = [[text_cell(name), Cell(format_duration(value))] for name, value in times.items()]
    text = json.dumps({"format": "lpfs-run", **settings}, indent=1, ensure_ascii=False)
    return {
        "command": command_line(settings, selection.name) if settings else None,
        "splits": ReportTable(["", "Rows", "Days"], split_rows) if splits else None,
        "times": ReportTable(["Stage", "Time"], time_rows) if seconds else None,
        "configuration": text if settings else None,
    }
