"""What has no rule of arithmetic: matmuls, norms, activations, attention, each a plain function between two doors.

A function of real values ``y = f(x)`` is computed on plain tensors: ``x / unit`` goes in by the first door, ``raw``
comes out, and the second door makes of it the scaled tensor ``raw * scale``. Where that is the function meant, the
chain rule says what the way back must be: if ``dy`` is the gradient of ``y``, then ``dx = (dy.scale * scale / unit) *
vjp(dy.data)``, where ``vjp`` is what PyTorch's own differentiation of the plain function returns. So a gradient's
data pass through the plain function's backward as they are, near one in size, and its scale travels around it, from
door to door, as the gradient of a *token* that has no other use. Values are therefore right whatever units, scales and
sizes a rule names; these only decide where data lie in their range. A *size* is how large ``raw`` or a ``vjp`` is: data
are divided and the scale is multiplied by it.

Whether a size is guessed or measured, :mod:`narrowgauge.spec.propagation` says. Guesses take operands to be independent, and
training makes them less so; e4m3 forgives a factor of some ten upwards and of some hundred downwards, e5m2, which gradients
are cast to, of ten thousand either way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.spec.propagation import RULES, Measured
from narrowgauge.transforms.scaled_tensor import FUNCTIONS, Scaled, measured, rescaled, root_below, times


class Held(NamedTuple):
    """The unit of an operand that enters as it is, for a function that divides it itself."""

    power: Tensor


# In what unit an operand enters: its own scale, its real value, that in float32 where it is float16, or this number.
Unit = Tensor | Held | Literal["own", "real", "wide"]
# The root mean square of what comes out, a guess; None: measure it.
Size = float | None

OWN: Final = "own"
REAL: Final = "real"
WIDE: Final = "wide"

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _in_graph(function: _Function) -> _Function:
    """A compiler takes the call as it is and looks inside only below automatic differentiation."""
    return cast(_Function, torch.compiler.allow_in_graph(function))


# --- the doors --------------------------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, units: tuple[Unit, ...], sizes: tuple[Size, ...], *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        divisors = [_divisor(x, unit) for x, unit in zip(operands, units, strict=True)]
        ctx.save_for_backward(*divisors)
        ctx.sizes = sizes
        ctx.scaled = [x.dtype if isinstance(x, Scaled) else None for x in operands]
        entered = [_in_unit(x, unit) for x, unit in zip(operands, units, strict=True)]
        # What wants no gradient costs no matmul on the way back.
        wanted = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(*(x for x, wants in zip(entered, wanted, strict=True) if not wants))
        return _one(operands[0]), *entered

    @staticmethod
    def backward(ctx: Any, token: Tensor, *vjps: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for vjp, divisor, size, dtype in zip(vjps, ctx.saved_tensors, ctx.sizes, ctx.scaled, strict=True):
            scale = token if divisor is None else token / divisor
            if vjp is None or dtype is None:
                gradients.append(None if vjp is None else times(vjp, scale))
                continue
            power = measured(vjp) if size is None else size
            gradients.append(Scaled((vjp / power).to(dtype), scale * power))
        return None, None, *gradients


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


def _divisor(x: Tensor, unit: Unit) -> Tensor | None:
    if isinstance(unit, (Tensor, Held)):
        return unit if isinstance(unit, Tensor) else unit.power
    return x._scale if unit == OWN and isinstance(x, Scaled) else None


def _in_unit(x: Tensor, unit: Unit) -> Tensor:
    """The operand's value in its unit, no view of anything that is differentiated."""
    if isinstance(x, Scaled):
        if unit == OWN:
            return x._data.detach()
        x = _roomy(x._data) * x._scale if unit == WIDE else times(x._data, x._scale)
    return x / unit if isinstance(unit, Tensor) else x.detach()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, token: Tensor, scale: Tensor, size: Size) -> Tensor:
        ctx.save_for_backward(scale)
        power = measured(raw) if size is None else size
        return Scaled(raw / power, scale * power)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_through(gradient, *ctx.saved_tensors), None, None


class _LeavePlain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, token: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = raw.dtype
        return _roomy(raw) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        data, scale = _through(gradient, *ctx.saved_tensors)
        return data.to(ctx.dtype), scale, None


