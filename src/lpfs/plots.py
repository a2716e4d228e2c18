"""Matplotlib figures for notebooks and papers: each function returns a figure and shows nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lpfs._text import escape_control_chars, truncate_middle
from lpfs.errors import InputError, MissingPackageError
from lpfs.report.format import format_with_interval
from lpfs.schema import Selection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT, DROPPED, INK, SECOND = "#0e7c7b", "#b9c1cc", "#161a22", "#c2570c"
MAX_BARS = 60  # fields that have a bar
BESIDE: dict[str, Any] = {"textcoords": "offset points", "va": "center", "parse_math": False}  # of a text
BINS = 25  # of the histogram
TITLES = {"alive": "gates alive", "penalty": "penalty λ", "epsilon": "smoothing ε"}


def gates(selection: Selection) -> Figure:
    """Draw the gate of every field: kept fields first, sorted by gate."""
    names = sorted(selection.gates, key=lambda name: (name not in selection.kept, -abs(selection.gates[name])))
    hidden, names = len(names) - MAX_BARS, names[:MAX_BARS]
    figure = new_figure(6.4, 0.6 + 0.2 * len(names))
    axes, values = figure.add_subplot(), [selection.gates[name] for name in names]
    colors = [KEPT if name in selection.kept else DROPPED for name in names]
    axes.barh(range(len(names)), values, color=colors, height=0.7)
    axes.set_yticks(range(len(names)), [_axis_label(name) for name in names], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("gate" + (f" (and {hidden:,} more fields)" if hidden > 0 else ""))
    return style_axes(figure)


def histogram(selection: Selection) -> Figure:
    """Draw the histogram of the gates, with the gates at exactly zero as a bar of their own."""
    figure = new_figure(5, 3)
    draw_histogram(figure.add_subplot(), selection)
    return style_axes(figure)


def trajectories(selection: Selection, highlight: Sequence[str] = ()) -> Figure:
    """Draw every gate over the steps of the search; highlighted fields are labeled."""
    for name in highlight:
        if name not in selection.gates:
            raise InputError(f"no field {name!r} in the selection; it has {', '.join(map(repr, selection.names))}")
    figure = new_figure(6.4, 3.6)
    draw_trajectories(figure.add_subplot(), selection, highlight)
    return style_axes(figure)


def search(selection: Selection) -> Figure:
    """Draw gates alive, λ and ε over the steps of the search."""
    history = _history(selection)
    figure, steps = new_figure(9, 2.6), [record["step"] for record in history]
    names = [name for name in TITLES if name in history[0]]
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        axes.plot(steps, [record[name] for record in history], color=INK, linewidth=1.2)
        axes.set_title(TITLES[name], fontsize=10, loc="left")
        axes.set_xlabel("step")
        if name != "alive" and any(record[name] > 0 for record in history):
            axes.set_yscale("log")
    return style_axes(figure)


def overview(selection: Selection) -> Figure:
    """Draw the histogram and, if the history has gates, the trajectories beside it."""
    has_gates = bool(selection.history) and "gates" in selection.history[0]
    figure = new_figure(10 if has_gates else 5, 3.4)
    draw_histogram(figure.add_subplot(1, 1 + has_gates, 1), selection)
    if has_gates:
        draw_trajectories(figure.add_subplot(1, 2, 2), selection)
    title = f"{len(selection.kept)} of {len(selection.names)} fields kept"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, weight="bold")
    return style_axes(figure)


def quality(metrics: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Figure:
    """Draw the AUC of every model of a run, with its 95 % interval if it has one, against that of all fields."""
    aucs = {name: model for name, model in metrics.items() if model.get("auc") is not None}
    if not aucs:
        raise InputError("no AUC to draw: the test rows contain only one class")
    figure = new_figure(6.4, 0.9 + 0.35 * len(aucs))
    axes = figure.add_subplot()
    if "all_fields" in aucs:
        axes.axvline(aucs["all_fields"]["auc"], color=DROPPED, linewidth=1.5, zorder=0)
    for number, (name, model) in enumerate(aucs.items()):
        auc, low, high = model["auc"], model.get("auc_low"), model.get("auc_high")
        color, half_width = INK if name == "all_fields" else KEPT, None
        if low is not None and high is not None:
            axes.plot([low, high], [number, number], color=color, linewidth=1.5)
            half_width = (high - low) / 2
        axes.plot([auc], [number], "o", color=color, markersize=8)
        text = format_with_interval(auc, half_width)
        axes.annotate(text, (auc, number), xytext=(0, 9), ha="center", fontsize=9, **BESIDE)
    axes.set_yticks(range(len(aucs)), [titles.get(name, name) for name in aucs])
    axes.set_ylim(len(aucs) - 0.5, -0.7)
    axes.margins(x=0.2)
    axes.set_xlabel("test AUC")
    return style_axes(figure)


def curve(record: Mapping[str, Any]) -> Figure:
    """Draw the AUC loss over the number of fields, with its 95 % interval, the allowed loss and the kept set.

    Args:
        record: ``Outcome.record``, or the values of ``selection.json``.
    """
    values = record.get("curve")
    if not values:
        raise InputError("the run has no curve; select without --no-curve")
    points = sorted(values["points"], key=lambda point: point["fields"])
    counts, losses = [point["fields"] for point in points], [point["loss"] for point in points]
    figure = new_figure(6.4, 3.6)
    axes, allowed, kept = figure.add_subplot(), values.get("allowed"), len(record["kept"])
    axes.plot(counts, losses, color=KEPT, label="AUC lost")
    if all(point.get("low") is not None and point.get("high") is not None for point in points):
        low, high = ([point[name] for point in points] for name in ("low", "high"))
        axes.fill_between(counts, low, high, color=KEPT, alpha=0.16, linewidth=0, label="95 % interval")
    if allowed is not None:
        axes.axhline(allowed, color=SECOND, linestyle="--", linewidth=1.2, label="allowed")
        shown = [point for point in points if point["fields"] >= kept]
        bottom = min([0.0, *(point.get("low") or 0.0 for point in shown)])
        axes.set_ylim(1.2 * bottom, 3 * max([allowed, 1e-6, *(point["loss"] for point in shown)]))
    axes.axvline(kept, color=INK, linestyle=":", linewidth=1.2, label=f"this run: {kept}")
    if values.get("recommended") not in (None, kept):
        recommended = values["recommended"]
        axes.axvline(recommended, color=DROPPED, linestyle=":", label=f"recommended: {recommended}")
    axes.set_xlabel("number of fields")
    axes.set_ylabel("AUC lost")
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return style_axes(figure)


def draw_histogram(axes: Axes, selection: Selection) -> None:
    """Draw the histogram of the gates."""
    values = list(selection.gates.values())
    if not values:
        raise InputError("the selection has no gates to draw")
    alive = [value for value in values if value != 0]
    edges = (min(0.0, *values), max(1.0, *values))
    if zeros := len(values) - len(alive):
        axes.bar([0.0], [zeros], width=(edges[1] - edges[0]) / BINS, color=DROPPED, label="exactly 0")
    axes.hist(alive, bins=BINS, range=edges, color=KEPT, label="alive")
    axes.set_xlabel("gate")
    axes.set_ylabel("fields")
    axes.legend(frameon=False, fontsize=9)


def draw_trajectories(axes: Axes, selection: Selection, highlight: Sequence[str] = ()) -> None:
    """Draw every gate over steps, kept fields on top."""
    history = _history(selection)
    if "gates" not in history[0]:
        raise InputError("the history has no gates: only methods that train gates have trajectories")
    kept, steps = set(selection.kept), [record["step"] for record in history]
    for number, name in sorted(enumerate(selection.gates), key=lambda item: item[1] in kept):
        highlighted = name in highlight
        color = KEPT if name in kept else SECOND if highlighted else DROPPED
        alpha, width = 1.0 if highlighted or not highlight else 0.2, 2.2 if highlighted else 0.9
        order = 3 if highlighted else 2 if name in kept else 1
        values = [record["gates"][number] for record in history]
        axes.plot(steps, values, color=color, alpha=alpha, linewidth=width, zorder=order)
        if highlighted:
            axes.annotate(_axis_label(name), (steps[-1], values[-1]), xytext=(4, 0), fontsize=8, **BESIDE)
    axes.set_xlabel("step")
    axes.set_ylabel("gate")


def _history(selection: Selection) -> Sequence[Mapping[str, Any]]:
    """Return the history of a search; raise InputError if the selection has none."""
    if not selection.history:
        raise InputError(
            "the selection has no history of its search; use the selection that search or select returned. "
            "The history of a run on disk is in its history.parquet and in its report"
        )
    return selection.history


def _axis_label(name: str) -> str:
    return truncate_middle(escape_control_chars(name), 40)


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure that pyplot does not show in a window."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingPackageError("plots need matplotlib; install it with: pip install 'lpfs[plots]'") from error
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)  # a notebook would show it a second time
    return figure


def style_axes(figure: Figure) -> Figure:
    """Hide the top and right spines and draw a light grid; return the figure."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#edf0f4", zorder=0)
        axes.set_axisbelow(True)
    return figure
