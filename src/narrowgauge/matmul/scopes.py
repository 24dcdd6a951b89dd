"""Scopes: compute in another dtype than that of the model's weights.

With float32 weights and a 16-bit compute we use ``torch.autocast``. Autocast cannot cast *from*
16-bit weights. So if the compute's dtype differs from theirs (``float32/word``), each module's own
parameters are cast during its forward. Tensors between modules have the compute's dtype, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.matmul.own_code import NARROW
from narrowgauge.matmul.swapping import Layer
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_support.torch_names import map_tensors


def compute_scope(recipe: Recipe, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in the recipe's dtype: autocast with float32
    weights, otherwise none.

    ``prepare`` puts it around the model's own forward. Code that calls submodules enters it itself.
    """
    if recipe.storage.visible != "float32" or recipe.dtype == "float32":
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, recipe.dtype))


def compute_in_scope(model: nn.Module, recipe: Recipe) -> None:
    """Make a model with rounded weights and swapped linear layers compute in the recipe's dtype in
    every call.
    """
    for module in model.modules():
        before = module.__dict__.get("forward")
        if isinstance(before, _Forward):  # from an earlier prepare
            del module.forward
            if before.replaced is not None:
                module.forward = before.replaced
    if recipe.storage.visible not in ("float32", recipe.dtype):
        dtype = getattr(torch, recipe.dtype)
        visible = getattr(torch, recipe.storage.visible)
        for module in model.modules():
            dtypes = {parameter.dtype for parameter in module.parameters(recurse=False)}
            if module is model or (visible in dtypes and not _casts_itself(module)):
                module.forward = _Cast(module, dtype)
    if isinstance(compute_scope(recipe, next(model.parameters()).device), torch.autocast):
        model.forward = _Scoped(model, recipe)


def _casts_itself(module: nn.Module) -> bool:
    return isinstance(module, Layer) or NARROW in module._modules or hasattr(module, "computes_in")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the same structure with every floating-point tensor in ``dtype``."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor

    return map_tensors(cast, value)


# Not __func__ and __wrapped__: a caller would use them to bypass the wrapper.
_OF_FUNCTIONS = (
    "__annotations__", "__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__", "__name__", "__qualname__"
)  # fmt: skip


class _Forward:
    """A callable that replaces a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # A forward that was set on the object itself.
        self.replaced: Callable[..., Any] | None = module.__dict__.get("forward")

    def _call(self, *args: Any, **kwargs: Any) -> Any:
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


class _Scoped(_Forward):
    """Call a module's own forward in the scope of a recipe."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        super().__init__(module)
        self.recipe = recipe

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(self.module.parameters()).device
        with compute_scope(self.recipe, device):
            return self._call(*args, **kwargs)


class _Cast(_Forward):
    """Call a module's own forward with inputs and own parameters cast to another dtype.

    Gradients keep their dtype.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self.dtype = dtype
        # nn.MultiheadAttention reads the parameters of its output layer and never calls it.
        self.owners = [module]
        for child in module.children():
            if isinstance(child, NonDynamicallyQuantizableLinear):
                self.owners.append(child)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = _cast(args, self.dtype)
        for name, value in kwargs.items():
            if "label" not in name:
                kwargs[name] = _cast(value, self.dtype)
        if _casts_itself(self.module):
            return self._call(*args, **kwargs)
        before = [owner._parameters for owner in self.owners]
        for owner, parameters in zip(self.owners, before, strict=True):
            owner._parameters = _cast(parameters, self.dtype)
        try:
            return self._call(*args, **kwargs)
        finally:
            for owner, parameters in zip(self.owners, before, strict=True):
                owner._parameters = parameters
