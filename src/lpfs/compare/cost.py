"""What a piece of work costs: seconds, and how far memory rose above where it began."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc(5): the peak of the resident memory begins anew


@dataclass
class Cost:
    """Seconds and bytes; None where this machine cannot tell."""

    seconds: float | None = None
    memory: int | None = None


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """Measure what is done in this block; the result is there when it ends.

    On a GPU memory is what torch allocated there; elsewhere it is the resident memory of the process, on Linux.
    """
    cost = Cost()
    gc.collect()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before: int | None = torch.cuda.memory_allocated(device)
    else:
        before = _begin()
    begin = time.perf_counter()
    yield cost
    if on_gpu:
        torch.cuda.synchronize(device)
    cost.seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else _resident("VmHWM")
    if before is not None and peak is not None:
        cost.memory = max(0, peak - before)


def _begin() -> int | None:
    """Hand unused memory back, let the peak begin anew, and return what is resident."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    try:
        CLEAR.write_text(RESET_PEAK)
    except OSError:
        return None
    return _resident("VmRSS")


def _resident(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(found[0]) * 1024 if found else None
