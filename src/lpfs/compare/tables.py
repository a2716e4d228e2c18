"""The comparison as tables of text, and the short form that the terminal gets.

The comparison as files: all tables as Markdown, a row a run as CSV.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lpfs.compare.run_dir import KINDS, TRUE_KINDS, Record
from lpfs.compare.summary import REFERENCE_METHOD, Comparison
from lpfs.pipeline.tell import Console

Table = tuple[list[str], list[list[str]]]
SIGNIFICANCE_NOTE = (
    "ahead, behind: beyond the 95 % intervals over seeds and over test rows together; level: within noise; "
    "not corrected for the number of comparisons"
)

ONE_SEED = "with one seed the luck of the training is not known: no difference can be said to be beyond noise"


def print_comparison(found: Comparison, tell: Console) -> None:
    """Print what matters, and where the rest is."""
    values, count = found.values, len(found.values["seeds"])
    tell.message("")
    seeds = "one seed" if count == 1 else f"mean of {count} seeds"
    tell.table(f"AUC on the test rows of K fields trained from scratch, {seeds}", *main_table(values))
    tell.message(f"  {all_fields_note(values)}")
    tell.message(
        "  area: under the K-AUC curve; search: in epochs of pretraining; memory: relative to pretraining"
    )
    tell.message(f"  {SIGNIFICANCE_NOTE if count > 1 else ONE_SEED}")
    for line in [*failures(values), *mixed_versions_note(values)]:
        tell.message(f"  {line}")
    true = sum(number for kind, number in values["kinds"].items() if kind in TRUE_KINDS)
    if true and values["sizes"]:
        size = min(values["sizes"], key=lambda each: (abs(each - true), each))
        tell.table(f"What is picked where {size} of {values['fields']} are kept", *picks_table(values, size))
    tell.message(f"  {found.folder}: comparison.md, comparison.json, results.csv")


def main_table(values: Record) -> Table:
    """Return a row a method: area, AUC of every K, overlap, cost, and the difference to the best."""
    best, sizes = values["best"], values["sizes"]
    rivals = ["best"] + (
        [REFERENCE_METHOD] if REFERENCE_METHOD in values["methods"] and best != REFERENCE_METHOD else []
    )
    header = ["method", "area", *(f"K={size}" for size in sizes), "overlap", "search", "memory"]
    header += [
        f"to {REFERENCE_METHOD if name == REFERENCE_METHOD or best == REFERENCE_METHOD else 'the best'}"
        for name in rivals
    ]
    rows = []
    for name, each in values["methods"].items():
        aucs = [number(each["sizes"].get(str(size), {}).get("auc"), 5) for size in sizes]
        search = each["search"]
        cost = f"{plain(search['epochs'], 2)}{' once' if search['once'] else ''}"
        row = [
            name,
            number(each["area"], 4),
            *aucs,
            plain(each["overlap"], 2),
            cost,
            plain(search["memory_ratio"], 2),
        ]
        rows.append(row + [difference(each["against"].get(rival), name == best) for rival in rivals])
    return header, rows


def all_fields_note(values: Record) -> str:
    """Say what all fields give, trained in the same way, and who is listed last, being no rival."""
    told = f"all {values['fields']} fields: {number(values['all_fields']['auc'], 5)}"
    below = [name for name in values["methods"] if name in values["aside"]]
    return f"{told}; no rivals, listed last: {' and '.join(below)}" if below else told


def differences_table(values: Record, rival: str) -> Table:
    """Return the differences to a method: area and every K, with both intervals."""
    header = ["method", "of", "difference", "95 % over seeds", "95 % over rows", "beyond noise"]
    rows = []
    for name, each in values["methods"].items():
        found = {"area": each["against"].get(rival)}
        found |= {f"K={size}": of["against"].get(rival) for size, of in each["sizes"].items()}
        for what, value in found.items():
            if value is not None:
                ends = [interval(value["seeds"]), interval(value["rows"])]
                rows.append([name, what, f"{value['value']:+.5f}", *ends, value["verdict"]])
    return header, rows


def picks_table(values: Record, size: int) -> Table:
    """Return how many fields of each kind a method picks, on average over seeds."""
    kinds = [kind for kind in KINDS if kind in values["kinds"]]
    header = ["method", *(f"{kind} (of {values['kinds'][kind]})" for kind in kinds), "recall", "false picks"]
    rows = []
    for name, each in values["methods"].items():
        own = each["sizes"].get(str(size), {})
        if "picks" in own:
            counts = [f"{own['picks'][kind]:.1f}" for kind in kinds]
            rows.append([name, *counts, f"{own['recall']:.2f}", f"{own['false_picks']:.1f}"])
    return header, rows


def size_table(values: Record, size: int) -> Table:
    """Return AUC and logloss with their intervals, validation AUC and overlap of one K."""
    ends = ["95 % over seeds", "95 % over rows"]
    rivals = ["best"] + (
        [REFERENCE_METHOD] if REFERENCE_METHOD in values["methods"] and values["best"] != REFERENCE_METHOD else []
    )
    to = [
        f"logloss to {REFERENCE_METHOD if REFERENCE_METHOD in (name, values['best']) else 'the best'}"
        for name in rivals
    ]
    header = ["method", "AUC", *ends, "logloss", *ends, *to, "validation AUC", "overlap", "fields"]
    rows = []
    for name, each in values["methods"].items():
        own = each["sizes"].get(str(size))
        if own is not None:
            cells = [name]
            for told in (own["auc"], own["logloss"]):
                cells += [number(told, 5), interval(told["seeds"]), interval(told["rows"])]
            cells += [difference(own["logloss_against"].get(rival), name == values["best"]) for rival in rivals]
            rest = [plain(own["validation_auc"], 5), plain(own["overlap"], 2), plain(own["count"], 1)]
            rows.append([*cells, *rest])
    return header, rows


def cost_table(values: Record) -> Table:
    """Return what a search costs, and with which settings it was done."""
    header = ["method", "seconds", "epochs", "memory (MB)", "to pretraining", "searches", "tried", "settings used"]
    rows = []
    for name, each in values["methods"].items():
        own = each["search"]
        memory = None if own["memory"] is None else own["memory"] / 1e6
        cells = [
            plain(own["seconds"], 2),
            plain(own["epochs"], 2),
            plain(memory, 1),
            plain(own["memory_ratio"], 2),
        ]
        used = ", ".join(f"{settings} {times}x" for settings, times in each["used"].items())
        rows.append(
            [name, *cells, "once for all K" if own["once"] else "one a K", str(each["tried"]), used or "-"]
        )
    return header, rows


def mixed_versions_note(values: Record) -> list[str]:
    """Return a note where results were made by another state of the code than these tables, or by several."""
    states, own = values["code"], values["versions"]["code"]
    if set(states) <= {own}:
        return []
    told = "; ".join(f"{digest}: {', '.join(each['search']) or '-'}" for digest, each in states.items())
    return [f"tables made by code {own}; searches by code {told}"]


def failures(values: Record) -> list[str]:
    """Return a line for every method and reason."""
    found: dict[tuple[str, str], int] = {}
    for name, each in values["methods"].items():
        for one in each["failed"]:
            found[name, one["reason"]] = found.get((name, one["reason"]), 0) + 1
    failed = [
        each
        for each in values["results"]
        if each["status"] == "failed" and each["method"] not in values["methods"]
    ]
    for one in failed:
        found[one["method"], one["reason"]] = found.get((one["method"], one["reason"]), 0) + 1
    return [
        f"failed: {name}, {times} {'run' if times == 1 else 'runs'}: {why}" for (name, why), times in found.items()
    ]


def number(found: Mapping[str, Any] | None, digits: int) -> str:
    """Return the mean of something that was told."""
    return plain(None if found is None else found["value"], digits)


def plain(value: float | None, digits: int) -> str:
    """Return a number, or a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def difference(found: Mapping[str, Any] | None, best: bool) -> str:
    """Return a difference and whether it is beyond noise."""
    if found is None:
        return "best" if best else "-"
    said = "" if found["verdict"] == "unknown" else f" {found['verdict']}"
    return f"{found['value']:+.4f}{said}"


