"""Headless Chromium controlled over a pipe with the DevTools protocol, without any package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
TIMEOUT_SECONDS = 60.0  # for an answer of the browser


def find_chromium() -> str | None:
    """Return the path of the browser: LPFS_CHROMIUM, or one that is on PATH."""
    return os.environ.get("LPFS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one page."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="lpfs-chromium-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def connect_pipes() -> None:  # the browser reads descriptor 3 and writes descriptor 4
            ours = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        arguments = [
            *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
            f"--user-data-dir={self.profile.name}",
        ]
        self.process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=connect_pipes,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result; events that arrive in the meantime are stored."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self.events.append(reply)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium exited")
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, page: Path | str, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a file or a URL and wait until it is loaded and drawn."""
        self.events.clear()
        self.set_view(width=width, height=height, dark=dark)
        self("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.settle()

    def set_view(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the color scheme."""
        phone = width < 600
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def settle(self) -> None:
        """Wait until two frames were drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))")

    def until(self, code: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true, at most ``seconds``; the caller checks it again."""
        end = time.monotonic() + seconds
        while not self.run(f"!!({code})") and time.monotonic() < end:
            self.settle()

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        result = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def problems(self) -> list[str]:
        """Return the console messages: errors, warnings, violations of the policy, exceptions."""
        messages = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                messages.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Log.entryAdded":
                messages.append(params["entry"]["text"])
            elif event.get("method") == "Runtime.consoleAPICalled":
                messages.append(json.dumps(params["args"]))
        return messages

    def requests(self) -> list[str]:
        """Return the URLs that were requested."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def picture(self, path: Path) -> Path:
        """Write a screenshot of the whole page."""
        self.settle()
        result = self("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(result["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """Print the page."""
        result = self(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=False, paperWidth=8.27, paperHeight=11.69
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(result["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)
        self.profile.cleanup()
