"""Summing the gradients of micro-batches: in which format, for how many bytes, and what each loses.

A batch too large for the memory is computed in k parts, and their gradients are added. Left alone, autograd adds them in
the gradient's own format. In bfloat16 a sum of equal gradients then stops at 256 of them: 256 + 1 = 257 lies in the
middle of 256 and 258, and goes back to 256. The rows of :data:`ACCUMULATIONS` keep the sum elsewhere, in one or two
*planes* shaped like the parameter, and round it once, at the end.

How far a sum may be off: let A be the sum of the k gradients' *magnitudes*, and r the most that one addition loses, as a
share of its result (``row.addition``). The first gradient is taken as it is, and each of the other k - 1 adds r:

    |sum - exact|  <=  ((1 + r)^(k-1) - 1) · A   (about (k-1) · r · A)

If the sum was wider than the gradient, the last rounding adds half a spacing, 2^-8 of the sum for bfloat16 and 2^-11 for
float16. Compared with the exact gradient there is an error that no accumulation removes: each micro-batch's gradient
is rounded to its 16 bits before it is added, 2^-8 · A. A batch in one piece has this error too, once.

A stochastic sum is bounded so as well, but its errors are random and without bias: their standard deviation is at most
2^-8 · sqrt(k-1) · A, and they average out over elements and steps. Its random bits are a hash of (seed, step,
micro-batch, the mantissas of sum and gradient): no generator, no position. So a sum does not depend on chunks or shards,
and gradients scaled by a power of two give the sum scaled by it, bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.numerics import rounding
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.fusion import COMPILE_ELEMENTS
from narrowgauge.numerics.rounding import (
    bits_of,
    cut,
    dither,
    float_of,
    half,
    narrowed,
    random_bits,
    rounded_to_odd,
    step_seed,
)
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.shards import local_of, placed_like
from narrowgauge.numerics.summation import flat_chunks
from narrowgauge.optim.codec import decode, dropped_bits, encode, multipliers
from narrowgauge.optim.compilation import (
    Compiled,
    Definition,
    compiled,
    edge_words,
    example_words,
    normal_words,
    run_each,
)
from narrowgauge.optim.kernel import INDEXABLE
from narrowgauge.optim.state import as_words
from narrowgauge.optim.validation import gradient_of, refuse_capture
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import Code
from narrowgauge.spec.sums import ACCUMULATIONS, Accumulation

MANTISSA, INFINITY, UPPER = 0x7FFFFF, rounding.EXPONENT, -65536


class AccumulationWarning(UserWarning):
    """So many micro-batches are summed in a narrow format that the sum loses more than the storage does."""


# ── one addition, of float32 values: the definitions that are compiled ────────────────────────────────────────────────


def add_stochastic(gradient: Tensor, planes: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """A bfloat16 sum plus a gradient, cut stochastically: the list of its one plane, int32 bits whose lower half is zero.

    ``gradient`` and ``planes`` are float32 values of bfloat16; ``seed`` is 0-d int32, this micro-batch's own.
    """
    total = planes[0] + gradient
    # Mantissas only, so that scaling by a power of two changes nothing; shifted apart, so that neither masks the other.
    key = (bits_of(total) & MANTISSA) ^ (bits_of(gradient) << 9)
    return [cut(total, 16, dither(random_bits(key, seed), 0, 16, 16))]


def add_kahan(gradient: Tensor, planes: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    """:func:`add_stochastic` for a sum of two bfloat16: the nearest, and the nearest to what that rounded off."""
    total = (planes[0] + planes[1]) + gradient
    high = cut(total, 16, half(16))
    # The difference is exact, unless the sum is infinite or NaN: then only the first plane is.
    rest = cut(total - float_of(high), 16, half(16))
    return [high, torch.where((high & rounding.MAGNITUDE) < INFINITY, rest, 0)]


def add_scaled(
    code: Code, gradient: Tensor, plane: Tensor, weight: Tensor, scales: Sequence[Tensor], seed: Tensor
) -> Tensor:
    """A sum in a code with a scale plus a gradient: int32, the bits of the code.

    ``scales`` are the multiplier out of the code's window as the plane has it, and the one into the window of the sum. The
    first gradient is rounded too, and has 128 mantissas: the ``weight`` that it belongs to tells elements apart.
    """
    total = sum_of_scaled(code, gradient, plane, scales[0])
    dropped = dropped_bits(code)
    addend: Tensor | int = half(dropped)
    if code.rounding == "stochastic":
        key = (bits_of(total) & MANTISSA) ^ (bits_of(gradient) << 9) ^ ((bits_of(weight) >> 16) & 0xFFFF)
        addend = dither(random_bits(key, seed), 0, dropped, dropped)
    return encode(code, total, addend, 0, scales[1])


def sum_of_scaled(code: Code, gradient: Tensor, plane: Tensor, back: Tensor) -> Tensor:
    """The sum itself, float32, before it is cut."""
    return decode(code, plane.view(torch.int8).to(torch.int32), 0, back) + gradient


Addition = Callable[[Tensor, Sequence[Tensor], Tensor], list[Tensor]]
ADDITIONS: dict[str, Addition] = {"bfloat16-stochastic": add_stochastic, "kahan": add_kahan}


def in_words(addition: Addition) -> Callable[..., Tensor]:
    """An addition over int32 words of two bfloat16 each: bitcasts are free there and slow beside bfloat16 loads.

    It takes ``(gradient, *planes, seed, *outputs)`` and writes the new planes to ``outputs``, which are the planes again.
    """

    def add(gradient: Tensor, *rest: Tensor) -> Tensor:
        count = len(rest) // 2
        words, seed, outputs = (gradient, *rest[:count]), rest[count], rest[count + 1 :]
        even, odd = [float_of(word << 16) for word in words], [float_of(word & UPPER) for word in words]
        sums = [addition(values[0], values[1:], seed) for values in (even, odd)]
        joined = [((low >> 16) & 0xFFFF) | high for low, high in zip(*sums, strict=True)]
        for output, value in zip(outputs, joined, strict=True):
            output.copy_(value)
        return gradient.new_zeros(0)

    return add


def define_addition(row: Accumulation, device: torch.device) -> Definition:
    """What :func:`in_words` compiles for a row's addition."""
    count, size = 1 + len(row.planes), example_words(device)
    lengths: list[tuple[int, ...]] = [*[(0,)] * count, (), *[(0,)] * (count - 1)]
    seed = torch.full((), 0x2545F491, dtype=torch.int32, device=device)

    # No tensor twice: the compiler would take it for one argument.
    def drawn(draw: Callable[..., Tensor]) -> list[Tensor]:
        return [draw(torch.bfloat16, (size,), device, k) if own else seed.clone() for k, own in enumerate(lengths)]

    outputs = tuple(range(1, count))
    return Definition(
        in_words(ADDITIONS[row.name]), drawn(normal_words), lengths, edges=lambda: drawn(edge_words), outputs=outputs
    )


