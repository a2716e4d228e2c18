"""evaluate and export: metrics of a saved model, and a file to serve it from."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from lpfs._console import print_lines
from lpfs._validation import did_you_mean
from lpfs.cli.app import cli, print_json
from lpfs.cli.options import FILES, OUTPUT_OPTIONS, PATH, days, encoding, model, output

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset

EVALUATE_HELP = """Print AUC, logloss, accuracy and calibration of the saved model MODEL on DATA.

MODEL is the directory of a model or of a run. DATA is a Dataset that fits it, or a log, which is encoded like the
training data of the model. If fields are missing or have another type, the command fails and names them.
"""
EXPORT_HELP = """Write the model of RUN as one file for serving, and verify that its predictions are the same.

RUN is the directory of a run of select, train or prune.
"""

like_option = encoding("--like", type=PATH, help="The Dataset that the model was trained on, if it was moved.")


@cli.command(
    help=EVALUATE_HELP,
    short_help="Evaluate a saved model.",
    examples=[
        "lpfs evaluate run data/log --days test",
        "lpfs evaluate run/model tomorrow.parquet --json",
        "lpfs evaluate run data/log --days 7..9",
    ],
)
@click.argument("folder", metavar="MODEL", type=PATH)
@click.argument("data", nargs=-1, required=True, type=FILES)
@days(
    "--days",
    "day_range",
    help="Name of a day, FIRST..LAST, 'last', or 'test' for the test rows of select. Default: all days.",
)
@days("--time", help="Column that orders the rows of a log. Default: that of the training data.")
@like_option
@model("--device", default="auto", show_default=False, help="auto, cpu, cuda, cuda:1 …")
@OUTPUT_OPTIONS
def evaluate(
    folder: Path, data: tuple[str, ...], day_range: str | None, device: str, quiet: bool, as_json: bool, **options: Any
) -> None:
    """Evaluate a saved model."""
    from lpfs.pipeline.data import dataset_for_model
    from lpfs.pipeline.plan import EVAL_BATCH_SIZE, resolve_device
    from lpfs.serialization import find_model_dir, load_saved
    from lpfs.train.evaluate import evaluate as evaluate_model

    saved = load_saved(find_model_dir(folder))
    trained = saved.model.to(resolve_device(device))
    with tempfile.TemporaryDirectory(prefix="lpfs-") as staging:
        dataset = dataset_for_model(saved, data, Path(staging) / "data", quiet=True, **options)
        rows = dataset if day_range is None else select_days(dataset, day_range)
        metrics = evaluate_model(trained, rows.stream(EVAL_BATCH_SIZE, fields=trained.reads.names))
    if day_range is None and not quiet and dataset.fingerprint == saved.metadata.get("fingerprint"):
        print_lines("these rows include the training rows; use --days test for the test rows", stream=sys.stderr)
    if as_json:
        print_json({"model": str(saved.path), "days": list(rows.days()), "metrics": metrics.to_json()})
    elif not quiet:
        print_lines(*str(metrics).split("\n"))


def select_days(dataset: Dataset, day_range: str) -> Dataset:
    """Return the days of a range, or the rows that select tests on."""
    names = list(dataset.days())
    if day_range == "test" and "test" not in names:
        from lpfs.pipeline.splits import split_dataset

        return split_dataset(dataset).test
    first, _, last = day_range.partition("..")
    indices = []
    for name in (first, last or first):
        if name not in names and name != "last":
            hint = f"{did_you_mean(name, names)}; the days are {names[0]} to {names[-1]}"
            raise click.BadParameter(f"no day {name!r}{hint}", param_hint="--days")
        indices.append(names.index(name) if name in names else len(names) - 1)
    start, stop = indices[0], indices[1] + 1
    if start >= stop:
        raise click.BadParameter(f"the last day of {day_range!r} is before the first", param_hint="--days")
    return dataset.days(start, stop)


@cli.command(
    help=EXPORT_HELP,
    short_help="Write a model as ONNX or torch.export.",
    examples=["lpfs export run", "lpfs export run --format torch --out model.pt2"],
)
@click.argument("folder", metavar="RUN", type=PATH)
@like_option
@output("--format", "file_format", choices=("onnx", "torch"), default="onnx", help="Format of the file.")
@output("--out", type=PATH, help="File to write. Default: model.onnx or model.pt2 in RUN.")
@output("--replace", is_flag=True, help="Replace an older file.")
@OUTPUT_OPTIONS
def export(
    folder: Path, like: Path | None, file_format: Literal["onnx", "torch"], quiet: bool, as_json: bool, **options: Any
) -> None:
    """Write a model as a file for serving."""
    from lpfs.export.export import export_run

    exported = export_run(folder, options.pop("out"), dataset=like, format=file_format, **options)
    if not quiet:
        print_lines(exported.describe(), stream=sys.stderr)
    if as_json:
        names = ("format", "rows", "max_logit_change", "bound", "checked_with")
        print_json({"path": str(exported.path), **{name: getattr(exported, name) for name in names}})
