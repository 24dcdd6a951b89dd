"""What rounding does to a step's gradient, and where: a ranked list of places, each with its number.

The gradient minus its shadow is what rounding does; it needs no bound. Each place rounds alone, and
gives its part. Halving finds the largest part in log2(n) passes. One half is measured, and the other
follows in squares, since rounding errors of different places are nearly orthogonal.

A place is counted in roundings of the format that it casts to: 8-bit formats are always meant. A cast
to 16 bits in a step that multiplies in float32 still counts in float32's roundings, since an island
of 16 bits is what this list looks for. A cast whose result is off by more than two roundings of its
own input leaves the range of its format: where nothing under- or overflows the bound is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.checks.fit import fit
from narrowgauge.checks.passes import Pass, Passes
from narrowgauge.checks.shadow import Shadow
from narrowgauge.checks.sites import SUM, FirstBad, Site, is_finite
from narrowgauge.checks.units import FINEST, UNITS
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_names import plain_name

Gradients = Mapping[str, Tensor]
RANKED = 3.0
RANKED_TENSOR = 8.0
"""Roundings of the whole gradient, or of one tensor, from which on places are ranked.

Healthy models have 1.0 to 9.2.
"""
SUMMED = 1.5
"""Roundings from which on the sum over micro-batches is measured: 64 of them in bfloat16 give 2.0.
"""
MOST = 0.7
LEFT = 1 / 3
"""The first place is unusual too if it gives this share, and leaves at most that share without it.
"""
FLIPPED = 4.0
"""Factor of these limits where roundings flip choices or units of a ReLU: each flip is a whole
element.
"""
OUTSIDE = 2.0
"""Roundings of its own input that a cast may err."""
_PASSES = 24
_SHORT = 0.03
"""Least length of a tensor, as a share of the mean length per element: a key's bias is zero but for
rounding.
"""


def lengths(exact: Gradients) -> dict[str, float]:
    """Return the length of each gradient, or the least length that counts for a tensor of its size."""
    squares = {name: float(x.square().sum()) for name, x in exact.items()}
    count = sum(x.numel() for x in exact.values())
    mean = sum(squares.values()) / max(1, count) or 1e-300
    least = {}
    for name, x in exact.items():
        least[name] = math.sqrt(max(squares[name], _SHORT**2 * mean * x.numel()))
    return least


def distances(gradients: Gradients, exact: Gradients) -> tuple[float, dict[str, float]]:
    """Return how far gradients are from exact ones, relative to their length: all, and each."""
    scales = lengths(exact)
    off = 0.0
    total = 0.0
    by_tensor = {}
    for name, x in exact.items():
        result = fit(x, gradients[name])
        off += result.distance**2
        total += result.length**2
        by_tensor[name] = result.distance / scales[name]
    return math.sqrt(off / (total or 1e-300)), by_tensor


class Place(NamedTuple):
    """A site, what it gives alone, and what is left without it and the places before it.

    Args:
        unit: unit roundoff of the format in which its part is counted.
        limit: roundings from which on a place is unusual.
    """

    site: Site
    operations: list[str]
    alone: float
    unit: float
    left: float
    is_unusual: bool
    limit: float

    def line(self, total: float) -> str:
        """Return the line of the ranked list."""
        kind = "unusual" if self.is_unusual else f"usual below {self.limit:g}"
        return (
            f"{self.alone:.2g} of {total:.2g} from {self.site}: {', '.join(self.operations)} "
            f"({self.alone / self.unit:.3g} roundings, {kind}); {self.left:.2g} without it"
        )


class Rounding:
    """What rounding does to a gradient, and where: at most three places, the largest first.

    Args:
        gradients: of a pass that measured what errs.
        shadows: of those gradients that are followed.
        mode: of that pass.
        repeat: runs the pass again with sites that round their shadows, and returns the shadows of
            its gradients.

    Attributes:
        all: relative distance of all gradients from their shadows; ``each`` by tensor.
        unit: unit roundoff of the coarsest format that counts; 0 if nothing rounds below float32.
        not_finite: the operation whose value is the first that is not finite.
    """

    not_finite = ""

    def __init__(
        self,
        gradients: Gradients,
        shadows: Gradients,
        mode: Shadow,
        repeat: Callable[[Collection[Site]], Gradients],
    ) -> None:
        self.gradients = gradients
        self.shadows = shadows
        self.mode = mode
        self.repeat = repeat
        self.places = list[Place]()
        self.notes = list[str]()
        self.outside: Reading | None = None
        self._passes = 0
        self.units = dict[Site, float]()
        for key in mode.errs:
            unit = mode.units[key]
            if unit <= UNITS[torch.bfloat16]:
                unit = min(unit, mode.working)
            self.units[key[0]] = max(self.units.get(key[0], 0.0), unit)
        self.unit = max(self.units.values(), default=0.0)
        self.all, self.each = distances(gradients, shadows)
        self.worst, self.largest = self._worst_tensor()
        self.slack = FLIPPED if mode.flips.total() else 1.0
        # One tensor that stands out is ranked alone.
        is_ranked = self.all >= RANKED * self.unit
        stands_out = self.largest >= RANKED_TENSOR * self.unit
        self.focus = self.worst if stands_out and not is_ranked else ""
        self.size = self.largest if self.focus else self.all
        if self.unit and shadows:
            self._find_casts()
            self._rank()

    def _worst_tensor(self) -> tuple[str, float]:
        """Return the tensor with the largest distance, and that.

        A gradient that is zero but for rounding, as of a bias before a batch norm, does not count.
        """
        scales = lengths(self.shadows)
        worst = ""
        largest = -1.0
        for name, error in self.each.items():
            if error > largest and float(self.shadows[name].norm()) > 0.999 * scales[name]:
                worst = name
                largest = error
        return worst, max(largest, 0.0)

    @property
    def roundings(self) -> float:
        return self.all / self.unit if self.unit else 0.0

    @property
    def format(self) -> str:
        for dtype, unit in (*UNITS.items(), (torch.float32, FINEST)):
            if unit == self.unit:
                return dtype_name(dtype)
        return f"a format of unit roundoff {self.unit:.2g}"

    def lines(self) -> list[str]:
        """Return the lines that are printed, without the first word."""
        if self.not_finite:
            return [f"first value that is not finite: {self.not_finite}"]
        if self.gradients and not self.shadows:
            return ["roundings were not measured (no gradient is followed)"]
        if not self.unit:
            return ["nothing was rounded below float32"]
        lines = [
            f"{self.all:.2g} of their length from float32's, {self.roundings:.3g} roundings of "
            f"{self.format}; most in {self.worst}, {self.largest:.2g}"
        ]
        for place in self.places:
            lines.append(f"  {place.line(self.size)}")
        return lines + self.notes

    def readings(self) -> list[Reading]:
        """Return a reading of a cast that leaves its range, or of the first unusual place, or of many
        roundings without one.
        """
        if self.outside is not None:
            return [self.outside]
        for place in self.places:
            if place.is_unusual:
                kind = KINDS["rounding"]
                bound = kind.bound * place.unit
                words = f"{place.line(self.size)}. {self._cure()}"
                return [kind.reading(self.worst, place.alone, 0.0, bound, place=words)]
        kind = KINDS["rounding"]
        if self.unit and self.roundings >= kind.bound * self.slack:
            words = (
                f"All roundings together give {self.all:.2g} of the gradient, {self.roundings:.3g} "
                f"roundings of {self.format}, and no single place gives most of it"
            )
            if self.format == "float16":
                words += ". Look at the loss scale"
            return [kind.reading("", self.all, 0.0, kind.bound * self.unit, place=words)]
        return []

    def _cure(self) -> str:
        """Return what to do about a place. A gradient that is rounding alone may lack its terms."""
        if self.size < MOST:
            return "Compute this place in float32"
        exact = [self.shadows[self.focus]] if self.focus else [*self.shadows.values()]
        norm = math.hypot(*(float(x.norm()) for x in exact))
        return (
            f"Most of this gradient is rounding: without it its norm is {norm:.2g}. If it should be "
            "larger, look for a term that is constant, as a ratio of a value with itself; else "
            "compute this place in float32"
        )

    def __str__(self) -> str:
        return "\n".join(["gradients: " + self.lines()[0], *self.lines()[1:]])

    def _find_casts(self) -> None:
        """Find a cast that errs by more than its roundings, and measure that it matters."""
        for (site, name), (roundings, dtype) in self.mode.casts.items():
            if roundings < OUTSIDE or self.outside is not None:
                continue
            alone = distances(self.repeat([site]), self.shadows)[1]
            tensor = max(alone, key=alone.__getitem__)
            bound = RANKED * UNITS[dtype]
            if alone[tensor] >= bound:
                words = (
                    f"{name} in {site} errs by {roundings:.3g} roundings of {dtype_name(dtype)}, and "
                    f"gives {alone[tensor]:.2g} of this gradient: values lie outside the range of the "
                    "format. Look at their scale"
                )
                self.outside = KINDS["rounding"].reading(
                    tensor, alone[tensor], 0.0, bound, place=words
                )

    def _measured(self, sites: Collection[Site]) -> float:
        self._passes += 1
        together, by_tensor = distances(self.repeat(sites), self.shadows)
        return by_tensor[self.focus] if self.focus else together

    def _rank(self) -> None:
        sites = list(self.units)
        if self.size < RANKED * self.unit:
            # Narrow sums over micro-batches grow with their number, and show before they are large.
            sums = [site for site in sites if site.line == SUM]
            if sums and self.size >= SUMMED * self.unit:
                alone = self._measured(sums)
                if alone >= MOST * self.size:
                    self._add_place(sums[0], alone, self.size, sites)
            return
        together = self._measured(sites)
        if together < self.size / 2:
            self.notes.append(
                f"  roundings of single results explain {together:.2g} of it: a kernel sums in its "
                "narrow format"
            )
            return
        error = self.size
        while sites and error >= RANKED * self.unit:
            if len(self.places) == 3 or self._passes >= _PASSES:
                break
            site, alone = self._largest(sites, error)
            error = self._add_place(site, alone, error, sites)
        if self.mode.flips.total():
            ((site, name), count), *_ = self.mode.flips.most_common(1)
            self.notes.append(f"  {count} choices of {name} in {site} are others in float32")

    def _largest(self, sites: list[Site], error: float) -> tuple[Site, float]:
        """Halve sites to the one that gives most of an error."""
        while len(sites) > 1:
            half = sites[: len(sites) // 2]
            part = self._measured(half)
            rest = 0.0
            if math.isfinite(part):
                rest = math.sqrt(max(0.0, error**2 - part**2))
            if part < rest:
                sites = sites[len(half) :]
                error = rest
            else:
                sites = half
                error = part
        return sites[0], self._measured(sites)

    def _add_place(self, site: Site, alone: float, before: float, sites: list[Site]) -> float:
        """Append a place, and return what is left without it."""
        sites.remove(site)
        left = self._measured(sites) if sites else 0.0
        unit = self.units[site]
        least = SUMMED if site.line == SUM else RANKED
        is_first = not self.places and self.slack == 1.0
        is_most = is_first and alone >= max(least * unit, MOST * self.size)
        limit = self.slack * KINDS["rounding"].bound
        is_unusual = alone >= limit * unit
        is_unusual = is_unusual or (is_most and left <= LEFT * before)
        operations = [key[1] for key in self.mode.errs if key[0] == site]
        self.places.append(Place(site, sorted(operations), alone, unit, left, is_unusual, limit))
        return left


def ranked_places(model: nn.Module, step: Callable[[], Any]) -> Rounding:
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
        >>> ranked.format, ranked.all < 0.02, ranked.readings()
        ('bfloat16', True, [])
    """
    leaves = {plain_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    passes = Passes(
        model, [], leaves, [], None, lambda model, batch: step(), None, {}, model.training
    )
    return rounding_of(passes, step)[1]


def rounding_of(passes: Passes, step: Callable[[], Any]) -> tuple[Pass, Rounding]:
    """Measure the roundings of a step, or name the operation that made a value not finite."""
    first = passes.run(step, Shadow(measures=True))
    is_bad = not all(map(is_finite, first.gradients.values()))

    def repeat(sites: Collection[Site]) -> Gradients:
        return passes.run(step, Shadow(chosen=sites)).shadows

    rounding = Rounding(first.gradients, {} if is_bad else first.shadows, first.mode, repeat)
    if is_bad:
        traced = passes.run(step, FirstBad(passes.model))
        rounding.not_finite = traced.first_bad or "no operation of the step made it"
    return first, rounding
