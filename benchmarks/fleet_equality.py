"""Why a fleet and single runs differ: rounding that training amplifies, or a mistake? Step by step.

    python benchmarks/fleet_equality.py [--device cuda] [--out benchmarks/results/fleet_equality.json]

Two trainings of the same model are compared after some of 200 steps, by the largest difference of a parameter:

* the same single run twice, step by step and captured as a CUDA graph (is a run deterministic?);
* a single run step by step against the captured one (is the capture a step too many or too few?);
* the fleet against single runs, step by step and captured, and against a larger fleet: does a replica depend on what
  else is trained with it?
* a single run against itself with initial parameters that are changed by one rounding, a relative 2**-23: how much of
  such a difference training amplifies, without any fleet;
* the last two in float64, where a rounding is 2**-52, and with SGD, whose step is proportional to the gradient. In its
  first steps Adagrad divides a gradient by its own size, so that a gradient of rounding errors alone moves a parameter
  by the learning rate in a random direction.

A mistake would give the same difference in every precision; rounding gives one that is smaller by 2**-29 in float64.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fleet import SCHEMA, make_batches, make_replica
from torch import Tensor, nn

from lpfs.data.batch import Batch
from lpfs.train.callbacks import Callback, State
from lpfs.train.config import Training
from lpfs.train.fit import fit
from lpfs.train.fleet import Fleet, FleetStream

RECORDED = (*range(1, 11), 20, 50, 100, 200)  # steps after which parameters are compared
REPLICAS = 3
EVALUATED = 8  # batches whose mean loss is compared at the end

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One training: what is trained, and how."""

    kind: str  # single or fleet
    graph: bool = False
    dtype: torch.dtype = torch.float32
    optimizer: str = "adagrad"
    perturbed: bool = False
    others: int = 0  # further replicas of a fleet, which are not compared


class Recorder(Callback):
    """Keeps the parameters of every replica after some steps."""

    def __init__(self, replicas: int) -> None:
        self.replicas = replicas
        self.recorded: dict[int, list[Parameters]] = {}

    def after_step(self, state: State) -> None:
        if state.step in RECORDED:
            states = [read_parameters(state.model, replica) for replica in range(self.replicas)]
            self.recorded[state.step] = [{name: value.clone() for name, value in each.items()} for each in states]


def read_parameters(model: nn.Module, replica: int) -> Parameters:
    """Return the parameters of a single model, or of a replica."""
    if isinstance(model, Fleet):
        return model.replica_state(replica)
    return {name: value.detach() for name, value in model.named_parameters()}


def initial_model(run: Run, seed: int) -> nn.Module:
    """Return an untrained model; a perturbed one has every parameter changed by one rounding, up or down."""
    model = make_replica(seed).to(run.dtype)
    if run.perturbed:
        source = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            sign = torch.randint(0, 2, weight.shape, generator=source).to(run.dtype) * 2 - 1
            weight.detach().mul_(1 + sign * torch.finfo(run.dtype).eps)
    return model


def train(run: Run, batches: Sequence[Batch], device: str) -> dict[int, list[Parameters]]:
    """Return the parameters of all replicas after the recorded steps."""
    config = Training(steps=RECORDED[-1], graph=run.graph, quiet=True, optimizer=run.optimizer)  # type: ignore[arg-type]
    models = [initial_model(run, seed) for seed in range(REPLICAS + run.others)]
    if run.kind == "fleet":
        fleet, recorder = Fleet(models, SCHEMA).to(device), Recorder(REPLICAS)
        fit(fleet, FleetStream(fleet, [batches]), fleet.make_optimizer(config), callbacks=[recorder], config=config)
        return recorder.recorded
    recorders = [Recorder(1) for _ in models]
    for model, recorder in zip(models, recorders, strict=True):
        fit(model.to(device), batches, callbacks=[recorder], config=config)
    return {step: [recorder.recorded[step][0] for recorder in recorders] for step in RECORDED}


