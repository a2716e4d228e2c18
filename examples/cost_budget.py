"""A budget: fields cost something to compute, some are paid for in groups; which set is worth its price?

    python examples/cost_budget.py

Ten of the 31 fields come from a service that is called once for all of them (a group); three are dear by
themselves. The search may spend 14 and weighs λ of each field by what dropping it would save. For comparison the
same is asked without prices: as many fields, whatever they cost. The same on the command line:

    lpfs select data/log --budget 14 --costs costs.toml --out run
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import lpfs
from lpfs.methods.target import Costs

BUDGET = 14.0


def main(rows: int = 30_000) -> None:
    started = time.perf_counter()
    place = Path(tempfile.mkdtemp())
    log = lpfs.simulate(place / "log", "small", rows=rows)
    names = list(log.schema.names)

    lines = ['unit = "ms"', "default = 0.5", "[fields]", *(f'"{name}" = 4.0' for name in names[:3])]
    lines += ["[groups.profile]", "cost = 6.0", f"fields = {names[-10:]}".replace("'", '"')]
    costs = place / "costs.toml"
    costs.write_text("\n".join(lines) + "\n", "utf-8")
    print(costs.read_text("utf-8"))

    quick: dict[str, Any] = {"model_options": {"dim": 4, "hidden": [32]}, "pretrain_steps": 500, "search_steps": 500}
    quick |= {"finish": "retrain", "quiet": True}
    paid = lpfs.select(log, place / "paid", budget=BUDGET, costs=str(costs), **quick)
    free = lpfs.select(log, place / "free", keep=len(paid.kept), **quick)

    price = Costs.load(costs, log.schema)
    print(f"everything costs {price.total(names):.1f} ms; at most {BUDGET:.1f} ms may be spent")
    for told, run in (("with prices", paid), ("without", free)):
        auc = run.metrics["retrained"]["auc"]
        dear = [name for name in run.kept if name in names[:3]]
        group = [name for name in run.kept if name in names[-10:]]
        print(f"  {told:<12} {len(run.kept)} fields for {price.total(run.kept):4.1f} ms, AUC {auc:.4f}")
        print(f"  {'':<12} dear ones: {len(dear)}; of the group: {len(group)}")
    print(f"AUC of all fields {paid.metrics['all_fields']['auc']:.4f}")
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/select.md")


if __name__ == "__main__":
    main()
