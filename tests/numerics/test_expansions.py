"""Expansions: roundings against torch's casts, sums and products against exact rationals, bounds asserted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from covering import whole
from narrowgauge.errors import FormatError
from narrowgauge.numerics import rounding
from narrowgauge.numerics.expansions import (
    Expansion,
    NearestEven,
    Parts,
    add,
    div,
    expansion_of,
    fast_two_sum,
    grow,
    mul,
    nearest_even,
    nearest_even_bits,
    negative,
    renormalise,
    scale,
    sqrt,
    square_root,
    two_prod,
    two_sum,
)
from narrowgauge.numerics.rounding import MAGNITUDE, QUIET_NAN, bits_of, float_of, round_to
from oracles import rational_expansions as oracle
from oracles import released_collage as narrow
from oracles.minifloat import Grid

FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2")
BFLOAT16 = nearest_even("bfloat16")


def cast(x: Tensor, name: str) -> Tensor:
    return x.to(getattr(torch, name)).float()


def lists(parts: Sequence[Tensor]) -> list[list[float]]:
    return [part.tolist() for part in parts]


def exact(parts: Sequence[Tensor]) -> list[Fraction]:
    return oracle.values(lists(parts))


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


# ── roundings ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def dense() -> Tensor:
    """A million float32 a prime stride apart; every 16-bit prefix with its tie and the values beside the tie."""
    strided = np.arange(0, 2**32, 4093, dtype=np.int64)
    prefixes = np.arange(2**16, dtype=np.int64) * 2**16
    ties = (prefixes[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])).ravel()
    finer = np.concatenate([prefixes[:, None] + d for d in (0x1000, 0x0FFF, 0x1001, 0x3000)]).ravel()
    words = np.concatenate([strided, ties, finer]).astype(np.uint32).view(np.int32)
    return float_of(torch.from_numpy(words))


@pytest.mark.parametrize("name", FORMATS)
def test_nearest_even_is_torchs_cast_bit_for_bit(dense: Tensor, name: str) -> None:
    found, expected = nearest_even(name)(dense), cast(dense, name)
    if name == "float8_e4m3fn":
        # What does not fit is NaN here, as everywhere in this package; torch's cast holds it at 448 since a late release.
        expected = torch.where(dense.abs() > 464, math.nan, expected)
    nan = expected.isnan()
    assert nan.sum() > 1000 and torch.equal(found.isnan(), nan)
    assert same_bits(found[~nan], expected[~nan])
    assert (bits_of(found[nan]) & MAGNITUDE == QUIET_NAN).all()
    assert same_bits(nearest_even(name)(found[~nan]), found[~nan])
    assert same_bits(found[~nan], round_to(dense, name)[~nan]) and torch.equal(round_to(dense, name).isnan(), nan)


@pytest.mark.parametrize("name", FORMATS)
def test_a_promise_about_nans_changes_only_nans_with_long_payloads(dense: Tensor, name: str) -> None:
    found, expected = nearest_even(name, quiet=True)(dense), nearest_even(name)(dense)
    numbers = ~dense.isnan()
    assert same_bits(found[numbers], expected[numbers])
    short = float_of(torch.tensor([0x7FC00000, 0xFFC00000 - 2**32, 0x7FFF0000, 0xFFFF0000 - 2**32], dtype=torch.int32))
    assert nearest_even(name, quiet=True)(short).isnan().all()


def test_a_cut_of_bits_keeps_float32s_exponents() -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for dropped, name in ((16, "bfloat16"), (13, "float16"), (20, "float8_e4m3fn"), (21, "float8_e5m2")):
        rn = nearest_even_bits(dropped)
        inside = x[(x.abs() > 2.0**-6)]
        assert same_bits(rn(inside), nearest_even(name)(inside))
        for power in (-100, -20, 20, 100):
            assert same_bits(rn(x * 2.0**power), rn(x) * 2.0**power)
    assert nearest_even_bits(20)(torch.tensor([math.inf, -math.inf, 3.4e38])).tolist() == [
        math.inf,
        -math.inf,
        math.inf,
    ]


def test_float32_is_not_rounded(dense: Tensor) -> None:
    assert nearest_even("float32")(dense) is dense and nearest_even_bits(0)(dense) is dense


def test_what_cannot_be_a_part_is_refused() -> None:
    for name in ("float64", "int8", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn"):
        with pytest.raises(FormatError, match=name):
            nearest_even(name)
    for dropped in (1, 12, 22, -1):
        with pytest.raises(FormatError, match=f"{dropped} bits"):
            nearest_even_bits(dropped)


# ── sums and products of two ────────────────────────────────────────────────────────────────────────────────────────


def every_pair(name: str) -> tuple[Tensor, Tensor]:
    """All pairs of finite values of an 8-bit format."""
    codes = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).float()
    finite = codes[codes.isfinite()]
    return tuple(side.clone() for side in torch.cartesian_prod(finite, finite).unbind(1))  # type: ignore[return-value]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_two_sum_is_exact_for_all_pairs(name: str) -> None:
    rn, grid, (a, b) = nearest_even(name), Grid(name), every_pair(name)
    s, e = two_sum(a, b, rn)
    fits = s.abs() <= float(grid.max)
    assert fits.sum() > 0.9 * len(a) > 50_000
    a, b, s, e = a[fits], b[fits], s[fits], e[fits]
    sums = exact((a, b))
    assert exact((s, e)) == sums
    assert torch.equal(rn(e), e)
    nearest = {total: grid.nearest(float(total)) for total in set(sums)}
    assert s.tolist() == [nearest[total] for total in sums]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_fast_two_sum_is_two_sum_where_the_first_is_not_the_smaller(name: str) -> None:
    rn, (a, b) = nearest_even(name), every_pair(name)
    # By exponents, which says more than by magnitudes; below the smallest normal all have one exponent.
    exponent = [x.abs().clamp(min=2.0**-6 if name == "float8_e4m3fn" else 2.0**-14).frexp().exponent for x in (a, b)]
    allowed = ((exponent[0] >= exponent[1]) | (a == 0)) & ((a + b).abs() <= float(Grid(name).max))
    assert allowed.sum() > 30_000
    s, e = fast_two_sum(a[allowed], b[allowed], rn)
    assert exact((s, e)) == exact((a[allowed], b[allowed]))
    assert all(map(torch.equal, (s, e), two_sum(a[allowed], b[allowed], rn)))


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_two_prod_is_exact_for_all_pairs(name: str) -> None:
    a, b = every_pair(name)
    products = [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    unbounded = nearest_even_bits(nearest_even(name).dropped)
    assert exact(two_prod(a, b, unbounded)) == products
    # In the format itself: wherever the error is not finer than its smallest value.
    rn, finest, largest = nearest_even(name), Grid(name).magnitudes[1], Grid(name).max
    p, e = two_prod(a, b, rn)
    fits = [i for i, x in enumerate(products) if abs(x) <= largest and (x / finest).denominator == 1]
    assert len(fits) > 12_000
    found = exact((p[fits], e[fits]))
    assert found == [products[i] for i in fits]
    assert torch.equal(rn(e[fits]), e[fits])


@pytest.mark.parametrize("dropped", [0, 13, 16, 20])
def test_two_sum_and_two_prod_at_any_distance(dropped: int) -> None:
    rn, generator = nearest_even_bits(dropped), torch.Generator().manual_seed(dropped)
    a = rn(torch.randn(20_000, generator=generator))
    b = rn(torch.randn(20_000, generator=generator) * 2.0 ** torch.randint(-45, 46, (20_000,), generator=generator))
    assert exact(two_sum(a, b, rn)) == exact((a, b)) == exact(two_sum(b, a, rn))
    p, e = two_prod(a, b, rn)
    assert exact((p, e)) == [Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert torch.equal(rn(p), p) and torch.equal(rn(e), e)


# ── the same bits as torch's narrow operations ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_eager_narrow_tensors_give_the_same_bits(name: str) -> None:
    dtype, rn, generator = getattr(torch, name), nearest_even(name), torch.Generator().manual_seed(3)
    wide = torch.randn(4, 50_000, generator=generator) * 2.0 ** torch.randint(-5, 6, (4, 50_000), generator=generator)
    x, y = expansion_of(wide[0], 2, rn), expansion_of(wide[1], 2, rn)
    a, b = rn(wide[2]), rn(wide[3])
    nx, ny, na, nb = (tuple(part.to(dtype) for part in parts) for parts in (x, y, (a,), (b,)))
    pairs: list[tuple[Parts, Parts]] = [
        ((rn(a + b), rn(a * b), rn(a / b), rn(a - b)), (na[0] + nb[0], na[0] * nb[0], na[0] / nb[0], na[0] - nb[0])),
        ((rn(rounding.sqrt(a.abs())),), (na[0].abs().sqrt(),)),
        (two_sum(a, b, rn), narrow.two_sum(na[0], nb[0])),
        (two_prod(a, b, rn), narrow.two_prod(na[0], nb[0])),
        (grow(x, a, rn), narrow.grow(nx, na[0])),
        (mul(x, y, rn), narrow.mul(nx, ny)),
        (scale(x, a, rn), narrow.scale(nx, na[0])),
        (add(x, y, rn), narrow.add(nx, ny)),
    ]
    for place, (ours, eager) in enumerate(pairs):
        for found, expected in zip(ours, eager, strict=True):
            assert expected.dtype is dtype
            # Zeros compare equal whatever their sign: an error of nothing.
            assert torch.equal(found, expected.float()), place


# ── bounds against exact rationals ──────────────────────────────────────────────────────────────────────────────────

PRECISIONS = {"bfloat16": 16, "float16": 13, "float8_e4m3fn": 20}


def samples(rn: NearestEven, length: int, seed: int, count: int = 1200) -> Parts:
    """Expansions of all kinds: near powers of two, with largest, zero or far smaller later parts."""
    generator = torch.Generator().manual_seed(seed)
    u = 2.0 ** -(24 - rn.dropped)
    power = 2.0 ** torch.randint(-6, 7, (count,), generator=generator)
    x = torch.randn(count, dtype=torch.float64, generator=generator) * power
    near = power * (1 + (torch.rand(count, dtype=torch.float64, generator=generator) - 0.5) * 4 * u)
    x = torch.where(torch.rand(count, generator=generator) < 0.3, x.sign() * near, x)
    parts = list(expansion_of(x, length, rn))
    for i in range(1, length):
        half = parts[i - 1].frexp().exponent.float().exp2() * u / 2 * torch.randn(count, generator=generator).sign()
        kind = torch.randint(0, 10, (count,), generator=generator)
        for case, value in enumerate((half, rn(half * (1 - 2 * u)), 0 * half, rn(half * 2.0**-9))):
            parts[i] = torch.where(kind == case, value, parts[i])
    return renormalise(parts, length, rn) if length > 1 else tuple(parts)


def cancelling(x: Parts, rn: NearestEven, seed: int) -> Parts:
    """Nearly -x: one part some spacings off, those after it unlike."""
    generator = torch.Generator().manual_seed(seed)
    count = len(x[0])
    place = torch.randint(0, len(x), (count,), generator=generator)
    parts = []
    for i, part in enumerate(negative(x)):
        spacing = part.frexp().exponent.float().exp2() * 2.0 ** -(24 - rn.dropped)
        off = rn(part + spacing * torch.randint(-2, 3, (count,), generator=generator))
        unlike = rn(part * torch.randn(count, generator=generator))
        parts.append(torch.where(place == i, off, torch.where(place < i, unlike, part)))
    return renormalise(parts, len(x), rn) if len(x) > 1 else tuple(parts)


Case = Callable[[Parts, Parts, Parts, NearestEven], tuple[Parts, list[Fraction]]]


def _pairwise(operation: Callable[[Fraction, Fraction], Fraction], x: Parts, y: Parts) -> list[Fraction]:
    return [operation(a, b) for a, b in zip(exact(x), exact(y), strict=True)]


# name: (what is computed and what it should be, from x, y and one near -x; bound for pairs, for triples, in u^length).
CASES: dict[str, tuple[Case, float, float]] = {
    "grow": (lambda x, y, z, rn: (grow(x, y[0], rn), _pairwise(Fraction.__add__, x, y[:1])), 2, 4),
    "grow, cancelling": (lambda x, y, z, rn: (grow(x, z[0], rn), _pairwise(Fraction.__add__, x, z[:1])), 2, 4),
    "add": (lambda x, y, z, rn: (add(x, y, rn), _pairwise(Fraction.__add__, x, y)), 3, 3),
    "scale": (lambda x, y, z, rn: (scale(x, y[0], rn), _pairwise(Fraction.__mul__, x, y[:1])), 3, 4),
    "mul": (lambda x, y, z, rn: (mul(x, y, rn), _pairwise(Fraction.__mul__, x, y)), 5, 8),
    "mul by a pair": (lambda x, y, z, rn: (mul(x, y[:2], rn), _pairwise(Fraction.__mul__, x, y[:2])), 5, 8),
    "div": (lambda x, y, z, rn: (div(x, y, rn), _pairwise(Fraction.__truediv__, x, y)), 15, 24),
    "div of a part": (lambda x, y, z, rn: (div(x[:1], y, rn), _pairwise(Fraction.__truediv__, x[:1], y)), 15, 24),
    "div by a part": (lambda x, y, z, rn: (div(x, y[:1], rn), _pairwise(Fraction.__truediv__, x, y[:1])), 15, 24),
}


def nonzero(x: Parts) -> Parts:
    """The expansions that are not zero: coarse ones near a power of two may cancel."""
    return tuple(torch.where(x[0] == 0, float(i == 0), part) for i, part in enumerate(x))


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_error_is_within_the_stated_bound(name: str, precision: str, length: int) -> None:
    rn = nearest_even_bits(PRECISIONS[precision])
    p = 24 - rn.dropped
    x, y = nonzero(samples(rn, length, 1)), nonzero(samples(rn, length, 2))
    case, *bounds = CASES[name]
    result, expected = case(x, y, cancelling(x, rn, 3), rn)
    assert len(result) == length
    bound = bounds[length - 2] / (1 - 4 * 2.0**-p if name == "add" else 1)
    error = oracle.worst(exact(result), expected)
    assert error <= bound * Fraction(1, 2 ** (p * length)), float(error * 2 ** (p * length))
    assert oracle.separated(lists(result), p)
    assert all(torch.equal(rn(part), part) for part in result)
    # The bound is not so wide that a result of one part less would pass, but where 24u is more than 1.
    assert p < 8 or oracle.worst(exact(result[:-1]), expected) > bound * Fraction(1, 2 ** (p * length))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sums_that_cancel(precision: str) -> None:
    """Pairs keep their relative bound whatever cancels; triples have one relative to the summands."""
    rn = nearest_even_bits(PRECISIONS[precision])
    p = 24 - rn.dropped
    for length, bound in ((2, 3 / (1 - 4 * 2.0**-p)), (3, 1.0)):
        x = samples(rn, length, 4, 3000)
        y = cancelling(x, rn, 5)
        result, expected = add(x, y, rn), _pairwise(Fraction.__add__, x, y)
        sizes = [abs(a) + abs(b) for a, b in zip(exact(x), exact(y), strict=True)] if length == 3 else None
        cancelled = sum(abs(e) < abs(a) * 2.0**-p for e, a in zip(expected, exact(x), strict=True))
        assert cancelled > 500
        assert oracle.worst(exact(result), expected, sizes) <= bound * Fraction(1, 2 ** (p * length))
        assert oracle.separated(lists(result), p)


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_square_root_is_within_its_bound(precision: str, length: int) -> None:
    rn = nearest_even_bits(PRECISIONS[precision])
    x = nonzero(samples(rn, length, 6))
    x = tuple(torch.where(x[0] < 0, -part, part) for part in x)
    root = square_root(x, rn)
    # The square's relative error is twice the root's, and a little.
    squares = [value * value for value in exact(root)]
    bound = {2: 6, 3: 12}[length] * Fraction(1, 2 ** ((24 - rn.dropped) * length))
    assert oracle.worst(squares, exact(x)) <= 2 * bound + bound**2
    zero = square_root(tuple(torch.zeros(2) for _ in range(length)), rn)
    assert all(torch.equal(part, torch.zeros(2)) for part in zero)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_grow_of_pairs_in_the_format_itself(name: str) -> None:
    """Not only in its precision: float16's own range is enough for pairs of numbers about 1 and more."""
    rn = nearest_even(name)
    p = 24 - rn.dropped
    x = tuple(part * 64 for part in samples(nearest_even_bits(rn.dropped), 2, 7))
    y = rn(samples(nearest_even_bits(rn.dropped), 2, 8)[0] * 64)
    result = grow(x, y, rn)
    assert oracle.worst(exact(result), _pairwise(Fraction.__add__, x, (y,))) <= 2 * Fraction(1, 4**p)


