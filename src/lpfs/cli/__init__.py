"""The ``lpfs`` command: one file per group of commands. Heavy packages are imported inside the commands.

Exit codes: 0 done, 1 error (printed in one line), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

try:
    import click
except ImportError:  # the library works without it
    sys.exit("lpfs: the command line needs click; install it with: pip install click")

from lpfs.cli import compare, data, info, models, select
from lpfs.cli.app import cli, distributed_command, reported_elsewhere
from lpfs.errors import LpfsError
from lpfs.train.distributed import launch_rank

__all__ = ["cli", "compare", "data", "info", "main", "models", "run", "select"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code; SIGTERM cleans up like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Errors are printed in one line, without a traceback."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with distributed_command(words) as has_work:
            code = cli.main(words, prog_name="lpfs", standalone_mode=False) if has_work else 0
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "lpfs"
        text = error.format_message()
        dot = "" if text.endswith((".", "?", "?)")) else "."
        return fail(f"{text}{dot} See: {command} --help", error.exit_code, on_all_ranks=False)
    except click.ClickException as error:
        return fail(error.format_message(), error.exit_code, on_all_ranks=False)
    except (click.Abort, KeyboardInterrupt) as stop:
        return fail(f"interrupted; {stop.args[0] if stop.args else 'no files were written'}", 130)
    except LpfsError as error:
        return 1 if reported_elsewhere(error) else fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        hint = "; free some space or choose another directory" if error.errno == errno.ENOSPC else ""
        return fail(f"{name}{error.strerror or error}{hint}")
    except MemoryError:
        return fail("out of memory; limit the vocabularies (--max-values), or hash values (--hash)")


def fail(message: str, code: int = 1, *, on_all_ranks: bool = True) -> int:
    """Print an error as one line, in red on a terminal unless NO_COLOR is set; return the exit code."""
    rank = launch_rank()
    if rank == 0 or on_all_ranks:
        start = f"lpfs: error: rank {rank}:" if rank else "lpfs: error:"
        use_color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
        click.echo(f"{click.style(start, fg='red') if use_color else start} {' '.join(message.split())}", err=True)
    return code
