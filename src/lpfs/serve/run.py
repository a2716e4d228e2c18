"""Run the server: uvicorn in this process, until SIGTERM or Ctrl-C; requests in flight are answered first."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch

from lpfs._imports import import_optional
from lpfs.errors import InputError
from lpfs.serve.app import LOOPBACK, Server
from lpfs.serve.engine import POLL_SECONDS, ModelStore, ignore_message
from lpfs.serve.loader import LoaderProcess
from lpfs.serve.requests import Limits

TOKEN_VARIABLE = "LPFS_SERVE_TOKEN"
MIN_TOKEN = 16  # characters
GRACE_SECONDS = 10  # after SIGTERM, for requests in flight
MAX_CONNECTIONS = 1024
SWITCH_SECONDS = 0.0002  # until a thread that loads a bundle yields to the requests; 0.005 in Python


def serve(
    bundles: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    token: str | None = None,
    poll_seconds: float = POLL_SECONDS,
    threads: int = 1,
    notify: Callable[[str], None] = ignore_message,
) -> None:
    """Answer requests with the current bundle of a folder until the process is asked to end.

    Args:
        bundles: folder that ``publish`` writes to; it may be empty at first.
        host: address to listen on; other machines reach only another one than 127.0.0.1.
        port: TCP port; 0 for any free one.
        limits: the largest request.
        token: for /reload and /rollback, at least 16 characters; by default that of LPFS_SERVE_TOKEN.
        poll_seconds: how often CURRENT is read.
        threads: threads of one prediction.
        notify: called with one line for start, swaps, refused bundles and end.
    """
    uvicorn = import_optional("uvicorn", "serve", "lpfs serve")
    token = os.environ.get(TOKEN_VARIABLE) if token is None else token
    if token is not None and len(token) < MIN_TOKEN:
        raise InputError(f"the token has {len(token)} characters; use at least {MIN_TOKEN} random ones")
    if not bundles.is_dir():
        raise InputError(f"no folder {bundles}; give the folder of bundles of a run of lpfs online: RUN/bundles")
    torch.set_num_threads(threads)
    loader = LoaderProcess()
    store = ModelStore(bundles, notify, loader)
    shared = Server(store, limits or Limits(), token, LOOPBACK if host in LOOPBACK else (), notify)

    class StoppingServer(uvicorn.Server):  # type: ignore[misc, name-defined]
        """Ends the live pages first: uvicorn waits for open answers."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            shared.stopping = True
            loader.closing.set()  # a bundle that is being loaded is not waited for
            super().handle_exit(sig, frame)

        async def startup(self, sockets: object = None) -> None:
            await super().startup(sockets=sockets)
            if self.started and self.servers:
                bound = self.servers[0].sockets[0].getsockname()[1]
                name = f"[{host}]" if ":" in host else host
                notify(f"listening on http://{name}:{bound}/")

    config = uvicorn.Config(
        shared,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="none",
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    wakeup = signal.set_wakeup_fd(-1)  # of the command line, which would end a process that drains for long
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with suppress(OSError):  # it is tried again for the next bundle; the first one is loaded here
            loader.start()
        store.start(poll_seconds)
        gc.collect()
        gc.freeze()  # what is loaded now stays: it need not be searched for garbage
        StoppingServer(config).run()
    except KeyboardInterrupt:  # uvicorn raises the signal again after it has stopped
        notify("stopped; all requests were answered")
    finally:
        loader.closing.set()
        store.stop()
        loader.stop()
        sys.setswitchinterval(interval)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