def test_renormalise_is_exact_and_separates_overlapping_terms() -> None:
    rn, generator = BFLOAT16, torch.Generator().manual_seed(9)
    terms = [rn(torch.randn(3000, generator=generator) * 2.0 ** (-5 * i)) for i in range(4)]
    for count in (2, 3, 4):
        some = sorted_by_exponent(terms[:count])
        result = renormalise(some, count, rn)
        assert exact(result) == exact(some)
        assert oracle.separated(lists(result), 8)
        shorter = renormalise(some, count - 1, rn)
        assert len(shorter) == count - 1
        assert oracle.worst(exact(shorter), exact(some)) <= Fraction(1, 2 ** (8 * (count - 1)))


def sorted_by_exponent(terms: list[Tensor]) -> list[Tensor]:
    """Larger first, element by element."""
    stacked = torch.stack(terms)
    order = stacked.abs().argsort(dim=0, descending=True)
    return list(stacked.gather(0, order))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_expansion_of_is_exact_where_it_can_be(length: int) -> None:
    rn = BFLOAT16
    x = torch.randn(3000, generator=torch.Generator().manual_seed(10))
    parts = expansion_of(x, length, rn)
    error = oracle.worst(exact(parts), exact((x,)))
    assert error <= Fraction(1, 2 ** (8 * length)) and (error == 0 or length < 4)
    assert oracle.separated(lists(parts), 8)
    short = rn(x)
    assert torch.equal(expansion_of(short, length, rn)[0], short)
    number = expansion_of(0.999, length, rn)
    assert abs(sum(Fraction(part.item()) for part in number) - Fraction(0.999)) <= Fraction(1, 2 ** (8 * length))
    assert [part.item() for part in number[:1]] == [1.0]


