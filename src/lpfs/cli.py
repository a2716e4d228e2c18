"""The ``lpfs`` command.

Exit codes: 0 done, 1 an error (told in one or two lines), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

try:
    import click
except ImportError:  # the library works without it
    sys.exit("lpfs: the command line needs click; install: pip install click")

import lpfs
from lpfs.errors import LpfsError

if TYPE_CHECKING:
    from lpfs.data.dataset import Dataset

PRESETS = ("criteo-terabyte", "criteo-kaggle", "avazu")
WORLDS = ("small", "terabyte", "industrial", "industrial-small")


class Near(click.Choice[str]):
    """One of some words; another one gets the nearest suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word, or fail with a suggestion."""
        if value not in self.choices:
            near = difflib.get_close_matches(str(value), list(self.choices), 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}.{hint}", param, ctx)
        return str(value)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lpfs.__version__, prog_name="lpfs")
def cli() -> None:
    """Find the feature fields that a CTR model really needs.

    Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
    """


PREPARE = """Turn the click log SOURCE into a Dataset.

SOURCE is a CSV, TSV or Parquet file (.gz and .zst too), a folder or a pattern of them, or several files.
The kinds of the columns are found and printed; correct them with --fields.

\b
lpfs prepare log.csv --label click --time timestamp --out data/log
lpfs prepare new.parquet --like data/log --out data/new
lpfs prepare day_* --preset criteo-terabyte --negatives 0.125 --out data/terabyte
"""
SIMULATE = """Make a click log whose truth is known and saved beside it in truth.json.

\b
lpfs simulate --preset small --out data/small
lpfs simulate --preset terabyte --rows 2000000 --format csv --out raw
"""

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")


@cli.command(help=PREPARE, short_help="Turn a click log into a Dataset.")
@click.argument("source", nargs=-1, required=True)
@click.option("--out", type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--label", help="Column of the clicks, 0 or 1.")
@click.option("--task", "tasks", multiple=True, help="Column of a further label; may be repeated.")
@click.option("--positive", help="Label value that counts as 1, where it is not 0 and 1.")
@click.option("--preset", type=Near(PRESETS), help="A log whose layout is known: " + ", ".join(PRESETS) + ".")
@click.option("--like", type=click.Path(path_type=Path), help="Encode as this Dataset; nothing is learned.")
@click.option("--only", "fields_only", multiple=True, help="With --like: only this field; may be repeated.")
@click.option("--fields", type=click.Path(path_type=Path), help="TOML file that corrects what is found.")
@click.option("--write-fields", type=click.Path(path_type=Path), help="Write what is found as TOML.")
@click.option("--dry-run", is_flag=True, help="Show what would happen to each column; write no Dataset.")
@click.option("--time", help="Column that orders the rows: dates, timestamps or day numbers.")
@click.option("--time-format", help="How it is written, for example %y%m%d%H; found when not given.")
@click.option("--ordered", is_flag=True, help="Rows are promised to be in time order: stop if they are not.")
@click.option("--parts", help="Cut the row order into so many days (10), or 'files': one a file.")
@click.option("--shuffle", is_flag=True, help="Deal the rows to those days at random; not with a time.")
@click.option("--split", help="Column of the words train, valid, test: days of train rows, then valid, then test.")
@click.option("--train", type=int, help="So many first days give the vocabularies (all but the last).")
@click.option("--negatives", type=float, help="Share of the negatives to keep, as 0.125; is stored.")
@click.option("--seed", type=int, help="Seed of that choice, and of --shuffle.")
@click.option("--min-count", type=int, help="Rarer values share the id of unseen ones.")
@click.option("--max-values", type=int, help="Keep so many of the most frequent values of a field.")
@click.option("--hash", type=int, help="Hash values modulo this range instead of keeping vocabularies.")
@click.option("--bins", type=int, help="Cut numeric columns into so many quantile bins.")
@click.option("--separator", help="Of a text table; found when not given. \\t is a tab.")
@click.option("--no-header", is_flag=True, help="Text tables do not name their columns: column_1, column_2 …")
@click.option("--missing", multiple=True, help="Text that means a missing value, as '?'; may be repeated.")
@click.option("--keep-all", is_flag=True, help="Keep constant and duplicate columns.")
@click.option("--replace", is_flag=True, help="Put the result in the place of another Dataset.")
@quiet_option
@json_option
def prepare(source: tuple[str, ...], quiet: bool, as_json: bool, **given: Any) -> None:
    """Turn a click log into a Dataset."""
    from lpfs.data.plan.table import TABLE, printed, table
    from lpfs.data.plan.toml import to_toml
    from lpfs.data.prepare import make_job, run
    from lpfs.data.progress import Reporter

    reporter = Reporter(quiet=quiet)
    out, replace, dry = given.pop("out"), given.pop("replace"), given.pop("dry_run")
    fields_out = given.pop("write_fields")
    if out is None and not dry:
        raise click.UsageError("Missing option '--out': the folder to make.")
    options = {
        name: value for name, value in given.items() if value is not None and value is not False and value != ()
    }
    if options.pop("no_header", False):
        options["header"] = False
    if "separator" in options:
        options["separator"] = options["separator"].replace("\\t", "\t")
    if options.get("parts", "files") != "files":
        options["parts"] = whole(options["parts"])
    job = make_job(list(source), **options)
    reporter.table(job.title, *printed(job))
    if fields_out is not None:
        fields_out.write_text(to_toml(job.plans), "utf-8")
        reporter.say(f"{fields_out}: what was found, to correct and give back with --fields")
    if dry:
        if as_json:
            show([dict(zip(TABLE, row, strict=True)) for row in table(job)])
        return
    dataset = run(job, out, replace=replace, reporter=reporter)
    if as_json:
        show(summary(dataset))


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


@cli.command(help=SIMULATE, short_help="Make a click log with a known truth.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder to make.")
@click.option("--preset", default="small", show_default=True, type=Near(WORLDS), help="What kind of log.")
@click.option("--rows", type=int, help="How many rows in all; each preset has its own default.")
@click.option("--days", type=int, help="How many days; each preset has its own default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides everything.")
@click.option(
    "--format",
    type=Near(("dataset", "csv", "parquet")),
    default="dataset",
    show_default=True,
    help="What to write.",
)
@click.option("--replace", is_flag=True, help="Put the new log in the place of an older one.")
@quiet_option
@json_option
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
        show({**values, "truth": str(out / "truth.json")})


def whole(text: str) -> int:
    """Return --parts as a number."""
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is neither a whole number nor 'files'", param_hint="--parts") from None


def show(values: Any) -> None:
    """Print JSON."""
    click.echo(json.dumps(values, indent=1, ensure_ascii=False))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code; a request to end cleans up as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(call(arguments))


def call(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code. Errors take one or two lines, never a traceback."""
    try:
        code = cli.main(None if arguments is None else list(arguments), prog_name="lpfs", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return fail("interrupted; nothing was kept", 130)
    except LpfsError as error:
        return fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        hint = "; free some space or choose another place" if error.errno == errno.ENOSPC else ""
        return fail(f"{name}{error.strerror or error}{hint}")
    except MemoryError:
        return fail("out of memory; cap the vocabularies (--max-values), or hash (--hash)")


def fail(message: str, code: int = 1) -> int:
    """Print an error as one line, in red on a terminal unless NO_COLOR is set."""
    message = " ".join(message.split())
    start = "lpfs: error:"
    coloured = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    click.echo(f"{click.style(start, fg='red') if coloured else start} {message}", err=True)
    return code
