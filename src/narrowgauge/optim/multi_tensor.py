"""One launch for all tensors of a (rule, storage): the step on a GPU.

The definition of a step is traced and printed as the body of a Triton kernel (:mod:`narrowgauge.triton_printer`). Weights,
gradients and states are read where they are, by their addresses:

    table    int64 [tensors, width]     for each tensor its addresses and sizes, and its row of numbers
    numbers  float32 [kinds, scalars]   the rule's scalars and the seed, for each param group and step count
    tiles    int32 [programs]           the tensor of each program; a tensor's programs follow one another

Table and numbers are one buffer, copied to the device once a step. A program steps ``BLOCK`` words, or in a storage of rows one
row of each part. Where rows have scales, it reads the row's gradient twice: for the new bounds, then for the step.

A tensor is *whole* if its rows are multiples of 16 bytes and begin at multiples of 16 bytes. The others are read in elements, by
a second launch. An audited launch also sums the terms of each program. One more launch adds them by tensor, in order. A matrix
rule has one more address, of its float32 change: one launch averages gradients into it, and a later one writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from textwrap import indent
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.compile import can_compile
from narrowgauge.edge_values import draw, same_numbers, with_nan
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.numerics.rounding import MAGNITUDE, bits_of
from narrowgauge.optim import codes
from narrowgauge.optim.audit import Auditor
from narrowgauge.optim.kernel import CONTROL, Kernel, Numbers, make_average, make_step
from narrowgauge.optim.layout import lanes_of_weight, layout_of
from narrowgauge.optim.matrix_step import MatrixStep
from narrowgauge.optim.row_bounds import bound_rows, bounding, scales_of_rows
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.state import ParameterState, allocate_all
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_names import send, to_device
from narrowgauge.triton_printer import (
    LARGEST,
    LAUNCH,
    TOTAL,
    launches_on,
    load,
    print_graph,
    proves,
    trace,
)

BLOCK = 512
"""Words that a program steps at a time: 16 bytes for each of 128 threads."""
SIZES = ("columns", "group", "elements", "rows", "first", "count", "number", "period", "phase")
"""The table after the addresses. Each part has ``group`` rows of ``columns`` words, the tensor ``rows`` rows of ``elements``. The
tensor has ``count`` programs. An audit sums every ``period``-th of them, from program ``phase`` on."""
NO_AUDIT = 1 << 40, 1 << 40
SUMS = len(KERNEL_SUMS)

# ── the text of the kernel ──────────────────────────────────────────────────────────────────────────────────────────────

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
def add_up(table, sums, totals, WIDTH: tl.constexpr):
    row = table + (tl.program_id(0) + 1) * WIDTH - {len(SIZES)}
    first, count, period, phase = tl.load(row + 4), tl.load(row + 5), tl.load(row + 7), tl.load(row + 8)
    column, total = tl.arange(0, {SUMS}), tl.full([{SUMS}], 0.0, tl.float64)
    for start in range(phase, count, 64 * period):
        place = start + tl.arange(0, 64)[:, None] * period
        terms = tl.load(sums + (first + place) * {SUMS} + column[None, :], mask=place < count, other=0.0)
        total += tl.reduce(terms.to(tl.float64), 0, {TOTAL})
    tl.store(totals + tl.program_id(0) * {SUMS} + column, total)
"""


def num_inputs(rule: AnyRule) -> int:
    """Return the columns of the table whose addresses change: of the weight, the gradient and a matrix rule's change."""
    return 3 if isinstance(rule, MatrixRule) else 2


