"""Two runs over all their rows: whether their losses drift apart, and whether one factor lies between all gradients.

The first row that differs says where two runs part, and little about why: a forward pass that sees later tokens begins with a
difference as small as rounding, and halves the loss. Training amplifies rounding too, but into noise: the difference of
two losses of the same tokens has either sign. So a difference of one sign, many standard errors from zero, that stays while both
runs go on learning, is none of rounding.

A loss that is divided by another count, a sum in place of a mean or a gradient that is added twice make one constant factor over
all gradients, which AdamW's updates do not even show. The factor itself is then the answer, and often equals a number of the
settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, number

FEWEST = 8
"""The fewest common rows, or half of them, that tell a drift from noise and a factor from chance."""
LEAST_DRIFT, SIGMAS = 0.03, 6.0
"""The least mean relative difference of two losses, and its standard errors from zero, that no rounding grows to."""
LEAST_FACTOR, SPREAD = 0.005, 0.2
"""How far a factor is from 1, relatively, and the spread of the single ratios over that distance, at most."""
_EQUAL = 2e-3
"""Relative difference up to which a factor equals a number of the settings."""


@dataclass(frozen=True, slots=True)
class Drift:
    """The losses of two runs, over the later half of the rows since they differ.

    ``mean`` is that of the second less the first, over the larger one, with its standard error; ``since`` the first step.
    """

    since: int
    mean: float
    error: float
    num_rows: int

    @property
    def is_beyond_rounding(self) -> bool:
        return self.num_rows >= FEWEST and abs(self.mean) > max(LEAST_DRIFT, SIGMAS * self.error)

    def __str__(self) -> str:
        which = "lower" if self.mean < 0 else "higher"
        return (
            f"from step {self.since} on the loss of the second run is {abs(self.mean):.1%} {which} ({self.num_rows} rows, ± "
            f"{self.error:.1%}): rounding has either sign"
        )


def drift_since(rows: Sequence[Mapping[int, Row]], since: int) -> Drift | None:
    """How the losses of two runs, given as rows by step, drift apart after a step.

    ``None`` where too few rows are common, or where a run no longer learns: what diverges is off by any amount.
    """
    common = [step for step in sorted(rows[0].keys() & rows[1].keys()) if step >= since]
    pairs = [(step, number(rows[0][step].get("loss")), number(rows[1][step].get("loss"))) for step in common]
    known = [
        (step, one, other)
        for step, one, other in pairs
        if one is not None and other is not None and math.isfinite(one) and math.isfinite(other)
    ]
    if len(known) < 2 * FEWEST or len(known) < len(pairs):
        return None
    half = len(known) // 2
    early, late = known[:half], known[half:]
    for run in (1, 2):
        noise = stdev(row[run] for row in late) if len(late) > 1 else 0.0
        if median(row[run] for row in late) > median(row[run] for row in early) + noise:
            return None
    apart = [(other - one) / max(abs(one), abs(other), 1e-12) for _, one, other in late]
    return Drift(late[0][0], fmean(apart), stdev(apart) / math.sqrt(len(apart)), len(apart))


# ── one factor over all gradients ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class GradientFactor:
    """One factor between all gradients of two runs: the second's over the first's.

    Args:
        value: the factor.
        of: what was compared: ``gradients`` of one step by their fingerprints, or ``gradient norms`` of all rows.
        count: how many of them.
        equals: settings of either run whose value the factor, or its inverse, is.
    """

    value: float
    of: str
    count: int
    equals: tuple[str, ...] = ()

    def sentence(self, names: tuple[str, str]) -> str:
        known = f", which is {' or '.join(self.equals)}" if self.equals else ""
        return (
            f"all {self.of} of {names[1]} are {self.value:.6g} times those of {names[0]} ({self.count} compared){known}"
        )


def factor_of_tensors(one: Row, other: Row, runs: tuple[Run, Run]) -> GradientFactor | None:
    """The factor between all gradients of one step, by two rows of fingerprints."""
    first, second = one["tensors"], other["tensors"]
    names = [key for key in first if key.startswith("grad:") and key in second and first[key][1] > 0]
    ratios = [second[key][1] / first[key][1] for key in names]
    return _factor(ratios, 2, "gradients", runs)


def factor_of_norms(rows: Sequence[Mapping[int, Row]], runs: tuple[Run, Run]) -> GradientFactor | None:
    """The factor between the gradient norms of all common rows."""
    common = sorted(rows[0].keys() & rows[1].keys())
    pairs = ((number(rows[0][step].get("grad_norm")), number(rows[1][step].get("grad_norm"))) for step in common)
    ratios = [other / one for one, other in pairs if one and other and math.isfinite(one) and math.isfinite(other)]
    return _factor(ratios, FEWEST, "gradient norms", runs)


def _factor(ratios: Sequence[float], fewest: int, of: str, runs: tuple[Run, Run]) -> GradientFactor | None:
    """One factor, where all ratios are one; a few tensors that are zero or not clipped alike may differ."""
    logs = [math.log(ratio) for ratio in ratios if ratio > 0 and math.isfinite(ratio)]
    if len(logs) < fewest:
        return None
    level = median(logs)
    spread = median(abs(log - level) for log in logs)
    if abs(level) < LEAST_FACTOR or spread > SPREAD * min(abs(level), 0.1) or len(logs) < 0.9 * len(ratios):
        return None
    value = math.exp(level)
    return GradientFactor(value, of, len(logs), tuple(_equal_settings(value, runs)))


def _equal_settings(value: float, runs: tuple[Run, Run]) -> Iterator[str]:
    """What a factor may come from: counts of micro-batches and ranks, one more of them, and the loss scale."""
    named: dict[str, float] = {}
    for run in runs:
        config, machine = run.run.get("config") or {}, run.run.get("machine") or {}
        counts = {
            "gradient_accumulation_steps": _number_of(config, "gradient_accumulation_steps"),
            "ranks": _number_of(machine, "ranks"),
        }
        for name, count in counts.items():
            if count is not None and count > 1:
                named |= {f"{name} = {count:g}": count, f"{name} + 1 = {count + 1:g}": count + 1}
        scale = next((number(row.get("loss_scale")) for row in run.steps if row.get("loss_scale")), None)
        if scale is not None and scale > 1:
            named[f"the loss scale {scale:g}"] = scale
    for name, count in named.items():
        if abs(value / count - 1) < _EQUAL:
            yield name
        elif abs(value * count - 1) < _EQUAL:
            yield f"1 over {name}"


def _number_of(table: Mapping[str, Any], name: str) -> float | None:
    return number(table.get(name))
