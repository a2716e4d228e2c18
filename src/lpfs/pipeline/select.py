"""select: the whole job. Say how much to keep; get the fields, the proof and the model.

lpfs.pipeline.select("clicks.parquet", label="click", time="day", keep=20, out="run")

prepare -> pretrain on the early days -> search on the next ones, all parameters together -> absorb and prune,
with a certificate -> go on from the pruned model, and train the kept fields from scratch -> judge on the last day.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lpfs.data.dataset import Dataset
from lpfs.data.prepare import make_job, prepare
from lpfs.errors import DataError, InputError
from lpfs.methods.costs import Costs, complexity
from lpfs.methods.known import known
from lpfs.methods.registry import check_method, check_search
from lpfs.methods.wish import DEFAULT_LOSS, Wish
from lpfs.models.base import Model
from lpfs.models.registry import check_model, make_model
from lpfs.protocol import hot
from lpfs.pipeline import stages
from lpfs.pipeline import results as result
from lpfs.pipeline.data import as_trained, check_fits, is_dataset, model_folder, trained_on
from lpfs.pipeline.run_dir import beginning
from lpfs.pipeline.hints import hints, unread
from lpfs.pipeline.results import Outcome
from lpfs.pipeline.splits import DEALT, TESTED, Periods, clicks, noise_of_auc, periods
from lpfs.protocol.recipe import recipe
from lpfs.pipeline.settings import WAYS, Settings
from lpfs.pipeline.stages import Work
from lpfs.pipeline.tell import Teller
from lpfs.protocol.tracking import tracked
from lpfs.report.verb import try_report
from lpfs.serialization import load, save
from lpfs.schema import Schema
from lpfs.train.boards import need_mlflow, need_tensorboard
from lpfs.train.config import Training
from lpfs.train.distributed.group import current, in_turn

HARDLY = 0.25  # of the standard error of an AUC: a loss that is hardly told
OWN_NUMBERS = ("dlrm", "dlrm_cross", "user_item")  # backbones with a way of their own to read numbers
STAGES = {"both": 7, "hot": 6, "retrain": 6, "none": 5}


def select(
    source: Any = None,
    out: str | os.PathLike[str] = "run",
    *,
    settings: Settings | None = None,
    resume: bool = False,
    replace: bool = False,
    quiet: bool = False,
    **given: Any,
) -> Outcome:
    """Find the fields that a CTR model needs, prove it, and leave the smaller model behind.

    Args:
        source: a log (files, a table in memory) or a Dataset or its folder.
        out: folder of the run.
        settings: the settings of an earlier run, as ``Settings.load(folder)`` reads them.
        resume: go on with the run in ``out`` from the stage and step it had reached.
        replace: put this run in the place of an older one.
        quiet: print nothing.
        given: single settings, see :class:`Settings`; they go before those of ``settings``.

    """
    wanted = (settings or Settings()).updated(**given)
    if isinstance(source, str | os.PathLike) or (
        isinstance(source, Sequence) and all(isinstance(each, str | os.PathLike) for each in source)
    ):
        names = [source] if isinstance(source, str | os.PathLike) else list(source)
        wanted = wanted.updated(source=tuple(os.fspath(each) for each in names))
        source = None
    elif isinstance(source, Dataset) and source.whole:  # the configuration says where it is
        wanted = wanted.updated(source=(os.fspath(source.path),))
    tell = Teller(quiet=quiet, stages=STAGES[wanted.finish] + (wanted.seeds > 1))
    wanted = checked(wanted)
    with tracked(wanted, Path(out)):
        return whole_job(source, Path(out), wanted, tell, resume=resume, replace=replace)


def whole_job(
    source: Any, folder: Path, wanted: Settings, tell: Teller, *, resume: bool = False, replace: bool = False
) -> Outcome:
    """Do the job, stage by stage."""
    seed, quiet = wanted.seed, tell.quiet
    tell.stage("prepare")
    begin = time.perf_counter()
    with (
        in_turn("preparing the data") as second,
        beginning(folder, wanted, resume=resume or second, replace=replace and not second, sources=wanted.source),
    ):
        dataset = prepared(source, wanted, folder, quiet, resume or second)
        work = planned(wanted, dataset, folder, resume, tell)
        work.seconds["prepare"] = time.perf_counter() - begin

    first = "pretrain" if wanted.checkpoint is None else "take the trained model of"
    with work.stage("pretrain", f"{first} all {len(work.schema)} fields"):
        trained = start(work, seed)
    with work.stage("all_fields", "all fields on all training rows, to compare with"):
        full = stages.all_fields(work, trained)
    with work.stage("search", f"search: {wished(work.wish)}"):
        model, optimizer, found = stages.find(work, trained, seed)
        gated = stages.judge(work, model, work.parts.test)
    with work.stage("prune", "absorb the gates, prune, prove"):
        zeros, cut, selection = stages.shrink(work, model, optimizer, found)
        pruned = stages.judge(work, as_model(cut.model), work.parts.test)
        choices = {"pruned": validated(work, as_model(cut.model))}
        tell.say(f"{zeros.certificate}; with the columns cut: {cut.certificate}")

    models = {"pruned": as_model(cut.model)}
    metrics = {"gated": gated, "pruned": pruned}
    if wanted.finish in ("both", "retrain"):
        with work.stage("retrain", f"train the {len(selection.kept)} kept fields from scratch"):
            models["retrained"] = stages.retrain(work, as_model(cut.model))
            metrics["retrained"] = stages.judge(work, models["retrained"], work.parts.test)
            choices["retrained"] = validated(work, models["retrained"])
    if wanted.finish in ("both", "hot"):
        with work.stage("hot_start", "go on from the pruned model"):
            models["hot_start"], watch = hot.hot_start(work, cut)
            metrics["hot_start"] = stages.judge(work, models["hot_start"], work.parts.test)
            choices["hot_start"] = validated(work, models["hot_start"])
    saved = {}
    if wanted.finish == "both":
        saved = result.steps_saved(watch.seen, choices["retrained"]["auc"], work.recipe.train)
        saved["shrunk"] = watch.shrunk

    counts = Counter(selection.kept)
    if wanted.seeds > 1:
        with work.stage("seeds", f"search again with {wanted.seeds - 1} other seeds"):
            for other in range(seed + 1, seed + wanted.seeds):
                again = stages.find(work, start(work, other), other)[2]
                counts.update(again.kept)

    chosen = max(choices, key=lambda name: (choices[name]["auc"] or 0.0, -choices[name]["logloss"]))
    compared = {"all_fields": full, "kept": models[chosen]}
    speed = current().agree(lambda: stages.serving_speed(work, compared), "measuring the speed of the models")
    order = ("all_fields", "gated", "pruned", "hot_start", "retrained")
    metrics["all_fields"] = stages.judge(work, full, work.parts.test)
    choices["all_fields"] = validated(work, full)
    found_all = Outcome(
        selection=selection,
        metrics={name: stages.brief(metrics[name]) for name in order if name in metrics},
        choices={name: choices[name] for name in order if name in choices},
        certificates={
            "zeros": certified(zeros.certificate),
            "cut": certified(cut.certificate),
        },
        max_logit_change=largest(selection.made["max_logit_change"], cut.certificate.max_logit_change),
        model=models[chosen],
        chosen=chosen,
        chosen_in={name: counts.get(name, 0) for name in selection.names},
        savings=result.savings(full, models[chosen], speed),
        seconds=work.seconds,
        folder=folder,
        hot_start=saved,
        hints=[
            *unread(selection.kept, models[chosen].names, work.schema),
            *hints(work, full, models[chosen].reads.names),
        ],
    )
    current().agree(lambda: leave(found_all, work, dataset), "writing the answer")
    return found_all


def leave(found: Outcome, work: Work, dataset: Dataset) -> None:
    """Write the answer and the model into the folder of the run, and show what was found."""
    folder = found.folder
    save(found.model, folder / "model", data=os.path.abspath(dataset.path), fingerprint=dataset.fingerprint)
    result.write(found, work, dataset.fingerprint)
    result.show(found, work)
    try_report(folder, work.tell.say)


class _Story(ModuleType):
    """The module, which may be called: ``lpfs.pipeline.select(…)`` is ``lpfs.pipeline.select.select(…)``."""

    def __call__(self, *args: Any, **given: Any) -> Outcome:
        return select(*args, **given)


sys.modules[__name__].__class__ = _Story


def checked(wanted: Settings) -> Settings:
    """Return the settings with absolute paths, after a check of all that can be checked without the data."""
    wanted = as_trained(wanted).anchored()
    check_method(wanted.method, wanted.options)
    check_model(wanted.backbone, wanted.model_options)
    if device_named(wanted.device).type != "cuda" and wanted.graph:
        raise InputError("graph captures the steps of a GPU, and this run is on the CPU; leave it out")
    if wanted.graph and current().several:
        raise InputError("graph captures the steps of one process, and there are several; leave it out")
    if wanted.tensorboard:
        need_tensorboard()
    if wanted.mlflow:
        need_mlflow()
    Training(optimizer=wanted.optimizer, lr=wanted.lr, precision=wanted.precision)  # type: ignore[arg-type]
    return wanted


def prepared(source: Any, wanted: Settings, folder: Path, quiet: bool, resume: bool = False) -> Dataset:
    """Return the Dataset: the one given, or one made of the log and kept with the run.

    Where a trained model is given, a log is encoded as the model's was. Rows that nothing orders are dealt to the
    days at random. A run that goes on has its data already.
    """
    if isinstance(source, Dataset):
        return source
    if resume and (folder / "data" / "dataset.json").exists():
        return Dataset(folder / "data")
    if source is None:
        if not wanted.source:
            raise InputError("give the log to select from: files, a table, or the folder of a Dataset")
        if is_dataset(wanted.source):
            return Dataset(wanted.source[0])
        source = list(wanted.source) if len(wanted.source) > 1 else wanted.source[0]
    options = {**wanted.prepare, "label": wanted.label, "time": wanted.time, "split": wanted.split}
    if wanted.checkpoint is not None:
        place = model_folder(wanted.checkpoint)
        options |= {"like": trained_on(place), "fields_only": load(place).reads.names}
    elif wanted.backbone not in OWN_NUMBERS:
        options.setdefault("bins", "auto")
    if not {"shuffle", "preset"} & set(options):
        found = make_job(source, **options).options
        if found.time is None and found.parts != "files":
            options["shuffle"] = True
            if "parts" not in options:
                options |= {"parts": DEALT, "train": DEALT if wanted.split else DEALT - TESTED}
    return prepare(source, folder / "data", quiet=quiet, replace=True, **options)


def planned(wanted: Settings, dataset: Dataset, folder: Path, resume: bool, tell: Teller) -> Work:
    """Check everything that can be checked before anything is trained."""
    work = laid_out(wanted, dataset, folder, resume, tell)
    check_begin(work)
    check_labels(work.parts)
    return work


def laid_out(wanted: Settings, dataset: Dataset, folder: Path, resume: bool, tell: Teller) -> Work:
    """Return the rows of every stage, how long each takes, and what is wished for."""
    schema = dataset.schema
    if dataset.settings.get("unlabelled"):
        raise DataError(f"{dataset.path} was prepared from rows without a label: nothing can be learned from it")
    for name in wanted.must_drop:
        known(name, schema.names, "must_drop")
    read = schema.names if wanted.checkpoint is None else load(model_folder(wanted.checkpoint)).reads.names
    left = [name for name in schema.names if name in read and name not in set(wanted.must_drop)]
    if not left:
        raise InputError("every field must be dropped: nothing is left to select from")
    schema = schema.subset(left)
    parts = periods(dataset)
    ways = {name: getattr(wanted, name) for name in WAYS}
    if all(each is None for each in ways.values()):
        ways["max_auc_loss"] = small_loss(parts.valid)
    wish = Wish(**ways, must_keep=wanted.must_keep, costs=costs_of(wanted, schema))
    steps = recipe(
        parts,
        batch_size=wanted.batch_size,
        pretrain_steps=wanted.pretrain_steps,
        search_steps=wanted.search_steps,
    )
    return Work(wanted, schema, parts, steps, wish, device_named(wanted.device), folder, resume, tell)


def check_begin(work: Work) -> None:
    """Refuse a search that could not be begun."""
    wanted, wish = work.settings, work.wish
    with torch.device("meta"):  # nothing is allocated for it
        model = make_model(wanted.backbone, work.schema, **wanted.model_options)
    fields = model.fields_of_parts()
    costs = None if wish.costs is None else wish.costs.of_parts({name: fields[name] for name in model.names})
    wish = changed(wish, costs=costs)
    check_search(wanted.method, wanted.options, wish, model.names, work.recipe.search, model)


def device_named(name: str) -> torch.device:
    """Return the device of a name; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"there is no device {name!r}; auto, cpu, cuda and cuda:1 are ones") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"device {name!r}: torch sees {count} GPUs here; lpfs doctor tells more")
    return device


