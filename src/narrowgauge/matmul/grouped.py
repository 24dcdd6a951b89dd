"""Grouped linears: the experts of a mixture, each a linear layer over the tokens that chose it, by the same rows.

A mixture keeps the weights of its experts in one tensor ``[experts, out, in]``. Sorted by expert, the tokens are a matrix whose
rows from one *offset* to the next belong to one expert: as many small matmuls as experts, each with casts of its own. A scale
of a tensor is then an expert's, and so is a delayed one; random bits are keyed by the expert; an expert without tokens costs
nothing and learns nothing. The whole product is one operator, so that a compiler sees neither how many tokens each expert
got nor a break.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import custom_ops, rng
from narrowgauge.matmul.choosing import row_of
from narrowgauge.matmul.delayed_scaling import new_history
from narrowgauge.matmul.gemm import operand_dtype
from narrowgauge.matmul.linear import Linear, is_plain
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec.computes import Compute


@torch.library.custom_op("narrowgauge::grouped_output", mutates_args=())
def grouped_output(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    row: str,
    state: Tensor,
    history: Tensor | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``output [tokens, out]``, zero after the last expert's tokens; and what is kept of the cast input: data, outer scales."""
    product = custom_ops.ROWS[row].output
    result = x.new_zeros((x.shape[0], weights.shape[1]))
    data, outer = _room_for_kept(x, weights.shape[0], row)
    for expert, tokens in _groups(offsets):
        own, by = state[:, expert], _history_of(history, expert, len(weights))
        group = x[tokens]
        values, scale = custom_ops.cast_input(group, row, None if by is None else own, by, record)
        source = group if product.left.outliers else None
        result[tokens] = custom_ops.multiply_output(
            values, scale, source, weights[expert], None if bias is None else bias[expert], row, own, by, record,
            len(group), x.dtype,
        )  # fmt: skip
        if data.numel():
            data[tokens] = values
        if outer.numel():
            outer[tokens if product.left.granularity == "row" else expert] = scale
    return result, data, outer


