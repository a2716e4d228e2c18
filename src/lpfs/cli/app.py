"""What all commands share: the group, help texts with sections and examples, suggestions, JSON, torchrun.

    torchrun --nproc-per-node 4 --max-restarts 3 -m lpfs select clicks.parquet --label click --keep 20 --out run

``select``, ``train``, ``search`` and ``compare`` share the work between processes; rank 0 runs any other command.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import click

import lpfs
from lpfs import _console
from lpfs._console import Console, print_lines
from lpfs._text import quote_command
from lpfs._validation import did_you_mean
from lpfs.errors import LpfsError
from lpfs.train.distributed import is_distributed_launch, launch_rank, restart_count

# commands by section of lpfs --help, in the order in which they are used
SECTIONS = {
    "Complete runs": ("select", "compare", "report"),
    "Data": ("prepare", "simulate"),
    "Single stages": ("train", "search", "prune", "evaluate", "export"),
    "The paper": ("reproduce",),
    "Online": ("online", "serve"),
    "Information": ("methods", "doctor", "completion"),
}
ORDER = tuple(name for names in SECTIONS.values() for name in names)
EXAMPLES = (
    "lpfs select clicks.parquet --label click --time day --keep 20 --out run",
    "lpfs select --help",
    'eval "$(lpfs completion bash)"       # complete commands, options and their values with the tab key',
)
EXIT_ALLOWANCE = 3  # exit code of select if no set of fields holds the allowed loss of AUC
STASH_DIRS = (".moving", ".replaced")  # of lpfs.pipeline.run_dir, which imports torch; a test compares them
DISTRIBUTED_COMMANDS = ("select", "train", "search", "compare")


class Option(click.Option):
    """An option in a section of --help; ``choices`` are its values, if they are words."""

    def __init__(self, *names: Any, section: str, choices: Iterable[str] = (), **attributes: Any) -> None:
        if choices:
            attributes["type"] = SuggestingChoice(choices)
        super().__init__(*names, **{"show_default": True, **attributes})
        self.section = section


class Command(click.Command):
    """A command whose --help has its options in sections and ends with examples."""

    def __init__(self, *names: Any, examples: Sequence[str], **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, records in self.sections(ctx).items():
            with formatter.section(title):
                formatter.write_dl(records)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return section -> (option, help text)."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if isinstance(parameter, click.Option) and record is not None:
                sections.setdefault(getattr(parameter, "section", "Output"), []).append(record)
        return sections

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, self.examples)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; first restore runs that it is given and whose replacement was killed."""
        for value in ctx.params.values():
            for path in value if isinstance(value, tuple) else (value,):
                if isinstance(path, str | Path):
                    restore_killed_run(Path(path))
        return super().invoke(ctx)


class Group(click.Group):
    """The commands; for an unknown one the nearest is suggested."""

    command_class = Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(ORDER)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str()) for name in names])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_examples(formatter, EXAMPLES)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command, or fail with a suggestion."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            names = self.list_commands(ctx)
            ctx.fail(f"no command {args[0]!r}{did_you_mean(args[0], names)}; choose from {', '.join(names)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click would print an empty line for an interrupt."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None


class SuggestingChoice(click.Choice[str]):
    """One of some words; for another one the nearest is suggested."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            hint = did_you_mean(str(value), self.choices)
            self.fail(f"{value!r} is not one of {', '.join(self.choices)}{hint}", param, ctx)
        return str(value)


def restore_killed_run(run_dir: Path) -> None:
    """Restore the older run in a directory if ``--replace`` was killed there, and say so."""
    with suppress(OSError, ValueError):  # not the path of a directory
        if any((run_dir / name).is_dir() for name in STASH_DIRS):
            from lpfs.pipeline.run_dir import recover_run

            recover_run(run_dir, Console().message)


def write_examples(formatter: click.HelpFormatter, examples: Iterable[str]) -> None:
    """Write the section of examples, one line each, without wrapping."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(lpfs.__version__, prog_name="lpfs")
def cli() -> None:
    """Find the feature fields that a CTR model needs.

    Start with "lpfs select"; each of its stages is also a command. See "lpfs COMMAND --help".

    Exit codes: 0 done, 1 error, 2 wrong usage, 3 allowed loss of AUC not met, 130 interrupted, 143 terminated.
    """


def print_json(values: Any) -> None:
    """Print JSON on standard output."""
    from lpfs._fileio import plain_value

    _console.print_json(values, plain_value)


@contextmanager
def resume_hint(*command: str | Path) -> Iterator[None]:
    """On Ctrl-C in the block, print the command that continues the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort(f"continue with: {quote_command(*command)}") from None


@contextmanager
def distributed_command(arguments: Sequence[str]) -> Iterator[bool]:
    """Join the processes that torchrun started while the block runs; yield whether this process has work to do."""
    if not is_distributed_launch():
        yield True
    elif not {"-h", "--help"}.isdisjoint(arguments) or not arguments or arguments[0] not in DISTRIBUTED_COMMANDS:
        yield launch_rank() == 0
    else:
        from lpfs.train.distributed.group import joined

        with joined() as group, ExitStack() as stack:
            if not group.is_leader:  # rank 0 prints everything
                stack.enter_context(redirect_stdout(io.StringIO()))
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
            yield True


def reported_elsewhere(error: LpfsError) -> bool:
    """Return whether another process has reported this error already."""
    if not is_distributed_launch():
        return False
    from lpfs.train.distributed.group import ReportedElsewhereError

    return isinstance(error, ReportedElsewhereError)


def resume_after_restart(resume: bool, replace: bool) -> tuple[bool, bool]:
    """Return whether to resume a run and whether to replace it; after a restart by torchrun it is resumed."""
    if not restart_count():
        return resume, replace
    if launch_rank() == 0:
        print_lines("lpfs: restarted by torchrun; resuming from the last checkpoint", stream=sys.stderr)
    return True, False
