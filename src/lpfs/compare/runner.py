"""Runs: one pretrained model a seed, the same steps of search for every method, one training from scratch.

What a piece of work costs: seconds, and how far memory rose above where it began.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lpfs.compare.locks import LockedError, WorkLocks
from lpfs.compare.plan import ALL_FIELDS, ComparisonPlan, RunSpec
from lpfs.compare.run_dir import Record, ResultStore, put, put_scores, read
from lpfs.errors import CheckpointError, LpfsError, SearchError
from lpfs.methods.ranking import top
from lpfs.methods.registry import each_keep
from lpfs.models import make_model
from lpfs.models.base import Model
from lpfs.pipeline import stages
from lpfs.pipeline.plan import RunPlan, check_search_start
from lpfs.pipeline.results import source_digest
from lpfs.train.checkpoint import seed_all
from lpfs.train.evaluate import predictions, task_names
from lpfs.train.metrics import scores

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5): the peak of the resident memory begins anew


@dataclass
class Measurement:
    """Seconds and bytes; None where this machine cannot tell."""

    seconds: float | None = None
    memory: int | None = None


@contextmanager
def measure(device: torch.device) -> Iterator[Measurement]:
    """Measure what is done in this block; the result is there when it ends.

    On a GPU memory is what torch allocated there; elsewhere it is the resident memory of the process, on Linux.
    """
    cost = Measurement()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int | None = torch.cuda.memory_allocated(device)
    else:
        before = _reset_peak()
    begin = time.perf_counter()
    yield cost
    if on_gpu:
        torch.cuda.synchronize(device)
    cost.seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _resident("VmHWM")
    if before is not None and peak is not None:
        cost.memory = max(0, peak - before)


def _reset_peak() -> int | None:
    """Hand unused memory back, let the peak begin anew, and return what is resident."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None


NOT_METHOD_ERRORS = (
    LockedError,
    OSError,
    CheckpointError,
)  # not a method's: somebody else is at it, or the disk is full


