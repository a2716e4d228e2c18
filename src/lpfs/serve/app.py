"""The HTTP interface: predictions, health, metrics, the live page; and what needs a token."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from lpfs.serve.encode import RefusedRowsError
from lpfs.serve.engine import ModelStore, ServedModel, ignore_message
from lpfs.serve.live import REFRESH_SECONDS, LivePage, RequestLog, describe_model, encode_events
from lpfs.serve.requests import Limits, RequestError, parse_rows, read_body

for _package in ("starlette", "prometheus_client"):
    import_optional(_package, "serve", "lpfs serve")
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest  # noqa: E402
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric  # noqa: E402
from prometheus_client.registry import Collector  # noqa: E402
from starlette.applications import Starlette  # noqa: E402
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import ClientDisconnect, Request  # noqa: E402
from starlette.responses import JSONResponse, Response, StreamingResponse  # noqa: E402
from starlette.routing import Route  # noqa: E402
from starlette.types import ASGIApp, Receive, Scope, Send  # noqa: E402

ASSETS = {  # name -> package, content type
    "uplot.min.js": ("lpfs.report", "text/javascript"),
    "uplot.min.css": ("lpfs.report", "text/css"),
    "report.css": ("lpfs.report", "text/css"),
    "live.js": ("lpfs.serve", "text/javascript"),
    "live.css": ("lpfs.serve", "text/css"),
}
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


@dataclass
class Server:
    """What the requests share.

    Args:
        store: the served model.
        limits: the largest request.
        token: what a client needs to change something; without one nothing can be changed.
        hosts: names that a request may give as its host; empty: any.
        notify: called with one line for an internal error.
    """

    store: ModelStore
    limits: Limits = field(default_factory=Limits)
    token: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    notify: Callable[[str], None] = ignore_message
    stopping: bool = False

    def __post_init__(self) -> None:
        self.log, self.watchers = RequestLog(), 0
        self.page = LivePage(self.store, self.log)
        self.registry = CollectorRegistry()
        self.registry.register(StoreCollector(self.store))
        common: dict[str, Any] = {"registry": self.registry}
        self.answered = Counter("lpfs_requests", "Requests to /predict, by status.", ["status"], **common)
        self.rows = Counter("lpfs_rows", "Rows that were predicted.", **common)
        self.unseen = Counter("lpfs_unseen_values", "Values that are in no vocabulary.", **common)
        self.absent = Counter("lpfs_absent_fields", "Requests without a field that was reopened.", **common)
        self.seconds = Histogram("lpfs_request_seconds", "Time to answer.", buckets=LATENCIES, **common)
        self.in_flight = Gauge("lpfs_requests_in_flight", "Requests that are being answered.", **common)
        self.deadlines = Deadlines(self.limits.max_seconds)

    def app(self) -> ASGIApp:
        """Return the application; predictions skip the routing and the middleware of starlette."""
        others, predict = self._other_pages(), self.guard(self.predict)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/predict" and scope["method"] == "POST":
                response = await predict(Request(scope, receive, send))
                await response(scope, receive, send)
            else:
                await others(scope, receive, send)

        return app

    def _other_pages(self) -> Starlette:
        routes = [
            Route("/predict", self.guard(self.predict), methods=["POST"]),
            Route("/", self.guard(self.show_page)),
            Route("/assets/{name}", self.guard(self.send_asset)),
            Route("/events", self.guard(self.send_events)),
            Route("/healthz", self.guard(self.report_health)),
            Route("/readyz", self.guard(self.report_ready)),
            Route("/metrics", self.guard(self.report_metrics)),
            Route("/model", self.guard(self.report_model)),
            Route("/reload", self.guard(self.reload), methods=["POST"]),
            Route("/rollback", self.guard(self.roll_back), methods=["POST"]),
        ]

        async def handle(request: Request, error: Exception) -> Response:
            status = error.status_code if isinstance(error, HTTPException) else 500
            names = {404: "there is no such page", 405: "this page takes another method"}
            return answer_error(status, names.get(status, "internal error"))

        return Starlette(routes=routes, exception_handlers={HTTPException: handle, Exception: handle})

    def guard(self, handler: Handler) -> Handler:
        """Return a handler that checks the host, and turns every error into one line without a traceback."""

        async def guarded(request: Request) -> Response:
            try:
                if self.hosts and host_name(request.headers.get("host", "")) not in self.hosts:
                    raise RequestError(421, "this server does not answer for that host name; see lpfs serve --help")
                return await handler(request)
            except RequestError as error:
                return answer_error(error.status, str(error), error)
            except ClientDisconnect:
                return answer_error(400, "the client closed the connection")
            except Exception as error:
                self.notify(f"internal error at {request.url.path[:80]}: {type(error).__name__}: {error}")
                return answer_error(500, "internal error; the log of the server says more")

        return guarded

    async def predict(self, request: Request) -> Response:
        """Answer with the model that is current now; a swap meanwhile does not concern this request."""
        start, served, rows, status = time.perf_counter(), self.store.model, 0, 500
        self.in_flight.inc()
        try:
            if served is None:
                raise RequestError(503, "no bundle is served yet; see /readyz")
            with self.deadlines.watch():
                body = await read_body(request, self.limits)
                table = parse_rows(request.headers.get("content-type", ""), body, self.limits)
                rows = len(table)
                if rows <= self.limits.inline_rows:
                    values = self._compute(served, table)
                else:
                    values = await anyio.to_thread.run_sync(self._compute, served, table, abandon_on_cancel=True)
            status = 200
            return Response(
                json.dumps(values), media_type="application/json", headers={"x-lpfs-version": served.version}
            )
        except RequestError as error:
            status = error.status
            raise
        except TimeoutError:
            status = 503
            raise RequestError(503, f"the request took more than {self.limits.max_seconds:g} s") from None
        finally:
            seconds = time.perf_counter() - start
            self.in_flight.dec()
            self.answered.labels(str(status)).inc()
            self.seconds.observe(seconds)
            self.log.add(seconds, rows, status >= 500)

    def _compute(self, served: ServedModel, table: list[Any] | pl.DataFrame) -> dict[str, Any]:
        """Return the answer; it is made by ``served`` alone and carries its version."""
        optional = served.optional()
        encode = served.encoder.encode_frame if isinstance(table, pl.DataFrame) else served.encoder.encode
        try:
            batch, unseen, absent = encode(table, optional)  # type: ignore[arg-type]
        except RefusedRowsError as error:
            message = (
                f"{len(error.refused):,} rows cannot be used; the first: {error}" if len(error.refused) > 1 else ""
            )
            raise RequestError(422, message or str(error), error.refused) from None
        except LpfsError as error:
            raise RequestError(422, str(error)) from None
        probabilities: Any = torch.sigmoid(served.logits(batch)).tolist()
        self.rows.inc(len(batch))
        if unseen:
            self.unseen.inc(unseen)
        answer: dict[str, Any] = {"version": served.version}
        if absent:
            self.absent.inc()
            answer["absent"] = sorted(absent)
        schema = served.model.schema
        if not schema.tasks:
            return {**answer, "probability": probabilities}
        columns = dict(zip((schema.label, *schema.tasks), map(list, zip(*probabilities, strict=True)), strict=True))
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
        with anyio.fail_after(self.limits.max_seconds):
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
        except InputError as error:
            raise RequestError(404, str(error)) from None
        except LpfsError as error:
            raise RequestError(409, str(error)) from None
        await anyio.to_thread.run_sync(self.store.check)
        return answer_json(describe_model(self.store))

    def _check_token(self, request: Request) -> None:
        if self.token is None:
            raise RequestError(403, "this server was started without a token, so nothing can be changed")
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise RequestError(401, "give the token of the server as the header Authorization: Bearer TOKEN")

    async def show_page(self, request: Request) -> Response:
        """Answer with the live page, which loads everything else from here."""
        headers = {**HEADERS, "content-security-policy": POLICY}
        return Response(live_page(), media_type="text/html", headers=headers)

    async def send_asset(self, request: Request) -> Response:
        """Answer with a file of the page."""
        name = request.path_params["name"]
        if name not in ASSETS:
            raise RequestError(404, "there is no such file")
        return Response(read_asset(name), media_type=ASSETS[name][1], headers=HEADERS)

    async def send_events(self, request: Request) -> Response:
        """Send a snapshot every second until the client or the server ends."""
        if self.watchers >= self.limits.max_watchers:
            raise RequestError(503, f"{self.limits.max_watchers} pages are open already")
        return StreamingResponse(self._events(), media_type="text/event-stream", headers=HEADERS)

    async def _events(self) -> AsyncIterator[str]:
        self.watchers += 1
        try:
            sent: str | None = None
            while not self.stopping:
                snapshot, state = await self.page.snapshot()
                for event in encode_events(snapshot, None if state == sent else state):
                    yield event
                sent = state
                await anyio.sleep(REFRESH_SECONDS)
        finally:
            self.watchers -= 1


class Deadlines:
    """Cancels requests that take too long. One timer looks at all of them: a timer for each costs a tenth of a request.

    Args:
        seconds: allowed time; a request is cancelled at most a fifth later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started: dict[asyncio.Task[Any], float] = {}
        self._expired: set[asyncio.Task[Any]] = set()
        self._has_timer = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Raise TimeoutError in the current task if the block takes too long."""
        task = asyncio.current_task()
        assert task is not None
        self._started[task] = time.monotonic()
        if not self._has_timer:
            self._has_timer = True
            asyncio.get_running_loop().call_later(self._seconds / 5, self._cancel_late)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._expired:
                raise
            getattr(task, "uncancel", int)()  # from Python 3.11 on
            raise TimeoutError from None
        finally:
            self._started.pop(task, None)
            self._expired.discard(task)

    def _cancel_late(self) -> None:
        now = time.monotonic()
        for task, started in list(self._started.items()):
            if now - started > self._seconds:
                del self._started[task]
                self._expired.add(task)
                task.cancel()
        self._has_timer = bool(self._started)
        if self._has_timer:
            asyncio.get_running_loop().call_later(self._seconds / 5, self._cancel_late)


class StoreCollector(Collector):
    """Metrics of the served model, read when they are asked for."""

    def __init__(self, store: ModelStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield what is served now, and what was refused."""
        served, refused = self._store.model, self._store.refused
        yield CounterMetricFamily("lpfs_swaps", "Bundles that were taken over.", value=self._store.swaps)
        yield CounterMetricFamily("lpfs_refused_bundles", "Bundles that were refused.", value=self._store.refusals)
        yield GaugeMetricFamily("lpfs_ready", "Whether a model is served.", value=float(served is not None))
        if served is not None:
            yield InfoMetricFamily("lpfs_model", "The served bundle.", {"version": served.version})
            yield GaugeMetricFamily("lpfs_model_since_seconds", "Time of the last swap.", value=served.since)
            yield GaugeMetricFamily("lpfs_model_fields", "Fields to fetch.", value=len(served.bundle.fields))
            yield GaugeMetricFamily("lpfs_model_load_seconds", "Time to load the bundle.", value=served.load_seconds)
        if refused is not None:
            about = {"version": refused.version, "reason": refused.reason}
            yield InfoMetricFamily("lpfs_refused_bundle", "The current bundle, which was refused.", about)


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


def answer_error(status: int, message: str, error: RequestError | None = None) -> Response:
    """Return an error: one line, and row, field and reason of the first refused rows."""
    values: dict[str, Any] = {"error": message}
    if error is not None and error.refused:
        rows = [{"row": row.row, "field": row.field, "reason": row.reason} for row in error.refused]
        values |= {"refused": rows[:MAX_REPORTED], "refused_rows": len(rows)}
    return answer_json(values, status)


@cache
def read_asset(name: str) -> bytes:
    """Return a file of the page."""
    return (resources.files(ASSETS[name][0]) / "assets" / name).read_bytes()


@cache
def live_page() -> str:
    """Return the live page; all that comes from data is filled in by its script, as text."""
    from jinja2 import PackageLoader

    return html_environment(PackageLoader("lpfs.serve")).get_template("live.html").render(version=__version__)
