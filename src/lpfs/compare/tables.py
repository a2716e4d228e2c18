"""The tables of a comparison: a short form on the terminal, all of them as Markdown, one row per run as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lpfs._console import Console
from lpfs._text import csv_cell, escape_markdown
from lpfs.compare.run_dir import KINDS, TRUE_KINDS, Record
from lpfs.compare.summary import REFERENCE_METHOD, Comparison

CSV_COLUMNS = (
    *("method", "keep", "seed", "status", "auc", "logloss", "validation_auc", "validation_logloss", "count"),
    *("search_seconds", "search_memory", "search_steps", "rows_forward", "rows_backward", "own_count"),
    *("train_seconds", "trials", "options", "search_code", "trained_code"),
    *("recall", "false_positives", "reason", "kept"),
)
INTERVALS = ["95 % over seeds", "95 % over rows"]

Table = tuple[list[str], list[list[str]]]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the main tables and the files with the others."""
    values, seeds = comparison.values, len(comparison.values["seeds"])
    console.message("")
    over = "one seed" if seeds == 1 else f"mean of {seeds} seeds"
    console.table(f"AUC on the test rows of K fields trained from scratch, {over}", *main_table(values))
    console.message(f"  {all_fields_note(values)}")
    console.message("  area: under the K-AUC curve; search: in epochs of pretraining; memory: relative to pretraining")
    for line in (significance_note(values), *failures(values), *mixed_versions_note(values)):
        console.message(f"  {line}")
    true = sum(count for kind, count in values["kinds"].items() if kind in TRUE_KINDS)
    if true and values["sizes"]:
        size = min(values["sizes"], key=lambda size: (abs(size - true), size))
        title = f"Kinds of the kept fields with {size} of {values['fields']} fields"
        console.table(title, *kinds_table(values, size))
    console.message(f"  {comparison.folder}: comparison.md, comparison.json, results.csv")


def rivals(values: Record) -> dict[str, str]:
    """Return key -> title of the methods that every method is compared with: the best one, and LPFS++."""
    if values["best"] == REFERENCE_METHOD:
        return {"best": REFERENCE_METHOD}
    reference = {REFERENCE_METHOD: REFERENCE_METHOD} if REFERENCE_METHOD in values["methods"] else {}
    return {"best": "the best", **reference}


def main_table(values: Record) -> Table:
    """Return one row per method: area, AUC of every K, overlap, cost, and the difference to the best."""
    sizes, others = values["sizes"], rivals(values)
    header = ["method", "area", *(f"K={size}" for size in sizes), "overlap", "search", "memory"]
    header += [f"to {title}" for title in others.values()]
    rows = [
        [
            name,
            format_mean(method["area"], 4),
            *(format_mean(method["sizes"].get(str(size), {}).get("auc"), 5) for size in sizes),
            format_number(method["overlap"], 2),
            f"{format_number(method['search']['epochs'], 2)}{' once' if method['search']['shared_by_all_k'] else ''}",
            format_number(method["search"]["memory_ratio"], 2),
            *(format_difference(method["differences"].get(key), name == values["best"]) for key in others),
        ]
        for name, method in values["methods"].items()
    ]
    return header, rows


def all_fields_note(values: Record) -> str:
    """Return the AUC of all fields, trained in the same way, and the methods that are not ranked."""
    text = f"all {values['fields']} fields: {format_mean(values['all_fields']['auc'], 5)}"
    unranked = [name for name in values["methods"] if name in values["unranked"]]
    return f"{text}; not ranked, listed last: {' and '.join(unranked)}" if unranked else text


def significance_note(values: Record) -> str:
    """Return what the verdicts mean."""
    if len(values["seeds"]) > 1:
        significance = "significant at 95 % over seeds and test rows together"
        return f"ahead, behind: {significance}; level: not significant; not corrected for the number of comparisons"
    return "with one seed the variance of the training is unknown, so no difference is called significant"


def differences_table(values: Record, rival: str) -> Table:
    """Return the differences to a method, of the area and of the AUC of every K, with both intervals."""
    rows = []
    for name, method in values["methods"].items():
        differences = {"area": method["differences"].get(rival)}
        differences |= {f"K={size}": of["differences"].get(rival) for size, of in method["sizes"].items()}
        for measure, difference in differences.items():
            if difference is not None:
                ends = [format_interval(difference["seeds"]), format_interval(difference["rows"])]
                rows.append([name, measure, f"{difference['value']:+.5f}", *ends, difference["verdict"]])
    return ["method", "of", "difference", *INTERVALS, "verdict"], rows


def kinds_table(values: Record, size: int) -> Table:
    """Return how many fields of each kind a method keeps, mean over seeds."""
    kinds = [kind for kind in KINDS if kind in values["kinds"]]
    header = ["method", *(f"{kind} (of {values['kinds'][kind]})" for kind in kinds), "recall", "false positives"]
    rows = []
    for name, method in values["methods"].items():
        metrics = method["sizes"].get(str(size), {})
        if "kept_by_kind" in metrics:
            counts = [f"{metrics['kept_by_kind'][kind]:.1f}" for kind in kinds]
            rows.append([name, *counts, f"{metrics['recall']:.2f}", f"{metrics['false_positives']:.1f}"])
    return header, rows


def size_table(values: Record, size: int) -> Table:
    """Return AUC and logloss with their intervals, validation AUC and overlap of one K."""
    others = rivals(values)
    to_others = [f"logloss to {title}" for title in others.values()]
    header = ["method", "AUC", *INTERVALS, "logloss", *INTERVALS, *to_others, "validation AUC", "overlap", "fields"]
    rows = []
    for name, method in values["methods"].items():
        metrics = method["sizes"].get(str(size))
        if metrics is None:
            continue
        cells = [name]
        for metric in (metrics["auc"], metrics["logloss"]):
            cells += [format_mean(metric, 5), format_interval(metric["seeds"]), format_interval(metric["rows"])]
        differences = metrics["logloss_differences"]
        cells += [format_difference(differences.get(key), name == values["best"]) for key in others]
        cells += [format_number(metrics["validation_auc"], 5), format_number(metrics["overlap"], 2)]
        rows.append([*cells, format_number(metrics["count"], 1)])
    return header, rows


