"""The operators: what a compiled model sees of a narrow linear layer.

Four opaque functions: cast the input for ``output``, multiply it with the weight, cast the input for ``grad_weight``, and both
gradients. Opaque, because a compiler that sees through the casts recomputes whatever feeds them at each of their uses; few,
because everything about the weight (casts, cache) then stays out of the graph; and casts of the input are apart, so that
equal ones are recognized: q, k and v share one.

A row of computes is passed by name, all that differs from layer to layer or from step to step as tensors: layers of one
shape share a graph, and no step compiles anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.cast_cache import cast_weight
from narrowgauge.matmul.delayed_scaling import delayed_amax
from narrowgauge.matmul.gemm import multiply, operand_dtype, with_channels_back
from narrowgauge.matmul.operand import Operand, cast_matrix, outer_shape
from narrowgauge.matmul.outliers import multiply_outliers, without_outliers
from narrowgauge.matmul.rng import STEP, random_words
from narrowgauge.numerics.quantization import padded
from narrowgauge.numerics.tensor_stats import power_of_rms
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product

ROWS: dict[str, Compute] = dict(COMPUTES)
"""Rows by the name that operators get: the table's, and what :func:`register` adds."""

# Which operand an amax or a random word belongs to; the gradient's second cast has words of its own.
INPUT, WEIGHT, GRADIENT = range(3)


def register(row: Compute) -> str:
    """Let operators know a row; the name that they then take for it.

    Returns:
        The row's own name, with a number where another row has it already.
    Raises:
        RecipeError: its cast of the input for ``output`` is stochastic: layers share that cast, and random bits are a layer's.
    """
    if row.output.left.rounding == "stochastic":
        raise RecipeError(
            f"compute '{row.name}' rounds the input of output stochastically, in a cast that several layers share.",
            "Round it to the nearest; weights and gradients may be stochastic.",
        )
    name, number = row.name, 1
    while ROWS.setdefault(name, row) != row:
        number += 1
        name = f"{row.name} ({number})"
    return name


@torch.library.custom_op("narrowgauge::cast_input", mutates_args=())
def cast_input(
    x: Tensor, row: str, state: Tensor | None, history: Tensor | None, record: bool
) -> tuple[Tensor, Tensor]:
    """x ``[tokens, in]`` cast for ``output``: data, and the outer scale (empty without one).

    Nothing of the layer goes in but for delayed scales, so that layers with the same input share one call.
    """
    product = ROWS[row].output
    source = without_outliers(x, product.left.outliers) if product.left.outliers else x
    amax = None if state is None else delayed_amax(x, product.left, history, INPUT, state[STEP], record)
    dtype = operand_dtype(product.left, product, x.device, as_codes=ROWS[row].keeps_codes)
    return _parted(cast_matrix(source, product.left, 1, dtype, amax=amax), x)


@torch.library.custom_op("narrowgauge::multiply_output", mutates_args=())
def multiply_output(
    data: Tensor,
    outer: Tensor,
    x: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    row: str,
    state: Tensor,
    history: Tensor | None,
    record: bool,
    rows: int,
    dtype: torch.dtype,
    unit: Tensor | None = None,
) -> Tensor:
    """``output [rows, out]`` of the cast input and the weight ``[out, in]``; ``x`` is what outliers are taken from.

    With a ``unit`` it is the product with ``weight / unit``: cast by that, kept by the weight itself.
    """
    product = ROWS[row].output
    left, right = _joined(data, outer), _weight(weight, row, "output", 1, state, history, record, unit)
    if product.left.smooth:
        left, right = with_channels_back(left, right)
    result = multiply(left, right, (1, 1), product, dtype, bias)[:rows, : weight.shape[0]]
    if product.left.outliers and x is not None:
        result = multiply_outliers(result, x, weight, product.left.outliers)
    return result.contiguous()


@torch.library.custom_op("narrowgauge::weight_unit", mutates_args=())
def weight_unit(weight: Tensor) -> Tensor:
    """The power of two at or below a weight's root mean square, 0-d float32: measured once while the weight stays."""
    unit = cast_weight(weight, ("unit",), lambda: Operand(power_of_rms(weight), None)).data
    return unit.clone()


@weight_unit.register_fake
def _(weight: Tensor) -> Tensor:
    return weight.new_empty((), dtype=torch.float32)


