"""The context of ``comparison.html``: K-AUC curves, differences, cost and quality, heat map of the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from lpfs.report.charts import line, lines
from lpfs.report.comparison_data import ComparisonReport
from lpfs.report.format import format_count, format_delta, format_duration, format_measured, format_number, format_size
from lpfs.report.selection_data import Cell, ReportTable, Tile, text_cell

COLORS = tuple(f"m{number}" for number in range(8))  # of the best methods
GRAY = "off"  # of the other methods
HEAT_LEVELS = 8
MIN_SEEDS = 3  # with fewer seeds no interval over seeds is shown
MAX_POINTS = 4  # numbers of fields up to which the chart has points instead of lines
MAX_LISTED = 3  # methods that the headline names
VERDICT_TEXTS = {  # in the order in which they are sorted
    "behind": "worse, significant",
    "level": "no significant difference",
    "unknown": "unknown",
    "ahead": "better, significant",
}
VERDICT_STYLES = {"ahead": "yes", "behind": "bad"}


def comparison_context(comparison: ComparisonReport) -> dict[str, Any]:
    """Return the context of ``comparison.html``."""
    heat_data, heatmap = _heatmap(comparison)
    charts: dict[str, Any] = {"k-auc": k_auc_chart(comparison), "heat-data": heat_data}
    costs = _mean_costs(comparison)
    if costs:
        charts["cost"] = _cost_chart(comparison, costs)
    failures = [[text_cell(name), text_cell(why, kind="isolated")] for name, why in comparison.failed.items()]
    configuration, command = comparison.record.get("configuration"), comparison.record.get("command")
    has_settings = isinstance(configuration, Mapping)
    return {
        "comparison": comparison,
        "headline": _headline(comparison),
        "tiles": _summary_tiles(comparison),
        "charts": charts,
        "colored": len(COLORS) if len(comparison.methods) > len(COLORS) else None,
        "quality": _quality_table(comparison),
        "has_ranges": comparison.seed_count >= MIN_SEEDS,
        "one_seed": all(difference.final_verdict == "unknown" for difference in comparison.differences),
        "differences": _difference_table(comparison),
        "costs": _cost_table(comparison, costs) if costs else None,
        "heatmap": heatmap,
        "command": command if isinstance(command, str) else None,
        "failures": ReportTable(["Method", "Reason"], failures) if failures else None,
        "configuration": json.dumps(configuration, indent=1, ensure_ascii=False) if has_settings else None,
    }


def _headline(comparison: ComparisonReport) -> str:
    """Return which method is best, and which ones differ from it by no more than noise."""
    if not comparison.ranked_methods:
        return "No method gave a result."
    best, *others = comparison.ranked_methods
    keeps = comparison.keeps
    one = f"{best} is best with {format_count(keeps[0], 'field')}"
    start = one if len(keeps) == 1 else f"{best} is best on average over {len(keeps)} numbers of fields"
    verdicts = {name: _verdict_against(comparison, name, best) for name in others}
    worse = [name for name, verdict in verdicts.items() if verdict == "behind"]
    close = [name for name in others if name not in worse]
    if not others:
        return f"{start}; no other method has a result."
    if all(verdict == "unknown" for verdict in verdicts.values()):
        seeds = format_count(comparison.seed_count, "seed")
        return f"{start}, but {seeds} cannot tell a difference from noise."
    if not close:
        return f"{start}, and the difference to {_enumerate(others)} is more than noise."
    if len(close) == len(others):
        return f"{start}, but no difference to it is more than noise."
    is_close, is_worse = ("is" if len(names) == 1 else "are" for names in (close, worse))
    return f"{start}; {_enumerate(close)} {is_close} within noise of it, {_enumerate(worse)} {is_worse} worse."


def _enumerate(names: Sequence[str]) -> str:
    """Return names in a sentence.

    >>> _enumerate(["a"]), _enumerate(["a", "b", "c"]), _enumerate(["a", "b", "c", "d"])
    ('a', 'a, b and c', '4 other methods')
    """
    if len(names) > MAX_LISTED:
        return f"{len(names)} other methods"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _verdict_against(comparison: ComparisonReport, method: str, best: str) -> str:
    """Return the verdict on the area if there is one, else the one at all numbers of fields; without any, by seeds."""
    given = [one for one in comparison.differences if (one.method, one.other) == (method, best)]
    verdicts = [one.final_verdict for one in given if one.keep is None] or [one.final_verdict for one in given]
    if verdicts:
        return verdicts[0] if len(set(verdicts)) == 1 else "level"
    deltas: dict[int, list[float]] = {}
    for keep in comparison.keeps:
        aucs, best_aucs = comparison.aucs(method, keep), comparison.aucs(best, keep)
        for seed in set(aucs) & set(best_aucs):
            deltas.setdefault(seed, []).append(aucs[seed] - best_aucs[seed])
    if len(deltas) < MIN_SEEDS:
        return "unknown"
    return "behind" if all(mean(values) < 0 for values in deltas.values()) else "level"


def _best_method(comparison: ComparisonReport, keep: int) -> str | None:
    """Return the method with the highest mean AUC at a number of fields."""
    aucs = {name: comparison.aucs(name, keep).values() for name in comparison.ranked_methods}
    means = {name: mean(values) for name, values in aucs.items() if values}
    return max(means, key=lambda name: means[name]) if means else None


def _summary_tiles(comparison: ComparisonReport) -> list[Tile]:
    failed = f"{len(comparison.failed)} with failures" if comparison.failed else "none failed"
    seeds = format_count(comparison.seed_count, "seed")
    counts = f"{format_count(len(comparison.keeps), 'number')} of fields, {seeds}"
    tiles = [Tile("Methods", len(comparison.methods), failed), Tile("Results", f"{len(comparison.results):,}", counts)]
    if comparison.all_fields is not None:
        tiles.append(Tile("All fields", f"{comparison.all_fields:.4f}", f"{len(comparison.fields):,} fields"))
    return tiles


def k_auc_chart(comparison: ComparisonReport) -> dict[str, Any]:
    """Return AUC over the number of fields: points or a line per method, with its range over seeds."""
    series = []
    for name in comparison.methods:
        aucs = [list(comparison.aucs(name, keep).values()) for keep in comparison.keeps]
        low, high = ([limit(values) if len(values) >= MIN_SEEDS else None for values in aucs] for limit in (min, max))
        color = _color(comparison, name)
        has_band = color != GRAY and None not in low  # gray bands would be unreadable
        means = [mean(values) if values else None for values in aucs]
        series.append(line(name, means, color, band=[low, high] if has_band else ()))
    series.sort(key=lambda one: one["color"] != GRAY)  # gray lines first: they are drawn below the others
    if comparison.all_fields is not None:
        series.append(line("all fields", [comparison.all_fields] * len(comparison.keeps), "ink", dashed=True))
    chart = lines(comparison.keeps, series, "fields kept", "test AUC", points=len(comparison.keeps) <= MAX_POINTS)
    return {**chart, **({"range": _visible_range(series)} if len(comparison.methods) > len(COLORS) else {})}


def _visible_range(series: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the range of AUC that shows all colored lines; gray lines may lie below it."""
    colored = [one for one in series if one["color"] != GRAY]
    values = [y for one in colored for key in ("y", "low", "high") for y in one.get(key, ()) if y is not None]
    margin = 0.05 * (max(values) - min(values)) or 0.01
    return [min(values) - margin, max(values) + margin]


