"""The state alone: weights, gradients and optimizer states of a number of parameters, on each chip
of a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.candidates import STORAGE_RECIPES, read_recipes, suited_recipes
from narrowgauge.planner.job import OPTIMIZER_STATES
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model_state import RANKS, bytes_per_parameter, shared
from narrowgauge.planner.units import axes_text, bytes_text, count_text
from narrowgauge.runs.finding import counted
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Column, Row, Table, name_columns, number_columns, text_columns

SENTENCES = (
    "Only the state is counted (weights, gradients and optimizer states). narrowgauge plan run "
    "adds activations, logits and "
    "buffers.",
    "While resuming, optimizer states exist twice: those that were made, and those of the "
    "checkpoint.",
)


def plan_state(
    params: float,
    *,
    recipes: str | Recipe | Sequence[str | Recipe] = (),
    chip: Sequence[str] = (),
    chips: Sequence[int] = (),
    layout: str | Mapping[str, Any] = "",
    optimizer: str = "adamw",
) -> list[Row]:
    """Return the state of ``params`` parameters on a chip in bytes, the smallest first for each
    number of chips.

    Args:
        recipes: by default every storage of bfloat16 weights.
        chip: names, to compare the state with their memory.
        chips: numbers of chips. Those that the layout does not use shard the state.
        layout, optimizer: as in :func:`narrowgauge.planner.plan.plan`.

    Example:
        >>> [row["total"] / 1e9 for row in plan_state(10e9, recipes=["bfloat16/master", "bfloat16/word"])]
        [80.0, 160.0]
    """
    if not 1 <= params < 1e18:
        raise RecipeError(
            f"Cannot plan {params:g} parameters.", "Give a number above 1, such as 10e9."
        )
    if optimizer in RANKS:
        raise RecipeError(
            f"Cannot count the states of {optimizer} without shapes of matrices.",
            "narrowgauge plan run --model …",
        )
    fixed = read_layout(layout)
    base = Layout(**fixed)
    places: list[Chip | None] = [*map(get_chip, chip)] or [None]
    compared = read_recipes(recipes, optimizer) or suited_recipes(STORAGE_RECIPES, None, optimizer)
    open_axes = [axis for axis in ("shard", "data") if axis not in fixed]
    rows: list[Row] = []
    for number, place, recipe in product(chips or [base.num_ranks], places, compared):
        ranks, rest = divmod(number, base.num_ranks)
        if rest or ranks < 1 or (ranks > 1 and not open_axes):
            raise ChipError(
                f"Cannot place a layout of {counted(base.num_ranks, 'chip')} on {number}.",
                "Name all its axes, or none.",
            )
        axes = replace(base, **{axis: getattr(base, axis) * ranks for axis in open_axes[:1]})
        storage = recipe.storage.keeping(OPTIMIZER_STATES[optimizer])
        on_rank = bytes_per_parameter(storage) * (params / axes.tensor / axes.pipeline)
        state = shared(on_rank, axes, axes.num_sharing)
        total = state.weights + state.gradients + state.optimizer
        row = {
            "recipe": recipe.title,
            "bytes_per_param": storage.bytes_per_param,
            "layout": axes_text(axes),
        }
        row |= {
            "chips": number,
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "total": total,
            "resuming": state.weights + 2 * state.optimizer,
        }
        rows.append(
            row
            if place is None
            else {**row, "chip": place.name, "free": place.memory_bytes - total}
        )
    return sorted(rows, key=lambda row: (row["chips"], row["total"]))


def state_table(rows: Sequence[Row], params: float) -> Table:
    """Return a table of the states of ``params`` parameters."""
    columns = (
        *name_columns(recipe="recipe"),
        Column("B/param", "bytes_per_param", right=True),
        *text_columns(layout="layout"),
        *number_columns(
            all_chips=lambda row: bytes_text(row["total"] * row["chips"]),
            a_chip=lambda row: bytes_text(row["total"]),
            while_resuming=lambda row: bytes_text(row["resuming"]),
        ),
    )
    if "chip" in rows[0]:
        columns += (
            *text_columns(chip="chip"),
            *number_columns(free=lambda row: bytes_text(row["free"])),
        )
    return Table(columns, list(rows), f"{count_text(params)} parameters")
