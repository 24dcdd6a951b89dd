"""Runs made up for the report's tests: as small or as long as a test asks, without a disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import FIRST_EXPONENT, NUM_EXPONENTS

Row = dict[str, Any]


def counts(centre: int) -> list[int]:
    """A histogram with half of its values at one exponent and a quarter at each neighbour."""
    bins = [0] * NUM_EXPONENTS
    for exponent, count in ((centre - 1, 25), (centre, 50), (centre + 1, 25)):
        bins[exponent - FIRST_EXPONENT] = count
    return bins


@pytest.fixture
def make_run() -> Callable[..., Run]:
    """Builds a run; a keyword of :func:`build` changes one thing about it."""

    def build(
        recipe: str = "bfloat16/word",
        seed: int = 0,
        steps: int = 100,
        *,
        loss: Callable[[int], float] = lambda step: 2.0 + 5.0 * math.exp(-step / 30),
        finished: bool = True,
        bytes_per_param: float = 8.0,
        events: tuple[Row, ...] = (),
        gauges: list[Row] | None = None,
        config: Row | None = None,
        more: Row | None = None,
    ) -> Run:
        rows = [
            {
                "step": step,
                "loss": loss(step),
                "grad_norm": 1.0,
                "seconds": 0.5,
                "tokens_per_second": 1000.0,
                **(more or {}),
            }
            for step in range(1, steps + 1)
        ]
        every = max(1, steps // 5)
        evals = [
            {"step": step, "val_loss": loss(step) + 0.1, "tokens": step} for step in range(every, steps + 1, every)
        ]
        summary = {
            "recipe": recipe,
            "val_loss": loss(steps) + 0.1,
            "bytes_per_param": bytes_per_param,
            "tokens_per_second": 1000.0,
        }
        toml = {
            "schema_version": 1,
            "config": {"recipe": recipe, "seed": seed, "steps": steps, "model": "llama-1m", **(config or {})},
            "versions": {"torch": "2.13.0"},
            "machine": {"device": "cpu"},
        }
        run = Run(
            Path(f"{recipe.replace('/', '-')}-seed{seed}"),
            toml,
            rows,
            evals,
            list(events),
            summary if finished else None,
        )
        # A cached property reads the file when it is first asked for; these runs have none.
        run.__dict__["gauges"] = gauges or []
        return run

    return build
