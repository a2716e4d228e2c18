"""select, and its stages as single commands: train, search and prune."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli import options as opt
from lpfs.cli.app import EXIT_ALLOWANCE, cli, print_json, resume_after_restart, resume_hint
from lpfs.cli.options import build_settings
from lpfs.train.distributed import is_distributed_launch

SELECT_HELP = """Find the fields that a CTR model needs, and write them, a report and the smaller model to --out.

SOURCE is a log (CSV, TSV, Parquet; files, directories, patterns) or the directory of a Dataset. The model is
pretrained on the early days, the search uses the following days, and the last days are the test set. Results in
--out: kept_fields.txt, selection.json, history.parquet, report.html, model/, and config.json to repeat the run.

Exit code 3: everything was written, but no set of fields was shown to lose at most the allowed AUC (--max-auc-loss).
"""
TRAIN_HELP = """Train a model on DATA without the last days, and save it in OUT/model.

DATA is a log or the directory of a Dataset, as for select; the last days are the test set.
"""
SEARCH_HELP = """Search for the fields that the trained model MODEL needs.

MODEL is the directory of a model or of a run. DATA is a Dataset that fits it, or a log, which is encoded like the
training data of the model. OUT contains selection.json, kept_fields.txt, history.parquet and the model with the
gates folded into its weights, as input for prune.
"""
PRUNE_HELP = """Remove the dropped fields from the model of a search, and verify that its predictions are the same.

