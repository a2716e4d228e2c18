"""Criteo, from the files to the report: the layout of the Terabyte log, prepared, selected from, reported.

    python examples/criteo.py                        # on simulated days in Criteo's own layout
    python examples/criteo.py --days /data/terabyte  # on the real day_0 … day_23, a day longer than this page

A line has no header: the click, 13 counts (I1 … I13) and 26 hashed categories (C1 … C26), cut by tabs. The same on
the command line, for the files you have downloaded (docs/data.md):

    lpfs prepare terabyte/ --preset criteo-terabyte --negatives 0.125 --out data/terabyte
    lpfs select data/terabyte --model dlrm --keep 15 --out run
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import lpfs

parser = argparse.ArgumentParser(description="Criteo, from the files to the report.")
parser.add_argument("--days", type=Path, help="folder of the real day_0 … day_23")
parser.add_argument("--rows", type=int, default=60_000, help="of the simulated log")
parser.add_argument("--keep", type=int, default=15)
given = parser.parse_args()


def main() -> None:
    started = time.perf_counter()
    place = Path(tempfile.mkdtemp())
    small: dict[str, Any] = {}
    if given.days is None:
        files = lpfs.simulate(place / "raw", "terabyte", rows=given.rows, days=6, format="csv")
        first = files[0].read_text("utf-8").splitlines()[0].split("\t")
        print(f"{len(files)} days in Criteo's layout; a line: click {first[0]}, I1 {first[1]!r}, C1 {first[14]!r} …")
        small = {"pretrain_steps": 400, "search_steps": 600, "model_options": {"dim": 8, "hidden": [64]}}
    else:
        files = given.days

    log = lpfs.prepare(files, place / "data", preset="criteo-terabyte", negatives=0.125, quiet=True)
    kept = log.table[0].negative_rate
    print(f"prepared {log.rows:,} rows, {len(log.schema)} fields, {kept:.1%} of the negatives")

    # the paper's network: the 13 counts enter together, as one token called dense with one gate
    run = lpfs.select(log, place / "run", model="dlrm", keep=given.keep, quiet=True, **small)

    print(f"kept {len(run.kept)} of {len(run.selection.names)}: {' '.join(run.kept)}")
    for name, each in run.metrics.items():
        print(f"  {name:<12} AUC {each['auc']:.4f}   log loss {each['logloss']:.4f}")
    tables = [run.savings[name]["table_bytes"] / 1e6 for name in ("all_fields", "kept")]
    print(f"tables {tables[0]:.1f} MB -> {tables[1]:.1f} MB; the report: {run.folder / 'report.html'}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/data.md")


if __name__ == "__main__":
    main()
