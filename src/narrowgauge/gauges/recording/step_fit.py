"""The step of an optimizer beside that of its class in ``torch.optim``, by a least-squares fit.

The class's step is repeated with one input left out: the decay, a state. Their differences are the
columns of the fit: how much of the step and the decay was done, and what a state kept of itself and
took of the gradient. The same step in the stored formats gives the bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.gauges.recording.twin import NARROW, UNEXPLAINED, Sample, Twin, Values, on_host
from narrowgauge.spec.formats import dtype_name

MARGIN = 4.0
"""Multiples of what the stored formats move the step by."""
LEAST = 2e-4
"""Of a step's length. Compiled steps round bias corrections to float32."""
COARSE = 0.125
FEW = 0.01
"""Largest error of e5m2, of an element; fraction of elements that may be farther, as below its range."""
ALIKE = 1e-6
"""Distance of a cosine from 1 at which two columns count as one."""


class Change(NamedTuple):
    """What a step did to one tensor, what its class does, and the value from which both count."""

    done: Tensor
    expected: Tensor
    start: Tensor

    @classmethod
    def of(cls, sample: Sample, name: str, exact: Values) -> Change:
        target = exact[name].flatten()
        start = torch.zeros_like(target)
        if name == "weight":
            start = sample.before[name].double().flatten()
        return cls(sample.after[name].double().flatten() - start, target - start, start)


def step_readings(twin: Twin) -> Iterator[Reading]:
    """Compare the step with that of its class in ``torch.optim``."""
    if twin.reference is None or twin.is_skipped:
        return
    samples = [_stepped_in_master(s) for s in twin.samples if s.gradient is not None]
    if not samples:
        return
    for sample in samples:
        yield from _count_readings(sample)
    exact = twin.as_class(samples, torch.float64)
    stored = twin.as_class(samples, torch.float32)
    plainly = twin.as_class(samples, None)
    places = []
    rows = []
    for index, sample in enumerate(samples):
        for name in sample.compared():
            if name in exact[index]:
                places.append((index, name))
                change = Change.of(sample, name, exact[index])
                narrow = stored[index][name].double() - exact[index][name]
                plain_step = plainly[index][name].double() - exact[index][name]
                sizes = (
                    change.done - change.expected, change.expected, change.done, narrow, exact[index][name],
                    plain_step,
                )  # fmt: skip
                rows.append(torch.stack([x.norm() for x in sizes]))
    twin.num_compared = len(samples)
    wrong: set[int] = set()
    for (index, name), sizes in zip(places, on_host(rows), strict=True):
        slack = _slack(samples[index], name, sizes)
        if index not in wrong and all(map(math.isfinite, sizes)) and sizes[0] > slack:
            wrong.add(index)  # with a wrong state the step is wrong, too
            yield from _fitted(twin, samples[index], name, exact[index], slack)


def _fitted(
    twin: Twin, sample: Sample, name: str, exact: Values, slack: float
) -> Iterator[Reading]:
    """Fit the columns of a change, and read those that are not done once."""
    change = Change.of(sample, name, exact)
    size = float(change.expected.norm()) or float(change.done.norm())
    error = change.done - change.expected
    distance = float(error.norm()) / size
    if name != "weight" and twin.has_own_step and _is_coarse(change):
        kind = KINDS["state"].case("coarse")
        yield kind.reading(sample.name, distance, 0.0, slack / size, state=name)
        return
    columns = _columns(twin, sample, name, change, exact)
    factors, rest = fit(change.done, columns)
    wrong = {}
    for key, factor in factors.items():
        bound = slack / float(columns[key].norm())
        # A wrong rate multiplies the decay too. Do not report it twice.
        scaled = factors.get("step", 1.0) if key == "decay" else 1.0
        if min(abs(factor - 1), abs(factor - scaled)) > bound:
            wrong[key] = bound
    if name != "weight" and wrong:  # the farther one of the two
        far = max(wrong, key=lambda key: abs(factors[key] - 1))
        wrong = {far: wrong[far]}
    more = rounded_to(sample.after[name], exact[name])
    if wrong and rest <= max(2 * slack, UNEXPLAINED * size):
        for key, bound in wrong.items():
            yield _factor_reading(sample, name, key, factors[key], bound, more)
        return
    far_off = error.abs() > slack / math.sqrt(len(error))
    share = float(far_off.double().mean())
    words: dict[str, Any] = {"state": name, "share": share, "more": more}
    words["words"] = f"differs from its class's by {distance:.2g} of its length"
    kind = KINDS["weight" if name == "weight" else "state"]
    yield kind.reading(sample.name, distance, 0.0, slack / size, **words)


def _is_coarse(change: Change) -> bool:
    """Return whether each element of a state is near that of the class, as in a format of few bits."""
    is_near = (change.done - change.expected).abs() <= COARSE * change.expected.abs()
    return float(is_near.double().mean()) >= 1 - FEW


