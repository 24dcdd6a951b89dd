"""The server of a live page answers its own address on this machine, and refuses all else alike."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.live.page_server import PageServer


class Fixed:
    """Content that has one version, and a second when it is told."""

    def __init__(self) -> None:
        self.version = 1
        self.changed = threading.Condition()

    def document(self) -> str:
        return "<!doctype html>" + "page" * 5000

    def news(self, since: int) -> tuple[int, str]:
        return self.version, json.dumps({"since": since, "version": self.version})

    def wait(self, since: int, seconds: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.version > since, min(seconds, 5))

    def window(self, first: float, last: float) -> str:
        return json.dumps([first, last])


@pytest.fixture
def server() -> Iterator[PageServer]:
    made = PageServer(Fixed(), token="secret")
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.close()
    thread.join()


def get(server: PageServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_the_page_is_at_its_address_with_headers_that_keep_it_to_itself(server: PageServer) -> None:
    assert server.address == f"http://127.0.0.1:{server.server_port}/secret/"
    status, body, headers = get(server, "/secret/")
    assert status == 200 and body.startswith(b"<!doctype html>")
    assert headers["Cache-Control"] == "no-store" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Python" not in headers["Server"] and "Access-Control-Allow-Origin" not in headers


def test_it_listens_on_the_loopback_address_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", ["/", "/secre/", "/secret2/", "//", "/secret", "/secret/other", "/secret/events/x", "/%73ecret/"]
)
def test_without_the_token_nothing_is_told(server: PageServer, path: str) -> None:
    status, body, _ = get(server, path)
    assert status == 403 and b"page" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::1]", "", "localhost:a"]
)
def test_another_host_is_refused_with_the_right_token(server: PageServer, host: str) -> None:
    assert get(server, "/secret/", Host=host)[0] == 403
    assert get(server, "/secret/events", Host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost:9999", "127.0.0.1:1", "LOCALHOST"])
def test_the_other_end_of_a_tunnel_is_this_machine(server: PageServer, host: str) -> None:
    assert get(server, "/secret/", Host=host)[0] == 200


def test_two_hosts_are_refused(server: PageServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall(b"GET /secret/ HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert b" 403 " in connection.recv(100)


def test_other_methods_are_no_part_of_it(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("POST", "/secret/", b"{}")
    assert connection.getresponse().status == 501


def test_a_window_of_steps_is_asked_for_by_numbers(server: PageServer) -> None:
    assert json.loads(get(server, "/secret/window?from=1.5&to=2e3")[1]) == [1.5, 2000.0]
    assert get(server, "/secret/window?from=a&to=2")[0] == 400
    assert get(server, "/secret/window")[0] == 400


def test_news_come_as_they_happen_and_the_end_is_said(server: PageServer) -> None:
    content = server.content
    assert isinstance(content, Fixed)
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", "/secret/events")
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream"
    assert answer.readline() == b'data: {"since": -1, "version": 1}\n' and answer.readline() == b"\n"
    with content.changed:
        content.version = 2
        content.changed.notify_all()
    assert answer.readline() == b'data: {"since": 1, "version": 2}\n' and answer.readline() == b"\n"
    server.is_closing.set()
    with content.changed:
        content.version = 3
        content.changed.notify_all()
    assert b"event: end" in answer.read()


def test_a_taken_port_is_refused_with_advice(server: PageServer) -> None:
    with pytest.raises(NarrowgaugeError, match="Leave --port out"):
        PageServer(Fixed(), server.server_port)
