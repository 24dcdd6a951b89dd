"""Attribution: where the steps of measured runs went, and what of it more ranks did not divide.

A run on several ranks records how long its ranks were in collectives on average, and how long the others waited there for the
slowest one. So a step splits into computing, sending and waiting without a guess. Steps whose update was not applied, and those
that a rollback undid, are added to the steps that count: what they cost is the price of numerics and of faults. Two runs of the
same work on different numbers of ranks then say what was lost: each part of the larger one, less what it should have been
had all work been divided.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.planner.causes import causes_of
from narrowgauge.planner.scaling_law import Point, duration
from narrowgauge.planner.term_changes import Change, changes
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.runs.record import Run

LEAST_STEPS = 6
"""Steps that a run must have: the first two compile, and a quarter at either end is left out."""
_WARM_UP = 2
_SIGMAS = 1.2816
_LATE = 0.5
"""Share of the steps from which on a rank that was the last to arrive is named."""
_WORDS = {
    "computing": "computing",
    "sending": "sending",
    "waiting": "waiting for the slowest rank",
    "void": "steps whose update was not applied",
    "undone": "steps that a rollback undid",
    "outside": "outside steps: evaluations, checkpoints, data",
}
"""The parts of a step that counts: what its own work took, and its share of work that was lost."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What an average step of a run took, without its first steps and its extremes.

    Args:
        name: of the run.
        num_ranks: that trained it.
        tokens: of a step, all ranks together.
        terms: seconds: computing, sending, waiting, the step's share of steps that were lost, and of what was outside steps.
        late: the rank that was most often the last to arrive, in which share of the steps, and how late; None where nobody knows.
    """

    name: str
    num_ranks: int
    tokens: int
    terms: Terms
    late: tuple[int, float, float] | None = None

    @property
    def seconds(self) -> float:
        """Of a step, without what is outside."""
        return sum(term.value for term in self.terms if term.group != "outside")


def measured_step(run: Run) -> MeasuredStep:
    """Where the time of a run's steps went.

    Args:
        run: a finished or unfinished run.
    Returns:
        Its average step.
    Raises:
        RecordError: it has too few steps.
    """
    rows = [row for row in run.steps if row.get("seconds")]
    if len(rows) < LEAST_STEPS:
        raise RecordError(
            f"the time of {run.path} was requested, which has {len(rows)} timed steps; {LEAST_STEPS} are needed.",
            "Train a few steps more: narrowgauge resume.",
        )
    num_ranks = int(run.run.get("machine", {}).get("ranks", 1))
    timed = sorted(rows[_WARM_UP:], key=lambda row: float(row["seconds"]))
    quarter = len(timed) // 4
    middle = timed[quarter : len(timed) - quarter]
    inside = [float(row.get("communication_seconds") or 0.0) for row in middle]
    # The mean of the waits of all ranks: the slowest, which the column leaves out, waits for nobody.
    waits = [float(row.get("wait_seconds") or 0.0) * (num_ranks - 1) / num_ranks for row in middle]
    parts = {
        "computing": [float(row["seconds"]) - c for row, c in zip(middle, inside, strict=True)],
        "sending": [c - w for c, w in zip(inside, waits, strict=True)],
        "waiting": waits,
    }
    terms = [_term(group, values, run) for group, values in parts.items() if group == "computing" or num_ranks > 1]
    terms += [*_lost_steps(run, sum(term.value for term in terms)), *_outside(run)]
    tokens = int(run.config["batch_size"]) * int(run.config["sequence_length"])
    return MeasuredStep(run.path.name, num_ranks, tokens, Terms(tuple(terms)), _latest(run, num_ranks))


def _term(group: str, values: Sequence[float], run: Run) -> Term:
    mean = statistics.fmean(values)
    half = _SIGMAS * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    formula = f"mean of the middle {len(values)} steps"
    return Term(group, _WORDS[group], mean, formula, str(run.path), mean - half, mean + half)


def _lost_steps(run: Run, seconds: float) -> Iterator[Term]:
    """The share of a step that counts in steps that do not: void ones, and those that were undone."""
    void = sum(bool(row.get("skipped") or row.get("spike")) for row in run.steps)
    undone = sum(int(event.get("batches") or 0) for event in run.events if event.get("kind") == "rollback")
    counted = max(1, len(run.steps) - void)
    for group, number in (("void", void), ("undone", undone)):
        if number:
            formula = f"{number} steps of {duration(seconds)} / {counted} that count"
            yield Term(group, _WORDS[group], seconds * number / counted, formula, str(run.path))


def _outside(run: Run) -> list[Term]:
    """The share of a step in what the run did between its steps, where it is finished and was not resumed."""
    wall = (run.summary or {}).get("wall_seconds")
    if not wall or any(event.get("kind") == "resume" for event in run.events):
        return []
    seconds = [float(row["seconds"]) for row in run.steps if row.get("seconds")]
    rest = max(0.0, float(wall) - sum(seconds))
    formula = f"({duration(float(wall))} − {duration(sum(seconds))} in steps) / {len(seconds)} steps"
    return [Term("outside", _WORDS["outside"], rest / len(seconds), formula, str(run.path))]


def _latest(run: Run, num_ranks: int) -> tuple[int, float, float] | None:
    tables = [row["ranks"] for row in run.steps if isinstance(row.get("ranks"), dict)]
    tables = [table for table in tables if len(table.get("num_last", ())) == num_ranks]
    if not tables:
        return None
    counts = [sum(table["num_last"][rank] for table in tables) for rank in range(num_ranks)]
    rank = max(range(num_ranks), key=counts.__getitem__)
    late = sum(table["num_last"][rank] * table["late_seconds"][rank] for table in tables) / max(1, counts[rank])
    return rank, counts[rank] / sum(table["num_steps"] for table in tables), late


@dataclass(frozen=True, slots=True)
class Attribution:
    """Measured runs on different numbers of ranks, and what the larger ones lost.

    Args:
        steps: by number of ranks.
    """

    steps: tuple[MeasuredStep, ...]

    @property
    def points(self) -> tuple[Point, ...]:
        """The seconds of a step of the first run's tokens, for :func:`narrowgauge.planner.scaling_law.fit`."""
        tokens = self.steps[0].tokens
        return tuple(Point(step.num_ranks, step.seconds * tokens / step.tokens) for step in self.steps)

    def lost(self, step: MeasuredStep) -> tuple[Change, ...]:
        """What a step took more than the smallest run's, divided by the ratio of ranks.

        Args:
            step: of :attr:`steps`.
        Returns:
            A change per part in seconds of that step, the largest first.
        """
        first = self.steps[0]
        scale = first.num_ranks / step.num_ranks * step.tokens / first.tokens
        return changes(first.terms, step.terms, scale)


