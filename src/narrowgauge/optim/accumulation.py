"""Sum the gradients of micro-batches in a chosen format.

A batch too large for the memory is split into k micro-batches, and their gradients are added. Autograd adds in the gradient's
own format. In bfloat16 a sum of equal gradients stops at 256 of them, since 257 rounds back to 256. The rows of
:data:`ACCUMULATIONS` keep the sum in one or two *buffers* shaped like the parameter. They round the sum once, at the end.

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
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from narrowgauge.compile import COMPILE_ELEMENTS, compiled
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.machine import require_float64
from narrowgauge.numerics import rounding
from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.dtensor import local_of, placed_like
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.rounding import bits_of, cut, dither, float_of, half, narrowed, random_bits, rounded_to_odd
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.codes import decode, dropped_bits, encode, multipliers
from narrowgauge.optim.validation import gradient_of, refuse_capture
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import Code
from narrowgauge.spec.sums import ACCUMULATIONS, Accumulation

MANTISSA, INFINITY, UPPER = 0x7FFFFF, rounding.EXPONENT, -65536
SMALL, JOINED = 1 << 13, 1 << 17
"""Gradients of at most ``SMALL`` elements are joined up to ``JOINED``: one call adds many of them."""


class AccumulationWarning(UserWarning):
    """Warn that many micro-batches are summed in a low-precision format: the sum loses more than the storage does."""


# ── one addition, of float32 values ─────────────────────────────────────────────────────────────────────────────────────


def add_stochastic(gradient: Tensor, buffers: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """Add a gradient to a bfloat16 sum with stochastic rounding. Return the new buffer: int32 bits, the lower half zero.

    ``gradient`` and the one buffer are float32 values of bfloat16. ``seed`` is 0-d int32, one per micro-batch.
    """
    total = buffers[0] + gradient
    # Hash mantissas only: then scaling by a power of two changes nothing. Shift one, so that neither masks the other.
    key = (bits_of(total) & MANTISSA) ^ (bits_of(gradient) << 9)
    return [cut(total, 16, dither(random_bits(key, seed), 0, 16, 16))]


def add_kahan(gradient: Tensor, buffers: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """Add a gradient to a sum of two bfloat16: the rounded sum, and its rounding error."""
    total = (buffers[0] + buffers[1]) + gradient
    high = cut(total, 16, half(16))
    # The difference is exact for a finite sum. Otherwise only the first buffer is infinite or NaN.
    low = cut(total - float_of(high), 16, half(16))
    return [high, torch.where((high & rounding.MAGNITUDE) < INFINITY, low, 0)]


def add_scaled(
    code: Code, gradient: Tensor, buffer: Tensor, weight: Tensor, scales: Sequence[Tensor], seed: Tensor
) -> Tensor:
    """Add a gradient to a sum stored as a scaled code; return the code's bits, int32.

    ``scales`` are two multipliers: out of the buffer's old window, and into the new one. The first gradient is rounded too, and
    has only 128 mantissas. Its ``weight`` makes the random bits of elements differ.
    """
    total = sum_of_scaled(code, gradient, buffer, scales[0])
    dropped = dropped_bits(code)
    addend: Tensor | int = half(dropped)
    if code.rounding == "stochastic":
        key = (bits_of(total) & MANTISSA) ^ (bits_of(gradient) << 9) ^ ((bits_of(weight) >> 16) & 0xFFFF)
        addend = dither(random_bits(key, seed), 0, dropped, dropped)
    return encode(code, total, addend, 0, scales[1])


def sum_of_scaled(code: Code, gradient: Tensor, buffer: Tensor, back: Tensor) -> Tensor:
    """Return the float32 sum before it is rounded."""
    return decode(code, buffer.view(torch.int8).to(torch.int32), 0, back) + gradient


Addition = Callable[[Tensor, Sequence[Tensor], Tensor], list[Tensor]]


def in_words(addition: Addition) -> Callable[..., None]:
    """Return an in-place addition ``(gradient, *buffers, seed)`` over int32 words of two bfloat16 each.

    Bitcasts are free in a compiled loop over words. Beside bfloat16 loads they are slow.
    """

    def add_words(gradient: Tensor, *rest: Tensor) -> None:
        *buffers, seed = rest
        words = (gradient, *buffers)
        even, odd = [float_of(word << 16) for word in words], [float_of(word & UPPER) for word in words]
        sums = zip(*(addition(values[0], values[1:], seed) for values in (even, odd)), strict=True)
        for buffer, (low, high) in zip(buffers, sums, strict=True):
            buffer.copy_(((low >> 16) & 0xFFFF) | high)

    return add_words


ADDITIONS: dict[str, Addition] = {"bfloat16-stochastic": add_stochastic, "kahan": add_kahan}
_IN_WORDS = {name: in_words(addition) for name, addition in ADDITIONS.items()}


def scale_out(code: Code, bound: Tensor) -> Tensor:
    """Return the multiplier out of the window of a sum whose largest magnitude is ``bound`` (0-d).

    It is NaN for a bound that is not finite or is above the largest window, 2^30. The optimizer then skips the step.
    """
    return torch.where(bound <= 2.0**-code.lowest, multipliers(code, bound)[1], torch.nan)


def nearest(buffers: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Round the sum in the buffers once to the gradient's format: to nearest. Ties go away from zero in 16-bit formats.

    For a 16-bit gradient return float32 values that its format can hold.
    """
    if buffers[0].dtype is dtype and len(buffers) == 1:
        return buffers[0]
    if dtype is torch.float32:
        return buffers[0].float()
    if buffers[0].dtype is torch.float64:
        buffers = [rounded_to_odd(buffers[0])]
    # Sums of float16 values are multiples of 2^-24, so float16 subnormals need no rounding. Dropping 13 bits is right
    # everywhere.
    dropped = 13 if dtype is torch.float16 else 16
    total = buffers[0] if len(buffers) == 1 else buffers[0].float() + buffers[1].float()
    return float_of(cut(total, dropped, half(dropped)))


