"""How near a trained model comes to the Bayes ceiling of a simulated log, over the rows it was trained on.

    python benchmarks/ceiling.py [--rows 4000000] [--model dlrm] [--device cuda] [--out results/ceiling.json]

The simulator knows the probability that every click was drawn with, so it knows the AUC that no model can beat. A
model is trained once through the last n rows before the last day, in time order and with the paper's settings
(Adagrad .01, batch 512, dim 16), and judged on the last day; "way" is (AUC - .5) / (ceiling - .5).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path

import torch

import lpfs
from lpfs.models import make_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--model", default="dlrm")
    parser.add_argument("--options", type=json.loads, default={}, help="of the model, as JSON")
    parser.add_argument("--optimizer", default="adagrad")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--parts", type=int, nargs="*", default=[32, 16, 8, 4, 2, 1])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="a simulated Dataset to use, or to make")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = given.data or Path(scratch) / "log"
        begin = time.perf_counter()
        data = lpfs.simulate(place, "terabyte", rows=given.rows)
        print(f"simulated in {time.perf_counter() - begin:.0f} s: {data}", flush=True)
        results = run(data, given)
    about = {
        "command": f"python {shlex.join(sys.argv)}",
        "device": torch.cuda.get_device_name() if given.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "lpfs": lpfs.__version__,
        "fingerprint": data.fingerprint,
        **results,
    }
    if given.out is not None:
        given.out.write_text(json.dumps(about, indent=1) + "\n")


def run(data: lpfs.Dataset, given: argparse.Namespace) -> dict[str, object]:
    days = len(data.days())
    past, test = data.split(days=(days - 1,))
    ceiling = data.attached("truth.json")["bayes"]["auc_by_day"]
    best = list(ceiling.values())[-1] if isinstance(ceiling, dict) else ceiling[-1]
    rows = []
    for part in given.parts:
        for seed in range(given.seeds):
            size = past.rows // part
            torch.manual_seed(seed)
            model = make_model(given.model, data.schema, **given.options).to(given.device)
            begin = time.perf_counter()
            lpfs.fit(
                model,
                past.part(past.rows - size, past.rows).stream(given.batch, device=given.device),
                given.optimizer,
                lr=given.lr,
                epochs=1,
                quiet=True,
                seed=seed,
                check_every=100,
                graph=given.device == "cuda",
            )
            seconds = time.perf_counter() - begin
            auc = lpfs.evaluate(model, test.stream(1 << 14, device=given.device)).auc
            assert auc is not None
            way = (auc - 0.5) / (best - 0.5)
            rows.append({"rows": size, "seed": seed, "auc": auc, "way": way, "seconds": round(seconds, 2)})
            print(
                f"{size:>10,} rows: AUC {auc:.5f}, {way:.1%} of the way to {best:.5f}; {seconds:.1f} s, "
                f"{size / seconds:,.0f} rows/s",
                flush=True,
            )
    settings = {"model": given.model, "options": given.options, "optimizer": given.optimizer, "lr": given.lr}
    return {"ceiling": best, "test_rows": test.rows, **settings, "batch": given.batch, "results": rows}


if __name__ == "__main__":
    main()
