"""The context of ``comparison.html``: K-AUC curves, differences, cost and quality, heat map of the fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from lpfs.report.charts import line, lines
from lpfs.report.comparison_data import ComparisonReport
from lpfs.report.format import format_count, format_delta, format_duration, format_number, format_size
from lpfs.report.selection import facts
from lpfs.report.selection_data import Cell, ReportTable, text_cell

COLORS = tuple(f"m{number}" for number in range(8))  # of the best methods
GRAY = "off"  # of the other methods
HEAT_LEVELS = 8
VERDICTS = ("behind", "level", "unknown", "ahead")  # in the order in which they are sorted
VERDICT_TEXTS = {
    "ahead": "better, significant",
    "behind": "worse, significant",
    "level": "no significant difference",
    "unknown": "unknown",
}
VERDICT_STYLES = {"ahead": "yes", "behind": "bad"}


def comparison_context(comparison: ComparisonReport) -> dict[str, Any]:
    """Return the context of ``comparison.html``."""
    charts: dict[str, Any] = {"k-auc": k_auc_chart(comparison), "heat-data": _heatmap_data(comparison)}
    costs = _mean_costs(comparison)
    if costs:
        charts["cost"] = _cost_chart(comparison, costs)
    headline = _headline(comparison)
    configuration, command = comparison.record.get("configuration"), comparison.record.get("command")
    has_settings = isinstance(configuration, Mapping)
    return {
        "title": f"{headline} – {comparison.name}",
        "kicker": f"Comparison report · {comparison.name}",
        "headline": headline,
        "tiles": _summary_tiles(comparison),
        "charts": charts,
        "colored": len(COLORS) if len(comparison.methods) > len(COLORS) else None,
        "quality": _quality_table(comparison),
        "is_paired": not comparison.differences,
        "one_seed": all(difference.final_verdict == "unknown" for difference in comparison.differences),
        "differences": _difference_table(comparison),
        "costs": _cost_table(comparison, costs) if costs else None,
        "heatmap": _heatmap(comparison),
        "keeps": comparison.keeps,
        "command": command if isinstance(command, str) else None,
        "facts": facts(comparison.record, ", ".join(comparison.methods)),
        "failures": _failure_table(comparison) if comparison.failed else None,
        "configuration": json.dumps(configuration, indent=1, ensure_ascii=False) if has_settings else None,
    }


def _headline(comparison: ComparisonReport) -> str:
    if not comparison.ranked_methods:
        return "No method gave a result."
    best, keeps = comparison.ranked_methods[0], comparison.keeps
    wins = sum(_best_method(comparison, keep) == best for keep in keeps)
    return (
        f"{best} is best on average over {format_count(len(keeps), 'number')} of fields, "
        f"and first at {wins} of {len(keeps)}."
    )


def _best_method(comparison: ComparisonReport, keep: int) -> str | None:
    """Return the method with the highest mean AUC at a number of fields."""
    aucs = {name: comparison.aucs(name, keep).values() for name in comparison.ranked_methods}
    means = {name: mean(values) for name, values in aucs.items() if values}
    return max(means, key=lambda name: means[name]) if means else None


def _summary_tiles(comparison: ComparisonReport) -> list[tuple[str, object, str, bool | None]]:
    ranked = [result for result in comparison.results if result.method in comparison.ranked_methods]
    best = max(
        (result for result in ranked if result.auc is not None), key=lambda result: result.auc or 0.0, default=None
    )
    failed = f"{len(comparison.failed)} with failures" if comparison.failed else "none failed"
    seeds = format_count(len({result.seed for result in comparison.results}), "seed")
    tiles: list[tuple[str, object, str, bool | None]] = [
        ("Methods", len(comparison.methods), failed, None),
        ("Results", f"{len(comparison.results):,}", f"{format_count(len(comparison.keeps), 'K')}, {seeds}", None),
    ]
    if best is not None:
        tiles.append(("Best test AUC", f"{best.auc:.4f}", f"{best.method} with {best.keep}", None))
    if comparison.all_fields is not None:
        tiles.append(("All fields", f"{comparison.all_fields:.4f}", f"{len(comparison.fields):,} fields", None))
    return tiles


def k_auc_chart(comparison: ComparisonReport) -> dict[str, Any]:
    """Return AUC over the number of fields: one line per method, with its band over seeds."""
    series = []
    for name in comparison.methods:
        aucs = [list(comparison.aucs(name, keep).values()) for keep in comparison.keeps]
        means, lows, highs = ([reduce(values) if values else None for values in aucs] for reduce in (mean, min, max))
        color = _color(comparison, name)
        low, high = (None, None) if color == GRAY else (lows, highs)  # gray bands could not be distinguished
        series.append(line(name, means, color=color, low=low, high=high))
    series.sort(key=lambda one: one["color"] != GRAY)  # gray lines first: they are drawn below the others
    if comparison.all_fields is not None:
        level = [comparison.all_fields] * len(comparison.keeps)
        series.append(line("all fields", level, color="ink", dashed=True))
    chart = lines(comparison.keeps, series, x_label="fields kept", y_label="test AUC")
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
        cells = [text_cell(method)]
        for keep in comparison.keeps:
            aucs = list(comparison.aucs(method, keep).values())
            kind = "strong" if _best_method(comparison, keep) == method else "text"
            cells.append(Cell(_mean_and_deviation(aucs), mean(aucs) if aucs else None, kind=kind))
        values = [comparison.measures.get(method, {}).get(name) for name in measures]
        rows.append([*cells, *(Cell(format_number(value, 4), value) for value in values)])
    return ReportTable(["Method", *(f"K = {keep}" for keep in comparison.keeps), *measures], rows, "quality")


def _mean_and_deviation(values: list[float]) -> str:
    """Return mean and standard deviation.

    >>> _mean_and_deviation([0.75, 0.77]), _mean_and_deviation([0.7]), _mean_and_deviation([])
    ('0.7600 ± 0.0141', '0.7000', '–')
    """
    if not values:
        return "–"
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


def _difference_table(comparison: ComparisonReport) -> ReportTable:
    """Return the given differences; if there are none, the differences to the best method paired by seed."""
    if not comparison.differences:
        header = ["K", "Methods", "Δ AUC", "min … max", "worse in"]
        return ReportTable(header, _paired_by_seed(comparison), "differences", "long")
    by_rows = any(difference.rows is not None for difference in comparison.differences)
    tested = any(difference.p is not None for difference in comparison.differences)
    header = ["K", "Methods", "Difference", "95 % over seeds" if by_rows else "interval"]
    header += [*(["95 % over rows"] if by_rows else []), *(["p"] if tested else []), "Verdict"]
    rows = []
    for difference in comparison.differences:
        verdict, rows_interval = difference.final_verdict, difference.rows or (None, None)
        style = VERDICT_STYLES.get(verdict, "no")
        p_text = "–" if difference.p is None else f"{difference.p:.2g}"
        rows.append(
            [
                Cell("area" if difference.keep is None else difference.keep, difference.keep or 0),
                text_cell(f"{difference.method} – {difference.other}"),
                Cell(format_delta(difference.mean), difference.mean),
                Cell(_interval(difference.low, difference.high), difference.low),
                *([Cell(_interval(*rows_interval), rows_interval[0])] if by_rows else []),
                *([Cell(p_text, difference.p)] if tested else []),
                text_cell(VERDICT_TEXTS[verdict], value=VERDICTS.index(verdict), kind="pill", style=style),
            ]
        )
    return ReportTable(header, rows, "differences", "long")


def _interval(low: float | None, high: float | None) -> str:
    return "–" if low is None or high is None else f"{format_delta(low)} … {format_delta(high)}"


def _paired_by_seed(comparison: ComparisonReport) -> list[list[Cell]]:
    rows = []
    for keep in comparison.keeps:
        best = _best_method(comparison, keep)
        if best is None:
            continue
        best_aucs = comparison.aucs(best, keep)
        for method in comparison.methods:
            aucs = comparison.aucs(method, keep)
            deltas = [aucs[seed] - best_aucs[seed] for seed in sorted(set(aucs) & set(best_aucs))]
            if method != best and deltas:
                worse = sum(delta < 0 for delta in deltas)
                rows.append(
                    [
                        Cell(keep, keep),
                        text_cell(f"{method} – {best}"),
                        Cell(format_delta(mean(deltas)), mean(deltas)),
                        Cell(_interval(min(deltas), max(deltas)), min(deltas)),
                        Cell(f"{worse} of {len(deltas)}", worse / len(deltas)),
                    ]
                )
    return rows


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
        line(method, [auc if value == seconds else None for value in x], color=_color(comparison, method))
        for method, (seconds, auc) in costs.items()
    ]
    return lines(x, series, x_label="seconds of a search", y_label="mean test AUC", log_x=True, points=True)


def _cost_table(comparison: ComparisonReport, costs: Mapping[str, tuple[float, float]]) -> ReportTable:
    rows = []
    for method, (seconds, auc) in costs.items():
        memory = [result.memory for result in comparison.results_of(method) if result.memory is not None]
        rows.append(
            [
                text_cell(method),
                Cell(format_duration(seconds), seconds),
                Cell(format_size(max(memory, default=None)), max(memory, default=None)),
                Cell(f"{auc:.4f}", auc),
            ]
        )
    return ReportTable(["Method", "Search", "Peak memory", "Mean AUC"], rows, "costs")


def _kept_shares(comparison: ComparisonReport, keep: int | None) -> list[list[int | None]]:
    """Return in how many percent of the searches of each method a field was kept (F, M)."""
    columns = []
    for method in comparison.methods:
        sets = [set(result.kept) for result in comparison.results_of(method, keep) if result.kept]
        columns.append(
            [
                round(100 * sum(name in kept for kept in sets) / len(sets)) if sets else None
                for name in comparison.fields
            ]
        )
    return [[column[row] for column in columns] for row in range(len(comparison.fields))]


def _heatmap_data(comparison: ComparisonReport) -> dict[str, list[list[int | None]]]:
    """Return the shares over all numbers of fields and at each one, in the order of the table's rows."""
    all_shares = _kept_shares(comparison, None)
    order = _by_popularity(all_shares)
    shares = {"all": all_shares, **{str(keep): _kept_shares(comparison, keep) for keep in comparison.keeps}}
    return {key: [rows[row] for row in order] for key, rows in shares.items()}


def _by_popularity(shares: list[list[int | None]]) -> list[int]:
    """Return the positions of the fields, the most often kept first."""
    return sorted(range(len(shares)), key=lambda row: -sum(share or 0 for share in shares[row]))


def _heatmap(comparison: ComparisonReport) -> ReportTable | None:
    if not comparison.fields or not any(result.kept for result in comparison.results):
        return None
    shares = _kept_shares(comparison, None)
    rows = [
        [text_cell(comparison.fields[row], kind="field"), *map(_heat_cell, shares[row])]
        for row in _by_popularity(shares)
    ]
    style = "heat many" if len(comparison.methods) > len(COLORS) else "heat"
    return ReportTable(["Field", *comparison.methods], rows, "heat", style)


def _heat_cell(share: int | None) -> Cell:
    if share is None:
        return Cell("–")
    return Cell(f"{share} %", share, shade=round(share * HEAT_LEVELS / 100))


def _failure_table(comparison: ComparisonReport) -> ReportTable:
    rows = [[text_cell(name), text_cell(reason, kind="isolated")] for name, reason in comparison.failed.items()]
    return ReportTable(["Method", "Reason"], rows)
