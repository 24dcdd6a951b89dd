"""Runs that a test writes row by row, as a training does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.runs.writer import RunWriter


def begin(folder: Path, recipe: str = "bfloat16/word", seed: int = 0, steps: int = 100, **config: Any) -> RunWriter:
    """A new run, whose writer holds its lock."""
    settings = {"recipe": recipe, "seed": seed, "steps": steps, "model": "llama-1m", **config}
    return RunWriter.create(folder, {"config": settings, "machine": {"device": "cpu"}})


def write_steps(writer: RunWriter, first: int, last: int, **more: Any) -> None:
    """Rows of the steps from ``first`` to ``last``; the loss is 1 / step beyond 2."""
    for step in range(first, last + 1):
        row = {"step": step, "loss": 2.0 + 1.0 / step, "grad_norm": 1.0, "seconds": 0.5, "tokens_per_second": 1000.0}
        writer.step({**row, **more})