# ── operators ───────────────────────────────────────────────────────────────────────────────────────────────────────


def average_and_root(x, y, c):  # type: ignore[no-untyped-def]
    """What an update rule may do: runs on tensors, numbers and expansions alike."""
    mean = x + (y - x) * c
    return (1.5 - mean) / (sqrt(abs(y) * c + 0.25) + 1.0) - 2.0 * x / 3.0 + 1.0 / (y * y + 1.0)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_rule_written_for_tensors_runs_on_expansions(length: int) -> None:
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(2000, generator=generator, dtype=torch.float64) for _ in range(2))
    ex, ey = (Expansion(expansion_of(v, length, BFLOAT16), BFLOAT16) for v in (x, y))
    c = torch.tensor(0.1)
    result = average_and_root(ex, ey, c)
    assert isinstance(result, Expansion) and len(result) == length
    mean = x + (y - x) * c.double()
    expected = (1.5 - mean) / ((y.abs() * c.double() + 0.25).sqrt() + 1.0) - 2.0 * x / 3.0 + 1.0 / (y * y + 1.0)
    error = (sum(part.double() for part in result.parts) - expected).abs().max().item()
    assert error < 60 * 2.0 ** (-8 * length)


def test_single_parts_are_eager_bfloat16_tensors() -> None:
    """Of numbers beside tensors: eager products on a CPU take them as float32, as ours do; its sums round them first."""
    generator = torch.Generator().manual_seed(12)
    x, y = (torch.randn(20_000, generator=generator).bfloat16() for _ in range(2))
    ex, ey = (Expansion((v.float(),), BFLOAT16) for v in (x, y))
    for found, expected in (
        (ex + ey, x + y),
        (ex - 0.3125, x - 0.3125),
        (0.3125 - ex, 0.3125 - x),
        (ex * 0.1, x * 0.1),
        (torch.tensor(0.1) * ex, 0.1 * x),
        (ex / ey, x / y),
        (ex / 0.3, x / 0.3),
        (-abs(ex), -abs(x)),
        (ex.sign(), x.sign()),
        (ex + (ey - ex) * 0.1, x + (y - x) * 0.1),
        (sqrt(abs(ex)), x.abs().sqrt()),
    ):
        assert same_bits(found.parts[0], expected.float())
    wide = x.float()
    assert same_bits((ex + 0.3).value, cast(wide + 0.3, "bfloat16"))
    assert same_bits((0.3 / ex).value, cast(torch.full_like(wide, 0.3) / wide, "bfloat16"))
    assert same_bits(sqrt(wide.abs()), rounding.sqrt(wide.abs()))


