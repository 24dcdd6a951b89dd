"""Laws of gradients, of the optimizer's step, and of the ranks."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from statistics import median

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Law, Step


def nonfinite(least: int = 3) -> Law:
    """Read the first place of the run that is not finite, once: it makes all later ones so.

    A loss scaler skips what overflows. A log that does not tell of skipped steps must hold several such
    norms in a row.
    """
    is_told = False
    bad_steps: list[int] = []
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        stage, names = _first_bad(step)
        if is_told or not stage:
            bad_steps.clear()
            continue
        if step.skipped and math.isfinite(step.loss or 0.0):
            continue
        bad_steps.append(step.step)
        is_unknown = stage == "gradient" and step.skipped is None and not step.bad
        if is_unknown and len(bad_steps) < least:
            continue
        readings = [measured("nonfinite", names, len(names), step=bad_steps[0], stage=stage)]
        is_told = True


def _first_bad(step: Step) -> tuple[str, list[str]]:
    """Return the first stage of a step that is not finite, and the names there."""
    if step.bad_weight:
        return "between steps", [step.bad_weight]
    if step.bad_output:
        return "forward", [step.bad_output]
    if not math.isfinite(step.loss or 0.0):
        return "loss", [""]
    if step.bad or not math.isfinite(step.grad_norm or 0.0):
        return "gradient", step.bad or [""]
    return "", []


def _share(kind: str, note: str, is_so: Callable[[Step], bool | None]) -> Law:
    """Count the steps of a run in which something is so.

    Where it is so in all of them, the reading is an error. Else it is a note with the share: policies,
    games and rare experts have such steps, and mean them.
    """
    count = 0
    total = 0
    since = 0
    readings: list[Reading] = []
    while True:
        step = yield readings
        value = is_so(step)
        if value is None:
            continue
        total += 1
        count += value
        since = since or step.step * value
        readings = []
        if count == total and count >= KINDS[kind].bound:
            readings = [measured(kind, "", count, step=since)]
        elif 0 < count < total and total >= 20:
            readings = [measured(note, "", count / total, 0.0, step=since)]


def zero_gradients() -> Law:
    """Count the steps without a gradient."""

    def is_zero(step: Step) -> bool | None:
        return None if step.arrived is None else step.arrived == 0

    return _share("zero-gradients", "zero-share", is_zero)


def gradients_kept() -> Law:
    """Count the steps that begin with the gradient of the step before."""

    def is_kept(step: Step) -> bool | None:
        return None if step.kept is None else bool(step.kept)

    return _share("gradients-kept", "kept-share", is_kept)


def zero_gradient() -> Law:
    """Read how often a tensor that had a gradient has none, while others have one."""
    counts: Counter[str] = Counter()
    since: dict[str, int] = {}
    total = 0
    readings: list[Reading] = []
    while True:
        step = yield readings
        total += step.arrived is not None
        if step.arrived:
            counts.update(step.zero)
            for name in step.zero:
                since.setdefault(name, step.step)
        if counts and total >= 20:
            names = [name for name, _ in counts.most_common()]
            share = counts[names[0]] / total
            readings = [measured("zero-share", names, share, 0.0, step=since[names[0]])]


def clip_norm() -> Law:
    """Read gradients that reach the step with another norm than the limit of the clip allows."""
    slack = KINDS["clip-norm"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        norm = step.arrived
        limit = step.limit
        if not limit or not norm or not math.isfinite(norm) or step.skipped:
            continue
        power = round(math.log2(limit / norm))
        is_scaled = power >= 3 and abs(norm * 2.0**power / limit - 1) < 1e-5
        if is_scaled or norm > limit * (1 + slack):
            kind = "clipped-scaled" if is_scaled else "clip-norm"
            readings = [measured(kind, "", norm, limit, slack * limit, step=step.step)]


def ranks() -> Law:
    """Read gradients that were not summed over ranks; where they were, weights that differ."""
    readings: list[Reading] = []
    while True:
        step = yield readings
        kind = "ranks-unsummed" if step.unsummed else "ranks-apart"
        names = step.unsummed or step.apart
        readings = []
        if names:
            readings = [measured(kind, names, len(names), 0, step=step.step)]


def jump() -> Law:
    """Read a weight that moved far in one step, beside the largest rate and the usual step of 20.

    In a warm-up the rate of one step is no unit.
    """
    recent: deque[Step] = deque(maxlen=20)
    factor = KINDS["weights-jump"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        if step.largest is None or step.skipped:
            continue
        recent.append(step)
        sizes = [x.largest or 0.0 for x in recent]
        bound = factor * max(median(sizes), *(x.rate or 0.0 for x in recent))
        if len(recent) >= 5 and max(sizes) > bound:
            worst = recent[sizes.index(max(sizes))]
            name = worst.largest_in
            readings = [measured("weights-jump", name, max(sizes), None, bound, step=worst.step)]
