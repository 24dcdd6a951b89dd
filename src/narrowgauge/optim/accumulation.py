"""Sum the gradients of micro-batches in a chosen format.

A batch too large for the memory is split into k micro-batches, and their gradients are added. Autograd adds in the gradient's
own format. In bfloat16 a sum of equal gradients stops at 256 of them, since 257 rounds back to 256. The rows of
:data:`ACCUMULATIONS` keep the sum in a *buffer* shaped like the parameter. They round the sum once, at the end.

Let A be the sum of the k gradients' *magnitudes*. Let r be the most that one addition loses, relative to its result
(``row.addition``). The first gradient is copied. Each of the other k - 1 adds an error of r:

    |sum - exact|  <=  ((1 + r)^(k-1) - 1) · A   (about (k-1) · r · A)

The last rounding adds half an ulp if the sum has more bits than the gradient. Half an ulp is 2^-8 of the sum for bfloat16, and
2^-11 for float16. Each micro-batch's gradient is also rounded to its 16 bits before the addition: 2^-8 · A. No accumulation
removes that error.

A stochastic sum is unbiased. The standard deviation of its error is at most 2^-8 · sqrt(k-1) · A. Its random bits are a hash of
(seed, step, micro-batch, the mantissas of sum and gradient). So a sum does not depend on chunks or shards. Gradients scaled by
a power of two give the sum scaled by it, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from narrowgauge.compile import COMPILE_ELEMENTS, compiled
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.machine import require_float64
from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.dtensor import local_of, placed_like
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.rounding import bits_of, cut, dither, float_of, half, narrowed, random_bits, rounded_to_odd
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.validation import gradient_of, refuse_capture
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.sums import ACCUMULATIONS, Accumulation

MANTISSA, UPPER = 0x7FFFFF, -65536
SMALL, JOINED = 1 << 13, 1 << 17
"""Gradients of at most ``SMALL`` elements are joined up to ``JOINED``: one call adds many of them."""


class AccumulationWarning(UserWarning):
    """Warn that many micro-batches are summed in a low-precision format: the sum loses more than the storage does."""


# ── one addition, of float32 values ─────────────────────────────────────────────────────────────────────────────────────


def add_stochastic(gradient: Tensor, total: Tensor, seed: Tensor) -> Tensor:
    """Add a gradient to a bfloat16 sum with stochastic rounding. Return the new sum: int32 bits, the lower half zero.

    ``gradient`` and ``total`` are float32 values of bfloat16. ``seed`` is 0-d int32, one per micro-batch.
    """
    total = total + gradient
    # Hash mantissas only: then scaling by a power of two changes nothing. Shift one, so that neither masks the other.
    key = (bits_of(total) & MANTISSA) ^ (bits_of(gradient) << 9)
    return cut(total, 16, dither(random_bits(key, seed), 0, 16, 16))


def add_words(gradient: Tensor, total: Tensor, seed: Tensor) -> None:
    """Do :func:`add_stochastic` in place on int32 words of two bfloat16 each.

    Bitcasts are free in a compiled loop over words. Beside bfloat16 loads they are slow.
    """
    low = add_stochastic(float_of(gradient << 16), float_of(total << 16), seed)
    high = add_stochastic(float_of(gradient & UPPER), float_of(total & UPPER), seed)
    total.copy_(((low >> 16) & 0xFFFF) | high)


def nearest(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a sum once to the gradient's format: to nearest. Ties go away from zero in 16-bit formats.

    For a 16-bit gradient return float32 values that its format can hold.
    """
    if total.dtype is dtype:
        return total
    if dtype is torch.float32:
        return total.float()
    if total.dtype is torch.float64:
        total = rounded_to_odd(total)
    # Sums of float16 values are multiples of 2^-24, so float16 subnormals need no rounding. Dropping 13 bits is right
    # everywhere.
    dropped = 13 if dtype is torch.float16 else 16
    return float_of(cut(total, dropped, half(dropped)))


