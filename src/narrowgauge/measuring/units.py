"""Formats whose roundings count, each with its unit roundoff: the one list."""

from __future__ import annotations

import torch

from narrowgauge.spec.formats import dtype_name

NARROW = (
    torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip
UNITS = {dtype: torch.finfo(dtype).eps / 2 for dtype in NARROW}
FINEST = 2.0**-24
"""Unit roundoff of float32."""


def unit_of(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a format; of wide ones, float32's."""
    return UNITS.get(dtype, FINEST)


def format_of(unit: float) -> str:
    """Return the name of the format with a unit roundoff.

    Example:
        >>> format_of(2.0**-8), format_of(2.0**-24), format_of(0.01)
        ('bfloat16', 'float32', 'a format of unit roundoff 0.01')
    """
    for dtype, roundoff in (*UNITS.items(), (torch.float32, FINEST)):
        if roundoff == unit:
            return dtype_name(dtype)
    return f"a format of unit roundoff {unit:.2g}"
