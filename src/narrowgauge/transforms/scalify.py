"""Scalify: every tensor of a model carries a power-of-two scale, so that the operands of its
matmuls are near one.

A tensor is ``data * scale``, and a rule for each operation gives its result a scale, forward and
backward (docs/matmuls.md). Most sizes are guessed. Outputs of activations, gradients behind a
norm, and weights are measured, since errors of guesses would accumulate there. A float8 matmul then
needs no scale and no amax: it casts ``data`` directly.

Only modules with parameters, and activations, compute by a rule. The rest is the model's own code,
run on scaled tensors. Tensors are scaled from the embedding to the last norm. Logits and the
parameters' gradients are plain tensors.

**Functions.** A function of real values ``y = f(x)`` runs on plain tensors. :func:`enter` divides
each operand by its unit, the function returns ``raw``, and :func:`leave` returns the scaled tensor
``raw * scale``. The chain rule fixes the backward pass. Let ``dy`` be the gradient of ``y``. Then
``dx = (dy.scale * scale / unit) * vjp(dy.data)``, where ``vjp`` is PyTorch's own backward of the
plain function. A gradient's data pass unchanged through the plain backward, with a size near one.
Its scale bypasses it from ``leave`` to ``enter``, as the gradient of a *token* without other use.
So values are right for all units, scales and sizes of a rule. These only decide where data are in
the format's range. A *size* is the root mean square of ``raw`` or of a ``vjp``. Data are divided by
it and the scale is multiplied by it. Guesses assume independent operands. Training makes them less
independent. E4m3 tolerates a factor of about ten upwards. E5m2, the format of gradients, tolerates
ten thousand.

Source: Balança et al., arXiv 2407.17353; graphcore-research/jax-scalify. Measuring the output of
activations is an addition, since the source's model has no gated MLP. In a Llama the product of
gate and up reaches a root mean square of 140 within 40 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any, Final, Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.numerics.metrics import power_of_rms
from narrowgauge.torch_support.extension import extended_class
from narrowgauge.torch_support.torch_names import map_tensors
from narrowgauge.transforms.scaled_tensor import (
    FUNCTIONS,
    Scaled,
    rescaled,
    root_below,
    times,
    unknown,
)

# The unit of an operand: its own scale, 1 (the real value), 1 with float16 widened to float32, or
# this number.
Unit = Tensor | Literal["own", "real", "wide"]
# A guess of the root mean square of the result; None: measure it.
Size = float | None

OWN: Final = "own"
REAL: Final = "real"
WIDE: Final = "wide"

# ── strip and restore scales ──────────────────────────────────────────────────────────────────────


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, units: tuple[Unit, ...], sizes: tuple[Size, ...], *operands: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*map(_divisor, operands, units))
        ctx.sizes = sizes
        ctx.scaled = [isinstance(x, Scaled) and x.dtype for x in operands]
        entered = tuple(map(_in_unit, operands, units))
        constants = []
        for x, needs_grad in zip(entered, ctx.needs_input_grad[2:], strict=True):
            if not needs_grad:  # it then costs no matmul in the backward pass
                constants.append(x)
        ctx.mark_non_differentiable(*constants)
        return _unit(operands[0]), *entered

    @staticmethod
    def backward(ctx: Any, token: Tensor, *vjps: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = []
        for vjp, divisor, size, dtype in zip(
            vjps, ctx.saved_tensors, ctx.sizes, ctx.scaled, strict=True
        ):
            if vjp is None:
                gradients.append(None)
                continue
            if divisor is None:
                scale = token
            else:
                scale = token / divisor
            if not dtype:
                gradients.append(times(vjp, scale))
                continue
            power = _size_of(vjp, size)
            gradients.append(Scaled((vjp / power).to(dtype), scale * power))
        return None, None, *gradients


def _size_of(x: Tensor, size: Size) -> Any:
    if size is None:
        return power_of_rms(x)
    return size


def _unit(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=like.device)


def _divisor(x: Tensor, unit: Unit) -> Tensor | None:
    if isinstance(unit, Tensor):
        return unit
    return x._scale if unit == OWN and isinstance(x, Scaled) else None


def _in_unit(x: Tensor, unit: Unit) -> Tensor:
    """Return the operand's value in its unit, detached."""
    if isinstance(x, Scaled):
        if unit == OWN:
            return x._data.detach()
        if unit == WIDE:
            x = _widened(x._data) * x._scale
        else:
            x = times(x._data, x._scale)
    if isinstance(unit, Tensor):
        return x / unit
    return x.detach()


