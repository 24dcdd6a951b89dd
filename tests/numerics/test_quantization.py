"""Casts against an oracle that works one group at a time in fractions, bit for bit; and the laws that rounding promises.

The casts are taken from the table of computes, so that a new row is tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fractions import Fraction
from functools import cache
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from covering import exhaustive, whole
from narrowgauge._torch.inductor import compile_any_shape
from narrowgauge.errors import FormatError
from narrowgauge.numerics.quantization import (
    TINY,
    Quantized,
    blocked,
    padded,
    power_of_two_scale,
    quantize,
    quantize_blocks,
    quantize_whole,
    random_words,
    rotate,
    round_nearest,
    round_stochastic,
    sides_of,
    spread,
    uniform,
    words_of,
)
from narrowgauge.numerics.rounding import round_to, step_seed
from narrowgauge.spec.computes import COMPUTES, ROTATION_SIZE, Cast
from narrowgauge.spec.formats import FORMATS, Format
from oracles import casting as oracle
from oracles.codes import hashed
from tensors import gaussian

CASTS = list(dict.fromkeys(cast for row in COMPUTES.values() for cast in row.casts.values()))
NARROW = [cast for cast in CASTS if not cast.is_wide]
NEAREST = [cast for cast in NARROW if cast.rounding == "nearest"]
STOCHASTIC = [cast for cast in NARROW if cast.rounding == "stochastic"]
# Ways to combine the table's words that no row goes yet.
UNUSED = [
    Cast("int8", "row", rotation="hadamard"),
    Cast("int8", "1x32", "power-of-two", "stochastic"),
    Cast("float8_e4m3fn", "row", rounding="stochastic"),
    Cast("float8_e5m2", "128x128", "float8_e8m0fnu", "stochastic"),
    Cast("float6_e3m2fn", "1x16", "float8_e4m3fn", rotation="hadamard"),
    Cast("float6_e2m3fn", "column"),
]
FORMATS_USED = sorted({cast.format for cast in CASTS})
NARROW_FLOATS = [row for row in FORMATS.values() if row.kind == "float" and row.bits <= 8]
KEY = torch.tensor(-77, dtype=torch.int32)
# Each number that a word of a row and one of a column can add up to.
EVERY_UNIFORM = (torch.arange(1 << 16).float() + 0.5) * 2.0**-16

each_cast = exhaustive("cast", CASTS)
each_narrow = exhaustive("cast", NARROW)
each_nearest = exhaustive("cast", NEAREST)
each_dim = pytest.mark.parametrize("dim", [0, 1])


def random_exponents(shape: tuple[int, ...], reach: int, seed: int = 0) -> Tensor:
    return torch.randint(-reach, reach + 1, shape, generator=torch.Generator().manual_seed(seed)).float().exp2()


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
    codes = range(1 << row.bits) if row.bits <= 8 else range(0, 1 << row.bits, 1 << (row.bits - 14))
    return torch.tensor(sorted({v for v in map(row.decode, codes) if math.isfinite(v)}), dtype=torch.float64).float()


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, but that all NaNs are one and so are both zeros."""
    return ours.shape == theirs.shape and bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all())


# ── rounding ────────────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("name", FORMATS_USED)
def test_nearest_is_the_definition_of_rounding(name: str) -> None:
    """Every bfloat16 and its neighbours, every value of the format, every tie, and three float32 neighbours of each."""
    row, own = FORMATS[name], numbers(name)
    if name == "float64":  # every float32 is one of its numbers, and there is no tie
        assert same(round_nearest(x := neighbours(every_bfloat16(), 1), row), x)
        return
    ties = ((own[1:].double() + own[:-1].double()) / 2).float()
    x = torch.cat([neighbours(every_bfloat16(), 1), neighbours(own, 3), neighbours(ties, 3)])
    expected = round_to(x, row, saturate=row.bits <= 8)
    if row.kind == "int":
        expected = expected.clamp(-row.max, row.max)
    assert same(round_nearest(x, row), torch.where(x.isnan(), torch.nan, expected))


@exhaustive("row", NARROW_FLOATS)
def test_nearest_decides_a_whole_binade_rightly(row: Format) -> None:
    """Every 37th significand of the format's top binade and of the one around its smallest normal number."""
    for exponent in (row.max_exponent, row.min_exponent - 1, row.min_exponent):
        x = from_bits(torch.arange((127 + exponent) << 23, (128 + exponent) << 23, 37))
        assert same(round_nearest(x, row), round_to(x, row, saturate=True))


