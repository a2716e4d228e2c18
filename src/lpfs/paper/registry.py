"""Every experiment by name; adding one is a file here and a line in EXPERIMENTS."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """Where an experiment is, what it does in a line, and what the paper says of it.

    ``preset`` is the simulated log that stands in for the paper's, in small and in full; None: it needs no data.
    """

    module: str
    summary: str
    claim: str
    preset: tuple[str, str] | None = None


ABLATED = ("industrial-small", "industrial")
QUICK = ("small", "terabyte")
EXPERIMENTS: dict[str, Entry] = {
    "gates": Entry(
        "lpfs.paper.gates",
        "the gate functions and their derivatives",
        "As ε falls g becomes a switch. The slope of LPFS at 0 is exactly 0, that of LPFS++ is α·ε^(1/τ), a small "
        "number that decays with ε.",
    ),
    "distribution": Entry(
        "lpfs.paper.distribution",
        "LASSO's continuous weights against polarized gates",
        "Group LASSO gives a continuous distribution that needs a threshold; gates are exactly 0 or around 1.",
        QUICK,
    ),
    "terabyte": Entry(
        "lpfs.paper.terabyte",
        "27 fields, K = 10 to 26, against FSCD, UMEC, permutation and group LASSO; the paper's 17 masks",
        "With few fields removed all methods choose almost the same; around a half LPFS and LPFS++ are clearly "
        "better. All 27 fields: AUC .797948.",
        ("terabyte", "terabyte"),
    ),
    "terabyte-cross": Entry(
        "lpfs.paper.terabyte_cross",
        "27 fields and their 351 crosses",
        "LPFS and LPFS++ are ahead, above all where few of the 378 features are left.",
        ("terabyte", "terabyte"),
    ),
    "industrial": Entry(
        "lpfs.paper.industrial",
        "user, item and combine fields, multi-task network",
        "The advantage of LPFS++ is more obvious on a large log with a complex network.",
        ABLATED,
    ),
    "alpha": Entry(
        "lpfs.paper.alpha",
        "the ablation over α, and λ by α at equal size",
        "In general, the larger α, the more informative the set. For about the same number of fields a larger α "
        "needs a larger λ.",
        ABLATED,
    ),
    "zero-gates": Entry(
        "lpfs.paper.zero_gates",
        "zero gates over the steps for several α",
        "With larger α and λ zero gates appear earlier, their number oscillates more in the middle, and all of it "
        "settles near the end.",
        ABLATED,
    ),
    "epsilon": Entry(
        "lpfs.paper.epsilon",
        "the decay of ε, and its final value",
        "The decay rate is not much important; a final ε between 1e-4 and 1e-8 has no significant effect.",
        QUICK,
    ),
    "l0-prox": Entry(
        "lpfs.paper.l0_prox",
        "the hard threshold of the ℓ0 penalty against the soft one",
        "ℓ0 is very sensitive to the start of x: above √(2λη) it is hardly penalised, below it becomes zero very "
        "quickly.",
        QUICK,
    ),
    "gate-functions": Entry(
        "lpfs.paper.gate_functions",
        "the related work's functions, other odd functions, fading noise, x tied to weight norms",
        "Named and not tried: other odd functions might work better; noise would be another way to revive; x may "
        "be the norm of the first layer's weights.",
        QUICK,
    ),
    "hot-start": Entry(
        "lpfs.paper.hot_start",
        "AUC right before and right after the fields are removed",
        "Removing fields with exactly zero gates changes nothing; cutting small weights damages the model.",
        QUICK,
    ),
    "robustness": Entry(
        "lpfs.paper.robustness",
        "overlap of the sets over runs, 177 of 332 fields kept",
        "The sets of different runs are highly overlapping.",
        ABLATED,
    ),
    "complexity": Entry(
        "lpfs.paper.complexity",
        "memory and step time of the gates, search against pretraining",
        "x takes 4N bytes, what goes with it about 4·4N; the longer step is negligible; T2 is about T1/4.",
        ("terabyte", "terabyte"),
    ),
}
