"""The step of all tensors on a GPU: each code, weight and rule, and one walk over the elements.

It computes what ``step.h`` does. A *program* steps ``BLOCK`` elements, or one row that has scales:
then it reads the gradient twice. Words stand at the bottom of 32-bit integers. :class:`Row` holds
the constants of a (rule, storage). ``div_rn`` and ``sqrt_rn`` round as on a CPU, and a launch fuses
no multiply-add. Triton's interpreter runs this file on a CPU
(:func:`narrowgauge.torch_support.triton.load`).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from narrowgauge.optim import codes
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step_cpp import num_addresses, struct_of
from narrowgauge.spec.storages import FLOAT32, VISIBLE, Code, Storage

BLOCK = 1024
"""Elements that a program steps at a time: 16 bytes of a 16-bit tensor for each of 128 threads."""
SIZES = tl.constexpr(8)
"""Columns of the table after the addresses (:data:`narrowgauge.optim.table.SIZES`)."""
SIGN = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)

# ── constants of a (rule, storage) ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Field:
    """Hold where a code lies, the bits that it drops, and which random bits drop them.

    A second part is finer by the bits of the first. Without a plane the field is not stored.
    """

    code: Code = FLOAT32
    plane: int = -1
    shift: int = 0
    drop: int = 0
    part: int = 0
    random: tuple[int, int] | None = None


@dataclass(frozen=True)
class Row:
    """Hold the constants of a (rule, storage). ``bytes`` are those of the weight and the planes."""

    rule: str
    scalars: int
    penalized: bool
    states: int
    given: bool
    addresses: int
    visible: str
    below: int
    beside: str
    tail_bits: int
    is_scaled: bool
    is_expansion: bool
    bytes: tuple[int, ...]
    weight: Field
    first: Field
    second: Field
    second_low: Field


def row_of(rule: AnyRule, storage: Storage) -> Row:
    """Return the constants of a (rule, storage) that has a kernel."""
    planes = planes_of(storage)
    size, below, _ = VISIBLE[storage.visible]
    places = {}
    for number, plane in enumerate(planes):
        for name, shift, _ in plane.fields:
            places[name] = number, shift
    beside = (*storage.beside, "")[0]
    fields = []
    for name in ("weight", *dict(storage.states)):
        code = storage.code(name)
        place = places.get(beside if name == "weight" else name, (-1, 0))
        random = codes.shares(storage).get(name)
        fields.append(Field(code, *place, codes.dropped_bits(code), 0, random))
    last = fields[-1]
    weight, first, second, *_ = [*fields, Field(), Field()]
    second_low = Field()
    low = f"{storage.states[-1][0]}_low" if storage.states else ""
    if low in places:
        second_low = Field(last.code.part(1), *places[low], last.drop, 1)
    return Row(
        struct_of(rule), len(rule.scalars), getattr(rule, "coupled", False), len(storage.states),
        isinstance(rule, MatrixRule), num_addresses(rule, storage), storage.visible, below, beside,
        storage.tail_bits, bool(storage.scaled), storage.arithmetic == "expansion",
        (size // 8, *[plane.bits // 8 for plane in planes]), weight, first, second, second_low,
    )  # fmt: skip


# ── rounding ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def float_of(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def int_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def quiet(x):
    return tl.where(x == x, int_of(x), 0x7FC00000)


@triton.jit
def rounded(bits, DROP: tl.constexpr):
    """Round to nearest, ties to even, all but the lowest bits."""
    if DROP == 0:
        return bits
    return (bits + ((1 << DROP >> 1) - 1 + ((bits >> DROP) & 1))) & -(1 << DROP)


@triton.jit
def random_bits(key, seed):
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def cut(bits, random, field: tl.constexpr, TO_ZERO: tl.constexpr = False):
    """Drop the lowest bits as a code does: by chance, to nearest, or toward zero."""
    if field.random is not None:
        if field.random[1] > 0:
            low = (random >> (32 - field.random[1])) & ((1 << field.random[1]) - 1)
            random = (random << field.random[1]) | low
        bits += (random >> field.random[0]) & ((1 << field.drop) - 1)
    elif not TO_ZERO:
        bits = rounded(bits, field.drop)
    return bits & -(1 << field.drop)


# ── the visible weight: bits as of a float32, of float16 times 2^-112 ─────────────────────────────


@triton.jit
def visible_bits(word, row: tl.constexpr):
    if row.visible == "float32":
        return word
    bits = word << 16
    return ((bits & 0x7FFF0000) >> 3) | (bits & SIGN) if row.visible == "float16" else bits


@triton.jit
def visible_word(bits, row: tl.constexpr):
    if row.visible == "float32":
        return bits
    if row.visible == "float16":
        bits = ((bits << 3) & 0x7FFF0000) | (bits & SIGN)
    return bits >> 16


@triton.jit
def visible_value(bits, row: tl.constexpr):
    x = float_of(bits)
    return x * 2.0**112 if row.visible == "float16" else x


@triton.jit
def scaled_bits(x, row: tl.constexpr):
    return int_of(x * 2.0**-112 if row.visible == "float16" else x)


@triton.jit
def in_range(bits, row: tl.constexpr):
    return (
        tl.minimum(bits & MAGNITUDE, 31 << 23) | (bits & SIGN) if row.visible == "float16" else bits
    )


@triton.jit
def nearest(x, row: tl.constexpr):
    """Return the bits of the visible weight nearest to x, ties to even."""
    bits = tl.where(x == x, scaled_bits(x, row), 0x7FC00000)
    return in_range(rounded(bits, row.below), row)


@triton.jit
def half_up(bits, row: tl.constexpr):
    """Return the nearest bits of a visible weight, ties up: a tail or a master says more."""
    return in_range((bits + (1 << row.below >> 1)) & -(1 << row.below), row)


# ── codes of states ───────────────────────────────────────────────────────────────────────────────


@triton.jit
def decode(words, field: tl.constexpr, back):
    word = words[field.plane]
    code: tl.constexpr = field.code
    if not code.is_window:
        return float_of(word << (32 - code.bits))
    bits = ((word >> field.shift) << field.drop) & (((1 << code.magnitude_bits) - 1) << field.drop)
    if code.signed:
        bits |= (word << (32 - field.shift - code.bits)) & SIGN
    x = float_of(bits) * 2.0 ** (code.lowest + 126)
    return x * (back * 2.0 ** -(field.part * (code.mantissa_bits + 1))) if code.scaled else x


@triton.jit
def encode(x, random, field: tl.constexpr, into, TO_ZERO: tl.constexpr = False):
    code: tl.constexpr = field.code
    if not code.is_window:
        bits = cut(quiet(x), random, field, TO_ZERO) >> (32 - code.bits)
        return bits & ((1 << code.bits) - 1) if code.bits < 32 else bits
    inside = x * (into * 2.0 ** (field.part * (code.mantissa_bits + 1))) if code.scaled else x
    bits = int_of(inside * 2.0 ** -(code.lowest + 126))
    last = ((1 << code.magnitude_bits) - 1) << field.drop
    step = cut(tl.minimum(bits & MAGNITUDE, last), random, field, TO_ZERO) >> field.drop
    if code.hold:
        step = tl.maximum(step, tl.minimum(int_of(x), 1))
    if code.signed:  # a NaN loses its sign: the mantissa carries into it
        step |= (((bits & (bits + 0x7FFFFF)) >> 31) & 1) << (code.bits - 1)
    return step << field.shift


# ── weights: alone, a tail, a master, or Kahan's low part ─────────────────────────────────────────


@triton.jit
def belongs(seen, low, row: tl.constexpr):
    """Return whether a low part and the visible weight together round to it."""
    return rounded(scaled_bits(visible_value(seen, row) + low, row), row.below) == seen


@triton.jit
def read_weight(words, seen, row: tl.constexpr):
    """Return the weight that a rule reads, and the low part that is added to its change."""
    x = visible_value(seen, row)
    low = x
    field: tl.constexpr = row.weight
    if row.beside == "tail":
        tail = words[field.plane] << (32 - row.tail_bits - field.shift)
        tail = (tail >> (32 - row.tail_bits - field.drop)) & -(1 << field.drop)
        x = visible_value(tl.where(((seen + tail) ^ seen) < 0, seen, seen + tail), row)
    elif row.beside == "master":
        master = float_of(words[field.plane])
        bits = tl.where(master == master, scaled_bits(master, row), 0x7FC00000)
        x = tl.where(half_up(bits, row) == in_range(seen, row), master, x)
    elif row.beside == "weight_low":
        low = decode(words, row.weight, 1.0)
        low = tl.where(belongs(seen, low, row), low, 0.0)
    return x, low


@triton.jit
def low_word(seen, rest, row: tl.constexpr):
    """Encode a low part to nearest, or toward zero where the nearest one does not belong."""
    word = encode(rest, 0, row.weight, 1.0)
    is_own = belongs(seen, decode((word, word, word), row.weight, 1.0), row)
    return tl.where(is_own, word, encode(rest, 0, row.weight, 1.0, True))


@triton.jit
def write_weight(x, low, change, random, row: tl.constexpr):
    """Return the bits of the new visible weight, and the word beside it, in place."""
    if row.beside == "weight_low":
        seen = nearest(x + (low + change), row)
        return seen, low_word(seen, (low + change) - (visible_value(seen, row) - x), row)
    new = x + change
    bits = tl.where(new == new, scaled_bits(new, row), 0x7FC00000)
    if row.beside == "master":
        return half_up(bits, row), quiet(new)
    if row.beside == "tail":
        bits = cut(bits, random, row.weight)
        seen = half_up(bits, row)
        tail = ((bits - seen) >> row.weight.drop) & ((1 << row.tail_bits) - 1)
        return seen, tail << row.weight.shift
    if row.weight.random is None:
        return nearest(new, row), bits
    return in_range(cut(bits, random, row.weight), row), bits


# ── rules: the change and new states, from scalars in the order of the Python rule ────────────────


@triton.jit
def toward(old, x, share):
    return tl.where(share != 1, old + (x - old) * share, x)


@triton.jit
def finite_or_zero(w):
    """Return the weight that a rule reads. It would turn the decay of an infinite one into NaN."""
    return tl.where(tl.abs(w) < float("inf"), w, 0.0)


@triton.jit
def adam(g, m, v, s):
    m = toward(m, g, tl.load(s))
    v = tl.where(v < float("inf"), toward(v, g * g, tl.load(s + 1)), v)
    negative_step_size, inverse_root_correction2, eps = (
        tl.load(s + 2),
        tl.load(s + 3),
        tl.load(s + 4),
    )
    return tl.div_rn(m, tl.sqrt_rn(v) * inverse_root_correction2 + eps) * negative_step_size, m, v


@triton.jit
def sgd(w, g, m, s):
    weight_decay, momentum, gain = tl.load(s), tl.load(s + 1), tl.load(s + 2)
    share_of_gradient, share_of_momentum = tl.load(s + 3), tl.load(s + 4)
    g = g + w * weight_decay
    m = m * momentum + g * gain
    return (g * share_of_gradient + m * share_of_momentum) * tl.load(s + 5), m


@triton.jit
def lion(w, g, m, s):
    direction = toward(m, g, tl.load(s))
    sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
    return sign * tl.load(s + 2) + w * tl.load(s + 3), toward(m, g, tl.load(s + 1))


@triton.jit
def update(w, g, m, v, s, RULE: tl.constexpr):
    if RULE == "AdamW":
        change, m, v = adam(g, m, v, s)
        change = change + tl.load(s + 5) * w
    elif RULE == "Adam":
        change, m, v = adam(g + w * tl.load(s + 5), m, v, s)
    elif RULE == "SGD":
        change, m = sgd(w, g, m, s)
    elif RULE == "Lion":
        change, m = lion(w, g, m, s)
    else:  # SGD without momentum
        change = (g + w * tl.load(s)) * tl.load(s + 1)
    return change, m, v


@triton.jit
def muon(g, m, s):
    """Return what the direction is computed from, and the new momentum."""
    m = toward(m, g, tl.load(s + 2))
    return tl.where(tl.load(s + 3) != 0, g + (m - g) * tl.load(s + 1), m), m


# ── Collage: every operation rounds to the weight's format ────────────────────────────────────────


@triton.jit
def rn(x, D: tl.constexpr):
    return tl.where(x == x, float_of(rounded(int_of(x), D)), float("nan"))


@triton.jit
def fast_two_sum(a, b, D: tl.constexpr):
    total = rn(a + b, D)
    return total, b - (total - a)


@triton.jit
def grow(high, low, x, D: tl.constexpr):
    total = rn(high + x, D)
    of_x = total - high
    return fast_two_sum(total, rn(low + ((high - (total - of_x)) + (x - of_x)), D), D)


@triton.jit
def multiply(high, low, by, by_low, D: tl.constexpr):
    product = rn(high * by, D)
    error = rn(high * by - product, D)
    return fast_two_sum(product, rn(rn(rn(low * by, D) + high * by_low, D) + error, D), D)


@triton.jit
def collage(w, g, m, v, v_low, s, PAIR: tl.constexpr, D: tl.constexpr):
    """Return AdamW's change and the new moments."""
    one_minus_beta1, one_minus_beta2 = tl.load(s), tl.load(s + 1)
    beta2 = 1 - one_minus_beta2
    g = rn(float_of(quiet(g)), D)
    m = rn(rn(m * (1 - one_minus_beta1), D) + one_minus_beta1 * g, D)
    square = one_minus_beta2 * g * g
    if PAIR:
        high = rn(beta2, D)
        v, v_low = multiply(v, v_low, high, rn(beta2 - high, D), D)
        v, v_low = grow(v, v_low, rn(square, D), D)
    else:
        v = rn(rn(v * beta2, D) + square, D)
    down = rn(rn(rn(tl.sqrt_rn(v), D) * tl.load(s + 3), D) + tl.load(s + 4), D)
    step = rn(tl.div_rn(rn(m * tl.load(s + 2), D), down), D)
    return rn(step + rn(w * tl.load(s + 5), D), D), m, v, v_low