def cost_table(values: Record) -> Table:
    """Return the cost of a search, and the options it used."""
    header = ["method", "seconds", "epochs", "memory (MB)", "to pretraining", "searches", "trials", "options used"]
    rows = []
    for name, method in values["methods"].items():
        search = method["search"]
        numbers = [format_number(search[key], 2) for key in ("seconds", "epochs", "memory_ratio")]
        numbers.insert(2, format_number(search["memory"] and search["memory"] / 1e6, 1))
        searches = "once for all K" if search["shared_by_all_k"] else "one per K"
        options = ", ".join(f"{options} {count}x" for options, count in method["options_used"].items())
        rows.append([name, *numbers, searches, str(method["trials"]), options or "-"])
    return header, rows


def mixed_versions_note(values: Record) -> list[str]:
    """Return a note if results were made by another version of the code than these tables, or by several."""
    digests, current = values["code"], values["versions"]["code"]
    if set(digests) <= {current}:
        return []
    searches = "; ".join(f"{digest}: {', '.join(by['search']) or '-'}" for digest, by in digests.items())
    return [f"tables made by code {current}; searches by code {searches}"]


def failures(values: Record) -> list[str]:
    """Return a line for every method and reason."""
    counts = Counter((row["method"], row["reason"]) for row in values["results"] if row["status"] == "failed")
    return [
        f"failed: {name}, {count} {'run' if count == 1 else 'runs'}: {reason}"
        for (name, reason), count in counts.items()
    ]


def format_mean(summary: Mapping[str, Any] | None, digits: int) -> str:
    """Return the mean of a summary, or a dash."""
    return format_number(None if summary is None else summary["value"], digits)


def format_number(value: float | None, digits: int) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_difference(difference: Mapping[str, Any] | None, is_best: bool) -> str:
    """Return a difference and its verdict."""
    if difference is None:
        return "best" if is_best else "-"
    verdict = "" if difference["verdict"] == "unknown" else f" {difference['verdict']}"
    return f"{difference['value']:+.4f}{verdict}"


def format_interval(interval: Mapping[str, float] | None) -> str:
    """Return both ends of an interval, or a dash."""
    return "-" if interval is None else f"{interval['low']:.5f} to {interval['high']:.5f}"


def as_markdown(comparison: Comparison) -> str:
    """Return the comparison as Markdown."""
    values = comparison.values
    rows = {name: split["rows"] for name, split in values["splits"].items()}
    tune, steps, best = values["plan"]["tune"], values["steps"], values["best"]
    tuning = f"Each method was tried with up to {tune} option sets on the validation rows." if tune else "No tuning."
    parts = [
        "# Comparison",
        f"{values['fields']} fields, K = {', '.join(map(str, values['sizes']))}, seeds "
        f"{', '.join(map(str, values['seeds']))}. Rows: {rows['early']:,} to pretrain, {rows['search']:,} to "
        f"search, {rows['valid']:,} to validate, {rows['test']:,} to test. Every method started from the same "
        f"pretrained model of its seed and had up to {steps['search']:,} search steps; the kept fields were "
        f"trained from scratch for {steps['train']:,} steps of {steps['batch_size']:,} rows. {tuning}",
        *_section("AUC on the test rows, mean over seeds", main_table(values)),
        f"{all_fields_note(values).capitalize()}. Area: under the K-AUC curve, (AUC - .5) / .5, divided by the "
        "range of K. Overlap: Jaccard, over pairs of seeds, mean over K. Search and memory: of one search, in "
        f"epochs of pretraining and relative to its peak. {significance_note(values).capitalize()}.",
    ]
    for rival in rivals(values):
        title = f"the best, {best}" if rival == "best" else rival
        parts += _section(f"Differences to {title}", differences_table(values, rival))
    for size in values["sizes"]:
        parts += _section(f"K = {size}", size_table(values, size))
    parts += _section("Cost of a search", cost_table(values))
    if values["kinds"]:
        kinds = "; ".join(f"{kind}: {text}" for kind, text in KINDS.items() if kind in values["kinds"])
        parts += ["## Kinds of the kept fields", f"Number of kept fields of each kind, mean over seeds. {kinds}."]
        for size in values["sizes"]:
            parts += [f"K = {size}", markdown(*kinds_table(values, size))]
    if failed := failures(values):
        parts += ["## Failed", "\n".join(f"- {escape_markdown(line)}" for line in failed)]
    parts += [f"{line.capitalize()}." for line in mixed_versions_note(values)]
    versions = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    parts += [f"Data {values['fingerprint']}; {versions}; {values['bootstrap_draws']} bootstrap draws."]
    return "\n\n".join(parts) + "\n"


def _section(title: str, table: Table) -> list[str]:
    return [f"## {escape_markdown(title)}", markdown(*table)] if table[1] else []


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    alignment = ["---"] + ["---:"] * (len(header) - 1)
    cells = [[escape_markdown(cell) for cell in row] for row in (header, *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], alignment, *cells[1:]))


def as_csv(comparison: Comparison) -> str:
    """Return one CSV row per run; lists and options are JSON, and no cell is read as a formula."""
    rows = [CSV_COLUMNS, *([row.get(name) for name in CSV_COLUMNS] for row in comparison.results)]
    return "".join(",".join(map(csv_cell, row)) + "\n" for row in rows)
