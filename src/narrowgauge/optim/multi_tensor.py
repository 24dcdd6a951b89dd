"""One launch for all tensors of a (rule, storage): the step on a GPU.

The definition of a step is traced and printed as the body of a Triton kernel (:mod:`narrowgauge.triton_printer`). Weights,
gradients and states are read where they are, by their addresses:

    table    int64 [tensors, width]     for each tensor its addresses and sizes, and its row of numbers
    numbers  float32 [kinds, scalars]   the rule's scalars and the seed, for each param group and step count
    tiles    int32 [programs]           the tensor of each program; a tensor's programs follow one another

Table and numbers are one buffer, copied to the device once a step. A program steps ``BLOCK`` words, or in a storage of rows one
row of each part. Where rows have scales, it reads the row's gradient twice: for the new bounds, then for the step.

A tensor is *whole* if its rows are multiples of 16 bytes and begin at multiples of 16 bytes. The others are read in elements, by
a second launch. An audited launch also sums the terms of each program. One more launch adds them by tensor, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from textwrap import indent
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.numerics.rounding import MAGNITUDE, bits_of
from narrowgauge.optim import codes, layout
from narrowgauge.optim.kernel import CONTROL, make_step
from narrowgauge.optim.row_bounds import scales_of_rows
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import ParameterState
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_names import to_device
from narrowgauge.triton_printer import LAUNCH, load, print_graph, trace

BLOCK = 512
"""Words that a program steps at a time: 16 bytes for each of 128 threads."""
SIZES = ("columns", "group", "elements", "rows", "first", "number", "low", "high")
"""The table after the addresses. Each part has ``group`` rows of ``columns`` words, the tensor ``rows`` rows of ``elements``.
``first`` is its first program. Audit its words (in a storage of rows: its rows) from ``low`` to ``high``."""
SUMS = len(KERNEL_SUMS)
LARGEST, TOTAL = "tl.standard._elementwise_max", "tl.standard._sum_combine"  # tl.max and tl.sum ignore our interpret

HELPERS = f"""
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
def add_up(table, sums, totals, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    row = table + (tl.program_id(0) + 1) * WIDTH - {len(SIZES)}
    first, column = tl.load(row + 4), tl.arange(0, {SUMS})
    begin, end = first + tl.load(row + 6) // UNIT, first + (tl.load(row + 7) + UNIT - 1) // UNIT
    total = tl.full([{SUMS}], 0.0, tl.float64)
    for start in range(begin, end, 64):
        program = start + tl.arange(0, 64)[:, None]
        terms = tl.load(sums + program * {SUMS} + column[None, :], mask=program < end, other=0.0)
        total += tl.reduce(terms.to(tl.float64), 0, {TOTAL})
    tl.store(totals + tl.program_id(0) * {SUMS} + column, total)
"""


def source(rule: Rule, storage: Storage, *, whole: bool, audited: bool) -> str:
    """Return the text of the Triton functions ``step`` and ``add_up``."""
    parts, per_word, in_rows = layout.num_parts(storage), layout.per_word(storage), layout.by_rows(storage)
    num_scalars, num_addresses = len(rule.scalars), num_columns(storage) - len(SIZES)
    lines = [
        "program = first_program + tl.program_id(0)",
        f"row = table + tl.load(tiles + program).to(tl.int64) * {num_columns(storage)}",
        *(f"{name} = tl.load(row + {num_addresses + k})" for k, name in enumerate(SIZES)),
        *(f"v_{k} = tl.load(control + {k})" for k in range(len(CONTROL))),
        f"scalars = numbers + number * {num_scalars + 1}",
        *(f"v_{len(CONTROL) + k} = tl.load(scalars + {k})" for k in range(num_scalars)),
        f"seed = tl.load(scalars + {num_scalars}).to(tl.int32, bitcast=True)",
        "place = program - first",
    ]
    if in_rows:
        lines += ["line, origin, span, left = place, 0, columns.to(tl.int32), elements"]
    else:
        lines += [
            f"line, origin = 0, place * {BLOCK}",
            f"span = tl.minimum(columns - origin, {BLOCK}).to(tl.int32)",
            f"left = elements - {per_word} * origin",
        ]
    if whole:
        lines += ["columns, span = tl.multiple_of(columns, 4), tl.multiple_of(span, 4)"]
    loads, stores = [], []
    for column, name in enumerate(("weight", "gradient", *(plane.name for plane in layout.planes(storage)))):
        is_plane, kind = column > 1, "int32" if whole or column > 1 or per_word == 1 else "int16"
        count = layout.num_tensors(storage, layout.planes(storage)[column - 2].bits) if is_plane else parts
        address = f"tl.load(row + {column}).to(tl.pointer_type(tl.{kind}))"
        for k in range(count):
            p, line = f"{name}_at{k}", f"({k} * group + line)"
            inside = "inside" if is_plane or whole else f"inside & ({line} < rows)"
            if kind == "int16":
                lines += [f"{p} = {address} + ({line} * elements + {per_word} * origin)"]
                loads += [f"load_halves({p}, at, {inside}, left)"]
                stores += [f"store_halves({p}, at, {{}}, {inside}, left)"]
            else:
                lines += [f"{p} = {f'tl.multiple_of({address}, 16)' if whole else address} + ({line} * columns + origin)"]
                loads += [f"tl.load({p} + at, mask={inside}, other=0)"]
                stores += [f"tl.store({p} + at, {{}}, mask={inside})"]
    if storage.scaled:
        lines += _bounds(rule, storage, loads, num_addresses)

    def loop(summarize: Callable[..., Any] | None, extra: str = "") -> str:
        words, rows = [(torch.int32, (4, 8) if in_rows else (8,))] * len(loads), [(torch.float32, (4, 1))]
        values = [(torch.float32, (len(CONTROL) + num_scalars,)), (torch.int32, ())]
        scales = [f"{way}_{name}{k}" for name in storage.scaled for k in range(parts) for way in ("into", "back")]
        graph = trace(make_step(rule, storage, summarize), *words, *rows * len(scales), *values)
        body, terms, writes = print_graph(graph, [*(f"w{k}" for k in range(len(loads))), *scales, "v", "seed"], "x")
        body = [f"w{k} = {text}" for k, text in enumerate(loads)] + body
        body += [stores[int(word[1:])].format(value) for word, value in writes]
        sums = [f"sum{k} += tl.reduce(tl.where(counted, {term}, 0.0), 0, {TOTAL})" for k, term in enumerate(terms)]
        start = [f"sum{k} = 0.0" for k in range(SUMS if summarize else 0)]
        end = [f"tl.store(sums + program * {SUMS} + {k}, sum{k})" for k in range(SUMS if summarize else 0)]
        return "\n".join([*start, _over_span([extra, *body, *sums]), *end])

    if audited:
        at, watched = (
            ("inside", "(place >= low) & (place < high)")
            if in_rows
            else ("inside & (origin + at >= low) & (origin + at < high)", f"(origin + {BLOCK} > low) & (origin < high)")
        )
        lines += [f"if {watched}:", indent(loop(list, f"counted = {at}"), "    "), "else:", indent(loop(None), "    ")]
    else:
        lines += [loop(None)]
    text = "\n".join(lines)
    head = "@triton.jit(do_not_specialize=['first_program'])\ndef step(table, tiles, numbers, control, sums, first_program):"
    return f"{HELPERS}\n\n{head}\n{indent(text, '    ')}\n"


def _over_span(body: Sequence[str]) -> str:
    """Return a loop over the words of a program."""
    begin = [f"at = start + tl.arange(0, {BLOCK})", "inside = at < span"]
    return f"for start in range(0, span, {BLOCK}):\n" + indent("\n".join([*begin, *body]), "    ")


def _bounds(rule: Rule, storage: Storage, loads: Sequence[str], num_addresses: int) -> list[str]:
    """Print the new bounds of the rows of a program, and the multipliers ``into_`` and ``back_`` of each code and part."""
    parts, scaled, per_word = layout.num_parts(storage), storage.scaled, layout.per_word(storage)
    names = ("gradient", "weight") if rule.coupled or "weight" in scaled else ("gradient",)

    def magnitude(word: Tensor) -> Tensor:
        """Return the largest magnitude of a word's values as bits, in which a NaN is the largest."""
        lanes = layout.lanes_of_weight(storage.visible, [word])
        bits = [bits_of(codes.gradient_value(storage.visible, lane)) & MAGNITUDE for lane in lanes]
        return bits[0] if per_word == 1 else torch.maximum(*bits)

    def scales(values: Tensor, *rows: Tensor) -> list[Tensor]:
        slopes, weights = rows[0], rows[1] if len(names) == 2 else torch.zeros_like(rows[0])
        old = dict(zip(scaled, rows[len(names) :], strict=True))
        return [x for scale in scales_of_rows(rule, storage, slopes, weights, old, values).values() for x in scale]

    lines, body = [], []
    for name in names:
        for k in range(parts):
            graph = trace(magnitude, (torch.int32, (8,)))
            text, (largest,), _ = print_graph(graph, ["w"], f"m_{name}{k}_")
            lines += [f"peak_{name}{k} = tl.full([{BLOCK}], 0, tl.int32)"]
            body += [f"w = {loads[k + (parts if name == 'gradient' else 0)]}", *text]
            body += [f"peak_{name}{k} = tl.maximum(peak_{name}{k}, {largest})"]
    lines += [_over_span(body)]
    values = torch.float32, (len(CONTROL) + len(rule.scalars),)
    graph = trace(scales, values, *[(torch.float32, (1,))] * (len(names) + len(scaled)))
    for k in range(parts):
        at, inside = f"{k} * group + line", f"{k} * group + line < rows"
        memory = [f"tl.load(row + {num_addresses - len(scaled) + j}).to(tl.pointer_type(tl.float32)) + {at}" for j in range(len(scaled))]
        lines += [f"largest_{name}{k} = tl.reduce(peak_{name}{k}, 0, {LARGEST}).to(tl.float32, bitcast=True)" for name in names]
        lines += [f"old_{name}{k} = tl.load({p}, mask={inside}, other=0.0)" for name, p in zip(scaled, memory, strict=True)]
        inputs = ["v", *(f"largest_{name}{k}" for name in names), *(f"old_{name}{k}" for name in scaled)]
        text, results, _ = print_graph(graph, inputs, f"b{k}_")
        lines += text
        for j, (name, p) in enumerate(zip(scaled, memory, strict=True)):
            bound, into, back = results[3 * j : 3 * j + 3]
            lines += [f"into_{name}{k}, back_{name}{k} = {into}, {back}", f"tl.store({p}, {bound}, mask={inside})"]
    return lines


def num_columns(storage: Storage) -> int:
    """Return the columns of the table: the addresses of weight, gradient, planes and bounds, and the sizes."""
    return 2 + len(layout.planes(storage)) + len(storage.scaled) + len(SIZES)


# ── the launch ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Numbers = tuple[Sequence[float], int]
"""The scalars of a rule in one step, and the seed."""
INTERPRET = False
"""Run the kernels on CPU tensors, in Triton's interpreter. Tests set it."""


@lru_cache(None)
def functions(rule: Rule, storage: Storage, whole: bool, audited: bool, interpret: bool) -> dict[str, Any]:
    """Return the Triton functions of :func:`source`. The first launch compiles them."""
    return load(source(rule, storage, whole=whole, audited=audited), interpret=interpret)


class Table:
    """Step tensors of one (rule, storage) and device by one launch. The table is kept between steps.

    Args:
        rule, storage: of all states. The storage does not compute in float64.
        device: of all states.
    """

    def __init__(self, rule: Rule, storage: Storage, device: torch.device) -> None:
        self.rule, self.storage, self.device = rule, storage, device
        self._states: list[ParameterState] = []
        self._addresses: list[int] = []
        self._numbers = np.zeros((0, 0), np.float32)

    def step(
        self,
        states: list[ParameterState],
        numbers: Sequence[Numbers],
        places: Sequence[int],
        control: Tensor,
        audited: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor | None:
        """Step states in place. Their weights and gradients are contiguous.

        Args:
            places: the index in ``numbers`` of each state.
            control: the scalars of ``CONTROL``, float32 ``[2]`` on the device.
            audited: the first word (or row) of each state to audit, and the one after the last.
        Returns:
            The audit, float64 ``[states, KERNEL_SUMS]``; ``None`` without one.
        """
        if states != self._states or len(numbers) != len(self._numbers):
            self._allocate(states, len(numbers))
        addresses = [x for state in states for x in (state.parameter.data_ptr(), state.gradient.data_ptr())]
        if addresses != self._addresses:
            self._set_addresses(addresses)
        for row, (scalars, seed) in zip(self._numbers, numbers, strict=True):
            row[:-1] = scalars
            row[-1:].view(np.int32)[0] = seed
        self._table[:, -3] = places
        if audited is not None:
            self._table[:, -2:] = audited
        self._buffer.copy_(to_device(torch.from_numpy(self._host), self.device))
        return self._launch(control, audited=audited is not None)

    def _allocate(self, states: list[ParameterState], num_numbers: int) -> None:
        """Lay out the table and the numbers of other states than before."""
        storage, rows = self.storage, []
        for state in states:
            group, columns = (1, *layout.extent(storage, state.parameter.shape))[-2:]
            num_rows, elements = (1, *layout.matrix_of(storage, state.parameter.shape))[-2:]
            memory = [*(state.words[p.name] for p in layout.planes(storage)), *(state.bounds[n] for n in storage.scaled)]
            rows.append([0, 0, *(x.data_ptr() for x in memory), columns, group, elements, num_rows, 0, 0, 0, 0])
        size, width = len(rows) * len(rows[0]), len(self.rule.scalars) + 1
        size += size % 2  # the numbers begin at 16 bytes
        self._host = np.zeros(size + -(-num_numbers * width // 2), np.int64)
        self._table = self._host[: len(rows) * len(rows[0])].reshape(len(rows), -1)
        self._table[:] = rows
        self._numbers = self._host[size:].view(np.float32)[: num_numbers * width].reshape(num_numbers, width)
        self._buffer = torch.empty(len(self._host), dtype=torch.int64, device=self.device)
        self._device_numbers = self._buffer[size:].view(torch.float32)
        self._states, self._addresses = list(states), []

    def _set_addresses(self, addresses: list[int]) -> None:
        """Set the addresses of weights and gradients, and find the programs of each tensor."""
        table, storage, self._addresses = self._table, self.storage, addresses
        table[:, :2] = np.array(addresses, np.int64).reshape(-1, 2)
        columns, group, elements, rows = table[:, -8:-4].T
        is_whole = (table[:, :2] % 16 == 0).all(1) & (columns % 4 == 0)
        is_whole &= (elements == layout.per_word(storage) * columns) & (rows == layout.num_parts(storage) * group)
        counts, order = group if layout.by_rows(storage) else -(-columns // BLOCK), np.argsort(~is_whole, kind="stable")
        table[order, -4] = np.cumsum(counts[order]) - counts[order]
        self._counts = int(counts[is_whole].sum()), int(counts[~is_whole].sum())
        tiles = np.repeat(order, counts[order]).astype(np.int32)
        self._tiles = to_device(torch.from_numpy(tiles), self.device)

    def _launch(self, control: Tensor, *, audited: bool) -> Tensor | None:
        """Launch the kernels on what the device has."""
        sums = torch.empty(sum(self._counts), SUMS, dtype=torch.float32, device=self.device) if audited else None
        arguments = self._buffer, self._tiles, self._device_numbers, control, sums
        with torch.cuda.device_of(control):
            for whole, first, count in ((True, 0, self._counts[0]), (False, *self._counts)):
                if count:
                    compiled = functions(self.rule, self.storage, whole, audited, control.is_cpu)
                    compiled["step"][(count,)](*arguments, first, **LAUNCH)
            if sums is None:
                return None
            totals = torch.empty(len(self._states), SUMS, dtype=torch.float64, device=self.device)
            unit = 1 if layout.by_rows(self.storage) else BLOCK
            compiled = functions(self.rule, self.storage, True, True, control.is_cpu)
            compiled["add_up"][(len(totals),)](self._buffer, sums, totals, self._table.shape[1], unit, **LAUNCH)
        return totals