def scale_out(code: Code, bound: Tensor) -> Tensor:
    """The multiplier out of the window of a sum whose largest magnitude is ``bound`` (0-d): NaN where that is not finite.

    Neither is what lies above the largest window, 2^30: a sum that would saturate makes the optimizer skip.
    """
    return torch.where(bound <= 2.0**-code.lowest, multipliers(code, bound)[1], torch.nan)


def nearest(planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """What the planes hold, rounded once to the gradient's format: to the nearest, ties of 16-bit ones away from zero.

    Of a 16-bit gradient the result is a float32 that its format holds.
    """
    if planes[0].dtype is dtype and len(planes) == 1:
        return planes[0]
    if dtype is torch.float32:
        return planes[0].float()
    if planes[0].dtype is torch.float64:
        planes = [rounded_to_odd(planes[0])]
    # Sums of float16 values are whole numbers of 2^-24: among float16's subnormals there is nothing to round, and 13 bits
    # are right in all of its range.
    dropped = 13 if dtype is torch.float16 else 16
    total = planes[0] if len(planes) == 1 else planes[0].float() + planes[1].float()
    return float_of(cut(total, dropped, half(dropped)))


class GradientAccumulator:
    """The sum of micro-batch gradients, stored in a format of its own.

    After each backward pass :meth:`accumulate` takes the gradients in and sets ``p.grad`` to ``None``; after the last,
    :meth:`finish` puts the sums into ``p.grad``, as a backward pass over the whole batch would have.

    Invariant: the sum of an element is a function of (seed, step, its gradients in their order) alone, within
    ``ACCUMULATIONS[dtype].bound(k)``; one micro-batch comes back bit for bit (in ``kahan`` -0 as +0, in 8 bits rounded).
    An infinity or a NaN stays not finite, so that the optimizer skips. A sum with a scale per tensor takes the power of two
    above its own largest magnitude, anew in each addition: there is no history to save, and nothing overflows. That
    scale is of this rank's shard; it decides only what lies under 2^-30 of the largest.

    Args:
        parameters: a tied one counts once, frozen ones and those without a gradient are skipped.
        dtype: a row of ``ACCUMULATIONS``. Parameters whose gradients no plane of the row keeps more of are left to autograd:
            float64 ones, and float32 ones except in ``float64``.
        seed: of the stochastic rounding.
        num_micro_batches: how many there will be, for a warning before the first; ``None``: warn when too many came.
        compile: compile the addition; ``None`` decides by size.

    Attributes:
        step: how often :meth:`finish` was called; set it when a run is resumed, for the same random bits.

    Raises:
        RecipeError: an unknown row, or a parameter in a format the row is not for.

    Cost: ``bytes_per_param`` of memory, kept from the first call on; under 16 MiB more while it works.

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
        # Those whose gradients are summed here and not by autograd.
        self._mine = [p for p in self.parameters if _takes(self.row, p)]
        self._planes: dict[Tensor, list[Tensor]] = {}
        self._bounds: dict[Tensor, Tensor] = {}  # of sums that have a scale, their largest magnitude: float32, 0-d
        self._filled: set[Tensor] = set()
        self._micro_step, self._warned = 0, False
        self._compile = compile if compile is not None else sum(p.numel() for p in self._mine) >= COMPILE_ELEMENTS
        self._warn(num_micro_batches or 0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Accumulators that were pickled before sums had scales have no ``_bounds``."""
        self.__dict__.update({"_bounds": {}, **state})

    def allocate(self) -> None:
        for parameter in self._mine:
            if parameter.requires_grad:
                self._planes_of(parameter, local_of(parameter.detach()))
        self._filled.clear()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Take in the gradients of one micro-batch; ``p.grad`` is ``None`` afterwards (where autograd sums, it stays).

        Raises:
            RecipeError: a gradient is sparse, or not in its parameter's format; nothing has been added then.
        """
        for device in {p.device for p in self._mine}:
            refuse_capture(device)
        pairs = [(p, local_of(gradient_of(p).detach())) for p in self._mine if p.grad is not None]
        number = step_seed(step_seed(self.seed, self.step) % 2**32, self._micro_step)
        self._micro_step += 1
        self._warn(self._micro_step)
        seeds = {d: torch.full((), number, dtype=torch.int32, device=d) for d in {g.device for _, g in pairs}}
        together: dict[Compiled, list[list[Tensor]]] = {}
        for parameter, gradient in pairs:
            planes, seed = self._planes_of(parameter, gradient), seeds[gradient.device]
            words = self._words(gradient, planes)
            run = self._kernel(seed.device) if words else None
            if run is not None and gradient.is_cpu:
                run([*words, seed, *words[1:]])  # one after the other, so that each gradient is freed
            elif run is not None:
                pieces = zip(*(word.tensor_split(-(-len(words[0]) // INDEXABLE)) for word in words), strict=True)
                together.setdefault(run, []).extend([*piece, seed, *piece[1:]] for piece in pieces)
            elif self.row.name in ADDITIONS:
                self._add(ADDITIONS[self.row.name], gradient, planes, seed)
            elif self.row.code is not None:
                weight = local_of(parameter.detach())
                self._add_scaled(self.row.code, gradient, planes[0], weight, self._bounds[parameter], seed)
            else:
                for plane, chunk in flat_chunks(*planes, gradient):
                    plane += chunk
            parameter.grad = None
        for run, batch in together.items():
            run_each(run, batch)

    @torch.no_grad()
    def finish(self) -> None:
        """Put each sum, rounded once, into ``p.grad``, and reset; without any gradient ``p.grad`` stays ``None``.

        A gradient that has not been accumulated yet is taken in first.
        """
        if any(p.grad is not None for p in self._mine):
            self.accumulate()
        for parameter in self._mine:
            if parameter in self._filled:
                planes, code = self._planes[parameter], self.row.code
                gradient = torch.empty(planes[0].shape, dtype=parameter.dtype, device=planes[0].device)
                for chunk, *parts in flat_chunks(gradient, *planes):
                    if code is not None:
                        back = scale_out(code, self._bounds[parameter])
                        parts = [decode(code, parts[0].view(torch.int8).to(torch.int32), 0, back)]
                    chunk.copy_(nearest(parts, chunk.dtype))
                parameter.grad = placed_like(parameter, gradient)
        self._filled.clear()
        self._micro_step = 0
        self.step += 1

    def discard(self) -> None:
        """Forget the gradients since the last :meth:`finish`."""
        for parameter in self.parameters:
            parameter.grad = None
        self._filled.clear()
        self._micro_step = 0

    def bytes_per_param(self) -> float:
        """Bytes per parameter of the planes, counted from live tensors."""
        tensors = [t for planes in self._planes.values() for t in planes] + list(self._bounds.values())
        kept = sum(t.numel() * t.element_size() for t in tensors)
        return kept / max(1, sum(local_of(p).numel() for p in self.parameters))

    def _planes_of(self, parameter: Tensor, like: Tensor) -> list[Tensor]:
        """The planes of a parameter; where they hold no sum, they are filled with -0, which changes no addend."""
        if parameter not in self._planes:
            formats = [getattr(torch, name) for name in self.row.planes]
            self._planes[parameter] = [torch.empty(like.shape, dtype=f, device=like.device) for f in formats]
            if self.row.code is not None:
                self._bounds[parameter] = torch.zeros((), dtype=torch.float32, device=like.device)
        if parameter not in self._filled:
            self._filled.add(parameter)
            if self.row.code is not None:
                self._bounds[parameter].zero_()
            for plane in self._planes[parameter]:
                plane.fill_(-0.0)
        return self._planes[parameter]

    def _words(self, gradient: Tensor, planes: Sequence[Tensor]) -> list[Tensor]:
        """The gradient and the planes as a kernel takes them; none where they are added without one."""
        if not self._compile or self.row.name not in ADDITIONS:
            return []
        words = [word for tensor in (gradient, *planes) if (word := as_words(tensor)) is not None]
        return words if len(words) == 1 + len(planes) and words[0].numel() > 1 else []

    def _kernel(self, device: torch.device) -> Compiled | None:
        return compiled(f"accumulate {self.row.name}", device, lambda: define_addition(self.row, device))

    @staticmethod
    def _add(addition: Addition, gradient: Tensor, planes: Sequence[Tensor], seed: Tensor) -> None:
        """Add a gradient to its planes, a chunk at a time."""
        for chunk, *parts in flat_chunks(gradient, *planes):
            for part, bits in zip(parts, addition(chunk.float(), [p.float() for p in parts], seed), strict=True):
                part.copy_(narrowed(float_of(bits), part.dtype))

    @staticmethod
    def _add_scaled(code: Code, gradient: Tensor, plane: Tensor, weight: Tensor, bound: Tensor, seed: Tensor) -> None:
        """:meth:`_add` for a plane with a scale: the largest magnitude of the sum is found first, and is the new ``bound``."""
        back = scale_out(code, bound)
        peaks = [
            sum_of_scaled(code, chunk.float(), part, back).abs().amax()
            for part, chunk in flat_chunks(plane, gradient)
            if chunk.numel()
        ]
        if not peaks:
            return
        bound.copy_(torch.stack(peaks).amax())
        scales = back, multipliers(code, bound)[0]
        for part, chunk, own in flat_chunks(plane, gradient, weight):
            bits = add_scaled(code, chunk.float(), part, own.float(), scales, seed)
            part.view(torch.int8).copy_(bits)

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


def backward_in_parts(
    losses: Iterable[Tensor], accumulator: GradientAccumulator | None = None, scaler: LossScaler | None = None
) -> Tensor:
    """Differentiate the losses of micro-batches one after the other, and leave the sum of gradients in ``p.grad``.

    Args:
        losses: each micro-batch's share of the loss, at least one; a generator keeps one micro-batch in memory at a time.
        accumulator: what sums the gradients; ``None`` leaves it to autograd.
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
        raise ValueError("backward_in_parts was given no losses")
    if accumulator is not None:
        accumulator.finish()
    return total


def _takes(row: Accumulation, parameter: Tensor) -> bool:
    """Whether the row's planes sum a parameter's gradients; it must support those of 16-bit floats."""
    name = dtype_name(parameter.dtype)
    if parameter.element_size() == 2 and parameter.is_floating_point() and name not in row.gradients:
        raise RecipeError(
            f"accumulation '{row.name}' sums {' and '.join(row.gradients)} gradients, and a parameter of shape "
            f"{tuple(parameter.shape)} is {name}.",
            "accumulation_dtype = 'float32' sums every format.",
        )
    return row.keeps_sums(name)
