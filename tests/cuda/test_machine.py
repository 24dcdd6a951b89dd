"""Each instruction of the machine that runs PTX against its definition, in Python's integers and fractions."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest

from cuda.machine import Memory, Program, Refused

HEAD = """
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
.reqntid {threads}
{{
mov.u32 %r1, %tid.x;
mad.wide.s32 %rd9, %r1, 32, 0;
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
add.s64 %rd1, %rd1, %rd9;
add.s64 %rd2, %rd2, %rd9;
"""


def run(lines: str, inputs: Sequence[Sequence[int]], threads: int | None = None, shared: int = 0) -> list[int]:
    """Run lines for each row of up to four inputs, in ``%rd11`` and up, also as 32 bits in ``%r11`` and up; gives ``%rd3``."""
    rows = np.zeros((len(inputs), 4), np.uint64)
    for row, values in zip(rows, inputs, strict=True):
        row[: len(values)] = np.array([value % (1 << 64) for value in values], np.uint64)
    count = threads or len(inputs)
    loads = [f"ld.global.b64 %rd{11 + k}, [%rd1 + {8 * k}];\ncvt.u32.u64 %r{11 + k}, %rd{11 + k};" for k in range(4)]
    text = "\n".join([HEAD.format(threads=count), *loads, lines, "st.global.b64 [%rd2], %rd3;", "ret;", "}"])
    memory = Memory(1 << 16)
    source = memory.put(rows.view(np.uint8).reshape(-1))
    target = memory.put(np.zeros(32 * count, np.uint8))
    Program.parse(text).run(memory, [source, target], shared=shared)
    return [int(found) for found in memory.get(target, 32 * count).view(np.uint64)[::4]]


def wrapped(value: int, bits: int, signed: bool) -> int:
    value %= 1 << bits
    return value - (1 << bits) if signed and value >> (bits - 1) else value


EDGES = (0, 1, 2, 3, 31, 32, 33, 63, 64, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x12345678, 0x2545F491)
PAIRS = list(itertools.product(EDGES, EDGES))

INTEGERS: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, bits: a + b,
    "sub": lambda a, b, bits: a - b,
    "mul.lo": lambda a, b, bits: a * b,
    "mul.hi": lambda a, b, bits: (a * b) >> bits,
    "and": lambda a, b, bits: a & b,
    "or": lambda a, b, bits: a | b,
    "xor": lambda a, b, bits: a ^ b,
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
}


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_integers(kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    register = "%r" if bits == 32 else "%rd"
    for op, definition in INTEGERS.items():
        if (op, bits) == ("mul.hi", 64):
            continue
        typed = f"b{bits}" if op in ("and", "or", "xor") else kind
        widen = f"cvt.u64.u32 %rd3, {register}4;" if bits == 32 else f"mov.b64 %rd3, {register}4;"
        found = run(f"{op}.{typed} {register}4, {register}11, {register}12;\n{widen}", PAIRS)
        for (a, b), result in zip(PAIRS, found, strict=True):
            wanted = definition(wrapped(a, bits, signed), wrapped(b, bits, signed), bits) % (1 << bits)
            assert result == wanted, (op, kind, a, b)


def test_two_halves_of_a_word() -> None:
    for op, definition in {"add": int.__add__, "sub": int.__sub__, "min": min, "max": max}.items():
        found = run(f"{op}.s16x2 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", PAIRS)
        for (a, b), result in zip(PAIRS, found, strict=True):
            halves = [[wrapped(x >> shift, 16, True) for x in (a, b)] for shift in (0, 16)]
            low, high = (definition(*half) % (1 << 16) for half in halves)
            assert result == low | high << 16, (op, a, b)


def test_integers_of_one_operand() -> None:
    for op, definition in {"neg.s32": lambda a: -a, "not.b32": lambda a: ~a, "abs.s32": abs}.items():
        found = run(f"{op} %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", [(a,) for a in EDGES])
        assert found == [definition(wrapped(a, 32, True)) % (1 << 32) for a in EDGES]


@pytest.mark.parametrize("op", ["div", "rem"])
@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_division_of_integers_is_toward_zero(op: str, kind: str) -> None:
    bits, signed = int(kind[1:]), kind[0] == "s"
    register = "%r" if bits == 32 else "%rd"
    pairs = [(a, b) for a, b in PAIRS if b and (wrapped(a, bits, signed), wrapped(b, bits, signed)) != (-(1 << 31), -1)]
    found = run(f"{op}.{kind} {register}4, {register}11, {register}12;\nmov.b64 %rd3, {register}4;", pairs)
    for (a, b), result in zip(pairs, found, strict=True):
        one, other = wrapped(a, bits, signed), wrapped(b, bits, signed)
        quotient = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
        wanted = quotient if op == "div" else one - other * quotient
        assert result % (1 << bits) == wanted % (1 << bits), (a, b)


@pytest.mark.parametrize("kind", ["s32", "u32", "b32"])
def test_shifts_beyond_the_width_leave_nothing_but_signs(kind: str) -> None:
    for op in ("shr", "shl") if kind == "b32" else ("shr",):
        found = run(f"{op}.{kind} %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", PAIRS)
        for (a, count), result in zip(PAIRS, found, strict=True):
            value = wrapped(a, 32, kind == "s32")
            assert result == (
                value << count if op == "shl" and count < 32 else 0 if op == "shl" else value >> count
            ) % (1 << 32)


def test_wide_products_and_fields() -> None:
    found = run("mad.wide.s32 %rd3, %r11, %r12, 5;", PAIRS)
    assert found == [(wrapped(a, 32, True) * wrapped(b, 32, True) + 5) % (1 << 64) for a, b in PAIRS]
    found = run("mul.wide.u32 %rd3, %r11, %r12;", PAIRS)
    assert found == [a * b for a, b in PAIRS]
    places = list(itertools.product(EDGES, (0, 7, 16, 31), (0, 1, 8, 16)))
    found = run("bfe.u32 %r4, %r11, %r12, %r13;\ncvt.u64.u32 %rd3, %r4;", places)
    assert found == [(a >> start) & ((1 << length) - 1) for a, start, length in places]
    found = run("bfe.s32 %r4, %r11, %r12, %r13;\ncvt.u64.u32 %rd3, %r4;", places)
    for (a, start, length), result in zip(places, found, strict=True):
        field = (wrapped(a, 32, True) >> start) % (1 << length)
        assert result == (wrapped(field, length, True) % (1 << 32) if length else 0), (a, start, length)


def test_shifts_of_two_registers() -> None:
    places = list(itertools.product(EDGES[-4:], EDGES[-4:], (0, 1, 4, 31, 32, 33)))
    for way, how in itertools.product("lr", ("wrap", "clamp")):
        found = run(f"shf.{way}.{how}.b32 %r4, %r11, %r12, %r13;\ncvt.u64.u32 %rd3, %r4;", places)
        for (low, high, count), result in zip(places, found, strict=True):
            by = count % 32 if how == "wrap" else min(count, 32)
            both = low | high << 32
            assert result == ((both << by) >> 32 if way == "l" else both >> by) % (1 << 32)


# ── floats ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bits32(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def value32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


SPECIAL = [
    0x00000000,
    0x80000000,
    0x00000001,
    0x807FFFFF,
    0x00800000,
    0x7F7FFFFF,
    0x7F800000,
    0xFF800000,
    0x7FC00000,
    0xFFC12345,
]
FLOATS = [*SPECIAL, *map(bits32, (1.0, -1.0, 1.5, 3.0, 1e-30, 7e-42, -2.5e37, 0.1, 1 / 3, 16777217.0))]
FLOAT_PAIRS = list(itertools.product(FLOATS, FLOATS))
CANONICAL = 0x7FFFFFFF


def nearest32(exact: Fraction) -> int:
    """The bits of the float32 nearest to a number, ties to even."""
    if not exact:
        return 0
    size, sign = abs(exact), 0x80000000 if exact < 0 else 0
    exponent = max(math.floor(math.log2(size.numerator) - math.log2(size.denominator)) - 1, -126)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    steps = size / Fraction(2) ** (exponent - 23)
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    if Fraction(2) ** (exponent - 23) * whole >= Fraction(2) ** 128:
        return sign | 0x7F800000
    return sign | ((exponent + 126) * (1 << 23) + whole if whole >= 1 << 23 else whole)


ARITHMETIC: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}


@pytest.mark.parametrize("op", list(ARITHMETIC))
def test_arithmetic_is_rounded_once_and_makes_one_nan(op: str) -> None:
    found = run(f"{op}.rn.f32 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", FLOAT_PAIRS)
    for (a, b), result in zip(FLOAT_PAIRS, found, strict=True):
        one, other = value32(a), value32(b)
        if not (math.isfinite(one) and math.isfinite(other)) or (op == "div" and other == 0):
            with np.errstate(all="ignore"):
                operation = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}[op]
                wanted = operation(np.float32(one), np.float32(other))
            assert result == (CANONICAL if np.isnan(wanted) else int(wanted.view(np.uint32))), (a, b)
            continue
        wanted = ARITHMETIC[op](Fraction(one), Fraction(other))
        if wanted:
            assert result == nearest32(wanted), (a, b)
        else:
            assert result & CANONICAL == 0


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_two_floats_of_a_register_are_two_floats(op: str) -> None:
    """As sm_100 has them."""
    lanes = [(a | b << 32, b | a << 32) for a, b in FLOAT_PAIRS]
    found = run(f"{op}.rn.f32x2 %rd3, %rd11, %rd12;", lanes)
    singles = [
        run(f"{op}.rn.f32 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", pairs)
        for pairs in (FLOAT_PAIRS, [(b, a) for a, b in FLOAT_PAIRS])
    ]
    assert found == [low | high << 32 for low, high in zip(*singles, strict=True)]


def test_square_roots() -> None:
    found = run("sqrt.rn.f32 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", [(a,) for a in FLOATS])
    for bits, result in zip(FLOATS, found, strict=True):
        value = value32(bits)
        if math.isnan(value) or value < 0:
            assert result == CANONICAL
        elif value in (0.0, math.inf):
            assert result == bits
        else:
            # Between the squares of the midpoints to its two neighbours.
            below, above = ((Fraction(value32(result)) + Fraction(value32(result + step))) / 2 for step in (-1, 1))
            assert below**2 < Fraction(value) < above**2


@pytest.mark.parametrize("suffix", ["", ".NaN"])
@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_order_zeros_and_prefer_numbers_unless_asked(op: str, suffix: str) -> None:
    found = run(f"{op}{suffix}.f32 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", FLOAT_PAIRS)
    for (a, b), result in zip(FLOAT_PAIRS, found, strict=True):
        numbers = [bits for bits in (a, b) if not math.isnan(value32(bits))]
        if not numbers or (suffix and len(numbers) < 2):
            assert result == CANONICAL
        else:
            order = [(value32(bits), bits >> 31 == 0, bits) for bits in numbers]
            assert result == (min if op == "min" else max)(order)[2]


def test_comparisons_with_nan() -> None:
    ordered: dict[str, Callable[[float, float], bool]] = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    for how in [*ordered, *(f"{how}u" for how in ordered), "num", "nan"]:
        found = run(f"setp.{how}.f32 %p1, %r11, %r12;\nselp.b64 %rd3, 1, 0, %p1;", FLOAT_PAIRS)
        for (a, b), result in zip(FLOAT_PAIRS, found, strict=True):
            one, other = value32(a), value32(b)
            unordered = math.isnan(one) or math.isnan(other)
            if how in ("num", "nan"):
                wanted = unordered == (how == "nan")
            else:
                wanted = how.endswith("u") if unordered else ordered[how.removesuffix("u")](one, other)
            assert bool(result) == wanted, (how, a, b)


def test_signs_are_bits_of_a_nan_too() -> None:
    cases = [(bits,) for bits in FLOATS]
    assert run("abs.f32 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", cases) == [bits & CANONICAL for bits in FLOATS]
    assert run("neg.f32 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", cases) == [bits ^ 0x80000000 for bits in FLOATS]


def test_the_sign_of_the_first_is_given_to_the_second() -> None:
    found = run("copysign.f32 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", FLOAT_PAIRS)
    assert found == [(b & CANONICAL) | (a & 0x80000000) for a, b in FLOAT_PAIRS]


def test_conversions() -> None:
    finite = [bits for bits in FLOATS if math.isfinite(value32(bits))]
    found = run("cvt.f64.f32 %rd3, %r11;", [(bits,) for bits in finite])
    assert [struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in found] == [value32(bits) for bits in finite]
    whole = run("cvt.rn.f32.u32 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", [(a,) for a in EDGES])
    assert whole == [nearest32(Fraction(a)) for a in EDGES]
    doubles = [0.5, 1.5, 2.5, -0.5, -1.5, 1e18, -1e18, 1e30, -1e30, 3.999]
    raw = [(int(struct.unpack("<Q", struct.pack("<d", x))[0]),) for x in doubles]
    even = run("cvt.rni.f64.f64 %rd4, %rd11;\ncvt.rzi.s64.f64 %rd3, %rd4;", raw)
    assert [wrapped(x, 64, True) for x in even] == [max(min(round(x), 2**63 - 1), -(2**63)) for x in doubles]
    assert run("cvt.s64.s32 %rd3, %r11;", [(a,) for a in EDGES]) == [wrapped(a, 32, True) % (1 << 64) for a in EDGES]
    with pytest.raises(AssertionError, match="a NaN becomes an integer"):
        run("cvt.rzi.s64.f64 %rd3, %rd11;", [(0x7FF8000000000000,)])


def test_the_upper_half_of_a_product_of_64_bits() -> None:
    numbers = [0, 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    pairs = list(itertools.product(numbers, numbers))
    for kind in ("s64", "u64"):
        given = [tuple(wrapped(each, 64, kind == "s64") for each in pair) for pair in pairs]
        assert run(f"mul.hi.{kind} %rd3, %rd11, %rd12;", pairs) == [(a * b >> 64) % (1 << 64) for a, b in given]


def test_a_nan_becomes_the_integer_zero() -> None:
    assert run("cvt.rzi.s32.f32 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", [(0x7FC00000,), (0xFFC00000,)]) == [0, 0]


def numbers_32() -> list[tuple[int]]:
    """Float32 numbers of every magnitude, ties of narrower formats and their neighbours, infinities and NaN."""
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 400, dtype=np.uint64).tolist()
    places = itertools.product((0, 1 << 31), range(0, 2000, 27), (-1, 0, 1))
    ties = [sign | 0x3C000000 + place * (1 << 15) + off for sign, place, off in places]
    return [(x,) for x in (*drawn, *ties, 0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001)]


@pytest.mark.parametrize("kind", ["bf16", "e4m3", "e5m2"])
def test_narrow_formats_are_those_of_ml_dtypes(kind: str) -> None:
    """To the nearest, ties to even; in eight bits what is too large becomes the largest. The first operand is the upper half."""
    import ml_dtypes

    given = numbers_32()
    values = np.array(given, np.uint32)[:, 0].view(np.float32)
    with np.errstate(all="ignore"):
        if kind == "bf16":
            found = run(
                "cvt.rn.bf16x2.f32 %r4, %r11, %r12;\ncvt.u64.u32 %rd3, %r4;", [(x, 0x3F800000) for (x,) in given]
            )
            assert {x & 0xFFFF for x in found} == {0x3F80}
            wanted, upper, nan = values.astype(ml_dtypes.bfloat16).view(np.uint16), 16, 0x7FFF
        else:
            lines = f"cvt.rn.satfinite.{kind}x2.f32 %rs1, %r11, %r12;\ncvt.u32.u16 %r4, %rs1;\ncvt.u64.u32 %rd3, %r4;"
            found = run(lines, [(x, 0x3F800000) for (x,) in given])
            assert len({x & 0xFF for x in found}) == 1
            dtype = ml_dtypes.float8_e4m3fn if kind == "e4m3" else ml_dtypes.float8_e5m2
            largest = np.float32(ml_dtypes.finfo(dtype).max)
            wanted, upper, nan = np.clip(values, -largest, largest).astype(dtype).view(np.uint8), 8, 0x7F
    for value, code, result in zip(values, wanted, found, strict=True):
        assert result >> upper == (nan if math.isnan(value) else code), value


def test_a_bfloat16_is_widened_by_zeros_and_loses_its_sign() -> None:
    halves = [0, 0x8000, 0x3F80, 0xBF81, 0x7F80, 0xFF80, 0x7FC0, 1, 0x8001]
    lines = "cvt.u16.u32 %rs1, %r11;\ncvt.f32.bf16 %r4, %rs1;\ncvt.u64.u32 %rd3, %r4;"
    assert run(lines, [(x,) for x in halves]) == [x << 16 for x in halves]
    pairs = [(x | y << 16,) for x, y in itertools.product(halves, halves)]
    assert run("abs.bf16x2 %r4, %r11;\ncvt.u64.u32 %rd3, %r4;", pairs) == [x & 0x7FFF7FFF for (x,) in pairs]


def test_a_nan_of_bfloat16_is_found() -> None:
    lines = "cvt.u16.u32 %rs1, %r11;\nsetp.nan.bf16 %p1, %rs1, %rs1;\nselp.b64 %rd3, 1, 0, %p1;"
    halves = [0x7F80, 0x7F81, 0xFF80, 0xFFC0, 0, 0x8000, 0x7FFF]
    assert run(lines, [(x,) for x in halves]) == [0, 1, 0, 1, 0, 0, 1]


def test_bytes_are_chosen_from_two_registers() -> None:
    given = (0x83128005, 0xFE7001C4)
    both = given[0] | given[1] << 32
    selectors = [0x3210, 0x7654, 0x7770, 0x5410, 0x8888, 0xFEDC, 0x0008]
    found = run("prmt.b32 %r4, %r11, %r12, %r13;\ncvt.u64.u32 %rd3, %r4;", [(*given, each) for each in selectors])

    def byte(choice: int) -> int:
        own = both >> 8 * (choice & 7) & 0xFF
        return (0xFF if own >> 7 else 0) if choice & 8 else own

    assert found == [sum(byte(each >> 4 * k & 15) << 8 * k for k in range(4)) for each in selectors]


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_butterfly_gives_each_lane_its_partners_value() -> None:
    found = run("shfl.sync.bfly.b32 %r4, %r11, 5, 31, -1;\ncvt.u64.u32 %rd3, %r4;", [(100 + k,) for k in range(64)])
    assert found == [100 + (k - k % 32) + (k % 32 ^ 5) for k in range(64)]


def test_a_lane_is_named_whose_value_is_taken() -> None:
    lines = "mul.lo.s32 %r5, %r11, 7;\nshfl.sync.idx.b32 %r4, %r11, %r5, 31, -1;\ncvt.u64.u32 %rd3, %r4;"
    found = run(lines, [(k,) for k in range(64)])
    assert found == [k - k % 32 + 7 * k % 32 for k in range(64)]


def test_matrices_are_stored_by_the_addresses_of_their_rows() -> None:
    """Four matrices of 8 × 8: lane l holds two numbers of row l / 4, from 2 (l mod 4) on; lane 8 m + r has where row r lies."""
    lines = """
    mul.wide.u32 %rd4, %r1, 16;
    xor.b64 %rd4, %rd4, 16;
    add.s32 %r5, %r11, 1000;
    add.s32 %r6, %r11, 2000;
    add.s32 %r7, %r11, 3000;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd4], {%r11, %r5, %r6, %r7};
    bar.sync 0;
    ld.shared.b32 %r8, [%rd4];
    cvt.u64.u32 %rd3, %r8;
    """
    found = run(lines, [(k,) for k in range(32)], shared=512)
    # Lane 8 m + r reads where it said that row r of matrix m is to lie: the first two numbers of it, which lane 4 r held.
    assert found == [1000 * (k // 8) + 4 * (k % 8) for k in range(32)]


def test_threads_that_part_meet_again() -> None:
    lines = """
        mov.b64 %rd3, 0;
        setp.lt.u32 %p1, %r11, 3;
        @!%p1 bra $L__END;
        $L__LOOP:
        add.s64 %rd3, %rd3, 10;
        add.s32 %r11, %r11, 1;
        setp.lt.u32 %p2, %r11, 3;
        @%p2 bra $L__LOOP;
        $L__END:
        add.s64 %rd3, %rd3, 1;"""
    assert run(lines, [(k,) for k in range(5)]) == [31, 21, 11, 1, 1]


def test_shared_memory_carries_values_over_a_barrier() -> None:
    lines = """
        shl.b32 %r5, %r1, 2;
        st.shared.b32 [%r5], %r11;
        bar.sync 0;
        xor.b32 %r5, %r5, 4;
        ld.shared.b32 %r6, [%r5];
        cvt.u64.u32 %rd3, %r6;"""
    assert run(lines, [(k,) for k in range(8)], shared=32) == [1, 0, 3, 2, 5, 4, 7, 6]
    parted = "setp.lt.u32 %p1, %r1, 4;\n@%p1 bar.sync 0;\nmov.b64 %rd3, 0;"
    with pytest.raises(AssertionError, match="not all threads of a block wait"):
        run(parted, [(k,) for k in range(8)])


def test_what_was_never_written_is_no_zero() -> None:
    lines = "setp.lt.u32 %p1, %r1, 1;\n@%p1 mov.b64 %rd3, 7;"
    assert run(lines, [(0,), (0,)]) == [7, 0xDEADBEEFDEADBEEF]


@pytest.mark.parametrize(
    "line",
    [
        "div.full.f32 %r4, %r11, %r12;",
        "div.approx.f32 %r4, %r11, %r12;",
        "sqrt.approx.f32 %r4, %r11;",
        "rsqrt.approx.f32 %r4, %r11;",
        "ex2.approx.f32 %r4, %r11;",
        "fma.rn.f32 %r4, %r11, %r12, %r13;",
        "add.f32 %r4, %r11, %r12;",
        "mul.f32 %r4, %r11, %r12;",
        "mul.rn.ftz.f32 %r4, %r11, %r12;",
        "add.rz.f32 %r4, %r11, %r12;",
        "abs.ftz.f32 %r4, %r11;",
        "cvt.rz.f32.f64 %r4, %rd11;",
        "cvt.rn.ftz.f32.f64 %r4, %rd11;",
        "mul.wide.u64 %rd4, %rd11, %rd12;",
        "bfe.s64 %rd4, %rd11, %r12, %r13;",
        "shfl.sync.up.b32 %r4, %r11, 1, 0, -1;",
        "add.rn.f16 %r4, %r11, %r12;",
        "add.rn.f16x2 %r4, %r11, %r12;",
        "fma.rn.f32x2 %rd4, %rd11, %rd12, %rd13;",
        "add.f32x2 %rd4, %rd11, %rd12;",
        "mul.lo.s16x2 %r4, %r11, %r12;",
        "atom.global.add.f32 %r4, [%rd1], %r11;",
    ],
)
def test_what_has_no_one_result_is_refused(line: str) -> None:
    with pytest.raises(Refused):
        run(f"{line}\nmov.b64 %rd3, 0;", [(1, 1, 1)])


def test_an_address_that_is_not_aligned_is_noticed() -> None:
    with pytest.raises(AssertionError, match="not aligned"):
        run("add.s64 %rd1, %rd1, 4;\nld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd1];\nmov.b64 %rd3, 0;", [(1,)])
