"""train, search and prune: the stages of select, one at a time.

select: the whole job in one command.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import SuggestingChoice, cli, print_json, resume_after_restart, resume_hint
from lpfs.cli.options import (
    CONFIG,
    DAYS,
    ENCODING,
    FILES,
    MODEL,
    OUTPUT_OPTIONS,
    PATH,
    RUN,
    SEARCH,
    TABLE,
    TARGET_OPTIONS,
    TRAINING,
    build_settings,
    days,
    model,
    output,
    search_option,
)

SELECT = """Find the fields that a CTR model needs, prove it, and leave the smaller model behind.

SOURCE is a log (CSV, TSV, Parquet; files, folders, patterns) or the folder of a Dataset. Early days pretrain, the
next ones search, the last one judges. The answer is in --out: kept_fields.txt, selection.json, history.parquet,
model/, and config.json to run it again.
"""
JSON_KEYS = (
    *("method", "kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "certificates", "model"),
    *("chosen_in", "hot_start", "savings", "seconds", "hints", "seed", "fingerprint", "versions"),
)


@cli.command(
    help=SELECT,
    short_help="Find the fields a model needs: the whole job.",
    examples=[
        "lpfs select clicks.parquet --label click --time day --keep 20 --out run",
        "lpfs select clicks.csv --label click --max-auc-loss 0.001 --must-keep user_id,ad_id --json",
        "lpfs select data/log --budget 40 --costs costs.toml --seeds 5",
        "lpfs select --config run/config.json --out again      # the same run once more",
        "lpfs select --resume --out run                        # after a kill",
    ],
)
@click.argument("source", nargs=-1, type=FILES)
@TARGET_OPTIONS
@TABLE
@DAYS
@ENCODING
@SEARCH
@search_option(
    "--level", type=SuggestingChoice(("field", "cross")), help="Gates on fields, or on the crosses of dlrm_cross."
)
@search_option("--seeds", type=int, help="How many searches; tells how often each field was chosen (1).")
@MODEL
@model("--pretrain-steps", type=int, help="Steps of pretraining.")
@model("--checkpoint", type=PATH, help="Folder of a trained model to start from instead of pretraining.")
@model(
    "--finish",
    type=SuggestingChoice(("both", "hot", "retrain", "none")),
    help="Train the pruned model on (hot), the kept fields from scratch (retrain), both (the default), none.",
)
@output("--out", type=PATH, default="run", show_default=True, help="Folder of the run.")
@CONFIG
@RUN
def select(
    source: tuple[str, ...], out: Path, resume: bool, replace: bool, quiet: bool, as_json: bool, **given: Any
) -> None:
    """Do the whole job."""
    resume, replace = resume_after_restart(resume, replace)
    settings = build_settings(source, out, resume=resume, **given)
    with resume_hint(f"lpfs select --resume --out {out}"):
        from lpfs.pipeline.select import select as run

        run(out=out, settings=settings, resume=resume, replace=replace, quiet=quiet)
    if as_json:
        values = json.loads((out / "selection.json").read_text("utf-8"))
        print_json({"folder": str(out), **{name: values[name] for name in JSON_KEYS if name in values}})


TRAIN = """Train a model on DATA, all but the last day, and save it in OUT/model.

DATA is a log or the folder of a Dataset, as for select; the last day judges.
"""
SEARCH_HELP = """Search from the trained model MODEL for the fields it needs.

MODEL is the folder of a model or of a run. DATA is a Dataset that fits it, or a log, which is encoded as the
model's was. OUT gets selection.json, kept_fields.txt, history.parquet and the model with the gates in its weights,
for prune.
"""
PRUNE = """Make the model of a search physically smaller and prove that it predicts the same.

FOLDER is what search left. The proof is made on rows of DATA, or of the data searched on.
"""

data = click.argument("data", nargs=-1, type=FILES)
out = output("--out", type=PATH, required=True, help="Folder to make.")


@cli.command(
    help=TRAIN,
    short_help="Train a model and save it.",
    examples=[
        "lpfs train clicks.parquet --label click --time day --model deepfm --out trained",
        "lpfs train data/log --rows early --out trained      # leaves the days of the search for lpfs search",
    ],
)
@data
@TABLE
@DAYS
@days(
    "--rows",
    type=SuggestingChoice(("train", "early")),
    default="train",
    show_default=True,
    help="All but the last day, or only those before the days that select searches on.",
)
@ENCODING
@MODEL
@model("--steps", "pretrain_steps", type=int, help="How many steps; found from the size of the data.")
@model("--must-drop", multiple=True, help="Fields to leave out, as a,b; may be repeated.")
@out
@RUN
def train(
    data: tuple[str, ...],
    out: Path,
    rows: str,
    resume: bool,
    replace: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Train a model and save it."""
    resume, replace = resume_after_restart(resume, replace)
    settings = build_settings(data, out, resume=resume, **given)
    with resume_hint(f"lpfs train --resume --rows {rows} --out {out}"):
        from lpfs.pipeline.single_stage import run_train

        found = run_train(settings, out, early=rows == "early", resume=resume, replace=replace, quiet=quiet)
    if as_json:
        print_json(found)


@cli.command(
    "search",
    help=SEARCH_HELP,
    short_help="Search from a trained model.",
    examples=[
        "lpfs search trained data/log --keep 20 --out found",
        "lpfs search trained week.parquet --rows all --max-auc-loss 0.0005 --out found",
    ],
)
@click.argument("checkpoint", metavar="MODEL", type=FILES)
@data
@TARGET_OPTIONS
@SEARCH
@DAYS
@days(
    "--rows",
    type=SuggestingChoice(("search", "all")),
    default="search",
    show_default=True,
    help="The days that select searches on, or all of DATA; the last tenth is held out.",
)
@TRAINING
@out
@RUN
def search(
    data: tuple[str, ...],
    out: Path,
    rows: str,
    resume: bool,
    replace: bool,
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Search from a trained model."""
    resume, replace = resume_after_restart(resume, replace)
    settings = build_settings(data, out, resume=resume, **given)
    with resume_hint(f"lpfs search {given['checkpoint']} --resume --rows {rows} --out {out}"):
        from lpfs.pipeline.single_stage import run_search_stage

        found = run_search_stage(settings, out, every=rows == "all", resume=resume, replace=replace, quiet=quiet)
    if as_json:
        print_json(found)


@cli.command(
    help=PRUNE,
    short_help="Make a searched model smaller, with proof.",
    examples=["lpfs prune found --out small", "lpfs prune found data/log --zeros --out small"],
)
@click.argument("folder", type=PATH)
@data
@model("--zeros", is_flag=True, help="Feed zeros instead of cutting the dense columns: bit-equal, not smallest.")
@out
@output("--replace", is_flag=True, help="Put the result in the place of an older one.")
@OUTPUT_OPTIONS
def prune(
    folder: Path, data: tuple[str, ...], out: Path, zeros: bool, replace: bool, quiet: bool, as_json: bool
) -> None:
    """Make a searched model smaller."""
    from lpfs.pipeline.single_stage import run_prune

    found = run_prune(folder, data, out, cut=not zeros, replace=replace, quiet=quiet)
    if as_json:
        print_json(found)