FOLDER is the directory of a search. The predictions are compared on rows of DATA, or of the data of the search.
"""
ZEROS_HELP = "Replace dropped fields by zeros instead of cutting columns: bit-equal, but larger."
# keys of selection.json that --json prints
JSON_KEYS = (
    *("method", "kept", "dropped", "gates", "metrics", "validation", "max_logit_change", "certificates", "model"),
    *("chosen_in", "hot_start", "savings", "seconds", "verdict", "warnings", "curve", "groups", "seed", "fingerprint"),
    "versions",
)

data_argument = click.argument("data", nargs=-1, type=opt.FILES)
out_option = opt.output("--out", type=opt.PATH, required=True, help="Directory to write.")


@cli.command(
    help=SELECT_HELP,
    short_help="Find the fields that a model needs.",
    examples=[
        "lpfs select clicks.parquet --label click --time day --keep 20 --out run",
        "lpfs select clicks.csv --label click --max-auc-loss 0.001 --must-keep user_id,ad_id --json",
        "lpfs select data/log --budget 40 --costs costs.toml --seeds 5",
        "lpfs select --config run/config.json --out again      # repeat a run",
        "lpfs select --resume --out run                        # continue an interrupted run",
    ],
)
@click.argument("source", nargs=-1, type=opt.FILES)
@opt.TARGET_OPTIONS
@opt.TABLE
@opt.DAYS
@opt.FORCE
@opt.ENCODING
@opt.SEARCH
@opt.search_option("--level", choices=("field", "cross"), help="Gates on fields, or on the crosses of dlrm_cross.")
@opt.search_option("--seeds", type=int, help="Number of searches, to count how often each field is kept (1).")
@opt.search_option("--no-curve", is_flag=True, help="Leave out the AUC against the number of fields.")
@opt.MODEL
@opt.model("--pretrain-steps", type=int, help="Number of pretraining steps.")
@opt.model("--checkpoint", type=opt.PATH, help="Directory of a trained model to start from instead of pretraining.")
@opt.FLEET
@opt.model(
    "--finish",
    choices=("both", "hot", "retrain", "none"),
    help="Train the pruned model further (hot), the kept fields from scratch (retrain), both (default) or none.",
)
@opt.output("--out", type=opt.PATH, default="run", help="Directory of the run.")
@opt.CONFIG
@opt.RUN
def select(
    source: tuple[str, ...], out: Path, resume: bool, replace: bool, quiet: bool, as_json: bool, **options: Any
) -> int:
    """Run all stages; return the exit code."""
    resume, replace = resume_after_restart(resume, replace)
    settings = build_settings(source, out, resume=resume, **options)
    with resume_hint("lpfs", "select", "--resume", "--out", out):
        from lpfs.pipeline.select import select as run

        record = run(out=out, settings=settings, resume=resume, replace=replace, quiet=quiet).record
    if as_json:
        print_json({"folder": str(out), **{name: record[name] for name in JSON_KEYS if name in record}})
    is_met = all(warning["kind"] != "allowance" for warning in record["warnings"])
    return 0 if is_met or is_distributed_launch() else EXIT_ALLOWANCE  # torchrun would start a failed run again


@cli.command(
    help=TRAIN_HELP,
    short_help="Train a model and save it.",
    examples=[
        "lpfs train clicks.parquet --label click --time day --model deepfm --out trained",
        "lpfs train data/log --rows early --out trained      # leave the days of the search to lpfs search",
    ],
)
@data_argument
@opt.TABLE
@opt.DAYS
@opt.FORCE
@opt.days(
    "--rows",
    choices=("train", "early"),
    default="train",
    help="All days but the last, or only those before the days that select searches on.",
)
@opt.ENCODING
@opt.MODEL
@opt.model("--steps", "pretrain_steps", type=int, help="Number of steps. Default: from the size of the data.")
@opt.model("--must-drop", multiple=True, help="Fields that are not used, as a,b; repeatable.")
@out_option
@opt.RUN
def train(**options: Any) -> None:
    """Train a model and save it."""
    _run_stage("train", **options)


@cli.command(
    help=SEARCH_HELP,
    short_help="Search from a trained model.",
    examples=[
        "lpfs search trained data/log --keep 20 --out found",
        "lpfs search trained week.parquet --rows all --max-auc-loss 0.0005 --out found",
    ],
)
@click.argument("checkpoint", metavar="MODEL", type=opt.FILES)
@data_argument
@opt.TARGET_OPTIONS
@opt.SEARCH
@opt.DAYS
@opt.FORCE
@opt.days(
    "--rows",
    choices=("search", "all"),
    default="search",
    help="The days that select searches on, or all of DATA; the last tenth is held out for validation.",
)
@opt.TRAINING
@out_option
@opt.RUN
def search(**options: Any) -> None:
    """Search from a trained model."""
    _run_stage("search", options["checkpoint"], **options)


def _run_stage(
    *command: str, data: tuple[str, ...], out: Path, rows: str, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Run ``lpfs train`` or ``lpfs search MODEL``."""
    resume, replace = resume_after_restart(options.pop("resume"), options.pop("replace"))
    settings = build_settings(data, out, resume=resume, **options)
    with resume_hint("lpfs", *command, "--resume", "--rows", rows, "--out", out):
        from lpfs.pipeline.single_stage import run_search_stage, run_train

        run = run_train if command == ("train",) else run_search_stage
        record = run(settings, out, rows, resume=resume, replace=replace, quiet=quiet)
    if as_json:
        print_json(record)


@cli.command(
    help=PRUNE_HELP,
    short_help="Remove the dropped fields from a model.",
    examples=["lpfs prune found --out small", "lpfs prune found data/log --zeros --out small"],
)
@click.argument("folder", type=opt.PATH)
@data_argument
@opt.model("--zeros", is_flag=True, help=ZEROS_HELP)
@out_option
@opt.output("--replace", is_flag=True, help="Replace an older result.")
@opt.OUTPUT_OPTIONS
def prune(
    folder: Path, data: tuple[str, ...], out: Path, zeros: bool, replace: bool, quiet: bool, as_json: bool
) -> None:
    """Remove the dropped fields from a model."""
    from lpfs.pipeline.single_stage import run_prune

    record = run_prune(folder, data, out, cut=not zeros, replace=replace, quiet=quiet)
    if as_json:
        print_json(record)
