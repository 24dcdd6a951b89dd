"""What every printed step has in common: the tensors that it reads, the traced definitions, and the
walk over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from textwrap import indent
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import MAGNITUDE, bits_of
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import CONTROL, make_average, make_step
from narrowgauge.optim.layout import lanes_of_weight, layout_of
from narrowgauge.optim.row_bounds import bounding, scales_of_rows
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.printer import Graph, Language, Printed, print_graph, trace

INPUTS = ("weight", "gradient", "change")
"""Tensors whose addresses change from step to step. A matrix rule alone has a change."""


@dataclass(frozen=True)
class Stream:
    """Describe words that a step walks over: of one part of an input, or one tensor of a plane.

    Attributes:
        name: of the input or plane, and the number of the part or tensor.
        column: the place of its address in a row of the table.
        part: of an input. Each tensor of a plane has an address of its own.
        is_plane: planes have whole words in every row. Inputs have the parameter's own rows.
        floats: of a word: 0, or for a matrix rule's change the weights of a word.
    """

    name: str
    column: int
    part: int
    is_plane: bool
    floats: int = 0


def input_names(rule: AnyRule) -> tuple[str, ...]:
    """Return the inputs of a rule's step, in the order of their addresses."""
    return INPUTS if isinstance(rule, MatrixRule) else INPUTS[:2]


def num_addresses(rule: AnyRule, storage: Storage) -> int:
    """Return the number of addresses in a row of the table: of inputs, planes and bounds."""
    layout = layout_of(storage)
    num_tensors = sum(layout.num_tensors(plane) for plane in layout.planes)
    return len(input_names(rule)) + num_tensors + len(storage.scaled)


def bounds_column(rule: AnyRule, storage: Storage) -> int:
    """Return the place of the first address of bounds in a row of the table."""
    return num_addresses(rule, storage) - len(storage.scaled)


def streams_of(rule: AnyRule, storage: Storage) -> list[Stream]:
    """Return the streams of a step: weight, gradient and planes, in the order of the definition,
    then changes.
    """
    layout = layout_of(storage)
    names = input_names(rule)
    streams = []
    for column, name in enumerate(("weight", "gradient")):
        for part in range(layout.num_parts):
            streams.append(Stream(f"{name}{part}", column, part, is_plane=False))
    column = len(names)
    for plane in layout.planes:
        for number in range(layout.num_tensors(plane)):
            streams.append(Stream(f"{plane.name}{number}", column, 0, is_plane=True))
            column += 1
    if "change" in names:
        for part in range(layout.num_parts):
            floats = layout.per_word
            streams.append(Stream(f"change{part}", 2, part, is_plane=False, floats=floats))
    return streams


def scale_names(storage: Storage) -> list[str]:
    """Return the names of the multipliers of rows, in the order of the definition."""
    names = []
    for name in storage.scaled:
        for part in range(layout_of(storage).num_parts):
            names += [f"into_{name}{part}", f"back_{name}{part}"]
    return names


def lane_names(rule: AnyRule, storage: Storage) -> list[str]:
    """Return the names of the lanes of a matrix rule's change: ``d0``, ``d1`` …"""
    if not isinstance(rule, MatrixRule):
        return []
    return [f"d{lane}" for lane in range(layout_of(storage).num_lanes)]


@lru_cache(16)
def step_graph(
    rule: Any,
    storage: Storage,
    language: Language,
    *,
    audited: bool = False,
    averages: bool = False,
    with_sources: bool = False,
) -> Graph:
    """Trace a step of ``word`` streams, multipliers, changes, ``values`` and ``seed``, or the
    average of a matrix rule.
    """
    shape = (4, 8) if layout_of(storage).by_rows else (8,)
    num_words = sum(not stream.floats for stream in streams_of(rule, storage))
    arguments: list[tuple[torch.dtype, Sequence[int]]] = [(torch.int32, shape)] * num_words
    arguments += [(torch.float32, (4, 1))] * len(scale_names(storage))
    arguments += [(torch.float32, shape)] * len(lane_names(rule, storage))
    arguments += [(torch.float32, (num_values(rule),)), (torch.int32, ())]
    if averages:
        definition = make_average(rule, storage)
    else:
        definition = make_step(rule, storage, all_terms if audited else None)
    return trace(definition, language.device, *arguments, with_sources=with_sources)


