"""Weights & Biases: metrics over steps, events as text; online, offline or off as ``WANDB_MODE`` says.

Files go to ``wandb/`` in the run folder, and a resumed run continues the one it began. Nothing can be taken back there: steps
that come again, with the same bits, are logged again.

Source: the guide at docs.wandb.ai/guides/track; version 0.31.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import wandb

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import comparison_of, gauge_numbers, kept_id, numbers_of
from narrowgauge.runs.schema import EVAL, STEP, Row


class WandbRun:
    """A run of Weights & Biases, beside those that the program may have.

    It is named after the run folder, and its project is ``WANDB_PROJECT``, or ``narrowgauge``. The settings are its config. Runs
    of one comparison are a group, named after its folder.

    Raises:
        NarrowgaugeError: nobody is logged in, and it would ask at the terminal.
    """

    def __init__(self, folder: Path, settings: Row, step: int = 0) -> None:
        self.is_finished = False
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, disable_git=True, disable_code=True)
        # Two folders of the same second would be one, and the later run lost.
        quiet.x_sync_dir_suffix = f"part{len([*folder.glob('wandb/*run-*')])}"
        with _logs_in(folder / "wandb" / "cache"):
            if wandb.setup().settings.mode in ("online", "shared") and not wandb.login(prompt=False):
                raise NarrowgaugeError("nobody is logged in to it.", "wandb login, or WANDB_MODE=offline.")
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "narrowgauge"),
                name=folder.resolve().name,
                group=comparison_of(folder),
                id=kept_id(folder / "wandb"),
                dir=folder,
                config=settings,
                resume="allow",
                reinit="create_new",
                settings=quiet,
            )
        self.run.define_metric("*", step_metric="step")

    def step(self, row: Row) -> None:
        self.run.log({"step": row["step"], **numbers_of(STEP, row)})

    def evaluation(self, row: Row) -> None:
        self.run.log({"step": row["step"], **numbers_of(EVAL, row)})

    def gauge(self, row: Row) -> None:
        self.run.log({"step": row["step"], **gauge_numbers(row)})

    def event(self, event: Event) -> None:
        self.is_finished = self.is_finished or event.kind == "finish"
        self.run.log({"step": event.step, f"events/{event.kind}": event.sentence})

    def go_back(self, step: int) -> None:
        """Nothing: what comes again is logged again, over the same step."""

    def close(self) -> None:
        """Upload what is left; its service ends with the process."""
        self.run.finish(exit_code=0 if self.is_finished else 1)


@contextmanager
def _logs_in(folder: Path) -> Iterator[None]:
    """Let the service, a process that the first run starts, write its log there and not into the user's home."""
    name, before = "WANDB_CACHE_DIR", os.environ.get("WANDB_CACHE_DIR")
    os.environ.setdefault(name, str(folder.resolve()))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
