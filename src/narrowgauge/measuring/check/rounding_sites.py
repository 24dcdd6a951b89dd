"""What rounding does to a step's gradient, and the places that do most of it.

The gradient minus its shadow is what rounding does. Each place is rounded alone in a shadow, and gives
its part. Halving the places finds the largest part in log2(n) passes: one half is measured, and the
other follows in squares, since errors of different places are nearly orthogonal.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.measuring.check.dispatch import BACKWARD, SUM, is_finite, tensors_in
from narrowgauge.measuring.check.passes import IS_ZERO, Gradients, Pass, Passes
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.unit_roundoff import FINEST
from narrowgauge.runs.text import plural

OF_FLOAT32 = 2.0**10
"""Bound in roundings of float32, where products are float32: half of its digits. Of 70 healthy steps
each has 1.8 to 9.2.
"""
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
"""Fraction of a gradient that is rounding alone. Healthy tensors have at most 0.08."""
THE_ONE = 0.94
"""A place that gives this fraction of the error is the only one: without it a third is left."""
PLACES = 3
"""Places that are printed, at most."""
LEAST_SHARE = 0.005
"""Places with a smaller fraction of the error are not printed."""
AT_END = 1 / 8
"""Fraction of a cast's values at the end of its format: delayed and rounded scales leave a few there,
of healthy steps at most 1/16.
"""


def add_roundings(passes: Passes, first: Pass, result: Readings) -> None:
    """Tell what is unusual in the roundings of a step's gradient, which the first pass computed.

    Raises:
        ArithmeticError: there is no gradient, or none is followed.
    """
    shadow = first.shadow
    roundoff, coarsest = shadow.coarsest
    distances = _distances(first.gradients, first.shadows)
    errors = {name: distance for name, distance in distances.items() if math.isfinite(distance)}
    lengths = {name: float(first.shadows[name].norm()) for name in errors}
    number_lost = len(first.gradients) - len(first.shadows)
    if number_lost:
        reason = f"not followed through {', '.join(shadow.cuts)}"
        result.unseen[f"roundings of {number_lost} gradients"] = reason
    error = math.hypot(*errors.values())
    length = math.hypot(*lengths.values()) or 1.0
    unit = roundoff * length
    _add_casts(shadow, bool(errors) and error <= RANKED * unit, result)
    if not errors:
        raise ArithmeticError("no gradient is seen, or none is followed")
    number_read = plural(len(errors), "tensor")
    if not error and first.is_zero:
        raise ArithmeticError(IS_ZERO)
    worst = max(errors, key=errors.__getitem__)
    result.lines.append(
        f"gradients of {number_read}: {error / length:.2g} of their length from float64's, "
        f"{error / unit:.3g} roundings of {coarsest}; most in {worst}"
    )

    shares = dict(_ranked(shadow, error, unit, partial(_error_of, passes, first, errors)))
    for site, share in shares.items():
        names = ", ".join(sorted(shadow.rounds[site]))
        result.lines.append(f"  {share:.2f} of it from {names} in {site}")
    bound = _bound_of(shadow, shares)
    if error > bound * unit:
        result.add("rounding", worst, error / unit, 0.0, bound)
    else:
        _add_single_tensors(first, errors, lengths, result)


def _distances(gradients: Gradients, shadows: Gradients) -> dict[str, float]:
    """Return the length of the difference of each gradient from its shadow; not finite where one is not."""
    distances = {}
    for name, exact in shadows.items():
        distances[name] = float((gradients[name].double() - exact).norm())
    return distances


def _error_of(passes: Passes, first: Pass, names: Collection[str], sites: Collection[str]) -> float:
    """Return the error of some gradients in a step that rounds the shadows of some sites alone."""
    rounded = passes.run(passes.step, Float64Shadow(sites)).shadows
    distances = _distances(rounded, first.shadows)
    error = math.hypot(*(distances[name] for name in names))
    return math.inf if math.isnan(error) else error


def _bound_of(shadow: Float64Shadow, shares: Mapping[str, float]) -> float:
    """Return the roundings that a gradient may err by, given the share of each ranked site."""
    bound = KINDS["rounding"].bound
    if shadow.coarsest[0] == FINEST:
        bound = OF_FLOAT32
    elif shadow.flips:
        bound *= FLIPPED
    for site, share in shares.items():
        is_usual = shadow.flips or site in shadow.layers
        if share >= THE_ONE and not is_usual and bound < OF_FLOAT32:
            bound = OF_SUMS
    return bound


def _add_single_tensors(
    first: Pass, errors: Mapping[str, float], lengths: Mapping[str, float], result: Readings
) -> None:
    """Tell matrices whose gradient is mostly rounding, where the whole gradient is not."""
    for name, size in errors.items():
        gradient = first.gradients[name]
        norm = float(gradient.double().norm())
        is_alone = size > MOST * norm > 0 and lengths[name] < (1 - MOST) * norm
        if is_alone and gradient.ndim > 1:
            roundings = size / (first.shadow.coarsest[0] * lengths[name] or 1.0)
            result.add("rounding", name, roundings)


def _ranked(
    shadow: Float64Shadow, error: float, unit: float, alone: Callable[[Collection[str]], float]
) -> Iterator[tuple[str, float]]:
    """Yield the places that do most of an error with their shares, until one rounding is left.

    Few roundings are asked of the sum of micro-batches alone: its error grows with their number.

    Args:
        unit: one rounding of the whole gradient.
        alone: the error that some sites give.
    """
    rest = list(shadow.rounds)
    sites = list(rest)
    if error <= (OF_FLOAT32 if shadow.coarsest[0] == FINEST else RANKED) * unit:
        sites = [site for site in rest if site == SUM and error > OF_SUMS * unit]
    unexplained = error
    for _ in range(PLACES if all_ranks().size == 1 else 0):  # ranks would take turns of their own
        if not sites or unexplained <= unit:
            break
        size = unexplained
        while len(sites) > 1:
            half = sites[: len(sites) // 2]
            part = alone(half)
            remainder = math.sqrt(max(0.0, size**2 - part**2))
            sites = half if part >= remainder else sites[len(half) :]
            size = max(part, remainder)
        size = alone(sites)
        if size < LEAST_SHARE * error:
            break
        yield sites[0], size / error
        rest.remove(sites[0])
        sites = list(rest)
        unexplained = math.sqrt(max(0.0, unexplained**2 - size**2))


def _add_casts(shadow: Float64Shadow, is_small: bool, result: Readings) -> None:
    """Tell casts whose values lie outside the range of their format.

    Args:
        is_small: the whole gradient errs little, so what casts in backward lose does not count.
    """
    losses = (
        ("a cast errs by {:.3g} roundings", shadow.cast_errors, 1.0, KINDS["cast-range"].bound),
        ("{:.1%} of a cast's values reach its format's end", shadow.at_end, 0.0, AT_END),
    )
    for words, values, expected, bound in losses:
        sites = []
        for site, value in values.items():
            if value > expected + bound and not (is_small and site.endswith(BACKWARD)):
                sites.append(site)
        sites.sort(key=values.__getitem__, reverse=True)
        result.lines += [f"  {site}: {words.format(values[site])}" for site in sites]
        if sites:
            result.add("cast-range", sites, values[sites[0]], expected, bound)


def add_nonfinite(passes: Passes, first: Pass, result: Readings) -> None:
    """Tell gradients or a loss that are not finite, with the operations that began it."""
    bad = [name for name in reversed(first.gradients) if not is_finite(first.gradients[name])]
    if bad or not all(map(is_finite, tensors_in(first.loss))):
        result.lines += [f"not finite first: {words}" for words in passes.nonfinite.made.values()]
        result.add("nonfinite", bad or "the loss", len(bad) or 1)
