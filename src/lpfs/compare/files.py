"""The comparison as files: all tables as Markdown, a row a run as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.compare.summary import OURS, Comparison
from lpfs.compare.tables import NOISE, ONE_SEED, Table, all_told, cost_table, differences_table, failures, main_table, mixed, picks_table, size_table
from lpfs.compare.truth import KINDS

COLUMNS = (
    *("method", "keep", "seed", "status", "auc", "logloss", "validation_auc", "validation_logloss", "count"),
    *("search_seconds", "search_memory", "train_seconds", "tried", "options"),
    *("recall", "false_picks", "reason", "kept"),
)


def as_markdown(found: Comparison) -> str:
    """Return the whole comparison as Markdown."""
    values = found.values
    rows = {name: each["rows"] for name, each in values["periods"].items()}
    tuned = values["plan"]["tune"]
    recipe = values["recipe"]
    tuning = (
        f"Each method was tried with up to {tuned} settings on the validation rows." if tuned else "No tuning."
    )
    several = len(values["seeds"]) > 1
    said = NOISE if several else ONE_SEED
    parts = [
        "# Comparison",
        f"{values['fields']} fields, K = {', '.join(map(str, values['sizes']))}, seeds "
        f"{', '.join(map(str, values['seeds']))}. Rows: {rows['early']:,} to pretrain on, {rows['search']:,} to "
        f"search on, {rows['valid']:,} to choose on, {rows['test']:,} to judge. Every method began with the same "
        f"pretrained model of its seed and had up to {recipe['search']:,} steps of search; what it kept was "
        f"trained from scratch for {recipe['train']:,} steps of {recipe['batch_size']:,} rows. {tuning}",
        *part("AUC on the test rows, mean over seeds", main_table(values)),
        f"{all_told(values).capitalize()}. Area: under the K-AUC curve, (AUC - .5) / .5, normalised to the range "
        "of K. Overlap: Jaccard, over pairs of seeds, mean over K. Search and memory: of one search, in epochs of "
        f"pretraining and relative to its peak. {said}.",
    ]
    if values["best"] is not None:
        parts += part(f"Differences to the best, {values['best']}", differences_table(values, "best"))
    if OURS in values["methods"] and values["best"] != OURS:
        parts += part(f"Differences to {OURS}", differences_table(values, OURS))
    for size in values["sizes"]:
        parts += part(f"K = {size}", size_table(values, size))
    parts += part("Cost of a search", cost_table(values))
    if values["kinds"]:
        told = [f"{kind}: {text}" for kind, text in KINDS.items() if kind in values["kinds"]]
        parts += ["## What is picked", f"Fields kept of each kind, mean over seeds. {'; '.join(told)}."]
        for size in values["sizes"]:
            parts += [f"K = {size}", markdown(*picks_table(values, size))]
    failed = failures(values)
    if failed:
        parts += ["## Failed", "\n".join(f"- {escaped(line)}" for line in failed)]
    parts += [f"{line.capitalize()}." for line in mixed(values)]
    made = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    parts += [f"Data {values['fingerprint']}; {made}; {values['draws']} draws of the test rows."]
    return "\n\n".join(parts) + "\n"


def part(title: str, table: Table) -> list[str]:
    """Return a table under its title; nothing where it has no rows."""
    return [f"## {escaped(title)}", markdown(*table)] if table[1] else []


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(
        f"| {' | '.join(cell if number == 1 else escaped(cell) for cell in line)} |"
        for number, line in enumerate(lines)
    )


def escaped(text: str) -> str:
    r"""Return text that says in Markdown, and in HTML made of it, what it says here.

    >>> escaped("a|b <i>")
    'a\\|b &lt;i&gt;'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`|[]":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def as_csv(found: Comparison) -> str:
    """Return a row a run; lists and settings are JSON, and no text is taken for a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for each in found.results:
        writer.writerow([cell(each.get(name)) for name in COLUMNS])
    return out.getvalue()


def cell(value: Any) -> Any:
    """Return a value for a table: text that a spreadsheet would take for a formula gets a ' before it.

    >>> cell("=1+1"), cell(["=1+1"]), cell(-0.5)
    ("'=1+1", '["=1+1"]', -0.5)
    """
    if value is None:
        return ""
    if isinstance(value, list | Mapping):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value
