"""The live page of ``lpfs serve`` in a real browser: it fills, follows swaps, and shows hostile names as text."""

from __future__ import annotations

import math
import threading
import time

import pytest
import uvicorn

from lpfs.online.state import Commit, StateStore
from lpfs.serve.app import Server
from lpfs.serve.engine import ModelStore
from tests.helpers import hostile
from tests.helpers.bundles import make_model, prepare_dataset, publish_model, sample_rows

pytestmark = pytest.mark.browser
EVENTS = 200


class LiveServer:
    """The application on a free port, in a thread of this process."""

    def __init__(self, folder, names=None):
        self.folder, self.names = folder, names or {}
        self.dataset = prepare_dataset(folder / "data", names)
        self.publish(0)
        self.store = ModelStore(folder / "bundles")
        self.store.start(0.05)
        self.server = Server(self.store)
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.server, port=0, lifespan="off", log_config=None))
        self.thread = threading.Thread(target=self.uvicorn.run, daemon=True)
        self.thread.start()
        while not self.uvicorn.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.uvicorn.servers[0].sockets[0].getsockname()[1]}/"

    def publish(self, seed, fields=None):
        model = make_model(self.dataset, fields, seed)
        rows = sample_rows(self.names)
        return publish_model(self.folder / "bundles", self.dataset, model, rows, metadata={"rows": 2_000_000})

    def write_state(self, names, points=EVENTS):
        """Write what a trainer writes: progressive AUC, changes and alarms of these fields."""
        store = StateStore(self.folder, {})
        auc = [0.7 + 0.08 * (1 - math.exp(-point / 30)) + 0.004 * math.sin(point / 3) for point in range(points)]
        metrics = [
            {
                **{"rows": 10_000 * (point + 1), "time": 1.8e9 + point, "auc": value, "logloss": 0.4},
                **{"low": value - 0.05 / math.sqrt(point + 1), "high": value + 0.05 / math.sqrt(point + 1)},
                "calibration": 1.0,
            }
            for point, value in enumerate(auc)
        ]
        changes = [
            {
                **{"rows": 400_000 + 100_000 * number, "time": 1.8e9, "position": number, "field": name},
                **{"action": ("closed", "reopened")[number % 2], "gain": 0.00021 * (number + 1)},
                **{"low": 0.0001, "high": 0.0009, "tested": 9, "before": [], "after": []},
            }
            for number, name in enumerate(names)
        ]
        alarms = [
            {
                **{"rows": 900_000, "time": 1.8e9, "field": name, "kind": "unseen values", "size": 0.21},
                **{"since": 850_000, "message": f"{name} drifts"},
            }
            for name in [*names[:3], None]
        ]
        records = {"metrics": metrics, "changes": changes, "alarms": alarms}
        store.commit(
            Commit(
                2_000_000, 7, {"x": 1}, tuple(self.dataset.schema.names), rate=48_211.0, lag=1_200.0, records=records
            )
        )
        store.close()

    def stop(self):
        self.server.stopping = self.uvicorn.should_exit = True
        self.thread.join(20)
        self.store.stop()


@pytest.fixture
def live(tmp_path):
    server = LiveServer(tmp_path)
    yield server
    server.stop()


HEADLINE = "document.getElementById('headline').textContent"
WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


def test_the_page_fills_and_follows_a_swap(browser, live, artefacts):
    names = list(live.dataset.schema.names)
    live.write_state(names * 3)
    for view, width in (("desktop", 1200), ("phone", 390)):
        for dark in (False, True):
            browser.open(live.url, width=width, dark=dark)
            browser.until("document.querySelector('#auc-chart canvas') && document.querySelector('.chip')")
            browser.picture(artefacts / f"live-{view}-{'dark' if dark else 'light'}.png")
            assert browser.run(HEADLINE) == "Bundle 000001: 5 fields"
            assert not browser.run(WIDE)
            assert browser.problems() == []
            assert all(url.startswith(("http://127.0.0.1", "data:")) for url in browser.requests())
    assert browser.run("document.querySelectorAll('#changes tr').length") == 15
    assert browser.run("document.querySelectorAll('#alarms tr').length") == 4
    live.publish(1, ["text", "age"])
    browser.until(f"{HEADLINE} === 'Bundle 000002: 2 fields'")
    assert browser.run("[...document.querySelectorAll('.chip')].map(chip => chip.textContent)") == ["text", "age"]


def test_a_refused_bundle_is_shown(browser, live, artefacts, monkeypatch):
    def refuse(*_):
        raise ValueError("the digest of model/model.safetensors does not match")

    monkeypatch.setattr("lpfs.serve.engine.load_bundle", refuse)
    live.publish(1)
    browser.open(live.url, width=1200)
    browser.until("!document.getElementById('warnings').hidden")
    assert "digest of model" in browser.run("document.getElementById('refused').textContent")
    assert browser.run("document.getElementById('auc-chart').closest('section').hidden"), "there is no trainer"
    browser.picture(artefacts / "live-refused.png")


def test_hostile_field_names_are_text(browser, tmp_path, artefacts):
    names = dict(zip(("text", "code", "price", "age", "tags"), [*hostile.TAGS[:4], "x" * 300], strict=True))
    live = LiveServer(tmp_path, names)
    try:
        live.write_state([*hostile.TAGS, "\u202eright", "line\nbreak", "y" * 400])
        browser.open(live.url, width=390)
        browser.until("document.querySelectorAll('#changes tr').length > 9 && document.querySelector('.chip')")
        assert browser.run("window.pwned") is None
        assert not browser.run(WIDE)
        shown = browser.run("[...document.querySelectorAll('.chip')].map(chip => chip.title || chip.textContent)")
        assert sorted(shown) == sorted(names.values())
        texts = browser.run(
            "[...document.querySelectorAll('#changes .name')].map(name => name.title || name.textContent)"
        )
        assert set(hostile.TAGS) <= set(texts)
        assert "\\u202eright" in texts
        assert browser.problems() == []
        browser.picture(artefacts / "live-hostile.png")
    finally:
        live.stop()
