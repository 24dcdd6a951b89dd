"""Check a run folder before a resume: required files, and settings that changed since the run began.

Every checkpoint holds the settings of its run. If ``run.toml`` has others, a resume would continue another run than the recorded
one. So it is refused unless the change is accepted. How a run is distributed over ranks may change. Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.lines import json_value
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import short
from narrowgauge.trainer.config import OF_RANKS, TrainConfig

FIXED = tuple(
    field.name for field in fields(TrainConfig) if field.name not in ("out", "stop_after", "verify_every", *OF_RANKS)
)
"""Settings that decide the numbers of a run."""


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"}, FIXED)
        [('lr', '0.003', '0.007')]
    """
    defaults = TrainConfig().to_dict()
    changes = []
    for name in names:
        old, new = (json_value(table.get(name, defaults.get(name))) for table in (before, now))
        if old != new:
            before_text, now_text = ("not set" if value is None else short(value) for value in (old, new))
            changes.append((name, before_text, now_text))
    return changes


def run_of_trainer(folder: Path) -> Run:
    """Return the record of a run of ``narrowgauge train``. Its settings are not parsed."""
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        program = run.run.get("recorder", {}).get("program") or "another program"
        raise RecordError(
            f"{folder} records a loop of its own, in {program}, which has the model and its data.",
            "Name a run of narrowgauge train. A loop with RunRecorder(resume=True) continues when its program starts again.",
        )
    return run


def unfinished_run(folder: Path) -> Run:
    """Return the record of a run that is not finished."""
    run = run_of_trainer(folder)
    if run.summary is not None:
        raise RecordError(
            f"{folder} is finished: {run.summary['steps']} steps, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    return run
