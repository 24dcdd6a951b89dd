"""Formats whose roundings count, each with its unit roundoff: the one list."""

import torch

UNITS = {
    dtype: torch.finfo(dtype).eps / 2
    for dtype in (
        torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    )
}  # fmt: skip
FINEST = 2.0**-24
"""Unit roundoff of float32."""


def unit_of(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a format; of wide ones, float32's."""
    return UNITS.get(dtype, FINEST)
