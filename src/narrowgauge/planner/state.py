"""The state alone: weights, gradients and optimizer states of a number of parameters, on each chip of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.layouts import Layout, read_layout
from narrowgauge.planner.model_state import Bytes, bytes_per_parameter, shared
from narrowgauge.planner.plan import read_recipes, recipes_of_storages
from narrowgauge.planner.units import axes_text, bytes_text, count_text
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns, text_columns

SENTENCES = (
    "Only the state is counted (weights, gradients and optimizer states). narrowgauge plan run adds activations, logits and "
    "buffers.",
    "While resuming, optimizer states exist twice: those that were made, and those of the checkpoint.",
)


@dataclass(frozen=True, slots=True)
class State:
    """Hold the bytes of a state on each chip. Without a ``chip``, nothing is known of its memory."""

    recipe: Recipe
    layout: Layout
    held: Bytes
    chip: Chip | None = None

    @property
    def total(self) -> float:
        return self.held.weights + self.held.gradients + self.held.optimizer

    @property
    def resuming(self) -> float:
        """Return the bytes while a checkpoint loads into allocated states: they exist twice."""
        return self.held.weights + 2 * self.held.optimizer

    @property
    def free(self) -> float | None:
        """Return a chip's free bytes; negative if the state does not fit."""
        return None if self.chip is None else self.chip.memory_bytes - self.total

    def row(self) -> Row:
        """Return plain values, for JSON."""
        return {
            "recipe": self.recipe.title,
            "bytes_per_param": self.recipe.bytes_per_param,
            "chip": self.chip and self.chip.name,
            "chips": self.layout.num_ranks,
            "parallelism": asdict(self.layout),
            "memory_bytes": {**asdict(self.held), "total": self.total},
            "resuming_bytes": self.resuming,
            "headroom_bytes": self.free,
            "fits": None if self.free is None else self.free >= 0,
        }


def plan_state(
    params: float,
    *,
    recipes: str | Recipe | Sequence[str | Recipe] = (),
    chip: Sequence[str] = (),
    chips: Sequence[int] = (),
    layout: str | Mapping[str, Any] = "",
    optimizer: str = "adamw",
) -> list[State]:
    """Return the state of ``params`` parameters, the smallest first on each number of chips.

    Args:
        recipes: by default every storage of bfloat16 weights.
        chip: names, to compare the state with their memory.
        chips: numbers of chips. Those that the layout does not use shard the state.
        layout, optimizer: as in :func:`narrowgauge.planner.plan.plan`.

    Example:
        >>> [state.total / 1e9 for state in plan_state(10e9, recipes=["bfloat16/master", "bfloat16/word"])]
        [80.0, 160.0]
    """
    if not 1 <= params < 1e18:
        raise RecipeError(f"{params:g} parameters were requested.", "Give a number above 1, such as 10e9.")
    fixed = read_layout(layout)
    base = Layout(**fixed)
    places: list[Chip | None] = [*map(get_chip, chip)] or [None]
    states = []
    for number, place, recipe in product(
        chips or [base.num_ranks], places, read_recipes(recipes, optimizer) or recipes_of_storages(optimizer)
    ):
        ranks, rest = divmod(number, base.num_ranks)
        if rest or ranks < 1 or (ranks > 1 and "shard" in fixed):
            raise ChipError(
                f"a layout of {base.num_ranks} chips was requested on {number}.", "Name all its axes, or none."
            )
        axes = replace(base, shard=base.shard * ranks)
        on_rank = bytes_per_parameter(recipe.storage) * (params / axes.tensor / axes.pipeline)
        states.append(State(recipe, axes, shared(on_rank, axes, axes.num_sharing), place))
    return sorted(states, key=lambda state: (state.layout.num_ranks, state.total))


def state_table(states: Sequence[State], params: float) -> Table:
    """Return one row for each state."""
    columns = (
        *name_columns(recipe=lambda state: state.recipe.title),
        *number_columns(B_per_parameter=lambda state: state.recipe.bytes_per_param),
        *text_columns(layout=lambda state: axes_text(state.layout)),
        *number_columns(
            all_chips=lambda state: bytes_text(state.total * state.layout.num_ranks),
            a_chip=lambda state: bytes_text(state.total),
            while_resuming=lambda state: bytes_text(state.resuming),
        ),
    )
    if any(state.chip for state in states):
        columns += (
            *text_columns(chip=lambda state: state.chip and state.chip.name),
            *number_columns(free=lambda state: "" if state.free is None else bytes_text(state.free)),
        )
    return Table(columns, list(states), f"{count_text(params)} parameters")