class GradientAccumulator:
    """Sum micro-batch gradients in a chosen format.

    Call :meth:`accumulate` after each backward pass: it adds the gradients and sets ``p.grad`` to ``None``. Call :meth:`finish`
    after the last one: it puts the sums into ``p.grad``, as a backward pass over the whole batch would.

    Invariant: the sum of an element depends only on (seed, step, its gradients in order). Its error is at most
    ``ACCUMULATIONS[dtype].bound(k)``. One micro-batch comes back bit for bit. An infinity or a NaN stays not finite, so the
    optimizer skips the step.

    Args:
        parameters: the parameters. Tied ones count once. Frozen ones and those without a gradient are skipped.
        dtype: a row of ``ACCUMULATIONS``. Autograd sums float64 gradients, and float32 ones except in ``float64``.
        seed: seed of the stochastic rounding.
        num_micro_batches: their number, for a warning before the first. With ``None``, warn when too many came.
        compile: compile the addition; ``None`` decides by size.

    Attributes:
        step: number of calls of :meth:`finish`. Set it when you resume a run, to get the same random bits.

    Raises:
        RecipeError: an unknown row, or a parameter in a format that the row does not support.

    Cost: ``bytes_per_param`` of memory from the first call on, and under 16 MiB more during a call.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        >>> accumulator = GradientAccumulator([weight])
        >>> for _ in range(300):
        ...     weight.sum().backward()
        ...     accumulator.accumulate()
        >>> accumulator.finish()
        >>> weight.grad
        tensor([300., 300., 300.], dtype=torch.bfloat16)
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        dtype: str = "float32",
        seed: int = 0,
        *,
        num_micro_batches: int | None = None,
        compile: bool | None = None,
    ) -> None:
        if dtype not in ACCUMULATIONS:
            near = suggestion(dtype, ACCUMULATIONS) or f"There are {', '.join(ACCUMULATIONS)}."
            raise RecipeError(f"no accumulation is named {dtype!r}.", near)
        self.row, self.seed, self.step = ACCUMULATIONS[dtype], seed, 0
        self.parameters = list(dict.fromkeys(parameters))
        require_float64(self.parameters)
        # The parameters whose gradients are summed here, not by autograd.
        self._summed = [p for p in self.parameters if _takes(self.row, p)]
        self._buffers: dict[Tensor, Tensor] = {}
        self._filled: set[Tensor] = set()
        self._micro_step, self._warned = 0, False
        self._compile = compile is not False
        self._warn(num_micro_batches or 0)

    def allocate(self) -> None:
        for parameter in self._summed:
            if parameter.requires_grad:
                self._buffer_of(parameter, local_of(parameter.detach()))
        self._filled.clear()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one micro-batch and set ``p.grad`` to ``None``. Gradients that autograd sums stay.

        Raises:
            RecipeError: a gradient is sparse, or not in its parameter's format. Nothing was added then.
        """
        for device in {p.device for p in self._summed}:
            refuse_capture(device)
        pairs = [(p, local_of(gradient_of(p).detach())) for p in self._summed if p.grad is not None]
        number = step_seed(step_seed(self.seed, self.step) % 2**32, self._micro_step)
        self._micro_step += 1
        self._warn(self._micro_step)
        seeds = {d: torch.full((), number, dtype=torch.int32, device=d) for d in {g.device for _, g in pairs}}
        small: list[list[Tensor]] = []
        for parameter, gradient in pairs:
            buffer = self._buffer_of(parameter, gradient)
            if buffer.dtype is not torch.bfloat16:
                for total, chunk in flat_chunks(buffer, gradient):
                    total += chunk
            elif gradient.numel() <= SMALL:
                small.append([gradient, buffer])
            else:
                self._add(gradient, buffer, seeds[gradient.device])
            parameter.grad = None
        for batch in _batches(small):
            self._add_joined(batch, seeds[batch[0][0].device])

    @torch.no_grad()
    def finish(self) -> None:
        """Round each sum once, put it into ``p.grad``, and reset. Without any gradient ``p.grad`` stays ``None``.

        Add a pending gradient first.
        """
        if any(p.grad is not None for p in self._summed):
            self.accumulate()
        for parameter in self._summed:
            if parameter in self._filled:
                buffer = self._buffers[parameter]
                gradient = torch.empty(buffer.shape, dtype=parameter.dtype, device=buffer.device)
                for chunk, total in flat_chunks(gradient, buffer):
                    chunk.copy_(nearest(total, chunk.dtype))
                parameter.grad = placed_like(parameter, gradient)
        self._filled.clear()
        self._micro_step = 0
        self.step += 1

    def discard(self) -> None:
        """Discard the gradients since the last :meth:`finish`."""
        for parameter in self.parameters:
            parameter.grad = None
        self._filled.clear()
        self._micro_step = 0

    def bytes_per_param(self) -> float:
        """Return the bytes per parameter of the live buffers."""
        size = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
        return size / max(1, sum(local_of(p).numel() for p in self.parameters))

    def _buffer_of(self, parameter: Tensor, like: Tensor) -> Tensor:
        """Return the buffer of a parameter. A new one is filled with -0, which changes no addend."""
        if parameter not in self._buffers:
            self._buffers[parameter] = torch.empty(
                like.shape, dtype=getattr(torch, self.row.buffer), device=like.device
            )
        if parameter not in self._filled:
            self._filled.add(parameter)
            self._buffers[parameter].fill_(-0.0)
        return self._buffers[parameter]

    def _add(self, gradient: Tensor, buffer: Tensor, seed: Tensor) -> None:
        """Add a gradient to its bfloat16 buffer: compiled if that pays, else chunk by chunk."""
        tensors = [gradient, buffer]
        is_whole = all(t.is_contiguous() and not (t.numel() % 2 or t.data_ptr() % 4) for t in tensors)
        if is_whole and self._compile and gradient.numel() >= COMPILE_ELEMENTS:
            words = [*(t.view(-1).view(torch.int32) for t in tensors), seed]
            if (run := compiled(add_words, words, one_loop=True)) is not None:
                run(*words)
                return
        for chunk, total in flat_chunks(*tensors):
            total.copy_(narrowed(float_of(add_stochastic(chunk.float(), total.float(), seed)), total.dtype))

    def _add_joined(self, batch: Sequence[Sequence[Tensor]], seed: Tensor) -> None:
        """Add many small gradients, each with its buffer, in one call."""
        gradient, joined = (torch.cat([t.reshape(-1) for t in tensors]) for tensors in zip(*batch, strict=True))
        self._add(gradient, joined, seed)
        buffers = [buffer for _, buffer in batch]
        parts = joined.split([buffer.numel() for buffer in buffers])
        torch._foreach_copy_(buffers, [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)])

    def _warn(self, num_micro_batches: int) -> None:
        row, limit = self.row, self.row.most_micro_batches
        if self._warned or limit is None or num_micro_batches <= limit:
            return
        if not any(p.requires_grad and dtype_name(p.dtype) in row.gradients for p in self.parameters):
            return  # autograd sums gradients of more bits itself
        self._warned = True
        warnings.warn(
            f"{num_micro_batches} micro-batches are summed in {row.name}, which may round away "
            f"{min(row.bound(num_micro_batches), 1):.0%} of the gradient, and equal ones stop adding up at {row.stalls_at}: "
            "accumulation_dtype 'bfloat16-stochastic' keeps the average for 2 bytes a parameter, 'float32' all for 4.",
            AccumulationWarning,
            stacklevel=4,
        )


