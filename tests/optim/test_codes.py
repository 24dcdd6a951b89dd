"""Every code of every storage, value by value, and what a weight is cut into."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.rounding import bits_of, float_of, half, quiet
from narrowgauge.optim import codes, layouts
from narrowgauge.optim.kernels import addends
from narrowgauge.storages import STORAGES, Code, Storage
from oracles import codes as oracle

IN_TABLES = {c for row in STORAGES.values() for c in (row.weight, row.exp_avg, row.exp_avg_sq)}
OTHERS = {
    Code("e4m3", 4, 3, lowest=-6),
    Code("e5m2, unsigned, held", 5, 2, signed=False, lowest=-14, hold=True),
    Code("e2m1", 2, 1, lowest=0),
    Code("e7m8", 7, 8, lowest=-100),
    Code("e8m3", 8, 3),
    Code("e8m4, unsigned", 8, 4, signed=False),
}
ALL = sorted(IN_TABLES | OTHERS, key=lambda c: c.name)
SHORT = [c for c in ALL if c.bits <= 16]
WINDOWS = [c for c in ALL if c.is_window]
ids = {"ids": lambda c: c.name.replace(" ", "")}


def shifts(code: Code) -> list[int]:
    """Places in a word: both ends, and some between."""
    last = 32 - code.bits
    return sorted({0, min(1, last), min(8, last), last // 2, last})


@lru_cache
def values_of(code: Code) -> oracle.Floats:
    """The finite magnitudes of a code."""
    magnitudes = oracle.magnitudes(code.exponent_bits, code.mantissa_bits, code.lowest)
    return np.array([float(m) for m in magnitudes])


def num_magnitudes(code: Code) -> int:
    """Codes of one sign that are finite numbers."""
    return len(values_of(code))


def place_mask(code: Code, shift: int) -> int:
    return (2**code.bits - 1) * 2**shift


def as_int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy((words % 2**32).astype(np.uint32).view(np.int32))


def as_unsigned(words: Tensor) -> oracle.Integers:
    return words.numpy().astype(np.int64) % 2**32


def every_code(code: Code) -> oracle.Integers:
    """Every finite code, the negative ones after the positive ones, -0 first among them."""
    steps = np.arange(num_magnitudes(code), dtype=np.int64)
    return np.concatenate([steps, steps + 2 ** (code.bits - 1)]) if code.signed else steps


@pytest.mark.parametrize("code", SHORT, **ids)
def test_decode_reads_the_listed_values_whatever_else_the_word_holds(code: Code) -> None:
    values = values_of(code)
    expected = np.concatenate([values, -values]) if code.signed else values
    for shift in shifts(code):
        garbage = np.random.default_rng(shift).integers(0, 2**32, len(expected)) & ~place_mask(code, shift)
        result = codes.decode(code, as_int32(every_code(code) * 2**shift | garbage), shift).numpy()
        assert np.array_equal(result.astype(np.float64), expected)
        assert np.array_equal(np.signbit(result), np.signbit(expected))


@pytest.mark.parametrize("code", SHORT, **ids)
def test_what_was_decoded_is_encoded_to_the_same_code_in_its_place(code: Code) -> None:
    steps = every_code(code)
    x = codes.decode(code, as_int32(steps), 0)
    for shift in shifts(code):
        # Values that lie in the code leave no remainder, so that no addend of any rounding can move them.
        for addend in (0, half(codes.dropped_bits(code)), 2 ** codes.dropped_bits(code) - 1):
            assert np.array_equal(as_unsigned(codes.encode(code, x, addend, shift)), steps * 2**shift)


@pytest.mark.parametrize("code", SHORT, **ids)
def test_encode_takes_the_nearest_listed_value_and_ties_away(code: Code) -> None:
    values = values_of(code)
    middles, gaps = (values[1:] + values[:-1]) / 2, np.diff(values)
    # 2^-7 of a step beside the tie: a subnormal of float32, which scaled values may be, still tells them apart.
    x = np.concatenate([values, middles, middles - gaps / 128, middles + gaps / 128])
    x = x[x == x.astype(np.float32)]
    assert len(x) > 3 * num_magnitudes(code) or code.exponent_bits == 8
    steps = oracle.nearest_steps(values, x)
    if code.hold:
        steps = np.maximum(steps, (x > 0).astype(np.int64))
    addend = half(codes.dropped_bits(code))
    positive = torch.from_numpy(x.astype(np.float32))
    assert np.array_equal(as_unsigned(codes.encode(code, positive, addend, 0)), steps)
    if code.signed:
        assert np.array_equal(as_unsigned(codes.encode(code, -positive, addend, 0)), steps + 2 ** (code.bits - 1))


@pytest.mark.parametrize("code", SHORT, **ids)
def test_encode_is_monotone_and_leaves_zeros_outside_its_place(code: Code) -> None:
    bits = np.arange(0, oracle.INFINITY + 1, 8191, dtype=np.int64)
    positive = float_of(as_int32(np.append(bits, oracle.INFINITY)))
    for addend in (0, half(codes.dropped_bits(code)), 2 ** codes.dropped_bits(code) - 1):
        steps = as_unsigned(codes.encode(code, positive, addend, 0))
        assert (np.diff(steps) >= 0).all()
        some = positive[::7]
        for shift in shifts(code):
            for x in (some, -some):
                assert not (as_unsigned(codes.encode(code, x, addend, shift)) & ~place_mask(code, shift)).any()


@pytest.mark.parametrize("code", ALL, **ids)
def test_nan_and_signed_zero_stay_in_their_place(code: Code) -> None:
    x = float_of(as_int32(np.array([0, 2**31, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000])))
    for shift in shifts(code):
        words = codes.encode(code, x, half(codes.dropped_bits(code)), shift)
        assert not (as_unsigned(words) & ~place_mask(code, shift)).any()
        result = codes.decode(code, words, shift)
        assert result[:2].tolist() == [0.0, 0.0]
        assert bool(result[1].signbit()) == code.signed
        if code.is_window:
            assert result[2:].abs().tolist() == [values_of(code)[-1]] * 4  # the largest stands for all beyond it
        else:
            assert result[2:4].isnan().all() and result[4:].isinf().all()


@pytest.mark.parametrize("code", WINDOWS, **ids)
def test_a_window_saturates_and_has_subnormals(code: Code) -> None:
    largest, smallest = 2.0**code.highest * (2 - 2.0**-code.mantissa_bits), 2.0 ** (code.lowest - code.mantissa_bits)
    x = torch.tensor(
        [largest, largest * 1.5, 2.0**127, math.inf, smallest, 2.0**code.lowest, 1.5 * smallest, 0.75 * smallest]
    )
    for addend in (half(codes.dropped_bits(code)), 2 ** codes.dropped_bits(code) - 1):
        result = codes.decode(code, codes.encode(code, x, addend, 0), 0)
        assert result.tolist() == [*[largest] * 4, smallest, 2.0**code.lowest, 2 * smallest, smallest]


@pytest.mark.parametrize("code", [c for c in ALL if c.hold], **ids)
def test_hold_keeps_every_positive_value_above_zero(code: Code) -> None:
    bits = np.concatenate([np.arange(1, 2**13), 2 ** np.arange(31), np.arange(1, oracle.INFINITY, 65521)])
    x = float_of(as_int32(bits))
    assert (x > 0).all() or x.isnan().any()
    for addend in (0, half(codes.dropped_bits(code))):
        assert (codes.encode(code, x, addend, 3) > 0).all()
        assert not codes.encode(code, torch.tensor([0.0, -0.0]), addend, 3).any()


@pytest.mark.parametrize("code", WINDOWS, **ids)
def test_powers_of_two_inside_the_window_move_the_exponent_alone(code: Code) -> None:
    x = 1 + torch.rand(1000, generator=torch.Generator().manual_seed(0))
    addend = torch.randint(1 << codes.dropped_bits(code), (1000,), generator=torch.Generator().manual_seed(1)).to(
        torch.int32
    )
    low = codes.encode(code, x * 2.0**code.lowest, addend, 0)
    for up in range(code.highest - code.lowest):
        high = codes.encode(code, x * 2.0 ** (code.lowest + up), addend, 0)
        assert torch.equal(high - low, torch.full_like(low, up << code.mantissa_bits))


@pytest.mark.parametrize("code", [c for c in WINDOWS if c.rounding == "stochastic"], **ids)
@pytest.mark.parametrize("where", [0.3, 1.0, 1.7e3])
def test_the_mean_over_all_addends_is_the_value(code: Code, where: float) -> None:
    """A count over every addend there is, not a sample; also among the subnormals."""
    dropped = codes.dropped_bits(code)
    value = torch.tensor(where * 2.0**code.lowest).expand(1 << dropped)
    every = torch.arange(1 << dropped, dtype=torch.int32)
    mean = float(codes.decode(code, codes.encode(code, value, every, 0), 0).double().mean())
    assert mean == pytest.approx(float(value[0]), rel=2.0**-20)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def patterns() -> Tensor:
    special = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000])
    every = np.arange(0, 2**32, 16381, dtype=np.int64)
    strided = np.concatenate([every, np.arange(2**16) * 2**16, special, special + oracle.SIGN])
    return quiet(float_of(as_int32(strided)))


def weight_shifts(storage: Storage) -> list[int]:
    """Where the row's own field lies, and for short tails every other place."""
    own = layouts.place_of(storage, storage.beside)
    return list(range(25)) if storage.tail_bits == 8 else [own.shift if own else 0]


@pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
def test_a_weight_is_seen_as_the_nearest_and_kept_whole(storage: Storage) -> None:
    every, dropped = patterns(), codes.dropped_bits(storage.weight)
    for shift in weight_shifts(storage):
        x = every if shift in (0, 16, 24) else every[::17]
        finite = ~x.isnan().numpy()
        for addend in (half(dropped), 0, 2**dropped - 1)[: 3 if shift in (0, 24) else 1]:
            seen, field, kept = codes.encode_weight(storage, x, addend, shift)
            if storage.beside is None:
                assert field is None
            else:
                assert field is not None
                width = 32 if storage.master else storage.tail_bits
                assert not (as_unsigned(field) & ~((2**width - 1) * 2**shift)).any()
                garbage = np.random.default_rng(shift).integers(0, 2**32, len(x)) & ~((2**width - 1) * 2**shift)
                field = field | as_int32(garbage)
            assert torch.equal(bits_of(codes.decode_weight(storage, seen, field, shift)), bits_of(kept))
            assert np.array_equal(x.isnan(), kept.isnan()) and np.array_equal(x.isnan(), float_of(seen).isnan())
            exact = as_unsigned(bits_of(x))[finite]
            stored = oracle.cut(exact, dropped, addend) if dropped else exact
            assert np.array_equal(as_unsigned(bits_of(kept))[finite], stored)
            visible = oracle.cut(stored, 16) if storage.visible == "bfloat16" else stored
            assert np.array_equal(as_unsigned(seen)[finite], visible)


