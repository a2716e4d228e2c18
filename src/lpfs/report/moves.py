"""How the gates moved: their histogram, their trajectories, zero gates, λ and ε over steps."""

from __future__ import annotations

from collections.abc import Mapping

from lpfs.markup import Html, tag
from lpfs.report import words
from lpfs.report.charts import TITLES
from lpfs.report.parts import Cell, card, chart, folded, table
from lpfs.report.run import History, Run, some

TOLD = 12  # records of the search in its table


def gates(run: Run, charts: Mapping[str, object]) -> list[Html]:
    """Return how the gates moved, where the search wrote it down."""
    found = []
    if "histogram" in charts:
        moving = "trajectories" in charts
        slider = tag(
            "label",
            tag("span", "Step", class_="quiet"),
            tag(
                "input", type="range", id="histogram-step", min=0, max=0, value=0, aria_label="Step of the search"
            ),
            tag("output", id="histogram-at"),
            class_="slider js-only",
        )
        note = "Polarization: gates end at exactly 0 or clear of it."
        place = chart("histogram", "Histogram of the gates", 250)
        found.append(card("Gate histogram", place, slider if moving else "", note=note, wide=False, scripted=True))
    if "trajectories" in charts:
        search = tag(
            "input", type="search", id="highlight", placeholder="Highlight fields", aria_label="Highlight fields",
            autocomplete="off", class_="js-only",
        )  # fmt: skip
        place = chart("trajectories", "The gates over steps", 250)
        keys = [tag("span", class_="key kept"), "kept ", tag("span", class_="key dropped"), "dropped", search]
        legend = tag("div", *keys, class_="note keys")
        found.append(card("Gate trajectories", legend, place, wide=False, scripted=True))
    if run.history is not None:
        tracks = [name for name in TITLES if f"track-{name}" in charts]
        small = [
            tag("figure", tag("figcaption", TITLES[name][0]), chart(f"track-{name}", TITLES[name][0], 150))
            for name in tracks
        ]
        told = folded("The search in numbers", numbers(run.history))
        found.append(card("The search, step by step", tag("div", *small, class_="tracks js-only"), told))
    return found


def numbers(history: History) -> Html:
    """Return some records of the search as a table."""
    names = [name for name in TITLES if name in history.tracks]
    places = some(range(len(history.steps)), TOLD)
    rows = [
        [Cell(f"{history.steps[at]:,}"), *(Cell(words.number(history.tracks[name][at])) for name in names)]
        for at in places
    ]
    return table(["Step", *(TITLES[name][0] for name in names)], rows)
