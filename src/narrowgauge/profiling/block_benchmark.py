"""Whole training steps, and single decoder blocks of them, compiled as the trainer compiles them.

The operations of a linear layer do not add up to what it takes in a model: operators must be launched, a compiler cannot fuse
across them, and operands are no longer in the cache. One block of the model, forward and backward in a compute, shows all of
that; a step is as many blocks as the model has, and a rest that no compute changes.
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

from narrowgauge._torch import inductor
from narrowgauge.matmul.gemm import EmulationNotice
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
    """One decoder block, and the arguments of a call.

    Args:
        module: the block.
        args, kwargs: of the call; the stream requires a gradient, as in the middle of a model.
        recipe: it computes in.
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
        """Everything that gets a gradient."""
        inputs = (v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.requires_grad)
        return [*self.module.parameters(), *inputs]


def training_block(session: Session, recipe: Recipe, *, compile: bool = True) -> Block:
    """A copy of the model's first decoder block, in a recipe's computes.

    Args:
        session: of the plain recipe; it is not changed.
        recipe: whose computes the copy gets.
        compile: whether it is compiled.
    """
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
    """Within it the compiler makes a version of a block for each compute; its default limit is eight."""
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
        """Record the arguments and end the pass."""
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
