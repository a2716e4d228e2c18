"""hot-start: the AUC of the model that a method leaves, right before and right after its fields are removed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lpfs.compare.run_dir import Record
from lpfs.errors import InputError
from lpfs.gates.module import NAME as GATES
from lpfs.methods.masks import looking
from lpfs.methods.registry import METHODS
from lpfs.models.base import Model
from lpfs.paper.job import Found, Job, Scale
from lpfs.paper.trials import Trials
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan
from lpfs.plots import DROPPED, INK, KEPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = {"dim": 8, "hidden": [64, 32]}
SMALL = Scale(60_000, "mlp", SHAPE, batch_size=128, pretrain=1000, search=1000, seeds=1)
FULL = Scale(model="dlrm", seeds=1)
SHARE = 0.5
NO_SEARCH = ("all", "oracle", "autofis")  # nothing is removed, nothing is learnt, or only crosses are chosen
OWN = ("lpfs", "lpfs++")  # their gates are part of the model


class Masked:
    """A search that sees the test AUC of the model while a method's mask is still on it."""

    def __init__(self) -> None:
        self.auc: float | None = None

    def find(self, work: RunPlan, pretrained: stages.Trained, seed: int) -> tuple[Model, Any, Any]:
        """Search, and look."""
        with looking(partial(self.look, work)):
            return stages.search_fields(work, pretrained, seed)

    def look(self, work: RunPlan, model: Model) -> None:
        """Judge the model as it is."""
        self.auc = stages.evaluate_split(work, model, work.splits.test).auc


def removed(masked: Masked, work: RunPlan, model: Model) -> Record:
    """Return the test AUC before and after the dropped fields are removed.

    Before, the model has the method's own gates or mask where it has some, else all of its fields.
    """
    gates = getattr(model, GATES)
    closed = gates.x.detach().clone()
    if work.settings.method not in OWN:
        with torch.no_grad():
            gates.x.fill_(1.0)
    before = stages.evaluate_split(work, model, work.splits.test).auc if masked.auc is None else masked.auc
    with torch.no_grad():
        gates.x.copy_(closed)
    optimizer = work.optimizer(torch.nn.ParameterList(gates.model_parameters()))
    zeros, cut, _ = stages.absorb_and_prune(work, model, optimizer, gates.selection())
    after = stages.evaluate_split(work, stages_model(cut.model), work.splits.test).auc
    moved = max(each.certificate.max_logit_change or 0.0 for each in (zeros, cut))
    return {"before": before, "after": after, "max_logit_change": moved}


def stages_model(model: Any) -> Model:
    """Return a pruned model as what it is."""
    assert isinstance(model, Model)
    return model


def run(job: Job) -> Found:
    """Search with every method, and remove what it drops."""
    trials = Trials(job)
    keep = trials.size(SHARE)
    found: dict[str, Any] = {}
    for method in METHODS:
        if method in NO_SEARCH:
            continue
        try:
            masked = Masked()
            probe = partial(removed, masked)
            told = trials.search(
                job.seed, method, keep=keep, find=masked.find, probe=probe, before="with its mask"
            )
        except InputError as error:
            job.console.message(f"  {method}: {error}")
            continue
        if "probe" in told:
            found[method] = told["probe"]
    lost = {name: each["after"] - each["before"] for name, each in found.items()}
    order = sorted(lost, key=lambda name: -lost[name])
    rows = [
        (
            name,
            "no change" if name in OWN else "damage",
            f"{found[name]['before']:.5f} to {found[name]['after']:.5f} ({lost[name]:+.5f})",
        )
        for name in order
    ]
    ours = {"keep": keep, "of": len(trials.names), "by_method": found}

    def figure(figure: Figure) -> None:
        axes = figure.add_subplot()
        for number, name in enumerate(order):
            ends = [found[name]["before"], found[name]["after"]]
            axes.plot(ends, [number] * 2, color=DROPPED, zorder=1)
            axes.plot(ends[:1], [number], "o", color=INK, label=None if number else "before")
            axes.plot(ends[1:], [number], "D", color=KEPT, label=None if number else "after")
        axes.set_yticks(range(len(order)), order, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("test AUC right before and right after the fields are removed")
        axes.legend(frameon=False, fontsize=8)

    return Found(ours, {}, rows, figure, (7.0, 0.9 + 0.24 * len(order)))
