"""Scalify: every tensor of a model carries a power-of-two scale, so that the operands of its
matmuls are near one.

A :class:`Scaled` tensor stands for ``data * scale``: its attributes ``raw``, with a mean square near
one, and ``scale``. Each operation guesses the size of its result from the scales of its operands, as for independent random
numbers: a product gets the product of the scales, a sum of n numbers the root of n times their
scale. A guess only decides where ``data`` is in its format's range. The value stays: a power of two
rounds nothing until a number leaves the range. The rules apply below autograd, so gradients are
scaled tensors too. An operation without a rule is an error.

Outputs of activations, gradients behind a norm, and weights are measured, since errors of guesses
would accumulate there. A float8 matmul then needs no scale and no amax: it casts ``data`` directly.
Linear layers, embeddings, norms, activations and attention compute by a rule, from the embedding to
the last norm. Logits and the parameters' gradients are plain tensors.

**Functions.** A function of real values ``y = f(x)`` runs on plain tensors. :func:`enter` divides
each operand by its unit, the function returns ``raw``, and :func:`leave` returns the scaled tensor
``raw * scale``. Let ``dy`` be the gradient of ``y``. Then
``dx = (dy.scale * scale / unit) * vjp(dy.data)``, where ``vjp`` is PyTorch's own backward of the
plain function. A gradient's data pass unchanged through the plain backward, with a size near one.
Its scale bypasses it from ``leave`` to ``enter``, as the gradient of a *token* without other use. A
*size* is the root mean square of ``raw`` or of a ``vjp``. Data are divided by it and the scale is
multiplied by it.

Source: Balança et al., Scalify, arXiv 2407.17353; graphcore-research/jax-scalify, whose default
rounds scales down too. Measuring the output of activations is an addition, since the source's model
has no gated MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.metrics import power_of_rms
from narrowgauge.torch_support.extension import extended_class
from narrowgauge.torch_support.torch_names import tree_map_only

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
        return _scale_of_one(operands[0]), *entered

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
                scale = _scale_of_one(vjp)
            if divisor is not None:
                scale = scale / divisor
            if dtype:
                power = size or power_of_rms(vjp)
                gradients.append(Scaled((vjp / power).to(dtype), scale * power))
            else:
                gradients.append(times(vjp, scale))
        return None, None, *gradients


def _scale_of_one(like: Tensor) -> Tensor:
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
        return gradient.raw, gradient.scale * scale, None, None


enter: Any = _Enter.apply
"""Return the token, and each operand as a plain tensor in its unit: of the units, the sizes of the
operands' ``vjp``, and the operands. A plain operand has scale 1, and a plain gradient."""
leave: Any = _Leave.apply
"""Return ``raw * scale`` as a scaled tensor: of ``raw``, token, scale and size."""


def value_of(x: Tensor) -> Tensor:
    """Return a scaled tensor's value as a plain one. Its gradient is measured."""
    return enter((WIDE,), (None,), x)[1]


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


class _Ruled:
    """Mix into the class of a module that computes by a rule.

    The class changes, not the object's forward. So the module can be copied and pickled.
    """


class _Linear(_Ruled):
    """A linear layer: PyTorch's, transformers' Conv1D, or one with a ``product`` of its own.

    The operands of its three matmuls are near one. The output sums over the inputs, ``grad_input``
    over the outputs. Their sizes are the roots of these numbers, rounded down. The weight's scale is
    measured, and its gradient is a plain value. The bias is added at the scale of the product.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if getattr(self, "is_transposed", not isinstance(self, nn.Linear)):
            weight = weight.t()
        outputs, inputs = weight.shape
        size = power_of_rms(weight)
        scale = (x.scale if isinstance(x, Scaled) else _scale_of_one(x)) * size
        operands = [x, weight]
        if self.bias is not None:
            operands.append(self.bias)
        sizes = (root_below(outputs), None, None)[: len(operands)]
        token, *entered = enter((OWN, size, scale)[: len(operands)], sizes, *operands)
        multiply = getattr(self, "product", F.linear)
        return leave(multiply(*entered), token, scale, root_below(inputs))


class _Embedding(_Ruled):
    """Look up rows of the weight at its measured scale. Its gradient is a plain value."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        size = power_of_rms(self.weight)
        token, table = enter((REAL,), (None,), self.weight)
        rows = F.embedding(tokens, table, self.padding_idx) / size
        return leave(rows, token, size, 1.0)


