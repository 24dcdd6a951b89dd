"""Compare two runs that should be equal: first difference, its size, and recorded settings that can
act there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from narrowgauge.analysis.columns import loop_of
from narrowgauge.analysis.first_difference import ends_of, find_parting, roundoff
from narrowgauge.analysis.reading import Readings
from narrowgauge.analysis.settings import SettingDifference, acting_at, settings_diff
from narrowgauge.runs.finding import counted, listed
from narrowgauge.runs.record import Run

_NAMED = 6
_REPEAT = "Repeat one run. If its bits come again, look at code, data and seeds outside the record."


class TwoRuns(Readings):
    """Find the first difference of two runs from their records, finished or not; ``print`` shows a
    table.

    Attributes:
        difference: the first beyond its bound, else the first of any size; ``None`` if all common
            records are equal.
        readings: the difference as a reading that expects the first run's value.
        is_rounding: the runs differ only within rounding, and both round alike.
        is_complete: both runs finished with equal hashes of the final weights.
        settings: recorded settings, data and software that differ.
        acting: those that can act at the stage of the difference.
        notes: limits of the comparison, a sentence each.
    """

    def __init__(self, first_run: Run, second_run: Run) -> None:
        runs = first_run, second_run
        self.parting = parting = find_parting(*runs)
        self.difference = at = parting.beyond or parting.first
        super().__init__()
        self.acting: tuple[SettingDifference, ...] = ()
        rounds_alike = roundoff(first_run) == roundoff(second_run)
        self.is_rounding = at is not None and parting.beyond is None and rounds_alike
        ends = ends_of(*runs)
        self.is_complete = None not in ends and ends[0] == ends[1]
        self.names = first_run.path.name, second_run.path.name
        if self.names[0] == self.names[1]:
            self.names = str(first_run.path), str(second_run.path)
        self.settings = tuple(settings_diff(first_run.run, second_run.run))
        if at is not None:
            self.readings = [at.reading(parting.bound)]
            self.acting = acting_at(self.settings, at.stage, self.is_rounding)
        self.notes = list(self._notes(runs))
        self.lines = [f"{' and '.join(self.names)}: {self.verdict}"]

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        common = counted(self.parting.num_common, "step")
        at = self.difference
        if at is None:
            if self.is_complete:
                return "The same run, bit for bit to the last weight."
            if not self.parting.num_common:
                return "Cannot compare the records because they have no step in common."
            return f"The same in all that both recorded ({common})."
        size = ""
        if self.is_rounding:
            size = " by rounding"
        elif self.parting.beyond is None:
            size = ", each within its own rounding,"
        elif at is not self.parting.first:
            size = " beyond rounding"
        ranks = ""
        if at.ranks:
            unit = "rank" if len(at.ranks) == 1 else "ranks"
            ranks = f" of {unit} {listed(map(str, at.ranks))}"
        return f"The runs first differ{size} at step {at.step}, in {at.place}{ranks}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        at = self.difference
        first = self.parting.first
        settings = []
        for setting in self.settings:
            settings.append(asdict(setting) | {"acts": setting in self.acting})
        return {
            "runs": list(self.names),
            "verdict": self.verdict,
            "same": at is None,
            "readings": list(map(asdict, self.readings)),
            "ranks": list(at.ranks) if at else [],
            "is_rounding": self.is_rounding,
            "rounding_since": first.step if first is not None and first is not at else None,
            "settings": settings,
            "num_common": self.parting.num_common,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [super().__str__(), *self._sentences()]
        for note in self.notes:
            lines.append(f"Note: {note}.")
        return "\n".join(lines)

    def _sentences(self) -> Iterator[str]:
        at = self.difference
        first = self.parting.first
        bound = self.parting.bound
        if at is None:
            if self.settings:
                yield f"Recorded settings that differ: {_listed(self.settings)}."
            return
        if at.only_in is not None:
            yield f"Only {self.names[at.only_in]} has {at.tensor}."
        if math.isfinite(at.relative) and at.values[0] != at.values[1]:
            sentence = f"The relative difference is {at.relative:.2g}"
            if at.common != 1:
                sentence += f", beside the factor {at.common:.6g} of all gradients"
            if math.isfinite(bound):
                yield f"{sentence}; rounding reaches {bound:.2g}."
            else:
                yield f"{sentence}; the step before was not hashed."
        if first is not None and first is not at:
            yield f"By rounding they differ since step {first.step}, first in {first.place}."
        if self.acting:
            yield f"Recorded settings that differ and can act there: {_listed(self.acting)}."
        else:
            yield f"No recorded setting that differs can act there. {_REPEAT}"
        inactive = [setting for setting in self.settings if setting not in self.acting]
        if inactive:
            yield f"They differ too, and cannot act there: {_listed(inactive)}."

    def _notes(self, runs: Sequence[Run]) -> Iterator[str]:
        lengths = [len(run.steps) for run in runs]
        at = self.difference
        if self.parting.num_common and lengths[0] != lengths[1]:
            yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {self.parting.num_common} are common"
        if not all(run.run.get("config") or run.run.get("versions") for run in runs):
            yield "one of them has neither settings nor versions in its record"
        if at is not None and at.what in ("loss", "grad_norm") and not self.parting.is_hashed:
            flag = "ng.RunRecorder(…, fingerprints_every=1)"
            if all(loop_of(run) == "trainer" for run in runs):
                flag = "--fingerprints-every 1"
            yield f"the tensor is not recorded: repeat both up to step {at.step} with {flag}"


def _listed(settings: Sequence[SettingDifference]) -> str:
    names = list(map(str, settings[:_NAMED]))
    if len(settings) > _NAMED:
        names[-1] += f" and {len(settings) - _NAMED} more"
    return ", ".join(names)
