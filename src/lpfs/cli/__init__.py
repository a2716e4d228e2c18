"""The ``lpfs`` command: one file per group of commands. Heavy packages are imported inside the commands.

Exit codes: 0 done, 1 error (printed in one line), 2 wrong usage, 3 select has written its results but no set of fields
holds the allowed loss of AUC, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

try:
    import click
except ImportError:  # the library works without it
    sys.exit("lpfs: the command line needs click; install it with: pip install click")

from lpfs._console import escape_all_output, print_error
from lpfs._text import escape_unprintable
from lpfs.cli import compare, data, info, models, online, select, serve
from lpfs.cli.app import EXIT_ALLOWANCE, cli, distributed_command, reported_elsewhere
from lpfs.errors import LpfsError
from lpfs.train.distributed import launch_rank

__all__ = ["EXIT_ALLOWANCE", "cli", "compare", "data", "info", "main", "models", "online", "run", "select", "serve"]


AGAIN_SECONDS = 0.05  # after an interrupt that a destructor swallowed, until it is repeated
BLOCKED_SECONDS = 2.0  # after SIGTERM, until a main thread that does not return to Python is ended
_terminated = threading.Event()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code; SIGTERM cleans up like Ctrl-C."""
    escape_all_output()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, _raise_once)
    sys.unraisablehook = _interrupt_again
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_if_blocked, args=(reader,), daemon=True).start()
    try:
        code = run(arguments)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(code)


def _raise_once(*_: object) -> None:
    """Raise KeyboardInterrupt at the first SIGTERM; a second one does not interrupt the cleaning up."""
    if not _terminated.is_set():
        _terminated.set()
        raise KeyboardInterrupt


def _interrupt_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Repeat an interrupt that came while a destructor ran, where Python cannot raise it.

    After SIGTERM other errors of destructors are not printed: the interrupted constructors of their objects cause them.
    """
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        number = signal.SIGTERM if _terminated.is_set() else signal.SIGINT  # the latter may be ignored
        _terminated.clear()
        threading.Timer(AGAIN_SECONDS, _thread.interrupt_main, [number]).start()
    elif not _terminated.is_set():
        sys.__unraisablehook__(unraisable)


def _end_if_blocked(reader: int) -> None:
    """End the process after a SIGTERM that the main thread does not handle, because it blocks outside Python."""
    while os.read(reader, 1) != bytes([signal.SIGTERM]):
        pass
    if not _terminated.wait(BLOCKED_SECONDS):
        fail("interrupted; a call that does not return was ended")
        os._exit(128 + signal.SIGTERM)


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
        code = 128 + (signal.SIGTERM if _terminated.is_set() else signal.SIGINT)
        return fail(f"interrupted; {stop.args[0] if stop.args else 'no files were written'}", code)
    except LpfsError as error:
        return 1 if reported_elsewhere(error) else fail(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        name = f"{escape_unprintable(str(error.filename))}: " if error.filename else ""
        hint = "; free some space or choose another directory" if error.errno == errno.ENOSPC else ""
        return fail(f"{name}{error.strerror or error}{hint}")
    except MemoryError:
        return fail("out of memory; limit the vocabularies (--max-values), or hash values (--hash)")
    except Exception as error:
        if not _terminated.is_set():
            raise
        return fail(f"interrupted; {type(error).__name__}: {error}", 128 + signal.SIGTERM)


def fail(message: str, code: int = 1, *, on_all_ranks: bool = True) -> int:
    """Print an error as one line and return the exit code."""
    rank = launch_rank()
    if rank == 0 or on_all_ranks:
        print_error(f"lpfs: error: rank {rank}:" if rank else "lpfs: error:", message)
    return code