def _through(gradient: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """What goes back through the plain function, and what goes around it."""
    g = gradient if isinstance(gradient, Scaled) else rescaled(gradient)
    return g._data, g._scale * scale


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scaled = cast(Scaled, x)
        ctx.dtype = scaled.dtype
        return _roomy(scaled._data) * scaled._scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        g = rescaled(gradient)
        return Scaled(g._data.to(ctx.dtype), g._scale)


def _roomy(x: Tensor) -> Tensor:
    """What leaves scaled arithmetic: float16 as float32, since the gradient that comes back is a plain tensor."""
    return x.float() if x.dtype is torch.float16 else x


@_in_graph
def enter(units: tuple[Unit, ...], sizes: tuple[Size, ...], *operands: Tensor) -> tuple[Tensor, ...]:
    """The token, and each operand as a plain tensor of the unit asked for.

    Args:
        units: of each operand; a plain one has scale 1.
        sizes: of what differentiation returns for each, of no account for a plain operand: its gradient is a value.
        operands: plain or scaled.
    """
    return cast(tuple[Tensor, ...], _Enter.apply(units, sizes, *operands))  # type: ignore[no-untyped-call]


@_in_graph
def leave(raw: Tensor, token: Tensor, scale: Tensor, size: Size) -> Tensor:
    """``raw * scale`` as a scaled tensor of data ``raw / size``."""
    return cast(Tensor, _Leave.apply(raw, token, scale, size))  # type: ignore[no-untyped-call]


@_in_graph
def leave_plain(raw: Tensor, token: Tensor, scale: Tensor) -> Tensor:
    """``raw * scale`` as a plain tensor; the gradient that comes back is measured."""
    return cast(Tensor, _LeavePlain.apply(raw, token, scale))  # type: ignore[no-untyped-call]


@_in_graph
def value_of(x: Tensor) -> Tensor:
    """A scaled tensor's value as a plain one; the gradient that comes back is measured."""
    return cast(Tensor, _Value.apply(x))  # type: ignore[no-untyped-call]


@_in_graph
def scale_of(x: Tensor) -> Tensor:
    """Its scale; 1 for a plain tensor."""
    return x._scale if isinstance(x, Scaled) else _one(x)


# --- the rules --------------------------------------------------------------------------------------------------------

Product = Callable[..., Tensor]


def _size(rule: str, what: Measured, guess: float) -> Size:
    """The guess, or ``None`` where the rule measures."""
    return None if what in RULES[rule].measures else guess


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Product,
    features: tuple[int, int],
    plain: bool = False,
    unit_of: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """A linear layer by the rule for dot products, whose three matmuls see data near one.

    The output is a sum over the inputs, ``grad_input`` one over the outputs: their sizes are the roots of those
    numbers, rounded down. The weight's scale is measured, and its gradient leaves as a plain value, so the root of the
    number of tokens would cancel. The bias joins at the scale of the product.

    Args:
        x: plain or scaled, ``[..., inputs]``.
        weight, bias: plain; the weight laid out as ``multiply`` wants it.
        multiply: the matmul of plain tensors, narrow or not.
        features: numbers of inputs and outputs.
        plain: return a plain tensor.
        unit_of: measures the weight, where ``multiply`` divides it by that itself, given as a fourth argument.

    Source: ``dot_general`` of jax-scalify.
    """
    inputs, outputs = features
    size = measured(weight) if unit_of is None else unit_of(weight)
    scale = scale_of(x) * size
    sizes = (root_below(outputs), None, None)
    held: Unit = size if unit_of is None else Held(size)
    also = () if unit_of is None else (size,)
    if bias is None:
        token, data, unit_weight = enter((OWN, held), sizes[:2], x, weight)
        raw = multiply(data, unit_weight, None, *also)
    else:
        token, data, unit_weight, unit_bias = enter((OWN, held, scale), sizes, x, weight, bias)
        raw = multiply(data, unit_weight, unit_bias, *also)
    return leave_plain(raw, token, scale) if plain else leave(raw, token, scale, root_below(inputs))


def norm(x: Tensor, function: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
    """A norm on the real value, with scale 1, which is the size of what it makes; its gradient is measured.

    Args:
        function: of the real value and of the vectors (gain, bias) as they are. Of float16 it computes in float32: what
            goes back is as much larger than what came as the real value is smaller than one.

    Source: the layer norm of the paper's FP8 training, with a dynamic rescale of its gradient.
    """
    units: tuple[Unit, ...] = tuple(WIDE for _ in (x, *vectors))
    token, real, *own = enter(units, (_size("norm", "gradient", 1.0),) * len(units), x, *vectors)
    own = [vector.to(real.dtype) if vector.dtype.itemsize <= real.dtype.itemsize else vector for vector in own]
    made = function(real, *own)
    return leave(made.half() if x.dtype is torch.float16 else made, token, torch.ones_like(token), 1.0)


def activation(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """An activation on the real value, as the source does with the exponential; its gradient is about as large as its own."""
    token, real = enter((REAL,), (_size("activation", "gradient", 1.0),), x)
    return leave(function(real), token, torch.ones_like(token), _size("activation", "output", 1.0))


def embedding(tokens: Tensor, weight: Tensor, padding: int | None, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a weight, at the weight's measured scale, in its dtype or in ``dtype``; its gradient leaves as a plain value."""
    size = measured(weight)
    token, table = enter((REAL,), (None,), weight)
    rows = F.embedding(tokens, table, padding) / size
    return leave(rows if dtype is None else rows.to(dtype), token, size, 1.0)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot product attention: scores on real queries and keys, the mean on the data of the values.

    The source leaves batched matmuls out. A mean of values is at most as large as they are. Queries and keys enter as real
    values near one; their gradients are small beside that of the output at first, and large later.
    """
    token, q, k, v = enter((REAL, REAL, OWN), (_size("attention", "gradient", 1.0),) * 3, query, key, value)
    raw = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return leave(raw, token, scale_of(value), _size("attention", "output", 1.0))


FUNCTIONS[F.scaled_dot_product_attention] = attention
