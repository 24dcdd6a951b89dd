"""Timings on this machine: casts and matmuls of each linear layer, and whole steps, in the same rounds.

A machine's speed drifts by tens of percent within minutes. So each round times everything once, a real compiled training step in
bfloat16 included, and ratios are taken within a round. Timed are the functions that a narrow layer itself calls, on random
operands of the layer's shape; everything is compiled before the first round.
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
from narrowgauge.matmul.gemm import emulated_formats
from narrowgauge.matmul.layer_matmuls import slot_dtype
from narrowgauge.planner.roofline import Setting
from narrowgauge.profiling.block_benchmark import blocks_of, many_versions, training_block, training_session
from narrowgauge.profiling.costs import Round
from narrowgauge.profiling.layer_benchmark import Work, operations_of
from narrowgauge.profiling.layer_plan import ELSEWHERE, Kind, compared_steps, plain_recipe, timed_settings
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.slots import weight_slots
from narrowgauge.spec.variants import named
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.memory import batch_bytes, free_bytes, shape_of
from narrowgauge.trainer.step import train_step

ROUNDS = 7
# A shorter operation is repeated until it takes this long.
_LEAST_SECONDS = 2e-3
_MOST_REPEATS = 50
# The largest ratio between rounds on an idle machine.
_QUIET = 1.25


def device_here() -> torch.device:
    """The device that the trainer would use."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def where() -> str:
    """A description of this machine."""
    if torch.cuda.is_available():
        return f"this {torch.cuda.get_device_name()}"
    return f"this CPU ({torch.get_num_threads()} threads)"


def describe_support(compute: Compute, device: torch.device) -> str:
    """``native``, or ``emulated`` and why."""
    formats = emulated_formats(compute, device)
    return f"emulated: {where()} does not multiply {' or '.join(formats)}" if formats else "native"


def noise_notes(rounds: Sequence[Round]) -> list[str]:
    """A warning where steps took different times from round to round."""
    steps = [[r.steps[recipe] for r in rounds] for recipe in rounds[0].steps]
    spread = max(max(times) / min(times) for times in steps)
    if spread < _QUIET:
        return []
    return [f"timings are noisy: the same step took up to {spread:.1f} × as long in one round as in another."]


def measure(
    kinds: Sequence[Kind],
    recipes: Sequence[Recipe],
    config: TrainConfig,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda _: None,
) -> list[Round]:
    """Time everything that the costs of these recipes need.

    Args:
        kinds: the model's linear layers.
        recipes: whose costs are needed.
        config: the model and the size of a step; its recipe is not used.
        rounds: how many.
        say: called with a line of progress.
    Returns:
        The seconds of each round.
    """
    device = device_here()
    sessions = {recipe: training_session(replace(config, recipe=recipe)) for recipe in compared_steps(recipes)}
    steps: dict[Recipe, Work] = {recipe: partial(train_step, session) for recipe, session in sessions.items()}
    blocks = {recipe: training_block(sessions[plain_recipe(recipe)], recipe) for recipe in _timed_blocks(recipes)}
    passes: dict[Recipe, Work] = {recipe: block.pass_through for recipe, block in blocks.items()}
    num_blocks = len(blocks_of(next(iter(sessions.values())).model))
    table = {key: operations_of(*key, config.tokens_per_step, device) for key in timed_settings(kinds, recipes)}
    repeats: dict[int, int] = {}

    def warmed(what: str, works: Mapping[Any, Work]) -> None:
        for key, work in works.items():
            if isinstance(key, Recipe):
                say(f"compiling {what} in {key.name}")
            repeats[id(work)] = _warmed(work, device)

    def timed(works: Mapping[Any, Work], times: int = 1) -> dict[Any, float]:
        return {key: times * _seconds(work, repeats[id(work)], device) for key, work in works.items()}

    with many_versions():
        warmed("a step", steps)
        warmed("a block", passes)
        say(f"compiling the casts of {len(table)} pairs of a shape and a compute")
        for operations in table.values():
            warmed("", operations)
        say(f"timing {rounds} rounds")
        return [
            Round(
                timed(steps), {key: timed(operations) for key, operations in table.items()}, timed(passes, num_blocks)
            )
            for _ in range(rounds)
        ]


def _timed_blocks(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes whose block is timed: narrow ones and their plain recipes. A transform changes more than a block."""
    narrow = [recipe for recipe in recipes if plain_recipe(recipe) != recipe and not recipe.compute.transform]
    return list(dict.fromkeys(other for recipe in narrow for other in (plain_recipe(recipe), recipe)))


def weight_bytes(setting: Setting, device: torch.device) -> float:
    """Bytes of all casts of a weight, per element."""
    compute = named(setting.compute)
    if setting.is_plain:
        return 0.0
    return sum(slot_dtype(compute, name, device).itemsize for name in weight_slots(compute))


def require_memory(model: Model, recipes: Iterable[Recipe], config: TrainConfig) -> None:
    """Refuse a model whose step does not fit this machine.

    Raises:
        ChipError: it needs more memory than is free.
    """
    architecture = shape_of(config.model)
    batch = 0 if architecture is None else batch_bytes(architecture, config)
    # The float32 weights that a model is initialized in stay until its states are made.
    states = sum(model.num_parameters * each.bytes_per_param for each in compared_steps(recipes))
    states += 8 * model.num_parameters
    needed, free = states + batch, free_bytes()
    if free is not None and needed > free:
        raise ChipError(
            f"a step of {model.name} with {config.batch_size} × {config.sequence_length} tokens takes about "
            f"{needed / 2**30:,.0f} GiB, and {where()} has {free / 2**30:,.0f} GiB free.",
            ELSEWHERE,
        )


def _warmed(work: Work, device: torch.device) -> int:
    """The number of repeats, once it is compiled."""
    work(), work()
    return max(1, min(_MOST_REPEATS, math.ceil(_LEAST_SECONDS / max(_seconds(work, 1, device), 1e-9))))


def _seconds(work: Work, repeats: int, device: torch.device) -> float:
    """Seconds of one call, the mean of as many."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats
