"""Scaled tensors: data with a power-of-two scale, their arithmetic, and the way into plain functions
and back.

A :class:`Scaled` tensor stands for ``data * scale``: its attributes ``raw``, with a mean square
near one, and ``scale``. Each operation guesses the size of its result from the scales of its
operands, as for independent random numbers: a product gets the product of the scales, a sum of n
numbers the root of n times their scale. A guess only decides where ``data`` is in its format's
range. The value stays: a power of two rounds nothing until a number leaves the range. The rules
apply below autograd, so gradients are scaled tensors too. An operation without a rule is an error.

**Functions.** A function of real values ``y = f(x)`` runs on plain tensors. :func:`enter` divides
each operand by its unit, the function returns ``raw``, and :func:`leave` returns the scaled tensor
``raw * scale``. Let ``dy`` be the gradient of ``y``. Then
``dx = (dy.scale * scale / unit) * vjp(dy.data)``, where ``vjp`` is PyTorch's own backward of the
plain function. A gradient's data pass unchanged through the plain backward, with a size near one.
Its scale bypasses it from ``leave`` to ``enter``, as the gradient of a *token* without other use. A
*size* is the root mean square of ``raw`` or of a ``vjp``. Data are divided by it and the scale is
multiplied by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.metrics import power_of_rms

# The unit of an operand: its own scale, 1 (the real value), 1 with float16 widened to float32, or
# this number.
Unit = Tensor | str
OWN, REAL, WIDE = "own", "real", "wide"
# A guess of the root mean square of the result; None: measure it.
Size = float | None


class Scaled(Tensor):
    """Hold a tensor as ``data * scale``.

    Results of operations are rounded as in the format of ``data``.

    Args:
        data: a plain floating-point tensor.
        scale: a power of two, as a number or as a 0-d float32 tensor on the device of ``data``. A
            check would synchronize with the device, so there is none.
    """

    raw: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor | float) -> Scaled:
        layout: Any = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        return Tensor._make_wrapper_subclass(
            cls, data.size(), dtype=data.dtype, device=data.device, **layout
        )

    def __init__(self, data: Tensor, scale: Tensor | float) -> None:
        self.raw = data
        self.scale = torch.as_tensor(scale, dtype=torch.float32, device=data.device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATTENTION:
            return attention(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        if name not in _RULES:
            raise unknown(f"{name} of a scaled tensor")
        kwargs = kwargs or {}
        result = _RULES[name](func, *args, **kwargs)
        if name in _VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, result)
        return result


def unknown(reason: str) -> RecipeError:
    return RecipeError(
        f"Cannot scalify {reason} because it has no rule.",
        "Use a model of the kinds of Llama or GPT-2 of transformers, with sdpa attention and without "
        "dropout.",
    )


def root_below(count: int) -> float:
    """Return the largest power of two not above ``sqrt(count)``: the size of a sum of ``count``
    numbers of size one.
    """
    return 2.0 ** ((count.bit_length() - 1) // 2)


def times(x: Tensor, power: Tensor) -> Tensor:
    """Return ``x * power`` for a 0-d float32 power of two, rounded once.

    The power may be out of float16's range.
    """
    if x.dtype is torch.float16:
        return (x.float() * power).to(x.dtype)
    return x * power


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────


def _as_one(func: Any, x: Scaled, *args: Any, **kwargs: Any) -> Any:
    """Move, copy, cast or negate elements at the same scale."""
    moved = func(x.raw, *args, **kwargs)
    if isinstance(moved, Tensor):
        return Scaled(moved, x.scale)
    return [Scaled(part, x.scale) for part in moved]


def _multiply(func: Any, a: Any, b: Any) -> Scaled:
    """Multiply scales. A plain tensor or a number has scale 1."""
    if not isinstance(a, Scaled):
        a, b = b, a
    if isinstance(b, Scaled):
        return Scaled(a.raw * b.raw, a.scale * b.scale)
    return Scaled(a.raw * b, a.scale)


def _add(func: Any, a: Any, b: Any, **options: Any) -> Scaled:
    """Add at the larger scale: the root of the sum of the squared scales, rounded down to a power
    of two.
    """
    lhs, rhs, scale = _aligned([a, b])
    return Scaled(func(lhs, rhs, **options), scale)


def _concatenate(func: Any, tensors: Sequence[Any], dim: int = 0) -> Scaled:
    *parts, scale = _aligned(tensors)
    return Scaled(func(parts, dim), scale)


def _aligned(operands: Sequence[Any]) -> list[Any]:
    """Return the data of all operands at their largest scale, and that scale.

    Plain operands are zeros that autograd fills in: they have no scale.
    """
    scale = torch.stack([x.scale for x in operands if isinstance(x, Scaled)]).amax()
    data = []
    for x in operands:
        if isinstance(x, Scaled):
            x = x.raw * (x.scale / scale)
        data.append(x)
    return [*data, scale]


def _sum(
    func: Any, x: Scaled, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
) -> Scaled:
    """Sum. The scale grows by the root of the number of terms, rounded down to a power of two."""
    size = root_below(math.prod(x.shape[dim] for dim in dims or range(x.ndim)))
    total = torch.ops.aten.sum.dim_IntList(x.raw, dims, keepdim, **kwargs)
    return Scaled(total / size, x.scale * size)


# PyTorch must see views as aliases.
_VIEWS = (
    "alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor",
    "split.Tensor", "split_with_sizes.default", "squeeze.dim", "t.default", "transpose.int", "unsqueeze.default",
    "view.default",
)  # fmt: skip
_MOVES = (
    "_to_copy.default", "_unsafe_view.default", "clone.default", "neg.default", "select_backward.default",
    "slice_backward.default",
)  # fmt: skip
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*_VIEWS, *_MOVES), _as_one),
    **dict.fromkeys(("mul.Tensor", "mul.Scalar"), _multiply),
    **dict.fromkeys(("add.Tensor", "sub.Tensor"), _add),
    **dict.fromkeys(("sum.dim_IntList", "sum.default"), _sum),
    "cat.default": _concatenate,
}


# ── strip and restore scales ──────────────────────────────────────────────────────────────────────


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, units: tuple[Unit, ...], sizes: tuple[Size, ...], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        entered = []
        divisors = []
        for x, unit in zip(operands, units, strict=True):
            value, divisor = _in_unit(x, unit)
            entered.append(value)
            divisors.append(divisor)
        ctx.save_for_backward(*divisors)
        ctx.sizes = sizes
        ctx.scaled = [isinstance(x, Scaled) and x.dtype for x in operands]
        return scale_of_one(operands[0]), *entered

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *vjps: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for vjp, divisor, size, dtype in zip(
            vjps, ctx.saved_tensors, ctx.sizes, ctx.scaled, strict=True
        ):
            if vjp is None:
                gradients.append(None)
                continue
            scale = token
            if scale is None:
                scale = scale_of_one(vjp)
            if divisor is not None:
                scale = scale / divisor
            if dtype:
                power = size or power_of_rms(vjp)
                gradients.append(Scaled((vjp / power).to(dtype), scale * power))
            else:
                gradients.append(times(vjp, scale))
        return None, None, *gradients


def scale_of_one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


def _in_unit(x: Tensor, unit: Unit) -> tuple[Tensor, Tensor | None]:
    """Return the operand's value in its unit, detached, and what a gradient is divided by."""
    if isinstance(x, Scaled):
        if unit is OWN:
            return x.raw.detach(), x.scale
        data = x.raw
        if unit is WIDE and data.dtype is torch.float16:  # its gradient will be a plain tensor
            data = data.float()
        x = times(data, x.scale)
    if isinstance(unit, Tensor):
        return x / unit, unit
    return x.detach(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, token: Tensor, scale: Tensor, size: Size) -> Tensor:
        ctx.save_for_backward(scale)
        power = size or power_of_rms(raw)
        return Scaled(raw / power, scale * power)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if isinstance(gradient, Scaled):
            return gradient.raw, gradient.scale * scale, None, None
        size = power_of_rms(gradient)  # the dynamic rescale
        return gradient / size, size * scale, None, None


enter: Any = _Enter.apply
"""Return the token, and each operand as a plain tensor in its unit: of the units, the sizes of the
operands' ``vjp``, and the operands. A plain operand has scale 1, and a plain gradient."""
leave: Any = _Leave.apply
"""Return ``raw * scale`` as a scaled tensor: of ``raw``, token, scale and size."""


def value_of(x: Tensor) -> Tensor:
    """Return a scaled tensor's value as a plain one. Its gradient is measured."""
    return enter((WIDE,), (None,), x)[1]


def attention(query: Tensor, key: Tensor, value: Any, *rest: Any, **options: Any) -> Tensor:
    """Apply scaled dot product attention: scores from real queries and keys, the mean from the data
    of the values.

    The source has no rule for batched matmuls. A mean of values is at most as large as the values.
    Queries and keys enter as real values near one. Their gradients are small relative to the
    output's at first, and large later.
    """
    token, *entered = enter((REAL, REAL, OWN), (1.0,) * 3, query, key, value)
    raw = F.scaled_dot_product_attention(*entered, *rest, **options)
    return leave(raw, token, value.scale, 1.0)


_ATTENTION = unwrap(F.scaled_dot_product_attention)
