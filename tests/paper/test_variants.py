"""Experiments run as the paper writes them, with this package's defaults beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from lpfs.methods.registry import make_method
from lpfs.paper import ablations, comparisons, gate_experiments
from lpfs.paper.context import ExperimentResult
from lpfs.paper.variants import WRITTEN_METHODS, in_both_variants, variants, written_options
from lpfs.plots import new_figure


def test_the_paper_comes_first_and_our_defaults_beside_it():
    seen = []

    @in_both_variants("industrial")
    def experiment(context, variant):
        seen.append((variant.method, variant.with_options(alpha=50.0)))
        return ExperimentResult({"auc": len(seen)}, {"n": 1}, [("AUC", "high", str(len(seen)))], draw, (5.0, 2.0))

    def draw(figure):
        figure.add_subplot().plot([0, 1])

    result = experiment(SimpleNamespace(full=False))
    assert seen == [
        ("lpfs++_paper", {"rescale": "rms", "final_epsilon": 1e-4, "alpha": 50.0}),
        ("lpfs++", {"alpha": 50.0}),
    ]
    assert result.measured == {"as_written": {"auc": 1}, "defaults": {"auc": 2}}
    assert list(result.rows) == [("as written: AUC", "high", "1"), ("our defaults: AUC", "high", "2")]
    assert result.size == (5.0, 4.0)
    figure = new_figure(*result.size)
    result.draw(figure)
    assert len(figure.axes) == 2


def test_at_full_size_the_schedule_is_absolute():
    small, full = SimpleNamespace(full=False), SimpleNamespace(full=True)
    assert written_options(small, "terabyte") == {}
    assert written_options(full, "terabyte") == {"schedule": "terabyte"}
    assert written_options(full, "industrial")["schedule"] == "industrial"
    for context in (small, full):
        for log in ("terabyte", "industrial"):
            for variant in variants(context, log):
                make_method(variant.method, variant.options)  # all options exist


def test_experiments_on_the_algorithm_have_both():
    for methods in (
        comparisons.TERABYTE_METHODS,
        comparisons.CROSS_METHODS,
        comparisons.INDUSTRIAL_METHODS,
        ablations.ROBUSTNESS_METHODS,
        gate_experiments.DISTRIBUTION_METHODS,
    ):
        assert set(WRITTEN_METHODS) | {"lpfs++", "lpfs"} <= set(methods)
    for experiment in (ablations.alpha, ablations.zero_gates, ablations.epsilon, ablations.l0_prox):
        assert hasattr(experiment, "__wrapped__")  # in_both_variants
