"""The runs of a comparison: one pretrained model per seed, equal search steps, one training from scratch.

``run_comparison`` does all missing runs and writes the tables.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from lpfs._console import Console
from lpfs._fileio import file_checksum, write_array_atomic, write_json_atomic, write_text_atomic
from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan, RunSpec
from lpfs.compare.run_dir import (
    SEARCH_SCHEMA,
    TRAINED_SCHEMA,
    Record,
    ResultStore,
    check_same,
    copy_truth,
    open_comparison_dir,
    read_plan,
    read_result,
    write_plan,
)
from lpfs.compare.summary import Comparison, summarize_comparison
from lpfs.compare.tables import as_csv, as_markdown, print_comparison
from lpfs.data.simulate import true_probabilities
from lpfs.errors import CheckpointError, InputError, LockedError, LpfsError, SearchError
from lpfs.methods.base import top_k
from lpfs.methods.registry import make_method
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.data import DATA_DIR, prepare_dataset
from lpfs.pipeline.plan import RunPlan, build_plan, check_settings
from lpfs.pipeline.results import source_digest
from lpfs.pipeline.settings import Settings
from lpfs.report import REPORT_FILE, write_report_safely
from lpfs.report.comparison_data import COMPARISON_FILE
from lpfs.report.format import format_duration
from lpfs.schema import Selection
from lpfs.train.checkpoint import seed_all
from lpfs.train.distributed.group import current_group, single_process
from lpfs.train.evaluate import predictions, task_names
from lpfs.train.metrics import scores
from lpfs.train.threads import describe_threads

Member = TypeVar("Member")
POLL_SECONDS = 1.0  # between two checks of runs that other processes do
NOT_METHOD_ERRORS = (LockedError, OSError, CheckpointError)  # not caused by the method: a lock, a full disk
SEARCH_KEYS = ("seconds", "memory", "first_in_process", "interrupted", "shared_by_all_k", "details", "code")


def run_comparison(
    settings: Settings,
    source: Any,
    run_dir: Path,
    request: Mapping[str, Any],
    console: Console,
    *,
    truth: str | os.PathLike[str] | None = None,
    retry_failed: bool = False,
    tables_only: bool = False,
) -> Comparison:
    """Do the missing runs of a comparison; write and print its tables and its report.

    ``request`` are fields of the :class:`ComparisonPlan`; those that are None or missing are taken from the plan of
    the directory. The other arguments are those of :func:`lpfs.compare.compare.compare`.
    """
    saved_plan = read_plan(run_dir)
    values = {**(saved_plan or {"methods": "all"}), **{name: x for name, x in request.items() if x is not None}}
    if truth is not None and saved_plan is None:
        values["options"] = {"oracle": {"truth": os.path.abspath(truth)}, **values.get("options", {})}
    if "keep" not in values:
        raise InputError("compare needs the numbers of fields to keep: keep=[5, 10, 20]")
    plan = ComparisonPlan.from_json(values)
    settings, saved_model = check_settings(settings)
    is_leader = current_group().is_leader
    with single_process():  # every rank does complete runs alone
        open_comparison_dir(run_dir, settings, plan, tables_only=tables_only)
        store, waiting = ResultStore(run_dir), "waiting for another process, which is preparing the data"
        with store.lock("prepare", on_wait=lambda: console.message(waiting)):
            data_dir = run_dir / DATA_DIR
            with nullcontext() if data_dir.exists() else remove_on_error(data_dir, LpfsError):
                dataset = prepare_dataset(source, settings, run_dir, console, saved=saved_model, resume=True)
                check_same(run_dir, settings, plan, dataset)
                base = build_plan(settings, dataset, run_dir, Console(quiet=True), saved=saved_model, resume=True)
                runner = Runner(base, plan, store, console.message, quiet=console.quiet)
                plan.check(runner.names, settings.must_keep)
                if not tables_only:
                    base.splits.check_labels(force=True)
                kinds = copy_truth(run_dir, dataset, truth)
            write_plan(run_dir, settings, plan, dataset)
        if not tables_only:
            if base.device.type == "cpu":
                console.message(f"training on {describe_threads()}")
            specs = plan.runs(settings.seed, len(runner.names))
            fleet = base.uses_fleet(console.message)
            run_missing(runner, specs, console, retry_failed=retry_failed, fleet=fleet)
            store.remove_leftovers()
        comparison = summarize_comparison(store, base, plan, kinds, dataset.fingerprint)
        if is_leader:
            write_json_atomic(run_dir / COMPARISON_FILE, comparison.values)
            write_text_atomic(run_dir / "comparison.md", as_markdown(comparison))
            write_text_atomic(run_dir / "results.csv", as_csv(comparison))
            print_comparison(comparison, console)
            write_report_safely(comparison.values, (), run_dir / REPORT_FILE, console.message)
    return comparison


def run_missing(
    runner: Runner, specs: Sequence[RunSpec], console: Console, *, retry_failed: bool, fleet: bool = False
) -> None:
    """Do the missing runs; runs that another process does are skipped and checked again later.

    With ``fleet``, the searches come first, and then the fields of all of them are trained together.
    """
    store, repeated, waiting = runner.store, set[RunSpec](), False

    def is_missing(spec: RunSpec) -> bool:
        record = read_result(store.result(spec))
        return record is None or (retry_failed and record["status"] == "failed" and spec not in repeated)

    left = [spec for spec in specs if is_missing(spec)]
    total, missing_at_start, start = len(specs), len(left), time.monotonic()
    done = f", {total - len(left)} of them done already" if len(left) < total else ""
    console.message(f"{total} runs{done}")
    if fleet:
        runner.train_together(left)
        start = time.monotonic()  # the estimate is that of the runs below
    while left:
        some_done = False
        for spec in left:
            try:
                with runner.store.lock(spec.name):
                    if not is_missing(spec):
                        continue
                    run_start = time.perf_counter()
                    record = runner.run(spec)
                    repeated.add(spec)
                    write_json_atomic(store.result(spec), record)
            except LockedError:
                continue
            some_done, waiting = True, False
            seconds, missing = time.perf_counter() - run_start, sum(map(is_missing, left))
            remaining = ""
            if missing:  # the estimate includes the work of other processes
                per_run = (time.monotonic() - start) / (missing_at_start - missing)
                remaining = f"; about {format_duration(missing * per_run)} left"
            result = describe_result(record)
            console.message(f"[{total - missing}/{total}] {spec}: {result} ({seconds:.1f} s{remaining})")
        left = [spec for spec in left if is_missing(spec)]
        if left and not some_done:
            if not waiting:
                console.message(f"waiting for other processes, which are doing {len(left)} runs")
            waiting = True
            time.sleep(POLL_SECONDS)


def describe_result(record: Record) -> str:
    """Return the result of a run in a few words."""
    if record["status"] == "failed":
        return f"failed: {record['reason']}"
    trials = len(record.get("trials", []))
    tuning = f", best of {trials} option sets" if trials > 1 else ""
    return f"AUC {record['test']['auc']:.5f} with {len(record['kept'])} fields{tuning}"


@dataclass
class Measurement:
    """Seconds, and bytes above the memory at the start; None if this machine cannot measure them."""

    seconds: float = 0.0
    memory: int | None = None


@contextmanager
def measure(device: torch.device) -> Iterator[Measurement]:
    """Measure the block; the result is filled in when it ends.

    On a GPU the memory is that allocated by torch, elsewhere the resident memory of the process, on Linux only.
    """
    measurement = Measurement()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if on_gpu else _reset_peak()
    start = time.perf_counter()
    yield measurement
    if on_gpu:
        torch.cuda.synchronize(device)
    measurement.seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _resident_bytes("VmHWM")
    if before is not None and peak is not None:
        measurement.memory = max(0, peak - before)


def _reset_peak() -> int | None:
    """Return unused memory to the system, reset the peak, and return the resident bytes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory, see proc(5)
        return _resident_bytes("VmRSS")
    return None


