"""What rounding does to a step's gradient, and the places that do most of it.

The gradient minus its shadow is what rounding does. Each place is rounded alone in a shadow, and gives
its part. Halving the places finds the largest part in log2(n) passes: one half is measured, and the
other follows in squares, since errors of different places are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowgauge.measuring.beside import SUM, Site, is_finite, tensors_in
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.passes import Gradients, Pass, Passes, inner_name
from narrowgauge.measuring.policies.finite import Finite
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.measuring.units import FINEST, UNITS
from narrowgauge.spec.formats import dtype_name

OF_FLOAT32 = 2.0**-14
"""Of a gradient whose products are float32: half of its digits."""
RANKED = 4.0
"""Roundings from which on places are ranked. Healthy models have 1.0 to 9.2."""
FLIPPED = 4.0
"""Factor of the bound where a rounding flips a choice, such as a unit of a ReLU: a flip is a whole
element.
"""
OF_SUMS = 1.5
"""Roundings of the gradient from which on the sum of micro-batches is measured alone: 64 of them in
bfloat16 give 2.0.
"""
MOST = 0.7
LEFT = 1 / 3
"""A place is the one if it gives this share of the error, and leaves at most that share without it."""
SATURATED = 1 / 8
"""Share of a cast's values beyond the end of its format: delayed and rounded scales leave a few."""
OUTSIDE = 2.0
"""Roundings of its input that a cast may err: one where nothing ends, and as much again."""
FEWEST = 0.03
"""Least length of a tensor that counts, as a share of the mean length per element: the gradient of a
bias before a norm is zero but for rounding.
"""


def distance(first: Gradients, second: Gradients, names: Sequence[str]) -> float:
    """Return the length of the difference of two sets of gradients."""
    squares = 0.0
    for name in names:
        squares += float((first[name].double() - second[name]).square().sum())
    return math.sqrt(squares)


class Place(NamedTuple):
    """A site, the share of the error that it gives alone, and the share that is left without it and
    those before it.
    """

    site: Site
    share: float
    left: float

    @property
    def is_most(self) -> bool:
        """Return whether the place is the one that gives the error."""
        return self.share >= MOST and self.left <= LEFT


