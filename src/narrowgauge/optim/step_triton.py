"""The step of all tensors on a GPU: each code, weight and rule, and one walk over the elements.

It computes what ``step.h`` does. A *program*
steps ``BLOCK`` elements, or one row that has scales: then it reads the gradient twice. Words stand
at the bottom of 32-bit integers. ``div_rn`` and ``sqrt_rn`` round as on a CPU, and a launch fuses no
multiply-add. Triton's interpreter runs this file on a CPU
(:func:`narrowgauge.torch_support.triton.load`).

Constants of a step are a ``row`` (:class:`narrowgauge.optim.table.Row`). Those of a code are a
``field`` (:class:`narrowgauge.optim.planes.Field`).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)
"""Elements that a program steps at a time: 16 bytes of a 16-bit tensor for each of 128 threads."""
SIZES = tl.constexpr(6)
"""Columns of the table after the addresses (:data:`narrowgauge.optim.table.SIZES`)."""
SIGN = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
TO_WHOLE = tl.constexpr(1.5 * 2.0**52)
"""A float64 that rounds off the bits below 1 of what is added to it, below 2^51."""

# ── rounding ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def float_of(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def int_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def times_power(x, EXPONENT: tl.constexpr):
    """Return x times a power of two. A product with 1 could change the bits of a NaN."""
    return x * 2.0**EXPONENT if EXPONENT != 0 else x


@triton.jit
def quiet(x):
    return tl.where(x == x, int_of(x), 0x7FC00000)


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def finite_or_zero(x):
    """Return the weight that a rule reads. It would turn the decay of an infinite one into NaN."""
    return tl.where(is_finite(x), x, 0.0)


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
def cut(bits, random, field: tl.constexpr):
    """Drop the lowest bits as a code does: by chance, or to nearest."""
    if field.share is not None:
        start: tl.constexpr = field.share[0]
        borrowed: tl.constexpr = field.share[1]
        if borrowed > 0:
            random = (random << borrowed) | ((random >> (32 - borrowed)) & ((1 << borrowed) - 1))
        bits = (bits + ((random >> start) & ((1 << field.drop) - 1))) & -(1 << field.drop)
    else:
        bits = rounded(bits, field.drop)
    return bits


# ── the visible weight: bits as of a float32, of float16 times 2^-112 ─────────────────────────────


@triton.jit
def bits_of(word, seen: tl.constexpr):
    bits = word << seen.gap
    return ((bits & MAGNITUDE) >> (seen.gap - seen.below)) | (bits & SIGN)


@triton.jit
def word_of(bits, seen: tl.constexpr):
    return (((bits << (seen.gap - seen.below)) & MAGNITUDE) | (bits & SIGN)) >> seen.gap


@triton.jit
def scaled(x, seen: tl.constexpr):
    return quiet(times_power(x, seen.exponent))


@triton.jit
def value_of(bits, seen: tl.constexpr):
    return times_power(float_of(bits), -seen.exponent)


@triton.jit
def in_range(bits, seen: tl.constexpr):
    return tl.minimum(bits & MAGNITUDE, seen.end) | (bits & SIGN)


@triton.jit
def nearest(x, seen: tl.constexpr):
    """Return the bits of the visible weight nearest to x, ties to even."""
    return in_range(rounded(scaled(x, seen), seen.below), seen)


@triton.jit
def half_up(bits, seen: tl.constexpr):
    """Return the nearest bits of a visible weight, ties up: a tail or a master says more."""
    return in_range((bits + (1 << seen.below >> 1)) & -(1 << seen.below), seen)


# ── codes of states: the upper bits of a float32 are a window of all its exponents ────────────────


@triton.jit
def decode(words, field: tl.constexpr, back):
    word = words[field.plane] >> field.shift
    bits = (word << field.drop) & field.last
    if field.code.signed:
        bits |= (word << (31 - field.code.magnitude_bits)) & SIGN
    x = times_power(float_of(bits), field.exponent)
    return x * back if field.code.scaled else x


@triton.jit
def encode(x, random, field: tl.constexpr, into, TO_ZERO: tl.constexpr = False):
    inside = x * into if field.code.scaled else x
    bits = quiet(times_power(inside, -field.exponent))
    magnitude = tl.minimum(bits & MAGNITUDE, field.last)
    if not TO_ZERO:
        magnitude = cut(magnitude, random, field)
    step = magnitude >> field.drop
    if field.code.hold:
        step = tl.maximum(step, tl.minimum(int_of(x), 1))
    if field.code.signed:
        step |= ((bits >> 31) & 1) << field.code.magnitude_bits
    return step << field.shift


# ── weights: alone, a tail, a master, or Kahan's low part ─────────────────────────────────────────


@triton.jit
def belongs(bits, low, seen: tl.constexpr):
    """Return whether a low part and the visible weight together round to it."""
    total = int_of(times_power(value_of(bits, seen) + low, seen.exponent))
    return rounded(total, seen.below) == bits


@triton.jit
def read_weight(words, bits, seen: tl.constexpr, field: tl.constexpr):
    """Return the weight that a rule reads, and the low part that is added to its change."""
    x = value_of(bits, seen)
    low = x * 0
    if field.name == "tail":
        up: tl.constexpr = 32 - field.bits
        tail = (words[field.plane] << (up - field.shift)) >> (up - field.drop)
        total = bits + (tail & -(1 << field.drop))
        x = value_of(tl.where((total ^ bits) < 0, bits, total), seen)
    elif field.name == "master":
        master = float_of(words[field.plane])
        is_own = half_up(scaled(master, seen), seen) == in_range(bits, seen)
        x = tl.where(is_own, master, x)
    elif field.name == "weight_low":
        low = decode(words, field, 1.0)
        low = tl.where(belongs(bits, low, seen), low, 0.0)
    return x, low


@triton.jit
def low_word(bits, rest, seen: tl.constexpr, field: tl.constexpr):
    """Encode a low part to nearest, or toward zero where the nearest one does not belong."""
    word = encode(rest, 0, field, 1.0)
    is_own = belongs(bits, decode((word, word), field, 1.0), seen)
    return tl.where(is_own, word, encode(rest, 0, field, 1.0, True))


@triton.jit
def write_weight(x, low, change, random, seen: tl.constexpr, field: tl.constexpr):
    """Return the bits of the new visible weight, and the word beside it, in place."""
    if field.name == "weight_low":
        bits = nearest(x + (low + change), seen)
        return bits, low_word(bits, (low + change) - (value_of(bits, seen) - x), seen, field)
    new = x + change
    if field.name == "master":
        return half_up(scaled(new, seen), seen), quiet(new)
    exact = cut(scaled(new, seen), random, field)
    if field.name == "tail":
        bits = half_up(exact, seen)
        return bits, (((exact - bits) >> field.drop) & ((1 << field.bits) - 1)) << field.shift
    return in_range(exact, seen), exact


# ── rules: the change and new states, from scalars in the order of the Python rule ────────────────


@triton.jit
def toward(old, x, share):
    return tl.where(share != 1, old + (x - old) * share, x)


@triton.jit
def adam(g, m, v, s):
    m = toward(m, g, s[0])
    v = tl.where(v < float("inf"), toward(v, g * g, s[1]), v)
    negative_step_size, inverse_root_correction2, eps = s[2:5]
    return tl.div_rn(m, tl.sqrt_rn(v) * inverse_root_correction2 + eps) * negative_step_size, m, v


@triton.jit
def update(w, g, m, v, s, RULE: tl.constexpr):
    change = g
    if RULE == "AdamW":
        change, m, v = adam(g, m, v, s)
        change = change + s[5] * w
    elif RULE == "Adam":
        change, m, v = adam(g + w * s[5], m, v, s)
    elif RULE == "SGD":
        weight_decay, momentum, gain, share_of_gradient, share_of_momentum, negative_lr = s
        g = g + w * weight_decay
        m = m * momentum + g * gain
        change = (g * share_of_gradient + m * share_of_momentum) * negative_lr
    elif RULE == "Lion":
        one_minus_beta1, one_minus_beta2, negative_lr, negative_decay = s
        direction = toward(m, g, one_minus_beta1)
        sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
        change = sign * negative_lr + w * negative_decay
        m = toward(m, g, one_minus_beta2)
    elif RULE == "PlainSGD":
        change = (g + w * s[0]) * s[1]
    elif RULE == "Muon":  # its change is a stream
        m = toward(m, g, s[2])
    return change, m, v


# ── programs: a `tile` is a row of the table, the first element, the number of elements, where the
# ── sizes are, the place in the tensor, and whether elements are whole vectors of 16 bytes ────────


@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def sum_of(a, b):
    return a + b


@triton.jit
def find(table, tiles, ADDRESSES: tl.constexpr):
    """Return a program's tile, but for the last."""
    program = tl.program_id(0)
    row = table + tl.load(tiles + program).to(tl.int64) * (ADDRESSES + SIZES)
    sizes = row + ADDRESSES
    place = program - tl.load(sizes + 2)
    begin = place * tl.load(sizes)
    count = tl.minimum(tl.load(sizes + 1) - begin, tl.load(sizes)).to(tl.int32)
    return row, begin, count, sizes, place


