"""Time the linear layers of a model, and its whole steps, on this machine in the same rounds.

A machine's speed drifts by tens of percent within minutes. So each round times everything once: a
real compiled training step in each recipe, and both passes of one layer of each kind. Ratios are
taken within a round. Everything is compiled before the first round.

The layers are the model's own, on random inputs, one of each kind. They run one by one. In a step a
compiler fuses them with their neighbours, and layers of one input (q, k and v) share its cast. The
steps show that time.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from narrowgauge.matmul.linear import is_linear, is_transposed
from narrowgauge.matmul.scopes import compute_scope
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
_LEAST_SECONDS = 2e-3  # a shorter call is repeated until it takes this long
_RANDOM_TOKENS = 1 << 18
Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of one shape whose names differ only in numbers, ``*`` in ``pattern``."""

    pattern: str
    out_features: int
    in_features: int
    names: tuple[str, ...]


def kinds_of(model: Any) -> tuple[Kind, ...]:
    """Return the kinds of linear layers of a PyTorch model, in their order."""
    names: dict[tuple[str, int, int], list[str]] = {}
    for name, module in model.named_modules():
        if is_linear(module):
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
            rows, columns = module.weight.shape
            kind = (pattern, rows, columns)
            if is_transposed(module):
                kind = (pattern, columns, rows)
            names.setdefault(kind, []).append(name)
    return tuple(Kind(*key, tuple(layers)) for key, layers in names.items())


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


@dataclass(frozen=True)
class Times:
    """Hold the model's kinds of layers, and seconds by round.

    Args:
        steps: of a whole step in each recipe.
        layers: of the forward pass of one layer, and of both passes, by recipe and the pattern of
            its kind.
    """

    kinds: tuple[Kind, ...]
    steps: dict[Recipe, list[float]]
    layers: dict[tuple[Recipe, str], list[tuple[float, float]]]


def measure(
    recipes: Sequence[Recipe], config: TrainConfig, say: Callable[[str], None] = lambda _: None
) -> Times:
    """Time these recipes and their baselines.

    ``config.recipe`` is not used. ``say`` gets lines of progress.
    """
    timed = dict.fromkeys([*map(baseline_of, recipes), *recipes])
    sessions = {recipe: training_session(replace(config, recipe=recipe)) for recipe in timed}
    kinds = kinds_of(next(iter(sessions.values())).model)
    times = Times(kinds, defaultdict(list), defaultdict(list))
    works = {}
    # The compiler keeps a version of a block for each compute. By default it keeps eight.
    with torch._dynamo.config.patch(
        recompile_limit=max(torch._dynamo.config.recompile_limit, MANY_VERSIONS)
    ):
        for recipe, session in sessions.items():
            say(f"compiling a step and the layers in {recipe.name}")
            train_step(session)
        for recipe, session in sessions.items():
            for kind in kinds:
                forward, forward_backward = passes_of(session, kind)
                forward()
                forward_backward()
                works[recipe, kind.pattern] = forward, forward_backward
        say(f"timing {ROUNDS} rounds")
        for _ in range(ROUNDS):
            for recipe, session in sessions.items():
                times.steps[recipe].append(_timer(partial(train_step, session)).timeit(1).median)
            for key, (forward, forward_backward) in works.items():
                times.layers[key].append((_seconds(forward), _seconds(forward_backward)))
    return times


def _timer(work: Work) -> Timer:
    """Return a timer that warms up, repeats and synchronizes."""
    return Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())


def _seconds(work: Work) -> float:
    return float(_timer(work).blocked_autorange(min_run_time=_LEAST_SECONDS).median)


def passes_of(session: Session, kind: Kind) -> tuple[Work, Work]:
    """Return two functions that run a layer of a kind: its forward pass, and forward and backward.

    Each call takes the kind's next layer. On a GPU it also takes other inputs, so that the cache is
    cold. In a model, a layer's weight and input come from memory, since other layers ran in
    between.
    """
    recipe = session.config.recipe
    device = session.device
    num_tokens = session.config.tokens_per_step
    generator = torch.Generator(device).manual_seed(0)

    def drawn(columns: int, scale: float) -> Tensor:
        values = torch.randn(num_tokens, columns, device=device, generator=generator) * scale
        return values.to(getattr(torch, recipe.dtype))

    copies = 1
    if device.type == "cuda":
        num_bytes = 2 * num_tokens * (kind.in_features + kind.out_features)
        copies += math.ceil(2 * torch.cuda.get_device_properties(device).L2_cache_size / num_bytes)
    pairs = []
    for _ in range(copies):
        x = drawn(kind.in_features, 1.0).requires_grad_()
        pairs.append((x, drawn(kind.out_features, 1e-3)))
    layers = itertools.cycle(map(session.model.get_submodule, kind.names))
    inputs = itertools.cycle(pairs)

    def forward() -> Any:
        with torch.no_grad(), compute_scope(recipe, device):
            return next(layers)(next(inputs)[0])

    def forward_backward() -> Any:
        layer = next(layers)
        x, gradient = next(inputs)
        with compute_scope(recipe, device):
            y = layer(x)
        return torch.autograd.grad(y, [x, *layer.parameters()], gradient.to(y.dtype))

    return forward, forward_backward


def training_session(config: TrainConfig, *, compile: bool = True) -> Session:
    """Return the trainer's own session on random tokens, without audits."""
    size = read_model(config.model).vocab_size
    count = max(_RANDOM_TOKENS, 2 * config.tokens_per_step)
    tokens = np.random.default_rng(config.seed).integers(0, size, count).astype(np.uint32)
    data = Dataset(tokens, tokens, size)
    return build(replace(config, compile=compile, audit_every=0), Path(), data)
