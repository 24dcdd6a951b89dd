"""One projection of all experts as one operator.

How many tokens an expert gets depends on the routing. A compiler that looked inside would break its
graph at each mixture, or compile for each routing. So it sees one operator forward and one backward,
which loop over the experts. Values and gradients are those of a
:class:`~narrowgauge.matmul.linear.Linear` on the tokens of each expert.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.matmul.layer_matmuls import REGISTERED, Call, gradients, layer_output, output
from narrowgauge.matmul.operand import Operand, values_of
from narrowgauge.numerics.float32_matmul import linear, matmul


@torch.library.custom_op("narrowgauge::grouped", mutates_args=())
def grouped(
    x: Tensor, weights: Tensor, offsets: Tensor, name: str, keys: Tensor | None, scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Multiply ``[tokens, in]`` by one projection of all experts.

    Args:
        x: sorted by expert.
        weights: ``[experts, out, in]``, or their codes with ``scales``.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset
            have no expert.
        name: of a registered compute; empty for the products of a plain layer.
        keys: of the experts' random bits.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert; and the codes of ``x`` with their
        scales, for backward, empty if backward casts ``x`` again.
    Cost: one product per expert, and on CUDA a wait for the offsets.
    """
    y = x.new_zeros(x.shape[0], weights.shape[1])
    codes, code_scales = _empty_codes(x, name)
    for expert, rows, call in _experts(offsets, name, keys):
        weight = weights[expert]
        if not name:
            y[rows] = linear(x[rows], weight)
        elif scales is not None:
            y[rows] = output(x[rows], Operand(weight, scales[expert]), len(weight), None, call)[0]
        else:
            y[rows], cast = layer_output(x[rows], weight, None, call)
            if keeps_codes(name):
                codes[rows] = cast.data
                assert cast.outer is not None
                code_scales[rows] = cast.outer
    return y, codes, code_scales


@grouped.register_fake
def _(x: Tensor, weights: Tensor, offsets: Tensor, name: str, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape[0], weights.shape[1]), *_empty_codes(x, name)


def keeps_codes(name: str) -> bool:
    """Return whether a compute saves one byte of each input value for backward: its code."""
    return bool(name) and REGISTERED[name].keeps_codes


def _empty_codes(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return tensors for the codes ``[tokens, in]`` and their scales ``[tokens, 1]``."""
    if not keeps_codes(name):
        return x.new_empty(0), x.new_empty(0)
    dtype = getattr(torch, REGISTERED[name].output.left.format)
    # Zeros: of tokens without an expert.
    return x.new_zeros(x.shape, dtype=dtype), x.new_zeros(x.shape[0], 1, dtype=torch.float32)


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
    grad: Tensor, saved: Tensor, scales: Tensor, weights: Tensor, offsets: Tensor, name: str,
    keys: Tensor | None, needs_weights: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x`` and, if needed, of ``weights``.

    ``saved`` is ``x``, or its codes with their ``scales``. For stored weights, which have no gradient,
    ``scales`` are the weights' own.
    """
    is_stored = weights.element_size() == 1
    by_x = grad.new_zeros(grad.shape[0], weights.shape[2])
    by_weights = grad.new_empty(0)
    if needs_weights:
        by_weights = torch.zeros_like(weights)
    for expert, rows, call in _experts(offsets, name, keys):
        weight = weights[expert]
        if name and not is_stored:
            cast = _saved_cast(saved[rows], scales[rows], call)
            needs = True, needs_weights, False
            to_x, to_weight, _ = gradients(grad[rows], cast, weight, call, needs)
            assert to_x is not None
            by_x[rows] = to_x
            if to_weight is not None:
                by_weights[expert] = to_weight
            continue
        if is_stored:
            weight = values_of(Operand(weight, scales[expert]))
        by_x[rows] = matmul(grad[rows], weight.to(grad.dtype))
        if needs_weights:
            by_weights[expert] = matmul(grad[rows].t(), saved[rows])
    return by_x, by_weights


@_grouped_gradients.register_fake
def _(grad: Tensor, saved: Tensor, scales: Tensor, weights: Tensor, *rest: Any) -> Any:
    by_weights = torch.empty_like(weights) if rest[-1] else grad.new_empty(0)
    return grad.new_empty(grad.shape[0], weights.shape[2]), by_weights


def _saved_cast(saved: Tensor, scales: Tensor, call: Call) -> Operand:
    """Return what a layer saves for backward of the tokens of an expert."""
    compute = call.compute
    if keeps_codes(call.name):
        if compute.output.left.granularity == "tensor":
            scales = scales[:1]  # one of all these tokens
        return Operand(saved, scales)
    if compute.cast_slots["grad_weight.right"] == "output.left":
        return call.cast(saved, "output.left")
    return Operand(saved)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weights, offsets, ctx.name, keys, weight_scales = inputs
    _, saved, scales = output
    if weight_scales is not None:
        scales = weight_scales
    elif not keeps_codes(ctx.name):
        saved = x
    if keys is not None:  # DDP writes buffers before each pass
        keys = keys.clone()
    ctx.save_for_backward(saved, scales, weights, offsets, keys)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    *tensors, keys = ctx.saved_tensors
    needs_weights = ctx.needs_input_grad[1]
    by_x, by_weights = _grouped_gradients(grad, *tensors, ctx.name, keys, needs_weights)
    return by_x, by_weights if needs_weights else None, None, None, None, None


grouped.register_autograd(_backward, setup_context=_save)
