"""Hugging Face's ``trainer_state.json``, which its Trainer, TRL's and Accelerate's examples write into every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.runs.atomic_io import load_json
from narrowgauge.runs.foreign_names import Log

FILE = "trainer_state.json"


def find(path: Path) -> list[Path]:
    """The file itself, that of the folder, or that of the folder's latest checkpoint, which holds those before it."""
    if path.name == FILE and path.is_file():
        return [path]
    if (path / FILE).is_file():
        return [path / FILE]
    checkpoints = [(_step(place), place / FILE) for place in path.glob("checkpoint-*") if (place / FILE).is_file()]
    return [max(checkpoints)[1]] if checkpoints else []


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def read(files: list[Path]) -> Log:
    """The rows of ``log_history``; each ``loss`` is the mean of the steps since the one before.

    Raises:
        ValueError: it is damaged.
    """
    state: Any = load_json(files[0].read_bytes())
    history = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(history, list) or not all(isinstance(row, dict) for row in history):
        raise ValueError("it has no list log_history")
    log = Log()
    for row in history:
        for name, value in row.items():
            if name not in ("step", "epoch"):
                log.add(name, row.get("step"), value)
    done, wanted = state.get("global_step"), state.get("max_steps")
    if isinstance(done, int) and isinstance(wanted, int) and wanted > 0:
        log.config, log.is_finished = {"steps": wanted}, done >= wanted
    return log