def narrow_values(row: Format) -> Tensor:
    """Values of the format, of places between, and of places so near to a value that float32 hardly tells."""
    own = numbers(row.name) if row.kind == "float" else numbers(row.name)[1:]
    gaps = own[1:] - own[:-1]
    parts = [own[:-1] + gaps * part for part in (0.5, 0.25, 2.0**-9, 0.9990234375, 1 / 3)]
    found = torch.cat([own, neighbours(own, 1), *parts, torch.tensor([2.0**-30, -(2.0**-30), 1e-40])])
    return found[found.abs() <= row.max].unique()


@exhaustive("name", [name for name in FORMATS_USED if FORMATS[name].bits <= 8])
def test_stochastic_over_all_numbers_is_unbiased_takes_neighbours_and_leaves_values(name: str) -> None:
    """Not sampled: the mean over every number that can be drawn, within 2^-16 of a spacing of the value."""
    row, own = FORMATS[name], numbers(name)
    values = narrow_values(row)
    for v in values[:: max(1, len(values) // 150)]:
        found = round_stochastic(v.expand(len(EVERY_UNIFORM)), row, EVERY_UNIFORM)
        below, above = own[own <= v].max(), own[own >= v].min()
        assert ((found == below) | (found == above)).all()
        assert abs(found.double().mean() - v.double()) <= 2.0**-16 * (above - below)
    for v in own[own.abs() <= row.max]:
        assert (round_stochastic(v.expand(len(EVERY_UNIFORM)), row, EVERY_UNIFORM) == v).all()


# ── random words ────────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("key", [0, 1, -77, 2**31 - 1, -(2**31)])
def test_words_are_hashes_of_logical_indices(key: int) -> None:
    words = random_words(5, 7, torch.tensor(key, dtype=torch.int32), first_row=1000)
    other = hashed(0x2545F491, key)
    by_row = [hashed(1000 + row, key) // 2**16 / 2**16 for row in range(5)]
    by_column = [(hashed(column, other) // 2**16 + 0.5) / 2**16 for column in range(7)]
    assert words[0].tolist() == [[word] for word in by_row] and words[1].tolist() == [by_column]
    drawn = uniform(words).double() * 2**16 - 0.5
    assert drawn.equal(drawn.round()) and drawn.min() >= 0 and drawn.max() < 2**16
    expected = (words[0].double() + words[1].double()) % 1
    assert uniform(words).double().equal(expected)


def test_chunks_of_rows_get_the_words_they_have_in_the_whole() -> None:
    whole = random_words(96, 40, KEY)
    for first in (0, 1, 31, 95):
        for start in (first, torch.tensor(first, dtype=torch.int32)):
            part = random_words(96 - first, 40, KEY, start)
            assert part[0].equal(whole[0][first:]) and part[1].equal(whole[1])
    counters = [torch.arange(size, dtype=torch.int32) for size in (96, 40)]
    assert all(a.equal(b) for a, b in zip(words_of(*counters, KEY, torch.zeros_like(KEY)), whole, strict=True))


@exhaustive("cast", STOCHASTIC)
def test_another_key_rounds_otherwise_and_the_same_key_alike(cast: Cast) -> None:
    x = gaussian(64, 128)
    one, again, other = (ours(x, cast, key=key) for key in (3, 3, 4))
    assert same(one.codes, again.codes) and not same(one.codes, other.codes)
    # Every uniform number moves, so about as many codes differ as two independent roundings would.
    assert 0.1 < (one.codes != other.codes).float().mean() < 0.9


@cache
def errors_of_equal_values(part: float) -> Tensor:
    """Rounding errors of 400 matrices ``[32, 64]`` of one value, in spacings; each matrix has its own key."""
    row = FORMATS["int8"]
    keys = torch.tensor([step_seed(0, step) for step in range(400)], dtype=torch.int32)
    drawn = torch.stack([uniform(random_words(32, 64, key)) for key in keys])
    return round_stochastic(torch.full_like(drawn, 3 + part), row, drawn).double() - (3 + part)


@exhaustive("part", [0.5, 0.25, 0.0625])
def test_equal_values_do_not_round_alike(part: float) -> None:
    """The mean of a whole matrix of one value is off by 5 standard deviations of independent roundings at the most.

    Any two of its places are independent, so the mean's variance is that of independent roundings, though its tails are
    longer: over 400 keys the variance is right within a fifth.
    """
    errors = errors_of_equal_values(part)
    deviation = math.sqrt(part * (1 - part))
    scores = errors.sum((1, 2)) / (deviation * math.sqrt(32 * 64))
    assert scores.abs().max() < 5 and abs(float(scores.square().mean()) - 1) < 0.2
    assert abs(float(scores.mean()) * math.sqrt(400)) < 4


@exhaustive("part", [0.5, 0.25, 0.0625])
@exhaustive("along", [1, 2])
def test_a_dot_product_is_off_as_much_as_by_independent_roundings(part: float, along: int) -> None:
    """Over columns or rows, with weights of one sign or of both: the variance of its error is the sum of variances."""
    errors = errors_of_equal_values(part)
    size = errors.shape[along]
    for weights in (torch.ones(size), torch.ones(size).cumsum(0).remainder(2) * 2 - 1, gaussian(size)):
        dots = torch.tensordot(errors, weights.double(), ([along], [0]))
        expected = part * (1 - part) * float(weights.double().square().sum())
        assert abs(float(dots.square().mean()) / expected - 1) < 0.2


# ── scales ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("row", [*NARROW_FLOATS, FORMATS["int8"]])
def test_power_of_two_scales_of_every_bfloat16(row: Format) -> None:
    """Up: nothing saturates, and by half of it something would. Else: the exponents' difference, as OCP MX 6.3 has it."""
    x = neighbours(every_bfloat16()[every_bfloat16() > 0], 1)
    x = x[(x >= TINY) & x.isfinite()]
    up, ocp = (power_of_two_scale(x, row, up=up).double() for up in (True, False))
    for scale in (up, ocp):
        assert (torch.frexp(scale).mantissa == 0.5).all()
    assert (x / up <= row.max).all() and (x / (up / 2) > row.max).all()
    assert ocp.equal(torch.ldexp(torch.ones_like(ocp), torch.frexp(x.double()).exponent - 1 - row.max_exponent))
    smaller = torch.tensor([0.0, 1e-45, TINY / 2, TINY])
    assert len(power_of_two_scale(smaller, row, up=True).unique()) == 1
    assert power_of_two_scale(torch.tensor([math.nan, math.inf]), row, up=False).isnan().all()


def two_levels(up: bool) -> tuple[Tensor, Quantized]:
    """Blocks of 16 of every bfloat16 magnitude from 2^-20 to 1, in a tensor whose largest is 1."""
    cast = next(c for c in NARROW if c.scale == "float8_e4m3fn" and up == (c.rounding == "stochastic"))
    largest = from_bits(torch.arange(0x3580, 0x3F81) << 16)
    x = largest[:, None] * torch.linspace(-1, 0.97, 16)
    return x, ours(x, Cast(cast.format, cast.granularity, cast.scale, cast.rounding))


def test_stochastic_e4m3_scales_are_the_least_at_which_nothing_saturates() -> None:
    x, found = two_levels(up=True)
    assert found.inner is not None and found.outer is not None
    # Three roundings to float32 lie between a value and what its code is rounded from.
    whole, slack = found.outer.double().item(), 1 + 2.0**-21
    quotients = x.double().abs().amax(1, keepdim=True) / (found.inner.double() * whole)
    assert quotients.max() <= 6 * slack
    numbers_of_scale = numbers("float8_e4m3fn")
    below = numbers_of_scale[torch.searchsorted(numbers_of_scale, found.inner) - 1].double()
    assert ((below * whole * 6 < x.double().abs().amax(1, keepdim=True) * slack) | (found.inner == 2.0**-9)).all()


def test_nearest_e4m3_scales_are_the_nearest() -> None:
    x, found = two_levels(up=False)
    assert found.inner is not None
    # In exact arithmetic: amax / 6 over the tensor's amax / (6 × 448), but for places nearer to a tie than three roundings.
    exact = [Fraction(value) * 448 for value in x.abs().amax(1).tolist()]
    expected = (
        np.array([float(value) for value in exact], np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    differ = found.inner.flatten().numpy() != np.maximum(expected, np.float32(2.0**-9))
    grid = sorted({Fraction(v) for v in numbers("float8_e4m3fn").tolist() if v > 0})
    ties = [(a + b) / 2 for a, b in pairwise(grid)]
    for place in np.flatnonzero(differ):
        assert min(abs(exact[place] / tie - 1) for tie in ties) < Fraction(1, 2**21)
    assert differ.mean() < 0.01


# ── every cast of the table against the oracle ──────────────────────────────────────────────────────────────────────


def ours(
    x: Tensor,
    cast: Cast,
    dim: int = 1,
    *,
    key: int = -77,
    first_row: int = 0,
    fold: Tensor | None = None,
    amax: Tensor | None = None,
) -> Quantized:
    words = random_words(x.shape[0], x.shape[1], torch.tensor(key, dtype=torch.int32), first_row)
    return quantize(x, cast, dim, words=words if cast.rounding == "stochastic" else None, fold=fold, amax=amax)


def theirs(
    x: Tensor, cast: Cast, dim: int, *, fold: Tensor | None = None, amax: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the oracle says, turned as the matrix lies."""
    drawn = uniform(random_words(*x.shape, KEY))
    turned = [v if v is None else (v if dim == 1 else v.t()).contiguous().numpy() for v in (x.float(), drawn, fold)]
    found = oracle.quantize(
        turned[0],
        **asdict(cast),
        uniform=turned[1],
        fold=turned[2],
        amax=None if amax is None else float(amax),
    )
    codes, inner, outer = (torch.from_numpy(np.ascontiguousarray(v)) for v in found)
    return (codes, inner, outer) if dim == 1 else (codes.t(), inner.t(), outer.t())


def agree(x: Tensor, cast: Cast, dim: int, **options: Tensor | None) -> bool:
    found = ours(x, cast, dim, **options)  # type: ignore[arg-type]
    codes, inner, outer = theirs(x, cast, dim, **options)
    one = torch.ones_like(codes)
    return (
        same(found.codes, codes)
        and same(one if found.inner is None else spread(found.inner, x.shape), inner)
        and same(one if found.outer is None else found.outer.expand(x.shape), outer)
    )


def shape_for(cast: Cast) -> tuple[int, int]:
    """A few blocks, or a few rotations."""
    high, wide = cast.block or (1, 16)
    return max(6, high), max(96, 2 * wide)


def matrices(cast: Cast) -> Iterator[tuple[str, Tensor]]:
    """What a cast may meet, ``[rows, contraction]``."""
    shape, row = shape_for(cast), cast.element
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
    own = numbers(cast.format) if row.bits <= 8 else numbers(cast.format)[::97]
    between = torch.cat([own[row.kind == "int" :], (own[1:] + own[:-1]) / 2])
    places = torch.randint(len(between), shape, generator=torch.Generator().manual_seed(1))
    ties = between[places]
    # The end of the format at the start of each group, so that scales are powers of two or next to one.
    high, wide = cast.block or (1, 16)
    ties[::high, ::wide] = row.max if row.bits <= 8 else 1.0
    yield "ties", ties
    yield "scaled ties", ties * random_exponents((shape[0], 1), 30)
    yield "ties under scales that are no powers of two", near_ties(cast, shape, between[places])
    ends = torch.tensor([1.0, 1 - 2.0**-24, 1 + 2.0**-23, 1.0625, 1.125, 1.3, 1.99, 2 - 2.0**-23, 0.75, 2.0 / 3])
    near_end = (ends[torch.arange(shape[0]) % 10][:, None] * x.sign() * min(row.max, 2.0**100)).clone()
    near_end[:, 1::2] *= 0.5
    yield "the format's end", near_end
    bad = x.clone()
    bad[0, 3], bad[-1, -1], bad[shape[0] // 2, shape[1] // 2], bad[2, 5] = math.nan, math.inf, -math.inf, -math.nan
    yield "not finite", bad


def near_ties(cast: Cast, shape: tuple[int, int], ties: Tensor) -> Tensor:
    """Values that fall on ties, or next to them, once divided: here one rounding too many or too few is seen.

    Of two levels, the ratios of largest magnitudes do as well.
    """
    high, wide = cast.block or (1, 16)
    ends = 9 + gaussian(*shape, seed=4).abs()[::high, ::wide]
    own = numbers("float8_e4m3fn")
    own = own[own > 16]
    if cast.scale == "float8_e4m3fn":
        ratios = (own[1:] + own[:-1]) / 2
        ends = (ratios[torch.arange(ends.numel()) % len(ratios)] * 6).view(ends.shape) * (
            0.7 if cast.rotation == "none" else 1
        )
        ends[0, 0] = 2688 * 0.7
    x = torch.ones(shape)
    x[::high, ::wide] = ends
    found = ours(x, cast, amax=torch.full((1, 1), 3.0) if cast.scaling == "delayed" else None)
    scale = torch.ones(1, 1) if found.inner is None else spread(found.inner, x.shape)
    scale = scale if found.outer is None else scale * found.outer
    ways = torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(5)).int()
    x = from_bits((ties * scale).view(torch.int32) + ways)
    x[::high, ::wide] = ends
    return x


@each_dim
@pytest.mark.parametrize("cast", [*CASTS, *UNUSED], ids=str)
def test_codes_and_scales_are_the_oracle_s(cast: Cast, dim: int) -> None:
    """Every kind of matrix; under a delayed scale, one that fits, is too small, is nothing, or is not finite."""
    given = [None] if cast.scaling != "delayed" else [torch.tensor([[v]]) for v in (3.0, 0.1, 0.0, math.inf)]
    for name, matrix in matrices(cast):
        # Transposed, not copied: how a matrix lies must not matter.
        x = matrix if dim == 1 else matrix.t()
        for amax in given:
            assert agree(x, cast, dim, amax=amax), name
    assert same(ours(x.contiguous(), cast, dim, amax=given[0]).codes, ours(x, cast, dim, amax=given[0]).codes)


@each_dim
@pytest.mark.parametrize("cast", [*CASTS, *UNUSED], ids=str)
def test_filled_up_matrices_are_cast_like_ragged_ones(cast: Cast, dim: int) -> None:
    """The oracle cuts the last groups short instead; only a rotation mixes in the zeros that it needs."""
    sides = list(sides_of(cast, dim))
    if cast.rotation != "none":
        sides[dim] = math.lcm(sides[dim], ROTATION_SIZE)
    for shape in [(1, 1), (1, 40), (40, 1), (7, 33), (sides[0] + 1, sides[1] + 2)]:
        x = gaussian(*shape, seed=2)
        filled = padded(x, cast, dim)
        assert filled.shape == tuple(-(-size // side) * side for size, side in zip(shape, sides, strict=True))
        assert filled[: shape[0], : shape[1]].equal(x) and filled.count_nonzero() == x.count_nonzero()
        assert padded(filled, cast, dim) is filled
        found = ours(filled, cast, dim)
        expected = theirs(x if cast.rotation == "none" else filled, cast, dim)
        cut = tuple(slice(size) for size in expected[0].shape)
        assert same(found.codes[cut], expected[0])
        if cast.rotation == "none":
            assert not found.codes[shape[0] :].any() and not found.codes[:, shape[1] :].any()
        if found.inner is not None:
            assert same(spread(found.inner, filled.shape)[cut], expected[1])
        if found.outer is not None:
            assert same(found.outer.expand(filled.shape)[cut], expected[2])


@pytest.mark.parametrize("cast", [*NARROW, *UNUSED], ids=str)
@each_dim
def test_a_fold_is_multiplied_in_first(cast: Cast, dim: int) -> None:
    x = gaussian(*shape_for(cast)) if dim == 1 else gaussian(*shape_for(cast)).t()
    for fold in (gaussian(1, x.shape[1], seed=3).exp(), gaussian(x.shape[0], 1, seed=3).exp()):
        assert agree(x, cast, dim, fold=fold)


@each_narrow
@each_dim
def test_scales_have_the_shape_of_their_groups(cast: Cast, dim: int) -> None:
    x = torch.ones(256, 384)
    found, (high, wide) = ours(x, cast, dim), sides_of(cast, dim)
    assert found.codes.shape == x.shape and found.codes.dtype == torch.float32
    assert (found.inner is None) == (cast.block is None)
    if found.inner is not None:
        assert found.inner.shape == (256 // high, 384 // wide)
    whole = {"row": (256, 1) if dim == 1 else (1, 384), "column": (1, 384) if dim == 1 else (256, 1), "tensor": (1, 1)}
    expected = (1, 1) if cast.scale == "float8_e4m3fn" else whole.get(cast.granularity)
    assert (None if found.outer is None else tuple(found.outer.shape)) == (
        None if cast.scaling == "static" else expected
    )


@each_nearest
@each_dim
def test_codes_are_nearest_to_the_true_quotient(cast: Cast, dim: int) -> None:
    """Without the definition's steps: no number of the format is nearer to value ÷ scale, but for float32's last bits."""
    x = gaussian(*shape_for(cast)) * random_exponents((shape_for(cast)[0], 1), 40)
    x = x if dim == 1 else x.t().contiguous()
    found = ours(x, cast, dim, amax=x.abs().amax().view(1, 1) if cast.scaling == "delayed" else None)
    meant = rotate(x, dim) if cast.rotation != "none" else x
    scale = torch.ones(1, 1, dtype=torch.float64) if found.outer is None else found.outer.double()
    if found.inner is not None:
        scale = scale * spread(found.inner, x.shape).double()
    own = numbers(cast.format).double()
    quotients = (meant.double() / scale).clamp(-cast.element.max, cast.element.max)
    nearest = (quotients[..., None] - own).abs().amin(-1)
    assert ((found.codes.double() - quotients).abs() <= nearest + 2.0**-21 * quotients.abs()).all()


@exhaustive("cast", [cast for cast in NARROW if cast.scale == "float8_e8m0fnu"])
def test_microscaled_blocks_follow_the_ocp_rules(cast: Cast) -> None:
    """OCP MX v1.0, section 6.3, in ml_dtypes' own numbers: nothing is rounded but the elements."""
    x = gaussian(8, 96) * random_exponents((8, 96), 20)
    found = ours(x, Cast(cast.format, cast.granularity, cast.scale))
    blocks = x.view(8, 3, 32).double().numpy()
    largest = np.floor(np.log2(np.abs(blocks).max(2, keepdims=True)))
    dtype = getattr(ml_dtypes, cast.format)
    end = float(ml_dtypes.finfo(dtype).max)
    scale = 2.0 ** (largest - math.floor(math.log2(end)))
    assert found.inner is not None and found.inner.double().equal(torch.from_numpy(scale[..., 0]))
    assert (scale == scale.astype(ml_dtypes.float8_e8m0fnu).astype(float)).all()
    elements = np.clip(blocks / scale, -end, end).astype(dtype).astype(np.float32)
    assert same(found.codes, torch.from_numpy(elements.reshape(8, 96)))


# ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────────


@each_nearest
@each_dim
def test_values_under_their_own_scales_stay(cast: Cast, dim: int) -> None:
    for name, matrix in matrices(cast):
        found = ours(matrix if dim == 1 else matrix.t(), cast, dim)
        scale = torch.ones(1, 1) if found.inner is None else spread(found.inner, found.codes.shape)
        scale = scale if found.outer is None else scale * found.outer
        values = found.values()
        seen = values.isfinite()
        again = round_nearest(values * scale.reciprocal(), cast.element)
        assert same(again[seen], found.codes[seen]), name
        # One level of scales follows from the values again, a power of two or to the last bit; of two levels, the finer one
        # may be another where it is a subnormal e4m3.
        if cast.scale == "float8_e4m3fn" or cast.rotation != "none" or cast.scaling != "current" or not seen.all():
            continue
        anew = ours(values, cast, dim)
        assert same(anew.values(), values) if cast.block else same(anew.codes, found.codes), name


def is_by_rows(cast: Cast) -> bool:
    """Whether what a scale is made from lies in one row."""
    return cast.scaling == "static" or cast.granularity in ("none", "row", "1x32", "1x128") or cast.scaling == "delayed"


@each_cast
@each_dim
def test_rows_depend_on_no_other_row_where_no_scale_is_shared(cast: Cast, dim: int) -> None:
    """One row altered, or half of them left out: the others' bits stay; with a scale for a tensor, column or square, not."""
    high = max(16, (cast.block or (1, 1))[0])
    x, amax = gaussian(2 * high, 256), torch.full((1, 1), 3.0) if cast.scaling == "delayed" else None

    def values(rows: Tensor, first: int = 0) -> Tensor:
        found = ours(rows if dim == 1 else rows.t().contiguous(), cast, dim, first_row=first, amax=amax).values()
        return found if dim == 1 else found.t()

    before = values(x)
    x = torch.cat([x[:1] * 100, x[1:]])
    after = values(x)
    assert not same(after[0], before[0])
    assert same(after[1:], before[1:]) == is_by_rows(cast)
    if cast.scale == "power-of-two":
        assert same(after[high:], before[high:])
    if is_by_rows(cast):
        # Along dim 1 rows keep their words by number; transposed, the first ones have the first words.
        kept, first = (slice(high, None), high) if dim == 1 else (slice(high), 0)
        assert same(values(x[kept], first), after[kept])


@each_narrow
@each_dim
def test_what_is_not_finite_makes_its_group_nan_and_no_other(cast: Cast, dim: int) -> None:
    shape = shape_for(cast)
    high, wide = cast.block or {"row": (1, shape[1]), "column": (shape[0], 1), "tensor": shape}[cast.granularity]
    if cast.scale == "float8_e4m3fn":
        high, wide = shape
    for bad in (math.nan, math.inf, -math.inf):
        x = gaussian(*shape)
        clean = x if dim == 1 else x.t()
        x = x.clone()
        x[3, 70] = bad
        group = torch.zeros(shape, dtype=torch.bool)
        group[3 // high * high :, 70 // wide * wide :][:high, :wide] = True
        given = cast.scaling != "current"
        found = ours(x if dim == 1 else x.t(), cast, dim, amax=torch.ones(1, 1) if cast.scaling == "delayed" else None)
        values = found.values() if dim == 1 else found.values().t()
        if given:
            # A scale from elsewhere does not see what it is for: an infinity is held at the format's end.
            group[:] = False
            group[3, 70] = bad != bad
            assert bad != bad or abs(float(values[3, 70])) == float(found.values().abs().max())
        assert values.isnan().equal(group)
        if not given:
            expected = ours(clean, cast, dim).values()
            assert same(values[~group], (expected if dim == 1 else expected.t())[~group])


def test_codes_that_serve_two_matmuls_are_those_of_both() -> None:
    """What the table says of two casts, shown on a matrix that tells scales apart."""
    x = gaussian(256, 256) * random_exponents((256, 1), 8) * random_exponents((1, 256), 8, seed=1)
    amax = x.abs().amax().view(1, 1)
    served = 0
    for cast in NARROW:
        for other in NARROW:
            if cast.serves(other) or (cast.format == other.format and cast.rounding == other.rounding == "nearest"):
                one, two = (
                    ours(x, c, dim, amax=amax if c.scaling == "delayed" else None) for c, dim in ((cast, 1), (other, 0))
                )
                if cast.serves(other):
                    assert same(one.codes, two.codes) and same(one.values(), two.values())
                    served += 1
                elif cast.granularity in ("row", "1x128", "1x32", "1x16") and cast.granularity == other.granularity:
                    assert not same(one.codes, two.codes)
    assert served >= 5


# ── exactness in bfloat16 ───────────────────────────────────────────────────────────────────────────────────────────


def is_bfloat16(x: Tensor) -> Tensor:
    return x.double() == x.double().bfloat16().double()


@each_narrow
def test_a_code_times_the_scale_of_its_block_is_a_bfloat16(cast: Cast) -> None:
    """Every code and every scale; the product in float64, rounded to nothing narrower than 2^-126."""
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
    # So are all that come of a matrix, whose scales are made of 2^-100 at the least.
    for name, matrix in matrices(cast):
        operand = ours(matrix, cast, amax=torch.full((1, 1), 1e-30) if cast.scaling == "delayed" else None).operand()
        assert is_bfloat16(operand[operand.isfinite()]).all(), name


def test_values_are_bfloat16_where_scales_are_powers_of_two() -> None:
    exact = {}
    for cast in NARROW:
        values = ours(gaussian(128, 256), cast, amax=torch.full((1, 1), 3.0)).values()
        exact[cast] = bool(is_bfloat16(values).all())
    assert exact == {
        cast: cast.scaling == "static" or (cast.block is not None and cast.scale != "float8_e4m3fn") for cast in NARROW
    }


# ── rotation ────────────────────────────────────────────────────────────────────────────────────────────────────────


@each_dim
def test_a_rotation_is_orthogonal_and_its_transpose_undoes_it(dim: int) -> None:
    """Exactly: all entries are ± 1/4, so each sum of 16 squares or of 16 products is."""
    matrix = rotate(torch.eye(ROTATION_SIZE), 1)
    assert matrix.abs().eq(0.25).all() and (matrix @ matrix.t()).equal(torch.eye(ROTATION_SIZE))
    signs = torch.tensor(oracle.SIGNS).float()
    hadamard = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(16)] for i in range(16)])
    assert matrix.equal(signs[:, None] * hadamard / 4)
    x = torch.randint(-8, 9, (48, 64), generator=torch.Generator().manual_seed(0)).float()
    whole = torch.block_diag(*[matrix] * (x.shape[dim] // ROTATION_SIZE))
    turned = rotate(x, dim)
    assert turned.equal(x @ whole if dim == 1 else whole.t() @ x)
    assert (turned @ whole.t() if dim == 1 else whole @ turned).equal(x)


@each_dim
def test_products_of_two_rotated_operands_are_unchanged(dim: int) -> None:
    a, b = gaussian(24, 64), gaussian(40, 64, seed=1)
    turned = [rotate(v if dim == 1 else v.t().contiguous(), dim) for v in (a, b)]
    left, right = (v.double() if dim == 1 else v.double().t() for v in turned)
    off = (left @ right.t() - a.double() @ b.double().t()).abs()
    # Each rotated value is within 4 roundings of its 16 terms' length.
    lengths = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    assert (off <= 2 * 4 * 2.0**-24 * 4 * lengths).all()


@each_dim
def test_an_outlier_is_spread_over_sixteen_places(dim: int) -> None:
    for place in range(32):
        x = torch.zeros(3, 32)
        x[1, place] = 12.0
        found = rotate(x if dim == 1 else x.t().contiguous(), dim)
        found = found if dim == 1 else found.t()
        first = place // 16 * 16
        assert found[1, first : first + 16].abs().eq(3.0).all() and found.count_nonzero() == 16


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────────────


def path(cast: Cast) -> tuple[object, ...]:
    """What of a cast decides the operations; a format decides their constants, and a rotation comes before."""
    return cast.granularity, cast.scale, cast.scaling, cast.rounding, cast.element.kind


def paths_of_blocks() -> list[tuple[Cast, int]]:
    """One cast in blocks for each path, along each dimension that the table's matmuls contract."""
    along_rows = ("output.left", "output.right", "grad_input.left")
    found: dict[tuple[object, ...], tuple[Cast, int]] = {}
    for row in COMPUTES.values():
        for place, cast in row.casts.items():
            if cast.block is not None:
                dim = int(place in along_rows)
                found.setdefault((*path(cast), dim), (cast, dim))
    return list(found.values())


def compiled_equals(function: Callable[..., list[Tensor | None]], *cases: tuple[Tensor, ...]) -> None:
    """Eager and compiled agree, on all shapes with one compilation."""
    torch._dynamo.reset()
    compiled = compile_any_shape(function, "cast_for_a_test")  # type: ignore[arg-type]
    found = [compiled(*cases[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [compiled(*case) for case in cases[1:]]
    for results, case in zip(found, cases, strict=True):
        for one, other in zip(results, function(*case), strict=True):
            assert one is other is None or same(one, other)


def awkward(*shape: int) -> Tensor:
    x = gaussian(*shape) * random_exponents((shape[0], 1), 40)
    x[2], x[5, 7], x[-1, -1] = 0.0, math.nan, math.inf
    return x


def test_compiled_rounding_gives_the_same_bits_for_every_format() -> None:
    """Conversions that are undone at once included, which a compiler would leave out."""
    narrow = [FORMATS[name] for name in FORMATS_USED if FORMATS[name].bits <= 8]

    def rounded(x: Tensor, u: Tensor) -> list[Tensor]:
        nearest = [round_nearest(x, FORMATS[name]) for name in FORMATS_USED]
        return nearest + [round_stochastic(x.clamp(row.min, row.max), row, u) for row in narrow]

    x = torch.cat([neighbours(every_bfloat16()[::7], 1), *(neighbours(numbers(row.name), 1) for row in narrow)])
    u = EVERY_UNIFORM.repeat(4)[: len(x)]
    compiled_equals(rounded, (x, u), (x[:1001], u[:1001]))


@whole
@each_dim
def test_compiled_casts_of_whole_groups_give_the_same_bits(dim: int) -> None:
    kinds = list({path(cast): cast for cast in CASTS if cast.block is None}.values())

    def casts(x: Tensor, amax: Tensor, by_row: Tensor, by_column: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for cast in kinds:
            given = amax if cast.scaling == "delayed" else None
            found += quantize_whole(x, cast, dim, (by_row, by_column), amax=given)
        return found

    amax = torch.tensor([[2.0]])
    compiled_equals(casts, *[(awkward(*shape), amax, *random_words(*shape, KEY)) for shape in [(130, 70), (40, 333)]])


@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=whole)])
def test_compiled_casts_in_blocks_give_the_same_bits(dim: int) -> None:
    """All in one function: a compilation of each took as long as of all."""
    kinds = [cast for cast, of in paths_of_blocks() if of == dim]

    def cast_blocks(*given: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for place, cast in enumerate(kinds):
            x, by_row, by_column = given[3 * place : 3 * place + 3]
            found += quantize_blocks(x, cast, (by_row, by_column))
        return found

    cases: list[tuple[Tensor, ...]] = []
    # No side of a block equals a number of blocks: the compiler would take the two for one.
    for shape in ((384, 640), (640, 384)):
        words, given = random_words(*shape, KEY), list[Tensor]()
        for high, wide in (sides_of(cast, dim) for cast in kinds):
            given += [blocked(awkward(*shape), (high, wide))]
            given += [blocked(words[0], (high, 1)), blocked(words[1], (1, wide))]
        cases.append(tuple(given))
    assert len(kinds) > 3
    compiled_equals(cast_blocks, *cases)


@whole
def test_a_compiled_rotation_gives_the_same_bits() -> None:
    compiled_equals(lambda x: [rotate(x, 0), rotate(x, 1)], (awkward(48, 96),), (awkward(64, 32),))


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_refused() -> None:
    stochastic, blocks = STOCHASTIC[0], next(cast for cast in NEAREST if cast.block)
    with pytest.raises(FormatError, match="without random words") as caught:
        quantize(torch.ones(16, 16), stochastic)
    assert "random_words" in caught.value.advice
    with pytest.raises(FormatError, match="1 × 33 was to be cut into blocks") as caught:
        quantize(torch.ones(1, 33), blocks)
    assert "padded" in caught.value.advice
    with pytest.raises(FormatError, match="4 × 24 was to be rotated by 16 places along dim 1"):
        rotate(torch.ones(4, 24), 1)
