"""Where a gradient's difference from float32 comes from: a ranked list of places, each with its
number.

A step runs beside its float32 shadow (:mod:`narrowgauge.checks.shadow`). The difference of the two
gradients is what rounding does; it needs no bound. Each place rounds alone, and gives its part.
Halving finds the largest part in log2(n) passes. One half is measured, and the other follows in
squares, since rounding errors of different places are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.checks.shadow import NARROW, SUM, Key, Shadow, Site, eager, is_finite, is_float
from narrowgauge.numerics.dtensor import named_gradients
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.put_back import put_back
from narrowgauge.torch_support.torch_names import plain_name

Gradients = dict[str, Tensor]
RANKED = 3.0
RANKED_TENSOR = 8.0
"""Roundings of the whole gradient, or of one tensor, from which on places are ranked.

Healthy models have 1.0 to 9.2.
"""
SUMMED = 1.5
"""Roundings from which on the sum over micro-batches is measured: 64 of them in bfloat16 give 2.0.
"""
UNUSUAL = 16.0
"""Roundings of its own format that one place may give."""
MOST = 0.7
LEFT = 1 / 3
"""The first place is unusual too if it gives this share, and leaves at most that share without it.
"""
FLIPPED = 4.0
"""Factor of these limits where roundings flip choices or units of a ReLU: each flip is a whole
element.
"""
MANY = 16.0
"""Roundings of the whole gradient that are noted even if no place is unusual."""
_PASSES = 24
_PLACES = 3
_SHORT = 0.03
"""Least length of a tensor, as a share of the mean length per element: a key's bias is zero but for
rounding.
"""


class Distance(NamedTuple):
    """The relative distance of all gradients, or of one, of the tensor where it is largest, and of
    each tensor.
    """

    all: float
    largest: float
    tensor: str
    by_tensor: Mapping[str, float]


def scales(exact: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the length of each gradient, or the least length that counts for a tensor of its size."""
    squares = {}
    count = 0
    for n, x in exact.items():
        squares[n] = float(x.square().sum())
        count += x.numel()
    least = _SHORT**2 * (sum(squares.values()) / max(1, count) or 1e-300)
    return {n: math.sqrt(max(squares[n], least * x.numel())) for n, x in exact.items()}


