"""The HTTP interface: predictions, health, metrics, the live page; and what needs a token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import anyio
import polars as pl
import torch

from lpfs import __version__
from lpfs._fileio import parse_json
from lpfs._imports import import_optional
from lpfs._text import html_environment
from lpfs.errors import InputError, LpfsError
from lpfs.online.bundle import rollback
from lpfs.serve.engine import ModelStore, ServedModel, ignore_message
from lpfs.serve.live import REFRESH_SECONDS, LivePage, RequestLog, describe_model
from lpfs.serve.requests import Limits, RequestError, parse_rows, read_body

for _package in ("starlette", "prometheus_client"):
    import_optional(_package, "serve", "lpfs serve")
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric  # noqa: E402
from starlette.requests import ClientDisconnect, Request  # noqa: E402
from starlette.responses import JSONResponse, Response, StreamingResponse  # noqa: E402
from starlette.types import Receive, Scope, Send  # noqa: E402

ASSETS = {  # name -> package
    **dict.fromkeys(("uplot.min.js", "uplot.min.css", "report.css"), "lpfs.report"),
    **dict.fromkeys(("live.js", "live.css"), "lpfs.serve"),
}
MEDIA_TYPES = {"js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LATENCIES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MAX_REPORTED = 20  # refused rows that an answer lists
ADMIN_BYTES = 4096  # of the body of a request that needs the token
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(eq=False)
class Server:
    """What the requests share."""

    store: ModelStore  # the served model
    limits: Limits = field(default_factory=Limits)  # the largest request
    token: str | None = None  # what a client needs to change something; without one nothing can be changed
    hosts: tuple[str, ...] = LOOPBACK  # names that a request may give as its host; empty: any
    notify: Callable[[str], None] = ignore_message  # called with one line for an internal error
    stopping: bool = False

    def __post_init__(self) -> None:
        self.log, self.watchers = RequestLog(), 0
        self.page = LivePage(self.store, self.log)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        common: dict[str, Any] = {"registry": self.registry}
        self.answered = Counter("lpfs_requests", "Requests to /predict, by status.", ["status"], **common)
        self.rows = Counter("lpfs_rows", "Rows that were predicted.", **common)
        self.unseen = Counter("lpfs_unseen_values", "Values that are in no vocabulary.", **common)
        self.absent = Counter("lpfs_absent_fields", "Requests without a field that was reopened.", **common)
        self.seconds = Histogram("lpfs_request_seconds", "Time to answer.", buckets=LATENCIES, **common)
        self.in_flight = Gauge("lpfs_requests_in_flight", "Requests that are being answered.", **common)
        posts = {"/predict": self.predict, "/reload": self.reload, "/rollback": self.roll_back}
        gets: dict[str, Handler] = {"/": self.show_page, "/events": self.send_events, "/model": self.report_model}
        gets |= {"/healthz": self.report_health, "/readyz": self.report_ready, "/metrics": self.report_metrics}
        gets |= {f"/assets/{name}": self.send_asset for name in ASSETS}
        self.handlers = {path: ("GET", handler) for path, handler in gets.items()}
        self.handlers |= {path: ("POST", handler) for path, handler in posts.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request as an ASGI application; every error is one line without a traceback."""
        request = Request(scope, receive, send)
        try:
            response = await self._handle(request)
        except RequestError as error:
            response = answer_error(error)
        except ClientDisconnect:
            response = answer_error(RequestError(400, "the client closed the connection"))
        except Exception as error:
            self.notify(f"internal error at {request.url.path[:80]}: {type(error).__name__}: {error}")
            response = answer_error(RequestError(500, "internal error; the log of the server says more"))
        await response(scope, receive, send)

    async def _handle(self, request: Request) -> Response:
        if self.hosts and host_name(request.headers.get("host", "")) not in self.hosts:
            raise RequestError(421, "this server does not answer for that host name; see lpfs serve --help")
        if request.scope["path"] not in self.handlers:
            raise RequestError(404, "there is no such page")
        method, handler = self.handlers[request.scope["path"]]
        if request.scope["method"] not in (method, "HEAD" if method == "GET" else method):
            raise RequestError(405, f"this page takes the method {method}")
        return await handler(request)

    async def predict(self, request: Request) -> Response:
        """Answer with the model that is current now; a swap meanwhile does not concern this request."""
        start, served, rows, status = time.perf_counter(), self.store.model, 0, 500
        self.in_flight.inc()
        try:
            if served is None:
                raise RequestError(503, "no bundle is served yet; see /readyz")
            with deadline(self.limits.max_seconds):
                body = await read_body(request, self.limits)
                table = parse_rows(request.headers.get("content-type", ""), body, self.limits)
                rows = len(table)
                if rows <= self.limits.inline_rows:
                    values = self._compute(served, table)
                else:
                    values = await anyio.to_thread.run_sync(self._compute, served, table, abandon_on_cancel=True)
            status, headers = 200, {"x-lpfs-version": served.version}
            return Response(json.dumps(values, allow_nan=False), media_type="application/json", headers=headers)
        except RequestError as error:
            status = error.status
            raise
        finally:
            seconds = time.perf_counter() - start
            self.in_flight.dec()
            self.answered.labels(str(status)).inc()
            self.seconds.observe(seconds)
            self.log.add(seconds, rows, status >= 500)

    def _compute(self, served: ServedModel, table: list[Any] | pl.DataFrame) -> dict[str, Any]:
        """Return the answer; it is made by ``served`` alone and carries its version."""
        try:
            encoded = served.encoder.encode(table, optional=served.optional())
        except LpfsError as error:
            raise RequestError(422, str(error)) from None
        if encoded.refused:
            first, count = encoded.refused[0], len(encoded.refused)
            message = f"{count:,} rows cannot be used; the first: {first}" if count > 1 else str(first)
            raise RequestError(422, message, encoded.refused)
        probabilities = torch.sigmoid(served.logits(encoded.batch))
        self.rows.inc(len(encoded.batch))
        if encoded.unseen:
            self.unseen.inc(sum(encoded.unseen.values()))
        answer: dict[str, Any] = {"version": served.version}
        if encoded.absent:
            self.absent.inc()
            answer["absent"] = sorted(encoded.absent)
        schema = served.encoder.schema
        if not schema.tasks:
            return {**answer, "probability": probabilities.tolist()}
        columns = dict(zip((schema.label, *schema.tasks), probabilities.T.tolist(), strict=True))
        return {**answer, "probability": columns.pop(schema.label), "tasks": columns}

    async def report_health(self, request: Request) -> Response:
        """Answer as long as the process runs."""
        return answer_json({"status": "ok"})

    async def report_ready(self, request: Request) -> Response:
        """Answer whether requests should be sent here."""
        served, refused = self.store.model, self.store.refused
        if self.stopping:
            return answer_json({"status": "stopping"}, 503)
        if served is None:
            reason = refused.reason if refused else f"nothing is published in {self.store.bundles.name}"
            return answer_json({"status": "no bundle", "reason": reason}, 503)
        return answer_json({"status": "ok", "version": served.version})

    async def report_metrics(self, request: Request) -> Response:
        """Answer with the metrics as text for Prometheus."""
        return Response(generate_latest(self.registry), media_type="text/plain; version=0.0.4", headers=HEADERS)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the served model and of the refused one."""
        served, refused = self.store.model, self.store.refused
        yield CounterMetricFamily("lpfs_swaps", "Bundles that were taken over.", value=self.store.swaps)
        yield CounterMetricFamily("lpfs_refused_bundles", "Bundles that were refused.", value=self.store.refusals)
        yield GaugeMetricFamily("lpfs_ready", "Whether a model is served.", value=float(served is not None))
        if served is not None:
            yield InfoMetricFamily("lpfs_model", "The served bundle.", {"version": served.version})
            yield GaugeMetricFamily("lpfs_model_since_seconds", "Time of the last swap.", value=served.since)
            yield GaugeMetricFamily("lpfs_model_fields", "Fields to fetch.", value=len(served.bundle.fields))
            yield GaugeMetricFamily("lpfs_model_load_seconds", "Time to load the bundle.", value=served.load_seconds)
        if refused is not None:
            about = {"version": refused.version, "reason": refused.reason}
            yield InfoMetricFamily("lpfs_refused_bundle", "The current bundle, which was refused.", about)

    async def report_model(self, request: Request) -> Response:
        """Answer with version, fields and certificate."""
        return answer_json(describe_model(self.store))

    async def reload(self, request: Request) -> Response:
        """Look for a new bundle now."""
        self._check_token(request)
        await anyio.to_thread.run_sync(self.store.check)
        return answer_json(describe_model(self.store))

    async def roll_back(self, request: Request) -> Response:
        """Make an older bundle the current one: ``{"version": "000006"}``, or ``{}`` for the one before."""
        self._check_token(request)
        with deadline(self.limits.max_seconds):
            body = await read_body(request, Limits(max_bytes=ADMIN_BYTES))
        try:
            values = parse_json(body or b"{}")
        except ValueError as error:
            raise RequestError(400, f"the body cannot be read: {error}") from None
        version = values.get("version") if isinstance(values, dict) else 0
        if not isinstance(version, str | None) or set(values) - {"version"}:
            raise RequestError(400, 'the body must be {"version": "000006"}, or {} for the bundle before')
        try:
            await anyio.to_thread.run_sync(rollback, self.store.bundles, version)
        except LpfsError as error:
            raise RequestError(404 if isinstance(error, InputError) else 409, str(error)) from None
        return await self.reload(request)

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            raise RequestError(403, "this server was started without a token, so nothing can be changed")
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise RequestError(401, "give the token of the server as the header Authorization: Bearer TOKEN")

    async def show_page(self, request: Request) -> Response:
        """Answer with the live page, which loads everything else from here."""
        return Response(live_page(), media_type="text/html", headers={**HEADERS, "content-security-policy": POLICY})

    async def send_asset(self, request: Request) -> Response:
        """Answer with a file of the page."""
        name = request.scope["path"].rpartition("/")[2]
        return Response(read_asset(name), media_type=MEDIA_TYPES[name.rpartition(".")[2]], headers=HEADERS)

    async def send_events(self, request: Request) -> Response:
        """Send a snapshot every second until the client or the server ends."""
        if self.watchers >= self.limits.max_watchers:
            raise RequestError(503, f"{self.limits.max_watchers} pages are open already")
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=HEADERS)

    async def _events(self) -> AsyncIterator[str]:
        """Yield server-sent events: the requests and the model every second, the state of the trainer if it is new."""
        self.watchers += 1
        try:
            sent: str | None = None
            while not self.stopping:
                snapshot, state = await self.page.snapshot()
                if state != sent:
                    yield f"event: state\ndata: {state}\n\n"
                yield f"event: live\ndata: {snapshot}\n\n"
                sent = state
                await anyio.sleep(REFRESH_SECONDS)
        finally:
            self.watchers -= 1


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise RequestError in the current task if the block takes too long; a tenth of the cost of a scope of anyio."""
    task, expired = asyncio.current_task(), []
    assert task is not None

    def expire() -> None:
        expired.append(True)
        task.cancel()

    timer = asyncio.get_running_loop().call_later(seconds, expire)
    try:
        yield
    except asyncio.CancelledError:
        if not expired:
            raise
        getattr(task, "uncancel", int)()  # from Python 3.11 on
        raise RequestError(503, f"the request took more than {seconds:g} s") from None
    finally:
        timer.cancel()


def host_name(host: str) -> str:
    """Return a Host header without its port.

    >>> [host_name(host) for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]")]
    ['localhost', '127.0.0.1', '::1', '::1']
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.strip("[]").lower()


def answer_json(values: dict[str, Any], status: int = 200) -> Response:
    """Return JSON that no cache keeps."""
    return JSONResponse(values, status, HEADERS)


def answer_error(error: RequestError) -> Response:
    """Return an error: one line, and row, field and reason of the first refused rows."""
    values: dict[str, Any] = {"error": str(error)}
    if error.refused:
        rows = [asdict(row) for row in error.refused[:MAX_REPORTED]]
        values |= {"refused": rows, "refused_rows": len(error.refused)}
    return answer_json(values, error.status)


@cache
def read_asset(name: str) -> bytes:
    """Return a file of the page."""
    return (resources.files(ASSETS[name]) / "assets" / name).read_bytes()


@cache
def live_page() -> str:
    """Return the live page; all that comes from data is filled in by its script, as text."""
    from jinja2 import PackageLoader

    return html_environment(PackageLoader("lpfs.serve")).get_template("live.html").render(version=__version__)
