"""Compare two runs that should be equal: the first difference, its size, and the recorded settings
that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
        difference: of the first step that differs, the first beyond its rounding, else the first;
            ``None`` if all common records are equal.
        readings: the difference as a reading that expects the first run's value.
        is_rounding: the runs differ only within rounding, both round alike, and every recorded
            number of that step agrees.
        is_complete: both runs finished with equal hashes of the final weights.
        settings: recorded settings, data and software that differ.
        verdict: the result in one sentence.
    """

    def __init__(self, first_run: Run, second_run: Run) -> None:
        runs = first_run, second_run
        self.search = search = Search(*runs)
        self.difference = at = search.at
        super().__init__([] if at is None else [at.reading(search.bound)])
        agrees = not search.unlike and abs(search.factor - 1) < AGREES
        round_alike = roundoff(first_run) == roundoff(second_run)
        self.is_rounding = search.is_within and agrees and round_alike
        ends = ends_of(*runs)
        self.is_complete = None not in ends and ends[0] == ends[1]
        self.names = [run.path.name for run in runs]
        if self.names[0] == self.names[1]:
            self.names = [str(run.path) for run in runs]
        self.settings = tuple(settings_diff(first_run.run, second_run.run))
        self.verdict = self._verdict()
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}"]
        flag = "ng.RunRecorder(…, fingerprints_every=1)"
        if all(loop_of(run) == "trainer" for run in runs):
            flag = "--fingerprints-every 1"
        self._sentences = list(self._told(flag))

    def _verdict(self) -> str:
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
        elif self.search.is_within:
            size = ", each within its own rounding,"
        ranks = ""
        if self.search.ranks:
            ranks = f" of rank {listed(map(str, self.search.ranks))}"
        return f"The runs first differ{size} at step {at.step}, in {at.key} ({at.stage}){ranks}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        return super().to_dict() | {
            "runs": self.names,
            "verdict": self.verdict,
            "same": self.difference is None,
            "ranks": self.search.ranks,
            "is_rounding": self.is_rounding,
            "factor": self.search.factor,
            "settings": [setting._asdict() for setting in self.settings],
            "num_common": self.search.num_common,
        }

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._sentences])

    def _told(self, flag: str) -> Iterator[str]:
        """Yield the sentences below the table.

        Args:
            flag: records the fingerprints of every step.
        """
        at = self.difference
        search = self.search
        if at is not None and at.only_in is not None:
            yield f"Only {self.names[at.only_in]} has {at.key}."
        if at is not None and math.isfinite(at.relative):
            yield (
                f"The relative difference is {at.relative:.2g}; rounding reaches {search.bound:.2g}."
            )
        if abs(search.factor - 1) > LEAST:
            yield f"All gradients of {self.names[1]} are {search.factor:.6g} times the others."
        if search.unlike:
            yield f"Other recorded numbers of the step differ: {', '.join(search.unlike)}."
        if search.is_within and None not in search.losses:
            yield "Their last losses are {:.6g} and {:.6g}.".format(*search.losses)
        if self.settings:
            yield f"Recorded settings that differ: {told(map(str, self.settings), _NAMED)}."
        elif at is not None:
            yield "No recorded setting differs."
        if at is not None and at.key in ("loss", "grad_norm") and not search.is_hashed:
            yield f"Note: the tensor is not recorded: repeat both up to step {at.step} with {flag}."
