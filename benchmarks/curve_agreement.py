"""Does the curve agree with retraining, and what does it cost?

    python benchmarks/curve_agreement.py small terabyte bank_marketing --data TABLES --out curve_agreement.json

For every table: the loss of AUC that the curve reads for the set of a search for the recommended K, and for a set of
its chain with half as many fields, beside the loss of a model that is trained from scratch on these fields, against
all fields on the test rows; both with their 95 % intervals. ``cpu`` has the CPU seconds of search and curve.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import lpfs
from lpfs._console import Console
from lpfs.data.dataset import Dataset
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.allowance import Allowance
from lpfs.pipeline.curve import EVALUATIONS_PER_ROW, NETWORK_SHARE, FieldCurve
from lpfs.pipeline.data import prepare_dataset
from lpfs.pipeline.plan import RunPlan, build_plan, check_settings
from lpfs.pipeline.settings import Settings
from lpfs.train.evaluate import predictions
from lpfs.train.intervals import auc_difference

PRESETS = ("small", "terabyte", "industrial-small")
TABLES: dict[str, dict[str, Any]] = {
    "bank_marketing": {"label": "label"},
    "census_income_kdd": {"label": "label", "split": "split"},
    "coil2000": {"label": "label", "split": "split"},
}


def open_table(name: str, data: Path | None, folder: Path, seed: int) -> Dataset:
    """Return a simulated log, or a table of ``data`` that is prepared as ``select`` does."""
    if name in PRESETS:
        return lpfs.simulate(folder / "log", name, seed=seed)
    if data is None:
        raise SystemExit(f"{name} is a file: give --data")
    settings = Settings(source=(str(data / f"{name}.parquet"),), **TABLES[name])
    return prepare_dataset(None, settings, folder, Console(quiet=True))


def measure(name: str, dataset: Dataset, folder: Path, seed: int) -> dict[str, Any]:
    """Return losses of the curve and of retrained models, and the CPU seconds of the stages."""
    settings, _ = check_settings(Settings(source=(str(dataset.path),), seed=seed, device="cpu"))
    plan = build_plan(settings, dataset, folder / "run", Console(quiet=True))
    trained = stages.initial_model(plan, seed)
    full = stages.all_fields(plan, trained)
    allowance = Allowance.of_run(plan, *(stages.valid_metrics(plan, model) for model in (full, trained[0])))
    cpu: dict[str, float] = {}
    start = time.process_time()
    curve = FieldCurve(plan, trained[0])
    cpu["networks"] = time.process_time() - start
    recommended = curve.recommend(allowance)
    cpu["chain"] = time.process_time() - start - cpu["networks"]
    size = recommended or len(curve.names)
    start = time.process_time()
    search_plan = plan.for_search(plan.run_dir, seed, keep=size)
    selection = stages.search_fields(search_plan, copy.deepcopy(trained), seed)[2]
    cpu["search"] = time.process_time() - start
    assert curve.order is not None
    half = [curve.names[part] for part in curve.order[len(curve.order) - max(1, size // 2) :]]
    points = []
    for kind, kept in (("chain", half), ("search", list(selection.kept))):
        start = time.process_time()
        record = curve.to_record(kept, recommended, allowance.allowed)["curve"]
        cpu[f"record of {kind}"] = time.process_time() - start
        point = next(point for point in record["points"] if point["fields"] == len(kept))
        small = type(full)(full.schema.subset(kept), **full.config)
        retrained = stages.retrain(replace(plan, run_dir=folder / kind), small)
        points.append({"set": kind, "kept": kept, **compare_losses(plan, full, retrained, point)})
    curve_cpu = cpu["networks"] + cpu["chain"] + cpu["record of search"]
    return {
        "table": name,
        "seed": seed,
        "fields": len(curve.names),
        "recommended": recommended,
        "allowed": allowance.allowed,
        "networks": len(curve.networks),
        "settings": {"network_share": NETWORK_SHARE, "evaluations_per_row": EVALUATIONS_PER_ROW},
        "judging": {"rows": len(curve.rows), "positives": curve.rows.positives},
        "points": points,
        "cpu": {key: round(value, 2) for key, value in cpu.items()},
        "curve_per_search": round(curve_cpu / cpu["search"], 3),
    }


def compare_losses(plan: RunPlan, full: Model, retrained: Model, point: dict[str, Any]) -> dict[str, Any]:
    """Return both losses with intervals, their difference, and whether it is within the interval of the difference."""
    logits = []
    for model in (full, retrained):
        predicted = predictions(model, plan.stream(plan.splits.test, model.reads.names, train=False))
        logits.append(predicted.logits[:, 0].astype(np.float64))
    labels = predicted.labels[:, 0].astype(np.float64)
    loss = auc_difference(logits[0], logits[1], labels).interval
    width = float(np.hypot(point["high"] - point["loss"], loss.high - loss.value))
    difference = point["loss"] - loss.value
    return {
        "curve": {key: point[key] for key in ("loss", "low", "high")},
        "retrained": {"loss": loss.value, "low": loss.low, "high": loss.high},
        "difference": difference,
        "half_width": width,
        "agrees": bool(abs(difference) <= width),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="+", choices=(*PRESETS, *TABLES))
    parser.add_argument("--data", type=Path, help="directory of the real tables")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    old = json.loads(arguments.out.read_text("utf-8")) if arguments.out.exists() else []
    results = {(result["table"], result["seed"]): result for result in old}
    for name in arguments.tables:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                dataset = open_table(name, arguments.data, Path(folder), seed)
                result = measure(name, dataset, Path(folder), seed)
            results[name, seed] = result
            print(json.dumps({key: result[key] for key in ("table", "seed", "recommended", "curve_per_search", "cpu")}))
            for point in result["points"]:
                print("   ", json.dumps({key: point[key] for key in ("set", "curve", "retrained", "agrees")}))
            arguments.out.write_text(json.dumps(list(results.values()), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
