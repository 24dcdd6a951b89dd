"""Compare two runs that should be equal: first difference, its size, and recorded settings that can act there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from narrowgauge.analysis.diagnose import effective_rate, loop_of, rows_of
from narrowgauge.analysis.first_difference import Difference, Parting, find_parting
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, reading_table
from narrowgauge.analysis.settings import SettingDifference, acting_at, counts_of, recipe_of, settings_diff
from narrowgauge.runs.finding import counted
from narrowgauge.runs.fingerprint_rows import in_words
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number, step_of
from narrowgauge.spec.significance import MIN_EDQ

FEWEST = 8
"""Minimum number of common rows, or half of them, to separate a drift from noise and a factor from chance."""
MIN_DRIFT, SIGMAS = 0.03, 6.0
"""Minimum mean relative difference of two losses, and its standard errors from zero. Rounding does not grow to this."""
MIN_FACTOR, SPREAD = 0.005, 0.2
"""Minimum relative distance of a factor from 1, and maximum spread of the single ratios over that distance."""
_EQUAL = 2e-3
"""Relative difference up to which a factor equals a number from the settings."""
_NAMED = 6
_DAMAGE = "other code or damaged memory. Repeat one run once: damage does not come twice."
_VARIES = "a sum whose order varies. Repeat one run once: then it differs from itself."


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Hold the differences of two runs; ``print`` shows a table.

    Args:
        names: names of the runs.
        readings: the first difference beyond its bound, or else the first. Then the drift between losses and a common factor
            of all gradients, if any. Each reading expects the first run's value.
        parting: the difference behind the first reading.
        settings: recorded settings, data and software that differ.
        acting: members of ``settings`` that can act at the stage of the first difference.
        is_complete: both runs finished with equal hashes of the final weights.
        notes: limits of the comparison, a sentence each.
    """

    names: tuple[str, str]
    readings: tuple[Reading, ...]
    parting: Parting
    settings: tuple[SettingDifference, ...] = ()
    acting: tuple[SettingDifference, ...] = ()
    is_complete: bool = False
    notes: tuple[str, ...] = ()

    @property
    def difference(self) -> Difference | None:
        """Return the first difference beyond its bound, else the first; ``None`` if all common records are equal."""
        return self.parting.beyond or self.parting.first

    @property
    def is_rounding(self) -> bool:
        """Return whether the runs differ only within rounding."""
        return bool(self.readings) and len(self.readings) == 1 and self.parting.beyond is None

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        common, at = counted(self.parting.num_common, "step"), self.difference
        if at is None:
            if self.is_complete:
                return "The same run, bit for bit to the last weight."
            if not self.parting.num_common and not self.parting.is_hashed:
                return "Cannot compare the records because they have no step in common."
            return f"The same in all that both recorded ({common})."
        size = "by rounding" if self.is_rounding else "beyond rounding" if at is not self.parting.first else ""
        ranks = f" of {in_words(at.ranks)}" if at.ranks else ""
        words = ["The runs first differ", *([size] if size else []), f"at step {at.step}, in {at.place}{ranks}."]
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        at, first = self.difference, self.parting.first
        acts = set(map(str, self.acting))
        return {
            "runs": list(self.names),
            "verdict": self.verdict,
            "same": at is None,
            "readings": [reading.to_dict() for reading in self.readings],
            "ranks": list(at.ranks) if at else [],
            "is_rounding": self.is_rounding,
            "rounding_since": first.step if first is not None and first is not at else None,
            "settings": [
                {
                    "name": setting.name,
                    "table": setting.table,
                    "values": list(setting.values),
                    "acts": str(setting) in acts,
                }
                for setting in self.settings
            ],
            "num_common": self.parting.num_common,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{' and '.join(self.names)}: {self.verdict}"]
        if self.readings:
            lines += reading_table(self.readings).plain().splitlines()
        lines += [*_sentences(self), *(reading.advice for reading in self.readings if reading.advice)]
        return "\n".join(lines + [f"Note: {note}." for note in self.notes])


def _sentences(pair: TwoRuns) -> Iterator[str]:
    at, first = pair.difference, pair.parting.first
    inactive = [setting for setting in pair.settings if setting not in pair.acting]
    if at is None:
        if pair.settings:
            yield f"Recorded settings that differ: {_listed(pair.settings)}."
        return
    if at.note:
        yield f"{at.note[:1].upper()}{at.note[1:].rstrip('.')}."
    elif at.only_in is not None:
        yield f"Only {pair.names[at.only_in]} has {at.tensor}."
    if math.isfinite(at.relative) and at.values != (at.values[0], at.values[0]):
        is_known = math.isfinite(pair.parting.bound)
        bound = f"rounding reaches {pair.parting.bound:.2g}" if is_known else "the step before was not hashed"
        yield f"The relative difference is {at.relative:.2g}; {bound}."
    if first is not None and first is not at:
        yield f"By rounding they differ since step {first.step}, first in {first.place}."
    if pair.acting:
        yield f"Recorded settings that differ and can act there: {_listed(pair.acting)}."
    else:
        yield f"No recorded setting that differs can act there: {_VARIES if pair.is_rounding else _DAMAGE}"
    if inactive:
        yield f"They differ too, and cannot act there: {_listed(inactive)}."


def _listed(settings: Sequence[SettingDifference]) -> str:
    more = len(settings) - _NAMED
    return ", ".join(map(str, settings[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def compare_two(first_run: Run, second_run: Run) -> TwoRuns:
    """Find the first difference of two runs from their records, finished or not."""
    parting = find_parting(first_run, second_run)
    at, settings = parting.beyond or parting.first, tuple(settings_diff(first_run.run, second_run.run))
    ends = [(run.summary or {}).get("weights_fingerprint") for run in (first_run, second_run)]
    names = (
        (first_run.path.name, second_run.path.name)
        if first_run.path.name != second_run.path.name
        else (str(first_run.path), str(second_run.path))
    )
    if at is None:
        return TwoRuns(
            names,
            (),
            parting,
            settings,
            (),
            None not in ends and ends[0] == ends[1],
            tuple(_notes(first_run, second_run)),
        )
    rows = [{step_of(row): row for row in run.steps} for run in (first_run, second_run)]
    extra = (
        _effective(first_run, second_run, names),
        _drift(rows, at.step),
        _factor(at, (first_run, second_run), rows),
    )
    more = [reading for reading in extra if reading is not None]
    is_rounding = parting.beyond is None and not more
    readings = (at.reading(parting.bound), *more)
    acting = acting_at(settings, at.stage, is_rounding)
    notes = (*_notes(first_run, second_run), *_to_record(first_run, second_run, parting))
    return TwoRuns(names, readings, parting, settings, acting, False, notes)


def _notes(first_run: Run, second_run: Run) -> Iterator[str]:
    lengths = [len(run.steps) for run in (first_run, second_run)]
    common = {step_of(row) for row in first_run.steps} & {step_of(row) for row in second_run.steps}
    if common and lengths[0] != lengths[1]:
        yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {len(common)} are common"
    if not all(run.run.get("config") or run.run.get("versions") for run in (first_run, second_run)):
        yield "neither settings nor versions are recorded of both"


def _to_record(first_run: Run, second_run: Run, parting: Parting) -> Iterator[str]:
    """Name the one flag whose record would identify the tensor."""
    at = parting.beyond or parting.first
    if at is None or at.tensor or parting.is_hashed or at.stage in ("start", "data", "evaluation"):
        return
    loops = {loop_of(run) for run in (first_run, second_run)}
    flag = "--fingerprints-every 1" if loops == {"trainer"} else "ng.RunRecorder(…, fingerprints_every=1)"
    yield f"the tensor is not recorded: repeat both up to step {at.step} with {flag}"


def _effective(first_run: Run, second_run: Run, names: tuple[str, str]) -> Reading | None:
    """Measure the effective learning rate under one storage, if the other run's storage keeps its updates."""
    rates = [effective_rate(run) for run in (first_run, second_run)]
    for low, high in ((0, 1), (1, 0)):
        lost, kept_rate, run = rates[low], rates[high], (first_run, second_run)[low]
        groups = run.run.get("optimizer") if isinstance(run.run.get("optimizer"), dict) else {}
        config = run.run.get("config") if isinstance(run.run.get("config"), dict) else {}
        rate = finite_number((config or {}).get("lr")) or finite_number((groups or {}).get("lr"))
        if lost is None or rate is None or lost[0] >= MIN_EDQ or (kept_rate is not None and kept_rate[0] < MIN_EDQ):
            continue
        if kept_rate is None and _storage(first_run) == _storage(second_run):
            continue
        return KINDS["effective-rate"].reading(
            "", lost[0], 1.0, name=names[low], other=names[high], interval=lost[1], rate=rate * lost[0]
        )
    return None


def _storage(run: Run) -> str:
    recipe = recipe_of(run)
    return "" if recipe is None else recipe.storage.name


# ── over all rows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _drift(rows: Sequence[Mapping[int, Row]], since: int) -> Reading | None:
    """Measure the drift of losses over the later half of the rows since a step. Rounding has either sign, a bug has one.

    Return ``None`` for too few rows, for noise, and if a run no longer learns.
    """
    common = [step for step in sorted(rows[0].keys() & rows[1].keys()) if step >= since]
    pairs = [(finite_number(rows[0][step].get("loss")), finite_number(rows[1][step].get("loss"))) for step in common]
    losses = [(first, second) for first, second in pairs if first is not None and second is not None]
    if len(losses) < 2 * FEWEST or len(losses) < len(pairs):
        return None
    half = len(losses) // 2
    early, late = losses[:half], losses[half:]
    for run in (0, 1):
        if median(row[run] for row in late) > median(row[run] for row in early) + stdev(row[run] for row in late):
            return None
    drifts = [(second - first) / max(abs(first), abs(second), 1e-12) for first, second in late]
    mean, bound = fmean(drifts), max(MIN_DRIFT, SIGMAS * stdev(drifts) / math.sqrt(len(drifts)))
    if abs(mean) <= bound:
        return None
    way = "lower" if mean < 0 else "higher"
    return KINDS["loss-drift"].reading("", mean, 0.0, bound, common[half], size=abs(mean), way=way, count=len(late))


def _factor(at: Difference, runs: tuple[Run, Run], rows: Sequence[Mapping[int, Row]]) -> Reading | None:
    """Measure a common factor of all gradients of the step, else of the gradient norms of all rows."""
    prints = [next((row for row in rows_of(run, "fingerprints") if step_of(row) == at.step), None) for run in runs]
    if at.stage == "gradient" and prints[0] is not None and prints[1] is not None:
        first, second = (row["tensors"] for row in prints if row is not None)
        pairs = [(first[key][1], second[key][1]) for key in first if key.startswith("grad:") and key in second]
        fewest, of = 2, "gradients"
    else:
        common = sorted(rows[0].keys() & rows[1].keys())
        norms = [[finite_number(run[step].get("grad_norm")) for step in common] for run in rows]
        pairs, fewest, of = list(zip(*norms, strict=True)), FEWEST, "gradient norms"
    logs = [
        math.log(second_norm / first_norm)
        for first_norm, second_norm in pairs
        if first_norm and second_norm and first_norm > 0 and second_norm > 0
    ]
    if len(logs) < fewest or len(logs) < 0.9 * len(pairs):
        return None
    level = median(logs)
    spread = median(abs(log - level) for log in logs)
    if abs(level) < MIN_FACTOR or spread > SPREAD * min(abs(level), 0.1):
        return None
    factor = math.exp(level)
    counts = [pair for run in runs for pair in counts_of(run).items()]
    equal = [name for name, count in counts if min(abs(factor / count - 1), abs(factor * count - 1)) < _EQUAL]
    suffix = f", which is {' or '.join(dict.fromkeys(equal))}" if equal else ""
    advice = f"All {of} of the second run are {factor:.6g} times those of the first ({len(logs)} compared){suffix}."
    return Reading(at.step, "gradient", "", "gradient-factor", factor, 1.0, MIN_FACTOR, advice)
