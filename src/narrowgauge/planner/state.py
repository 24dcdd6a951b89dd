"""The state alone: weights, gradients and optimizer states of a number of parameters, on each chip
of a layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
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
from narrowgauge.spec.tables import Column, Row, Table

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
    # Chips that the layout does not use shard the state, or replicate it.
    open_axis = "data" if "shard" in fixed else "shard"
    rows: list[Row] = []
    for number, place, recipe in product(chips or [base.num_ranks], places, compared):
        ranks, rest = divmod(number, base.num_ranks)
        if rest or ranks < 1 or (ranks > 1 and open_axis in fixed):
            raise ChipError(
                f"Cannot place a layout of {counted(base.num_ranks, 'chip')} on {number}.",
                "Name all its axes, or none.",
            )
        axes = replace(base, **{open_axis: getattr(base, open_axis) * ranks})
        storage = recipe.storage.keeping(OPTIMIZER_STATES[optimizer])
        on_rank = bytes_per_parameter(storage) * (params / axes.tensor / axes.pipeline)
        state = shared(on_rank, axes, axes.num_sharing)
        total = state.weights + state.gradients + state.optimizer
        row = {
            "recipe": recipe.title,
            "bytes_per_param": storage.bytes_per_param,
            "layout": axes_text(axes),
            "chips": number,
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "total": total,
            "resuming": state.weights + 2 * state.optimizer,
        }
        if place is not None:
            row |= {"chip": place.name, "free": place.memory_bytes - total}
        rows.append(row)
    return sorted(rows, key=itemgetter("chips", "total"))


def state_table(rows: Sequence[Row], params: float) -> Table:
    """Return a table of the states of ``params`` parameters."""
    columns = [
        Column("recipe", "recipe", code=True),
        Column("B/param", "bytes_per_param", right=True),
        Column("layout", "layout"),
        Column("all chips", lambda row: bytes_text(row["total"] * row["chips"]), right=True),
        Column("a chip", lambda row: bytes_text(row["total"]), right=True),
        Column("while resuming", lambda row: bytes_text(row["resuming"]), right=True),
    ]
    if "chip" in rows[0]:
        columns.append(Column("chip", "chip"))
        columns.append(Column("free", lambda row: bytes_text(row["free"]), right=True))
    return Table(tuple(columns), list(rows), f"{count_text(params)} parameters")
