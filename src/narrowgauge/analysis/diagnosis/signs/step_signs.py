"""Signs in the rows of steps and evaluations: losses, gradient norms, rates, the loss scale, durations, resumes.

The detectors say that a loss jumped; these signs say how. A corrupted batch is over with the next one, an unstable
update takes many steps to recover from, and gradients that grow come before a loss that does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import median, quantiles

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import number, step_of

BEFORE = 30
"""Steps whose median is the level before something."""
FEWEST = 5
"""The fewest steps whose median says something."""
LEAD = 8
"""Steps before a spike in which a rising gradient norm counts as its beginning (BLOOM-176B: 2 to 4)."""
RISE, FALL = 3.0, 30.0
"""Factors of a gradient norm over its level where it leads a spike, and below it where it has vanished."""
STEPS_BY = 1.6
"""Least factor between the gradient norms of two steps that may begin a lasting change of level."""
ERRATIC = 0.15
"""Median difference of two consecutive losses over their level; healthy batches of 256 tokens differ by 0.02."""
SPREAD = 20.0
"""That difference times the root of a step's tokens, in nats; healthy runs reach 1.7 at 256 tokens and 13 at 2,048."""
ROUGH = 1.5
"""Factor of the gradient norm after a spike over its level before, where the spike has left something behind."""
BURST = 6.0
"""Factor of a gradient norm over its level that is a burst if it lasts for two steps."""
ENDS_HIGH, SIGMAS = 0.2, 8.0
"""Nats, and standard errors, by which a loss ends above its lowest level where that is a sign."""
SETTLED = 20
"""Steps after which delayed scales have settled."""
EXCEEDS = 50.0
"""Factor of the count of values beyond a delayed scale over its level; healthy runs of small batches reach 18."""


def _first_spike(evidence: Evidence) -> tuple[int, float] | None:
    """The row of the first step whose loss spiked, and the loss above which it was one."""
    for event in sorted(evidence.raised_by("loss-spike"), key=step_of):
        limit, step = number(event.get("threshold")), step_of(event)
        if limit is not None and step in evidence.steps:
            return evidence.steps.index(step), limit
    return None


def _is_above(loss: float | None, limit: float) -> bool:
    return loss is not None and not loss <= limit  # NaN counts as above


def _spike_width(evidence: Evidence) -> tuple[int, int, bool] | None:
    """The row of the first spike, how many rows it lasts, and whether the loss came back."""
    found = _first_spike(evidence)
    if found is None:
        return None
    row, limit = found
    losses = evidence.column("loss")[row:]
    width = next((k for k, loss in enumerate(losses) if not _is_above(loss, limit)), len(losses))
    return row, width, width < len(losses)


def _one_batch(evidence: Evidence) -> Observation:
    found = _spike_width(evidence)
    if found is None or found[1] > 1 or not found[2]:
        return ABSENT
    if _is_between_gaps(evidence, found[0]):
        return UNKNOWN  # it lasted for one row, which may be one step or as many as lie between two rows
    if not _is_back(evidence.column("loss"), found[0]):
        return ABSENT  # one step of a loss that climbs is above the threshold first
    step = evidence.steps[found[0]]
    return present(step, f"the loss jumped at step {step} and was back at the next one", value=1.0)


def _is_back(losses: Sequence[float | None], row: int) -> bool:
    """Whether the losses after a spike are nearer to the level before it than to the spike."""
    spike, level, after = (
        losses[row],
        level_of(losses[max(0, row - BEFORE) : row]),
        finite(losses[row + 1 : row + 1 + FEWEST]),
    )
    if spike is None or level is None or not after or not math.isfinite(spike):
        return True
    return median(after) - level < (spike - level) / 2


def _is_between_gaps(evidence: Evidence, row: int) -> bool:
    """Whether a step beside a row has no row of its own."""
    around = evidence.steps[max(0, row - 1) : row + 2]
    return any(now - before > 1 for before, now in pairwise(around))