def _color(comparison: ComparisonReport, method: str) -> str:
    """Return the color of a method by its rank; an unranked method is gray."""
    ranked = comparison.ranked_methods
    rank = ranked.index(method) if method in ranked else len(COLORS)
    return COLORS[rank] if rank < len(COLORS) else GRAY


def _quality_table(comparison: ComparisonReport) -> ReportTable:
    """Return mean and standard deviation of the AUC over seeds, and the measures."""
    measures = list(dict.fromkeys(name for values in comparison.measures.values() for name in values))
    rows = []
    for method in comparison.methods:
        row = [text_cell(method)]
        for keep in comparison.keeps:
            aucs = list(comparison.aucs(method, keep).values())
            kind = "strong" if _best_method(comparison, keep) == method else "text"
            row.append(Cell(_mean_and_deviation(aucs), mean(aucs) if aucs else None, kind=kind))
        values = [comparison.measures.get(method, {}).get(name) for name in measures]
        rows.append([*row, *(Cell(format_number(value, 4), value) for value in values)])
    return ReportTable(["Method", *(f"K = {keep}" for keep in comparison.keeps), *measures], rows, "quality")


def _mean_and_deviation(values: list[float]) -> str:
    r"""Return the mean, with the standard deviation over three or more seeds.

    >>> _mean_and_deviation([0.75, 0.76, 0.77]), _mean_and_deviation([0.7, 0.8]), _mean_and_deviation([])
    ('0.760\xa0±\xa00.010', '0.7500', '–')
    """
    if not values:
        return "–"
    return format_measured(mean(values), stdev(values) if len(values) >= MIN_SEEDS else None)


def _difference_table(comparison: ComparisonReport) -> ReportTable:
    """Return the given differences; if there are none, the differences to the best method paired by seed."""
    if not comparison.differences:
        return _paired_by_seed(comparison)
    by_rows = any(difference.rows is not None for difference in comparison.differences)
    tested = any(difference.p is not None for difference in comparison.differences)
    header = ["K", "Methods", "Difference", "95 % over seeds" if by_rows else "interval"]
    header += [*(["95 % over rows"] if by_rows else []), *(["p"] if tested else []), "Verdict"]
    rows = []
    for difference in comparison.differences:
        limits = (difference.low, difference.high) if comparison.seed_count >= MIN_SEEDS else (None, None)
        verdict, p_text = difference.final_verdict, "–" if difference.p is None else f"{difference.p:.2g}"
        row = [
            Cell("area" if difference.keep is None else difference.keep, difference.keep or 0),
            *_difference_cells(difference.method, difference.other, difference.mean, *limits),
            *([_interval(*(difference.rows or (None, None)))] if by_rows else []),
            *([Cell(p_text, difference.p)] if tested else []),
        ]
        style = VERDICT_STYLES.get(verdict, "no")
        pill = text_cell(VERDICT_TEXTS[verdict], value=list(VERDICT_TEXTS).index(verdict), kind="pill", style=style)
        rows.append([*row, pill])
    return ReportTable(header, rows, "differences", "long")


