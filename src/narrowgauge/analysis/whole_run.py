"""Laws of a whole run: what only its end, or a count over all of its record, can tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from narrowgauge.analysis.columns import Array, column, rows_of
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.log import reading_of
from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.thresholds import FEWEST_BATCHES, FEWEST_STEPS, MAX_SKIPPED
from narrowgauge.measuring.comparison import divergence, has_zero
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import number, step_of
from narrowgauge.spec.significance import MIN_EDQ

_SKIPPED = 3
"""Skipped steps without a reading beside ``MAX_SKIPPED``, after the search for a loss scale."""
_ORIGIN = (
    "Repeat the first of these steps with ng.ranked_places, which names the operation and its line."
)
_SHARES = {"utilization": KINDS["idle-device"], "mfu": KINDS["idle-device"].case("mfu")}
"""Columns with a fraction of what the device could do, each with the kind of a low one."""
_LASTING = 20
_LEAST_SECONDS = 10.0
"""Steps of a block whose median speed is compared, and the lost time below which other programs
explain a slow one.
"""


def whole_run_readings(run: Run, skipped: list[int] | None) -> Iterator[Reading]:
    """Yield the readings of a whole run.

    Args:
        skipped: the steps whose update was not applied; ``None`` if the record does not tell.
    """
    out = skipped or []
    yield from _steps(run, skipped)
    yield from _losses(run, out)
    yield from _resumes(run)
    yield from _unreported_losses(run)
    yield from _slower(run)
    yield from _idle(run)
    yield from _batches(run)
    yield from _rates(run, out)


def skipped_steps(run: Run) -> list[int] | None:
    """Return the steps whose update was not applied, by the column ``skipped``; ``None`` if no row
    has it.
    """
    flags = column(run, "steps", "skipped")
    if not len(flags):
        return None
    return [int(step) for step in flags.x[flags.y > 0]]


def rows_per_step(run: Run, skipped: list[int]) -> int:
    """Return the number of rows for each step, as of micro-batches: 1 unless steps come evenly and
    no loss is scaled.
    """
    applied = []
    out = set(skipped)
    for place, row in enumerate(run.steps):
        if row.get("loss_scale") is not None or row.get("spike") is not None:
            return 1
        if step_of(row) not in out:
            applied.append(place)
    gaps = {after - before for before, after in pairwise(applied)}
    if len(gaps) != 1 or len(applied) <= 2 or events_of(run, "skip"):
        return 1
    return gaps.pop()


def events_of(run: Run, what: str) -> list[Reading]:
    """Return the logged readings of a kind."""
    return [reading for reading in map(reading_of, run.events) if reading.what == what]


def _steps(run: Run, skipped: list[int] | None) -> Iterator[Reading]:
    """Yield the skipped steps, and the steps that are not finite."""
    out = set(skipped or ())
    if out and rows_per_step(run, skipped or []) == 1:
        yield from _skips(run, out)
    bad_losses = set(map(int, column(run, "steps", "loss").gaps)) - out
    failed = bad_losses | (set(map(int, column(run, "steps", "grad_norm").gaps)) - out)
    if not failed:
        return
    unit = "rows" if run.is_foreign else "steps"
    since = min(failed)
    before = -1
    for step in map(step_of, run.steps):
        if before < step < since:
            before = step
    if before < 0:
        before = since - 1
    advice = f"{len(failed)} of {len(run.steps)} {unit} have a loss or a gradient norm that is not"
    advice += " finite."
    if before < since - 1:
        advice += f" They began after step {before}, at the latest at {since}."
    severity = "error"
    if skipped is None:
        advice += " The log does not tell whether their steps were skipped."
        # A loss scaler skips such norms, as long as they pass.
        if not bad_losses and step_of(run.steps[-1]) not in failed:
            severity = "note"
    stage = "loss" if since in bad_losses else "gradient"
    advice = f"{advice} {_ORIGIN}"
    yield Reading(since, stage, "", "nonfinite-step", len(failed), 0, 0, advice, severity)


def _skips(run: Run, skipped: set[int]) -> Iterator[Reading]:
    kind = KINDS["skipped-steps"]
    total = len(run.steps)
    leading = 0  # skipped steps before the first that was applied
    while leading < total and step_of(run.steps[leading]) in skipped:
        leading += 1
    bound = 0
    if leading < total:
        bound = min(leading, int(kind.bound)) + _SKIPPED + int(MAX_SKIPPED * total)
    if len(skipped) > bound:
        reason = "no weight changed in them"
        for reading in events_of(run, "skip")[:1]:
            reason = reading.advice
        words = {"count": total, "more": f": {reason.rstrip('.')}"}
        yield kind.reading("", len(skipped), 0, bound, min(skipped), **words)


def _losses(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield a divergence that no event tells, or a loss that does not fall.

    The losses of a generator and its critic may end at any size.
    """
    if len(skipped) == len(run.steps) or events_of(run, "divergence"):
        return
    snapshots = rows_of(run, "snapshots")
    if snapshots and snapshots[-1].get("is_game"):
        return
    values = column(run, "steps", "loss").finite
    end = max(map(step_of, run.steps))
    if not has_zero(values.tolist()):
        return
    reason = divergence(run)
    if reason:
        words = f"{reason[0].upper()}{reason[1:]}."
        yield Reading(end, "loss", "", "divergence", advice=words)
    elif len(values) >= FEWEST_STEPS:
        kind = KINDS["constant-loss"].case("flat")
        quarters = np.array_split(values, 4)
        first = float(np.median(quarters[0]))
        last = float(np.median(quarters[-1]))
        least = first * kind.bound
        if last >= least:
            yield kind.reading("", last, None, least, end, first=first)


