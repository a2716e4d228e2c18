"""Differences to LPFS++ over the logs of benchmarks/logs.json, with intervals that include the log or split.

    python benchmarks/compare_summary.py --out benchmarks/results/compare_summary.json

One value per log, family and K is the mean over seeds of the difference in test AUC. Student's interval is over the
logs or splits of a family, so that it includes the split; families with fewer than two logs have none. p values are
corrected by Holm over all rivals, families and K; a rival is ahead or behind if its corrected p value is below 0.05.
``overall`` does the same over all logs, of whatever family, corrected over all rivals and K; ``ranks`` are mean ranks
by the area under the K-AUC curve. Unseen logs and splits of tables that were used in development are kept apart in
all of it. ``--tuned`` reads the tuned comparisons.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from compare_tables import RESULTS, BenchmarkLog, load_logs
from scipy import stats

REFERENCE = "lpfs++"
NOT_RIVALS = (REFERENCE, "all", "oracle")
SHARES = ("N/8", "N/4", "N/2")
LEVEL = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file; default: print")
    options = parser.parse_args()
    suffix = "-tuned" if options.tuned else ""
    values = summary(options.results, suffix)
    text = json.dumps(values, indent=1) + "\n"
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, "utf-8")


def summary(results: Path, suffix: str = "") -> dict[str, Any]:
    """Return everything that is written."""
    tables = {"auc": mean_auc(results, suffix), "ranks": mean_ranks(results, suffix)}
    return {**summarize(read_differences(results, suffix)), **tables}


def read_comparisons(results: Path, suffix: str = "") -> list[tuple[BenchmarkLog, dict[str, Any]]]:
    """Return the logs of the list that have results, with their comparison.json."""
    paths = {log: results / f"{log.name}{suffix}" / "comparison.json" for log in load_logs().values()}
    return [(log, json.loads(path.read_text("utf-8"))) for log, path in paths.items() if path.exists()]


def mean_auc(results: Path, suffix: str = "") -> list[dict[str, Any]]:
    """Return the AUC of LPFS++ for each K and that of all fields, mean over logs of the means over seeds."""
    rows = []
    for unseen in (True, False):
        comparisons = [comparison for log, comparison in read_comparisons(results, suffix) if log.unseen is unseen]
        if not comparisons:
            continue
        for number, share in enumerate(SHARES):
            sizes = [
                comparison["methods"][REFERENCE]["sizes"][str(comparison["sizes"][number])]
                for comparison in comparisons
            ]
            rows.append({"unseen": unseen, "keep": share, "auc": mean(values["auc"]["value"] for values in sizes)})
        every = mean(comparison["all_fields"]["auc"]["value"] for comparison in comparisons)
        rows.append({"unseen": unseen, "keep": "N", "auc": every})
    return rows


def read_differences(results: Path, suffix: str = "") -> list[dict[str, Any]]:
    """Return a record per log, method and K: the mean over seeds of its AUC minus that of LPFS++."""
    records = []
    for log, comparison in read_comparisons(results, suffix):
        reference = comparison["methods"][REFERENCE]["sizes"]
        for method, summary in comparison["methods"].items():
            if method in NOT_RIVALS:
                continue
            for share, size in zip(SHARES, map(str, comparison["sizes"]), strict=True):
                ours, theirs = (values.get(size, {}).get("auc") for values in (reference, summary["sizes"]))
                if ours is None or theirs is None:
                    continue
                seeds = sorted(set(ours["by_seed"]) & set(theirs["by_seed"]))
                difference = mean(theirs["by_seed"][seed] - ours["by_seed"][seed] for seed in seeds)
                about = {"family": log.family, "unseen": log.unseen, "log": log.name, "seeds": len(seeds)}
                records.append({**about, "method": method, "keep": share, "difference": difference})
    return records


def summarize(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return per family, K and rival the mean difference, its interval over logs, and Holm's corrected p value."""
    return {
        "reference": REFERENCE,
        "level": LEVEL,
        "overall": tested_rows([{**record, "family": "all"} for record in records]),
        "differences": tested_rows(records),
    }


def tested_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each family, K and rival: mean difference, interval over logs, corrected p value, verdict."""
    groups: dict[tuple[bool, str, str, str], list[float]] = {}
    for record in records:
        key = (record["unseen"], record["family"], record["keep"], record["method"])
        groups.setdefault(key, []).append(record["difference"])
    rows = []
    for (unseen, family, keep, method), values in sorted(groups.items(), key=lambda item: (not item[0][0], item[0])):
        row: dict[str, Any] = {"unseen": unseen, "family": family, "keep": keep, "method": method, "logs": len(values)}
        row["difference"] = mean(values)
        if len(values) > 1:
            error = float(np.std(values, ddof=1)) / len(values) ** 0.5
            width = float(stats.t.ppf(0.975, len(values) - 1)) * error
            row |= {"low": row["difference"] - width, "high": row["difference"] + width}
            row["p"] = float(2 * stats.t.sf(abs(row["difference"]) / max(error, 1e-12), len(values) - 1))
        rows.append(row)
    for unseen in (True, False):
        tested = [row for row in rows if row["unseen"] is unseen and "p" in row]
        for row, corrected in zip(tested, holm([row["p"] for row in tested]), strict=True):
            row["corrected_p"] = corrected
            ahead = "ahead" if row["difference"] > 0 else "behind"
            row["verdict"] = ahead if corrected < LEVEL else "level"
    return rows


def mean_ranks(results: Path, suffix: str = "") -> list[dict[str, Any]]:
    """Return the mean rank of every method by area over the logs on which it ran, best first."""
    rows = []
    for unseen in (True, False):
        comparisons = [comparison for log, comparison in read_comparisons(results, suffix) if log.unseen is unseen]
        ranks: dict[str, list[int]] = {}
        for comparison in comparisons:
            for rank, method in enumerate(ranked_methods(comparison), 1):
                ranks.setdefault(method, []).append(rank)
        for method, values in sorted(ranks.items(), key=lambda item: mean(item[1])):
            rows.append({"unseen": unseen, "method": method, "rank": mean(values), "logs": len(values)})
    return rows


def ranked_methods(comparison: dict[str, Any]) -> list[str]:
    """Return the methods of a comparison by the area under their curve, largest first."""
    areas = {method: values["area"] for method, values in comparison["methods"].items() if values["area"] is not None}
    ranked = [method for method in areas if method not in comparison["unranked"]]
    return sorted(ranked, key=lambda method: -areas[method]["value"])


def holm(values: list[float]) -> list[float]:
    """Return the p values corrected by Holm: in ascending order times the number of those that are left.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


if __name__ == "__main__":
    main()
