"""Compare two runs that should be equal: first difference, its size, and recorded settings that can act there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.analysis.diagnose import loop_of
from narrowgauge.analysis.first_difference import Difference, Parting, find_parting
from narrowgauge.analysis.reading import Reading, reading_table
from narrowgauge.analysis.settings import SettingDifference, acting_at, settings_diff
from narrowgauge.runs.finding import counted
from narrowgauge.runs.fingerprint_rows import in_words
from narrowgauge.runs.record import Run

_NAMED = 6
_REPEAT = "Repeat one run. If its bits come again, look at code, data and seeds outside the record."


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Hold the differences of two runs; ``print`` shows a table.

    Args:
        names: names of the runs.
        parting: the first differences.
        settings: recorded settings, data and software that differ.
        is_complete: both runs finished with equal hashes of the final weights.
        notes: limits of the comparison, a sentence each.
    """

    names: tuple[str, str]
    parting: Parting
    settings: tuple[SettingDifference, ...] = ()
    is_complete: bool = False
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> Difference | None:
        """Return the first difference beyond its bound, else the first; ``None`` if all common records are equal."""
        return self.parting.beyond or self.parting.first

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Return the difference as a reading that expects the first run's value."""
        return () if self.difference is None else (self.difference.reading(self.parting.bound),)

    @property
    def acting(self) -> tuple[SettingDifference, ...]:
        """Return the settings that differ and can act at the stage of the difference."""
        at = self.difference
        return () if at is None else acting_at(self.settings, at.stage, self.is_rounding)

    @property
    def is_rounding(self) -> bool:
        """Return whether the runs differ only within rounding."""
        return self.difference is not None and self.parting.beyond is None

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        common, at = counted(self.parting.num_common, "step"), self.difference
        if at is None:
            if self.is_complete:
                return "The same run, bit for bit to the last weight."
            if not self.parting.num_common:
                return "Cannot compare the records because they have no step in common."
            return f"The same in all that both recorded ({common})."
        size = " by rounding" if self.is_rounding else " beyond rounding" if at is not self.parting.first else ""
        ranks = f" of {in_words(at.ranks)}" if at.ranks else ""
        return f"The runs first differ{size} at step {at.step}, in {at.place}{ranks}."

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        at, first, acting = self.difference, self.parting.first, self.acting
        return {
            "runs": list(self.names),
            "verdict": self.verdict,
            "same": at is None,
            "readings": [reading.to_dict() for reading in self.readings],
            "ranks": list(at.ranks) if at else [],
            "is_rounding": self.is_rounding,
            "rounding_since": first.step if first is not None and first is not at else None,
            "settings": [asdict(setting) | {"acts": setting in acting} for setting in self.settings],
            "num_common": self.parting.num_common,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{' and '.join(self.names)}: {self.verdict}"]
        if self.readings:
            lines += reading_table(self.readings).plain().splitlines()
        return "\n".join([*lines, *_sentences(self), *(f"Note: {note}." for note in self.notes)])


def _sentences(pair: TwoRuns) -> Iterator[str]:
    at, first, acting = pair.difference, pair.parting.first, pair.acting
    inactive = [setting for setting in pair.settings if setting not in acting]
    if at is None:
        if pair.settings:
            yield f"Recorded settings that differ: {_listed(pair.settings)}."
        return
    if at.only_in is not None:
        yield f"Only {pair.names[at.only_in]} has {at.tensor}."
    if math.isfinite(at.relative) and at.values[0] != at.values[1]:
        is_known = math.isfinite(pair.parting.bound)
        bound = f"rounding reaches {pair.parting.bound:.2g}" if is_known else "the step before was not hashed"
        shared = "" if at.common == 1 else f", beside the factor {at.common:.6g} of all gradients"
        yield f"The relative difference is {at.relative:.2g}{shared}; {bound}."
    if first is not None and first is not at:
        yield f"By rounding they differ since step {first.step}, first in {first.place}."
    if acting:
        yield f"Recorded settings that differ and can act there: {_listed(acting)}."
    else:
        yield f"No recorded setting that differs can act there. {_REPEAT}"
    if inactive:
        yield f"They differ too, and cannot act there: {_listed(inactive)}."


def _listed(settings: Sequence[SettingDifference]) -> str:
    more = len(settings) - _NAMED
    return ", ".join(map(str, settings[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def compare_two(first_run: Run, second_run: Run) -> TwoRuns:
    """Find the first difference of two runs from their records, finished or not."""
    runs, parting = (first_run, second_run), find_parting(first_run, second_run)
    ends = [(run.summary or {}).get("weights_fingerprint") for run in runs]
    names = first_run.path.name, second_run.path.name
    return TwoRuns(
        names if names[0] != names[1] else (str(first_run.path), str(second_run.path)),
        parting,
        tuple(settings_diff(first_run.run, second_run.run)),
        None not in ends and ends[0] == ends[1],
        tuple(_notes(runs, parting)),
    )


def _notes(runs: Sequence[Run], parting: Parting) -> Iterator[str]:
    lengths = [len(run.steps) for run in runs]
    if parting.num_common and lengths[0] != lengths[1]:
        yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {parting.num_common} are common"
    if not all(run.run.get("config") or run.run.get("versions") for run in runs):
        yield "one of them has neither settings nor versions in its record"
    at = parting.beyond or parting.first
    if at is not None and at.what in ("loss", "grad_norm") and not parting.is_hashed:
        flag = "ng.RunRecorder(…, fingerprints_every=1)"
        if all(loop_of(run) == "trainer" for run in runs):
            flag = "--fingerprints-every 1"
        yield f"the tensor is not recorded: repeat both up to step {at.step} with {flag}"
