"""Options that several commands take, declared once, and what they become.

From options of the command line to the Settings of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lpfs.cli.app import Option, SuggestingChoice

if TYPE_CHECKING:
    from lpfs.pipeline.settings import Settings


PRESETS = ("criteo-terabyte", "criteo-kaggle", "avazu")
MODELS = ("mlp", "wide_deep", "fm", "deepfm", "dcnv2", "dlrm", "dlrm_cross", "user_item")
OPTIMIZERS = ("adagrad", "rowwise-adagrad", "adam", "sgd")
PRECISIONS = ("float32", "tf32", "bfloat16")

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator = Callable[[Function], Function]
PATH = click.Path(path_type=Path)
FILES = click.Path()  # names or patterns of files and folders, as text; the tab key completes them


class BinsType(click.ParamType[int | str]):
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


def combine_options(*options: Decorator[Any]) -> Decorator[Any]:
    """Return one decorator for several options, in this order."""

    def add(function: Function) -> Function:
        for each in reversed(options):
            function = each(function)
        return function

    return add


table, days, encoding = section("The table"), section("Rows and days"), section("Fields")

TABLE = combine_options(
    table("--label", help="Column of the clicks, 0 or 1."),
    table("--task", "tasks", multiple=True, help="Column of a further label; may be repeated."),
    table("--positive", help="Label value that counts as 1, where it is not 0 and 1."),
    table("--preset", type=SuggestingChoice(PRESETS), help="A log whose layout is known."),
    table("--separator", help="Of a text table; found when not given. \\t is a tab."),
    table("--no-header", is_flag=True, help="Text tables do not name their columns: column_1, column_2 …"),
    table("--missing", multiple=True, help="Text that means a missing value, as '?'; may be repeated."),
)
DAYS = combine_options(
    days("--time", help="Column that orders the rows: dates, timestamps or day numbers."),
    days("--time-format", help="How it is written, for example %y%m%d%H; found when not given."),
    days("--parts", help="Cut the row order into so many days (10), or 'files': one a file."),
    days("--split", help="Column of the words train, valid, test: days of train rows, then valid, then test."),
    days("--negatives", type=float, help="Share of the negatives to keep, as 0.125; is stored."),
)
ENCODING = combine_options(
    encoding("--fields", type=PATH, help="TOML file that corrects what is found."),
    encoding("--min-count", type=int, help="Rarer values share the id of unseen ones."),
    encoding("--max-values", type=int, help="Keep so many of the most frequent values of a field."),
    encoding("--hash", type=int, help="Hash values modulo this range instead of keeping vocabularies."),
    encoding("--bins", type=BinsType(), help="Cut numeric columns into so many quantile bins; auto, or off."),
    encoding("--keep-all", is_flag=True, help="Keep constant and duplicate columns."),
)
PREPARED = (
    *("tasks", "positive", "preset", "separator", "no_header", "missing"),
    *("time_format", "parts", "negatives"),
    *("fields", "min_count", "max_values", "hash", "bins", "keep_all"),
)

GRAPHS = {"auto": None, "on": True, "off": False}
model = section("The model")
TRAINING = combine_options(
    model("--optimizer", type=SuggestingChoice(OPTIMIZERS), help="Of the model (adagrad)."),
    model("--lr", type=float, help="Its learning rate."),
    model("--batch-size", type=int, help="Rows in a step; found from the size of the data."),
    model("--precision", type=SuggestingChoice(PRECISIONS), help="Of the arithmetic (float32)."),
    model(
        "--graph",
        type=SuggestingChoice(GRAPHS),
        help="Capture a GPU's steps and replay them (auto: where it can).",
    ),
    model("--device", help="auto, cpu, cuda, cuda:1 … (auto)."),
)
MODEL = combine_options(
    model("--model", type=SuggestingChoice(MODELS), help="The backbone (mlp)."),
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
OUTPUT_OPTIONS = combine_options(QUIET, JSON)
BOARDS = combine_options(
    output("--tensorboard", is_flag=True, help="Write TensorBoard files too: tensorboard --logdir OUT."),
    output("--mlflow", is_flag=True, help="Log to MLflow too, where MLFLOW_TRACKING_URI says."),
)
RUN = combine_options(
    output("--resume", is_flag=True, help="Go on with the run in --out from the stage and step it had reached."),
    output("--replace", is_flag=True, help="Put this run in the place of an older one."),
    SEED,
    BOARDS,
    OUTPUT_OPTIONS,
)


def drop_none(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {
        name: value for name, value in values.items() if value is not None and value is not False and value != ()
    }


def prepare_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return options as ``prepare`` takes them, in plain JSON values."""
    options = drop_none(given)
    if options.pop("no_header", False):
        options["header"] = False
    if "separator" in options:
        options["separator"] = options["separator"].replace("\\t", "\t")
    if options.get("parts", "files") != "files":
        options["parts"] = parse_int(options["parts"])
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def parse_int(text: str) -> int:
    """Return --parts as a number."""
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor 'files'", param_hint="--parts") from None


