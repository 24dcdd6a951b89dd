"""Least squares with few unknowns, in float64: which multiples of known terms add up to what the run did."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CLOSE = 0.02
"""Relative distance at which a fitted number counts as a known one, where rounding does not say less."""


def fitted(target: Tensor, terms: Sequence[Tensor]) -> tuple[list[float], float]:
    """The factors of some terms whose sum is nearest to a target, and the length of what is left.

    Args:
        target, terms: 1-D float64 of one length.
    """
    if not terms:
        return [], float(target.norm())
    scales = [max(float(t.norm()), 1e-300) for t in terms]
    columns = torch.stack([t / s for t, s in zip(terms, scales, strict=True)], dim=1)
    gram = columns.T @ columns
    gram += 1e-14 * torch.eye(len(terms), dtype=torch.float64, device=gram.device)
    found = torch.linalg.solve(gram, columns.T @ target)
    rest = float((target - columns @ found).norm())
    return [float(f) / s for f, s in zip(found, scales, strict=True)], rest


def near(value: float, wanted: float, tolerance: float = CLOSE) -> bool:
    """Whether a fitted number is a known one."""
    return abs(value - wanted) <= tolerance * max(abs(wanted), 1e-12)
