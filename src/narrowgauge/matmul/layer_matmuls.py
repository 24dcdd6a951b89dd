"""The three products of a linear layer, forward and backward.

    product      left operand         right operand      contracts
    output       x   [tokens, in]     w  [out, in]       in
    grad_input   dy  [tokens, out]    wᵀ [in, out]       out
    grad_weight  dyᵀ [out, tokens]    xᵀ [in, tokens]    tokens

:mod:`narrowgauge.spec.computes` says how each operand is cast. :meth:`Call.cast` casts a tensor to an
operand ``[side, contraction]``, and :func:`~narrowgauge.matmul.gemm.multiply` multiplies two of them.
``narrowgauge show recipe`` prints the casts.

``torch.compile`` sees through a layer: its casts are operations of the model's graph, and fuse with
their neighbours. Two operators are opaque: widened products on a CPU, and outlier columns (their
number varies).

*Outlier features* are the few input columns that are hundreds of times larger than the rest, in
every token. A scale per row that covers them leaves few codes for the others. Without those columns
a row fits int8. A thin 16-bit matmul adds them, times the widened codes. Source: Dettmers et al.
2022, LLM.int8() (2208.07339), section 3.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.gemm import multiply, operand_dtype
from narrowgauge.matmul.operand import Operand, cast_matrix, content_key, mixed
from narrowgauge.numerics.float32_matmul import add_product, bias_gradient
from narrowgauge.spec.computes import COMPUTES, SLOTS, Compute

REGISTERED = dict(COMPUTES)
"""Computes by the name that graphs hold: the table's, and those that :func:`register` adds."""


def register(compute: Compute) -> str:
    """Return the name of a compute in graphs: its own, with primes if another one has it."""
    name = compute.name
    while REGISTERED.setdefault(name, compute) != compute:
        name += "'"
    return name


class Call(NamedTuple):
    """One call of a layer: what its casts depend on, in addition to their tensors.

    Attributes:
        name: of a registered compute.
        key: int32, one number, of the layer's random bits; ``None`` without stochastic casts.
    """

    name: str
    key: Tensor | None = None

    @property
    def compute(self) -> Compute:
        return REGISTERED[self.name]

    def cast(self, x: Tensor, slot: str, right: Operand | None = None) -> Operand:
        """Cast a tensor of the layer to the operand of a slot, ``[side, contraction]``.

        If the right operand has a scale for each term of the sum, multiply it into ``x`` first.
        """
        row = SLOTS[slot]
        compute = self.compute
        cast = compute.casts[slot]
        product = compute.products[row.matmul]
        if cast.outliers:
            x = torch.where(outlier_columns(x, cast.outliers), 0, x)
        key = fold = None
        if self.key is not None and cast.needs_bits:
            key = mixed(self.key, row.random_key)
        if right is not None and right.outer is not None and product.right.granularity == "column":
            fold = right.outer.reshape((1, -1) if row.dim == 1 else (-1, 1))
        return cast_matrix(x, cast, row.dim, operand_dtype(cast), key, fold)


def output(
    x: Tensor, rhs: Operand, outputs: int, bias: Tensor | None, call: Call
) -> tuple[Tensor, Operand]:
    """Return ``x · wᵀ + b`` of ``[tokens, in]`` and the operand of ``[out, in]``, and the operand
    saved for backward: x's cast, or x itself.
    """
    compute = call.compute
    product = compute.output
    lhs = call.cast(x, "output.left")
    y = multiply(lhs, rhs, product, (x.shape[0], outputs), x.dtype, bias)
    if product.left.outliers:
        y = add_outliers(y, x, product.left.outliers, rhs.data, rhs.outer)
    if compute.cast_slots["grad_weight.right"] == "output.left":
        return y, lhs
    return y, Operand(x)


def layer_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, call: Call
) -> tuple[Tensor, Operand]:
    """Return :func:`output` of a weight that has no cast yet."""
    return output(x, call.cast(weight, "output.right"), weight.shape[0], bias, call)


def gradients(
    grad: Tensor, saved: Operand, weight: Tensor, call: Call, needs: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias from that of the output ``[tokens, out]``,
    each if needed.
    """
    compute = call.compute
    slots = compute.cast_slots
    if call.key is not None:
        call = Call(call.name, content_key(call.key, grad, saved.data, weight))
    outputs, inputs = weight.shape
    grad = grad.contiguous()
    grad_input = grad_weight = grad_bias = None
    shared = None
    if needs[0]:
        if slots["grad_input.right"] == "output.right":
            rhs = call.cast(weight, "output.right").transposed()
        else:
            rhs = call.cast(weight, "grad_input.right")
        lhs = call.cast(grad, "grad_input.left", rhs)
        grad_input = multiply(lhs, rhs, compute.grad_input, (grad.shape[0], inputs), grad.dtype)
        if slots["grad_weight.left"] == "grad_input.left":
            shared = lhs.transposed()
    if needs[1]:
        if slots["grad_weight.right"] == "output.left":
            rhs = saved.transposed()
        else:
            rhs = call.cast(saved.data, "grad_weight.right")
        lhs = shared or call.cast(grad, "grad_weight.left", rhs)
        grad_weight = multiply(lhs, rhs, compute.grad_weight, (outputs, inputs), weight.dtype)
    if needs[2]:
        grad_bias = bias_gradient(grad)
    return grad_input, grad_weight, grad_bias


# ── outliers ──────────────────────────────────────────────────────────────────────────────────────


def outlier_columns(x: Tensor, threshold: float) -> Tensor:
    """Return which columns of ``[rows, columns]`` hold a magnitude of at least ``threshold`` (or a
    NaN): bool ``[columns]``.
    """
    # Compare in float32: PyTorch would first round the threshold to the format of x.
    return ~(x.abs().amax(0).float() < threshold)


@torch.library.custom_op("narrowgauge::add_outliers", mutates_args=())
def add_outliers(y: Tensor, x: Tensor, threshold: float, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the sum of ``y`` and the product of the outlier columns of ``x`` and the weight's
    widened codes.

    Cost: a thin matmul; on CUDA one synchronization, for the number of columns, which would break a
    graph.
    """
    outliers = outlier_columns(x, threshold).nonzero().view(-1)
    if not len(outliers):
        return y.clone(memory_format=torch.contiguous_format)
    thin = codes[:, outliers].float() * scales
    return add_product(y, x[:, outliers].to(y.dtype), thin.to(y.dtype).t()).contiguous()


@add_outliers.register_fake
def _(y: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(y)


# ── autograd ──────────────────────────────────────────────────────────────────────────────────────


# Dynamo puts the call into its graph unchanged. AOTAutograd traces the operations inside: no guards
# on computes and casts.
@torch.compiler.allow_in_graph
class LayerProduct(torch.autograd.Function):
    """Compute :func:`output`, and :func:`gradients` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Any:
        y, saved = layer_output(x, weight, bias, call)
        key = call.key
        if key is not None:  # DDP writes buffers before each pass
            key = key.clone()
        ctx.save_for_backward(*saved, weight, key)
        ctx.compute_name = call.name
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # PyTorch's once_differentiable says nothing where the gradient itself is a constant.
        if torch.is_grad_enabled():  # with create_graph=True
            raise RecipeError(
                "Cannot take a second derivative of a narrow layer because its casts have no rule "
                "for it.",
                "Leave out create_graph=True, or leave the layer plain: keep=.",
            )
        *saved, weight, key = ctx.saved_tensors
        call = Call(ctx.compute_name, key)
        return *gradients(grads[0], Operand(*saved), weight, call, ctx.needs_input_grad[:3]), None
