"""The operations of a linear layer, each a function to time on random operands: up to six casts, and three matmuls.

They call the functions that a narrow layer calls, in its order: codes that are used twice are made once, and scales that lie
along a contraction are multiplied into the other operand first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.matmul.delayed_scaling import history_for
from narrowgauge.matmul.layer_matmuls import cast_to_slot, multiply_outliers, multiply_slots, scales_to_fold
from narrowgauge.matmul.linear import is_plain
from narrowgauge.matmul.operand import Operand
from narrowgauge.planner.roofline import Setting, Shape
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.slots import SLOTS, casts_made, slot_of_cast
from narrowgauge.spec.variants import named

Work = Callable[[], Any]

# A right operand is made before the left one of its matmul, which may take its scales.
_ORDER = ("output.left", "output.right", "grad_input.right", "grad_input.left", "grad_weight.right", "grad_weight.left")


def operations_of(shape: Shape, setting: Setting, num_tokens: int, device: torch.device) -> dict[str, Work]:
    """The operations of a linear layer on random operands; each call runs one.

    They return the operands, the output and the gradients of the layer itself.

    Args:
        shape: of its weight.
        setting: how it is computed.
        num_tokens: rows of its input.
        device: where.
    """
    x, weight, grad = operands(shape, setting, num_tokens, device)
    compute = named(setting.compute)
    if setting.is_plain and is_plain(compute, x.dtype):
        return _plain_operations(x, weight, grad)
    return narrow_operations(compute, x, weight, grad)


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


def _plain_operations(x: Tensor, weight: Tensor, grad: Tensor) -> dict[str, Work]:
    """PyTorch's own linear function; wider weights are cast as autocast does it."""
    seen = weight.to(x.dtype)
    casts: dict[str, Work] = {} if seen is weight else {"output.right": lambda: weight.to(x.dtype)}
    return {
        **casts,
        "output": lambda: F.linear(x, seen),
        "grad_input": lambda: grad @ seen,
        "grad_weight": lambda: (grad.t() @ x).to(weight.dtype),
    }


def narrow_operations(
    compute: Compute, x: Tensor, weight: Tensor, grad: Tensor, state: Tensor | None = None
) -> dict[str, Work]:
    """The casts that a compute makes, and its matmuls.

    Args:
        compute: which.
        x, weight, grad: see :func:`operands`.
        state: a layer's, which its random bits depend on.
    """
    state = torch.zeros(4, dtype=torch.int32, device=x.device) if state is None else state
    history = history_for(compute, x.device)
    tensors = {"input": x, "weight": weight, "gradient": grad}
    made: dict[str, Operand] = {}
    casts: dict[str, Work] = {}
    for name in _ORDER:
        first = slot_of_cast(compute, name)
        if first == name:
            matmul = SLOTS[name].matmul
            right = made.get(f"{matmul}.right")
            fold = None if right is None else scales_to_fold(right.outer, compute, matmul)
            casts[name] = partial(
                cast_to_slot, tensors[SLOTS[name].tensor], compute, name,
                state=state, history=history, record=True, fold=fold,
            )  # fmt: skip
            made[name] = casts[name]()
        else:
            made[name] = made[first]

    def output() -> Tensor:
        result = product("output", (len(x), len(weight)), x.dtype)
        threshold = compute.output.left.outliers
        return multiply_outliers(result, x, weight, threshold) if threshold else result

    def product(matmul: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return multiply_slots(made[f"{matmul}.left"], made[f"{matmul}.right"], compute, matmul, shape, dtype)

    return {
        **{name: casts[name] for name in casts_made(compute)},
        "output": output,
        "grad_input": partial(product, "grad_input", (len(grad), weight.shape[1]), grad.dtype),
        "grad_weight": partial(product, "grad_weight", (len(weight), weight.shape[1]), weight.dtype),
    }
