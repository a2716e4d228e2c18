"""A table of clicks: which columns does it need? One call in; the answer, the proof and the smaller model out.

    python examples/table.py

The log is simulated, so that the truth is known: of 31 columns 15 say something about the click, some of them only
in pairs; the others are noisy copies of these, relatives of them, and noise. The same on the command line:

    lpfs simulate --rows 20000 --format csv --out log
    lpfs select log/log --label click --time day --keep 12 --min-count 20 --out run
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import lpfs
from lpfs.pipeline.results import Outcome


def main(rows: int = 20_000, keep: int = 12) -> Outcome:
    started = time.perf_counter()
    place = Path(tempfile.mkdtemp())

    files = lpfs.simulate(place / "log", "small", rows=rows, format="csv")
    print(f"{rows:,} rows in {len(files)} files, {files[0].name} to {files[-1].name}")

    run = lpfs.select(
        files,
        place / "run",
        label="click",
        time="day",  # early days pretrain, the next ones search, the last one judges
        keep=keep,
        prepare={"min_count": 20},  # rarer values share an id: nothing can be learned of them but by heart
        model_options={"dim": 8, "hidden": [32]},  # smaller and shorter than by default, to be quick
        pretrain_steps=500,
        search_steps=500,
        quiet=True,
    )

    print(f"\nkept {len(run.kept)} of {len(run.selection.names)}: {' '.join(run.kept)}")
    true = set(json.loads((place / "log" / "truth.json").read_text())["true"])
    print(f"{len(true & set(run.kept))} of them are true fields, of which there are {len(true)}")
    for name, each in run.metrics.items():
        print(f"  {name:<12} AUC {each['auc']:.4f}   log loss {each['logloss']:.4f}")
    print(f"dropping the others moved no prediction by more than {run.max_logit_change:.1g}")
    before, after = (run.savings[name]["parameters"] for name in ("all_fields", "kept"))
    print(f"parameters {before:,} -> {after:,}")

    model = lpfs.load(run.folder / "model")  # what you would deploy
    print(f"{run.folder / 'model'} ({run.chosen}) reads {len(model.reads)} columns")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/select.md")
    return run


if __name__ == "__main__":
    main()
