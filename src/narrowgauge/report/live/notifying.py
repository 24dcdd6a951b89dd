"""Findings of weight, sent to an address as they happen: one POST of a JSON object each.

What needs attention is an event that is not routine, and a run that died. Of events with the same kind, detector and tensor,
a run sends the first alone: an alarm that speaks in every step is one finding. What had happened before the watch began is on
the page, and is not sent. A receiver that fails is tried again twice, then the finding is left
out and said so.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from urllib.parse import urlsplit

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.event_commands import command_of
from narrowgauge.report.live.live_page import finding_rows
from narrowgauge.report.live.live_run import LiveRun, State
from narrowgauge.runs.lines import json_value
from narrowgauge.runs.schema import Row

TRIES = 3
_SECONDS = 10.0
"""The longest wait for a receiver."""

Key = tuple[str, ...]


@dataclass
class Findings:
    """The findings of runs, each once.

    Args:
        known: those that were there before, or were given out.
    """

    known: set[Key] = field(default_factory=set)

    def new(self, runs: Iterable[LiveRun], states: Mapping[Path, State]) -> list[Row]:
        """The findings that were not there before, in the form in which they are sent."""
        found = [(key, row) for run in runs for key, row in _findings(run, states.get(run.path))]
        fresh = [(key, row) for key, row in found if key not in self.known]
        first = dict(reversed(fresh))
        self.known |= set(first)
        return [row for key, row in fresh if first[key] is row]


def _findings(run: LiveRun, state: State | None) -> Iterator[tuple[Key, Row]]:
    for event in finding_rows(run):
        key = (str(run.path), *(str(event.get(name, "")) for name in ("kind", "detector", "tensor")))
        fields = ("kind", "step", "message", "advice", "tensor", "value", "threshold")
        row = {name: event[name] for name in fields if event.get(name) is not None}
        # Of a run that ended, how it goes on comes first.
        command = (state.command if state is not None else "") or command_of(run.run, event)
        yield key, {"run": str(run.path), **row, "command": command}
    if state is not None and state.word == "died":
        row = {"kind": "died", "step": state.step, "message": state.said, "command": state.command}
        yield (str(run.path), "died", str(state.step)), {"run": str(run.path), **row}


class Webhook:
    """Sends findings to an address, from a thread of its own: a slow receiver holds up nothing.

    Args:
        url: ``http://`` or ``https://``.
        say: is told of findings that could not be sent.

    Raises:
        NarrowgaugeError: the address is none.
    """

    def __init__(self, url: str, say: Callable[[str], object]) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise NarrowgaugeError(f"--notify {url} is no address to send to.", "Give one that begins with https://.")
        self.url, self._say = url, say
        self._queue: Queue[Row | None] = Queue()
        self._thread = threading.Thread(target=self._send_all, daemon=True)
        self._thread.start()

    def send(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._queue.put(row)

    def close(self, seconds: float = 2 * _SECONDS) -> None:
        """Send what is left, at most that long."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _send_all(self) -> None:
        while (row := self._queue.get()) is not None:
            failures: list[str] = []
            while len(failures) < TRIES and (failure := self._failure(row)):
                failures.append(failure)
            if len(failures) == TRIES:
                self._say(f"note: {self.url} did not take the finding {row['kind']} of {row['run']}: {failures[-1]}.")

    def _failure(self, row: Row) -> str:
        """Send a finding; returns why that failed, or nothing."""
        body = json.dumps(json_value(row)).encode()
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "User-Agent": "narrowgauge"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                answer.read(1)
        except (OSError, ValueError) as error:
            return str(getattr(error, "reason", error))
        return ""