class GradientAccumulator:
    """Sum micro-batch gradients in a chosen format.

    Call :meth:`accumulate` after each backward pass: it adds the gradients and sets ``p.grad`` to ``None``. Call :meth:`finish`
    after the last one: it puts the sums into ``p.grad``, as a backward pass over the whole batch would.

    Invariant: the sum of an element depends only on (seed, step, its gradients in order). Its error is at most
    ``ACCUMULATIONS[dtype].bound(k)``. One micro-batch comes back bit for bit (``kahan`` turns -0 into +0; 8 bits are rounded).
    An infinity or a NaN stays not finite, so the optimizer skips the step. A sum with a scale per tensor uses the power of two
    above its own largest magnitude. Each addition sets that scale anew, so nothing overflows. The scale depends on this rank's
    shard, which affects only bits under 2^-30 of the largest value.

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
        self._buffers: dict[Tensor, list[Tensor]] = {}
        self._bounds: dict[Tensor, Tensor] = {}  # largest magnitudes of scaled sums: float32, 0-d
        self._filled: set[Tensor] = set()
        self._micro_step, self._warned = 0, False
        self._compile = compile is not False
        self._warn(num_micro_batches or 0)

    def allocate(self) -> None:
        for parameter in self._summed:
            if parameter.requires_grad:
                self._buffers_of(parameter, local_of(parameter.detach()))
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
            buffers, seed = self._buffers_of(parameter, gradient), seeds[gradient.device]
            if self.row.code is not None:
                weight = local_of(parameter.detach())
                self._add_scaled(self.row.code, gradient, buffers[0], weight, self._bounds[parameter], seed)
            elif self.row.name not in ADDITIONS:
                for buffer, chunk in flat_chunks(*buffers, gradient):
                    buffer += chunk
            elif gradient.numel() <= SMALL:
                small.append([gradient, *buffers])
            else:
                self._add(gradient, buffers, seed)
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
                buffers, code = self._buffers[parameter], self.row.code
                gradient = torch.empty(buffers[0].shape, dtype=parameter.dtype, device=buffers[0].device)
                for chunk, *parts in flat_chunks(gradient, *buffers):
                    if code is not None:
                        back = scale_out(code, self._bounds[parameter])
                        parts = [decode(code, parts[0].view(torch.int8).to(torch.int32), 0, back)]
                    chunk.copy_(nearest(parts, chunk.dtype))
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
        tensors = [t for buffers in self._buffers.values() for t in buffers] + list(self._bounds.values())
        size = sum(t.numel() * t.element_size() for t in tensors)
        return size / max(1, sum(local_of(p).numel() for p in self.parameters))

    def _buffers_of(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        """Return the buffers of a parameter. New ones are filled with -0, which changes no addend."""
        if parameter not in self._buffers:
            formats = [getattr(torch, name) for name in self.row.planes]
            self._buffers[parameter] = [torch.empty(like.shape, dtype=f, device=like.device) for f in formats]
            if self.row.code is not None:
                self._bounds[parameter] = torch.zeros((), dtype=torch.float32, device=like.device)
        if parameter not in self._filled:
            self._filled.add(parameter)
            if self.row.code is not None:
                self._bounds[parameter].zero_()
            for buffer in self._buffers[parameter]:
                buffer.fill_(-0.0)
        return self._buffers[parameter]

    def _add(self, gradient: Tensor, buffers: Sequence[Tensor], seed: Tensor) -> None:
        """Add a gradient to its buffers: compiled if that pays, else chunk by chunk."""
        tensors = [gradient, *buffers]
        is_whole = all(t.is_contiguous() and not (t.numel() % 2 or t.data_ptr() % 4) for t in tensors)
        if is_whole and self._compile and gradient.numel() >= COMPILE_ELEMENTS:
            words = [*(t.view(-1).view(torch.int32) for t in tensors), seed]
            if (run := compiled(_IN_WORDS[self.row.name], words, one_loop=True)) is not None:
                run(*words)
                return
        for chunk, *parts in flat_chunks(*tensors):
            sums = ADDITIONS[self.row.name](chunk.float(), [part.float() for part in parts], seed)
            for part, bits in zip(parts, sums, strict=True):
                part.copy_(narrowed(float_of(bits), part.dtype))

    def _add_joined(self, batch: Sequence[Sequence[Tensor]], seed: Tensor) -> None:
        """Add many small gradients, each with its buffers, in one call."""
        gradient, *buffers = (torch.cat([t.reshape(-1) for t in tensors]) for tensors in zip(*batch, strict=True))
        self._add(gradient, buffers, seed)
        sizes = [members[0].numel() for members in batch]
        for place, joined in enumerate(buffers):
            parts = [members[1 + place] for members in batch]
            torch._foreach_copy_(parts, [v.view_as(p) for v, p in zip(joined.split(sizes), parts, strict=True)])

    @staticmethod
    def _add_scaled(code: Code, gradient: Tensor, buffer: Tensor, weight: Tensor, bound: Tensor, seed: Tensor) -> None:
        """Add to a scaled buffer. Find the largest magnitude of the sum first; it becomes the new ``bound``."""
        back = scale_out(code, bound)
        peaks = [
            largest_magnitude(sum_of_scaled(code, chunk.float(), part, back))
            for part, chunk in flat_chunks(buffer, gradient)
        ]
        if not peaks:
            return
        bound.copy_(torch.stack(peaks).amax())
        scales = back, multipliers(code, bound)[0]
        for part, chunk, weights in flat_chunks(buffer, gradient, weight):
            part.view(torch.int8).copy_(add_scaled(code, chunk.float(), part, weights.float(), scales, seed))

    def _warn(self, num_micro_batches: int) -> None:
        row, limit = self.row, self.row.most_micro_batches
        if self._warned or limit is None or num_micro_batches <= limit:
            return
        if not any(p.requires_grad and dtype_name(p.dtype) in row.gradients for p in self.parameters):
            return  # autograd sums gradients of more bits itself
        self._warned = True
        random = ACCUMULATIONS[f"{row.name}-stochastic"]
        warnings.warn(
            f"{num_micro_batches} micro-batches are summed in {row.name}, which may round away "
            f"{min(row.bound(num_micro_batches), 1):.0%} of the gradient, and equal ones stop adding up at {row.stalls_at}: "
            f"accumulation_dtype '{random.name}' keeps the average for {random.bytes_per_param:.0f} "
            f"byte{'s' * (random.bytes_per_param > 1)} a parameter, 'float32' all for 4.",
            AccumulationWarning,
            stacklevel=4,
        )


def _batches(members: Sequence[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Split gradients, each with its buffers, into batches of one device and at most ``JOINED`` elements."""
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
