"""Which fields the searches of several methods keep on a simulated log, without training the kept fields from scratch.

    python benchmarks/search_recall.py --methods lpfs++,group_lasso,umec,lassonet,random --keep 4 7 13 --seeds 2

A quick check of a set-up: for every method, K and seed the number of kept fields by role, and the share of the variance
of the true logit on the last day that the kept fields carry (a pair counts if both of its fields are kept, a noisy copy
with its likeness if the original is dropped). A method whose ranking serves every K is searched with once per seed. The
result goes to benchmarks/results/search_recall.json. ``lpfs compare`` says what the fields are worth.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs._console import Console
from lpfs.methods.base import top_k
from lpfs.pipeline import stages
from lpfs.pipeline.plan import build_plan, check_settings
from lpfs.pipeline.results import versions
from lpfs.pipeline.settings import Settings
from lpfs.train.checkpoint import seed_all

RESULT = Path(__file__).parent / "results" / "search_recall.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="terabyte")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--log-seed", type=int, default=0)
    parser.add_argument("--methods", default="lpfs++,group_lasso,umec,lassonet,random")
    parser.add_argument("--keep", type=int, nargs="+", default=[4, 7, 13])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    command = shlex.join(["python", "benchmarks/search_recall.py", *sys.argv[1:]])
    result: dict[str, Any] = {"command": command, "versions": versions(), "searches": []}
    with tempfile.TemporaryDirectory() as folder:
        log = lpfs.simulate(Path(folder) / "log", options.preset, rows=options.rows, seed=options.log_seed)
        truth = log.attached("truth.json")
        settings, _ = check_settings(Settings())
        base = build_plan(settings, log, Path(folder) / "run", Console(quiet=True))
        for seed in range(options.seeds):
            trained = stages.pretrain(base.for_search(Path(folder) / f"seed{seed}", seed), seed)
            for method in options.methods.split(","):
                for record in search(base, trained, method, seed, options.keep, Path(folder)):
                    facts = {"roles": roles(truth, record["kept"]), "share": round(share(truth, record["kept"]), 4)}
                    result["searches"].append({**record, **facts})
                    print(json.dumps({**record, **facts}), flush=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def search(base: Any, trained: Any, method: str, seed: int, sizes: Sequence[int], folder: Path) -> list[dict[str, Any]]:
    """Return a record per K: the kept fields and what the search took."""
    records: list[dict[str, Any]] = []
    scores: dict[str, float] = {}
    steps = 0
    for size in sizes:
        about = {"method": method, "seed": seed, "keep": size}
        plan = base.for_search(folder / f"{method}-{seed}-{size}", seed, method=method, keep=size)
        if records and not plan.method.search_per_k:
            records.append({**about, "kept": sorted(top_k(scores, size)), "steps": steps, "cpu_seconds": 0.0})
            continue
        seed_all(seed)
        start = time.process_time()
        selection = stages.search_fields(plan, copy.deepcopy(trained), seed)[2]
        seconds = round(time.process_time() - start, 1)
        scores, steps = selection.made.get("scores", {}), selection.made["steps"]
        records.append({**about, "kept": sorted(selection.kept), "steps": steps, "cpu_seconds": seconds})
    return records


def roles(truth: dict[str, Any], kept: Sequence[str]) -> dict[str, int]:
    """Return how many fields of each role are kept."""
    by_name = {field["name"]: field["role"] for field in truth["fields"]}
    return dict(Counter(by_name[name] for name in kept))


def share(truth: dict[str, Any], kept: Sequence[str]) -> float:
    """Return the share of the variance of the true logit on the last day that some fields carry."""
    fields, chosen = {field["name"]: field for field in truth["fields"]}, set(kept)
    copies = {field["copy_of"] for field in truth["fields"] if field["name"] in chosen and field["copy_of"]}
    likeness = {spec["source"]: spec["likeness"] for spec in truth["plan"]["specs"] if spec["role"] == "copy"}
    total = found = 0.0
    for name, field in fields.items():
        if not field["true"] or (field["role"] == "pair" and name > field["pair_with"]):
            continue
        variance = (field["effect"] * field["strength_by_day"][-1]) ** 2
        total += variance
        if field["role"] == "pair":
            found += variance * ({name, field["pair_with"]} <= chosen)
        else:
            found += variance * (1.0 if name in chosen else likeness[name] if name in copies else 0.0)
    return found / total


if __name__ == "__main__":
    main()
