"""The page of a comparison: K-AUC curves, fields by methods, cost against quality, what is beyond noise."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from lpfs.markup import Html, named, tag, together
from lpfs.report import words
from lpfs.report.charts import line, lines
from lpfs.report.comparison import Comparison
from lpfs.report.differences import best_at, significance
from lpfs.report.made import facts
from lpfs.report.page import page
from lpfs.report.parts import Cell, card, chart, copyable, folded, table, tile, word

TONES = tuple(f"m{number}" for number in range(8))  # of the best methods
GREY = "off"  # of the others
LEVELS = 8  # shades of the heat map


def comparison_page(found: Comparison) -> str:
    """Return the page of a comparison as one document."""
    charts: dict[str, Any] = {"k-auc": curves(found), "heat-data": heat_data(found)}
    costs = cost_chart(found)
    if costs is not None:
        charts["cost"] = costs
    place = chart("k-auc", "AUC by the number of kept fields", 340)
    note = "Test AUC of the kept fields trained from scratch: the mean over seeds, and from the least to the most."
    if len(found.methods) > len(TONES):
        note += f" The first {len(TONES)} methods have colours; weak ones may lie below the picture."
    body = together(
        hero(found),
        card("AUC by the number of fields", place, quality_table(found), note=note),
        tag("div", significance(found), cost_card(found, "cost" in charts), class_="grid"),
        heat(found),
        made(found),
    )
    return page(f"{sentence(found)} – {found.name}", f"Comparison report · {found.name}", body, charts)


def sentence(found: Comparison) -> str:
    """Return the answer in one sentence."""
    first = found.fair[0] if found.fair else None
    if first is None:
        return "No method gave a result."
    wins = sum(best_at(found, keep) == first for keep in found.keeps)
    return (
        f"{first} is best on average over {words.plural(len(found.keeps), 'number')} of fields, "
        f"and first at {wins} of {len(found.keeps)}."
    )


def hero(found: Comparison) -> Html:
    """Return the answer and the numbers that matter."""
    judged = [each for each in found.results if each.auc is not None and each.method in found.fair]
    best = max(judged, key=lambda each: each.auc or 0.0, default=None)
    seeds = len({each.seed for each in found.results})
    tiles = [
        tile(
            "Methods", len(found.methods), f"{len(found.failed)} with failures" if found.failed else "none failed"
        ),
        tile(
            "Results",
            f"{len(found.results):,}",
            f"{words.plural(len(found.keeps), 'K')}, {words.plural(seeds, 'seed')}",
        ),
    ]
    if best is not None:
        tiles.append(tile("Best test AUC", f"{best.auc:.4f}", f"{best.method} with {best.keep}"))
    if found.all_fields is not None:
        tiles.append(tile("All fields", f"{found.all_fields:.4f}", f"{len(found.fields):,} fields"))
    return tag("div", tag("h1", sentence(found)), tag("dl", *tiles, class_="tiles"), class_="hero")


def curves(found: Comparison) -> dict[str, Any]:
    """Return AUC over the number of fields, a line a method with its band over seeds."""
    series = []
    for name in found.methods:
        each = [list(found.aucs(name, keep).values()) for keep in found.keeps]
        middle, *band = ([how(one) if one else None for one in each] for how in (mean, min, max))
        colour = tone(found, name)
        low, high = (None, None) if colour == GREY else band  # grey on grey says nothing
        series.append(line(name, middle, low=low, high=high, colour=colour))
    series.sort(key=lambda each: each["colour"] != GREY)  # below the others
    if found.all_fields is not None:
        level = [found.all_fields] * len(found.keeps)
        series.append(line("all fields", level, colour="ink", dashed=True))
    drawn = lines(found.keeps, series, x_label="fields kept", y_label="test AUC")
    return {**drawn, **({"range": focus(series)} if len(found.methods) > len(TONES) else {})}


def focus(series: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the range of AUC that shows the coloured lines; the weak ones among the grey may leave it below."""
    loud = [each for each in series if each["colour"] != GREY]
    values = [one for each in loud for key in ("y", "low", "high") for one in each.get(key, ()) if one is not None]
    room = 0.05 * (max(values) - min(values)) or 0.01
    return [min(values) - room, max(values) + room]


def tone(found: Comparison, method: str) -> str:
    """Return the colour of a method by its place; who stands aside has none."""
    number = found.fair.index(method) if method in found.fair else len(TONES)
    return TONES[number] if number < len(TONES) else GREY


def quality_table(found: Comparison) -> Html:
    """Return the numbers of the curves: mean and standard deviation over seeds, and the measures."""
    named_too = list(dict.fromkeys(name for each in found.measures.values() for name in each))
    rows = []
    for method in found.methods:
        cells = []
        for keep in found.keeps:
            values = list(found.aucs(method, keep).values())
            best = tag("b", spread(values)) if best_at(found, keep) == method else spread(values)
            cells.append(Cell(best, mean(values) if values else None))
        more = [found.measures.get(method, {}).get(name) for name in named_too]
        rows.append([word(method), *cells, *(Cell(words.number(each, 4), each) for each in more)])
    return table(["Method", *(f"K = {keep}" for keep in found.keeps), *named_too], rows, identity="quality")


