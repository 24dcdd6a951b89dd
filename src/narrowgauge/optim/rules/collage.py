"""Collage: AdamW in the arithmetic of narrow parts.

A float32 optimizer keeps narrow words and computes wide. Collage rounds every operation to the
narrow format. What must not be lost is an expansion, an exact sum of parts. *Light* keeps the
weight as a pair, so that no update is lost however small. *Plus* keeps the second moment as a pair
too, and splits beta2 with it: 0.999 is 1 in bfloat16, and a single word would never decay.

``RN(x + c * g)`` is a float32 product, a float32 sum and one rounding. A fused multiply-add, as in
torch's own kernels, gives a neighbouring value about once in 100,000 times. The authors' released
code has two errors, in its product of expansions and in the low word of beta2. With both corrected
it has our bits (``tests/optim/rules/test_collage.py``).

Source: Yu et al. 2024, Collage, arXiv:2405.03637.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven, Pair, grow, mul, pair_of
from narrowgauge.numerics.rounding import sqrt

ExpansionParts = Sequence[Tensor]
"""One part, or a pair."""


def collage_adamw(
    weight: Pair,
    gradient: Tensor,
    exp_avg: ExpansionParts,
    exp_avg_sq: ExpansionParts,
    s: Mapping[str, Tensor],
    rn: NearestEven,
) -> tuple[Pair, ExpansionParts, ExpansionParts]:
    """Take one step of Collage's AdamW; return the new weight and moments.

    ``rn`` rounds to the parts' format. As published, the step itself reads only the leading parts
    of weight and moments, and weight decay is part of the one update, which rounds some of it away.
    Bias correction and eps are torch's. ``weight`` is a pair for light and plus, ``exp_avg_sq`` for
    plus. ``s`` are the scalars of :data:`narrowgauge.optim.rules.elementwise.ADAMW`.
    """
    gradient = rn(gradient)
    exp_avg = _average(exp_avg, s["one_minus_beta1"], gradient, rn=rn)
    exp_avg_sq = _average(exp_avg_sq, s["one_minus_beta2"], gradient, gradient, rn=rn)
    root = rn(rn(sqrt(exp_avg_sq[0])) * s["inverse_root_correction2"])
    step = rn(rn(exp_avg[0] * s["negative_step_size"]) / rn(root + s["eps"]))
    change = rn(step + rn(weight[0] * s["negative_decay"]))
    return grow(weight, change, rn), exp_avg, exp_avg_sq


def _average(
    average: ExpansionParts, one_minus_beta: Tensor, *factors: Tensor, rn: NearestEven
) -> ExpansionParts:
    """Return ``beta * average + (1 - beta) * product of the factors``, of one part or a pair.

    Beta has as many parts as the average.
    """
    beta = 1 - one_minus_beta
    increment = one_minus_beta
    for factor in factors:
        increment = increment * factor
    if len(average) == 1:
        return (rn(rn(average[0] * beta) + increment),)
    high, low = average
    return grow(mul((high, low), pair_of(beta, rn), rn), rn(increment), rn)
