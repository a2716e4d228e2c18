"""The context of ``selection.html``: verdict, warnings, curve, savings, certificate, fields, quality, provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lpfs._text import describe_target
from lpfs.report.charts import TITLES, curve_points, point_texts, selection_charts
from lpfs.report.format import (
    MODEL_LABELS,
    command_line,
    format_change,
    format_count,
    format_delta,
    format_duration,
    format_measured,
    format_number,
    format_share,
    format_size,
)
from lpfs.report.selection_data import (
    Cell,
    FieldRow,
    Measured,
    ReportTable,
    SearchHistory,
    SelectionReport,
    Tile,
    evenly_spaced,
    text_cell,
)

MAX_EXCHANGED = 8  # exchanges that are named
HISTORY_ROWS = 12  # records of the history in its table
MAX_CHECKS = 4  # checks of the allowance that are listed
MIN_SHARE = 0.1  # of the worth of a field, below which another field is not named as its substitute
LARGE_DRIFT = 0.25  # of the population stability index, by convention
MODELS = {name: label.capitalize() for name, label in MODEL_LABELS.items()}
REMOVALS = {"zeros": "Dropped fields set to zero", "cut": "Their columns removed from the network"}
SPLITS = {
    "early": "Pretraining",
    "search": "Search",
    "valid": "Validation (choices)",
    "test": "Test (evaluated once)",
    "train": "Pretraining and search",
}
VERDICT_STYLES = {"enough": "good", "costs": "costs", "not decided": "open"}
WARNING_TITLES = {  # kind -> title
    "leak": "Possible leak",
    "few positives": "Few positives",
    "near unique": "Nearly unique values",
    "memorized": "Memorized",
    "drift": "Drift",
    "allowance": "Allowance not met",
    "seeds": "Searches disagree",
    "same column": "Same column",
    "not read": "Not read",
}
SERIOUS = ("leak", "few positives", "memorized", "allowance")


class Warning(NamedTuple):
    """A warning; ``names`` are its fields that the text does not name, each with an empty remark."""

    title: str
    text: str
    names: Sequence[tuple[str, str]]
    style: str


def selection_context(selection: SelectionReport) -> dict[str, Any]:
    """Return the context of ``selection.html``."""
    charts, fields = selection_charts(selection), _field_table(selection)
    return {
        "name": selection.name,
        "record": selection.record,
        "headline": _headline(selection),
        "verdict_style": VERDICT_STYLES.get(str(selection.section("verdict").get("kind")), ""),
        "verdict_facts": list(_verdict_facts(selection)),
        "warnings": _warnings(selection),
        "curve_table": _curve_table(selection) if "curve" in charts else None,
        "curve_note": _curve_note(selection),
        "savings": list(_savings_tiles(selection)),
        "fields": fields,
        "field_note": _field_note(selection, fields.header),
        "groups": [[(name, "") for name in group] for group in selection.record.get("groups") or ()],
        "target": _target(selection),
        "charts": charts,
        "tracks": [(name, title) for name, (title, _) in TITLES.items() if f"track-{name}" in charts],
        "history_table": None if selection.history is None else _history_table(selection.history),
        "quality": _quality_table(selection),
        "quality_note": _quality_note(selection),
        **_certificates(selection),
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
    """Return the text of the verdict; without one, how many fields were kept and the change of AUC."""
    if text := selection.section("verdict").get("text"):
        text = re.sub(r" (?=± |[-+]?[\d.]+ ± )|(?<=±) ", "\N{NO-BREAK SPACE}", text)  # no line break inside a number
        return f"{text[:1].upper()}{text[1:]}"
    start = f"{len(selection.kept):,} of {format_count(len(selection.rows), 'field')} kept"
    aucs = _auc_before_after(selection)
    if aucs is None:
        return f"{start}."
    before, after, rows = aucs
    delta = round(after - before, 4)
    if delta == 0:
        return f"{start}: the {rows} AUC stays at {after:.4f}."
    verb = "rises" if delta > 0 else "falls"
    return f"{start}: the {rows} AUC {verb} by {abs(delta):.4f}, from {before:.4f} to {after:.4f}."


def _verdict_facts(selection: SelectionReport) -> Iterator[tuple[str, str]]:
    """Yield what stands below the headline: the reason, the rows, the allowance, the checks, the target."""
    verdict = selection.section("verdict")
    if verdict.get("reason") and verdict["reason"] not in verdict["text"]:
        yield "Why", verdict["reason"]
    if verdict.get("rows") is not None:
        yield "Judged on", _rows_text("test", verdict, selection.section("splits").get("test"))
    allowed, because = verdict.get("allowed"), verdict.get("allowed_because")
    if allowed is not None:
        reason = {None: "", "given": " (given)"}.get(because, f": {because}")
        yield "Allowed loss of AUC", f"{format_number(allowed, 2)}{reason}"
    checks = (verdict.get("checks") or [])[-MAX_CHECKS:]
    if checks:
        text = "; ".join(filter(None, map(_check_text, checks)))
        yield "Checked before, on " + _rows_text("validation", checks[-1]), text
    settings = selection.section("configuration")
    is_given = any(settings.get(name) is not None for name in ("keep", "budget", "penalty"))
    if (target := _target(selection)) and (is_given or not verdict):
        yield "Target", target
    exchanged = selection.section("made").get("exchanged") or []
    if exchanged:
        names = ", ".join(f"{pair['kept']} instead of {pair['dropped']}" for pair in exchanged[:MAX_EXCHANGED])
        more = f" and {len(exchanged) - MAX_EXCHANGED} more" if len(exchanged) > MAX_EXCHANGED else ""
        yield "Exchanged after the search, by held-out loss", f"{names}{more}"


def _rows_text(name: str, counts: Mapping[str, Any], split: Mapping[str, Any] | None = None) -> str:
    """Return rows and positives, and the days of a split."""
    days = [str(day).replace("-", "\N{NON-BREAKING HYPHEN}") for day in dict.fromkeys((split or {}).get("days") or ())]
    when = f" ({'day' if len(days) == 1 else 'days'} {' to '.join(days)})" if days else ""
    if counts.get("rows") is None:
        return f"{name} rows{when}"
    positives = "" if counts.get("positives") is None else f", {format_count(counts['positives'], 'positive')}"
    return f"{counts['rows']:,} {name} rows{positives}{when}"


def _check_text(check: Mapping[str, Any]) -> str:
    upper = check.get("upper")
    verb = "lose at most" if (upper or 0.0) >= 0 else "gain at least"
    bound = "" if upper is None else f" {verb} {format_measured(abs(upper))}"
    held = "" if check.get("holds") is None else ", which holds" if check["holds"] else ", too much"
    return f"{format_count(check['fields'], 'field')}{bound}{held}"


def _target(selection: SelectionReport) -> str:
    """Return the target of the search in words; empty if the record has no configuration."""
    settings, made = selection.section("configuration"), selection.section("made")
    if not settings:
        return ""
    target = {name: settings.get(name) for name in ("keep", "penalty", "budget")}
    allowed = settings.get("max_auc_loss") or selection.section("verdict").get("allowed")
    allowed = float(f"{allowed or (made.get('end') or {}).get('allowed', 0.001):.2g}")
    return describe_target(**target, max_auc_loss=allowed, unit=str(made.get("unit") or ""))


def _warnings(selection: SelectionReport) -> list[Warning]:
    """Return all warnings, in the order of the record; older records call them hints."""
    warnings = []
    for warning in selection.record.get("warnings") or selection.record.get("hints") or ():
        kind, text = warning.get("kind") or "", warning["text"]
        names = [(name, "") for name in warning.get("fields") or () if not _is_named(name, text)]
        title = WARNING_TITLES.get(kind, kind.capitalize())
        warnings.append(Warning(title, text, names, "bad" if kind in SERIOUS else "warn"))
    return warnings


def _is_named(name: str, text: str) -> bool:
    """Return whether a text has a field name in quotes or as a word."""
    return repr(name) in text or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


def _curve_note(selection: SelectionReport) -> str:
    """Return how the curve was measured."""
    curve = selection.section("curve")
    where = f" on {_rows_text('training', curve)} that its networks did not see" if curve.get("rows") else ""
    return (
        f"AUC lost against all fields when fields are removed one after the other, with its 95 % interval, measured"
        f"{where}."
    )


def _curve_table(selection: SelectionReport) -> ReportTable:
    """Return the points of the curve, from all fields to none; the row of this run is marked."""
    rows, styles, kept = [], [], len(selection.kept)
    for point in reversed(curve_points(selection)):
        auc, loss, logloss = map(Cell, point_texts(point))
        name = point.get("removed")
        removed = text_cell("–") if name is None else text_cell(name, kind="field")
        rows.append([Cell(f"{point['fields']:,}"), removed, auc, loss, logloss])
        styles.append("shipped" if point["fields"] == kept else "")
    return ReportTable(["Fields", "Removed last", "AUC", "AUC lost", "Logloss"], rows, style="long", row_styles=styles)


def _savings_tiles(selection: SelectionReport) -> Iterator[Tile]:
    """Yield what the kept fields save: fields, cost, memory, parameters, time."""
    total, kept = len(selection.rows), len(selection.kept)
    yield Tile("Fields to fetch", f"{kept:,}", f"of {total:,}, {format_change(total, kept)}", kept < total or None)
    cost = selection.section("cost")
    unit = f" ({cost['unit']})" if cost.get("unit") else ""
    before, after = (
        {**(selection.section("savings").get(name) or {}), "cost": cost.get(name)} for name in ("all_fields", "kept")
    )
    measures: dict[str, tuple[str, Callable[[float], str]]] = {
        "cost": (f"Cost of the fields{unit}", format_number),
        "table_bytes": ("Embedding tables", format_size),
        "parameters": ("Parameters", format_number),
    }
    for key, (title, form) in measures.items():
        if before.get(key) is not None and after.get(key) is not None:
            yield _tile(title, before[key], after[key], form)
    if before.get("rows_per_second") and after.get("rows_per_second"):
        slow, fast = (1000 / rows["rows_per_second"] for rows in (before, after))
        limits = [after.get(f"rows_per_second_{limit}") for limit in ("high", "low")]
        spread = " to ".join(_milliseconds(1000 / limit) for limit in limits if limit)
        yield _tile("Time per 1,000 rows", slow, fast, _milliseconds, f". Spread: {spread}" if spread else "")


def _tile(title: str, before: float, after: float, form: Callable[[float], str], suffix: str = "") -> Tile:
    good = None if before == after else after < before
    return Tile(title, form(after), f"{format_change(before, after)}, from {form(before)}{suffix}", good)


def _milliseconds(seconds: float) -> str:
    return f"{format_number(1000 * seconds)} ms"


def _field_table(selection: SelectionReport) -> ReportTable:
    """Return the table of the fields, without columns that are empty or equal in all rows."""
    rows, seeds = selection.rows, selection.section("configuration").get("seeds") or 1
    columns = {"Field": [text_cell(row.name, kind="field") for row in rows], "Kept": [_state_cell(row) for row in rows]}
    for title, cells in _field_columns(rows, seeds).items():
        if title == "Cardinality" and "Distinct values" in columns:
            continue
        texts = {cell.text if isinstance(cell.text, str) else str(cell.text) for cell in cells}
        if len(texts) > 1 or (len(rows) == 1 and texts != {"–"}):
            columns[title] = cells
    styles = ["kept" if row.kept else "dropped" for row in rows]
    return ReportTable(list(columns), list(zip(*columns.values(), strict=True)), "fields", "fields", styles)


def _field_note(selection: SelectionReport, header: Sequence[str]) -> str:
    """Return what the columns of the table mean, those that are not obvious."""
    notes = {
        "Worth to the kept fields": "the AUC that they lose without a kept field, or would gain with a dropped one",
        "Worth to all fields": "the AUC that all fields lose without it",
        "Substitutes": "other fields, and the share of that loss which each makes up for",
        "Drift": f"population stability index between training and test rows, large from {LARGE_DRIFT:g} on",
    }
    text = "".join(f"{title}: {note}. " for title, note in notes.items() if title in header)
    if "Worth to the kept fields" not in header and any((row.gate or 0.0) < 0 for row in selection.rows):
        text += "An orange bar is a negative gate; its sign is absorbed into the weights."
    return text.rstrip()


def _state_cell(row: FieldRow) -> Cell:
    state, style = ("kept", "yes") if row.kept else ("dropped", "no")
    return text_cell(state, value=float(row.kept), kind="pill", style=style)


def _field_columns(rows: Sequence[FieldRow], seeds: int) -> dict[str, list[Cell]]:
    """Return title -> cells of every column that a table may have."""
    max_worth = max((row.worth.value for row in rows if row.worth), default=None)
    max_gate = max((abs(row.gate or 0.0) for row in rows), default=1.0) or 1.0
    return {
        "Worth to the kept fields": [_worth_cell(row, max_worth or 1.0) for row in rows],
        "Worth to all fields": [_measured_cell(row.worth_to_all) for row in rows],
        "AUC alone": [_number_cell(row.auc_alone, "{:.3f}") for row in rows],
        "Missing": [Cell(format_share(row.missing), row.missing) for row in rows],
        "Distinct values": [Cell(format_number(row.distinct), row.distinct) for row in rows],
        "Drift": [
            _number_cell(row.drift, "{:.2f}", "strong" if (row.drift or 0.0) >= LARGE_DRIFT else "text") for row in rows
        ],
        "Substitutes": [
            text_cell(names, kind="names") if names else text_cell("–")
            for row in rows
            for names in [[(name, format_share(share, 0)) for name, share in row.substitutes if share >= MIN_SHARE]]
        ],
        "Gate": [_gate_cell(row, max_gate, has_bar=max_worth is None) for row in rows],
        "Score": [Cell(format_number(row.score), row.score) for row in rows],
        "Group": [text_cell(row.group or "–") for row in rows],
        "Kind": [text_cell(row.kind or "–") for row in rows],
        "Cardinality": [Cell(format_number(row.cardinality), row.cardinality) for row in rows],
        "Cost": [Cell(format_number(row.cost), row.cost) for row in rows],
        "Memory": [Cell(format_size(row.table_bytes), row.table_bytes) for row in rows],
        f"Chosen in {seeds}": [
            Cell("–" if row.chosen is None or seeds == 1 else f"{row.chosen} of {seeds}", row.chosen) for row in rows
        ],
    }


def _number_cell(value: float | None, form: str, kind: str = "text") -> Cell:
    return Cell("–" if value is None else form.format(value), value, kind=kind)


def _measured_cell(measured: Measured | None, **kwargs: Any) -> Cell:
    return Cell("–") if measured is None else Cell(format_measured(*measured), measured.value, **kwargs)


def _worth_cell(row: FieldRow, max_worth: float) -> Cell:
    share = row.worth.value / max_worth if row.worth else 0.0
    return _measured_cell(row.worth, kind="bar", style="wide" if row.kept else "wide off", share=share)


def _gate_cell(row: FieldRow, max_gate: float, *, has_bar: bool) -> Cell:
    gate = row.gate
    if gate is None:
        return Cell("–")
    style = "off" if not gate else "negative" if gate < 0 else ""
    kind = "bar" if has_bar else "text"
    return Cell(f"{gate:.3f}" if gate else "0", gate, kind=kind, style=style, share=abs(gate) / max_gate)


def _history_table(history: SearchHistory) -> ReportTable:
    names = [name for name in TITLES if name in history.tracks]
    rows = [
        [Cell(f"{history.steps[row]:,}"), *(Cell(format_number(history.tracks[name][row])) for name in names)]
        for row in evenly_spaced(range(len(history.steps)), HISTORY_ROWS)
    ]
    return ReportTable(["Step", *(TITLES[name][0] for name in names)], rows)


def _quality_table(selection: SelectionReport) -> ReportTable | None:
    """Return AUC and logloss of the models on test and validation rows; the row of the shipped model is marked."""
    test, valid = selection.section("metrics"), selection.section("validation")
    if not test and not valid:
        return None
    base, rows, styles, shipped = _metric(test.get("all_fields")), [], [], selection.record.get("model")
    for name, label in MODELS.items():
        if name in test or name in valid:
            auc = _metric(test.get(name))
            delta = "" if name == "all_fields" else format_delta(None if auc is None or base is None else auc - base)
            loss = Measured.from_json(selection.section("verdict"), value="loss") if name == shipped else None
            if loss is not None:
                delta = f"{'+' if loss.value < 0 else ''}{format_measured(-loss.value, loss.half_width)}"
            texts = [_auc_text(test.get(name)), delta, _logloss_text(test.get(name)), _auc_text(valid.get(name))]
            rows.append([text_cell(label, badge="shipped" if name == shipped else ""), *map(Cell, texts)])
            styles.append("shipped" if name == shipped else "")
            for task, metrics in list((test.get(name) or {}).get("tasks", {}).items())[1:]:  # the first is the label
                rows.append(
                    [text_cell(f"{label}, {task}"), *map(Cell, (_auc_text(metrics), "", _logloss_text(metrics), ""))]
                )
                styles.append("")
    return ReportTable(["Model", "Test AUC", "vs all fields", "Logloss", "Validation AUC"], rows, row_styles=styles)


def _auc_text(metrics: Mapping[str, Any] | None) -> str:
    auc = Measured.from_json(metrics, "auc_", "auc")
    return "–" if auc is None else format_measured(*auc)


def _logloss_text(metrics: Mapping[str, Any] | None) -> str:
    return format_measured(_metric(metrics, "logloss"))


def _quality_note(selection: SelectionReport) -> str:
    """Return on which rows the models were evaluated."""
    parts = []
    for name, section in (("test", "metrics"), ("validation", "validation")):
        counts = selection.section(section).get("all_fields") or {}
        parts += [_rows_text(name, counts)] if counts.get("rows") is not None else []
    rows = f"{'; '.join(parts)}. " if parts else ""
    return f"{rows}Choices are made on the validation rows; the test rows are evaluated once, at the end."


def _certificates(selection: SelectionReport) -> dict[str, Any]:
    """Return the table of the certificates, and how many dropped fields they checked in words; empty if none."""
    rows, checked, all_certified = [], 0, True
    for name, certificate in selection.section("certificates").items():
        change, certified = certificate["max_logit_change"], certificate.get("certified")
        state = "not certified" if not certified else "bit-equal" if change == 0 else "certified"
        numbers = [Cell(format_number(value, 2)) for value in (change, certificate["bound"])]
        pill = text_cell(state, kind="pill", style="yes" if certified else "no")
        rows.append([text_cell(REMOVALS.get(name, name)), *numbers, pill])
        all_certified = all_certified and bool(certified)
        checked = max(checked, len(certificate.get("checked") or ()))
    return {
        "certificates": ReportTable(["Removal", "max |Δ logit|", "bound", ""], rows) if rows else None,
        "certified": all_certified,
        "certified_fields": format_count(checked, "dropped field") if checked else "",
    }


def _provenance(selection: SelectionReport) -> dict[str, Any]:
    settings, splits = selection.section("configuration"), selection.section("splits")
    seconds = selection.section("seconds")
    counts = [key for key in ("rows", "positives") if any(split.get(key) is not None for split in splits.values())]
    split_rows = []
    for name, split in splits.items():
        days = " to ".join(map(str, dict.fromkeys(split["days"])))
        cells = [Cell(format_number(split.get(key))) for key in counts]
        split_rows.append([text_cell(SPLITS.get(name, name)), *cells, text_cell(days)])
    times = {name.replace("_", " ").capitalize(): value for name, value in seconds.items()}
    times["Total"] = sum(seconds.values())
    time_rows = [[text_cell(name), Cell(format_duration(value))] for name, value in times.items()]
    text = json.dumps({"format": "lpfs-run", **settings}, indent=1, ensure_ascii=False)
    return {
        "command": command_line(settings, selection.name) if settings else None,
        "splits": ReportTable(["", *map(str.capitalize, counts), "Days"], split_rows) if splits else None,
        "times": ReportTable(["Stage", "Time"], time_rows) if seconds else None,
        "configuration": text if settings else None,
    }
