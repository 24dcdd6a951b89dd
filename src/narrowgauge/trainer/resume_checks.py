"""Check a run folder before a resume: required files, and settings that changed since the run began.

Every checkpoint holds the settings of its run. Nothing here needs PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import short
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.tables import json_value
from narrowgauge.trainer.config import TrainConfig

_FREE = ("out", "stop_after", "verify_every")
"""Settings that change no number of a run."""


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text. A missing one is at its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    first, second = (json_value({**TrainConfig().to_dict(), **table}) for table in (before, now))

    def text(table: Mapping[str, Any], name: str) -> str:
        return short(table[name]) if name in table else "not set"

    names = [name for name in {**first, **second} if name not in _FREE and first.get(name) != second.get(name)]
    return [(name, text(first, name), text(second, name)) for name in names]


def require_same_run(run: Run, saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Refuse edited settings that a started run cannot change: its model, storage and split of the data.

    ``saved`` are the settings in the run's checkpoint; empty without one.
    """
    for name, old, new in changed_settings(saved, config.to_dict()) if saved else ():
        is_fixed = name in ("seed", "held_out") or (name == "model" and {old, new} & MODELS.keys())
        if is_fixed or (name == "recipe" and parse(saved["recipe"]).storage != config.recipe.storage):
            raise RecordError(
                f"{run.path / 'run.toml'} says {name} {new}, and the run began with {old}.",
                "Put it back, or start another run with narrowgauge train.",
            )


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
            f"{folder} is finished: {counted(run.summary['steps'], 'step')}, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    return run
