"""Variants of an experiment: the algorithm as the paper writes it, and this package's defaults beside it.

What does not replicate as written is then the paper's, and what differs between the variants is this package's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from lpfs.paper.context import ExperimentContext, ExperimentResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PaperLog = Literal["terabyte", "industrial"]  # logs that the paper has settings for
WRITTEN_METHODS = ("lpfs++_paper", "lpfs_paper")
INDUSTRIAL_OPTIONS: dict[str, Any] = {"rescale": "rms", "final_epsilon": 1e-4}  # only a part of the inputs is gated


@dataclass(frozen=True)
class Variant:
    """How LPFS++ is searched with."""

    key: str  # in the JSON file
    title: str  # in the table
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def with_options(self, **options: Any) -> dict[str, Any]:
        """Return the options of the variant with others added."""
        return {**self.options, **options}


def written_options(context: ExperimentContext, log: PaperLog) -> dict[str, Any]:
    """Return the options of the paper on one of its logs; at full size with its schedule in absolute steps."""
    options = dict(INDUSTRIAL_OPTIONS) if log == "industrial" else {}
    return {**options, "schedule": log} if context.full else options


def variants(context: ExperimentContext, log: PaperLog) -> tuple[Variant, Variant]:
    """Return the paper as written, and the defaults of this package."""
    written = Variant("as_written", "as written", "lpfs++_paper", written_options(context, log))
    return written, Variant("defaults", "our defaults", "lpfs++")


def in_both_variants(
    log: PaperLog,
) -> Callable[
    [Callable[[ExperimentContext, Variant], ExperimentResult]], Callable[[ExperimentContext], ExperimentResult]
]:
    """Run an experiment in both variants: as written first, this package's defaults beside it."""

    def decorate(
        run: Callable[[ExperimentContext, Variant], ExperimentResult],
    ) -> Callable[[ExperimentContext], ExperimentResult]:
        @wraps(run)
        def run_both(context: ExperimentContext) -> ExperimentResult:
            results = [(variant, run(context, variant)) for variant in variants(context, log)]
            first = results[0][1]
            measured = {variant.key: dict(result.measured) for variant, result in results}
            rows = [
                (f"{variant.title}: {name}", claim, text)
                for variant, result in results
                for name, claim, text in result.rows
            ]

            def draw(figure: Figure) -> None:
                parts: Any = figure.subfigures(len(results), 1)
                for part, (variant, result) in zip(parts, results, strict=True):
                    result.draw(part)
                    part.suptitle(variant.title, fontsize=9)

            width, height = first.size
            return ExperimentResult(measured, first.paper, rows, draw, (width, height * len(results)))

        return run_both

    return decorate
