"""Charts as plain values, which the script of the page draws with uPlot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.report.selection_data import SearchHistory, SelectionReport, finite_or_none

GATE_SCALE = 1000  # gates are written as integer thousandths: a third of the characters, no visible difference
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
    charts: dict[str, Any] = {"names": [row.name for row in selection.rows]}
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


def _trajectories(selection: SelectionReport, history: SearchHistory) -> dict[str, Any]:
    """Return steps (R,) and the gate of each field (R,) in thousandths; kept fields last, to be drawn on top."""
    kept = set(selection.kept)
    position = {row.name: number for number, row in enumerate(selection.rows)}
    names = sorted((name for name in history.gates if name in position), key=lambda name: name in kept)
    return {
        "x": list(history.steps),
        "fields": [position[name] for name in names],
        "kept": [int(name in kept) for name in names],
        "gates": [[_scaled_gate(value) for value in history.gates[name]] for name in names],
        "scale": GATE_SCALE,
    }


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
