"""select: the whole job. Say how much to keep; get the fields, the proof and the model.

lpfs.select("clicks.parquet", label="click", time="day", keep=20, out="run")

prepare -> pretrain on the early days -> search on the next ones, all parameters together -> absorb and prune,
with a certificate -> go on from the pruned model, and train the kept fields from scratch -> judge on the last day.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.pipeline import results as result
from lpfs.pipeline import stages
from lpfs.pipeline import stages as hot
from lpfs.pipeline.data import (
    prepare_dataset,
)
from lpfs.pipeline.hints import find_hints, unread_fields_hint
from lpfs.pipeline.plan import (
    RunPlan,
    check_settings,
    plan_run,
)
from lpfs.pipeline.results import Outcome, certificate_record, describe_target, total_logit_change, validate
from lpfs.pipeline.run_dir import mlflow_run, starting_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.stages import as_model, initial_model
from lpfs.pipeline.tell import Console
from lpfs.report.verb import try_report
from lpfs.serialization import save
from lpfs.train.distributed.group import current_group, leader_first

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
    tell = Console(quiet=quiet, stages=STAGES[wanted.finish] + (wanted.seeds > 1))
    wanted = check_settings(wanted)
    with mlflow_run(wanted, Path(out)):
        return _run_stages(source, Path(out), wanted, tell, resume=resume, replace=replace)


def _run_stages(
    source: Any, folder: Path, wanted: Settings, tell: Console, *, resume: bool = False, replace: bool = False
) -> Outcome:
    """Do the job, stage by stage."""
    seed, quiet = wanted.seed, tell.quiet
    tell.heading("prepare")
    begin = time.perf_counter()
    with (
        leader_first("preparing the data") as second,
        starting_run(
            folder, wanted, resume=resume or second, replace=replace and not second, sources=wanted.source
        ),
    ):
        dataset = prepare_dataset(source, wanted, folder, quiet, resume or second)
        work = plan_run(wanted, dataset, folder, resume, tell)
        work.seconds["prepare"] = time.perf_counter() - begin

    first = "pretrain" if wanted.checkpoint is None else "take the trained model of"
    with work.stage("pretrain", f"{first} all {len(work.schema)} fields"):
        trained = initial_model(work, seed)
    with work.stage("all_fields", "all fields on all training rows, to compare with"):
        full = stages.all_fields(work, trained)
    with work.stage("search", f"search: {describe_target(work.target)}"):
        model, optimizer, found = stages.search_fields(work, trained, seed)
        gated = stages.evaluate_split(work, model, work.splits.test)
    with work.stage("prune", "absorb the gates, prune, prove"):
        zeros, cut, selection = stages.absorb_and_prune(work, model, optimizer, found)
        pruned = stages.evaluate_split(work, as_model(cut.model), work.splits.test)
        choices = {"pruned": validate(work, as_model(cut.model))}
        tell.message(f"{zeros.certificate}; with the columns cut: {cut.certificate}")

    models = {"pruned": as_model(cut.model)}
    metrics = {"gated": gated, "pruned": pruned}
    if wanted.finish in ("both", "retrain"):
        with work.stage("retrain", f"train the {len(selection.kept)} kept fields from scratch"):
            models["retrained"] = stages.retrain(work, as_model(cut.model))
            metrics["retrained"] = stages.evaluate_split(work, models["retrained"], work.splits.test)
            choices["retrained"] = validate(work, models["retrained"])
    if wanted.finish in ("both", "hot"):
        with work.stage("hot_start", "go on from the pruned model"):
            models["hot_start"], watch = hot.hot_start(work, cut)
            metrics["hot_start"] = stages.evaluate_split(work, models["hot_start"], work.splits.test)
            choices["hot_start"] = validate(work, models["hot_start"])
    saved = {}
    if wanted.finish == "both":
        saved = result.steps_saved(watch.points, choices["retrained"]["auc"], work.steps.train)
        saved["shrunk"] = watch.shrink_factor

    counts = Counter(selection.kept)
    if wanted.seeds > 1:
        with work.stage("seeds", f"search again with {wanted.seeds - 1} other seeds"):
            for other in range(seed + 1, seed + wanted.seeds):
                again = stages.search_fields(work, initial_model(work, other), other)[2]
                counts.update(again.kept)

    chosen = max(choices, key=lambda name: (choices[name]["auc"] or 0.0, -choices[name]["logloss"]))
    compared = {"all_fields": full, "kept": models[chosen]}
    speed = current_group().run_on_leader(
        lambda: stages.serving_speed(work, compared), "measuring the speed of the models"
    )
    order = ("all_fields", "gated", "pruned", "hot_start", "retrained")
    metrics["all_fields"] = stages.evaluate_split(work, full, work.splits.test)
    choices["all_fields"] = validate(work, full)
    found_all = Outcome(
        selection=selection,
        metrics={name: stages.metrics_to_dict(metrics[name]) for name in order if name in metrics},
        choices={name: choices[name] for name in order if name in choices},
        certificates={
            "zeros": certificate_record(zeros.certificate),
            "cut": certificate_record(cut.certificate),
        },
        max_logit_change=total_logit_change(selection.made["max_logit_change"], cut.certificate.max_logit_change),
        model=models[chosen],
        chosen=chosen,
        chosen_in={name: counts.get(name, 0) for name in selection.names},
        savings=result.savings(full, models[chosen], speed),
        seconds=work.seconds,
        folder=folder,
        hot_start=saved,
        hints=[
            *unread_fields_hint(selection.kept, models[chosen].names, work.schema),
            *find_hints(work, full, models[chosen].reads.names),
        ],
    )
    current_group().run_on_leader(lambda: _finish(found_all, work, dataset), "writing the answer")
    return found_all


def _finish(found: Outcome, work: RunPlan, dataset: Dataset) -> None:
    """Write the answer and the model into the folder of the run, and show what was found."""
    folder = found.folder
    save(found.model, folder / "model", data=os.path.abspath(dataset.path), fingerprint=dataset.fingerprint)
    result.write_results(found, work, dataset.fingerprint)
    result.print_results(found, work)
    try_report(folder, work.console.message)
