"""compare: every method against every other, on the user's own data.

report: one HTML file of a run, to forward.

reproduce: one experiment of the paper by one command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import SuggestingChoice, cli, near, print_json, resume_hint
from lpfs.cli.options import (
    DAYS,
    ENCODING,
    FILES,
    MODEL,
    OUTPUT_OPTIONS,
    PATH,
    SEED,
    TABLE,
    build_settings,
    model,
    output,
    parse_value,
    section,
    split_names,
)
from lpfs.paper.registry import EXPERIMENTS

COMPARE = """Search with every method, train what each keeps from scratch, and tell which is best on DATA.

DATA is a log or the folder of a Dataset, as for select. A second call does only what is missing: stop it with
Ctrl-C and go on with "lpfs compare --out OUT", or run it several times at once, on one machine or on many that
share the folder. OUT gets comparison.md, comparison.json, results.csv and a JSON file a run in results/.
"""
MAIN = ("best", "sizes", "seeds", "fields", "all_fields", "methods", "kinds", "fingerprint", "versions")

compare_option = section("What to compare")


@cli.command(
    help=COMPARE,
    short_help="Compare the methods on your data.",
    examples=[
        "lpfs compare clicks.parquet --label click --time day --methods lpfs++,permutation --keep 10,20 --out cmp",
        "lpfs compare data/log --methods lpfs++,permutation --keep 10 --seeds 3 --tune 2 --out cmp",
        "lpfs compare --out cmp                              # go on, or help",
        "lpfs compare --out cmp --tables-only --json         # what is known so far",
    ],
)
@click.argument("data", nargs=-1, type=FILES)
@compare_option(
    "--methods", multiple=True, help="Names out of lpfs methods, as a,b; all of them, if nothing is said."
)
@compare_option("--keep", multiple=True, help="Numbers of fields, as 5,10,20.")
@compare_option("--seeds", type=int, help="How many seeds (3).")
@compare_option(
    "--tune", type=int, help="Try so many settings of each method on validation rows (0: its defaults)."
)
@compare_option(
    "--method-option", "options", multiple=True, help="Of a method, as lpfs++:alpha=20; may be repeated."
)
@compare_option("--must-keep", multiple=True, help="Fields that stay, as a,b; may be repeated.")
@compare_option("--must-drop", multiple=True, help="Fields that are never looked at, as a,b; may be repeated.")
@compare_option("--truth", type=PATH, help="truth.json of a simulated log; a simulated Dataset has it already.")
@TABLE
@DAYS
@ENCODING
@MODEL
@model("--pretrain-steps", type=int, help="Steps of pretraining.")
@model("--search-steps", type=int, help="Steps of every search.")
@output("--out", type=PATH, default="comparison", show_default=True, help="Folder of the comparison.")
@output("--retry-failed", is_flag=True, help="Do runs that failed once more.")
@output("--tables-only", is_flag=True, help="Only make the tables of what is there.")
@SEED
@OUTPUT_OPTIONS
def compare(
    data: tuple[str, ...],
    out: Path,
    methods: tuple[str, ...],
    keep: tuple[str, ...],
    options: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Compare the methods."""
    own = {name: given.pop(name) for name in ("seeds", "tune", "truth", "retry_failed", "tables_only")}
    own |= {"methods": names(split_names(methods)), "keep": sizes(split_names(keep)), "options": settings(options)}
    wanted = build_settings(data, out, resume=True, **given)
    with resume_hint(f"lpfs compare --out {out}"):
        from lpfs.compare.compare import compare as run

        found = run(out=out, settings=wanted, quiet=quiet, **own)
    if as_json:
        print_json({"folder": str(out), **{name: found.values[name] for name in MAIN}})
    if found.best is None and not own["tables_only"]:
        failed = [each for each in found.results if each["status"] == "failed"]
        if failed:
            raise click.ClickException(f"no method came to an end; {failed[0]['method']}: {failed[0]['reason']}")