@pytest.mark.parametrize("name", ["exact", "split", "master"])
def test_rows_that_lose_nothing_of_the_weight_give_float32_back(name: str) -> None:
    storage, x = STORAGES[name], patterns()
    place = layouts.place_of(storage, storage.beside)
    assert place is not None
    seen, field, kept = codes.encode_weight(storage, x, half(codes.dropped_bits(storage.weight)), place.shift)
    assert torch.equal(bits_of(codes.decode_weight(storage, seen, field, place.shift)), bits_of(x))
    assert torch.equal(bits_of(kept), bits_of(x))


# ── random bits of the three fields ─────────────────────────────────────────────────────────────────────────────────


def test_addends_are_dealt_from_the_hash_of_weight_and_mantissa() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, generator=generator)
    gradient = bits_of(torch.randn(300, generator=generator)) & -65536
    seed = torch.tensor(-987654321, dtype=torch.int32)
    result = addends(STORAGES["word"], weight, gradient, seed)
    keys = [w ^ (g // 2**16 % 2**7) for w, g in zip(as_unsigned(bits_of(weight)), as_unsigned(gradient), strict=True)]
    words = [oracle.hashed(int(key), -987654321) for key in keys]
    expected = {
        "weight": [oracle.field(w, 0, 8) for w in words],
        # Bits 8 to 19 and 20 to 31 are their own; the six below each are borrowed.
        "exp_avg": [oracle.field(w, 2, 18) for w in words],
        "exp_avg_sq": [oracle.field(w, 14, 18) for w in words],
    }
    assert {name: value.tolist() for name, value in result.items() if isinstance(value, Tensor)} == expected
    doubled = addends(STORAGES["word"], weight, gradient + (1 << 23), seed)
    assert all(torch.equal(torch.as_tensor(doubled[name]), torch.as_tensor(result[name])) for name in result)


def test_rows_that_round_to_the_nearest_add_half() -> None:
    weight, seed = torch.ones(3), torch.tensor(1, dtype=torch.int32)
    for name, row in STORAGES.items():
        if not row.is_stochastic:
            wanted = {n: half(codes.dropped_bits(getattr(row, n))) for n in ("weight", "exp_avg", "exp_avg_sq")}
            assert addends(row, weight, bits_of(weight), seed) == wanted, name


def seeds(count: int) -> Tensor:
    """Well mixed seeds of consecutive steps, as the optimizer makes them: splitmix64's stream."""
    step = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = step * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return as_int32(z.astype(np.uint64) & np.uint64(0xFFFFFFFF))


def regime(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradients' bits and seeds, to be broadcast: about 2^18 draws, no (key, seed) twice."""
    generator = torch.Generator().manual_seed(11)
    one = torch.ones(1, 1)
    if name == "one weight, one gradient":
        return one, bits_of(one * 0.3), seeds(1 << 18)
    if name == "zero weight":
        return one * 0, bits_of(one), seeds(1 << 18)
    if name == "all weights 1, every gradient":
        return one, (torch.arange(128, dtype=torch.int32) << 16)[:, None], seeds(1 << 11)
    if name == "powers of two":
        return 2.0 ** torch.arange(-64, 64)[:, None].float(), bits_of(one), seeds(1 << 11)
    if name == "every bfloat16 near one":
        return (
            float_of((torch.arange(256, dtype=torch.int32) << 16) + 0x3F800000)[:, None],
            bits_of(one),
            seeds(1 << 10),
        )
    gaussian = torch.randn(1 << 16, 1, generator=generator)
    weight = float_of(torch.unique(bits_of(gaussian) & -256))[:, None]
    return weight, bits_of(torch.randn(weight.shape, generator=generator)) & -65536, seeds(4)


REGIMES = (
    "one weight, one gradient",
    "zero weight",
    "all weights 1, every gradient",
    "powers of two",
    "every bfloat16 near one",
    "gaussian",
)


@pytest.mark.parametrize("name", REGIMES)
def test_the_fields_random_bits_are_fair_and_independent(name: str) -> None:
    """Every |z| < 5.5 over some 600 readings a regime: one false failure in 40,000 such tests."""
    dealt = addends(STORAGES["word"], *regime(name))
    fields = np.stack([torch.as_tensor(dealt[n]).numpy() for n in ("weight", "exp_avg", "exp_avg_sq")]).astype(
        np.float64
    )
    # The tail's addends 0 … 255 have the mean 255/2, which is no bias: its remainders are whole numbers too.
    scale, middle = np.array([2.0**8, 2.0**18, 2.0**18]), np.array([255 / 2, 2.0**17, 2.0**17])
    centred = (fields - middle[:, None, None]) / scale[:, None, None]
    count, limit = fields[0].size, 5.5
    means = centred.mean((1, 2))
    assert (np.abs(means) * np.sqrt(12 * count) < limit).all()
    flat = centred.reshape(3, -1)
    between = np.corrcoef(flat)[np.triu_indices(3, 1)]
    assert (np.abs(between) * np.sqrt(count) < limit).all()
    # Consecutive steps of one element, every field against every field.
    before, after = centred[:, :, :-1].reshape(3, -1), centred[:, :, 1:].reshape(3, -1)
    across = np.corrcoef(before, after)[:3, 3:]
    assert (np.abs(across) * np.sqrt(before.shape[1]) < limit).all()


@pytest.mark.parametrize("name", REGIMES)
def test_no_two_random_bits_agree_more_than_chance(name: str) -> None:
    """All 32 bits and all 496 pairs of them, |z| < 5.5: one false failure in 50,000 such tests."""
    dealt = {n: torch.as_tensor(a).long() for n, a in addends(STORAGES["word"], *regime(name)).items()}
    words = dealt["weight"] | (dealt["exp_avg"] >> 6 << 8) | (dealt["exp_avg_sq"] >> 6 << 20)
    num_keys, num_seeds = words.shape
    # Keys that differ in few bits share some parities of a step's bits: over keys those are one reading, not many.
    clusters = num_seeds if 1 < num_keys <= 256 else words.numel()
    table = words.t().reshape(clusters, -1)
    signs = torch.stack([1.0 - 2.0 * ((table >> place) & 1).float() for place in range(32)], 1)
    means = signs.mean(2)
    assert float(standard_scores(means).max()) < 5.5
    if clusters == num_seeds and num_keys > 1:
        pairs = (signs @ signs.mT / signs.shape[2]).reshape(clusters, -1)[
            :, ~torch.eye(32, dtype=torch.bool).reshape(-1)
        ]
        assert float(standard_scores(pairs).max()) < 5.5
        assert float(pairs.mean(0).abs().max()) < 0.1
    else:
        flat = signs[:, :, 0]
        agreement = (flat.t() @ flat / clusters).fill_diagonal_(0)
        assert float(agreement.abs().max()) * clusters**0.5 < 5.5


def standard_scores(rows: Tensor) -> Tensor:
    """How many standard errors the mean over rows lies from zero, per column."""
    return rows.mean(0).abs() / (rows.std(0) / len(rows) ** 0.5).clamp(min=1e-9)