@torch.library.custom_op("narrowgauge::cast_kept", mutates_args=())
def cast_kept(x: Tensor, row: str, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """x ``[tokens, in]`` cast for ``grad_weight``, which contracts the tokens."""
    product = ROWS[row].grad_weight
    dtype = operand_dtype(product.right, product, x.device)
    words = None if state is None else random_words(product.right, x, 0, state, INPUT, 1)
    return _parted(cast_matrix(x, product.right, 0, dtype, words=words), x)


@torch.library.custom_op("narrowgauge::gradients", mutates_args=())
def gradients(
    grad: Tensor,
    data: Tensor,
    outer: Tensor,
    weight: Tensor,
    row: str,
    state: Tensor,
    history: Tensor | None,
    sequence_length: int,
    wanted: list[bool],
    record: bool,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``grad_input [tokens, in]`` and ``grad_weight [out, in]`` of the output's gradient; empty where not wanted.

    With a ``unit`` they are those of the product with ``weight / unit``.
    """
    compute = ROWS[row]
    amax = delayed_amax(grad, compute.grad_input.left, history, GRADIENT, state[STEP], record)
    grad_input, grad_weight = grad.new_empty(0), grad.new_empty(0)
    cast = None
    if wanted[0]:
        right, fold = _folded(_weight(weight, row, "grad_input", 0, state, history, False, unit), compute.grad_input, 1)
        cast = _cast_grad(grad, compute.grad_input, 1, state, sequence_length, fold, amax)
        product = multiply(cast, right, (1, 0), compute.grad_input, grad.dtype)
        grad_input = product[: grad.shape[0], : weight.shape[1]].contiguous()
    if wanted[1]:
        right, fold = _folded(_kept(data, outer, compute.grad_weight), compute.grad_weight, 0)
        if cast is None or not compute.reuses_grad:
            cast = _cast_grad(grad, compute.grad_weight, 0, state, sequence_length, fold, amax)
        product = multiply(cast, right, (0, 0), compute.grad_weight, weight.dtype)
        grad_weight = product[: weight.shape[0], : weight.shape[1]].contiguous()
    return grad_input, grad_weight


@cast_input.register_fake
def _(x: Tensor, row: str, state: Tensor | None, history: Tensor | None, record: bool) -> tuple[Tensor, Tensor]:
    product = ROWS[row].output
    return _shaped(x, product.left, 1, operand_dtype(product.left, product, x.device, as_codes=ROWS[row].keeps_codes))


@multiply_output.register_fake
def _(
    data: Tensor, outer: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, row: str, state: Tensor,
    history: Tensor | None, record: bool, rows: int, dtype: torch.dtype, unit: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return data.new_empty((rows, weight.shape[0]), dtype=dtype)


@cast_kept.register_fake
def _(x: Tensor, row: str, state: Tensor | None) -> tuple[Tensor, Tensor]:
    product = ROWS[row].grad_weight
    return _shaped(x, product.right, 0, operand_dtype(product.right, product, x.device))


@gradients.register_fake
def _(
    grad: Tensor, data: Tensor, outer: Tensor, weight: Tensor, row: str, state: Tensor, history: Tensor | None,
    sequence_length: int, wanted: list[bool], record: bool, unit: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    grad_input = grad.new_empty((grad.shape[0], weight.shape[1])) if wanted[0] else grad.new_empty(0)
    grad_weight = weight.new_empty(weight.shape) if wanted[1] else grad.new_empty(0)
    return grad_input, grad_weight


def _weight(
    weight: Tensor, row: str, place: str, dim: int, state: Tensor, history: Tensor | None, record: bool,
    unit: Tensor | None,
) -> Operand:  # fmt: skip
    """The weight ``[out, in]``, in its unit, cast for a product that contracts its dimension ``dim``."""
    compute = ROWS[row]
    # One cast where it serves both: the one of `output`.
    shared = compute.reuses_weight
    product = compute.output if shared else compute.products[place]
    along = 1 if shared else dim

    def make() -> Operand:
        amax = delayed_amax(weight, product.right, history, WEIGHT, state[STEP], record)
        dtype = operand_dtype(product.right, product, weight.device)
        words = random_words(product.right, weight, along, state, WEIGHT, 0)
        source = weight if unit is None else weight.detach() / unit
        return cast_matrix(source, product.right, along, dtype, words=words, amax=amax)

    return cast_weight(weight, (product.right, along), make)


def _cast_grad(
    grad: Tensor, product: Product, dim: int, state: Tensor, length: int, fold: Tensor | None, amax: Tensor | None
) -> Operand:
    dtype = operand_dtype(product.left, product, grad.device)
    words = random_words(product.left, grad, dim, state, GRADIENT + dim, length)
    return cast_matrix(grad, product.left, dim, dtype, words=words, fold=fold, amax=amax)


def _folded(right: Operand, product: Product, dim: int) -> tuple[Operand, Tensor | None]:
    """The right operand and, where its scales lie along the contraction, those: to be multiplied into the left one.

    Args:
        right: the operand.
        product: which matmul.
        dim: the dimension of the left operand that is contracted.
    """
    if product.right.granularity != "column" or right.outer is None:
        return right, None
    return Operand(right.data, None), right.outer.view((1, -1) if dim == 1 else (-1, 1))


def _kept(data: Tensor, outer: Tensor, product: Product) -> Operand:
    """The right operand of ``grad_weight``: a cast of the input, or the input itself where that is only rounded."""
    if product.right.is_wide:
        return cast_matrix(data, product.right, 0, operand_dtype(product.right, product, data.device))
    return _joined(data, outer)


def _parted(operand: Operand, like: Tensor) -> tuple[Tensor, Tensor]:
    """Data and scale as an operator returns them: never an input itself, nor ``None``."""
    data = operand.data.contiguous()
    data = data.clone() if data.data_ptr() == like.data_ptr() else data
    outer = like.new_empty(0, dtype=torch.float32) if operand.outer is None else operand.outer
    return data, outer


def _joined(data: Tensor, outer: Tensor) -> Operand:
    return Operand(data, outer if outer.numel() else None)


def _shaped(x: Tensor, cast: Cast, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a cast returns, without values."""
    shape = padded(x, cast, dim).shape
    return x.new_empty(shape, dtype=dtype), x.new_empty(outer_shape(shape, cast, dim) or 0, dtype=torch.float32)
