"""From a Dataset to the pruned model in one process on one device: rows a second of every stage.

    python benchmarks/gpu_path.py --rows 8000000 --batch 512 65536 --out benchmarks/results/gpu_path_h200.json

A simulated Terabyte log is read from disk, streamed to the device and trained on as a DLRM: pretraining on the
early days, a search on the next ones, gates into the weights, the dropped fields removed, the hot start, the last
day judged. Each batch size runs step by step and, on a GPU, with steps captured as a graph. Preparing kernels and
capturing is counted, as a user would feel it; ``steady`` leaves the first tenth of the steps out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import lpfs
from lpfs.train.step import make_optimizer

KEEP, LEAST = 13, 100  # fields that are kept, and steps that a stage has at the least
FIRST = 10  # one part in so many of the steps comes before the steady ones


class Clock(lpfs.Callback):
    """Notes when the steady part of a training begins."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self.first, self.device = max(1, steps // FIRST), device
        self.since, self.rows = 0.0, 0

    def after_step(self, state: lpfs.State) -> None:
        """Take the time once."""
        if state.step == self.first:
            wait(self.device)
            self.since, self.rows = time.perf_counter(), state.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, nargs="*", default=[512, 4096, 65536])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="keep the Dataset here")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu_path") as scratch:
        place = given.data or Path(scratch) / "log"
        log = lpfs.Dataset(place) if place.exists() else lpfs.simulate(place, "terabyte", rows=given.rows)
        runs = []
        for batch in given.batch:
            for graph in (False, True) if given.device.startswith("cuda") else (False,):
                runs.append(one(log, batch, given.dim, torch.device(given.device), graph))
                print(json.dumps(runs[-1]), flush=True)
    about = {
        "rows": log.rows,
        "fields": len(log.schema),
        "device": torch.cuda.get_device_name(0) if given.device.startswith("cuda") else given.device,
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "fingerprint": log.fingerprint,
    }
    given.out.write_text(json.dumps({**about, "runs": runs}, indent=1) + "\n", "utf-8")


def one(log: lpfs.Dataset, batch: int, dim: int, device: torch.device, graph: bool) -> dict[str, Any]:
    """Go the whole way once."""
    days = len(log.days())
    early, search, last = log.split(days=(days * 18 // 24, days * 23 // 24))
    torch.manual_seed(0)
    model = lpfs.make_model("dlrm", log.schema, dim=dim).to(device)
    how = lpfs.Training(optimizer="adagrad", lr=0.02, graph=graph, check_every=50, quiet=True)
    optimizer = make_optimizer(how, model.parameters())
    found: dict[str, Any] = {"batch": batch, "graph": graph, "seconds": {}, "rows_a_second": {}, "steady": {}}

    def timed(name: str, part: lpfs.Dataset, act: Any, fields: Any = None) -> None:
        steps = max(LEAST, part.rows // batch)
        clock = Clock(steps, device)
        wait(device)
        begin = time.perf_counter()
        act(part.stream(batch, fields=fields, device=device), clock, replace(how, steps=steps))
        wait(device)
        end = time.perf_counter()
        found["seconds"][name] = round(end - begin, 3)
        found["rows_a_second"][name] = round(steps * batch / (end - begin))
        if clock.since:
            found["steady"][name] = round((steps * batch - clock.rows) / (end - clock.since))

    def pretrain(stream: lpfs.Stream, clock: Clock, config: lpfs.Training) -> None:
        lpfs.fit(model, stream, optimizer, config=replace(config, lr=None), callbacks=[clock])

    def look(stream: lpfs.Stream, clock: Clock, config: lpfs.Training) -> None:
        lpfs.search(model, stream, keep=KEEP, optimizer=optimizer, steps=config.steps, config=config)

    def go_on(stream: lpfs.Stream, clock: Clock, config: lpfs.Training) -> None:
        assert isinstance(pruned.optimizer, torch.optim.Optimizer)
        lpfs.fit(small, stream, pruned.optimizer, config=replace(config, lr=None), callbacks=[clock])

    timed("pretrain", early, pretrain)
    timed("search", search, look)
    gated = lpfs.evaluate(model, last.stream(8192, device=device)).auc
    begin = time.perf_counter()
    selection = lpfs.absorb(model, optimizer)
    proof = next(iter(last.stream(4096, device=device)))
    pruned = lpfs.prune(model, selection, batch=proof, optimizer=optimizer, cut=True)
    wait(device)
    found["seconds"]["absorb and prune"] = round(time.perf_counter() - begin, 3)
    small = pruned.model
    fields = read_by(small)
    after = lpfs.evaluate(small, last.stream(8192, fields=fields, device=device)).auc
    timed("hot start", search, go_on, fields)
    hot = lpfs.evaluate(small, last.stream(8192, fields=fields, device=device)).auc
    found["auc"] = {"gated": gated, "pruned": after, "hot_start": hot}
    found["max_logit_change"] = pruned.certificate.max_logit_change
    found["kept"] = list(selection.kept)
    return found


def read_by(model: Any) -> tuple[str, ...]:
    """Return the fields that a model of ours reads."""
    found: tuple[str, ...] = model.reads.names
    return found


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