def source(rule: AnyRule, storage: Storage, *, whole: bool, audited: bool) -> str:
    """Return the text of the Triton functions ``step``, ``add_up`` and, for a matrix rule, ``average``."""
    layout, num_scalars, first_plane = layout_of(storage), len(rule.scalars), num_inputs(rule)
    num_addresses = first_plane + len(layout.planes) + len(storage.scaled)
    parts, per_word = layout.num_parts, layout.per_word
    lines = [
        "program = first_program + tl.program_id(0)",
        f"row = table + tl.load(tiles + program).to(tl.int64) * {num_addresses + len(SIZES)}",
        *(f"{name} = tl.load(row + {num_addresses + k})" for k, name in enumerate(SIZES)),
        *(f"v_{k} = tl.load(control + {k})" for k in range(len(CONTROL))),
        f"scalars = numbers + number * {num_scalars + 1}",
        *(f"v_{len(CONTROL) + k} = tl.load(scalars + {k})" for k in range(num_scalars)),
        f"seed = tl.load(scalars + {num_scalars}).to(tl.int32, bitcast=True)",
        "place = program - first",
    ]
    if layout.by_rows:
        lines += ["line, origin, span, left = place, 0, columns.to(tl.int32), elements"]
    else:
        lines += [
            f"line, origin = 0, place * {BLOCK}",
            f"span = tl.minimum(columns - origin, {BLOCK}).to(tl.int32)",
            f"left = elements - {per_word} * origin",
        ]
    if whole:
        lines += ["columns, span = tl.multiple_of(columns, 4), tl.multiple_of(span, 4)"]
    loads: list[str] = []
    changes: list[str] = []
    stores: dict[str, str] = {}
    planes = ((k, p.name, layout.num_tensors(p)) for k, p in enumerate(layout.planes, first_plane))
    for column, name, count in [(0, "weight", parts), (1, "gradient", parts), *planes]:
        is_plane = column > 1
        by_halves = not (whole or is_plane or per_word == 1)
        address = f"tl.load(row + {column}).to(tl.pointer_type({'tl.int16' if by_halves else 'tl.int32'}))"
        for k in range(count):
            p, line = f"{name}_at{k}", f"({k} * group + line)"
            inside = "inside" if is_plane or whole else f"inside & ({line} < rows)"
            if by_halves:
                lines += [f"{p} = {address} + ({line} * elements + {per_word} * origin)"]
                stores[f"w{len(loads)}"] = f"store_halves({p}, at, {{}}, {inside}, left)"
                loads += [f"load_halves({p}, at, {inside}, left)"]
            else:
                first = f"tl.multiple_of({address}, 16)" if whole else address
                lines += [f"{p} = {first} + ({line} * columns + origin)"]
                stores[f"w{len(loads)}"] = f"tl.store({p} + at, {{}}, mask={inside})"
                loads += [f"tl.load({p} + at, mask={inside}, other=0)"]
    for k in range(parts if isinstance(rule, MatrixRule) else 0):
        place = f"({k} * group + line) * elements + {per_word} * origin"
        lines += [f"change_at{k} = tl.load(row + 2).to(tl.pointer_type(tl.float32)) + ({place})"]
        for lane in range(per_word):
            at = f"{per_word} * at + {lane}"
            there = f"change_at{k} + {at}, {{}}mask=inside & ({at} < left) & ({k} * group + line < rows)"
            stores[f"d{len(changes)}"] = f"tl.store({there.format('{}, ')})"
            changes += [f"tl.load({there.format('')}, other=0.0)"]
    if isinstance(rule, Rule) and storage.scaled:
        lines += _bounds(rule, storage, loads, num_addresses - len(storage.scaled))

    def loop(summarize: Callable[..., Any] | None, *, averages: bool = False) -> str:
        scales = [
            f"{way}_{name}{k}"
            for name in storage.scaled
            for k in range(parts)
            for way in ("into", "back")
        ]
        graph = _graph(rule, storage, summarize, averages, len(loads), len(scales))
        texts = {f"w{k}": text for k, text in enumerate(loads)} | {
            f"d{k}": text for k, text in enumerate(changes)
        }
        names = list(texts)
        names[len(loads) : len(loads)] = scales
        body, terms, writes = print_graph(graph, [*names, "v", "seed"], "x")
        body = [f"{name} = {text}" for name, text in texts.items()] + body
        body += [stores[word].format(value) for word, value in writes]
        body += [
            f"sum{k} += tl.reduce(tl.where(inside, {term}, 0.0), 0, {TOTAL})"
            for k, term in enumerate(terms)
        ]
        sums = range(SUMS if summarize else 0)
        ends = [f"tl.store(sums + program * {SUMS} + {k}, sum{k})" for k in sums]
        return "\n".join([*(f"sum{k} = 0.0" for k in sums), _over_span(body), *ends])

    body = loop(None)
    if audited:
        watched, body = indent(loop(list), "    "), indent(body, "    ")
        body = f"if place % period == phase:\n{watched}\nelse:\n{body}"
    bodies = {"step": body}
    if isinstance(rule, MatrixRule):
        bodies["average"] = loop(None, averages=True)
    text = HELPERS
    for name, body in bodies.items():
        head = f"def {name}(table, tiles, numbers, control, sums, first_program):"
        body = indent("\n".join([*lines, body]), "    ")
        text += f"\n\n@triton.jit(do_not_specialize=['first_program'])\n{head}\n{body}\n"
    return text