def all_terms(terms: Sequence[Tensor]) -> Any:
    """Return the terms of an audit as they are: a printed step adds them itself."""
    return list(terms)


def num_values(rule: AnyRule) -> int:
    """Return the number of scalars of a step: of ``CONTROL`` and of the rule."""
    return len(CONTROL) + len(rule.scalars)


@lru_cache(16)
def magnitude_graph(storage: Storage, language: Language) -> Graph:
    """Trace the largest magnitude of a word's values as bits, in which a NaN is the largest."""

    def magnitude(word: Tensor) -> Tensor:
        lanes = lanes_of_weight(storage.visible, [word])
        values = [codes.gradient_value(storage.visible, lane) for lane in lanes]
        bits = [bits_of(value) & MAGNITUDE for value in values]
        return reduce(torch.maximum, bits)

    return trace(magnitude, language.device, (torch.int32, (8,)))


@lru_cache(16)
def scales_graph(rule: Rule, storage: Storage, language: Language) -> Graph:
    """Trace for each scaled code a row's new bound and its multipliers into the window and back.

    The arguments are ``values``, the largest magnitudes of :func:`row_bounds.bounding`, and the old
    bounds.
    """
    count = len(bounding(rule, storage))

    def scales(values: Tensor, slopes: Tensor, *rest: Tensor) -> list[Tensor]:
        weights = rest[0] if count == 2 else torch.zeros_like(slopes)
        old = dict(zip(storage.scaled, rest[count - 1 :], strict=True))
        new = scales_of_rows(rule, storage, slopes, weights, old, values)
        tensors: list[Tensor] = []
        for name in storage.scaled:
            tensors += new[name]
        return tensors

    rows = [(torch.float32, (1,))] * (count + len(storage.scaled))
    return trace(scales, language.device, (torch.float32, (num_values(rule),)), *rows)


# ── the walk ──────────────────────────────────────────────────────────────────────────────────────