def names(given: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the methods; one that there is not gets the nearest suggested."""
    from lpfs.methods.registry import METHODS

    for each in given:
        if each not in METHODS and given != ("all",):
            known = f"there is no method {each!r}.{near(each, METHODS)} Known are {', '.join(METHODS)}."
            raise click.BadParameter(known, param_hint="--methods")
    return given or None


def sizes(given: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the numbers of fields."""
    try:
        return tuple(map(int, given)) or None
    except ValueError:
        wrong = ",".join(given)
        raise click.BadParameter(
            f"{wrong!r} is not a list of whole numbers, as 5,10,20", param_hint="--keep"
        ) from None


def settings(given: tuple[str, ...]) -> dict[str, dict[str, Any]] | None:
    """Return the settings of single methods."""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        head, sign, value = text.partition("=")
        method, colon, name = head.partition(":")
        if not (sign and colon and name.strip()):
            raise click.BadParameter(
                f"{text!r} is not of the form method:name=value", param_hint="--method-option"
            )
        found.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = parse_value(value.strip())
    return found or None


REPORT = """Write the report of RUN as one self-contained HTML file.

RUN is the folder that select, search or compare left. The file opens offline, asks the network for nothing, and
can be forwarded as it is.
"""


@cli.command(
    help=REPORT,
    short_help="Write a run as one HTML file.",
    examples=["lpfs report run", "lpfs report run --out selection.html"],
)
@click.argument("folder", metavar="RUN", type=PATH)
@output("--out", type=PATH, help="File to make; report.html in RUN, if nothing is said.")
@OUTPUT_OPTIONS
def report(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Write the report of a run."""
    from lpfs.report.verb import report as write

    place = write(folder, out)
    if as_json:
        print_json({"path": str(place), "bytes": place.stat().st_size})
    elif not quiet:
        click.echo(f"open {place}")


REPRODUCE = """Do an experiment of the LPFS paper; without NAME, list them.

OUT gets NAME.json, NAME.png and NAME.html: what was found beside what the paper claims. Without --data the
simulator's matching log is taken, and the output says so. What was trained is kept in OUT/work: a second call
does only what is missing.
"""

experiment_option = section("The experiment")


@cli.command(
    help=REPRODUCE,
    short_help="Do an experiment of the paper.",
    examples=[
        "lpfs reproduce                                      # the list",
        "lpfs reproduce gates",
        "lpfs reproduce terabyte --data criteo/ --full --out paper",
        "lpfs reproduce alpha --rows 20000 --steps 500 --seeds 1",
    ],
)
@click.argument("name", required=False, metavar="[NAME]", type=SuggestingChoice(tuple(EXPERIMENTS)))
@experiment_option(
    "--data", type=PATH, help="Real log: days of Criteo Terabyte, Kaggle's train.txt, or a Dataset."
)
@experiment_option("--full", is_flag=True, help="The real thing; else small, in minutes.")
@experiment_option("--rows", type=int, help="Rows of the simulated log.")
@experiment_option("--steps", type=int, help="Steps of pretraining and of every search.")
@experiment_option("--seeds", type=int, help="How many seeds.")
@output("--out", type=PATH, default="paper", show_default=True, help="Folder of the results.")
@SEED
@OUTPUT_OPTIONS
def reproduce(name: str | None, quiet: bool, as_json: bool, seed: int | None, **given: Any) -> None:
    """Do an experiment."""
    if name is None:
        list_experiments(as_json)
        return
    out: Path = given["out"]
    with resume_hint(f"lpfs reproduce {name} --out {out}"):
        from lpfs.paper.verb import reproduce as run

        found = run(name, seed=seed or 0, quiet=quiet, **given)
    if as_json:
        print_json({"path": str(found.path), "figure": str(found.figure), **found.values})


def list_experiments(as_json: bool) -> None:
    """List the experiments."""
    if as_json:
        print_json(
            [{"name": name, "what": each.summary, "claim": each.claim} for name, each in EXPERIMENTS.items()]
        )
        return
    for name, each in EXPERIMENTS.items():
        click.echo(f"{name}\n    {each.summary}")
