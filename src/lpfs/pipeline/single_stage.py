"""The stages of a run one at a time: train, search and prune, each from a folder to a folder."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.prune import prune
from lpfs.pipeline import stages
from lpfs.pipeline.data import dataset_for_model, prepare_dataset, training_dataset
from lpfs.pipeline.plan import EVAL_BATCH_SIZE, check_settings, plan_run
from lpfs.pipeline.results import (
    RECORD_FILE,
    certificate_record,
    data_reference,
    describe_target,
    field_facts,
    print_kept,
    read_record,
    versions,
    write_history,
    write_record,
)
from lpfs.pipeline.run_dir import starting_run
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.splits import LEAST_SEARCH, lr_factor, split_all_rows
from lpfs.pipeline.stages import as_model, load_given_model
from lpfs.pipeline.tell import Console
from lpfs.serialization import find_model_dir, load, load_metadata, save
from lpfs.train.distributed.group import current_group, leader_first


def run_train(
    settings: Settings, out: Path, *, early: bool = False, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Train all fields on the rows before the last day, save the model, judge it; return what is to be told.

    Args:
        settings: as of ``select``; ``pretrain_steps`` is how long.
        out: folder to make.
        early: leave the days that ``select`` searches on out as well.
        resume, replace, quiet: as of ``select``.

    """
    settings = check_settings(settings)
    folder, tell = out, Console(quiet=quiet)
    with (
        leader_first("preparing the data") as second,
        starting_run(
            folder, settings, resume=resume or second, replace=replace and not second, sources=settings.source
        ),
    ):
        name = _check_same_rows(folder, "early" if early else "train", ("early", "train"))
        dataset = prepare_dataset(None, settings, folder, quiet, resume or second)
        work = plan_run(settings, dataset, folder, resume, tell)
    part = work.splits.early if early else work.splits.train
    once = -(-part.rows // work.steps.batch_size)
    steps = settings.pretrain_steps or (work.steps.pretrain if early else work.steps.train)
    work.steps = changed(work.steps, shuffle=work.splits.shuffled or steps > once)
    tell.heading(f"train {work.settings.backbone} of {len(work.schema)} fields on {part.rows:,} rows")
    model = stages.new_model(work, settings.seed)
    stages.train(work, model, work.optimizer(model), part, steps, name, settings.seed)
    found = stages.evaluate_split(work, model, work.splits.test)
    saved = partial(save, model, folder / "model", **data_reference(dataset), metrics=found.to_json())
    current_group().run_on_leader(lambda: str(saved()), "writing the model")
    tell.message(f"on the test rows:\n{found}\n{folder / 'model'}: the model")
    return {
        "folder": str(folder),
        "model": str(folder / "model"),
        "steps": steps,
        "rows": part.rows,
        "metrics": found.to_json(),
        "fingerprint": dataset.fingerprint,
        "versions": versions(),
    }


def run_search_stage(
    settings: Settings, out: Path, *, every: bool = False, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Search from the model of ``settings.checkpoint``; leave the selection and the absorbed model in a folder.

    Args:
        settings: as of ``select``; ``checkpoint`` is the model to start from.
        out: folder to make.
        every: search on all rows instead of the days that ``select`` searches on.
        resume, replace, quiet: as of ``select``.

    """
    place = find_model_dir(settings.checkpoint or "")
    settings = check_settings(settings)
    folder, tell = out, Console(quiet=quiet)
    sources: tuple[str | Path, ...] = (*settings.source, place)
    with (
        leader_first("preparing the data") as second,
        starting_run(folder, settings, resume=resume or second, replace=replace and not second, sources=sources),
    ):
        _check_same_rows(folder, "all" if every else "search", ("all", "search"))
        dataset = prepare_dataset(None, settings, folder, quiet, resume or second)
        work = plan_run(settings, dataset, folder, resume, tell)
    if every:
        work.splits, work.run_dir = split_all_rows(dataset), folder / "all"
        once = -(-work.splits.train.rows // work.steps.batch_size)
        steps = settings.search_steps or max(LEAST_SEARCH, once)
        again = steps > once
        if not again:
            work.splits = changed(work.splits, search=work.splits.train)
        work.steps = changed(
            work.steps,
            search=steps,
            shuffle=work.splits.shuffled or again,
            separate_gate_rows=again,
            lr_factor=lr_factor(steps * work.steps.batch_size, work.splits.early.rows) if again else 1.0,
        )
    tell.heading(f"search from {place}: {describe_target(work.target)}")
    trained = load_given_model(work)
    before = stages.metrics_to_dict(stages.evaluate_split(work, trained[0], work.splits.valid))
    model, optimizer, found = stages.search_fields(work, trained, settings.seed)
    after = stages.metrics_to_dict(stages.evaluate_split(work, model, work.splits.valid))
    selection = absorb(model, optimizer, batch=stages.verification_batch(work, model))
    selection = changed(selection, history=found.history, made={**selection.made, **found.made})
    selection = selection.in_order(work.schema.names)
    values = {
        "method": settings.method,
        "fields": field_facts(work),
        "kept": list(selection.kept),
        "dropped": list(selection.dropped),
        "gates": dict(selection.gates),
        "validation": {"all_fields": before, "gated": after},
        "max_logit_change": selection.made["max_logit_change"],
        "seed": settings.seed,
        "configuration": settings.to_json(),
        "fingerprint": dataset.fingerprint,
        "versions": versions(),
    }

    def leave() -> None:
        save(model, folder / "model", **data_reference(dataset))
        write_record(folder, values, selection)
        write_history(folder / "history.parquet", selection)

    current_group().run_on_leader(leave, "writing the answer")
    print_kept(tell, selection)
    tell.message(f"  AUC on the held-out rows: {before['auc']:.5f} before, {after['auc']:.5f} with gates")
    tell.message(
        f"  {folder}: {RECORD_FILE}, kept_fields.txt, history.parquet, model/; next: lpfs prune {folder} --out …"
    )
    return {"folder": str(folder), **values}


def run_prune(
    folder: Path, data: Sequence[str], out: Path, *, cut: bool = True, replace: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Prune the model that a search left, with proof; return what is to be told.

    Args:
        folder: of the search.
        data: rows for the proof; none: the data that was searched on.
        out: folder to make.
        cut: remove the dense columns too; False feeds zeros, which is bit-equal.
        replace: put the result in the place of an older one.
        quiet: print nothing.

    """
    selection, values = read_record(folder)
    place = find_model_dir(folder)
    model = load(place)
    if not set(selection.names) <= set(model.names):
        raise InputError(f"the model in {place} is pruned already: it has no {selection.dropped[0]!r}")
    if folder.resolve().is_relative_to(out.resolve()):
        raise InputError(f"{out} holds what is to be pruned; choose another folder")
    if out.exists() and any(out.iterdir()) and not (replace and (out / RECORD_FILE).exists()):
        raise InputError(f"{out} is not empty; choose another folder, or --replace an older result")
    with tempfile.TemporaryDirectory(prefix="lpfs-") as aside:
        dataset = (
            dataset_for_model(place, model, data, Path(aside) / "data", quiet=quiet)
            if data
            else training_dataset(place)
        )
        batch = next(iter(dataset.stream(EVAL_BATCH_SIZE, fields=model.reads.names)))
    pruned = prune(model, selection, batch=batch, cut=cut)
    small = as_model(pruned.model)
    save(small, out / "model", **load_metadata(place))
    tell = Console(quiet=quiet)
    values = {
        **values,
        "certificates": {"cut" if cut else "zeros": certificate_record(pruned.certificate)},
        "max_logit_change": pruned.certificate.max_logit_change,
        "savings": {
            name: {"table_bytes": stages.table_bytes(each), "parameters": stages.parameters(each)}
            for name, each in (("all_fields", model), ("kept", small))
        },
    }
    write_record(out, values, selection)
    print_kept(tell, selection)
    tell.message(f"  {pruned.certificate}\n  {out}: {RECORD_FILE}, kept_fields.txt, model/")
    return {"folder": str(out), **values}


def _check_same_rows(folder: Path, rows: str, choices: Sequence[str]) -> str:
    """Return which rows to take; refuse to go on with a run that was begun on others."""
    for other in choices:
        if other != rows and (folder / other).exists():
            raise InputError(f"the run in {folder} was begun with --rows {other} and cannot go on with {rows}")
    return rows
