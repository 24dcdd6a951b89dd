"""What rounding does to a step's gradient, and the places that do most of it.

The gradient minus its shadow is what rounding does. Each place is rounded alone in a shadow, and gives
its part. Halving the places finds the largest part in log2(n) passes: one half is measured, and the
other follows in squares, since errors of different places are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from narrowgauge.measuring.beside import SUM, Site, is_finite, tensors_in
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.passes import Findings, Gradients, Pass, Passes, trained_leaves
from narrowgauge.measuring.policies.finite import Finite
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.units import FINEST, format_of

OF_FLOAT32 = 2.0**10
"""Bound in roundings of float32, where products are float32: half of its digits."""
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
LEAST_SHARE = 0.005
"""A place of less of the error is not printed."""
SATURATED = 1 / 8
"""Share of a cast's values that reach the end of its format: delayed and rounded scales leave a few."""
OUTSIDE = 2.0
"""Roundings of its input that a cast may err: one where nothing ends, and as much again."""

Repeat = Callable[[Collection[Site]], Pass]
"""Run a step again, with sites whose shadows are rounded."""


def distance(first: Gradients, second: Gradients, names: Sequence[str]) -> float:
    """Return the length of the difference of two sets of gradients."""
    squares = 0.0
    for name in names:
        squares += float((first[name].double() - second[name]).square().sum())
    return math.sqrt(squares)


