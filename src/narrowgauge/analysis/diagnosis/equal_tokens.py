"""Two runs at equal tokens: where a step of one is not a step of the other, the losses of the same amount of text.

Runs with other batches, or another length of sequences, take other numbers of steps for the same tokens. Their rows count the
tokens seen, so wherever both have seen equally many, the mean losses since the last such place are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from narrowgauge.analysis.monitor.features import number
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


@dataclass(frozen=True, slots=True)
class EqualTokens:
    """The losses of two runs between the places at which both have seen equally many tokens.

    Args:
        steps: of each run, those that end at these places.
        tokens: that both have seen there.
        losses: for each place, the mean loss in nats per token of both runs since the place before.
    """

    steps: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    losses: tuple[tuple[float, float], ...]

    @property
    def differences(self) -> list[float]:
        """The loss of the second run minus that of the first, for each place."""
        return [other - one for one, other in self.losses if math.isfinite(one) and math.isfinite(other)]

    @property
    def mean(self) -> float:
        """The mean of :attr:`differences`; NaN of none."""
        return _mean(self.differences)

    @property
    def error(self) -> float:
        """The standard error of :attr:`mean`, as if places were independent; NaN below two."""
        found = self.differences
        if len(found) < 2:
            return math.nan
        mean = _mean(found)
        return math.sqrt(sum((each - mean) ** 2 for each in found) / (len(found) - 1) / len(found))

    def __str__(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        where = f"steps {first[0]} and {first[1]} to steps {last[0]} and {last[1]}"
        places = f"{len(self.steps)} place{'s' if len(self.steps) != 1 else ''}"
        said = f"at equal tokens ({places}, {where}, {self.tokens[-1]:,} tokens)"
        if not self.differences:
            return f"{said} no loss is recorded of both"
        spread = "" if math.isnan(self.error) else f" ± {self.error:.2g}"
        return f"{said} the loss of the second minus that of the first is {self.mean:+.2g}{spread} nats per token"

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        return {
            "places": len(self.steps),
            "last_steps": list(self.steps[-1]),
            "last_tokens": self.tokens[-1],
            "loss_difference": None if math.isnan(self.mean) else self.mean,
            "standard_error": None if math.isnan(self.error) else self.error,
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def have_other_tokens(one: Run, other: Run) -> bool:
    """Whether a step of one run has seen other tokens than the same step of the other, or a record does not count them alike."""
    counts = [{int(row["step"]): number(row.get("tokens")) for row in run.steps} for run in (one, other)]
    both = [(counts[0][step], counts[1][step]) for step in counts[0].keys() & counts[1].keys()]
    return any(mine is not None and its is not None and mine != its for mine, its in both)


def at_equal_tokens(one: Run, other: Run) -> EqualTokens | None:
    """Compare two runs at equal tokens.

    Args:
        one, other: their records; rows without ``tokens`` do not count.
    Returns:
        The losses, or ``None`` where they have never seen equally many tokens.
    Cost: one pass over the rows.
    """
    seen = [
        {int(count): place for place, count in enumerate(_tokens(run)) if count is not None} for run in (one, other)
    ]
    common = sorted(seen[0].keys() & seen[1].keys())
    common = [count for count in common if count > 0]
    if not common:
        return None
    steps = tuple((int(one.steps[seen[0][n]]["step"]), int(other.steps[seen[1][n]]["step"])) for n in common)
    means = [list(_means(run.steps, [mine[n] for n in common])) for run, mine in zip((one, other), seen, strict=True)]
    return EqualTokens(steps, tuple(common), tuple(zip(*means, strict=True)))


def _tokens(run: Run) -> Iterator[float | None]:
    counts = (number(row.get("tokens")) for row in run.steps)
    return (count if count is not None and math.isfinite(count) else None for count in counts)


def _means(rows: Sequence[Row], ends: Sequence[int]) -> Iterator[float]:
    """The mean loss of the rows up to each end, since the end before; rows of one run have equally many tokens."""
    for start, end in pairwise([-1, *ends]):
        losses = [number(row.get("loss")) for row in rows[start + 1 : end + 1]]
        known = [loss for loss in losses if loss is not None]
        yield _mean(known)
