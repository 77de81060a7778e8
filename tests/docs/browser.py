"""A real browser for the tests of the site, spoken to over Chromium's DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_SECONDS = 120.0
"""How long an answer may take on a busy machine."""

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


class Page:
    """A tab of a browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._last_id = 0
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Sends a command and returns its result; events that come before it are kept."""
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                return message["result"]
            self._events.append(message)

    def open(self, address: str) -> None:
        """Opens a page and waits until it and all that it refers to are loaded."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(json.loads(self._socket.recv()))
        # What scripts have thrown or logged meanwhile comes before the answer to this.
        self.evaluate("new Promise(done => setTimeout(done, 50))")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        return answer["result"].get("value")

    def set_width(self, width: int, height: int = 900, mobile: bool = False) -> None:
        """Sets the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )

    def save_screenshot(self, path: Path) -> None:
        """Writes a picture of the whole page."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def problems(self) -> list[str]:
        """Returns what went wrong since the page was opened: errors and failed requests."""
        found: list[str] = []
        for event in self._events:
            params = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(params["exceptionDetails"]["text"])
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                    found.append(str(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found

    def requests(self) -> list[str]:
        """Returns the addresses that were asked for since the page was opened."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Starts Chromium with an empty profile in a folder; gives a tab, and ends the browser."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        endpoint = next(line for line in process.stderr if line.startswith("DevTools listening on"))
        with _connect(endpoint.split()[-1]) as browser:
            browser.send(json.dumps({"id": 0, "method": "Target.getTargets"}))
            targets = json.loads(browser.recv())["result"]["targetInfos"]
            target = next(t["targetId"] for t in targets if t["type"] == "page")
            address = endpoint.split()[-1].partition("/devtools/")[0]
            with _connect(f"{address}/devtools/page/{target}") as socket:
                yield Page(socket)
            browser.send(json.dumps({"id": 1, "method": "Browser.close"}))
        process.wait(_SECONDS)
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _connect(address: str) -> contextlib.closing[Any]:
    import websocket

    return contextlib.closing(websocket.create_connection(address, timeout=_SECONDS))
