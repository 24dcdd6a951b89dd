"""PTX on arrays: all threads of all blocks at once, each instruction by its definition, bit for bit.

A register holds raw bits, which an instruction reads as its type. Threads that took another branch wait: those that are least
far run first. What the PTX ISA does not define to the bit (approximations, flushed subnormals) or what the project's kernels must
not contain (a fused multiply-add, which the compiler would have made of two roundings) is refused with :class:`Refused`, so a
kernel that runs here has one possible result.

Source: NVIDIA, Parallel Thread Execution ISA 8.7.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {32: np.float32, 64: np.float64}
CANONICAL_NAN = {32: 0x7FFFFFFF, 64: 0x7FF8000000000000}
"""What arithmetic makes of any NaN."""
NEVER_WRITTEN = 0xDEADBEEF_DEADBEEF
REGISTER_BITS = {"%p": 1, "%rs": 16, "%r": 32, "%rd": 64, "%f": 32, "%fd": 64}
WARP = 32


class Refused(Exception):
    """An instruction without one exact definition here."""


class Memory:
    """The memory of a device: arrays at addresses; and how many instructions of a program read and wrote each byte."""

    def __init__(self, size: int) -> None:
        self.bytes, self.end = np.zeros(size, np.uint8), 512
        self.reads, self.writes = np.zeros(size, np.int32), np.zeros(size, np.int32)

    def put(self, content: Array, offset: int = 0) -> int:
        """Copy bytes in, at a multiple of 256 plus ``offset``, with a gap behind that nothing may touch."""
        address = self.end + offset
        assert address + content.size <= len(self.bytes), "the device's memory is full"
        self.bytes[address : address + content.size] = content
        self.end = -(-(address + content.size) // 256) * 256 + 256
        return address

    def get(self, address: int, count: int) -> Array:
        return self.bytes[address : address + count].copy()


@dataclass(frozen=True)
class Instruction:
    """``@predicate op operands``; ``op`` is split at its dots."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool

    def __str__(self) -> str:
        return f"{'.'.join(self.op)} {', '.join(self.operands)}"


OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
LINE = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*?);?$")


@dataclass
class Program:
    """A parsed ``.entry``: its parameters in order, threads of a block, and instructions."""

    params: list[str]
    threads: int
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, ptx: str) -> Program:
        head, body = ptx.split(".entry", 1)[1].split("{", 1)
        params = re.findall(r"\.param\s+\.\w+[^,)]*?(\w+_param_\d+)", head)
        found = re.search(r"\.(?:reqntid|maxntid) (\d+)", head)
        assert found is not None, "the number of threads is not fixed"
        program = cls(params, int(found[1]))
        for line in body.splitlines():
            line = line.partition("//")[0].strip()
            if label := re.fullmatch(r"(\$\w+):", line):
                program.labels[label[1]] = len(program.code)
            elif line and line[0] != "." and (match := LINE.match(line.strip("{} "))):
                operands = tuple(operand.strip() for operand in OPERAND.findall(match[4]))
                op = tuple(match[3].replace("shared::cta", "shared").split("."))  # newer Triton writes the longer name
                program.code.append(Instruction(op, operands, match[2], match[1] == "!"))
        return program

    def run(
        self,
        memory: Memory,
        arguments: Sequence[int],
        grid: tuple[int, int] = (1, 1),
        *,
        shared: int = 0,
        limit: int = 10**6,
    ) -> int:
        """Run every thread of a grid of blocks; returns how many instructions were issued, each for all who wait at it.

        Args:
            arguments: addresses and integers, for the parameters in order.
            shared: bytes of shared memory of a block.
        """
        with np.errstate(all="ignore"):
            return _Threads(self, memory, arguments, grid, shared).run(limit)


WIDTHS = {"pred": 1, "s16x2": 32, "u16x2": 32, "f32x2": 64, "bf16": 16, "bf16x2": 32, "e4m3x2": 16, "e5m2x2": 16}
"""Of types that do not end with their width."""


