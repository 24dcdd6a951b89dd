"""The exact norm of all gradients, clipping by it, and the decision to skip a step.

The two passes of :mod:`narrowgauge.numerics.summation` over every gradient, compiled where gradients are large. The result
is a property of the gradients' values alone, so clipping cannot make a run depend on the number of ranks or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowgauge._torch.transfers import to_device
from narrowgauge.errors import RecipeError
from narrowgauge.numerics import summation
from narrowgauge.numerics.edge_values import edge_values
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.shards import by_reduction, local_of, squares_of_all
from narrowgauge.optim.compilation import Compiled, Definition, compiled, example_words, normal_words, run_each
from narrowgauge.optim.kernel import INDEXABLE
from narrowgauge.optim.state import SMALL, as_words

Measures = tuple[Tensor, Tensor, Tensor]
"""Of both passes at once: the largest magnitude's bits, and the steps of the coarse and of the fine grid, int64.

Each pass ignores one result: the first has no scales yet, the second knows the largest already. But one kernel for both compiles
in half the time of two, and the ignored result costs a tenth of a nanosecond a value."""


def measure_words(words: Tensor, scales: Tensor, dim: summation.Dims = ()) -> Measures:
    """The measures of bfloat16 pairs, of all or over some dims."""
    largest = summation.largest_magnitude_words(words, dim).view(torch.int32).to(torch.int64)
    return largest, *summation.grid_sums_words(words, scales, dim)


def measure_floats(values: Tensor, scales: Tensor, dim: summation.Dims = ()) -> Measures:
    """:func:`measure_words` for float32 values."""
    largest = summation.largest_magnitude(values, dim).view(torch.int32).to(torch.int64)
    return largest, *summation.grid_sums(values, scales, dim)


MEASURES = {torch.bfloat16: measure_words, torch.float32: measure_floats}
ROW = 1 << 12
"""Words of which a block of a GPU's threads makes one result."""


def measure_whole(dtype: torch.dtype) -> Callable[..., Tensor]:
    """A CPU's function of a whole gradient: ``(words, scales) -> int64 [3]``."""
    return lambda words, scales: torch.stack(MEASURES[dtype](words, scales))


def measure_rows(dtype: torch.dtype) -> Callable[..., Tensor]:
    """A GPU's function of words ``[rows, ROW]``, which writes three int64 ``[rows]``: ``(words, scales, *results) -> [0]``."""

    def write(words: Tensor, scales: Tensor, *results: Tensor) -> Tensor:
        for result, measured in zip(results, MEASURES[dtype](words, scales, (1,)), strict=True):
            result.copy_(measured)
        return scales.new_zeros(0)

    return write


