"""Every code of every storage, value by value and relative to its row, and what a weight is cut
into.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import bits_of, float_of, quiet
from narrowgauge.optim import codes, extras
from narrowgauge.optim.planes import dropped_bits
from narrowgauge.spec.storages import STORAGES, Code, Storage
from optim.scenarios import shifts as shifts_in_planes
from oracles import codes as oracle
from tables import exhaustive
from tensors import unsigned

# The parts of an expansion are coded one by one: here each stands for itself.
IN_TABLES = {
    replace(code, parts=1)
    for row in STORAGES.values()
    for code in (row.weight, row.exp_avg, row.exp_avg_sq)
}
OTHERS = {
    Code("e4m3", 4, 3, lowest=-6),
    Code("e5m2, unsigned, held", 5, 2, signed=False, lowest=-14, hold=True),
    Code("e2m1", 2, 1, lowest=0),
    Code("e7m8", 7, 8, lowest=-100),
    Code("e8m3", 8, 3),
    Code("e8m4, unsigned", 8, 4, signed=False),
}
ALL = sorted({replace(c, name=c.name.split(" ")[0]) for c in IN_TABLES} | OTHERS, key=repr)
SHORT = [c for c in ALL if c.bits <= 16]
WINDOWS = [c for c in ALL if c.is_window]
SCALED = [c for c in ALL if c.scaled]


def shifts(code: Code) -> list[int]:
    """Places in a word: both ends, and some between."""
    last = 32 - code.bits
    return sorted({0, min(1, last), min(8, last), last // 2, last})


@lru_cache
def values_of(code: Code) -> oracle.Floats:
    """The finite magnitudes of a code."""
    magnitudes = oracle.magnitudes(code.exponent_bits, code.mantissa_bits, code.lowest)
    return np.array([float(m) for m in magnitudes])


def as_int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words % 2**32).astype(np.uint32).view(np.int32))


def every_code(code: Code) -> oracle.Integers:
    """Every finite code, the negative ones after the positive ones, -0 first among them."""
    steps = np.arange(len(values_of(code)), dtype=np.int64)
    return np.concatenate([steps, steps + 2 ** (code.bits - 1)]) if code.signed else steps


@exhaustive("code", SHORT)
def test_decode_reads_the_listed_values_whatever_else_the_word_holds(code: Code) -> None:
    values = values_of(code)
    expected = np.concatenate([values, -values]) if code.signed else values
    for shift in shifts(code):
        garbage = np.random.default_rng(shift).integers(0, 2**32, len(expected)) & ~(
            (2**code.bits - 1) * 2**shift
        )
        result = codes.decode(code, as_int32(every_code(code) * 2**shift | garbage), shift).numpy()
        assert np.array_equal(result.astype(np.float64), expected)
        assert np.array_equal(np.signbit(result), np.signbit(expected))


@exhaustive("code", SHORT)
def test_encode_takes_the_nearest_listed_value_and_ties_to_even(code: Code) -> None:
    values = values_of(code)
    middles = (values[1:] + values[:-1]) / 2
    gaps = np.diff(values)
    # 2^-7 of a step beside the tie: a subnormal of float32, which scaled values may be, still tells
    # them apart.
    x = np.concatenate([values, middles, middles - gaps / 128, middles + gaps / 128])
    x = x[x == x.astype(np.float32)]
    assert len(x) > 3 * len(values_of(code)) or code.exponent_bits == 8
    steps = oracle.nearest_steps(values, x)
    expected = np.maximum(steps, (x > 0).astype(np.int64)) if code.hold else steps
    addend = None
    positive = torch.from_numpy(x.astype(np.float32))
    assert np.array_equal(unsigned(codes.encode(code, positive, addend, 0)), expected)
    if code.signed:
        assert np.array_equal(
            unsigned(codes.encode(code, -positive, addend, 0)), steps + 2 ** (code.bits - 1)
        )


NANS = [0x7FC00000, 0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FFF0000, 0x7FFF7FFF, 0x7FFFFFFF]


def every_nan() -> Tensor:
    """Float32 NaNs of several payloads and both signs, the quiet positive one first."""
    return float_of(as_int32(np.array([*NANS, *(bits + 2**31 for bits in NANS)])))


@exhaustive("code", ALL)
def test_every_nan_is_cut_to_the_same_bits(code: Code) -> None:
    """Of a window, which has none, to its largest value."""
    scales = [None, torch.tensor(2.0**-7), torch.tensor(2.0**126)] if code.is_window else [None]
    for shift in shifts(code):
        for addend in (0, None, 2 ** dropped_bits(code) - 1):
            for scale in scales:
                words = codes.encode(code, every_nan(), addend, shift, scale)
                assert (words == words[0]).all()
                value = codes.decode(code, words[:1], shift)
                assert not value.signbit()
                assert value == values_of(code)[-1] if code.is_window else value.isnan()


@exhaustive("code", WINDOWS)
def test_a_window_saturates_and_has_subnormals(code: Code) -> None:
    largest = 2.0**code.highest * (2 - 2.0**-code.mantissa_bits)
    smallest = 2.0 ** (code.lowest - code.mantissa_bits)
    x = torch.tensor(
        [
            largest,
            largest * 1.5,
            2.0**127,
            math.inf,
            smallest,
            2.0**code.lowest,
            1.5 * smallest,
            0.75 * smallest,
        ]
    )
    for addend in (None, 2 ** dropped_bits(code) - 1):
        result = codes.decode(code, codes.encode(code, x, addend, 0), 0)
        assert result.tolist() == [
            *[largest] * 4,
            smallest,
            2.0**code.lowest,
            2 * smallest,
            smallest,
        ]


@exhaustive("code", [c for c in WINDOWS if c.rounding == "stochastic"])
@exhaustive("where", [0.3, 1.0, 1.7e3])
def test_the_mean_over_all_addends_is_the_value(code: Code, where: float) -> None:
    """A count over every addend there is, not a sample; also among the subnormals."""
    dropped = dropped_bits(code)
    value = torch.tensor(where * 2.0**code.lowest).expand(1 << dropped)
    every = torch.arange(1 << dropped, dtype=torch.int32)
    mean = float(codes.decode(code, codes.encode(code, value, every, 0), 0).double().mean())
    assert mean == pytest.approx(float(value[0]), rel=2.0**-20)


# ── relative to a row ─────────────────────────────────────────────────────────────────────────────

BOUNDS = [2.0**-100, 1e-3, 1 - 2.0**-24, 1.0, 1 + 2.0**-23, 448.0, 2.0**20, 2.0**80]


def above(bound: float) -> float:
    """The smallest power of two that is not below."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


