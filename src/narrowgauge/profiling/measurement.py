"""Time casts and matmuls of each linear layer, and whole steps, on this machine in the same rounds.

A machine's speed drifts by tens of percent within minutes. So each round times everything once, including a real compiled
training step in each recipe, and ratios are taken within a round. Everything is compiled before the first round.

A narrow layer calls the same functions in the same order: up to six casts and three matmuls. Here their operands are random, in
the layer's shape. Their sum is not the layer's time in a model, where operators are launched and a compiler fuses. The steps
show that time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from narrowgauge import inductor
from narrowgauge.matmul.delayed_scaling import new_history
from narrowgauge.matmul.gemm import emulated_formats
from narrowgauge.matmul.layer_matmuls import (
    add_outliers,
    cast_to_slot,
    multiply_slots,
    scales_to_fold,
)
from narrowgauge.matmul.linear import plain_dtype
from narrowgauge.matmul.operand import Keys, Operand
from narrowgauge.planner.roofline import Setting, Shape
from narrowgauge.profiling.layers import Kind, kinds_of, timed_recipes, timed_settings
from narrowgauge.spec.computes import SLOTS, Compute, casts_made, named
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset
from narrowgauge.trainer.language_model import vocabulary_size
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

ROUNDS = 5
_LEAST_SECONDS = 2e-3  # a shorter operation is repeated until it takes this long
# The largest ratio between rounds on an idle machine.
_QUIET = 1.25


@dataclass(frozen=True)
class Round:
    """Seconds timed in one round: a whole step of each recipe, and the operations of layers."""

    steps: Mapping[Recipe, float]
    times: Mapping[tuple[Shape, Setting], Mapping[str, float]]


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def where() -> str:
    """Describe this machine."""
    if torch.cuda.is_available():
        return f"this {torch.cuda.get_device_name()}"
    return f"this CPU ({torch.get_num_threads()} threads)"


def describe_support(compute: Compute) -> str:
    """Return ``native``, or ``emulated`` and why."""
    formats = emulated_formats(compute, _device())
    return f"emulated: {where()} does not multiply {' or '.join(formats)}" if formats else "native"


def noise_notes(rounds: Sequence[Round]) -> list[str]:
    """Warn if step times differ from round to round."""
    steps = [[r.steps[recipe] for r in rounds] for recipe in rounds[0].steps]
    spread = max(max(times) / min(times) for times in steps)
    if spread < _QUIET:
        return []
    return [f"timings are noisy: the same step took up to {spread:.1f} × as long in one round as in another."]


def measure(
    recipes: Sequence[Recipe],
    config: TrainConfig,
    rounds: int = ROUNDS,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Kind, ...], list[Round]]:
    """Return the model's layers, and all times that the costs of these recipes need. ``say`` gets lines of progress.

    ``config.recipe`` is not used.
    """
    sessions = {recipe: training_session(replace(config, recipe=recipe)) for recipe in timed_recipes(recipes)}
    # The first is a baseline with PyTorch's own layers.
    kinds = kinds_of(next(iter(sessions.values())).model)
    with _many_versions():
        for recipe, session in sessions.items():
            say(f"compiling a step in {recipe.name}")
            train_step(session)
        pairs = timed_settings(kinds, recipes)
        say(f"compiling the casts of {len(pairs)} pairs of a shape and a compute")
        operations = {key: rotated_operations(*key, config.tokens_per_step, _device()) for key in pairs}
        say(f"timing {rounds} rounds")
        return kinds, [
            Round(
                {recipe: _timer(partial(train_step, session)).timeit(1).median for recipe, session in sessions.items()},
                {
                    key: {
                        name: _timer(work).blocked_autorange(min_run_time=_LEAST_SECONDS).median
                        for name, work in works.items()
                    }
                    for key, works in operations.items()
                },
            )
            for _ in range(rounds)
        ]


def _timer(work: Work) -> Timer:
    """Return a timer that warms up, repeats and synchronizes."""
    return Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())


# ── the operations of a linear layer ──────────────────────────────────────────────────────────────────────────────────

Work = Callable[[], Any]

# Make a right operand before the left one of its matmul, which may take its scales.
_ORDER = ("output.left", "output.right", "grad_input.right", "grad_input.left", "grad_weight.right", "grad_weight.left")


def operations_of(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> dict[str, Work]:
    """Return the operations of a linear layer on random operands; each call runs one.

    They return the operands, the output and the gradients of the layer itself. ``num_tokens`` are the rows of its input.
    """
    x, weight, grad = operands(shape, setting, num_tokens, device)
    compute = named(setting.compute)
    if setting.is_plain and x.dtype is plain_dtype(compute):
        return _plain_operations(x, weight, grad)
    return narrow_operations(compute, x, weight, grad)


def rotated_operations(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> dict[str, Work]:
    """Return the operations of a layer. On a GPU each call takes other operands, so that the cache is cold.

    In a model, a layer's weight and input come from memory, since other layers ran in between.
    """
    copies = 1
    if device.type == "cuda":
        num_bytes = 2 * (shape.num_weights + num_tokens * (shape.in_features + shape.out_features))
        copies += math.ceil(2 * torch.cuda.get_device_properties(device).L2_cache_size / num_bytes)
    sets = [operations_of(shape, setting, num_tokens, device) for _ in range(copies)]
    return {name: _in_turn([works[name] for works in sets]) for name in sets[0]}


def _in_turn(works: Sequence[Work]) -> Work:
    turn = itertools.cycle(works)
    return works[0] if len(works) == 1 else lambda: next(turn)()


def operands(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return random x ``[tokens, in]``, weight ``[out, in]`` and gradient ``[tokens, out]``."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int, columns: int, scale: float, dtype: str) -> Tensor:
        values = torch.randn(rows, columns, dtype=torch.float32, device=device, generator=generator) * scale
        return values.to(getattr(torch, dtype))

    sides = (shape.in_features, shape.out_features) if shape.is_transposed else (shape.out_features, shape.in_features)
    weight = drawn(*sides, 0.02, setting.weights)
    x = drawn(num_tokens, shape.in_features, 1.0, setting.stream)
    grad = drawn(num_tokens, shape.out_features, 1e-3, setting.stream)
    return x, weight.t() if shape.is_transposed else weight, grad


def _plain_operations(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Work]:
    """Return PyTorch's own linear function. Wider weights are cast as in autocast."""
    seen = weight.to(x.dtype)
    casts: dict[str, Work] = {} if seen is weight else {"output.right": lambda: weight.to(x.dtype)}
    return {
        **casts,
        "output": lambda: F.linear(x, seen),
        "grad_input": lambda: grad @ seen,
        "grad_weight": lambda: (grad.t() @ x).to(weight.dtype),
    }


