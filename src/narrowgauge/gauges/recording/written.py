"""What a loop writes between a sampled step and the next: into weights, states and counts.

Such a write is a fault of a load, an evaluation or a format, or the rule of the loop. Two rules are
known, and notes: what a loop writes after each of its first two steps, as a projection; and weights
that go a part of the way back to the first ones, as those of Lookahead (1907.08610).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, joined
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.gauges.recording.step_fit import fit, rounded_to
from narrowgauge.gauges.recording.twin import Sample, Twin, on_host

Place = tuple[str, str]
"""What a reading is about: its kind and its tensor."""


class Writes:
    """Know what a loop wrote after its first steps."""

    def __init__(self) -> None:
        # After the first step, until the second.
        self._first: dict[torch.optim.Optimizer, dict[Place, Reading]] = {}
        self._projected: set[Place] = set()

    def readings(self, twin: Twin, step: int, starts: Mapping[Tensor, Tensor]) -> Iterator[Reading]:
        """Read what was written since a step, which the twin repeated.

        Args:
            starts: elements of the weights before the first step, by parameter.
        """
        held = self._first.pop(twin.optimizer, {})
        readings = []
        first = {}
        for written, is_plain in _written(twin, starts):
            place = written.what, written.tensor
            if written.severity == "note":
                self._projected.add(place)
            reading = replace(written, step=step)
            if is_plain and step == 1:
                first[place] = reading
                continue
            if is_plain and held.pop(place, None) is not None:
                self._projected.add(place)
            if place in self._projected:
                reading = replace(reading, severity="note")
            readings.append(reading)
        if first:
            self._first[twin.optimizer] = first
        yield from joined([*held.values(), *readings], len(twin.samples))


def _written(twin: Twin, starts: Mapping[Tensor, Tensor]) -> Iterator[tuple[Reading, bool]]:
    """Compare weights and states with those that the step left.

    Yield a reading of each tensor, and whether it is a weight with new values of no known kind, or a
    state of a rule of its own.
    """
    pairs = []
    flags = []
    for sample in twin.samples:
        now = twin.values_of(sample.parameter)
        for name in sample.compared():
            before = sample.after[name]
            value = now.get(name)
            if value is not None and value.shape != before.shape:
                continue  # of other shards
            pairs.append((sample, name, value))
            is_same = before.new_zeros((), dtype=torch.bool)
            if value is not None:
                is_same = ((value == before) | before.isnan()).all()
            flags.append(is_same)
        count, expected = now.get("step"), sample.after.get("step")
        if count is not None and expected is not None and count != expected:
            kind = KINDS["step-count"]
            more = ", and no step was taken"
            yield kind.reading(sample.name, float(count), float(expected), more=more), False
    for (sample, name, value), is_same in zip(pairs, on_host(flags), strict=True):
        if not is_same:
            is_own = twin.reference is None and name != "weight"
            for reading, is_plain in _reading(sample, name, value):
                start = starts.get(sample.parameter)
                is_weight = name == "weight" and is_plain and start is not None
                if is_weight and _is_between(value, sample.after[name], start):
                    reading = replace(reading, severity="note")
                yield reading, is_plain or is_own


def _is_between(value: Any, before: Tensor, start: Any) -> bool:
    """Return whether a weight went a part of the way from its value before to its first one."""
    old = evenly_spread(before).double()
    way = start.double() - old
    parts, rest = fit(evenly_spread(value).double() - old, {"way": way})
    slack = 4 * torch.finfo(before.dtype).eps * float(old.norm())
    return 0 < parts["way"] < 1 and rest <= slack


def _reading(sample: Sample, name: str, value: Any) -> Iterator[tuple[Reading, bool]]:
    """Read a weight or state that the loop wrote after the step."""
    before = sample.after[name]
    kind = KINDS["weights-written" if name == "weight" else "states-written"]
    if value is None:
        yield (
            kind.reading(sample.name, 1.0, 0.0, 0.0, state=name, share=1.0, more=": it is lost"),
            False,
        )
        return
    now = value.double().flatten()
    old = before.double().flatten()
    length = float(old.norm())
    distance = float((now - old).norm()) / length if length else math.inf
    # Averages that are swapped in and back out leave a rounding error.
    slack = 4 * torch.finfo(before.dtype).eps
    if before.dtype in (torch.float32, torch.float64) and distance <= slack:
        return
    factor = float(now @ old) / length**2 if length else 0.0
    unstepped: Any = sample.before.get(name, before)
    more = rounded_to(value, before)
    if not now.any():
        more = ": it is lost"
    elif torch.equal(value, unstepped):
        more = ": it has the values from before the step again"
    elif not more and float((now - factor * old).norm()) <= slack * length:
        more = f": it was multiplied by {factor:.6g}"
    share = float((value != before).double().mean())
    reading = kind.reading(sample.name, distance, 0.0, 0.0, state=name, share=share, more=more)
    yield reading, name == "weight" and not more
