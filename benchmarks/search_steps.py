"""Milliseconds of a step of every method's search on a GPU: eager, and captured as a CUDA graph.

    python benchmarks/search_steps.py [--methods shufflegate stg …] [--steps 300] [--batch 128] [--out FILE]

The model is the default, an MLP 256-128-1 on embeddings of dim 16, of 40 fields; batches are on the GPU. Every method
searches from the same pretrained model, once eager and once captured, with the same random numbers; only steps after
the warm-up are timed. Gates and masks are trained on other batches than the weights, so that a step has two passes. The
state is recorded every tenth step, as in a search of 2,000 steps. ``same_fields`` is how many of the kept fields are
the same: rounding, which Adagrad amplifies, makes the difference. ``captured_ms`` is null, with the reason, for a
method whose steps cannot be captured.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fleet import SCHEMA, make_batches

from lpfs.errors import InputError
from lpfs.methods import base
from lpfs.methods.base import SearchCost
from lpfs.methods.registry import make_method
from lpfs.methods.search import search
from lpfs.models import make_model
from lpfs.train.callbacks import State
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.step import make_optimizer

METHODS = [
    *("lpfs++", "lpfs", "shufflegate", "leap", "fairfs", "autofield", "adafs", "optfs", "fscd", "stg"),
    *("hard_concrete", "variational_dropout", "cold_se", "group_lasso", "umec", "lassonet", "subset_elimination"),
]
PRETRAINING_STEPS = 100


class Clock:
    """Seconds between the warm-up and the last step of a search."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.start, self.end = warmup, 0.0, 0.0

    def after_step(self, state: State) -> None:
        if state.step == self.warmup or state.step == state.steps:
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.start, self.end = (now, now) if state.step == self.warmup else (self.start, now)


def measure(args: argparse.Namespace, method: str, graph: bool, pretrained: Any, rows: dict[str, Any]) -> Any:
    """Return the milliseconds per step of a search, and the fields that it keeps."""
    model, optimizer = copy.deepcopy(pretrained)
    clock, count = Clock(args.warmup), SearchCost.after_step

    def count_and_time(cost: SearchCost, state: State) -> None:
        count(cost, state)
        clock.after_step(state)

    config = Training(quiet=True, graph=graph, check_every=50, log_every=10**6)
    records = patch.object(base, "HISTORY_RECORDS", args.steps // 10)
    with records, patch.object(SearchCost, "after_step", count_and_time):
        found = search(model, method=method, keep=8, steps=args.steps, optimizer=optimizer, config=config, **rows)
    return 1e3 * (clock.end - clock.start) / (args.steps - args.warmup), set(found.kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=60)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = make_model("mlp", SCHEMA).to(args.device)
    optimizer = make_optimizer(Training(), model.parameters())
    stream, holdout, valid = (make_batches(args.batch, seed, args.device) for seed in range(3))
    fit(model, stream, optimizer, steps=PRETRAINING_STEPS, quiet=True)
    rows = {"stream": stream, "holdout": holdout, "valid": valid}
    results = []
    for method in args.methods:
        eager, kept = measure(args, method, False, (model, optimizer), rows)
        row: dict[str, Any] = {"method": method, "eager_ms": round(eager, 3), "captured_ms": None}
        row["capturable"] = make_method(method).cuda_graph
        try:
            captured, same = measure(args, method, True, (model, optimizer), rows)
            row |= {"captured_ms": round(captured, 3), "times_faster": round(eager / captured, 1)}
            row["same_fields"] = f"{len(kept & same)} of {len(kept)}"
        except (InputError, RuntimeError) as error:  # a method whose steps cannot be captured
            row["reason"] = str(error).partition("\n")[0]
        results.append(row)
        print(json.dumps(row), flush=True)
    report = {
        "command": shlex.join(["python", "benchmarks/search_steps.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "torch": torch.__version__,
        **{"fields": len(SCHEMA), "batch": args.batch, "steps": args.steps, "warmup": args.warmup},
        "results": results,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