@torch.library.custom_op("narrowgauge::grouped_gradients", mutates_args=())
def grouped_gradients(
    grad: Tensor,
    data: Tensor,
    outer: Tensor,
    weights: Tensor,
    offsets: Tensor,
    row: str,
    state: Tensor,
    history: Tensor | None,
    sequence_length: int,
    wanted: list[bool],
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weights and bias; empty where not wanted, zero for experts without tokens."""
    product = custom_ops.ROWS[row].grad_weight
    grad_input, grad_weights, grad_bias = _room_for_gradients(grad, weights, wanted)
    for expert, tokens in _groups(offsets):
        own, by = state[:, expert], _history_of(history, expert, len(weights))
        group, kept, scale = grad[tokens], data[tokens], outer
        if outer.numel():
            scale = outer[tokens] if product.right.granularity == "column" else outer[expert : expert + 1]
        elif wanted[1] and not _keeps_data(row) and not product.right.is_wide:
            kept, scale = custom_ops.cast_kept(kept, row, own if product.right.rounding == "stochastic" else None)
        by_token, by_output = custom_ops.gradients(
            group, kept, scale, weights[expert], row, own, by, sequence_length, wanted[:2], record
        )
        if wanted[0]:
            grad_input[tokens] = by_token
        if wanted[1]:
            grad_weights[expert] = by_output
        if wanted[2]:
            grad_bias[expert] = group.sum(0)
    return grad_input, grad_weights, grad_bias


@grouped_output.register_fake
def _(
    x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, row: str, state: Tensor, history: Tensor | None,
    record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return x.new_empty((x.shape[0], weights.shape[1])), *_room_for_kept(x, weights.shape[0], row)


@grouped_gradients.register_fake
def _(
    grad: Tensor, data: Tensor, outer: Tensor, weights: Tensor, offsets: Tensor, row: str, state: Tensor,
    history: Tensor | None, sequence_length: int, wanted: list[bool], record: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _room_for_gradients(grad, weights, wanted)


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert that got tokens, and their rows. On CUDA this waits for the router."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def _history_of(history: Tensor | None, expert: int, num_experts: int) -> Tensor | None:
    return None if history is None else history.unflatten(2, (num_experts, -1))[:, :, expert]


def _keeps_data(row: str) -> bool:
    """Whether the input as cast for ``output`` is what ``grad_weight`` takes, with as many rows as there are tokens."""
    compute = custom_ops.ROWS[row]
    return compute.output.left.block is None and compute.output.left.serves(compute.grad_weight.right)


def _room_for_kept(x: Tensor, num_experts: int, row: str) -> tuple[Tensor, Tensor]:
    compute, left = custom_ops.ROWS[row], custom_ops.ROWS[row].output.left
    if not _keeps_data(row):
        return x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    dtype = operand_dtype(left, compute.output, x.device, as_codes=compute.keeps_codes)
    scales = {"row": x.shape[0], "tensor": num_experts}.get(left.granularity, 0) if left.scaling != "static" else 0
    # Rows that no expert has are never read.
    width = x.shape[1] if left.smooth else 1
    return x.new_empty(x.shape, dtype=dtype), x.new_empty((scales, width), dtype=torch.float32)


def _room_for_gradients(grad: Tensor, weights: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        grad.new_zeros((grad.shape[0], weights.shape[2])) if wanted[0] else grad.new_empty(0),
        weights.new_zeros(weights.shape) if wanted[1] else grad.new_empty(0),
        grad.new_zeros(weights.shape[:2]) if wanted[2] else grad.new_empty(0),
    )


class _Product(torch.autograd.Function):
    """Every expert's ``x · wᵀ + b`` and its gradients, in a row's casts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor, row: str, state: Tensor,
        history: Tensor | None, sequence_length: int, record: bool,
    ) -> Tensor:  # fmt: skip
        y: Tensor
        y, data, outer = grouped_output(x, weights, bias, offsets, row, state, history, record)
        ctx.save_for_backward(data if _keeps_data(row) else x, outer, weights, offsets, state, history)
        ctx.row, ctx.sequence_length, ctx.record = row, sequence_length, record
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of input, weights and bias."""
        data, outer, weights, offsets, state, history = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:3])
        found = grouped_gradients(
            grads[0].contiguous(), data, outer, weights, offsets, ctx.row, state, history, ctx.sequence_length, wanted,
            ctx.record,
        )  # fmt: skip
        given = [grad if asked else None for grad, asked in zip(found, wanted, strict=True)]
        return (*given, None, None, None, None, None, None)


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    compute: str | Compute,
    *,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    history: Tensor | None = None,
    sequence_length: int = 1,
    record: bool = False,
) -> Tensor:
    """Each expert's linear layer over its own tokens, in a row of ``COMPUTES``.

    Law: an expert's rows of the output, of the input's gradient and of the weights' are those of a
    :class:`~narrowgauge.matmul.linear.Linear` of the row on that expert's tokens alone, bit for bit.

    Args:
        x: ``[tokens, in]``, sorted by expert.
        weights: ``[experts, out, in]``, a view or not.
        offsets: int32 ``[experts]``: where each expert's tokens end. Tokens after the last offset have no expert.
        compute: a row or its name.
        bias: ``[experts, out]``.
        state: int32 ``[4, experts]``, see :func:`new_state`; ``None`` is that of step 0 and seed 0.
        history: for rows with delayed scales, see :class:`GroupedLinear`.
        sequence_length: how far apart the random bits of two sequences lie; only the number of the first sequence counts.
        record: write the largest magnitudes of this step into ``history``.
    Returns:
        ``[tokens, out]``, zero for tokens without an expert.
    Raises:
        RecipeError: no such row, or a row of delayed scales without a history.

    Cost: a matmul for each expert, one after another, and on CUDA a wait for the offsets; bfloat16 takes PyTorch's grouped
        matmul where that takes the operands.
    Example:
        >>> x, weights = torch.randn(5, 32), torch.randn(3, 16, 32)
        >>> grouped_linear(x, weights, torch.tensor([2, 2, 5], dtype=torch.int32), "float8-row").shape
        torch.Size([5, 16])
    """
    row = row_of(compute)
    if row.is_delayed and history is None:
        raise RecipeError(
            f"compute '{row.name}' takes its scales from earlier steps, and grouped_linear got no history of them.",
            "Take a GroupedLinear, which has one.",
        )
    name = custom_ops.register(row)
    weights = weights.to(x.dtype) if is_plain(row, x.dtype) else weights
    if is_plain(row, x.dtype) and bias is None and _suits_torch(x, weights):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    state = new_state(len(weights), device=x.device) if state is None else state
    apply = cast(Callable[..., Tensor], _Product.apply)
    return apply(x, weights, bias, offsets, name, state, history, sequence_length, record)


def _suits_torch(x: Tensor, weights: Tensor) -> bool:
    """Whether PyTorch's grouped matmul takes the operands, compiled too: bfloat16, rows of multiples of 16 bytes."""
    if is_widened(x.dtype, x.device.type):
        return False
    if x.dtype != torch.bfloat16 or x.shape[1] % 8 or weights.shape[1] % 8 or not x.shape[0]:
        return False
    return not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)


