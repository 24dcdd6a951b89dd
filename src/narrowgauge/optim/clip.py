"""The exact norm of all gradients, clipping by it, and the decision to skip a step.

The two passes of :mod:`narrowgauge.numerics.summation` over every gradient, compiled where gradients are large. The result
is a property of the gradients' values alone, so clipping cannot make a run depend on the number of ranks or threads. What
follows a pass are chains of operations on few numbers; each chain is one kernel of a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge._torch.transfers import stream_id, to_device
from narrowgauge.errors import RecipeError
from narrowgauge.numerics import summation
from narrowgauge.numerics.edge_values import edge_values
from narrowgauge.numerics.rounding import EXPONENT, sqrt
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.shards import add_up, by_group, local_of
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

    On a GPU ``rows`` are, by dtype, the rows of ``ROW`` words of all gradients, and ``owners`` say of these in order to which
    gradient, by number, how many belong.
    """

    def __init__(self, gradients: Iterable[tuple[int, Tensor]], zeros: Callable[[torch.dtype], Tensor]) -> None:
        self.large: list[Tensor] = []
        self.rest: list[Tensor] = []
        self.rows: dict[torch.dtype, list[Tensor]] = {}
        self.owners: list[tuple[int, int]] = []
        by_rows: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
        small = []
        for number, gradient in gradients:
            words = _words_of(gradient) if _reads_rows(gradient) or gradient.numel() > SMALL else None
            if words is not None and _reads_rows(gradient):
                by_rows.setdefault(gradient.dtype, []).append((number, words))
            elif gradient.numel() <= SMALL:
                small.append(gradient)
            else:
                (self.rest if words is None else self.large).append(gradient)
        for dtype, own in by_rows.items():
            matrices, owners = in_rows(own, zeros(own[0][1].dtype))
            if matrices:  # a rank may hold no row of any gradient
                self.rows[dtype] = matrices
                self.owners += owners
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


