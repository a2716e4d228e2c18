"""Which crosses does a model need? Gates on every field and on every product of two fields.

    python examples/cross_features.py

Wherever two fields count only together, their product is a feature of its own. DLRMCross feeds all of them to its
top, as the paper does with 378; each has a gate. The log is simulated: two pairs of its fields matter only
together, and the gates are not told which. The same on the command line:

    lpfs select data/log --level cross --keep 40 --out run
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import lpfs


def main(rows: int = 30_000, keep: int = 40) -> None:
    started = time.perf_counter()
    place = Path(tempfile.mkdtemp())
    log = lpfs.simulate(place / "log", "small", rows=rows)
    truth = log.attached("truth.json")

    run = lpfs.select(
        log,
        place / "run",
        level="cross",
        keep=keep,
        model_options={"dim": 4, "hidden": [32]},
        pretrain_steps=600,
        search_steps=600,
        finish="retrain",
        quiet=True,
    )

    parts, crosses = len(run.selection.names), [name for name in run.kept if "*" in name]
    alone = [name for name in run.kept if "*" not in name]
    print(f"{parts} gates: {len(log.schema)} fields and their products; {len(run.kept)} are left")
    print(f"  {len(alone):>3} fields: {' '.join(alone)}")
    print(f"  {len(crosses):>3} crosses: {' '.join(crosses)}")
    pairs = [f"{each['fields'][0]}*{each['fields'][1]}" for each in truth["pairs"]]
    print(f"matter only together: {', '.join(pairs)}; found {len(set(pairs) & set(crosses))} of {len(pairs)}")
    for name, each in run.metrics.items():
        print(f"  {name:<12} AUC {each['auc']:.4f}   log loss {each['logloss']:.4f}")
    read = lpfs.load(run.folder / "model").reads.names
    print(f"a field stays while one of its crosses does: the model reads {len(read)} of {len(log.schema)} fields")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/models.md")


if __name__ == "__main__":
    main()
