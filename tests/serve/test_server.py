"""A real server in a process of its own: swaps under requests, SIGTERM, the port."""

from __future__ import annotations

import http.client
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest

from lpfs.cli import run
from tests.helpers.bundles import make_model, publish_model, sample_rows


class Serving:
    """``lpfs serve`` on a free port of 127.0.0.1."""

    def __init__(self, bundles, first):
        self.bundles, self.first = bundles, first
        command = [sys.executable, "-m", "lpfs", "serve", str(bundles), "--port", "0", "--poll", "0.02"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if "listening on" in line:
                self.port = int(line.rpartition(":")[2].strip(" /\n"))
                break
        else:
            raise AssertionError(lines)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)


def request(connection, body):
    connection.request("POST", "/predict", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.fixture(scope="module")
def serving(dataset, tmp_path_factory):
    """One process for all tests: it takes seconds to start."""
    bundles = tmp_path_factory.mktemp("server") / "bundles"
    first = publish_model(bundles, dataset, make_model(dataset), sample_rows())
    serving = Serving(bundles, first)
    yield serving
    serving.process.kill()
    serving.process.wait()
    serving.process.stderr.close()


def test_no_request_is_lost_and_no_answer_is_mixed_while_models_are_swapped(dataset, serving):
    rows, expected = sample_rows(), {serving.first.version: serving.first.manifest["logits"]}
    answers, end = [], threading.Event()

    def ask():
        connection, body = serving.connect(), json.dumps({"rows": rows})
        while not end.is_set():
            answers.append(request(connection, body))
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(1, 6):
        bundle = publish_model(serving.bundles, dataset, make_model(dataset, seed=seed), rows)
        expected[bundle.version] = bundle.manifest["logits"]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not answers or answers[-1][1].get("version") != bundle.version):
            time.sleep(0.01)
    end.set()
    for thread in threads:
        thread.join()
    assert {status for status, _ in answers} == {200}
    assert {values["version"] for _, values in answers} == set(expected)
    for _, values in answers:
        for probability, logit in zip(values["probability"], expected[values["version"]], strict=True):
            assert probability == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-6)


def test_sigterm_answers_what_is_in_flight_and_ends_open_pages(serving):
    """The last test of the process."""
    with closing(serving.connect()) as page, closing(serving.connect()) as slow:
        page.request("GET", "/events")
        events = page.getresponse()
        assert events.readline() == b"event: state\n"
        body = json.dumps({"rows": sample_rows()}).encode()
        slow.putrequest("POST", "/predict")
        slow.putheader("content-type", "application/json")
        slow.putheader("content-length", str(len(body)))
        slow.endheaders(body[:10])
        time.sleep(0.2)
        serving.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        slow.send(body[10:])
        answer = slow.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["version"]
        assert events.read().endswith(b"\n\n")
    assert serving.process.wait(30) == 0
    assert "stopped; all requests were answered" in serving.process.stderr.read()


def test_wrong_options_are_one_line(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("short")
    for options, text in (([str(tmp_path / "none")], "no folder"), ([str(tmp_path), "--token-file", str(token)], "16")):
        assert run(["serve", *options]) == 1
        assert text in capsys.readouterr().err
