"""Findings of weight: each is sent once, to a server of this machine, and a receiver that fails is named."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.live.live_run import LiveRun, State
from narrowgauge.report.live.notifying import Findings, Webhook
from narrowgauge.report.live.poll_loop import Watch
from narrowgauge.runs.events import Event
from report.live.growing_runs import begin, write_steps

RUNNING = State("running")


@pytest.fixture
def receiver() -> Iterator[tuple[str, Queue[Any]]]:
    heard: Queue[Any] = Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            heard.put((self.headers["Content-Type"], json.loads(body)))
            self.send_response(500 if self.path == "/fails" else 204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_finding_is_given_once_and_a_routine_event_never(tmp_path: Path) -> None:
    with begin(tmp_path / "a") as writer:
        run, findings, states = LiveRun(writer.path), Findings(), {tmp_path / "a": RUNNING}
        writer.event(Event("start", 0, "it began"))
        for step in (3, 4):
            writer.event(Event("skip", step, f"skipped {step}", advice="Lower the rate.", detector="d"))
        run.poll()
        (row,) = findings.new([run], states)
        assert row == {
            "run": str(run.path), "kind": "skip", "step": 3, "message": "skipped 3", "advice": "Lower the rate.",
            "command": f"narrowgauge diagnose {run.path}",
        }  # fmt: skip
        writer.event(Event("skip", 5, "skipped 5", detector="d"))
        writer.event(Event("overflow", 5, "too large", tensor="a", detector="d"))
        writer.event(Event("overflow", 5, "too large", tensor="b", detector="d"))
        run.poll()
        assert [row["tensor"] for row in findings.new([run], states)] == ["a", "b"]
        died = State("died", "nobody writes it", "narrowgauge resume a", 7)
        (row,) = findings.new([run], {run.path: died})
        assert (row["kind"], row["step"], row["command"]) == ("died", 7, "narrowgauge resume a")
        assert findings.new([run], {run.path: died}) == []


def test_what_happened_before_the_watch_is_not_sent(tmp_path: Path) -> None:
    sent: list[Any] = []
    with begin(tmp_path / "a") as writer:
        write_steps(writer, 1, 3)
        writer.event(Event("loss_spike", 3, "before"))
        watch = Watch([tmp_path], sent.extend)
        watch.page.whole = {"trouble": "not here"}
        watch._start_whole = lambda: None  # type: ignore[method-assign]
        watch.poll()
        writer.event(Event("growth", 4, "after"))
        watch.poll()
        watch.poll()
    assert [row["message"] for row in sent] == ["after"]


def test_findings_are_posted_as_json(receiver: tuple[str, Queue[Any]]) -> None:
    url, heard = receiver
    said: list[str] = []
    hook = Webhook(url, said.append)
    hook.send([{"kind": "skip", "run": "a", "value": float("inf")}, {"kind": "growth", "run": "b"}])
    hook.close()
    assert [heard.get_nowait() for _ in range(2)] == [
        ("application/json", {"kind": "skip", "run": "a", "value": "inf"}),
        ("application/json", {"kind": "growth", "run": "b"}),
    ]
    assert heard.empty() and said == []


def test_a_receiver_that_fails_is_tried_three_times_and_named(receiver: tuple[str, Queue[Any]]) -> None:
    url, heard = receiver
    said: list[str] = []
    hook = Webhook(f"{url}/fails", said.append)
    hook.send([{"kind": "skip", "run": "a"}])
    hook.close()
    assert heard.qsize() == 3 and len(said) == 1 and "did not take the finding skip of a" in said[0]


@pytest.mark.parametrize("url", ["", "example.org", "file:///etc/passwd", "https://"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(NarrowgaugeError, match="no address"):
        Webhook(url, print)
