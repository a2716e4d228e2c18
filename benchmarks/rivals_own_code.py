"""Run the rivals' own code beside ours, on the same simulated log: scores and picks.

    pip install --target rivals --no-deps lassonet stg sortedcontainers tqdm lifelines
    git clone https://github.com/goldenNormal/ShuffleGate repositories/ShuffleGate
    git clone https://github.com/AMLab-Amsterdam/L0_regularization repositories/L0_regularization
    python benchmarks/rivals_own_code.py --packages rivals --repositories repositories

Nothing of theirs is copied here: packages and repositories are imported from where they are, and are left out if they
are missing. The log is simulated; each of its fields becomes one number (ids become the click rate of other rows, as
for trees), because LassoNet and stg take numbers only. Their networks read these numbers, ours an embedding of each.

- lassonet, stg: their estimators are fitted to the training rows; Spearman correlation of the scores,
  overlap of the K best, and recall of the true fields (a copy counts as false).
- ShuffleGate, L0 regularization: their modules are called with the same parameters as ours; the largest difference of
  gates and penalties.

The result goes to benchmarks/results/rivals_own_code.json.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import importlib
import importlib.util
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from scipy.stats import spearmanr

from lpfs._console import Console
from lpfs.data.dataset import Dataset
from lpfs.data.simulate import simulate
from lpfs.data.store.writer import DatasetWriter
from lpfs.methods.base import top_k
from lpfs.methods.sampling import batch_columns
from lpfs.methods.shufflegate import ShuffleGate, ShuffleGateOptions
from lpfs.methods.stochastic_gates import HardConcrete, HardConcreteOptions
from lpfs.methods.trees import feature_matrix
from lpfs.pipeline import stages
from lpfs.pipeline.plan import build_plan, check_settings
from lpfs.pipeline.results import versions
from lpfs.pipeline.settings import Settings
from lpfs.schema import Field, Schema
from lpfs.train.checkpoint import seed_all

RESULT = Path(__file__).parent / "results" / "rivals_own_code.json"
PARTS = 10
MODEL = {"dim": 4, "hidden": [32, 16]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, help="directory with lassonet and stg")
    parser.add_argument("--repositories", type=Path, help="directory with ShuffleGate and L0_regularization")
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--seed", type=int, default=41, help="of the simulation and of all searches")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/rivals_own_code.py", *named(options)])}
    with tempfile.TemporaryDirectory() as folder:
        log = NumericLog(Path(folder), options.rows, options.seed)
        result |= {"log": log.about(), "versions": versions(), "searches": {}, "formulas": {}}
        if options.packages is not None:
            sys.path.append(str(options.packages))  # packages of this environment come first
        for name, fit in (("stg", fit_stg), ("lassonet", fit_lassonet)):
            package = import_if_there(name)
            if package is not None:
                result["searches"][name] = compare_scores(log, name, package, fit)
                print(name, json.dumps(result["searches"][name])[:300], flush=True)
    if options.repositories is not None:
        result["formulas"] = compare_formulas(options.repositories)
        print(json.dumps(result["formulas"]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def named(options: argparse.Namespace) -> list[str]:
    """Return the options as words, without local directories."""
    words = ["--rows", str(options.rows), "--seed", str(options.seed)]
    words += ["--packages", "rivals"] if options.packages else []
    return words + (["--repositories", "repositories"] if options.repositories else [])


def import_if_there(name: str) -> ModuleType | None:
    """Return a package; None if it is not installed."""
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None


class NumericLog:
    """A simulated log whose fields are one number each, standardized; as arrays, and as a Dataset."""

    def __init__(self, folder: Path, rows: int, seed: int) -> None:
        source = simulate(folder / "source", "small", rows=rows, seed=seed)
        sampled = batch_columns(next(iter(source.stream(rows))), source.schema)
        columns, self.names = feature_matrix(sampled, source.schema)
        scale = np.where(columns.std(0) > 0, columns.std(0), 1.0)
        self.columns, self.labels = ((columns - columns.mean(0)) / scale).astype(np.float32), sampled.labels
        truth = source.attached("truth.json")
        self.true, self.seed, self.folder = set(truth["true"]), seed, folder
        schema = Schema(tuple(Field(name, "numeric") for name in self.names), label=source.schema.label)
        with DatasetWriter(folder / "numbers", schema, fingerprint=f"numbers-{seed}", settings={}) as writer:
            for part, index in enumerate(np.array_split(np.arange(rows), PARTS)):
                dense = {name: self.columns[index, number] for number, name in enumerate(self.names)}
                labels = {schema.label: sampled.labels[index].astype(np.float32)}
                writer.day(f"part_{part}").append(ids={}, bags={}, dense=dense, labels=labels)
        settings, _ = check_settings(Settings(model="mlp", model_options=MODEL, seed=seed))
        self.plan = build_plan(settings, Dataset(folder / "numbers"), folder / "run", Console(quiet=True))
        train = self.plan.splits.train.rows
        self.train = slice(0, train)  # the rows that our searches may read
        self.valid = slice(train, train + self.plan.splits.valid.rows)

    def about(self) -> dict[str, Any]:
        """Return what the log is."""
        rows = {"train": self.train.stop, "valid": self.valid.stop - self.valid.start}
        return {"preset": "small", "seed": self.seed, "fields": len(self.names), "true": len(self.true), **rows}

    def our_scores(self, method: str) -> tuple[dict[str, float], float]:
        """Return the scores of our search, and its seconds with pretraining."""
        start = time.process_time()
        plan = self.plan.for_search(self.folder / method, self.seed, method=method, keep=len(self.true), resume=False)
        seed_all(self.seed)
        selection = stages.search_fields(plan, stages.pretrain(plan, self.seed), self.seed)[2]
        return selection.made["scores"], time.process_time() - start


def compare_scores(log: NumericLog, name: str, package: ModuleType, fit: Any) -> dict[str, Any]:
    """Return how well the scores of both agree, and how many true fields each finds."""
    start = time.process_time()
    theirs = dict(zip(log.names, map(float, fit(package, log)), strict=True))
    seconds = time.process_time() - start
    ours, our_seconds = log.our_scores(name)
    keep = len(log.true)
    picks = {"theirs": set(top_k(theirs, keep)), "ours": set(top_k({name: ours[name] for name in log.names}, keep))}
    order = [(theirs[field], ours[field]) for field in log.names]
    return {
        "version": getattr(package, "__version__", "unknown"),
        "spearman": round(float(spearmanr(*zip(*order, strict=True)).statistic), 3),
        "overlap": len(picks["theirs"] & picks["ours"]) / keep,
        "recall": {side: len(kept & log.true) / keep for side, kept in picks.items()},
        "cpu_seconds": {"theirs": round(seconds, 1), "ours": round(our_seconds, 1)},
        "theirs": {field: round(value, 6) for field, value in theirs.items()},
        "ours": {field: round(ours[field], 6) for field in log.names},
    }


def fit_lassonet(package: ModuleType, log: NumericLog) -> Any:
    """Return the λ at which LassoNet's own path removes each feature."""
    torch.manual_seed(log.seed)
    model = package.LassoNetClassifier(
        hidden_dims=tuple(cast(list[int], MODEL["hidden"])), n_iters=(200, 20), verbose=0
    )
    labels = log.labels.astype(np.int64)
    model.path(
        log.columns[log.train],
        labels[log.train],
        X_val=log.columns[log.valid],
        y_val=labels[log.valid],
        return_state_dicts=False,
    )
    return model.feature_importances_.cpu().numpy()


