"""reproduce: one experiment of the paper by one command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lpfs.cli.app import Near, cli, going_on, show
from lpfs.cli.options import PATH, SAID, SEED, output, section
from lpfs.paper.registry import EXPERIMENTS

REPRODUCE = """Do an experiment of the LPFS paper; without NAME, list them.

OUT gets NAME.json, NAME.png and NAME.html: what was found beside what the paper claims. Without --data the
simulator's matching log is taken, and the output says so. What was trained is kept in OUT/work: a second call
does only what is missing.
"""

what = section("The experiment")


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
@click.argument("name", required=False, metavar="[NAME]", type=Near(tuple(EXPERIMENTS)))
@what("--data", type=PATH, help="Real log: days of Criteo Terabyte, Kaggle's train.txt, or a Dataset.")
@what("--full", is_flag=True, help="The real thing; else small, in minutes.")
@what("--rows", type=int, help="Rows of the simulated log.")
@what("--steps", type=int, help="Steps of pretraining and of every search.")
@what("--seeds", type=int, help="How many seeds.")
@output("--out", type=PATH, default="paper", show_default=True, help="Folder of the results.")
@SEED
@SAID
def reproduce(name: str | None, quiet: bool, as_json: bool, seed: int | None, **given: Any) -> None:
    """Do an experiment."""
    if name is None:
        listing(as_json)
        return
    out: Path = given["out"]
    with going_on(f"lpfs reproduce {name} --out {out}"):
        from lpfs.paper.verb import reproduce as run

        found = run(name, seed=seed or 0, quiet=quiet, **given)
    if as_json:
        show({"path": str(found.path), "figure": str(found.figure), **found.values})


def listing(as_json: bool) -> None:
    """List the experiments."""
    if as_json:
        show([{"name": name, "what": each.summary, "claim": each.claim} for name, each in EXPERIMENTS.items()])
        return
    for name, each in EXPERIMENTS.items():
        click.echo(f"{name}\n    {each.summary}")
