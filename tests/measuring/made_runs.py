"""Runs made up for the comparison's tests: a few steps and a loss, without a disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.measuring.diagnose.comparison import run_name
from narrowgauge.runs.record import Run

COLUMNS = [
    "recipe", "val_loss", "bytes_per_param", "tokens_per_second",
    "step_memory_bytes", "edq", "num_seeds", "difference",
    "difference_interval", "verdict",
]  # fmt: skip
SIZES = {
    "bfloat16/master": 16.0,
    "bfloat16/word": 8.0,
    "bfloat16/naive": 8.0,
    "bfloat16/compact": 7.0,
}


def make_run(
    recipe: str,
    seed: int,
    loss: float | None,
    *,
    edq: float | None = 1.0,
    step_seconds: float = 0.5,
    evals: Sequence[tuple[int, float]] = (),
) -> Run:
    """A run that took 10 steps from a loss of 8, and ended in ``loss``; ``None`` is not finished."""
    rows = []
    for k in range(1, 11):
        rows.append({"step": k, "loss": 8.0 - k / 10, "seconds": step_seconds, "edq": edq})
    summary = {
        "val_loss": loss, "steps": 10, "tokens_per_second": 100 / step_seconds, "step_memory_bytes": 1 << 20,
        "bytes_per_param": SIZES.get(recipe, 8.0), "edq": edq,
    }  # fmt: skip
    settings = {"recipe": recipe, "seed": seed, "steps": 10, "schedule": "cosine"}
    path = Path(run_name(recipe, seed))
    validations = [{"step": step, "val_loss": value} for step, value in evals]
    ended = None if loss is None else summary
    return Run(path, {"config": settings}, rows, validations, [], ended)


def seeds(recipe: str, losses: Sequence[float | None], **more: Any) -> list[Run]:
    return [make_run(recipe, seed, loss, **more) for seed, loss in enumerate(losses)]


MASTER = seeds("bfloat16/master", (4.0, 4.1, 4.2))
