"""Experiments that compare methods: terabyte, terabyte-cross, industrial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lpfs._console import Console
from lpfs._text import truncate_middle
from lpfs.compare.run_dir import digest
from lpfs.compare.runner import run_comparison
from lpfs.compare.summary import Comparison
from lpfs.errors import InputError
from lpfs.paper.context import ExperimentContext, ExperimentResult
from lpfs.paper.masks import TERABYTE_MASKS, mask_fields
from lpfs.paper.trials import Trials, plot_curves
from lpfs.paper.variants import WRITTEN_METHODS, PaperLog, written_options
from lpfs.pipeline.data import with_source
from lpfs.pipeline.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TERABYTE_SIZES = (10, 14, 18, 22, 26)
TERABYTE_METHODS = (*WRITTEN_METHODS, "lpfs++", "lpfs", "fscd", "umec", "permutation", "group_lasso")
TERABYTE_ALL_FIELDS = {"auc": 0.797948, "accuracy": 0.811079, "logloss": 0.423315}  # of the paper
TERABYTE_CLAIMS = {
    "all fields": f"{TERABYTE_ALL_FIELDS['auc']:.6f}",
    "lpfs++_paper": "best, clearly so around half of the fields",
    "lpfs_paper": "second",
    "umec": "poor",
}
CROSS_SIZES = {False: (20, 60, 150), True: (20, 40, 60, 80, 100, 150, 200, 300)}  # by ``full``
CROSS_METHODS = (*WRITTEN_METHODS, "lpfs++", "lpfs", "fscd", "permutation", "group_lasso", "autofis")
CROSS_CLAIMS = {"lpfs++_paper": "ahead, above all if few are left", "lpfs_paper": "ahead of the others"}
INDUSTRIAL_SHARES = (0.1, 0.3, 0.6)  # of the categorical fields
INDUSTRIAL_METHODS = (*WRITTEN_METHODS, "lpfs++", "lpfs", "fscd", "permutation", "group_lasso")
INDUSTRIAL_CLAIMS = {"lpfs++_paper": "best, more obviously than on Terabyte", "lpfs_paper": "second"}
ONLY_DRAWN = "only drawn in the paper"


def terabyte(context: ExperimentContext) -> ExperimentResult:
    """Compare methods on 27 fields, then train the masks of the paper in the same way."""
    sizes = tuple(TERABYTE_MASKS) if context.full else TERABYTE_SIZES
    comparison = compare_methods(context, TERABYTE_METHODS, sizes, "terabyte")
    trials = Trials(context)
    known = [size for size in sorted(sizes) if set(mask_fields(size)) <= set(trials.names)]
    trials.train_together((mask_fields(size), seed) for size in known for seed in context.seeds)
    masks = {
        size: sum(trials.auc(mask_fields(size), seed) for seed in context.seeds) / len(context.seeds) for size in known
    }
    rows = comparison_rows(comparison, TERABYTE_CLAIMS)
    if masks:
        simulated = "" if context.log.preset is None else "; meaningless on a simulated one"
        aucs = ", ".join(f"{size}: {auc:.4f}" for size, auc in masks.items())
        rows.append(("masks of the paper", f"kept by LPFS++ on the real log{simulated}", aucs))
    measured = {**comparison_numbers(comparison), "masks": {str(size): auc for size, auc in masks.items()}}
    paper = {"all_fields": TERABYTE_ALL_FIELDS, "masks": dict(TERABYTE_MASKS), "curves": ONLY_DRAWN}
    draw = partial(draw_comparison, comparison, {"masks of the paper": masks} if masks else {})
    return ExperimentResult(measured, paper, rows, draw, (7.5, 4.2))


def terabyte_cross(context: ExperimentContext) -> ExperimentResult:
    """Compare methods on 27 fields and all their crosses, 378 features in total."""
    comparison = compare_methods(context, CROSS_METHODS, CROSS_SIZES[context.full], "terabyte")
    rows, draw = comparison_rows(comparison, CROSS_CLAIMS), partial(draw_comparison, comparison, {})
    return ExperimentResult(comparison_numbers(comparison), {"features": 378, "curves": ONLY_DRAWN}, rows, draw)


def industrial(context: ExperimentContext) -> ExperimentResult:
    """Compare methods on user, item and combine fields, as in the paper.

    Numeric fields are always kept, and the learning rate of the weights rises to ten times its start.
    """
    if context.scale.model != "user_item":
        raise InputError("industrial needs user and item fields, which this log does not have; leave --data out")
    schema = context.log.dataset.schema
    numeric = tuple(field.name for field in schema if field.kind == "numeric")
    categorical = len(schema) - len(numeric)
    sizes = sorted({max(1, round(share * categorical)) + len(numeric) for share in INDUSTRIAL_SHARES})
    comparison = compare_methods(
        context, INDUSTRIAL_METHODS, sizes, "industrial", must_keep=numeric, lr_schedule="rise"
    )
    paper = {"fields": {"user": 250, "item": 46, "combine": 96, "numeric": 25}, "curves": ONLY_DRAWN}
    measured = {**comparison_numbers(comparison), "numeric_fields": len(numeric)}
    draw = partial(draw_comparison, comparison, {}, label=f"fields kept, including {len(numeric)} numeric fields")
    return ExperimentResult(measured, paper, comparison_rows(comparison, INDUSTRIAL_CLAIMS), draw)


def compare_methods(
    context: ExperimentContext, methods: Sequence[str], keep: Sequence[int], paper_log: PaperLog, **changes: Any
) -> Comparison:
    """Compare methods on the log of an experiment; the directory of the comparison contains its report.

    LPFS and LPFS++ as written have the options that the paper has on that log, the others their defaults.
    """
    values, log = {**context.scale.settings(), **changes}, context.log
    settings, dataset = with_source(Settings(seed=context.seed, fleet=context.fleet, **values), log.dataset)
    run_dir = context.work_dir / f"compare-{digest([values, dataset.fingerprint, context.seed])[:10]}"
    written = written_options(context, paper_log)
    options = {name: written for name in methods if name in WRITTEN_METHODS and written}
    request = {"methods": methods, "keep": keep, "seeds": context.scale.seeds, "options": options}
    return run_comparison(settings, dataset, run_dir, request, Console(quiet=context.console.quiet), truth=log.truth)


def draw_comparison(
    comparison: Comparison, other_curves: Mapping[str, Mapping[int, float]], figure: Figure, label: str = "fields kept"
) -> None:
    """Draw the AUC of every method over K, the best method first, and other curves."""
    curves = {
        name: {int(size): metrics["auc"]["value"] for size, metrics in method["sizes"].items()}
        for name, method in comparison.methods.items()
        if method["sizes"]
    }
    axes, all_fields = figure.add_subplot(), comparison.values["all_fields"]["auc"]
    plot_curves(axes, {**curves, **other_curves}, None if all_fields is None else all_fields["value"])
    axes.set_xlabel(label)


def comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    """Return the results of a comparison that an experiment stores."""
    names = ("best", "sizes", "seeds", "fields", "all_fields", "kinds", "fingerprint", "splits", "steps")
    method_names = ("area", "differences", "overlap", "search", "sizes", "failed")
    result_names = ("method", "keep", "seed", "auc", "kept")
    return {
        **{name: comparison.values[name] for name in names},
        "methods": {
            method: {name: values[name] for name in method_names} for method, values in comparison.methods.items()
        },
        "results": [{name: result.get(name) for name in result_names} for result in comparison.results],
    }


def comparison_rows(comparison: Comparison, claims: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return one row per method: its area, its verdict against the best method, and its AUC at every K."""
    all_fields = comparison.values["all_fields"]["auc"]
    text = "-" if all_fields is None else f"{all_fields['value']:.5f}"
    rows = [("all fields", claims.get("all fields", "-"), text)]
    for name, method in comparison.methods.items():
        aucs = ", ".join(f"{size}: {metrics['auc']['value']:.4f}" for size, metrics in method["sizes"].items())
        difference = method["differences"].get("best")
        verdict = "best" if name == comparison.best else "" if difference is None else difference["verdict"]
        area = "" if method["area"] is None else f"area {method['area']['value']:.4f} ({verdict}); "
        failed = truncate_middle(method["failed"][0]["reason"], 90) if method["failed"] and not aucs else ""
        rows.append((name, claims.get(name, "-"), f"{area}{aucs}{failed}"))
    return rows