def bits_of(kind: str) -> int:
    """The width of a type: a number's, or that of two halves of a register."""
    if kind in WIDTHS:
        return WIDTHS[kind]
    if not re.fullmatch(r"[subf](8|16|32|64)", kind):
        raise Refused(f"values of type {kind}")
    return int(kind[1:])


class _Threads:
    """The threads of a launch: a program counter for each, and each register for all."""

    def __init__(
        self, program: Program, memory: Memory, arguments: Sequence[int], grid: tuple[int, int], shared: int
    ) -> None:
        self.program, self.memory = program, memory
        self.count = grid[0] * grid[1] * program.threads
        index = np.arange(self.count)
        self.block, thread = index // program.threads, index % program.threads
        self.lane = thread % WARP
        ones = np.ones_like(index)
        self.special = {
            "%tid.x": thread,
            "%ctaid.x": self.block % grid[0],
            "%ctaid.y": self.block // grid[0],
            "%ntid.x": ones * program.threads,
            "%nctaid.x": ones * grid[0],
            "%nctaid.y": ones * grid[1],
            "%laneid": self.lane,
        }
        assert len(arguments) == len(program.params), f"{len(arguments)} arguments for {len(program.params)} parameters"
        self.params = dict(zip(program.params, arguments, strict=True))
        self.registers: dict[str, Array] = {}
        self.shared = np.zeros((grid[0] * grid[1], shared), np.uint8)
        self.at = np.zeros(self.count, np.int64)

    def run(self, limit: int) -> int:
        end = len(self.program.code)
        for issued in range(limit):
            first = int(self.at.min())
            if first >= end:
                return issued
            instruction, active = self.program.code[first], self.at == first
            self.at[active] = first + 1
            if instruction.predicate is not None:
                active = active & (self.read(instruction.predicate, 1) ^ instruction.negated)
            if active.any():
                try:
                    self.issue(instruction, active)
                except (AssertionError, KeyError, IndexError, ValueError, Refused) as error:
                    raise type(error)(f"{instruction}: {error}") from error
        raise AssertionError(f"the kernel did not end after {limit} instructions")

    # ── operands ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, operand: str, bits: int) -> Array:
        """The raw bits of an operand, for each thread."""
        if operand in self.special:
            return self.special[operand].astype(UNSIGNED[bits])
        if operand.startswith("%"):
            if operand not in self.registers:
                self.write(operand, np.zeros(self.count, np.uint64), np.zeros(self.count, bool))
            value = self.registers[operand]
            return value if bits == 1 else value.astype(UNSIGNED[bits], copy=False)
        if operand[:2] in ("0f", "0d"):
            number = int(operand[2:], 16)
        elif re.match(r"[A-Za-z_$]", operand):
            number = 0  # where shared memory begins
        else:
            number = int(operand.rstrip("U"), 0)
        if bits == 1:
            return np.full(self.count, bool(number))
        return np.full(self.count, number % (1 << bits), UNSIGNED[bits])

    def values(self, operand: str, kind: str) -> Array:
        """An operand as the values of a type."""
        bits = bits_of(kind)
        raw = self.read(operand, bits)
        if kind == "pred":
            return raw
        if kind == "bf16":
            return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if kind[0] == "f" and bits not in FLOAT:
            raise Refused(f"arithmetic of {kind}")
        if kind.endswith("x2"):
            bits //= 2
        return np.ascontiguousarray(raw).view({"s": SIGNED, "f": FLOAT}.get(kind[0], UNSIGNED)[bits])

    def write(self, register: str, value: Array, active: Array) -> None:
        """Write a result to the threads that take part; it is cut, or filled with zeros, to the register's width."""
        if register == "_":
            return
        name = re.match(r"%[a-z]+", register)
        assert name is not None, register
        bits = REGISTER_BITS[name[0]]
        if bits > 1:
            value = np.ascontiguousarray(value).view(UNSIGNED[8 * value.dtype.itemsize]).astype(UNSIGNED[bits])
        if register not in self.registers:
            unset = False if bits == 1 else NEVER_WRITTEN % (1 << bits)
            self.registers[register] = np.full(self.count, unset, bool if bits == 1 else UNSIGNED[bits])
        self.registers[register] = np.where(active, value, self.registers[register])

    # ── instructions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def issue(self, instruction: Instruction, active: Array) -> None:
        op, operands = instruction.op, instruction.operands
        if op[0] in ("ret", "exit"):
            self.at[active] = len(self.program.code)
        elif op[0] == "bra":
            self.at[active] = self.program.labels[operands[-1]]
        elif op[0] in ("bar", "barrier"):
            waiting = np.bincount(self.block[active], minlength=len(self.shared))
            living = np.bincount(self.block[self.at <= len(self.program.code) - 1], minlength=len(self.shared))
            assert ((waiting == living) | (waiting == 0)).all(), "not all threads of a block wait at the barrier"
        elif op[0] == "createpolicy":
            self.write(operands[0], np.zeros(self.count, np.uint64), active)  # a hint to the caches
        elif op[0] in ("stmatrix", "ldmatrix"):
            self.move_matrices(op, operands, active)
        elif op[0] in ("ld", "st"):
            self.access(op, operands, active)
        elif op[0] == "mov":
            self.move(op[-1], operands, active)
        elif op[0] == "selp":
            chosen, other = (self.read(operand, bits_of(op[-1])) for operand in operands[1:3])
            self.write(operands[0], np.where(self.read(operands[3], 1), chosen, other), active)
        elif op[0] == "setp":
            self.write(operands[0], self.compare(op, operands), active)
        elif op[0] == "shfl":
            self.write(operands[0].partition("|")[0], self.shuffle(op, operands, active), active)
        elif op[0] == "cvt":
            self.write(operands[0], self.convert(op, operands), active)
        else:
            if op in (("abs", "bf16"), ("abs", "bf16x2")):
                bits = bits_of(op[1])
                self.write(operands[0], self.read(operands[1], bits) & UNSIGNED[bits](0x7FFF7FFF % (1 << bits)), active)
                return
            if op[-1] == "bf16":
                raise Refused("no exact definition")
            family = FLOATING if op[-1][0] == "f" else INTEGER
            if op[0] not in family:
                raise Refused("no exact definition")
            kind = op[-1]
            if kind[0] == "f" and (inexact := {"approx", "full", "ftz", "sat", "rz", "rm", "rp"} & set(op)):
                raise Refused(f"rounding {', '.join(inexact)}")
            if kind.endswith("x2") and op[0] not in HALVES[kind[0]]:
                raise Refused("no exact definition of halves")
            wide = "wide" in op and op[0] == "mad"
            kinds = [kind, kind, f"{kind[0]}{2 * bits_of(kind)}"] if wide else SOURCES.get(op[0], [kind] * 3)
            given = [self.values(x, k or kind) for x, k in zip(operands[1:], kinds, strict=False)]
            found = family[op[0]](op, *given)
            self.write(operands[0], found.view(UNSIGNED[bits_of(kind)]) if kind.endswith("x2") else found, active)

    def move(self, kind: str, operands: Sequence[str], active: Array) -> None:
        bits = bits_of(kind)
        into, of = operands
        if into.startswith("{"):
            whole, parts = self.read(of, bits), into.strip("{} ").split(",")
            width = bits // len(parts)
            for place, part in enumerate(parts):
                cut = (whole >> whole.dtype.type(place * width)).astype(UNSIGNED[width])
                self.write(part.strip(), cut, active)
        elif of.startswith("{"):
            parts = of.strip("{} ").split(",")
            width, total = bits // len(parts), np.zeros(self.count, UNSIGNED[bits])
            for place, part in enumerate(parts):
                total |= self.read(part.strip(), width).astype(UNSIGNED[bits]) << UNSIGNED[bits](place * width)
            self.write(into, total, active)
        else:
            self.write(into, self.read(of, bits), active)

    def compare(self, op: tuple[str, ...], operands: Sequence[str]) -> Array:
        kind, how = op[-1], op[1]
        one, other = (self.values(operand, kind) for operand in operands[1:3])
        if kind[0] != "f" and kind != "bf16":
            found = COMPARISONS[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(how, how)](one, other)
        else:
            unordered = np.isnan(one) | np.isnan(other)
            if how in ("num", "nan"):
                found = unordered if how == "nan" else ~unordered
            else:
                bare = how.removesuffix("u")
                found = COMPARISONS[bare](one, other) & ~unordered | (unordered & (how != bare))
        if op[2] in ("and", "or", "xor"):
            third = self.read(operands[3].lstrip("!"), 1) ^ operands[3].startswith("!")
            found = {"and": found & third, "or": found | third, "xor": found ^ third}[op[2]]
        return found

    def shuffle(self, op: tuple[str, ...], operands: Sequence[str], active: Array) -> Array:
        """The same register of another lane; a source that takes no part has no defined value."""
        offset = self.values(operands[2], "u32").astype(np.int64)
        if op[2] not in ("bfly", "idx") or not operands[3].isdigit() or int(operands[3]) != WARP - 1:
            raise Refused("a shuffle of another kind than a butterfly, or of named lanes, of a whole warp")
        source = np.arange(self.count) - self.lane + (self.lane ^ offset if op[2] == "bfly" else offset % WARP)
        assert active[source[active]].all(), "a lane that takes no part is read"
        return self.read(operands[1], 32)[source]

    def convert(self, op: tuple[str, ...], operands: Sequence[str]) -> Array:
        to, of = op[-2], op[-1]
        if to in NARROW or of in NARROW:
            return self.convert_narrow(op, operands)
        if "ftz" in op or "sat" in op or not all(re.fullmatch(r"[suf](8|16|32|64)", kind) for kind in (to, of)):
            raise Refused(f"from {of} to {to}")
        value, bits = self.values(operands[1], of), bits_of(to)
        if of[0] == "f" and to[0] == "f":
            if whole := [mode for mode in op if mode in WHOLE]:
                value = WHOLE[whole[0]](value)
            elif bits < bits_of(of) and "rn" not in op:
                raise Refused("a rounding that is not to nearest")
            return numbers(value.astype(FLOAT[bits]))
        if to[0] == "f":
            if "rn" not in op:
                raise Refused("a rounding that is not to nearest")
            return value.astype(FLOAT[bits])
        if of[0] == "f":
            (mode,) = (mode for mode in op if mode in WHOLE)
            kind = (SIGNED if to[0] == "s" else UNSIGNED)[bits]
            ends = np.iinfo(kind)
            assert not (np.isnan(value).any() and (bits == 64 or of == "f64")), "a NaN becomes an integer"
            value = np.where(np.isnan(value), value.dtype.type(0), value)
            whole_value = np.clip(WHOLE[mode](value).astype(np.longdouble), ends.min, ends.max)
            return np.asarray(whole_value.astype(kind))
        return np.asarray(value.astype((SIGNED if to[0] == "s" else UNSIGNED)[bits]))

    def convert_narrow(self, op: tuple[str, ...], operands: Sequence[str]) -> Array:
        """Between formats of 16 or 8 bits and wider ones; of two numbers in a register the first operand's is the upper."""
        to, of = op[-2:]
        values = [self.read(operand, bits_of(of)) for operand in operands[1:]]
        if (op[1:-2], to, of) == ((), "f32", "bf16"):
            return values[0].astype(np.uint32) << np.uint32(16)
        if of != "f32" or to not in NARROW or op[1:-2] != (("rn", "satfinite") if to in EIGHT_BITS else ("rn",)):
            raise Refused(f"from {of} to {to}")
        codes = [NARROW[to](np.ascontiguousarray(value).view(np.float32)) for value in values]
        if len(codes) == 1:
            return codes[0]
        width = 8 * codes[0].dtype.itemsize
        wide = UNSIGNED[2 * width]
        return codes[0].astype(wide) << wide(width) | codes[1].astype(wide)

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def access(self, op: tuple[str, ...], operands: Sequence[str], active: Array) -> None:
        loads, size = op[0] == "ld", bits_of(op[-1]) // 8
        target, place = operands[:2] if loads else operands[1::-1]
        names = [name.strip() for name in target.strip("{} ").split(",")]
        base, _, offset = place.strip("[] ").replace(" ", "").partition("+")
        if op[1] == "param":
            number = self.params[base] % (1 << (8 * size))
            self.write(names[0], np.full(self.count, number, UNSIGNED[8 * size]), active)
            return
        assert op[1] in ("global", "shared"), f"memory of kind {op[1]}"
        address = (self.read(base, 64).astype(np.int64) + int(offset or "0", 0))[active]
        assert (address % (size * len(names)) == 0).all(), "an address that is not aligned"
        for number, name in enumerate(names):
            places = (address + number * size)[:, None] + np.arange(size)
            if op[1] == "global":
                (self.memory.reads if loads else self.memory.writes)[places] += 1
            if loads:
                raw = (
                    self.memory.bytes[places] if op[1] == "global" else self.shared[self.block[active][:, None], places]
                )
                value = np.zeros(self.count, UNSIGNED[8 * size])
                value[active] = np.ascontiguousarray(raw).view(UNSIGNED[8 * size])[:, 0]
                self.write(name, value, active)
                continue
            kept = np.ascontiguousarray(self.read(name, 8 * size)[active]).view(np.uint8).reshape(-1, size)
            if op[1] == "global":
                self.memory.bytes[places] = kept
            else:
                self.shared[self.block[active][:, None], places] = kept

    def move_matrices(self, op: tuple[str, ...], operands: Sequence[str], active: Array) -> None:
        """``stmatrix`` and ``ldmatrix``: 8 × 8 numbers of 16 bits for each register.

        Four lanes hold a row; another lane has the row's address.
        """
        loads = op[0] == "ldmatrix"
        target, place = operands[:2] if loads else operands[1::-1]
        names = [name.strip() for name in target.strip("{} ").split(",")]
        if op[1:4] != ("sync", "aligned", "m8n8") or op[5:] != ("shared", "b16") or op[4] != f"x{len(names)}":
            raise Refused("matrices moved in another way")
        assert (active.reshape(-1, WARP).all(1) == active.reshape(-1, WARP).any(1)).all(), "lanes do not take part"
        base, _, offset = place.strip("[] ").replace(" ", "").partition("+")
        address = self.read(base, 64).astype(np.int64) + int(offset or "0", 0)
        first = np.arange(self.count) - self.lane
        for number, name in enumerate(names):
            begins = address[first + 8 * number + self.lane // 4]
            assert (begins[active] % 16 == 0).all(), "an address that is not aligned"
            places = (begins + 4 * (self.lane % 4))[active][:, None] + np.arange(4)
            if loads:
                value = np.zeros(self.count, np.uint32)
                value[active] = np.ascontiguousarray(self.shared[self.block[active][:, None], places]).view(np.uint32)[
                    :, 0
                ]
                self.write(name, value, active)
            else:
                row = np.ascontiguousarray(self.read(name, 32)[active]).view(np.uint8).reshape(-1, 4)
                self.shared[self.block[active][:, None], places] = row


# ── definitions ──────────────────────────────────────────────────────────────────────────────────────────────────────


def numbers(value: Array) -> Array:
    """The bits of floats, of which any NaN is the canonical one."""
    bits = 8 * value.dtype.itemsize
    return np.where(np.isnan(value), UNSIGNED[bits](CANONICAL_NAN[bits]), value.view(UNSIGNED[bits]))


def _rounded(result: Callable[..., Array]) -> Callable[..., Array]:
    def operation(op: tuple[str, ...], *values: Array) -> Array:
        if "rn" not in op:
            raise Refused("may be fused with another operation")
        return numbers(np.asarray(result(*values)))

    return operation


def _of_bits(result: Callable[[Array, Any], Array]) -> Callable[..., Array]:
    def operation(op: tuple[str, ...], value: Array) -> Array:
        bits = 8 * value.dtype.itemsize
        return result(value.view(UNSIGNED[bits]), UNSIGNED[bits](1 << (bits - 1)))

    return operation


def _with_sign(op: tuple[str, ...], signed: Array, value: Array) -> Array:
    """``copysign`` takes the sign first; it is a bit of a NaN too."""
    bits = 8 * value.dtype.itemsize
    one, other, top = signed.view(UNSIGNED[bits]), value.view(UNSIGNED[bits]), UNSIGNED[bits](1 << (bits - 1))
    return (other & ~top) | (one & top)


def _extreme(op: tuple[str, ...], one: Array, other: Array) -> Array:
    """``min`` and ``max``: of a number and a NaN the number, unless ``.NaN`` says otherwise; -0 is below +0."""
    least = op[0] == "min"
    found = (np.fmin if least else np.fmax)(one, other)
    zeros = (one == 0) & (other == 0) & (np.signbit(one) != np.signbit(other))
    found = np.where(zeros, one.dtype.type(-0.0 if least else 0.0), found)
    if "NaN" in op:
        found = np.where(np.isnan(one) | np.isnan(other), one.dtype.type(np.nan), found)
    return numbers(found)


def _multiplied(op: tuple[str, ...], one: Array, other: Array) -> Array:
    if "lo" in op:
        return one * other
    bits = 8 * one.dtype.itemsize
    if bits == 64:
        if "wide" in op:
            raise Refused("a product of 128 bits")
        return _upper_half(one, other)
    wide = (SIGNED if one.dtype.kind == "i" else UNSIGNED)[2 * bits]
    product = one.astype(wide) * other.astype(wide)
    return product if "wide" in op else (product >> wide(bits)).astype(one.dtype)


def _upper_half(one: Array, other: Array) -> Array:
    """The upper 64 of the 128 bits of a product, from those of its 32-bit halves."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b = one.view(np.uint64), other.view(np.uint64)
    low, middle = (a & mask) * (b & mask), (a >> half) * (b & mask)
    cross = (a & mask) * (b >> half) + (middle & mask) + (low >> half)
    found = (a >> half) * (b >> half) + (middle >> half) + (cross >> half)
    if one.dtype.kind == "i":  # a negative number is its bits less 2^64
        found = found - np.where(one < 0, b, 0).astype(np.uint64) - np.where(other < 0, a, 0).astype(np.uint64)
    return found.view(one.dtype)


def _shifted(op: tuple[str, ...], value: Array, count: Array) -> Array:
    """Counts from the width on leave zeros, or copies of the sign."""
    bits = 8 * value.dtype.itemsize
    within = np.minimum(count, bits - 1).astype(value.dtype)
    found = value << within if op[0] == "shl" else value >> within
    beyond = found if op[0] == "shr" and value.dtype.kind == "i" else value.dtype.type(0)
    return np.where(count >= bits, beyond, found)


def _field(op: tuple[str, ...], value: Array, start: Array, length: Array) -> Array:
    """``bfe``: of a signed field its highest bit is the sign, and beyond the value are copies of the value's."""
    if value.dtype.kind == "i":
        if value.dtype.itemsize != 4:
            raise Refused("a signed field of 64 bits")
        unused = (64 - np.clip(length, 1, 64)).astype(np.int64)
        moved = value.astype(np.int64) >> np.minimum(start, 63).astype(np.int64)
        return np.where(length == 0, 0, (moved << unused) >> unused).astype(np.int32)
    mask = (np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)
    return (value >> start.astype(value.dtype)) & mask.astype(value.dtype)


def _funnel(op: tuple[str, ...], low: Array, high: Array, count: Array) -> Array:
    """``shf``: 32 of the 64 bits of two registers, shifted; the upper ones to the left, the lower ones to the right."""
    count = (count & 31 if "wrap" in op else np.minimum(count, 32)).astype(np.uint64)
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return ((both << count) >> np.uint64(32) if "l" in op else both >> count).astype(np.uint32)


def _bytes(op: tuple[str, ...], one: Array, other: Array, selector: Array) -> Array:
    """``prmt``: each byte one of the eight of two registers, or eight copies of its sign."""
    if op != ("prmt", "b32"):
        raise Refused("bytes chosen in another mode")
    both, found = one.astype(np.uint64) | other.astype(np.uint64) << np.uint64(32), np.zeros_like(one)
    for place in range(4):
        chosen = selector >> np.uint32(4 * place)
        byte = both >> (np.uint64(8) * (chosen & np.uint32(7)).astype(np.uint64)) & np.uint64(0xFF)
        byte = np.where(chosen & np.uint32(8), np.where(byte >> np.uint64(7), 0xFF, 0), byte).astype(np.uint32)
        found |= byte << np.uint32(8 * place)
    return found


def _remainder(op: tuple[str, ...], one: Array, other: Array) -> Array:
    assert (other != 0).all(), "division by zero"
    return np.fmod(one, other)


def _quotient(op: tuple[str, ...], one: Array, other: Array) -> Array:
    return ((one - _remainder(op, one, other)) // other).astype(one.dtype)


def _bfloat16(value: Array) -> Array:
    """The codes of the nearest bfloat16 numbers, ties to even; any NaN is the canonical one."""
    bits = value.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), rounded)


