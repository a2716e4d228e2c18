"""Every experiment by name; adding one is a function and an entry in EXPERIMENTS. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ExperimentScale:
    """Size of an experiment; None: as ``select`` derives it from the data."""

    rows: int | None = None  # of the simulated log
    model: str = "mlp"
    model_options: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None
    pretrain: int | None = None  # steps
    search: int | None = None  # steps
    seeds: int = 3

    def settings(self) -> dict[str, Any]:
        """Return the settings of ``select`` and ``compare``."""
        return {
            "model": self.model,
            "model_options": dict(self.model_options),
            "batch_size": self.batch_size,
            "pretrain_steps": self.pretrain,
            "search_steps": self.search,
        }


@dataclass(frozen=True)
class Experiment:
    """An experiment of the paper."""

    run: str  # "package.module:function"
    summary: str  # one line on what it does
    claim: str  # what the paper says about it
    small: ExperimentScale  # the default
    full: ExperimentScale  # with --full
    presets: tuple[str, str] | None = None  # simulated logs of both sizes; None: it needs no data


DEFAULT_PRESETS = ("small", "terabyte")
TERABYTE_PRESETS = ("terabyte", "terabyte")
ABLATION_PRESETS = ("industrial-small", "industrial")
TINY_MODEL = {"dim": 4, "hidden": [64, 32]}
SMALL_MODEL = {"dim": 8, "hidden": [64, 32]}
LARGE_MODEL = {"dim": 16, "hidden": [256, 128]}
CROSS_MODEL = {"dim": 4, "hidden": [32, 16]}
USER_ITEM_MODEL = {"dim": 4, "other_dim": 4, "hidden": [64, 32]}


def _mlp(search: int, seeds: int) -> ExperimentScale:
    return ExperimentScale(60_000, "mlp", SMALL_MODEL, batch_size=128, pretrain=1000, search=search, seeds=seeds)


def _ablation(search: int, seeds: int) -> ExperimentScale:
    return ExperimentScale(60_000, "mlp", TINY_MODEL, batch_size=256, pretrain=600, search=search, seeds=seeds)


def _user_item(seeds: int) -> ExperimentScale:
    return ExperimentScale(model="user_item", batch_size=1024, seeds=seeds)


EXPERIMENTS: dict[str, Experiment] = {
    "gates": Experiment(
        "lpfs.paper.gate_experiments:gates",
        "the gate functions and their derivatives",
        "As ε falls g becomes a switch. The slope of LPFS at 0 is exactly 0, that of LPFS++ is α·ε^(1/τ), a small "
        "number that decays with ε.",
        ExperimentScale(seeds=1),
        ExperimentScale(seeds=1),
    ),
    "distribution": Experiment(
        "lpfs.paper.gate_experiments:distribution",
        "the continuous weights of group LASSO against polarized gates",
        "Group LASSO gives a continuous distribution that needs a threshold; gates are exactly 0 or around 1.",
        _mlp(search=1500, seeds=1),
        ExperimentScale(model="dlrm", seeds=1),
        DEFAULT_PRESETS,
    ),
    "terabyte": Experiment(
        "lpfs.paper.comparisons:terabyte",
        "27 fields, K = 10 to 26, against FSCD, UMEC, permutation and group LASSO; the 17 masks of the paper",
        "With few fields removed all methods choose almost the same; around a half LPFS and LPFS++ are clearly "
        "better. All 27 fields: AUC .797948.",
        ExperimentScale(400_000, "dlrm", SMALL_MODEL, batch_size=256, pretrain=700, search=700, seeds=2),
        ExperimentScale(model="dlrm", model_options=LARGE_MODEL, batch_size=512, seeds=3),
        TERABYTE_PRESETS,
    ),
    "terabyte-cross": Experiment(
        "lpfs.paper.comparisons:terabyte_cross",
        "27 fields and their 351 crosses",
        "LPFS and LPFS++ are ahead, above all where few of the 378 features are left.",
        ExperimentScale(400_000, "dlrm_cross", CROSS_MODEL, batch_size=256, pretrain=500, search=500, seeds=1),
        ExperimentScale(model="dlrm_cross", model_options=LARGE_MODEL, batch_size=512, seeds=3),
        TERABYTE_PRESETS,
    ),
    "industrial": Experiment(
        "lpfs.paper.comparisons:industrial",
        "user, item and combine fields, multi-task network",
        "The advantage of LPFS++ is more obvious on a large log with a complex network.",
        ExperimentScale(60_000, "user_item", USER_ITEM_MODEL, batch_size=256, pretrain=400, search=400, seeds=1),
        _user_item(seeds=3),
        ABLATION_PRESETS,
    ),
    "alpha": Experiment(
        "lpfs.paper.ablations:alpha",
        "AUC for several α, and the λ of each α at equal size",
        "In general, the larger α, the more informative the set. For about the same number of fields a larger α "
        "needs a larger λ.",
        _ablation(search=600, seeds=2),
        _user_item(seeds=3),
        ABLATION_PRESETS,
    ),
    "zero-gates": Experiment(
        "lpfs.paper.ablations:zero_gates",
        "number of zero gates over the steps for several α",
        "With larger α and λ zero gates appear earlier, their number oscillates more in the middle, and all of it "
        "settles near the end.",
        _ablation(search=1000, seeds=1),
        _user_item(seeds=1),
        ABLATION_PRESETS,
    ),
    "epsilon": Experiment(
        "lpfs.paper.ablations:epsilon",
        "the decay rate of ε, and its final value",
        "The decay rate is not much important; a final ε between 1e-4 and 1e-8 has no significant effect.",
        _mlp(search=1000, seeds=3),
        ExperimentScale(model="dlrm", seeds=3),
        DEFAULT_PRESETS,
    ),
    "l0-prox": Experiment(
        "lpfs.paper.ablations:l0_prox",
        "the hard threshold of the ℓ0 penalty against the soft threshold of ℓ1",
        "ℓ0 is very sensitive to the start of x: above √(2λη) it is hardly penalised, below it becomes zero very "
        "quickly.",
        _mlp(search=1000, seeds=1),
        ExperimentScale(model="dlrm", seeds=1),
        DEFAULT_PRESETS,
    ),
    "gate-functions": Experiment(
        "lpfs.paper.gate_experiments:gate_functions",
        "gate functions of related work, other odd functions, decaying noise, x as the norm of weights",
        "Named and not tried: other odd functions might work better; noise would be another way to revive; x may "
        "be the norm of the first layer's weights.",
        _mlp(search=1000, seeds=3),
        ExperimentScale(model="dlrm", seeds=3),
        DEFAULT_PRESETS,
    ),
    "hot-start": Experiment(
        "lpfs.paper.cost_experiments:hot_start",
        "AUC immediately before and after the fields are removed",
        "Removing fields with exactly zero gates changes nothing; cutting small weights damages the model.",
        _mlp(search=1000, seeds=1),
        ExperimentScale(model="dlrm", seeds=1),
        DEFAULT_PRESETS,
    ),
    "robustness": Experiment(
        "lpfs.paper.ablations:robustness",
        "overlap of the kept fields over runs, 177 of 332 fields kept",
        "The sets of different runs are highly overlapping.",
        _ablation(search=800, seeds=4),
        _user_item(seeds=5),
        ABLATION_PRESETS,
    ),
    "complexity": Experiment(
        "lpfs.paper.cost_experiments:complexity",
        "memory and step time of the gates, duration of search and pretraining",
        "x takes 4N bytes, what goes with it about 4·4N; the longer step is negligible; T2 is about T1/4.",
        ExperimentScale(1_000_000, "dlrm", batch_size=128, pretrain=800, search=200, seeds=2),
        ExperimentScale(model="dlrm", batch_size=512, seeds=2),
        TERABYTE_PRESETS,
    ),
}
