"""What a sign is, and what looking for it gives.

A sign is one thing that a record shows or does not. Where the record does not hold what the sign reads, it is unknown, and the
sign names what would record that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from narrowgauge.analysis.diagnosis.evidence import Evidence

State = Literal["present", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What looking for a sign has given.

    Args:
        state: the record shows it, shows that it is not there, or does not hold what it takes to know.
        step: the first step at which it shows.
        sentence: what shows, without a full stop.
        base_rate: share of healthy runs of this length that show it.
    """

    state: State
    sign: str = ""
    step: int | None = None
    tensor: str | None = None
    value: float | None = None
    threshold: float | None = None
    sentence: str = ""
    base_rate: float = 0.0


ABSENT, UNKNOWN = Observation("absent"), Observation("unknown")


def present(
    step: int | None,
    sentence: str,
    tensor: str | None = None,
    value: float | None = None,
    threshold: float | None = None,
) -> Observation:
    """An observation of a sign that is there; :meth:`Sign.observe` adds its name."""
    return Observation("present", "", step, tensor, value, threshold, sentence)


def earliest(
    found: Iterable[tuple[int, str, float | None]], message: str, threshold: float | None = None, least: float = 1
) -> Observation:
    """The earliest of the places at which a sign shows; absent where there are fewer than ``least``.

    Args:
        found: step, tensor (or empty) and value of each place.
        message: what shows, with ``{tensor}``, ``{value}`` and ``{others}``, the number of the other places.

    Example:
        >>> earliest([(20, "input:b", 9.0), (10, "input:a", 7.0)], "{tensor} reaches {value:g}, as {others} more").sentence
        'input:a reaches 7, as 1 more'
    """
    places = list(found)
    if not places or len(places) < least:
        return ABSENT
    step, tensor, value = min(places)
    said = message.format(tensor=tensor, value=value, others=len(places) - 1)
    return present(step, said, tensor or None, value, threshold)


@dataclass(frozen=True, slots=True)
class Sign:
    """One thing that a record shows or does not.

    Args:
        meaning: what it says, one sentence without a full stop.
        reads: what it takes to know, as for :meth:`Evidence.has`: all of them.
        base_rate: share of the healthy runs that show it.
        find: looks for it; called only where the record holds all that it reads.
        needs: what records it, where not every run does: a template of :data:`~narrowgauge.analysis.diagnosis.loop_terms.TERMS`.
        given: a sign of which this one says more: it is unknown unless that one is present, and all its probabilities are
            those among runs that show that one. So nothing is counted twice.
        per_step: how often a step of a healthy run shows it: what is rare is likelier in a long run.
    """

    name: str
    meaning: str
    reads: tuple[str, ...]
    base_rate: float
    find: Callable[[Evidence], Observation]
    needs: str = ""
    given: str = ""
    per_step: float = 0.0

    @property
    def is_of_time(self) -> bool:
        """Whether it is about how long steps take: no fault of the arithmetic makes them longer."""
        return bool({"steps.seconds", "steps.cpu_seconds", "steps.ranks"} & set(self.reads))

    def observe(self, evidence: Evidence) -> Observation:
        """Look for the sign in a run; ``unknown`` where the record does not hold what the sign reads."""
        held = all(evidence.has(read) for read in self.reads)
        base = self.base_rate_over(evidence.num_steps)
        return replace(self.find(evidence) if held else UNKNOWN, sign=self.name, base_rate=base)

    def base_rate_over(self, num_steps: int) -> float:
        """The share of healthy runs of so many steps that show it."""
        return 1 - (1 - self.base_rate) * math.exp(-self.per_step * num_steps)