@triton.jit
def places(tile, at, COLUMN: tl.constexpr, BYTES: tl.constexpr):
    """Return where elements of a tile lie, and which are inside."""
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    address = tl.load(tile[0] + COLUMN).to(tl.pointer_type(TYPE)) + tile[1]
    if tile[5]:
        return tl.multiple_of(address, 16) + at, at < tile[2] // 16 * 16
    return address + at, at < tile[2]


@triton.jit
def load(tile, at, COLUMN: tl.constexpr, BYTES: tl.constexpr):
    place, is_inside = places(tile, at, COLUMN, BYTES)
    return tl.load(place, mask=is_inside, other=0).to(tl.int32)


@triton.jit
def store(tile, at, COLUMN: tl.constexpr, BYTES: tl.constexpr, x):
    place, is_inside = places(tile, at, COLUMN, BYTES)
    tl.store(place, x.to(place.dtype.element_ty), mask=is_inside)


@triton.jit
def load_values(tile, at, COLUMN: tl.constexpr, format):
    """Return values of bfloat16 (0), float16 (1) or float32 (2), with infinities and NaN."""
    if format == 2:
        x = float_of(load(tile, at, COLUMN, 4))
    else:
        bits = load(tile, at, COLUMN, 2) << 16
        x = float_of(bits)
        if format == 1:
            bits = ((bits & MAGNITUDE) >> 3) | (bits & SIGN)
            x = float_of(bits) * 2.0**112
            x = tl.where(tl.abs(x) >= 65536.0, float_of(bits | 0x7F800000), x)
    return x