class _Sorted:
    """Gradients by how they are read: ``large`` ones as words in place, ``rest`` a chunk at a time.

    On a GPU ``rows`` are, by dtype: the rows of ``ROW`` words of all gradients, and what is left of each, joined.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self.large: list[Tensor] = []
        self.rest: list[Tensor] = []
        by_rows: dict[torch.dtype, list[Tensor]] = {}
        small = []
        for gradient in gradients:
            words = _words_of(gradient) if _reads_rows(gradient) or gradient.numel() > SMALL else None
            if words is not None and _reads_rows(gradient):
                by_rows.setdefault(gradient.dtype, []).append(words)
            elif gradient.numel() <= SMALL:
                small.append(gradient)
            else:
                (self.rest if words is None else self.large).append(gradient)
        # A rank may hold no row of any gradient.
        self.rows = {dtype: matrices for dtype, words in by_rows.items() if (matrices := in_rows(words))}
        # Small ones are joined by kind: a pass over many costs the same few calls as a pass over one.
        for dtype in dict.fromkeys(g.dtype for g in small):
            flat = [g.reshape(-1) for g in small if g.dtype is dtype]
            self.rest += [torch.cat(flat[start : start + 64]) for start in range(0, len(flat), 64)]


def _reads_rows(gradient: Tensor) -> bool:
    """A CPU reads a whole gradient by one call, which costs it nothing."""
    return not gradient.is_cpu


def _words_of(gradient: Tensor) -> Tensor | None:
    """What :data:`MEASURES` takes: pairs of bfloat16 as words, float32 values; ``None`` where there is no such view."""
    if gradient.dtype not in MEASURES or (words := as_words(gradient)) is None:
        return None
    return words if gradient.dtype is torch.bfloat16 else words.view(gradient.dtype)


def in_rows(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The words of gradients of one dtype as matrices ``[rows, ROW]``, of two rows or more, the last filled up with zeros."""
    whole: list[Tensor] = []
    left: list[Tensor] = []
    for words in gradients:
        end = words.numel() // ROW * ROW if words.numel() >= 2 * ROW else 0
        if end:
            whole += words[:end].view(-1, ROW).tensor_split(-(-end // INDEXABLE))
        left += [words[end:]] if end < words.numel() else []
    if left:
        count = sum(map(len, left))
        rows = max(2, -(-count // ROW))
        whole.append(torch.cat([*left, left[0].new_zeros(rows * ROW - count)]).view(rows, ROW))
    return whole


class GradientNorm:
    """The L2 norm over many gradients, whose passes are compiled for large tensors if ``compile``."""

    def __init__(self, *, compile: bool) -> None:
        self.compile = compile

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm, float32 0-d; NaN or infinite where any gradient is. Of DTensors it is that of the whole, on all ranks."""
        return self.with_own(gradients, None)[0]

    @torch.no_grad()
    def with_own(self, gradients: Sequence[Tensor], own: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients, and that of one, whose squares use the grid of all and so have its absolute error."""
        if not gradients:
            return torch.zeros((), dtype=torch.float32), None
        rest = [(groups, _Sorted(members)) for groups, members in by_reduction(g for g in gradients if g is not own)]
        alone = [] if own is None else [(groups, _Sorted(members)) for groups, members in by_reduction([own])]
        parts = [*rest, *alone]
        device = local_of(gradients[0]).device
        nothing = torch.zeros(2, dtype=torch.float64, device=device)
        steps, scales, peak = squares_of_all(
            parts,
            sum(g.numel() for g in gradients),
            lambda part: self._peak(part, nothing, device),
            lambda part, scales: self._steps(part, scales, device),
        )
        norms = [
            summation.root(summation.from_grid(some.sum(0), scales, peak))
            for some in ((steps, steps[len(rest) :]) if alone else (steps,))
        ]
        return norms[0], norms[1] if alone else None

    def _peak(self, part: _Sorted, nothing: Tensor, device: torch.device) -> Tensor:
        """The largest magnitude, 0 where there is nothing."""
        largest = [measured[0].to(torch.int32).view(torch.float32) for measured in self._measured(part, nothing)]
        largest += [summation.largest_magnitude(chunk) for chunk in summation.chunks_of(part.rest)]
        return torch.stack([torch.zeros((), dtype=torch.float32, device=device), *largest]).amax()

    def _steps(self, part: _Sorted, scales: Tensor, device: torch.device) -> Tensor:
        """The sum of squares in steps of both grids, int64 ``[2]``."""
        steps = [measured[1:] for measured in self._measured(part, scales)]
        steps += [summation.grid_sum_of_squares(chunk, scales) for chunk in summation.chunks_of(part.rest)]
        return torch.stack([torch.zeros(2, dtype=torch.int64, device=device), *steps]).sum(0)

    def _measured(self, part: _Sorted, scales: Tensor) -> list[Tensor]:
        """The measures, int64 ``[3]``, of everything but the rest."""
        return [
            *(self._measure(gradient, scales) for gradient in part.large),
            *(self._measure_rows(dtype, matrices, scales) for dtype, matrices in part.rows.items()),
        ]

    def _kernel(self, dtype: torch.dtype, device: torch.device) -> Compiled | None:
        if not self.compile:
            return None
        return compiled(MEASURES[dtype].__name__, device, lambda: define_norm(dtype, device))

    def _measure(self, gradient: Tensor, scales: Tensor) -> Tensor:
        words, run = _words_of(gradient), self._kernel(gradient.dtype, gradient.device)
        assert words is not None
        if run is not None:
            return run([words, scales])[0]
        measure = measure_whole(gradient.dtype)
        parts = torch.stack([measure(chunk, scales) for chunk in words.split(summation.chunk_size(words.device))])
        return torch.cat([parts[:, :1].amax(0), parts[:, 1:].sum(0)])

    def _measure_rows(self, dtype: torch.dtype, matrices: Sequence[Tensor], scales: Tensor) -> Tensor:
        device = scales.device
        # Each begins at a multiple of 16 bytes, and what lies between is 0.
        sizes = [len(matrix) + len(matrix) % 2 for matrix in matrices]
        results = torch.zeros(3, sum(sizes), dtype=torch.int64, device=device)
        places = zip(*(result.split(sizes) for result in results), strict=True)
        batch = [
            [matrix, scales, *(part[: len(matrix)] for part in parts)]
            for matrix, parts in zip(matrices, places, strict=True)
        ]
        if (run := self._kernel(dtype, device)) is not None:
            run_each(run, batch)
        else:
            measure, size = measure_rows(dtype), summation.chunk_size(device) // ROW
            for matrix, _, *parts in batch:
                for start in range(0, len(matrix), size):
                    measure(matrix[start : start + size], scales, *(part[start : start + size] for part in parts))
        return torch.cat([results[:1].amax(1), results[1:].sum(1)])


def define_norm(dtype: torch.dtype, device: torch.device, *, by_rows: bool | None = None) -> Definition:
    """What both passes over gradients of this dtype compile: of a whole gradient on a CPU, ``by_rows`` on a GPU."""
    by_rows = device.type != "cpu" if by_rows is None else by_rows
    size, kind = example_words(device), torch.int32 if dtype is torch.bfloat16 else dtype
    shape = (size // ROW, ROW) if by_rows else (size,)
    words = normal_words(dtype, shape, device)
    count = words.numel() * 4 // dtype.itemsize
    largest = torch.full((), 8.0, dtype=torch.float32, device=device)
    results = [torch.zeros(shape[0], dtype=torch.int64, device=device) for _ in range(3)] if by_rows else []

    def edges() -> list[Tensor]:
        # An infinity or NaN has no place on a grid: where there is one, the sums are not used.
        drawn = edge_values(dtype, (*shape[:-1], shape[-1] * 4 // dtype.itemsize), finite=True).to(device)
        scales = summation.grid_scales(drawn.abs().amax().float(), count)
        return [drawn.view(kind), scales, *results]

    example = [words.view(kind), summation.grid_scales(largest, count), *results]
    if by_rows:
        return Definition(measure_rows(dtype), example, [(0, None), (), *[(0,)] * 3], edges=edges)
    return Definition(measure_whole(dtype), example, [(0,), ()], edges=edges)


def largest_magnitudes(gradients: Sequence[Tensor]) -> list[Tensor]:
    """That of each gradient, 0-d in its dtype, by one call for all; 0 for a rank that holds none of a parameter's rows.

    Example:
        >>> largest_magnitudes([torch.tensor([1.0, -3.0]), torch.zeros(0, 4)])
        [tensor(3.), tensor(0.)]
    """
    held = [gradient for gradient in gradients if gradient.numel()]
    norms = iter(torch._foreach_norm(held, math.inf) if held else ())
    return [next(norms) if gradient.numel() else gradient.new_zeros(()) for gradient in gradients]


def control_scalars(
    norm: Tensor | None,
    max_norm: float | None,
    device: torch.device,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Tensor:
    """The scalars ``(gradient_scale, skip)`` for a step, float32 ``[2]`` on ``device``; the host waits for nothing.

    Args:
        norm: the norm of the gradients as they are, ``None`` where it is not needed.
        max_norm: clip to it; ``None`` does not.
        device: where the step runs.
        grad_scale: what the loss was multiplied by, 0-d; ``None`` for 1.
        found_inf: not 0 where ``torch.amp.GradScaler`` found a gradient that is not finite.
    Returns:
        The inverse of ``grad_scale`` times ``min(1, max_norm / (norm + 1e-6))`` as in
        ``torch.nn.utils.clip_grad_norm_``, and 1 where the norm is not finite or ``found_inf`` is set.
    """
    if grad_scale is found_inf is norm is None:
        return to_device(torch.tensor([1.0, 0.0], dtype=torch.float32, device="cpu"), device)
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


class StepControl:
    """Decides for each step what gradients are multiplied by and whether the step is skipped.

    ``worth_compiling`` says whether to compile the norm of so many elements.
    """

    def __init__(self, worth_compiling: Callable[[int], bool]) -> None:
        self._worth_compiling = worth_compiling
        self.loss_scaler: LossScaler | None = None
        self._request: object = None
        self._norm: GradientNorm | None = None

    def use(self, loss_scaler: LossScaler | None) -> None:
        """Divide gradients by this scaler's scale from now on; before each step it must have scaled a loss."""
        self.loss_scaler = loss_scaler
        self._request = None if loss_scaler is None else loss_scaler.request

    def begin_after(self, request: object) -> None:
        """Accept for the first step a loss that was scaled since ``request``, the scaler's own at that time.

        An optimizer may get its scaler only after the loss was scaled.
        """
        self._request = request

    def __call__(
        self,
        gradients: Sequence[Tensor],
        device: torch.device,
        *,
        max_norm: float | None,
        skip_above: float,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The result of :func:`control_scalars`, and the norms of all unscaled gradients and of ``own``, one of them.

        The norms are ``None`` where nothing needs the first. A step whose norm is above ``skip_above`` is skipped.

        Raises:
            RecipeError: the loss was not scaled.
        """
        scale, is_ours = self._scale_of_loss(gradients, grad_scale, found_inf)
        if max_norm is None and self.loss_scaler is None and skip_above == math.inf:
            return control_scalars(None, None, device, scale, found_inf), None, None
        if self._norm is None:
            self._norm = GradientNorm(compile=self._worth_compiling(sum(g.numel() for g in gradients)))
        norm, part = self._norm.with_own(gradients, own)
        control = control_scalars(norm, max_norm, device, scale, found_inf)
        unscaled = norm if scale is None else norm / scale.to(norm.device)
        part = part if scale is None or part is None else part / scale.to(part.device)
        if is_ours and self.loss_scaler is not None:
            self.loss_scaler.update_(control[1] != 0)
        if skip_above < math.inf:
            control[1] = torch.maximum(control[1], (unscaled > skip_above).to(control))
        return control, unscaled, part

    def _scale_of_loss(
        self, gradients: Sequence[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> tuple[Tensor | None, bool]:
        """What gradients are divided by, and whether our own scaler takes part."""
        scaler = self.loss_scaler
        if scaler is None:
            return grad_scale, False
        if scaler.request is self._request:
            # Gradients of zero, by which distributed checkpoints make a state, have any scale.
            if found_inf is None and any(bool(local_of(g).any()) for g in gradients):
                raise RecipeError(
                    "a step was requested whose loss was not scaled: the optimizer's loss_scaler has scaled none since "
                    "its last step, and the optimizer would divide the gradients by its scale.",
                    "Call optimizer.loss_scaler.scale(loss).backward(). Where a framework calls backward() itself, let its "
                    "own torch.amp.GradScaler scale the loss (fp16=True, '16-mixed'), or take a bfloat16 recipe.",
                )
            return grad_scale, False
        self._request = scaler.request
        ours = scaler.scale_tensor
        return ours if grad_scale is None else grad_scale.to(ours.device) * ours, True
