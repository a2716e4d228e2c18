"""Run the rivals' own code beside ours, on the same simulated log: scores and picks.

    pip install --target rivals --no-deps lassonet stg sortedcontainers tqdm lifelines six autograd autograd-gamma \
        formulaic interface-meta matplotlib wrapt narwhals fuxictr==2.0.4 h5py
    git clone https://github.com/goldenNormal/ShuffleGate repositories/ShuffleGate
    git clone https://github.com/AMLab-Amsterdam/L0_regularization repositories/L0_regularization
    git clone https://github.com/xqwustc/FairFS repositories/FairFS
    git clone https://github.com/VITA-Group/UMEC repositories/UMEC
    python benchmarks/rivals_own_code.py --packages rivals --repositories repositories

Nothing of theirs is copied here: packages and repositories are imported from where they are, and are left out if they
are missing. The log is simulated; each of its fields becomes one number (ids become the click rate of other rows, as
for trees), because LassoNet and stg take numbers only. Their networks read these numbers, ours an embedding of each.

- lassonet, stg, FairFS (their DCN on FuxiCTR), UMEC (their steps on our pretrained network): fitted to the training
  rows; Spearman correlation of the scores, overlap of the K best, and recall of the true fields (a copy counts as
  false).
- ShuffleGate, L0 regularization, FairFS, UMEC: their code is called with the same parameters, batches and gradients as
  ours; the largest difference of gates, penalties, scores, weights and gradients.

The result goes to benchmarks/results/rivals_own_code.json.
"""

from __future__ import annotations

import argparse
import collections
import collections.abc
import importlib
import importlib.util
import io
import json
import math
import shlex
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from scipy.stats import spearmanr
from torch.utils.data import DataLoader

from lpfs._console import Console
from lpfs.data.batch import Batch
from lpfs.data.dataset import Dataset
from lpfs.data.simulate import simulate
from lpfs.data.store.writer import DatasetWriter
from lpfs.methods.base import SearchCost, SearchTask, top_k
from lpfs.methods.fairfs import AttributionPenalty, EmbeddingPath, FairFS
from lpfs.methods.group_sparsity import first_layer
from lpfs.methods.masks import apply_mask
from lpfs.methods.registry import make_method
from lpfs.methods.sampling import batch_columns
from lpfs.methods.shufflegate import ShuffleGate, ShuffleGateOptions
from lpfs.methods.stochastic_gates import HardConcrete, HardConcreteOptions
from lpfs.methods.target import SelectionTarget
from lpfs.methods.trees import feature_matrix
from lpfs.methods.umec import BudgetConstraint, UMECOptions
from lpfs.pipeline import stages
from lpfs.pipeline.plan import build_plan, check_settings
from lpfs.pipeline.results import versions
from lpfs.pipeline.settings import Settings
from lpfs.schema import Field, Schema
from lpfs.train.callbacks import State
from lpfs.train.checkpoint import seed_all
from lpfs.train.config import Training
from lpfs.train.evaluate import predict_batch
from lpfs.train.metrics import scores
from lpfs.train.step import bce_loss

