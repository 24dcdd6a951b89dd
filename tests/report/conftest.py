"""Runs made up for the report's tests: as small or as long as a test asks, without a disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.record import Run

Row = dict[str, Any]


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """Builds a run; a keyword of :func:`build` changes one thing about it."""

    def build(
        recipe: str = "bfloat16/word",
        seed: int = 0,
        steps: int = 100,
        *,
        loss: Callable[[int], float] = lambda step: 2.0 + 5.0 * math.exp(-step / 30),
        bytes_per_param: float = 8.0,
        events: tuple[Row, ...] = (),
        gauges: list[Row] | None = None,
        config: Row | None = None,
        more: Row | None = None,
    ) -> Run:
        same = {"grad_norm": 1.0, "seconds": 0.5, "tokens_per_second": 1000.0, **(more or {})}
        rows = []
        for step in range(1, steps + 1):
            rows.append({"step": step, "loss": loss(step), **same})
        places = range(max(1, steps // 5), steps + 1, max(1, steps // 5))
        evals = []
        for step in places:
            evals.append({"step": step, "val_loss": loss(step) + 0.1, "tokens": step})
        summary = {
            "val_loss": loss(steps) + 0.1,
            "bytes_per_param": bytes_per_param,
            "tokens_per_second": 1000.0,
        }
        settings = {
            "recipe": recipe,
            "seed": seed,
            "steps": steps,
            "model": "llama-1m",
            **(config or {}),
        }
        toml = {
            "schema_version": 1,
            "config": settings,
            "versions": {"torch": "2.13.0"},
            "machine": {"device": "cpu"},
        }
        folder = Path(f"{recipe.replace('/', '-')}-seed{seed}")
        run = Run(folder, toml, rows, evals, list(events), {"recipe": recipe, **summary})
        # A cached property reads the file when it is first asked for; these runs have none.
        run.__dict__["gauges"] = gauges or []
        return run

    return build
