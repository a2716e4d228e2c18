"""gates: the functions and their derivatives, as ε falls (the paper's figures of g and g')."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lpfs.gates.functions import gate_function
from lpfs.paper import draw
from lpfs.paper.job import Found, Job, Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SMALL = FULL = Scale(seeds=1)
EPSILONS = (1e-1, 1e-2, 1e-3, 1e-4)
GATES = ("lpfs", "lpfs++")


def run(job: Job) -> Found:
    """Evaluate both functions on a grid."""
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    curves: dict[str, dict[float, tuple[list[float], list[float]]]] = {name: {} for name in GATES}
    ours: dict[str, Any] = {}
    rows: list[tuple[str, str, str]] = []
    for name in GATES:
        function, numbers = gate_function(name), []
        for epsilon in EPSILONS:
            at = torch.tensor(epsilon, dtype=torch.float64)
            value, slope = function.value_and_slope(x, at)
            curves[name][epsilon] = value.tolist(), slope.tolist()
            ends = function.value_and_slope(torch.tensor([0.0, 1.0], dtype=torch.float64), at)
            numbers.append(
                {
                    "epsilon": epsilon,
                    "value_at_0": float(ends[0][0]),
                    "slope_at_0": float(ends[1][0]),
                    "value_at_1": float(ends[0][1]),
                    "largest_slope": float(slope.max()),
                }
            )
        ours[name] = {"alpha": function.alpha, "tau": function.tau, "by_epsilon": numbers}
        slopes = ", ".join(f"{each['slope_at_0']:.3g}" for each in numbers)
        rows.append((f"{name}: slope at 0, ε = .1 to 1e-4", SLOPES[name], slopes))
        rows.append((f"{name}: value at x = 1, ε = .1", STARTS[name], f"{numbers[0]['value_at_1']:.4f}"))

    def figure(figure: Figure) -> None:
        for column, name in enumerate(GATES):
            for line, what in enumerate(("g", "g'")):
                axes = figure.add_subplot(2, 2, 1 + column + 2 * line)
                lines = {
                    f"ε = {epsilon:g}": list(zip(x.tolist(), both[line], strict=True))
                    for epsilon, both in curves[name].items()
                }
                draw.series(axes, lines, "x", f"{what}, {name}")
                if line:
                    axes.set_yscale("symlog", linthresh=0.1)

    return Found(ours, {"slopes_at_0": SLOPES, "values_at_1": STARTS}, rows, figure, (9.0, 6.4))


SLOPES = {"lpfs": "exactly 0", "lpfs++": "α·ε^(1/τ)"}
STARTS = {"lpfs": "0.909", "lpfs++": "0.909 + 0.785αε (τ is left out)"}