def _recovers(evidence: Evidence) -> Observation:
    found = _spike_width(evidence)
    if found is None or not found[2]:
        return ABSENT
    row, rows, _ = found
    if rows < 2:
        return UNKNOWN if _is_between_gaps(evidence, row) else ABSENT
    step = evidence.steps[row]
    width = evidence.steps[row + rows] - step
    return present(step, f"the loss jumped at step {step} and took {width} steps to recover", value=float(width))


def _stays(evidence: Evidence) -> Observation:
    found = _spike_width(evidence)
    if found is None or found[2]:
        return ABSENT
    if found[1] < FEWEST:
        return UNKNOWN
    step = evidence.steps[found[0]]
    width = evidence.steps[-1] - step + 1
    return present(step, f"the loss jumped at step {step} and did not come back in {width} steps", value=float(width))


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are known and neither NaN nor infinite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def jitter(values: Iterable[float]) -> float:
    """The median difference of two consecutive values: noise, to which a trend adds almost nothing."""
    return median(abs(b - a) for a, b in pairwise(values))


def level_of(values: Sequence[float | None]) -> float | None:
    """The median of finite values; ``None`` for too few, and where it is zero, since no factor over zero means anything."""
    known = finite(values)
    return median(known) or None if len(known) >= FEWEST else None


def _leads(evidence: Evidence) -> Observation:
    found = _first_spike(evidence)
    if found is None:
        return ABSENT
    if evidence.is_sparse:
        return UNKNOWN  # what leads by two to four steps lies between two rows
    norms, row = evidence.column("grad_norm"), found[0]
    level = level_of(norms[max(0, row - BEFORE - LEAD) : max(0, row - LEAD)])
    if level is None:
        return UNKNOWN
    for place in range(max(0, row - LEAD), row):
        norm = norms[place]
        if norm is not None and RISE * level < norm < math.inf:
            step = evidence.steps[place]
            said = f"the gradient norm was {norm / level:.0f} times its level at step {step}, {row - place} before the loss"
            return present(step, said, value=norm, threshold=RISE * level)
    return ABSENT


def _stays_rough(evidence: Evidence) -> Observation:
    """What a bad update has done shows in the next steps too; a bad batch leaves nothing behind."""
    found, norms = _spike_width(evidence), evidence.column("grad_norm")
    if found is None:
        return ABSENT
    row, width, _ = found
    was, now = level_of(norms[max(0, row - BEFORE) : row]), level_of(norms[row + width + 2 : row + width + 22])
    if was is None or now is None or evidence.is_sparse:
        return UNKNOWN
    if now < ROUGH * was:
        return ABSENT
    step = evidence.steps[row]
    said = f"the gradient norm is {now / was:.1f} times its level after the spike of step {step}"
    return present(step, said, None, now, ROUGH * was)


def _norm_vanishes(evidence: Evidence) -> Observation:
    norms = evidence.column("grad_norm")
    for row in range(BEFORE, len(norms) - 2):
        late = norms[row : row + 3]
        if any(norm is None or not norm < math.inf for norm in late):
            continue
        highest, before = max(norm for norm in late if norm is not None), norms[row - 1]
        if before is None or not highest * RISE < before:  # no fall: most steps need no median
            continue
        level = level_of(norms[row - BEFORE : row])
        if level is not None and highest * FALL <= level:
            step = evidence.steps[row]
            said = f"the gradient norm fell from {level:.3g} to {highest:.3g} at step {step}"
            return present(step, said, None, highest, level / FALL)
    return ABSENT


