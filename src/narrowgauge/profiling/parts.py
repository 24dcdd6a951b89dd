"""The nine parts of a linear layer, each a function to time: six casts and three matmuls, on random operands.

They call what a narrow layer itself calls, in its order: codes that serve twice are made once, and scales that lie along a
contraction go into the other operand first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul.custom_ops import GRADIENT, INPUT, WEIGHT
from narrowgauge.matmul.delayed_scaling import delayed_amax, new_history
from narrowgauge.matmul.gemm import multiply, operand_dtype
from narrowgauge.matmul.linear import is_plain
from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.matmul.outliers import multiply_outliers, without_outliers
from narrowgauge.matmul.rng import STEP, random_words
from narrowgauge.profiling.layer_plan import Shape
from narrowgauge.profiling.settings import Setting, casts_made
from narrowgauge.spec.computes import Compute, Product
from narrowgauge.spec.variants import named

Work = Callable[[], Any]


def parts_of(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> dict[str, Work]:
    """The parts of a linear layer on random operands; each call does one.

    Law: what they return are the operands, the output and the gradients of the layer itself.

    Args:
        shape: of its weight.
        setting: how it is computed.
        num_tokens: rows of its input.
        device: where.
    """
    x, weight, grad = operands(shape, setting, num_tokens, device)
    row = named(setting.row)
    if setting.is_plain and is_plain(row, x.dtype):
        return _plain_parts(x, weight, grad)
    return narrow_parts(row, x, weight, grad)


def operands(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random x ``[tokens, in]``, weight ``[out, in]`` and gradient ``[tokens, out]``."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(rows: int, columns: int, scale: float, dtype: str) -> Tensor:
        values = torch.randn(rows, columns, dtype=torch.float32, device=device, generator=generator) * scale
        return values.to(getattr(torch, dtype))

    sides = (shape.in_features, shape.out_features) if shape.is_transposed else (shape.out_features, shape.in_features)
    weight = drawn(*sides, 0.02, setting.weights)
    x = drawn(num_tokens, shape.in_features, 1.0, setting.stream)
    grad = drawn(num_tokens, shape.out_features, 1e-3, setting.stream)
    return x, weight.t() if shape.is_transposed else weight, grad


def _plain_parts(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Work]:
    """PyTorch's own linear function; wider weights are cast as autocast does it."""
    seen = weight.to(x.dtype)
    casts: dict[str, Work] = {} if seen is weight else {"output.right": lambda: weight.to(x.dtype)}
    return {
        **casts,
        "output": lambda: F.linear(x, seen),
        "grad_input": lambda: grad @ seen,
        "grad_weight": lambda: (grad.t() @ x).to(weight.dtype),
    }


def narrow_parts(row: Compute, x: Tensor, weight: Tensor, grad: Tensor, state: Tensor | None = None) -> dict[str, Work]:
    """The casts that a row makes and its matmuls, as :mod:`narrowgauge.matmul.custom_ops` does them.

    Args:
        row: of computes.
        x, weight, grad: see :func:`operands`.
        state: a layer's, which its random words depend on.
    """
    state = torch.zeros(4, dtype=torch.int32, device=x.device) if state is None else state
    history = new_history(max(cast.history for cast in row.casts.values()), x.device) if row.is_delayed else None
    # Each operand, its number, and what a sequence is long in its rows.
    sources = {"input": (x, INPUT, 1), "weight": (weight, WEIGHT, 0), "gradient": (grad, GRADIENT, 1)}
    made: dict[str, Operand] = {}

    def cast(name: str, what: str, dim: int, fold: Tensor | None = None) -> Work:
        product, own = row.products[name.partition(".")[0]], row.casts[name]
        as_codes = name == "output.left" and row.keeps_codes
        dtype = operand_dtype(own, product, x.device, as_codes=as_codes)

        def work() -> Operand:
            source, number, length = sources[what]
            source = without_outliers(source, own.outliers) if own.outliers else source
            amax = delayed_amax(source, own, history, number, state[STEP], True)
            number += dim if what == "gradient" else 0
            words = random_words(own, source, dim, state, number, length)
            return cast_matrix(source, own, dim, dtype, words=words, fold=fold, amax=amax)

        made[name] = work()
        return work

    works = {"output.left": cast("output.left", "input", 1), "output.right": cast("output.right", "weight", 1)}
    by_output = made["output.right"] if row.reuses_weight else None
    if by_output is None:
        works["grad_input.right"] = cast("grad_input.right", "weight", 0)
    weights = by_output or made["grad_input.right"]
    works["grad_input.left"] = cast("grad_input.left", "gradient", 1, _folded(weights, row.grad_input, (1, -1)))
    if row.output.left.serves(row.grad_weight.right):
        made["grad_weight.right"] = made["output.left"]
    else:
        works["grad_weight.right"] = cast("grad_weight.right", "input", 0)
    if row.reuses_grad:
        made["grad_weight.left"] = made["grad_input.left"]
    else:
        fold = _folded(made["grad_weight.right"], row.grad_weight, (-1, 1))
        works["grad_weight.left"] = cast("grad_weight.left", "gradient", 0, fold)

    def output() -> Tensor:
        result = multiply(made["output.left"], made["output.right"], (1, 1), row.output, x.dtype)
        result = _cut(result, len(x), len(weight))
        threshold = row.output.left.outliers
        return multiply_outliers(result, x, weight, threshold) if threshold else result

    def grad_input() -> Tensor:
        right = _unfolded(weights, row.grad_input)
        result = multiply(made["grad_input.left"], right, (1, 0), row.grad_input, grad.dtype)
        return _cut(result, len(grad), weight.shape[1])

    def grad_weight() -> Tensor:
        right = _unfolded(made["grad_weight.right"], row.grad_weight)
        result = multiply(made["grad_weight.left"], right, (0, 0), row.grad_weight, weight.dtype)
        return _cut(result, *weight.shape)

    casts = {name: works[name] for name in casts_made(row)}
    return {**casts, "output": output, "grad_input": grad_input, "grad_weight": grad_weight}


def _folded(right: Operand, product: Product, sides: tuple[int, int]) -> Tensor | None:
    """The right operand's scales, where they go into the left one."""
    return right.outer.view(sides) if right.outer is not None and product.right.granularity == "column" else None


def _unfolded(right: Operand, product: Product) -> Operand:
    return Operand(right.data, None) if product.right.granularity == "column" else right


def _cut(result: Tensor, rows: int, columns: int) -> Tensor:
    return result[:rows, :columns].contiguous()
