"""Timings on this machine: casts and matmuls of each linear layer, and whole steps, in the same rounds.

A machine's speed drifts by tens of percent within minutes. So each round times everything once, a real compiled training step in
bfloat16 included, and ratios are taken within a round. Everything is compiled before the first round.

The functions timed are those that a narrow layer itself calls, in its order, on random operands of the layer's shape: up to six
casts and three matmuls. They do not add up to what the layer takes in a model: operators must be launched, a compiler cannot fuse
across them, and operands are no longer in the cache. One decoder block, forward and backward in a compute, shows all of that; a
step is as many blocks as the model has, and a rest that no compute changes.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from narrowgauge._torch import inductor
from narrowgauge.errors import ChipError
from narrowgauge.matmul.delayed_scaling import history_for
from narrowgauge.matmul.gemm import EmulationNotice, emulated_formats
from narrowgauge.matmul.layer_matmuls import (
    cast_to_slot,
    met_by_outliers,
    multiply_outliers,
    multiply_slots,
    scales_to_fold,
    slot_dtype,
)
from narrowgauge.matmul.linear import is_plain
from narrowgauge.matmul.operand import Operand
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.planner.time.roofline import Setting, Shape
from narrowgauge.profiling.costs import Round
from narrowgauge.profiling.layer_plan import ELSEWHERE, Kind, compared_steps, plain_recipe, timed_settings
from narrowgauge.spec.computes import SLOTS, Compute, casts_made, named, slot_of_cast, weight_slots
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset
from narrowgauge.trainer.language_model import vocabulary_size
from narrowgauge.trainer.memory import batch_bytes, free_bytes, shape_of
from narrowgauge.trainer.session import Session, build
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
    """Time everything that the costs of these recipes need; ``config.recipe`` is not used. ``say`` gets lines of progress."""
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
    """Refuse a model whose step needs more memory than is free."""
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
    """Compile it, and return the number of repeats."""
    work(), work()
    return max(1, min(_MOST_REPEATS, math.ceil(_LEAST_SECONDS / max(_seconds(work, 1, device), 1e-9))))


def _seconds(work: Work, repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


# ── the operations of a linear layer ──────────────────────────────────────────────────────────────────────────────────

Work = Callable[[], Any]

# A right operand is made before the left one of its matmul, which may take its scales.
_ORDER = ("output.left", "output.right", "grad_input.right", "grad_input.left", "grad_weight.right", "grad_weight.left")


def operations_of(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> dict[str, Work]:
    """The operations of a linear layer on random operands; each call runs one.

    They return the operands, the output and the gradients of the layer itself. ``num_tokens`` are the rows of its input.
    """
    x, weight, grad = operands(shape, setting, num_tokens, device)
    compute = named(setting.compute)
    if setting.is_plain and is_plain(compute, x.dtype):
        return _plain_operations(x, weight, grad)
    return narrow_operations(compute, x, weight, grad)


def operands(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random x ``[tokens, in]``, weight ``[out, in]`` and gradient ``[tokens, out]``."""
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
    """PyTorch's own linear function; wider weights are cast as autocast does it."""
    seen = weight.to(x.dtype)
    casts: dict[str, Work] = {} if seen is weight else {"output.right": lambda: weight.to(x.dtype)}
    return {
        **casts,
        "output": lambda: F.linear(x, seen),
        "grad_input": lambda: grad @ seen,
        "grad_weight": lambda: (grad.t() @ x).to(weight.dtype),
    }


