"""The live page: the report of unfinished runs, rendered again when they grow, and served locally
to a browser.

``narrowgauge watch`` leaves the processor to training: it runs at the lowest priority, and waits
ten times as long as the last rendering took. Nothing is written into the run folders.

Any web page in a browser may send requests to the loopback address. It cannot guess the token in
the address. It may point its own name to 127.0.0.1 (DNS rebinding): the ``Host`` header check
refuses that. A tunnel may end on another port, so ports are not compared.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.publishing import read_runs
from narrowgauge.report.runs_page import render
from narrowgauge.runs.foreign_logs import log_files
from narrowgauge.runs.places import ROW_FILES, run_folders

HERE = "127.0.0.1"
HOSTS = frozenset({HERE, "localhost"})
"""Allowed names of a ``Host`` header: the loopback address, here and at the other end of a tunnel.
"""
FILES = ("run.toml", "summary.json", *(f"{name}.jsonl" for name in ROW_FILES))
"""Files of a run that a page shows."""
POLL_SECONDS = 2.0
_REST = 10.0
"""Wait before the next rendering, as a multiple of the last rendering's time."""


# ── rendering ─────────────────────────────────────────────────────────────────────────────────────


def stamp_of(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return the name, size and time of each file of the runs in ``paths``; empty without runs."""
    files = []
    for path in paths:
        with contextlib.suppress(NarrowgaugeError, OSError):
            for folder in run_folders([path]):
                record_files = map(folder.joinpath, FILES)
                for file in filter(Path.is_file, [*record_files, *log_files(folder)]):
                    status = file.stat()
                    files.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(files)


def rendered(paths: Sequence[Path]) -> bytes:
    """Render the page of the runs in ``paths``.

    Raises:
        NarrowgaugeError: the report cannot show the runs.
    """
    return render(compare_runs(read_runs(paths)), live=True).encode()


class LivePage:
    """Render the report of runs in folders that training writes, or will write.

    Args:
        paths: run folders, or folders of runs. They may hold no run yet.
    Attributes:
        current: the number of the rendering, and its page; 0 before the first run.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self.current: tuple[int, bytes] = (0, b"")
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._next = 0.0

    def poll(self) -> bool:
        """Render the page if its runs have grown and enough time has passed.

        Return whether it was rendered.

        Raises:
            NarrowgaugeError: the first rendering failed. After that, keep the last rendering: it is
                older, but correct.
        """
        began = time.monotonic()
        stamp = stamp_of(self.paths)
        if not stamp or stamp == self._stamp or began < self._next:
            return False
        self._stamp = stamp
        number = self.current[0]
        try:
            self.current = (number + 1, rendered(self.paths))
        except NarrowgaugeError:
            if not number:
                raise
            return False
        now = time.monotonic()
        self._next = now + _REST * (now - began)
        return True


# ── serving ───────────────────────────────────────────────────────────────────────────────────────

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """Serve one page on the loopback address.

    Port 0 is a free port.

    Raises:
        NarrowgaugeError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page, self.token = page, secrets.token_urlsafe(24)
        try:
            super().__init__((HERE, port), _Handler)
        except OSError as error:
            raise NarrowgaugeError(
                f"Cannot serve on port {port} of {HERE}: {error.strerror}.",
                "Leave --port out for a free one.",
            ) from error

    @property
    def address(self) -> str:
        """Return the address to open in a browser."""
        return f"http://{HERE}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a browser that closes a page breaks its connections."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "narrowgauge"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        # Require "/TOKEN/": the page asks for its version relative to its address.
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        is_ours = hmac.compare_digest(token.encode(), self.server.token.encode())
        version, page = self.server.page.current
        if (
            not is_ours
            or not slash
            or name not in ("", "version")
            or not is_here(self.headers.get_all("Host", []))
        ):
            self._send(
                HTTPStatus.FORBIDDEN,
                "text/plain",
                b"Open the address that narrowgauge watch printed.\n",
            )
        elif name:
            self._send(HTTPStatus.OK, "text/plain", str(version).encode())
        else:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            **_HEADERS,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the terminal shows the address, not requests."""


def is_here(hosts: list[str]) -> bool:
    """Return whether a request has exactly one ``Host`` header, which names this machine.

    Example:
        >>> is_here(["127.0.0.1:8000"]), is_here(["localhost"]), is_here(["evil.example:8000"]), is_here([])
        (True, True, False, False)
    """
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].partition(":")
    return name.lower() in HOSTS and (not port or port.isdecimal())
