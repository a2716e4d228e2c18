"""The main job on data it makes itself: which of 31 fields does a click model need?  (make demo)

A log of clicks is simulated, so that the truth is known: 15 fields matter, two pairs of them only together; others
are noisy copies of these, or noise. ``lpfs.select`` does not know which. It pretrains a model on the first days,
searches on the next, removes what it dropped, trains the kept fields from scratch, and judges it on the last day.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import lpfs

parser = argparse.ArgumentParser(description="The main job on simulated clicks.")
parser.add_argument("--rows", type=int, default=80_000)
parser.add_argument("--keep", type=int, default=15)
parser.add_argument("--out", type=Path, help="directory of the log and the run; by default a new temporary one")
given = parser.parse_args()


def main() -> None:
    out = given.out or Path(tempfile.mkdtemp(prefix="lpfs-demo-"))
    log = lpfs.simulate(out / "log", "small", rows=given.rows, replace=True)
    truth = log.attached("truth.json")
    print(f"simulated {log.rows:,} rows, {len(log.schema)} fields, {len(truth['true'])} of them true")

    answer = lpfs.select(log, out / "run", keep=given.keep, replace=True)

    # truth against selection: a noisy copy may stand for the field it copies
    roles = {each["name"]: each["role"] for each in truth["fields"]}
    kinds: dict[str, list[str]] = {}
    for name in answer.kept:
        kinds.setdefault("true" if name in truth["true"] else roles[name], []).append(name)
    print("\nkept, by what the simulator knows:")
    for kind, names in sorted(kinds.items(), key=lambda each: -len(each[1])):
        print(f"  {kind:<10} {len(names):>3}: {', '.join(names)}")
    missed = [name for name in truth["true"] if name not in answer.kept]
    print(f"  true fields missed: {', '.join(missed) or 'none'}")

    # the model that was left is loaded from its folder and predicts the same, to the last bit
    loaded = lpfs.load(answer.folder / "model")
    batch = next(iter(log.stream(1000, fields=loaded.reads.names)))
    with torch.no_grad():
        same = torch.equal(loaded(batch), answer.model.cpu().eval()(batch))
    print(f"\nloaded again from {answer.folder / 'model'}: predictions equal to the last bit: {same}")
    zeros = answer.certificates["zeros"]["max_logit_change"]
    print(f"removing {len(answer.selection.dropped)} fields moved the logits by {zeros} (zeros fed in their place)")
    print(f"\nopen {answer.folder / 'report.html'} in a browser. Next: docs/getting-started.md")


if __name__ == "__main__":
    main()