RESULT = Path(__file__).parent / "results" / "rivals_own_code.json"
PARTS = 10
MODEL = {"dim": 4, "hidden": [32, 16]}
FAIRFS = {"strength": 0.01, "points": 5}  # the defaults of its functions, and ours
UMEC_STEPS = 2000


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
        restore_old_names()
        theirs: list[tuple[str, ModuleType | None, Any]] = [
            ("stg", import_if_there("stg"), fit_stg),
            ("lassonet", import_if_there("lassonet"), fit_lassonet),
            ("fairfs", load_fairfs(options.repositories), fit_fairfs),
            ("umec", load_umec(options.repositories), fit_umec),
        ]
        for name, module, fit in theirs:
            if module is not None:
                result["searches"][name] = compare_scores(log, name, module, fit)
                print(name, json.dumps(result["searches"][name])[:300], flush=True)
        if options.repositories is not None:
            result["formulas"] = compare_formulas(options.repositories)
            for name, module, compare in (
                ("FairFS", theirs[2][1], compare_fairfs),
                ("UMEC", theirs[3][1], compare_umec),
            ):
                if module is not None:
                    result["formulas"][name] = compare(module, log)
            print(json.dumps(result["formulas"]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


def restore_old_names() -> None:
    """Define names that their code uses and newer versions of Python and numpy have removed."""
    for name in collections.abc.__all__:  # stg 0.1.2
        setattr(collections, name, getattr(collections.abc, name))
    if not hasattr(np, "Inf"):  # FuxiCTR 2.0
        setattr(np, "Inf", np.inf)  # noqa: B010


def load_fairfs(repositories: Path | None) -> ModuleType | None:
    """Return the module of FairFS's DCN; None if it or FuxiCTR is missing."""
    path = None if repositories is None else repositories / "FairFS" / "DCN" / "DCN_torch" / "src" / "DCN.py"
    if path is None or not path.exists() or import_if_there("fuxictr") is None:
        return None
    spec = importlib.util.spec_from_file_location("fairfs_dcn", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_umec(repositories: Path | None) -> ModuleType | None:
    """Return the module of UMEC's optimizer; None if it is missing. It imports torchvision without using it."""
    path = None if repositories is None else repositories / "UMEC"
    if path is None or not path.is_dir():
        return None
    sys.path.append(str(path))
    if import_if_there("torchvision") is None:
        unused: Any = ModuleType("torchvision")
        unused.datasets, unused.transforms = ModuleType("datasets"), ModuleType("transforms")
        sys.modules["torchvision"] = unused
    return importlib.import_module("rc_optimizer")


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
        "theirs": {field: float(f"{value:.6g}") for field, value in theirs.items()},
        "ours": {field: float(f"{ours[field]:.6g}") for field in log.names},
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
    """Return the gate μ + ½ of each feature of stg's own model."""
    seed_all(log.seed)
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


def fit_fairfs(module: Any, log: NumericLog) -> Any:
    """Return the scores of FairFS's own DCN, trained by its own loop with early stopping, on the validation rows."""
    torch.manual_seed(log.seed)
    rows = torch.from_numpy(np.column_stack([log.columns, log.labels]).astype(np.float32))
    model = module.DCN(
        feature_map(log),
        learning_rate=1e-3,
        embedding_dim=MODEL["dim"],
        dnn_hidden_units=MODEL["hidden"],
        net_dropout=0.0,
        **{"optimizer": "adam", "loss": "binary_crossentropy", "metrics": ["logloss", "AUC"], "monitor": "AUC"},
        **{"verbose": 0, "model_root": str(log.folder), "model_id": "fairfs", "interp": FAIRFS["points"]},
    )
    # FuxiCTR's own calls scikit-learn with an option that is no longer there
    model.evaluate_metrics = lambda labels, predicted, *_: {
        "AUC": scores(logits(predicted), labels).auc,
        "logloss": scores(logits(predicted), labels).logloss,
    }
    Path(model.model_dir).mkdir(exist_ok=True)
    valid = rows[log.valid].split(10_000)
    train: Any = DataLoader(cast(Any, rows[log.train]), batch_size=128, shuffle=True)
    with redirect_stdout(io.StringIO()):
        model.fit_for_embig(train, 100, valid, normk=FAIRFS["strength"], baseline="smooth")
        model.eval()
        result, _ = model.evaluate_with_fmcr(valid, baseline="smooth")
    return result["feature_weight"].to_numpy()


def logits(probabilities: Any) -> Any:
    """Return logits."""
    clipped = np.clip(probabilities, 1e-7, 1 - 1e-7)
    return np.log(clipped / (1 - clipped))


def feature_map(log: NumericLog) -> Any:
    """Return what FuxiCTR knows of the fields."""
    fields = importlib.import_module("fuxictr.features").FeatureMap("numbers", str(log.folder))
    fields.features.update((name, {"type": "numeric", "source": ""}) for name in log.names)
    fields.labels, fields.num_fields, fields.default_emb_dim = ["label"], len(log.names), MODEL["dim"]
    fields.set_column_index()
    return fields


def fit_umec(module: Any, log: NumericLog) -> Any:
    """Return the energies ‖W_n‖² after UMEC's own steps from our pretrained network, with the rates of its scripts.

    It repeats the rows: its s moves by at most .05 per step, and its own pass has 300,000 steps.
    """
    plan = log.plan.for_search(log.folder / "umec-theirs", log.seed, method="umec", keep=len(log.true), resume=False)
    seed_all(log.seed)
    model, _ = stages.pretrain(plan, log.seed)
    linear, parts = first_linear(model), len(log.names)
    minimax, dual_optimizer, s_optimizer, args = umec_problem(module, model, linear, parts, len(log.true))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = plan.splits.train.stream(128, seed=log.seed, shuffle=True, fields=log.names)
    step = 0
    while step < UMEC_STEPS:
        for batch in rows:
            optimizer.zero_grad()
            bce_loss(*predict_batch(model, batch)).backward()
            optimizer.step()
            with redirect_stdout(io.StringIO()):
                module.rc_optimizer(optimizer, minimax, s_optimizer, dual_optimizer, args, {}, None)
            step += 1
            if step == UMEC_STEPS:
                break
    return first_layer(model, "umec").energies()


def first_linear(model: torch.nn.Module) -> torch.nn.Linear:
    """Return the layer whose columns belong to the fields, in their order."""
    layer = first_layer(model, "umec")
    assert layer.owner.equal(layer.owner.sort().values)
    linear = model.get_submodule(layer.path)
    assert isinstance(linear, torch.nn.Linear)
    return linear


def umec_problem(
    module: Any, model: torch.nn.Module, linear: torch.nn.Linear, parts: int, keep: int
) -> tuple[Any, Any, Any, SimpleNamespace]:
    """Return UMEC's problem for one layer and a budget that K groups use, its two optimizers and its options."""
    hidden = "-".join(map(str, [*cast(list[int], MODEL["hidden"]), 1]))
    args = SimpleNamespace(
        **{"punit": 1, "group_size": linear.in_features // parts, "arch_mlp_top": hidden, "budget": 0.0},
        **{"soptim": "sgd", "slr": 0.05, "ylr": 0.1, "zlr": 2.0, "sl2wd": 0.0},
        **{"zclamp": False, "early_stop": False, "verbose": False},
    )
    layers, numbers, names = [[linear]], {linear: 0}, {linear: "first"}
    with redirect_stdout(io.StringIO()):
        minimax, dual_optimizer, s_optimizer = module.build_minimax_model(model, names, layers, numbers, args)
    args.budget = float(minimax.resource_fn(torch.tensor([float(parts - keep)])))
    return minimax, dual_optimizer, s_optimizer, args


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


def compare_fairfs(module: Any, log: NumericLog) -> dict[str, Any]:
    """Return the differences between FairFS's code and ours on the same network and batch.

    Its model is made without its own layers: embeddings and everything behind them are those of our network.
    """
    model, batch = small_network(log)
    path, parts, points = EmbeddingPath(model.names), len(log.names), int(FAIRFS["points"])
    rows = torch.cat([batch.dense, batch.labels], 1)

    model.zero_grad()
    theirs = module.DCN.__new__(module.DCN)
    torch.nn.Module.__init__(theirs)
    theirs.embedding_layer = lambda columns, **kinds: model.inputs(replace(batch, dense=columns)).flatten(1)
    theirs.crossnet = lambda tokens: model.top(tokens)
    theirs.dnn, theirs.fc, theirs.output_activation = None, torch.nn.Identity(), torch.sigmoid
    theirs.embedding_dim, theirs.interpolate_n, theirs.feature_map = MODEL["dim"], points, feature_map(log)
    theirs.get_inputs = lambda data: data[:, :parts]
    theirs.get_labels = lambda data: data[:, parts:]
    theirs.compute_loss = lambda result, labels: torch.nn.functional.binary_cross_entropy(result["y_pred"], labels)
    theirs.optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: None)
    theirs.evaluate_metrics = lambda *values: {"logloss": 0.0}
    theirs.validation_metrics, theirs.checkpoint, theirs.expid = [], "", ""
    theirs._monitor_mode, theirs._eval_steps, theirs._verbose = "min", None, 0
    theirs.load_weights = theirs.save_weights = lambda path: None
    theirs.eval_step = lambda: None

    with redirect_stdout(io.StringIO()):
        theirs.fit_for_embig([rows], 1, None, normk=1.0, baseline="smooth")
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        result, _ = theirs.evaluate_with_fmcr([rows], baseline="smooth")
        model.zero_grad()

    method = make_method("fairfs", {"points": points})
    assert isinstance(method, FairFS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with apply_mask(model, path, "fairfs"):
        state = State(model, optimizer, Training(steps=1), 1)
        state.loss = bce_loss(*predict_batch(model, batch))
        AttributionPenalty(1, path, 1.0).before_backward(state)
        state.loss.backward()
        ours = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        task = SearchTask(model, optimizer, [batch], [batch], SelectionTarget(keep=1), 1)
        our_scores, _ = method.score(task, model, path, SearchCost())
    assert ours.keys() == gradients.keys()
    expected = torch.tensor(result["feature_weight"].to_numpy(), dtype=torch.float64)
    factor = len(batch) * (points + 1)  # they average over rows and points twice
    return {
        "gradient_of_the_penalized_loss": max(relative(ours[name], gradients[name]) for name in ours),
        "scores": relative(our_scores, factor * expected),
        "factor_of_the_scores": factor,
    }


def compare_umec(module: Any, log: NumericLog) -> dict[str, Any]:
    """Return the differences between UMEC's step and ours from the same weights, s and y, without our scaling.

    Our rates are those that move s and y as far as theirs do in one step. y ascends in ours when s has reached N - K,
    so its step is compared for a larger K.
    """
    model, batch = small_network(log)
    linear, parts, s, y, lr = first_linear(model), len(log.names), 5.3, 0.7, 0.1
    weight, optimizer = linear.weight.detach().clone(), torch.optim.SGD(model.parameters(), lr=lr)
    minimax, dual_optimizer, s_optimizer, args = umec_problem(module, model, linear, parts, len(log.true))
    minimax.s.data.fill_(s)
    minimax.y.data.fill_(y)
    module.rc_optimizer(optimizer, minimax, s_optimizer, dual_optimizer, args, {}, None)
    theirs, steps = linear.weight.detach().clone(), round(parts / args.slr)
    rates = UMECOptions(s_rate=1.0, z_rate=100.0, y_rate=args.ylr * parts * steps)
    differences: dict[str, Any] = {}
    for name, keep in (("s", len(log.true)), ("y", parts - math.ceil(s))):
        linear.weight.data.copy_(weight)
        task = SearchTask(model, optimizer, [batch], None, SelectionTarget(keep=keep), steps)
        ours = BudgetConstraint(task, first_layer(model, "umec"), rates)
        for values, value in ((ours.scales, 1.0), (ours.unit, 1.0), (ours.s, s), (ours.y, y)):
            values.fill_(value)
        ours.within_step(State(model, optimizer, Training(steps=steps), steps))
        differences["weights"] = relative(linear.weight.detach(), theirs)
        start, end, our_end = {"s": (s, minimax.s, ours.s), "y": (y, minimax.y, ours.y)}[name]
        differences[f"step_of_{name}"] = relative(our_end - start, (end - start).detach())
    return differences


def small_network(log: NumericLog) -> tuple[Any, Batch]:
    """Return a pretrained network and a batch."""
    plan = log.plan.for_search(log.folder / "formulas", log.seed, method="umec", keep=1, resume=True)
    seed_all(log.seed)
    model, _ = stages.pretrain(plan, log.seed)
    return model, next(iter(plan.splits.valid.stream(256, fields=log.names)))


def relative(values: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    return float((values - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


if __name__ == "__main__":
    main()