def fit_stg(package: ModuleType, log: NumericLog) -> Any:
    """Return the gate μ + ½ of each feature of stg's own model.

    stg 0.1.2 uses names that Python 3.10 moved from collections to collections.abc.
    """
    for name in collections.abc.__all__:
        setattr(collections, name, getattr(collections.abc, name))
    model = package.STG(
        task_type="classification",
        input_dim=len(log.names),
        output_dim=2,
        hidden_dims=MODEL["hidden"],
        activation="relu",
        optimizer="Adam",
        learning_rate=0.003,
        batch_size=128,
        feature_selection=True,
        sigma=0.5,
        lam=0.1,
        random_state=log.seed,
        device="cpu",
    )
    labels = log.labels.astype(np.int64)
    valid = (log.columns[log.valid], labels[log.valid])
    quiet = {"verbose": False, "print_interval": 1000}
    model.fit(log.columns[log.train], labels[log.train], nr_epochs=20, valid_X=valid[0], valid_y=valid[1], **quiet)
    return model.get_gates(mode="raw") + 0.5


def compare_formulas(repositories: Path) -> dict[str, Any]:
    """Return the largest differences between their modules and ours, with the same parameters."""
    values = torch.tensor([-1.7, -0.4, 0.0, 0.6, 2.3])
    names = tuple("abcde")
    found: dict[str, Any] = {}
    path = repositories / "ShuffleGate"
    if path.is_dir():
        sys.path.insert(0, str(path))
        module = importlib.import_module("models.fs.shuffle_gate")
        args = SimpleNamespace(device="cpu", epoch=1, fs_weight=0.3)
        theirs = module.shuffle_gate(args, {}, list(names))
        ours = ShuffleGate(names, 1, 0, ShuffleGateOptions(strength=0.3))
        theirs.theta.data.copy_(values[:, None])
        ours.theta.data.copy_(values)
        gate = (theirs.get_fea_importance() - ours.scores()).abs().max()
        penalty = theirs.fs_loss() * len(names) - ours.penalty(1)  # theirs is a mean over the fields, ours a sum
        found["ShuffleGate"] = {"gates": float(gate.detach()), "penalty_times_N": float(penalty.detach().abs())}
    path = repositories / "L0_regularization"
    if path.is_dir():
        sys.path.insert(0, str(path))
        module = importlib.import_module("l0_layers")
        theirs = module.L0Dense(5, 1, droprate_init=0.2)
        start = theirs.qz_loga.detach().mean()
        theirs.qz_loga.data.copy_(values * 3)
        gates = HardConcrete(names, 1, 0, HardConcreteOptions(strength=1.0))
        our_start = gates.logit.detach().mean()
        gates.logit.data.copy_(values * 3)
        open_ = (1 - theirs.cdf_qz(0)).sum() - gates.penalty(1)
        test = theirs.sample_z(1, sample=False)[0] - gates.eval()()
        noise = torch.linspace(0.01, 0.99, 5)
        drawn = torch.nn.functional.hardtanh(theirs.quantile_concrete(noise), 0, 1)
        logit = (gates.logit + noise.logit()) / gates.options.temperature
        found["L0_regularization"] = {
            "probability_of_an_open_gate": float(open_.detach().abs()),
            "gates_without_noise": float(test.detach().abs().max()),
            "sampled_gates": float((drawn - gates.stretched(logit.sigmoid()).clamp(0, 1)).detach().abs().max()),
            "mean_start": [float(start), float(our_start)],
        }
    return found


if __name__ == "__main__":
    main()