class Roundings:
    """Measure what rounding does to a gradient, and rank the places that do it.

    Attributes:
        names: tensors whose gradients are finite and followed.
        unit: unit roundoff of the coarsest product of the step.
        error: distance of all gradients from their shadows.
        number: the error over the length of the gradients, in roundings of the unit.
        is_most: whether the first place that was ranked gives most of the error.
    """

    is_most = False

    def __init__(self, first: Pass, repeat: Repeat) -> None:
        self.first = first
        self.repeat = repeat
        self.names = []
        for name, shadow in first.shadows.items():
            if is_finite(first.gradients[name]) and is_finite(shadow):
                self.names.append(name)
        self.unit = first.wide.working
        self.error = self.of(self.names)
        self.length = math.hypot(*(float(first.shadows[name].norm()) for name in self.names))
        self.number = self.error / (self.length or 1.0) / self.unit

    def of(self, names: Sequence[str]) -> float:
        """Return the distance of some gradients from their shadows."""
        return distance(self.first.gradients, self.first.shadows, names)

    @property
    def worst(self) -> str:
        """Return the tensor with the largest part of the error."""
        return max(self.names, key=lambda name: self.of([name]))

    def line(self) -> str:
        if not self.first.gradients:
            return "gradients: none is seen"
        if not self.names:
            return "gradients: none is followed"
        return (
            f"gradients of {len(self.names)} tensors: {self.number * self.unit:.2g} of their length "
            f"from float64's, {self.number:.3g} roundings of {format_of(self.unit)}; "
            f"most in {self.worst}"
        )

    def places(self, number: int) -> list[str]:
        """Return the lines of at most ``number`` places, the largest first.

        Few roundings are asked of the sum of micro-batches alone: its error grows with their number.
        """
        wide = self.first.wide
        rest = list(wide.rounds)
        sites = rest
        if self.number <= RANKED or (self.unit == FINEST and self.number <= OF_FLOAT32):
            sites = [site for site in rest if site.line == SUM and self.number > OF_SUMS]
        left = self.error
        lines: list[str] = []
        while sites and len(lines) < number and left > self.unit * self.length:
            site = self._largest(sites, left)
            share = self._alone([site]) / self.error
            if share < LEAST_SHARE:
                break
            rest = [other for other in rest if other != site]
            left = self._alone(rest)
            self.is_most |= not lines and share >= MOST and left <= LEFT * self.error
            line = f"  {share:.2f} of it from {', '.join(sorted(wide.rounds[site]))} in {site}"
            line += f"; {left / self.error:.2f} is left without it"
            if site in wide.casts:
                line += f"; {_words(wide.casts[site])}"
            lines.append(line)
            sites = rest
        return lines

    def _largest(self, sites: list[Site], error: float) -> Site:
        while len(sites) > 1:
            half = sites[: len(sites) // 2]
            part = self._alone(half)
            other = math.sqrt(max(0.0, error**2 - part**2))
            sites = sites[len(half) :]
            if part >= other:
                sites = half
            error = max(part, other)
        return sites[0]

    def _alone(self, sites: Collection[Site]) -> float:
        shadows = self.repeat(sites).shadows
        reached = distance(shadows, self.first.shadows, self.names)
        return math.inf if math.isnan(reached) else reached


def add_roundings(roundings: Roundings, findings: Findings, number: int) -> None:
    """Tell what is unusual in the roundings, with lines of at most ``number`` places that do most."""
    findings.lines.append(roundings.line())
    flips = roundings.first.wide.flips
    bound = KINDS["rounding"].bound
    if flips:
        bound *= FLIPPED
    if roundings.unit == FINEST:
        bound = OF_FLOAT32
    findings.lines += roundings.places(number)
    alone = []
    for name in roundings.names:
        gradient = roundings.first.gradients[name]
        if gradient.ndim > 1 and name in roundings.first.shadows:
            norm = float(gradient.double().norm())
            without = float(roundings.first.shadows[name].double().norm())
            if roundings.of([name]) > MOST * norm > 0 and without < (1 - MOST) * norm:
                alone.append(name)
    if roundings.number <= bound and roundings.is_most and not flips:
        bound = OF_SUMS
    if roundings.number > bound:
        findings.add("rounding", roundings.worst, roundings.number, 0.0, bound)
    elif alone:
        findings.add("rounding-alone", alone, len(alone))
    _add_casts(roundings.first.wide, findings)
    number_lost = len(roundings.first.gradients) - len(roundings.first.shadows)
    if number_lost:
        through = ", ".join(roundings.first.wide.cuts) or "shards"
        findings.unseen[f"roundings of {number_lost} gradients"] = f"not followed through {through}"


def _add_casts(wide: Wide, findings: Findings) -> None:
    """Tell casts whose values lie outside the range of their format."""
    for what, place, limit, right in (
        ("saturation", 0, SATURATED, 0),
        ("cast-range", 2, OUTSIDE, 1),
    ):
        losses = {site: loss[place] for site, loss in wide.casts.items() if loss[place] > limit}
        sites = sorted(losses, key=lambda site: -losses[site])
        if sites:
            findings.add(what, map(str, sites), losses[sites[0]], right)
        findings.lines += [f"  {site}: {_words(wide.casts[site])}" for site in sites]
    for site, words in wide.misread.items():
        findings.add("misread-bytes", str(site), 1)
        findings.lines.append(f"  {words} in {site}")


def _words(losses: Sequence[float]) -> str:
    return f"{losses[0]:.1%} of its values reach the format's end, {losses[1]:.1%} became 0"


def add_nonfinite(first: Pass, finite: Finite, findings: Findings) -> None:
    """Tell gradients or a loss that are not finite, with the operation that began it."""
    bad = [name for name in reversed(first.gradients) if not is_finite(first.gradients[name])]
    loss = [x for x in tensors_in(first.loss) if not is_finite(x)]
    cause = finite.first([*loss, *(first.gradients[name] for name in bad)])
    if cause:
        findings.lines.append(f"not finite first: {cause}")
    if bad:
        shadow = first.shadows.get(bad[0])
        if shadow is not None and is_finite(shadow):
            findings.lines.append(
                f"without roundings that of {bad[0]} is finite: a format's range ends"
            )
        findings.add("nonfinite", bad, len(bad))
    elif loss:
        findings.add("nonfinite", "the loss", 1, stage="loss")


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
    leaves = trained_leaves(model)
    passes = Passes(model, leaves, [], lambda *_: None, is_training=model.training)

    def call() -> Any:
        """Keep each gradient when it is complete, since the step may clear it."""
        complete: dict[Any, Any] = {}
        hooks = []
        for p in leaves.values():
            keep = lambda p: complete.update({p: p.grad.clone()})  # noqa: E731
            hooks.append(p.register_post_accumulate_grad_hook(keep))
        value = step()
        for hook in hooks:
            hook.remove()
        for p, gradient in complete.items():
            p.grad = gradient
        return value

    finite = Finite(model)
    first = passes.run(call, Wide(), finite)
    findings = Findings()
    add_nonfinite(first, finite, findings)
    if not findings.readings:
        roundings = Roundings(first, lambda places: passes.run(call, Wide(places)))
        add_roundings(roundings, findings, 3)
    return Readings(findings.readings, findings.lines, "roundings of the gradient", findings.unseen)