def _widened(x: Tensor) -> Tensor:
    """Widen float16 that leaves scaled arithmetic, since its gradient will be a plain tensor."""
    if x.dtype is torch.float16:
        return x.float()
    return x


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor, token: Tensor, scale: Tensor, size: Size) -> Tensor:
        ctx.save_for_backward(scale)
        power = _size_of(raw, size)
        return Scaled(raw / power, scale * power)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        if not isinstance(gradient, Scaled):
            gradient = rescaled(gradient)
        return gradient._data, gradient._scale * scale, None, None


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scaled = cast(Scaled, x)
        ctx.dtype = scaled.dtype
        return _widened(scaled._data) * scaled._scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        g = rescaled(gradient)
        return Scaled(g._data.to(ctx.dtype), g._scale)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def _in_graph(function: _Function) -> _Function:
    """Make a compiler keep the call in the graph and trace it only below autograd."""
    return cast(_Function, torch.compiler.allow_in_graph(function))


@_in_graph
def enter(
    units: tuple[Unit, ...], sizes: tuple[Size, ...], *operands: Tensor
) -> tuple[Tensor, ...]:
    """Return the token, and each operand as a plain tensor in its unit.

    Args:
        units: unit of each operand. A plain one has scale 1.
        sizes: size of each operand's ``vjp``. Ignored for a plain operand, whose gradient is a
            plain value.
    """
    return cast(tuple[Tensor, ...], _Enter.apply(units, sizes, *operands))  # type: ignore[no-untyped-call]


@_in_graph
def leave(raw: Tensor, token: Tensor, scale: Tensor, size: Size) -> Tensor:
    """Return ``raw * scale`` as a scaled tensor of data ``raw / size``."""
    return cast(Tensor, _Leave.apply(raw, token, scale, size))  # type: ignore[no-untyped-call]


@_in_graph
def value_of(x: Tensor) -> Tensor:
    """Return a scaled tensor's value as a plain one. Its gradient is measured."""
    return cast(Tensor, _Value.apply(x))  # type: ignore[no-untyped-call]


@_in_graph
def scale_of(x: Tensor) -> Tensor:
    """Return the scale of a tensor; 1 for a plain one."""
    if isinstance(x, Scaled):
        return x._scale
    return _unit(x)


