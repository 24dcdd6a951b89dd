"""The step of all tensors on a GPU, as Triton: one launch over a table of addresses.

A *program* steps ``BLOCK`` words of a flat storage, or one row of each part where rows have scales.
A tensor is *whole* if its rows are multiples of 16 bytes and begin at multiples of 16 bytes. The
others are read in elements, by a second launch. Where rows have scales, a program reads the row's
gradient twice: for the new bounds, then for the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from textwrap import indent
from typing import Any, ClassVar

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim.cpp_step import SIZES
from narrowgauge.optim.kernel import CONTROL
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step_graph import (
    StepText,
    Stream,
    magnitude_graph,
    num_addresses,
)
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.printer import print_graph
from narrowgauge.torch_support.triton import REDUCERS, TRITON, load

BLOCK = 512
"""Words that a program steps at a time: 16 bytes for each of 128 threads."""
SUMS = len(KERNEL_SUMS)
COLUMNS = 1 << (SUMS - 1).bit_length()
"""Lengths of vectors are powers of two."""
_HELPERS = f"""{REDUCERS}

@triton.jit
def load_halves(address, at, inside, left):
    low = tl.load(address + 2 * at, mask=inside & (2 * at < left), other=0).to(tl.int32)
    high = tl.load(address + 2 * at + 1, mask=inside & (2 * at + 1 < left), other=0).to(tl.int32)
    return (low & 0xFFFF) | (high << 16)


@triton.jit
def store_halves(address, at, word, inside, left):
    tl.store(address + 2 * at, word.to(tl.int16), mask=inside & (2 * at < left))
    tl.store(address + 2 * at + 1, (word >> 16).to(tl.int16), mask=inside & (2 * at + 1 < left))


@triton.jit
def add_up(table, order, sums, totals, WIDTH: tl.constexpr):
    row = table + (tl.load(order + tl.program_id(0)) + 1) * WIDTH - {len(SIZES)}
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


