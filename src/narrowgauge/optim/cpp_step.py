"""The step of all tensors on a CPU, as C++: one call over a table of addresses.

A *program* steps one tile: ``TILE`` words of a flat storage, or one row of each part where rows
have scales. It walks over streams (:class:`narrowgauge.optim.step_graph.Stream`) in whole vectors.
What is left at the end of a row, or missing in a second part, goes through a copy padded with
zeros. Programs run on all threads, with one barrier at the end of the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from textwrap import indent
from typing import Any, ClassVar

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim.kernel import CONTROL
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step_graph import (
    StepText,
    Stream,
    lane_names,
    magnitude_graph,
    num_addresses,
    num_values,
    scale_names,
)
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.cpp import CPP, VECTORS, build
from narrowgauge.torch_support.printer import print_graph

TILE = 4096
"""Words of a tile: 16 KB of each stream. A longer row is stepped in several tiles."""
AHEAD = 64
"""Words between a load and its prefetch.

The hardware's own prefetch leaves a loop of many streams waiting.
"""
SIZES = (
    "columns", "group", "elements", "rows", "first", "count", "pieces", "record", "number", "period", "phase",
)  # fmt: skip
"""The table after the addresses.

Each part has ``group`` rows of ``columns`` words. The tensor has ``rows`` rows of ``elements``. Its
``count`` programs begin at ``first``, with ``pieces`` for each row. Where rows are bounded before
the step, their records begin at ``record``, else it is -1. ``number`` is the row of its scalars. An
audit sums every ``period``-th program, from ``phase`` on.
"""
SUMS = len(KERNEL_SUMS)

_OVER = """
// Walk over the words of a span. What is no whole vector, or not there at all, goes through a copy padded with zeros.
template <class Walk>
INLINE void over(Walk walk, int streams, const int* size, const bool* is_written, char* const* p, const int64_t* bytes,
                 int64_t span, int64_t whole, const float* u, float* out) {
  if (whole) walk(p, whole, LANES, u, out);
  for (int64_t at = whole * LANES; at < span; at += LANES) {
    alignas(64) char copy[STREAMS][4 * MOST_FLOATS * LANES] = {};
    char* q[STREAMS];
    for (int k = 0; k < streams; k++) {
      const int64_t there = bytes[k] - size[k] * at, most = size[k] * LANES;
      if (there > 0) memcpy(copy[k], p[k] + size[k] * at, there < most ? there : most);
      q[k] = copy[k];
    }
    walk(q, 1, span - at < LANES ? (int32_t)(span - at) : LANES, u, out);
    for (int k = 0; k < streams; k++) {
      const int64_t there = bytes[k] - size[k] * at, most = size[k] * LANES;
      if (there > 0 && is_written[k]) memcpy(p[k] + size[k] * at, copy[k], there < most ? there : most);
    }
  }
}

