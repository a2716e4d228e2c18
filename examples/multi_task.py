"""Several labels at once: which fields do click, like, share and purchase need together?

    python examples/multi_task.py

The log is simulated after the paper's industrial one: 40 fields of the user, 8 of the item, 16 of both, 5 of
numbers, and besides the click five further labels. One model with a head a label is trained, one gate a field
serves them all.
A log of your own says which columns are labels when it is prepared:

    lpfs select clicks.parquet --label click --task like --task purchase --model user_item --keep 20 --out run
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import lpfs


def main(rows: int = 30_000, keep: int = 20) -> None:
    started = time.perf_counter()
    place = Path(tempfile.mkdtemp())
    log = lpfs.simulate(place / "log", "industrial-small", rows=rows)
    print(f"{log.rows:,} rows, {len(log.schema)} fields, labels {log.schema.label}, {', '.join(log.schema.tasks)}")

    run = lpfs.select(
        log,
        place / "run",
        model="user_item",  # every user field times every item field, shared layers, a head a label
        keep=keep,
        model_options={"dim": 4, "hidden": [32]},
        pretrain_steps=400,
        search_steps=400,
        finish="retrain",
        quiet=True,
    )

    print(f"kept {len(run.kept)}: {' '.join(run.kept)}")
    groups = {name: log.schema[name].group for name in run.kept if name in log.schema.names}
    counts = {group: list(groups.values()).count(group) for group in sorted(set(groups.values()))}
    print(f"by group: {', '.join(f'{count} {group}' for group, count in counts.items())}")
    before, after = run.metrics["all_fields"]["tasks"], run.metrics["retrained"]["tasks"]
    print("AUC          all fields   kept, from scratch")
    for name in before:
        print(f"  {name:<12} {before[name]['auc']:.4f}   {after[name]['auc']:.4f}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/select.md")


if __name__ == "__main__":
    main()
