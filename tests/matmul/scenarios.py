"""Shared by the tests of the matmuls: layers of every compute, and the operands that a compute
specifies, cast one by one.
"""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import tensors
from narrowgauge.matmul.gemm import EmulationNotice, operand_dtype
from narrowgauge.matmul.layer_matmuls import Call, outlier_columns, output
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand, cast_matrix, content_key, mixed
from narrowgauge.matmul.swapping import NarrowLayers, swap_linears
from narrowgauge.spec.computes import COMPUTES, PLACES, Cast, Compute
from narrowgauge.spec.parse import get_compute
from tensors import bits_with_one_nan

ROWS = list(COMPUTES.values())
EIGHT = [COMPUTES[name] for name in (
    "bfloat16", "float8-row", "float8-tensor", "float8-block", "int8-row", "mxfp8", "nvfp4", "scalify"
)]  # fmt: skip
"""Computes that stand for all in what does not depend on the arithmetic: each granularity, random
bits.
"""
KEY = torch.tensor(1234567, dtype=torch.int32)
# The dimension that each matmul contracts of what a layer has: x and w, dy and w, dy and x.
DIMS = {"output": (1, 1), "grad_input": (1, 0), "grad_weight": (0, 0)}
names = {"ids": lambda row: row.name}
gaussian = partial(tensors.gaussian, dtype=torch.bfloat16)


def make_layer(
    row: Compute | str,
    inputs: int = 65,
    outputs: int = 17,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Linear, NarrowLayers]:
    """A layer called ``fc``, in training, and the handle on it."""
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        plain.weight.copy_(gaussian(outputs, inputs, dtype=dtype, seed=1, scale=inputs**-0.5))
        if bias:
            plain.bias.copy_(gaussian(outputs, dtype=dtype, seed=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        linears = swap_linears(nn.Sequential(OrderedDict(fc=plain)), lambda _: get_compute(row))
    return linears.layers["fc"], linears


class Result(NamedTuple):
    """What one pass forward and backward gives."""

    output: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def passed(
    layer: nn.Module, x: Tensor, grad: Tensor, call: Callable[[Tensor], Tensor] | None = None
) -> Result:
    """Forward and backward through a layer, from fresh gradients; ``call`` is the layer compiled,
    say.
    """
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = (layer if call is None else call)(x)
    y.backward(grad)
    bias = layer.bias.grad.clone() if layer.bias is not None else torch.zeros(0)
    return Result(y.detach(), x.grad, layer.weight.grad.clone(), bias)


def same(first: Result, second: Result) -> bool:
    """Whether two results agree bit for bit, NaN for NaN."""
    return all(
        a.dtype == b.dtype and torch.equal(bits_with_one_nan(a), bits_with_one_nan(b))
        for a, b in zip(first, second, strict=True)
    )


def exact(operand: Operand) -> Tensor:
    """The values that an operand stands for, in float64, where codes times scales are exact."""
    values = operand.data.double()
    return values if operand.outer is None else values * operand.outer.double()


def cast_operands(row: Compute, place: str, shape: tuple[int, int, int]) -> list[Operand]:
    """Both operands of a matmul ``[rows, contraction, columns]``, cast as this device takes them."""
    matmul, (rows, contraction, columns) = row.products[place], shape
    operands = []
    for seed, cast, dim, side in zip(
        (0, 1), (matmul.left, matmul.right), DIMS[place], (rows, columns), strict=True
    ):
        x = gaussian(*((side, contraction) if dim == 1 else (contraction, side)), seed=seed)
        draw = None if cast.rounding == "nearest" else KEY
        operands.append(cast_matrix(x, cast, dim, operand_dtype(cast), key=draw))
    return operands


def quantized(
    x: Tensor, cast: Cast, dim: int, *, key: Tensor = KEY, fold: Tensor | None = None
) -> Operand:
    """A matrix cast by itself, ``[side, contraction]``, filled up to whole blocks."""
    x = x.detach() if fold is None else x.detach().float() * fold
    dtype = getattr(torch, cast.format) if cast.is_wide else torch.float32
    return cast_matrix(x, cast, dim, dtype, None if cast.rounding == "nearest" else key)


def operands(layer: Linear, x: Tensor, grad: Tensor):
    """Both operands of each matmul as float64 ``[rows, contraction]``, each cast for itself from
    what the table says.

    Nothing is shared or kept here: that a layer may do so is what the comparison proves.
    """
    row = layer.compute
    weight = layer.weight.t() if layer.is_transposed else layer.weight
    call = Call(layer.registered_name)
    rhs = call.cast(weight, "output.right")
    saved = output(x, rhs, len(weight), None, call)[1].data
    outliers = row.output.left.outliers
    sources = {
        "output": (torch.where(outlier_columns(x, outliers), 0, x) if outliers else x, weight),
        "grad_input": (grad, weight),
        "grad_weight": (grad, x),
    }
    values = {}
    for place in PLACES:
        (first, second), (of_left, of_right), matmul = (
            sources[place],
            DIMS[place],
            row.products[place],
        )
        rhs = quantized(second, matmul.right, of_right)
        fold = None
        if matmul.right.granularity == "column":
            # Scales along the contraction: a factor of the left operand, before it is cast.
            fold = rhs.outer.reshape((1, -1) if of_left else (-1, 1))
            rhs = rhs._replace(outer=None)
        key = KEY
        if row.is_stochastic:
            key = mixed(content_key(layer.key, grad, saved, weight), 2 + of_left)
        lhs = quantized(first, matmul.left, of_left, key=key, fold=fold)
        values[place] = exact(lhs), exact(rhs)
    return values


def expected(layer: Linear, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """What each matmul and the bias's gradient must be: float64, cut to size."""
    tokens = x.shape[0]
    sizes = {
        "output": (tokens, layer.out_features),
        "grad_input": (tokens, layer.in_features),
        "grad_weight": (layer.out_features, layer.in_features),
    }
    values = {}
    for place, (lhs, rhs) in operands(layer, x, grad).items():
        height, width = sizes[place]
        depth = min(lhs.shape[1], rhs.shape[1])  # a cast pads its operand with zeros
        values[place] = lhs[:height, :depth] @ rhs[:width, :depth].t()
    if layer.bias is not None:
        values["output"] += layer.bias.detach().double()
    values["grad_bias"] = grad.double().sum(0)
    return values


def assert_exact(row: Compute, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """All products of a layer are the exact products of its casts: in float32 to 2^-20 of their
    norm; in bfloat16 rounded once, after the scales: to half a unit in the last place.
    """
    tokens, inputs, outputs = shape
    layer, _ = make_layer(row, inputs, outputs, dtype=dtype)
    x = gaussian(tokens, inputs, dtype=dtype, seed=3)
    grad = gaussian(tokens, outputs, dtype=dtype, seed=4)
    results = passed(layer, x, grad)
    for (place, value), result in zip(expected(layer, x, grad).items(), results, strict=True):
        assert result.dtype == dtype and result.shape == value.shape and result.any()
        error = result.double() - value
        if dtype is torch.float32:
            assert error.norm() <= 2.0**-20 * value.norm(), (row.name, place)
        elif row.dtype == "bfloat16":
            units = torch.exp2(value.abs().clamp_min(2.0**-100).log2().floor() - 7)
            assert (error / units).abs().quantile(0.98) <= 0.51, (row.name, place)