def _resumes(run: Run) -> Iterator[Reading]:
    """Compare hashes around a resume: it hashes the loaded state, which must equal the saved state
    bit for bit.
    """
    kind = KINDS["weights-written"].case("resume")
    for before, row in pairwise(rows_of(run, "fingerprints")):
        step = step_of(row)
        if step != step_of(before):
            continue
        saved = before.get("tensors") or {}
        loaded = row.get("tensors") or {}
        for key, entry in saved.items():
            if key in loaded and loaded[key][0] != entry[0]:
                yield kind.reading(key, number(loaded[key][1]), number(entry[1]), step=step + 1)
                break


def _unreported_losses(run: Run) -> Iterator[Reading]:
    """Yield the steps whose recorded audit stored too little, in a record without the audit's own
    events.
    """
    if events_of(run, "lost-updates"):
        return
    advice = "Take a storage that keeps what the weights' format cuts, such as 'word'."
    stored = column(run, "steps", "edq")
    for step, value in zip(stored.x, stored.y, strict=True):
        if value < MIN_EDQ:
            bound = 1.0 - MIN_EDQ
            yield Reading(
                int(step), "storage", "", "lost-updates", float(value), 1.0, bound, advice
            )


def _slower(run: Run) -> Iterator[Reading]:
    """Yield the first lasting fall of tokens per second: a block of steps whose median is far below
    those before.

    The median of all blocks before counts, or of their first quarter: a slow fall departs from it.
    Single slow steps do not.
    """
    kind = KINDS["slower-steps"]
    rate = column(run, "steps", "tokens_per_second")
    steps = rate.x[rate.y > 0]
    rates = rate.y[rate.y > 0]
    size = min(_LASTING, len(rates) // 2)
    if size < 2:
        return
    start = len(rates) % size
    medians = np.median(rates[start:].reshape(-1, size), 1)
    for place in range(1, len(medians)):
        quarter = medians[: -(-place // 4)]
        usual = max(float(np.median(medians[:place])), float(np.median(quarter)))
        least = usual * (1 - kind.bound)
        if medians[place] >= least:
            continue
        end = place
        while end < len(medians) and medians[end] < least:
            end += 1
        first, last = _slow_steps(rates, start + place * size, start + end * size - 1, least)
        value = float(np.median(rates[first : last + 1]))
        started = int(steps[first])
        ended = int(steps[last])
        seconds = column(run, "steps", "seconds")
        within = seconds.y[(seconds.x >= started) & (seconds.x <= ended)]
        lost = within.sum() * (1 - value / usual)
        if lost >= _LEAST_SECONDS or not len(seconds):
            more = "".join(_changes(run, started, ended))
            words = {"first": started, "last": ended, "factor": usual / value, "more": more}
            yield kind.reading("", value, usual, kind.bound * usual, started, **words)
            return


def _slow_steps(rates: Array, first: int, last: int, least: float) -> tuple[int, int]:
    """Return the first and the last slow step of a stretch of slow blocks."""
    while rates[first - 1] < least:
        first -= 1
    while rates[first] >= least:
        first += 1
    while rates[last] >= least:
        last -= 1
    return first, last


def _idle(run: Run) -> Iterator[Reading]:
    """Yield a device that was idle for most of the median step, and one far below its peak."""
    for name, kind in _SHARES.items():
        values = column(run, "steps", name)
        if len(values.y) < 2:
            continue
        shares = values.y
        if shares.max() > 1.5:  # in percent
            shares = shares / 100
        share = float(np.median(shares))
        if share < 1 - kind.bound:
            waits = "".join(_waits(run))
            step = int(values.x[np.argmax(shares < 1 - kind.bound)])
            yield kind.reading("", share, 1.0, step=step, more=waits)


def _waits(run: Run) -> Iterator[str]:
    """Yield the recorded times that a step waited, in the median."""
    for name in ("loader_seconds", "wait_seconds"):
        values = column(run, "steps", name)
        if len(values.y):
            yield f"; {name} is {float(np.median(values.y)):.3g}"


def _batches(run: Run) -> Iterator[Reading]:
    """Compare the checksums of the batches: one batch for ever, or the rows of an earlier stretch
    in the same order.
    """
    steps = []
    checksums = []
    for row in run.steps:
        if row.get("batch_crc"):
            steps.append(step_of(row))
            checksums.append(str(row["batch_crc"]))
    total = len(steps)
    if total < FEWEST_BATCHES:
        return
    if len({*checksums}) == 1:
        yield KINDS["equal-batches"].reading("", total, 1, step=steps[1])
        return
    first: dict[str, int] = {}
    for place, checksum in enumerate(checksums):
        first.setdefault(checksum, place)
    for place in range(1, total - FEWEST_BATCHES + 1):
        start = first[checksums[place]]
        length = 0
        while place + length < total and checksums[place + length] == checksums[start + length]:
            length += 1
        if start < place and length >= FEWEST_BATCHES:
            started = steps[place]
            words = {"begun": started, "end": steps[place + length - 1]}
            words |= {"first": steps[start], "last": steps[start + length - 1]}
            reading = (
                KINDS["equal-batches"]
                .case("repeated")
                .reading("", length, 0, step=started, **words)
            )
            resumes = [event.step for event in events_of(run, "resume")]
            if started > 1 and started - 1 in resumes:
                reading = replace(reading, severity="warning")
            yield reading
            return


def _rates(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield the rows at a rate of zero after others, and a rate that a whole run never reached."""
    still: list[int] = []
    has_moved = False
    highest = 0.0
    for row in run.steps:
        rate = number(row.get("lr"))
        highest = max(highest, rate or 0.0)
        if rate:
            has_moved = True
            still = []
        elif rate is not None and has_moved and step_of(row) not in skipped:
            still.append(step_of(row))
    if len(still) >= FEWEST_BATCHES:
        yield KINDS["learning-rate"].reading("", len(still), 0, step=still[0], words="")
    asked = _asked_rate(run)
    kind = KINDS["learning-rate"].case("not-reached")
    is_long = run.summary is not None and len(run.steps) >= FEWEST_STEPS
    if asked and is_long and 0 < highest < kind.bound * asked:
        step = step_of(run.steps[-1])
        yield kind.reading("", highest, None, kind.bound * asked, step, asked=asked)


def _asked_rate(run: Run) -> float:
    """Return the learning rate of the settings, or that of the optimizer before its schedule."""
    optimizer = run.run.get("optimizer")
    settings = run.run.get("config")
    for table, name in ((settings, "lr"), (run.run, "lr"), (optimizer, "initial_lr")):
        rate = number(table.get(name)) if isinstance(table, dict) else None
        if rate:
            return rate
    return 0.0


def _changes(run: Run, first: int, last: int) -> Iterator[str]:
    """Yield the columns of time that changed with the throughput: their medians before and then."""
    for name in ("loader_seconds", "communication_seconds", "wait_seconds", "utilization"):
        values = column(run, "steps", name)
        before = values.y[values.x < first]
        then = values.y[(values.x >= first) & (values.x <= last)]
        if len(before) and len(then):
            medians = [float(np.median(before)), float(np.median(then))]
            if max(medians) > 1.5 * min(medians):
                yield f"; {name} went from {medians[0]:.3g} to {medians[1]:.3g}"
