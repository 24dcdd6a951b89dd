"""Casts against an oracle that works one group at a time in fractions, bit for bit; and the laws
that rounding promises.

The casts are taken from the table of computes, so that a new row is tested by itself.
"""

import math
from dataclasses import asdict
from functools import cache

import pytest
import torch
from torch import Tensor

from narrowgauge.matmul.operand import Operand, cast_matrix
from narrowgauge.numerics.quantization import random_words, uniform
from narrowgauge.numerics.rounding import round_nearest, round_to
from narrowgauge.spec.computes import COMPUTES, Cast
from narrowgauge.spec.formats import FORMATS
from oracles import casting as oracle
from oracles.codes import hashed
from oracles.minifloat import values_of
from tables import exhaustive
from tensors import gaussian

CASTS = list(dict.fromkeys(cast for row in COMPUTES.values() for cast in row.casts.values()))
NARROW = [cast for cast in CASTS if not cast.is_wide]
# Ways to combine the table's words that no row goes yet.
UNUSED = [
    Cast("int8", "row", rotation="hadamard"),
    Cast("int8", "1x32", "float8_e8m0fnu", "stochastic"),
    Cast("float8_e4m3fn", "row", rounding="stochastic"),
    Cast("float8_e5m2", "128x128", "float8_e8m0fnu", "stochastic"),
    Cast("float8_e4m3fn", "row", "float8_e8m0fnu"),
    Cast("int8", "128x1", "float8_e8m0fnu"),
    Cast("int8", "1x16", "float8_e4m3fn", "stochastic"),
    Cast("float4_e2m1fn", "column"),
]
KEY = torch.tensor(-77, dtype=torch.int32)

each_narrow = exhaustive("cast", NARROW)
each_dim = pytest.mark.parametrize("dim", [0, 1])


def random_exponents(shape: tuple[int, ...], reach: int, seed: int = 0) -> Tensor:
    return (
        torch.randint(-reach, reach + 1, shape, generator=torch.Generator().manual_seed(seed))
        .float()
        .exp2()
    )


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)


def neighbours(x: Tensor, reach: int = 2) -> Tensor:
    """Float32 values and those next to them."""
    bits = x.view(torch.int32)
    return torch.cat([(bits + way).view(torch.float32) for way in range(-reach, reach + 1)])


@cache
def every_bfloat16() -> Tensor:
    return from_bits(torch.arange(-(2**15), 2**15) << 16)


