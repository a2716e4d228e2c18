"""The stages of a run one at a time: train, search and prune, each from a folder to a folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from typing import Any

from lpfs.data.dataset import Dataset
from lpfs.errors import InputError
from lpfs.gates.absorb import absorb
from lpfs.gates.prune import prune
from lpfs.pipeline import stages
from lpfs.pipeline.data import model_folder, rows_for, trained_on
from lpfs.pipeline.run_dir import beginning
from lpfs.protocol.listing import listed
from lpfs.pipeline.results import facts, put, versions, write_history
from lpfs.pipeline.splits import HELD, Periods
from lpfs.protocol.recipe import LEAST_SEARCH, pace
from lpfs.pipeline.settings import Settings
from lpfs.pipeline.tell import Teller
from lpfs.serialization import load, load_extra, save
from lpfs.schema import Selection
from lpfs.pipeline.select import as_model, certified, checked, given_model, planned, prepared, wished
from lpfs.train.distributed.group import current, in_turn

ANSWER = "selection.json"


def train_alone(
    settings: Settings, out: Path, *, early: bool = False, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Train all fields on the rows before the last day, save the model, judge it; return what is to be told.

    Args:
        settings: as of ``select``; ``pretrain_steps`` is how long.
        out: folder to make.
        early: leave the days that ``select`` searches on out as well.
        resume, replace, quiet: as of ``select``.

    """
    settings = checked(settings)
    folder, tell = out, Teller(quiet=quiet)
    with (
        in_turn("preparing the data") as second,
        beginning(
            folder, settings, resume=resume or second, replace=replace and not second, sources=settings.source
        ),
    ):
        name = same_rows(folder, "early" if early else "train", ("early", "train"))
        dataset = prepared(None, settings, folder, quiet, resume or second)
        work = planned(settings, dataset, folder, resume, tell)
    part = work.parts.early if early else work.parts.train
    once = -(-part.rows // work.recipe.batch_size)
    steps = settings.pretrain_steps or (work.recipe.pretrain if early else work.recipe.train)
    work.recipe = changed(work.recipe, shuffle=work.parts.dealt or steps > once)
    tell.stage(f"train {work.settings.backbone} of {len(work.schema)} fields on {part.rows:,} rows")
    model = stages.fresh(work, settings.seed)
    stages.train(work, model, work.optimizer(model), part, steps, name, settings.seed)
    found = stages.judge(work, model, work.parts.test)
    saved = partial(save, model, folder / "model", **origin(dataset), metrics=found.to_json())
    current().agree(lambda: str(saved()), "writing the model")
    tell.say(f"on the test rows:\n{found}\n{folder / 'model'}: the model")
    return {
        "folder": str(folder),
        "model": str(folder / "model"),
        "steps": steps,
        "rows": part.rows,
        "metrics": found.to_json(),
        "fingerprint": dataset.fingerprint,
        "versions": versions(),
    }


def search_alone(
    settings: Settings, out: Path, *, every: bool = False, resume: bool, replace: bool, quiet: bool
) -> dict[str, Any]:
    """Search from the model of ``settings.checkpoint``; leave the selection and the absorbed model in a folder.

    Args:
        settings: as of ``select``; ``checkpoint`` is the model to start from.
        out: folder to make.
        every: search on all rows instead of the days that ``select`` searches on.
        resume, replace, quiet: as of ``select``.

    """
    place = model_folder(settings.checkpoint or "")
    settings = checked(settings)
    folder, tell = out, Teller(quiet=quiet)
    sources: tuple[str | Path, ...] = (*settings.source, place)
    with (
        in_turn("preparing the data") as second,
        beginning(folder, settings, resume=resume or second, replace=replace and not second, sources=sources),
    ):
        same_rows(folder, "all" if every else "search", ("all", "search"))
        dataset = prepared(None, settings, folder, quiet, resume or second)
        work = planned(settings, dataset, folder, resume, tell)
    if every:
        work.parts, work.out = all_rows(dataset), folder / "all"
        once = -(-work.parts.train.rows // work.recipe.batch_size)
        steps = settings.search_steps or max(LEAST_SEARCH, once)
        again = steps > once
        if not again:
            work.parts = changed(work.parts, search=work.parts.train)
        work.recipe = changed(
            work.recipe,
            search=steps,
            shuffle=work.parts.dealt or again,
            apart=again,
            pace=pace(steps * work.recipe.batch_size, work.parts.early.rows) if again else 1.0,
        )
    tell.stage(f"search from {place}: {wished(work.wish)}")
    trained = given_model(work)
    before = stages.brief(stages.judge(work, trained[0], work.parts.valid))
    model, optimizer, found = stages.find(work, trained, settings.seed)
    after = stages.brief(stages.judge(work, model, work.parts.valid))
    selection = absorb(model, optimizer, batch=stages.proof(work, model))
    selection = changed(selection, history=found.history, made={**selection.made, **found.made})
    selection = selection.in_order(work.schema.names)
    values = {
        "method": settings.method,
        "fields": facts(work),
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
        save(model, folder / "model", **origin(dataset))
        write_answer(folder, values, selection)
        write_history(folder / "history.parquet", selection)

    current().agree(leave, "writing the answer")
    tell_kept(tell, selection)
    tell.say(f"  AUC on the held-out rows: {before['auc']:.5f} before, {after['auc']:.5f} with gates")
    tell.say(f"  {folder}: {ANSWER}, kept_fields.txt, history.parquet, model/; next: lpfs prune {folder} --out …")
    return {"folder": str(folder), **values}


def prune_alone(
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
    selection, values = read_answer(folder)
    place = model_folder(folder)
    model = load(place)
    if not set(selection.names) <= set(model.names):
        raise InputError(f"the model in {place} is pruned already: it has no {selection.dropped[0]!r}")
    if folder.resolve().is_relative_to(out.resolve()):
        raise InputError(f"{out} holds what is to be pruned; choose another folder")
    if out.exists() and any(out.iterdir()) and not (replace and (out / ANSWER).exists()):
        raise InputError(f"{out} is not empty; choose another folder, or --replace an older result")
    with tempfile.TemporaryDirectory(prefix="lpfs-") as aside:
        dataset = rows_for(place, model, data, Path(aside) / "data", quiet=quiet) if data else trained_on(place)
        batch = next(iter(dataset.stream(stages.SCORED, fields=model.reads.names)))
    pruned = prune(model, selection, batch=batch, cut=cut)
    small = as_model(pruned.model)
    save(small, out / "model", **load_extra(place))
    tell = Teller(quiet=quiet)
    values = {
        **values,
        "certificates": {"cut" if cut else "zeros": certified(pruned.certificate)},
        "max_logit_change": pruned.certificate.max_logit_change,
        "savings": {
            name: {"table_bytes": stages.table_bytes(each), "parameters": stages.parameters(each)}
            for name, each in (("all_fields", model), ("kept", small))
        },
    }
    write_answer(out, values, selection)
    tell_kept(tell, selection)
    tell.say(f"  {pruned.certificate}\n  {out}: {ANSWER}, kept_fields.txt, model/")
    return {"folder": str(out), **values}


def same_rows(folder: Path, rows: str, choices: Sequence[str]) -> str:
    """Return which rows to take; refuse to go on with a run that was begun on others."""
    for other in choices:
        if other != rows and (folder / other).exists():
            raise InputError(f"the run in {folder} was begun with --rows {other} and cannot go on with {rows}")
    return rows


def all_rows(dataset: Dataset) -> Periods:
    """Search on all rows, the last tenth held out for choices; nothing is left to judge on.

    Where they are gone through several times, gates learn from a quarter of them and weights from the rest.
    """
    edge = dataset.rows - max(1, dataset.rows // HELD)
    if edge < 1:
        raise InputError(f"{dataset.rows} rows are too few to search and to choose on")
    most = edge * 3 // 4
    early, search = dataset.part(0, max(1, most)), dataset.part(most, edge)
    valid = dataset.part(edge, dataset.rows)
    return Periods(early, search, valid, valid, dataset.part(0, edge))


def origin(dataset: Dataset) -> dict[str, str]:
    """Return what a saved model remembers of its data, so that other rows can be encoded like it."""
    return {"data": os.path.abspath(dataset.path), "fingerprint": dataset.fingerprint}


def write_answer(folder: Path, values: dict[str, Any], selection: Selection) -> None:
    """Write selection.json and kept_fields.txt."""
    more = selection.to_json()
    text = json.dumps({**values, "sites": more["sites"], "made": more["made"]}, indent=1, ensure_ascii=False)
    put(folder / ANSWER, text + "\n")
    put(folder / "kept_fields.txt", listed(selection.kept))


def read_answer(folder: Path) -> tuple[Selection, dict[str, Any]]:
    """Return the selection that a search left, and what else it said."""
    try:
        values = json.loads((folder / ANSWER).read_text("utf-8"))
        parts = {name: values[name] for name in ("kept", "dropped", "gates", "sites", "made")}
    except FileNotFoundError:
        raise InputError(f"there is no {ANSWER} in {folder}: is it the folder of a search?") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / ANSWER} holds no selection ({error}); search again") from None
    values.pop("sites")
    values.pop("made")
    return Selection(**parts), values


def tell_kept(tell: Teller, selection: Selection) -> None:
    """Say which fields stay."""
    some = ", ".join(selection.kept[:12]) + (
        f" and {len(selection.kept) - 12} more" if len(selection.kept) > 12 else ""
    )
    tell.say(f"{len(selection.kept)} of {len(selection.names)} kept: {some}")