def in_rows(gradients: Iterable[tuple[int, Tensor]], zeros: Tensor) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """The words of gradients of one dtype as matrices ``[rows, ROW]``, each of an even number of rows.

    Args:
        gradients: a number and its words.
        zeros: ``[ROW]``, with which what is left of a gradient is filled up.
    Returns:
        ``(matrices, owners)``; the owners say of all rows in order to which gradient, by number, how many belong.
    """
    matrices: list[Tensor] = []
    left: list[Tensor] = []
    owners: list[tuple[int, int]] = []
    last: list[tuple[int, int]] = []
    for number, words in gradients:
        # In pairs of rows, so that the results of each matrix begin at a multiple of 16 bytes.
        end = words.numel() // (2 * ROW) * 2 * ROW
        if end:
            matrices += words[:end].view(-1, ROW).split(INDEXABLE // ROW)
            owners.append((number, end // ROW))
        if end < words.numel():
            left += [words[end:], zeros[: -words.numel() % ROW]]
            last.append((number, -(-(words.numel() - end) // ROW)))
    if sum(rows for _, rows in last) % 2:
        left.append(zeros)
        last.append((last[-1][0], 1))
    if left:
        matrices += torch.cat(left).view(-1, ROW).split(INDEXABLE // ROW)
    return matrices, owners + last


class Sums(NamedTuple):
    """The exact sum of squares of many gradients, in parts that need only be added up.

    ``coarse`` and ``fine`` are int64 ``[n]``, steps of the two grids; ``grid`` is float64 ``[3]``: both scales and the largest
    magnitude.
    """

    coarse: Tensor
    fine: Tensor
    grid: Tensor


def grid_of(largest: Tensor, width: Tensor) -> Tensor:
    """``Sums.grid`` from the bits of magnitudes, int64 ``[n]``, and :func:`~narrowgauge.numerics.summation.grid_width`."""
    peak = largest.amax().to(torch.int32).view(torch.float32)
    return torch.stack([*summation.scales_of_width(peak, width), peak.double()])


def squares_of(coarse: Tensor, fine: Tensor, grid: Tensor) -> Tensor:
    """The sum of squares of :class:`Sums`, float64 0-d."""
    return summation.from_grid((coarse.sum(), fine.sum()), grid, grid[2])


def norm_of(coarse: Tensor, fine: Tensor, grid: Tensor) -> Tensor:
    """The norm of :class:`Sums`, float32 0-d."""
    return summation.root(squares_of(coarse, fine, grid))


def decision(norm: Tensor, options: Tensor) -> Tensor:
    """What a norm decides, ``[4]`` in its dtype: what gradients are multiplied by, 1 to skip the step, the norm of the unscaled
    gradients, and 1 where a gradient is not finite.

    ``options`` are ``[4]`` in the same dtype: the norm to clip to, the norm above which a step is skipped (both may be
    infinite), what the loss was multiplied by, and what is not 0 where ``torch.amp.GradScaler`` found a gradient that is not
    finite.
    """
    max_norm, skip_above, grad_scale, found_inf = options.unbind()
    scale, unscaled, finite = 1.0 / grad_scale, norm / grad_scale, norm.isfinite()
    clip = ((norm * scale + 1e-6).reciprocal() * max_norm).clamp(max=1.0)
    overflow = (found_inf != 0) | ~finite
    skip = overflow | (unscaled > skip_above)
    scale = torch.where(finite & (max_norm < math.inf), scale * clip, scale)
    return torch.stack([scale, skip.to(scale.dtype), unscaled, overflow.to(scale.dtype)])


def decision_of(coarse: Tensor, fine: Tensor, grid: Tensor, options: Tensor) -> Tensor:
    return decision(norm_of(coarse, fine, grid), options)


def decision_in_float64(coarse: Tensor, fine: Tensor, grid: Tensor, options: Tensor) -> Tensor:
    """:func:`decision_of` for float64 gradients: the norm, and what they are multiplied by, are float64 too."""
    return decision(sqrt(squares_of(coarse, fine, grid)), options)


class _Kept:
    """Numbers of the host on a device, which are sent again only where they have changed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._sent = dtype, torch.empty(0, dtype=dtype)
        self._key: tuple[object, ...] = ()

    def __call__(self, numbers: Sequence[float], device: torch.device) -> Tensor:
        """As a tensor of one dim."""
        key = (*numbers, device, stream_id(device))
        if key != self._key:
            self._sent = to_device(torch.tensor(numbers, dtype=self.dtype, device="cpu"), device)
            self._key = key
        return self._sent


class GradientNorm:
    """The L2 norm over many gradients, whose passes are compiled for large tensors if ``compile``."""

    def __init__(self, *, compile: bool) -> None:
        self.compile = compile
        self._width = _Kept(torch.int64)
        self._kept_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm, float32 0-d; NaN or infinite where any gradient is. Of DTensors it is that of the whole, on all ranks."""
        return self.with_own(gradients, None)[0]

    @torch.no_grad()
    def with_own(self, gradients: Sequence[Tensor], own: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The norm of all gradients, and that of one, whose squares use the grid of all and so have its absolute error."""
        if not gradients:
            return torch.zeros((), dtype=torch.float32), None
        whole, part, _ = self.sums(gradients, own)
        return norm_of(*whole), None if part is None else norm_of(*part)

    @torch.no_grad()
    def sums(self, gradients: Sequence[Tensor], own: Tensor | None) -> tuple[Sums, Sums | None, Finite | None]:
        """The sums of all gradients, at least one, and of one of them, ``own``.

        The last result tells later which gradients are finite, ``None`` where the passes do not tell all of them apart.
        """
        device = local_of(gradients[0]).device
        numbers = {id(gradient): number for number, gradient in enumerate(gradients)}
        rest = by_group(gradient for gradient in gradients if gradient is not own)
        alone = [] if own is None else by_group([own])
        parts = [
            (
                groups,
                _Sorted([(numbers[id(each)], local_of(each)) for each in members], lambda d: self._zeros(d, device)),
            )
            for groups, members in (*rest, *alone)
        ]
        peaks = [self._largest(part, device) for _, part in parts]
        over_ranks = [
            add_up(some.amax().view(1), groups, "max") if groups else some
            for (groups, _), some in zip(parts, peaks, strict=True)
        ]
        width = summation.grid_width(max(1, sum(gradient.numel() for gradient in gradients)))
        grid = self.chain("norm grid", grid_of, [_joined(over_ranks, 0), self._width([width], device)[0]])
        found = [(groups, self._steps(part, grid[:2])) for groups, part in parts]
        steps = [add_up(some.sum(1, keepdim=True), groups, "sum") if groups else some for groups, some in found]
        finite = None
        if not any(part.large or part.rest for _, part in parts):
            owners = [(part.owners, some) for (_, part), some in zip(parts, peaks, strict=True) if part.owners]
            finite = partial(finite_of_rows, len(gradients), owners)
        (coarse, fine), own_steps = _joined(steps, 1), steps[len(rest) :]
        whole = Sums(coarse, fine, grid)
        if not own_steps:
            return whole, None, finite
        coarse, fine = _joined(own_steps, 1)
        return whole, Sums(coarse, fine, grid), finite

    def chain(self, name: str, function: Callable[..., Tensor], arguments: Sequence[Tensor]) -> Tensor:
        """A chain of operations on few numbers: as it is on a CPU, and on a GPU one kernel, since each would be a launch."""
        device, run = arguments[0].device, None
        if self.compile and device.type != "cpu" and len(arguments[0]) > 1:  # one number is no dynamic length
            run = compiled(name, device, lambda: CHAINS[name][0](device))
        # The results of a kernel are compared as integers, bit for bit.
        return function(*arguments) if run is None else run([*arguments])[0].view(CHAINS[name][1])

    def _zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros that are kept, ``[ROW]``."""
        key = dtype, device
        if key not in self._kept_zeros:
            self._kept_zeros[key] = torch.zeros(ROW, dtype=dtype, device=device)
        return self._kept_zeros[key]

    def _largest(self, part: _Sorted, device: torch.device) -> Tensor:
        """The bits of magnitudes of which the largest is the part's, int64 ``[n]``; 0 where there is nothing."""
        found = [measured[0] for measured in self._measured(part, self._zeros(torch.float64, device)[:2])]
        if chunks := [summation.largest_magnitude(chunk) for chunk in summation.chunks_of(part.rest)]:
            found.append(torch.stack(chunks).view(torch.int32).to(torch.int64))
        return _joined(found, 0) if found else self._zeros(torch.int64, device)[:1]

    def _steps(self, part: _Sorted, scales: Tensor) -> Tensor:
        """Numbers of steps of both grids, int64 ``[2, n]``, whose sum is the part's sum of squares."""
        found = [measured[1:] for measured in self._measured(part, scales)]
        chunks = summation.chunks_of(part.rest)
        found += [summation.grid_sum_of_squares(chunk, scales).view(2, 1) for chunk in chunks]
        return _joined(found, 1) if found else self._zeros(torch.int64, scales.device)[:2].view(2, 1)

    def _measured(self, part: _Sorted, scales: Tensor) -> list[Tensor]:
        """The measures, int64 ``[3, n]``, of everything but the rest."""
        return [
            *(self._measure(gradient, scales).view(3, 1) for gradient in part.large),
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
        device, sizes = scales.device, [len(matrix) for matrix in matrices]
        results = torch.empty(3, sum(sizes), dtype=torch.int64, device=device)
        places = zip(*(result.split(sizes) for result in results), strict=True)
        batch = [[matrix, scales, *parts] for matrix, parts in zip(matrices, places, strict=True)]
        if (run := self._kernel(dtype, device)) is not None:
            run_each(run, batch)
        else:
            measure, size = measure_rows(dtype), summation.chunk_size(device) // ROW
            for matrix, _, *parts in batch:
                for start in range(0, len(matrix), size):
                    measure(matrix[start : start + size], scales, *(part[start : start + size] for part in parts))
        return results


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


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


EXAMPLE_ROWS = 1 << 13
"""Of a chain. One block of a GPU's threads reads them all, and from the example Inductor sees that there are many."""


def define_grid(device: torch.device) -> Definition:
    """What :func:`grid_of` is compiled from."""

    def given(largest: Tensor) -> list[Tensor]:
        return [largest.to(device), torch.full((), 36, dtype=torch.int64, device=device)]

    example = given(torch.linspace(0.0, 1.5, EXAMPLE_ROWS, dtype=torch.float32).view(torch.int32).to(torch.int64))
    return Definition(_as_bits(grid_of), example, [(0,), ()], edges=lambda: given(_edge_bits()))


def define_decision(device: torch.device) -> Definition:
    """What :func:`decision_of` is compiled from."""

    def given(steps: Tensor, largest: float, options: Sequence[float]) -> list[Tensor]:
        grid = summation.grid_scales(torch.full((), largest, dtype=torch.float32, device=device), 1 << 27)
        whole = torch.cat([grid, grid.new_full((1,), largest)])
        return [*steps.to(device), whole, torch.tensor(options, dtype=torch.float32, device="cpu").to(device)]

    def edges() -> list[Tensor]:
        return given(torch.stack([_edge_bits(), _edge_bits()]), math.inf, (1.0, 1e30, 65536.0, 0.0))

    steps = torch.arange(2 * EXAMPLE_ROWS, dtype=torch.int64).view(2, -1) * 123_456_789
    return Definition(
        _as_bits(decision_of), given(steps, 0.3, (0.5, math.inf, 8.0, 0.0)), [(0,), (0,), (), ()], edges=edges
    )


def _edge_bits() -> Tensor:
    """The bits of finite magnitudes, int64 ``[EXAMPLE_ROWS]``."""
    return edge_values(torch.float32, (EXAMPLE_ROWS,), finite=True).abs().view(torch.int32).to(torch.int64)


def _as_bits(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The bits of a function's result, which are compared exactly."""
    return lambda *arguments: (result := function(*arguments)).view(INTEGERS[result.dtype])


INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
CHAINS = {"norm grid": (define_grid, torch.float64), "norm decision": (define_decision, torch.float32)}
"""By name, chains of operations on few numbers: what they are compiled from, and the dtype of the result."""


def largest_magnitudes(gradients: Sequence[Tensor]) -> list[Tensor]:
    """That of each gradient, 0-d in its dtype, by one call for all; 0 for a rank that holds none of a parameter's rows.

    Example:
        >>> largest_magnitudes([torch.tensor([1.0, -3.0]), torch.zeros(0, 4)])
        [tensor(3.), tensor(0.)]
    """
    held = [gradient for gradient in gradients if gradient.numel()]
    norms = iter(torch._foreach_norm(held, math.inf) if held else ())
    return [next(norms) if gradient.numel() else gradient.new_zeros(()) for gradient in gradients]


Finite = Callable[[], list[bool]]
"""Tells which gradients of a step were finite, without keeping them; it waits for the device."""


def finite_of_rows(count: int, rows: Sequence[tuple[Sequence[tuple[int, int]], Tensor]]) -> list[bool]:
    """Which of so many gradients are finite, from the bits of the largest magnitude of each of their rows, int64 ``[n]``.

    Example:
        >>> finite_of_rows(3, [([(0, 2), (2, 1)], torch.tensor([5, 0x7F800000, 7]))])
        [False, True, True]
    """
    finite = [True] * count
    for owners, largest in rows:
        for (number, _), own in zip(owners, largest.cpu().split([size for _, size in owners]), strict=True):
            finite[number] &= bool((own < EXPONENT).all())
    return finite


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
    if norm is None:
        norm, max_norm = torch.zeros((), dtype=torch.float32, device=device), None
    limits = to_device(torch.tensor(_limits(max_norm, math.inf), dtype=torch.float32, device="cpu"), device)
    return decision(norm, _scaled_options(limits, grad_scale, found_inf))[:2]


def _limits(max_norm: float | None, skip_above: float) -> tuple[float, ...]:
    """The options of :func:`decision` where no loss is scaled."""
    return math.inf if max_norm is None else max_norm, skip_above, 1.0, 0.0


def _scaled_options(limits: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor:
    if grad_scale is found_inf is None:
        return limits
    given = [
        limits[2 + k : 3 + k] if each is None else each.to(limits).view(1)
        for k, each in enumerate((grad_scale, found_inf))
    ]
    return torch.cat([limits[:2], *given])


def _finite_later(gradients: Sequence[Tensor], device: torch.device) -> Finite | None:
    """Keeps the largest magnitude of each gradient; ``None`` on a CPU."""
    if device.type == "cpu":
        return None
    largest = largest_magnitudes([local_of(gradient) for gradient in gradients])
    return lambda: [bool(each.isfinite()) for each in largest]


class Decision(NamedTuple):
    """What a step does with its gradients.

    Args:
        control: the scalars of ``CONTROL``, ``[2]``: float64 where a gradient is, else float32.
        norm, own_norm: of all unscaled gradients and of one of them; ``None`` where nothing needs them.
        finite: tells which gradients were finite, ``None`` on a CPU, where they can be looked at.
    """

    control: Tensor
    norm: Tensor | None
    own_norm: Tensor | None
    finite: Finite | None


class StepControl:
    """Decides for each step what gradients are multiplied by and whether the step is skipped.

    ``worth_compiling`` says whether to compile the norm of so many elements.
    """

    def __init__(self, worth_compiling: Callable[[int], bool]) -> None:
        self._worth_compiling = worth_compiling
        self.loss_scaler: LossScaler | None = None
        self._request: object = None
        self._norm: GradientNorm | None = None
        self._kept_limits = {dtype: _Kept(dtype) for dtype in (torch.float32, torch.float64)}
        self._kept_control = _Kept(torch.float32)

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
    ) -> Decision:
        """What to do with all gradients, of which ``own`` is one. A step whose norm is above ``skip_above`` is skipped.

        Raises:
            RecipeError: the loss was not scaled.
        """
        scale, is_ours = self._scale_of_loss(gradients, grad_scale, found_inf)
        if max_norm is None and self.loss_scaler is None and skip_above == math.inf:
            if scale is found_inf is None:
                return Decision(self._kept_control([1.0, 0.0], device), None, None, None)
            control = control_scalars(None, None, device, scale, found_inf)
            return Decision(control, None, None, None if found_inf is None else _finite_later(gradients, device))
        if self._norm is None:
            self._norm = GradientNorm(compile=self._worth_compiling(sum(g.numel() for g in gradients)))
        is_double = any(gradient.dtype is torch.float64 for gradient in gradients)
        kept = self._kept_limits[torch.float64 if is_double else torch.float32]
        options = _scaled_options(kept(_limits(max_norm, skip_above), device), scale, found_inf)
        whole, part, finite = self._norm.sums(gradients, own)
        found = self._decided(whole, options, is_double)
        own_norm = None if part is None else self._decided(part, options, is_double)[2]
        if is_ours and self.loss_scaler is not None:
            self.loss_scaler.update_(found[3])
        return Decision(found[:2], found[2], own_norm, finite or _finite_later(gradients, device))

    def _decided(self, sums: Sums, options: Tensor, is_double: bool) -> Tensor:
        assert self._norm is not None
        if is_double:
            return decision_in_float64(*sums, options)
        return self._norm.chain("norm decision", decision_of, [*sums, options])

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
