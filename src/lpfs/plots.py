"""Figures for notebooks and papers, by matplotlib: each function returns one and shows nothing.

lpfs.plots.overview(run.selection).savefig("selection.png")

``Selection.plot()`` and ``Outcome.plot()`` call these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lpfs.errors import InputError, MissingPackageError
from lpfs.markup import shortened, visible
from lpfs.schema import Selection

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEPT, DROPPED, INK, SECOND = "#0e7c7b", "#b9c1cc", "#161a22", "#c2570c"
LABELLED = 60  # fields that a bar is drawn for
BINS = 25  # of a histogram
TITLES = {"alive": "gates alive", "penalty": "penalty λ", "epsilon": "smoothing ε"}


def gates(selection: Selection) -> Figure:
    """Draw the gate of every field, kept ones first, the strongest on top."""
    names = sorted(selection.gates, key=lambda name: (name not in selection.kept, -abs(selection.gates[name])))
    left, names = len(names) - LABELLED, names[:LABELLED]
    figure = blank(6.4, 0.6 + 0.2 * len(names))
    axes = figure.add_subplot()
    kept = set(selection.kept)
    values = [selection.gates[name] for name in names]
    axes.barh(range(len(names)), values, color=[KEPT if name in kept else DROPPED for name in names], height=0.7)
    axes.set_yticks(range(len(names)), [label(name) for name in names], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.set_xlabel("gate" + (f" (and {left:,} more fields)" if left > 0 else ""))
    return finished(figure)


def histogram(selection: Selection) -> Figure:
    """Draw the histogram of the gates: those at exactly zero apart from those that are alive."""
    figure = blank(5, 3)
    draw_histogram(figure.add_subplot(), selection)
    return finished(figure)


def trajectories(selection: Selection, highlight: Sequence[str] = ()) -> Figure:
    """Draw every gate over the steps of the search; fields to highlight are named."""
    for name in highlight:
        if name not in selection.gates:
            raise InputError(f"no field {name!r} in the selection; it has {', '.join(map(repr, selection.names))}")
    figure = blank(6.4, 3.6)
    draw_trajectories(figure.add_subplot(), selection, highlight)
    return finished(figure)


def search(selection: Selection) -> Figure:
    """Draw gates alive, λ and ε over the steps of the search."""
    history = recorded(selection)
    figure = blank(9, 2.6)
    names = [name for name in TITLES if name in history[0]]
    for number, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), number + 1)
        axes.plot([each["step"] for each in history], [each[name] for each in history], color=INK, linewidth=1.2)
        axes.set_title(TITLES[name], fontsize=10, loc="left")
        axes.set_xlabel("step")
        if name != "alive" and any(each[name] > 0 for each in history):
            axes.set_yscale("log")
    return finished(figure)


def overview(selection: Selection) -> Figure:
    """Draw the histogram and, where the search wrote them down, the trajectories beside it."""
    moved = bool(selection.history) and "gates" in selection.history[0]
    figure = blank(10 if moved else 5, 3.4)
    draw_histogram(figure.add_subplot(1, 1 + moved, 1), selection)
    if moved:
        draw_trajectories(figure.add_subplot(1, 2, 2), selection)
    figure.suptitle(
        f"{len(selection.kept)} of {len(selection.names)} fields kept",
        x=0.01,
        ha="left",
        fontsize=12,
        weight="bold",
    )
    return finished(figure)


def quality(metrics: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str]) -> Figure:
    """Draw the AUC of every model of a run against that of all fields."""
    named = {name: each["auc"] for name, each in metrics.items() if each.get("auc") is not None}
    if not named:
        raise InputError("there is no AUC to draw: the rows that judge hold one class only")
    figure = blank(6.4, 0.9 + 0.35 * len(named))
    axes = figure.add_subplot()
    base = named.get("all_fields")
    if base is not None:
        axes.axvline(base, color=DROPPED, linewidth=1.5, zorder=0)
    for number, (name, auc) in enumerate(named.items()):
        axes.plot([auc], [number], "o", color=INK if name == "all_fields" else KEPT, markersize=8)
        axes.annotate(
            f"{auc:.4f}", (auc, number), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(named)), [titles.get(name, name) for name in named])
    axes.set_ylim(len(named) - 0.5, -0.5)
    axes.margins(x=0.2)
    axes.set_xlabel("test AUC")
    return finished(figure)


def draw_histogram(axes: Axes, selection: Selection) -> None:
    """Draw the histogram of the gates."""
    values = list(selection.gates.values())
    if not values:
        raise InputError("the selection holds no gates to draw")
    alive = [each for each in values if each != 0]
    edges = (min(0.0, *values), max(1.0, *values))
    if len(alive) < len(values):
        axes.bar(
            [0.0], [len(values) - len(alive)], width=(edges[1] - edges[0]) / BINS, color=DROPPED, label="exactly 0"
        )
    axes.hist(alive, bins=BINS, range=edges, color=KEPT, label="alive")
    axes.set_xlabel("gate")
    axes.set_ylabel("fields")
    axes.legend(frameon=False, fontsize=9)


def draw_trajectories(axes: Axes, selection: Selection, highlight: Sequence[str] = ()) -> None:
    """Draw every gate over steps, kept ones on top."""
    history = recorded(selection)
    if "gates" not in history[0]:
        raise InputError("the search wrote down no gates: only methods that move gates have trajectories")
    kept, steps = set(selection.kept), [each["step"] for each in history]
    for number, name in sorted(enumerate(selection.gates), key=lambda each: each[1] in kept):
        loud = name in highlight
        colour = SECOND if loud and name not in kept else KEPT if name in kept else DROPPED
        axes.plot(
            steps,
            [each["gates"][number] for each in history],
            color=colour,
            alpha=1.0 if loud or not highlight else 0.2,
            linewidth=2.2 if loud else 0.9,
            zorder=3 if loud else 2 if name in kept else 1,
        )
        if loud:
            end = (steps[-1], history[-1]["gates"][number])
            axes.annotate(
                label(name),
                end,
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                parse_math=False,
            )
    axes.set_xlabel("step")
    axes.set_ylabel("gate")


def recorded(selection: Selection) -> Sequence[Mapping[str, Any]]:
    """Return the history of a search, or say where it is."""
    if not selection.history:
        raise InputError(
            "the selection holds no history of its search: take the one that search or select returned; that of a "
            "run on disk is in its history.parquet and in its report"
        )
    return selection.history


def label(name: str) -> str:
    """Return a name as it can be drawn."""
    return shortened(visible(name), 40)


def blank(width: float, height: float) -> Figure:
    """Return an empty figure that no window will show on its own."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingPackageError("plots need matplotlib; install it with: pip install 'lpfs[plots]'") from error
    figure = pyplot.figure(figsize=(width, height), layout="constrained")
    pyplot.close(figure)  # a notebook shows what a cell returns, once
    return figure


def finished(figure: Figure) -> Figure:
    """Take away what says nothing."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", color="#edf0f4", zorder=0)
        axes.set_axisbelow(True)
    return figure