def _difference_cells(method: str, other: str, mean: float, low: float | None, high: float | None) -> list[Cell]:
    return [text_cell(f"{method} – {other}"), Cell(format_delta(mean), mean), _interval(low, high)]


def _interval(low: float | None, high: float | None) -> Cell:
    return Cell("–" if low is None or high is None else f"{format_delta(low)} … {format_delta(high)}", low)


def _paired_by_seed(comparison: ComparisonReport) -> ReportTable:
    rows = []
    for keep in comparison.keeps:
        best = _best_method(comparison, keep)
        best_aucs = {} if best is None else comparison.aucs(best, keep)
        for method in comparison.methods:
            aucs = comparison.aucs(method, keep)
            deltas = [aucs[seed] - best_aucs[seed] for seed in sorted(set(aucs) & set(best_aucs))]
            if best is not None and method != best and deltas:
                limits = (min(deltas), max(deltas)) if len(deltas) >= MIN_SEEDS else (None, None)
                cells = _difference_cells(method, best, mean(deltas), *limits)
                worse = sum(delta < 0 for delta in deltas)
                rows.append([Cell(keep, keep), *cells, Cell(f"{worse} of {len(deltas)}", worse / len(deltas))])
    return ReportTable(["K", "Methods", "Δ AUC", "min … max", "worse in"], rows, "differences", "long")


def _mean_costs(comparison: ComparisonReport) -> dict[str, tuple[float, float]]:
    """Return method -> mean seconds of a search and mean AUC."""
    costs = {}
    for method in comparison.methods:
        pairs = [(result.seconds, result.auc) for result in comparison.results_of(method)]
        known = [(seconds, auc) for seconds, auc in pairs if seconds is not None and auc is not None and seconds > 0]
        if known:
            costs[method] = (mean(seconds for seconds, _ in known), mean(auc for _, auc in known))
    return costs


def _cost_chart(comparison: ComparisonReport, costs: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return cost and quality: one point per method."""
    x = sorted({seconds for seconds, _ in costs.values()})
    series = [
        line(method, [auc if value == seconds else None for value in x], _color(comparison, method))
        for method, (seconds, auc) in costs.items()
    ]
    return lines(x, series, "seconds of a search", "mean test AUC", logX=True, points=True)


def _cost_table(comparison: ComparisonReport, costs: Mapping[str, tuple[float, float]]) -> ReportTable:
    rows = []
    for method, (seconds, auc) in costs.items():
        memories = [result.memory for result in comparison.results_of(method) if result.memory is not None]
        memory = max(memories, default=None)
        cells = (Cell(format_duration(seconds), seconds), Cell(format_size(memory), memory), Cell(f"{auc:.4f}", auc))
        rows.append([text_cell(method), *cells])
    return ReportTable(["Method", "Search", "Peak memory", "Mean AUC"], rows, "costs")


def _kept_shares(comparison: ComparisonReport, keep: int | None) -> list[list[int | None]]:
    """Return in how many percent of the searches of each method a field was kept (F, M)."""
    searches = [
        [set(result.kept) for result in comparison.results_of(method, keep) if result.kept]
        for method in comparison.methods
    ]
    return [
        [round(100 * sum(name in kept for kept in sets) / len(sets)) if sets else None for sets in searches]
        for name in comparison.fields
    ]


def _heatmap(comparison: ComparisonReport) -> tuple[dict[str, list[list[int | None]]], ReportTable | None]:
    """Return the shares over all numbers of fields and at each one, and the table; most often kept fields first."""
    all_shares = _kept_shares(comparison, None)
    order = sorted(range(len(all_shares)), key=lambda row: -sum(share or 0 for share in all_shares[row]))
    shares = {"all": all_shares, **{str(keep): _kept_shares(comparison, keep) for keep in comparison.keeps}}
    data = {key: [rows[row] for row in order] for key, rows in shares.items()}
    if not comparison.fields or not any(result.kept for result in comparison.results):
        return data, None
    rows = [[text_cell(comparison.fields[row], kind="field"), *map(_heat_cell, all_shares[row])] for row in order]
    style = "heat many" if len(comparison.methods) > len(COLORS) else "heat"
    return data, ReportTable(["Field", *comparison.methods], rows, "heat", style)


def _heat_cell(share: int | None) -> Cell:
    return Cell("–") if share is None else Cell(f"{share} %", share, shade=round(share * HEAT_LEVELS / 100))
