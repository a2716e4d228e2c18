"""Commands that torchrun starts in several processes at once.

    torchrun --nproc-per-node 4 --max-restarts 3 -m lpfs select clicks.parquet --label click --keep 20 --out run

``select``, ``train``, ``search`` and ``compare`` share the work; any other command is done by rank 0 alone.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from lpfs.errors import LpfsError
from lpfs.train.launched import launched, launched_rank, restarts

SHARED = ("select", "train", "search", "compare")


@contextmanager
def beside_others(arguments: Sequence[str]) -> Iterator[bool]:
    """Within this block this process works with those beside it; say whether it has anything to do."""
    if not launched():
        yield True
    elif not {"-h", "--help"}.isdisjoint(arguments) or not arguments or arguments[0] not in SHARED:
        yield launched_rank() == 0
    else:
        from lpfs.train.joined import joined

        with joined() as ranks:
            if ranks.leads:
                yield True
                return
            with redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rank 0 says it
                yield True


def told_by_another(error: LpfsError) -> bool:
    """Whether another process has told this error already."""
    if not launched():
        return False
    from lpfs.train.joined import ToldError

    return isinstance(error, ToldError)


def going_again(resume: bool, replace: bool) -> tuple[bool, bool]:
    """Return whether to go on with a run, and whether to replace it: torchrun's second try goes on."""
    if not restarts():
        return resume, replace
    if launched_rank() == 0:
        print("lpfs: torchrun has started again: going on from the last checkpoint", file=sys.stderr)
    return True, False
