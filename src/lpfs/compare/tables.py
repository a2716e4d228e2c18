"""The comparison as tables of text, and the short form that the terminal gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpfs.compare.store import Record
from lpfs.compare.summary import OURS, Comparison
from lpfs.compare.truth import KINDS, TRUE
from lpfs.pipeline.tell import Teller

Table = tuple[list[str], list[list[str]]]
NOISE = (
    "ahead, behind: beyond the 95 % intervals over seeds and over test rows together; level: within noise; "
    "not corrected for the number of comparisons"
)

ONE_SEED = "with one seed the luck of the training is not known: no difference can be said to be beyond noise"


def show(found: Comparison, tell: Teller) -> None:
    """Print what matters, and where the rest is."""
    values, count = found.values, len(found.values["seeds"])
    tell.say("")
    seeds = "one seed" if count == 1 else f"mean of {count} seeds"
    tell.table(f"AUC on the test rows of K fields trained from scratch, {seeds}", *main_table(values))
    tell.say(f"  {all_told(values)}")
    tell.say("  area: under the K-AUC curve; search: in epochs of pretraining; memory: relative to pretraining")
    tell.say(f"  {NOISE if count > 1 else ONE_SEED}")
    for line in [*failures(values), *mixed(values)]:
        tell.say(f"  {line}")
    true = sum(number for kind, number in values["kinds"].items() if kind in TRUE)
    if true and values["sizes"]:
        size = min(values["sizes"], key=lambda each: (abs(each - true), each))
        tell.table(f"What is picked where {size} of {values['fields']} are kept", *picks_table(values, size))
    tell.say(f"  {found.folder}: comparison.md, comparison.json, results.csv")


def main_table(values: Record) -> Table:
    """Return a row a method: area, AUC of every K, overlap, cost, and the difference to the best."""
    best, sizes = values["best"], values["sizes"]
    rivals = ["best"] + ([OURS] if OURS in values["methods"] and best != OURS else [])
    header = ["method", "area", *(f"K={size}" for size in sizes), "overlap", "search", "memory"]
    header += [f"to {OURS if name == OURS or best == OURS else 'the best'}" for name in rivals]
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


def all_told(values: Record) -> str:
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
    rivals = ["best"] + ([OURS] if OURS in values["methods"] and values["best"] != OURS else [])
    to = [f"logloss to {OURS if name == OURS or values['best'] == OURS else 'the best'}" for name in rivals]
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


def mixed(values: Record) -> list[str]:
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
