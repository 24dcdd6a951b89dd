"""Bounds of rows: the scale of each row of a matrix, computed before a step writes anything.

A storage scaled by row keeps a bound for each scaled code. No exact value of a row exceeds it. The
rule itself is applied to the largest magnitudes of each row. It is monotone in them, so the result
bounds every new state of the row. So a row's scale depends only on its own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import row_pieces
from narrowgauge.numerics.dtensor import largest_over_ranks
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import CONTROL
from narrowgauge.optim.rules.elementwise import Rule

if TYPE_CHECKING:
    from narrowgauge.optim.state import LocalState


MOST_GROWTH = 2.0**20
"""The factor by which the bound of a row grows in a step, at most."""


def scales_of_rows(
    rule: Rule, slopes: Tensor, weights: Tensor, old: Mapping[str, Tensor], values: Tensor
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return for each scaled code the bounds of rows after a step, and its multipliers into the
    window and back.

    Apply the rule to the largest magnitudes of rows: of gradients (``slopes``), ``weights``, and
    the ``old`` bounds. A skipped step keeps its bounds.
    """
    slopes = slopes * values[0].abs()
    scalars = {name: values[place] for place, name in enumerate((*CONTROL, *rule.scalars))}
    # A state without a scale per row needs no bound.
    moments = [old.get(name, torch.zeros_like(slopes)) for name in rule.states]
    plus = rule.update(weights, slopes, *moments, scalars)[1:]
    minus = rule.update(weights, -1.0 * slopes, *moments, scalars)[1:]
    zeros = [torch.zeros_like(slopes)] * len(moments)
    added = dict(zip(rule.states, rule.update(weights, slopes, *zeros, scalars)[1:], strict=True))
    new = {}
    for name, at_plus, at_minus in zip(rule.states, plus, minus, strict=True):
        new[name] = torch.maximum(at_plus.abs(), at_minus.abs())
    scales = {}
    for name, before in old.items():
        # A non-finite gradient must not stay in a bound: inf - inf would be NaN forever.
        bound = codes.finite_bound(new[name])
        # One huge gradient costs its element, not its row.
        limited = torch.where(before > 0, torch.minimum(bound, before * MOST_GROWTH), bound)
        # The bound of a row without gradients would fall, and the next gradient would be huge to it.
        bound = torch.where(added[name] == 0, torch.maximum(bound, before), limited)
        bound = torch.where(scalars["skip"] != 0, before, bound)
        into = codes.multipliers(bound)[0]
        back = codes.multipliers(before)[1]
        scales[name] = bound, into, back
    return scales


def new_bounds(
    states: Sequence[LocalState], values: Sequence[Tensor]
) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Return :func:`scales_of_rows` for each state, which has its gradient.

    ``values`` are the scalars of ``CONTROL`` and of the rule for each state, float32.
    """
    rule = states[0].kernel.rule
    assert isinstance(rule, Rule)
    slopes = peaks_of_rows(states, [state.gradient for state in states])
    weights = [torch.zeros_like(peaks) for peaks in slopes]
    if rule.coupled:
        seen = [state.parameter.detach() for state in states]
        weights = peaks_of_rows(states, [torch.where(w.abs() < math.inf, w, 0.0) for w in seen])
    result = []
    for state, slope, weight, scalars in zip(states, slopes, weights, values, strict=True):
        result.append(scales_of_rows(rule, slope, weight, state.bounds, scalars))
    return result


def peaks_of_rows(states: Sequence[LocalState], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each row of a tensor for each state, float32 ``[rows, 1]``,
    over all ranks that share the row. A NaN is the largest.
    """
    peaks = []
    for state, tensor in zip(states, tensors, strict=True):
        matrix = state.in_rows(tensor)
        rows = torch.zeros(len(matrix), dtype=torch.float32, device=matrix.device)
        if matrix.numel():
            rows = torch.cat([part.abs().amax(1).float() for part in row_pieces(matrix)])
        peaks.append(rows.view(torch.int32))  # in which a NaN is the largest
    joined = largest_over_ranks(peaks, [state.column_groups for state in states])
    return [rows.view(torch.float32).view(-1, 1) for rows in joined]