def _norm_steps(evidence: Evidence) -> Observation:
    """A norm that moves to another level at one step and stays there, while the loss goes on as before."""
    norms, losses = evidence.column("grad_norm"), evidence.column("loss")
    for row in range(BEFORE, len(norms) - BEFORE):
        before, now = norms[row - 1], norms[row]
        if not before or not now or not (now > STEPS_BY * before or before > STEPS_BY * now):
            continue
        was, level = norms[row - BEFORE : row], norms[row : row + BEFORE]
        known = [sorted(value for value in part if value is not None and value > 0) for part in (was, level)]
        if min(map(len, known)) < BEFORE - 2:
            continue
        low, high = (known[0], known[1]) if now > before else (known[1], known[0])
        # The two levels do not overlap but for single steps.
        if high[2] <= low[-3] or _moves(losses, row):
            continue
        factor = median(known[1]) / median(known[0])
        if not (factor >= STEPS_BY or factor <= 1 / STEPS_BY):
            continue
        step = evidence.steps[row]
        said = f"the gradient norm is {factor:.3g} times what it was from step {step} on, and the loss as before"
        return present(step, said, None, factor)
    return ABSENT


def _moves(losses: Sequence[float | None], row: int) -> bool:
    """Whether the loss is at another level from a row on, beyond its noise."""
    was, now = level_of(losses[row - 10 : row]), level_of(losses[row : row + 10])
    known = [value for value in losses[row - BEFORE : row + BEFORE] if value is not None]
    noise = jitter(known) if len(known) > 1 else 0.0
    return was is None or now is None or abs(now - was) > 2 * noise + 0.02 * abs(was)


