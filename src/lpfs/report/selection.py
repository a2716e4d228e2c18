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
    headline = _headline(selection)
    target = _target(selection)
    history = selection.history
    return {
        "title": f"{headline} – {selection.name}",
        "kicker": f"Selection report · {selection.name}",
        "headline": headline,
        "lead": f"Found by {selection.method or 'a search'}.{f' Target: {target}.' if target else ''}",
        "tiles": _summary_tiles(selection),
        "fields": _field_table(selection),
        "has_negative_gates": any((row.gate or 0.0) < 0 for row in selection.rows),
        "charts": charts,
        "tracks": [(name, title) for name, (title, _) in TITLES.items() if f"track-{name}" in charts],
        "history_table": None if history is None else _history_table(history),
        "quality": _quality_table(selection),
        "hot_start_note": _hot_start_note(selection) if "hot-start" in charts else None,
        "certificates": _certificate_table(selection),
        "certified_fields": _certified_fields(selection),
        "savings": _savings_table(selection),
        **_provenance(selection),
    }


def _models(selection: SelectionReport) -> tuple[Mapping[str, Any], str]:
    """Return the metrics of every model, and the rows they were measured on."""
    test = selection.section("metrics")
    return (test, "test") if test else (selection.section("validation"), "holdout")


def _auc_before_after(selection: SelectionReport) -> tuple[float | None, float | None]:
    metrics, _ = _models(selection)
    final = metrics.get(str(selection.record.get("model"))) or metrics.get("gated")
    return _auc(metrics.get("all_fields")), _auc(final)


def _auc(metrics: Mapping[str, Any] | None) -> float | None:
    return None if not metrics else metrics.get("auc")


def _headline(selection: SelectionReport) -> str:
    """Return the result in one sentence: how many fields are enough, and the change of AUC."""
    total, kept = len(selection.rows), len(selection.kept)
    start = f"{kept:,} of {format_count(total, 'field')} {'is' if kept == 1 else 'are'} enough"
    before, after = _auc_before_after(selection)
    if before is None or after is None:
        return f"{start}."
    rows, delta = _models(selection)[1], round(after - before, 4)
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


def _summary_tiles(selection: SelectionReport) -> list[tuple[str, str, str, bool | None]]:
    """Return title, value, explanation, and whether the value is good (None: neither)."""
    total, kept, savings = len(selection.rows), len(selection.kept), selection.section("savings")
    tiles: list[tuple[str, str, str, bool | None]] = [
        ("Fields kept", f"{kept:,}", f"of {total:,}, {total - kept:,} dropped", None)
    ]
    before, after = _auc_before_after(selection)
    if before is not None and after is not None:
        delta = round(after - before, 4)
        title = f"{_models(selection)[1].capitalize()} AUC"
        tiles.append((title, f"{after:.4f}", f"{format_delta(delta)} against all fields", delta >= 0))
    if savings:
        for title, key in (("Tables", "table_bytes"), ("Parameters", "parameters")):
            old, new, format_value = savings["all_fields"].get(key), savings["kept"].get(key), SAVINGS[key][1]
            if old is not None and new is not None:
                text = f"{format_change(old, new)}, from {format_value(old)}"
                tiles.append((title, format_value(new), text, new <= old))
    logit_change = selection.record.get("max_logit_change")
    if logit_change is not None:
        tiles.append(("Largest logit change", format_number(logit_change, 2), "by removing the fields", None))
    return tiles


def _field_table(selection: SelectionReport) -> ReportTable:
    rows, seeds = selection.rows, selection.seeds
    scored = any(row.score is not None for row in rows)
    max_gate = max((abs(row.gate or 0.0) for row in rows), default=1.0) or 1.0
    header = ["Field", "Kept", "Gate", *(["Score"] if scored else []), "Group", "Kind", "Cardinality", "Cost"]
    return ReportTable(
        [*header, "Memory", f"Chosen in {seeds}"],
        [_field_cells(row, max_gate, scored, seeds) for row in rows],
        "fields",
        "fields",
        ["kept" if row.kept else "dropped" for row in rows],
    )


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
    names = [name for name in MODELS if name in test or name in valid]
    rows = [_quality_cells(name, test, valid, selection.record.get("model")) for name in names]
    rows += [cells for name in names for cells in _task_rows(test.get(name), MODELS[name])]
    return ReportTable(["Model", "Test AUC", "vs all fields", "Logloss", "Validation AUC"], rows)


