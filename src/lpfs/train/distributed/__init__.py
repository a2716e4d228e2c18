"""How this process was started, as torchrun tells it; torch itself is not needed to know."""

from __future__ import annotations

import os


def is_distributed_launch() -> bool:
    """Whether torchrun, or something like it, started this process beside others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch_rank() -> int:
    """Return which of these processes this is; 0 where it is the only one."""
    return int(os.environ["RANK"]) if is_distributed_launch() else 0


def restart_count() -> int:
    """Return how often torchrun has started these processes again, after some that failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_distributed_launch() else 0
