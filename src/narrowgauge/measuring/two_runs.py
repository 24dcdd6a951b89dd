"""Compare two runs that should be equal: the first difference, its size, and the recorded settings
that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from narrowgauge.measuring.columns import loop_of
from narrowgauge.measuring.first_difference import AGREES, LEAST, Search, ends_of, roundoff
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.settings import settings_diff
from narrowgauge.runs.finding import counted, listed, told
from narrowgauge.runs.record import Run

_NAMED = 6


class TwoRuns(Readings):
    """Find the first difference of two runs from their records, finished or not; ``print`` shows a
    table.

    Attributes:
        difference: the first beyond its bound, else the first of any size; ``None`` if all common
            records are equal.
        readings: the difference as a reading that expects the first run's value.
        is_rounding: the runs differ only within rounding, both round alike, and every recorded
            number of that step agrees.
        is_complete: both runs finished with equal hashes of the final weights.
        settings: recorded settings, data and software that differ.
        notes: limits of the comparison, a sentence each.
    """

    def __init__(self, first_run: Run, second_run: Run) -> None:
        runs = first_run, second_run
        self.search = search = Search(*runs)
        self.difference = at = search.at
        super().__init__()
        is_within = search.beyond is None and roundoff(first_run) == roundoff(second_run)
        agrees = not search.unlike and abs(search.factor - 1) < AGREES
        self.is_rounding = at is not None and is_within and agrees
        ends = ends_of(*runs)
        self.is_complete = None not in ends and ends[0] == ends[1]
        self.names = first_run.path.name, second_run.path.name
        if self.names[0] == self.names[1]:
            self.names = str(first_run.path), str(second_run.path)
        self.settings = tuple(settings_diff(first_run.run, second_run.run))
        if at is not None:
            self.readings = [at.reading(search.bound)]
        self.notes = list(self._notes(runs))
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}"]

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        common = counted(self.search.num_common, "step")
        at = self.difference
        if at is None:
            if self.is_complete:
                return "The same run, bit for bit to the last weight."
            if not self.search.num_common:
                return "Cannot compare the records because they have no step in common."
            return f"The same in all that both recorded ({common})."
        size = ""
        if self.is_rounding:
            size = " by rounding"
        elif self.search.beyond is None:
            size = ", each within its own rounding,"
        elif at is not self.search.first:
            size = " beyond rounding"
        ranks = ""
        if at.ranks:
            ranks = f" of rank {listed(map(str, at.ranks))}"
        return f"The runs first differ{size} at step {at.step}, in {at.place}{ranks}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        at = self.difference
        return super().to_dict() | {
            "runs": list(self.names),
            "verdict": self.verdict,
            "same": at is None,
            "ranks": list(getattr(at, "ranks", ())),
            "is_rounding": self.is_rounding,
            "factor": self.search.factor,
            "settings": list(map(asdict, self.settings)),
            "num_common": self.search.num_common,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [super().__str__(), *self._sentences()]
        for note in self.notes:
            lines.append(f"Note: {note}.")
        return "\n".join(lines)

    def _sentences(self) -> Iterator[str]:
        at = self.difference
        search = self.search
        if at is not None and at.only_in is not None:
            yield f"Only {self.names[at.only_in]} has {at.tensor}."
        if at is not None and math.isfinite(at.relative):
            reach = "the step before was not hashed"
            if math.isfinite(search.bound):
                reach = f"rounding reaches {search.bound:.2g}"
            yield f"The relative difference is {at.relative:.2g}; {reach}."
        if abs(search.factor - 1) > LEAST:
            yield f"All gradients of {self.names[1]} are {search.factor:.6g} times the others."
        if search.unlike:
            yield f"Other recorded numbers of the step differ: {', '.join(search.unlike)}."
        if search.first is not None and search.first is not at:
            first = search.first
            yield f"By rounding they differ since step {first.step}, first in {first.place}."
        if self.settings:
            yield f"Recorded settings that differ: {told(map(str, self.settings), _NAMED)}."
        elif at is not None:
            yield "No recorded setting differs."

    def _notes(self, runs: Sequence[Run]) -> Iterator[str]:
        at = self.difference
        if at is not None and at.what in ("loss", "grad_norm") and not self.search.is_hashed:
            flag = "ng.RunRecorder(…, fingerprints_every=1)"
            if all(loop_of(run) == "trainer" for run in runs):
                flag = "--fingerprints-every 1"
            yield f"the tensor is not recorded: repeat both up to step {at.step} with {flag}"
