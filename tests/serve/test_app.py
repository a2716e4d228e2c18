"""The HTTP interface: answers and their versions, errors that name row and field, limits, the token, metrics."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import anyio
import numpy as np
import polars as pl
import pytest
import torch

from lpfs._fileio import write_text_atomic
from lpfs.online.bundle import CURRENT
from lpfs.serve import app as app_module
from lpfs.serve.app import ASSETS, Server
from lpfs.serve.engine import ModelStore
from lpfs.serve.requests import ARROW_TYPE, Limits
from tests.helpers.asgi import call, post_json
from tests.helpers.bundles import make_model, publish_model, raw_table, sample_rows

TOKEN = "a token of many characters"
ARROW = {"content-type": ARROW_TYPE}


class Site:
    """A server on bundles of its own."""

    def __init__(self, folder, dataset, **options):
        self.bundles, self.dataset, self.lines = folder / "bundles", dataset, []
        self.bundles.mkdir()
        self.store = ModelStore(self.bundles)
        self.server = Server(self.store, notify=self.lines.append, **options)
        self.app = self.server

    def publish(self, seed=0, fields=None):
        bundle = publish_model(self.bundles, self.dataset, make_model(self.dataset, fields, seed), sample_rows())
        self.store.check()
        return bundle

    def predict(self, rows):
        return post_json(self.app, "/predict", {"rows": rows})

    def get(self, path):
        return call(self.app, "GET", path)


@pytest.fixture
def site(tmp_path, dataset):
    site = Site(tmp_path, dataset, token=TOKEN)
    site.publish()
    return site


def arrow(frame, **options):
    file = io.BytesIO()
    frame.write_ipc_stream(file, **options)
    return file.getvalue()


def test_predictions_are_those_of_the_model_and_carry_the_version(site):
    rows = sample_rows(count=100)
    logits = site.publish(1).manifest["logits"]
    expected = torch.sigmoid(torch.tensor(logits))
    for path_rows in (rows[:8], rows):  # in the event loop, and in a thread
        answer = site.predict(path_rows)
        values = answer.json()
        assert answer.status == 200
        assert values["version"] == answer.headers["x-lpfs-version"] == "000002"
        assert len(values["probability"]) == len(path_rows)
        assert np.allclose(values["probability"][:8], expected, atol=1e-6)


def test_arrow_gives_the_same_answers_as_json(site):
    table = raw_table(3).drop("click")
    expected = site.predict(table.to_dicts()).json()
    for options in ({}, {"compat_level": pl.CompatLevel.oldest()}):
        answer = call(site.app, "POST", "/predict", arrow(table, **options), ARROW)
        assert answer.json()["version"] == expected["version"]
        assert np.allclose(answer.json()["probability"], expected["probability"], atol=1e-6)


def test_tasks_are_named(tmp_path, dataset):
    site = Site(tmp_path, dataset)
    model = make_model(dataset)
    schema = replace(dataset.schema, tasks=("buy",))
    assert model.schema != schema
    site.publish()
    model = type(model)(schema, dim=4, hidden=(8,)).eval()
    site.store.model.encoder.schema = schema
    site.store.model = replace(site.store.model, logits=torch.inference_mode()(model.forward))
    values = site.predict(sample_rows(count=3)).json()
    assert set(values) == {"version", "probability", "tasks"}
    assert set(values["tasks"]) == {"buy"}
    assert len(values["probability"]) == len(values["tasks"]["buy"]) == 3


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"rows": [{"a": NaN}]}', 400, "NaN is not a number; give null"),
        (b'{"rows": [{"a": -Infinity}]}', 400, "-Infinity is not a number"),
        (b"[" * 5000, 400, "not JSON"),
        (b'{"rows": [{"text": ' + b"9" * 5000 + b"}]}", 400, "not JSON"),
        (b"[]", 400, "must be an object"),
        (b'{"rows": {}}', 400, "must be an object"),
        (b'{"rows": [], "x": 1}', 400, "unknown key 'x'"),
        (b'{"rows": []}', 400, "1 to 10,000 rows, found 0"),
        (b'{"rows": [1]}', 422, "a row must be an object"),
        (b"\xff", 400, "not JSON"),
    ],
)
def test_a_body_that_cannot_be_used_is_one_line(site, body, status, text):
    answer = call(site.app, "POST", "/predict", body, {"content-type": "application/json; charset=utf-8"})
    assert answer.status == status
    assert text in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_refused_rows_are_named(site):
    rows = sample_rows(count=30)
    rows[3] = {**rows[3], "price": "cheap"}
    rows[7] = {name: value for name, value in rows[7].items() if name != "tags"}
    answer = site.predict(rows)
    assert answer.status == 422
    values = answer.json()
    assert [(row["row"], row["field"]) for row in values["refused"]] == [(3, "price"), (7, "tags")]
    assert values["refused_rows"] == 2
    assert "row 3, field 'price'" in values["error"]
    assert site.predict([{}] * 40).json()["refused_rows"] == 40
    assert len(site.predict([{}] * 40).json()["refused"]) == 20


def test_limits(tmp_path, dataset):
    site = Site(tmp_path, dataset, limits=Limits(max_bytes=2000, max_rows=5, max_seconds=0.2))
    site.publish()
    rows = sample_rows(count=6)
    assert site.predict(rows[:5]).status == 200
    assert site.predict(rows).status == 413
    assert call(site.app, "POST", "/predict", arrow(raw_table().head(6)), ARROW).status == 413
    kind = {"content-type": "application/json"}
    parts = [b" " * 900] * 3
    assert call(site.app, "POST", "/predict", parts, kind).status == 413, "chunked, without a length"
    assert call(site.app, "POST", "/predict", b"{}", {**kind, "content-length": "9" * 30}).status == 413
    assert call(site.app, "POST", "/predict", b"{}", {"content-type": "text/csv"}).status == 415
    assert call(site.app, "GET", "/predict").status == 405


def test_a_client_that_sends_slowly_is_ended(tmp_path, dataset):
    site = Site(tmp_path, dataset, limits=Limits(max_seconds=0.05))
    site.publish()

    class Slow:
        def __init__(self):
            self.headers = {"content-type": "application/json"}

        async def stream(self):
            while True:
                yield b" "
                await anyio.sleep(0.01)

    with pytest.raises(Exception, match=r"took more than 0\.05 s"):
        anyio.run(site.server.predict, Slow())


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_arrow_stream_is_refused_before_it_is_read(site, compression):
    frame = pl.DataFrame({"text": ["w1"] * 9000})
    answer = call(site.app, "POST", "/predict", arrow(frame, compression=compression), ARROW)
    assert answer.status == 400
    assert "compressed" in answer.json()["error"]


def test_arrow_streams_that_cannot_be_used_are_one_line(site):
    table = raw_table().drop("click")
    body = arrow(table)
    categories = arrow(table.with_columns(pl.col("text").cast(pl.Categorical)))
    assert "dictionary" in call(site.app, "POST", "/predict", categories, ARROW).json()["error"]
    long_text = arrow(pl.DataFrame({"text": ["x" * 50_000] * 200}))
    assert call(site.app, "POST", "/predict", long_text, ARROW).status == 413, "rows share one long text"
    assert call(site.app, "POST", "/predict", arrow(table.drop("age")), ARROW).json()["refused"][0]["field"] == "age"
    rng = np.random.default_rng(0)
    for number in range(60):
        damaged = bytearray(body)
        if number % 2:
            damaged = damaged[: rng.integers(len(body))]
        else:
            damaged[rng.integers(2000)] ^= 1 << rng.integers(8)
        answer = call(site.app, "POST", "/predict", bytes(damaged), ARROW)
        assert answer.status in (200, 400, 413, 422), answer.body
        assert "\n" not in answer.json().get("error", "")


def test_a_reopened_field_may_be_absent_for_a_while(tmp_path, dataset, monkeypatch):
    site = Site(tmp_path, dataset)
    site.publish(fields=["text", "code"])
    row = {"text": "w1", "code": 3}
    assert site.predict([row]).status == 200
    site.publish(fields=["text", "code", "age"])
    values = site.predict([row]).json()
    assert values["version"] == "000002"
    assert values["absent"] == ["age"]
    assert site.get("/model").json()["reopened"] == ["age"]
    monkeypatch.setattr("lpfs.serve.engine.GRACE_SECONDS", -1.0)
    assert site.predict([row]).status == 422


def test_health_readiness_and_model(tmp_path, dataset):
    site = Site(tmp_path, dataset)
    assert site.get("/healthz").json() == {"status": "ok"}
    assert site.get("/readyz").status == 503
    assert site.predict([{}]).status == 503
    assert site.get("/model").json()["version"] is None
    site.publish()
    assert site.get("/readyz").json() == {"status": "ok", "version": "000001"}
    model = site.get("/model").json()
    assert set(model["fields"]) == set(dataset.schema.names)
    assert model["certificate"]["bound"] == 0.0
    site.server.stopping = True
    assert site.get("/readyz").status == 503


def test_a_refused_bundle_is_on_metrics_and_model(site):
    (site.publish(1).path / "samples.json").unlink()
    write_text_atomic(site.bundles / CURRENT, "000001\n")
    site.store.check()
    write_text_atomic(site.bundles / CURRENT, "000002\n")
    site.store.check()
    text = site.get("/metrics").body.decode()
    assert 'lpfs_model_info{version="000001"} 1.0' in text
    assert 'lpfs_refused_bundle_info{reason="bundle ' in text
    assert "samples.json is missing" in text
    assert site.get("/model").json()["refused"]["version"] == "000002"
    assert site.get("/readyz").status == 200


def test_requests_are_counted(site):
    site.predict(sample_rows())
    site.predict([{**sample_rows()[0], "text": "never"}])
    site.predict([{}])
    text = site.get("/metrics").body.decode()
    assert 'lpfs_requests_total{status="200"} 2.0' in text
    assert 'lpfs_requests_total{status="422"} 1.0' in text
    assert "lpfs_rows_total 9.0" in text
    assert "lpfs_unseen_values_total 1.0" in text
    assert "lpfs_requests_in_flight 0.0" in text
    assert site.server.log.summary()["requests"] == 3


@pytest.mark.parametrize("path", ["/reload", "/rollback"])
def test_what_changes_something_needs_the_token(site, path, tmp_path):
    site.publish(1)
    for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}, {"authorization": "Bearer ü"}):
        answer = call(site.app, "POST", path, b"{}", given)
        assert answer.status == 401
        assert TOKEN not in answer.body.decode()
    assert call(site.app, "GET", path).status == 405
    site.server.token = None
    assert call(site.app, "POST", path, b"{}", {"authorization": "Bearer None"}).status == 403
    assert site.store.model.version == "000002"


def test_rollback_over_http(site):
    site.publish(1)
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert post_json(site.app, "/rollback", {}, **headers).json()["version"] == "000001"
    assert post_json(site.app, "/rollback", {"version": "000002"}, **headers).json()["version"] == "000002"
    assert post_json(site.app, "/rollback", {"version": "000009"}, **headers).status == 404
    for values in ([], {"version": 2}, {"file": "x"}):
        assert post_json(site.app, "/rollback", values, **headers).status == 400
    assert call(site.app, "POST", "/rollback", b" " * 9999, headers).status == 413
    assert post_json(site.app, "/reload", {}, **headers).json()["version"] == "000002"


def test_no_traceback_reaches_a_client(site, monkeypatch):
    def fail(*_):
        raise RuntimeError("secret detail")

    site.store.model = replace(site.store.model, logits=fail)
    answer = site.predict(sample_rows())
    assert answer.status == 500
    assert answer.json() == {"error": "internal error; the log of the server says more"}
    assert site.lines == ["internal error at /predict: RuntimeError: secret detail"]


def test_another_host_name_is_not_answered(site):
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert call(site.app, "GET", "/model", headers={"host": host}).status == 421
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert call(site.app, "GET", "/model", headers={"host": host}).status == 200


def test_the_page_allows_only_its_own_files(site):
    page = site.get("/")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "http" not in page.body.decode().lower().replace("http-equiv", "")
    for name in ASSETS:
        assert f"/assets/{name}" in page.body.decode()
        assert site.get(f"/assets/{name}").status == 200
    for name in ("live.html", "..", "%2e%2e", "x"):
        assert site.get(f"/assets/{name}").status == 404


def test_events_send_the_state_once_and_end_with_the_server(site):
    async def collect():
        events = []
        async for event in site.server._events():
            events.append(event)
            if len(events) == 4:
                site.server.stopping = True
        return events

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "REFRESH_SECONDS", 0.01)
        events = anyio.run(collect)
    assert [event.partition("\n")[0] for event in events] == ["event: state"] + ["event: live"] * 3
    assert events[0] == "event: state\ndata: null\n\n"
    live = json.loads(events[1].partition("data: ")[2])
    assert live["model"]["version"] == "000001"
    assert site.server.watchers == 0


def test_a_prediction_that_is_not_finite_is_an_error(site):
    site.store.model = replace(site.store.model, logits=lambda batch: torch.full((len(batch),), torch.nan))
    answer = site.predict(sample_rows()[:1])
    assert answer.status == 500
    assert b"NaN" not in answer.body
    assert "not JSON compliant" in site.lines[-1]
