"""Time whole training steps of recipes on this machine in the same rounds.

A machine's speed drifts by tens of percent within minutes. So each round times a real compiled
training step in each recipe once, and ratios are taken within a round. Everything is compiled
before the first round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.benchmark import Timer

from narrowgauge.matmul.swapping import COMPILE_OPTIONS
from narrowgauge.planner.model import read_model
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support.inductor import MANY_VERSIONS
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

ROUNDS = 5
_RANDOM_TOKENS = 1 << 18
Times = dict[Recipe, list[float]]
"""Seconds of a step in each recipe, by round."""


def baseline_of(recipe: Recipe) -> Recipe:
    """Return the bfloat16 recipe to compare a recipe with: with the same storage, if bfloat16
    supports it.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> baseline_of(parse("float32/float32")).name, baseline_of(parse("float16/split")).name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if recipe.storage.owner:
        return Recipe(COMPUTES["bfloat16"], STORAGES["word"])
    return replace(recipe, compute=COMPUTES["bfloat16"], overrides=())


def measure(
    recipes: Sequence[Recipe], config: TrainConfig, say: Callable[[str], None] = lambda _: None
) -> Times:
    """Time these recipes and their baselines.

    ``config.recipe`` is not used. ``say`` gets lines of progress.
    """
    timed = dict.fromkeys([*map(baseline_of, recipes), *recipes])
    sessions = {recipe: training_session(replace(config, recipe=recipe)) for recipe in timed}
    times: Times = defaultdict(list)
    # The compiler keeps a version of a block for each compute. By default it keeps eight.
    limit = max(torch._dynamo.config.recompile_limit, MANY_VERSIONS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        for recipe, session in sessions.items():
            say(f"compiling a step in {recipe.name}")
            train_step(session)
        say(f"timing {ROUNDS} rounds")
        for _ in range(ROUNDS):
            for recipe, session in sessions.items():
                work = {"work": partial(train_step, session)}
                # A timer warms up and synchronizes.
                timer = Timer("work()", globals=work, num_threads=torch.get_num_threads())
                times[recipe].append(timer.timeit(1).median)
    return times


def training_session(config: TrainConfig, *, compile: bool = True) -> Session:
    """Return the trainer's own session on random tokens, without audits. Its layers are compiled."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    size = read_model(config.model).vocab_size
    count = max(_RANDOM_TOKENS, 2 * config.tokens_per_step)
    tokens = np.random.default_rng(config.seed).integers(0, size, count).astype(np.uint32)
    data = Dataset(tokens, tokens, size)
    session = build(replace(config, audit_every=0), Path(), data)
    for module in session.model.modules() if compile else ():
        if isinstance(module, GradientCheckpointingLayer):  # each decoder layer of transformers
            module.compile(options=COMPILE_OPTIONS)
    return session
