"""The step of all tensors on a GPU: each code, weight and rule, and one walk over the elements.

It computes what ``cpp/`` does, for weights in bfloat16 or float32 without a low part. A *program*
steps some blocks of 256 elements. Words stand at the bottom of 32-bit integers. ``div_rn`` and
``sqrt_rn`` round as on a CPU, and a launch fuses no multiply-add. Triton's interpreter runs this file
on a CPU (:func:`narrowgauge.torch_support.triton.load`).

Constants of a step are a ``row`` (:class:`narrowgauge.optim.step.step_cpp.KernelRow`), constants of a
code a ``field`` (:class:`narrowgauge.optim.step.bit_layout.Field`).
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)
"""Elements that share scales (:data:`narrowgauge.optim.step.bit_layout.BLOCK`)."""
BLOCKS = tl.constexpr(4)
"""Blocks of a program: 16 bytes of a 16-bit tensor for each of 128 threads."""
SIZES = tl.constexpr(7)
"""Columns of the table after the addresses (:data:`narrowgauge.optim.step.launch.SIZES`)."""
SIGN = tl.constexpr(-(1 << 31))
MAGNITUDE = tl.constexpr(0x7FFFFFFF)

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
def canonical_nan(x):
    return tl.where(x == x, int_of(x), 0x7FC00000)


@triton.jit
def finite_or_zero(x):
    """Return the weight that a rule reads. It would turn the decay of an infinite one into NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def random_bits(key, seed):
    h = (key ^ seed) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


@triton.jit
def round_bits(bits, random, field: tl.constexpr):
    """Drop the lowest bits as a code does: by chance, or to nearest, ties to even."""
    if field.drop == 0:
        return bits
    if field.random_slice is not None:
        start: tl.constexpr = field.random_slice[0]
        borrowed: tl.constexpr = field.random_slice[1]
        if borrowed > 0:
            random = (random << borrowed) | ((random >> (32 - borrowed)) & ((1 << borrowed) - 1))
        addend = (random >> start) & ((1 << field.drop) - 1)
    else:
        addend = (1 << field.drop >> 1) - 1 + ((bits >> field.drop) & 1)
    return (bits + addend) & -(1 << field.drop)


@triton.jit
def half_up(bits, seen: tl.constexpr):
    """Return the nearest bits of a visible weight, ties up: a tail or a master says more."""
    return (bits + (1 << seen.below >> 1)) & -(1 << seen.below)


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
def encode(x, random, field: tl.constexpr, into):
    inside = x * into if field.code.scaled else x
    bits = canonical_nan(times_power(inside, -field.exponent))
    step = round_bits(tl.minimum(bits & MAGNITUDE, field.last), random, field) >> field.drop
    if field.code.hold:
        step = tl.maximum(step, tl.minimum(int_of(x), 1))
    if field.code.signed:
        step |= ((bits >> 31) & 1) << field.code.magnitude_bits
    return step << field.shift


# ── weights: alone, a tail or a master ────────────────────────────────────────────────────────────


@triton.jit
def read_weight(words, bits, seen: tl.constexpr, field: tl.constexpr):
    x = float_of(bits)
    if field.name == "tail":
        up: tl.constexpr = 32 - field.bits
        tail = (words[field.plane] << (up - field.shift)) >> (up - field.drop)
        total = bits + (tail & -(1 << field.drop))
        x = float_of(tl.where((total ^ bits) < 0, bits, total))
    elif field.name == "master":
        master = float_of(words[field.plane])
        x = tl.where(half_up(canonical_nan(master), seen) == bits, master, x)
    return x


@triton.jit
def write_weight(x, random, seen: tl.constexpr, field: tl.constexpr):
    """Return the bits of the new visible weight, and the word beside it, in place."""
    if field.name == "master":
        return half_up(canonical_nan(x), seen), canonical_nan(x)
    exact = round_bits(canonical_nan(x), random, field)
    if field.name == "tail":
        bits = half_up(exact, seen)
        return bits, (((exact - bits) >> field.drop) & ((1 << field.bits) - 1)) << field.shift
    return exact, exact


# ── rules: the change and new states, from scalars in the order of the Python rule ────────────────


@triton.jit
def lerp(old, x, weight):
    return tl.where(weight != 1, old + (x - old) * weight, x)


@triton.jit
def adam(g, m, v, s):
    m = lerp(m, g, s[0])
    v = tl.where(v < float("inf"), lerp(v, g * g, s[1]), v)
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
        direction = lerp(m, g, one_minus_beta1)
        sign = tl.where(direction > 0, 1.0, tl.where(direction < 0, -1.0, 0.0))
        change = sign * negative_lr + w * negative_decay
        m = lerp(m, g, one_minus_beta2)
    elif RULE == "PlainSGD":
        change = (g + w * s[0]) * s[1]
    elif RULE == "Muon":  # its change is a stream
        m = lerp(m, g, s[2])
    else:
        tl.static_assert(RULE == "Given", "no rule of this name is written in Triton")
    return change, m, v


# ── programs: a `tile` is a row of the table, the first element of each block, how many elements it
# ── has, the blocks' numbers, how many elements lie in whole vectors, and whether others do not ────


