"""What all commands share: the group, help in sections with examples, suggestions for mistyped words, JSON.

Commands that torchrun starts in several processes at once.

    torchrun --nproc-per-node 4 --max-restarts 3 -m lpfs select clicks.parquet --label click --keep 20 --out run

``select``, ``train``, ``search`` and ``compare`` share the work; any other command is done by rank 0 alone.
"""

from __future__ import annotations

import difflib
import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import click

import lpfs
from lpfs.errors import LpfsError
from lpfs.train.distributed import is_distributed_launch, launch_rank, restart_count

# the commands, in sections of lpfs --help and in the order in which they are used
SECTIONS = {
    "The whole job": ("select", "compare", "report"),
    "Data": ("prepare", "simulate"),
    "Its stages, one at a time": ("train", "search", "prune", "evaluate", "export"),
    "The paper": ("reproduce",),
    "About": ("methods", "doctor", "completion"),
}
ORDER = tuple(name for names in SECTIONS.values() for name in names)
EXAMPLES = (
    "lpfs select clicks.parquet --label click --time day --keep 20 --out run",
    "lpfs select --help",
    'eval "$(lpfs completion bash)"       # the tab key completes commands, options and what they take',
)


class Option(click.Option):
    """An option that stands in a section of --help."""

    def __init__(self, *names: Any, section: str = "Options", **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.section = section


class Command(click.Command):
    """A command whose --help has its options in sections and ends with examples."""

    def __init__(self, *names: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        for title, records in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the options and what they do, by section."""
        found: dict[str, list[tuple[str, str]]] = {}
        for each in self.get_params(ctx):
            record = each.get_help_record(ctx)
            if isinstance(each, click.Option) and record is not None:
                found.setdefault(getattr(each, "section", "Output"), []).append(record)
        return found

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, as they are typed."""
        if self.examples:
            with formatter.section("Examples"):
                write_examples(formatter, self.examples)


class Group(click.Group):
    """Commands; a mistyped one gets the nearest suggested."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they are used."""
        return sorted(self.commands, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, section by section."""
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                records = [(name.ljust(width), self.commands[name].get_short_help_str()) for name in names]
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write some examples."""
        with formatter.section("Examples"):
            write_examples(formatter, EXAMPLES)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or fail with a suggestion."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            ctx.fail(f"No such command {args[0]!r}.{near(args[0], names)} There are {', '.join(names)}.")
        return super().resolve_command(ctx, args)


class SuggestingChoice(click.Choice[str]):
    """One of some words; another one gets the nearest suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the word, or fail with a suggestion."""
        if value not in self.choices:
            hint = near(str(value), self.choices)
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}.{hint}", param, ctx)
        return str(value)


def write_examples(formatter: click.HelpFormatter, examples: Iterable[str]) -> None:
    """Write examples as they are typed, a line each."""
    for each in examples:
        formatter.write(f"{'':>{formatter.current_indent}}{each}\n")


def near(word: str, words: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" where something is near."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f" Did you mean {found[0]!r}?" if found else ""


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lpfs.__version__, prog_name="lpfs")
def cli() -> None:
    """Find the feature fields that a CTR model really needs.

    Begin with "lpfs select"; each of its stages also runs alone. "lpfs COMMAND --help" tells more.

    Exit codes: 0 done, 1 an error, 2 wrong usage, 130 interrupted.
    """


def print_json(values: Any) -> None:
    """Print JSON."""
    click.echo(json.dumps(values, indent=1, ensure_ascii=False))


@contextmanager
def resume_hint(command: str) -> Iterator[None]:
    """Within this block, say on Ctrl-C which command goes on from there."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort(f"go on from here: {command}") from None


DISTRIBUTED_COMMANDS = ("select", "train", "search", "compare")


@contextmanager
def distributed_command(arguments: Sequence[str]) -> Iterator[bool]:
    """Within this block this process works with those beside it; say whether it has anything to do."""
    if not is_distributed_launch():
        yield True
    elif not {"-h", "--help"}.isdisjoint(arguments) or not arguments or arguments[0] not in DISTRIBUTED_COMMANDS:
        yield launch_rank() == 0
    else:
        from lpfs.train.distributed.group import joined

        with joined() as ranks:
            if ranks.is_leader:
                yield True
                return
            with redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rank 0 says it
                yield True


def reported_elsewhere(error: LpfsError) -> bool:
    """Whether another process has told this error already."""
    if not is_distributed_launch():
        return False
    from lpfs.train.distributed.group import ReportedElsewhereError

    return isinstance(error, ReportedElsewhereError)


def resume_after_restart(resume: bool, replace: bool) -> tuple[bool, bool]:
    """Return whether to go on with a run, and whether to replace it: torchrun's second try goes on."""
    if not restart_count():
        return resume, replace
    if launch_rank() == 0:
        print("lpfs: torchrun has started again: going on from the last checkpoint", file=sys.stderr)
    return True, False
