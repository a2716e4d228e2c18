"""Hot start against training from scratch: the AUC of both on rows that decided nothing, and the steps saved.

    python benchmarks/hot_starts.py --logs 3 --out benchmarks/results/hot_starts.json

Every log is simulated anew (another seed is another truth), ``lpfs.select`` runs on it from end to end, and its
own answer is written down: the gated and the pruned model, the hot start, the same fields trained from scratch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import lpfs

LOGS: dict[str, dict[str, Any]] = {
    "small": {"rows": 60_000, "keep": 12, "model_options": {}},
    "industrial-small": {"rows": 200_000, "keep": 17, "model_options": {"dim": 4, "hidden": [64, 32]}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=int, default=3, help="how many logs of each kind")
    parser.add_argument("--presets", nargs="*", default=list(LOGS))
    parser.add_argument("--methods", nargs="*", default=["lpfs++"])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found = []
    for preset in given.presets:
        for number in range(given.logs):
            for method in given.methods:
                found.append(one(preset, number, method))
                print(json.dumps(found[-1]), flush=True)
    print(summary(found))
    values = {"runs": found, "summary": summary(found), "torch": torch.__version__, "lpfs": lpfs.__version__}
    given.out.write_text(json.dumps(values, indent=1) + "\n", "utf-8")


def one(preset: str, number: int, method: str) -> dict[str, Any]:
    """Select on one log."""
    how = LOGS[preset]
    place = Path(tempfile.mkdtemp(prefix="hot_start"))
    try:
        log = lpfs.simulate(place / "log", preset, rows=how["rows"], seed=number)
        lpfs.select(
            log,
            place / "run",
            keep=how["keep"],
            method=method,
            seed=number,
            model_options=how["model_options"],
            quiet=True,
        )
        answer = json.loads((place / "run" / "selection.json").read_text("utf-8"))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    auc = {name: each["auc"] for name, each in answer["metrics"].items()}
    return {
        "preset": preset,
        "log": number,
        "method": method,
        "keep": how["keep"],
        "auc": auc,
        "difference": auc["hot_start"] - auc["retrained"],
        "hot_start": answer.get("hot_start"),
        "fingerprint": log.fingerprint,
    }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often the hot start is at least level, within .0005, and the mean and worst difference."""
    each = [run["difference"] for run in found]
    return {
        "runs": len(each),
        "not_below": sum(value >= -0.0005 for value in each),
        "mean": statistics.mean(each),
        "worst": min(each),
    }


if __name__ == "__main__":
    main()
