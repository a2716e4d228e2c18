"""Trials: many searches that begin with one pretrained model a seed, and the training of what they keep.

Pretraining, searching and training from scratch are those of ``compare``; only what is asked of a search is freer.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass, replace
from statistics import mean
from typing import Any, TypeVar

from lpfs.compare import statistics
from lpfs.compare.locks import LockedError, WorkLocks
from lpfs.compare.plan import ComparisonPlan
from lpfs.compare.run_dir import TRUE_KINDS, Record, ResultStore, digest, put, read
from lpfs.compare.runner import Runner
from lpfs.errors import AllGatesZeroError, SearchError
from lpfs.methods.wish import Wish
from lpfs.models.base import Model
from lpfs.paper.job import Job
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan, build_plan, check_settings
from lpfs.pipeline.results import source_digest
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Console
from lpfs.train.checkpoint import seed_all

TRIES = 6  # searches for the λ that keeps a number of fields
PAUSE = 1.0  # seconds between looks at what another process is doing
Finder = Callable[[RunPlan, stages.Trained, int], tuple[Model, Any, Any]]
Probe = Callable[[RunPlan, Model], Record]

_Found = TypeVar("_Found")


def waited(make: Callable[[], _Found]) -> _Found:
    """Return what is made; wait while another process is making it."""
    while True:
        try:
            return make()
        except LockedError:
            time.sleep(PAUSE)


class Trials:
    """Searches and trainings of one experiment, each done once and kept in its folder.

    Args:
        job: the experiment.
        settings: settings of ``select`` beside those of its scale.

    """

    def __init__(self, job: Job, **settings: Any) -> None:
        wanted = check_settings(Settings(**{**job.scale.settings(), **settings}))
        mark = digest([wanted.to_json(), job.log.fingerprint])[:10]
        self.job, self.folder, self.kinds = job, job.folder / f"trials-{mark}", job.kinds
        self.base = build_plan(wanted, job.log, self.folder, True, Console(quiet=True))
        plan, store = ComparisonPlan(("lpfs++",), (1,), seeds=1), ResultStore(self.folder)
        self._told = False
        self.runs = Runner(self.base, plan, store, WorkLocks(self.folder / "claims"), job.console.message)

    @property
    def names(self) -> tuple[str, ...]:
        """What can be kept."""
        return self.runs.names

    def size(self, share: float) -> int:
        """Return so large a part of all fields, at least one."""
        return max(1, min(len(self.names), round(share * len(self.names))))

    def search(
        self,
        seed: int,
        method: str = "lpfs++",
        *,
        keep: int | None = None,
        penalty: float | None = None,
        options: Mapping[str, Any] | None = None,
        find: Finder = stages.search_fields,
        probe: Probe | None = None,
        **said: Any,
    ) -> Record:
        """Search from a copy of the pretrained model; return what was kept, the gates and how it went.

        Args:
            seed: of the pretrained model and of the search.
            method: a name out of ``lpfs methods``.
            keep, penalty: what is wanted, in one way.
            options: of the method.
            find: does it in place of the method, for what is no method.
            probe: looks at the model when it is done; what it returns is kept as ``probe``.
            said: tells this search from others.

        """
        options = dict(options or {})
        told = {name: asdict(each) if is_dataclass(each) else each for name, each in options.items()}  # type: ignore[arg-type]
        asked = {"method": method, "keep": keep, "penalty": penalty, "options": told, "seed": seed, **said}
        path = self.folder / "found" / f"{digest(asked)}.json"
        known = read(path)
        if known is not None:
            self._warn_other_version(known)
            return known
        wish = Wish(keep=keep, penalty=penalty, must_keep=self.base.target.must_keep)
        settings = replace(self.base.settings, seed=seed, method=method, options=options)
        out = self.folder / "work" / path.stem
        work = replace(self.base, settings=settings, target=wish, run_dir=out, resume=False)
        shutil.rmtree(out, ignore_errors=True)  # of a search that was interrupted
        pretrained = copy.deepcopy(waited(lambda: self.runs.pretrained(seed)))
        seed_all(seed)
        begin = time.perf_counter()
        try:
            model, _, selection = find(work, pretrained, seed)
        except (AllGatesZeroError, SearchError) as error:
            found: Record = {
                "asked": asked,
                "code": source_digest(),
                "kept": [],
                "gates": {},
                "history": [],
                "failed": str(error),
            }
            put(path, found)
            return found
        history = [{key: each[key] for key in each if key != "gates"} for each in selection.history]
        found = {
            "asked": asked,
            "code": source_digest(),
            "kept": self.runs.in_order(selection.kept),
            "gates": dict(selection.gates),
            "scores": selection.made.get("scores"),
            "seconds": round(time.perf_counter() - begin, 3),
            "history": [{key: plain(value) for key, value in each.items()} for each in history],
            **({} if probe is None else {"probe": probe(work, model)}),
        }
        put(path, found)
        shutil.rmtree(out, ignore_errors=True)
        return found

    def _warn_other_version(self, known: Record) -> None:
        """Say once that searches are taken which another state of the code made."""
        if known.get("code") != source_digest() and not self._told:
            self._told = True
            self.job.console.message(
                f"  some searches in {self.folder} were made by another state of the code and are taken as they "
                "are; remove that folder to do them again"
            )

    def auc(self, kept: Sequence[str], seed: int) -> float:
        """Return the test AUC of some fields trained from scratch."""
        found: float = waited(lambda: self.runs.train(kept, seed))["test"]["auc"]
        return found

    def evaluate_k(self, keep: int, **asked: Any) -> Record:
        """Search with every seed; return the sets, their AUC and overlap, and recall where the truth is known."""
        sets = [self.search(seed, keep=keep, **asked)["kept"] for seed in self.job.seeds]
        aucs = [self.auc(kept, seed) if kept else None for kept, seed in zip(sets, self.job.seeds, strict=True)]
        known = [each for each in aucs if each is not None]
        return {
            "keep": keep,
            "auc": mean(known) if known else None,
            "by_seed": aucs,
            "overlap": statistics.mean_jaccard(sets),
            "recall": self.recall(sets),
            "kept": sets,
        }

    def recall(self, sets: Sequence[Sequence[str]]) -> float | None:
        """Return the share of the true fields that was kept, as a mean over sets; None where it is not known."""
        true = [name for name in self.names if self.kinds.get(name) in TRUE_KINDS]
        return mean(statistics.recall(each, true) for each in sets) if true else None

    def search_penalty_for(self, target: int, seed: int, start: float, **asked: Any) -> Record:
        """Search with a fixed λ until about ``target`` fields are left: λ is doubled or halved, then bisected."""
        low, high, penalty = 0.0, math.inf, start
        best: Record | None = None
        for _ in range(TRIES):
            found = {**self.search(seed, penalty=penalty, **asked), "penalty": penalty}
            count = len(found["kept"])
            if best is None or abs(count - target) < abs(len(best["kept"]) - target):
                best = found
            if abs(count - target) <= max(1, round(0.05 * target)):
                break
            low, high = (penalty, high) if count > target else (low, penalty)
            penalty = low * 2 if math.isinf(high) else high / 2 if low == 0 else math.sqrt(low * high)
        assert best is not None
        return best


def plain(value: Any) -> Any:
    """Return a number that JSON has; None for one that is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
