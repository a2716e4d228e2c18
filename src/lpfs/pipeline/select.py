"""select: the whole job, from a log of clicks to the kept fields, their quality and a smaller model.

lpfs.select("clicks.parquet", label="click", time="day", keep=20, out="run")

prepare -> pretrain on the early days -> curve: how many fields are enough -> search on the following days -> absorb
the gates and prune, with a certificate -> train the pruned model further, and the kept fields from scratch -> choose a
model and check the allowed loss on validation rows; if it is exceeded, search for more fields -> evaluate on the last
day.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs.errors import DeviceMemoryError, InputError, NonFiniteError, SearchError
from lpfs.gates.prune import Certificate
from lpfs.models.base import Model
from lpfs.pipeline import results, stages
from lpfs.pipeline.allowance import MAX_TRIES, Allowance, describe_check, next_size
from lpfs.pipeline.curve import CurveStage
from lpfs.pipeline.data import prepare_dataset, with_source
from lpfs.pipeline.plan import RunPlan, StageTimer, build_plan, check_settings
from lpfs.pipeline.results import Outcome
from lpfs.pipeline.run_dir import locked_run, log_run, mlflow_run, starting_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.warnings import find_warnings
from lpfs.report import REPORT_FILE, write_report_safely
from lpfs.schema import Selection
from lpfs.serialization import save
from lpfs.train.distributed.group import current_group, leader_first

# number of headings of a run without a curve; of them those that another search repeats, by its last stages
HEADINGS, SEARCH_HEADINGS = 3, {"both": 4, "hot": 3, "retrain": 3, "none": 2}
CHOICE_ORDER = ("pruned", "retrained", "hot_start")  # of models that can be chosen: the first of equal ones is
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
    headings = HEADINGS + SEARCH_HEADINGS[settings.finish] + 2 * settings.curve + (settings.seeds > 1)
    console = Console(quiet=quiet or not group.is_leader, stages=headings)
    settings, saved = check_settings(settings)
    timer = StageTimer(console)
    with mlflow_run(settings, run_dir) as mlflow, ExitStack() as lock:
        with timer.stage("prepare", "prepare"), leader_first("preparing the data") as follows:
            if not follows:
                lock.enter_context(locked_run(run_dir, console.message))
            with starting_run(run_dir, settings, resume=resume or follows, replace=replace and not follows):
                dataset = prepare_dataset(source, settings, run_dir, console, saved=saved, resume=resume or follows)
                plan = build_plan(settings, dataset, run_dir, console, saved=saved, resume=resume)
                plan.check(with_curve=settings.curve)
            console.message(*plan.splits.describe())
        outcome = results.with_record(_run_stages(plan, timer), plan)
        group.run_on_leader(lambda: _write_results(outcome, plan), "writing the results")
        if mlflow is not None:
            log_run(mlflow, run_dir, outcome.record)
    return outcome


def _run_stages(plan: RunPlan, timer: StageTimer) -> Outcome:
    """Run the stages after the data is prepared, in order."""
    settings, seed, console = plan.settings, plan.settings.seed, plan.console
    timer.before_stage = plan.free_memory
    action = "pretrain" if plan.saved_model is None else "load the trained model of"
    with timer.stage("pretrain", f"{action} all {len(plan.schema)} fields"):
        trained = stages.initial_model(plan, seed)
    with timer.stage("all_fields", "train all fields on all training rows, for comparison"):
        full = stages.all_fields(plan, trained)
    full_valid = stages.valid_metrics(plan, full)
    stages.release_weights(plan, full)
    allowance = Allowance.of_run(plan, full_valid, stages.valid_metrics(plan, trained[0]))
    curve, recommended, first_plan = None, None, plan
    if settings.curve:
        with timer.stage("curve", "train networks on random subsets of the fields, for the curve"):
            curve = CurveStage(plan, trained[0])
            if curve.problem is not None:
                console.message(f"the curve is left out: {curve.problem}")
                curve = None
            elif settings.finds_count:
                recommended = curve.recommend(allowance)
                size = recommended or len(trained[0].names)
                console.message(f"{allowance.describe()}: {size} of {len(trained[0].names)} fields are recommended")
                first_plan = plan.for_search(plan.run_dir, seed, keep=size)
            if curve is not None:
                curve.release()

    pretrained = [trained]
    del trained  # the first search takes it from the list, so that its tables are released after the search

    def take_trained() -> stages.Trained:
        """Return the pretrained model, which a search changes; for another search it is read from its checkpoint."""
        return pretrained.pop() if pretrained else stages.initial_model(replace(plan, resume=True), seed)

    search_plan, found, checks = _search_until_allowed(first_plan, timer, take_trained, full_valid, allowance)
    selection, chosen = found.selection, found.model
    counts, seed_aucs = Counter(selection.kept), [found.gated_auc]
    if settings.seeds > 1:
        others = range(seed + 1, seed + settings.seeds)
        with timer.stage("seeds", f"search again with {len(others)} other seed{'s' * (len(others) > 1)}"):
            for model, other_selection in _search_with_seeds(plan, search_plan, others):
                counts.update(other_selection.kept)
                seed_aucs.append(stages.evaluate_split(plan, model, plan.splits.valid).auc)
    record = None
    if curve is not None:
        with timer.stage("curve", "curve: AUC against the number of fields, and what every field is worth"):
            record = curve.to_record(selection.kept, recommended, allowance.allowed)
            del curve  # its networks
            plan.free_memory()

    compared = {"all_fields": full, "kept": chosen}
    speeds = current_group().run_on_leader(
        lambda: stages.serving_speed(plan, compared), "measuring the speed of the models"
    )
    metrics, choices = dict(found.metrics), dict(found.choices)
    metrics["all_fields"], choices["all_fields"] = stages.test_metrics(plan, full), full_valid
    console.message("checking the fields: leaks, drift, identical columns")
    with timer.measure("warnings"):
        models = (full, full_valid, chosen, choices[found.chosen])
        warnings, field_facts = find_warnings(plan, *models, selection.kept)
    changes = (selection.made["max_logit_change"], found.certificates["cut"].max_logit_change)
    return Outcome(
        selection=selection,
        metrics={name: metrics[name] for name in MODEL_ORDER if name in metrics},
        choices={name: choices[name] for name in MODEL_ORDER if name in choices},
        certificates={name: results.certificate_record(value) for name, value in found.certificates.items()},
        max_logit_change=None if None in changes else sum(changes),
        model=chosen,
        chosen=found.chosen,
        chosen_in={name: counts.get(name, 0) for name in selection.names},
        savings={name: {**stages.model_size(model), **speeds[name]} for name, model in compared.items()},
        seconds=timer.seconds,
        folder=plan.run_dir,
        hot_start=found.hot_start,
        curve=record,
        checks=checks,
        allowed=allowance.allowed,
        allowed_because=allowance.because,
        warnings=warnings,
        field_facts=field_facts,
        seed_aucs=[auc for auc in seed_aucs if auc is not None],
    )


def _search_with_seeds(plan: RunPlan, search_plan: RunPlan, seeds: Sequence[int]) -> Iterator[tuple[Model, Selection]]:
    """Pretrain and search with other seeds, as fleets where they are used; yield the model with gates and selection."""
    uses_fleet = plan.searches_as_fleet(plan.console.message) and len(seeds) > 1
    if uses_fleet and plan.saved_model is None:
        folders = {seed: plan.run_dir / stages.stage_dir("pretrain", plan, seed) for seed in seeds}
        stages.pretrain_together(plan, folders, plan.run_dir / "pretrain-fleet")
        plan = replace(plan, resume=True)  # the stage has ended
    if uses_fleet and search_plan.method.fleet and search_plan.target.keep is not None:
        trained, plans = [stages.initial_model(plan, seed) for seed in seeds], [search_plan] * len(seeds)
        folder, quiet = search_plan.run_dir / "search-fleet", plan.console.quiet
        try:
            selections = stages.search_together(plans, trained, seeds, folder, quiet=quiet)
        except (SearchError, NonFiniteError, DeviceMemoryError, InputError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            plan.console.message(f"the searches are done one by one: {error}")
        else:
            yield from zip((model for model, _ in trained), selections, strict=True)
            return
    for seed in seeds:
        model, _, selection = stages.search_fields(search_plan, stages.initial_model(plan, seed), seed)
        yield model, selection


@dataclass(frozen=True)
class Found:
    """One search: its selection, the best model of the kept fields and its name, and the metrics of all models."""

    selection: Selection
    certificates: Mapping[str, Certificate]
    model: Model
    chosen: str
    metrics: Mapping[str, stages.RowScores]
    choices: Mapping[str, stages.RowScores]
    hot_start: Mapping[str, Any]
    gated_auc: float | None  # validation AUC after the search, if there are several


def _search_until_allowed(
    plan: RunPlan,
    timer: StageTimer,
    take_trained: Callable[[], stages.Trained],
    full: stages.RowScores,
    allowance: Allowance,
) -> tuple[RunPlan, Found, list[dict[str, Any]]]:
    """Search and train the kept fields; if no target fixes their number, search for more while they lose too much.

    Return the plan of the last search, its result, and the check of the allowance on the validation rows after each
    search.
    """
    original, checks = plan, list[dict[str, Any]]()
    while True:
        is_last = not allowance.finds_count or len(checks) + 1 == MAX_TRIES
        found = _search(plan, timer, take_trained)
        size, total = len(found.selection.kept), len(found.selection.names)
        checks.append(allowance.check(full, found.choices[found.chosen], size))
        if allowance.finds_count:
            plan.console.message(describe_check(checks[-1], allowance))
        if is_last or checks[-1]["holds"] or size == total:
            return plan, found, checks
        del found  # its model
        plan.console.stages += SEARCH_HEADINGS[plan.settings.finish]
        run_dir = original.run_dir / f"try-{len(checks) + 1}"
        plan = original.for_search(run_dir, plan.settings.seed, keep=next_size(size, total))


def _search(plan: RunPlan, timer: StageTimer, take_trained: Callable[[], stages.Trained]) -> Found:
    """Search, prune, and train the kept fields; the model that is best on the validation rows is chosen.

    Of the models of the kept fields only the best one so far stays in memory.
    """
    settings = plan.settings
    with timer.stage("search", f"search: {plan.target.describe()}"):
        model, optimizer, selection = stages.search_fields(plan, take_trained(), settings.seed)
        metrics = {"gated": stages.test_metrics(plan, model)}
        gated_auc = stages.evaluate_split(plan, model, plan.splits.valid).auc if settings.seeds > 1 else None
    with timer.stage("prune", "absorb the gates, prune, verify"):
        zeros, cut, selection = stages.absorb_and_prune(plan, model, optimizer, selection, keep_zeros=False)
        certificates = {"zeros": zeros.certificate, "cut": cut.certificate}
        plan.console.message(f"{zeros.certificate}; without the columns: {cut.certificate}")
        del model, optimizer  # the tables of all fields
        plan.free_memory()
    models, choices = {"pruned": stages.pruned_model(cut)}, dict[str, stages.RowScores]()
    hot_start, auc_history = dict[str, Any](), stages.AucHistory()

    def keep_best() -> None:
        for name in [name for name in models if name not in choices]:
            choices[name] = stages.valid_metrics(plan, models[name])
            metrics[name] = stages.test_metrics(plan, models[name])
        best = _best_model(choices)
        for name in [name for name in models if name != best]:
            del models[name]

    if settings.finish in ("both", "hot"):
        with timer.stage("hot_start", "train the pruned model further"):
            models["hot_start"], auc_history = stages.hot_start(plan, cut)
    del cut  # the state of its optimizer
    keep_best()
    if settings.finish in ("both", "retrain"):
        with timer.stage("retrain", f"train the {len(selection.kept)} kept fields from scratch"):
            models["retrained"] = stages.retrain(plan, next(iter(models.values())))
        keep_best()
    if settings.finish == "both":
        hot_start = results.steps_saved(
            auc_history.points, choices["retrained"]["auc"], plan.steps.train, auc_history.shrink_factor
        )
    ((chosen, model),) = models.items()
    return Found(selection, certificates, model, chosen, metrics, choices, hot_start, gated_auc)


def _best_model(choices: Mapping[str, stages.RowScores]) -> str:
    """Return the name of the model with the best scores on the validation rows; the first of equal ones."""
    names = [name for name in CHOICE_ORDER if name in choices]
    return max(names, key=lambda name: (choices[name]["auc"] or 0.0, -choices[name]["logloss"]))


def _write_results(outcome: Outcome, plan: RunPlan) -> None:
    """Write the model, the record and the report; print the result."""
    save(outcome.model, plan.run_dir / "model", **results.data_reference(plan.dataset))
    results.write_record(plan.run_dir, outcome.record, outcome.selection)
    results.print_results(outcome, plan)
    write_report_safely(outcome.record, outcome.selection.history, plan.run_dir / REPORT_FILE, plan.console.message)