def small_loss(valid: Dataset) -> float:
    """Return the AUC loss that is allowed where nothing is asked for: one that these rows could hardly tell."""
    return max(DEFAULT_LOSS, round(noise_of_auc(valid) * HARDLY, 4))


def check_labels(parts: Periods) -> None:
    """Refuse rows of one class only, where they have to judge or to choose."""
    for name in ("early", "search", "valid", "test"):
        part = getattr(parts, name)
        positive, _ = clicks(part)
        if positive in (0, part.rows):
            raise InputError(
                f"the {name} rows ({part.rows:,}) hold one class only ({positive:,} positive): nothing can be "
                "learned or judged there. Give more rows, another time column, or a split"
            )


def costs_of(wanted: Settings, schema: Schema) -> Costs | None:
    """Return the costs that the settings name."""
    if wanted.costs is None:
        return None
    if wanted.costs == "complexity":
        return complexity(schema, **{name: value for name, value in wanted.model_options.items() if name == "dim"})
    return Costs.load(wanted.costs, schema)


def start(work: Work, seed: int) -> stages.Trained:
    """Return the model that a search starts from."""
    return stages.pretrain(work, seed) if work.settings.checkpoint is None else given_model(work)


def validated(work: Work, model: Model) -> dict[str, Any]:
    """Return AUC and logloss on the rows where choices are made."""
    return stages.brief(stages.judge(work, model, work.parts.valid))


