"""What the figures share: curves over K, points with their names, histograms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lpfs.plots import DROPPED, INK, KEPT, SECOND

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = (KEPT, SECOND, "#5b5bd6", "#b8326e", "#4d7c0f", "#0369a1", "#854d0e", "#6b7280", "#a21caf", "#166534")


def curves(axes: Axes, lines: Mapping[str, Mapping[int, float]], level: float | None = None) -> None:
    """Draw AUC over the number of fields, a line a name; ``level``: what all fields give."""
    for number, (name, points) in enumerate(lines.items()):
        x = sorted(points)
        axes.plot(
            x,
            [points[each] for each in x],
            marker="o",
            markersize=4,
            linewidth=1.6,
            label=name,
            color=COLOURS[number % len(COLOURS)],
        )
    if level is not None:
        axes.axhline(level, color=INK, linewidth=1, linestyle="--", label="all fields")
    axes.set_xlabel("fields kept")
    axes.set_ylabel("test AUC")
    axes.legend(frameon=False, fontsize=8)


def points(axes: Axes, rows: Mapping[str, Sequence[float | None]], label: str) -> None:
    """Draw the values of every seed, a line a name, and their mean."""
    for number, values in enumerate(rows.values()):
        known = [each for each in values if each is not None]
        axes.plot(known, [number] * len(known), "o", color=DROPPED, markersize=5)
        if known:
            axes.plot([sum(known) / len(known)], [number], "D", color=KEPT, markersize=6)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)


def histogram(axes: Axes, values: Sequence[float], title: str) -> None:
    """Draw a histogram in which exact zeros stand apart."""
    alive = [each for each in values if each != 0]
    top = max([1e-12, *map(abs, values)])
    axes.hist(alive, bins=30, range=(0, top), color=KEPT, label="not 0")
    axes.bar([0.0], [len(values) - len(alive)], width=top / 30, color=DROPPED, label="exactly 0")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("fields")
    axes.legend(frameon=False, fontsize=8)


def series(axes: Axes, lines: Mapping[str, Sequence[tuple[Any, Any]]], x: str, y: str) -> None:
    """Draw lines of (x, y), a name each."""
    for number, (name, pairs) in enumerate(lines.items()):
        axes.plot(
            [each[0] for each in pairs],
            [each[1] for each in pairs],
            label=name,
            linewidth=1.3,
            color=COLOURS[number % len(COLOURS)],
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(frameon=False, fontsize=8)
