"""Times on this machine: casts and matmuls of each linear layer, and whole steps, in the same rounds.

A machine's speed drifts by tens of percent within minutes. So in each round everything is timed once, a real compiled
training step in bfloat16 among it, and ratios are taken within a round. What is timed are the functions that a narrow layer
itself runs, on random operands of the layer's shape; compilation is over before the first round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowgauge.errors import ChipError
from narrowgauge.matmul.gemm import is_native, operand_dtype
from narrowgauge.profiling.block_benchmark import blocks_of, many_rows, training_block, training_session
from narrowgauge.profiling.costs import Round
from narrowgauge.profiling.layer_plan import Kind
from narrowgauge.profiling.parts import Work, parts_of
from narrowgauge.profiling.settings import ELSEWHERE, Setting, base_of, settings_of, yardstick_of
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.variants import named
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.memory import Sizes, batch_bytes, free_bytes
from narrowgauge.trainer.step import train_step

ROUNDS = 7
# A part that is shorter is timed as often as makes it so long.
_LEAST_SECONDS = 2e-3
_MOST_REPEATS = 50
# Rounds of a quiet machine differ by less.
_QUIET = 1.25


def device_here() -> torch.device:
    """Where the trainer would train."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def where() -> str:
    """This machine, in words."""
    if torch.cuda.is_available():
        return f"this {torch.cuda.get_device_name()}"
    return f"this CPU ({torch.get_num_threads()} threads)"


def told(row: Compute, device: torch.device) -> str:
    """``native``, or ``emulated`` and why."""
    emulated = [product for product in row.products.values() if not is_native(product, device)]
    formats = sorted({cast.format for product in emulated for cast in (product.left, product.right)})
    return f"emulated: {where()} does not multiply {' or '.join(formats)}" if formats else "native"


def noise_notes(rounds: Sequence[Round]) -> list[str]:
    """A warning where steps took different times from round to round."""
    steps = [[r.steps[base] for r in rounds] for base in rounds[0].steps]
    spread = max(max(times) / min(times) for times in steps)
    if spread < _QUIET:
        return []
    return [
        f"one and the same step took up to {spread:.1f} × as long in one round as in another: this machine was busy."
    ]


def measure(
    kinds: Sequence[Kind],
    recipes: Sequence[Recipe],
    config: TrainConfig,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Round]:
    """Time all that the costs of these recipes need.

    Args:
        kinds: the model's linear layers.
        recipes: whose costs are asked.
        config: the model and the size of a step; its recipe is not read.
        rounds: how many.
        say: told what is going on.
    Returns:
        What was timed in each.
    """
    device = device_here()
    sessions = {base: training_session(replace(config, recipe=base)) for base in _bases(recipes)}
    steps: dict[Recipe, Work] = {base: partial(train_step, session) for base, session in sessions.items()}
    blocks = {recipe: training_block(sessions[base_of(recipe)], recipe) for recipe in _with_blocks(recipes)}
    passes: dict[Recipe, Work] = {recipe: block.pass_through for recipe, block in blocks.items()}
    num_blocks = len(blocks_of(next(iter(sessions.values())).model))
    table = {key: parts_of(*key, config.tokens_per_step, device) for key in settings_of(kinds, recipes)}
    repeats: dict[int, int] = {}

    def warmed(what: str, works: Mapping[Any, Work]) -> None:
        for key, work in works.items():
            if isinstance(key, Recipe):
                say(f"compiling {what} in {key.name}")
            repeats[id(work)] = _warmed(work, device)

    def timed(works: Mapping[Any, Work], times: int = 1) -> dict[Any, float]:
        return {key: times * _seconds(work, repeats[id(work)], device) for key, work in works.items()}

    with many_rows():
        warmed("a step", steps)
        warmed("a block", passes)
        say(f"compiling the casts of {len(table)} pairs of a shape and a row")
        for parts in table.values():
            warmed("", parts)
        say(f"timing {rounds} rounds")
        return [
            Round(timed(steps), {key: timed(parts) for key, parts in table.items()}, timed(passes, num_blocks))
            for _ in range(rounds)
        ]


def _bases(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Everything of which a whole step is timed."""
    return list(dict.fromkeys(other for recipe in recipes for other in (base_of(recipe), yardstick_of(recipe))))


def _with_blocks(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Everything of which a block is timed: narrow recipes and their bases. A transform changes more than a block."""
    narrow = [recipe for recipe in recipes if base_of(recipe) != recipe and not recipe.compute.transform]
    return list(dict.fromkeys(other for recipe in narrow for other in (base_of(recipe), recipe)))


def weight_bytes(setting: Setting, device: torch.device) -> float:
    """Bytes of all casts of a weight, for each of its elements."""
    row = named(setting.row)
    if setting.is_plain:
        return 0.0
    made = [product for place, product in row.products.items() if f"{place}.right" in _WEIGHT_CASTS]
    made = made[:1] if row.reuses_weight else made
    return sum(operand_dtype(product.right, product, device).itemsize for product in made)


_WEIGHT_CASTS = ("output.right", "grad_input.right")


def require_memory(model: Model, recipes: Iterable[Recipe], config: TrainConfig) -> None:
    """Refuse a model whose step would not fit this machine.

    Raises:
        ChipError: it takes more memory than is free.
    """
    batch = batch_bytes(Sizes(model.num_layers, model.hidden_size, model.vocab_size), config)
    # The float32 weights that a model is drawn in stay until its states are made.
    states = sum(model.num_parameters * base.bytes_per_param for base in _bases(recipes)) + 8 * model.num_parameters
    needed, free = states + batch, free_bytes()
    if free is not None and needed > free:
        raise ChipError(
            f"a step of {model.name} with {config.batch_size} × {config.sequence_length} tokens takes about "
            f"{needed / 2**30:,.0f} GiB, and {where()} has {free / 2**30:,.0f} GiB free.",
            ELSEWHERE,
        )


def _warmed(work: Work, device: torch.device) -> int:
    """How often to repeat it, once it is compiled."""
    work(), work()
    return max(1, min(_MOST_REPEATS, math.ceil(_LEAST_SECONDS / max(_seconds(work, 1, device), 1e-9))))


def _seconds(work: Work, repeats: int, device: torch.device) -> float:
    """One call, of as many."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats
