"""The number of CPU threads: fewer than torch's default where other work holds the cores.

Threads of OpenMP wait for each other after every operation. If one of them gets no core, the others wait for its
turn, and a step takes a hundred times as long as on one thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by the user, or by torchrun
SECONDS = 0.05  # of a measurement
MIN_REPEATS = 3
MIN_GAIN = 1.5  # factor by which fewer threads must be faster
STEP_SHAPE = (512, 256, 128)  # rows, inputs and outputs of the layer that is measured

_default: list[int] = []  # number of threads before the first choice, and the one that was chosen


def seconds_per_step(threads: int) -> float:
    """Return the mean seconds of a small training step on this many threads."""
    rows, inputs, outputs = STEP_SHAPE
    data, weight = torch.ones(rows, inputs), torch.ones(inputs, outputs, requires_grad=True)
    torch.set_num_threads(threads)
    (data @ weight).relu().sum().backward()  # starts the threads
    start, repeats = time.perf_counter(), 0
    while repeats < MIN_REPEATS or time.perf_counter() - start < SECONDS:
        (data @ weight).relu().sum().backward()
        repeats += 1
    return (time.perf_counter() - start) / repeats


def fastest_threads(maximum: int, measure: Callable[[int], float] = seconds_per_step) -> int:
    """Return the number of threads to use: ``maximum``, or half as many as long as that is much faster.

    >>> fastest_threads(8, {8: 1.0, 4: 0.1, 2: 0.01, 1: 0.02}.__getitem__)
    2
    """
    best, threads = maximum, maximum // 2
    seconds = measure(maximum) if maximum > 1 else 0.0
    while threads >= 1:
        fewer = measure(threads)
        if fewer * MIN_GAIN < seconds:
            best, seconds = threads, fewer
        elif fewer > seconds:
            break
        threads //= 2
    return best


def choose_threads() -> None:
    """Set torch's number of threads by a short measurement, unless the user has set it."""
    if any(os.environ.get(name) for name in VARIABLES):
        return
    current = torch.get_num_threads()
    if not _default or _default[1] != current:  # the user changed it
        _default[:] = [current, current]
    chosen = fastest_threads(_default[0])
    torch.set_num_threads(chosen)
    _default[1] = chosen


def describe_threads() -> str:
    """Return the number of threads in words."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    given = next((name for name in VARIABLES if os.environ.get(name)), None)
    reason = f" ({given})" if given else "; more were slower just now" if threads < _maximum() else ""
    return f"{threads} CPU thread{'s' * (threads != 1)} on {cores} core{'s' * (cores != 1)}{reason}"


def _maximum() -> int:
    return _default[0] if _default else torch.get_num_threads()
