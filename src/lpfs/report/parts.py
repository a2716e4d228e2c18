"""The pieces that pages are built of: cards, tables that can be sorted, bars, places of charts, text to copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lpfs.markup import Html, escaped, tag, together


@dataclass(frozen=True)
class Cell:
    """A cell: what is shown, the value it is sorted by where that is a number, and its shade in a heat map."""

    shown: object
    value: float | None = None
    number: bool = True
    shade: int | None = None


def card(
    title: str,
    *inside: object,
    note: object = None,
    wide: bool = True,
    scripted: bool = False,
    identity: str | None = None,
) -> Html:
    """Return a part of the page with its heading; one that is nothing without a script is not shown without."""
    told = "" if note is None else tag("p", note, class_="note")
    styles = ["card", *([] if wide else ["half"]), *(["js-only"] if scripted else [])]
    return tag("section", tag("h2", title), told, *inside, class_=" ".join(styles), id=identity)


def chart(identity: str, label: str, height: int = 240, **attributes: object) -> Html:
    """Return the place of a chart; the script fills it."""
    return tag(
        "div", class_="chart", data_chart=identity, data_height=height, role="img", aria_label=label, **attributes
    )


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    identity: str | None = None,
    style: str = "",
    **more: object,
) -> Html:
    """Return a table; where it has an id the script lets it be sorted and searched."""
    first = rows[0] if rows else [Cell("", number=False)] * len(header)
    heads = [
        tag("th", title, scope="col", class_="number" if each.number else None)
        for title, each in zip(header, first, strict=True)
    ]
    lines = [tag("tr", *map(_cell, row), **_attributes(more, number)) for number, row in enumerate(rows)]
    inner = together(tag("thead", tag("tr", *heads)), tag("tbody", *lines))
    return tag("div", tag("table", inner, id=identity, class_=style or None), class_="scroll")


def _cell(each: Cell) -> Html:
    return tag("td", each.shown, class_="number" if each.number else None, data_v=each.value, data_h=each.shade)


def _attributes(more: dict[str, object], number: int) -> dict[str, object]:
    return {key: values[number] if isinstance(values, Sequence) else values for key, values in more.items()}


def word(shown: object) -> Cell:
    """Return a cell of text."""
    return Cell(shown, number=False)


def bar(share: float, style: str = "") -> Html:
    """Return a small bar, from 0 to 1."""
    width = round(100 * min(1.0, max(0.0, share)), 1)
    rect = tag("rect", width=f"{width:g}", height=6, rx=1)
    return tag(
        "svg",
        rect,
        class_=f"bar {style}".strip(),
        viewBox="0 0 100 6",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


def tile(title: str, big: object, small: object = "", *, good: bool | None = None) -> Html:
    """Return a number that matters."""
    style = "tile" if good is None else f"tile {'good' if good else 'bad'}"
    return tag(
        "div",
        tag("dt", title),
        tag("dd", tag("span", big, class_="big"), tag("span", small, class_="small")),
        class_=style,
    )


def copyable(text: str, identity: str, label: str = "Copy") -> Html:
    """Return text in a box with a button that copies it."""
    button = tag("button", label, type="button", class_="copy js-only", data_copy=identity)
    lines = Html("\n".join(map(escaped, text.split("\n"))))
    return tag("div", button, tag("pre", tag("code", lines), id=identity, tabindex=0), class_="copyable")


def folded(title: str, *inside: object) -> Html:
    """Return something that opens on request."""
    return tag("details", tag("summary", title), *inside)