# Not tl.max and tl.sum, which the interpreter of this file does not run.


@triton.jit
def larger_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def sum_of(a, b):
    return a + b


@triton.jit
def find(
    table, tensor_of_program, control, ADDRESSES: tl.constexpr, IS_SCALED: tl.constexpr = False
):
    """Return a program's tile, and where the sizes of its tensor are. A skipped step has no elements."""
    program = tl.program_id(0)
    row = table + tl.load(tensor_of_program + program).to(tl.int64) * (ADDRESSES + SIZES)
    sizes = row + ADDRESSES
    block = ((program - tl.load(sizes + 2)) * BLOCKS).to(tl.int32) + tl.arange(0, BLOCKS)
    columns = tl.load(sizes + 6)
    begin = block.to(tl.int64) * BLOCK
    column = begin
    if IS_SCALED:  # else all elements are one row
        blocks_of_row = ((columns + BLOCK - 1) // BLOCK).to(tl.int32)
        column = (block % blocks_of_row).to(tl.int64) * BLOCK
        begin = (block // blocks_of_row).to(tl.int64) * columns + column
    size = tl.minimum(columns - column, BLOCK).to(tl.int32)
    size = tl.where(block < tl.load(sizes + 1), size, 0)
    if control is not None:
        size = tl.where(tl.load(control + 1) == 0, size, 0)
    num_whole = size // 16 * tl.load(sizes + 4).to(tl.int32) * 16
    is_odd = tl.reduce(size - num_whole, 0, larger_of) > 0
    return (row, begin, size, block, num_whole, is_odd), sizes


@triton.jit
def places(tile, COLUMN: tl.constexpr, BYTES: tl.constexpr):
    """Return where the elements of a tile lie, ``[blocks, elements]``, which stand in whole vectors,
    and which others are inside.
    """
    TYPE: tl.constexpr = tl.int32 if BYTES == 4 else (tl.int16 if BYTES == 2 else tl.int8)
    address = (tl.load(tile[0] + COLUMN).to(tl.pointer_type(TYPE)) + tile[1])[:, None]
    address = tl.multiple_of(address, (16, 16))  # if it is not, no element stands in a whole vector
    at = tl.arange(0, BLOCK)[None, :]
    is_whole = at < tile[4][:, None]
    return address + at, is_whole, (at < tile[2][:, None]) & (is_whole == 0)


@triton.jit
def load(tile, COLUMN: tl.constexpr, BYTES: tl.constexpr):
    """Load whole vectors of 16 bytes, and other elements one by one: the ends of a tensor."""
    place, is_whole, is_other = places(tile, COLUMN, BYTES)
    x = tl.load(place, mask=is_whole, other=0)
    if tile[5]:
        x = tl.where(is_other, tl.load(place, mask=is_other, other=0), x)
    return x.to(tl.int32)


@triton.jit
def store(tile, COLUMN: tl.constexpr, BYTES: tl.constexpr, x):
    place, is_whole, is_other = places(tile, COLUMN, BYTES)
    x = x.to(place.dtype.element_ty)
    tl.store(place, x, mask=is_whole)
    if tile[5]:
        tl.store(place, x, mask=is_other)


@triton.jit
def load_gradient(tile, format):
    """Return a gradient in bfloat16 (0), float16 (1) or float32 (2), with infinities and NaN."""
    if format == 2:
        x = float_of(load(tile, 1, 4))
    else:
        bits = load(tile, 1, 2)
        x = float_of(bits << 16)
        if format == 1:
            x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def peaks_of(x):
    """Return the largest magnitude of each block. A NaN is the largest."""
    return float_of(tl.reduce(int_of(x) & MAGNITUDE, 1, larger_of))


# ── blocks with scales: a rule's step of the largest magnitudes of a block bounds its new states ──


@triton.jit
def finite(bound):
    return tl.where(bound < float("inf"), bound, 3e38)


@triton.jit
def end_of(bound, WAY: tl.constexpr):
    """Return the power of two not below a bound, or its inverse."""
    exponent = ((int_of(finite(bound)) + 0x7FFFFF) >> 23) - 127
    end = float_of((127 + WAY * tl.minimum(tl.maximum(exponent, -112), 126)) << 23)
    return end[:, None]


@triton.jit
def bound_of(x, y, old, is_idle):
    """Return the new bound of a block from a state's values at its largest magnitudes."""
    most = finite(float_of(tl.maximum(int_of(x) & MAGNITUDE, int_of(y) & MAGNITUDE)))
    # One huge gradient costs its element, not its block.
    limited = tl.where(old > 0, tl.minimum(most, old * 2.0**20), most)
    # The bound of a block without gradients would fall, and the next gradient would be huge to it.
    return tl.where(is_idle, tl.maximum(most, old), limited)


@triton.jit
def set_bounds(tile, sizes, slope, weight, s, row: tl.constexpr):
    """Set the bounds of blocks. Return the multipliers of both codes: into their windows, and back."""
    first = tl.load(sizes - row.num_scaled).to(tl.pointer_type(tl.float32)) + tile[3]
    second = tl.load(sizes - 1).to(tl.pointer_type(tl.float32)) + tile[3]
    is_inside = tile[2] > 0
    m, v = tl.load(first, mask=is_inside, other=0.0), tl.load(second, mask=is_inside, other=0.0)
    _, plus_m, plus_v = update(weight, slope, m, v, s, row.rule)
    _, minus_m, minus_v = update(weight, -1.0 * slope, m, v, s, row.rule)
    _, added_m, added_v = update(weight, slope, m * 0, v * 0, s, row.rule)
    new_m = bound_of(plus_m, minus_m, m, added_m == 0)
    new_v = bound_of(plus_v, minus_v, v, added_v == 0)
    if row.num_scaled > 1:  # else the second is the first, which other warps still read
        tl.store(second, new_v, mask=is_inside)
    tl.store(first, new_m, mask=is_inside)
    return end_of(new_m, -1), end_of(m, 1), end_of(new_v, -1), end_of(v, 1)


@triton.jit
def step(table, tensor_of_program, numbers, control, row: tl.constexpr):
    """Step the elements of a program, unless the step is skipped."""
    tile, sizes = find(table, tensor_of_program, control, row.addresses, row.num_scaled > 0)
    s = (numbers,)
    NUM_SCALARS: tl.constexpr = row.scalars
    for k in tl.static_range(0, NUM_SCALARS):
        s += (tl.load(numbers + k),)
    s = s[1:]
    seed = int_of(tl.load(numbers + row.scalars))
    bits = load(tile, 0, row.bytes[0]) << row.below
    gradient = load_gradient(tile, tl.load(sizes + 3))
    words = (bits,)  # the first stands for a field that is not stored
    for k in tl.static_range(1, len(row.bytes)):
        words += (load(tile, 1 + k, row.bytes[k]),)
    scales = 1.0, 1.0, 1.0, 1.0
    if row.num_scaled > 0:
        slope = peaks_of(gradient) * tl.abs(tl.load(control))
        weight = peaks_of(finite_or_zero(float_of(bits)))
        scales = set_bounds(tile, sizes, slope, weight, s, row)
    x = read_weight(words, bits, row, row.fields[0])
    m, v = decode(words, row.fields[1], scales[1]), decode(words, row.fields[2], scales[3])
    random = random_bits(int_of(x) ^ ((int_of(gradient) & 0x7FFFFF) >> row.below), seed)
    g = gradient * tl.load(control)
    change, m, v = update(finite_or_zero(x), g, m, v, s, row.rule)
    if row.is_given:
        change = float_of(load(tile, 1 + len(row.bytes), 4)) + finite_or_zero(x) * s[0]
    bits, beside = write_weight(x + change, random, row, row.fields[0])
    first = encode(m, random, row.fields[1], scales[0])
    second = encode(v, random, row.fields[2], scales[2])
    new_words = beside, first, second
    store(tile, 0, row.bytes[0], bits >> row.below)
    for k in tl.static_range(1, len(row.bytes)):
        word = bits & 0
        for j in tl.static_range(0, 3):
            if row.fields[j].plane == k:
                word |= new_words[j]
        store(tile, 1 + k, row.bytes[k], word)


# ── the norm of gradients: the exact sum of squares, as integers at fixed places ──────────────────


@triton.jit
def add_counts(word, counts):
    """Add the sum of counts: its low 32 bits to a word, and the others 16 words on."""
    count = tl.reduce(tl.reduce(counts.to(tl.int64), 1, sum_of), 0, sum_of)
    tl.atomic_add(word, count & 0xFFFFFFFF)
    tl.atomic_add(word + 16, count >> 32)


@triton.jit
def squares(table, tensor_of_program, words, SLOTS: tl.constexpr, WORDS: tl.constexpr):
    """Add squares on two grids. What is too far below the largest waits for a round of its own."""
    tile, sizes = find(table, tensor_of_program, None, 2)
    x = load_gradient(tile, tl.load(sizes + 3))
    slot = words + (tl.load(sizes + 5) * SLOTS + tl.program_id(0) % SLOTS) * WORDS
    bits = int_of(x) & MAGNITUDE
    largest = tl.reduce(tl.reduce(bits, 1, larger_of), 0, larger_of)
    if largest >= 0x7F800000:
        tl.atomic_add(slot + WORDS - 1, tl.where(largest > 0x7F800000, 1 << 32, 1).to(tl.int64))
        largest = 0
    while largest > 0:
        top = tl.maximum(largest >> 23, 1)
        is_near = bits >= tl.maximum(top - 23, 0) << 23
        values = tl.where(is_near, float_of(bits), 0.0).to(tl.float64)
        power = ((50 + 2 * 127 + 1023 - 2 * top).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        steps = values * values * power
        add_counts(slot + top + 41, tl.floor(steps))
        add_counts(slot + top + 20, (steps - tl.floor(steps)) * 2.0**42)
        bits = tl.where(is_near, 0, bits)
        largest = tl.reduce(tl.reduce(bits, 1, larger_of), 0, larger_of)
