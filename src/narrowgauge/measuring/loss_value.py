"""What the format of a loss's value hides."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from narrowgauge.measuring.units import UNITS
from narrowgauge.spec.formats import dtype_name


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in UNITS or not loss.isfinite():
        return []
    exponent = math.floor(math.log2(max(abs(float(loss.detach())), 2.0**-14)))
    spacing = torch.finfo(loss.dtype).eps * 2.0**exponent
    return [
        f"loss in {dtype_name(loss.dtype)}: near {float(loss.detach()):.3g} its values lie "
        f"{spacing:.3g} apart; take the loss of logits.float()"
    ]
