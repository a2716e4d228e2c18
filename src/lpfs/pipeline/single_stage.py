"""The stages of ``select`` one at a time: train, search and prune, each from a directory to a directory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from lpfs._console import Console
from lpfs._text import quote_command
from lpfs.errors import InputError
from lpfs.gates.prune import prune
from lpfs.pipeline import results, stages
from lpfs.pipeline.data import dataset_for_model, prepare_dataset, training_dataset
from lpfs.pipeline.plan import EVAL_BATCH_SIZE, RunPlan, build_plan, check_settings
from lpfs.pipeline.run_dir import is_empty, locked_run, replacing_run, starting_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import MIN_SEARCH_STEPS, search_lr_factor, split_all_rows
from lpfs.pipeline.verdict import format_auc
from lpfs.serialization import find_model_dir, load_saved, save
from lpfs.train.distributed.group import current_group, leader_first

OTHER_ROWS = {"train": "early", "early": "train", "search": "all", "all": "search"}  # values of --rows


@contextmanager
def _planned_stage(
    settings: Settings, run_dir: Path, rows: str, *, resume: bool, replace: bool, quiet: bool
) -> Iterator[RunPlan]:
    """Check the settings, prepare the data and yield the plan of a run of one stage on the rows of ``--rows``.

    The directory is locked while the block runs.
    """
    settings, saved = check_settings(settings)
    console = Console(quiet=quiet or not current_group().is_leader)
    inputs = () if saved is None else (saved.path,)
    with ExitStack() as lock:
        with leader_first("preparing the data") as follows:
            if not follows:
                lock.enter_context(locked_run(run_dir, console.message))
            resume_data, replace = resume or follows, replace and not follows
            with starting_run(run_dir, settings, resume=resume_data, replace=replace, inputs=inputs):
                other = OTHER_ROWS[rows]
                if (run_dir / other).exists():
                    raise InputError(
                        f"the run in {run_dir} was started with --rows {other} and cannot be resumed with {rows}"
                    )
                dataset = prepare_dataset(None, settings, run_dir, console, saved=saved, resume=resume_data)
                plan = build_plan(settings, dataset, run_dir, console, saved=saved, resume=resume)
                plan.check()
            console.message(*plan.splits.describe())
        yield plan


def run_train(
    settings: Settings, run_dir: Path, rows: str = "train", *, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Train all fields on the rows before the last day, save the model and evaluate it; return what to print.

    ``settings.pretrain_steps`` is the number of steps. The rows ``early`` leave out those that ``select`` searches on.
    """
    with _planned_stage(settings, run_dir, rows, resume=resume, replace=replace, quiet=quiet) as plan:
        settings, console = plan.settings, plan.console
        early = rows == "early"
        part = plan.splits.early if early else plan.splits.train
        steps = settings.pretrain_steps or (plan.steps.pretrain if early else plan.steps.train)
        one_pass = -(-part.rows // plan.steps.batch_size)
        plan = _with_steps(plan, shuffle=plan.splits.shuffled or steps > one_pass)
        console.heading(f"train {settings.backbone} of {len(plan.schema)} fields on {part.rows:,} rows")
        model = stages.new_model(plan, settings.seed)
        stages.train(plan, model, plan.optimizer(model), part, steps, rows, settings.seed)
        metrics = stages.evaluate_split(plan, model, plan.splits.test)
        model_dir = run_dir / "model"
        metadata = {**results.data_reference(plan.dataset), "metrics": metrics.to_json()}
        current_group().run_on_leader(lambda: str(save(model, model_dir, **metadata)), "writing the model")
        console.message("on the test rows:", *str(metrics).split("\n"), f"{model_dir}: the model")
        return {
            "folder": str(run_dir),
            "model": str(model_dir),
            "steps": steps,
            "rows": part.rows,
            "metrics": metrics.to_json(),
            "fingerprint": plan.dataset.fingerprint,
            "versions": results.versions(),
        }


def run_search_stage(
    settings: Settings, run_dir: Path, rows: str = "search", *, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Search from the model of ``settings.checkpoint``, on the rows that ``select`` searches on or on ``all`` rows.

    Write the selection and the absorbed model; return what to print.
    """
    if settings.checkpoint is None:
        raise InputError("search needs a trained model: give the directory of a run of lpfs train")
    with _planned_stage(settings, run_dir, rows, resume=resume, replace=replace, quiet=quiet) as plan:
        seed, console = plan.settings.seed, plan.console
        if rows == "all":
            plan = _plan_all_rows(plan)
        assert plan.saved_model is not None  # check_settings has loaded it
        console.heading(f"search from {plan.saved_model.path}: {plan.target.describe()}")
        trained = stages.initial_model(plan, seed)
        before = stages.valid_metrics(plan, trained[0])
        model, optimizer, selection = stages.search_fields(plan, trained, seed)
        after = stages.valid_metrics(plan, model)
        selection = stages.absorb_gates(plan, model, optimizer, selection)
        metrics, change = {"all_fields": before, "gated": after}, selection.made["max_logit_change"]
        record = results.build_record(plan, selection, validation=metrics, max_logit_change=change)

        def write() -> None:
            save(model, run_dir / "model", **results.data_reference(plan.dataset))
            results.write_record(run_dir, record, selection)

        current_group().run_on_leader(write, "writing the results")
        console.message(results.describe_kept(selection))
        console.message(f"  validation AUC: {format_auc(before)} before, {format_auc(after)} with gates")
        console.message(f"  {run_dir}: {results.FILES_TEXT}; next: {quote_command('lpfs', 'prune', run_dir)} --out …")
        return {"folder": str(run_dir), **record}


def _plan_all_rows(plan: RunPlan) -> RunPlan:
    """Return the plan of a search on all rows."""
    splits = split_all_rows(plan.dataset)
    batch_size = plan.steps.batch_size
    one_pass = -(-splits.train.rows // batch_size)
    steps = plan.settings.search_steps or max(MIN_SEARCH_STEPS, one_pass)
    is_repeated, lr_factor = steps > one_pass, search_lr_factor(steps * batch_size, splits.early.rows)
    if not is_repeated:
        splits, lr_factor = replace(splits, search=splits.train), 1.0
    plan = replace(plan, splits=splits, run_dir=plan.run_dir / "all")
    shuffle = splits.shuffled or is_repeated
    return _with_steps(plan, search=steps, shuffle=shuffle, separate_gate_rows=is_repeated, lr_factor=lr_factor)


def _with_steps(plan: RunPlan, **changes: Any) -> RunPlan:
    return replace(plan, steps=replace(plan.steps, **changes))


def run_prune(
    search_dir: Path, data: Sequence[str], out: Path, *, cut: bool = True, replace: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Prune the model that a search wrote and verify its logits on ``data``, by default that of the search.

    Without ``cut`` the dropped fields are replaced by zeros and the dense columns stay, which is bit-equal. Return what
    to print.
    """
    selection, record = results.read_record(search_dir)
    saved = load_saved(find_model_dir(search_dir))
    if not set(selection.names) <= set(saved.model.names):
        raise InputError(f"the model in {saved.path} is pruned already: it has no {selection.dropped[0]!r}")
    if search_dir.resolve().is_relative_to(out.resolve()):
        raise InputError(f"{out} contains the model to prune; choose another directory")
    console = Console(quiet=quiet)
    with locked_run(out, console.message):
        is_replaced = not is_empty(out)
        if is_replaced and not (replace and (out / results.RECORD_FILE).exists()):
            raise InputError(f"{out} is not empty; choose another directory, or replace an older result (--replace)")
        with tempfile.TemporaryDirectory(prefix="lpfs-") as staging:
            data_dir = Path(staging) / "data"
            dataset = dataset_for_model(saved, data, data_dir, quiet=quiet) if data else training_dataset(saved)
            batch = next(iter(dataset.stream(EVAL_BATCH_SIZE, fields=saved.model.reads.names)))
        pruned = prune(saved.model, selection, batch=batch, cut=cut)
        small = stages.pruned_model(pruned)
        record = {
            **record,
            "certificates": {"cut" if cut else "zeros": results.certificate_record(pruned.certificate)},
            "max_logit_change": pruned.certificate.max_logit_change,
            "savings": {"all_fields": stages.model_size(saved.model), "kept": stages.model_size(small)},
        }
        with replacing_run(out, (*data, dataset.path)) if is_replaced else nullcontext():
            save(small, out / "model", **saved.metadata)
            results.write_record(out, record, selection)
    files = f"{out}: {results.RECORD_FILE}, {results.FIELDS_FILE}, model/"
    console.message(results.describe_kept(selection), f"  {pruned.certificate}", f"  {files}")
    return {"folder": str(out), **record}