class StepText:
    """Write the step of a (rule, storage). The class of each language has its statements.

    Attributes:
        language: of operations.
        texts: of statements: ``bound`` is the place of a row's bound, by column and part. ``load``
            and ``store`` are its value and a new one. ``found`` names a row's record, ``read`` is a
            number there. ``new`` and ``set`` give a number a name, and another value. ``sum`` adds
            a term of the audit. ``if``, ``else``, ``end`` choose.
        loads, stores: of each word of the streams, and of each lane of a change.
        peaks: the tensors and parts whose largest magnitudes bound a row.
    """

    language: Language
    texts: ClassVar[Mapping[str, str]]
    indentation: str

    def __init__(self, rule: AnyRule, storage: Storage, *, with_sources: bool = False) -> None:
        self.rule = rule
        self.storage = storage
        self.layout = layout_of(storage)
        self.with_sources = with_sources
        self.streams = streams_of(rule, storage)
        num_words = sum(not stream.floats for stream in self.streams)  # changes come last
        self.words = [f"w{k}" for k in range(num_words)]
        self.loads: dict[str, str] = {}
        self.stores: dict[str, str] = {}
        self.peaks: list[tuple[str, int]] = []
        if storage.scaled and isinstance(rule, Rule):
            for name in bounding(rule, storage):
                self.peaks += [(name, part) for part in range(self.layout.num_parts)]

    def text(self, name: str, *arguments: object) -> str:
        return self.texts[name].format(*arguments)

    def assign(self, name: str, value: str) -> str:
        return self.language.assignment.format(name=name, value=value)

    def choice(self, condition: str, yes: Sequence[str], no: Sequence[str]) -> list[str]:
        """Return lines that run one of two."""
        first = indent("\n".join(yes), self.indentation)
        second = indent("\n".join(no), self.indentation)
        lines = [self.text("if", condition), first, self.texts["else"], second, self.texts["end"]]
        return "\n".join(lines).rstrip().split("\n")

    def printed(self, *, audited: bool = False, averages: bool = False) -> Printed:
        """Print the step of a word, its audit, or the average of a matrix rule."""
        lanes = lane_names(self.rule, self.storage)
        inputs = [*self.words, *scale_names(self.storage), *lanes, "v", "seed"]
        graph = step_graph(
            self.rule, self.storage, self.language,
            audited=audited, averages=averages, with_sources=self.with_sources,
        )  # fmt: skip
        return print_graph(graph, inputs, "x", self.language)

    def body(self, printed: Printed) -> list[str]:
        """Return lines that load words, step them, add up the audit's terms and store."""
        lines = []
        for name, value in self.loads.items():
            lines.append(self.assign(name, value))
        lines += printed.lines
        for k, term in enumerate(printed.results):
            lines.append(self.text("sum", k, term))
        for name, value in printed.writes:
            lines.append(self.stores[name].format(value))
        return lines

    def place_of_peak(self, name: str, part: int) -> int:
        """Return the stream of a weight's or gradient's part."""
        if name == "weight":
            return part
        return self.layout.num_parts + part

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a program's rows: ``peak_NAME_PART``."""
        raise NotImplementedError

    def declared_peaks(self) -> list[str]:
        """Return lines that a language needs before both ways to set the peaks."""
        return []

    def record_size(self) -> int:
        """Return the floats of a row that is bounded before the step: its largest magnitudes and
        old bounds.
        """
        return len(self.peaks) + len(self.storage.scaled) * self.layout.num_parts

    def old_bounds(self) -> list[str]:
        """Return the places of a row's bounds, for each part and scaled code."""
        column = bounds_column(self.rule, self.storage)
        places = []
        for part in range(self.layout.num_parts):
            for k in range(len(self.storage.scaled)):
                places.append(self.text("bound", column + k, part))
        return places

    def bounds(self) -> list[str]:
        """Return lines that bound the rows of a program, and define the multipliers of each code
        and part.
        """
        if not self.peaks:
            return []
        assert isinstance(self.rule, Rule)
        places = self.old_bounds()
        scaled = self.storage.scaled
        lines = self.declared_peaks()
        stored_peaks = [self.text("found", self.record_size())]
        for k, (name, part) in enumerate(self.peaks):
            stored_peaks.append(self.text("set", f"peak_{name}{part}", self.text("read", k)))
        for k, place in enumerate(places):
            lines.append(self.text("new", f"old{k}", self.text("load", place)))
            stored_peaks.append(self.text("set", f"old{k}", self.text("read", len(self.peaks) + k)))
        lines += self.choice("record < 0", self.peak_lines(), stored_peaks)
        graph = scales_graph(self.rule, self.storage, self.language)
        for part in range(self.layout.num_parts):
            peaks = [f"peak_{name}{part}" for name in bounding(self.rule, self.storage)]
            first = part * len(scaled)
            olds = [f"old{first + k}" for k in range(len(scaled))]
            printed = print_graph(graph, ["v", *peaks, *olds], f"b{part}_", self.language)
            lines += printed.lines
            for k, name in enumerate(scaled):
                new, into, back = printed.results[3 * k : 3 * k + 3]
                lines.append(self.assign(f"into_{name}{part}", into))
                lines.append(self.assign(f"back_{name}{part}", back))
                lines.append(self.text("store", places[first + k], new))
        return lines


def record_size(rule: AnyRule, storage: Storage) -> int:
    """Return the floats of the record of a row that is bounded before the step."""
    return StepText(rule, storage).record_size()