def _eight_bits(exponent_bits: int, largest: int, nan: int) -> Callable[[Array], Array]:
    """The codes of the nearest numbers of an 8-bit format, ties to even; what is beyond the largest becomes that."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1

    def codes(value: Array) -> Array:
        magnitude = np.abs(value).astype(np.float64)
        exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - bias), 1 - bias)
        steps = np.rint(np.ldexp(magnitude, mantissa_bits - exponent))  # of the number's binade, the carry included
        code = np.ldexp(exponent + bias - 1, mantissa_bits) + steps
        code = np.where(np.isnan(value), nan, np.minimum(code, largest))
        sign = np.where(np.signbit(value) & ~np.isnan(value), 0x80, 0)
        return code.astype(np.uint8) | sign.astype(np.uint8)

    return codes


EIGHT_BITS = {"e4m3x2": _eight_bits(4, 0x7E, 0x7F), "e5m2x2": _eight_bits(5, 0x7B, 0x7F)}
NARROW: dict[str, Callable[[Array], Array]] = {"bf16": _bfloat16, "bf16x2": _bfloat16, **EIGHT_BITS}
"""What float32 numbers become in narrower formats."""


Operation = Callable[..., Array]
SOURCES: dict[str, list[str]] = {"shl": ["", "u32"], "shr": ["", "u32"], "bfe": ["", "u32", "u32"]}
"""Types of the operands where they are not all the instruction's own."""