class _Activation(_Ruled):
    """Apply it to the real value.

    Its output is measured. Its gradient has about the output gradient's size.
    """

    def forward(self: Any, x: Tensor) -> Any:
        token, real = enter((REAL,), (1.0,), x)
        return leave(super().forward(real), token, _scale_of_one(token), None)  # type: ignore[misc]


class _Norm(_Ruled):
    """Apply a norm to the real value.

    The result has scale 1, since its size is one. Its gradient is measured. float16 is computed in
    float32, since the gradient of a small input is large.
    """

    def forward(self: Any, x: Tensor) -> Any:
        parameters = self._parameters
        named = {name: p for name, p in parameters.items() if p is not None}
        count = 1 + len(named)
        token, real, *vectors = enter((WIDE,) * count, (None,) * count, x, *named.values())
        for name, vector in zip(named, vectors, strict=True):
            named[name] = vector.to(torch.promote_types(vector.dtype, real.dtype))
        try:
            self._parameters = {**parameters, **named}
            raw = super().forward(real)  # type: ignore[misc]
        finally:
            self._parameters = parameters
        if x.dtype is torch.float16:
            raw = raw.half()
        return leave(raw, token, _scale_of_one(token), 1.0)


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


# ── models ────────────────────────────────────────────────────────────────────────────────────────


def scalify(model: nn.Module) -> None:
    """Make a model compute with scaled tensors from its inputs to its outputs.

    Logits and gradients have the plain model's values. Every operand of a linear layer's three
    matmuls has a root mean square of the order of one. Parameters, ``state_dict`` and gradients are
    plain tensors under the same names. A linear layer with a method ``product(x, weight, bias)``,
    such as a narrow layer, multiplies its plain data with it.

    Args:
        model: changed in place. Each module with parameters, and each activation, gets its own
            class. Swap narrow layers before.
    Raises:
        RecipeError: a module's class has no rule, or has one already; or, when the model runs, an
            operation has none.
    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 8)
        >>> plain = model(x)
        >>> scalify(model)
        >>> torch.equal(model(x), plain)
        True
    """
    rules = rules_of(model)
    # The body of a Hugging Face model can also be called directly.
    plain: set[Any] = {model, getattr(model, "base_model", model)}
    if hasattr(model, "get_output_embeddings"):
        head = cast(Any, model).get_output_embeddings()
        plain.add(head)
        if (
            type(head) is nn.Linear
        ):  # its inputs and outputs are plain: a rule would only measure it
            del rules[head]
    for module, rule in rules.items():
        kind: Any = type(module)
        module.__class__ = extended_class(rule, kind)
    for module in plain - {None}:
        module.register_forward_hook(_leave_values)


def rules_of(model: nn.Module) -> dict[nn.Module, Any]:
    """Return the rules of a model's modules. Refuse a module that needs one and has none."""
    rules = {}
    for name, module in model.named_modules():
        if isinstance(module, _Ruled):
            raise RecipeError(
                f"Cannot scalify this {type(model).__name__} because '{name}' is scalified already.",
                "Scalify the whole model once.",
            )
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            kind = "LayerNorm"
        # A subclass may compute anything, unless its product shows that only this differs.
        if isinstance(module, nn.Linear) and hasattr(module, "product"):
            kind = "Linear"
        if kind in _RULE_OF:
            rules[module] = _RULE_OF[kind]
        elif isinstance(module, nn.Linear) or list(module.parameters(False)):
            raise unknown(f"the module '{name}' of class {type(module).__name__}")
    return rules


_RULE_OF: dict[str, type[_Ruled]] = {
    "Linear": _Linear, "Conv1D": _Linear, "Embedding": _Embedding, "LayerNorm": _Norm,
    **dict.fromkeys(("GELU", "ReLU", "SiLU"), _Activation),
    **dict.fromkeys(("GELUActivation", "GELUTanh", "NewGELUActivation", "SiLUActivation"), _Activation),
}  # fmt: skip
"""By the class's name: a model of another library must not need transformers."""


def _leave_values(_: nn.Module, __: Any, result: Any) -> Any:
    return tree_map_only(Scaled, value_of, result)