def interval(found: Mapping[str, float] | None) -> str:
    """Return both ends of an interval."""
    return "-" if found is None else f"{found['low']:.5f} to {found['high']:.5f}"


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
    said = SIGNIFICANCE_NOTE if several else ONE_SEED
    parts = [
        "# Comparison",
        f"{values['fields']} fields, K = {', '.join(map(str, values['sizes']))}, seeds "
        f"{', '.join(map(str, values['seeds']))}. Rows: {rows['early']:,} to pretrain on, {rows['search']:,} to "
        f"search on, {rows['valid']:,} to choose on, {rows['test']:,} to judge. Every method began with the same "
        f"pretrained model of its seed and had up to {recipe['search']:,} steps of search; what it kept was "
        f"trained from scratch for {recipe['train']:,} steps of {recipe['batch_size']:,} rows. {tuning}",
        *_section("AUC on the test rows, mean over seeds", main_table(values)),
        f"{all_fields_note(values).capitalize()}. Area: under the K-AUC curve, (AUC - .5) / .5, normalised to the "
        "range "
        "of K. Overlap: Jaccard, over pairs of seeds, mean over K. Search and memory: of one search, in epochs of "
        f"pretraining and relative to its peak. {said}.",
    ]
    if values["best"] is not None:
        parts += _section(f"Differences to the best, {values['best']}", differences_table(values, "best"))
    if REFERENCE_METHOD in values["methods"] and values["best"] != REFERENCE_METHOD:
        parts += _section(f"Differences to {REFERENCE_METHOD}", differences_table(values, REFERENCE_METHOD))
    for size in values["sizes"]:
        parts += _section(f"K = {size}", size_table(values, size))
    parts += _section("Cost of a search", cost_table(values))
    if values["kinds"]:
        told = [f"{kind}: {text}" for kind, text in KINDS.items() if kind in values["kinds"]]
        parts += ["## What is picked", f"Fields kept of each kind, mean over seeds. {'; '.join(told)}."]
        for size in values["sizes"]:
            parts += [f"K = {size}", markdown(*picks_table(values, size))]
    failed = failures(values)
    if failed:
        parts += ["## Failed", "\n".join(f"- {escaped(line)}" for line in failed)]
    parts += [f"{line.capitalize()}." for line in mixed_versions_note(values)]
    made = ", ".join(f"{name} {version}" for name, version in values["versions"].items())
    parts += [f"Data {values['fingerprint']}; {made}; {values['draws']} draws of the test rows."]
    return "\n\n".join(parts) + "\n"


def _section(title: str, table: Table) -> list[str]:
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
