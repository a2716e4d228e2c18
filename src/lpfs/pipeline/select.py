"""select: the whole job, from a log of clicks to the kept fields, their quality and a smaller model.

lpfs.select("clicks.parquet", label="click", time="day", keep=20, out="run")

prepare -> pretrain on the early days -> search on the following days -> absorb the gates and prune, with a
certificate -> train the pruned model further, and the kept fields from scratch -> evaluate on the last day.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs.pipeline import results, stages
from lpfs.pipeline.data import prepare_dataset, with_source
from lpfs.pipeline.hints import find_hints, unread_fields_hint
from lpfs.pipeline.plan import RunPlan, StageTimer, build_plan, check_settings
from lpfs.pipeline.results import Outcome
from lpfs.pipeline.run_dir import locked_run, log_run, mlflow_run, starting_run
from lpfs.pipeline.settings import Settings
from lpfs.report import REPORT_FILE, write_report_safely
from lpfs.serialization import save
from lpfs.train.distributed.group import current_group, leader_first

# number of headings of a run, by its last stages
HEADINGS = {"both": 7, "hot": 6, "retrain": 6, "none": 5}
MODEL_ORDER = ("all_fields", "gated", "pruned", "hot_start", "retrained")


def select(
    source: Any = None,
    out: str | os.PathLike[str] = "run",
    *,
    settings: Settings | None = None,
    resume: bool = False,
    replace: bool = False,
    quiet: bool = False,
    **changes: Any,
) -> Outcome:
    """Find the fields that a CTR model needs, and write them, a report and the smaller model to a directory.

    Args:
        source: a log (files, a table in memory), or a Dataset or its directory.
        out: directory of the run.
        settings: settings of an earlier run, from ``Settings.load(directory)``.
        resume: continue the run in ``out`` from the stage and step it had reached.
        replace: replace an older run in ``out``.
        quiet: print nothing.
        changes: single settings, see :class:`Settings`; they override those of ``settings``.
    """
    settings, source = with_source((settings or Settings()).updated(**changes), source)
    group, run_dir = current_group(), Path(out)
    console = Console(quiet=quiet or not group.is_leader, stages=HEADINGS[settings.finish] + (settings.seeds > 1))
    settings, saved = check_settings(settings)
    timer = StageTimer(console)
    with mlflow_run(settings, run_dir) as mlflow, ExitStack() as lock:
        with timer.stage("prepare", "prepare"), leader_first("preparing the data") as follows:
            if not follows:
                lock.enter_context(locked_run(run_dir, console.message))
            with starting_run(run_dir, settings, resume=resume or follows, replace=replace and not follows):
                dataset = prepare_dataset(source, settings, run_dir, console, saved=saved, resume=resume or follows)
                plan = build_plan(settings, dataset, run_dir, console, saved=saved, resume=resume)
                plan.check()
        outcome = results.with_record(_run_stages(plan, timer), plan)
        group.run_on_leader(lambda: _write_results(outcome, plan), "writing the results")
        if mlflow is not None:
            log_run(mlflow, run_dir, outcome.record)
    return outcome


def _run_stages(plan: RunPlan, timer: StageTimer) -> Outcome:
    """Run the stages after the data is prepared, in order."""
    settings, seed = plan.settings, plan.settings.seed
    action = "pretrain" if plan.saved_model is None else "load the trained model of"
    with timer.stage("pretrain", f"{action} all {len(plan.schema)} fields"):
        trained = stages.initial_model(plan, seed)
    with timer.stage("all_fields", "train all fields on all training rows, for comparison"):
        full = stages.all_fields(plan, trained)
    with timer.stage("search", f"search: {plan.target.describe()}"):
        model, optimizer, selection = stages.search_fields(plan, trained, seed)
        metrics = {"gated": stages.test_metrics(plan, model)}
    with timer.stage("prune", "absorb the gates, prune, verify"):
        zeros, cut, selection = stages.absorb_and_prune(plan, model, optimizer, selection)
        models = {"pruned": stages.pruned_model(cut)}
        plan.console.message(f"{zeros.certificate}; without the columns: {cut.certificate}")
    if settings.finish in ("both", "retrain"):
        with timer.stage("retrain", f"train the {len(selection.kept)} kept fields from scratch"):
            models["retrained"] = stages.retrain(plan, models["pruned"])
    if settings.finish in ("both", "hot"):
        with timer.stage("hot_start", "train the pruned model further"):
            models["hot_start"], auc_history = stages.hot_start(plan, cut)
    choices = {name: stages.valid_metrics(plan, model) for name, model in models.items()}
    metrics |= {name: stages.test_metrics(plan, model) for name, model in models.items()}
    hot_start = {}
    if settings.finish == "both":
        hot_start = results.steps_saved(
            auc_history.points, choices["retrained"]["auc"], plan.steps.train, auc_history.shrink_factor
        )

    counts = Counter(selection.kept)
    if settings.seeds > 1:
        others = range(seed + 1, seed + settings.seeds)
        with timer.stage("seeds", f"search again with {len(others)} other seed{'s' * (len(others) > 1)}"):
            for other in others:
                counts.update(stages.search_fields(plan, stages.initial_model(plan, other), other)[2].kept)

    chosen = max(choices, key=lambda name: (choices[name]["auc"] or 0.0, -choices[name]["logloss"]))
    compared = {"all_fields": full, "kept": models[chosen]}
    speeds = current_group().run_on_leader(
        lambda: stages.serving_speed(plan, compared), "measuring the speed of the models"
    )
    metrics["all_fields"], choices["all_fields"] = stages.test_metrics(plan, full), stages.valid_metrics(plan, full)
    certificates = {"zeros": zeros.certificate, "cut": cut.certificate}
    changes = (selection.made["max_logit_change"], cut.certificate.max_logit_change)
    return Outcome(
        selection=selection,
        metrics={name: metrics[name] for name in MODEL_ORDER if name in metrics},
        choices={name: choices[name] for name in MODEL_ORDER if name in choices},
        certificates={name: results.certificate_record(value) for name, value in certificates.items()},
        max_logit_change=None if None in changes else sum(changes),
        model=models[chosen],
        chosen=chosen,
        chosen_in={name: counts.get(name, 0) for name in selection.names},
        savings={name: {**stages.model_size(model), **speeds[name]} for name, model in compared.items()},
        seconds=timer.seconds,
        folder=plan.run_dir,
        hot_start=hot_start,
        hints=[
            *unread_fields_hint(selection.kept, models[chosen].names, plan.schema),
            *find_hints(plan, full, models[chosen].reads.names),
        ],
    )


def _write_results(outcome: Outcome, plan: RunPlan) -> None:
    """Write the model, the record and the report; print the result."""
    save(outcome.model, plan.run_dir / "model", **results.data_reference(plan.dataset))
    results.write_record(plan.run_dir, outcome.record, outcome.selection)
    results.print_results(outcome, plan)
    write_report_safely(outcome.record, outcome.selection.history, plan.run_dir / REPORT_FILE, plan.console.message)