# ── rules ─────────────────────────────────────────────────────────────────────────────────────────


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Callable[..., Tensor],
    features: tuple[int, int],
) -> Tensor:
    """Apply a linear layer by the rule for dot products: the operands of its three matmuls are near
    one.

    The output sums over the inputs, ``grad_input`` over the outputs. Their sizes are the roots of
    these numbers, rounded down. The weight's scale is measured, and its gradient is a plain value.
    The bias is added at the scale of the product.

    Args:
        x: plain or scaled, ``[..., inputs]``.
        weight, bias: plain. The weight has the layout of ``multiply``.
        multiply: the linear function of plain tensors, low-precision or not.
        features: numbers of inputs and outputs.
    """
    inputs, outputs = features
    size = power_of_rms(weight)
    scale = scale_of(x) * size
    sizes = (root_below(outputs), None, None)
    if bias is None:
        token, data, unit_weight = enter((OWN, size), sizes[:2], x, weight)
        raw = multiply(data, unit_weight, None)
    else:
        units: tuple[Unit, ...] = (OWN, size, scale)
        token, data, unit_weight, unit_bias = enter(units, sizes, x, weight, bias)
        raw = multiply(data, unit_weight, unit_bias)
    return leave(raw, token, scale, root_below(inputs))


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Apply scaled dot product attention: scores from real queries and keys, the mean from the data
    of the values.

    The source has no rule for batched matmuls. A mean of values is at most as large as the values.
    Queries and keys enter as real values near one. Their gradients are small relative to the
    output's at first, and large later.
    """
    if isinstance(attn_mask, Scaled):  # a learned bias, as of T5's positions
        raise unknown("attention with a mask that is learned")
    token, q, k, v = enter((REAL, REAL, OWN), (1.0,) * 3, query, key, value)
    raw = F.scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return leave(raw, token, scale_of(value), 1.0)


FUNCTIONS[unwrap(F.scaled_dot_product_attention)] = attention  # attached gauges wrap it


# ── modules that compute by a rule ────────────────────────────────────────────────────────────────


def scalify(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make a model compute with scaled tensors from its inputs to its outputs.

    Logits and gradients have the plain model's values. Every operand of a linear layer's three
    matmuls has a root mean square of the order of one. Parameters, ``state_dict`` and gradients are
    plain tensors under the same names. A linear layer with a method ``multiply(x, weight, bias)``,
    such as a narrow layer, multiplies its plain data with it.

    Args:
        model: changed in place. Each module with parameters, and each activation, gets its own
            class. Swap narrow layers before. A second call changes nothing.
        dtype: dtype of the scaled tensors, if not the parameters' own.
    Raises:
        RecipeError: a module's class has no rule; or, when the model runs, an operation has none.
    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 8)
        >>> plain = model(x)
        >>> scalify(model)
        >>> torch.equal(model(x), plain)
        True
    """
    head = None
    if hasattr(model, "get_output_embeddings"):
        head = cast(Any, model).get_output_embeddings()
    classes = {}
    for name, module in model.named_modules():
        # A plain head has plain inputs and outputs. A rule would only measure it.
        if module is not head or type(module) is not nn.Linear:
            classes[module] = _class_for(name, module)
    for module, ruled in classes.items():
        module.__class__ = ruled
        if isinstance(module, _Ruled):
            cast(Any, module).computes_in = dtype
    if isinstance(head, _Ruled):
        head.leaves_plain = True
    # The body of a Hugging Face model can also be called directly.
    for module in (model, cast(nn.Module, getattr(model, "base_model", model))):
        if _leave_values not in module._forward_hooks.values():
            module.register_forward_hook(_leave_values)


def _leave_values(_: nn.Module, __: Any, result: Any) -> Any:
    return map_tensors(
        lambda tensor: value_of(tensor) if isinstance(tensor, Scaled) else tensor, result
    )


class _Ruled:
    """Mix into the class of a module that computes by a rule.

    The class changes, not the object's forward. So the module can be copied and pickled, and a
    compiler reuses one graph for all layers of the class.
    """

    leaves_plain = False
    # The dtype of the scaled tensors, if not the parameters' own. A rule casts its parameters
    # itself. After a separate cast their gradients would leave scaled arithmetic in the smaller
    # range of the two.
    computes_in: torch.dtype | None = None


class _Linear(_Ruled):
    """A linear layer: PyTorch's, transformers' Conv1D, or one with a ``multiply`` of its own."""

    def forward(self: Any, x: Tensor) -> Tensor:
        inputs = getattr(self, "nx", None) or self.in_features
        outputs = getattr(self, "nf", None) or self.out_features
        multiply = getattr(self, "multiply", None)
        if multiply is None:
            multiply = _multiply_conv1d if hasattr(self, "nf") else F.linear
        y = linear(x, self.weight, self.bias, multiply, (inputs, outputs))
        if self.leaves_plain:
            return value_of(y)
        return y


def _multiply_conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight + bias


