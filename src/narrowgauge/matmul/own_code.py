"""Experts that a module multiplies in its own code: its products take the swapped projections.

Transformers calls a registered function for most of its experts (:mod:`.experts`). Other modules,
such as torchtitan's ``GroupedExperts``, JetMoE's or Llama 4's, multiply their stacked weights by
``linear``, ``matmul``, ``bmm`` or ``grouped_mm`` themselves. While such a module's forward runs,
these four functions multiply by its weights as the swapped projections do. Its routing, activation
and order of tokens stay its own. A weight is recognized by its shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowgauge.errors import RecipeError
from narrowgauge.torch_support.anatomy import stacked
from narrowgauge.torch_support.extension import extended_class

NARROW = "narrow"
"""The submodule that holds the swapped projections: no parameters, nothing in the ``state_dict``.
"""
_LINEAR = (F.linear,)
_MATMUL = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_GROUPED = (torch._grouped_mm,)


class OwnCode:
    """A module of stacked weights whose own forward multiplies them, in low precision."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, with its swapped projections."""
        products = _Products(self)
        with products:
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        has_tokens = any(isinstance(x, Tensor) and x.numel() > 0 for x in args)
        missed = sorted(set(products.layers) - products.multiplied)
        if has_tokens and missed:
            raise RecipeError(
                f"Cannot multiply '{missed[0]}' of {type(self).__name__} in low precision because "
                "its code uses none of linear, matmul, bmm and grouped_mm on a whole weight.",
                f'Leave it as it is with keep=("*.{missed[0]}",).',
            )
        return result


class _Products(TorchFunctionMode):
    """Replace the products with a module's stacked weights."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.layers: Any = module.get_submodule(NARROW)
        self.weights = {name: module._parameters[name] for name in stacked(module)}
        self.multiplied: set[str] = set()
        self._turns: dict[tuple[int, ...], int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        weight = _weight_of(func, args)
        name = ""
        if weight is not None:
            name = self._name_of(weight)
        if not name:
            return func(*args, **kwargs)
        self.multiplied.add(name)
        if name not in self.layers:
            return func(*args, **kwargs)
        assert weight is not None
        return self._multiply(self.layers[name], name, weight, *args, **kwargs)

    def _name_of(self, weight: Tensor) -> str:
        """Return the name of a weight ``[…, out, in]``, or of the stack that it is a part of; empty
        if it is another one.

        Weights of equal shape take turns, in the order of their names.
        """
        if weight.stride(-1) == 1:
            stored = weight
        else:
            stored = weight.transpose(-2, -1)
        shape = tuple(stored.shape)
        names = []
        for name, candidate in self.weights.items():
            if shape == tuple(candidate.shape[-len(shape) :]):
                names.append(name)
        if not names or (len(shape) == 2 and not _is_part(weight)):
            return ""
        turn = self._turns.get(shape, 0)
        self._turns[shape] = turn + 1
        return names[turn % len(names)]

    def _multiply(
        self,
        layer: Any,
        name: str,
        weight: Tensor,
        x: Tensor,
        _: Tensor,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if weight.ndim == 2:
            if rest:
                bias = rest[0]
            else:
                bias = options.get("bias")
            return layer.multiply_one(x, weight, self._expert_of(name, weight), bias)
        if rest:
            offsets = rest[0]
        else:
            offsets = options.get("offs")
        if offsets is not None:
            return layer(x, weight, offsets)
        experts, tokens = x.shape[:2]
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=x.device) * tokens
        y = layer(x.reshape(experts * tokens, -1), weight, ends)
        return y.view(experts, tokens, -1)

    def _expert_of(self, name: str, weight: Tensor) -> int:
        """Return the place of a part in its stack."""
        stack = self.weights[name]
        is_same = stack.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        first = stack.storage_offset() if is_same else 0
        return (weight.storage_offset() - first) // weight.numel() % len(stack)


def _weight_of(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the second factor of a product as ``[…, out, in]``; ``None`` for other functions."""
    if len(args) < 2 or not isinstance(args[1], Tensor) or not isinstance(args[0], Tensor):
        return None
    x, weight = args[0], args[1]
    if func in _LINEAR:
        return weight
    is_product = func in _GROUPED or func in _MATMUL
    if not is_product or weight.ndim not in (2, 3):
        return None
    if func in _MATMUL and weight.ndim == 3 and x.ndim != 3:
        return None
    return weight.transpose(-2, -1)


def _is_part(weight: Tensor) -> bool:
    """Return whether a matrix is a part of a larger tensor, as a layer's own weight is not."""
    return weight.untyped_storage().nbytes() >= 2 * weight.numel() * weight.element_size()


def take_over(module: nn.Module, layers: nn.ModuleDict) -> None:
    """Make a module's own forward multiply by swapped projections, by the names of its weights."""
    module.add_module(NARROW, layers)
    if not isinstance(module, OwnCode):
        kind: Any = type(module)
        module.__class__ = extended_class(OwnCode, kind)
