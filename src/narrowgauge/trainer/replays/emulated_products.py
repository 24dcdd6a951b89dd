"""A narrow linear layer's three matmuls in float32, with each cast of an operand made or left out.

The casts are the layer's own (:mod:`narrowgauge.matmul.layer_matmuls`), with its random bits and delayed scales; products of the
values that they give are computed in float32. So one cast can be left out while the others stay, which no kernel offers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.matmul.layer_matmuls import cast_to_slot, outlier_columns, scales_to_fold
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand
from narrowgauge.numerics.quantization import padded, rotate
from narrowgauge.spec.computes import SLOTS, slot_of_cast

PLACES = {"input": "inputs", "weight": "weights", "gradient": "output-gradients"}
"""The place of the table of variants at which each tensor of a layer is cast."""


@dataclass(frozen=True, eq=False)
class Casts:
    """The casts of one layer, some of them left out.

    Args:
        layer: whose compute, random bits and delayed scales; nothing in it changes.
        wide: the places at which nothing is cast.
        length: tokens of a sequence.
    """

    layer: Linear
    wide: Collection[str]
    length: int

    def product(self, matmul: str, left: Tensor, right: Tensor) -> Tensor:
        """One of the three matmuls, float32 and with the padding of its operands cut off."""
        slots = f"{matmul}.left", f"{matmul}.right"
        made = self._operand(slots[1], right, None)
        fold = None if made is None else scales_to_fold(made.outer, self.layer.compute, matmul)
        a, b = (
            self._values(slots[0], left, self._operand(slots[0], left, fold), fold),
            self._values(slots[1], right, made),
        )
        rows, columns = left.shape[1 - SLOTS[slots[0]].dim], right.shape[1 - SLOTS[slots[1]].dim]
        a, b = a if SLOTS[slots[0]].dim == 1 else a.t(), b.t() if SLOTS[slots[1]].dim == 1 else b
        return (a @ b)[:rows, :columns]

    def _operand(self, slot: str, x: Tensor, fold: Tensor | None) -> Operand | None:
        """The operand that the layer casts; ``None`` where nothing is cast."""
        compute = self.layer.compute
        made = slot_of_cast(compute, slot)
        if PLACES[SLOTS[slot].tensor] in self.wide or compute.casts[made].is_wide:
            return None
        state, history = self.layer.state, self.layer.amax_history
        if SLOTS[slot].tensor == "input" and self.layer.scale_owner:
            history = self.layer.scale_owner[0].amax_history
        return cast_to_slot(x, compute, made, state=state, history=history, sequence_length=self.length, fold=fold)

    def _values(self, slot: str, x: Tensor, made: Operand | None, fold: Tensor | None = None) -> Tensor:
        """The float32 values of an operand, in the layout of its tensor; padded only where it is rotated."""
        cast = self.layer.compute.casts[slot]
        is_rotated = cast.rotation != "none"
        if made is None:
            return rotate(padded(x, cast, SLOTS[slot].dim), SLOTS[slot].dim) if is_rotated else x
        found = made.data.float() if made.outer is None else made.data.float() * made.outer
        if is_rotated:
            return found
        found = found[: x.shape[0], : x.shape[1]]
        found = found if fold is None else found / fold
        return torch.where(outlier_columns(x, cast.outliers), x, found) if cast.outliers else found


class EmulatedProduct(torch.autograd.Function):
    """``x · wᵀ + b`` of ``[tokens, in]`` and ``[out, in]``, and its gradients, in a layer's casts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, casts: Casts) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        ctx.casts, ctx.has_bias = casts, bias is not None
        y = casts.product("output", x, weight)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The three gradients."""
        x, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_input = ctx.casts.product("grad_input", grad, weight)
        by_weight = ctx.casts.product("grad_weight", grad, x)
        return by_input, by_weight, grad.sum(0) if ctx.has_bias else None, None