WIDTHS = ("hidden", "bottom", "head")  # of a model: lists, also where one number is given
METHOD_OPTIONS = ("alpha", "tau", "epsilon", "schedule", "rescale")

target_option, search_option = section("What you want, in one way"), section("The search")

TARGET_OPTIONS = combine_options(
    target_option("--keep", type=int, help="Exactly so many fields."),
    target_option(
        "--max-auc-loss",
        type=float,
        help="As few fields as cost at most this much AUC (0.001, if nothing is said).",
    ),
    target_option("--budget", type=float, help="Fields that cost this much together at most; needs --costs."),
    target_option("--penalty", type=float, help="The paper's fixed penalty λ."),
    target_option("--costs", help="TOML file of what each field costs, or 'complexity'."),
    target_option("--must-keep", multiple=True, help="Fields that stay, as a,b; may be repeated."),
    target_option("--must-drop", multiple=True, help="Fields that are never looked at, as a,b; may be repeated."),
)


def search_options() -> Decorator[Any]:
    """Return the options of a search; the methods are listed without torch."""
    from lpfs.methods.registry import METHODS

    return combine_options(
        search_option(
            "--method", type=SuggestingChoice(tuple(METHODS)), metavar="NAME", help="One of lpfs methods (lpfs++)."
        ),
        search_option("--alpha", type=float, help="Weight of the odd term of the gate."),
        search_option("--tau", type=float, help="Its ε is raised to 1/τ."),
        search_option("--epsilon", type=float, help="ε of the gate at the start."),
        search_option(
            "--schedule",
            type=SuggestingChoice(("scaled", "terabyte", "industrial")),
            help="How ε and the gate's rate move.",
        ),
        search_option(
            "--rescale", type=SuggestingChoice(("epsilon", "rms", "off")), help="What the gates are divided by."
        ),
        search_option(
            "--method-option",
            "options",
            multiple=True,
            help="Any other of the method, as name=value; may be repeated.",
        ),
        search_option("--search-steps", type=int, help="Steps of the search."),
    )


SEARCH = search_options()
CONFIG = output(
    "--config", type=click.Path(path_type=Path), help="Settings of an earlier run: its config.json or folder."
)


def build_settings(
    source: Sequence[str], out: Path, *, resume: bool, config: Path | None = None, **given: Any
) -> Settings:
    """Return the settings: those of --config, or of the run to go on with, and those given in their place."""
    from lpfs.pipeline.settings import CONFIG as NAME
    from lpfs.pipeline.settings import Settings

    base = Settings()
    if config is not None:
        base = Settings.load(config)
    elif resume and (out / NAME).exists():
        base = Settings.load(out)
    prepare = prepare_options({name: given.pop(name, None) for name in PREPARED})
    options = drop_none({name: given.pop(name, None) for name in METHOD_OPTIONS})
    options |= parse_pairs(given.pop("options", ()), "--method-option")
    model_options = parse_pairs(given.pop("model_options", ()), "--model-option")
    model_options |= {name: [model_options[name]] for name in WIDTHS if isinstance(model_options.get(name), int)}
    for name in ("must_keep", "must_drop"):
        given[name] = split_names(given.pop(name, ()))
    graph = given.pop("graph", None)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in drop_none(given).items()}
    if "fields" in prepare:
        prepare["fields"] = str(prepare["fields"])
    merged: dict[str, Any] = {
        "prepare": {**base.prepare, **prepare},
        "options": {**base.options, **options},
        "model_options": {**base.model_options, **model_options},
    }
    if graph is not None:
        merged["graph"] = GRAPHS[graph]
    settings = base.updated(**values, **merged, **({"source": tuple(source)} if source else {}))
    if not settings.source:
        there = f" There is nothing in {out} to go on with." if resume else ""
        raise click.UsageError(
            f"Missing argument: the log, as files or the folder of a Dataset (or --config).{there}"
        )
    return settings


def split_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names given as a,b or one by one."""
    return tuple(each.strip() for text in names for each in text.split(",") if each.strip())


def parse_pairs(given: Iterable[str], option: str) -> dict[str, Any]:
    """Return name=value pairs; a value is a number, true, false, null, a list as 64,32, or text."""
    result = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form name=value", param_hint=option)
        result[name.strip().replace("-", "_")] = parse_value(value.strip())
    return result


def parse_value(text: str) -> Any:
    """Return text as the value it stands for."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return json.loads(f"[{text}]") if "," in text else text
    except ValueError:
        return text