def attribute(runs: Sequence[Run]) -> Attribution:
    """Measure where the steps of runs went.

    Args:
        runs: of one model and recipe, on one or more numbers of ranks.
    Returns:
        Their steps, by number of ranks.
    Raises:
        RecordError: a run has too few steps, or the runs differ in what they compute.
    """
    for key in ("model", "recipe", "sequence_length"):
        found = {str(run.config.get(key)) for run in runs}
        if len(found) > 1:
            raise RecordError(
                f"runs of one job were requested, and these differ in {key}: {', '.join(sorted(found))}.",
                "Name runs that differ in the number of ranks only.",
            )
    steps = [measured_step(run) for run in runs]
    if len({step.name for step in steps}) < len(steps):
        steps = [replace(step, name=str(run.path)) for step, run in zip(steps, runs, strict=True)]
    return Attribution(tuple(sorted(steps, key=lambda step: step.num_ranks)))


def attribution_lines(found: Attribution) -> list[str]:
    """The attribution in sentences.

    Args:
        found: from :func:`attribute`.
    Returns:
        One sentence per run and per lost part.
    """
    said = [_shares(step) for step in found.steps]
    for step in found.steps[1:]:
        if step.num_ranks > found.steps[0].num_ranks:
            said += _lost_lines(found, step)
    return said


def _shares(step: MeasuredStep) -> str:
    parts = [f"{duration(term.value)} {term.name}" for term in step.terms if term.group != "outside"]
    said = f"{step.name}, {_ranks(step.num_ranks)}: {duration(step.seconds)} a step: {', '.join(parts)}."
    outside = [term.value for term in step.terms if term.group == "outside"]
    if outside and outside[0] > 0.02 * step.seconds:
        said += f" {duration(outside[0])} for each step are spent outside steps."
    if step.late is not None and step.num_ranks > 2 and step.late[1] >= _LATE:
        rank, share, late = step.late
        said += f" Rank {rank} is the last in {share:.0%} of the steps, {duration(late)} late."
    return said


def _lost_lines(found: Attribution, step: MeasuredStep) -> list[str]:
    first, lost = found.steps[0], found.lost(step)
    inside = [change for change in lost if change.group != "outside"]
    scale = first.num_ranks / step.num_ranks * step.tokens / first.tokens
    total, ideal = sum(change.difference for change in inside), first.seconds * scale
    said = (
        f"{_ranks(step.num_ranks)} instead of {first.num_ranks}: {duration(step.seconds)} a step where "
        f"{duration(ideal)} would be in proportion, an efficiency of {ideal / step.seconds:.0%}."
    )
    if step.tokens != first.tokens:
        said += f" Its steps have {step.tokens / first.tokens:.3g} × the tokens, which is counted."
    return [said, *(_lost_line(change, total) for change in inside if abs(change.difference) > 0.02 * ideal)]


def _lost_line(change: Change, total: float) -> str:
    if change.difference < 0:
        return f"  {change.name}: {duration(-change.difference)} less than in proportion."
    share = f" ({change.difference / total:.0%} of what is lost)" if total > 0 else ""
    remedies = "; ".join(f"{cause.name}: {cause.remedy}" for cause in causes_of(change.group))
    return f"  {change.name}: {duration(change.difference)} more than in proportion{share}. {remedies}."


def _ranks(number: int) -> str:
    return f"{number:,} rank{'' if number == 1 else 's'}"


def attribution_dict(found: Attribution) -> dict[str, Any]:
    """The attribution as values for JSON.

    Args:
        found: from :func:`attribute`.
    Returns:
        Each run's seconds by part, what it lost by part, and the sentences.
    """
    return {
        "runs": [
            {
                "name": step.name,
                "ranks": step.num_ranks,
                "tokens": step.tokens,
                "step_seconds": step.seconds,
                "seconds": step.terms.groups,
                "lost_seconds": {change.group: change.difference for change in found.lost(step)},
            }
            for step in found.steps
        ],
        "sentences": attribution_lines(found),
    }
