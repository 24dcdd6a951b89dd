"""round_to: every bfloat16 and float16 value and a sweep of float32, against ml_dtypes, NumPy and
fractions.
"""

import math
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import expectations
from expectations import INTEGERS
from narrowgauge.numerics.rounding import round_to
from narrowgauge.spec.formats import FORMATS
from oracles.casting import nearest
from oracles.codes import magnitudes, nearest_steps
from oracles.minifloat import spacing, values_of

NAMES = [name for name, row in FORMATS.items() if name != "float64" and row.kind != "scale"]
FLOATS = [name for name in NAMES if FORMATS[name].kind == "float"]


def reference(x: np.ndarray, name: str) -> np.ndarray:
    """Round to nearest even by someone else's code: ml_dtypes, or NumPy where that lacks the
    format.
    """
    with np.errstate(all="ignore"):
        if name in INTEGERS:
            return np.clip(
                np.rint(np.nan_to_num(x, nan=0.0, posinf=1e9, neginf=-1e9)), *INTEGERS[name]
            ) + np.float32(0)
        if name == "tfloat32":
            return nearest(x, name)
        dtype = getattr(ml_dtypes, name, getattr(np, name, None))
        rounded = x.astype(dtype).astype(np.float32)
        # ml_dtypes gives NaN some zero where the format has no NaN; ours is the positive one.
        return rounded if FORMATS[name].nans else np.where(np.isnan(x), np.float32(0), rounded)


def mismatches(ours: Tensor, theirs: np.ndarray) -> int:
    """How many differ in any bit; all NaNs count as one."""
    theirs = torch.from_numpy(np.ascontiguousarray(theirs, dtype=np.float32))
    differ = ours.view(torch.int32) != theirs.view(torch.int32)
    return int((differ & ~(ours.isnan() & theirs.isnan())).sum())


@cache
def sweep() -> Tensor:
    """2.2 million bit patterns: every exponent and sign at a stride, and all the places where
    16-bit formats decide.
    """
    strided = torch.arange(-(2**31), 2**31, 2039, dtype=torch.int64)
    upper = torch.arange(-(2**15), 2**15, 5, dtype=torch.int64) << 16
    ties = torch.cat([upper + low for low in (0, 1, 0x1000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    return torch.cat([strided, ties]).to(torch.int32).view(torch.float32)


@cache
def decisive(name: str) -> Tensor:
    """All values of a format (or 4,096 of them), all ties between neighbours, and two float32
    neighbours of each.
    """
    row = FORMATS[name]
    values = np.array(values_of(name, max(1, (1 << row.bits) >> 12)))
    steps = np.array([spacing(name, v) for v in values]) / 2
    places = np.concatenate(
        [values, values + steps, values - steps, values + steps / 2, values - steps / 2]
    )
    with np.errstate(over="ignore"):
        bits = torch.from_numpy(places.astype(np.float32)).view(torch.int32)
    near = torch.cat([bits + way for way in (-2, -1, 0, 1, 2)]).view(torch.float32)
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.4e38, -3.4e38]
    )
    return torch.cat([near, special])


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_of_float32(name):
    for x in (sweep(), decisive(name)):
        assert mismatches(round_to(x, name), reference(x.numpy(), name)) == 0


@pytest.mark.parametrize("name", sorted(expectations.FLOATS))
def test_saturated_to_the_nearest_of_all_values(name):
    """Float32, and float64 with parts far below float32's resolution that decide a tie: rounded
    once.
    """
    *bits, bias, reserved = expectations.FLOATS[name]
    listed = magnitudes(*bits, 1 - bias)[: 2 ** sum(bits) - reserved]
    finite = np.array([float(value) for value in listed])
    narrow = decisive(name)
    narrow = narrow[narrow.isfinite()]
    wide = narrow.double()
    beyond = torch.tensor([1e300, -1e300, 1e-300, 5e-324], dtype=torch.float64)
    wide = torch.cat([wide, wide * (1 + 2.0**-48), wide * (1 - 2.0**-48), beyond])
    for x in (narrow, wide):
        nearest_values = finite[nearest_steps(finite, x.double().numpy())]
        saturated = round_to(x, name, saturate=True).double()
        assert torch.equal(saturated, torch.from_numpy(nearest_values).copysign(x))
