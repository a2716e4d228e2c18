"""Cards: how a Selection and an Outcome look in a notebook; every name is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.markup import Html, named, tag, together
from lpfs.schema import Selection

ROWS = 30  # fields of a table before the rest is folded away
ROW = "border:0;padding:1px 14px 1px 0;text-align:left"


def selection_card(selection: Selection) -> Html:
    """Return a Selection: how many, which with what gate, what goes."""
    total = len(selection.names)
    method = selection.made.get("method")
    head = tag("b", f"{len(selection.kept):,} of {total:,} fields kept")
    by = tag("span", f" by {method}" if method else "", style="opacity:.7")
    kept = sorted(selection.kept, key=lambda name: -abs(selection.gates.get(name, 0.0)))
    parts: list[object] = [tag("div", head, by), fields(kept[:ROWS], selection.gates)]
    if kept[ROWS:]:
        parts.append(folded(f"{len(kept) - ROWS:,} more kept", fields(kept[ROWS:], selection.gates)))
    if selection.dropped:
        parts.append(folded(f"{len(selection.dropped):,} dropped", listed(selection.dropped)))
    return tag("div", *parts, style="line-height:1.5")


def outcome_card(
    selection: Selection, metrics: Mapping[str, Mapping[str, Any]], titles: Mapping[str, str], folder: object
) -> Html:
    """Return an Outcome: AUC and logloss of its models, then the Selection."""
    rows = [
        line(
            titles.get(name, name),
            "–" if each.get("auc") is None else f"{each['auc']:.5f}",
            "–" if each.get("logloss") is None else f"{each['logloss']:.5f}",
        )
        for name, each in metrics.items()
    ]
    table = tag("table", line("on the test rows", "AUC", "logloss", head=True), *rows, style="margin:4px 0")
    where = tag("div", "in ", tag("code", folder), ": report.html, selection.json, model/", style="opacity:.7")
    return together(table, selection_card(selection), where)


def fields(names: Sequence[str], gates: Mapping[str, float]) -> Html:
    """Return fields and their gates."""
    rows = [line(named(name), f"{gates[name]:.3f}" if name in gates else "–") for name in names]
    return tag("table", line("field", "gate", head=True), *rows, style="margin:4px 0")


def line(*cells: object, head: bool = False) -> Html:
    """Return a line of a table."""
    return tag("tr", *(tag("th" if head else "td", each, style=ROW) for each in cells))


def listed(names: Sequence[str]) -> Html:
    """Return names one after another."""
    inside = [piece for name in names for piece in (named(name), ", ")]
    return tag("div", *inside[:-1])


def folded(title: str, inside: Html) -> Html:
    """Return something that opens on request."""
    return tag("details", tag("summary", title, style="cursor:pointer"), inside)
