"""Hot start: prune a trained model, go on with it and its optimizer; what would training from scratch have cost?

    python examples/hot_start.py

A log of clicks is simulated, of whose 31 fields 15 matter. A model is trained on the first days and its fields are
searched on the next ones. The pruned model serves at once; it goes on over the last training day with the state of
its optimizer, while the same fields are also trained from scratch on all days. Both are judged on the day after.
"""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

import lpfs
from lpfs.embeddings.optim import Adagrad
from lpfs.pipeline.results import _describe_hot_start, steps_saved
from lpfs.pipeline.stages import AucHistory

SHAPE = {"dim": 8, "hidden": [32]}
BATCH, KEEP, LOOK = 64, 15, 20


def main(rows: int = 40_000) -> None:
    started = time.perf_counter()
    log = lpfs.simulate(Path(tempfile.mkdtemp()) / "log", "small", rows=rows, days=10)
    early, fresh, late, valid = (log.days(first, stop) for first, stop in pairwise((0, 5, 8, 9, 10)))
    every = log.days(0, 9)

    torch.manual_seed(0)
    model = lpfs.make_model("mlp", log.schema, **SHAPE)
    optimizer = Adagrad(model.parameters(), lr=0.02)
    lpfs.fit(model, early.stream(BATCH), optimizer, quiet=True)
    steps = len(fresh.stream(BATCH))
    found = lpfs.search(
        model, fresh.stream(BATCH), keep=KEEP, optimizer=optimizer, steps=steps, config=lpfs.Training(quiet=True)
    )
    print(f"trained on days 0 to 4, searched on 5 to 7: {len(found.kept)} of {len(log.schema)} fields kept")

    def auc(of: torch.nn.Module, names: tuple[str, ...]) -> float:
        found = lpfs.evaluate(of, valid.stream(4096, fields=names)).auc
        assert found is not None
        return found

    gated = auc(model, log.schema.names)
    batch = next(iter(valid.stream(4096)))
    selection = lpfs.absorb(model, optimizer, batch=batch)
    pruned = lpfs.prune(model, selection, batch=batch, optimizer=optimizer, cut=True)  # both of them smaller
    small, going = pruned.model, pruned.optimizer
    assert isinstance(small, lpfs.Model)
    assert isinstance(going, torch.optim.Optimizer)
    names = small.reads.names
    print(f"pruned: {pruned.certificate}")
    print(f"AUC {gated:.6f} with gates, {auc(small, names):.6f} pruned: it can serve now")

    # from scratch: the same fields, all nine days
    torch.manual_seed(0)
    scratch = lpfs.make_model("mlp", small.schema, **SHAPE)
    done = lpfs.fit(scratch, every.stream(BATCH, fields=names), lr=0.02, quiet=True)
    level = auc(scratch, names)

    # hot start: the last of these days, which the search has not seen; its start counts as well
    watch = AucHistory()
    lpfs.fit(
        small,
        late.stream(BATCH, fields=names),
        going,
        valid=valid.stream(4096, fields=names),
        callbacks=[watch],
        evaluate_every=LOOK,
        evaluate_first=True,
        keep="best",
        quiet=True,
    )
    print(f"AUC {level:.4f} from scratch in {done.steps} steps, {auc(small, names):.4f} by the hot start")
    for line in _describe_hot_start(steps_saved(watch.points, level, done.steps)):
        print(line)
    print(f"{time.perf_counter() - started:.0f} seconds. Next: docs/select.md")


if __name__ == "__main__":
    main()