def given_model(work: Work) -> stages.Trained:
    """Return the model to start from instead of pretraining."""
    assert work.settings.checkpoint is not None
    place = model_folder(work.settings.checkpoint)
    model = load(place).to(work.device)
    check_fits(place, model, work.parts.train)
    dropped = [name for name in model.reads.names if name not in work.schema.names]
    if dropped:
        raise InputError(f"the model in {place} reads {dropped[0]!r}, which must be dropped: decide")
    return model, work.optimizer(model)


def as_model(model: Any) -> Model:
    """Return a model as what it is."""
    assert isinstance(model, Model)
    return model


def largest(*changes: float | None) -> float | None:
    """Return how far the logits moved at most, over several steps; None where one was not looked at."""
    known = [each for each in changes if each is not None]
    return sum(known) if len(known) == len(changes) else None


def certified(certificate: Any) -> dict[str, Any]:
    """Return a certificate as plain values."""
    return {
        "max_logit_change": certificate.max_logit_change,
        "bound": certificate.bound,
        "certified": certificate.certified,
        "checked": list(certificate.checked),
    }


def wished(wish: Wish) -> str:
    """Say what is looked for."""
    if wish.keep is not None:
        return f"keep exactly {wish.keep}"
    if wish.penalty is not None:
        return f"a fixed penalty of {wish.penalty:g}"
    if wish.budget is not None:
        return f"a budget of {wish.budget:g} {wish.costs.unit if wish.costs else ''}".rstrip()
    return f"as few as cost at most {wish.max_auc_loss:g} AUC"
