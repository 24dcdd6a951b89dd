"""Collage: optimizer steps in the arithmetic of narrow parts.

A float32 optimizer keeps narrow words and computes wide; Collage never leaves the narrow format: every operation is
rounded to it, and what must not be lost is kept as an expansion, an exact sum of parts. *Light* keeps the weight as a
pair, so that no update is lost however small. *Plus* keeps the second moment as a pair too, and splits beta2 with it:
0.999 is 1 in bfloat16, and a single word would never decay.

:func:`published_adamw` is the AdamW of the paper for weights and moments of any number of parts; :func:`expanded` runs
any other rule in the same arithmetic. Two roundings have a product inside: ``RN(x + c * g)`` is a float32 product, a
float32 sum and one rounding. A fused multiply-add, as in torch's own kernels, gives a neighbouring value about once in
100,000 times.

The authors' released code has two errors, in its product of expansions and in the low word of beta2; with both corrected it has
our bits (``tests/optim/rules/test_collage.py``).

Source: Yu et al. 2024, Collage, arXiv:2405.03637.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from narrowgauge.numerics.expansions import Expansion, expansion_of, grow, mul, sqrt


def published_adamw(
    weight: Expansion, gradient: Tensor, exp_avg: Expansion, exp_avg_sq: Expansion, s: Mapping[str, Tensor]
) -> tuple[Tensor, Expansion, Expansion, Expansion]:
    """Take one step of Collage's AdamW; return the intended change, a part, and the new weight and moments.

    Every operation is rounded to the parts' format. As published, the step itself reads only the leading parts of weight and
    moments, and weight decay is part of the one update, which rounds some of it away. Bias correction and eps are torch's.
    ``weight`` is a pair for Collage-light and -plus, ``exp_avg_sq`` for -plus; ``s`` holds the scalars of
    :data:`narrowgauge.optim.rules.elementwise.ADAMW`.

    Cost: in bfloat16 15 roundings for light, 23 for plus.
    """
    rn = weight.rounding
    gradient = rn(gradient)
    exp_avg = _average(exp_avg, s["one_minus_beta1"], gradient)
    exp_avg_sq = _average(exp_avg_sq, s["one_minus_beta2"], gradient, gradient)
    root = rn(rn(sqrt(exp_avg_sq.parts[0])) * s["inverse_root_correction2"])
    step = rn(rn(exp_avg.parts[0] * s["negative_step_size"]) / rn(root + s["eps"]))
    change = rn(step + rn(weight.parts[0] * s["negative_decay"]))
    return change, Expansion(grow(weight.parts, change, rn), rn), exp_avg, exp_avg_sq


def _average(average: Expansion, one_minus_beta: Tensor, *factors: Tensor) -> Expansion:
    """``beta * average + (1 - beta) * product of the factors``; beta has as many parts as the average."""
    rn, parts = average.rounding, average.parts
    beta, increment = 1 - one_minus_beta, one_minus_beta
    for factor in factors:
        increment = increment * factor
    if len(parts) == 1:
        return Expansion((rn(rn(parts[0] * beta) + increment),), rn)
    decayed = mul(parts, expansion_of(beta, len(parts), rn), rn)
    return Expansion(grow(decayed, rn(increment), rn), rn)


def expanded(update: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return a rule's update in the arithmetic of expansions: its own text, run on them.

    Args:
        update: ``(weight, gradient, *states, scalars) -> (change, *new states)``, in operators and
            :func:`narrowgauge.numerics.expansions.sqrt`, see :class:`narrowgauge.optim.rules.elementwise.Rule`.
    Returns:
        ``(weight, gradient, *states, scalars) -> (change, new weight, *new states)``: weight and states are expansions
        and keep their numbers of parts, gradient and change are float32 tensors. The change has as many parts as the
        longest of what it is made of, and all of them are added to the weight.
    """

    def step(weight: Expansion, gradient: Tensor, *rest: Any) -> tuple[Any, ...]:
        *states, s = rest
        rn = weight.rounding
        change, *new = update(weight, Expansion((rn(gradient),), rn), *states, s)
        grown = weight + change
        cut = [
            Expansion(after.parts[: len(before)], rn)
            for after, before in zip([grown, *new], [weight, *states], strict=True)
        ]
        return change.value, *cut

    return step