def mean_losses(states: Sequence[Parameters], batches: Sequence[Batch], device: str) -> list[float]:
    """Return the mean loss of each replica on some of its training batches."""
    losses = []
    for seed, state in enumerate(states):
        model = make_replica(seed).to(device, next(iter(state.values())).dtype)
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            logits, labels = (torch.cat(parts) for parts in zip(*((model(b), b.labels) for b in batches), strict=True))
            loss = nn.functional.binary_cross_entropy_with_logits(logits.double(), labels[:, 0].double())
        losses.append(float(loss))
    return losses


def compare(first: dict[int, list[Parameters]], second: dict[int, list[Parameters]]) -> dict[str, Any]:
    """Return the largest difference of a parameter after every recorded step, and the first step that differs."""
    largest: dict[int, float] = {}
    moved = 0.0
    for step in RECORDED:
        pairs = [(a[name], b[name]) for a, b in zip(first[step], second[step], strict=True) for name in a]
        differences = [(a - b).abs() for a, b in pairs]
        largest[step] = max(float(difference.max()) for difference in differences)
        moved = float(torch.cat([(difference > 1e-3).flatten() for difference in differences]).double().mean())
    differing = [step for step, value in largest.items() if value > 0]
    return {
        "first_step_that_differs": differing[0] if differing else None,
        "largest_difference": {str(step): float(f"{value:.3g}") for step, value in largest.items()},
        "fraction_above_1e-3_at_the_end": float(f"{moved:.3g}"),
    }


def comparisons(device: str) -> dict[str, tuple[Run, Run]]:
    """Return the pairs of trainings by name."""
    pairs: dict[str, tuple[Run, Run]] = {
        "single, again": (Run("single"), Run("single")),
        "fleet, again": (Run("fleet"), Run("fleet")),
        "fleet against single": (Run("fleet"), Run("single")),
        "fleet against a larger fleet": (Run("fleet"), Run("fleet", others=13)),
        "single against single with parameters changed by 2**-23": (Run("single"), Run("single", perturbed=True)),
    }
    if device != "cpu":
        pairs |= {
            "single captured, again": (Run("single", graph=True), Run("single", graph=True)),
            "single captured against single": (Run("single", graph=True), Run("single")),
            "fleet captured against fleet": (Run("fleet", graph=True), Run("fleet")),
            "fleet captured against single captured": (Run("fleet", graph=True), Run("single", graph=True)),
            "fleet captured against a larger fleet": (Run("fleet", graph=True), Run("fleet", graph=True, others=13)),
        }
    for name, settings in {"float64": {"dtype": torch.float64}, "SGD": {"optimizer": "sgd"}}.items():
        single = Run("single", **settings)  # type: ignore[arg-type]
        other = Run("single", perturbed=True, **settings)  # type: ignore[arg-type]
        pairs[f"{name}: fleet against single"] = (Run("fleet", **settings), single)  # type: ignore[arg-type]
        pairs[f"{name}: single against single with parameters changed by one rounding"] = (single, other)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help="comparisons whose name contains one of these texts")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = make_batches(args.batch, 0, args.device)
    trained: dict[tuple[Run, int], dict[int, list[Parameters]]] = {}

    def result(run: Run, again: int = 0) -> dict[int, list[Parameters]]:
        if (run, again) not in trained:
            recorded = train(run, batches, args.device)
            trained[run, again] = {
                step: [{name: value.cpu() for name, value in state.items()} for state in states]
                for step, states in recorded.items()
            }
        return trained[run, again]

    rows = {}
    for name, (first, second) in comparisons(args.device).items():
        if not any(text in name for text in args.only):
            continue
        states = result(first), result(second, again=int(first == second))
        losses = [mean_losses(recorded[RECORDED[-1]], batches[:EVALUATED], args.device) for recorded in states]
        rows[name] = compare(*states)
        rows[name]["mean_loss"] = [[round(loss, 5) for loss in each] for each in losses]
        shown = {step: rows[name]["largest_difference"][str(step)] for step in (1, 2, 4, 5, 10, 50, 200)}
        print(
            f"{name}: first at {rows[name]['first_step_that_differs']}; {shown}; {rows[name]['mean_loss']}", flush=True
        )
    report = {
        "command": shlex.join(["python", "benchmarks/fleet_equality.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "torch": torch.__version__,
        **{"threads": args.threads, "batch": args.batch, "replicas": REPLICAS},
        "comparisons": rows,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
