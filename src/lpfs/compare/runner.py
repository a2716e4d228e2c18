"""Runs: one pretrained model a seed, the same steps of search for every method, one training from scratch."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lpfs.compare.locks import BusyError, Claims
from lpfs.compare.cost import Cost, measured
from lpfs.compare.plan import ALL_FIELDS, Job, Plan
from lpfs.compare.store import Record, Store, put, put_scores, read
from lpfs.errors import CheckpointError, LpfsError, SearchError
from lpfs.methods.ranking import top
from lpfs.methods.registry import each_keep
from lpfs.models.base import Model
from lpfs.models.registry import make_model
from lpfs.pipeline import stages
from lpfs.pipeline.results import code
from lpfs.pipeline.stages import Work
from lpfs.pipeline.select import check_begin
from lpfs.train.evaluate import outputs, task_names
from lpfs.train.metrics import scores
from lpfs.train.snapshot import seed_all

NO_FAULT = (BusyError, OSError, CheckpointError)  # not a method's: somebody else is at it, or the disk is full


class Runs:
    """Does the runs of a comparison, each from what is there already.

    Whatever two runs share (the pretrained model of a seed, a ranking, a set of fields) is made once and kept;
    :class:`BusyError` is raised where another process is making it just now.
    """

    def __init__(self, base: Work, plan: Plan, store: Store, claims: Claims, say: Callable[[str], None]) -> None:
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

    def run(self, job: Job) -> Record:
        """Return the result of a run; one that fails says why, and stops nothing else."""
        try:
            found = self.all_fields(job) if job.method == ALL_FIELDS else self.best_try(job)
            return {**head(job), "status": "done", **found}
        except NO_FAULT:
            raise
        except Exception as error:  # a method may fail in any way
            return {**head(job), "status": "failed", "reason": reason(error)}

    def all_fields(self, job: Job) -> Record:
        """Train all fields from scratch, as every selection is."""
        return {"kept": self.in_order(self.names), **self.train(self.names, job.seed)}

    def best_try(self, job: Job) -> Record:
        """Search with each setting, train what it finds, and take the one with the best validation AUC."""
        tried: list[Record] = []
        failed: list[Exception] = []
        done: list[Record] = []
        for options in self.plan.tries(job.method):
            try:
                found = self.find(job, options)
                trained = self.train(found["kept"], job.seed)
            except NO_FAULT:
                raise
            except Exception as error:
                failed.append(error)
                tried.append({"options": options, "reason": reason(error)})
                continue
            done.append({**found, **trained, "options": options})
            tried.append({"options": options, "validation": trained["validation"], "kept": found["kept"]})
        if not done:
            raise failed[0]
        best = max(done, key=lambda each: (each["validation"]["auc"], -each["validation"]["logloss"]))
        return {**best, "tried": tried}

    def find(self, job: Job, options: Mapping[str, Any]) -> Record:
        """Return the fields that a method keeps; a ranking that does not depend on K is made once a seed."""
        once = not each_keep(job.method, options)
        path = self.store.search(job.method, options, job.seed, None if once else job.keep)
        found = read(path)
        if found is None:
            with self.claims.take(f"search-{path.stem}"):
                found = read(path) or self.search(job, options, path)
        found["once"] = once
        if once:
            found["kept"] = self.in_order(self.best(found["scores"], job.keep))
        return {"kept": found["kept"], "search": {name: found.get(name) for name in ABOUT_SEARCH}}

    def best(self, ranking: Mapping[str, float], keep: int) -> tuple[str, ...]:
        """Return the best of a ranking."""
        return top(ranking, keep, self.base.wish.must_keep)

    def search(self, job: Job, options: Mapping[str, Any], path: Path) -> Record:
        """Search from a copy of the pretrained model, and write down what is found."""
        wish = replace(self.base.wish, keep=job.keep, max_auc_loss=None)
        settings = replace(self.base.settings, seed=job.seed, method=job.method, options=options, keep=job.keep)
        work = replace(self.base, settings=settings, wish=wish, out=self.store.work(path.stem))
        check_begin(work)
        pretrained = self.pretrained(job.seed)
        again = begun(work.out)
        seed_all(job.seed)
        with working(work.out), measured(work.device) as cost:
            found = stages.find(work, copy.deepcopy(pretrained), job.seed)[2]
        made = {name: value for name, value in found.made.items() if name != "scores"}
        record = {
            "kept": self.in_order(found.kept),
            "scores": found.made.get("scores"),
            "gates": dict(found.gates),
            "made": made,
            "code": code(),
            **self.told(cost, job.method, again),
        }
        if not each_keep(job.method, options) and not self.cuts(record, job.keep):
            raise SearchError(f"{job.method} does not keep the best of its scores: it needs each_keep in METHODS")
        put(path, record)
        shutil.rmtree(work.out, ignore_errors=True)
        return record

    def cuts(self, found: Record, keep: int) -> bool:
        """Say whether a search kept the best of its scores, so that they can be cut at another K."""
        return found["scores"] is not None and set(self.best(found["scores"], keep)) == set(found["kept"])

    def pretrained(self, seed: int) -> stages.Trained:
        """Return the model of all fields that every search of a seed begins with."""
        if self._pretrained is None or self._pretrained[0] != seed:
            self._pretrained = None  # free it first
            place = self.store.seed(seed)
            settings = replace(self.base.settings, seed=seed)
            work = replace(self.base, settings=settings, out=place)
            if read(place / "cost.json") is not None:
                trained = stages.pretrain(work, seed)
            else:
                with self.claims.take(f"pretrain-s{seed}"):
                    self.say(f"seed {seed}: pretraining all {len(work.schema)} fields")
                    again = begun(place)
                    with measured(work.device) as cost:
                        trained = stages.pretrain(work, seed)
                    passes = work.recipe.pretrain * work.recipe.batch_size / work.parts.early.rows
                    put(place / "cost.json", {"passes": passes, **self.told(cost, "pretraining", again)})
            self._pretrained = seed, trained
        return self._pretrained[1]

    def told(self, cost: Cost, what: str, interrupted: bool) -> Record:
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
            with self.claims.take(f"train-{path.stem}"):
                found = read(path) or self.from_scratch(kept, seed, path)
        return found

    def from_scratch(self, kept: Sequence[str], seed: int, path: Path) -> Record:
        """Train a set of fields; its scores on the test rows are kept for the bootstrap."""
        with torch.device("meta"):
            shape = self.shape.cut([name for name in self.names if name in set(kept)])
        settings = replace(self.base.settings, seed=seed)
        work = replace(self.base, settings=settings, out=self.store.work(path.stem))
        with working(work.out), measured(work.device) as cost:
            model = stages.retrain(work, shape)
        judged = {}
        for name, part in (("test", work.parts.test), ("validation", work.parts.valid)):
            stream = work.stream(part, model.reads.names, train=False)
            found = outputs(model, stream)
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
        record = {"trained": path.stem, **judged, "train_seconds": cost.seconds, "code": code()}
        put(path, record)
        shutil.rmtree(work.out, ignore_errors=True)
        return record


ABOUT_SEARCH = ("seconds", "memory", "first", "interrupted", "once", "made", "code")


def head(job: Job) -> Record:
    """Return what a result begins with."""
    return {"method": job.method, "keep": job.keep, "seed": job.seed}


@contextmanager
def working(folder: Path) -> Iterator[None]:
    """Within this block something is trained in a folder: where it fails, nothing of it is gone on with."""
    try:
        yield
    except NO_FAULT:
        raise
    except Exception:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def begun(folder: Path) -> bool:
    """Whether something was begun there before."""
    return folder.is_dir() and any(folder.iterdir())


def reason(error: Exception) -> str:
    """Return why something failed, in a line."""
    text = "".join(sign if sign.isprintable() else " " for sign in str(error))
    text = " ".join(text.split())
    return text if isinstance(error, LpfsError) else f"{type(error).__name__}: {text}"
