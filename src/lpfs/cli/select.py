"""select: the whole job in one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import Near, cli, going_on, show
from lpfs.cli.options import DAYS, ENCODING, FILES, MODEL, PATH, RUN, TABLE, model, output
from lpfs.cli.together import going_again
from lpfs.cli.wanted import CONFIG, SEARCH, WISH, how, settings_of

SELECT = """Find the fields that a CTR model needs, prove it, and leave the smaller model behind.

SOURCE is a log (CSV, TSV, Parquet; files, folders, patterns) or the folder of a Dataset. Early days pretrain, the
next ones search, the last one judges. The answer is in --out: kept_fields.txt, selection.json, history.parquet,
model/, and config.json to run it again.
"""
MAIN = (
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
@WISH
@TABLE
@DAYS
@ENCODING
@SEARCH
@how("--level", type=Near(("field", "cross")), help="Gates on fields, or on the crosses of dlrm_cross.")
@how("--seeds", type=int, help="How many searches; tells how often each field was chosen (1).")
@MODEL
@model("--pretrain-steps", type=int, help="Steps of pretraining.")
@model("--checkpoint", type=PATH, help="Folder of a trained model to start from instead of pretraining.")
@model(
    "--finish",
    type=Near(("both", "hot", "retrain", "none")),
    help="Train the pruned model on (hot), the kept fields from scratch (retrain), both (the default), none.",
)
@output("--out", type=PATH, default="run", show_default=True, help="Folder of the run.")
@CONFIG
@RUN
def select(
    source: tuple[str, ...], out: Path, resume: bool, replace: bool, quiet: bool, as_json: bool, **given: Any
) -> None:
    """Do the whole job."""
    resume, replace = going_again(resume, replace)
    settings = settings_of(source, out, resume=resume, **given)
    with going_on(f"lpfs select --resume --out {out}"):
        from lpfs.pipeline.select import select as run

        run(out=out, settings=settings, resume=resume, replace=replace, quiet=quiet)
    if as_json:
        values = json.loads((out / "selection.json").read_text("utf-8"))
        show({"folder": str(out), **{name: values[name] for name in MAIN if name in values}})
