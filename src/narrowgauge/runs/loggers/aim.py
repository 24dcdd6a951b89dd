"""Aim: metrics over steps, settings as parameters, events as texts.

Everything goes to a repository in ``aim/`` of the run folder, or to the one that ``AIM_REPO`` names (a folder, or
``aim://host:port``). A resumed run continues the one it began; a step that comes again takes the place of the earlier one.

Source: aimstack.readthedocs.io; version 3.29.
"""

from __future__ import annotations

import os
from pathlib import Path

import aim

from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import comparison_of, gauge_numbers, kept_id, numbers_of
from narrowgauge.runs.schema import EVAL, STEP, Row


class AimRun:
    """A run of Aim, named after the run folder; the settings are its parameters."""

    def __init__(self, folder: Path, settings: Row, step: int = 0) -> None:
        own = folder / "aim"
        own.mkdir(exist_ok=True)
        quiet = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
        made: list[aim.Run] = []

        def begin() -> str:
            made.append(aim.Run(repo=os.environ.get("AIM_REPO", str(own)), experiment="narrowgauge", **quiet))
            return str(made[0].hash)

        known = kept_id(own, begin)
        self.run = made[0] if made else aim.Run(known, repo=os.environ.get("AIM_REPO", str(own)), **quiet)
        self.run.name = folder.resolve().name
        self.run["settings"] = settings
        if group := comparison_of(folder):
            self.run["comparison"] = group

    def step(self, row: Row) -> None:
        self._track(numbers_of(STEP, row), row["step"])

    def evaluation(self, row: Row) -> None:
        self._track(numbers_of(EVAL, row), row["step"])

    def gauge(self, row: Row) -> None:
        self._track(gauge_numbers(row), row["step"])

    def event(self, event: Event) -> None:
        self.run.track(aim.Text(event.sentence), name=f"events/{event.kind}", step=event.step)

    def go_back(self, step: int) -> None:
        """Nothing: what comes again takes the place of what is there."""

    def close(self) -> None:
        self.run.close()

    def _track(self, numbers: dict[str, float], step: int) -> None:
        for tag, value in numbers.items():
            self.run.track(value, name=tag, step=step)