def _quality_cells(name: str, test: Mapping[str, Any], valid: Mapping[str, Any], saved_model: object) -> list[Cell]:
    auc, base = _auc(test.get(name)), _auc(test.get("all_fields"))
    delta = None if auc is None or base is None else auc - base
    return [
        text_cell(MODELS[name], badge="saved in model/" if name == saved_model else ""),
        Cell(format_decimals(auc)),
        Cell("" if name == "all_fields" else format_delta(delta)),
        Cell(format_decimals((test.get(name) or {}).get("logloss"))),
        Cell(format_decimals(_auc(valid.get(name)))),
    ]


def _task_rows(metrics: Mapping[str, Any] | None, model: str) -> list[list[Cell]]:
    """Return a row for each task but the first."""
    return [
        [
            text_cell(f"{model}, {name}"),
            Cell(format_decimals(task.get("auc"))),
            Cell(""),
            Cell(format_number(task.get("logloss"), 5)),
            Cell(""),
        ]
        for name, task in list((metrics or {}).get("tasks", {}).items())[1:]
    ]


def _hot_start_note(selection: SelectionReport) -> str:
    hot_start = selection.section("hot_start")
    if hot_start.get("matched_at") is None:
        return f"Does not reach the AUC of training from scratch within {hot_start['steps']:,} steps."
    return (
        f"Reaches the AUC of training from scratch after {hot_start['matched_at']:,} steps: "
        f"{hot_start['steps_saved']:,} steps saved."
    )


def _certificate_table(selection: SelectionReport) -> ReportTable | None:
    certificates = selection.section("certificates")
    rows = [
        [
            text_cell(REMOVALS.get(name, name)),
            Cell(format_number(certificate["max_logit_change"], 2)),
            Cell(format_number(certificate["bound"], 2)),
            text_cell(
                _certificate_state(certificate), kind="pill", style="yes" if certificate.get("certified") else "no"
            ),
        ]
        for name, certificate in certificates.items()
    ]
    return ReportTable(["Removal", "max |Δ logit|", "bound", ""], rows) if rows else None


def _certificate_state(certificate: Mapping[str, Any]) -> str:
    if not certificate.get("certified"):
        return "not certified"
    return "bit-equal" if certificate["max_logit_change"] == 0 else "certified"


def _certified_fields(selection: SelectionReport) -> str:
    """Return how many dropped fields the certificates checked, in words; empty if none."""
    certificates = selection.section("certificates").values()
    count = max((len(certificate.get("checked") or ()) for certificate in certificates), default=0)
    return format_count(count, "dropped field") if count else ""


def _savings_table(selection: SelectionReport) -> ReportTable | None:
    savings = selection.section("savings")
    if not savings:
        return None
    rows = []
    for key, (title, format_value, larger_is_better) in SAVINGS.items():
        before, after = savings["all_fields"].get(key), savings["kept"].get(key)
        if before is not None and after is not None:
            longest = max(before, after) or 1
            better = after >= before if larger_is_better else after <= before
            style = "" if better else "negative"
            rows.append(
                [
                    text_cell(title),
                    Cell(format_value(before), kind="bar_after", style="off", share=before / longest),
                    Cell(format_value(after), kind="bar_after", style=style, share=after / longest),
                    Cell(format_change(before, after)),
                ]
            )
    return ReportTable(["", "All fields", "Kept", ""], rows)


def _provenance(selection: SelectionReport) -> dict[str, Any]:
    settings, splits = selection.section("configuration"), selection.section("splits")
    seconds = selection.section("seconds")
    split_rows = [
        [
            text_cell(SPLITS.get(name, name)),
            Cell(f"{split['rows']:,}"),
            text_cell(" to ".join(map(str, dict.fromkeys(split["days"])))),
        ]
        for name, split in splits.items()
    ]
    times = {**{name.replace("_", " ").capitalize(): value for name, value in seconds.items()}}
    times["Total"] = sum(seconds.values())
    time_rows = [[text_cell(name), Cell(format_duration(value))] for name, value in times.items()]
    text = json.dumps({"format": "lpfs-run", **settings}, indent=1, ensure_ascii=False)
    return {
        "command": command_line(settings) if settings else None,
        "facts": facts(selection.record, selection.method),
        "splits": ReportTable(["", "Rows", "Days"], split_rows) if splits else None,
        "times": ReportTable(["Stage", "Time"], time_rows) if seconds else None,
        "configuration": text if settings else None,
    }


def facts(record: Mapping[str, Any], method: str) -> dict[str, object]:
    """Return method, seed, data fingerprint and versions, where the record has them."""
    versions = record.get("versions") or {}
    values = {
        "Method": method,
        "Seed": record.get("seed"),
        "Data fingerprint": record.get("fingerprint"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
    return {name: value for name, value in values.items() if value not in (None, "")}
