"""Experiments on the cost of a search: AUC before and after fields are removed, memory and time of the gates."""

from __future__ import annotations

import time
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from lpfs.compare.run_dir import COST_SCHEMA, Record, read_result
from lpfs.errors import InputError
from lpfs.gates.attach import attach
from lpfs.gates.functions import gate_function
from lpfs.gates.module import ATTRIBUTE as GATES_ATTRIBUTE, Gates
from lpfs.methods.masks import observe_masked_model
from lpfs.methods.registry import METHODS
from lpfs.models.base import Model
from lpfs.paper.context import ExperimentContext, ExperimentResult
from lpfs.paper.trials import Trials
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan
from lpfs.plots import DROPPED, INK, KEPT, SECOND
from lpfs.schema import Selection
from lpfs.train.evaluate import predict_batch
from lpfs.train.step import bce_loss

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT_SHARE = 0.5  # share of the fields that is kept
METHODS_WITHOUT_MASK = ("all", "oracle", "autofis")  # remove nothing, train nothing, or only select crosses
GATED_METHODS = ("lpfs", "lpfs++", "lpfs_paper", "lpfs++_paper")  # their gates are part of the model
GATE_COUNTS = (27, 378, 392, 1000)
WARMUP_STEPS, TIMED_STEPS = 10, 60  # steps of each kind, measured in turns


class MaskedAucProbe:
    """A search that records the test AUC of the model while the mask of the method is still applied."""

    def __init__(self) -> None:
        self.masked_auc: float | None = None

    def search(self, plan: RunPlan, pretrained: stages.Trained, seed: int) -> tuple[Model, Any, Selection]:
        """Search, and record the AUC of the masked model."""

        def record_auc(model: Model) -> None:
            self.masked_auc = stages.test_metrics(plan, model)["auc"]

        with observe_masked_model(record_auc):
            return stages.search_fields(plan, pretrained, seed)

    def auc_before_after(self, plan: RunPlan, model: Model) -> Record:
        """Return the test AUC before and after the dropped fields are removed.

        Before, the model has the gates or the mask of the method if it has any, otherwise all of its fields.
        """
        gates = getattr(model, GATES_ATTRIBUTE)
        before = self.masked_auc
        if before is None:
            selected = gates.x.detach().clone()
            with torch.no_grad():
                if plan.settings.method not in GATED_METHODS:
                    gates.x.fill_(1.0)
                before = stages.test_metrics(plan, model)["auc"]
                gates.x.copy_(selected)
        optimizer = plan.optimizer(torch.nn.ParameterList(gates.model_parameters()))
        zeros, cut, _ = stages.absorb_and_prune(plan, model, optimizer, gates.selection())
        after = stages.test_metrics(plan, stages.pruned_model(cut))["auc"]
        change = max(pruned.certificate.max_logit_change or 0.0 for pruned in (zeros, cut))
        return {"before": before, "after": after, "max_logit_change": change}


def hot_start(context: ExperimentContext) -> ExperimentResult:
    """Search with every method, and measure the AUC before and after the dropped fields are removed."""
    trials = Trials(context)
    keep = trials.count_of(KEPT_SHARE)
    by_method: dict[str, Any] = {}
    for method in METHODS:
        if method in METHODS_WITHOUT_MASK:
            continue
        probe = MaskedAucProbe()
        functions: dict[str, Any] = {"search": probe.search, "probe": probe.auc_before_after}
        try:
            record = trials.search(context.seed, method, keep=keep, before="with mask", **functions)
        except InputError as error:
            context.console.message(f"  {method}: {error}")
            continue
        if "probe" in record:
            by_method[method] = record["probe"]
    change = {name: values["after"] - values["before"] for name, values in by_method.items()}
    order = sorted(change, key=lambda name: -change[name])
    rows = []
    for name in order:
        text = f"{by_method[name]['before']:.5f} to {by_method[name]['after']:.5f} ({change[name]:+.5f})"
        rows.append((name, "no change" if name in GATED_METHODS else "damage", text))
    measured = {"keep": keep, "fields": len(trials.names), "by_method": by_method}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for number, name in enumerate(order):
            ends = [by_method[name]["before"], by_method[name]["after"]]
            axes.plot(ends, [number] * 2, color=DROPPED, zorder=1)
            axes.plot(ends[:1], [number], "o", color=INK, label=None if number else "before")
            axes.plot(ends[1:], [number], "D", color=KEPT, label=None if number else "after")
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("test AUC before and after the fields are removed")
        axes.legend(frameon=False, fontsize=8)

    return ExperimentResult(measured, {}, rows, draw, (7.0, 0.9 + 0.24 * len(order)))