def distance(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Distance:
    """Return how far gradients are from exact ones, relative to their length."""
    lengths = scales(exact)
    off = 0.0
    total = 0.0
    by_tensor = {}
    for n, x in exact.items():
        error = gradients[n] - x
        off += float(error.square().sum())
        total += float(x.square().sum())
        by_tensor[n] = float(error.norm()) / lengths[n]
    worst = max(by_tensor, key=by_tensor.__getitem__, default="")
    overall = math.sqrt(off / (total or 1e-300))
    return Distance(overall, by_tensor.get(worst, 0.0), worst, by_tensor)


class Place(NamedTuple):
    """A site, what it gives alone, and what is left without it and the places before it.

    Args:
        unit: unit roundoff of its own format, in which its part is counted.
    """

    site: Site
    operations: tuple[str, ...]
    alone: float
    unit: float
    left: float
    is_unusual: bool

    def line(self, total: float) -> str:
        """Return the line of the ranked list."""
        kind = "unusual" if self.is_unusual else "usual"
        return (
            f"{self.alone:.2g} of {total:.2g} from {self.site}: {', '.join(self.operations)} "
            f"({self.alone / self.unit:.3g} roundings, {kind}); {self.left:.2g} without it"
        )


@dataclass
class Ranked:
    """What rounding does to a step's gradient, and where.

    Args:
        total: the distance of the gradient from its shadow.
        unit: unit roundoff of the coarsest format in which the step multiplies; 0 if nothing rounds
            below float32.
        focus: the tensor whose places are ranked; empty for all.
        places: the largest parts first; empty below :data:`RANKED` roundings.
        notes: what the list does not explain, a sentence each.
        flips: whether roundings flip choices, or units of a ReLU.
        not_finite: the first operation whose value is not finite; empty if gradients are finite.
        why_not: why roundings were not measured; empty if they were.
    """

    total: Distance
    unit: float
    focus: str = ""
    places: list[Place] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flips: bool = False
    not_finite: str = ""
    why_not: str = ""

    @property
    def format(self) -> str:
        for dtype, unit in (*NARROW.items(), (torch.float32, 2.0**-24)):
            if unit == self.unit:
                return dtype_name(dtype)
        return f"a format of unit roundoff {self.unit:.2g}"

    @property
    def roundings(self) -> float:
        if self.unit:
            return self.total.all / self.unit
        return 0.0

    def lines(self) -> list[str]:
        """Return the lines that are printed, without the first word."""
        if self.not_finite:
            return [f"first value that is not finite: {self.not_finite}"]
        if self.why_not:
            return [f"roundings were not measured ({self.why_not})"]
        if not self.unit:
            return ["nothing was rounded below float32"]
        total = self.total
        reference = total.largest if self.focus else total.all
        lines = [
            f"{total.all:.2g} of their length from float32's, {self.roundings:.3g} roundings of "
            f"{self.format}; most in {total.tensor}, {total.largest:.2g}"
        ]
        for place in self.places:
            lines.append(f"  {place.line(reference)}")
        return lines + self.notes

    def readings(self) -> list[Reading]:
        """Return a reading of the first unusual place; or of many roundings without one."""
        for place in self.places:
            if place.is_unusual:
                line = place.line(self.total.largest if self.focus else self.total.all)
                kind = KINDS["rounding"]
                bound = kind.bound * place.unit
                return [kind.reading(self.total.tensor, place.alone, 0.0, bound, place=line)]
        if self.roundings >= MANY * (FLIPPED if self.flips else 1.0):
            kind = KINDS["many-roundings"]
            bound = kind.bound * self.unit
            words = f"{self.roundings:.3g} roundings of {self.format}"
            return [kind.reading("", self.total.all, 0.0, bound, roundings=words)]
        return []

    def __str__(self) -> str:
        return "\n".join(["gradients: " + self.lines()[0], *self.lines()[1:]])


def rank(
    gradients: Gradients, shadows: Gradients, mode: Shadow, repeat: Callable[[Collection[Key]], Gradients]
) -> Ranked:  # fmt: skip
    """Rank the places of a step.

    Args:
        gradients: of the first pass, float64, by name.
        shadows: of those that are followed.
        mode: of the first pass, which measured what errs.
        repeat: runs the step again with places that round their shadows. Returns the shadows of its
            gradients.
    """
    if gradients and not shadows:
        return not_measured("no gradient is followed")
    units = {key: unit for key, unit in mode.units.items() if key in mode.errs}
    total = distance(gradients, shadows)
    unit = min(mode.working, max(units.values(), default=0.0))
    result = Ranked(total, unit)
    if not units:
        return result
    size = total.all
    if total.all < RANKED * unit <= RANKED_TENSOR * unit <= total.largest:
        result.focus = total.tensor
        size = total.largest
    exact = {result.focus: shadows[result.focus]} if result.focus else shadows
    sites = list(dict.fromkeys(site for site, _ in units))
    result.flips = mode.others.total() > 0
    slack = FLIPPED if result.flips else 1.0
    passes = 0

    def measured(group: Iterable[Site]) -> float:
        nonlocal passes
        passes += 1
        chosen = [key for key in units if key[0] in set(group)]
        return distance(repeat(chosen), exact).all

    def place_of(site: Site, alone: float, before: float) -> Place:
        sites.remove(site)
        remaining = measured(sites) if sites else 0.0
        operations = []
        own_unit = 0.0
        for key in units:
            if key[0] == site:
                operations.append(key[1])
                own_unit = max(own_unit, units[key])
        own_unit = min(unit, own_unit)
        is_first = not result.places and slack == 1.0
        least = SUMMED if site.line == SUM else RANKED
        is_most = is_first and alone >= max(least * own_unit, MOST * size)
        is_unusual = alone >= slack * UNUSUAL * own_unit or (is_most and remaining <= LEFT * before)
        return Place(site, tuple(operations), alone, own_unit, remaining, is_unusual)

    sums = [site for site in sites if site.line == SUM]
    if size < RANKED * unit:
        # Narrow sums over micro-batches grow with their number, and show before they are large.
        if sums and size >= SUMMED * unit:
            alone = measured(sums)
            if alone >= MOST * size:
                result.places.append(place_of(sums[0], alone, size))
        return result
    together = measured(sites)
    if together < size / 2:
        result.notes.append(
            f"  roundings of single results explain {together:.2g} of it: a kernel sums in its "
            "narrow format"
        )
        return result
    error = size
    while sites and len(result.places) < _PLACES and passes < _PASSES and error >= RANKED * unit:
        group = list(sites)
        group_error = error
        alone = error if len(group) == 1 else math.nan
        while len(group) > 1:
            half = group[: len(group) // 2]
            second_half = group[len(group) // 2 :]
            part = measured(half)
            rest = math.sqrt(max(0.0, group_error**2 - part**2)) if math.isfinite(part) else 0.0
            if part < rest:
                group = second_half
                group_error = rest
                alone = math.nan
            else:
                group = half
                group_error = part
                alone = part
        if math.isnan(alone):
            alone = measured(group)
        place = place_of(group[0], alone, error)
        result.places.append(place)
        error = place.left
    if result.flips:
        (site, name), count = mode.others.most_common(1)[0]
        result.notes.append(f"  {count} choices of {name} in {site} are others in float32")
    return result


def ranked_places(model: nn.Module, step: Callable[[], Any]) -> Ranked:
    """Rank the places of a step by what their rounding adds to the gradient; or name the first
    value that is not finite.

    The step runs eagerly on the model, including compiled parts. Gradients, buffers and random
    states are restored bit for bit.

    Args:
        model: gives the names of the parameters.
        step: computes forward and backward of a whole step, with all its micro-batches. It must not
            change the weights.

    Returns:
        The ranked list; ``print`` shows it.

    Cost: one pass of a healthy step, 5 to 24 of a step with a place to be found. A pass takes 3 to
    16 steps, in twice the memory.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
        >>> x = torch.randn(8, 16).bfloat16()
        >>> ranked = ranked_places(model, lambda: model(x).float().square().mean().backward())
        >>> ranked.format, ranked.total.all < 0.02, ranked.readings()
        ('bfloat16', True, [])
    """

    def run(chosen: Collection[Key] = (), **asks: bool) -> tuple[Gradients, Gradients, Shadow, Any]:
        with put_back(model), eager():
            with Shadow(chosen, model=model, **asks) as mode:
                value = step()
            named = named_gradients({plain_name(n): p for n, p in model.named_parameters()})
            causes = [mode.first_bad(x) for x in (value, *named.values()) if is_float(x)]
            gradients = {name: g.detach().to_dense().double() for name, g in named.items()}
            return gradients, followed(mode, named), mode, causes

    gradients, shadows, mode, _ = run(measures=True)
    if not all(map(is_finite, gradients.values())):
        return not_finite(run(traces=True)[3])
    return rank(gradients, shadows, mode, lambda chosen: run(chosen)[1])


def not_finite(causes: Iterable[Any]) -> Ranked:
    """Return the result of a step whose gradients are not finite: the earliest of the operations
    that reached them.
    """
    sorted_causes = sorted(filter(None, causes))
    words = sorted_causes[0].words if sorted_causes else "no operation of the step made it"
    return Ranked(Distance(math.inf, math.inf, "", {}), 0.0, not_finite=words)


def not_measured(why_not: str) -> Ranked:
    """Return the result of a step that could not run beside a shadow: an allowance of 32 roundings
    of bfloat16.
    """
    allowed = 32 * 2.0**-8
    return Ranked(Distance(allowed, allowed, "", {}), 0.0, why_not=why_not)


def followed(mode: Shadow, named: Mapping[str, Tensor]) -> Gradients:
    """Return the shadows of the gradients that are followed, float64."""
    shadows = Gradients()
    for name, g in named.items():
        if mode.follows(g):
            shadows[name] = mode.of(g.detach()).to_dense().double()
    return shadows


def not_followed(mode: Shadow, names: Collection[str]) -> str:
    """Return the line about gradients whose shadows are lost."""
    through = f" through {', '.join(mode.cuts)}" if mode.cuts else ""
    return f"  not followed{through}: {counted(len(names), 'gradient')}"