def narrow_operations(
    compute: Compute, x: Tensor, weight: Tensor, grad: Tensor, state: Tensor | None = None
) -> dict[str, Work]:
    """The casts that a compute makes, and its matmuls; random bits depend on ``state``, that of a layer."""
    state = torch.zeros(4, dtype=torch.int32, device=x.device) if state is None else state
    history = history_for(compute, x.device)
    tensors = {"input": x, "weight": weight, "gradient": grad}
    made: dict[str, Operand] = {}
    casts: dict[str, Work] = {}
    for name in _ORDER:
        first = slot_of_cast(compute, name)
        if first == name:
            matmul = SLOTS[name].matmul
            right = made.get(f"{matmul}.right")
            fold = None if right is None else scales_to_fold(right.outer, compute, matmul)
            casts[name] = partial(
                cast_to_slot, tensors[SLOTS[name].tensor], compute, name,
                state=state, history=history, record=True, fold=fold,
            )  # fmt: skip
            made[name] = casts[name]()
        else:
            made[name] = made[first]

    def output() -> Tensor:
        result = product("output", (len(x), len(weight)), x.dtype)
        threshold = compute.output.left.outliers
        met = met_by_outliers(compute, weight, made["output.right"])
        return multiply_outliers(result, x, met, threshold) if threshold else result

    def product(matmul: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return multiply_slots(made[f"{matmul}.left"], made[f"{matmul}.right"], compute, matmul, shape, dtype)

    return {
        **{name: casts[name] for name in casts_made(compute)},
        "output": output,
        "grad_input": partial(product, "grad_input", (len(grad), weight.shape[1]), grad.dtype),
        "grad_weight": partial(product, "grad_weight", (len(weight), weight.shape[1]), weight.dtype),
    }


# ── whole steps, and blocks of them ───────────────────────────────────────────────────────────────────────────────────

_RANDOM_TOKENS = 1 << 18


def training_session(config: TrainConfig, *, compile: bool = True) -> Session:
    """The trainer's own session on random tokens, without audits."""
    size = vocabulary_size(config.model)
    assert size is not None
    count = max(_RANDOM_TOKENS, 2 * config.tokens_per_step)
    tokens = np.random.default_rng(config.seed).integers(0, size, count).astype(np.uint32)
    data = Dataset(Path(), tokens, tokens[:0], {"vocab_size": size, "request": {"held_out": 0}, "notes": []})
    return build(replace(config, compile=compile, audit_every=0), Path(), data)


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder blocks of a Hugging Face model, by name."""
    return [(name, m) for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)]


@dataclass
class Block:
    """One decoder block, and the arguments of a call; the stream requires a gradient, as in the middle of a model."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recipe: Recipe

    def output(self) -> Tensor:
        """The stream after the block."""
        device = next(self.module.parameters()).device
        with compute_scope(self.recipe, device):
            result = self.module(*self.args, **self.kwargs)
        stream: Tensor = result[0] if isinstance(result, tuple) else result
        return stream

    def pass_through(self) -> None:
        output = self.output()
        output.backward(torch.ones_like(output))
        for leaf in self.leaves:
            leaf.grad = None

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that gets a gradient."""
        inputs = (v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.requires_grad)
        return [*self.module.parameters(), *inputs]


def training_block(session: Session, recipe: Recipe, *, compile: bool = True) -> Block:
    """A copy of the model's first decoder block, in a recipe's computes; ``session``, of the plain recipe, is not changed."""
    name, original = blocks_of(session.model)[0]
    args, kwargs = _arguments(session, name)
    module = copy.deepcopy(original)
    computes = {local: recipe.compute_of(f"{name}.{local}") for local, _ in module.named_modules()}
    if any(compute.name != recipe.dtype for compute in computes.values()):
        with warnings.catch_warnings():
            # The profile reports what is emulated.
            warnings.simplefilter("ignore", EmulationNotice)
            swap_linears(module, computes.__getitem__)
    if compile:
        module.compile(fullgraph=True)
    return Block(module, tuple(map(_leaf, args)), {key: _leaf(value) for key, value in kwargs.items()}, recipe)


@contextmanager
def many_versions() -> Iterator[None]:
    """Let the compiler keep a version of a block for each compute; by default it keeps eight."""
    limit = max(torch._dynamo.config.recompile_limit, inductor.MANY_VERSIONS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


class _Called(Exception):
    """Raised once the block is called: the rest of the pass is not needed."""


class _ArgumentRecorder(nn.Module):
    """Replaces a block, and records the arguments of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs
        raise _Called


def _arguments(session: Session, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which the model calls its block of a name."""
    parent, _, own = name.rpartition(".")
    owner, original = session.model.get_submodule(parent), session.model.get_submodule(name)
    recorder = _ArgumentRecorder()
    owner.register_module(own, recorder)
    try:
        session.loss(session.batch()[0])
    except _Called:
        pass
    finally:
        owner.register_module(own, original)
    return recorder.arguments


def _leaf(value: Any) -> Any:
    is_stream = isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
    return value.detach().clone().requires_grad_() if is_stream else value