class Runner:
    """Does the runs of a comparison, each from what is there already.

    Whatever two runs share (the pretrained model of a seed, a ranking, a set of fields) is made once and kept;
    :class:`BusyError` is raised where another process is making it just now.
    """

    def __init__(
        self,
        base: RunPlan,
        plan: ComparisonPlan,
        store: ResultStore,
        claims: WorkLocks,
        say: Callable[[str], None],
    ) -> None:
        self.base, self.plan, self.store, self.claims, self.say = base, plan, store, claims, say
        with torch.device("meta"):
            made = make_model(base.settings.backbone, base.schema, **base.settings.model_options)
        self.shape: Model = made
        self._pretrained: tuple[int, stages.Trained] | None = None
        self._warm: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """What can be kept: the fields, or the parts of a model that gates more than fields."""
        return self.shape.names

    def run(self, job: RunSpec) -> Record:
        """Return the result of a run; one that fails says why, and stops nothing else."""
        try:
            found = self.all_fields(job) if job.method == ALL_FIELDS else self.best_trial(job)
            return {**record_header(job), "status": "done", **found}
        except NOT_METHOD_ERRORS:
            raise
        except Exception as error:  # a method may fail in any way
            return {**record_header(job), "status": "failed", "reason": error_text(error)}

    def all_fields(self, job: RunSpec) -> Record:
        """Train all fields from scratch, as every selection is."""
        return {"kept": self.in_order(self.names), **self.train(self.names, job.seed)}

    def best_trial(self, job: RunSpec) -> Record:
        """Search with each setting, train what it finds, and take the one with the best validation AUC."""
        tried: list[Record] = []
        failed: list[Exception] = []
        done: list[Record] = []
        for options in self.plan.trial_settings(job.method):
            try:
                found = self.selected_fields(job, options)
                trained = self.train(found["kept"], job.seed)
            except NOT_METHOD_ERRORS:
                raise
            except Exception as error:
                failed.append(error)
                tried.append({"options": options, "reason": error_text(error)})
                continue
            done.append({**found, **trained, "options": options})
            tried.append({"options": options, "validation": trained["validation"], "kept": found["kept"]})
        if not done:
            raise failed[0]
        best = max(done, key=lambda each: (each["validation"]["auc"], -each["validation"]["logloss"]))
        return {**best, "tried": tried}

    def selected_fields(self, job: RunSpec, options: Mapping[str, Any]) -> Record:
        """Return the fields that a method keeps; a ranking that does not depend on K is made once a seed."""
        once = not each_keep(job.method, options)
        path = self.store.search(job.method, options, job.seed, None if once else job.keep)
        found = read(path)
        if found is None:
            with self.claims.acquire(f"search-{path.stem}"):
                found = read(path) or self.search(job, options, path)
        found["once"] = once
        if once:
            found["kept"] = self.in_order(self.best(found["scores"], job.keep))
        return {"kept": found["kept"], "search": {name: found.get(name) for name in ABOUT_SEARCH}}

    def best(self, ranking: Mapping[str, float], keep: int) -> tuple[str, ...]:
        """Return the best of a ranking."""
        return top(ranking, keep, self.base.target.must_keep)

    def search(self, job: RunSpec, options: Mapping[str, Any], path: Path) -> Record:
        """Search from a copy of the pretrained model, and write down what is found."""
        wish = replace(self.base.target, keep=job.keep, max_auc_loss=None)
        settings = replace(self.base.settings, seed=job.seed, method=job.method, options=options, keep=job.keep)
        work = replace(self.base, settings=settings, target=wish, run_dir=self.store.work(path.stem))
        check_search_start(work)
        pretrained = self.pretrained(job.seed)
        again = was_started(work.run_dir)
        seed_all(job.seed)
        with remove_on_error(work.run_dir), measure(work.device) as cost:
            found = stages.search_fields(work, copy.deepcopy(pretrained), job.seed)[2]
        made = {name: value for name, value in found.made.items() if name != "scores"}
        record = {
            "kept": self.in_order(found.kept),
            "scores": found.made.get("scores"),
            "gates": dict(found.gates),
            "made": made,
            "code": source_digest(),
            **self.cost_record(cost, job.method, again),
        }
        if not each_keep(job.method, options) and not self.keeps_top_scores(record, job.keep):
            raise SearchError(f"{job.method} does not keep the best of its scores: it needs each_keep in METHODS")
        put(path, record)
        shutil.rmtree(work.run_dir, ignore_errors=True)
        return record

    def keeps_top_scores(self, found: Record, keep: int) -> bool:
        """Say whether a search kept the best of its scores, so that they can be cut at another K."""
        return found["scores"] is not None and set(self.best(found["scores"], keep)) == set(found["kept"])

    def pretrained(self, seed: int) -> stages.Trained:
        """Return the model of all fields that every search of a seed begins with."""
        if self._pretrained is None or self._pretrained[0] != seed:
            self._pretrained = None  # free it first
            place = self.store.seed(seed)
            settings = replace(self.base.settings, seed=seed)
            work = replace(self.base, settings=settings, run_dir=place)
            if read(place / "cost.json") is not None:
                trained = stages.pretrain(work, seed)
            else:
                with self.claims.acquire(f"pretrain-s{seed}"):
                    self.say(f"seed {seed}: pretraining all {len(work.schema)} fields")
                    again = was_started(place)
                    with measure(work.device) as cost:
                        trained = stages.pretrain(work, seed)
                    passes = work.steps.pretrain * work.steps.batch_size / work.splits.early.rows
                    put(place / "cost.json", {"passes": passes, **self.cost_record(cost, "pretraining", again)})
            self._pretrained = seed, trained
        return self._pretrained[1]

    def cost_record(self, cost: Measurement, what: str, interrupted: bool) -> Record:
        """Return a cost: whether it is the first of its kind in this process, which compiles and loads things too.

        Seconds of work that was interrupted and gone on with are not all of them: None.
        """
        first = what not in self._warm
        self._warm.add(what)
        return {
            "seconds": None if interrupted or cost.seconds is None else round(cost.seconds, 4),
            "memory": cost.memory,
            "first": first,
            "interrupted": interrupted,
        }

    def in_order(self, kept: Iterable[str]) -> list[str]:
        """Return fields in the order of the table, other parts of the model after them."""
        place = {name: number for number, name in enumerate((*self.base.schema.names, *self.names))}
        return sorted(kept, key=lambda name: place[name])

    def train(self, kept: Sequence[str], seed: int) -> Record:
        """Train these fields from scratch and judge them; the same fields are trained once a seed."""
        path = self.store.trained(kept, seed)
        found = read(path)
        if found is None:
            with self.claims.acquire(f"train-{path.stem}"):
                found = read(path) or self.from_scratch(kept, seed, path)
        return found

    def from_scratch(self, kept: Sequence[str], seed: int, path: Path) -> Record:
        """Train a set of fields; its scores on the test rows are kept for the bootstrap."""
        with torch.device("meta"):
            shape = self.shape.cut([name for name in self.names if name in set(kept)])
        settings = replace(self.base.settings, seed=seed)
        work = replace(self.base, settings=settings, run_dir=self.store.work(path.stem))
        with remove_on_error(work.run_dir), measure(work.device) as cost:
            model = stages.retrain(work, shape)
        judged = {}
        for name, part in (("test", work.splits.test), ("validation", work.splits.valid)):
            stream = work.stream(part, model.reads.names, train=False)
            found = predictions(model, stream)
            tasks = {
                task: {"auc": each.auc, "logloss": each.logloss}
                for number, task in enumerate(task_names(stream, found.logits.shape[1]))
                for each in [scores(found.logits[:, number], found.labels[:, number])]
            }
            first = next(iter(tasks.values()))
            judged[name] = first if len(tasks) == 1 else {**first, "tasks": tasks}
            if name == "test":
                put_scores(path.with_suffix(".npy"), found.logits[:, 0])
                if not self.store.labels.exists():
                    put_scores(self.store.labels, found.labels[:, 0])
        record = {"trained": path.stem, **judged, "train_seconds": cost.seconds, "code": source_digest()}
        put(path, record)
        shutil.rmtree(work.run_dir, ignore_errors=True)
        return record


ABOUT_SEARCH = ("seconds", "memory", "first", "interrupted", "once", "made", "code")


def record_header(job: RunSpec) -> Record:
    """Return what a result begins with."""
    return {"method": job.method, "keep": job.keep, "seed": job.seed}


@contextmanager
def remove_on_error(folder: Path) -> Iterator[None]:
    """Within this block something is trained in a folder: where it fails, nothing of it is gone on with."""
    try:
        yield
    except NOT_METHOD_ERRORS:
        raise
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def was_started(folder: Path) -> bool:
    """Whether something was begun there before."""
    return folder.is_dir() and any(folder.iterdir())


def error_text(error: Exception) -> str:
    """Return why something failed, in a line."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(error))
    text = " ".join(text.split())
    return text if isinstance(error, LpfsError) else f"{type(error).__name__}: {text}"