@lru_cache(4)
def _graph(
    rule: Any, storage: Storage, summarize: Any, averages: bool, *counts: int
) -> torch.fx.Graph:
    layout, (num_words, num_scales) = layout_of(storage), counts
    shape = (4, 8) if layout.by_rows else (8,)
    arguments = [(torch.int32, shape)] * num_words + [(torch.float32, (4, 1))] * num_scales
    arguments += [(torch.float32, shape)] * (
        layout.num_lanes if isinstance(rule, MatrixRule) else 0
    )
    step = make_average(rule, storage) if averages else make_step(rule, storage, summarize)
    return trace(
        step, *arguments, (torch.float32, (len(CONTROL) + len(rule.scalars),)), (torch.int32, ())
    )


def _over_span(body: Sequence[str]) -> str:
    begin = [f"at = start + tl.arange(0, {BLOCK})", "inside = at < span"]
    return f"for start in range(0, span, {BLOCK}):\n" + indent("\n".join([*begin, *body]), "    ")


def _bounds(rule: Rule, storage: Storage, loads: Sequence[str], column: int) -> list[str]:
    """Print the new bounds of a program's rows, and ``into_`` and ``back_`` of each code and part. Scales begin at ``column``."""
    parts, scaled, names = layout_of(storage).num_parts, storage.scaled, bounding(rule, storage)
    magnitude, scales = _graphs_of_bounds(rule, storage)
    lines, body = [], []
    for place, name in enumerate(names):
        for k in range(parts):
            text, (largest,), _ = print_graph(magnitude, ["w"], f"m_{name}{k}_")
            lines += [f"peak_{name}{k} = tl.full([{BLOCK}], 0, tl.int32)"]
            body += [f"w = {loads[k + (1 - place) * parts]}", *text]
            body += [f"peak_{name}{k} = tl.maximum(peak_{name}{k}, {largest})"]
    lines += [_over_span(body)]
    for k in range(parts):
        bounds = {
            name: f"tl.load(row + {column + j}).to(tl.pointer_type(tl.float32)) + ({k} * group + line)"
            for j, name in enumerate(scaled)
        }
        lines += [
            f"peak_{n}{k} = tl.reduce(peak_{n}{k}, 0, {LARGEST}).to(tl.float32, bitcast=True)"
            for n in names
        ]
        lines += [f"old_{name}{k} = tl.load({bound})" for name, bound in bounds.items()]
        inputs = [
            "v",
            *(f"peak_{name}{k}" for name in names),
            *(f"old_{name}{k}" for name in scaled),
        ]
        text, results, _ = print_graph(scales, inputs, f"b{k}_")
        lines += text
        for name, new, into, back in zip(
            scaled, results[::3], results[1::3], results[2::3], strict=True
        ):
            lines += [
                f"into_{name}{k}, back_{name}{k} = {into}, {back}",
                f"tl.store({bounds[name]}, {new})",
            ]
    return lines


@lru_cache(4)
def _graphs_of_bounds(rule: Rule, storage: Storage) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Trace the largest magnitude of a word's values as bits, in which a NaN is the largest, and the scales of a row."""
    count, scaled = len(bounding(rule, storage)), storage.scaled

    def magnitude(word: Tensor) -> Tensor:
        lanes = lanes_of_weight(storage.visible, [word])
        bits = [bits_of(codes.gradient_value(storage.visible, lane)) & MAGNITUDE for lane in lanes]
        return bits[0] if len(bits) == 1 else torch.maximum(*bits)

    def scales(values: Tensor, slopes: Tensor, *rest: Tensor) -> list[Tensor]:
        weights = rest[0] if count == 2 else torch.zeros_like(slopes)
        old = dict(zip(scaled, rest[count - 1 :], strict=True))
        return [
            x
            for scale in scales_of_rows(rule, storage, slopes, weights, old, values).values()
            for x in scale
        ]

    values = torch.float32, (len(CONTROL) + len(rule.scalars),)
    rows = [(torch.float32, (1,))] * (count + len(scaled))
    return trace(magnitude, (torch.int32, (8,))), trace(scales, values, *rows)


# ── the launch ──────────────────────────────────────────────────────────────────────────────────────────────────────────

