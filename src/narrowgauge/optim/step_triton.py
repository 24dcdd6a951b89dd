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

# ── constants of a (rule, storage) ────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Field:
    """Hold where a code lies, and which of the random bits it drops bits by."""

    code: Code = FLOAT32
    plane: int = 0
    shift: int = 0
    drop: int = 0
    part: int = 0
    is_random: bool = False
    start: int = 0
    borrowed: int = 0


@dataclass(frozen=True)
class Row:
    """Hold the constants of a (rule, storage).

    ``weight`` describes what lies beside the visible weight, and ``beside`` names it. ``bytes`` are
    those of the weight, ``bytes0`` and so on those of the planes, 0 for none.
    """

    rule: str
    scalars: int
    states: int
    penalized: bool
    given: bool
    visible: str
    below: int
    beside: str
    tail_bits: int
    is_random: bool
    is_scaled: bool
    is_expansion: bool
    has_pair: bool
    bytes: int
    bytes0: int
    bytes1: int
    bytes2: int
    bytes3: int
    planes: int
    addresses: int
    weight: Field
    first: Field
    second: Field
    second_low: Field


def row_of(rule: AnyRule, storage: Storage) -> Row:
    """Return the constants of a (rule, storage) that ``step.h`` supports."""
    planes = planes_of(storage)
    places = {}
    for number, plane in enumerate(planes):
        for name, shift, _ in plane.fields:
            places[name] = number, shift
    shares = codes.shares(storage)
    fields = []
    for name in ("weight", *dict(storage.states)):
        code = storage.code(name)
        stored = storage.beside[0] if name == "weight" and storage.beside else name
        share = shares.get(name)
        place = places.get(stored, (0, 0))
        dropped = codes.dropped_bits(code)
        start, borrowed = share or (0, 0)
        fields.append(Field(code, *place, dropped, 0, share is not None, start, borrowed))
    weight, *moments = fields
    second_low = Field()
    low = f"{storage.states[-1][0]}_low" if storage.states else ""
    if low in places:
        code = moments[-1].code.part(1)
        second_low = Field(code, *places[low], moments[-1].drop, 1)
    sizes = [plane.bits // 8 for plane in planes] + [0] * 4
    first, second = (*moments, Field(), Field())[:2]
    return Row(
        struct_of(rule), len(rule.scalars), len(storage.states), getattr(rule, "coupled", False),
        isinstance(rule, MatrixRule), storage.visible, VISIBLE[storage.visible][1],
        (*storage.beside, "")[0], storage.tail_bits, bool(shares), bool(storage.scaled),
        storage.arithmetic == "expansion", low in places, VISIBLE[storage.visible][0] // 8,
        *sizes[:4], len(planes), num_addresses(rule, storage), weight, first, second, second_low,
    )  # fmt: skip


# ── rounding ──────────────────────────────────────────────────────────────────────────────────────
# A float is shifted to the right with copies of its sign, and the copies are masked.


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
    if DROP == 0:
        return bits
    return bits + (((1 << DROP) >> 1) - 1 + ((bits >> DROP) & 1))


@triton.jit
def random_bits(key, seed):
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def dropped_by(random, field: tl.constexpr):
    """Return what is added before the bits that a code drops are cut."""
    if field.borrowed > 0:
        turned = (random >> (32 - field.borrowed)) & ((1 << field.borrowed) - 1)
        random = (random << field.borrowed) | turned
    return (random >> field.start) & ((1 << field.drop) - 1)


# ── the visible weight ────────────────────────────────────────────────────────────────────────────


@triton.jit
def visible_bits(word, VISIBLE: tl.constexpr):
    if VISIBLE == "float32":
        return word
    upper = word << 16
    if VISIBLE == "float16":
        upper = ((upper & 0x7FFF0000) >> 3) | (upper & -2147483648)
    return upper


@triton.jit
def visible_word(bits, VISIBLE: tl.constexpr):
    if VISIBLE == "float32":
        return bits
    if VISIBLE == "float16":
        bits = ((bits << 3) & 0x7FFF0000) | (bits & -2147483648)
    return bits >> 16


@triton.jit
def visible_value(bits, VISIBLE: tl.constexpr):
    x = float_of(bits)
    return x * 2.0**112 if VISIBLE == "float16" else x


@triton.jit
def gradient_value(word, VISIBLE: tl.constexpr):
    bits = visible_bits(word, VISIBLE)
    x = visible_value(bits, VISIBLE)
    if VISIBLE == "float16":
        x = tl.where(tl.abs(x) >= 65536.0, float_of(bits | 0x7F800000), x)
    return x


@triton.jit
def scaled(x, VISIBLE: tl.constexpr):
    return x * 2.0**-112 if VISIBLE == "float16" else x


@triton.jit
def in_range(bits, VISIBLE: tl.constexpr):
    if VISIBLE == "float16":
        bits = tl.minimum(bits & 0x7FFFFFFF, 31 << 23) | (bits & -2147483648)
    return bits


@triton.jit
def nearest(x, row: tl.constexpr):
    """Return the bits of the visible weight nearest to x, ties to even."""
    bits = rounded(quiet(scaled(x, row.visible)), row.below) & -(1 << row.below)
    return in_range(bits, row.visible)


@triton.jit
def half_up(x, row: tl.constexpr):
    """Return the bits of the visible weight nearest to x, ties up: a tail says more."""
    bits = quiet(scaled(x, row.visible)) + ((1 << row.below) >> 1)
    return in_range(bits & -(1 << row.below), row.visible)


# ── codes of states ───────────────────────────────────────────────────────────────────────────────


@triton.jit
def decode(w0, w1, w2, w3, field: tl.constexpr, back):
    word = plane_of(w0, w1, w2, w3, field)
    code: tl.constexpr = field.code
    if not code.is_window:
        return float_of(word << (32 - code.bits))
    LAST: tl.constexpr = (1 << (code.exponent_bits + code.mantissa_bits)) - 1
    bits = ((word >> field.shift) & LAST) << field.drop
    if code.signed:
        bits |= (word << (32 - field.shift - code.bits)) & -2147483648
    x = float_of(bits) * 2.0 ** (code.lowest + 126)
    if code.scaled:
        x = x * (back * 2.0 ** -(field.part * (code.mantissa_bits + 1)))
    return x


@triton.jit
def encode(x, random, field: tl.constexpr, into, TO_ZERO: tl.constexpr = False):
    code: tl.constexpr = field.code
    if not code.is_window:
        bits = quiet(x) if TO_ZERO else rounded(quiet(x), field.drop)
        return bits if code.bits == 32 else (bits >> (32 - code.bits)) & ((1 << code.bits) - 1)
    inside = x
    if code.scaled:
        inside = x * (into * 2.0 ** (field.part * (code.mantissa_bits + 1)))
    bits = int_of(inside * 2.0 ** -(code.lowest + 126))
    LAST: tl.constexpr = (1 << (code.exponent_bits + code.mantissa_bits)) - 1
    magnitude = tl.minimum(bits & 0x7FFFFFFF, LAST << field.drop)
    if field.is_random:
        magnitude += dropped_by(random, field)
    elif not TO_ZERO:
        magnitude = rounded(magnitude, field.drop)
    step = magnitude >> field.drop
    if code.hold:
        step = tl.maximum(step, tl.minimum(int_of(x), 1))
    step = step << field.shift
    if code.signed:  # a NaN loses its sign: the mantissa carries into it
        sign = ((bits & (bits + 0x7FFFFF)) >> 31) & 1
        step |= sign << (field.shift + code.bits - 1)
    return step


@triton.jit
def plane_of(w0, w1, w2, w3, field: tl.constexpr):
    if field.plane == 0:
        return w0
    if field.plane == 1:
        return w1
    return w2 if field.plane == 2 else w3


@triton.jit
def added_to(w0, w1, w2, w3, field: tl.constexpr, bits):
    if field.plane == 0:
        w0 |= bits
    elif field.plane == 1:
        w1 |= bits
    elif field.plane == 2:
        w2 |= bits
    else:
        w3 |= bits
    return w0, w1, w2, w3


# ── weights: alone, a tail, a master, Kahan's low part ────────────────────────────────────────────


@triton.jit
def own_low(seen, low, row: tl.constexpr):
    """Return a low part that belongs to the visible weight, or 0."""
    total = scaled(visible_value(seen, row.visible) + low, row.visible)
    is_own = (rounded(int_of(total), row.below) & -(1 << row.below)) == seen
    return tl.where(is_own, low, 0.0)


@triton.jit
def read_weight(w0, w1, w2, w3, seen, row: tl.constexpr):
    """Return the weight that a rule reads, and the low part that is added to its change."""
    x = visible_value(seen, row.visible)
    low = float_of(seen & 0)
    field: tl.constexpr = row.weight
    if row.beside == "tail":
        word = plane_of(w0, w1, w2, w3, field)
        tail = (word << (32 - row.tail_bits - field.shift)) >> (32 - row.tail_bits - field.drop)
        total = seen + (tail & -(1 << field.drop))
        x = visible_value(tl.where((total ^ seen) < 0, seen, total), row.visible)
    elif row.beside == "master":
        master = float_of(plane_of(w0, w1, w2, w3, field))
        x = tl.where(half_up(master, row) == in_range(seen, row.visible), master, x)
    elif row.beside == "weight_low":
        low = own_low(seen, decode(w0, w1, w2, w3, field, 1.0), row)
    return x, low


@triton.jit
def low_word(seen, rest, row: tl.constexpr):
    """Encode a low part to nearest, or toward zero where the nearest one does not belong."""
    field: tl.constexpr = row.weight
    word = encode(rest, 0, field, 1.0)
    near = decode(word, word, word, word, field, 1.0)
    total = scaled(visible_value(seen, row.visible) + near, row.visible)
    is_own = (rounded(int_of(total), row.below) & -(1 << row.below)) == seen
    return tl.where(is_own, word, encode(rest, 0, field, 1.0, True))


@triton.jit
def write_weight(x, low, change, random, row: tl.constexpr):
    """Return the bits of the new visible weight, and the word beside it, in place."""
    field: tl.constexpr = row.weight
    if row.beside == "weight_low":
        total = low + change
        seen = nearest(x + total, row)
        return seen, low_word(seen, total - (visible_value(seen, row.visible) - x), row)
    if row.beside == "master":
        return half_up(x + change, row), quiet(x + change)
    bits = quiet(scaled(x + change, row.visible))
    if row.beside == "tail":
        if field.is_random:
            bits += dropped_by(random, field)
        bits = bits & -(1 << field.drop)
        seen = in_range((bits + ((1 << row.below) >> 1)) & -(1 << row.below), row.visible)
        tail = ((bits - seen) >> field.drop) & ((1 << row.tail_bits) - 1)
        return seen, tail << field.shift
    if field.is_random:
        seen = in_range((bits + dropped_by(random, field)) & -(1 << row.below), row.visible)
    else:
        seen = nearest(x + change, row)
    return seen, seen & 0


# ── rules: the change and new states, from scalars in the order of the Python rule ────────────────


@triton.jit
def toward(old, x, share):
    return tl.where(share != 1, old + (x - old) * share, x)


@triton.jit
def adam(g, m, v, s):
    m = toward(m, g, tl.load(s))
    v = tl.where(v < float("inf"), toward(v, g * g, tl.load(s + 1)), v)
    negative_step_size, inverse_root_correction2 = tl.load(s + 2), tl.load(s + 3)
    down = tl.sqrt_rn(v) * inverse_root_correction2 + tl.load(s + 4)  # eps
    return tl.div_rn(m, down) * negative_step_size, m, v


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
        return change + tl.load(s + 5) * w, m, v
    if RULE == "Adam":
        return adam(g + w * tl.load(s + 5), m, v, s)
    if RULE == "SGD":
        change, m = sgd(w, g, m, s)
        return change, m, v
    if RULE == "Lion":
        change, m = lion(w, g, m, s)
        return change, m, v
    return (g + w * tl.load(s)) * tl.load(s + 1), m, v  # SGD without momentum


@triton.jit
def averaged(g, m, s, RULE: tl.constexpr):
    """Return what the direction of a matrix rule is computed from, and the new momentum."""
    if RULE == "Muon":
        m = toward(m, g, tl.load(s + 2))
        g = tl.where(tl.load(s + 3) != 0, g + (m - g) * tl.load(s + 1), m)
    return g, m


# ── Collage: every operation rounds to the weight's format ────────────────────────────────────────


@triton.jit
def rn(x, DROP: tl.constexpr):
    bits = rounded(int_of(x), DROP) & -(1 << DROP)
    return tl.where(x == x, float_of(bits), float("nan"))


@triton.jit
def grow(high, low, x, DROP: tl.constexpr):
    total = rn(high + x, DROP)
    of_x = total - high
    error = rn(low + ((high - (total - of_x)) + (x - of_x)), DROP)
    result = rn(total + error, DROP)
    return result, error - (result - total)


@triton.jit
def multiply(high, low, by, by_low, DROP: tl.constexpr):
    exact = high * by
    product = rn(exact, DROP)
    error = rn(exact - product, DROP)
    rest = rn(rn(rn(low * by, DROP) + high * by_low, DROP) + error, DROP)
    result = rn(product + rest, DROP)
    return result, rest - (result - product)


@triton.jit
def collage(w, g, m, v, v_low, s, row: tl.constexpr):
    """Return the change and the new moments."""
    D: tl.constexpr = row.below
    one_minus_beta1, one_minus_beta2 = tl.load(s), tl.load(s + 1)
    beta2 = 1 - one_minus_beta2
    g = rn(float_of(quiet(g)), D)
    m = rn(rn(m * (1 - one_minus_beta1), D) + one_minus_beta1 * g, D)
    square = one_minus_beta2 * g * g
    if row.has_pair:
        high = rn(beta2, D)
        v, v_low = multiply(v, v_low, high, rn(beta2 - high, D), D)
        v, v_low = grow(v, v_low, rn(square, D), D)
    else:
        v = rn(rn(v * beta2, D) + square, D)
    down = rn(rn(rn(tl.sqrt_rn(v), D) * tl.load(s + 3), D) + tl.load(s + 4), D)
    step = rn(tl.div_rn(rn(m * tl.load(s + 2), D), down), D)
    return rn(step + rn(w * tl.load(s + 5), D), D), m, v, v_low


# ── programs ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def sum_of(a, b):
    return a + b


@triton.jit
def load_words(row_of_table, PLACE: tl.constexpr, begin, at, left, aligned, TYPE: tl.constexpr):
    address = tl.load(row_of_table + PLACE).to(tl.pointer_type(TYPE))
    if aligned != 0:  # a mask in whole vectors
        x = tl.load(tl.multiple_of(address + begin, 16) + at, mask=at < left // 16 * 16, other=0)
    else:
        x = tl.load(address + begin + at, mask=at < left, other=0)
    return x


@triton.jit
def load_plane(row_of_table, PLACE: tl.constexpr, begin, at, left, aligned, BYTES: tl.constexpr):
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    return load_words(row_of_table, PLACE, begin, at, left, aligned, TYPE).to(tl.int32)


@triton.jit
def store_plane(
    row_of_table, PLACE: tl.constexpr, begin, at, left, aligned, x, BYTES: tl.constexpr
):
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    address = tl.load(row_of_table + PLACE).to(tl.pointer_type(TYPE))
    if aligned != 0:
        tl.store(tl.multiple_of(address + begin, 16) + at, x.to(TYPE), mask=at < left // 16 * 16)
    else:
        tl.store(address + begin + at, x.to(TYPE), mask=at < left)


@triton.jit
def load_gradient(row_of_table, begin, at, left, aligned, wide, row: tl.constexpr):
    if wide != 0:
        g = load_words(row_of_table, 1, begin, at, left, aligned, tl.float32)
    else:
        word = load_plane(row_of_table, 1, begin, at, left, aligned, row.bytes)
        g = gradient_value(word, row.visible)
    return g


@triton.jit
def load_state(row_of_table, begin, at, left, aligned, row: tl.constexpr):
    """Return the words of up to four planes."""
    w0 = at & 0
    w1, w2, w3 = w0, w0, w0
    if row.planes > 0:
        w0 = load_plane(row_of_table, 2, begin, at, left, aligned, row.bytes0)
    if row.planes > 1:
        w1 = load_plane(row_of_table, 3, begin, at, left, aligned, row.bytes1)
    if row.planes > 2:
        w2 = load_plane(row_of_table, 4, begin, at, left, aligned, row.bytes2)
    if row.planes > 3:
        w3 = load_plane(row_of_table, 5, begin, at, left, aligned, row.bytes3)
    return w0, w1, w2, w3


@triton.jit
def find(table, tiles, row: tl.constexpr):
    """Return a program's row of the table, its sizes, its place, first element and length."""
    program = tl.program_id(0)
    width = row.addresses + SIZES
    row_of_table = table + tl.load(tiles + program).to(tl.int64) * width
    sizes = row_of_table + row.addresses
    extent, numel = tl.load(sizes), tl.load(sizes + 1)
    place = program - tl.load(sizes + 2)
    begin = place * extent
    return row_of_table, sizes, place, begin, tl.minimum(numel - begin, extent).to(tl.int32)


@triton.jit
def peaks_of(row_of_table, begin, left, aligned, wide, row: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest magnitudes of a row's gradient and weight, in which a NaN is the largest."""
    most_gradient = tl.full([BLOCK], 0, tl.int32)
    most_weight = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = load_gradient(row_of_table, begin, at, left, aligned, wide, row)
        most_gradient = tl.maximum(most_gradient, int_of(g) & 0x7FFFFFFF)
        if row.penalized:
            word = load_plane(row_of_table, 0, begin, at, left, aligned, row.bytes)
            weight = gradient_value(word, row.visible)
            most_weight = tl.maximum(most_weight, int_of(weight) & 0x7FFFFFFF)
    gradient = tl.reduce(most_gradient, 0, larger_of)
    return float_of(gradient), float_of(tl.reduce(most_weight, 0, larger_of))


@triton.jit
def finite(bound):
    return tl.where(bound < float("inf"), bound, 3e38)


@triton.jit
def end_of(bound, SIGN: tl.constexpr):
    """Return the power of two not below a bound, or its inverse."""
    exponent = ((int_of(finite(bound)) + 0x7FFFFF) >> 23) - 127
    exponent = tl.minimum(tl.maximum(exponent, -112), 126)
    return float_of((127 + SIGN * exponent) << 23)


@triton.jit
def larger_magnitude(a, b):
    return float_of(tl.maximum(int_of(a) & 0x7FFFFFFF, int_of(b) & 0x7FFFFFFF))


@triton.jit
def bound_at(row_of_table, place, STATE: tl.constexpr, row: tl.constexpr):
    return tl.load(row_of_table + 2 + row.planes + STATE).to(tl.pointer_type(tl.float32)) + place


@triton.jit
def bounds_of(row_of_table, place, row: tl.constexpr):
    first = tl.load(bound_at(row_of_table, place, 0, row))
    second = first
    if row.states > 1:
        second = tl.load(bound_at(row_of_table, place, 1, row))
    return first, second


@triton.jit
def bound(weight, peak, old_first, old_second, s, row: tl.constexpr):
    """Bound the new states of a row by the rule's step of its largest magnitudes."""
    _, m, v = update(weight, peak, old_first, old_second, s, row.rule)
    _, minus_m, minus_v = update(weight, -1.0 * peak, old_first, old_second, s, row.rule)
    return finite(larger_magnitude(m, minus_m)), finite(larger_magnitude(v, minus_v))


@triton.jit
def step(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    row_of_table, sizes, place, begin, left = find(table, tiles, row)
    record, wide = tl.load(sizes + 4), tl.load(sizes + 5)
    aligned, number = tl.load(sizes + 6), tl.load(sizes + 7)
    gradient_scale, skip = tl.load(control), tl.load(control + 1) != 0
    s = numbers + number * (row.scalars + 1)
    seed = int_of(tl.load(s + row.scalars))
    first_into, first_back, second_into, second_back = 1.0, 1.0, 1.0, 1.0
    if row.is_scaled:
        found = records + (record + place) * (1 + row.penalized + row.states)
        if record < 0:
            peak, weight = peaks_of(row_of_table, begin, left, aligned, wide, row, BLOCK)
            old_first, old_second = bounds_of(row_of_table, place, row)
        else:
            peak, weight = tl.load(found), tl.load(found + row.penalized)
            old_first = tl.load(found + 1 + row.penalized)
            old_second = tl.load(found + row.penalized + row.states)
        peak = peak * tl.abs(gradient_scale)
        new_first, new_second = bound(weight, peak, old_first, old_second, s, row)
        new_first = tl.where(skip, old_first, new_first)
        new_second = tl.where(skip, old_second, new_second)
        first_into, first_back = end_of(new_first, -1), end_of(old_first, 1)
        second_into, second_back = end_of(new_second, -1), end_of(old_second, 1)
        tl.store(bound_at(row_of_table, place, 0, row), new_first)
        if row.states > 1:
            tl.store(bound_at(row_of_table, place, 1, row), new_second)
    end = tl.where(skip, 0, left)
    for start in range(0, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = load_plane(row_of_table, 0, begin, at, left, aligned, row.bytes)
        gradient = load_gradient(row_of_table, begin, at, left, aligned, wide, row)
        w0, w1, w2, w3 = load_state(row_of_table, begin, at, left, aligned, row)
        seen = visible_bits(word, row.visible)
        x, low = read_weight(w0, w1, w2, w3, seen, row)
        g = gradient * gradient_scale
        m = float_of(seen & 0)
        v, v_low = m, m
        if row.states > 0:
            m = decode(w0, w1, w2, w3, row.first, first_back)
        if row.states > 1:
            v = decode(w0, w1, w2, w3, row.second, second_back)
        random = seen & 0
        if row.is_random:
            bits = int_of(gradient) >> 16 & 0x7F
            if row.visible != "bfloat16":
                bits = int_of(scaled(gradient, row.visible)) & 0x7FFFFF
            random = random_bits(int_of(x) ^ bits, seed)
        if row.is_expansion:
            if row.has_pair:
                v_low = decode(w0, w1, w2, w3, row.second_low, second_back)
            x, low = float_of(quiet(x)), float_of(quiet(low))
            change, m, v, v_low = collage(x, g, m, v, v_low, s, row)
            x, low = grow(x, low, change, row.below)
            seen = nearest(x, row)
            beside = low_word(seen, low, row)
        else:
            if row.given:
                PLACE: tl.constexpr = 2 + row.planes
                change = load_words(row_of_table, PLACE, begin, at, left, aligned, tl.float32)
                _, m = averaged(g, m, s, row.rule)
                if row.scalars > 0:
                    change = change + (x + low if row.beside == "weight_low" else x) * tl.load(s)
            else:
                change, m, v = update(x, g, m, v, s, row.rule)
            seen, beside = write_weight(x, low, change, random, row)
        w0 = at & 0
        w1, w2, w3 = w0, w0, w0
        if row.beside != "":
            w0, w1, w2, w3 = added_to(w0, w1, w2, w3, row.weight, beside)
        if row.states > 0:
            code = encode(m, random, row.first, first_into)
            w0, w1, w2, w3 = added_to(w0, w1, w2, w3, row.first, code)
        if row.states > 1:
            code = encode(v, random, row.second, second_into)
            w0, w1, w2, w3 = added_to(w0, w1, w2, w3, row.second, code)
        if row.has_pair:
            code = encode(v_low, random, row.second_low, second_into)
            w0, w1, w2, w3 = added_to(w0, w1, w2, w3, row.second_low, code)
        word = visible_word(seen, row.visible)
        store_plane(row_of_table, 0, begin, at, left, aligned, word, row.bytes)
        if row.planes > 0:
            store_plane(row_of_table, 2, begin, at, left, aligned, w0, row.bytes0)
        if row.planes > 1:
            store_plane(row_of_table, 3, begin, at, left, aligned, w1, row.bytes1)
        if row.planes > 2:
            store_plane(row_of_table, 4, begin, at, left, aligned, w2, row.bytes2)
        if row.planes > 3:
            store_plane(row_of_table, 5, begin, at, left, aligned, w3, row.bytes3)


@triton.jit
def find_peaks(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    """Write the records of rows that ranks share: largest magnitudes and bounds so far."""
    row_of_table, sizes, place, begin, left = find(table, tiles, row)
    record, wide, aligned = tl.load(sizes + 4), tl.load(sizes + 5), tl.load(sizes + 6)
    if record >= 0:
        gradient, weight = peaks_of(row_of_table, begin, left, aligned, wide, row, BLOCK)
        found = records + (record + place) * (1 + row.penalized + row.states)
        tl.store(found, gradient)
        if row.penalized:
            tl.store(found + 1, weight)
        first, second = bounds_of(row_of_table, place, row)
        tl.store(found + 1 + row.penalized, first)
        if row.states > 1:
            tl.store(found + 2 + row.penalized, second)


@triton.jit
def average(table, tiles, numbers, control, records, row: tl.constexpr, BLOCK: tl.constexpr):
    """Write the average of the gradient of a matrix rule into its change."""
    row_of_table, sizes, _, begin, left = find(table, tiles, row)
    wide, aligned, number = tl.load(sizes + 5), tl.load(sizes + 6), tl.load(sizes + 7)
    s = numbers + number * (row.scalars + 1)
    address = tl.load(row_of_table + 2 + row.planes).to(tl.pointer_type(tl.float32)) + begin
    for start in range(0, left, BLOCK):
        at = start + tl.arange(0, BLOCK)
        g = load_gradient(row_of_table, begin, at, left, aligned, wide, row) * tl.load(control)
        if row.states > 0:
            w0, w1, w2, w3 = load_state(row_of_table, begin, at, left, aligned, row)
            g, _ = averaged(g, decode(w0, w1, w2, w3, row.first, 1.0), s, row.rule)
        tl.store(address + at, g, mask=at < left)


# ── the norm of gradients: squares on two grids of integers, whose sums no order changes ──────────


@triton.jit
def values_of(table, tiles, TYPE: tl.constexpr, start, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    row_of_table = table + tl.load(tiles + tl.program_id(0)) * 5
    begin = (tl.program_id(0) - tl.load(row_of_table + 1)) * SPAN
    address, numel = tl.load(row_of_table), tl.load(row_of_table + 2)
    at = start + tl.arange(0, BLOCK)
    left = numel - begin
    pointer = address.to(tl.pointer_type(TYPE))
    if (address | numel * 2) % 16 == 0:
        left = tl.multiple_of(left, 8)
        x = tl.load(tl.multiple_of(pointer, 16) + begin + at, mask=at < left, other=0.0)
    else:
        x = tl.load(pointer + begin + at, mask=at < left, other=0.0)
    return x.to(tl.float32)


@triton.jit
def largest_of(table, tiles, TYPE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    bits = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, SPAN, BLOCK):
        x = values_of(table, tiles, TYPE, start, SPAN, BLOCK)
        bits = tl.maximum(bits, int_of(x) & 0x7FFFFFFF)
    return tl.reduce(bits, 0, larger_of)


@triton.jit
def largest(table, tiles, peaks, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    tensor = tl.load(tiles + tl.program_id(0))
    dtype = tl.load(table + tensor * 5 + 4)
    if dtype == 0:
        bits = largest_of(table, tiles, tl.bfloat16, SPAN, BLOCK)
    elif dtype == 1:
        bits = largest_of(table, tiles, tl.float16, SPAN, BLOCK)
    else:
        bits = largest_of(table, tiles, tl.float32, SPAN, BLOCK)
    tl.atomic_max(peaks + tensor, bits)


@triton.jit
def to_even(x):
    """Round a float64 below 2^52: the sum with 2^52 rounds off the bits below 1."""
    near = tl.where(x < 0, x - 2.0**52 + 2.0**52, x + 2.0**52 - 2.0**52)
    return tl.where(tl.abs(x) >= 2.0**52, x, near)


@triton.jit
def squares_of(table, tiles, scales, TYPE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    coarse, fine = tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, SPAN, BLOCK):
        x = values_of(table, tiles, TYPE, start, SPAN, BLOCK).to(tl.float64)
        scaled_square = x * x * tl.load(scales)
        whole = to_even(scaled_square)
        coarse += whole.to(tl.int64)
        fine += to_even((scaled_square - whole) * tl.load(scales + 1)).to(tl.int64)
    return tl.reduce(coarse, 0, sum_of), tl.reduce(fine, 0, sum_of)


@triton.jit
def squares(
    table, tiles, scales, sums, SPAN: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    row_of_table = table + tl.load(tiles + tl.program_id(0)) * 5
    dtype = tl.load(row_of_table + 4)
    if dtype == 0:
        coarse, fine = squares_of(table, tiles, scales, tl.bfloat16, SPAN, BLOCK)
    elif dtype == 1:
        coarse, fine = squares_of(table, tiles, scales, tl.float16, SPAN, BLOCK)
    else:
        coarse, fine = squares_of(table, tiles, scales, tl.float32, SPAN, BLOCK)
    group = tl.load(row_of_table + 3)
    slot = sums + (group * SLOTS + tl.program_id(0) % SLOTS) * 2
    tl.atomic_add(slot, coarse)
    tl.atomic_add(slot + 1, fine)
