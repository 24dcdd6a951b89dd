"""Tell how much of an update the forward pass sees. Weights of a 16-bit checkpoint lie on the grid of their format.

The forward pass multiplies weights rounded to the format. A weight on the grid moves for it only when the sum of its updates
reaches half an ulp, however wide the optimizer stores the weight (:mod:`narrowgauge.optim.low_bits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.checks.set_up import NARROW, SetUp, SteppedParameter
from narrowgauge.checks.step_samples import ELEMENTS, spread
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name

STEPS = 10
"""Number of updates to add up. Each moves a weight by about the learning rate, in one direction."""


def grid_lines(set_up: SetUp) -> list[str]:
    """Return a line for each format on whose grid weights lie that are stored wider."""
    members: dict[torch.dtype, list[SteppedParameter]] = {}
    for p in set_up.trained:
        if p.size and p.rate and (dtype := _grid(p)) is not None:
            members.setdefault(dtype, []).append(p)
    lines = []
    for dtype, stepped in members.items():
        parts = [visible_part(spread(p.parameter), dtype, STEPS * p.rate) * p.parameter.numel() for p in stepped]
        share = sum(parts) / sum(p.parameter.numel() for p in stepped)
        is_narrow = any(p.parameter.dtype is dtype for p in set_up.trained)
        lines.append(
            f"forward pass in {dtype_name(dtype)}: {share:.2g} of the updates is visible after {STEPS} steps at lr "
            f"{stepped[-1].rate:.3g}, since the weights lie on its grid; 1 with "
            + ('low_bits="random"' if is_narrow else "ng.fill_low_bits(model)")
        )
    return lines


def visible_part(weights: Tensor, dtype: torch.dtype, update: float) -> float:
    """Return the mean visible change of weights on a format's grid, relative to ``update``: 0 if no weight moves."""
    magnitude = weights.double().abs()
    ulp = torch.finfo(dtype).eps * torch.exp2(magnitude.clamp(min=torch.finfo(dtype).tiny).log2().floor())
    moved = torch.where(magnitude == 0, update, (update / ulp + 0.5).floor() * ulp)
    return float(moved.mean()) / update


def _grid(p: SteppedParameter) -> torch.dtype | None:
    """Return the 16-bit format on whose grid a parameter's stored weight lies; ``None`` if it has bits below, or stores none."""
    if p.parameter.ndim < 2:
        return None  # gains of 1 and biases of 0 lie on every grid
    if p.parameter.dtype is torch.float32:
        weights = spread(p.parameter)
        fits = (dtype for dtype in NARROW if torch.equal(weights.to(dtype).float(), weights))
        return next(fits, None) if bool(weights.any()) else None
    if p.parameter.dtype not in NARROW or not p.storage.beside or p.group.get("low_bits") == "random":
        return None
    if isinstance(p.optimizer, Optimizer) and (state := p.optimizer.state_of(p.parameter)) is not None:
        stored, weight = state.leading(ELEMENTS, "weight"), state.parameter.detach().reshape(-1)
        if stored is not None and not torch.equal(stored, weight[: len(stored)].to(stored.dtype)):
            return None
    return p.parameter.dtype