@cache
def numbers(name: str) -> Tensor:
    """Every finite value of a narrow format, ascending; of a wide one's, those of a few exponents."""
    row = FORMATS[name]
    step = 1 if row.bits <= 8 else 1 << (row.bits - 14)
    return torch.tensor(values_of(name, step), dtype=torch.float64).float()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, but that all NaNs are one and so are both zeros."""
    return ours.shape == theirs.shape and bool(
        ((ours == theirs) | (ours.isnan() & theirs.isnan())).all()
    )


# ── random words ──────────────────────────────────────────────────────────────────────────────────


@exhaustive("key", [0, -77, 2**31 - 1, -(2**31)])
def test_words_are_hashes_of_logical_indices(key):
    words = random_words(5, 7, torch.tensor(key, dtype=torch.int32))
    column_key = hashed(0x2545F491, key)
    by_row = [[hashed(row, key) // 2**16 / 2**16] for row in range(5)]
    by_column = [(hashed(column, column_key) // 2**16 + 0.5) / 2**16 for column in range(7)]
    assert words[0].tolist() == by_row and words[1].tolist() == [by_column]
    expected = (words[0].double() + words[1].double()) % 1
    assert uniform(words).double().equal(expected)


# ── every cast of the table against the oracle ────────────────────────────────────────────────────


def ours(x: Tensor, cast: Cast, dim: int = 1) -> Operand:
    """The cast operand ``[side, contraction]``: of blocks, codes times the scales of their blocks."""
    dtype = getattr(torch, cast.format) if cast.is_wide else torch.float32
    return cast_matrix(x, cast, dim, dtype, None if cast.rounding == "nearest" else KEY)


def theirs(x: Tensor, cast: Cast, dim: int = 1) -> oracle.Result:
    """What the oracle says."""
    drawn = uniform(random_words(*x.shape, KEY))
    turned = []
    for v in (x.float(), drawn):
        turned.append((v if dim == 1 else v.t()).contiguous().numpy())
    return oracle.quantize(turned[0], **asdict(cast), uniform=turned[1])


def agree(x: Tensor, cast: Cast, dim: int) -> bool:
    operand = ours(x, cast, dim)
    result = theirs(x, cast, dim)
    values = torch.from_numpy(result.codes * result.inner)
    outer = torch.from_numpy(result.outer)
    scale = torch.ones(1, 1) if operand.outer is None else operand.outer
    return same(operand.data.float(), values) and same(scale.expand(values.shape), outer)


def matrices(cast: Cast):
    """What a cast may meet, ``[rows, contraction]``."""
    high, wide = cast.block or (1, 16)
    shape, row = (max(6, high), max(96, 2 * wide)), cast.element  # a few blocks, or a few rotations
    x = gaussian(*shape)
    yield "gaussian", x
    yield "bfloat16", x.bfloat16()
    yield "rows of wild ranges", x * random_exponents((shape[0], 1), 90)
    yield "values of wild ranges", x * random_exponents(shape, 12)
    yield "columns of wild ranges", x * random_exponents((1, shape[1]), 40)
    yield "one value", torch.full(shape, 0.7)
    yield "zeros", torch.zeros(shape) * x.sign()
    yield "a row of zeros, one of one value", x * (torch.arange(shape[0]) % 3 > 0)[:, None]
    yield "tiny", x * 2.0**-98
    yield "subnormal", x * 2.0**-130
    yield "huge", x * 2.0**125
    representable = numbers(cast.format) if row.bits <= 8 else numbers(cast.format)[::97]
    between = torch.cat(
        [representable[row.kind == "int" :], (representable[1:] + representable[:-1]) / 2]
    )
    places = torch.randint(len(between), shape, generator=torch.Generator().manual_seed(1))
    ties = between[places]
    # The end of the format at the start of each group, so that scales are powers of two or next to
    # one.
    ties[::high, ::wide] = row.max if row.bits <= 8 else 1.0
    yield "ties", ties
    yield "scaled ties", ties * random_exponents((shape[0], 1), 30)
    yield "ties under scales that are no powers of two", near_ties(cast, shape, between[places])
    ends = torch.tensor(
        [1.0, 1 - 2.0**-24, 1 + 2.0**-23, 1.0625, 1.125, 1.3, 1.99, 2 - 2.0**-23, 0.75, 2.0 / 3]
    )
    near_end = (
        ends[torch.arange(shape[0]) % 10][:, None] * x.sign() * min(row.max, 2.0**100)
    ).clone()
    near_end[:, 1::2] *= 0.5
    yield "the format's end", near_end
    bad = x.clone()
    bad[0, 3] = math.nan
    bad[-1, -1] = math.inf
    bad[shape[0] // 2, shape[1] // 2] = -math.inf
    bad[2, 5] = -math.nan
    yield "not finite", bad


def near_ties(cast: Cast, shape: tuple[int, int], ties: Tensor) -> Tensor:
    """Values that fall on ties, or next to them, once divided: here one rounding too many or too
    few is seen.

    Of two levels, the ratios of largest magnitudes do as well.
    """
    high, wide = cast.block or (1, 16)
    ends = 9 + gaussian(*shape, seed=4).abs()[::high, ::wide]
    scales = numbers("float8_e4m3fn")
    scales = scales[scales > 16]
    if cast.scale == "float8_e4m3fn":
        ratios = (scales[1:] + scales[:-1]) / 2
        ends = (ratios[torch.arange(ends.numel()) % len(ratios)] * 6).view(ends.shape) * (
            0.7 if cast.rotation == "none" else 1
        )
        ends[0, 0] = 2688 * 0.7
    x = torch.ones(shape)
    x[::high, ::wide] = ends
    result = theirs(x, cast)
    scale = torch.from_numpy(result.inner * result.outer)
    ways = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(5)).int()
    x = from_bits((ties * scale).view(torch.int32) + ways)
    x[::high, ::wide] = ends
    return x


@each_dim
@pytest.mark.parametrize("cast", [*CASTS, *UNUSED], ids=str)
def test_codes_and_scales_are_the_oracle_s(cast, dim):
    for name, matrix in matrices(cast):
        # Transposed, not copied: how a matrix lies must not matter.
        x = matrix if dim == 1 else matrix.t()
        assert agree(x, cast, dim), name
    assert same(ours(x.contiguous(), cast, dim).data, ours(x, cast, dim).data)


# ── exactness in bfloat16 ─────────────────────────────────────────────────────────────────────────


def is_bfloat16(x: Tensor) -> Tensor:
    return x.double() == x.double().bfloat16().double()


@each_narrow
def test_a_code_times_the_scale_of_its_block_is_a_bfloat16(cast):
    """Every code and every scale; the product in float64, rounded to nothing narrower than 2^-126."""
    if cast.values_format != "bfloat16":
        assert cast.block is not None and cast.scale == "float32"
        return
    codes = numbers(cast.format).double()
    if cast.block is None:
        scales = torch.ones(1, dtype=torch.float64)
    elif cast.scale == "float8_e4m3fn":
        scales = numbers("float8_e4m3fn").double()
        scales = scales[scales > 0]
    else:
        scales = torch.arange(-127, 128, dtype=torch.float64).exp2()
    products = (codes[:, None] * scales).flatten()
    seen = (products.abs() >= 2.0**-126) & (products.abs() < 2.0**128)
    assert is_bfloat16(products[seen]).all()


# ── rounding in floats ────────────────────────────────────────────────────────────────────────────


@exhaustive("name", [row.name for row in FORMATS.values() if row.bits <= 8 and row.kind != "scale"])
def test_rounding_in_floats_is_that_of_any_format(name):
    """One rounding, however it is computed."""
    row = FORMATS[name]
    x = torch.cat([neighbours(every_bfloat16()[::7], 1), neighbours(numbers(name), 1)])
    expected = round_to(x, row, saturate=True)
    if row.kind == "int":
        expected = expected.clamp(-row.max, row.max)
    assert same(round_nearest(x, row), torch.where(x.isnan(), torch.nan, expected))
