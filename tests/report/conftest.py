"""Runs made up for the report's tests: as small or as long as a test asks, without a disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.record import Run


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """Builds a run; a keyword of :func:`build` changes one thing about it."""

    def build(
        recipe: str = "bfloat16/word",
        seed: int = 0,
        steps: int = 100,
        *,
        loss: Callable[[int], float] = lambda step: 2.0 + 5.0 * math.exp(-step / 30),
        events: tuple[dict[str, Any], ...] = (),
        tables: dict[str, Any] | None = None,
        is_finished: bool = True,
        **more: Any,
    ) -> Run:
        rows = []
        evals = []
        for step in range(1, steps + 1):
            rows.append({"step": step, "loss": loss(step), "seconds": 0.5, **more})
            if step * 5 % steps == 0:
                evals.append({"step": step, "val_loss": loss(step) + 0.1})
        summary = {"recipe": recipe, "val_loss": loss(steps) + 0.1, "bytes_per_param": 8.0}
        config = {"recipe": recipe, "seed": seed, "steps": steps, "model": "llama-1m"}
        folder = Path(f"{recipe.replace('/', '-')}-seed{seed}")
        content = {"config": config, **(tables or {})}
        end = summary if is_finished else None
        run = Run(folder, content, rows, evals, list(events), end)
        # A cached property reads the file when it is first asked for; these runs have none.
        run.__dict__["gauges"] = []
        run.__dict__["fingerprints"] = []
        return run

    return build
