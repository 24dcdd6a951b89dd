"""The formats' derived figures and codes, against PyTorch, NumPy, ml_dtypes and fractions."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch

from expectations import ELSEWHERE, FLOATS, INTEGERS
from narrowgauge.errors import FormatError
from narrowgauge.numerics.rounding import round_to
from narrowgauge.spec.formats import FORMATS, get_format
from oracles.minifloat import Grid

ML_DTYPES = [name for name in FORMATS if hasattr(ml_dtypes, name) and FORMATS[name].kind != "int"]
NARROW_ML = [name for name in ML_DTYPES if FORMATS[name].bits <= 8]


def same(a: float, b: float) -> bool:
    """Equal as codes would be: NaN is NaN, and zeros have signs."""
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1, a) == math.copysign(1, b)


def test_the_tables_know_what_they_should() -> None:
    assert {*FLOATS, *INTEGERS, *ELSEWHERE} == set(FORMATS), (
        "tests/expectations.py states each format a second time"
    )
    assert len(ML_DTYPES) >= 9
    assert all(row.source and row.purpose for row in FORMATS.values())


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_figures_against_torch(name: str) -> None:
    row = FORMATS[name]
    info = torch.finfo(getattr(torch, name))
    assert (row.bits, row.min, row.max, row.epsilon) == (info.bits, info.min, info.max, info.eps)
    assert row.smallest_normal == info.smallest_normal


@pytest.mark.parametrize("name", ML_DTYPES)
def test_figures_against_ml_dtypes(name: str) -> None:
    row = FORMATS[name]
    info = ml_dtypes.finfo(getattr(ml_dtypes, name))
    assert (row.bits, row.exponent_bits, row.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert (row.max, row.min, row.epsilon) == (float(info.max), float(info.min), float(info.eps))
    assert (row.min_exponent, row.max_exponent + 1) == (info.minexp, info.maxexp)
    assert row.smallest_normal == float(info.smallest_normal)
    if row.kind == "float":
        assert row.smallest_subnormal == float(info.smallest_subnormal)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integers_against_their_limits(name: str) -> None:
    row = FORMATS[name]
    info = (
        ml_dtypes.iinfo(getattr(ml_dtypes, name))
        if name.endswith("int4")
        else torch.iinfo(getattr(torch, name))
    )
    assert (row.min, row.max, row.bits) == (info.min, info.max, info.bits)
    assert (row.min, row.max) == INTEGERS[name]
    assert (row.smallest_subnormal, row.smallest_normal, row.epsilon) == (None, None, 1.0)
    codes = [row.encode(value) for value in range(int(info.min), int(info.max) + 1)]
    assert sorted(codes) == list(range(1 << row.bits))
    assert [row.decode(code) for code in codes] == list(range(int(info.min), int(info.max) + 1))
    assert [row.decode(row.encode(way * 1e9)) for way in (-1, 1)] == [info.min, info.max]


@pytest.mark.parametrize("name", NARROW_ML)
def test_every_code_of_narrow_formats(name: str) -> None:
    row = FORMATS[name]
    codes = np.arange(1 << row.bits, dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, name)).astype(np.float64)
    for code, value in zip(codes.tolist(), values.tolist(), strict=True):
        assert same(row.decode(code), value)
        if not math.isnan(value):
            assert row.encode(value) == code
    assert math.isnan(row.decode(row.encode(math.nan))) == row.nans


def awkward_values(name: str, precision: type[np.floating]) -> list[float]:
    """Values of the format, the ties between them, and the next floats beside those; zeros,
    infinities, extremes.
    """
    row = FORMATS[name]
    finite = sorted(
        v
        for v in map(row.decode, range(0, 1 << row.bits, max(1, 1 << row.bits >> 8)))
        if math.isfinite(v)
    )
    ties = [(low + high) / 2 for low, high in pairwise(finite)]
    ties += [edge + way * row.spacing(edge) / 2 for edge in (row.max, row.min) for way in (-1, 1)]
    with np.errstate(over="ignore"):
        middle = np.array(finite + ties, dtype=precision)
        near = np.concatenate([np.nextafter(middle, precision(way)) for way in (-np.inf, np.inf)])
    extremes = [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3.4e38, -3.4e38]
    return [*middle.tolist(), *near.tolist(), *np.array(extremes, dtype=precision).tolist()]


@pytest.mark.parametrize("name", sorted(FLOATS.keys() - {"tfloat32"}))
def test_encode_against_fractions(name: str) -> None:
    row = FORMATS[name]
    grid = Grid(name)
    assert row.max == float(grid.max)
    for value in filter(math.isfinite, awkward_values(name, np.float64)):
        nearest = grid.nearest(value)
        if nearest is not None:
            assert row.decode(row.encode(value)) == nearest


@pytest.mark.parametrize("name", NARROW_ML)
def test_both_conventions_of_values_beyond_the_range(name: str) -> None:
    """ml_dtypes gives infinity or NaN.

    PyTorch 2.13 does too, and saturates in ``float8_e4m3fn``.
    """
    row = FORMATS[name]
    near = []
    for place in range(-8, 40):
        for sign in (-1, 1):
            if row.max < 1e30:
                near.append(sign * row.max * (1 + place / 64))
    bfloat16 = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = np.concatenate(
        [bfloat16, np.array([*awkward_values(name, np.float32), *near], dtype=np.float32)]
    )

    def rounded(saturate: bool) -> np.ndarray:
        codes = [row.encode(value, saturate=saturate) for value in x.tolist()]
        return np.array([row.decode(code) for code in codes], dtype=np.float32)

    plain = rounded(False)
    saturated = rounded(True)
    if row.nans:  # ml_dtypes gives NaN some zero where the format has none
        with np.errstate(all="ignore"):
            assert np.array_equal(
                plain, x.astype(getattr(ml_dtypes, name)).astype(np.float32), equal_nan=True
            )
    assert np.array_equal(
        saturated, round_to(torch.from_numpy(x), name, saturate=True).numpy(), equal_nan=True
    )
    assert (np.isfinite(saturated) | np.isnan(x)).all()
    if row.kind == "float" and (dtype := getattr(torch, name, None)) is not None:
        cast = torch.from_numpy(x).to(dtype).float().numpy()
        saturates = float(torch.tensor(math.inf).to(dtype)) == row.max
        assert np.array_equal(saturated if saturates else plain, cast, equal_nan=True)


@pytest.mark.parametrize("name", list(FORMATS))
def test_spacing_is_the_distance_to_the_next_code(name: str) -> None:
    row = FORMATS[name]
    value = row.decode(row.encode(min(2.0, row.max / 2)))
    assert row.spacing(value) == row.decode(row.encode(value) + 1) - value
    assert row.spacing(math.inf) == row.spacing(row.max)
    assert math.isnan(row.spacing(math.nan))


def test_codes_outside_the_format_are_refused() -> None:
    with pytest.raises(FormatError, match="float4_e2m1fn"):
        get_format("float4_e2m1fn").decode(16)


def test_names() -> None:
    assert get_format("int4") is get_format(FORMATS["int4"]) is FORMATS["int4"]
    with pytest.raises(FormatError, match="Did you mean 'bfloat16'"):
        get_format("bfloat15")