@exhaustive("code", SCALED)
@exhaustive("bound", BOUNDS)
def test_nothing_up_to_its_bound_saturates_and_all_beyond_the_window_does(
    code: Code, bound: float
) -> None:
    into, back = codes.multipliers(torch.tensor(bound))
    window = above(bound) * (2 - 2.0**-code.mantissa_bits)
    x = torch.tensor(
        [bound, above(bound) * 1.7, window, window * 1.5, window * 1e10, math.inf, math.nan]
    )
    for addend in (0, None, 2 ** dropped_bits(code) - 1):
        decoded = codes.decode(code, codes.encode(code, x, addend, 0, into), 0, back).tolist()
        assert abs(decoded[0] - bound) <= bound * 2.0**-code.mantissa_bits and decoded[0] < window
        assert decoded[1] <= window and decoded[2:] == [window] * 5


@exhaustive("code", [c for c in SCALED if c.hold])
@exhaustive("bound", [2.0**-149, 1e-40, *BOUNDS, 1e38])
def test_hold_keeps_every_positive_value_of_a_row_above_zero(code: Code, bound: float) -> None:
    into, back = codes.multipliers(torch.tensor(bound))
    x = torch.tensor([2.0**-149, 2.0**-126, 1e-30, 1e-10, 1.0, 1e30])
    for addend in (0, None):
        steps = codes.encode(code, x, addend, 0, into)
        assert (steps > 0).all()
        # What a float32 can say of them, of rows whose largest is above 2^-100.
        assert bound < 2.0**-100 or (codes.decode(code, steps, 0, back) > 0).all()
        zeros = codes.encode(code, torch.tensor([0.0, -0.0]), addend, 0, into)
        assert not codes.decode(code, zeros, 0, back).any()


# ── weights ───────────────────────────────────────────────────────────────────────────────────────

WHOLE = [r for r in STORAGES.values() if r.master or r.weight.parts == 1]
IN_BFLOAT16 = [row for row in WHOLE if row.visible != "float16"]
IN_FLOAT16 = [row for row in WHOLE if row.visible == "float16"]


def patterns() -> Tensor:
    special = np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000]
    )
    every = np.arange(0, 2**32, 16381, dtype=np.int64)
    strided = np.concatenate([every, np.arange(2**16) * 2**16, special, special + oracle.SIGN])
    return quiet(float_of(as_int32(strided)))


def through_words(storage: Storage, x: Tensor, addend: int | None) -> tuple[Tensor, Tensor]:
    """Return the visible bits of weights, and the weights read among other bits of their words."""
    nothing = torch.zeros_like(x, dtype=torch.int32)
    fields = {}
    for name, shift in shifts_in_planes(storage).items():
        fields[name] = nothing, shift
    lane = codes.Lane(nothing, nothing.float(), fields, {})
    seen, written = codes.write_weight(storage, lane, x, addend)
    for name, bits in written.items():
        shift = fields[name][1]
        mask = (2**storage.tail_bits - 1) * 2**shift
        if storage.tail_bits:
            assert not (unsigned(bits) & ~mask).any()
            garbage = np.random.default_rng(shift).integers(0, 2**32, len(bits)) & ~mask
            bits = bits | as_int32(garbage)
        fields[name] = bits, shift
    return seen, codes.read_weight(storage, replace(lane, visible=seen))