def spread(values: list[float]) -> str:
    """Return mean and standard deviation.

    >>> spread([0.75, 0.77]), spread([0.7]), spread([])
    ('0.7600 ± 0.0141', '0.7000', '–')
    """
    if not values:
        return "–"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def costs_of(found: Comparison) -> dict[str, tuple[float, float]]:
    """Return method -> mean seconds of a search and mean AUC."""
    result = {}
    for method in found.methods:
        both = [(each.seconds, each.auc) for each in found.of(method)]
        known = [
            (seconds, auc) for seconds, auc in both if seconds is not None and auc is not None and seconds > 0
        ]
        if known:
            result[method] = (mean(each[0] for each in known), mean(each[1] for each in known))
    return result


def cost_chart(found: Comparison) -> dict[str, Any] | None:
    """Return cost against quality: a point a method."""
    costs = costs_of(found)
    if not costs:
        return None
    x = sorted({seconds for seconds, _ in costs.values()})
    series = []
    for method in found.methods:
        if method in costs:
            seconds, auc = costs[method]
            y = [auc if each == seconds else None for each in x]
            series.append(line(method, y, colour=tone(found, method)))
    return lines(x, series, x_label="seconds of a search", y_label="mean test AUC", log_x=True, points=True)


def cost_card(found: Comparison, drawn: bool) -> Html:
    """Return cost against quality, drawn and in numbers."""
    if not drawn:
        return Html("")
    rows = []
    for method, (seconds, auc) in costs_of(found).items():
        memory = [each.memory for each in found.of(method) if each.memory is not None]
        rows.append(
            [
                word(method),
                Cell(words.duration(seconds), seconds),
                Cell(words.size(max(memory)) if memory else "–", max(memory, default=None)),
                Cell(f"{auc:.4f}", auc),
            ]
        )
    header = ["Method", "Search", "Memory at its peak", "Mean AUC"]
    place = chart("cost", "Seconds of a search against AUC", 280)
    return card("Cost against quality", place, table(header, rows, identity="costs"))


def shares(found: Comparison, keep: int | None) -> list[list[int | None]]:
    """Return field, method -> in how many percent of the searches the field was kept (F, M)."""
    columns = []
    for method in found.methods:
        sets = [set(each.kept) for each in found.of(method, keep) if each.kept]
        columns.append(
            [round(100 * sum(name in one for one in sets) / len(sets)) if sets else None for name in found.fields]
        )
    return [[column[at] for column in columns] for at in range(len(found.fields))]


def heat_data(found: Comparison) -> dict[str, list[list[int | None]]]:
    """Return the shares at each number of fields, and over all of them."""
    every = shares(found, None)
    order = by_popularity(every)
    data = {"all": every, **{str(keep): shares(found, keep) for keep in found.keeps}}
    return {key: [rows[at] for at in order] for key, rows in data.items()}


def by_popularity(rows: list[list[int | None]]) -> list[int]:
    """Return the places of the fields, those first that most searches kept."""
    return sorted(range(len(rows)), key=lambda at: -sum(each or 0 for each in rows[at]))


def heat(found: Comparison) -> Html:
    """Return fields by methods, the darker the more often kept."""
    if not found.fields or not any(each.kept for each in found.results):
        return Html("")
    every = shares(found, None)
    rows = [[word(named(found.fields[at])), *map(shade, every[at])] for at in by_popularity(every)]
    pick = tag(
        "label",
        tag("span", "Fields kept ", class_="quiet"),
        tag(
            "select",
            tag("option", "all together", value="all"),
            *(tag("option", f"K = {keep}", value=keep) for keep in found.keeps),
            id="heat-keep",
        ),
        class_="js-only",
    )
    note = "In how many of its searches each method kept a field."
    style = "heat many" if len(found.methods) > len(TONES) else "heat"
    listed = table(["Field", *found.methods], rows, identity="heat", style=style)
    return card("Fields by methods", tag("div", pick, class_="tools"), listed, note=note, identity="all-fields")


def shade(share: int | None) -> Cell:
    """Return a cell of the heat map."""
    if share is None:
        return Cell("–")
    return Cell(f"{share} %", share, shade=round(share * LEVELS / 100))


def made(found: Comparison) -> Html:
    """Return how the comparison was made."""
    parts: list[object] = []
    command = found.said.get("command")
    if isinstance(command, str):
        parts.append(copyable(command, "command"))
    parts.append(facts(found.said, ", ".join(found.methods)))
    if found.failed:
        rows = [[word(name), word(tag("bdi", why))] for name, why in found.failed.items()]
        parts.append(folded("Runs that failed", table(["Method", "Why"], rows)))
    asked = found.said.get("configuration")
    if isinstance(asked, Mapping):
        text = json.dumps(asked, indent=1, ensure_ascii=False)
        parts.append(folded("Configuration", copyable(text, "configuration")))
    return card("How it was made", *parts)
