"""compare: every method, every K, several seeds, one protocol.

lpfs.compare("clicks.parquet", "cmp", label="click", time="day", methods="all", keep=[5, 10, 20], seeds=3)

What a comparison says while it works: what is done, what is left, and about how long.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs.compare.locks import LockedError, WorkLocks
from lpfs.compare.plan import ComparisonPlan, RunSpec
from lpfs.compare.run_dir import (
    Record,
    ResultStore,
    check_same,
    copy_truth,
    open_comparison_dir,
    put,
    put_text,
    read,
    read_plan,
    remove_data_on_error,
    wait_for_lock,
    write_plan,
)
from lpfs.compare.runner import Runner
from lpfs.compare.summary import Comparison, summarize_comparison
from lpfs.compare.tables import as_csv, as_markdown, print_comparison
from lpfs.errors import InputError
from lpfs.pipeline.data import prepare_dataset
from lpfs.pipeline.plan import build_plan, check_label_classes, check_settings
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Console
from lpfs.report.verb import try_report
from lpfs.train.distributed.group import current_group, single_process


class ComparisonProgress:
    """A line a run; the estimate counts what other processes do too."""

    def __init__(self, tell: Console) -> None:
        self.tell, self.total, self.left, self.start, self.said = tell, 0, 0, 0.0, False

    def begin(self, total: int, left: int) -> None:
        """Say how much there is to do."""
        self.total, self.left, self.start = total, left, time.monotonic()
        done = f", {total - left} of them done already" if left < total else ""
        self.tell.message(f"{total} runs{done}")

    def done(self, job: RunSpec, found: Record, seconds: float, left: int) -> None:
        """Say what a run gave."""
        self.said = False
        if found["status"] == "failed":
            what = f"failed: {found['reason']}"
        else:
            tried = found.get("tried", [])
            settings = f", best of {len(tried)} settings" if len(tried) > 1 else ""
            what = f"AUC {found['test']['auc']:.5f} with {len(found['kept'])} fields{settings}"
        rest = ""
        if left:
            rate = (self.left - left) / max(1e-9, time.monotonic() - self.start)
            rest = f"; about {duration(left / rate)} left" if rate > 0 else ""
        self.tell.message(f"[{self.total - left}/{self.total}] {job}: {what} ({seconds:.1f} s{rest})")

    def waiting(self, left: int) -> None:
        """Say, once, that the rest is being done elsewhere."""
        if not self.said:
            self.tell.message(f"{left} runs are being done by other processes: waiting for them")
            self.said = True


def duration(seconds: float) -> str:
    """Return a length of time in words.

    >>> duration(40), duration(400), duration(40_000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


# settings of select that a comparison has its own ways for
RESERVED_SETTINGS = (
    "keep",
    "penalty",
    "budget",
    "max_auc_loss",
    "costs",
    "method",
    "options",
    "checkpoint",
    "finish",
    "seeds",
)
PAUSE = 1.0  # seconds between looks at what others are doing


def compare(
    source: Any = None,
    out: str | os.PathLike[str] = "comparison",
    *,
    methods: str | Sequence[str] | None = None,
    keep: int | Sequence[int] | None = None,
    seeds: int | None = None,
    tune: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    truth: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
    retry_failed: bool = False,
    tables_only: bool = False,
    quiet: bool = False,
    **given: Any,
) -> Comparison:
    """Search with every method for every K and seed, train what is kept from scratch, judge it on the test rows.

    A second call does only what is missing; several processes or machines may work on one folder at once.
    Processes that torchrun started do so too: each does runs of its own, and rank 0 makes the tables.

    Args:
        source: a log (files, a table in memory) or a Dataset or its folder; not needed to go on.
        out: folder of the comparison.
        methods: names out of ``lpfs methods``; ``"all"``, the default, for every one.
        keep: numbers of fields.
        seeds: how many seeds (3).
        tune: try so many settings of each method on the validation rows (0: none, the defaults are taken).
        options: settings of single methods, ``{"lpfs++": {"alpha": 20.0}}``.
        truth: ``truth.json`` of a simulated log that was prepared from raw files; a simulated Dataset has it.
        settings: settings to begin with, see :class:`Settings`.
        retry_failed: do runs that failed once more.
        tables_only: only make the tables of what is there.
        quiet: print nothing.
        given: single settings: ``label``, ``time``, ``model``, ``batch_size`` …

    """
    for name in RESERVED_SETTINGS:
        if given.get(name) is not None:
            raise InputError(f"{name} is not a setting of compare; it has methods, keep, seeds, tune and options")
    folder, tell = Path(out), Console(quiet=quiet)
    wanted = (settings or Settings()).updated(**given)
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, Sequence) and all(isinstance(each, str | os.PathLike) for each in source):
        wanted, source = wanted.updated(source=tuple(os.fspath(each) for each in source)), None
    wanted = check_settings(wanted)
    saved = read_plan(folder)
    asked = {"methods": methods, "keep": keep, "seeds": seeds, "tune": tune, "options": options}
    if truth is not None and saved is None:
        asked["options"] = {"oracle": {"truth": os.path.abspath(truth)}, **(options or {})}
    values = {**(saved or {"methods": "all"}), **{name: each for name, each in asked.items() if each is not None}}
    if "keep" not in values:
        raise InputError("say how many fields to keep: keep=[5, 10, 20]")
    plan = ComparisonPlan.from_json(values)

    leads = current_group().is_leader
    with single_process():  # every rank does whole runs of its own
        store, claims = (
            ResultStore(folder),
            WorkLocks(open_comparison_dir(folder, wanted, plan, tables_only) / "claims"),
        )
        with wait_for_lock(claims, "prepare", tell):
            with remove_data_on_error(folder / "data"):
                dataset = prepare_dataset(source, wanted, folder, tell.quiet, resume=True)
                check_same(folder, wanted, plan, dataset)
                base = build_plan(wanted, dataset, folder, True, Console(quiet=True))
                runs = Runner(base, plan, store, claims, tell.message)
                plan.check(runs.names, wanted.must_keep)
                if not tables_only:
                    check_label_classes(base.splits)
                kinds = copy_truth(folder, dataset, truth)
            write_plan(folder, wanted, plan, dataset)
        if not tables_only:
            run_missing(
                runs, plan.jobs(wanted.seed, len(runs.names)), ComparisonProgress(tell), retry_failed=retry_failed
            )
        found = summarize_comparison(store, base, plan, kinds, dataset.fingerprint)
        if leads:
            put(folder / "comparison.json", found.values)
            put_text(folder / "comparison.md", as_markdown(found))
            put_text(folder / "results.csv", as_csv(found))
            print_comparison(found, tell)
            try_report(folder, tell.message)
    return found


def run_missing(
    runs: Runner, jobs: Sequence[RunSpec], progress: ComparisonProgress, *, retry_failed: bool
) -> None:
    """Do what is missing: what another process is doing is left to it, and looked at again later."""
    store, redone = runs.store, set[RunSpec]()

    def missing(job: RunSpec) -> bool:
        found = read(store.result(job))
        return found is None or (retry_failed and found["status"] == "failed" and job not in redone)

    left = [job for job in jobs if missing(job)]
    progress.begin(len(jobs), len(left))
    while left:
        moved = False
        for job in left:
            try:
                with runs.claims.acquire(job.name):
                    if not missing(job):
                        continue
                    begun = time.perf_counter()
                    found = runs.run(job)
                    redone.add(job)
                    put(store.result(job), found)
            except LockedError:
                continue
            moved = True
            progress.done(job, found, time.perf_counter() - begun, sum(map(missing, left)))
        left = [job for job in left if missing(job)]
        if left and not moved:
            progress.waiting(len(left))
            time.sleep(PAUSE)
