"""prepare and simulate: write a Dataset from a log, or a simulated log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lpfs.cli import options as opt
from lpfs.cli.app import cli, print_json

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset

# Copies of names whose modules import torch; a test compares them with the originals.
ENGINES = ("embedded", "spark")
SIMULATED_PRESETS = ("small", "terabyte", "industrial", "industrial-small", "catalog", "turnover")

PREPARE_HELP = """Convert the click log SOURCE to a Dataset.

SOURCE is a CSV, TSV or Parquet file (.gz and .zst too), a directory or a pattern of them, or several files.
The kinds of the columns are inferred and printed; correct them with --kind or --fields.
--dry-run examines a table first: label values, days, missing values, odd columns, each with the option to add.
"""
SIMULATE_HELP = """Write a simulated click log whose relevant fields are known; they are saved in truth.json.

With --stream, write segments for "lpfs online" instead: the field "dies" predicts clicks until event T1, the field
"wakes" from event T2 on, and from event T3 on more and more values of the field "drifts" are new; see schedule.json.
"""

log_option, stream_option = opt.section("Log"), opt.section("Stream")


@cli.command(
    help=PREPARE_HELP,
    short_help="Convert a click log to a Dataset.",
    examples=[
        "lpfs prepare log.csv --label click --time timestamp --out data/log",
        "lpfs prepare new.parquet --like data/log --out data/new",
        "lpfs prepare day_* --preset criteo-terabyte --negatives 0.125 --out data/terabyte",
        "lpfs prepare s3://logs/day_* --preset criteo-terabyte --engine spark --out s3://data/terabyte",
    ],
)
@click.argument("source", nargs=-1, required=True, type=opt.FILES)
@opt.TABLE
@opt.DAYS
@opt.days("--ordered", is_flag=True, help="Require rows in time order; fail if they are not.")
@opt.days("--shuffle", is_flag=True, help="Split the rows into days at random; not with a time column.")
@opt.days("--train", type=int, help="Number of first days that vocabularies are built from (all but the last).")
@opt.days("--seed", type=int, help="Seed of --negatives and --shuffle.")
@opt.ENCODING
@opt.encoding("--like", type=opt.PATH, help="Encode like this Dataset; no vocabularies are built.")
@opt.encoding("--only", "fields_only", multiple=True, help="With --like: use only this field; repeatable.")
@opt.encoding("--write-fields", type=opt.PATH, help="Write the inferred fields as TOML.")
@opt.output("--out", type=opt.PATH, help="Directory to write.")
@opt.output("--dry-run", is_flag=True, help="Examine the table: labels, days, columns; write no Dataset.")
@opt.output("--replace", is_flag=True, help="Replace another Dataset.")
@opt.output("--engine", choices=ENGINES, default="embedded", help="What reads the log.")
@opt.OUTPUT_OPTIONS
def prepare(source: tuple[str, ...], quiet: bool, as_json: bool, **options: Any) -> None:
    """Convert a click log to a Dataset."""
    from lpfs._console import Console
    from lpfs._text import quote_command
    from lpfs.data.diagnose import diagnose
    from lpfs.data.fields import to_toml
    from lpfs.data.planning import TABLE, field_table, field_table_compact
    from lpfs.data.prepare import plan_source, run_plan

    console = Console(quiet=quiet)
    out, replace, dry_run = options.pop("out"), options.pop("replace"), options.pop("dry_run")
    fields_out, engine = options.pop("write_fields"), options.pop("engine")
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out': the directory to write.")
    plan = plan_source(list(source), **opt.prepare_options(options))
    if fields_out is not None:
        fields_out.write_text(to_toml(plan.plans), "utf-8")
        use = quote_command("--fields", fields_out)
        console.message(f"{fields_out}: the inferred fields; edit them and pass them with {use}")
    if dry_run:
        diagnosis = diagnose(plan, console)
        console.table(plan.title, *field_table_compact(diagnosis.plan), numeric=False)
        diagnosis.report(console)
        if as_json:
            print_json(diagnosis.to_json([dict(zip(TABLE, row, strict=True)) for row in field_table(diagnosis.plan)]))
        return
    dataset = run_plan(plan, out, engine=engine, replace=replace, console=console)
    if as_json:
        print_json(dataset_summary(dataset))


def dataset_summary(dataset: Dataset) -> dict[str, Any]:
    """Return what --json prints about a Dataset."""
    names = ("name", "rows", "positives", "negative_rate")
    return {
        "path": str(dataset.path),
        "rows": dataset.rows,
        "fingerprint": dataset.fingerprint,
        "days": [{name: getattr(day, name) for name in names} for day in dataset.table],
        "fields": dataset.schema.to_json()["fields"],
        "dropped": dataset.settings.get("dropped", {}),
        "ignored": dataset.settings.get("ignored", {}),
    }


@cli.command(
    help=SIMULATE_HELP,
    short_help="Simulate a click log with known relevant fields.",
    examples=[
        "lpfs simulate --preset small --out data/small",
        "lpfs simulate --preset terabyte --rows 2000000 --format csv --out raw",
        "lpfs simulate --stream --rows 1000000 --rate 20000 --out segments",
    ],
)
@log_option("--preset", choices=SIMULATED_PRESETS, default="small", help="Kind of log.")
@log_option("--rows", type=int, help="Total number of rows. Default: that of the preset.")
@log_option("--days", type=int, help="Number of days. Default: that of the preset.")
@log_option("--seed", type=int, default=0, help="Seed of all random numbers.")
@stream_option("--stream", is_flag=True, help="Write segments of a stream.")
@stream_option("--first", type=int, default=0, help="Number of the first event; a stream can be continued.")
@stream_option("--segment", type=int, default=10_000, help="Events per segment.")
@stream_option("--rate", type=float, help="Events per second. Default: as fast as possible.")
@stream_option("--events", metavar="T1,T2,T3", help="Events at which the fields change.  [default: 40, 70, 50 %]")
@stream_option("--fields", type=int, default=40, help="Number of fields.")
@opt.output("--out", required=True, type=opt.PATH, help="Directory to write.")
@opt.output("--format", choices=("dataset", "csv", "parquet", "jsonl"), help="Format to write.")
@opt.output("--replace", is_flag=True, help="Replace an older log.")
@opt.OUTPUT_OPTIONS
def simulate(out: Path, quiet: bool, as_json: bool, **options: Any) -> None:
    """Simulate a click log."""
    stream = {name: options.pop(name) for name in ("stream", "first", "segment", "rate", "events", "fields")}
    if stream.pop("stream"):
        _simulate_stream(out, quiet, as_json, stream, options)
        return
    options["format"] = options["format"] or "dataset"
    from lpfs._console import Console
    from lpfs.data.dataset import Dataset
    from lpfs.data.simulate import simulate as run

    console, truth = Console(quiet=quiet), out / "truth.json"
    with console.progress("simulating") as update:
        result = run(out, progress=update, **options)
    if isinstance(result, Dataset):
        console.message(f"{result}; the truth is in {truth}")
        values = dataset_summary(result)
    else:
        console.message(f"{out}: {len(result)} files; the truth is in {truth}")
        values = {"path": str(out), "files": [str(path) for path in result]}
    if as_json:
        print_json({**values, "truth": str(truth)})


def _simulate_stream(out: Path, quiet: bool, as_json: bool, stream: dict[str, Any], options: dict[str, Any]) -> None:
    """Write segments with a known schedule."""
    from lpfs._console import Console
    from lpfs.data.simulate_stream import SCHEDULE, StreamSpec, write_stream

    rows, texts = options["rows"] or 1_000_000, (stream.pop("events") or "").split(",")
    total = stream["first"] + rows
    times = [int(total * share) for share in (0.4, 0.7, 0.5)]
    if texts != [""]:
        if len(texts) != 3 or not all(text.strip().isdigit() for text in texts):
            raise click.UsageError("--events needs three numbers: T1,T2,T3.")
        times = [int(text) for text in texts]
    spec = StreamSpec(stream.pop("fields"), dies=times[0], wakes=times[1], drifts=times[2], seed=options["seed"])
    write_stream(out, spec, events=rows, format=options["format"] or "parquet", **stream)
    Console(quiet=quiet).message(f"{out}: {rows:,} events; the schedule is in {out / SCHEDULE}")
    if as_json:
        print_json({"path": str(out), "rows": rows, "dies": times[0], "wakes": times[1], "drifts": times[2]})
