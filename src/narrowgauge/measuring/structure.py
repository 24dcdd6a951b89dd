"""Compare the shadow of a step with the shadow of the plain loss in one process.

Both are without roundings, so they are equal or the step computes another gradient: a factor, other
weights of micro-batches and ranks, or another distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.passes import Gradients, Pass, Passes
from narrowgauge.measuring.reading import Reading, measured, of_all

SAME = 2.0**-20
"""Shadows are float64. What a loop counts by itself in float32, such as a denominator, leaves 16 of
its roundings.
"""


class Answer(NamedTuple):
    """How a gradient is related to the right one.

    Args:
        words: of the line that is printed.
        value: the factor, or the distance over the length.
        expected: 1 of a factor, 0 of a distance.
    """

    words: str
    value: float
    expected: float


def structure_readings(
    step: Gradients,
    exact: Gradients,
    bounds: Mapping[str, float],
    terms: Sequence[Gradients],
    lines: list[str],
) -> list[Reading]:
    """Return a reading for each answer: tensors that have one are one reading.

    Args:
        step: what the loop's own passes gave.
        exact: what the plain loss gives.
        bounds: of the distance over the length, by tensor.
        terms: the plain gradients of each micro-batch, if there are several.
    """
    differing: dict[str, float] = {}
    count = 0
    for name, own in step.items():
        size = float(exact[name].norm())
        if size and own.any() and is_finite(own):
            count += 1
            off = float((own - exact[name]).norm()) / size
            if off > bounds[name]:
                differing[name] = off
    equal = count - len(differing)
    if count:
        lines.append(f"  without roundings {equal} of {count} gradients equal the plain loss's")
    names: dict[str, list[str]] = {}
    answers: dict[str, Answer] = {}
    for name in sorted(differing, key=differing.__getitem__, reverse=True):
        answer = _answer(name, step[name], exact[name], differing[name], bounds[name], terms)
        if answer is not None:
            answers.setdefault(answer.words, answer)
            names.setdefault(answer.words, []).append(name)
    readings = []
    for words, (_, value, expected) in answers.items():
        members = names[words]
        lines.append(f"  {of_all(members)}: {words}")
        what = "gradient"
        if value >= 256 and math.log2(value) % 1 == 0:
            what = "own-scale"
        if len(members) == count > 1:
            members = []
        readings.append(measured(what, members, value, expected, bounds[names[words][0]]))
    return readings


def _answer(
    name: str, own: Tensor, right: Tensor, off: float, bound: float, terms: Sequence[Gradients]
) -> Answer | None:
    a, b = own.flatten(), right.flatten()
    factor = float(a @ b) / float(b @ b)
    if float((a - factor * b).norm()) <= bound * abs(factor) * float(b.norm()):
        return Answer(f"{factor:.6g} times the plain loss's", round(factor, 9), 1.0)
    usable = [term[name].flatten() for term in terms if name in term]
    if usable and len(usable) == len(terms) and a.numel() >= 2 * len(terms):
        columns = torch.stack(usable, 1)
        weights, of_whole = _weights(columns, a), _weights(columns, b)
        if not of_whole and float((columns.mean(1) - a).norm()) <= bound * float(a.norm()):
            return None  # a mean of losses of which the whole batch's is no sum
        if weights and of_whole and min(map(abs, of_whole)) > 1e-6:
            times = []
            for weight, whole in zip(weights, of_whole, strict=True):
                times.append(f"{weight / whole:.3g}")
            return Answer(f"micro-batches count {', '.join(times)} times", off, 0.0)
    return Answer("neither a multiple of the plain loss's nor of its micro-batches'", off, 0.0)


def _weights(columns: Tensor, target: Tensor) -> list[float]:
    """Return the weights of columns whose sum is a target; empty if none is."""
    solution = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    rest = float((target - columns @ solution).norm())
    is_sum = rest <= 1e-3 * float(target.norm())
    return [float(weight) for weight in solution] if is_sum else []


def missing_readings(passes: Passes, step: Pass, exact: Gradients) -> list[Reading]:
    """Return readings of gradients that the step lacks, and that the plain loss lacks too."""
    lacking = []
    for name, right in exact.items():
        own = step.gradients.get(name)
        if bool(right.any()) and (own is None or not bool(own.any())):
            lacking.append(name)
    gone = [n for n in passes.leaves if n not in step.gradients and n not in exact]
    readings = []
    gradients = step.gradients.values()
    if gradients and not any(bool(x.any()) for x in gradients) and not lacking:
        readings.append(measured("zero-gradients", "", 1, 0))
    if lacking:
        readings.append(measured("no-gradient", lacking[::-1], len(lacking), 0))
    if gone and len(gone) < len(passes.leaves):
        readings.append(measured("no-graph", gone[::-1], len(gone), 0))
    return readings
