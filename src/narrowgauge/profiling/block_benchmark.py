"""Whole training steps, and single decoder blocks of them, compiled as the trainer compiles them.

The parts of a linear layer do not add up to what it takes in a model: operators must be launched, a compiler can no longer
join what lies on both sides of them, and operands come from memory that others have used meanwhile. One block of the model,
forward and backward in a row of computes, shows all of that; a step is as many of them as the model has, and a rest that no
row changes.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from narrowgauge import _torch
from narrowgauge.matmul.choosing import EmulationNotice
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data import Dataset
from narrowgauge.trainer.loop import vocabulary_size
from narrowgauge.trainer.session import Session, build

_RANDOM_TOKENS = 1 << 18


def training_session(config: TrainConfig, *, compile: bool = True) -> Session:
    """The trainer's own session on random tokens, without audits.

    Args:
        config: the model, its recipe and the size of a step.
        compile: whether the model is compiled.
    """
    size = vocabulary_size(config)
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
    """One decoder block, and how its model calls it.

    Args:
        module: the block.
        args, kwargs: what it is called with; the stream among them asks for its gradient, as in the middle of a model.
        recipe: that it computes in.
    """

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
        """Forward and backward."""
        output = self.output()
        output.backward(torch.ones_like(output))
        for leaf in self.leaves:
            leaf.grad = None

    @property
    def leaves(self) -> list[Tensor]:
        """All that gets a gradient."""
        inputs = (v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.requires_grad)
        return [*self.module.parameters(), *inputs]


def training_block(session: Session, recipe: Recipe, *, compile: bool = True) -> Block:
    """A copy of the model's first decoder block, in a recipe's computes.

    Args:
        session: of the recipe's base; it is left as it was.
        recipe: whose computes the copy gets.
        compile: whether it is compiled.
    """
    name, original = blocks_of(session.model)[0]
    args, kwargs = _arguments(session, name)
    module = copy.deepcopy(original)
    rows = {local: recipe.compute_of(f"{name}.{local}") for local, _ in module.named_modules()}
    if any(row.name != recipe.dtype for row in rows.values()):
        with warnings.catch_warnings():
            # The profile itself says what is emulated.
            warnings.simplefilter("ignore", EmulationNotice)
            swap_linears(module, rows.__getitem__)
    if compile:
        module.compile(fullgraph=True)
    return Block(module, tuple(map(_leaf, args)), {key: _leaf(value) for key, value in kwargs.items()}, recipe)


@contextmanager
def many_rows() -> Iterator[None]:
    """Within it the compiler makes as many versions of a block as there are rows; by itself it gives up after eight."""
    limit = max(torch._dynamo.config.recompile_limit, _torch.MANY_VERSIONS)
    with torch._dynamo.config.patch(recompile_limit=limit):
        yield


class _Seen(Exception):
    """Raised once a block was called: what comes after it is not needed."""


class _Seer(nn.Module):
    """Stands where a block stood, and notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Note the arguments and end the pass."""
        self.seen = args, kwargs
        raise _Seen


def _arguments(session: Session, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How the model calls its block of that name."""
    parent, _, own = name.rpartition(".")
    place, original, seer = session.model.get_submodule(parent), session.model.get_submodule(name), _Seer()
    place.register_module(own, seer)
    try:
        session.loss(session.batch()[0])
    except _Seen:
        pass
    finally:
        place.register_module(own, original)
    return seer.seen


def _leaf(value: Any) -> Any:
    is_stream = isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()
    return value.detach().clone().requires_grad_() if is_stream else value
