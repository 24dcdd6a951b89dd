"""The step of all tensors on a CPU, as C++: one call over a table of addresses.

A *program* steps ``TILE`` elements, or one row where rows have scales. It walks over the streams
(:class:`narrowgauge.optim.program.Stream`) in groups of two vectors. What is left at the end of a
row goes through a copy padded with zeros. Programs run on all threads, with one barrier at the end
of the call.
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
from narrowgauge.optim.program import SIZES, Program, Stream, num_addresses, scale_names
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.cpp import CPP, VECTORS, build

TILE = 8192
"""Elements that a program steps: 16 to 32 KB of each stream."""
AHEAD = 512
"""Bytes between a load and its prefetch.

The hardware's own prefetch leaves a loop of many streams waiting.
"""
SUMS = len(KERNEL_SUMS)

_OVER = """
// Walk over the elements of a span in groups. The rest goes through a copy padded with zeros.
template <class Walk>
INLINE void over(Walk walk, int streams, const int64_t* size, const bool* is_written, char* const* p, int64_t span,
                 int64_t wide, const float* u, float* out) {
  const int64_t groups = span / GROUP, at = groups * GROUP, left = span - at;
  if (groups) walk(p, groups, GROUP, wide, u, out);
  if (!left) return;
  alignas(64) char copy[STREAMS][4 * GROUP] = {};
  char* q[STREAMS];
  for (int k = 0; k < streams; k++) {
    memcpy(copy[k], p[k] + size[k] * at, size[k] * left);
    q[k] = copy[k];
  }
  walk(q, 1, (int32_t)left, wide, u, out);
  for (int k = 0; k < streams; k++)
    if (is_written[k]) memcpy(p[k] + size[k] * at, copy[k], size[k] * left);
}
"""
_HEAD = (
    'extern "C" void {name}(const int64_t* table, const int32_t* tiles, int64_t num_programs, const float* numbers,\n'
    "                        const float* control, float* records, float* sums, int32_t threads) "
    "{{\n"
    "#pragma omp parallel for schedule(static) num_threads(threads)\n"
    "for (int64_t program = 0; program < num_programs; program++) {{\n"
)


class _Text(Program):
    """Write the C++ of a (rule, storage)."""

    language = CPP
    indentation = "  "
    texts: ClassVar = {
        "bound": "((float*)row[{0}])[place]",
        "load": "{0}",
        "store": "{0} = {1};",
        "found": "float* found = records + (record + place) * {0};",
        "at": "found[{0}]",
        "new": "float {0} = {1};",
        "set": "{0} = {1};",
        "if": "if ({0}) {{",
        "else": "} else {",
        "end": "}",
    }

    def __init__(
        self, rule: AnyRule, storage: Storage, *, audited: bool = False, with_sources: bool = False
    ) -> None:
        super().__init__(rule, storage, with_sources=with_sources)
        self.is_audited = audited
        self.uniforms = [*self.values, "seed", *scale_names(storage)]

    def text_of_program(self) -> str:
        """Return the text of all functions."""
        text = f"{VECTORS}\nconstexpr int STREAMS = {len(self.streams)};\n{_OVER}"
        printed = self.value_of_word()
        lines = [*printed.lines, f"return {printed.results[0]};"]
        text += "INLINE Floats value_of(Ints w) {\n" + indent("\n".join(lines), "  ") + "\n}\n"
        if self.peaks:
            text += self.walk_of_peaks()
        text += self.walk("step_elements")
        if self.is_audited:
            text += self.walk("audit_elements", audited=True)
            return text + self.function(
                "step_and_audit", self.step("step_elements", "audit_elements")
            )
        if self.peaks:
            lines = ["if (record < 0) continue;", *self.find_peaks()]
            text += self.function("find_peaks", lines)
        text += self.function("step", self.step("step_elements"))
        if isinstance(self.rule, MatrixRule):
            text += self.walk("average_elements", averages=True)
            text += self.function("average", self.step("average_elements"))
        return text

    # ── functions over elements ───────────────────────────────────────────────────────────────────

    def loaded(self, stream: Stream) -> tuple[str, str]:
        """Return the type of a stream's vector, and the text that loads it at ``at``."""
        pointer = f"p_{stream.name}"
        narrow = f"load<{stream.size}>({pointer} + {stream.size} * at)"
        if stream.name == "change":
            return "Floats", f"float_of({narrow})"
        if stream.name != "gradient":
            return "Ints", narrow
        wide = f"float_of(load<4>({pointer} + 4 * at))"
        return "Floats", wide if stream.size == 4 else f"wide ? {wide} : value_of({narrow})"

    def walk(self, name: str, *, audited: bool = False, averages: bool = False) -> str:
        """Return a function that steps, audits or averages groups of elements.

        Of one group only the first ``inside`` elements count in a sum.
        """
        printed = self.printed(audited=audited, averages=averages)
        written = self.written(averages=averages)
        results = printed.results[: len(written)]
        terms = printed.results[len(written) :]
        flags = [stream in written for stream in self.streams]
        lines = self._pointers_and_numbers(self.streams, self.uniforms)
        kinds = []
        loads = []
        names = []
        for stream in self.read(averages=averages):
            kind, load = self.loaded(stream)
            kinds.append(f"{kind} w_{stream.name};")
            names.append(f"w_{stream.name}")
            loads.append(load)
        outputs = []
        stores = []
        for k, (stream, value) in enumerate(zip(written, results, strict=True)):
            outputs.append(f"splat(int_of({value}))" if averages else f"splat({value})")
            place = f"p_{stream.name} + {stream.size} * at"
            stores.append(f"store<{stream.size}>({place}, x.y{k}, y.y{k});")
        done = [f"Ints y{k};" for k in range(len(written))]
        done += [f"Floats t{k};" for k in range(len(terms))]
        outputs += [f"splat({term})" for term in terms]
        lines += [
            f"struct Loaded {{ {' '.join(kinds)} }};",
            f"struct Done {{ {' '.join(done)} }};",
            f"const auto load_at = [=](int64_t at) ALWAYS {{ return Loaded{{{', '.join(loads)}}}; }};",
            "const auto step = [=](const Loaded& loaded) ALWAYS {",
            f"  const auto [{', '.join(names)}] = loaded;",
            *[f"  {line}" for line in printed.lines],
            f"  return Done{{{', '.join(outputs)}}};",
            "};",
            *[f"Floats sum{k}{{}};" for k in range(len(terms))],
        ]
        if terms:
            lines.append(
                "const auto first = places() < inside, second = places() + LANES < inside;"
            )
        lines.append("for (int64_t at = 0; at < GROUP * groups; at += GROUP) {")
        for stream in self.read(averages=averages):
            size = stream.size
            lines.append(f"  prefetch<{size}>(p_{stream.name} + {size} * at + {AHEAD});")
        lines += [
            "  const Loaded a = load_at(at), b = load_at(at + LANES);",
            "  const Done x = step(a), y = step(b);",
            *[f"  {line}" for line in stores],
        ]
        ends = []
        for k in range(len(terms)):
            term = f"where(first, x.t{k}, 0.0f) + where(second, y.t{k}, 0.0f)"
            lines.append(f"  sum{k} += {term};")
            ends.append(f"out[{k}] += sum_of(sum{k});")
        text = f"constexpr bool WRITTEN_BY_{name}[] = {{{', '.join(map(str, flags)).lower()}}};\n"
        return text + _function_over_groups(name, [*lines, "}", *ends])

    def walk_of_peaks(self) -> str:
        """Return functions that find the largest magnitude of the gradient, and of the weight."""
        text = "constexpr bool WRITTEN_BY_peak[] = {false};\n"
        for stream in self.streams[:2]:
            if stream.name not in self.peaks:
                continue
            load = self.loaded(stream)[1]
            bits = "int_of(w) & 0x7FFFFFFF"
            if stream.name == "weight":
                load = f"value_of({load})"
                bits = f"{bits} & ((int_of(w) & 0x7FFFFFFF) < 0x7F800000)"
            lines = [
                f"char* const p_{stream.name} = p[0];",
                "Ints most{};",
                "for (int64_t at = 0; at < GROUP * groups; at += LANES) {",
                f"  const Floats w = {load};",
                f"  most = larger(most, {bits});",
                "}",
                "out[0] = float_of(larger(int_of(out[0]), largest_of(most)));",
            ]
            text += _function_over_groups(f"peak_of_{stream.name}", lines)
        return text

    def _pointers_and_numbers(
        self, streams: Sequence[Stream], uniforms: Sequence[str]
    ) -> list[str]:
        lines = [f"char* const p_{stream.name} = p[{k}];" for k, stream in enumerate(streams)]
        meanings = dict(zip(self.values, (*CONTROL, *self.rule.scalars), strict=True))
        for k, uniform in enumerate(uniforms):
            value = f"int_of(u[{k}])" if uniform == "seed" else f"u[{k}]"
            line = f"const auto {uniform} = {value};"
            if uniform in meanings:
                line += f"  // {meanings[uniform]}"
            lines.append(line)
        return lines

    # ── functions over programs ───────────────────────────────────────────────────────────────────

    def function(self, name: str, lines: Sequence[str]) -> str:
        """Return an exported function that runs lines for every program."""
        return (
            _HEAD.format(name=name) + indent("\n".join([*self.place(), *lines]), "  ") + "\n}\n}\n"
        )

    def place(self) -> list[str]:
        """Return lines that find the tile of a program: its row of the table, and its streams."""
        width = num_addresses(self.rule, self.storage)
        lines = [f"const int64_t* row = table + tiles[program] * {width + len(SIZES)};"]
        lines += [f"const int64_t {name} = row[{width + k}];" for k, name in enumerate(SIZES)]
        sizes = [str(stream.size) for stream in self.streams]
        sizes[1] = f"wide ? 4 : {sizes[1]}"
        lines += [
            "const int64_t place = program - first;",
            "const int64_t begin = place * extent;",
            "const int64_t span = numel - begin < extent ? numel - begin : extent;",
            f"const int64_t size[] = {{{', '.join(sizes)}}};",
            "char* p[STREAMS];",
            "for (int k = 0; k < STREAMS; k++)",
            "  p[k] = (char*)row[k] + size[k] * begin;",
        ]
        return lines

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
        call = "over({0}, STREAMS, size, WRITTEN_BY_{0}, p, span, wide, u, {1});"
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
        """Return lines that find the largest magnitudes of a tile in ``peak_NAME``, which exist."""
        lines = []
        for name in self.peaks:
            k = 0 if name == "weight" else 1
            lines.append(
                f"over(peak_of_{name}, 1, size + {k}, WRITTEN_BY_peak, p + {k}, span, wide, "
                f"nullptr, &peak_{name});"
            )
        return lines

    def declared_peaks(self) -> list[str]:
        return [self.text("new", f"peak_{name}", 0) for name in self.peaks]


def _function_over_groups(name: str, lines: Sequence[str]) -> str:
    """Return ``name(p, groups, inside, wide, u, out)``: walk over groups of the streams ``p``, with
    the same numbers ``u``.
    """
    head = (
        f"static __attribute__((noinline)) void {name}(char* const* p, int64_t groups, int32_t "
        "inside, int64_t wide, const float* u, float* out) {\n"
    )
    return head + indent("\n".join(lines), "  ") + "\n}\n"


def source(
    rule: AnyRule, storage: Storage, *, audited: bool = False, with_sources: bool = False
) -> str:
    """Return the C++ of ``step``, ``find_peaks`` of rows with scales and ``average`` of a matrix
    rule, or of ``step_and_audit``.
    """
    return _Text(rule, storage, audited=audited, with_sources=with_sources).text_of_program()


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
