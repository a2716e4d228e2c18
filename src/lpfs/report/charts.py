"""Charts as plain values, which the script of the page draws with uPlot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.report.format import format_measured
from lpfs.report.selection_data import Measured, SearchHistory, SelectionReport, finite_or_none, removal_order

GATE_SCALE = 1000  # gates are written as integer thousandths: a third of the characters, no visible difference
MIN_HALF_WIDTH = 0.0004  # of an AUC on the curve, whose own interval is wider than that of its loss: four decimals
TITLES = {  # track of the history -> title, logarithmic axis
    "alive": ("Gates alive", False),
    "penalty": ("Penalty λ", True),
    "epsilon": ("Smoothing ε", True),
    "loss": ("Training loss", False),
}
Chart = dict[str, Any]
Values = Sequence[float | None]


def line(
    label: str, y: Values, color: str = "accent", *, band: Sequence[Values] = (), dashed: bool = False
) -> dict[str, Any]:
    """Return a line of a chart, with a band between a lower and an upper line if they are given."""
    edges = dict(zip(("low", "high"), map(_rounded, band), strict=False))
    return {"label": label, "y": _rounded(y), "color": color, **edges, **({"dashed": True} if dashed else {})}


def lines(x: Sequence[float], series: Sequence[Mapping[str, Any]], x_label: str, y_label: str, **flags: bool) -> Chart:
    """Return a chart of lines over a common x; the flags ``log``, ``logX``, ``points`` and ``stepped`` style it."""
    chart = {"type": "lines", "x": _rounded(x), "series": list(series), "xLabel": x_label, "yLabel": y_label}
    return {**chart, **{name: True for name, value in flags.items() if value}}


def selection_charts(selection: SelectionReport) -> dict[str, Any]:
    """Return the field names and the charts of a selection, by the id of their element in the page."""
    charts: dict[str, Any] = {"names": [row.name for row in selection.rows], **_curve_chart(selection)}
    history = selection.history
    if history is not None:
        if history.gates:
            charts["trajectories"] = {"type": "trajectories", **_trajectories(selection, history)}
            charts["histogram"] = {"type": "histogram", "of": "trajectories"}
        for name, (title, log) in TITLES.items():
            if name in history.tracks:
                values = [None if log and not value else value for value in history.tracks[name]]
                series = line(title, values, "accent" if name == "alive" else "ink")
                chart = lines(history.steps, [series], "step", title, log=log, stepped=name == "alive")
                charts[f"track-{name}"] = chart
    if "histogram" not in charts and any(row.gate is not None for row in selection.rows):
        charts["histogram"] = {"type": "histogram", "gates": [_scaled_gate(row.gate or 0.0) for row in selection.rows]}
    return charts | _quality_charts(selection)


def curve_points(selection: SelectionReport) -> list[Mapping[str, Any]]:
    """Return the points of the curve from no field to all fields, those with a loss."""
    points = selection.section("curve").get("points") or ()
    known = {point["fields"]: point for point in points if finite_or_none(point.get("loss")) is not None}
    return [known[count] for count in sorted(known)]


def _curve_chart(selection: SelectionReport) -> dict[str, Chart]:
    """Return the AUC loss over the number of fields, with what the slider shows at each of them."""
    curve, points = selection.section("curve"), curve_points(selection)
    if len(points) < 2:
        return {}
    counts, kept = [point["fields"] for point in points], len(selection.kept)
    columns = {name: [point.get(name) for point in points] for name in ("loss", "low", "high", "auc", "logloss")}
    has_band = None not in columns["low"] + columns["high"]
    band = [columns["low"], columns["high"]] if has_band else []
    series = [line("AUC lost, with its 95 % interval" if band else "AUC lost", columns["loss"], band=band)]
    allowed = finite_or_none(curve.get("allowed"))
    if allowed is not None:
        series.append(line("Allowed loss", [allowed] * len(points), "second", dashed=True))
    recommended = curve.get("recommended")
    marks = {kept: "this run"} if kept in counts else {}
    checks = selection.section("verdict").get("checks") or ()
    if recommended is not None and recommended in counts:
        has_failed = any(check["fields"] == recommended and check.get("holds") is False for check in checks)
        label = "recommended (check failed)" if has_failed else "recommended"
        marks[recommended] = "recommended, this run" if recommended == kept else label
    chart = lines(counts, series, "number of fields", "AUC lost")
    return {
        "curve": {
            **chart,
            "marks": [{"x": count, "label": f"{label}: {count:,}"} for count, label in marks.items()],
            "range": _curve_range(points, allowed or 0.0, list(marks)),
            "texts": [point_texts(point) for point in points],
            "run": kept,
            "run_holds": any(check["fields"] == kept and check.get("holds") is True for check in checks),
            **({} if allowed is None else {"allowed": allowed, "upper": [point.get("upper") for point in points]}),
            **_chain(selection, max(counts)),
        }
    }


def point_texts(point: Mapping[str, Any]) -> list[str]:
    """Return AUC, AUC loss and logloss of a point as text; the AUC ends at the last digit of its loss, or before."""
    loss = Measured.from_json(point, value="loss")
    half_width = max(MIN_HALF_WIDTH, (loss and loss.half_width) or 0.0)
    auc = format_measured(point.get("auc"), half_width).partition("\N{NO-BREAK SPACE}")[0]
    return [auc, format_measured(*(loss or (None, None))), format_measured(point.get("logloss"), None)]


def _curve_range(points: Sequence[Mapping[str, Any]], allowed: float, marked: Sequence[int]) -> list[float]:
    """Return the losses that the chart shows first: those around the allowance and the marked points."""
    near = [point for point in points if point["fields"] in marked or point["loss"] <= 3 * allowed]
    highs = [max(point["loss"], point.get("high") or 0.0) for point in near]
    lows = [min(point["loss"], point.get("low") or 0.0) for point in near]
    high = max([2 * allowed, *highs]) or max(point["loss"] for point in points) or 0.01
    low = max(min([0.0, *lows]), -high)
    margin = 0.08 * (high - low)
    return [low - margin, high + margin]


def _chain(selection: SelectionReport, total: int) -> dict[str, Any]:
    """Return the positions of the fields in the order in which they leave the set; empty if it is incomplete."""
    position = {row.name: number for number, row in enumerate(selection.rows)}
    removed = removal_order(selection.section("curve"))
    is_complete = len(removed) == total == len(position) and set(removed) == set(position)
    return {"removed": [position[name] for name in removed]} if is_complete else {}


def _trajectories(selection: SelectionReport, history: SearchHistory) -> dict[str, Any]:
    """Return steps (R,) and the gate of each field (R,) in thousandths; kept fields last, to be drawn on top.

    ``labeled`` are the lines at the boundary: the kept field with the smallest gate, and the last one to reach zero.
    """
    kept = set(selection.kept)
    position = {row.name: number for number, row in enumerate(selection.rows)}
    names = sorted((name for name in history.gates if name in position), key=lambda name: name in kept)
    smallest = sorted((abs(history.gates[name][-1]), name) for name in names if name in kept)[:1]
    latest = sorted((-_last_alive(history.gates[name]), name) for name in names if name not in kept)[:1]
    return {
        "x": list(history.steps),
        "fields": [position[name] for name in names],
        "kept": [int(name in kept) for name in names],
        "gates": [[_scaled_gate(value) for value in history.gates[name]] for name in names],
        "labeled": [names.index(name) for _, name in (*smallest, *latest)],
        "scale": GATE_SCALE,
    }


def _last_alive(gates: Sequence[float]) -> int:
    """Return the last record in which a gate is not zero; -1 if there is none."""
    return max((record for record, gate in enumerate(gates) if gate), default=-1)


def _quality_charts(selection: SelectionReport) -> dict[str, Chart]:
    """Return the hot start against training from scratch, and the AUC loss by the number of fields."""
    charts: dict[str, Chart] = {}
    hot_start = selection.section("hot_start")
    scratch_auc = selection.section("validation").get("retrained", {}).get("auc")
    evaluations = hot_start.get("validation") or []
    if len(evaluations) > 1 and scratch_auc is not None:
        steps, aucs = zip(*evaluations, strict=True)
        label = f"From scratch, {hot_start['retrain_steps']:,} steps"
        series = [line("Pruned, trained on", aucs), line(label, [scratch_auc] * len(steps), "second", dashed=True)]
        charts["hot-start"] = lines(steps, series, "step", "validation AUC")
    made = selection.section("made")
    losses: dict[int, float] = {point["alive"]: point["loss"] for point in made.get("curve") or []}
    if len(losses) > 1:
        counts = sorted(losses)
        series = [line("AUC lost", [losses[count] for count in counts])]
        allowed = (made.get("end") or {}).get("allowed")
        if allowed is not None:
            series.append(line("Allowed", [allowed] * len(counts), "second", dashed=True))
        charts["cuts"] = lines(counts, series, "fields alive", "validation AUC lost")
    return charts


def _scaled_gate(value: float) -> int:
    """Return a gate in thousandths; a gate other than zero never becomes zero."""
    rounded = round(value * GATE_SCALE)
    return rounded if rounded or not value else (1 if value > 0 else -1)


def _rounded(values: Values) -> list[float | None]:
    return [None if finite_or_none(value) is None else float(f"{value:.6g}") for value in values]
