"""Options that several commands share, and the Settings that they become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lpfs.cli.app import Option
from lpfs.methods.registry import METHODS
from lpfs.models import MODELS

if TYPE_CHECKING:
    from lpfs.pipeline.settings import Settings

# Copies of names whose modules import torch; a test compares them with the originals.
PRESETS = ("criteo-terabyte", "criteo-kaggle", "avazu")
OPTIMIZERS = ("adagrad", "rowwise-adagrad", "adam", "sgd")
PRECISIONS = ("float32", "tf32", "bfloat16")
SCHEDULES = ("scaled", "terabyte", "industrial")
GRAPH_VALUES = {"auto": None, "on": True, "off": False}
LIST_OPTIONS = ("hidden", "bottom", "head")  # options of a model that are lists, also if one number is given
METHOD_OPTIONS = ("alpha", "tau", "epsilon", "schedule", "rescale")  # of a method, each also an option here
# options of prepare, which are in Settings.prepare
PREPARE_OPTIONS = (
    *("tasks", "positive", "preset", "separator", "no_header", "strip", "decimal", "missing"),
    *("time_format", "parts", "negatives"),
    *("fields", "kind", "min_count", "max_values", "hash", "bins", "keep_all"),
)

FLEET_HELP = (
    "Train several models together. Default: only final trainings, if tables are small, on a CPU for batches up to 256."
)
MODEL_OPTION_HELP = "Option of the model, as dim=8 or hidden=64,32; repeatable."
Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]
PATH = click.Path(path_type=Path)
FILES = click.Path()  # names or patterns of files and directories, as text; shells complete them


class BinsType(click.ParamType[int | str]):
    """A number of bins, ``auto`` or ``off``."""

    name = "N|auto|off"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if value in ("auto", "off") else click.INT.convert(value, param, ctx)


def section(title: str) -> Callable[..., Decorator[Any]]:
    """Return ``click.option`` for the options of a section of --help."""
    return partial(click.option, cls=Option, section=title)


def combine_options(*options: Decorator[Any]) -> Decorator[Any]:
    """Return one decorator for several options, in this order."""

    def add(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return add


table, days, encoding = section("Table"), section("Rows and days"), section("Fields")
target_option, search_option, model = section("Target"), section("Search"), section("Model")
output = section("Output")

TABLE = combine_options(
    table("--label", help="Label column, 0 or 1."),
    table("--task", "tasks", multiple=True, help="Column of an additional label; repeatable."),
    table("--positive", help="Label value that counts as 1, if labels are not 0 and 1."),
    table("--preset", choices=PRESETS, help="Layout of a public log."),
    table("--separator", help="Column separator of a text table; \\t is a tab. Default: detected."),
    table("--no-header", is_flag=True, help="Text tables have no header; columns are column_1, column_2 …"),
    table("--strip", is_flag=True, help="Remove blanks around the names and values of text tables."),
    table("--decimal", metavar="MARK", help="Decimal mark of numbers in text, . or , (detected by column)."),
    table("--missing", multiple=True, help="Text of a missing value, for example '?'; repeatable."),
)
DAYS = combine_options(
    days("--time", help="Column that orders the rows: dates, timestamps or day numbers."),
    days("--time-format", help="Format of the time column, for example %y%m%d%H. Default: detected."),
    days("--parts", help="Split the rows in their order into this many days (10), or 'files': one day per file."),
    days("--split", help="Column with the values train, valid and test, which defines the split."),
    days("--negatives", type=float, help="Fraction of negative rows to keep, for example 0.125; it is recorded."),
)
FORCE = days("--force", is_flag=True, help="Run even if validation or test rows have fewer than 10 of a class.")
ENCODING = combine_options(
    encoding("--fields", type=FILES, help="TOML file that corrects the inferred fields."),
    encoding("--kind", multiple=True, metavar="COLUMN=KIND", help="Kind of a column, as price=numeric; repeatable."),
    encoding(
        "--min-count",
        type=int,
        help="Rarer values share the id of unseen values. Default: 2 for near-unique columns, else 1.",
    ),
    encoding("--max-values", type=int, help="Maximum number of values of a field; the most frequent ones are kept."),
    encoding("--hash", type=int, help="Hash values to this many ids instead of storing vocabularies."),
    encoding("--bins", type=BinsType(), help="Number of quantile bins of numeric columns, auto, or off."),
    encoding("--keep-all", is_flag=True, help="Keep constant and duplicate columns."),
)
TARGET_OPTIONS = combine_options(
    target_option("--keep", type=int, help="Number of fields to keep."),
    target_option(
        "--max-auc-loss",
        type=float,
        help="Keep as few fields as possible with at most this loss of AUC. Default: 1 % of what all fields gain, or "
        "the smallest loss that the rows can decide.",
    ),
    target_option("--budget", type=float, help="Maximum total cost of the kept fields; needs --costs."),
    target_option("--penalty", type=float, help="Fixed penalty λ, as in the paper."),
    target_option("--costs", help="TOML file with the cost of each field, or 'complexity'."),
    target_option("--must-keep", multiple=True, help="Fields that are always kept, as a,b; repeatable."),
    target_option("--must-drop", multiple=True, help="Fields that are never used, as a,b; repeatable."),
)
SEARCH = combine_options(
    search_option("--method", choices=METHODS, metavar="NAME", help="Search method (lpfs++); see lpfs methods."),
    search_option("--alpha", type=float, help="Weight α of the odd term of the gate."),
    search_option("--tau", type=float, help="τ of the odd term, in which ε is raised to 1/τ."),
    search_option("--epsilon", type=float, help="Initial ε of the gate."),
    search_option("--schedule", choices=SCHEDULES, help="Schedule of ε and of the gate learning rate."),
    search_option("--rescale", choices=("epsilon", "rms", "off"), help="What the gates are divided by."),
    search_option(
        "--method-option", "options", multiple=True, help="Any other option of the method, as name=value; repeatable."
    ),
    search_option("--search-steps", type=int, help="Number of search steps."),
)
TRAINING = combine_options(
    model("--optimizer", choices=OPTIMIZERS, help="Optimizer of the model (adagrad)."),
    model("--lr", type=float, help="Learning rate of the optimizer."),
    model("--lr-schedule", choices=("constant", "rise"), help="rise: exponentially to ten times --lr."),
    model("--batch-size", type=int, help="Rows per step. Default: from the size of the data."),
    model("--precision", choices=PRECISIONS, help="Arithmetic precision (float32)."),
    model("--graph", choices=GRAPH_VALUES, help="Capture GPU steps as CUDA graphs (auto: if possible)."),
    model("--device", help="auto, cpu, cuda, cuda:1 … (auto)."),
)
MODEL = combine_options(
    model("--model", choices=MODELS, help="Model architecture (mlp)."),
    model("--model-option", "model_options", multiple=True, help=MODEL_OPTION_HELP),
    TRAINING,
)
FLEET = model("--fleet/--no-fleet", default=None, help=FLEET_HELP)
SEED = output("--seed", type=int, help="Seed of all random numbers (0).")
JSON = output("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
OUTPUT_OPTIONS = combine_options(output("-q", "--quiet", is_flag=True, help="Print only errors."), JSON)
RUN = combine_options(
    output("--resume", is_flag=True, help="Continue the run in --out from its last checkpoint."),
    output("--replace", is_flag=True, help="Replace an older run."),
    SEED,
    output("--tensorboard", is_flag=True, help="Also write TensorBoard files: tensorboard --logdir OUT."),
    output("--mlflow", is_flag=True, help="Also log to MLflow at MLFLOW_TRACKING_URI."),
    OUTPUT_OPTIONS,
)
CONFIG = output("--config", type=PATH, help="Settings of an earlier run: its config.json or its directory.")


def drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in values.items() if value is not None and value is not False and value != ()}


def prepare_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return options as ``prepare`` takes them, in plain JSON values."""
    options = drop_none(values)
    if options.pop("no_header", False):
        options["header"] = False
    if "separator" in options:
        options["separator"] = options["separator"].replace("\\t", "\t")
    if options.get("parts", "files") != "files":
        try:
            options["parts"] = int(options["parts"])
        except ValueError:
            message = f"{options['parts']!r} is neither an integer nor 'files'"
            raise click.BadParameter(message, param_hint="--parts") from None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def build_settings(
    source: Sequence[str], out: Path, *, resume: bool, config: Path | None = None, **options: Any
) -> Settings:
    """Return the settings: those of --config, or of the run to resume, changed by the given options."""
    from lpfs.pipeline.settings import CONFIG_FILE, Settings

    if config is None and resume and (out / CONFIG_FILE).exists():
        config = out
    base = Settings() if config is None else Settings.load(config)
    prepare = prepare_options({name: options.pop(name, None) for name in PREPARE_OPTIONS})
    method_options = drop_none({name: options.pop(name, None) for name in METHOD_OPTIONS})
    method_options |= parse_pairs(options.pop("options", ()), "--method-option")
    model_options = parse_pairs(options.pop("model_options", ()), "--model-option")
    for name in LIST_OPTIONS:
        if isinstance(model_options.get(name), int):
            model_options[name] = [model_options[name]]
    for name in ("must_keep", "must_drop"):
        options[name] = split_names(options.pop(name, ()))
    graph, fleet, no_curve = options.pop("graph", None), options.pop("fleet", None), options.pop("no_curve", False)
    changes = {name: str(value) if isinstance(value, Path) else value for name, value in drop_none(options).items()}
    changes |= {
        "prepare": {**base.prepare, **prepare},
        "options": {**base.options, **method_options},
        "model_options": {**base.model_options, **model_options},
    }
    if no_curve:
        changes["curve"] = False
    if graph is not None:
        changes["graph"] = GRAPH_VALUES[graph]
    if fleet is not None:
        changes["fleet"] = fleet
    if source:
        changes["source"] = tuple(source)
    settings = base.updated(**changes)
    if not settings.source:
        hint = f" {out} contains no run to resume." if resume else ""
        raise click.UsageError(f"Missing argument: the log, as files or a Dataset directory (or --config).{hint}")
    return settings


def split_names(texts: Iterable[str]) -> tuple[str, ...]:
    """Return names given as a,b or one by one."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Return name=value pairs; a value is a number, true, false, null, a list as 64,32, or text."""
    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form name=value", param_hint=option)
        values[name.strip().replace("-", "_")] = parse_value(value.strip())
    return values


def parse_value(text: str) -> Any:
    """Return the value of a text: JSON, a list of numbers, or the text itself."""
    for candidate in (text, f"[{text}]" if "," in text else text):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError):
            pass
    return text