@triton.jit
def peak_of(tile, COLUMN: tl.constexpr, format):
    """Return the largest magnitude of a gradient, in which a NaN is the largest, or of the finite
    weights.
    """
    most = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, tile[2], BLOCK):
        x = load_values(tile, start + tl.arange(0, BLOCK), COLUMN, format)
        if COLUMN == 0:
            x = finite_or_zero(x)
        most = tl.maximum(most, int_of(x) & MAGNITUDE)
    return float_of(tl.reduce(most, 0, larger_of))


# ── rows with scales: a rule's step of the largest magnitudes of a row bounds its new states ──────


@triton.jit
def finite(bound):
    return tl.where(bound < float("inf"), bound, 3e38)


@triton.jit
def end_of(bound, WAY: tl.constexpr):
    """Return the power of two not below a bound, or its inverse."""
    exponent = ((int_of(finite(bound)) + 0x7FFFFF) >> 23) - 127
    return float_of((127 + WAY * tl.minimum(tl.maximum(exponent, -112), 126)) << 23)


@triton.jit
def bound_of(x, y, old, is_idle):
    """Return the new bound of a row from a state's values at its largest magnitudes."""
    most = finite(float_of(tl.maximum(int_of(x) & MAGNITUDE, int_of(y) & MAGNITUDE)))
    # One huge gradient costs its element, not its row.
    limited = tl.where(old > 0, tl.minimum(most, old * 2.0**20), most)
    # The bound of a row without gradients would fall, and the next gradient would be huge to it.
    return tl.where(is_idle, tl.maximum(most, old), limited)


@triton.jit
def set_bounds(tile, control, s, row: tl.constexpr):
    """Set the bounds of a row. Return the multipliers of both codes: into their windows, and back."""
    sizes = tile[3]
    first = tl.load(sizes - row.layout.num_scaled).to(tl.pointer_type(tl.float32)) + tile[4]
    second = tl.load(sizes - 1).to(tl.pointer_type(tl.float32)) + tile[4]
    m, v = tl.load(first), tl.load(second)
    peak = peak_of(tile, 1, tl.load(sizes + 3)) * tl.abs(tl.load(control))
    weight = peak
    if row.is_penalized:
        weight = peak_of(tile, 0, row.layout.number)
    _, plus_m, plus_v = update(weight, peak, m, v, s, row.rule)
    _, minus_m, minus_v = update(weight, -1.0 * peak, m, v, s, row.rule)
    _, added_m, added_v = update(weight, peak, 0.0, 0.0, s, row.rule)
    new_m = bound_of(plus_m, minus_m, m, added_m == 0)
    new_v = bound_of(plus_v, minus_v, v, added_v == 0)
    is_stepped = tl.load(control + 1) == 0
    tl.store(second, new_v, mask=is_stepped)
    tl.store(first, new_m, mask=is_stepped)
    return end_of(new_m, -1), end_of(m, 1), end_of(new_v, -1), end_of(v, 1)


