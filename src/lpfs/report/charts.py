"""Charts as plain values: what the script of the page hands to uPlot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.report.run import History, Run, finite

SCALE = 1000  # gates are written as whole thousandths: a third of the characters, and no eye sees more
TITLES = {
    "alive": ("Gates alive", False),
    "penalty": ("Penalty λ", True),
    "epsilon": ("Smoothing ε", True),
    "loss": ("Training loss", False),
}
Chart = dict[str, Any]


def line(
    label: str,
    y: Sequence[float | None],
    *,
    colour: str = "accent",
    low: Sequence[float | None] | None = None,
    high: Sequence[float | None] | None = None,
    dashed: bool = False,
) -> dict[str, Any]:
    """Return a line of a chart, with a band around it where ``low`` and ``high`` are given."""
    band = {} if low is None or high is None else {"low": exact(low), "high": exact(high)}
    return {"label": label, "y": exact(y), "colour": colour, **band, **({"dashed": True} if dashed else {})}


def lines(
    x: Sequence[float],
    series: Sequence[Mapping[str, Any]],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    log_x: bool = False,
    points: bool = False,
    stepped: bool = False,
) -> Chart:
    """Return a chart of lines over a common x; ``points`` draws points only."""
    flags = {"log": log, "logX": log_x, "points": points, "stepped": stepped}
    chosen = {name: True for name, value in flags.items() if value}
    return {"type": "lines", "x": exact(x), "series": list(series), "xLabel": x_label, "yLabel": y_label, **chosen}


def charts_of(run: Run) -> dict[str, Any]:
    """Return the names of the fields and the charts of a selection, by the id of their place in the page."""
    found: dict[str, Any] = {"names": [each.name for each in run.rows]}
    if run.history is not None:
        if run.history.gates:
            found["trajectories"] = {"type": "trajectories", **trajectories(run, run.history)}
            found["histogram"] = {"type": "histogram", "of": "trajectories"}
        for name, (title, log) in TITLES.items():
            if name in run.history.tracks:
                values = run.history.tracks[name]
                only = [None if log and not each else each for each in values]
                one = line(title, only, colour="accent" if name == "alive" else "ink")
                found[f"track-{name}"] = lines(
                    run.history.steps, [one], x_label="step", y_label=title, log=log, stepped=name == "alive"
                )
    if "histogram" not in found and any(each.gate is not None for each in run.rows):
        found["histogram"] = {"type": "histogram", "gates": [thousandths(each.gate or 0.0) for each in run.rows]}
    found |= quality_charts(run)
    return found


def trajectories(run: Run, history: History) -> dict[str, Any]:
    """Return step (R,) and, a field, its gate (R,) in thousandths; kept ones last, so that they are on top."""
    kept = set(run.kept)
    place = {each.name: number for number, each in enumerate(run.rows)}
    order = sorted((name for name in history.gates if name in place), key=lambda name: name in kept)
    return {
        "x": list(history.steps),
        "fields": [place[name] for name in order],
        "kept": [int(name in kept) for name in order],
        "gates": [[thousandths(each) for each in history.gates[name]] for name in order],
        "scale": SCALE,
    }


def quality_charts(run: Run) -> dict[str, Chart]:
    """Return the hot start against training from scratch, and what further cuts would have cost."""
    found: dict[str, Chart] = {}
    hot, level = run.part("hot_start"), run.part("validation").get("retrained", {}).get("auc")
    seen = hot.get("validation") or []
    if len(seen) > 1 and level is not None:
        x = [each[0] for each in seen]
        scratch = f"From scratch, {hot['retrain_steps']:,} steps"
        series = [
            line("Pruned, trained on", [each[1] for each in seen]),
            line(scratch, [level] * len(x), colour="second", dashed=True),
        ]
        found["hot-start"] = lines(x, series, x_label="step", y_label="validation AUC")
    made = run.part("made")
    best: dict[int, float] = {}
    for each in made.get("curve") or []:
        best[each["alive"]] = each["loss"]
    if len(best) > 1:
        x = sorted(best)
        series = [line("AUC lost", [best[each] for each in x])]
        allowed = (made.get("end") or {}).get("allowed")
        if allowed is not None:
            series.append(line("Allowed", [allowed] * len(x), colour="second", dashed=True))
        found["cuts"] = lines(x, series, x_label="fields alive", y_label="validation AUC lost")
    return found


def thousandths(value: float) -> int:
    """Return a gate in thousandths; one that is not zero never becomes it."""
    rounded = round(value * SCALE)
    return rounded if rounded or not value else (1 if value > 0 else -1)


def exact(values: Sequence[float | None]) -> list[float | None]:
    """Return numbers in six digits, None where one is none."""
    return [None if finite(each) is None else float(f"{each:.6g}") for each in values]
