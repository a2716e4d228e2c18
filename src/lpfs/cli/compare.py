"""compare, report and reproduce: compare methods, write a report, repeat an experiment of the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs._console import print_lines
from lpfs._text import quote_command
from lpfs._validation import check_name
from lpfs.cli import options as opt
from lpfs.cli.app import SuggestingChoice, cli, print_json, resume_hint
from lpfs.cli.options import build_settings
from lpfs.errors import InputError
from lpfs.methods.registry import METHODS
from lpfs.paper.registry import EXPERIMENTS

COMPARE_HELP = """Search with several methods, train the kept fields from scratch, and report which method is best.

DATA is a log or the directory of a Dataset, as for select. A second call does only the missing runs: stop it with
Ctrl-C and continue with "lpfs compare --out OUT", or start it several times, on one machine or on several that
share the directory. OUT contains comparison.md, comparison.json, results.csv, report.html, and one JSON file per
run in results/.
"""
REPORT_HELP = """Write the report of RUN as one self-contained HTML file.

RUN is the directory of select, search or compare. The file works offline and loads nothing from the network.
"""
REPRODUCE_HELP = """Repeat an experiment of the LPFS paper; without NAME, list the experiments.

OUT contains NAME.json, NAME.png and NAME.html: the results next to the claims of the paper. Without --data a
simulated log is used, and the output says so. Trained models are kept in OUT/work, so a second call does only
what is missing.
"""
TUNE_HELP = "Number of option sets of each method to try on the validation rows (0: defaults)."
# keys of comparison.json that --json prints
JSON_KEYS = ("best", "sizes", "seeds", "fields", "all_fields", "methods", "kinds", "fingerprint", "versions")

compare_option, experiment_option = opt.section("Comparison"), opt.section("Experiment")


@cli.command(
    help=COMPARE_HELP,
    short_help="Compare methods on your data.",
    examples=[
        "lpfs compare clicks.parquet --label click --time day --methods lpfs++,permutation --keep 10,20 --out cmp",
        "lpfs compare data/log --methods lpfs++,permutation --keep 10 --seeds 3 --tune 2 --out cmp",
        "lpfs compare --out cmp                              # continue, or share the work",
        "lpfs compare --out cmp --tables-only --json         # the results so far",
    ],
)
@click.argument("data", nargs=-1, type=opt.FILES)
@compare_option("--methods", multiple=True, help="Names from lpfs methods, as a,b. Default: all.")
@compare_option("--keep", multiple=True, help="Numbers of fields to keep, as 5,10,20.")
@compare_option("--seeds", type=int, help="Number of seeds (3).")
@compare_option("--tune", type=int, help=TUNE_HELP)
@compare_option("--method-option", "options", multiple=True, help="Option of a method, as lpfs++:alpha=20; repeatable.")
@compare_option("--must-keep", multiple=True, help="Fields that are always kept, as a,b; repeatable.")
@compare_option("--must-drop", multiple=True, help="Fields that are never used, as a,b; repeatable.")
@compare_option("--truth", type=opt.PATH, help="truth.json of a simulated log; a simulated Dataset contains it.")
@opt.TABLE
@opt.DAYS
@opt.ENCODING
@opt.MODEL
@opt.model("--pretrain-steps", type=int, help="Number of pretraining steps.")
@opt.model("--search-steps", type=int, help="Number of steps of every search.")
@opt.FLEET
@opt.output("--out", type=opt.PATH, default="comparison", help="Directory of the comparison.")
@opt.output("--retry-failed", is_flag=True, help="Repeat runs that failed.")
@opt.output("--tables-only", is_flag=True, help="Only write the tables of the results so far.")
@opt.SEED
@opt.OUTPUT_OPTIONS
def compare(data: tuple[str, ...], out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Compare methods."""
    arguments = {name: options.pop(name) for name in ("seeds", "tune", "truth", "retry_failed", "tables_only")}
    arguments |= {
        "methods": parse_methods(opt.split_names(options.pop("methods"))),
        "keep": parse_sizes(opt.split_names(options.pop("keep"))),
        "options": parse_method_options(options.pop("options")),
    }
    settings = build_settings(data, out, resume=True, **options)
    with resume_hint("lpfs", "compare", "--out", out):
        from lpfs.compare.compare import compare as run

        comparison = run(out=out, settings=settings, quiet=quiet, **arguments)
    if as_json:
        print_json({"folder": str(out), **{name: comparison.values[name] for name in JSON_KEYS}})
    failed = [result for result in comparison.results if result["status"] == "failed"]
    if comparison.best is None and failed and not arguments["tables_only"]:
        raise click.ClickException(f"no method is complete and ranked; {failed[0]['method']}: {failed[0]['reason']}")


