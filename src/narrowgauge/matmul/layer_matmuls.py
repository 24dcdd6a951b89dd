"""The three matmuls of a linear layer: the casts of their six operands, the products, and their
gradients.

:mod:`narrowgauge.spec.computes` defines which tensor fills which slot. This module casts the
tensors and multiplies them. Linear layers, experts, inference and the profiler call these
functions.

``torch.compile`` sees through a layer: its casts are operations of the model's graph, and fuse with
their neighbours. Two operators are opaque: a CPU's products by tiles, and outlier columns (their
number varies).

*Outlier features* are the few input columns that are hundreds of times larger than the rest, in
every token. A scale per row that covers them leaves few codes for the others. Without those columns
a row fits int8. A thin 16-bit matmul adds them, times the 16-bit weights (the paper) or the widened
codes (bitsandbytes), as the cast says. Source: Dettmers et al. 2022, LLM.int8() (2208.07339),
section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import cast_cache
from narrowgauge.matmul.gemm import multiply, operand_dtype
from narrowgauge.matmul.operand import Keys, Operand, cast_matrix, draw
from narrowgauge.numerics.widening import add_product, bias_gradient
from narrowgauge.spec.computes import COMPUTES, SLOTS, Compute, keeps_outlier_weights
from narrowgauge.torch_support.torch_names import is_traced, is_transformed

REGISTERED: dict[str, Compute] = dict(COMPUTES)
"""Computes by the name that operators and graphs get: the table's, and those that :func:`register`
adds.
"""


def register(compute: Compute) -> str:
    """Register a compute for the operators, and return its registered name.

    The name is the compute's own, with a number if another compute has it.

    Raises:
        RecipeError: layers share the cast of ``output``'s input, and it would need random bits or
            scales of one layer.
    """
    if compute.output.left.needs_bits:
        raise RecipeError(
            f"Cannot round the input of output stochastically in compute '{compute.name}' because "
            "several layers share its cast.",
            "Round it to nearest; weights and gradients may be stochastic.",
        )
    if compute.output.right.granularity == "column":
        raise RecipeError(
            f"Cannot scale the weight of output per column in compute '{compute.name}' because "
            "such scales would enter the cast "
            "of the input, which several layers share.",
            "Scale that weight per row, tensor or block.",
        )
    name = compute.name
    number = 1
    while (
        registered := REGISTERED.setdefault(name, compute)
    ) is not compute and registered != compute:
        number += 1
        name = f"{compute.name} ({number})"
    return name


# ── one operand, one product ──────────────────────────────────────────────────────────────────────


class Call(NamedTuple):
    """One call of a layer: what its casts depend on, in addition to their tensors.

    Attributes:
        name: of a registered compute.
        keys: of random bits; ``None`` rounds to nearest.
        sequence_length: rows per sequence, which key the random bits of gradients.
        unit: 0-d, a power of two. Multiply by ``weight / unit``. The cast is cached under the
            weight itself.
    """

    name: str
    keys: Keys | None = None
    sequence_length: int = 1
    unit: Tensor | None = None

    @property
    def compute(self) -> Compute:
        return REGISTERED[self.name]


def slot_dtype(compute: Compute, slot: str, device: torch.device) -> torch.dtype:
    # Codes saved for backward stay codes, even if this matmul widens them.
    as_codes = slot == "output.left" and compute.keeps_codes
    return operand_dtype(
        compute.casts[slot], compute.products[SLOTS[slot].matmul], device, as_codes=as_codes
    )


def cast_to_slot(x: Tensor, call: Call, slot: str, fold: Tensor | None = None) -> Operand:
    """Cast a tensor of a layer to the operand of a slot.

    Multiply ``fold`` into it first, see :func:`scales_to_fold`.
    """
    slot_row = SLOTS[slot]
    cast = call.compute.casts[slot]
    drawn = None
    if call.keys is not None and cast.needs_bits:
        length: int | None = call.sequence_length
        if slot_row.tensor == "weight":
            length = None
        drawn = draw(cast, x, call.keys, slot_row.random_key, length)
    if cast.outliers:
        x = without_outliers(x, cast.outliers)
    return cast_matrix(
        x, cast, slot_row.dim, slot_dtype(call.compute, slot, x.device), draw=drawn, fold=fold
    )


def scales_to_fold(right: Tensor | None, compute: Compute, matmul: str) -> Tensor | None:
    """Return the right operand's outer scales, shaped to multiply the left tensor, if each belongs
    to one term of the sum.
    """
    if right is None or compute.products[matmul].right.granularity != "column":
        return None
    return right.view((1, -1) if SLOTS[f"{matmul}.left"].dim == 1 else (-1, 1))


def multiply_slots(
    lhs: Operand, rhs: Operand, name: str, matmul: str, shape: tuple[int, int], dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:  # fmt: skip
    """Multiply the two operands of a matmul of the registered compute ``name``.

    Return ``shape``, without padding.
    """
    product = REGISTERED[name].products[matmul]
    if product.right.granularity == "column":
        rhs = rhs._replace(outer=None)  # the left operand includes its scales, see scales_to_fold
    dims = SLOTS[f"{matmul}.left"].dim, SLOTS[f"{matmul}.right"].dim
    y = multiply(lhs, rhs, dims, product, dtype, bias)
    if (*y.shape,) == shape and not y._is_view():
        return y
    # A view could not be changed in place by the model.
    return y[: shape[0], : shape[1]].clone(memory_format=torch.contiguous_format)


# ── weights ───────────────────────────────────────────────────────────────────────────────────────


def cast_weight_to_slot(weight: Tensor, call: Call, slot: str) -> Operand:
    """Call :func:`cast_to_slot` for a weight ``[out, in]``, or ``weight / unit``.

    Use the cached cast if there is one.
    """
    slot = call.compute.cast_slots[slot]

    def make() -> Operand:
        if call.unit is None:
            return cast_to_slot(weight, call, slot)
        return cast_to_slot(weight.detach() / call.unit, call, slot)

    return cast_cache.cast_weight(weight, (call.compute.casts[slot], SLOTS[slot].dim), make)


# ── outliers ──────────────────────────────────────────────────────────────────────────────────────


def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Return which columns of ``[rows, columns]`` hold a magnitude of at least ``threshold`` (or a
    NaN): bool ``[columns]``.
    """
    # Compare in float32: PyTorch would first round the threshold to the format of x.
    return ~(x.abs().amax(0).float() < threshold)


