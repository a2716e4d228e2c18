"""evaluate and export: what a saved model is worth, and a file to serve it from."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from lpfs.cli.app import SuggestingChoice, cli, near, print_json
from lpfs.cli.options import FILES, OUTPUT_OPTIONS, PATH, days, encoding, model, output

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset

EVALUATE = """Print AUC, logloss, accuracy and calibration of the saved model MODEL on DATA.

MODEL is the folder of a model or of a run. DATA is a Dataset that fits it, or a log, which is encoded as the
model's was: a log with missing or retyped fields is refused, with their names.
"""
EXPORT = """Write the model of RUN as one file to serve, and check that it predicts the same.

RUN is the folder of a run of select, train or prune.
"""


@cli.command(
    help=EVALUATE,
    short_help="How good a saved model is on some rows.",
    examples=[
        "lpfs evaluate run data/log --days last",
        "lpfs evaluate run/model tomorrow.parquet --json",
        "lpfs evaluate run data/log --days 7..9",
    ],
)
@click.argument("folder", metavar="MODEL", type=PATH)
@click.argument("data", nargs=-1, required=True, type=FILES)
@days("--days", "chosen", help="A day by name, FIRST..LAST, or 'last'; all of them, if nothing is said.")
@days("--time", help="Column that orders the rows of a log; that of the model's log, if nothing is said.")
@encoding("--like", type=PATH, help="The Dataset that the model was trained on, where it is not where it was.")
@model("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
@OUTPUT_OPTIONS
def evaluate(
    folder: Path,
    data: tuple[str, ...],
    chosen: str | None,
    time: str | None,
    like: Path | None,
    device: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Judge a saved model."""
    from lpfs.pipeline.data import dataset_for_model
    from lpfs.pipeline.plan import EVAL_BATCH_SIZE, resolve_device
    from lpfs.serialization import find_model_dir, load, load_metadata
    from lpfs.train.evaluate import evaluate as judge

    place = find_model_dir(folder)
    read = load(place).to(resolve_device(device))
    given: dict[str, Any] = {"time": time, "like": like, "quiet": True}
    with tempfile.TemporaryDirectory(prefix="lpfs-") as aside:
        rows = dataset_for_model(place, read, data, Path(aside) / "data", **given)
        part = rows if chosen is None else select_days(rows, chosen)
        found = judge(read, part.stream(EVAL_BATCH_SIZE, fields=read.reads.names))
    if chosen is None and not quiet and rows.fingerprint == load_metadata(place).get("fingerprint"):
        click.echo("these rows hold those it was trained on; --days last judges it on the others", err=True)
    if as_json:
        print_json({"model": str(place), "days": list(part.days()), "metrics": found.to_json()})
    elif not quiet:
        click.echo(str(found))


def select_days(rows: Dataset, chosen: str) -> Dataset:
    """Return the days that are named."""
    names = list(rows.days())
    first, _, last = chosen.partition("..")
    places = []
    for name in (first, last or first):
        if name not in names and name != "last":
            hint = near(name, names)
            raise click.BadParameter(
                f"there is no day {name!r}.{hint} There are {names[0]} to {names[-1]}.", param_hint="--days"
            )
        places.append(names.index(name) if name in names else len(names) - 1)
    if places[0] > places[1]:
        raise click.BadParameter(f"{chosen!r} ends before it begins", param_hint="--days")
    return rows.days(places[0], places[1] + 1)


@cli.command(
    help=EXPORT,
    short_help="Write a model as ONNX or torch.export.",
    examples=["lpfs export run", "lpfs export run --format torch --out model.pt2"],
)
@click.argument("folder", metavar="RUN", type=PATH)
@encoding("--like", type=PATH, help="The Dataset that the model was trained on, where it is not where it was.")
@output(
    "--format",
    "form",
    type=SuggestingChoice(("onnx", "torch")),
    default="onnx",
    show_default=True,
    help="What to write.",
)
@output("--out", type=PATH, help="File to make; model.onnx or model.pt2 in RUN, if nothing is said.")
@output("--replace", is_flag=True, help="Put the file in the place of an older one.")
@OUTPUT_OPTIONS
def export(
    folder: Path,
    like: Path | None,
    form: Literal["onnx", "torch"],
    out: Path | None,
    replace: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write a model as a file to serve."""
    from lpfs.export.export import export_run

    found = export_run(folder, out, dataset=like, format=form, replace=replace)
    if not quiet:
        click.echo(found.describe(), err=True)
    if as_json:
        names = ("format", "rows", "max_logit_change", "bound", "checked_with")
        print_json({"path": str(found.path), **{name: getattr(found, name) for name in names}})