def _batches(members: Sequence[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Split gradients, each with its buffer, into batches of one device and at most ``JOINED`` elements."""
    batches: list[list[list[Tensor]]] = []
    for tensors in sorted(members, key=lambda tensors: str(tensors[0].device)):
        last = batches[-1] if batches else []
        fits = sum(t[0].numel() for t in last) + tensors[0].numel() <= JOINED
        if last and fits and last[0][0].device == tensors[0].device:
            last.append(tensors)
        else:
            batches.append([tensors])
    return batches


def backward_in_parts(
    losses: Iterable[Tensor], accumulator: GradientAccumulator | None = None, scaler: LossScaler | None = None
) -> Tensor:
    """Run backward on each micro-batch's loss in turn, and leave the sum of gradients in ``p.grad``.

    Args:
        losses: each micro-batch's part of the loss, at least one. A generator keeps only one micro-batch in memory.
        accumulator: sums the gradients; with ``None`` autograd does.
    Returns:
        The sum of the losses, unscaled and detached.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> backward_in_parts((weight.sum() * k for k in (1, 2)), GradientAccumulator([weight]))
        tensor(6., dtype=torch.bfloat16)
    """
    total: Tensor | None = None
    try:
        for loss in losses:
            (loss if scaler is None else scaler.scale(loss)).backward()
            if accumulator is not None:
                accumulator.accumulate()
            total = loss.detach() if total is None else total + loss.detach()
    except BaseException:
        if accumulator is not None:
            accumulator.discard()  # half a batch must not be added to the next
        raise
    if total is None:
        raise ValueError("Cannot differentiate without a loss. Give at least one.")
    if accumulator is not None:
        accumulator.finish()
    return total


def _takes(row: Accumulation, parameter: Tensor) -> bool:
    """Return whether the row sums a parameter's gradients. Raise if the row does not support 16-bit gradients."""
    name = dtype_name(parameter.dtype)
    if parameter.element_size() == 2 and parameter.is_floating_point() and name not in row.gradients:
        raise RecipeError(
            f"accumulation '{row.name}' sums {' and '.join(row.gradients)} gradients, and a parameter of shape "
            f"{tuple(parameter.shape)} is {name}.",
            "accumulation_dtype = 'float32' sums every format.",
        )
    return row.keeps_sums(name)
