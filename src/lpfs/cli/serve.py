"""serve: answer requests with the current bundle of lpfs online."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from lpfs._console import print_lines
from lpfs.cli.app import cli
from lpfs.cli.options import PATH, output, section
from lpfs.errors import InputError

HELP = """Answer requests with the current model of BUNDLES, and swap to every new one without losing a request.

BUNDLES is the folder that lpfs online publishes to: RUN/bundles. The live page is at /, predictions at /predict.
"""
TOKEN_FILE_BYTES = 4096
network, limit = section("Network"), section("Limits")


@cli.command(
    help=HELP,
    short_help="Serve the current model of lpfs online.",
    examples=["lpfs serve RUN/bundles", "lpfs serve RUN/bundles --port 9000 --token-file token.txt"],
)
@click.argument("bundles", metavar="BUNDLES", type=PATH)
@network("--host", default="127.0.0.1", help="Address to listen on. Any other than this one opens it to the network.")
@network("--port", type=click.IntRange(0, 65535), default=8000, help="Port; 0 takes a free one.")
@network("--token-file", type=PATH, help="File with the token for /reload and /rollback. Default: LPFS_SERVE_TOKEN.")
@limit("--max-bytes", type=click.IntRange(1), default=4 << 20, help="Longest body of a request.")
@limit("--max-rows", type=click.IntRange(1), default=10_000, help="Most rows of a request.")
@limit("--max-seconds", type=click.FloatRange(0, min_open=True), default=10.0, help="Longest time of a request.")
@limit("--poll", type=click.FloatRange(0.01), default=0.5, help="Seconds between two looks for a new bundle.")
@limit("--threads", type=click.IntRange(1), default=1, help="Threads of one prediction.")
@output("-q", "--quiet", is_flag=True, help="Print only errors.")
def serve(
    bundles: Path,
    host: str,
    port: int,
    token_file: Path | None,
    max_bytes: int,
    max_rows: int,
    max_seconds: float,
    poll: float,
    threads: int,
    quiet: bool,
) -> None:
    """Serve the current bundle."""
    from lpfs.serve.requests import Limits
    from lpfs.serve.run import serve as run_server

    def notify(text: str) -> None:
        if not quiet:
            print_lines(f"{time.strftime('%H:%M:%S')} {text}", stream=sys.stderr)

    token = None
    if token_file is not None:
        if token_file.stat().st_size > TOKEN_FILE_BYTES:
            raise InputError(f"{token_file} has more than {TOKEN_FILE_BYTES:,} bytes; it must hold one token")
        token = token_file.read_text("utf-8").strip()
    limits = Limits(max_bytes, max_rows, max_seconds)
    run_server(
        bundles, host=host, port=port, limits=limits, token=token, poll_seconds=poll, threads=threads, notify=notify
    )