class _Embedding(_Ruled):
    """Look up rows of the weight at its measured scale. Its gradient is a plain value."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        size = power_of_rms(self.weight)
        token, table = enter((REAL,), (None,), self.weight)
        rows = F.embedding(tokens, table, self.padding_idx) / size
        return leave(rows.to(self.computes_in or rows.dtype), token, size, 1.0)


class _Activation(_Ruled):
    """Apply it to the real value.

    Its output is measured. Its gradient has about the output gradient's size.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        token, real = enter((REAL,), (1.0,), x)
        return leave(super().forward(real), token, torch.ones_like(token), None)  # type: ignore[misc]


class _Norm(_Ruled):
    """Apply a norm to the real value.

    The result has scale 1, since its size is one. Its gradient is measured. float16 is computed in
    float32, since the gradient of a small input is large.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        parameters = dict(self.named_parameters(recurse=False))
        units: tuple[Unit, ...] = tuple(WIDE for _ in range(1 + len(parameters)))
        token, real, *vectors = enter(units, (None,) * len(units), x, *parameters.values())
        for name, vector in zip(parameters, vectors, strict=True):
            parameters[name] = vector
            if vector.dtype.itemsize <= real.dtype.itemsize:
                parameters[name] = vector.to(real.dtype)
        raw = self._normalized(real, **parameters)
        if x.dtype is torch.float16:
            raw = raw.half()
        return leave(raw, token, torch.ones_like(token), 1.0)


class _TorchNorm(_Norm):
    def _normalized(self: Any, real: Tensor, **vectors: Tensor) -> Tensor:
        norm: Any = F.layer_norm if isinstance(self, nn.LayerNorm) else F.rms_norm
        return cast(Tensor, norm(real, self.normalized_shape, **vectors, eps=self.eps))


class _RMSNorm(_Norm):
    """A norm by the root mean square that a model defines itself, as Llama, Mistral, Qwen, SmolLM."""

    def _normalized(self: Any, real: Tensor, weight: Tensor) -> Tensor:
        return _rms_norm(self, real, weight)


def _rms_norm(module: Any, x: Tensor, weight: Tensor) -> Tensor:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", 0.0))
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * unit.to(x.dtype)


@torch.no_grad()
def _is_rms_norm(module: nn.Module) -> bool:
    """Return whether a module computes :class:`_RMSNorm`, bit for bit, on drawn values."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or len(list(module.parameters())) != 1:
        return False
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        gain, *rows = torch.randn(5, len(weight), generator=generator).to(dtype)
        x = torch.stack(rows)
        try:
            y = torch.func.functional_call(module, {"weight": gain}, (x,))
        except (RuntimeError, TypeError):
            return False
        if not isinstance(y, Tensor) or not torch.equal(y, _rms_norm(module, x, gain)):
            return False
    return True


# By full name: a model of another library must not need transformers.
_ACTIVATIONS = ("GELUActivation", "GELUTanh", "NewGELUActivation", "SiLUActivation")
_BY_CLASS: dict[str, type[_Ruled]] = {
    "torch.nn.modules.linear.Linear": _Linear,
    "transformers.pytorch_utils.Conv1D": _Linear,
    "torch.nn.modules.sparse.Embedding": _Embedding,
    "torch.nn.modules.normalization.LayerNorm": _TorchNorm,
    "torch.nn.modules.normalization.RMSNorm": _TorchNorm,
    **{f"torch.nn.modules.activation.{name}": _Activation for name in ("GELU", "ReLU", "SiLU")},
    **{f"transformers.activations.{name}": _Activation for name in _ACTIVATIONS},
}


def _class_for(name: str, module: nn.Module) -> Any:
    """Return a module's class with its rule, or as it is if it needs none."""
    origin = cast(Any, type(module))
    if isinstance(module, _Ruled):
        return origin
    for kind in origin.__mro__:
        rule = _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        # A subclass may compute anything, unless its `multiply` shows that only its product
        # differs.
        if rule is not None and (kind is origin or hasattr(origin, "multiply")):
            return extended_class(cast(Any, rule), origin)
    if next(module.parameters(recurse=False), None) is None:
        return origin
    if not _is_rms_norm(module):
        raise unknown(f"the module '{name}' of class {type(module).__name__}")
    return extended_class(cast(Any, _RMSNorm), origin)