// One float of each of several that belong to a word.
template <int FLOATS> INLINE Floats take_lane(const char* p, int lane) {
  Floats x;
  for (int k = 0; k < LANES; k++) memcpy(&x[k], p + 4 * (FLOATS * k + lane), 4);
  return x;
}
template <int FLOATS> INLINE void put_lane(char* p, int lane, Floats x) {
  for (int k = 0; k < LANES; k++) memcpy(p + 4 * (FLOATS * k + lane), (char*)&x + 4 * k, 4);
}
"""
_HEAD = (
    'extern "C" void {name}(const int64_t* table, const int32_t* tiles, int64_t num_programs, const float* numbers,\n'
    "                        const float* control, float* records, float* sums, int32_t threads) "
    "{{\n"
    "#pragma omp parallel for schedule(static) num_threads(threads)\n"
    "for (int64_t program = 0; program < num_programs; program++) {{\n"
)


class _Text(StepText):
    """Write the C++ of a (rule, storage)."""

    language = CPP
    indentation = "  "
    texts: ClassVar = {
        "bound": "((float*)row[{0}])[{1} * group + line]",
        "load": "{0}",
        "store": "{0} = {1};",
        "found": "float* found = records + (record + line) * {0};",
        "read": "found[{0}]",
        "new": "float {0} = {1};",
        "set": "{0} = {1};",
        "sum": "sum{0} += where(counted, {1}, 0.0f);",
        "if": "if ({0}) {{",
        "else": "} else {",
        "end": "}",
    }

    def __init__(
        self, rule: AnyRule, storage: Storage, *, audited: bool = False, with_sources: bool = False
    ) -> None:
        super().__init__(rule, storage, with_sources=with_sources)
        self.is_audited = audited
        self.values = [f"v_{k}" for k in range(num_values(rule))]
        self.uniforms = [*self.values, "seed", *scale_names(storage)]
        for k, word in enumerate(self.words):
            self.loads[word] = f"load(p{k} + 4 * at)"
            self.stores[word] = f"store(p{k} + 4 * at, {{}});"
        for lane, name in enumerate(lane_names(rule, storage)):
            floats = self.layout.per_word
            stream = len(self.words) + lane // floats
            place = f"p{stream} + {4 * floats} * at, {lane % floats}"
            self.loads[name] = f"take_lane<{floats}>({place})"
            self.stores[name] = f"put_lane<{floats}>({place}, {{}});"

    def whole(self) -> str:
        """Return the text of all functions."""
        sizes = [4 * max(1, stream.floats) for stream in self.streams]
        text = VECTORS + "\n// Bytes of a word in each stream.\n"
        text += f"constexpr int STREAMS = {len(self.streams)}, MOST_FLOATS = {max(sizes) // 4};\n"
        text += f"constexpr int SIZE[] = {{{', '.join(map(str, sizes))}}};\n{_OVER}"
        text += self.walk("step_words")
        if self.peaks:
            text += self.walk_of_peaks()
        if self.is_audited:
            text += self.walk("audit_words", audited=True)
            return text + self.function("step_and_audit", self.step("step_words", "audit_words"))
        if self.peaks:
            text += self.function("find_peaks", self.find_peaks())
        text += self.function("step", self.step("step_words"))
        if isinstance(self.rule, MatrixRule):
            text += self.walk("average_words", averages=True)
            text += self.function("average", self.step("average_words"))
        return text

    # ── functions over words ──────────────────────────────────────────────────────────────────────

    def walk(self, name: str, *, audited: bool = False, averages: bool = False) -> str:
        """Return a function that steps, audits or averages whole vectors of words."""
        printed = self.printed(audited=audited, averages=averages)
        is_written = [word in dict(printed.writes) for word in self.words]
        is_written += [averages] * (len(self.streams) - len(self.words))
        text = (
            f"constexpr bool WRITTEN_BY_{name}[] = {{{', '.join(map(str, is_written)).lower()}}};\n"
        )
        ends = []
        sums = []
        for k in range(len(printed.results)):
            sums.append(f"Floats sum{k}{{}};")
            ends.append(f"out[{k}] += sum_of(sum{k});")
        if sums:
            sums.append("const auto counted = places() < inside;")
        return text + self._loop(name, self.streams, self.uniforms, sums, self.body(printed), ends)

    def walk_of_peaks(self) -> str:
        """Return a function that finds the largest magnitude of a stream, as bits."""
        printed = print_graph(magnitude_graph(self.storage, CPP), ["w"], "m", CPP)
        body = ["const auto w = load(p0 + 4 * at);", *printed.lines]
        body.append(f"most = larger(most, {printed.results[0]});")
        ends = ["out[0] = float_of(larger(int_of(out[0]), largest_of(most)));"]
        text = "constexpr bool WRITTEN_BY_peak_of_words[] = {false};\n"
        return text + self._loop(
            "peak_of_words", self.streams[:1], [], ["Ints most{};"], body, ends
        )

    def _loop(
        self,
        name: str,
        streams: Sequence[Stream],
        uniforms: Sequence[str],
        begin: Sequence[str],
        body: Sequence[str],
        ends: Sequence[str],
    ) -> str:
        """Return ``name(p, blocks, inside, u, out)``: walk over vectors of the streams ``p``, with
        the same numbers ``u``.

        Of one vector only the first ``inside`` words count in a sum.
        """
        lines = [f"char* const p{k} = p[{k}];  // {s.name}" for k, s in enumerate(streams)]
        meanings = dict(zip(self.values, (*CONTROL, *self.rule.scalars), strict=True))
        for k, uniform in enumerate(uniforms):
            value = f"int_of(u[{k}])" if uniform == "seed" else f"u[{k}]"
            line = f"const auto {uniform} = {value};"
            if uniform in meanings:
                line += f"  // {meanings[uniform]}"
            lines.append(line)
        lines += begin
        lines.append("for (int64_t at = 0; at < LANES * blocks; at += LANES) {")
        for k, stream in enumerate(streams):
            size = 4 * max(1, stream.floats)
            lines.append(f"  __builtin_prefetch(p{k} + {size} * (at + {AHEAD}));")
        lines += [f"  {line}" for line in body]
        lines += ["}", *ends]
        head = (
            f"static __attribute__((noinline)) void {name}(char* const* p, int64_t blocks, int32_t "
            "inside, const float* u, "
            "float* out) {\n"
        )
        return head + indent("\n".join(lines), "  ") + "\n}\n"

    # ── functions over programs ───────────────────────────────────────────────────────────────────

    def function(self, name: str, lines: Sequence[str]) -> str:
        """Return an exported function that runs lines for every program."""
        return (
            _HEAD.format(name=name) + indent("\n".join([*self.place(), *lines]), "  ") + "\n}\n}\n"
        )

    def place(self) -> list[str]:
        """Return lines that find the tile of a program: its row of the table, its streams, and its
        whole vectors.
        """
        width = num_addresses(self.rule, self.storage)
        lines = [f"const int64_t* row = table + tiles[program] * {width + len(SIZES)};"]
        lines += [f"const int64_t {name} = row[{width + k}];" for k, name in enumerate(SIZES)]
        lines += [
            "const int64_t place = program - first;",
            "const int64_t line = place / pieces, piece = place % pieces;",
            f"const int64_t origin = piece * {TILE};",
            f"const int64_t span = pieces == 1 || columns - origin < {TILE} ? columns - origin : "
            f"{TILE};",
            f"const int64_t left = elements - {self.layout.per_word} * origin;",
            "char* p[STREAMS];",
            "int64_t bytes[STREAMS];",
            "int64_t whole = span / LANES;",
        ]
        for k, stream in enumerate(self.streams):
            lines += self.place_of(k, stream)
        return lines

    def place_of(self, k: int, stream: Stream) -> list[str]:
        """Return lines that find a stream's address and the bytes of the tile that are there."""
        at = f"({stream.part} * group + line)"
        address = f"p[{k}] = (char*)row[{stream.column}]"
        if stream.is_plane:
            return [f"{address} + 4 * ({at} * columns + origin);", f"bytes[{k}] = 4 * span;"]
        per_word = self.layout.per_word
        size = 4 if stream.floats else 4 // per_word
        return [
            f"{address} + {size} * ({at} * elements + {per_word} * origin);",
            f"bytes[{k}] = {at} < rows ? {size} * (left < {per_word} * span ? left : {per_word} * "
            "span) : 0;",
            f"if (bytes[{k}] < SIZE[{k}] * span && bytes[{k}] / (SIZE[{k}] * LANES) < whole) "
            f"whole = bytes[{k}] / (SIZE[{k}] * LANES);",
        ]

    def step(self, walk: str, audit: str = "") -> list[str]:
        """Return lines that step a tile, or audit and step it."""
        scalars = len(self.rule.scalars)
        lines = [f"const float* scalars = numbers + number * {scalars + 1};"]
        sources = [f"control[{k}]" for k in range(len(CONTROL))]
        sources += [f"scalars[{k}]" for k in range(scalars)]
        for value, source in zip(self.values, sources, strict=True):
            lines.append(f"const float {value} = {source};")
        lines += self.bounds()
        numbers = list(self.uniforms)
        numbers[len(self.values)] = f"scalars[{scalars}]"  # the seed
        lines.append(f"const float u[] = {{{', '.join(numbers)}}};")
        call = "over({0}, STREAMS, SIZE, WRITTEN_BY_{0}, p, bytes, span, whole, u, {1});"
        if not audit:
            return [*lines, call.format(walk, "nullptr")]
        lines += [
            f"float* out = sums + program * {SUMS};",
            f"for (int k = 0; k < {SUMS}; k++) out[k] = 0;",
            "if (place % period == phase)",
            f"  {call.format(audit, 'out')}",
            "else",
            f"  {call.format(walk, 'nullptr')}",
        ]
        return lines

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a tile in ``peak_NAME_PART``, which
        exist.
        """
        lines = []
        for name, part in self.peaks:
            k = self.place_of_peak(name, part)
            lines.append(
                f"over(peak_of_words, 1, SIZE + {k}, WRITTEN_BY_peak_of_words, p + {k}, bytes + "
                f"{k}, span, whole, nullptr, "
                f"&peak_{name}{part});"
            )
        return lines

    def declared_peaks(self) -> list[str]:
        return [self.text("new", f"peak_{name}{part}", 0) for name, part in self.peaks]

    def find_peaks(self) -> list[str]:
        """Return lines that write a row's record: its largest magnitudes, over all its tiles, and
        its bounds so far.
        """
        lines = [
            "if (record < 0) continue;",
            self.text("found", self.record_size()),
            *self.declared_peaks(),
            *self.peak_lines(),
        ]
        for k, (name, part) in enumerate(self.peaks):
            lines += [
                f"int32_t* most{k} = (int32_t*)(found + {k});",
                f"int32_t now{k} = __atomic_load_n(most{k}, __ATOMIC_RELAXED);",
                f"while (now{k} < int_of(peak_{name}{part}) &&",
                f"       !__atomic_compare_exchange_n(most{k}, &now{k}, int_of(peak_{name}{part}), "
                "false, __ATOMIC_RELAXED,",
                "                                    __ATOMIC_RELAXED)) {}",
            ]
        lines.append("if (piece == 0) {")
        for k, place in enumerate(self.old_bounds()):
            lines.append(f"  found[{len(self.peaks) + k}] = {place};")
        lines.append("}")
        return lines


def source(
    rule: AnyRule, storage: Storage, *, audited: bool = False, with_sources: bool = False
) -> str:
    """Return the C++ of ``step``, ``find_peaks`` of rows with scales and ``average`` of a matrix
    rule, or of ``step_and_audit``.
    """
    return _Text(rule, storage, audited=audited, with_sources=with_sources).whole()


@lru_cache(None)
def functions(rule: AnyRule, storage: Storage, audited: bool) -> dict[str, Any]:
    """Return the functions of :func:`source`.

    Build them, unless this machine has done so before.
    """
    library = build(source(rule, storage, audited=audited))
    result = {}
    for name in ("step", "step_and_audit", "find_peaks", "average"):
        function = getattr(library, name, None)
        if function is not None:
            pointers = [ctypes.c_void_p] * 4
            function.argtypes = [
                ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, *pointers, ctypes.c_int32
            ]  # fmt: skip
            function.restype = None
            result[name] = function
    return result


def build_all(rule: AnyRule, storage: Storage) -> None:
    """Build the functions with and without an audit, at the same time."""
    texts = [source(rule, storage, audited=audited) for audited in (False, True)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(build, texts))