def narrow_operations(
    compute: Compute, x: Tensor, weight: Tensor, grad: Tensor, keys: Keys | None = None
) -> dict[str, Work]:
    """Return the casts that a compute makes, and its matmuls. Random bits depend on ``keys``, a layer's keys."""
    zeros = torch.zeros(4, dtype=torch.int32, device=x.device)
    keys = Keys(zeros[:3], zeros[3]) if keys is None else keys
    history = new_history(x.device) if compute.is_delayed else None
    tensors = {"input": x, "weight": weight, "gradient": grad}
    operands: dict[str, Operand] = {}
    casts: dict[str, Work] = {}
    for name in _ORDER:
        first = compute.cast_slots[name]
        if first == name:
            matmul = SLOTS[name].matmul
            right = operands.get(f"{matmul}.right")
            fold = None if right is None else scales_to_fold(right.outer, compute, matmul)
            casts[name] = partial(
                cast_to_slot, tensors[SLOTS[name].tensor], compute, name,
                keys=keys, history=history, record=True, fold=fold,
            )  # fmt: skip
            operands[name] = casts[name]()
        else:
            operands[name] = operands[first]

    def output() -> Tensor:
        result = product("output", (len(x), len(weight)), x.dtype)
        has_outliers = compute.output.left.outliers
        return add_outliers(result, x, compute, weight, operands["output.right"]) if has_outliers else result

    def product(matmul: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return multiply_slots(operands[f"{matmul}.left"], operands[f"{matmul}.right"], compute, matmul, shape, dtype)

    return {
        **{name: casts[name] for name in casts_made(compute)},
        "output": output,
        "grad_input": partial(product, "grad_input", (len(grad), weight.shape[1]), grad.dtype),
        "grad_weight": partial(product, "grad_weight", (len(weight), weight.shape[1]), weight.dtype),
    }


# ── whole steps ────────────────────────────────────────────────────────────────────────────────────────────────────────

_RANDOM_TOKENS = 1 << 18


def training_session(config: TrainConfig, *, compile: bool = True) -> Session:
    """Return the trainer's own session on random tokens, without audits."""
    size = vocabulary_size(config.model)
    assert size is not None
    count = max(_RANDOM_TOKENS, 2 * config.tokens_per_step)
    tokens = np.random.default_rng(config.seed).integers(0, size, count).astype(np.uint32)
    data = Dataset(tokens, tokens[:0], size, must_validate=False)
    return build(replace(config, compile=compile, audit_every=0), Path(), data)


@contextmanager
def _many_versions() -> Iterator[None]:
    """Let the compiler keep a version of a block for each compute. By default it keeps eight."""
    limit = max(torch._dynamo.config.recompile_limit, inductor.MANY_VERSIONS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield
