"""Every code of every storage, value by value and relative to its row; what a weight is cut into;
and the random bits that cut.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

import expectations
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.rounding import bits_of, canonical_nan, float_of
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import Field, dropped_bits, fields_of
from narrowgauge.spec.storages import STORAGES, Code, Storage
from oracles import codes as oracle
from tables import exhaustive
from tensors import unsigned

# The parts of an expansion are coded one by one: here each stands for itself.
IN_TABLES = {
    replace(code, parts=1, name=code.name.split(" ")[0])
    for row in STORAGES.values()
    for code in (row.weight, row.exp_avg, row.exp_avg_sq)
}
OTHERS = {Code("e2m1", 2, 1, lowest=0), Code("e8m4, unsigned", 8, 4, signed=False)}
ALL = sorted(IN_TABLES | OTHERS, key=repr)
SHORT = [c for c in ALL if c.bits <= 16]
SCALED = [c for c in ALL if c.scaled]


@lru_cache
def values_of(code: Code) -> oracle.Floats:
    """The finite magnitudes of a code."""
    magnitudes = oracle.magnitudes(code.exponent_bits, code.mantissa_bits, code.lowest)
    return np.array([float(m) for m in magnitudes])


def as_int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words % 2**32).astype(np.uint32).view(np.int32))


def garbage(shape: Sequence[int], bits: int, shift: int) -> oracle.Integers:
    """Random words that are zero in ``bits`` from ``shift`` on."""
    words = np.random.default_rng(shift).integers(0, 2**32, shape)
    return words & ~((2**bits - 1) * 2**shift)


@exhaustive("code", SHORT)
def test_decode_reads_the_listed_values_whatever_else_the_word_holds(code):
    values = values_of(code)
    steps = np.arange(len(values), dtype=np.int64)
    if code.signed:
        steps = np.concatenate([steps, steps + 2 ** (code.bits - 1)])
        values = np.concatenate([values, -values])
    for shift in {0, 8, 32 - code.bits}:
        words = as_int32(steps * 2**shift | garbage(steps.shape, code.bits, shift))
        result = codes.decode(Field(code=code, shift=shift), words).numpy()
        assert np.array_equal(result.astype(np.float64), values)
        assert np.array_equal(np.signbit(result), np.signbit(values))


@exhaustive("code", SHORT)
def test_encode_takes_the_nearest_listed_value_and_ties_to_even(code):
    """Larger values of a window become its largest."""
    values = values_of(code)
    middles = (values[1:] + values[:-1]) / 2
    gaps = np.diff(values)
    # 2^-7 of a step beside the tie: a subnormal of float32, which scaled values may be, still tells
    # them apart.
    x = np.concatenate([values, middles, middles - gaps / 128, middles + gaps / 128])
    if code.is_window:
        x = np.concatenate([x, [values[-1] * 1.5, 2.0**127, math.inf]])
    x = x[x == x.astype(np.float32)]
    assert len(x) > 3 * len(values) or code.exponent_bits == 8
    steps = oracle.nearest_steps(values, x)
    expected = np.maximum(steps, (x > 0).astype(np.int64)) if code.hold else steps
    positive = torch.from_numpy(x.astype(np.float32))
    assert np.array_equal(unsigned(codes.encode(Field(code=code), positive, None)), expected)
    if code.signed:
        negative = unsigned(codes.encode(Field(code=code), -positive, None))
        assert np.array_equal(negative, steps + 2 ** (code.bits - 1))


@exhaustive("code", ALL)
def test_every_nan_is_cut_to_the_same_bits(code):
    """Of several payloads and both signs: of a window, which has none, to its largest value."""
    payloads = np.array([0x7FC00000, 0x7F800001, 0x7FBFFFFF, 0x7FFF7FFF, 0x7FFFFFFF])
    nans = float_of(as_int32(np.concatenate([payloads, payloads + 2**31])))
    scales = [None, torch.tensor(2.0**-7), torch.tensor(2.0**126)] if code.is_window else [None]
    for addend in (0, None, 2 ** dropped_bits(code) - 1):
        for scale in scales:
            words = codes.encode(Field(code=code), nans, addend, scale)
            assert (words == words[0]).all()
            value = codes.decode(Field(code=code), words[:1])
            assert not value.signbit()
            assert value == values_of(code)[-1] if code.is_window else value.isnan()


@exhaustive("code", [c for c in ALL if c.is_window and c.rounding == "stochastic"])
@exhaustive("where", [0.3, 1.0, 1.7e3])
def test_the_mean_over_all_addends_is_the_value(code, where):
    """A count over every addend there is, not a sample; also among the subnormals."""
    dropped = dropped_bits(code)
    value = torch.tensor(where * 2.0**code.lowest).expand(1 << dropped)
    every = torch.arange(1 << dropped, dtype=torch.int32)
    field = Field(code=code)
    mean = float(codes.decode(field, codes.encode(field, value, every)).double().mean())
    assert mean == pytest.approx(float(value[0]), rel=2.0**-20)


@exhaustive("code", SCALED)
@exhaustive("bound", [2.0**-149, 1e-40, 2.0**-100, 1e-3, 1.0, 1 + 2.0**-23, 448.0, 2.0**80, 1e38])
def test_up_to_its_bound_nothing_of_a_row_saturates_and_what_is_held_stays(code, bound):
    field = Field(code=code)
    into, back = codes.multipliers(torch.tensor(bound))
    mantissa, exponent = math.frexp(bound)
    above = math.ldexp(1.0, exponent - (mantissa == 0.5))
    window = above * (2 - 2.0**-code.mantissa_bits)
    x = torch.tensor([bound, window * 1.5, window * 1e10, math.inf, math.nan])
    tiny = torch.tensor([0.0, 2.0**-149, 2.0**-126, 1e-30, 1e-10])
    for addend in (0, None, 2 ** dropped_bits(code) - 1):
        if 2.0**-100 <= bound <= 2.0**80:
            decoded = codes.decode(field, codes.encode(field, x, addend, into), back).tolist()
            assert abs(decoded[0] - bound) <= bound * 2.0**-code.mantissa_bits
            assert decoded[0] < window and decoded[1:] == [window] * 4
        if code.hold and addend != 2 ** dropped_bits(code) - 1:
            steps = codes.encode(field, tiny, addend, into)
            assert steps[0] == 0 and (steps[1:] > 0).all()


# ── weights ───────────────────────────────────────────────────────────────────────────────────────

WHOLE = [r for r in STORAGES.values() if r.visible != "float16" if r.master or r.weight.parts == 1]


def patterns() -> Tensor:
    """Every upper half of a float32, and values a prime stride apart."""
    every = np.arange(0, 2**32, 16381, dtype=np.int64)
    return canonical_nan(float_of(as_int32(np.concatenate([every, np.arange(2**16) * 2**16]))))


def through_words(storage: Storage, x: Tensor, addend: int | None) -> tuple[Tensor, Tensor]:
    """Return the visible bits of weights, and the weights read among other bits of their words."""
    seen, written = codes.write_weight(storage, x, addend)
    field = fields_of(storage)["weight"]
    words = [torch.zeros_like(seen)] * field.plane
    if field.name:
        bits = words[-1] = written[field.name]
        if storage.tail_bits:
            others = garbage(bits.shape, field.bits, field.shift)
            assert not (unsigned(bits) & others).any()
            words[-1] = bits | as_int32(others)
    return seen, codes.read_weight(storage, codes.Lane(seen, seen.float(), words, {}))


@exhaustive("storage", WHOLE)
def test_a_weight_is_seen_as_the_nearest_and_kept_whole(storage):
    x = patterns()
    dropped = dropped_bits(storage.weight)
    finite = ~x.isnan().numpy()
    for addend in (None, 0, 2**dropped - 1):
        seen, stored = through_words(storage, x, addend)
        assert np.array_equal(x.isnan(), stored.isnan())
        assert np.array_equal(x.isnan(), float_of(seen).isnan())
        exact = unsigned(bits_of(x))[finite]
        expected = oracle.cut(exact, dropped, addend) if dropped else exact
        # Float64 holds these values too.
        assert np.array_equal(unsigned(bits_of(stored.float()))[finite], expected)
        visible = expected
        if storage.visible == "bfloat16":
            # A tie goes up where more is kept: a tail has no room for both ends of a cell.
            visible = oracle.cut(expected, 16, 2**15 if storage.extra_fields else None)
        assert np.array_equal(unsigned(seen)[finite], visible)


# ── random bits ───────────────────────────────────────────────────────────────────────────────────

DEALT = {name: row.dealt for name, row in expectations.STORAGES.items() if row.dealt}


@exhaustive("row", ["word", "states8"])
@exhaustive(("weight", "num_gradients"), [(0.0, 1), (1.0, 128)])
def test_the_fields_random_bits_are_fair_and_independent(row, weight, num_gradients):
    """Every |z| < 5.5 over some 600 readings a regime: one false failure in 20,000 such tests."""
    gradient = float_of(torch.arange(num_gradients, dtype=torch.int32) << 16)[:, None]
    seeds = [step_seed(0, step) for step in range((1 << 18) // num_gradients)]
    seed = torch.tensor(seeds, dtype=torch.int32)  # no (key, seed) twice
    dealt = codes.addends(STORAGES[row], torch.full((1, 1), weight), gradient, seed)
    fields = np.stack([torch.as_tensor(dealt[n]).numpy() for n in DEALT[row]]).astype(np.float64)
    # Addends 0 … 2^d - 1 have the mean (2^d - 1)/2, which is no bias: remainders are whole numbers
    # too.
    scale = np.array([2.0**count for _, count in DEALT[row].values()])[:, None, None]
    centred = (fields - (scale - 1) / 2) / scale
    count = fields[0].size
    assert count >= 1 << 17  # elements that differ in weight or gradient draw bits of their own
    limit = 5.5
    assert (np.abs(centred.mean((1, 2))) * np.sqrt(12 * count) < limit).all()
    # Every field against every field, of one step and of consecutive steps.
    before = centred[:, :, :-1].reshape(3, -1)
    after = centred[:, :, 1:].reshape(3, -1)
    between = np.corrcoef(before, after)[np.triu_indices(6, 1)]
    # Bits that two codes share are the lower one's least: 2^-10 of it.
    assert (np.abs(between) < limit / np.sqrt(before.shape[1]) + 2.0**-9).all()
