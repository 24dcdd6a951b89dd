"""The server of a live page: this machine's loopback address, one secret token, and nothing else.

Any web page that a browser shows may send requests to the loopback address. It cannot guess the token in the address, and a
name of its own that it points to 127.0.0.1 (DNS rebinding) is refused by the ``Host`` header, which must name this machine. A
tunnel may end on another port than the server's, so ports are not compared. Every refusal is the same short answer.

The standard library's server has a thread for each request; a browser holds one for server-sent events as long as the page is
open.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit

from narrowgauge.errors import NarrowgaugeError

HERE = "127.0.0.1"
HOSTS = frozenset({HERE, "localhost"})
"""Names that a ``Host`` header may have: the loopback address, as it is here and at the other end of a tunnel."""

HEARTBEAT_SECONDS = 15.0
"""Without news, a comment is sent as often: a browser that left is noticed, and a tunnel stays open."""

_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "SAMEORIGIN",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Content(Protocol):
    """What is served; methods are called from several threads."""

    def document(self) -> str:
        """The page."""

    def news(self, since: int) -> tuple[int, str]:
        """The version now, and what is newer than a version as a JSON object."""

    def wait(self, since: int, seconds: float) -> bool:
        """Wait for a newer version at most that long; returns whether there is one."""

    def window(self, first: float, last: float) -> str:
        """The figures over steps in a range of steps, as a JSON object."""


class PageServer(ThreadingHTTPServer):
    """A server on the loopback address.

    Args:
        content: what it serves.
        port: 0 for a free one.
        token: of the address; ``None`` makes one.

    Raises:
        NarrowgaugeError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, content: Content, port: int = 0, token: str | None = None) -> None:
        self.content = content
        self.token = secrets.token_urlsafe(24) if token is None else token
        self.is_closing = threading.Event()
        try:
            super().__init__((HERE, port), _Handler)
        except OSError as error:
            raise NarrowgaugeError(
                f"Cannot serve on port {port} of {HERE}: {error.strerror}.", "Leave --port out for a free one."
            ) from error

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HERE}:{self.server_port}/{self.token}/"

    def close(self) -> None:
        """End all streams, then the server; to be called from another thread than its own."""
        self.is_closing.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that closes a page breaks its connections."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "narrowgauge", ""
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        found = urlsplit(self.path)
        # "/TOKEN/" at least: the page names what it asks for relative to its address.
        token, slash, name = found.path.removeprefix("/").partition("/")
        answer = _ANSWERS.get(name) if slash else None
        is_ours = hmac.compare_digest(token.encode(), self.server.token.encode())
        if not is_ours or answer is None or not is_here(self.headers.get_all("Host", [])):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"Open the address that narrowgauge watch printed.\n")
            return
        answer(self, {name: values[-1] for name, values in parse_qs(found.query).items()})

    def page(self, _: dict[str, str]) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.content.document().encode())

    def window(self, asked: dict[str, str]) -> None:
        try:
            first, last = float(asked["from"]), float(asked["to"])
        except (KeyError, ValueError):
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", b"from and to are numbers of steps.\n")
            return
        self._send(HTTPStatus.OK, "application/json", self.server.content.window(first, last).encode())

    def events(self, _: dict[str, str]) -> None:
        """News as long as the browser listens; a browser that connects again gets everything again."""
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._headers("text/event-stream")
        self.end_headers()
        content, version = self.server.content, -1
        while not self.server.is_closing.is_set():
            version, news = content.news(version)
            self.wfile.write(b"data: " + news.encode() + b"\n\n")
            while not content.wait(version, HEARTBEAT_SECONDS) and not self.server.is_closing.is_set():
                self.wfile.write(b": still here\n\n")
        self.wfile.write(b"event: end\ndata: {}\n\n")

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self._headers(kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)

    def version_string(self) -> str:
        return self.server_version

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the terminal shows the address and what happened, not requests."""


_ANSWERS: dict[str, Callable[[_Handler, dict[str, str]], None]] = {
    "": _Handler.page,
    "events": _Handler.events,
    "window": _Handler.window,
}


def is_here(hosts: list[str]) -> bool:
    """Whether the ``Host`` headers of a request are one that names this machine.

    Example:
        >>> is_here(["127.0.0.1:8000"]), is_here(["localhost"]), is_here(["evil.example:8000"]), is_here([])
        (True, True, False, False)
    """
    if len(hosts) != 1:
        return False
    name, _, port = hosts[0].partition(":")
    return name.lower() in HOSTS and (not port or port.isdecimal())