def _is_erratic(evidence: Evidence) -> Observation:
    losses = finite(evidence.column("loss"))
    late, tokens = losses[len(losses) // 2 :], evidence.tokens_per_step
    if tokens is None:
        return UNKNOWN
    if len(late) < BEFORE or evidence.raised_by("loss-spike"):
        return ABSENT
    level, noise = median(late), jitter(late)
    if noise <= max(ERRATIC * level, SPREAD / math.sqrt(tokens)) or level <= 0:
        return ABSENT
    said = f"the loss differs by {noise / level:.0%} from one step to the next, and no step is a spike"
    return present(None, said, None, noise, ERRATIC * level)


def _exceeds_scales(evidence: Evidence) -> Observation:
    """Only a burst counts: a few values exceed a delayed scale in every step, since it is taken from earlier ones."""
    counts = [count or 0.0 for count in evidence.column("saturated")]
    for row, count in enumerate(counts[SETTLED:], SETTLED):
        level = max(1.0, median(counts[max(0, row - BEFORE) : row]))
        if count >= EXCEEDS * level:
            step = evidence.steps[row]
            said = f"{count:.0f} values exceeded their delayed scale at step {step}, {count / level:.0f} times as many as before"
            return present(step, said, None, count, EXCEEDS * level)
    return ABSENT


def _loss_drops(evidence: Evidence) -> Observation:
    losses = evidence.column("loss")
    for row in range(BEFORE, len(losses) - 3):
        late = [loss for loss in losses[row : row + 3] if loss is not None]
        before = losses[row - 1]
        if len(late) < 3 or before is None or not max(late) < 0.9 * before:
            continue
        level = finite(losses[row - BEFORE : row])
        noise = jitter(level) if len(level) > FEWEST else math.inf
        if max(late) < min(level) - 3 * noise:
            step = evidence.steps[row]
            said = f"the loss fell from {before:.3f} to {max(late):.3f} at step {step}"
            return present(step, said, None, max(late), min(level) - 3 * noise)
    return ABSENT


def _one_not_finite(evidence: Evidence) -> Observation:
    losses = evidence.column("loss")
    bad = [row for row, loss in enumerate(losses) if loss is not None and not math.isfinite(loss)]
    if len(bad) != 1 or bad[0] + 2 >= len(losses):
        return ABSENT
    step = evidence.steps[bad[0]]
    return present(step, f"the loss of step {step} alone is {losses[bad[0]]}, and those after it are finite")


def _loss_not_finite(evidence: Evidence) -> Observation:
    for step, loss in zip(evidence.steps, evidence.column("loss"), strict=True):
        if loss is not None and not math.isfinite(loss):
            return present(step, f"the loss of step {step} is {loss}", value=loss)
    return ABSENT


def _norm_not_finite(evidence: Evidence) -> Observation:
    """Left out are steps that the loss scaler skipped, which raise no event, and those whose loss is not finite either."""
    sound = {
        step
        for step, loss in zip(evidence.steps, evidence.column("loss"), strict=True)
        if loss is None or math.isfinite(loss)
    }
    for event in evidence.raised_by("nonfinite-step"):
        if step_of(event) in sound:
            return present(step_of(event), f"the gradient norm of step {step_of(event)} is not finite")
    return ABSENT


def _bursts(evidence: Evidence) -> Observation:
    """Gradients that jump for some steps, more than once, while the loss goes on as before."""
    if evidence.raised_by("loss-spike"):
        return ABSENT
    found, last, length = [], -2, 0
    norms = evidence.column("grad_norm")
    known = [norm if norm is not None and math.isfinite(norm) else math.inf for norm in norms]
    for row in range(BEFORE // 3, len(norms)):
        norm, start = norms[row], max(0, row - BEFORE)
        if norm is None or not norm < math.inf or norm <= BURST * min(known[start:row]):
            continue  # no median is below the minimum: most steps need none
        level = level_of(norms[start:row])
        if level is None or norm <= BURST * level:
            continue
        length = length + 1 if row == last + 1 else 1
        last = row
        if length == 2:
            found.append((row - 1, norm / level))
    if len(found) < 2:
        return ABSENT
    (row, factor), step = found[0], evidence.steps[found[0][0]]
    said = f"the gradient norm jumped {len(found)} times for some steps, to {factor:.0f} times its level at step {step}"
    return present(step, said)


def _not_falling(evidence: Evidence) -> Observation:
    losses = finite(evidence.column("loss"))
    if len(losses) < 2 * BEFORE:
        return UNKNOWN
    early, late = losses[: len(losses) // 4], losses[-len(losses) // 4 :]
    noise = jitter(losses)
    if median(late) < median(early) - 2 * noise / math.sqrt(len(late)):
        return ABSENT
    said = f"the median loss was {median(early):.3f} in the first quarter and is {median(late):.3f} in the last"
    return present(evidence.steps[-1], said, None, median(late), median(early))


def _ends_high(evidence: Evidence) -> Observation:
    """The loss of the last steps is far above the lowest level that it had reached, beyond what a restarted schedule does."""
    rows = [
        (step, loss) for step, loss in zip(evidence.steps, evidence.column("loss"), strict=True) if loss is not None
    ]
    losses = [loss for _, loss in rows]
    if len(losses) < 3 * BEFORE or not all(map(math.isfinite, losses)):
        return UNKNOWN
    levels = [(median(losses[row : row + BEFORE]), row) for row in range(0, len(losses) - 2 * BEFORE + 1, BEFORE // 2)]
    (lowest, row), now = min(levels), median(losses[-BEFORE:])
    limit = lowest + max(ENDS_HIGH, SIGMAS * jitter(losses) / math.sqrt(BEFORE))
    if now <= limit:
        return ABSENT
    since = next(step for step, loss in rows[row + BEFORE :] if loss > limit)
    said = f"the loss had fallen to {lowest:.3f} by step {rows[row + BEFORE - 1][0]}, and ends at {now:.3f}"
    return present(since, said, None, now, limit)


_LOSS, _NORM = ("steps.loss",), ("steps.grad_norm",)

SIGNS_OF_STEPS: tuple[Sign, ...] = (
    Sign(
        "spike-of-one-batch", "the loss jumps for one step and is back at the next", _LOSS, 0.15, _one_batch, given="loss-spikes",
    ),
    Sign(
        "spike-recovers-slowly", "the loss jumps and takes several steps to recover", _LOSS, 0.2, _recovers,
        given="loss-spikes",
    ),
    Sign("spike-stays", "the loss jumps and does not come back", _LOSS, 0.05, _stays, given="loss-spikes"),
    Sign(
        "gradient-leads-spike", "the gradient norm rises before the loss jumps", _LOSS + _NORM, 0.1, _leads,
        given="loss-spikes",
    ),
    Sign(
        "gradient-stays-raised", "the gradient norm is higher after a spike than before", _LOSS + _NORM, 0.2, _stays_rough,
        given="loss-spikes",
    ),
    Sign("gradient-vanishes", "the gradient norm falls to a thirtieth at one step, and stays", _NORM, 0.002, _norm_vanishes),
    Sign(
        "gradient-norm-steps", "the gradient norm moves to another level at one step, and the loss does not", _LOSS + _NORM,
        0.005, _norm_steps,
    ),
    Sign(
        "gradient-bursts", "gradients jump for some steps, again and again, and the loss does not", _LOSS + _NORM, 0.003,
        _bursts,
    ),
    Sign("loss-not-finite", "the loss of a step is NaN or infinite", _LOSS, 0.001, _loss_not_finite),
    Sign(
        "one-step-not-finite", "the loss of one step alone is NaN or infinite", _LOSS, 0.2, _one_not_finite,
        given="loss-not-finite",
    ),
    Sign(
        "norm-not-finite", "the gradient norm of a step is not finite, and its loss is", (*_LOSS, "events.nonfinite"), 0.002,
        _norm_not_finite,
    ),
    Sign("loss-does-not-fall", "the loss of the last quarter is no lower than that of the first", _LOSS, 0.01, _not_falling),
    Sign("loss-ends-high", "the loss ends far above the lowest level that it had reached", _LOSS, 0.004, _ends_high),
    Sign("loss-is-erratic", "the loss varies as no mean over a step's tokens does", _LOSS, 0.03, _is_erratic),
    Sign("loss-drops", "the loss falls at one step far below all recent ones", _LOSS, 0.005, _loss_drops),
    Sign(
        "scales-are-exceeded", "a burst of values exceeds delayed scales", ("steps.saturated",), 0.003,
        _exceeds_scales,
    ),
)  # fmt: skip


# ── evaluations: the training loss falls, and the validation loss does not ───────────────────────────────────────────────

LARGE_GAP = 0.1
"""Validation loss minus training loss, in nats, of a model that has memorized its data."""
FEWEST_EVALS = 3
"""The fewest evaluations that can show a growing gap."""


def _gaps(evidence: Evidence) -> list[tuple[int, float]]:
    """At each evaluation the validation loss minus the level of the training loss in the steps before it."""
    steps, losses = evidence.steps, evidence.column("loss")
    found = []
    for row in evidence.run.evals:
        count = bisect_right(steps, int(row["step"]))
        level, value = level_of(losses[max(0, count - BEFORE) : count]), number(row.get("val_loss"))
        if level is not None and value is not None:
            found.append((int(row["step"]), value - level))
    return found


def _parts(evidence: Evidence) -> Observation:
    gaps = _gaps(evidence)
    if len(gaps) < FEWEST_EVALS:
        return UNKNOWN
    values = [gap for _, gap in gaps]
    # It grows over the whole run, and from one evaluation to the next at the end: a single one is noise.
    if not (values[-1] > LARGE_GAP and values[-1] > values[-2] > values[0] and values[-1] > values[0] + LARGE_GAP):
        return ABSENT
    step = next(step for step, gap in gaps if gap > LARGE_GAP)
    said = f"the validation loss is {values[-1]:.2f} nats above the training loss at the end, and was {values[0]:.2f} at first"
    return present(step, said, None, values[-1], LARGE_GAP)


SIGNS_OF_EVALS: tuple[Sign, ...] = (
    Sign(
        "validation-parts-from-training", "the training loss falls, and the validation loss falls less or rises",
        ("steps.loss", "run.evals"), 0.03, _parts, "{evaluations}",
    ),
)  # fmt: skip


# ── the learning rate: a schedule changes it a little from one step to the next, a warm-up by a factor of two ────────────

JUMP = 2.5
"""Factor between the rates of two consecutive steps that no schedule has after a warm-up's first steps."""
STAYS = 10
"""Steps for which a lasting jump lasts at least."""
RESUMED_BY = 1.5
"""Factor between the rates before and after a resume that no schedule has."""


def _jumps(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Rates that rise in one step above all earlier ones: the row, the rates before and after, and how many rows the rise lasts.

    A return to an earlier rate is a restart.
    """
    rates, highest = evidence.column("lr"), 0.0
    for row in range(2, len(rates)):  # a warm-up may begin at a thousandth, and its second rate be many times that
        before, now = rates[row - 1], rates[row]
        highest = max(highest, before or 0.0)
        if evidence.steps[row] - evidence.steps[row - 1] > 1 or (now or 0.0) <= 1.1 * highest:
            continue
        if before and now and now > JUMP * before:
            width = next((k for k, rate in enumerate(rates[row:]) if (rate or 0.0) < now / JUMP), len(rates) - row)
            yield row, before, now, width


def _rate_jumps(evidence: Evidence) -> Observation:
    if evidence.is_sparse:
        return UNKNOWN
    for row, before, now, width in _jumps(evidence):
        if width >= STAYS:
            step = evidence.steps[row]
            said = f"the learning rate rose from {before:.3g} to {now:.3g} at step {step}"
            return present(step, said, None, now, JUMP * before)
    return ABSENT


def _rate_bursts(evidence: Evidence) -> Observation:
    if evidence.is_sparse:
        return UNKNOWN
    for row, before, now, width in _jumps(evidence):
        if width < STAYS and row + width < len(evidence.steps):
            step = evidence.steps[row]
            said = f"the learning rate was {now:.3g} instead of {before:.3g} for {counted(width, 'step')} from step {step} on"
            return present(step, said, None, now, JUMP * before)
    return ABSENT


def _rate_moves_at_resume(evidence: Evidence) -> Observation:
    rates = evidence.column("lr")
    for resumed in evidence.resumes:
        row = evidence.row_after(resumed)
        if not 3 <= row < len(rates) or evidence.steps[row] - evidence.steps[row - 1] > 1:
            continue
        before, now = rates[row - 1], rates[row]
        if not before or not now:
            continue
        if max(now / before, before / now) >= RESUMED_BY:
            step = evidence.steps[row]
            said = f"the learning rate went from {before:.3g} to {now:.3g} where the run resumed"
            return present(step, said, None, now, RESUMED_BY * before)
    return ABSENT


_RATE = ("steps.lr",)

SIGNS_OF_RATES: tuple[Sign, ...] = (
    Sign("rate-jumps", "the learning rate jumps as no schedule lets it, and stays there", _RATE, 0.002, _rate_jumps),
    Sign("rate-bursts", "the learning rate is far higher for a few steps", _RATE, 0.001, _rate_bursts),
    Sign(
        "rate-moves-at-resume", "the learning rate is another one since a resume", (*_RATE, "run.ours"), 0.005,
        _rate_moves_at_resume,
    ),
)  # fmt: skip


# ── the loss scale: whether overflows lower it, and what the loss does meanwhile ─────────────────────────────────────────


def _scale_falls_alone(evidence: Evidence) -> Observation:
    """A loss scale is halved only where gradients overflow, and that step is skipped: any other fall has another cause."""
    before: float | None = None
    for row in evidence.run.steps:
        now = number(row.get("loss_scale"))
        if before is not None and now is not None and now < before / 2.5 and not row.get("skipped"):
            step = int(row["step"])
            said = f"the loss scale fell from {before:g} to {now:g} at step {step}, and no gradient overflowed"
            return present(step, said, None, now)
        before = now if now is not None else before
    return ABSENT


def _rises_with_scale(evidence: Evidence) -> Observation:
    """Whether the loss is higher at the end than before the loss scale fell: skipped steps alone would leave it where it was."""
    losses = evidence.column("loss")
    events = evidence.raised_by("scale-halvings", "scale-skips")
    row = next((k for k, step in enumerate(evidence.steps) if events and step >= step_of(events[0])), 0)
    before = finite(losses[max(0, row - 25) : max(0, row - 5)])
    late = finite(losses[max(row, len(losses) - 20) :])
    if min(len(before), len(late)) < 10:
        return UNKNOWN
    noise = jitter(before) * math.sqrt(2 / min(len(before), len(late)))
    was, now = median(before), median(late)
    if now <= was + 1.5 * noise:
        return ABSENT
    said = f"the loss is {now:.3f} at the end and was {was:.3f} before the loss scale fell"
    return present(evidence.steps[row], said, None, now, was + 1.5 * noise)


SIGNS_OF_LOSS_SCALE: tuple[Sign, ...] = (
    Sign(
        "loss-rises-with-scale", "the loss is higher at the end than before the loss scale fell", ("steps.loss",), 0.2,
        _rises_with_scale,
        given="loss-scale-falls",
    ),
    Sign(
        "scale-falls-alone", "the loss scale falls where no gradient overflowed", ("steps.loss_scale", "run.ours"), 0.002,
        _scale_falls_alone,
    ),
)  # fmt: skip


# ── where the time goes (medians of the later three quarters, since the first steps compile), and resumes ────────────────

MAX_SHARE = 0.2
"""Share of a step's time, outside its arithmetic, from which waiting is a sign."""
SLOWER = 1.4
"""Factor between the durations of late and early steps."""
SLOWER_CLOCK = 1.5
"""Factor between the fast tenth of late steps and the median of early ones, in processor time; busy machines reached 1.33."""
LEVEL_SIGMAS = 5.0
"""Standard errors by which a level must move to be more than chance."""


def _share(evidence: Evidence, column: str) -> tuple[int, float] | None:
    """The step at which the later three quarters of the run begin, and the median share of their time."""
    rows = [
        (row["step"], part / whole)
        for row in evidence.run.steps
        if (part := number(row.get(column))) is not None and (whole := number(row.get("seconds")))
    ]
    later = rows[len(rows) // 4 :]
    return (int(later[0][0]), median(share for _, share in later)) if len(later) >= FEWEST else None


def _waits_for(column: str, words: str, evidence: Evidence) -> Observation:
    found = _share(evidence, column)
    if found is None:
        return UNKNOWN
    step, share = found
    if share < MAX_SHARE:
        return ABSENT
    return present(step, f"{share:.0%} of a step's time is {words}", None, share, MAX_SHARE)


def _are_alike(evidence: Evidence) -> bool:
    """Whether the last third of steps has no more tokens each than the first, as far as they are counted."""
    counts = [found for row in evidence.run.steps if (found := number(row.get("tokens"))) is not None]
    taken = [now - before for before, now in pairwise(counts) if now > before]
    third = len(taken) // 3
    return not third or median(taken[-third:]) < SLOWER * median(taken[:third])


def _slows_down(evidence: Evidence) -> Observation:
    """Late steps take longer than early ones, in what neither data nor other ranks account for.

    Where processor time is recorded, that distinguishes a slow clock from other programs, which make any step longer.
    """
    if (evidence.has("steps.cpu_seconds") and evidence.has("run.on_cpu")) or not _are_alike(evidence):
        return UNKNOWN
    own = []
    for row in evidence.run.steps[3:]:
        if (seconds := number(row.get("seconds"))) is not None:
            others = (number(row.get(name)) or 0.0 for name in ("data_seconds", "wait_seconds"))
            own.append((int(row["step"]), seconds - sum(others)))
    # The slow quarter of early steps and the fast tenth of late ones: other programs slow many steps, heat slows all.
    return _is_slower(own, lambda early: quantiles(early, n=4)[2], SLOWER)


def _computes_slower(evidence: Evidence) -> Observation:
    """The same step takes more processor time, so its clock is slower. Other programs would make it wait instead."""
    if not _are_alike(evidence):
        return UNKNOWN
    spent = [(int(row["step"]), number(row.get("cpu_seconds"))) for row in evidence.run.steps[3:]]
    known = [(step, seconds) for step, seconds in spent if seconds]
    # A core that is shared with another program makes many steps longer, and not the fastest ones.
    return _is_slower(known, median, SLOWER_CLOCK, " of processor time")


def _is_slower(
    times: list[tuple[int, float]], level: Callable[[list[float]], float], factor: float, kind: str = ""
) -> Observation:
    """Whether the fast tenth of the last third of steps takes a factor longer than the level of the first third."""
    if len(times) < 4 * FEWEST:
        return UNKNOWN
    third = len(times) // 3
    early, late = [seconds for _, seconds in times[:third]], [seconds for _, seconds in times[-third:]]
    limit = factor * level(early)
    if quantiles(late, n=10)[0] < limit:
        return ABSENT
    begins = next((step for step, seconds in times[third:] if seconds > limit), times[-third][0])
    said = f"a step took {median(early):.3g} s{kind} at first and takes {median(late):.3g} s at the end"
    return present(begins, said, None, median(late), limit)


def _moves_at_resume(evidence: Evidence) -> Observation:
    losses = evidence.column("loss")
    for step in evidence.resumes:
        row = evidence.row_after(step)
        before, after = losses[max(0, row - BEFORE) : row], losses[row : row + BEFORE]
        known = [value for value in (*before, *after) if value is not None]
        was, now = level_of(before), level_of(after)
        if was is None or now is None:
            continue
        noise = jitter(known) / math.sqrt(min(len(before), len(after)))
        if now - was > max(LEVEL_SIGMAS * noise, 0.02 * abs(was)):
            said = f"the level of the loss went from {was:.3f} to {now:.3f} where the run resumed, at step {step}"
            return present(step, said, None, now, was)
    return ABSENT


def _spikes_at_resume(evidence: Evidence) -> Observation:
    for spike in evidence.raised_by("loss-spike"):
        at = step_of(spike)
        since = next((step for step in evidence.resumes if 0 < at - step <= BEFORE), None)
        if since is not None:
            return present(at, f"the loss jumped at step {at}, soon after the run resumed from step {since}")
    return ABSENT


def _was_resumed(evidence: Evidence) -> Observation:
    steps = evidence.resumes
    return present(steps[0], f"the run resumed from step {steps[0]}") if steps else ABSENT


_TIME, _DATA, _WAIT = "steps.seconds", "steps.data_seconds", "steps.wait_seconds"

SIGNS_OF_TIME: tuple[Sign, ...] = (
    Sign(
        "data-is-slow", "a fifth of the time or more is spent waiting for data", (_TIME, _DATA), 0.003,
        partial(_waits_for, "data_seconds", "waiting for data"), "{data_seconds}",
    ),
    Sign(
        "ranks-wait", "a fifth of the time or more is spent waiting for the slowest rank", (_TIME, _WAIT), 0.02,
        partial(_waits_for, "wait_seconds", "waiting for the slowest rank"),
    ),
    Sign("steps-slow-down", "late steps take longer than early ones", (_TIME,), 0.012, _slows_down),
    Sign(
        "computing-slows-down", "late steps take more processor time than early ones",
        ("steps.cpu_seconds", "run.on_cpu"), 0.006, _computes_slower, "{cpu_seconds}",
    ),
    Sign("run-was-resumed", "the run was resumed", ("run.ours",), 0.2, _was_resumed),
    Sign(
        "level-moves-at-resume", "the loss goes on at a higher level after a resume", ("run.ours", "steps.loss"), 0.003,
        _moves_at_resume,
    ),
    Sign(
        "spike-at-resume", "the loss jumps soon after a resume", ("run.ours", "steps.loss"), 0.1, _spikes_at_resume,
        given="loss-spikes",
    ),
)  # fmt: skip
