"""Bounds of rows: the scale of each row of a matrix, computed before a step writes anything.

A storage scaled by row keeps a bound for each scaled code. No exact value of a row exceeds it. The rule itself is applied to
the largest magnitudes of each row. It is monotone in them, so the result bounds every new state of the row. So a row's scale
depends only on its own gradients. All rows of all matrices are bounded at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from narrowgauge.compile import compiled_for_pattern
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import CONTROL, Kernel
from narrowgauge.optim.layout import Bucket
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import ParameterState, padded_rows, peaks_of_all, weight_bound
from narrowgauge.spec.storages import Storage

LEAST_COMPILED = 1 << 14
"""Bound fewer rows uncompiled: the compiler takes seconds."""


def bounding(rule: Rule, storage: Storage) -> tuple[str, ...]:
    """Return the tensors whose largest magnitudes bound a row."""
    return ("gradient", "weight") if rule.coupled or "weight" in storage.scaled else ("gradient",)


def scales_of_rows(
    rule: Rule,
    storage: Storage,
    slopes: Tensor,
    weights: Tensor,
    old: Mapping[str, Tensor],
    values: Tensor,
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return for each scaled code the bounds of rows after a step, and its multipliers into the window and back.

    Apply the rule to the largest magnitudes of rows: of gradients (``slopes``), ``weights``, and the ``old`` bounds. A skipped
    step keeps its bounds.
    """
    slopes = slopes * values[0].abs()
    scalars = {name: values[place] for place, name in enumerate((*CONTROL, *rule.scalars))}
    # A state without a scale per row needs no bound.
    moments = [old.get(name, torch.zeros_like(slopes)) for name in rule.states]
    signed = [rule.update(weights, sign * slopes, *moments, scalars)[1:] for sign in (1.0, -1.0)]
    new = {
        name: torch.maximum(plus.abs(), minus.abs())
        for name, plus, minus in zip(rule.states, *signed, strict=True)
    }
    scales = {}
    for name, before in old.items():
        # A non-finite gradient must not stay in a bound: inf - inf would be NaN forever.
        after = weight_bound(weights) if name == "weight" else codes.finite_bound(new[name])
        code, bound = storage.code(name), torch.where(scalars["skip"] != 0, before, after)
        scales[name] = bound, codes.multipliers(code, bound)[0], codes.multipliers(code, before)[1]
    return scales


def bound_rows(kernel: Kernel, batch: Sequence[ParameterState | Bucket], values: Tensor) -> None:
    """Set the new row bounds and this step's scales of one kernel's states and buckets, which have their gradients.

    ``values`` are the scalars of ``CONTROL`` and of the rule, float32.
    """
    rule, storage = kernel.rule, kernel.storage
    assert isinstance(rule, Rule)  # matrix rules refuse scales by row
    memory = {name: [member.scales[name].flatten(1) for member in batch] for name in storage.scaled}
    sizes = [scales.shape[1] for scales in memory[storage.scaled[0]]]
    groups = [member.column_groups for member in batch]

    def peaks(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(map(padded_rows, peaks_of_all(kernel, tensors, groups), sizes)))

    slopes = peaks([member.gradient for member in batch])
    weights = torch.zeros_like(slopes)
    if "weight" in bounding(rule, storage):
        weights = peaks([member.parameter.detach() for member in batch])
    old = {name: torch.cat([scales[0] for scales in tensors]) for name, tensors in memory.items()}
    arguments = [slopes, weights, *old.values(), values]
    function = table_of_scales(rule, storage)
    is_worth_it = len(slopes) >= LEAST_COMPILED and kernel.compiles_for(slopes.device)
    table = compiled_for_pattern(function, *arguments) if is_worth_it else function(*arguments)
    for name, scales in zip(old, table, strict=True):
        torch._foreach_copy_(memory[name], scales.split(sizes, 1))


@lru_cache(None)
def table_of_scales(rule: Rule, storage: Storage) -> Callable[..., list[Tensor]]:
    """Return :func:`scales_of_rows` as a function of tensors, one object for each rule and storage."""

    def function(slopes: Tensor, weights: Tensor, *rest: Tensor) -> list[Tensor]:
        old = dict(zip(storage.scaled, rest[:-1], strict=True))
        return [
            torch.stack(s)
            for s in scales_of_rows(rule, storage, slopes, weights, old, rest[-1]).values()
        ]

    return function
