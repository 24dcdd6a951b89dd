"""What every printed step has in common: the tensors that it reads, the traced definitions, and the
walk over them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import indent
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowgauge.optim import codes
from narrowgauge.optim.kernel import CONTROL, make_average, make_step
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.row_bounds import bounding, scales_of_rows
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.torch_support.printer import Graph, Language, Printed, print_graph, trace

SIZES = (
    "extent", "numel", "first", "count", "record", "wide", "aligned", "number", "period", "phase",
)  # fmt: skip
"""The table after the addresses.

The tensor has ``numel`` elements, each program ``extent`` of them: a row that has scales. Its
``count`` programs begin at ``first``. Where rows are bounded before the step, their records begin
at ``record``, else it is -1. A ``wide`` gradient is float32, another one has the weight's format.
An ``aligned`` tensor has programs of whole vectors, at addresses of whole vectors. ``number`` is
the row of its scalars. An audit sums every ``period``-th program, from ``phase`` on.
"""


@dataclass(frozen=True)
class Stream:
    """Describe a tensor that a step walks over: its name, the bytes of an element, and whether a
    step writes it.

    A gradient has the weight's bytes, or four.
    """

    name: str
    size: int
    is_written: bool


@lru_cache
def streams_of(rule: AnyRule, storage: Storage) -> tuple[Stream, ...]:
    """Return the streams of a step in the order of their addresses: weight, gradient, planes, and a
    matrix rule's change.
    """
    size = VISIBLE[storage.visible][0] // 8
    streams = [Stream("weight", size, True), Stream("gradient", size, False)]
    for plane in planes_of(storage):
        streams.append(Stream(plane.name, plane.bits // 8, True))
    if isinstance(rule, MatrixRule):
        streams.append(Stream("change", 4, False))
    return tuple(streams)


def num_addresses(rule: AnyRule, storage: Storage) -> int:
    """Return the number of addresses in a row of the table: of streams and bounds."""
    return len(streams_of(rule, storage)) + len(storage.scaled)


def num_values(rule: AnyRule) -> int:
    """Return the number of scalars of a step: of ``CONTROL`` and of the rule."""
    return len(CONTROL) + len(rule.scalars)


def scale_names(storage: Storage) -> list[str]:
    """Return the names of the multipliers of rows, in the order of the definition."""
    names = []
    for name in storage.scaled:
        names += [f"into_{name}", f"back_{name}"]
    return names


@lru_cache(32)
def step_graph(
    rule: Any,
    storage: Storage,
    language: Language,
    *,
    audited: bool = False,
    averages: bool = False,
    with_sources: bool = False,
) -> Graph:
    """Trace a step of its streams, multipliers, ``values`` and ``seed``, or the average of a matrix
    rule.
    """
    is_matrix = isinstance(rule, MatrixRule)
    words = (torch.int32, (8,))
    floats = (torch.float32, (8,))
    arguments: list[tuple[torch.dtype, Sequence[int]]] = [words, floats]
    arguments += [words] * len(planes_of(storage))
    if not averages:
        arguments += [(torch.float32, (1,))] * len(scale_names(storage))
        arguments += [floats] * is_matrix
    arguments += [(torch.float32, (num_values(rule),)), (torch.int32, ())]
    if averages:
        definition = make_average(rule, storage)
    else:
        definition = make_step(rule, storage, audited=audited)
    return trace(definition, language.device, *arguments, with_sources=with_sources)


@lru_cache(32)
def gradient_graph(storage: Storage, language: Language) -> Graph:
    """Trace the value of a word of the visible format, with infinities and NaN."""

    def value(word: Tensor) -> Tensor:
        return codes.gradient_value(storage.visible, codes.weight_bits(storage.visible, word))

    return trace(value, language.device, (torch.int32, (8,)))


@lru_cache(32)
def scales_graph(rule: Rule, storage: Storage, language: Language) -> Graph:
    """Trace for each scaled code a row's new bound and its multipliers below its end and back.

    The arguments are ``values``, the largest magnitudes of :func:`row_bounds.bounding`, and the old
    bounds.
    """
    count = len(bounding(rule))

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


class Program:
    """Write the step of a (rule, storage). The class of each language has its statements.

    Attributes:
        language: of operations.
        texts: of statements: ``bound`` is the place of a row's bound, by column. ``load`` and
            ``store`` are its value and a new one. ``found`` names a row's record, ``at`` is a
            place there. ``new`` and ``set`` give a number a name, and another value. ``if``,
            ``else``, ``end`` choose.
        peaks: the streams whose largest magnitudes bound a row.
    """

    language: Language
    texts: ClassVar[Mapping[str, str]]
    indentation: str

    def __init__(self, rule: AnyRule, storage: Storage, *, with_sources: bool = False) -> None:
        self.rule = rule
        self.storage = storage
        self.with_sources = with_sources
        self.streams = streams_of(rule, storage)
        self.peaks: tuple[str, ...] = ()
        if storage.scaled and isinstance(rule, Rule):
            self.peaks = bounding(rule)
        self.values = [f"v_{k}" for k in range(num_values(rule))]

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

    def read(self, *, averages: bool = False) -> list[Stream]:
        """Return the streams that a step reads, or an average."""
        return [s for s in self.streams if not (averages and s.name == "change")]

    def printed(self, *, audited: bool = False, averages: bool = False) -> Printed:
        """Print the step of an element, from ``w_NAME`` of each stream that is read."""
        inputs = [f"w_{stream.name}" for stream in self.read(averages=averages)]
        if not averages:
            names = scale_names(self.storage)
            place = len(planes_of(self.storage)) + 2
            inputs = [*inputs[:place], *names, *inputs[place:]]
        graph = step_graph(
            self.rule, self.storage, self.language,
            audited=audited, averages=averages, with_sources=self.with_sources,
        )  # fmt: skip
        return print_graph(graph, [*inputs, "v", "seed"], "x", self.language)

    def written(self, *, averages: bool = False) -> list[Stream]:
        """Return the streams of the first results of a step, or of an average."""
        if averages:
            return [self.streams[-1]]
        return [stream for stream in self.streams if stream.is_written]

    def value_of_word(self) -> Printed:
        """Print the value ``m…`` of a word ``w`` of the visible format."""
        return print_graph(gradient_graph(self.storage, self.language), ["w"], "m", self.language)

    def peak_lines(self) -> list[str]:
        """Return lines that find the largest magnitudes of a program's row: ``peak_NAME``."""
        raise NotImplementedError

    def declared_peaks(self) -> list[str]:
        """Return lines that a language needs before both ways to set the peaks."""
        return []

    def record_size(self) -> int:
        """Return the floats of a row that is bounded before the step: its largest magnitudes and
        old bounds.
        """
        return len(self.peaks) + len(self.storage.scaled)

    def old_bounds(self) -> list[str]:
        """Return the places of a row's bounds, for each scaled code."""
        column = len(self.streams)
        return [self.text("bound", column + k) for k in range(len(self.storage.scaled))]

    def _from_record(self, place: int) -> str:
        return self.text("load", self.text("at", place))

    def find_peaks(self) -> list[str]:
        """Return lines that write a row's record: its largest magnitudes and its bounds so far."""
        lines = [self.text("found", self.record_size()), *self.declared_peaks(), *self.peak_lines()]
        values = [f"peak_{name}" for name in self.peaks]
        values += [self.text("load", place) for place in self.old_bounds()]
        for k, value in enumerate(values):
            lines.append(self.text("store", self.text("at", k), value))
        return lines

    def bounds(self) -> list[str]:
        """Return lines that bound the row of a program, and define the multipliers of each code."""
        if not self.peaks:
            return []
        assert isinstance(self.rule, Rule)
        places = self.old_bounds()
        lines = self.declared_peaks()
        stored_peaks = [self.text("found", self.record_size())]
        for k, name in enumerate(self.peaks):
            stored_peaks.append(self.text("set", f"peak_{name}", self._from_record(k)))
        for k, place in enumerate(places):
            lines.append(self.text("new", f"old{k}", self.text("load", place)))
            stored_peaks.append(self.text("set", f"old{k}", self._from_record(len(self.peaks) + k)))
        lines += self.choice("record < 0", self.peak_lines(), stored_peaks)
        peaks = [f"peak_{name}" for name in self.peaks]
        olds = [f"old{k}" for k in range(len(places))]
        graph = scales_graph(self.rule, self.storage, self.language)
        printed = print_graph(graph, ["v", *peaks, *olds], "b", self.language)
        lines += printed.lines
        for k, name in enumerate(self.storage.scaled):
            new, into, back = printed.results[3 * k : 3 * k + 3]
            lines.append(self.assign(f"into_{name}", into))
            lines.append(self.assign(f"back_{name}", back))
            lines.append(self.text("store", places[k], new))
        return lines


def record_size(rule: AnyRule, storage: Storage) -> int:
    """Return the floats of the record of a row that is bounded before the step."""
    return Program(rule, storage).record_size()
