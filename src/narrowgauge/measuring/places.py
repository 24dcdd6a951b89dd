"""What rounding does to a step's gradient, and the places that do most of it.

The gradient minus its shadow is what rounding does. Each place is rounded alone in a shadow, and gives
its part. Halving the places finds the largest part in log2(n) passes: one half is measured, and the
other follows in squares, since errors of different places are nearly orthogonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from narrowgauge.measuring.beside import SUM, is_finite, tensors_in
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

Repeat = Callable[[Collection[str]], Pass]
"""Run a step again, with sites whose shadows are rounded."""


class Place(NamedTuple):
    """A site, its share of the error, and the share that is left without it and those before it."""

    site: str
    share: float
    left: float


def add_roundings(first: Pass, repeat: Repeat, number: int, findings: Findings) -> None:
    """Tell what is unusual in the roundings of a gradient.

    Args:
        repeat: runs the step of the first pass again.
        number: lines of places that do most, at most.
    """
    wide = first.wide
    errors = {}
    for name, shadow in first.shadows.items():
        if is_finite(first.gradients[name]) and is_finite(shadow):
            errors[name] = _distance(first.gradients, first.shadows, [name])
    number_lost = len(first.gradients) - len(first.shadows)
    if number_lost:
        through = ", ".join(wide.cuts) or "shards"
        findings.unseen[f"roundings of {number_lost} gradients"] = f"not followed through {through}"
    if not errors:
        findings.lines.append("gradients: none is seen, or none is followed")
        return
    error = math.hypot(*errors.values())
    length = math.hypot(*(float(first.shadows[name].norm()) for name in errors)) or 1.0
    roundings = error / length / wide.working
    worst = max(errors, key=errors.__getitem__)
    findings.lines.append(
        f"gradients of {len(errors)} tensors: {error / length:.2g} of their length from float64's, "
        f"{roundings:.3g} roundings of {format_of(wide.working)}; most in {worst}"
    )

    def alone(sites: Collection[str]) -> float:
        """Return the error that some sites give."""
        reached = _distance(repeat(sites).shadows, first.shadows, list(errors))
        return math.inf if math.isnan(reached) else reached

    places = _ranked(wide, error, wide.working * length, number, alone)
    for site, share, left in places:
        line = f"  {share:.2f} of it from {', '.join(sorted(wide.rounds[site]))} in {site}"
        findings.lines.append(f"{line}; {left:.2f} is left without it")
    bound = KINDS["rounding"].bound
    if wide.working == FINEST:
        bound = OF_FLOAT32
    elif wide.flips:
        bound *= FLIPPED
    elif roundings <= bound and places and places[0].share >= MOST and places[0].left <= LEFT:
        bound = OF_SUMS
    noisy = _noisy(first, errors)
    if roundings > bound:
        findings.add("rounding", worst, roundings, 0.0, bound)
    elif noisy:
        findings.add("rounding-alone", noisy, len(noisy))
    _add_casts(wide, findings)


def _distance(first: Gradients, second: Gradients, names: Sequence[str]) -> float:
    """Return the length of the difference of two sets of gradients."""
    return math.hypot(*(float((first[name].double() - second[name]).norm()) for name in names))


def _noisy(first: Pass, errors: Mapping[str, float]) -> list[str]:
    """Return matrices whose gradient is rounding alone."""
    names = []
    for name, error in errors.items():
        norm = float(first.gradients[name].double().norm())
        is_alone = error > MOST * norm > 0 and float(first.shadows[name].norm()) < (1 - MOST) * norm
        if is_alone and first.gradients[name].ndim > 1:
            names.append(name)
    return names


def _ranked(
    wide: Wide,
    error: float,
    unit: float,
    number: int,
    alone: Callable[[Collection[str]], float],
) -> list[Place]:
    """Return the places that do most of an error, the largest first, until one rounding is left.

    Few roundings are asked of the sum of micro-batches alone: its error grows with their number.

    Args:
        unit: one rounding of the whole gradient.
        number: places, at most.
        alone: the error that some sites give.
    """
    rest = list(wide.rounds)
    sites = rest
    if error <= (OF_FLOAT32 if wide.working == FINEST else RANKED) * unit:
        sites = [site for site in rest if site == SUM and error > OF_SUMS * unit]
    places: list[Place] = []
    left = error
    while sites and len(places) < number and left > unit:
        size = left
        while len(sites) > 1:
            half = sites[: len(sites) // 2]
            part = alone(half)
            other = math.sqrt(max(0.0, size**2 - part**2))
            sites = sites[len(half) :]
            if part >= other:
                sites = half
            size = max(part, other)
        share = alone(sites) / error
        if share < LEAST_SHARE:
            break
        rest = [site for site in rest if site != sites[0]]
        left = alone(rest)
        places.append(Place(sites[0], share, left / error))
        sites = rest
    return places


def _add_casts(wide: Wide, findings: Findings) -> None:
    """Tell casts whose values lie outside the range of their format."""
    for what, expected in (("saturation", 0), ("cast-range", 1)):
        losses = {}
        for site, loss in wide.casts.items():
            if loss[what] - expected > KINDS[what].bound:
                losses[site] = loss[what]
        sites = sorted(losses, key=losses.__getitem__, reverse=True)
        if sites:
            findings.add(what, sites, losses[sites[0]], expected)
        for site in sites:
            loss = wide.casts[site]
            findings.lines.append(
                f"  {site}: {loss['saturation']:.1%} of its values reach the format's end, "
                f"{loss['zeros']:.1%} became 0"
            )
    for site in wide.misread:
        findings.add("misread-bytes", site, 1)


def add_nonfinite(first: Pass, finite: Finite, findings: Findings) -> None:
    """Tell gradients or a loss that are not finite, with the operations that began it."""
    bad = [name for name in reversed(first.gradients) if not is_finite(first.gradients[name])]
    is_loss_bad = not all(map(is_finite, tensors_in(first.loss)))
    if bad or is_loss_bad:
        findings.lines += [f"not finite first: {words}" for words in finite.made.values()]
        findings.add("nonfinite", bad or "the loss", len(bad) or 1)
    if bad and bad[0] in first.shadows and is_finite(first.shadows[bad[0]]):
        findings.lines.append(
            f"without roundings that of {bad[0]} is finite: a format's range ends"
        )


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

    finite = Finite()
    first = passes.run(call, Wide(), finite)
    findings = Findings()
    add_nonfinite(first, finite, findings)
    if not findings.readings:
        add_roundings(first, lambda sites: passes.run(call, Wide(sites)), 3, findings)
    return Readings(findings.readings, findings.lines, "roundings of the gradient", findings.unseen)
