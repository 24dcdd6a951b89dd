"""The norm of all gradients, exact and in no order, and what to do about it.

The two passes of :mod:`narrowgauge.numerics.summation` over every gradient, compiled where gradients are large. The result
is a property of the gradients' values alone, so clipping cannot make a run depend on the number of ranks or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics import summation
from narrowgauge.optim.compilation import Compiled, compiled
from narrowgauge.optim.stores import SMALL, as_words

_PASSES: dict[str, Callable[..., Tensor]] = {
    "largest bfloat16": summation.largest_magnitude_words,
    "largest float32": summation.largest_magnitude,
    "squares bfloat16": summation.grid_sum_of_squares_words,
    "squares float32": summation.grid_sum_of_squares,
}


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
        """The norm, float32 0-d; NaN or infinite where any gradient is."""
        if not gradients:
            return torch.zeros(())
        large = [g for g in gradients if self._is_large(g)]
        small = [g for g in gradients if g.numel() <= SMALL]
        rest = [g for g in gradients if g.numel() > SMALL and not self._is_large(g)]
        # Small ones are joined by kind: a pass over many costs the same few calls as a pass over one. Large ones in odd
        # places are copied a chunk at a time.
        rest += [torch.cat([g.reshape(-1) for g in small if g.dtype is d]) for d in {g.dtype for g in small}]
        largest = [self._pass("largest", g) for g in large] + [summation.largest_magnitude(c) for c in _chunks(rest)]
        if not largest:
            return torch.zeros((), device=gradients[0].device)
        peak = torch.stack(largest).amax()
        scales = summation.grid_scales(peak, sum(g.numel() for g in (*large, *rest)))
        steps = [self._pass("squares", g, scales) for g in large]
        steps += [summation.grid_sum_of_squares(c, scales) for c in _chunks(rest)]
        return summation.root(summation.from_grid(torch.stack(steps).sum(0), scales, peak))

    def _is_large(self, gradient: Tensor) -> bool:
        known = gradient.dtype in (torch.bfloat16, torch.float32)
        return known and gradient.numel() > SMALL and as_words(gradient) is not None

    def _pass(self, name: str, gradient: Tensor, *scales: Tensor) -> Tensor:
        kind = f"{name} {str(gradient.dtype).removeprefix('torch.')}"
        words = as_words(gradient)
        assert words is not None
        values = words if gradient.dtype is torch.bfloat16 else gradient.view(-1)
        run = self._compile(kind, values, scales) if self.compile else None
        if run is not None:
            return run([values, *scales])[0]
        parts = [_PASSES[kind](chunk, *scales) for chunk in values.split(summation.CHUNK)]
        return torch.stack(parts).amax(0) if name == "largest" else torch.stack(parts).sum(0)

    def _compile(self, kind: str, values: Tensor, scales: tuple[Tensor, ...]) -> Compiled | None:
        key = (kind, torch.get_num_threads(), values.device)
        if key not in self._compiled:
            example = [torch.ones(1 << 10, dtype=values.dtype, device=values.device), *scales]
            self._compiled[key] = compiled(f"norm {kind}", _PASSES[kind], example, [0, *[None] * len(scales)])
        return self._compiled[key]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (chunk for tensor in tensors for (chunk,) in summation.flat_chunks(tensor))


def control_scalars(norm: Tensor | None, max_norm: float | None, device: torch.device) -> Tensor:
    """The scalars ``(gradient_scale, skip)`` for a step, float32 ``[2]`` on ``device``; the host waits for nothing.

    Args:
        norm: the gradients' norm, ``None`` where it was not asked for.
        max_norm: clip to it; ``None`` leaves gradients as they are.
        device: where the step runs.
    Returns:
        ``min(1, max_norm / (norm + 1e-6))`` as in ``torch.nn.utils.clip_grad_norm_``, and 1 where the norm is not finite.
    """
    if norm is None:
        return torch.tensor([1.0, 0.0], device=device)
    finite = torch.isfinite(norm)
    scale = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return torch.stack([torch.where(finite, scale, 1.0), (~finite).float()])
