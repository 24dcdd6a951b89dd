"""The step of all tensors on a GPU, as Triton: one launch over a table of addresses.

A *program* steps ``BLOCK`` elements, or one row where rows have scales. Tensors whose rows are
whole vectors of 16 bytes are read in vectors. Where rows have scales, a program reads the row's
gradient twice: for the new bounds, then for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from textwrap import indent
from typing import Any, ClassVar

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim.kernel import CONTROL
from narrowgauge.optim.program import SIZES, Program, Stream, num_addresses
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.triton import REDUCERS, TRITON, load

BLOCK = 1024
"""Elements that a program steps at a time: 16 bytes of a 16-bit tensor for each of 128 threads."""
SUMS = len(KERNEL_SUMS)
COLUMNS = 1 << (SUMS - 1).bit_length()
"""Lengths of vectors are powers of two."""
_TYPES = {1: "tl.int8", 2: "tl.int16", 4: "tl.int32"}
_HELPERS = f"""{REDUCERS}

@triton.jit
def load_words(address, begin, at, left, aligned, TYPE: tl.constexpr):
    if aligned != 0:
        pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)) + begin, 16)
        x = tl.load(pointer + at, mask=at < left // 16 * 16, other=0)  # a mask in whole vectors
    else:
        x = tl.load(address.to(tl.pointer_type(TYPE)) + begin + at, mask=at < left, other=0)
    return x


@triton.jit
def store_words(address, begin, at, left, aligned, word, TYPE: tl.constexpr):
    if aligned != 0:
        pointer = tl.multiple_of(address.to(tl.pointer_type(TYPE)) + begin, 16)
        tl.store(pointer + at, word.to(TYPE), mask=at < left // 16 * 16)
    else:
        tl.store(address.to(tl.pointer_type(TYPE)) + begin + at, word.to(TYPE), mask=at < left)


@triton.jit
def add_up(table, sums, totals, WIDTH: tl.constexpr):
    row = table + (tl.program_id(0) + 1) * WIDTH - {len(SIZES)}
    first, count = tl.load(row + {SIZES.index("first")}), tl.load(row + {SIZES.index("count")})
    period, phase = tl.load(row + {SIZES.index("period")}), tl.load(row + {SIZES.index("phase")})
    column, total = tl.arange(0, {COLUMNS}), tl.full([{COLUMNS}], 0.0, tl.float64)
    is_sum = column[None, :] < {SUMS}
    for start in range(phase, count, 64 * period):
        place = start + tl.arange(0, 64)[:, None] * period
        terms = tl.load(sums + (first + place) * {SUMS} + column[None, :], mask=(place < count) & is_sum, other=0.0)
        total += tl.reduce(terms.to(tl.float64), 0, sum_of)
    tl.store(totals + tl.program_id(0) * {SUMS} + column, total, mask=column < {SUMS})
"""


class _Text(Program):
    """Write the Triton of a (rule, storage)."""

    language = TRITON
    indentation = "    "
    texts: ClassVar = {
        "bound": "(tl.load(row + {0}).to(tl.pointer_type(tl.float32)) + place)",
        "load": "tl.load({0})",
        "store": "tl.store({0}, {1})",
        "found": "found = records + (record + place) * {0}",
        "at": "found + {0}",
        "new": "{0} = {1}",
        "set": "{0} = {1}",
        "if": "if {0}:",
        "else": "else:",
        "end": "",
    }

    def place(self) -> list[str]:
        """Return lines that find the tile of a program."""
        width = num_addresses(self.rule, self.storage)
        scalars = len(self.rule.scalars)
        lines = [
            "program = tl.program_id(0)",
            f"row = table + tl.load(tiles + program).to(tl.int64) * {width + len(SIZES)}",
        ]
        lines += [f"{name} = tl.load(row + {width + k})" for k, name in enumerate(SIZES)]
        lines += [f"v_{k} = tl.load(control + {k})  # {name}" for k, name in enumerate(CONTROL)]
        lines.append(f"scalars = numbers + number * {scalars + 1}")
        for k, name in enumerate(self.rule.scalars):
            lines.append(f"v_{len(CONTROL) + k} = tl.load(scalars + {k})  # {name}")
        lines += [
            f"seed = tl.load(scalars + {scalars}).to(tl.int32, bitcast=True)",
            "place = program - first",
            "begin = place * extent",
            "left = tl.minimum(numel - begin, extent).to(tl.int32)",
        ]
        for k, stream in enumerate(self.streams):
            lines.append(f"p_{stream.name} = tl.load(row + {k})")
        return lines

    def loaded(self, stream: Stream) -> list[str]:
        """Return lines that load a stream's vector as ``w_NAME``."""
        name = f"w_{stream.name}"
        call = f"load_words(p_{stream.name}, begin, at, left, aligned, {{0}})"
        word = f"{call.format(_TYPES[stream.size])}.to(tl.int32)"
        floats = f"{call.format('tl.float32')}"
        if stream.name == "change" or (stream.name == "gradient" and stream.size == 4):
            return [f"{name} = {floats}"]
        if stream.name != "gradient":
            return [f"{name} = {word}"]
        narrow = [f"{name} = value_of({word})"]
        return self.choice("wide != 0", [f"{name} = {floats}"], narrow)

    # ── functions ─────────────────────────────────────────────────────────────────────────────────

    def text_of_program(self) -> str:
        """Return the text of all functions."""
        printed = self.value_of_word()
        lines = [*printed.lines, f"return {printed.results[0]}"]
        text = f"{_HELPERS}\n\n@triton.jit\ndef value_of(w):\n" + indent("\n".join(lines), "    ")
        begin = self.place()
        bounded = [*begin, *self.bounds()]
        step = self.walk()
        audit = self.walk(audited=True)
        choice = self.choice("place % period == phase", [audit], [step])
        text += "\n" + self.function("step", [*bounded, step])
        text += self.function("step_and_audit", [*bounded, *choice])
        if self.peaks:
            peak_text = indent("\n".join(self.find_peaks()), "    ")
            text += self.function("find_peaks", [*begin, "if record >= 0:", peak_text])
        if isinstance(self.rule, MatrixRule):
            text += self.function("average", [*begin, self.walk(averages=True)])
        return text

    def function(self, name: str, lines: Sequence[str]) -> str:
        head = f"def {name}(table, tiles, numbers, control, records, sums):"
        return f"\n\n@triton.jit\n{head}\n{indent(chr(10).join(lines), '    ')}\n"

    def walk(self, *, audited: bool = False, averages: bool = False) -> str:
        """Return the loop that steps, audits or averages the elements of a program."""
        printed = self.printed(audited=audited, averages=averages)
        written = self.written(averages=averages)
        body = []
        for stream in self.read(averages=averages):
            body += self.loaded(stream)
        body += printed.lines
        terms = printed.results[len(written) :]
        for k, term in enumerate(terms):
            body.append(f"sum{k} += tl.reduce(tl.where(at < left, {term}, 0.0), 0, sum_of)")
        for stream, value in zip(written, printed.results, strict=False):
            kind = "tl.float32" if stream.name == "change" else _TYPES[stream.size]
            place = f"p_{stream.name}, begin, at, left, aligned"
            body.append(f"store_words({place}, {value}, {kind})")
        sums = range(SUMS if audited else 0)
        begin = [f"sum{k} = 0.0" for k in sums]
        ends = [f"tl.store(sums + program * {SUMS} + {k}, sum{k})" for k in sums]
        return "\n".join([*begin, _over_row(body), *ends])

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a program's row, in which a NaN is the
        largest.
        """
        begin = []
        body = []
        ends = []
        for name in self.peaks:
            stream = next(stream for stream in self.streams if stream.name == name)
            value = f"w_{name}" if name == "gradient" else f"value_of(w_{name})"
            most = f"most_{name}"
            begin.append(f"{most} = tl.full([{BLOCK}], 0, tl.int32)")
            body += self.loaded(stream)
            bits = f"{value}.to(tl.int32, bitcast=True) & 0x7FFFFFFF"
            if name == "weight":
                bits = f"tl.where(({bits}) < 0x7F800000, {bits}, 0)"
            body.append(f"{most} = tl.maximum({most}, {bits})")
            largest = f"tl.reduce({most}, 0, larger_of)"
            ends.append(f"peak_{name} = {largest}.to(tl.float32, bitcast=True)")
        return [*begin, _over_row(body), *ends]


def _over_row(body: Sequence[str]) -> str:
    loop = indent("\n".join([f"at = start + tl.arange(0, {BLOCK})", *body]), "    ")
    return f"for start in range(0, left, {BLOCK}):\n{loop}"


def source(rule: AnyRule, storage: Storage, *, with_sources: bool = False) -> str:
    """Return the Triton of ``step``, ``step_and_audit``, ``add_up``, ``find_peaks`` of rows with
    scales, and ``average``.
    """
    return _Text(rule, storage, with_sources=with_sources).text_of_program()


@lru_cache(None)
def functions(rule: AnyRule, storage: Storage, interpret: bool) -> dict[str, Any]:
    """Return the functions of :func:`source`. The first launch of each compiles it."""
    return load(source(rule, storage), interpret=interpret)
