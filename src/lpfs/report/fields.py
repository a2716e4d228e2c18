"""The table of all fields of a selection: kept and dropped, sorted and searched by the script of the page."""

from __future__ import annotations

from lpfs.markup import Html, named, tag, together
from lpfs.report import words
from lpfs.report.parts import Cell, bar, card, table, word
from lpfs.report.run import Row, Run


def fields(run: Run) -> Html:
    """Return the table of all fields."""
    scored = any(each.score is not None for each in run.rows)
    largest = max((abs(each.gate or 0.0) for each in run.rows), default=1.0) or 1.0
    header = ["Field", "Kept", "Gate", *(["Score"] if scored else []), "Group", "Kind", "Cardinality", "Cost"]
    header += ["Memory", f"Chosen in {run.seeds}"]
    lines = [field_line(each, largest, scored, run.seeds) for each in run.rows]
    styles = ["kept" if each.kept else "dropped" for each in run.rows]
    tools = tag(
        "div",
        tag(
            "input",
            type="search",
            id="search",
            placeholder="Search fields",
            aria_label="Search fields",
            autocomplete="off",
        ),
        tag("div", *(choice(each) for each in ("all", "kept", "dropped")), class_="choices", role="group"),
        tag("span", id="count", class_="quiet", aria_live="polite"),
        tag("span", class_="spring"),
        tag("button", "Copy kept", type="button", id="copy-kept"),
        tag("button", "CSV", type="button", id="csv", title="Download the table as CSV"),
        class_="tools js-only",
    )
    listed = table(header, lines, identity="fields", style="fields", class_=styles)
    signed = any((each.gate or 0.0) < 0 for each in run.rows)
    note = "An orange bar is a negative gate: its sign goes into the weights." if signed else None
    return card("Fields", tools, listed, note=note, identity="all-fields")


def choice(name: str) -> Html:
    """Return a button that shows some of the fields."""
    return tag(
        "button",
        name.capitalize(),
        type="button",
        data_show=name,
        aria_pressed="true" if name == "all" else "false",
    )


def field_line(each: Row, largest: float, scored: bool, seeds: int) -> list[Cell]:
    """Return the cells of a field."""
    gate = each.gate
    style = "off" if not gate else "negative" if gate < 0 else ""
    share = abs(gate or 0.0) / largest
    shown = together(bar(share, style), tag("span", "–" if gate is None else f"{gate:.3f}" if gate else "0"))
    pill = tag("span", "kept" if each.kept else "dropped", class_=f"pill {'yes' if each.kept else 'no'}")
    times = "–" if each.chosen is None else f"{each.chosen} of {seeds}"
    return [
        word(named(each.name)),
        Cell(pill, float(each.kept), number=False),
        Cell(shown, gate),
        *([Cell(words.number(each.score), each.score)] if scored else []),
        word(each.group or "–"),
        word(each.kind or "–"),
        Cell(words.number(each.cardinality), each.cardinality),
        Cell(words.number(each.cost), each.cost),
        Cell(words.size(each.memory), each.memory),
        Cell(times, each.chosen),
    ]