def _resident_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


class Runner:
    """Does the runs of a comparison.

    Results that several runs share (the pretrained model of a seed, a ranking, fields trained from scratch) are
    computed once and stored. :class:`LockedError` is raised if another process is computing one of them. Each run
    replaces method, seed and target of ``base``.
    """

    def __init__(
        self,
        base: RunPlan,
        plan: ComparisonPlan,
        store: ResultStore,
        message: Callable[[str], None],
        *,
        quiet: bool = True,
    ) -> None:
        self.base, self.plan, self.store, self.message, self.quiet = base, plan, store, message, quiet
        self.meta_model = base.meta_model()
        self.names = self.meta_model.names  # what can be kept: the fields, or all gated parts of the model
        self._pretrained: tuple[int, stages.Trained] | None = None
        self._measured: set[str] = set()
        self._failed: set[Path] = set()  # files of searches and trainings that failed and are left to run

    @cached_property
    def test_probabilities(self) -> npt.NDArray[np.float64] | None:
        """Return the true click probabilities of the test rows, which replace their labels; None if unknown."""
        return true_probabilities(self.base.splits.test)

    def run(self, spec: RunSpec) -> Record:
        """Return the result of a run; a method that fails becomes a result with a reason."""
        header = {"method": spec.method, "keep": spec.keep, "seed": spec.seed}
        try:
            if spec.method == ALL_FIELDS:
                result = {"kept": self.in_order(self.names), **self.train(self.names, spec.seed)}
            else:
                result = self.best_trial(spec)
            return {**header, "status": "done", **result}
        except NOT_METHOD_ERRORS:
            raise
        except Exception as error:  # a method may fail in any way
            return {**header, "status": "failed", "reason": error_text(error)}

    def best_trial(self, spec: RunSpec) -> Record:
        """Search with each option set and train the kept fields; return the trial with the best validation AUC."""
        trials, results, errors = list[Record](), list[Record](), list[Exception]()
        for options in self.plan.trial_settings(spec.method):
            try:
                selected = self.selected_fields(spec, options)
                trained = self.train(selected["kept"], spec.seed)
            except NOT_METHOD_ERRORS:
                raise
            except Exception as error:
                errors.append(error)
                trials.append({"options": options, "reason": error_text(error)})
                continue
            results.append({**selected, **trained, "options": options})
            trials.append({"options": options, "validation": trained["validation"], "kept": selected["kept"]})
        if not results:
            raise errors[0]
        best = max(results, key=lambda result: (result["validation"]["auc"], -result["validation"]["logloss"]))
        return {**best, "trials": trials}

    def selected_fields(self, spec: RunSpec, options: Mapping[str, Any]) -> Record:
        """Return the fields that a method keeps; a ranking that does not depend on K is made once per seed."""
        shared, path = self.search_path(spec, options)
        record = read_result(path, SEARCH_SCHEMA)
        if record is None:
            with self.store.lock(f"search-{path.stem}"):
                record = read_result(path, SEARCH_SCHEMA) or self.search(spec, options, path)
        record["shared_by_all_k"] = shared
        kept = record["kept"]
        if shared:
            kept = self.in_order(top_k(record["scores"], spec.keep, self.base.target.must_keep))
        return {"kept": kept, "search": {name: record.get(name) for name in SEARCH_KEYS}}

    def search_path(self, spec: RunSpec, options: Mapping[str, Any]) -> tuple[bool, Path]:
        """Return whether a search serves every K, and its file."""
        shared = not make_method(spec.method, options).search_per_k
        return shared, self.store.search(spec.method, options, spec.seed, None if shared else spec.keep)

    def search(self, spec: RunSpec, options: Mapping[str, Any], path: Path) -> Record:
        """Search from a copy of the pretrained model, and write the result."""
        plan = self.search_plan(spec, options, path)
        pretrained = self.pretrained(spec.seed)
        seed_all(spec.seed)
        with remove_on_error(plan.run_dir), self.measure_cost(plan, spec.method) as cost:
            selection = stages.search_fields(plan, copy.deepcopy(pretrained), spec.seed)[2]
        shared = selection.made.get("shared_seconds", 0.0)  # of networks that a search of this method would train alone
        cost["seconds"] = None if None in (cost["seconds"], shared) else round(cost["seconds"] + shared, 4)
        record = self.write_search(path, plan, selection, cost)
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        return record

    def search_plan(self, spec: RunSpec, options: Mapping[str, Any], path: Path) -> RunPlan:
        """Return the plan of the search of a run, after checking that the search can start."""
        work_dir, judges_dir = self.store.work(path.stem), self.store.seed(spec.seed)
        plan = self.base.for_search(work_dir, spec.seed, method=spec.method, options=options, keep=spec.keep)
        plan.method.check(plan.target.for_model(self.meta_model), self.names, plan.steps.search)
        plan.method.check_model(self.meta_model)
        return replace(plan, judges_dir=judges_dir)

    def write_search(self, path: Path, plan: RunPlan, selection: Selection, cost: Record) -> Record:
        """Write the result of a search, and return it."""
        record = {
            "kept": self.in_order(selection.kept),
            "scores": selection.made.get("scores"),
            "gates": dict(selection.gates),
            "details": {name: value for name, value in selection.made.items() if name != "scores"},
            "code": source_digest(),
            **cost,
        }
        keep, method = plan.settings.keep, plan.method
        if not method.search_per_k and keep is not None:  # its scores must serve every K
            ranking, must_keep = record["scores"], self.base.target.must_keep
            if ranking is None or set(top_k(ranking, keep, must_keep)) != set(record["kept"]):
                raise SearchError(
                    f"{method.name} does not keep the fields with the highest scores; set search_per_k in its class"
                )
        write_json_atomic(path, record)
        return record

    def pretrained(self, seed: int) -> stages.Trained:
        """Return the model of all fields that every search of a seed starts from."""
        if self._pretrained is None or self._pretrained[0] != seed:
            self._pretrained = None  # free its memory first
            plan = self.base.for_search(self.store.seed(seed), seed)
            cost_file = plan.run_dir / "cost.json"
            if cost_file.exists():
                trained = stages.pretrain(plan, seed)
            else:
                with self.store.lock(f"pretrain-s{seed}"):
                    self.message(f"seed {seed}: pretraining all {len(plan.schema)} fields")
                    with self.measure_cost(plan, "pretraining") as cost:
                        trained = stages.pretrain(plan, seed)
                    self.write_pretrain_cost(plan.run_dir, cost)
            self._pretrained = seed, trained
        return self._pretrained[1]

    def pretrain_together(self, seeds: Iterable[int]) -> None:
        """Pretrain the models of several seeds as a fleet, from which :meth:`pretrained` reads them."""
        plan = self.base.for_search(self.store.work("pretrain"), self.base.settings.seed)
        folders = {seed: self.store.seed(seed) / "pretrain" for seed in sorted(set(seeds))}
        waiting = "waiting for another process, which pretrains"
        with self.store.lock("pretrain", on_wait=lambda: self.message(waiting)), ExitStack() as locks:
            for seed in list(folders):  # a process without a fleet may pretrain some of them
                try:
                    locks.enter_context(self.store.lock(f"pretrain-s{seed}"))
                except LockedError:
                    del folders[seed]
            if sum(not folder.exists() for folder in folders.values()) < 2:
                return
            self.message(f"pretraining all {len(plan.schema)} fields with several seeds together")
            with self.measure_cost(plan, "pretraining") as cost:
                saved = stages.pretrain_together(plan, folders, plan.run_dir)
            for seed in saved:
                self.write_pretrain_cost(self.store.seed(seed), shared_cost(cost, len(saved)))

    def write_pretrain_cost(self, folder: Path, cost: Record) -> None:
        """Write what the pretraining of a seed has cost."""
        steps, rows = self.base.steps, self.base.splits.early.rows
        write_json_atomic(folder / "cost.json", {"passes": steps.pretrain * steps.batch_size / rows, **cost})

    @contextmanager
    def measure_cost(self, plan: RunPlan, name: str) -> Iterator[Record]:
        """Measure the cost of the block; the record is filled in when it ends.

        The first work of a name in this process includes compilation. The seconds of work that was interrupted and
        resumed are unknown: None.
        """
        interrupted = plan.run_dir.is_dir() and any(plan.run_dir.iterdir())
        record: Record = {}
        with measure(plan.device) as measurement:
            yield record
        record["seconds"] = None if interrupted else round(measurement.seconds, 4)
        record["memory"] = measurement.memory
        record["first_in_process"] = name not in self._measured
        record["interrupted"] = interrupted
        self._measured.add(name)

    def in_order(self, kept: Iterable[str]) -> list[str]:
        """Return fields in the order of the table, followed by other parts of the model."""
        position = {name: number for number, name in enumerate((*self.base.schema.names, *self.names))}
        return sorted(kept, key=lambda name: position[name])

    def train(self, kept: Sequence[str], seed: int) -> Record:
        """Train these fields from scratch and evaluate them; the same fields are trained once per seed."""
        path = self.store.trained(kept, seed)
        record: Record | None = read_result(path, TRAINED_SCHEMA)
        if record is None:
            with self.store.lock(f"train-{path.stem}"):
                record = read_result(path, TRAINED_SCHEMA) or self.from_scratch(kept, seed, path)
        return record

    def from_scratch(self, kept: Sequence[str], seed: int, path: Path) -> Record:
        """Train fields from scratch and store the result."""
        plan = self.base.for_search(self.store.work(path.stem), seed)
        with remove_on_error(plan.run_dir), measure(plan.device) as measurement:
            model = stages.retrain(plan, self.cut_model(kept))
        record = self.store_trained(model, path, measurement.seconds)
        shutil.rmtree(plan.run_dir, ignore_errors=True)
        return record

    def cut_model(self, kept: Sequence[str]) -> Model:
        """Return the model of some fields on the meta device."""
        with torch.device("meta"):
            return self.meta_model.cut([name for name in self.names if name in set(kept)])

    def train_together(self, specs: Sequence[RunSpec]) -> None:
        """Search for the fields of all runs, train them from scratch as a fleet, and store the results.

        Several processes share the searches, and each trains the sets of fields that are known when it has no search
        left to do. Runs whose search fails are left to ``run``.
        """
        waiting = False
        if self.base.searches_as_fleet(self.message):
            self.pretrain_together(spec.seed for spec in specs if spec.method != ALL_FIELDS)
            self.search_together(specs)
        while True:
            missing, locked = self.search_all(specs)
            is_trained = self.train_missing(missing)
            if not locked:
                return
            unfinished = sum(not path.exists() for path in locked)
            if unfinished and not is_trained:
                if not waiting:
                    self.message(f"waiting for other processes, which are doing {unfinished} searches")
                waiting = True
                time.sleep(POLL_SECONDS)

    def trials(self, specs: Sequence[RunSpec]) -> list[tuple[RunSpec, Mapping[str, Any], Path]]:
        """Return the searches of all runs: the run, the options of the method, and the file of the result."""
        return [
            (spec, options, self.search_path(spec, options)[1])
            for spec in specs
            if spec.method != ALL_FIELDS
            for options in self.plan.trial_settings(spec.method)
        ]

    def search_together(self, specs: Sequence[RunSpec]) -> None:
        """Do missing gate searches as a fleet, except those of other processes; the others are left to search_all."""
        with ExitStack() as locks:
            missing = dict[Path, RunPlan]()
            for spec, options, path in self.trials(specs):
                if make_method(spec.method, options).fleet and not path.exists() and path not in missing:
                    with suppress(LockedError, LpfsError):  # search_all waits, or records why it cannot start
                        plan = self.search_plan(spec, options, path)
                        locks.enter_context(self.store.lock(f"search-{path.stem}"))
                        if read_result(path, SEARCH_SCHEMA) is None:
                            missing[path] = plan
            for fleet in self.fleets(missing):
                self.message(f"searching {len(fleet)} times together")
                self.fleet_search(fleet)

    def fleet_search(self, plans: Mapping[Path, RunPlan]) -> None:
        """Search with several plans at once, and write the results."""
        paths = sorted(plans)
        folder = self.store.open_fleet([path.stem for path in paths])
        fleet = [plans[path] for path in paths]
        seeds = [plan.settings.seed for plan in fleet]
        pretrained = {seed: self.pretrained(seed) for seed in sorted(set(seeds))}
        seed_all(seeds[0])
        try:
            with (
                remove_on_error(folder),
                self.measure_cost(replace(self.base, run_dir=folder / "round-000"), "searches of a fleet") as cost,
            ):
                trained = [copy.deepcopy(pretrained[seed]) for seed in seeds]
                selections = stages.search_together(fleet, trained, seeds, folder, quiet=self.quiet)
        except NOT_METHOD_ERRORS:
            raise
        except (LpfsError, torch.OutOfMemoryError) as error:  # one of the searches fails, or there is no memory
            self.message(f"the searches are done one by one: {error_text(error)}")
            return
        for path, plan, selection in zip(paths, fleet, selections, strict=True):
            self.write_search(path, plan, selection, shared_cost(cost, len(paths)))
            shutil.rmtree(plan.run_dir, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)

    def fleets(self, missing: dict[Path, Member]) -> list[dict[Path, Member]]:
        """Return missing results in the fleets that a killed process was doing them in, and the rest as one more."""
        fleets, left = [], dict(missing)
        for members in self.store.killed_fleets():
            if set(members) <= {path.stem for path in left}:
                killed = [path for path in left if path.stem in members]
                fleets.append({path: left.pop(path) for path in killed})
        return [fleet for fleet in (*fleets, left) if len(fleet) > 1]

    def search_all(self, specs: Sequence[RunSpec]) -> tuple[dict[Path, tuple[list[str], int]], set[Path]]:
        """Do the missing searches of all runs.

        Returns:
            Fields and seed of each missing training from scratch, and the files of the searches that other processes
            were doing.
        """
        trials = self.trials(specs)
        paths, locked, start = {path for _, _, path in trials}, set[Path](), time.monotonic()
        found = [(self.in_order(self.names), spec.seed) for spec in specs if spec.method == ALL_FIELDS]
        done_at_start = sum(path.exists() or path in self._failed for path in paths)
        for spec, options, path in trials:
            if path in self._failed or path in locked:
                continue
            is_new, search_start, result = not path.exists(), time.monotonic(), "fields found"
            try:
                found.append((self.selected_fields(spec, options)["kept"], spec.seed))
            except LockedError:
                locked.add(path)
                continue
            except NOT_METHOD_ERRORS:
                raise
            except Exception as error:  # a method may fail in any way; ``run`` records the reason
                self._failed.add(path)
                result = f"failed: {error_text(error)}"
            if is_new:
                now, done = time.monotonic(), sum(path.exists() or path in self._failed for path in paths)
                left = (now - start) / max(1, done - done_at_start) * (len(paths) - done)
                remaining = f"; about {format_duration(left)} of searches left" if done < len(paths) else ""
                text = f"{result} ({now - search_start:.1f} s{remaining})"
                self.message(f"[{done}/{len(paths)}] search with {spec}: {text}")
        missing = {self.store.trained(kept, seed): (kept, seed) for kept, seed in found}
        missing = {path: kept for path, kept in missing.items() if path not in self._failed and not path.exists()}
        return missing, locked

    def train_missing(self, missing: dict[Path, tuple[list[str], int]]) -> bool:
        """Train sets of fields from scratch as a fleet, except those of other processes; return whether it did.

        A killed fleet is resumed unless another process has trained some of its sets.
        """
        with ExitStack() as locks:
            for path in list(missing):
                with suppress(LockedError):
                    locks.enter_context(self.store.lock(f"train-{path.stem}"))
                    if read_result(path, TRAINED_SCHEMA) is None:
                        continue
                del missing[path]
            fleets = self.fleets(missing)
            for fleet in fleets:
                self.message(f"training {len(fleet)} sets of fields from scratch together")
                self.fleet_from_scratch(fleet)
            return bool(fleets)

    def fleet_from_scratch(self, missing: Mapping[Path, tuple[Sequence[str], int]]) -> None:
        """Train sets of fields from scratch at once, each on the batches that it would be trained on alone."""
        base, paths = self.base, sorted(missing)
        plan = base.for_search(self.store.open_fleet([path.stem for path in paths]), base.settings.seed)
        try:
            with remove_on_error(plan.run_dir), measure(plan.device) as measurement:
                models = [
                    stages.reinitialized(base.for_search(plan.run_dir, seed), self.cut_model(kept))
                    for kept, seed in map(missing.__getitem__, paths)
                ]
                trained = [(model, plan.optimizer(model)) for model in models]
                seeds = [missing[path][1] for path in paths]
                rows, is_large = plan.splits.train, plan.has_large_tables
                stages.train_together(
                    plan, trained, rows, plan.steps.train, plan.run_dir, seeds, final_if_due=is_large, quiet=self.quiet
                )
        except NOT_METHOD_ERRORS:
            raise
        except (LpfsError, torch.OutOfMemoryError) as error:  # one loss is not finite, or no memory: some runs fail
            self.message(f"the sets of fields are trained one by one: {error_text(error)}")
            self._failed.update(paths)
            return
        for path, model in zip(paths, models, strict=True):
            self.store_trained(model, path, measurement.seconds / len(paths))
        shutil.rmtree(plan.run_dir, ignore_errors=True)

    def store_trained(self, model: Model, path: Path, seconds: float) -> Record:
        """Evaluate a trained model; store its metrics, and its logits on the test rows for the bootstrap.

        The test rows of a simulated Dataset are scored against their true click probabilities.
        """
        plan, metrics = self.base, {}
        for name, rows in (("test", plan.splits.test), ("validation", plan.splits.valid)):
            stream = plan.stream(rows, model.reads.names, train=False)
            predicted = predictions(model, stream)
            labels = predicted.labels
            if name == "test" and self.test_probabilities is not None:
                labels = np.column_stack([self.test_probabilities, labels[:, 1:]])
            tasks = {
                task: {"auc": task_scores.auc, "logloss": task_scores.logloss}
                for number, task in enumerate(task_names(stream, predicted.logits.shape[1]))
                for task_scores in [scores(predicted.logits[:, number], labels[:, number])]
            }
            main = next(iter(tasks.values()))
            metrics[name] = main if len(tasks) == 1 else {**main, "tasks": tasks}
            if name == "test":
                write_array_atomic(path.with_suffix(".npy"), predicted.logits[:, 0])
                if not self.store.labels.exists():
                    write_array_atomic(self.store.labels, labels[:, 0])
        record = {
            **{"trained": path.stem, **metrics, "train_seconds": seconds, "code": source_digest()},
            "labels": file_checksum(self.store.labels),
            "files": {f"{path.stem}.npy": file_checksum(path.with_suffix(".npy"))},
        }
        write_json_atomic(path, record)
        return record


def shared_cost(cost: Record, count: int) -> Record:
    """Return the cost of one of several trainings that were measured together."""
    shares = {name: None if cost[name] is None else cost[name] / count for name in ("seconds", "memory")}
    return {**cost, **shares}


@contextmanager
def remove_on_error(directory: Path, errors: type[Exception] = Exception) -> Iterator[None]:
    """Remove the directory of a failed method or of data that cannot be used, so that it is not resumed."""
    try:
        yield
    except NOT_METHOD_ERRORS:
        raise
    except errors:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def error_text(error: Exception) -> str:
    """Return the text of an error on one line."""
    text = " ".join("".join(char if char.isprintable() else " " for char in str(error)).split())
    return text if isinstance(error, LpfsError) else f"{type(error).__name__}: {text}"
