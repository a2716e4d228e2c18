"""The launch environment that torchrun sets; importing this module does not import torch."""

from __future__ import annotations

import os


def is_distributed_launch() -> bool:
    """Return whether torchrun, or a similar launcher, started several processes."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launch_rank() -> int:
    """Return the rank of this process; 0 for a single process."""
    return int(os.environ["RANK"]) if is_distributed_launch() else 0


def restart_count() -> int:
    """Return how often torchrun has restarted the processes after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if is_distributed_launch() else 0
