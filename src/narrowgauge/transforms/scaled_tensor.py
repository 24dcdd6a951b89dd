"""A tensor that carries a power-of-two scale, and the rules for the scale of an operation's result.

A :class:`Scaled` tensor stands for ``data * scale``. ``data`` is a plain tensor with a mean square
near one, ``scale`` one power of two. Each operation guesses the size of its result from the scales
of its operands, as for independent random numbers. A product gets the product of the scales, a sum
of n numbers the root of n times their scale. This file measures nothing.
:mod:`narrowgauge.transforms.scalify` measures at few places. A guess only decides where ``data`` is
in its format's range. The value stays: a power of two rounds nothing until a number leaves the
range.

The rules apply below autograd. A backward pass uses the same table, so gradients are scaled tensors
too. An operation without a rule is an error.

Source: Balança et al., Scalify, arXiv 2407.17353, and graphcore-research/jax-scalify. As its
default does, scales round down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.metrics import power_of_rms

aten = torch.ops.aten


class Scaled(Tensor):
    """Hold a tensor as ``data * scale``.

    Results of operations are rounded as in the format of ``data``.

    Args:
        data: a plain floating-point tensor.
        scale: a power of two, as a number or as a 0-d float32 tensor on the device of ``data``. A
            check would synchronize with the device, so there is none.
    """

    _data: Tensor
    _scale: Tensor

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor | float) -> Scaled:
        layout: Any = {
            "strides": data.stride(),
            "storage_offset": data.storage_offset(),
            "layout": data.layout,
        }
        return Tensor._make_wrapper_subclass(
            cls, data.size(), dtype=data.dtype, device=data.device, **layout
        )

    def __init__(self, data: Tensor, scale: Tensor | float) -> None:
        self._data = data
        if isinstance(scale, Tensor):
            self._scale = scale
        else:
            self._scale = torch.tensor(float(scale), dtype=torch.float32, device=data.device)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._data

    @property
    def scale(self) -> Tensor:
        return self._scale

    def value(self) -> Tensor:
        """Return ``data * scale`` as a plain tensor, without a gradient."""
        return times(self._data, self._scale)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Scaled({self._data}, {self._scale})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_scale"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], _: None, size: object, stride: object
    ) -> Scaled:
        return Scaled(inner["_data"], inner["_scale"])

    def _stable_hash_for_caching(self) -> str:
        data = self._data
        return (
            f"{tuple(data.shape)} {data.stride()} {data.dtype} {data.device} {self.requires_grad}"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = FUNCTIONS.get(func)
        if rule is not None:
            return rule(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return return_and_correct_aliasing(func, args, kwargs, _as_one(func, *args, **kwargs))
        rule = _RULES.get(func)
        if rule is None:
            raise unknown(f"{str(func).removesuffix('.default')} of a scaled tensor")
        return rule(func, *args, **kwargs)


Rule = Callable[..., Any]

# Rules for whole functions, looked up before PyTorch decomposes them; filled by scalify.py.
FUNCTIONS: dict[Any, Rule] = {}


def unknown(reason: str) -> RecipeError:
    return RecipeError(
        f"Cannot scalify {reason} because it has no rule.",
        "Use a model of the kinds of Llama or GPT-2 of transformers, with sdpa attention and without "
        "dropout.",
    )


def root_below(count: int) -> float:
    """Return the largest power of two not above ``sqrt(count)``: the size of a sum of ``count``
    numbers of size one.

    It uses comparisons only, so that a compiled graph of dynamic shape is valid for all counts
    between two powers of four.
    """
    power = 1
    while 4 * power * power <= count:
        power *= 2
    return float(power)


def times(x: Tensor, power: Tensor) -> Tensor:
    """Return ``x * power`` for a 0-d float32 power of two, rounded once.

    The power may be out of float16's range.

    Example:
        >>> times(torch.tensor([64.0], dtype=torch.float16), torch.tensor(2.0**-28))
        tensor([2.3842e-07], dtype=torch.float16)
    """
    if x.dtype is torch.float16:
        return (x.float() * power).to(x.dtype)
    return x * power


def rescaled(x: Tensor) -> Scaled:
    """Return ``x``, plain or scaled, with a new scale from its measured root mean square: the
    *dynamic rescale*.

    Example:
        >>> rescaled(Scaled(torch.tensor([0.25, -0.5]), 2.0))
        Scaled(tensor([ 1., -2.]), 0.5)
    """
    data, scale = (x._data, x._scale) if isinstance(x, Scaled) else (x, 1.0)
    size = power_of_rms(data)
    return Scaled(data / size, size * scale)


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────


def _as_one(func: Any, x: Scaled, *args: Any, **kwargs: Any) -> Any:
    """Move, copy, cast or negate elements at the same scale."""
    moved = func(x._data, *args, **kwargs)
    if isinstance(moved, Tensor):
        return Scaled(moved, x._scale.to(moved.device))
    parts = []
    for part in moved:
        parts.append(Scaled(part, x._scale))
    return parts


def _multiply(func: Any, a: Any, b: Any) -> Scaled:
    """Multiply scales. A plain tensor or a number has scale 1."""
    if not isinstance(a, Scaled):
        a, b = b, a
    if isinstance(b, Scaled):
        return Scaled(a._data * b._data, a._scale * b._scale)
    needs_grad = isinstance(b, Tensor) and b.requires_grad and torch.is_grad_enabled()
    if needs_grad:  # its gradient would be a scaled tensor
        raise unknown(f"{func} of a scaled tensor with a plain one that requires a gradient")
    return Scaled(a._data * b, a._scale)


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
    scales = []
    for x in operands:
        if isinstance(x, Scaled):
            scales.append(x._scale)
    scale = scales[0]
    is_shared = all(candidate is scale for candidate in scales)
    for candidate in scales[1:]:
        if not is_shared:
            scale = torch.maximum(scale, candidate)
    data = []
    for x in operands:
        if not isinstance(x, Scaled):
            data.append(x / scale)
        elif is_shared:
            data.append(x._data)
        else:
            data.append(x._data * (x._scale / scale))
    return [*data, scale]


def _sum(
    func: Any, x: Scaled, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any
) -> Scaled:
    """Sum. The scale grows by the root of the number of terms, rounded down to a power of two."""
    count = 1
    for dim in dims or range(x.ndim):
        count = count * x.shape[dim]
    size = root_below(count)
    return Scaled(aten.sum.dim_IntList(x._data, dims, keepdim, **kwargs) / size, x._scale * size)


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload)


# PyTorch must see views as aliases.
_VIEWS = {
    _operation(name)
    for name in (
        "alias.default", "detach.default", "expand.default", "permute.default", "select.int", "slice.Tensor",
        "split.Tensor", "split_with_sizes.default", "squeeze.dim", "t.default", "transpose.int", "unsqueeze.default",
        "view.default",
    )
}  # fmt: skip
_OPERATIONS: dict[Rule, tuple[str, ...]] = {
    _as_one: (
        "_to_copy.default", "_unsafe_view.default", "clone.default", "neg.default", "select_backward.default",
        "slice_backward.default",
    ),
    _multiply: ("mul.Tensor", "mul.Scalar"),
    _add: ("add.Tensor", "sub.Tensor"),
    _concatenate: ("cat.default",),
    _sum: ("sum.dim_IntList", "sum.default"),
}  # fmt: skip
_RULES: dict[Any, Rule] = {}
for _rule, _names in _OPERATIONS.items():
    for _name in _names:
        _RULES[_operation(_name)] = _rule