def _columns(
    twin: Twin, sample: Sample, name: str, change: Change, exact: Values
) -> dict[str, Tensor]:
    """Return the parts of a change: step and decay of a weight, or what a state takes and keeps."""
    expected = change.expected
    if name == "weight":
        (bare,) = twin.as_class([sample], torch.float64, weight_decay=0.0)
        step = bare[name] - change.start
        columns = {"step": step, "decay": expected - step}
    else:
        (fresh,) = twin.as_class([sample], torch.float64, without=name)
        columns = {"taken": fresh[name], "kept": expected - fresh[name]}
    size = float(expected.norm()) or float(change.done.norm())
    columns = {key: x for key, x in columns.items() if float(x.norm()) > 1e-9 * size}
    if len(columns) == 2:
        first, second = columns.values()
        cosine = float(first @ second) / float(first.norm() * second.norm())
        if abs(cosine) > 1 - ALIKE:  # of equal elements: no fit tells them apart
            return {next(iter(columns)): expected}
    return columns


def fit(values: Tensor, columns: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """Return the factor of each column by least squares, and the length that they leave."""
    if not columns:
        return {}, float(values.norm())
    matrix = torch.stack([x.flatten() for x in columns.values()], 1).cpu()
    values = values.cpu()
    solution = torch.linalg.lstsq(matrix, values[:, None], driver="gelsd").solution[:, 0]
    rest = float((values - matrix @ solution).norm())
    return dict(zip(columns, solution.tolist(), strict=True)), rest


def _stepped_in_master(sample: Sample) -> Sample:
    """Return a sample whose weight is the master that the step moved."""
    before, after = sample.before, sample.after
    if not isinstance(before.get("master"), Tensor):
        return sample
    before = {**before, "weight": before["master"]}
    after = {**after, "weight": after["master"]}
    for values in (before, after):
        del values["master"]
    return Sample(sample.name, sample.parameter, sample.group, sample.gradient, before, True, after)


def _slack(sample: Sample, name: str, sizes: list[float]) -> float:
    """Return the largest distance that the stored formats explain."""
    _, expected, done, narrow, target, plain_step = sizes
    eps = torch.finfo(sample.after[name].dtype).eps
    slack = MARGIN * (narrow + eps * target) + LEAST * (expected or done)
    if eps > torch.finfo(torch.float32).eps and plain_step:
        # The stored format itself: its grid for a weight, its underflow for a state.
        bound = min if name == "weight" else max
        slack = bound(slack, 2 * plain_step)
    return slack


def _count_readings(sample: Sample) -> Iterator[Reading]:
    """Compare the count of steps with one step, and with moments that hold older gradients."""
    if "step" not in sample.after:
        return
    if torch.equal(sample.after["weight"], sample.before["weight"]):
        return
    kind = KINDS["step-count"]
    before = int(sample.before.get("step", 0))
    count = int(sample.after["step"])
    if count != before + 1:
        yield kind.reading(sample.name, count, before + 1, more=" and one more step")
    elif count == 1:
        more = " at least: its moments hold older gradients, and are corrected as if they had just begun"
        states = [sample.before[name] for name in sample.compared()[:-1] if name in sample.before]
        if any(bool(x.any()) for x in states):
            yield kind.reading(sample.name, 1, 2, more=more)


def _factor_reading(
    sample: Sample, name: str, key: str, factor: float, bound: float, more: str
) -> Reading:
    settings = sample.group[1]
    if key == "step":
        return KINDS["step-factor"].reading(
            sample.name, factor, 1.0, bound, rate=float(settings["lr"]), more=more
        )
    if key == "decay":
        decay = float(settings.get("weight_decay") or 0.0)
        return KINDS["weight-decay"].reading(sample.name, factor * decay, decay, bound * decay)
    word = "itself" if key == "kept" else "the gradient's term"
    factor = 0.0 if abs(factor) < ALIKE else factor
    words = (
        f"{key[:4] if key == 'kept' else 'took'} {factor:.6g} times as much of {word} as its class"
    )
    return KINDS["state"].reading(
        sample.name, factor, 1.0, bound, state=name, words=words, more=more
    )


def rounded_to(values: Tensor, expected: Tensor) -> str:
    """Name the smaller format that holds all values, if rounding the expected ones gives them;
    empty otherwise.
    """
    if values.dtype not in (torch.float32, torch.float64) or values.numel() < 8 or not values.any():
        return ""
    for dtype in NARROW:
        rounded = expected.flatten().float().to(dtype).to(values.dtype)
        is_near = float((rounded == values.flatten()).double().mean()) >= 0.95  # few lie near a tie
        if is_near and torch.equal(values.to(dtype).to(values.dtype), values):
            return f"; it was rounded to {dtype_name(dtype)}"
    return ""
