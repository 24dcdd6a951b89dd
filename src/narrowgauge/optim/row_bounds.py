"""Bounds of rows: the scale of each row of a matrix, computed before a step writes anything.

A storage scaled by row keeps a bound for each scaled code. No exact value of a row exceeds it. The
rule itself is applied to the largest magnitudes of each row. It is monotone in them, so the result
bounds every new state of the row. So a row's scale depends only on its own gradients. No ranks
share a row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import row_pieces
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import named
from narrowgauge.optim.rules.elementwise import Rule

if TYPE_CHECKING:
    from narrowgauge.optim.state import LocalState


MOST_GROWTH = 2.0**20
"""The factor by which the bound of a row grows in a step, at most."""


def set_bounds(state: LocalState, values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Set the bounds of a state's rows for a step, and return for each scaled code the multipliers
    into its new window and back from the old one.

    Apply the rule to the largest magnitudes of rows: of gradients, weights, and the old bounds.
    ``values`` are the scalars of ``CONTROL`` and of the rule, float32. A skipped step keeps its
    bounds.
    """
    if not state.bounds:
        return {}
    rule = state.kernel.rule
    assert isinstance(rule, Rule)
    scalars = named(rule, values)
    slopes = peaks_of_rows(state, state.gradient) * scalars["gradient_scale"].abs()
    zeros = torch.zeros_like(slopes)
    weights = zeros
    if rule.coupled:
        seen = state.parameter.detach()
        weights = peaks_of_rows(state, torch.where(seen.abs() < math.inf, seen, 0.0))
    # A state without a scale per row needs no bound.
    moments = [state.bounds.get(name, zeros) for name in rule.states]
    plus = rule.update(weights, slopes, *moments, scalars)[1:]
    minus = rule.update(weights, -1.0 * slopes, *moments, scalars)[1:]
    added = rule.update(weights, slopes, *[zeros] * len(moments), scalars)[1:]
    scales = {}
    for place, name in enumerate(rule.states):
        if name not in state.bounds:
            continue
        old = moments[place]
        bound = torch.maximum(plus[place].abs(), minus[place].abs())
        # A non-finite gradient must not stay in a bound: inf - inf would be NaN forever.
        bound = torch.where(bound < math.inf, bound, 3e38)
        # One huge gradient costs its element, not its row.
        limited = torch.where(old > 0, torch.minimum(bound, old * MOST_GROWTH), bound)
        # The bound of a row without gradients would fall, and the next gradient would be huge to it.
        bound = torch.where(added[place] == 0, torch.maximum(bound, old), limited)
        bound = torch.where(scalars["skip"] != 0, old, bound)
        scales[name] = codes.multipliers(bound)[0], codes.multipliers(old)[1]
        state.bounds[name].copy_(bound)
    return scales


def peaks_of_rows(state: LocalState, tensor: Tensor) -> Tensor:
    """Return the largest magnitude of each row of a tensor in the parameter's shape, float32
    ``[rows, 1]``. A NaN is the largest.
    """
    matrix = state.in_rows(tensor)
    if not matrix.numel():
        return torch.zeros(len(matrix), 1, dtype=torch.float32, device=matrix.device)
    return torch.cat([part.abs().amax(1, keepdim=True).float() for part in row_pieces(matrix)])
