"""prepare and simulate: a log in, or none; a Dataset out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpfs.cli.app import SuggestingChoice, cli, print_json
from lpfs.cli.options import (
    DAYS,
    ENCODING,
    FILES,
    OUTPUT_OPTIONS,
    PATH,
    TABLE,
    days,
    encoding,
    output,
    prepare_options,
    section,
)

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset

ENGINES = ("embedded", "spark")
WORLDS = ("small", "terabyte", "industrial", "industrial-small")

PREPARE = """Turn the click log SOURCE into a Dataset.

SOURCE is a CSV, TSV or Parquet file (.gz and .zst too), a folder or a pattern of them, or several files.
The kinds of the columns are found and printed; correct them with --fields.
"""
SIMULATE = "Make a click log whose truth is known and saved beside it in truth.json."

log = section("The log")


@cli.command(
    help=PREPARE,
    short_help="Turn a click log into a Dataset.",
    examples=[
        "lpfs prepare log.csv --label click --time timestamp --out data/log",
        "lpfs prepare new.parquet --like data/log --out data/new",
        "lpfs prepare day_* --preset criteo-terabyte --negatives 0.125 --out data/terabyte",
        "lpfs prepare s3://logs/day_* --preset criteo-terabyte --engine spark --out s3://data/terabyte",
    ],
)
@click.argument("source", nargs=-1, required=True, type=FILES)
@TABLE
@DAYS
@days("--ordered", is_flag=True, help="Rows are promised to be in time order: stop if they are not.")
@days("--shuffle", is_flag=True, help="Deal the rows to those days at random; not with a time.")
@days("--train", type=int, help="So many first days give the vocabularies (all but the last).")
@days("--seed", type=int, help="Seed of the negatives kept, and of --shuffle.")
@ENCODING
@encoding("--like", type=PATH, help="Encode as this Dataset; nothing is learned.")
@encoding("--only", "fields_only", multiple=True, help="With --like: only this field; may be repeated.")
@encoding("--write-fields", type=PATH, help="Write what is found as TOML.")
@output("--out", type=PATH, help="Folder to make.")
@output("--dry-run", is_flag=True, help="Show what would happen to each column; write no Dataset.")
@output("--replace", is_flag=True, help="Put the result in the place of another Dataset.")
@output(
    "--engine", type=SuggestingChoice(ENGINES), default="embedded", show_default=True, help="Who reads the log."
)
@OUTPUT_OPTIONS
def prepare(source: tuple[str, ...], quiet: bool, as_json: bool, **given: Any) -> None:
    """Turn a click log into a Dataset."""
    from lpfs.data.fields import to_toml
    from lpfs.data.planning import TABLE, field_table, field_table_compact
    from lpfs.data.prepare import plan_source, run_plan
    from lpfs.data.progress import Reporter

    reporter = Reporter(quiet=quiet)
    out, replace, dry = given.pop("out"), given.pop("replace"), given.pop("dry_run")
    fields_out, engine = given.pop("write_fields"), given.pop("engine")
    if out is None and not dry:
        raise click.UsageError("Missing option '--out': the folder to make.")
    job = plan_source(list(source), **prepare_options(given))
    reporter.table(job.title, *field_table_compact(job))
    if fields_out is not None:
        fields_out.write_text(to_toml(job.plans), "utf-8")
        reporter.say(f"{fields_out}: what was found, to correct and give back with --fields")
    if dry:
        if as_json:
            print_json([dict(zip(TABLE, row, strict=True)) for row in field_table(job)])
        return
    dataset = run_plan(job, out, engine=engine, replace=replace, reporter=reporter)
    if as_json:
        print_json(summary(dataset))


def summary(dataset: Dataset) -> dict[str, Any]:
    """Return what --json prints about a Dataset."""
    kept = ("name", "rows", "positives", "negative_rate")
    return {
        "path": str(dataset.path),
        "rows": dataset.rows,
        "fingerprint": dataset.fingerprint,
        "days": [{name: getattr(day, name) for name in kept} for day in dataset.table],
        "fields": dataset.schema.to_json()["fields"],
        "dropped": dataset.settings.get("dropped", {}),
        "ignored": dataset.settings.get("ignored", {}),
    }


@cli.command(
    help=SIMULATE,
    short_help="Make a click log with a known truth.",
    examples=[
        "lpfs simulate --preset small --out data/small",
        "lpfs simulate --preset terabyte --rows 2000000 --format csv --out raw",
    ],
)
@log("--preset", default="small", show_default=True, type=SuggestingChoice(WORLDS), help="What kind of log.")
@log("--rows", type=int, help="How many rows in all; each preset has its own default.")
@log("--days", type=int, help="How many days; each preset has its own default.")
@log("--seed", type=int, default=0, show_default=True, help="Decides everything.")
@output("--out", required=True, type=PATH, help="Folder to make.")
@output(
    "--format",
    type=SuggestingChoice(("dataset", "csv", "parquet")),
    default="dataset",
    show_default=True,
    help="What to write.",
)
@output("--replace", is_flag=True, help="Put the new log in the place of an older one.")
@OUTPUT_OPTIONS
def simulate(out: Path, quiet: bool, as_json: bool, **given: Any) -> None:
    """Make a click log with a known truth."""
    from lpfs.data.dataset import Dataset
    from lpfs.data.progress import Reporter
    from lpfs.data.simulate import simulate as make

    reporter = Reporter(quiet=quiet)
    with reporter.counting("simulating") as told:
        made = make(out, progress=told, **given)
    if isinstance(made, Dataset):
        reporter.say(f"{made}; the truth is in {out / 'truth.json'}")
        values = summary(made)
    else:
        reporter.say(f"{out}: {len(made)} files; the truth is in {out / 'truth.json'}")
        values = {"path": str(out), "files": [str(path) for path in made]}
    if as_json:
        print_json({**values, "truth": str(out / "truth.json")})