class _Text(StepText):
    """Write the Triton of a (rule, storage), for whole tensors or for others."""

    language = TRITON
    indentation = "    "
    texts: ClassVar = {
        "bound": "(tl.load(row + {0}).to(tl.pointer_type(tl.float32)) + ({1} * group + line))",
        "load": "tl.load({0})",
        "store": "tl.store({0}, {1})",
        "found": "found = records + (record + line) * {0}",
        "read": "tl.load(found + {0})",
        "new": "{0} = {1}",
        "set": "{0} = {1}",
        "sum": "sum{0} += tl.reduce(tl.where(inside, {1}, 0.0), 0, sum_of)",
        "if": "if {0}:",
        "else": "else:",
        "end": "",
    }

    def __init__(self, rule: AnyRule, storage: Storage, *, whole: bool, with_sources: bool) -> None:
        super().__init__(rule, storage, with_sources=with_sources)
        self.is_whole = whole
        self.lines = self.place()
        for stream in self.streams:
            if stream.floats:
                self.add_change(stream.part)
            else:
                self.add_words(stream)

    def place(self) -> list[str]:
        """Return lines that find the tile of a program."""
        width = num_addresses(self.rule, self.storage)
        scalars = len(self.rule.scalars)
        lines = [
            "program = first_program + tl.program_id(0)",
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
        ]
        if self.layout.by_rows:
            lines += [
                "line = place",
                "origin = 0",
                "span = columns.to(tl.int32)",
                "left = elements",
            ]
        else:
            lines += [
                "line = 0",
                f"origin = place * {BLOCK}",
                f"span = tl.minimum(columns - origin, {BLOCK}).to(tl.int32)",
                f"left = elements - {self.layout.per_word} * origin",
            ]
        if self.is_whole:
            lines += ["columns = tl.multiple_of(columns, 4)", "span = tl.multiple_of(span, 4)"]
        return lines

    def add_words(self, stream: Stream) -> None:
        """Add the load and the store of a stream of words."""
        per_word = self.layout.per_word
        name = f"{stream.name}_at"
        word = f"w{len(self.loads)}"
        is_there = stream.is_plane or self.is_whole
        by_halves = not is_there and per_word == 2
        line = f"({stream.part} * group + line)"
        inside = "inside" if is_there else f"(inside & {self.is_row(line)})"
        kind = "tl.int16" if by_halves else "tl.int32"
        address = f"tl.load(row + {stream.column}).to(tl.pointer_type({kind}))"
        if by_halves:
            self.lines.append(f"{name} = {address} + ({line} * elements + {per_word} * origin)")
            self.stores[word] = f"store_halves({name}, at, {{}}, {inside}, left)"
            self.loads[word] = f"load_halves({name}, at, {inside}, left)"
            return
        first = f"tl.multiple_of({address}, 16)" if self.is_whole else address
        self.lines.append(f"{name} = {first} + ({line} * columns + origin)")
        self.stores[word] = f"tl.store({name} + at, {{}}, mask={inside})"
        self.loads[word] = f"tl.load({name} + at, mask={inside}, other=0)"

    def is_row(self, line: str) -> str:
        """Return whether a line is a row, for each word: a mask of Triton 3.9 takes no scalar."""
        return f"({line} + 0 * at < rows)"

    def add_change(self, part: int) -> None:
        """Add the loads and the stores of a matrix rule's change: a float for each weight of a
        word.
        """
        per_word = self.layout.per_word
        line = f"({part} * group + line)"
        place = f"{line} * elements + {per_word} * origin"
        name = f"change_at{part}"
        self.lines.append(f"{name} = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + ({place})")
        for lane in range(per_word):
            at = f"({per_word} * at + {lane})"
            mask = f"mask=inside & ({at} < left) & {self.is_row(line)}"
            d = f"d{part * per_word + lane}"
            self.loads[d] = f"tl.load({name} + {at}, {mask}, other=0.0)"
            self.stores[d] = f"tl.store({name} + {at}, {{}}, {mask})"

    # ── functions ─────────────────────────────────────────────────────────────────────────────────

    def whole(self) -> str:
        """Return the text of all functions."""
        bounded = [*self.lines, *self.bounds()]
        step = self.walk()
        audit = self.walk(audited=True)
        choice = self.choice("place % period == phase", [audit], [step])
        text = _HELPERS
        text += self.function("step", [*bounded, step])
        text += self.function("step_and_audit", [*bounded, *choice])
        if self.peaks:
            peak_text = indent("\n".join(self.find_peaks()), "    ")
            text += self.function("find_peaks", [*self.lines, "if record >= 0:", peak_text])
        if isinstance(self.rule, MatrixRule):
            text += self.function("average", [*self.lines, self.walk(averages=True)])
        return text

    def function(self, name: str, lines: Sequence[str]) -> str:
        head = f"def {name}(table, tiles, numbers, control, records, sums, first_program):"
        body = indent("\n".join(lines), "    ")
        return f"\n\n@triton.jit(do_not_specialize=['first_program'])\n{head}\n{body}\n"

    def walk(self, *, audited: bool = False, averages: bool = False) -> str:
        """Return the loop that steps, audits or averages the words of a program."""
        body = self.body(self.printed(audited=audited, averages=averages))
        sums = range(SUMS if audited else 0)
        begin = [f"sum{k} = 0.0" for k in sums]
        ends = [f"tl.store(sums + program * {SUMS} + {k}, sum{k})" for k in sums]
        return "\n".join([*begin, _over_span(body), *ends])

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a program's rows, in which a NaN is the
        largest.
        """
        graph = magnitude_graph(self.storage, TRITON)
        begin = []
        body = []
        ends = []
        for name, part in self.peaks:
            k = self.place_of_peak(name, part)
            printed = print_graph(graph, ["w"], f"m_{name}{part}_", TRITON)
            most = f"most_{name}{part}"
            begin.append(f"{most} = tl.full([{BLOCK}], 0, tl.int32)")
            body += [f"w = {self.loads[f'w{k}']}", *printed.lines]
            body.append(f"{most} = tl.maximum({most}, {printed.results[0]})")
            bits = f"tl.reduce({most}, 0, larger_of)"
            ends.append(f"peak_{name}{part} = {bits}.to(tl.float32, bitcast=True)")
        return [*begin, _over_span(body), *ends]

    def find_peaks(self) -> list[str]:
        """Return lines that write a row's record: its largest magnitudes and its bounds so far."""
        lines = [self.text("found", self.record_size()), *self.peak_lines()]
        for k, (name, part) in enumerate(self.peaks):
            lines.append(self.text("store", f"found + {k}", f"peak_{name}{part}"))
        for k, place in enumerate(self.old_bounds()):
            old = f"found + {len(self.peaks) + k}"
            lines.append(self.text("store", old, self.text("load", place)))
        return lines


def _over_span(body: Sequence[str]) -> str:
    begin = [f"at = start + tl.arange(0, {BLOCK})", "inside = at < span"]
    loop = indent("\n".join([*begin, *body]), "    ")
    return f"for start in range(0, span, {BLOCK}):\n{loop}"


def source(rule: AnyRule, storage: Storage, *, whole: bool, with_sources: bool = False) -> str:
    """Return the Triton of ``step``, ``step_and_audit``, ``add_up``, ``find_peaks`` of rows with
    scales, and ``average``.
    """
    return _Text(rule, storage, whole=whole, with_sources=with_sources).whole()


@lru_cache(None)
def functions(rule: AnyRule, storage: Storage, whole: bool, interpret: bool) -> dict[str, Any]:
    """Return the functions of :func:`source`. The first launch of each compiles it."""
    return load(source(rule, storage, whole=whole), interpret=interpret)
