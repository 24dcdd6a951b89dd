"""The second moment of Collage-plus as its authors' released code computes it, from a description of the fault.

That code multiplies the expansion (v, dv) by (B, dB), beta2 split into two bfloat16, in place: the tensor that holds v
is overwritten by the rounded product, and so is every later line that reads it. Two things follow. The error of the
product, v*B - RN(v*B), is computed from the overwritten v and becomes B*(B-1)*v, no small correction but a second decay.
And the last line, which should leave in the low word only what the sum lost, compares the sum with itself, so the low
word is added to the high word and kept as well: counted twice. ``in_place=False`` is the same sequence without the
overwriting, which is what the paper says. Of stationary gradients the released sequence keeps 0.33, 0.33, 0.31 and 0.50 of
the value at beta2 = 0.95, 0.98, 0.99 and 0.999; the authors' own functions, run, gave 0.331, 0.335, 0.313 and 0.501.

Source: what amazon-science/collage of July 2024 does, in our own words and code; arXiv:2405.03637 for the method.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def rn(x: Tensor) -> Tensor:
    """To the nearest bfloat16, in float32."""
    return x.to(torch.bfloat16).float()


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and error, every operation rounded."""
    s = rn(a + b)
    return s, rn(b - rn(s - a))


def multiply(v: Tensor, dv: Tensor, beta: float, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """(v, dv) times beta, as released or as published."""
    high = rn(torch.tensor(beta))
    low = rn(torch.tensor(beta) - high)
    product = rn(v * high)
    read = product if in_place else v
    error = rn(read * high - product)
    rest = rn(rn(rn(dv * high) + read * low) + error)
    if in_place:
        return rn(product + rest), rest
    return fast_two_sum(product, rest)


def second_moment(gradients: Iterable[Tensor], beta: float, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """The second moment of gradients, one a step, from zero: ``(as kept, exact)``, float64.

    Args:
        gradients: bfloat16 values in float32, of equal shape.
        beta: beta2.
        in_place: as released; else as published.
    """
    v = dv = torch.zeros(())
    exact = torch.zeros((), dtype=torch.float64)
    for g in gradients:
        v, dv = multiply(v, dv, beta, in_place=in_place)
        v, error = fast_two_sum(v, rn((1 - beta) * g * g))
        v, dv = fast_two_sum(v, rn(dv + error))
        exact = beta * exact + (1 - beta) * g.double() ** 2
    return v.double() + dv.double(), exact