def without_outliers(x: Tensor, threshold: float) -> Tensor:
    """Return ``x`` with zeros in its outlier columns."""
    return torch.where(outlier_columns(x, threshold), 0, x)


def add_outliers(
    result: Tensor, x: Tensor, compute: Compute, weight: Tensor | None, codes: Operand
) -> Tensor:
    """Add the product of the outlier columns of ``x`` and the weights ``[out, in]``, in 16 bits or
    widened codes, to ``result``.

    Cost: a thin matmul; on CUDA one synchronization, for the number of columns, which would break a
    graph.
    """
    weight = weight if keeps_outlier_weights(compute) else None
    arguments = (result, x, compute.output.left.outliers, weight, codes.data, codes.outer)
    return cast(Tensor, (_add_opaque if is_traced() else _add_outliers)(*arguments))


def _add_outliers(
    result: Tensor,
    x: Tensor,
    threshold: float,
    weight: Tensor | None,
    codes: Tensor,
    scales: Tensor | None,
) -> Tensor:
    outliers = outlier_columns(x, threshold).nonzero().view(-1)
    if not len(outliers):
        return result
    assert scales is not None
    if weight is None:
        thin = codes[:, outliers].float() * scales
    else:
        thin = weight[:, outliers]
    return add_product(result, x[:, outliers].to(result.dtype), thin.to(result.dtype).t())


@torch.library.custom_op("narrowgauge::add_outliers", mutates_args=())
def _add_opaque(
    result: Tensor,
    x: Tensor,
    threshold: float,
    weight: Tensor | None,
    codes: Tensor,
    scales: Tensor | None,
) -> Tensor:
    total = _add_outliers(result, x, threshold, weight, codes, scales)
    if total is result:
        return total.clone()
    return total.contiguous()


