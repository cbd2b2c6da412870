"""A headless Chromium, steered over the DevTools protocol, for tests of pages that people see."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

from support.redis_server import wait_for

_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")


class Browser:
    """One page of a browser.

    Attributes:
        complaints: what the page wrote to its console, and errors that the browser saw.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go to a page; its script may still be at work."""
        self._ask("Page.navigate", url=url)
        wait_for("the page is there", lambda: self.value("document.readyState") == "complete")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark`` colours."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("method") in _COMPLAINTS:
                self.complaints.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result


@contextmanager
def browsing() -> Iterator[Browser]:
    """Run a browser with an empty profile."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs chromium, which is not there: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-proxy-server",
        ]
        words += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            found = Path(folder) / "DevToolsActivePort"
            wait_for("the browser listens", lambda: found.exists() and found.read_text().count("\n"), 60.0)
            port = found.read_text().splitlines()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
                page = next(each for each in json.load(answer) if each["type"] == "page")
            with connect(page["webSocketDebuggerUrl"], max_size=64 << 20, open_timeout=30) as connection:
                yield Browser(connection)
        finally:
            process.kill()
            process.wait()