HostNumbers = tuple[Sequence[float], int]
"""The scalars of a rule in one step, and the seed."""


@lru_cache(None)
def functions(
    rule: AnyRule, storage: Storage, whole: bool, audited: bool, interpret: bool
) -> dict[str, Any]:
    """Return the Triton functions of :func:`source`. The first launch compiles them."""
    return load(source(rule, storage, whole=whole, audited=audited), interpret=interpret)


class Table:
    """Step tensors of one (rule, storage), not in float64, and device by one launch. The table is kept between steps."""

    def __init__(self, rule: AnyRule, storage: Storage, device: torch.device) -> None:
        self.rule, self.storage, self.device = rule, storage, device
        self._states: list[ParameterState] = []
        self._addresses: list[int] = []
        self._is_whole: Any = None
        self._new_tiles: Tensor | None = None
        self._numbers = np.zeros((0, 0), np.float32)

    def set(
        self,
        states: list[ParameterState],
        numbers: Sequence[HostNumbers],
        choices: Sequence[tuple[int, ...]],
    ) -> None:
        """Set the states of the next step, whose weights and gradients are contiguous.

        ``choices`` are the index in ``numbers``, the ``period`` and the ``phase`` of each state.
        """
        if states != self._states or len(numbers) != len(self._numbers):
            self._allocate(states, len(numbers))
        inputs = (
            x for s in states for x in (s.parameter, s.gradient, s.change)[: num_inputs(self.rule)]
        )
        addresses = [tensor.data_ptr() for tensor in inputs]
        if addresses != self._addresses:
            self._set_addresses(addresses)
        for row, (scalars, seed) in zip(self._numbers, numbers, strict=True):
            row[:-1] = list(map(float, scalars))
            row[-1:].view(np.int32)[0] = seed
        self._table[:, -3:] = choices

    def _allocate(self, states: list[ParameterState], num_numbers: int) -> None:
        """Lay out the table and the numbers of other states than before."""
        layout, rows, width = layout_of(self.storage), [], len(self.rule.scalars) + 1
        for state in states:
            group, columns = (1, *state.extent)[-2:]
            num_rows, elements = (1, *layout.matrix(state.parameter.shape))[-2:]
            memory = [state.words[p.name] for p in layout.planes] + [
                state.scales[n] for n in self.storage.scaled
            ]
            sizes = columns, group, elements, num_rows, 0, num_programs(state), 0, 0, 0
            rows.append([*[0] * num_inputs(self.rule), *(x.data_ptr() for x in memory), *sizes])
        size = len(rows) * len(rows[0])
        start = size + size % 2  # the numbers begin at 16 bytes
        self._host = np.zeros(start + -(-num_numbers * width // 2), np.int64)
        self._table = self._host[:size].reshape(len(rows), -1)
        self._table[:] = rows
        self._numbers = (
            self._host[start:].view(np.float32)[: num_numbers * width].reshape(num_numbers, width)
        )
        self._buffer = torch.empty(len(self._host), dtype=torch.int64, device=self.device)
        self._device_numbers = self._buffer[start:].view(torch.float32)
        self._states, self._addresses, self._is_whole = list(states), [], None

    def _set_addresses(self, addresses: list[int]) -> None:
        """Set the addresses of the inputs, and find the programs of each tensor."""
        layout, table, self._addresses = layout_of(self.storage), self._table, addresses
        table[:, : num_inputs(self.rule)] = np.array(addresses, np.int64).reshape(len(table), -1)
        columns, group, elements, rows, _, counts = table[:, -len(SIZES) : -3].T
        is_whole = (table[:, :2] % 16 == 0).all(1) & (columns % 4 == 0)
        is_whole &= (elements == layout.per_word * columns) & (rows == layout.num_parts * group)
        if np.array_equal(is_whole, self._is_whole):
            return
        self._is_whole, order = is_whole, np.argsort(~is_whole, kind="stable")
        table[order, -5] = np.cumsum(counts[order]) - counts[order]
        self._counts = int(counts[is_whole].sum()), int(counts[~is_whole].sum())
        self._new_tiles = torch.from_numpy(np.repeat(order, counts[order]).astype(np.int32))
        self._tiles = torch.empty_like(self._new_tiles, device=self.device)

    def send(self) -> None:
        """Copy the table and the numbers to the device, and the tiles if they are new."""
        if self._new_tiles is not None:
            send(self._new_tiles, self._tiles)
            self._new_tiles = None
        send(torch.from_numpy(self._host), self._buffer)

    def launch(self, control: Tensor, *, audited: bool, averages: bool = False) -> Tensor | None:
        """Step the states in place, with what was sent, or write the averages of a matrix rule into their changes.

        ``control`` holds the scalars of ``CONTROL``, float32 ``[2]`` on the device. Return the audit, float64 ``[states,
        KERNEL_SUMS]``, if ``audited``.
        """
        sums = (
            torch.empty(sum(self._counts), SUMS, dtype=torch.float32, device=self.device)
            if audited
            else None
        )
        arguments = self._buffer, self._tiles, self._device_numbers, control, sums
        with torch.cuda.device_of(control):
            for whole, first, count in ((True, 0, self._counts[0]), (False, *self._counts)):
                if count:
                    compiled = functions(self.rule, self.storage, whole, audited, control.is_cpu)
                    compiled["average" if averages else "step"][(count,)](
                        *arguments, first, **LAUNCH
                    )
            if sums is None:
                return None
            totals = torch.empty(len(self._states), SUMS, dtype=torch.float64, device=self.device)
            compiled = functions(self.rule, self.storage, True, True, control.is_cpu)
            compiled["add_up"][(len(totals),)](
                self._buffer, sums, totals, self._table.shape[1], **LAUNCH
            )
        return totals


def num_programs(state: ParameterState) -> int:
    """Return the number of programs that step a state."""
    return state.extent[0] if state.layout.by_rows else -(-state.extent[0] // BLOCK)


def audit_of(state: ParameterState, turn: int) -> tuple[int, int, int]:
    """Return ``period`` and ``phase`` of audit number ``turn``, and the number of elements that it reads."""
    period, width = state.layout.audit(state.parameter.shape, BLOCK)
    programs = range(turn % period, num_programs(state), period)
    missing = max(0, (programs[-1] + 1) * width - state.parameter.numel()) if programs else 0
    return period, turn % period, len(programs) * width - missing


# ── the proof ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(None)
def is_proven(rule: AnyRule, storage: Storage, device: torch.device, audited: bool) -> bool:
    """Return whether a launch gives the bits of the definition, which runs on the CPU. Warn once if not."""

    def compare() -> bool:
        scalars, seed = np.linspace(0.1, 0.9, len(rule.scalars), dtype=np.float32).tolist(), 12345
        expected, actual = (_cases(rule, storage, place) for place in (torch.device("cpu"), device))
        table, kernel = Table(rule, storage, device), Kernel(rule, storage)
        values = torch.tensor([1.0, 0.0, *scalars], dtype=torch.float32)
        table.set(actual, [(scalars, seed)], [(0, 1, 0)] * len(actual))
        table.send()
        control, numbers = (
            to_device(values[:2], device),
            Numbers(values, torch.tensor(seed, dtype=torch.int32), False),
        )
        if kernel.is_matrix:
            table.launch(control, audited=False, averages=True)
        table.launch(control, audited=audited)
        for state in expected:
            if kernel.is_matrix:
                step = MatrixStep(state, {}, numbers)
                step.average()
                step.write()
                continue
            if storage.scaled:
                bound_rows(kernel, [state], values)
            tensors, weight = state.kernel_tensors()
            kernel.run(tensors, values, numbers.seed)
            state.write_back(weight)
        ours, theirs = (
            [x for s in states for x in (s.parameter, s.change, *s.in_parameter_order().values())]
            for states in (actual, expected)
        )
        return all(same_numbers(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))

    is_possible = device.type == "cpu" or can_compile("gpu")
    return is_possible and proves(f"the step of all tensors of {rule.name}/{storage.name}", compare)


def _cases(rule: AnyRule, storage: Storage, device: torch.device) -> list[ParameterState]:
    """Draw a whole tensor and another one. Their last two rows have edge values."""
    kernel, dtype, states = Kernel(rule, storage), getattr(torch, storage.visible), []

    def drawn(dtype: torch.dtype, shape: Sequence[int], seed: int, *, nan: bool = False) -> Tensor:
        rows, edges = (
            draw(dtype, (n, shape[1]), edges=n == 2, seed=seed) for n in (shape[0] - 2, 2)
        )
        return torch.cat([rows, with_nan(edges) if nan else edges])

    for shape in ((3, 67), (4, 256)):
        weight, gradient = drawn(dtype, shape, 1), drawn(dtype, shape, 2, nan=True)
        states.append(state := ParameterState(weight.to(device), storage, kernel))
        allocate_all([state], joined=False)
        state.begin()
        values = {
            name: drawn(x.dtype, x.shape, 3) for name, x in state.in_parameter_order().items()
        }
        state.take({name: x.abs() if x.is_floating_point() else x for name, x in values.items()})
        state.gradient, state.change = (
            gradient.to(device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )
    return states


# ── the step of an optimizer ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Batch:
    """Hold the states of one kernel in a step. ``audited`` has a state's place, and how many elements and ulps are audited."""

    states: list[ParameterState] = field(default_factory=list)
    numbers: list[HostNumbers] = field(default_factory=list)
    choices: list[tuple[int, ...]] = field(default_factory=list)
    audited: list[tuple[int, int, float]] = field(default_factory=list)


class Launches:
    """Step the states of an optimizer by one launch for each (rule, storage). It keeps ``tables`` between steps."""

    def __init__(self, tables: dict[Kernel, Table]) -> None:
        self.tables, self._batches = tables, defaultdict[Kernel, _Batch](_Batch)

    def take(self, stepper: Any, states: Sequence[ParameterState]) -> list[ParameterState]:
        """Take states of the group of a :class:`narrowgauge.optim.step.Stepper`. Return those that it must step itself."""
        alike: dict[tuple[Kernel, int], list[ParameterState]] = defaultdict(list)
        for state in states:
            alike[state.kernel, state.step + 1].append(state)
        return [
            state for key, members in alike.items() for state in self._take(stepper, *key, members)
        ]

    def _take(
        self, stepper: Any, kernel: Kernel, count: int, states: list[ParameterState]
    ) -> list[ParameterState]:
        rule, storage, group, audit_every = (
            kernel.rule,
            kernel.storage,
            stepper.group,
            stepper.audit_every,
        )
        device = states[0].parameter.device
        is_captured = (
            kernel.is_matrix and states[0].change is None
        )  # a graph has no place for the products of matrices
        if not launches_on(device) or not kernel.compiles_for(device) or is_captured:
            return states
        is_audited = audit_every > 0 and count % audit_every == 0
        # Before an audit prove the step alone too: nothing can be compared later, while a graph captures it.
        if not all(
            is_proven(rule, storage, device, audited) for audited in sorted({False, is_audited})
        ):
            return states
        batch, refused = self._batches[kernel], []
        batch.numbers.append((rule.prepare(group, count), step_seed(group["seed"], count)))
        for state in states:
            is_contiguous = state.parameter.is_contiguous() and state.gradient.is_contiguous()
            # Ranks that split columns bound their rows together.
            if not is_contiguous or (state.scales and state.column_groups):
                refused.append(state)
                continue
            audit: Sequence[int] = NO_AUDIT
            if is_audited:
                *audit, elements = audit_of(state, count // audit_every)
                batch.audited.append(
                    (len(batch.states), elements, elements * stepper.audited_spacings(state))
                )
            batch.states.append(state)
            batch.choices.append((len(batch.numbers) - 1, *audit))
        return refused

    def run(
        self,
        control: Tensor,
        auditor: Auditor,
        *,
        sends: bool = True,
        launches: bool = True,
        averages: bool = False,
    ) -> None:
        """Step all states that were taken, and pass the audits on. ``control`` is the step's, ``[2]``.

        A captured step only ``launches``. Before each replay the host only ``sends``. Matrices are first averaged.
        """
        for kernel, batch in self._batches.items():
            if not batch.states:
                continue
            table = self.tables.get(kernel)
            if table is None or table.device != control.device:
                table = self.tables[kernel] = Table(kernel.rule, kernel.storage, control.device)
            is_audited = bool(batch.audited) and not averages
            table.set(batch.states, batch.numbers, batch.choices)
            if sends:
                table.send()
            sums = (
                table.launch(control, audited=is_audited, averages=averages) if launches else None
            )
            kernel.ran_compiled = True
            if sums is not None:
                host = to_device(
                    torch.tensor(batch.audited, dtype=torch.float64, device="cpu"), control.device
                )
                rows = torch.cat([sums[host[:, 0].long()], host[:, 1:]], 1)
                auditor.fresh.append(
                    ([batch.states[place].owner for place, *_ in batch.audited], rows)
                )
