"""The norm of all gradients, exact and in no order, and what to do about it.

The two passes of :mod:`narrowgauge.numerics.summation` over every gradient, compiled where gradients are large. The result
is a property of the gradients' values alone, so clipping cannot make a run depend on the number of ranks or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics import summation
from narrowgauge.optim.compilation import Compiled, compiled, normal_words
from narrowgauge.optim.shards import add_up, by_reduction, local_of
from narrowgauge.optim.stores import SMALL, as_words


def measure_words(words: Tensor, scales: Tensor) -> Tensor:
    """Both passes over bfloat16 pairs at once: ``(largest's bits, coarse steps, fine steps)``, int64 ``[3]``.

    The first pass has no scales yet and the second knows the largest already; but one kernel for both compiles in half the
    time of two, and what it computes in vain costs a tenth of a nanosecond a value.
    """
    largest = summation.largest_magnitude_words(words).view(torch.int32).to(torch.int64)
    return torch.cat([largest.reshape(1), summation.grid_sum_of_squares_words(words, scales)])


def measure_floats(values: Tensor, scales: Tensor) -> Tensor:
    """:func:`measure_words` for float32 values."""
    largest = summation.largest_magnitude(values).view(torch.int32).to(torch.int64)
    return torch.cat([largest.reshape(1), summation.grid_sum_of_squares(values, scales)])


class _Sorted:
    """Gradients by how they are gone over: large ones in words where they lie, and ``rest`` a chunk at a time."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self.large = [g for g in gradients if _is_large(g)]
        small = [g for g in gradients if g.numel() <= SMALL]
        self.rest = [g for g in gradients if g.numel() > SMALL and not _is_large(g)]
        # Small ones are joined by kind: a pass over many costs the same few calls as a pass over one.
        for dtype in dict.fromkeys(g.dtype for g in small):
            flat = [g.reshape(-1) for g in small if g.dtype is dtype]
            self.rest += [torch.cat(flat[start : start + 64]) for start in range(0, len(flat), 64)]


def _is_large(gradient: Tensor) -> bool:
    known = gradient.dtype in (torch.bfloat16, torch.float32)
    return known and gradient.numel() > SMALL and as_words(gradient) is not None


class GradientNorm:
    """The L2 norm over many gradients.

    Args:
        compile: whether to compile the two passes for tensors that are worth it.
    """

    def __init__(self, *, compile: bool) -> None:
        self.compile = compile
        self._compiled: dict[tuple[str, int, torch.device], Compiled | None] = {}

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm, float32 0-d; NaN or infinite where any gradient is. Of DTensors it is that of the whole, on all ranks."""
        if not gradients:
            return torch.zeros((), dtype=torch.float32)
        parts = [(groups, _Sorted(members)) for groups, members in by_reduction(gradients)]
        device = local_of(gradients[0]).device
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        peaks = [add_up(self._peak(part, nothing, device), groups, "max") for groups, part in parts]
        peak = torch.stack(peaks).amax()
        scales = summation.grid_scales(peak, max(1, sum(g.numel() for g in gradients)))
        steps = [add_up(self._steps(part, scales, device), groups, "sum") for groups, part in parts]
        return summation.root(summation.from_grid(torch.stack(steps).sum(0), scales, peak))

    def _peak(self, part: _Sorted, nothing: Tensor, device: torch.device) -> Tensor:
        """The largest magnitude, 0 where there is nothing."""
        largest = [self._measure(g, nothing)[0].to(torch.int32).view(torch.float32) for g in part.large]
        largest += [summation.largest_magnitude(chunk) for chunk in _chunks(part.rest)]
        return torch.stack([torch.zeros((), dtype=torch.float32, device=device), *largest]).amax()

    def _steps(self, part: _Sorted, scales: Tensor, device: torch.device) -> Tensor:
        """The sum of squares in steps of both grids, int64 ``[2]``."""
        steps = [self._measure(g, scales)[1:] for g in part.large]
        steps += [summation.grid_sum_of_squares(chunk, scales) for chunk in _chunks(part.rest)]
        return torch.stack([torch.zeros(2, dtype=torch.int64, device=device), *steps]).sum(0)

    def _measure(self, gradient: Tensor, scales: Tensor) -> Tensor:
        narrow = gradient.dtype is torch.bfloat16
        values = as_words(gradient) if narrow else gradient.view(-1)
        assert values is not None
        measure = measure_words if narrow else measure_floats
        run = self._compile(measure, values, scales) if self.compile else None
        if run is not None:
            return run([values, scales])[0]
        parts = torch.stack([measure(chunk, scales) for chunk in values.split(summation.CHUNK)])
        return torch.cat([parts[:, :1].amax(0), parts[:, 1:].sum(0)])

    def _compile(self, measure: Callable[..., Tensor], values: Tensor, scales: Tensor) -> Compiled | None:
        key = (measure.__name__, torch.get_num_threads(), values.device)
        if key not in self._compiled:
            kind = torch.bfloat16 if values.dtype is torch.int32 else torch.float32
            words = normal_words(kind, (1 << 10,), values.device)
            largest = torch.full((), 8.0, dtype=torch.float32, device=values.device)
            example = [words.view(values.dtype), summation.grid_scales(largest, 1 << 11)]
            self._compiled[key] = compiled(measure.__name__, measure, example, [(0,), ()])
        return self._compiled[key]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """All elements of all tensors, a cache-sized 1-D piece at a time."""
    for tensor in tensors:
        for (chunk,) in summation.flat_chunks(tensor):
            yield chunk


def control_scalars(
    norm: Tensor | None,
    max_norm: float | None,
    device: torch.device,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """The scalars ``(gradient_scale, skip)`` for a step, float32 ``[2]`` on ``device``; the host waits for nothing.

    Args:
        norm: the norm of the gradients as they are, ``None`` where it was not asked for.
        max_norm: clip to it; ``None`` leaves gradients as they are.
        device: where the step runs.
        grad_scale: what the loss was multiplied by, 0-d; ``None`` for 1.
        found_inf: not 0 where somebody else has seen a gradient that is not finite.
    Returns:
        The inverse of ``grad_scale`` times ``min(1, max_norm / (norm + 1e-6))`` as in
        ``torch.nn.utils.clip_grad_norm_``, and 1 where the norm is not finite or ``found_inf`` is set.
    """
    scale = torch.ones((), dtype=torch.float32, device=device)
    skip = torch.zeros((), dtype=torch.bool, device=device)
    if grad_scale is not None:
        scale = scale / grad_scale.to(device)
    if found_inf is not None:
        skip = found_inf.to(device).reshape(()) != 0
    if norm is not None:
        finite = torch.isfinite(norm)
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm * scale + 1e-6)).clamp(max=1.0)
        scale, skip = scale * torch.where(finite, clip, 1.0), skip | ~finite
    return torch.stack([scale.reshape(()), skip.float()])