class Roundings:
    """Measure what rounding does to a gradient, and rank the places that do it.

    Args:
        first: a pass of the step.
        repeat: runs the step again with sites whose shadows are rounded.

    Attributes:
        names: tensors whose gradients are finite and followed.
        unit: unit roundoff of the coarsest product of the step.
        relative: distance of all gradients from their shadows, over their length.
        worst: the tensor with the largest distance over its length, and ``largest``, that distance.
    """

    def __init__(self, first: Pass, repeat: Callable[[Collection[Site]], Pass]) -> None:
        self.first = first
        self.repeat = repeat
        self.names = []
        for name, shadow in first.shadows.items():
            if is_finite(first.gradients[name]) and is_finite(shadow):
                self.names.append(name)
        self.unit = first.wide.working
        self.error = distance(first.gradients, first.shadows, self.names)
        self.length = math.hypot(*(float(first.shadows[name].norm()) for name in self.names))
        self.relative = self.error / self.length if self.length else 0.0
        self.worst, self.largest = self._worst_tensor()

    def _worst_tensor(self) -> tuple[str, float]:
        """Return the tensor that is farthest from its shadow, over its length."""
        count = 1
        for name in self.names:
            count += self.first.shadows[name].numel()
        mean = self.length / math.sqrt(count)
        worst = ""
        largest = 0.0
        for name in self.names:
            shadow = self.first.shadows[name]
            own = float(shadow.norm())
            if own <= FEWEST * mean * math.sqrt(shadow.numel()):
                continue
            relative = distance(self.first.gradients, self.first.shadows, [name]) / own
            if relative > largest or not worst:
                worst, largest = name, relative
        return worst, largest

    @property
    def roundings(self) -> float:
        return self.relative / self.unit

    @property
    def format(self) -> str:
        for dtype, unit in (*UNITS.items(), (torch.float32, FINEST)):
            if unit == self.unit:
                return dtype_name(dtype)
        return f"a format of unit roundoff {self.unit:.2g}"

    def line(self) -> str:
        if not self.first.gradients:
            return "gradients: none was seen"
        if not self.names:
            return "gradients: none is followed"
        return (
            f"gradients of {len(self.names)} tensors: {self.relative:.2g} of their length from "
            f"float64's, {self.roundings:.3g} roundings of {self.format}; most in {self.worst}, "
            f"{self.largest:.2g}"
        )

    # ── places ────────────────────────────────────────────────────────────────────────────────────

    def places(self, number: int) -> list[Place]:
        """Return at most ``number`` places, the largest first."""
        rest = self.sites
        left = self.error
        ranked: list[Place] = []
        while rest and len(ranked) < number and left > self.unit * self.length:
            site = self._largest(rest, left)
            alone = self._alone([site])
            rest.remove(site)
            left = self._alone(rest) if rest else 0.0
            ranked.append(Place(site, alone / self.error, left / self.error))
        return ranked

    @property
    def sites(self) -> list[Site]:
        """Return the sites that round."""
        return list(dict.fromkeys(site for site, _ in self.first.wide.rounds))

    def _largest(self, places: list[Site], error: float) -> Site:
        while len(places) > 1:
            half = places[: len(places) // 2]
            part = self._alone(half)
            other = math.sqrt(max(0.0, error**2 - part**2))
            if part < other:
                places = places[len(half) :]
                error = other
            else:
                places = half
                error = part
        return places[0]

    def _alone(self, places: Collection[Site]) -> float:
        shadows = self.repeat(places).shadows
        names = [name for name in self.names if name in shadows]
        reached = distance(shadows, self.first.shadows, names)
        return math.inf if math.isnan(reached) else reached

    def sum_of_micro_batches(self) -> list[Place]:
        """Return the narrow sum over micro-batches with its share, where it gives most of the error.

        Its error grows with their number, and shows before the whole is large.
        """
        sums = [site for site in self.sites if site.line == SUM]
        if not sums or self.roundings < OF_SUMS:
            return []
        share = self._alone(sums) / self.error
        return [Place(sums[0], share, 1 - share)]


def place_line(place: Place, wide: Wide) -> str:
    """Return the line of a place: its share of the error, and what is left without it."""
    names = [name for site, name in wide.rounds if site == place.site]
    line = f"  {place.share:.2f} of it from {', '.join(names)} in {place.site}"
    line += f"; {place.left:.2f} is left without it"
    casts = [cast for (site, _), cast in wide.casts.items() if site == place.site]
    for cast in casts[:1]:
        line += f"; {cast.at_end:.1%} of its values are beyond the format's end, {cast.zeros:.1%} became 0"
    return line


def rounding_alone(roundings: Roundings) -> list[str]:
    """Return the matrices whose gradient is rounding alone: their shadows are nearly zero."""
    first = roundings.first
    names = []
    for name in roundings.names:
        shadow = first.shadows[name]
        off = distance(first.gradients, first.shadows, [name])
        if shadow.ndim > 1 and off > MOST * float(first.gradients[name].double().norm()) > 0:
            names.append(name)
    return names


def rounding_readings(roundings: Roundings, lines: list[str], number: int = 1) -> list[Reading]:
    """Return a reading where rounding is unusual, with a line for each place that does most of it."""
    lines.append(roundings.line())
    wide = roundings.first.wide
    readings = []
    is_float32 = roundings.unit == FINEST
    bound = OF_FLOAT32 / FINEST if is_float32 else KINDS["rounding"].bound
    slack = FLIPPED if wide.flips else 1.0
    is_many = roundings.roundings > (bound if is_float32 else slack * bound)
    places: list[Place] = []
    if is_many or (not is_float32 and roundings.roundings > RANKED):
        places = roundings.places(number)
    elif number:
        places = roundings.sum_of_micro_batches()
    lines += [place_line(place, wide) for place in places]
    if is_many or (slack == 1.0 and places and places[0].is_most):
        bound = bound if is_many else OF_SUMS
        measures = roundings.worst, roundings.roundings, 0.0, bound
        readings.append(measured("rounding", *measures))
    alone = rounding_alone(roundings)
    if alone and not readings:
        readings.append(measured("rounding-alone", alone, len(alone), 0))
    return readings + cast_readings(wide, lines)


def cast_readings(wide: Wide, lines: list[str]) -> list[Reading]:
    """Return readings of casts whose values lie outside the range of their format."""
    readings = []
    saturated: dict[str, float] = {}
    coarse: dict[str, float] = {}
    for (site, name), cast in wide.casts.items():
        place = f"{name} in {site}"
        if cast.at_end > SATURATED:
            saturated[place] = cast.at_end
        elif cast.roundings > OUTSIDE:
            coarse[place] = cast.roundings
            lines.append(f"  {place}: {cast.zeros:.1%} of its values became 0")
    for what, casts, expected in (("saturation", saturated, 0.0), ("cast-range", coarse, 1.0)):
        if casts:
            places = sorted(casts, key=lambda place: -casts[place])
            readings.append(measured(what, places, casts[places[0]], expected))
    for site, words in wide.misread.items():
        readings.append(measured("misread-bytes", str(site), 1, 0))
        lines.append(f"  {words} in {site}")
    return readings


def nonfinite_readings(first: Pass, finite: Finite, lines: list[str]) -> list[Reading]:
    """Return a reading of gradients or a loss that are not finite, with the operation that began it."""
    bad = [name for name in reversed(first.gradients) if not is_finite(first.gradients[name])]
    loss = tensors_in(first.loss)
    if not bad and all(map(is_finite, loss)):
        return []
    cause = finite.first([*loss, *(x for x in first.raw if not is_finite(x))])
    if cause:
        lines.append(f"not finite first: {cause}")
    if not bad:
        return [measured("nonfinite", "the loss", 1, 0, stage="loss")]
    shadow = first.shadows.get(bad[0])
    if shadow is not None and is_finite(shadow):
        lines.append(f"without roundings that of {bad[0]} is finite: a format's range ends")
    return [measured("nonfinite", bad, len(bad), 0)]


def ranked_places(model: nn.Module, step: Callable[[], Any]) -> Readings:
    """Rank the places of a step by what their rounding adds to the gradient; or name the operation
    that made its first value which is not finite.

    The step runs eagerly on the model, including compiled parts. Weights, gradients, buffers and
    random states are as before at the end.

    Args:
        model: gives the names of the parameters.
        step: computes forward and backward of a whole step, with all its micro-batches. It may end
            with ``optimizer.step()`` and ``zero_grad()``.

    Returns:
        Readings, whose lines are the ranked list.

    Cost: one pass of a healthy step, 5 to 24 of a step with a place to be found. A pass takes 3 to
    16 steps, in twice the memory.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
        >>> x = torch.randn(8, 16).bfloat16()
        >>> ranked = ranked_places(model, lambda: model(x).float().square().mean().backward())
        >>> ranked.ok, "roundings of bfloat16" in ranked.lines[0]
        (True, True)
    """
    leaves = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    passes = Passes(model, [], leaves, [None], None, lambda *_: None, lambda *_: step())
    passes.is_training = model.training
    finite = Finite(model)

    def repeat(places: Collection[Site]) -> Pass:
        return passes.run(step, Wide(places), hooked=True)

    first = passes.run(step, Wide(), finite, hooked=True)
    lines: list[str] = []
    readings = nonfinite_readings(first, finite, lines)
    if not readings:
        readings = rounding_readings(Roundings(first, repeat), lines, 3)
    unseen: Mapping[str, str] = not_followed(first)
    return Readings(readings, lines, "roundings of the gradient", unseen)


def not_followed(first: Pass) -> dict[str, str]:
    """Return the gradients whose shadows are not known, with the operations that cut them."""
    names = [name for name in first.gradients if name not in first.shadows]
    if not names:
        return {}
    through = ", ".join(first.wide.cuts) or "shards"
    return {f"roundings of {len(names)} gradients": f"not followed through {through}"}
