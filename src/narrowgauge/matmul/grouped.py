"""One projection of all experts as one operator.

How many tokens an expert gets depends on the routing. A compiler that looked inside would break its
graph at each mixture, or compile for each routing. So it sees one operator forward and one backward,
which loop over the experts. Values and gradients are those of a
:class:`~narrowgauge.matmul.linear.Linear` on the tokens of each expert. Backward keeps the input,
and casts it again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.matmul.layer_matmuls import Call, gradients, layer_output, output
from narrowgauge.matmul.operand import Operand, values_of
from narrowgauge.numerics.float32_matmul import linear, matmul


@torch.library.custom_op("narrowgauge::grouped", mutates_args=())
def grouped(
    x: Tensor, weights: Tensor, offsets: Tensor, name: str, keys: Tensor | None, scales: Tensor | None
) -> Tensor:  # fmt: skip
    """Multiply ``[tokens, in]`` by one projection of all experts.

    Args:
        x: sorted by expert.
        weights: ``[experts, out, in]``, or their codes with ``scales``.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset
            have no expert.
        name: of a registered compute; empty for the products of a plain layer.
        keys: of the experts' random bits.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert.
    Cost: one product per expert, and on CUDA a wait for the offsets.
    """
    y = x.new_zeros(x.shape[0], weights.shape[1])
    for expert, rows, call in _experts(offsets, name, keys):
        weight = weights[expert]
        if not name:
            y[rows] = linear(x[rows], weight)
        elif scales is None:
            y[rows] = layer_output(x[rows], weight, None, call)[0]
        else:
            y[rows] = output(x[rows], Operand(weight, scales[expert]), len(weight), None, call)[0]
    return y


@grouped.register_fake
def _(x: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[1])


def _experts(offsets: Tensor, name: str, keys: Tensor | None) -> Iterator[tuple[int, slice, Call]]:
    """Yield the index, the rows and the call of each expert that has tokens."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            key = None if keys is None else keys[expert]
            yield expert, slice(start, end), Call(name, key)
        start = end


@torch.library.custom_op("narrowgauge::grouped_gradients", mutates_args=())
def _grouped_gradients(
    grad: Tensor, x: Tensor, weights: Tensor, offsets: Tensor, name: str, keys: Tensor | None,
    scales: Tensor | None, needs_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x`` and, if needed, of ``weights``. Stored weights have none, and
    need no ``x``.
    """
    by_x = grad.new_zeros(grad.shape[0], weights.shape[2])
    by_weights = grad.new_empty(0)
    if needs_weights:
        by_weights = torch.zeros_like(weights)
    for expert, rows, call in _experts(offsets, name, keys):
        weight = weights[expert]
        if name and scales is None:
            needs = True, needs_weights, False
            to_x, to_weight, _ = gradients(grad[rows], _cast(x[rows], call), weight, call, needs)
            assert to_x is not None
            by_x[rows] = to_x
            if to_weight is not None:
                by_weights[expert] = to_weight
            continue
        if scales is not None:
            weight = values_of(Operand(weight, scales[expert]))
        by_x[rows] = matmul(grad[rows], weight.to(grad.dtype))
        if needs_weights:
            by_weights[expert] = matmul(grad[rows].t(), x[rows])
    return by_x, by_weights


@_grouped_gradients.register_fake
def _(grad: Tensor, x: Tensor, weights: Tensor, *rest: Any) -> Any:
    by_weights = torch.empty_like(weights) if rest[-1] else grad.new_empty(0)
    return grad.new_empty(grad.shape[0], weights.shape[2]), by_weights


def _cast(x: Tensor, call: Call) -> Operand:
    """Return what a layer saves for backward of the tokens of an expert."""
    if call.compute.cast_slots["grad_weight.right"] == "output.left":
        return call.cast(x, "output.left")
    return Operand(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, offsets, ctx.name, keys, scales = inputs
    if scales is not None:
        x = x.new_empty(0)
    if keys is not None:  # DDP writes buffers before each pass
        keys = keys.clone()
    ctx.save_for_backward(x, weights, offsets, keys, scales)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weights, offsets, keys, scales = ctx.saved_tensors
    needs_weights = ctx.needs_input_grad[1]
    by_x, by_weights = _grouped_gradients(
        grad, x, weights, offsets, ctx.name, keys, scales, needs_weights
    )
    return by_x, by_weights if needs_weights else None, None, None, None, None


grouped.register_autograd(_backward, setup_context=_save)
