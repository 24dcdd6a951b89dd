"""The live page: the report of runs that are being written, rendered again when they grow, and served to a browser here.

The training that is watched needs the processor more. So the page is rendered in a process of its own at the lowest priority,
and again only after ten times as long as the last rendering took. Nothing is written into the run folders.

Any web page that a browser shows may send requests to the loopback address. It cannot guess the token in the address. A name of
its own that it points to 127.0.0.1 (DNS rebinding) is refused by the ``Host`` header. A tunnel may end on another port than the
server's, so ports are not compared.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.publishing import run_folders
from narrowgauge.runs.lines import ROW_FILES

HERE = "127.0.0.1"
HOSTS = frozenset({HERE, "localhost"})
"""Names that a ``Host`` header may have: the loopback address, here and at the other end of a tunnel."""
FILES = ("run.toml", "summary.json", *(f"{name}.jsonl" for name in ROW_FILES))
"""The files of a run that a page shows."""
POLL_SECONDS = 2.0
_REST = 10.0
"""How many times as long as a rendering took the next one waits."""


# ── rendering ───────────────────────────────────────────────────────────────────────────────────────────────────────


def stamp_of(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """Return the name, size and time of each file of the runs that paths lead to; nothing while there is no run."""
    files = []
    for path in paths:
        with contextlib.suppress(NarrowgaugeError, OSError):
            for folder in run_folders([path]):
                for file in (folder / name for name in FILES):
                    with contextlib.suppress(OSError):
                        status = file.stat()
                        files.append((str(file), status.st_size, status.st_mtime_ns))
    return tuple(files)


def rendered(paths: Sequence[Path]) -> bytes:
    """Render the page in a process of the lowest priority.

    Raises:
        NarrowgaugeError: the report refuses the runs.
    """
    command = [sys.executable, "-m", "narrowgauge.report.live", *map(str, paths)]
    process = subprocess.run(command, capture_output=True, check=False)
    if process.returncode:
        raise NarrowgaugeError(process.stderr.decode(errors="replace").strip().rpartition("\n")[2])
    return process.stdout


def waiting_page(paths: Sequence[Path], trouble: str = "") -> bytes:
    """Return the page before there is a run, or while the runs cannot be read."""
    from narrowgauge.report.page import document

    text = trouble or "No run is here yet; the page begins when one does."
    return document(
        "waiting.html.j2", [], title="Waiting for a run", paths=list(map(str, paths)), text=text, live=True
    ).encode()


class LivePage:
    """The report of runs in folders that are being written, or will be.

    Args:
        paths: run folders, or folders that hold some; they need not exist yet.
        render: makes the page of these paths.
    """

    def __init__(self, paths: Sequence[Path], render: Callable[[Sequence[Path]], bytes] = rendered) -> None:
        self.paths, self._render = list(paths), render
        self.current: tuple[int, bytes] = (0, waiting_page(paths))
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._rendered_at, self._seconds = 0.0, 0.0
        self._ends = threading.Event()

    def poll(self, is_last: bool = False) -> bool:
        """Render the page again where its runs have grown and the last rendering is long enough ago; return whether it was."""
        now, stamp = time.monotonic(), stamp_of(self.paths)
        if not stamp or stamp == self._stamp or not (is_last or now - self._rendered_at >= _REST * self._seconds):
            return False
        self._stamp = stamp
        try:
            page = self._render(self.paths)
        except NarrowgaugeError as error:
            # What was rendered before stays: it is older, and not wrong.
            page = self.current[1] if self._seconds else waiting_page(self.paths, str(error))
        else:
            self._rendered_at = time.monotonic()
            self._seconds = self._rendered_at - now
        self.current = (self.current[0] + 1, page)
        return True

    def run(self) -> None:
        """Poll until :meth:`end` is called."""
        while not self._ends.wait(POLL_SECONDS):
            self.poll()

    def end(self) -> None:
        self._ends.set()


# ── serving ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    """A server of one page on the loopback address.

    Args:
        page: what it serves.
        port: 0 for a free one.
        token: of the address; ``None`` draws one.

    Raises:
        NarrowgaugeError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, page: LivePage, port: int = 0, token: str | None = None) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(24) if token is None else token
        try:
            super().__init__((HERE, port), _Handler)
        except OSError as error:
            raise NarrowgaugeError(
                f"Cannot serve on port {port} of {HERE}: {error.strerror}.", "Leave --port out for a free one."
            ) from error

    @property
    def address(self) -> str:
        """Return the address to open in a browser."""
        return f"http://{HERE}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: a browser that closes a page breaks its connections."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "narrowgauge", ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        # "/TOKEN/" at least: the page asks for its version relative to its address.
        token, slash, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        is_ours = hmac.compare_digest(token.encode(), self.server.token.encode())
        version, page = self.server.page.current
        if not is_ours or not slash or name not in ("", "version") or not is_here(self.headers.get_all("Host", [])):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that narrowgauge watch printed.\n")
        elif name:
            self._send(HTTPStatus.OK, "text/plain", str(version).encode())
        else:
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return self.server_version

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: the terminal shows the address, not requests."""


def is_here(hosts: list[str]) -> bool:
    """Return whether the ``Host`` headers of a request are one that names this machine.

    Example:
        >>> is_here(["127.0.0.1:8000"]), is_here(["localhost"]), is_here(["evil.example:8000"]), is_here([])
        (True, True, False, False)
    """
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].partition(":")
    return name.lower() in HOSTS and (not port or port.isdecimal())


def main() -> None:
    """Write the page of the paths on the command line to standard output."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(19)
    # Imported late: the page takes most of the time to load.
    from narrowgauge.analysis.comparison.comparison import compare_runs
    from narrowgauge.report.publishing import read_runs, title_of
    from narrowgauge.report.runs_page import render

    paths = sys.argv[1:]
    try:
        comparison = compare_runs(read_runs(paths))
        page = render(comparison, title_of(comparison), live=True)
    except NarrowgaugeError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(page.encode())


if __name__ == "__main__":
    main()
