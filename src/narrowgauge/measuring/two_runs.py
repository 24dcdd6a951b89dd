"""Compare two runs that should be equal: the first difference, its size, and the recorded settings
that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowgauge.measuring.first_difference import (
    AGREES,
    LEAST,
    factor_of,
    first_difference,
    other_numbers,
    records_of,
    roundoff,
)
from narrowgauge.measuring.reading import Reading, Readings
from narrowgauge.measuring.settings import settings_diff
from narrowgauge.runs.finding import counted, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

_NAMED = 6


class TwoRuns(Readings):
    """Find the first difference of two runs from their records, finished or not; ``print`` shows a
    table.

    Attributes:
        readings: of the first step that differs, the first difference beyond its rounding, else the
            first. It expects the first run's value.
        is_rounding: the runs differ only within rounding, both round alike, and every recorded
            number of that step agrees.
        is_complete: both runs finished with equal hashes of the final weights.
        factor: of all gradients of that step, second run over first, if they share one; else 1.
        unlike: other recorded numbers of that step that differ by more than 5 %.
        num_common: number of steps that both recorded.
        settings: recorded settings, data and software that differ.
        verdict: the result in one sentence.
    """

    def __init__(self, first: Run, second: Run) -> None:
        super().__init__()
        units = roundoff(first), roundoff(second)
        steps = [{row["step"] for row in run.steps} for run in (first, second)]
        self.num_common = len(steps[0] & steps[1])
        self.factor = 1.0
        self.unlike: list[str] = []
        self._search(records_of(first), records_of(second), max(units))
        ends = [(run.summary or {}).get("weights_fingerprint") for run in (first, second)]
        self.is_complete = None not in ends and ends[0] == ends[1]
        if not self.readings and None not in ends and not self.is_complete:
            stage = "optimizer step"
            self.readings = [Reading(self.num_common, stage, "", "weights_fingerprint")]
        agrees = not self.unlike and abs(self.factor - 1) < AGREES and units[0] == units[1]
        self.is_rounding = agrees and any(reading.excess <= 1 for reading in self.readings)
        self.names = [run.path.name for run in (first, second)]
        if self.names[0] == self.names[1]:
            self.names = [str(run.path) for run in (first, second)]
        self.settings = settings_diff(first.run, second.run)
        self.verdict = self._verdict()
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}"]

    def _search(self, first: dict[int, Row], second: dict[int, Row], u: float) -> None:
        """Find the first step that differs, and read its numbers."""
        for step in sorted(first.keys() & second.keys()):
            rows = first[step], second[step]
            difference = first_difference(step, *rows, u)
            if difference is not None:
                self.readings = [difference]
                self.factor = factor_of(*rows)
                self.unlike = list(other_numbers(*rows))
                break

    def _verdict(self) -> str:
        if self.readings:
            at = self.readings[0]
            size = " by rounding" if self.is_rounding else ""
            place = f"{at.tensor or at.what} ({at.stage})"
            return f"The runs first differ{size} at step {at.step}, in {place}."
        if self.is_complete:
            return "The same run, bit for bit to the last weight."
        if not self.num_common:
            return "Cannot compare the records because they have no step in common."
        common = counted(self.num_common, "step")
        return f"The same in all that both recorded ({common})."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        return super().to_dict() | {
            "runs": self.names,
            "verdict": self.verdict,
            "same": not self.readings,
            "is_rounding": self.is_rounding,
            "factor": self.factor,
            "settings": self.settings,
            "num_common": self.num_common,
        }

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._told()])

    def _told(self) -> Iterator[str]:
        """Yield the sentences below the table."""
        for at in self.readings:
            if at.what == "only-in-one-run":
                yield f"Only {self.names[int(at.value or 0)]} has {at.tensor}."
        if abs(self.factor - 1) > LEAST:
            yield f"All gradients of {self.names[1]} are {self.factor:.6g} times the others."
        if self.unlike:
            yield f"Other recorded numbers of the step differ: {', '.join(self.unlike)}."
        if self.settings:
            words = [f"{name} {a} and {b}" for name, (a, b) in self.settings.items()]
            yield f"Recorded settings that differ: {told(words, _NAMED)}."
        elif self.readings:
            yield "No recorded setting differs."
