"""Trials: the searches and trainings of an experiment, all from one pretrained model per seed. Figures.

Pretraining and training from scratch are those of ``compare``; a search may have any target or options.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeVar

from lpfs._console import Console
from lpfs._fileio import read_json, write_json_atomic
from lpfs.compare import statistics
from lpfs.compare.plan import ComparisonPlan
from lpfs.compare.run_dir import TRUE_KINDS, Record, ResultStore, digest
from lpfs.compare.runner import POLL_SECONDS, Runner
from lpfs.errors import AllGatesZeroError, LockedError, SearchError
from lpfs.gates.schedule import Schedule
from lpfs.models.base import Model
from lpfs.paper.context import ExperimentContext
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan, build_plan, check_settings
from lpfs.pipeline.results import source_digest
from lpfs.pipeline.settings import Settings
from lpfs.plots import DROPPED, INK, KEPT, SECOND
from lpfs.schema import Selection
from lpfs.train.checkpoint import seed_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PENALTY_TRIALS = 6  # searches for the λ that keeps a number of fields
COUNT_TOLERANCE = 0.05  # relative error of the number of kept fields at which that search stops
COLORS = (KEPT, SECOND, "#5b5bd6", "#b8326e", "#4d7c0f", "#0369a1", "#854d0e", "#6b7280", "#a21caf", "#166534")

SearchFunction = Callable[[RunPlan, stages.Trained, int], tuple[Model, Any, Selection]]
Probe = Callable[[RunPlan, Model], Record]

_Result = TypeVar("_Result")
_Key = TypeVar("_Key")


def retry_while_locked(function: Callable[[], _Result]) -> _Result:
    """Return the result of a function; wait while another process does the same work."""
    while True:
        try:
            return function()
        except LockedError:
            time.sleep(POLL_SECONDS)


class Trials:
    """Searches and trainings of one experiment; each is done once and stored in its directory.

    ``settings`` are settings of ``select`` besides those of the scale of the experiment.
    """

    def __init__(self, context: ExperimentContext, **settings: Any) -> None:
        checked, _ = check_settings(Settings(**{**context.scale.settings(), **settings, "fleet": context.fleet}))
        self.context, self.kinds, dataset = context, context.log.kinds, context.log.dataset
        values = {name: value for name, value in checked.to_json().items() if name != "fleet"}
        self.directory = context.work_dir / f"trials-{digest([values, dataset.fingerprint])[:10]}"
        self.base = build_plan(checked, dataset, self.directory, Console(quiet=True), resume=True)
        plan = ComparisonPlan(("lpfs++",), (1,), seeds=1)  # only used for its options, of which there are none
        self.runner = Runner(self.base, plan, ResultStore(self.directory), context.console.message)
        self.names = self.runner.names  # what can be kept
        self._warned = False

    def count_of(self, share: float) -> int:
        """Return a share of all fields as a number of fields, at least one."""
        return max(1, min(len(self.names), round(share * len(self.names))))

    def search(
        self,
        seed: int,
        method: str = "lpfs++",
        *,
        keep: int | None = None,
        penalty: float | None = None,
        options: Mapping[str, Any] | None = None,
        search: SearchFunction = stages.search_fields,
        probe: Probe | None = None,
        **key: Any,
    ) -> Record:
        """Search from a copy of the pretrained model; return the kept fields, the gates and the history.

        ``search`` replaces the search of the method. ``probe`` is called with the model after the search, and its
        result is stored. ``key`` distinguishes this search from others with the same arguments.
        """
        options = dict(options or {})
        plain = {name: asdict(value) if isinstance(value, Schedule) else value for name, value in options.items()}
        request = {"method": method, "keep": keep, "penalty": penalty, "options": plain, "seed": seed, **key}
        path = self.directory / "searches" / f"{digest(request)}.json"
        stored: Record | None = read_json(path, missing_ok=True)
        if stored is not None:
            if stored.get("code") != source_digest() and not self._warned:
                self._warned = True
                self.context.console.message(
                    f"  some searches in {self.directory} were made by another version of the code and are used as "
                    "they are; remove that directory to repeat them"
                )
            return stored
        work_dir = self.directory / "work" / path.stem
        plan = self.base.for_search(
            work_dir, seed, method=method, options=options, keep=keep, penalty=penalty, resume=False
        )
        plan = replace(plan, judges_dir=self.runner.store.seed(seed))
        shutil.rmtree(work_dir, ignore_errors=True)  # of an interrupted search
        pretrained = copy.deepcopy(retry_while_locked(lambda: self.runner.pretrained(seed)))
        seed_all(seed)
        start = time.perf_counter()
        record: Record = {"request": request, "code": source_digest()}
        try:
            model, _, selection = search(plan, pretrained, seed)
        except (AllGatesZeroError, SearchError) as error:
            record |= {"kept": [], "gates": {}, "history": [], "failed": str(error)}
        else:
            record |= {
                "kept": self.runner.in_order(selection.kept),
                "gates": dict(selection.gates),
                "scores": selection.made.get("scores"),
                "seconds": round(time.perf_counter() - start, 3),
                "history": [
                    {name: _finite_or_none(value) for name, value in point.items() if name != "gates"}
                    for point in selection.history
                ],
                **({} if probe is None else {"probe": probe(plan, model)}),
            }
        write_json_atomic(path, record)
        shutil.rmtree(work_dir, ignore_errors=True)
        return record

    def auc(self, kept: Sequence[str], seed: int) -> float:
        """Return the test AUC of fields trained from scratch."""
        return float(retry_while_locked(lambda: self.runner.train(kept, seed))["test"]["auc"])

    def train_together(self, sets: Iterable[tuple[Sequence[str], int]]) -> None:
        """Train sets of fields from scratch as a fleet, each with its seed, if the run uses fleets."""
        if self.base.uses_fleet(self.context.console.message):
            paths = {self.runner.store.trained(kept, seed): (list(kept), seed) for kept, seed in sets if kept}
            self.runner.train_missing({path: member for path, member in paths.items() if not path.exists()})

    def evaluate(self, searches: Mapping[_Key, Mapping[str, Any]]) -> dict[_Key, Record]:
        """Search with every seed; return the kept fields, AUC and overlap, and recall if the truth is known.

        ``searches`` are arguments of :meth:`search` by name; the kept fields of all of them are trained together.
        """
        seeds = self.context.seeds
        sets = {
            name: [self.search(seed, **arguments)["kept"] for seed in seeds] for name, arguments in searches.items()
        }
        self.train_together(pair for several in sets.values() for pair in zip(several, seeds, strict=True))
        return {name: self._evaluate(searches[name]["keep"], several) for name, several in sets.items()}

    def _evaluate(self, keep: int, sets: Sequence[Sequence[str]]) -> Record:
        aucs = [self.auc(kept, seed) if kept else None for kept, seed in zip(sets, self.context.seeds, strict=True)]
        known = [auc for auc in aucs if auc is not None]
        return {
            "keep": keep,
            "auc": mean(known) if known else None,
            "by_seed": aucs,
            "overlap": statistics.mean_jaccard(sets),
            "recall": self.recall(sets),
            "kept": sets,
        }

    def recall(self, sets: Sequence[Sequence[str]]) -> float | None:
        """Return the mean share of the true fields that was kept; None if the truth is unknown."""
        true = [name for name in self.names if self.kinds.get(name) in TRUE_KINDS]
        return mean(statistics.recall(kept, true) for kept in sets) if true else None

    def search_penalty_for(self, count: int, seed: int, start: float, **arguments: Any) -> Record:
        """Search with fixed λ until about ``count`` fields are kept: λ is doubled or halved, then bisected."""
        low, high, penalty, records = 0.0, math.inf, start, list[Record]()
        for _ in range(MAX_PENALTY_TRIALS):
            records.append({**self.search(seed, penalty=penalty, **arguments), "penalty": penalty})
            kept = len(records[-1]["kept"])
            if abs(kept - count) <= max(1, round(COUNT_TOLERANCE * count)):
                break
            low, high = (penalty, high) if kept > count else (low, penalty)
            penalty = low * 2 if math.isinf(high) else high / 2 if low == 0 else math.sqrt(low * high)
        return min(records, key=lambda record: abs(len(record["kept"]) - count))


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plot_curves(axes: Axes, lines: Mapping[str, Mapping[int, float]], all_fields: float | None = None) -> None:
    """Draw AUC over the number of kept fields, one line per name, and the AUC of all fields."""
    if all_fields is not None:
        axes.axhline(all_fields, color=INK, linewidth=1, linestyle="--", label="all fields")
    series = {name: sorted(points.items()) for name, points in lines.items()}
    plot_series(axes, series, "fields kept", "test AUC", marker="o", markersize=4)


def plot_points(axes: Axes, rows: Mapping[str, Sequence[float | None]], label: str) -> None:
    """Draw the values of all seeds and their mean, one line per name."""
    for number, values in enumerate(rows.values()):
        known = [value for value in values if value is not None]
        axes.plot(known, [number] * len(known), "o", color=DROPPED, markersize=5)
        if known:
            axes.plot([sum(known) / len(known)], [number], "D", color=KEPT, markersize=6)
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(label)


def plot_histogram(axes: Axes, values: Sequence[float], title: str) -> None:
    """Draw a histogram with a separate bar for exact zeros."""
    nonzero = [value for value in values if value != 0]
    top = max([1e-12, *map(abs, values)])
    axes.hist(nonzero, bins=30, range=(0, top), color=KEPT, label="not 0")
    axes.bar([0.0], [len(values) - len(nonzero)], width=top / 30, color=DROPPED, label="exactly 0")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel("fields")
    axes.legend(frameon=False, fontsize=8)


def plot_series(axes: Axes, lines: Mapping[str, Sequence[tuple[Any, Any]]], x: str, y: str, **style: Any) -> None:
    """Draw lines of (x, y) points, one per name."""
    for number, (name, pairs) in enumerate(lines.items()):
        xs, ys = zip(*pairs, strict=True) if pairs else ((), ())
        axes.plot(xs, ys, label=name, linewidth=1.3, color=COLORS[number % len(COLORS)], **style)
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False, fontsize=8)
