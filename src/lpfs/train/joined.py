"""joined: the processes that torchrun started find each other, and part again.

with joined() as ranks:
    lpfs.fit(model, days.stream(512), folder="runs/first")
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from lpfs.errors import InputError, LpfsError, RankError, StateError
from lpfs.train.launched import launched, restarts
from lpfs.train.distributed.group import Ranks, current, working_as
from lpfs.train.distributed.heartbeat import Watch

JOIN = 300.0  # seconds that ranks wait for each other to start
LIMIT = 45.0  # seconds that ranks wait for each other in a collective; LPFS_RANK_LIMIT says otherwise


class ToldError(RankError):
    """What ended this rank has been told by another one."""


@contextmanager
def stoppable() -> Iterator[None]:
    """Within this block a request to end, as torchrun sends where a rank is gone, is a KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def joined(limit: float | None = None) -> Iterator[Ranks]:
    """Within this block this process and those beside it train as one; see :class:`Ranks`.

    For a process that torchrun started; gloo carries what is on CPUs, NCCL what is on GPUs, one GPU a process.

    Args:
        limit: seconds that ranks wait for each other in a step before the one that is missing is given up.

    """
    if current().several:
        raise StateError("these processes have joined already")
    if not launched():
        raise StateError("there is nobody to join: start with torchrun --nproc-per-node N -m lpfs …")
    limit = float(os.environ.get("LPFS_RANK_LIMIT", LIMIT)) if limit is None else limit
    backend = "gloo"
    if torch.cuda.is_available():
        place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if place >= count:
            raise InputError(
                f"there are {count} GPUs here, too few for process {place + 1}: start {count} at most, or hide "
                "them to train on the CPU (CUDA_VISIBLE_DEVICES=)"
            )
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=JOIN)))
    except RuntimeError as error:
        raise RankError(f"the ranks did not all start within {JOIN:.0f} s: {error}") from error
    store = PrefixStore(f"lpfs/{restarts()}", store)  # nothing that a killed try left there is taken for ours
    watch, fine = Watch(store, rank, world, limit), False
    try:
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
        )
        watch.begin()
        with working_as(Ranks(rank, world, watch)) as ranks, stoppable():
            try:
                yield ranks
                ranks.agree(lambda: None, "the end")
                watch.farewell()
                fine = True
            except BaseException as error:
                found = watch.lost(error) if isinstance(error, KeyboardInterrupt) else error
                first = watch.told(found)
                watch.linger()
                if isinstance(found, LpfsError) and not first:
                    raise ToldError(str(found)) from error
                if found is not error:
                    raise found from error
                raise
    finally:
        watch.close()
        if torch.distributed.is_initialized() and (fine or backend == "gloo"):  # NCCL would wait for who is lost
            torch.distributed.destroy_process_group()