def test_a_result_is_as_long_as_the_longer_operand() -> None:
    def one(length: int) -> Expansion:
        return Expansion(expansion_of(torch.tensor([1.1, 2.3]), length, BFLOAT16), BFLOAT16)

    for a, b in itertools.product((1, 2, 3), repeat=2):
        for result in (one(a) + one(b), one(a) - one(b), one(a) * one(b), one(a) / one(b)):
            assert len(result) == max(a, b)
    assert all(len(sqrt(one(n))) == len(-one(n)) == len(abs(one(n))) == len(2.0 - one(n)) == n for n in (1, 2, 3))
    assert len(one(3).sign()) == 1


def test_a_scalar_beside_a_pair_is_split() -> None:
    """0.999 is 1 in bfloat16; the pair's product must know better, and the single part's must round once."""
    pair = Expansion(expansion_of(torch.tensor([1.0, 1.5]), 2, BFLOAT16), BFLOAT16)
    for product in (pair * 0.999, torch.tensor(0.999) * pair):
        assert (product.value - torch.tensor([0.999, 1.4985])).abs().max() < 2.0**-16
    many = Expansion(
        expansion_of(torch.randn(2000, generator=torch.Generator().manual_seed(14)), 2, BFLOAT16), BFLOAT16
    )
    split = expansion_of(0.999, 2, BFLOAT16)
    for found, expected in (
        ((many * 0.999), mul(many.parts, split, BFLOAT16)),
        ((many + torch.tensor(0.999)), add(many.parts, expansion_of(torch.tensor(0.999), 2, BFLOAT16), BFLOAT16)),
        ((0.999 / many), div(split, many.parts, BFLOAT16)),
    ):
        assert all(map(torch.equal, found.parts, expected))
    single = Expansion((torch.tensor([1.5]),), BFLOAT16)
    assert (single * 0.999).value.item() == BFLOAT16(torch.tensor(1.4985)).item()
    assert (abs(-pair).value == pair.value).all() and (abs(pair).value == pair.value).all()


# ── compiled ────────────────────────────────────────────────────────────────────────────────────────────────────────


@whole
def test_compiled_is_eager_bit_for_bit() -> None:
    rn = nearest_even("bfloat16")

    def step(high: Tensor, low: Tensor, a: Tensor, beta: Tensor) -> Parts:
        return grow(mul((high, low), expansion_of(beta, 2, rn), rn), a, rn)

    generator = torch.Generator().manual_seed(13)
    high, low = expansion_of(torch.randn(4096, generator=generator), 2, rn)
    a, beta = rn(torch.randn(4096, generator=generator) * 1e-3), torch.tensor(0.999)
    eager = step(high, low, a, beta)
    compiled = torch.compile(step, fullgraph=True, dynamic=False)(high, low, a, beta)
    assert all(map(same_bits, eager, compiled))
    assert (eager[1] != 0).float().mean() > 0.95
