"""A real Chromium without a window, spoken to over a pipe (the DevTools protocol): no package is needed for it."""

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
PATIENCE = 60.0  # seconds until an answer is given up on


def find_chromium() -> str | None:
    """Return the browser: LPFS_CHROMIUM, or what is on the path."""
    return os.environ.get("LPFS_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one page."""

    def __init__(self, program: str) -> None:
        self.profile = tempfile.TemporaryDirectory(prefix="lpfs-chromium-", ignore_cleanup_errors=True)
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def take_pipes() -> None:  # the browser reads descriptor 3 and writes descriptor 4
            ours = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        arguments = [
            *(
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ),
            *("--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"),
            f"--user-data-dir={self.profile.name}",
        ]
        self.process = subprocess.Popen(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=take_pipes,
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

    def __call__(self, method: str, **given: Any) -> dict[str, Any]:
        """Send a command and return its answer; events that come meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": given}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                return found["result"]
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open a file and wait until it is loaded and drawn."""
        self.events.clear()
        self.look(width=width, height=height, dark=dark)
        self("Page.navigate", url=path.resolve().as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self._next())
        self.settle()

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window, and light or dark."""
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
        self.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))"
        )

    def until(self, code: str, seconds: float = 20.0) -> None:
        """Wait until something is true; go on after so many seconds, so that the test says what is not."""
        end = time.monotonic() + seconds
        while not self.run(code) and time.monotonic() < end:
            self.settle()

    def run(self, code: str) -> Any:
        """Return what an expression of JavaScript gives, a promise awaited."""
        found = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def problems(self) -> list[str]:
        """Return what the console said: errors, warnings, violations of the policy, exceptions."""
        found = []
        for each in self.events:
            told = each.get("params", {})
            if each.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(told["exceptionDetails"]))
            elif each.get("method") == "Log.entryAdded":
                found.append(told["entry"]["text"])
            elif each.get("method") == "Runtime.consoleAPICalled":
                found.append(json.dumps(told["args"]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        return [
            each["params"]["request"]["url"]
            for each in self.events
            if each.get("method") == "Network.requestWillBeSent"
        ]

    def picture(self, path: Path) -> Path:
        """Write a picture of the whole page."""
        self.settle()
        found = self("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """Print the page."""
        found = self(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=False, paperWidth=8.27, paperHeight=11.69
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(20)
        os.close(self._out)
        os.close(self._in)
        self.profile.cleanup()