@exhaustive("storage", IN_BFLOAT16)
def test_a_weight_is_seen_as_the_nearest_and_kept_whole(storage: Storage) -> None:
    x = patterns()
    dropped = dropped_bits(storage.weight)
    finite = ~x.isnan().numpy()
    for addend in (None, 0, 2**dropped - 1):
        seen, read = through_words(storage, x, addend)
        assert np.array_equal(x.isnan(), read.isnan())
        assert np.array_equal(x.isnan(), float_of(seen).isnan())
        exact = unsigned(bits_of(x))[finite]
        stored = oracle.cut(exact, dropped, addend) if dropped else exact
        # Float64 holds these values too.
        assert np.array_equal(unsigned(bits_of(read.float()))[finite], stored)
        # A tie goes up where more is kept: a tail has no room for both ends of a cell.
        addend_of_tie = 2**15 if storage.beside else None
        visible = stored
        if storage.visible == "bfloat16":
            visible = oracle.cut(stored, 16, addend_of_tie)
        assert np.array_equal(unsigned(seen)[finite], visible)


# ── float16 ───────────────────────────────────────────────────────────────────────────────────────


@lru_cache
def float16_values() -> oracle.Floats:
    """The magnitudes of float16, and those that its largest exponent would hold: the first is where
    infinity begins.
    """
    return np.array([float(m) for m in oracle.magnitudes(5, 10, -14)])


@lru_cache
def around_float16() -> Tensor:
    """Every positive float16, every midpoint, and their float32 neighbours; then many others of all
    sizes.
    """
    values = float16_values()
    exact = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    near = [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))]
    spread = 2.0 ** np.random.default_rng(0).uniform(-45, 18, 50_000)
    return torch.from_numpy(np.concatenate([*near, spread.astype(np.float32)]))


def nearest_float16(x: Tensor, *, tie_goes_up: bool = False) -> oracle.Floats:
    """The nearest float16 of magnitudes, ties to even or, as beside a tail, up.

    Below float16's normal numbers a kernel's float32, scaled to float16's exponents, is itself a
    subnormal: a multiple of 2^-37.
    """
    exact = x.double().numpy()
    exact = np.where(exact < 2.0**-14, np.rint(exact * 2.0**37) * 2.0**-37, exact)
    values = np.append(float16_values()[:0x7C00], 65536.0)
    steps = oracle.nearest_steps(values, exact)
    if tie_goes_up:
        steps = np.searchsorted((values[1:] + values[:-1]) / 2, exact, side="right")
    nearest = values[steps]
    return np.where(nearest == 65536.0, np.inf, nearest)


@exhaustive("storage", IN_FLOAT16)
def test_a_float16_weight_is_seen_as_the_nearest(storage: Storage) -> None:
    for sign, x in ((1.0, around_float16()), (-1.0, around_float16()[::17])):
        seen, read = through_words(storage, sign * x, 0)
        shown = codes.weight_word("float16", seen).to(torch.int16).view(torch.float16).double()
        ties = {"tie_goes_up": bool(storage.beside)}
        assert np.array_equal(shown.numpy(), sign * nearest_float16(read.abs(), **ties))
        if storage.beside:
            inside = read.abs() < 65520
            exact = x[inside].double().numpy()
            if storage.tail_bits:  # a multiple of 2^-37
                small = exact < 2.0**-14
                exact[small] = np.rint(exact[small] * 2.0**37) * 2.0**-37
            assert np.array_equal(read[inside].double().numpy(), sign * exact)
            assert (read[~inside].abs() >= 65520).all()  # it stays where it is seen


def test_the_random_bits_of_a_separate_state_number_the_elements_of_each_matrix() -> None:
    stack = torch.linspace(-1, 1, 3 * 5 * 7).view(3, 5, 7)
    seed = torch.tensor(5, dtype=torch.int32)

    def rounded(values: Tensor) -> Tensor:
        memory = torch.zeros(values.shape, dtype=torch.int16)
        codes_of = {"x": STORAGES["word"].exp_avg}
        state: Any = SimpleNamespace(extras={"x": memory}, extra_codes=codes_of, extra_bounds={})
        extras.store_extra(state, "x", values, seed)
        return extras.extra_values(state, "x")

    alone = [rounded(matrix) for matrix in stack]
    assert torch.equal(rounded(stack), torch.stack(alone))
    assert torch.equal(rounded(stack[0].flatten()).view(5, 7), alone[0])
    assert torch.equal(rounded(stack) / 32, rounded(stack / 32))  # changes no random bit
    assert len(rounded(torch.full((5, 7), 1 / 3)).unique()) == 2  # no element has another's bits
