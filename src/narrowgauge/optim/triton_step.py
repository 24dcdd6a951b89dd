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
from typing import Any

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim.cpp_step import SIZES, record_size
from narrowgauge.optim.kernel import CONTROL
from narrowgauge.optim.layout import layout_of
from narrowgauge.optim.row_bounds import bounding
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step_graph import (
    bounds_column,
    lane_names,
    magnitude_graph,
    num_addresses,
    scale_names,
    scales_graph,
    step_graph,
    streams_of,
)
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.printer import print_graph
from narrowgauge.torch_support.triton import REDUCERS, TRITON, load

BLOCK = 512
"""Words that a program steps at a time: 16 bytes for each of 128 threads."""
SUMS = len(KERNEL_SUMS)
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
    column, total = tl.arange(0, {SUMS}), tl.full([{SUMS}], 0.0, tl.float64)
    for start in range(phase, count, 64 * period):
        place = start + tl.arange(0, 64)[:, None] * period
        terms = tl.load(sums + (first + place) * {SUMS} + column[None, :], mask=place < count, other=0.0)
        total += tl.reduce(terms.to(tl.float64), 0, sum_of)
    tl.store(totals + tl.program_id(0) * {SUMS} + column, total)
"""


class _Text:
    """Write the Triton of a (rule, storage), for whole tensors or for others."""

    def __init__(self, rule: AnyRule, storage: Storage, *, whole: bool, with_sources: bool) -> None:
        self.rule, self.storage, self.layout = rule, storage, layout_of(storage)
        self.is_whole, self.with_sources = whole, with_sources
        self.loads: dict[str, str] = {}
        self.stores: dict[str, str] = {}
        self.lines = self.place()
        for stream in streams_of(rule, storage):
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

    def add_words(self, stream: Any) -> None:
        """Add the load and the store of a stream of words."""
        per_word, name = self.layout.per_word, f"{stream.name}_at"
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
        per_word, line = self.layout.per_word, f"({part} * group + line)"
        place = f"{line} * elements + {per_word} * origin"
        name = f"change_at{part}"
        self.lines.append(f"{name} = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + ({place})")
        for lane in range(per_word):
            at = f"({per_word} * at + {lane})"
            mask = f"mask=inside & ({at} < left) & {self.is_row(line)}"
            d = f"d{part * per_word + lane}"
            self.loads[d] = f"tl.load({name} + {at}, {mask}, other=0.0)"
            self.stores[d] = f"tl.store({name} + {at}, {{}}, {mask})"

    # ── functions ───────────────────────────────────────────────────────────────────────────────────────────────────

    def whole(self) -> str:
        """Return the text of all functions."""
        bounded = [*self.lines, *self.bounds()]
        step, audit = self.walk(), self.walk(audited=True)
        choice = [
            "if place % period == phase:",
            indent(audit, "    "),
            "else:",
            indent(step, "    "),
        ]
        text = _HELPERS
        text += self.function("step", [*bounded, step])
        text += self.function("step_and_audit", [*bounded, *choice])
        if self.peaks:
            found = indent("\n".join(self.find_peaks()), "    ")
            text += self.function("find_peaks", [*self.lines, "if record >= 0:", found])
        if isinstance(self.rule, MatrixRule):
            text += self.function("average", [*self.lines, self.walk(averages=True)])
        return text

    def function(self, name: str, lines: Sequence[str]) -> str:
        head = f"def {name}(table, tiles, numbers, control, records, sums, first_program):"
        body = indent("\n".join(lines), "    ")
        return f"\n\n@triton.jit(do_not_specialize=['first_program'])\n{head}\n{body}\n"

    def walk(self, *, audited: bool = False, averages: bool = False) -> str:
        """Return the loop that steps, audits or averages the words of a program."""
        words = [w for w in self.loads if w.startswith("w")]
        lanes = lane_names(self.rule, self.storage)
        inputs = [*words, *scale_names(self.storage), *lanes, "v", "seed"]
        graph = step_graph(
            self.rule, self.storage, TRITON,
            audited=audited, averages=averages, with_sources=self.with_sources,
        )  # fmt: skip
        printed = print_graph(graph, inputs, "x", TRITON)
        body = [f"{name} = {text}" for name, text in self.loads.items()]
        body += printed.lines
        body += [self.stores[target].format(value) for target, value in printed.writes]
        for k, term in enumerate(printed.results):
            body.append(f"sum{k} += tl.reduce(tl.where(inside, {term}, 0.0), 0, sum_of)")
        sums = range(SUMS if audited else 0)
        begin = [f"sum{k} = 0.0" for k in sums]
        ends = [f"tl.store(sums + program * {SUMS} + {k}, sum{k})" for k in sums]
        return "\n".join([*begin, _over_span(body), *ends])

    @property
    def peaks(self) -> list[tuple[str, int]]:
        """Return the tensors and parts whose largest magnitudes bound a row."""
        if not self.storage.scaled or not isinstance(self.rule, Rule):
            return []
        parts = range(self.layout.num_parts)
        return [(name, part) for name in bounding(self.rule, self.storage) for part in parts]

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a program's rows, as bits."""
        graph = magnitude_graph(self.storage, TRITON)
        begin, body, ends = [], [], []
        for name, part in self.peaks:
            k = part if name == "weight" else self.layout.num_parts + part
            printed = print_graph(graph, ["w"], f"m_{name}{part}_", TRITON)
            most = f"most_{name}{part}"
            begin.append(f"{most} = tl.full([{BLOCK}], 0, tl.int32)")
            body += [f"w = {self.loads[f'w{k}']}", *printed.lines]
            body.append(f"{most} = tl.maximum({most}, {printed.results[0]})")
            ends.append(f"bits_{name}{part} = tl.reduce({most}, 0, larger_of)")
        return [*begin, _over_span(body), *ends]

    def old_bounds(self) -> list[str]:
        """Return the addresses of a row's bounds, for each part and scaled code."""
        column = bounds_column(self.rule, self.storage)
        return [
            f"(tl.load(row + {column + k}).to(tl.pointer_type(tl.float32)) + ({part} * group + line))"
            for part in range(self.layout.num_parts)
            for k in range(len(self.storage.scaled))
        ]

    def bounds(self) -> list[str]:
        """Return lines that bound the rows of a program, and define the multipliers of each code
        and part.
        """
        if not self.peaks:
            return []
        assert isinstance(self.rule, Rule)
        size, places = record_size(self.rule, self.storage), self.old_bounds()
        lines = [f"found = records + (record + line) * {size}", "if record < 0:"]
        lines += indent("\n".join(self.peak_lines()), "    ").split("\n")
        lines += [f"    old{k} = tl.load({place})" for k, place in enumerate(places)]
        lines.append("else:")
        for k, (name, part) in enumerate(self.peaks):
            lines.append(f"    bits_{name}{part} = tl.load(found + {k}).to(tl.int32, bitcast=True)")
        for k in range(len(places)):
            lines.append(f"    old{k} = tl.load(found + {len(self.peaks) + k})")
        for name, part in self.peaks:
            lines.append(f"peak_{name}{part} = bits_{name}{part}.to(tl.float32, bitcast=True)")
        graph, scaled = scales_graph(self.rule, self.storage, TRITON), self.storage.scaled
        for part in range(self.layout.num_parts):
            peaks = [f"peak_{name}{part}" for name in bounding(self.rule, self.storage)]
            first = part * len(scaled)
            olds = [f"old{first + k}" for k in range(len(scaled))]
            printed = print_graph(graph, ["v", *peaks, *olds], f"b{part}_", TRITON)
            lines += printed.lines
            for k, name in enumerate(scaled):
                new, into, back = printed.results[3 * k : 3 * k + 3]
                lines += [f"into_{name}{part} = {into}", f"back_{name}{part} = {back}"]
                lines.append(f"tl.store({places[first + k]}, {new})")
        return lines

    def find_peaks(self) -> list[str]:
        """Return lines that write a row's record: its largest magnitudes and its bounds so far."""
        size = record_size(self.rule, self.storage)
        lines = [f"found = records + (record + line) * {size}", *self.peak_lines()]
        for k, (name, part) in enumerate(self.peaks):
            lines.append(f"tl.store(found + {k}, bits_{name}{part}.to(tl.float32, bitcast=True))")
        for k, place in enumerate(self.old_bounds()):
            lines.append(f"tl.store(found + {len(self.peaks) + k}, tl.load({place}))")
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