FLOATING: dict[str, Operation] = {
    "add": _rounded(np.add),
    "sub": _rounded(np.subtract),
    "mul": _rounded(np.multiply),
    "div": _rounded(np.divide),
    "sqrt": _rounded(np.sqrt),
    "abs": _of_bits(lambda raw, sign: raw & ~sign),
    "neg": _of_bits(lambda raw, sign: raw ^ sign),
    "copysign": _with_sign,
    "min": _extreme,
    "max": _extreme,
}

INTEGER: dict[str, Operation] = {
    "add": lambda op, a, b: a + b,
    "sub": lambda op, a, b: a - b,
    "mul": _multiplied,
    "mad": lambda op, a, b, c: _multiplied(op, a, b) + c,
    "and": lambda op, a, b: a & b,
    "or": lambda op, a, b: a | b,
    "xor": lambda op, a, b: a ^ b,
    "not": lambda op, a: ~a,
    "neg": lambda op, a: -a,
    "abs": lambda op, a: np.abs(a),
    "min": lambda op, a, b: np.minimum(a, b),
    "max": lambda op, a, b: np.maximum(a, b),
    "shl": _shifted,
    "shr": _shifted,
    "bfe": _field,
    "shf": _funnel,
    "prmt": _bytes,
    "rem": _remainder,
    "div": _quotient,
}

HALVES = {"s": ("add", "sub", "min", "max"), "u": ("add", "sub", "min", "max"), "f": ("add", "sub", "mul")}
"""Operations on two halves of a register at once, by the first letter of the type."""

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}

WHOLE: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
"""Roundings to whole numbers."""