@_add_opaque.register_fake
def _(result: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(result)


# ── the layer ─────────────────────────────────────────────────────────────────────────────────────


def output(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return ``x · wᵀ + b`` of ``[tokens, in]`` and ``[out, in]``, and the operand saved for
    backward: x's cast, or x itself.
    """
    compute = call.compute
    lhs = cast_to_slot(x, call, "output.left")
    rhs = cast_weight_to_slot(weight, call, "output.right")
    y = multiply_slots(lhs, rhs, call.name, "output", (x.shape[0], weight.shape[0]), x.dtype, bias)
    if compute.output.left.outliers:
        y = add_outliers(y, x, compute, weight, rhs)
    if compute.cast_slots["grad_weight.right"] == "output.left":
        saved = lhs
    else:
        saved = Operand(x)
    return y, *saved


def _save(ctx: Any, inputs: tuple[Any, ...], saved: Sequence[Tensor | None]) -> None:
    """Save what :func:`_restored` returns: the operand that :func:`output` returned, the weight,
    and the call.
    """
    _, weight, _, call = inputs
    # A copy of the clock, since another model's optimizer may step before this backward pass.
    if call.keys is None:
        keys = (None, None)
    else:
        keys = (call.keys.clock.clone(), call.keys.layer)
    ctx.save_for_backward(*saved, weight, *keys, call.unit)
    ctx.settings = call.name, call.sequence_length


def _restored(ctx: Any) -> tuple[Any, ...]:
    """Return the arguments of :func:`gradients` after the first."""
    *operand, weight, clock, layer, unit = ctx.saved_tensors
    name, sequence_length = ctx.settings
    keys = None
    if clock is not None:
        keys = Keys(clock, layer)
    return (
        Operand(*operand),
        weight,
        Call(name, keys, sequence_length, unit),
        ctx.needs_input_grad[:3],
    )


def gradients(
    grad: Tensor, saved: Operand, weight: Tensor, call: Call, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias from that of the output ``[tokens, out]``,
    each if needed.
    """
    compute = call.compute
    slots = compute.cast_slots
    grad = grad.contiguous()
    grad_input = grad_weight = grad_bias = lhs = None

    def cast_grad(slot: str, rhs: Operand) -> Operand:
        return cast_to_slot(
            grad, call, slot, scales_to_fold(rhs.outer, compute, SLOTS[slot].matmul)
        )

    if needs[0]:
        rhs = cast_weight_to_slot(weight, call, "grad_input.right")
        lhs = cast_grad("grad_input.left", rhs)
        grad_input = multiply_slots(
            lhs, rhs, call.name, "grad_input", (grad.shape[0], weight.shape[1]), grad.dtype
        )
    if needs[1]:
        rhs = saved
        if slots["grad_weight.right"] == "grad_weight.right":
            rhs = cast_to_slot(saved.data, call, "grad_weight.right")
        if lhs is None or slots["grad_weight.left"] == "grad_weight.left":
            lhs = cast_grad("grad_weight.left", rhs)
        shape = weight.shape[0], weight.shape[1]
        grad_weight = multiply_slots(lhs, rhs, call.name, "grad_weight", shape, weight.dtype)
    if needs[2]:
        grad_bias = bias_gradient(grad)
    return grad_input, grad_weight, grad_bias


class FirstOrder(torch.autograd.Function):
    """A function without rules for ``torch.func``, forward mode and second derivatives."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RecipeError(
            "Cannot use torch.func, forward mode or a second derivative on a narrow layer because "
            "its casts have no rule for it.",
            "Use backward() once, on the whole batch, or leave the layer plain: keep=.",
        )

    vmap = jvp = backward


class _Product(FirstOrder):
    """Compute ``x · wᵀ + b`` and its gradients, in a compute's casts."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        y, *saved = output(*inputs)
        _save(ctx, inputs, saved)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        arguments: Any = (grads[0], *_restored(ctx))
        # With create_graph=True. Casts are detached, so a second derivative would lack terms: it is
        # refused.
        if torch.is_grad_enabled():
            results = _Gradients.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            results = gradients(*arguments)
        return *results, None


class _Forward(FirstOrder):
    """The product alone, for transforms of ``torch.func`` without gradients."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        return output(*inputs)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Multiply one sample after the other: a scale may belong to all of a sample's rows."""
        results = []
        for index in range(info.batch_size):
            sample = []
            for value, dim in zip(inputs, in_dims, strict=True):
                sample.append(value.select(dim, index) if isinstance(dim, int) else value)
            results.append(cast(Callable[..., Tensor], _Forward.apply)(*sample))
        return torch.stack(results), 0


class _Gradients(FirstOrder):
    forward = staticmethod(gradients)
    setup_context = staticmethod(lambda ctx, inputs, output: None)


# Dynamo puts the call into its graph unchanged. AOTAutograd traces the operations inside: no guards
# on computes and casts.
@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def multiply_layer(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """Return the product of :func:`output`, with gradients."""
    if is_transformed():
        return cast(Callable[..., Tensor], _Forward.apply)(x, weight, bias, call)
    return cast(Callable[..., Tensor], _Product.apply)(x, weight, bias, call)