# ── programs: `at` are elements of `tile`, which is a row of the table, its first element, its
# length, and whether it is read in whole vectors of 16 bytes ─────────────────────────────────────


@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def sum_of(a, b):
    return a + b


@triton.jit
def load(tile, at, PLACE: tl.constexpr, BYTES: tl.constexpr):
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    address = tl.load(tile[0] + PLACE).to(tl.pointer_type(TYPE)) + tile[1]
    if tile[3] != 0:
        x = tl.load(tl.multiple_of(address, 16) + at, mask=at < tile[2] // 16 * 16, other=0)
    else:
        x = tl.load(address + at, mask=at < tile[2], other=0)
    return x.to(tl.int32)


@triton.jit
def store(tile, at, PLACE: tl.constexpr, BYTES: tl.constexpr, x):
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    address = tl.load(tile[0] + PLACE).to(tl.pointer_type(TYPE)) + tile[1]
    if tile[3] != 0:
        tl.store(tl.multiple_of(address, 16) + at, x.to(TYPE), mask=at < tile[2] // 16 * 16)
    else:
        tl.store(address + at, x.to(TYPE), mask=at < tile[2])


@triton.jit
def load_values(tile, at, PLACE: tl.constexpr, wide, row: tl.constexpr):
    """Return values of the gradient or the weight, with infinities and NaN."""
    if wide != 0:
        x = float_of(load(tile, at, PLACE, 4))
    else:
        bits = visible_bits(load(tile, at, PLACE, row.bytes[0]), row)
        x = visible_value(bits, row)
        if row.visible == "float16":
            x = tl.where(tl.abs(x) >= 65536.0, float_of(bits | 0x7F800000), x)
    return x


@triton.jit
def load_planes(tile, at, row: tl.constexpr):
    words = (at,)
    for k in tl.static_range(1, len(row.bytes)):
        words += (load(tile, at, 1 + k, row.bytes[k]),)
    return words[1:]


@triton.jit
def find(table, tiles, row: tl.constexpr):
    """Return a program's tile, its place, and its sizes in the table."""
    program = tl.program_id(0)
    row_of_table = table + tl.load(tiles + program).to(tl.int64) * (row.addresses + SIZES)
    sizes = row_of_table + row.addresses
    place = program - tl.load(sizes + 2)
    begin = place * tl.load(sizes)
    left = tl.minimum(tl.load(sizes + 1) - begin, tl.load(sizes)).to(tl.int32)
    return (row_of_table, begin, left, tl.load(sizes + 6)), place, sizes


@triton.jit
def peak_of(tile, PLACE: tl.constexpr, wide, row: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest magnitude of a row, in which a NaN is the largest."""
    most = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, tile[2], BLOCK):
        x = load_values(tile, start + tl.arange(0, BLOCK), PLACE, wide, row)
        if PLACE == 0:  # the weight
            x = finite_or_zero(x)
        most = tl.maximum(most, int_of(x) & MAGNITUDE)
    return float_of(tl.reduce(most, 0, larger_of))


@triton.jit
def bound_at(tile, place, STATE: tl.constexpr, row: tl.constexpr):
    column = tile[0] + row.addresses - row.states + STATE
    return tl.load(column).to(tl.pointer_type(tl.float32)) + place


@triton.jit
def record_of(tile, place, wide, row: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest magnitudes of a row, and its bounds so far."""
    peak = peak_of(tile, 1, wide, row, BLOCK)
    weight = peak
    if row.penalized:
        weight = peak_of(tile, 0, 0, row, BLOCK)
    first = tl.load(bound_at(tile, place, 0, row))
    return peak, weight, first, tl.load(bound_at(tile, place, row.states - 1, row))


@triton.jit
def end_of(bound, WAY: tl.constexpr):
    """Return the power of two not below a bound, or its inverse."""
    finite = tl.where(bound < float("inf"), bound, 3e38)
    exponent = ((int_of(finite) + 0x7FFFFF) >> 23) - 127
    return float_of((127 + WAY * tl.minimum(tl.maximum(exponent, -112), 126)) << 23)


@triton.jit
def bound_of(x, y, old, skip, is_idle):
    """Return the new bound of a row from a state's values at its largest magnitudes."""
    most = float_of(tl.maximum(int_of(x) & MAGNITUDE, int_of(y) & MAGNITUDE))
    most = tl.where(most < float("inf"), most, 3e38)
    # One huge gradient costs its element, not its row.
    limited = tl.where(old > 0, tl.minimum(most, old * 2.0**20), most)
    # The bound of a row without gradients would fall, and the next gradient would be huge to it.
    most = tl.where(is_idle, tl.maximum(most, old), limited)
    return tl.where(skip, old, most)


@triton.jit
def set_bounds(
    tile, place, record, wide, control, records, s, row: tl.constexpr, BLOCK: tl.constexpr
):
    """Bound the new states of a row by the rule's step of its largest magnitudes.

    Return the multipliers of both codes: into their windows, and back.
    """
    if record < 0:
        peak, weight, m, v = record_of(tile, place, wide, row, BLOCK)
    else:
        at = records + (record + place) * (1 + row.penalized + row.states)
        peak, weight, m = tl.load(at), tl.load(at + row.penalized), tl.load(at + row.penalized + 1)
        v = tl.load(at + row.penalized + row.states)
    skip = tl.load(control + 1) != 0
    peak = peak * tl.abs(tl.load(control))
    _, plus_m, plus_v = update(weight, peak, m, v, s, row.rule)
    _, minus_m, minus_v = update(weight, -1.0 * peak, m, v, s, row.rule)
    new_m = bound_of(plus_m, minus_m, m, skip, peak == 0)
    new_v = bound_of(plus_v, minus_v, v, skip, peak == 0)
    tl.store(bound_at(tile, place, 0, row), new_m)
    if row.states > 1:
        tl.store(bound_at(tile, place, 1, row), new_v)
    return end_of(new_m, -1), end_of(m, 1), end_of(new_v, -1), end_of(v, 1)


@triton.jit
def step(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    tile, place, sizes = find(table, tiles, row)
    wide = tl.load(sizes + 5)
    s = numbers + tl.load(sizes + 7) * (row.scalars + 1)
    seed = int_of(tl.load(s + row.scalars))
    scales = 1.0, 1.0, 1.0, 1.0
    if row.is_scaled:
        scales = set_bounds(tile, place, tl.load(sizes + 4), wide, control, records, s, row, BLOCK)
    for start in range(0, tl.where(tl.load(control + 1) != 0, 0, tile[2]), BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = visible_bits(load(tile, at, 0, row.bytes[0]), row)
        gradient = load_values(tile, at, 1, wide, row)
        words = load_planes(tile, at, row)
        x, low = read_weight(words, seen, row)
        g, m, v, v_low = gradient * tl.load(control), x, x, x
        if row.states > 0:
            m = decode(words, row.first, scales[1])
        if row.states > 1:
            v = decode(words, row.second, scales[3])
        mantissa = int_of(gradient) >> 16 & 0x7F
        if row.visible != "bfloat16":
            mantissa = scaled_bits(gradient, row) & 0x7FFFFF
        random = random_bits(int_of(x) ^ mantissa, seed)
        if row.is_expansion:
            if row.second_low.plane >= 0:
                v_low = decode(words, row.second_low, scales[3])
            x, low = float_of(quiet(x)), float_of(quiet(low))
            PAIR: tl.constexpr = row.second_low.plane >= 0
            w = finite_or_zero(x)
            change, m, v, v_low = collage(w, g, m, v, v_low, s, PAIR, row.below)
            new, new_low = grow(w, low, change, row.below)
            low = tl.where(tl.abs(x) < float("inf"), new_low, low)
            x = tl.where(tl.abs(x) < float("inf"), new, x)
            seen = nearest(x, row)
            beside = low_word(seen, low, row)
        else:
            if row.given:
                change = float_of(load(tile, at, 1 + len(row.bytes), 4))
                if row.rule == "Muon":
                    _, m = muon(g, m, s)
                if row.scalars > 0:
                    whole = x + low if row.beside == "weight_low" else x
                    change += finite_or_zero(whole) * tl.load(s)
            else:
                change, m, v = update(finite_or_zero(x), g, m, v, s, row.rule)
            seen, beside = write_weight(x, low, change, random, row)
        store(tile, at, 0, row.bytes[0], visible_word(seen, row))
        for k in tl.static_range(0, len(row.bytes) - 1):
            word = at & 0
            if row.weight.plane == k:
                word |= beside
            if row.first.plane == k:
                word |= encode(m, random, row.first, scales[0])
            if row.second.plane == k:
                word |= encode(v, random, row.second, scales[2])
            if row.second_low.plane == k:
                word |= encode(v_low, random, row.second_low, scales[2])
            store(tile, at, 2 + k, row.bytes[k + 1], word)


@triton.jit
def find_peaks(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    """Write the records of rows that ranks share."""
    tile, place, sizes = find(table, tiles, row)
    record = tl.load(sizes + 4)
    if record >= 0:
        at = records + (record + place) * (1 + row.penalized + row.states)
        peak, weight, first, second = record_of(tile, place, tl.load(sizes + 5), row, BLOCK)
        tl.store(at, peak)
        if row.penalized:
            tl.store(at + 1, weight)
        tl.store(at + row.penalized + 1, first)
        if row.states > 1:
            tl.store(at + row.penalized + 2, second)


@triton.jit
def average(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    """Write the average of the gradient of a matrix rule into its change."""
    tile, _, sizes = find(table, tiles, row)
    s = numbers + tl.load(sizes + 7) * (row.scalars + 1)
    for start in range(0, tile[2], BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = load_values(tile, at, 1, tl.load(sizes + 5), row) * tl.load(control)
        if row.rule == "Muon":
            g, _ = muon(g, decode(load_planes(tile, at, row), row.first, 1.0), s)
        store(tile, at, 1 + len(row.bytes), 4, int_of(g))


# ── the norm of gradients: squares on two grids of integers, whose sums no order changes ──────────


@triton.jit
def values_of(table, tiles, start, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return values of a program's gradient, which is bfloat16 (0), float16 (1) or float32 (2)."""
    row = table + tl.load(tiles + tl.program_id(0)) * 5
    begin = (tl.program_id(0) - tl.load(row + 1)) * SPAN
    left = tl.minimum(tl.load(row + 2) - begin, SPAN).to(tl.int32)
    dtype = tl.load(row + 4)
    is_aligned = (tl.load(row) | tl.load(row + 2)) % 16 == 0
    tile = row, begin, left, is_aligned.to(tl.int32)
    at = start + tl.arange(0, BLOCK)
    if dtype == 2:
        x = float_of(load(tile, at, 0, 4))
    else:
        word = load(tile, at, 0, 2)
        x = float_of(word << 16)
        if dtype == 1:
            bits = ((word & 0x7FFF) << 13) | ((word << 16) & SIGN)
            x = float_of(bits) * 2.0**112
            x = tl.where(tl.abs(x) >= 65536.0, float_of(bits | 0x7F800000), x)
    return x


@triton.jit
def largest(table, tiles, peaks, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    bits = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, SPAN, BLOCK):
        bits = tl.maximum(bits, int_of(values_of(table, tiles, start, SPAN, BLOCK)) & MAGNITUDE)
    tl.atomic_max(peaks + tl.load(tiles + tl.program_id(0)), tl.reduce(bits, 0, larger_of))


@triton.jit
def to_even(x):
    """Round a float64: below 2^52 the sum with it rounds off the bits below 1."""
    near = tl.where(x < 0, x - 2.0**52 + 2.0**52, x + 2.0**52 - 2.0**52)
    return tl.where(tl.abs(x) >= 2.0**52, x, near)


@triton.jit
def squares(
    table, tiles, scales, sums, SPAN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    coarse, fine = tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, SPAN, BLOCK):
        x = values_of(table, tiles, start, SPAN, BLOCK).to(tl.float64)
        scaled = x * x * tl.load(scales)
        whole = to_even(scaled)
        coarse += whole.to(tl.int64)
        fine += to_even((scaled - whole) * tl.load(scales + 1)).to(tl.int64)
    group = tl.load(table + tl.load(tiles + tl.program_id(0)) * 5 + 3)
    slot = sums + (group * SLOTS + tl.program_id(0) % SLOTS) * 2
    tl.atomic_add(slot, tl.reduce(coarse, 0, sum_of))
    tl.atomic_add(slot + 1, tl.reduce(fine, 0, sum_of))