@triton.jit
def walk(tile, numbers, control, row: tl.constexpr):
    """Step the elements of a tile."""
    L: tl.constexpr = row.layout
    s = (numbers,)
    NUM_SCALARS: tl.constexpr = row.scalars
    for k in tl.static_range(0, NUM_SCALARS):
        s += (tl.load(numbers + k),)
    s = s[1:]
    seed = int_of(tl.load(numbers + row.scalars))
    scales = 1.0, 1.0, 1.0, 1.0
    if L.num_scaled > 0:
        scales = set_bounds(tile, control, s, row)
    for start in range(0, tl.where(tl.load(control + 1) == 0, tile[2], 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = bits_of(load(tile, at, 0, L.bytes[0]), L)
        gradient = load_values(tile, at, 1, tl.load(tile[3] + 3))
        words = (at,)  # the first stands for a field that is not stored
        for k in tl.static_range(1, len(L.bytes)):
            words += (load(tile, at, 1 + k, L.bytes[k]),)
        x, low = read_weight(words, bits, L, L.fields[0])
        m, v = decode(words, L.fields[1], scales[1]), decode(words, L.fields[2], scales[3])
        mantissa = (int_of(times_power(gradient, L.exponent)) & 0x7FFFFF) >> (L.below // 16 * 16)
        random = random_bits(int_of(x) ^ mantissa, seed)
        g = gradient * tl.load(control)
        change, m, v = update(finite_or_zero(x), g, m, v, s, row.rule)
        if row.is_given:
            change = float_of(load(tile, at, 1 + len(L.bytes), 4))
            whole = x + low if L.fields[0].name == "weight_low" else x
            change += finite_or_zero(whole) * s[0]
        bits, beside = write_weight(x, low, change, random, L, L.fields[0])
        first = encode(m, random, L.fields[1], scales[0])
        second = encode(v, random, L.fields[2], scales[2])
        new_words = beside, first, second
        store(tile, at, 0, L.bytes[0], word_of(bits, L))
        for k in tl.static_range(1, len(L.bytes)):
            word = at & 0
            for j in tl.static_range(0, 3):
                if L.fields[j].plane == k:
                    word |= new_words[j]
            store(tile, at, 1 + k, L.bytes[k], word)


@triton.jit
def step(table, tiles, numbers, control, row: tl.constexpr):
    """Step the elements of a program."""
    start, begin, count, sizes, place = find(table, tiles, row.addresses)
    numbers += tl.load(sizes + 5) * (row.scalars + 1)
    if tl.load(sizes + 4) != 0:
        walk((start, begin, count, sizes, place, True), numbers, control, row)
    else:
        walk((start, begin, count, sizes, place, False), numbers, control, row)


# ── the norm of gradients: squares on two grids of integers, whose sums no order changes ──────────


@triton.jit
def largest(table, tiles, peaks):
    start, begin, count, sizes, place = find(table, tiles, 2)
    if tl.load(sizes + 4) != 0:
        peak = peak_of((start, begin, count, sizes, place, True), 1, tl.load(sizes + 3))
    else:
        peak = peak_of((start, begin, count, sizes, place, False), 1, tl.load(sizes + 3))
    tl.atomic_max(peaks + tl.load(tiles + tl.program_id(0)), int_of(peak))


@triton.jit
def squares_of(tile, scales):
    coarse, fine = tl.full([BLOCK], 0, tl.int64), tl.full([BLOCK], 0, tl.int64)
    for start in range(0, tile[2], BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = load_values(tile, at, 1, tl.load(tile[3] + 3)).to(tl.float64)
        scaled_square = x * x * tl.load(scales)
        whole = (scaled_square + TO_WHOLE) - TO_WHOLE
        coarse += whole.to(tl.int64)
        rest = (scaled_square - whole) * tl.load(scales + 1)
        fine += ((rest + TO_WHOLE) - TO_WHOLE).to(tl.int64)
    return tl.reduce(coarse, 0, sum_of), tl.reduce(fine, 0, sum_of)


@triton.jit
def squares(table, tiles, scales, sums, SLOTS: tl.constexpr):
    start, begin, count, sizes, place = find(table, tiles, 2)
    if tl.load(sizes + 4) != 0:
        coarse, fine = squares_of((start, begin, count, sizes, place, True), scales)
    else:
        coarse, fine = squares_of((start, begin, count, sizes, place, False), scales)
    slot = sums + (tl.load(sizes + 5) * SLOTS + tl.program_id(0) % SLOTS) * 2
    tl.atomic_add(slot, coarse)
    tl.atomic_add(slot + 1, fine)
