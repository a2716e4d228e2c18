"""compare: every method, every K, several seeds, one protocol.

lpfs.compare("clicks.parquet", "cmp", label="click", time="day", methods="all", keep=[5, 10, 20], seeds=3)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpfs.compare.locks import BusyError, Claims
from lpfs.compare.files import as_csv, as_markdown
from lpfs.compare.run_dir import begin, check_same, read_plan, unless_refused, wait_for, write_plan
from lpfs.compare.plan import Job, Plan
from lpfs.compare.progress import Progress
from lpfs.compare.runner import Runs
from lpfs.compare.store import Store, put, put_text, read
from lpfs.compare.summary import Comparison, summarise
from lpfs.compare.tables import show
from lpfs.compare.truth import keep_truth
from lpfs.errors import InputError
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Teller
from lpfs.report.verb import try_report
from lpfs.pipeline.select import check_labels, checked, laid_out, prepared
from lpfs.train.distributed.group import alone, current

# settings of select that a comparison has its own ways for
OWN = ("keep", "penalty", "budget", "max_auc_loss", "costs", "method", "options", "checkpoint", "finish", "seeds")
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
    for name in OWN:
        if given.get(name) is not None:
            raise InputError(f"{name} is not a setting of compare; it has methods, keep, seeds, tune and options")
    folder, tell = Path(out), Teller(quiet=quiet)
    wanted = (settings or Settings()).updated(**given)
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, Sequence) and all(isinstance(each, str | os.PathLike) for each in source):
        wanted, source = wanted.updated(source=tuple(os.fspath(each) for each in source)), None
    wanted = checked(wanted)
    saved = read_plan(folder)
    asked = {"methods": methods, "keep": keep, "seeds": seeds, "tune": tune, "options": options}
    if truth is not None and saved is None:
        asked["options"] = {"oracle": {"truth": os.path.abspath(truth)}, **(options or {})}
    values = {**(saved or {"methods": "all"}), **{name: each for name, each in asked.items() if each is not None}}
    if "keep" not in values:
        raise InputError("say how many fields to keep: keep=[5, 10, 20]")
    plan = Plan.from_json(values)

    leads = current().leads
    with alone():  # every rank does whole runs of its own
        store, claims = Store(folder), Claims(begin(folder, wanted, plan, tables_only) / "claims")
        with wait_for(claims, "prepare", tell):
            with unless_refused(folder / "data"):
                dataset = prepared(source, wanted, folder, tell.quiet, resume=True)
                check_same(folder, wanted, plan, dataset)
                base = laid_out(wanted, dataset, folder, True, Teller(quiet=True))
                runs = Runs(base, plan, store, claims, tell.say)
                plan.check(runs.names, wanted.must_keep)
                if not tables_only:
                    check_labels(base.parts)
                kinds = keep_truth(folder, dataset, truth)
            write_plan(folder, wanted, plan, dataset)
        if not tables_only:
            do_all(runs, plan.jobs(wanted.seed, len(runs.names)), Progress(tell), retry_failed=retry_failed)
        found = summarise(store, base, plan, kinds, dataset.fingerprint)
        if leads:
            put(folder / "comparison.json", found.values)
            put_text(folder / "comparison.md", as_markdown(found))
            put_text(folder / "results.csv", as_csv(found))
            show(found, tell)
            try_report(folder, tell.say)
    return found


def do_all(runs: Runs, jobs: Sequence[Job], progress: Progress, *, retry_failed: bool) -> None:
    """Do what is missing: what another process is doing is left to it, and looked at again later."""
    store, redone = runs.store, set[Job]()

    def missing(job: Job) -> bool:
        found = read(store.result(job))
        return found is None or (retry_failed and found["status"] == "failed" and job not in redone)

    left = [job for job in jobs if missing(job)]
    progress.begin(len(jobs), len(left))
    while left:
        moved = False
        for job in left:
            try:
                with runs.claims.take(job.name):
                    if not missing(job):
                        continue
                    begun = time.perf_counter()
                    found = runs.run(job)
                    redone.add(job)
                    put(store.result(job), found)
            except BusyError:
                continue
            moved = True
            progress.done(job, found, time.perf_counter() - begun, sum(map(missing, left)))
        left = [job for job in left if missing(job)]
        if left and not moved:
            progress.waiting(len(left))
            time.sleep(PAUSE)
