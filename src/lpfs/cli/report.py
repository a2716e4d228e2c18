"""report: one HTML file of a run, to forward."""

from __future__ import annotations

from pathlib import Path

import click

from lpfs.cli.app import cli, show
from lpfs.cli.options import PATH, SAID, output

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
@SAID
def report(folder: Path, out: Path | None, quiet: bool, as_json: bool) -> None:
    """Write the report of a run."""
    from lpfs.report.verb import report as write

    place = write(folder, out)
    if as_json:
        show({"path": str(place), "bytes": place.stat().st_size})
    elif not quiet:
        click.echo(f"open {place}")
