"""Kill a process right before one of its operations on files."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def killed_at(number: int, directory: Path, function: Callable[[], object]) -> bool:
    """Run a function in a process that is killed before its n-th operation below a directory; return whether it was."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    signal.alarm(60)  # if the child of a process with threads hangs, it ends by another signal
    left = number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in FILE_EVENTS and str(directory) in str(arguments[0]):
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)

    code = 1
    try:
        sys.addaudithook(hook)
        function()
        code = 0
    finally:
        os._exit(code)
