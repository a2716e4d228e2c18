"""Options that several commands take, declared once, and what they become."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from lpfs.cli.app import Near, Option

PRESETS = ("criteo-terabyte", "criteo-kaggle", "avazu")
MODELS = ("mlp", "wide_deep", "fm", "deepfm", "dcnv2", "dlrm", "dlrm_cross", "user_item")
OPTIMIZERS = ("adagrad", "rowwise-adagrad", "adam", "sgd")
PRECISIONS = ("float32", "tf32", "bfloat16")

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]
PATH = click.Path(path_type=Path)
FILES = click.Path()  # names or patterns of files and folders, as text; the tab key completes them


class Bins(click.ParamType[int | str]):
    """A number of bins, or a word for one."""

    name = "N|auto|off"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number, or the word."""
        if value in ("auto", "off"):
            return value
        return click.INT.convert(value, param, ctx)


def section(title: str) -> Callable[..., Decorator[Any]]:
    """Return ``click.option`` for options of a section."""
    return partial(click.option, cls=Option, section=title)


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Return one decorator for several options, in this order."""

    def add(function: Function) -> Function:
        for each in reversed(options):
            function = each(function)
        return function

    return add


table, days, encoding = section("The table"), section("Rows and days"), section("Fields")

TABLE = together(
    table("--label", help="Column of the clicks, 0 or 1."),
    table("--task", "tasks", multiple=True, help="Column of a further label; may be repeated."),
    table("--positive", help="Label value that counts as 1, where it is not 0 and 1."),
    table("--preset", type=Near(PRESETS), help="A log whose layout is known."),
    table("--separator", help="Of a text table; found when not given. \\t is a tab."),
    table("--no-header", is_flag=True, help="Text tables do not name their columns: column_1, column_2 …"),
    table("--missing", multiple=True, help="Text that means a missing value, as '?'; may be repeated."),
)
DAYS = together(
    days("--time", help="Column that orders the rows: dates, timestamps or day numbers."),
    days("--time-format", help="How it is written, for example %y%m%d%H; found when not given."),
    days("--parts", help="Cut the row order into so many days (10), or 'files': one a file."),
    days("--split", help="Column of the words train, valid, test: days of train rows, then valid, then test."),
    days("--negatives", type=float, help="Share of the negatives to keep, as 0.125; is stored."),
)
ENCODING = together(
    encoding("--fields", type=PATH, help="TOML file that corrects what is found."),
    encoding("--min-count", type=int, help="Rarer values share the id of unseen ones."),
    encoding("--max-values", type=int, help="Keep so many of the most frequent values of a field."),
    encoding("--hash", type=int, help="Hash values modulo this range instead of keeping vocabularies."),
    encoding("--bins", type=Bins(), help="Cut numeric columns into so many quantile bins; auto, or off."),
    encoding("--keep-all", is_flag=True, help="Keep constant and duplicate columns."),
)
PREPARED = (
    *("tasks", "positive", "preset", "separator", "no_header", "missing"),
    *("time_format", "parts", "negatives"),
    *("fields", "min_count", "max_values", "hash", "bins", "keep_all"),
)

GRAPHS = {"auto": None, "on": True, "off": False}
model = section("The model")
TRAINING = together(
    model("--optimizer", type=Near(OPTIMIZERS), help="Of the model (adagrad)."),
    model("--lr", type=float, help="Its learning rate."),
    model("--batch-size", type=int, help="Rows in a step; found from the size of the data."),
    model("--precision", type=Near(PRECISIONS), help="Of the arithmetic (float32)."),
    model("--graph", type=Near(GRAPHS), help="Capture a GPU's steps and replay them (auto: where it can)."),
    model("--device", help="auto, cpu, cuda, cuda:1 … (auto)."),
)
MODEL = together(
    model("--model", type=Near(MODELS), help="The backbone (mlp)."),
    model(
        "--model-option",
        "model_options",
        multiple=True,
        help="Of the model, as dim=8 or hidden=64,32; may be repeated.",
    ),
    TRAINING,
)

output = section("Output")
SEED = output("--seed", type=int, help="Of everything that is drawn (0).")
QUIET = output("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
JSON = output("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
SAID = together(QUIET, JSON)
BOARDS = together(
    output("--tensorboard", is_flag=True, help="Write TensorBoard files too: tensorboard --logdir OUT."),
    output("--mlflow", is_flag=True, help="Log to MLflow too, where MLFLOW_TRACKING_URI says."),
)
RUN = together(
    output("--resume", is_flag=True, help="Go on with the run in --out from the stage and step it had reached."),
    output("--replace", is_flag=True, help="Put this run in the place of an older one."),
    SEED,
    BOARDS,
    SAID,
)


def given_only(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {
        name: value for name, value in values.items() if value is not None and value is not False and value != ()
    }


def prepare_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return options as ``prepare`` takes them, in plain JSON values."""
    options = given_only(given)
    if options.pop("no_header", False):
        options["header"] = False
    if "separator" in options:
        options["separator"] = options["separator"].replace("\\t", "\t")
    if options.get("parts", "files") != "files":
        options["parts"] = whole(options["parts"])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def whole(text: str) -> int:
    """Return --parts as a number."""
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor 'files'", param_hint="--parts") from None