def new_state(num_experts: int, name: str = "", device: torch.device | None = None) -> Tensor:
    """Int32 ``[4, experts]``: for each expert what :class:`~narrowgauge.matmul.linear.Linear` has as its state.

    An expert's number, which keys its random bits, comes from the name of its weights and its place among them.
    """
    state = torch.zeros(4, num_experts, dtype=torch.int32)
    digests = [hashlib.sha256(f"{name}.{expert}".encode()).digest()[:4] for expert in range(num_experts)]
    numbers = [int.from_bytes(digest, "little", signed=True) for digest in digests]
    state[rng.LAYER] = torch.tensor(numbers, dtype=torch.int32)
    return state.to(device)


class GroupedLinear(nn.Module):
    """One projection of all experts of a mixture, in a row of computes; the weights stay with the model's own module.

    Attributes:
        compute: the row in force.
        state: int32 ``[4, experts]``: seed of the step, step, first sequence, the expert's own number.
        amax_history: float64 ``[operand, (amax, step, overflows), experts × places]``, or ``None``.
    """

    compute: Compute
    state: Tensor
    amax_history: Tensor | None
    step: int = 0
    seed: int = 0

    def __init__(self, num_experts: int, name: str, row: Compute, device: torch.device | None = None) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.register_buffer("state", new_state(num_experts, name, device), persistent=False)
        self.register_buffer("amax_history", None, persistent=False)
        self.set_compute(row)

    def set_step(self, step: int, seed: int) -> None:
        """Say how many optimizer steps are done, and what seeds the stochastic casts."""
        self.step, self.seed = step, seed
        self.state[rng.STEP_SEED] = step_seed(seed, step)
        self.state[rng.STEP] = step

    def set_compute(self, row: Compute) -> None:
        """Go on in another row."""
        self.compute = row
        if row.is_delayed and self.amax_history is None:
            length = max(c.history for c in row.casts.values())
            self.amax_history = new_history(length, self.state.device).repeat(1, 1, self.num_experts)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
        """``[tokens, in]`` to ``[tokens, out]``, as :func:`grouped_linear` does."""
        x = Linear._streamed(cast(Any, self), x)
        return grouped_linear(
            x, weights, offsets, self.compute, bias=bias, state=self.state, history=self.amax_history,
            sequence_length=x.shape[0], record=torch.is_grad_enabled() and self.training,
        )  # fmt: skip

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        history = self.amax_history
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if history is not None and self.amax_history is not None and self.amax_history.dtype != history.dtype:
            self.amax_history = history.to(self.amax_history.device)  # a cast of the model is none of its histories
        return self

    def extra_repr(self) -> str:
        """The number of experts, and the row."""
        return f"{self.num_experts}, compute={self.compute.name!r}"