def complexity(context: ExperimentContext) -> ExperimentResult:
    """Count the bytes of gates; time a step and a whole search, for which the first seeds are a warm-up."""
    sizes = {count: gate_bytes(count) for count in GATE_COUNTS}
    trials = Trials(context)
    for seed in context.seeds:
        record = trials.search(seed, keep=trials.count_of(KEPT_SHARE))
    cost = read_result(trials.runner.store.seed(seed) / "cost.json", COST_SCHEMA) or {}
    pretraining, search, steps = cost.get("seconds"), record["seconds"], trials.base.steps
    step = time_steps(trials.base, seed)
    measured: dict[str, Any] = {
        "bytes": {str(count): values for count, values in sizes.items()},
        "step": step,
        "T1": {"seconds": pretraining, "steps": steps.pretrain},
        "T2": {"seconds": search, "steps": steps.search},
        "T2/T1": search / pretraining if pretraining else None,
    }
    ratio = f"{search / pretraining:.2f} ({steps.search:,} steps to {steps.pretrain:,})" if pretraining else "-"
    rows = [
        ("x of 392 fields", "4N = 1,568 bytes", f"{sizes[392]['x']:,} bytes"),
        ("g, gradient, momentum and x", "about 16N = 6,272 bytes", f"{sizes[392]['x_and_optimizer']:,} bytes"),
        ("all buffers of the gates", "-", f"{sizes[392]['all']:,} bytes"),
        ("step with gates / step without", "negligible", f"{step['ratio']:.3f} (median of {TIMED_STEPS} pairs)"),
        ("T2 / T1", "about 1/4", ratio),
    ]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(1, 2, 1)
        labels = {"x_and_optimizer": "g, x, gradient, momentum", "all": "with all buffers"}
        for (key, label), color in zip(labels.items(), (KEPT, SECOND), strict=True):
            axes.plot(GATE_COUNTS, [sizes[count][key] for count in GATE_COUNTS], "o-", color=color, label=label)
        axes.set(xlabel="fields", ylabel="bytes")
        axes.legend(frameon=False, fontsize=8)
        axes = figure.add_subplot(1, 2, 2)
        axes.bar(["without", "with gates"], [step["plain"] * 1e3, step["gated"] * 1e3], color=KEPT)
        axes.set_ylabel("milliseconds per step")

    paper = {"bytes_of_x": "4N", "bytes": "4·4N", "T2/T1": 0.25}
    return ExperimentResult(measured, paper, rows, draw, (8.0, 3.2))


def gate_bytes(count: int) -> dict[str, int]:
    """Return the bytes of gates: x alone; with value, gradient and momentum; with all buffers."""
    gates = Gates([f"f{number}" for number in range(count)], gate_function("lpfs++"), 100)
    optimizer = gates.optimizer(penalty=0.1)
    values = gates()
    values.sum().backward()
    optimizer.step()
    assert gates.x.grad is not None
    state = [gates.x.grad, values, *optimizer.state[gates.x].values()]
    return {
        "x": _tensor_bytes(gates.x),
        "x_and_optimizer": sum(map(_tensor_bytes, [gates.x, *state])),
        "all": sum(map(_tensor_bytes, [*gates.parameters(), *gates.buffers(), *state])),
    }


def _tensor_bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def time_steps(plan: RunPlan, seed: int) -> dict[str, float]:
    """Return the median seconds of a step without and with gates, measured in turns, and their median ratio."""
    plain, gated = stages.new_model(plan, seed), stages.new_model(plan, seed)
    models: list[tuple[Model, list[Any]]] = [(plain, [plan.optimizer(plain)]), (gated, [plan.optimizer(gated)])]
    gates = attach(gated, steps=10 * TIMED_STEPS)
    models[1][1].extend([gates.optimizer(penalty=0.01), gates])
    stream = plan.stream(plan.splits.early, plan.schema.names, train=True, seed=seed)
    batches = list(islice(iter(stream), WARMUP_STEPS + TIMED_STEPS))
    pairs = []
    for number in range(WARMUP_STEPS + TIMED_STEPS):
        pair = []
        for model, steppers in models:
            start = time.perf_counter()
            steppers[0].zero_grad()
            bce_loss(*predict_batch(model, batches[number % len(batches)])).backward()
            for stepper in steppers:
                stepper.step()
            if plan.device.type == "cuda":
                torch.cuda.synchronize()
            pair.append(time.perf_counter() - start)
        pairs.append(pair)
    pairs = pairs[WARMUP_STEPS:]
    ratio = median(with_gates / without for without, with_gates in pairs)
    return {"plain": median(pair[0] for pair in pairs), "gated": median(pair[1] for pair in pairs), "ratio": ratio}
