"""train, search and prune: the stages of select, one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import Near, cli, going_on, show
from lpfs.cli.options import DAYS, ENCODING, FILES, MODEL, PATH, RUN, SAID, TABLE, TRAINING, days, model, output
from lpfs.cli.together import going_again
from lpfs.cli.wanted import SEARCH, WISH, settings_of

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
    type=Near(("train", "early")),
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
    resume, replace = going_again(resume, replace)
    settings = settings_of(data, out, resume=resume, **given)
    with going_on(f"lpfs train --resume --rows {rows} --out {out}"):
        from lpfs.pipeline.single_stage import train_alone

        found = train_alone(settings, out, early=rows == "early", resume=resume, replace=replace, quiet=quiet)
    if as_json:
        show(found)


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
@WISH
@SEARCH
@DAYS
@days(
    "--rows",
    type=Near(("search", "all")),
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
    resume, replace = going_again(resume, replace)
    settings = settings_of(data, out, resume=resume, **given)
    with going_on(f"lpfs search {given['checkpoint']} --resume --rows {rows} --out {out}"):
        from lpfs.pipeline.single_stage import search_alone

        found = search_alone(settings, out, every=rows == "all", resume=resume, replace=replace, quiet=quiet)
    if as_json:
        show(found)


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
@SAID
def prune(
    folder: Path, data: tuple[str, ...], out: Path, zeros: bool, replace: bool, quiet: bool, as_json: bool
) -> None:
    """Make a searched model smaller."""
    from lpfs.pipeline.single_stage import prune_alone

    found = prune_alone(folder, data, out, cut=not zeros, replace=replace, quiet=quiet)
    if as_json:
        show(found)