def parse_methods(names: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the names of methods, or fail with a suggestion."""
    try:
        for name in names if names != ("all",) else ():
            check_name(name, METHODS, "method")
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--methods") from None
    return names or None


def parse_sizes(texts: tuple[str, ...]) -> tuple[int, ...] | None:
    """Return the numbers of fields."""
    try:
        return tuple(map(int, texts)) or None
    except ValueError:
        message = f"{','.join(texts)!r} is not a list of integers such as 5,10,20"
        raise click.BadParameter(message, param_hint="--keep") from None


def parse_method_options(texts: tuple[str, ...]) -> dict[str, dict[str, Any]] | None:
    """Return method -> its options."""
    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        head, sign, value = text.partition("=")
        method, colon, name = head.partition(":")
        if not (sign and colon and name.strip()):
            raise click.BadParameter(f"{text!r} is not of the form method:name=value", param_hint="--method-option")
        options.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = opt.parse_value(value.strip())
    return options or None


@cli.command(
    help=REPORT_HELP,
    short_help="Write the report of a run as HTML.",
    examples=["lpfs report run", "lpfs report run --out selection.html"],
)
@click.argument("folder", metavar="RUN", type=opt.PATH)
@opt.output("--out", type=opt.PATH, help="File to write. Default: report.html in RUN.")
@opt.OUTPUT_OPTIONS
def report(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Write the report of a run."""
    from lpfs.report import report as write_report

    path = write_report(folder, out)
    if as_json:
        print_json({"path": str(path), "bytes": path.stat().st_size})
    elif not quiet:
        print_lines(quote_command("open", path))


@cli.command(
    help=REPRODUCE_HELP,
    short_help="Repeat an experiment of the paper.",
    examples=[
        "lpfs reproduce                                      # list the experiments",
        "lpfs reproduce gates",
        "lpfs reproduce terabyte --data criteo/ --full --out paper",
        "lpfs reproduce alpha --rows 20000 --steps 500 --seeds 1",
    ],
)
@click.argument("name", required=False, metavar="[NAME]", type=SuggestingChoice(tuple(EXPERIMENTS)))
@experiment_option("--data", type=opt.PATH, help="Real log: days of Criteo Terabyte, Kaggle's train.txt, or a Dataset.")
@experiment_option("--full", is_flag=True, help="Full size; by default small, which takes minutes.")
@experiment_option("--rows", type=int, help="Number of rows of the simulated log.")
@experiment_option("--steps", type=int, help="Number of steps of pretraining and of every search.")
@experiment_option("--seeds", type=int, help="Number of seeds.")
@experiment_option("--fleet/--no-fleet", default=None, help=opt.FLEET_HELP)
@opt.output("--out", type=opt.PATH, default="paper", help="Directory of the results.")
@opt.SEED
@opt.OUTPUT_OPTIONS
def reproduce(name: str | None, quiet: bool, as_json: bool, seed: int | None, out: Path, **options: Any) -> None:
    """Repeat an experiment."""
    if name is None:
        entries = {name: {"summary": entry.summary, "claim": entry.claim} for name, entry in EXPERIMENTS.items()}
        if as_json:
            print_json([{"name": name, **entry} for name, entry in entries.items()])
        else:
            for name, entry in entries.items():
                print_lines(name, f"    {entry['summary']}")
        return
    with resume_hint("lpfs", "reproduce", name, "--out", out):
        from lpfs.paper.reproduce import reproduce as run

        result = run(name, out, seed=seed or 0, quiet=quiet, **options)
    if as_json:
        print_json({"path": str(result.path), "figure": str(result.figure), **result.values})
