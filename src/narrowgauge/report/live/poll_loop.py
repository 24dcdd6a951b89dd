"""Watching: polls run folders, keeps the page's parts, and has the whole record read again from time to time.

The training that is watched needs the processor more. So a poll comes a second after the last, or later where polls are
expensive: a tenth of one core is the most they take. The process that reads the whole record has the lowest priority, comes
again only after ten times as long as it took, and not at all for records of many rows until all runs have ended.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.report.live.live_page import LivePage
from narrowgauge.report.live.notifying import Findings
from narrowgauge.runs.schema import Row

POLL_SECONDS = 1.0
_SHARE = 10.0
"""How many times as long as a poll or a report took the next one comes later."""
MOST_ROWS = 150_000
"""Of runs that are under way, the most rows of steps that are read as a whole again and again: about half a minute."""


class Watch:
    """The content of a live page, and the loop that keeps it.

    Args:
        paths: as for :class:`~narrowgauge.report.live.live_page.LivePage`.
        on_findings: is called with findings of weight that happened since the watch began.
    """

    def __init__(self, paths: Sequence[Path], on_findings: Callable[[list[Row]], object] = lambda rows: None) -> None:
        self.page = LivePage(paths)
        self._on_findings = on_findings
        self._findings: Findings | None = None
        self._changed = threading.Condition()
        self._ends = threading.Event()
        self._whole: subprocess.Popen[bytes] | None = None
        self._whole_of: object = None
        self._whole_after, self._whole_began = 0.0, 0.0
        self._made: dict[str, Any] | None = None
        self._is_stale, self._drawn_at = True, -math.inf

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Poll until :meth:`end` is called."""
        while not self._ends.is_set():
            began = time.thread_time()
            is_read = self.poll()
            cost = time.thread_time() - began
            self._ends.wait(max(POLL_SECONDS, _SHARE * cost) if is_read else 0.01)
        if self._whole is not None:
            self._whole.kill()

    def end(self) -> None:
        self._ends.set()
        with self._changed:
            self._changed.notify_all()

    def settle(self, seconds: float) -> None:
        """Show the end of runs that have ended: wait for the whole record, at most that long."""
        ends = time.monotonic() + seconds
        self._whole_after = 0.0
        while time.monotonic() < ends:
            self.poll()
            if self.page.is_read and self._whole is None and self._made is None:
                return
            self._ends.wait(0.05)

    def poll(self) -> bool:
        """Read what is new once; returns whether everything has been read."""
        with self._changed:
            changed = self.page.poll()
            self._is_stale |= changed | self._take_whole()
            is_read = self.page.is_read
            # A long record is read in many polls, of which not each is drawn.
            if self._is_stale and (is_read or time.monotonic() - self._drawn_at > POLL_SECONDS):
                self.page.update()
                self._is_stale, self._drawn_at = False, time.monotonic()
                self._changed.notify_all()
            if is_read:
                self._notify()
                self._start_whole()
        return is_read

    def _notify(self) -> None:
        runs, states = list(self.page.runs.values()), self.page.states
        if self._findings is None:
            self._findings = Findings()
            self._findings.new(runs, states)
        elif rows := self._findings.new(runs, states):
            self._on_findings(rows)

    # ── the whole record ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_whole(self) -> None:
        page = self.page
        now = [
            (str(path), run.num_steps, run.summary, state.word)
            for (path, run), state in zip(page.runs.items(), page.states.values(), strict=True)
        ]
        if self._whole is not None or not now or now == self._whole_of or time.monotonic() < self._whole_after:
            return
        is_under_way = any(state.word in ("running", "waiting") for state in page.states.values())
        if is_under_way and page.num_rows > MOST_ROWS:
            page.whole = page.whole or {"trouble": _too_long(page.num_rows, page.paths)}
            return
        self._whole_of, self._whole_began = now, time.monotonic()
        asked = {"folders": [str(path) for path in page.runs], "named": [str(path) for path in page.paths]}
        command = [sys.executable, "-m", "narrowgauge.report.live.whole_report"]
        self._whole = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._whole.stdin is not None
        self._whole.stdin.write(json.dumps(asked).encode())
        self._whole.stdin.close()
        threading.Thread(target=self._read_whole, args=(self._whole,), daemon=True).start()

    def _read_whole(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        text = process.stdout.read()
        process.wait()
        try:
            made: dict[str, Any] = json.loads(text)
        except ValueError:
            made = {"trouble": "The whole record could not be read; narrowgauge report says why."}
        with self._changed:
            self._made, self._whole = made, None
            self._whole_after = time.monotonic() + _SHARE * (time.monotonic() - self._whole_began)

    def _take_whole(self) -> bool:
        made, self._made = self._made, None
        if made is None:
            return False
        # What was made before stays where there is trouble: it is older, and not wrong.
        self.page.whole = made if "trouble" not in made else {**self.page.whole, **made}
        return True

    # ── what is served ───────────────────────────────────────────────────────────────────────────────────────────────

    def document(self) -> str:
        with self._changed:
            return self.page.document()

    def news(self, since: int) -> tuple[int, str]:
        with self._changed:
            return self.page.version, self.page.news(since)

    def wait(self, since: int, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.page.version > since or self._ends.is_set(), seconds)

    def window(self, first: float, last: float) -> str:
        with self._changed:
            return json.dumps(self.page.figures((first, last)), allow_nan=False)


def _too_long(num_rows: int, paths: Sequence[Path]) -> str:
    named = " ".join(str(path) for path in paths)
    return (
        f"These runs hold {num_rows:,} rows, and are under way: this section follows when they have ended. "
        f"narrowgauge report {named} makes it now, which takes about {num_rows / 5000 / 60:.0f} minutes."
    )
