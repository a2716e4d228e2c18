"""compare: every method against every other, on the user's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import cli, going_on, near, show
from lpfs.cli.options import DAYS, ENCODING, FILES, MODEL, PATH, SAID, SEED, TABLE, model, output, section
from lpfs.cli.wanted import listed, plain, settings_of

COMPARE = """Search with every method, train what each keeps from scratch, and tell which is best on DATA.

DATA is a log or the folder of a Dataset, as for select. A second call does only what is missing: stop it with
Ctrl-C and go on with "lpfs compare --out OUT", or run it several times at once, on one machine or on many that
share the folder. OUT gets comparison.md, comparison.json, results.csv and a JSON file a run in results/.
"""
MAIN = ("best", "sizes", "seeds", "fields", "all_fields", "methods", "kinds", "fingerprint", "versions")

what = section("What to compare")


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
@what("--methods", multiple=True, help="Names out of lpfs methods, as a,b; all of them, if nothing is said.")
@what("--keep", multiple=True, help="Numbers of fields, as 5,10,20.")
@what("--seeds", type=int, help="How many seeds (3).")
@what("--tune", type=int, help="Try so many settings of each method on validation rows (0: its defaults).")
@what("--method-option", "options", multiple=True, help="Of a method, as lpfs++:alpha=20; may be repeated.")
@what("--must-keep", multiple=True, help="Fields that stay, as a,b; may be repeated.")
@what("--must-drop", multiple=True, help="Fields that are never looked at, as a,b; may be repeated.")
@what("--truth", type=PATH, help="truth.json of a simulated log; a simulated Dataset has it already.")
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
@SAID
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
    own |= {"methods": names(listed(methods)), "keep": sizes(listed(keep)), "options": settings(options)}
    wanted = settings_of(data, out, resume=True, **given)
    with going_on(f"lpfs compare --out {out}"):
        from lpfs.compare.compare import compare as run

        found = run(out=out, settings=wanted, quiet=quiet, **own)
    if as_json:
        show({"folder": str(out), **{name: found.values[name] for name in MAIN}})
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
        found.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = plain(value.strip())
    return found or None
