"""Signs in the rows of steps: how a spike begins and ends, and what the gradient norm does.

The detectors say that a loss jumped; these signs say how. A corrupted batch is over with the next one, an unstable
update takes many steps to recover from, and gradients that grow come before a loss that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from narrowgauge.analysis.diagnosis.evidence import Evidence, step_of
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.monitor.features import number

BEFORE = 30
"""Steps whose median is the level before something."""
FEWEST = 5
"""Steps from which a median says something."""
LEAD = 8
"""Steps before a spike in which a rising gradient norm counts as its beginning (BLOOM-176B: 2 to 4)."""
RISE, FALL = 3.0, 30.0
"""Factors over its level of a gradient norm that leads a spike, and below it of one that has vanished."""
STEPS_BY = 1.6
"""Factor between gradient norms of two steps from which a lasting change of level is looked for."""
ERRATIC = 0.15
"""Median difference of two consecutive losses over their level; healthy batches of 256 tokens differ by 0.02."""
SPREAD = 20.0
"""That difference times the root of a step's tokens, in nats; healthy runs reach 1.7 at 256 tokens and 13 at 2,048."""
ROUGH = 1.5
"""Factor over its level before of the gradient norm after a spike that has left something behind."""
BURST = 6.0
"""Factor over its level of a gradient norm that is a burst where it lasts for two steps."""
SETTLED = 20
"""Steps after which delayed scales have seen what comes."""
EXCEEDS = 50.0
"""Factor over its level of the count of values beyond a delayed scale; healthy runs of small batches reach 18."""


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
    step = evidence.steps[found[0]]
    return present(step, f"the loss jumped at step {step} and was back at the next one", value=1.0)


def _is_between_gaps(evidence: Evidence, row: int) -> bool:
    """Whether steps beside a row have none of their own."""
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


def level_of(values: Sequence[float | None]) -> float | None:
    """The median of finite values; ``None`` for too few, and where it is zero: nothing is so many times that."""
    known = [value for value in values if value is not None and math.isfinite(value)]
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
    """What a bad update has done is there at the next steps; what a bad batch was is not."""
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
    return present(
        step,
        f"the gradient norm is {now / was:.1f} times its level after the spike of step {step}",
        None,
        now,
        ROUGH * was,
    )


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
            return present(
                step,
                f"the gradient norm fell from {level:.3g} to {highest:.3g} at step {step}",
                None,
                highest,
                level / FALL,
            )
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
        return present(
            step,
            f"the gradient norm is {factor:.3g} times what it was from step {step} on, and the loss as before",
            None,
            factor,
        )
    return ABSENT


def _moves(losses: Sequence[float | None], row: int) -> bool:
    """Whether the loss is at another level from a row on, beyond its noise."""
    was, now = level_of(losses[row - 10 : row]), level_of(losses[row : row + 10])
    known = [value for value in losses[row - BEFORE : row + BEFORE] if value is not None]
    noise = median(abs(b - a) for a, b in pairwise(known)) if len(known) > 1 else 0.0
    return was is None or now is None or abs(now - was) > 2 * noise + 0.02 * abs(was)


def _is_erratic(evidence: Evidence) -> Observation:
    losses = [loss for loss in evidence.column("loss") if loss is not None and math.isfinite(loss)]
    late, tokens = losses[len(losses) // 2 :], evidence.tokens_per_step
    if tokens is None:
        return UNKNOWN
    if len(late) < BEFORE or evidence.raised_by("loss-spike"):
        return ABSENT
    level, noise = median(late), median(abs(b - a) for a, b in pairwise(late))
    if noise <= max(ERRATIC * level, SPREAD / math.sqrt(tokens)) or level <= 0:
        return ABSENT
    said = f"the loss differs by {noise / level:.0%} from one step to the next, and no step is a spike"
    return present(None, said, None, noise, ERRATIC * level)


def _exceeds_scales(evidence: Evidence) -> Observation:
    """A burst: a few values exceed a delayed scale in every step, since the scale is that of earlier ones."""
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
        level = [loss for loss in losses[row - BEFORE : row] if loss is not None and math.isfinite(loss)]
        noise = median(abs(b - a) for a, b in pairwise(level)) if len(level) > FEWEST else math.inf
        if max(late) < min(level) - 3 * noise:
            step = evidence.steps[row]
            return present(
                step,
                f"the loss fell from {before:.3f} to {max(late):.3f} at step {step}",
                None,
                max(late),
                min(level) - 3 * noise,
            )
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
    """The detector's, which leaves out steps that the loss scaler skipped, without those whose loss says it already."""
    finite = {
        step
        for step, loss in zip(evidence.steps, evidence.column("loss"), strict=True)
        if loss is None or math.isfinite(loss)
    }
    for event in evidence.raised_by("nonfinite-step"):
        if step_of(event) in finite:
            return present(step_of(event), f"the gradient norm of step {step_of(event)} is not finite")
    return ABSENT


def _bursts(evidence: Evidence) -> Observation:
    """Gradients that jump for some steps, more than once, while the loss goes on as before."""
    if evidence.raised_by("loss-spike"):
        return ABSENT
    found, last, length = [], -2, 0
    norms = evidence.column("grad_norm")
    finite = [norm if norm is not None and math.isfinite(norm) else math.inf for norm in norms]
    for row in range(BEFORE // 3, len(norms)):
        norm, start = norms[row], max(0, row - BEFORE)
        if norm is None or not norm < math.inf or norm <= BURST * min(finite[start:row]):
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
    return present(
        step,
        f"the gradient norm jumped {len(found)} times for some steps, to {factor:.0f} times its level at step {step}",
    )


def _not_falling(evidence: Evidence) -> Observation:
    losses = [loss for loss in evidence.column("loss") if loss is not None and math.isfinite(loss)]
    if len(losses) < 2 * BEFORE:
        return UNKNOWN
    early, late = losses[: len(losses) // 4], losses[-len(losses) // 4 :]
    noise = median(abs(b - a) for a, b in pairwise(losses))
    if median(late) < median(early) - 2 * noise / math.sqrt(len(late)):
        return ABSENT
    said = f"the median loss was {median(early):.3f} in the first quarter and is {median(late):.3f} in the last"
    return present(evidence.steps[-1], said, None, median(late), median(early))


_LOSS, _NORM = ("steps.loss",), ("steps.grad_norm",)
LATER = "a run of narrowgauge train of this version, which records {}"
"""What records a column that older versions lack."""

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
    Sign("loss-is-erratic", "the loss varies as no mean over a step's tokens does", _LOSS, 0.03, _is_erratic),
    Sign("loss-drops", "the loss falls at one step far below all recent ones", _LOSS, 0.005, _loss_drops),
    Sign(
        "scales-are-exceeded", "a burst of values exceeds delayed scales", ("steps.saturated",), 0.003,
        _exceeds_scales,
    ),
)  # fmt: skip
"""The signs in the rows of steps."""
