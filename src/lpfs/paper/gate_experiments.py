r"""Experiments on gates: gate functions and their derivatives, all gate functions in a search, distributions.

The search with norm gates has no vector x; the norm of the columns of a field in the first layer takes its place.

.. math:: x_n = \|W_n\| / \|W_n^0\|, \qquad e_n \mapsto g_\epsilon(x_n) / g_\epsilon(1) \cdot e_n

The paper names it as a choice of x. The proximal step of λ‖x‖₁ is then that of group LASSO on W, with λ moved
until K blocks are left (:mod:`lpfs.methods.group_sparsity`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lpfs.compare.run_dir import Record
from lpfs.errors import InputError
from lpfs.gates.functions import FUNCTIONS, GateFunction, gate_function
from lpfs.gates.schedule import scaled
from lpfs.methods.base import SearchCost, SearchTask
from lpfs.methods.group_sparsity import ColumnShrinkage, FirstLayer, first_layer
from lpfs.methods.masks import FieldMask, apply_mask
from lpfs.models.base import Model
from lpfs.paper.context import ExperimentContext, ExperimentResult
from lpfs.paper.trials import Trials, plot_histogram, plot_points, plot_series
from lpfs.paper.variants import WRITTEN_METHODS, written_options
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan
from lpfs.schema import Selection
from lpfs.train.callbacks import Callback, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GATES = ("lpfs", "lpfs++")
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4)
SLOPES_AT_0 = {"lpfs": "exactly 0", "lpfs++": "α·ε^(1/τ)"}  # of the paper
VALUES_AT_1 = {"lpfs": "0.909", "lpfs++": "0.909 + 0.785αε (τ is left out)"}  # of the paper, ε = .1
FUNCTIONS_SHARE = 1 / 3  # share of the fields that is kept in gate-functions
PAPER_CLAIMS = {"lpfs": "its first method", "lpfs++": "its best method", "lpfs-noise": "named as another solution"}
NORM_GATES = "x = norm of W (lpfs++)"
DISTRIBUTION_SHARE = 0.5  # share of the fields that is kept in distribution
DISTRIBUTION_METHODS = ("lpfs_paper", "lpfs++_paper", "lpfs", "lpfs++")  # the paper as written, and our defaults
DISTRIBUTION_CLAIMS = ("continuous; some 0, many very close to 0", "exactly 0, or around 1")  # group LASSO, gates
NEAR_ZERO = 0.2  # of the median of the non-zero values: a smaller one is near zero
TINY = 1e-12  # below the square root, so that a block at zero has a gradient


def gates(context: ExperimentContext) -> ExperimentResult:
    """Evaluate both gate functions and their derivatives on a grid, for decreasing ε."""
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    curves: dict[str, dict[float, tuple[list[float], list[float]]]] = {name: {} for name in GATES}
    measured: dict[str, Any] = {}
    rows: list[tuple[str, str, str]] = []
    for name in GATES:
        function, by_epsilon = gate_function(name), []
        for epsilon in EPSILONS:
            tensor = torch.tensor(epsilon, dtype=torch.float64)
            values, slopes = function.value_and_slope(x, tensor)
            curves[name][epsilon] = values.tolist(), slopes.tolist()
            ends = function.value_and_slope(torch.tensor([0.0, 1.0], dtype=torch.float64), tensor)
            facts = {"value_at_0": ends[0][0], "slope_at_0": ends[1][0], "value_at_1": ends[0][1]}
            facts["largest_slope"] = slopes.max()
            by_epsilon.append({"epsilon": epsilon, **{key: float(value) for key, value in facts.items()}})
        measured[name] = {"alpha": function.alpha, "tau": function.tau, "by_epsilon": by_epsilon}
        at_zero = ", ".join(f"{point['slope_at_0']:.3g}" for point in by_epsilon)
        rows.append((f"{name}: slope at 0, ε = .1 to 1e-4", SLOPES_AT_0[name], at_zero))
        rows.append((f"{name}: value at x = 1, ε = .1", VALUES_AT_1[name], f"{by_epsilon[0]['value_at_1']:.4f}"))

    def draw(figure: Figure) -> None:
        for column, name in enumerate(GATES):
            for row, symbol in enumerate(("g", "g'")):
                axes = figure.add_subplot(2, 2, 1 + column + 2 * row)
                lines = {
                    f"ε = {epsilon:g}": list(zip(x.tolist(), both[row], strict=True))
                    for epsilon, both in curves[name].items()
                }
                plot_series(axes, lines, "x", f"{symbol}, {name}")
                if row:
                    axes.set_yscale("symlog", linthresh=0.1)

    paper = {"slopes_at_0": SLOPES_AT_0, "values_at_1": VALUES_AT_1}
    return ExperimentResult(measured, paper, rows, draw, (9.0, 6.4))


def gate_functions(context: ExperimentContext) -> ExperimentResult:
    """Search with every gate function for the same number of fields: AUC, recall and overlap over seeds."""
    trials = Trials(context)
    keep = trials.count_of(FUNCTIONS_SHARE)
    by_function = trials.evaluate({name: {"keep": keep, "options": {"gate": name}} for name in FUNCTIONS})
    try:
        search = {"keep": keep, "method": "group_lasso", "search": search_norm_gates, "norm_gates": True}
        by_function |= trials.evaluate({NORM_GATES: search})
    except InputError as error:  # the model has no such first layer
        context.console.message(f"  {NORM_GATES}: {error}")
    rows = []
    for name, record in by_function.items():
        auc = "-" if record["auc"] is None else f"AUC {record['auc']:.4f}"
        recall = "" if record["recall"] is None else f", recall {record['recall']:.2f}"
        overlap = "" if record["overlap"] is None else f", overlap {record['overlap']:.2f}"
        rows.append((name, PAPER_CLAIMS.get(name, "not tried"), f"{auc}{recall}{overlap}"))
    measured = {"keep": keep, "fields": len(trials.names), "by_function": by_function}

    def draw(figure: Figure) -> None:
        aucs = {name: record["by_seed"] for name, record in by_function.items()}
        plot_points(figure.add_subplot(), aucs, f"test AUC of {keep} fields (diamonds: mean)")

    return ExperimentResult(measured, {"claims": PAPER_CLAIMS}, rows, draw, (7.0, 4.2))


class NormGates(FieldMask):
    """Factors of the fields (N,) computed from the weights of the first layer."""

    def __init__(self, layer: FirstLayer, function: GateFunction, steps: int, seed: int) -> None:
        super().__init__(layer.names, steps, seed)
        self.layer, self.function, self.schedule = layer, function, scaled(function, steps)
        self.initial_norms = self.norms().detach().clamp_min(TINY)

    def norms(self) -> Tensor:
        """Return ‖W_n‖ (N,), with its gradient."""
        weight = self.layer.weight
        total = weight.new_zeros(len(self.names) + 1).index_add(0, self.layer.owner, weight.square().sum(0))
        return (total[:-1] + TINY**2).sqrt()

    def forward(self) -> Tensor:
        """Return g(x) / g(1) (N,)."""
        x = self.norms() / self.initial_norms
        epsilon = x.new_tensor(self.schedule.epsilon(self.step))
        factors: Tensor = self.function.value(x, epsilon) / self.function.value(x.new_ones(()), epsilon)
        return factors


@dataclass(eq=False)
class _SetMaskStep(Callback):
    mask: NormGates

    def after_step(self, state: State) -> None:
        self.mask.set_step(state.step)


def search_norm_gates(plan: RunPlan, pretrained: stages.Trained, seed: int) -> tuple[Model, Any, Selection]:
    """Search like ``stages.search_fields``, with gates on the norms of the first layer."""
    model, optimizer = pretrained
    stream, _ = stages.search_streams(plan, model.reads.names, seed)
    steps = plan.steps.search
    training = replace(plan.training(steps, seed, keep_best=False), lr=None)
    task = SearchTask(model, optimizer, stream, None, plan.target, steps, seed, plan.run_dir, training=training)
    layer = first_layer(model, "norm gates")
    mask = NormGates(layer, gate_function("lpfs++"), steps, seed)
    shrinkage, cost = ColumnShrinkage(task, layer), SearchCost()
    with apply_mask(model, mask, "norm gates"), stages.scaled_learning_rate(optimizer, plan.steps.lr_factor):
        task.fit(_SetMaskStep(mask), shrinkage, cost)
    return model, optimizer, shrinkage.selection(task, "norm gates", cost)


def distribution(context: ExperimentContext) -> ExperimentResult:
    """Compare the norms of group LASSO with the gates of LPFS and LPFS++, at the same number of fields."""
    trials = Trials(context)
    keep = trials.count_of(DISTRIBUTION_SHARE)
    record = trials.search(context.seed, "group_lasso", keep=keep, probe=first_layer_norms)
    values = {"group LASSO: ‖W‖": list(record["probe"].values())}
    for method in DISTRIBUTION_METHODS:
        options = written_options(context, "terabyte") if method in WRITTEN_METHODS else {}
        record = trials.search(context.seed, method, keep=keep, options=options)
        values[f"{method}: gate"] = [abs(value) for value in record["gates"].values()]
    measured: dict[str, Any] = {"keep": keep, "fields": len(trials.names)}
    rows = []
    for number, (name, numbers) in enumerate(values.items()):
        claim, facts = DISTRIBUTION_CLAIMS[min(number, 1)], polarization(numbers)
        measured[name] = {**facts, "values": [round(number, 6) for number in numbers]}
        ratio = f"smallest / median of the rest {facts['smallest_ratio']:.3f}"
        rows.append((name, claim, f"{facts['zeros']} at 0, {facts['near_zero']} near 0; {ratio}"))

    def draw(figure: Figure) -> None:
        for number, (name, numbers) in enumerate(values.items()):
            plot_histogram(figure.add_subplot(1, len(values), number + 1), numbers, name)

    return ExperimentResult(measured, {"claims": list(DISTRIBUTION_CLAIMS)}, rows, draw, (14.0, 3.2))


def first_layer_norms(plan: RunPlan, model: Model) -> Record:
    """Return the norm of the columns of every field in the first layer."""
    layer = first_layer(model, "group_lasso")
    return dict(zip(layer.names, layer.energies().sqrt().tolist(), strict=True))


def polarization(values: Sequence[float]) -> dict[str, Any]:
    """Return how many values are zero, how many others are near zero, and their minimum divided by their median.

    >>> polarization([0.0, 0.1, 1.0, 1.2])
    {'zeros': 1, 'near_zero': 1, 'smallest_ratio': 0.1, 'median': 1.0}
    """
    nonzero = sorted(value for value in values if value != 0)
    if not nonzero:
        return {"zeros": len(values), "near_zero": 0, "smallest_ratio": 0.0, "median": 0.0}
    center = median(nonzero)
    return {
        "zeros": len(values) - len(nonzero),
        "near_zero": sum(value < NEAR_ZERO * center for value in nonzero),
        "smallest_ratio": nonzero[0] / center,
        "median": center,
    }
