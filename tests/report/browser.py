"""A real headless chromium through its DevTools protocol: what a page logs, loads and shows."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE = 120.0
"""Seconds to wait for anything: the machine may be busy."""


class Tab:
    """One page. Everything it said and asked for is kept in `logged` and `requested`."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.logged: list[str] = []
        """Console errors and warnings, and exceptions."""
        self.requested: list[str] = []
        """Addresses of all requests."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command and its result; events in between are kept."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.logged.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.logged.append(f"{params['type']}: {[argument.get('value') for argument in params['args']]}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.logged.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never came true: {expression}; logged: {self.logged}"
            time.sleep(0.05)

    def size(self, width: int, height: int = 900) -> None:
        """Give the window a size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, page: Path, width: int = 1280) -> None:
        """Load a report from disk and wait until its charts are drawn."""
        self.size(width)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until("document.body && document.body.dataset.state === 'drawn'")

    def choose(self, name: str, value: str) -> None:
        """Choose in one of the report's menus and wait for the charts."""
        self.evaluate(
            f"(() => {{ const box = document.getElementById('choose-{name}'); box.value = {json.dumps(value)};"
            "box.dispatchEvent(new Event('change')); })()"
        )
        self.until("document.body.dataset.state === 'drawn'")

    def hover(self, selector: str) -> None:
        """Move the mouse onto the middle of an element."""
        x, y = self.evaluate(
            f"(() => {{ const mark = document.querySelector({json.dumps(selector)});"
            "mark.scrollIntoView({block: 'center'}); const box = mark.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for at in (x - 3, x):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=at, y=y)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        """What it looks like, as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Tab]:
    """A fresh chromium with one tab; `profile` is an empty folder for its files."""
    assert CHROMIUM is not None
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
    command = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with connect(_tab_address(profile / "DevToolsActivePort"), max_size=None, open_timeout=PATIENCE) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def _tab_address(file: Path) -> str:
    """The socket of the first tab, once chromium has written down where it listens."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if file.is_file() and (lines := file.read_text().splitlines()):
            with urlopen(f"http://127.0.0.1:{lines[0]}/json/list", timeout=PATIENCE) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("chromium did not come up")
