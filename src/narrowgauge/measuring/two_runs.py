"""Compare two runs that should be equal: the first difference, its size, and the recorded settings
that differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowgauge.measuring.first_difference import (
    AGREES,
    LEAST,
    Difference,
    factor_of,
    first_difference,
    odd_ranks,
    other_numbers,
    records_of,
    roundoff,
)
from narrowgauge.measuring.reading import Readings
from narrowgauge.measuring.settings import settings_diff
from narrowgauge.runs.finding import counted, listed, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, step_of

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
        ranks: that alone differ in this kind of tensor; empty if all differ or unknown.
        factor: of all gradients of that step, second run over first, if they share one; else 1.
        unlike: other recorded numbers of that step that differ by more than 5 %.
        num_common: number of steps that both recorded.
        settings: recorded settings, data and software that differ.
        verdict: the result in one sentence.
    """

    difference: Difference | None
    ranks: list[int]
    unlike: list[str]
    factor: float
    num_common: int
    _rows: tuple[Row, Row]
    _last_losses: list[float | None]

    def __init__(self, first_run: Run, second_run: Run) -> None:
        super().__init__()
        runs = first_run, second_run
        units = roundoff(first_run), roundoff(second_run)
        self._search(runs, max(units))
        ends = [(run.summary or {}).get("weights_fingerprint") for run in runs]
        self.is_complete = None not in ends and ends[0] == ends[1]
        if self.difference is None and None not in ends and not self.is_complete:
            self.difference = Difference(self.num_common, "weights_fingerprint")
        self.bound = 0.0
        self.is_within = self.is_rounding = False
        if self.difference is not None:
            self.readings = [self.difference.reading(max(units))]
            self.bound = self.difference.rounding(max(units))
            self.is_within = self.difference.relative <= self.bound
            agrees = not self.unlike and abs(self.factor - 1) < AGREES
            self.is_rounding = self.is_within and agrees and units[0] == units[1]
        self.names = [run.path.name for run in runs]
        if self.names[0] == self.names[1]:
            self.names = [str(run.path) for run in runs]
        self.settings = tuple(settings_diff(first_run.run, second_run.run))
        self.verdict = self._verdict()
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}"]

    def _search(self, runs: tuple[Run, Run], u: float) -> None:
        """Find the first step that differs, and read its numbers."""
        self.difference = None
        self.factor = 1.0
        self.ranks = []
        self.unlike = []
        self._rows = {}, {}
        first, second = map(records_of, runs)
        steps = [set(map(step_of, run.steps)) for run in runs]
        self.num_common = len(steps[0] & steps[1])
        common = sorted(first.keys() & second.keys())
        for step in common:
            self._rows = first[step], second[step]
            self.difference = first_difference(step, *self._rows, u)
            if self.difference is not None:
                self.factor = factor_of(*self._rows)
                self.ranks = odd_ranks(*self._rows, self.difference.kind)
                self.unlike = list(other_numbers(*self._rows))
                break
        self._last_losses = [record[common[-1]].get("loss") for record in (first, second) if common]

    def _verdict(self) -> str:
        common = counted(self.num_common, "step")
        at = self.difference
        if at is None:
            if self.is_complete:
                return "The same run, bit for bit to the last weight."
            if not self.num_common:
                return "Cannot compare the records because they have no step in common."
            return f"The same in all that both recorded ({common})."
        size = ""
        if self.is_rounding:
            size = " by rounding"
        elif self.is_within:
            size = ", each within its own rounding,"
        ranks = ""
        if self.ranks:
            ranks = f" of rank {listed(map(str, self.ranks))}"
        return f"The runs first differ{size} at step {at.step}, in {at.key} ({at.stage}){ranks}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        return super().to_dict() | {
            "runs": self.names,
            "verdict": self.verdict,
            "same": self.difference is None,
            "ranks": self.ranks,
            "is_rounding": self.is_rounding,
            "factor": self.factor,
            "settings": [setting._asdict() for setting in self.settings],
            "num_common": self.num_common,
        }

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *self._told()])

    def _told(self) -> Iterator[str]:
        """Yield the sentences below the table."""
        at = self.difference
        if at is None and not self.settings:
            return
        if at is not None and at.only_in is not None:
            yield f"Only {self.names[at.only_in]} has {at.key}."
        if at is not None and math.isfinite(at.relative):
            words = f"The relative difference is {at.relative:.2g}"
            yield f"{words}; rounding reaches {self.bound:.2g}."
        if abs(self.factor - 1) > LEAST:
            yield f"All gradients of {self.names[1]} are {self.factor:.6g} times the others."
        if self.unlike:
            yield f"Other recorded numbers of the step differ: {', '.join(self.unlike)}."
        if self.is_within and None not in self._last_losses:
            first, second = self._last_losses
            yield f"Their last losses are {first:.6g} and {second:.6g}."
        if self.settings:
            yield f"Recorded settings that differ: {told(map(str, self.settings), _NAMED)}."
        else:
            yield "No recorded setting differs."
        is_hashed = all("tensors" in row for row in self._rows)
        if at is not None and at.key in ("loss", "grad_norm") and not is_hashed:
            yield (
                f"Note: the tensor is not recorded: repeat both up to step {at.step} and record "
                "each step (fingerprints_every=1)."
            )
