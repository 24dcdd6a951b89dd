"""Measure what each recipe costs a model on this machine: its steps against its baseline's.

A machine's speed drifts. So every ratio is taken within a round, and the median over rounds is
reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import truediv
from statistics import median

import torch

from narrowgauge.matmul.gemm import describe_matmuls
from narrowgauge.profiling import measurement
from narrowgauge.profiling.measurement import Times, baseline_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns
from narrowgauge.trainer.config import TrainConfig, known_model


def profile(
    model: str,
    recipes: Sequence[Recipe],
    *,
    batch_size: int = 8,
    sequence_length: int = 256,
    say: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Measure what each recipe costs a model: a row for each, with times in seconds, and ratios
    above 1 if it is faster.

    Args:
        model: a preset's name, or a folder with a Hugging Face ``config.json``.
        recipes: one that is named twice counts once.
        batch_size: sequences per step.
        sequence_length: tokens per sequence.
        say: called with a line of progress before each long operation.
    Raises:
        NarrowgaugeError: an unknown model or recipe, or a model that does not fit.

    Cost: the compilation of a training step of each recipe, and then some steps.
    """
    recipes = list(dict.fromkeys(recipes))
    config = TrainConfig(
        model=known_model(model), batch_size=batch_size, sequence_length=sequence_length
    )
    times = measurement.measure(recipes, config, say)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for recipe in recipes:
        multiplies = describe_matmuls(recipe.compute, device)
        rows.append({**cost_row(recipe, times), "multiplies": multiplies})
    return rows


def cost_row(recipe: Recipe, times: Times) -> Row:
    """Return a recipe's costs.

    Ratios are its baseline's seconds over its own, medians over rounds.
    """
    baseline = baseline_of(recipe)
    ratios = sorted(map(truediv, times[baseline], times[recipe]))
    return {
        "recipe": recipe.name, "baseline": baseline.name, "step_seconds": median(times[recipe]),
        "step_ratio": median(ratios), "step_ratio_range": (ratios[0], ratios[-1]),
    }  # fmt: skip


def _ms(row: Row) -> str:
    return f"{1e3 * row['step_seconds']:.3g}"


def _range_text(row: Row) -> str:
    low, high = row["step_ratio_range"]
    return f"{low:.2f} to {high:.2f}"


def table_of(rows: Sequence[Row]) -> Table:
    """Return one table of all recipes."""

    columns = (
        *name_columns(recipe="recipe"),
        *number_columns(step_ms=_ms, speed_up=lambda row: f"{row['step_ratio']:.2f} ×"),
        Column("in all rounds", _range_text, right=True),
        *name_columns(baseline="baseline"),
        *text_columns(here="multiplies"),
    )
    return Table(columns, list(rows))
