"""Chromium, driven: over two pipes it is told to open, press and look, and tells what it requested and what its console said.

The DevTools protocol over ``--remote-debugging-pipe``: JSON messages that end with a zero byte, on the file descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report.test_page_in_browser import browser

SECONDS = 60


class Reloaded(Exception):
    """The page left while it was asked."""


class Tab:
    """One page of a browser."""

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = to, os.fdopen(of, "rb", buffering=0)
        self._number, self._rest, self._session = 0, b"", ""
        self.requested: list[str] = []
        self.said: list[str] = []
        self._downloads: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                if any(word in str(heard.get("error")) for word in ("navigated", "destroyed")):
                    raise Reloaded
                assert "error" not in heard, heard
                return dict(heard["result"])
            self._note(heard.get("method"), heard.get("params", {}))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            # A promise that is looked at again and again has its own, shorter time.
            assert select.select([self._of], [], [], 2 * SECONDS)[0], f"the browser is silent: {self.said}"
            more = self._of.read(1 << 16)
            assert more, "the browser ended"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif method == "Browser.downloadWillBegin":
            self._downloads.append(params["suggestedFilename"])
        elif method == "Browser.downloadProgress":
            self._downloads.append(params["state"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.said.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.said.append(params["entry"]["text"])

    def open(self, address: str, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.resize(width, height)
        self.call("Page.navigate", url=address)

    def resize(self, width: int, height: int = 1000) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def saved(self, query: str, folder: Path) -> Path:
        """Press the space bar on an element that saves a file; returns the file, in ``folder``, when it is there."""
        of_page, self._session = self._session, ""
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), eventsEnabled=True)
        self._session = of_page
        self.see(f"document.querySelector({json.dumps(query)}).focus()")
        self._downloads.clear()
        self.press(" ", 32)
        while "completed" not in self._downloads:
            heard = self._hear()
            self._note(heard.get("method"), heard.get("params", {}))
        return folder / self._downloads[0]

    def see(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """The value of an expression as soon as it is true, which the browser looks for at each of its frames."""
        script = f"""new Promise((then, fail) => {{
          const ends = Date.now() + {1000 * SECONDS};
          const look = () => {{
            let found; try {{ found = {expression}; }} catch {{ found = undefined; }}
            if (found) then(found); else if (Date.now() > ends) then("gave up"); else setTimeout(look, 20);
          }};
          look();
        }})"""
        found = None
        while found is None:  # The page may be loaded anew meanwhile.
            with contextlib.suppress(Reloaded):
                found = self.see(script)
        assert found != "gave up", (expression, self.said)
        return found

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def _mouse(self, kind: str, x: float, y: float, clicks: int = 1) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=clicks)

    def drag(self, query: str, first: float, last: float) -> None:
        """Drag the mouse over an element, between two shares of its width."""
        left, top, width, height = self._box(query)
        x, y = [left + share * width for share in (first, (first + last) / 2, last)], top + height / 2
        self._mouse("mousePressed", x[0], y)
        for place in x[1:]:
            self._mouse("mouseMoved", place, y)
        self._mouse("mouseReleased", x[-1], y)

    def double_click(self, query: str) -> None:
        left, top, width, height = self._box(query)
        for clicks in (1, 2):
            for kind in ("mousePressed", "mouseReleased"):
                self._mouse(kind, left + width / 2, top + height / 2, clicks)

    def _box(self, query: str) -> list[float]:
        """Left, top, width and height of an element, which is scrolled to."""
        return list(
            self.see(f"""(() => {{
          const found = document.querySelector({json.dumps(query)});
          found.scrollIntoView({{ block: "center", behavior: "instant" }});
          const box = found.getBoundingClientRect();
          return [box.left, box.top, box.width, box.height];
        }})()""")
        )

    def picture(self, file: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A new tab of a new browser; ``folder`` gets its profile."""
    hear, to = os.pipe()
    of, say = os.pipe()
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        "--no-first-run", "--disable-background-networking", "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]  # fmt: skip

    def place() -> None:
        own = os.dup(hear), os.dup(say)
        os.dup2(own[0], 3)
        os.dup2(own[1], 4)

    process = subprocess.Popen(
        command, preexec_fn=place, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(hear)
    os.close(say)
    try:
        yield Tab(to, of)
    finally:
        process.kill()
        process.wait()
        os.close(to)
