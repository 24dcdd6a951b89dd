"""The scope in which a prepared model computes: ``torch.autocast`` where float32 weights meet a
16-bit compute, else none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from narrowgauge.spec.recipes import Recipe


def compute_scope(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in the recipe's dtype.

    ``prepare`` puts it around the model's own forward. Code that calls submodules enters it itself.
    """
    if recipe.storage.visible != "float32" or recipe.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, recipe.dtype))


def compute_in_scope(model: nn.Module, recipe: Recipe) -> None:
    """Make a model compute in the scope of a recipe in every call."""
    before = model.__dict__.get("forward")
    if isinstance(before, _Scoped):  # from an earlier prepare
        del model.forward
        if before.replaced is not None:
            model.forward = before.replaced
    if isinstance(compute_scope(recipe, next(model.parameters()).device), torch.autocast):
        model.forward = _Scoped(model, recipe)


# Not __func__ and __wrapped__: a caller would use them to bypass the wrapper.
_OF_FUNCTIONS = (
    "__annotations__", "__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__", "__qualname__"
)  # fmt: skip


class _Scoped:
    """A callable that replaces a module's forward, and calls it in the scope of a recipe."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        self.module = module
        self.recipe = recipe
        # A forward that was set on the object itself.
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.module.parameters()).device
        with compute_scope(self.recipe, device):
            if self.replaced is not None:
                return self.replaced(*args, **kwargs)
            return type(self.module).forward(self.module, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Libraries inspect functions: Lightning compares the code of a forward with its class's.
        if name in _OF_FUNCTIONS:
            return getattr(self.replaced or type(self.module).forward, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def __signature__(self) -> inspect.Signature:
        # Callers such as transformers inspect the names of the arguments.
        return inspect.signature(self.replaced or type(self.module).forward.__get__(self.module))
