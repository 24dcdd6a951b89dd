"""Laws of gradients, of the optimizer's step, and of the ranks."""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Law, Step

# ── gradients ─────────────────────────────────────────────────────────────────────────────────────


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
    if step.bad:
        return "gradient", step.bad
    if not math.isfinite(step.grad_norm or 0.0):
        return "gradient", [""]
    return "", []


class _Share:
    """Count the steps of a run in which something is so.

    Where it is so in all of them, the reading is an error. Else it is a note with the share: policies,
    games and rare experts have such steps, and mean them.
    """

    def __init__(self, kind: str, note: str) -> None:
        self.kind = kind
        self.note = note
        self.count = 0
        self.total = 0
        self.since = 0

    def add(self, is_so: bool, step: int) -> None:
        self.total += 1
        self.count += is_so
        if is_so:
            self.since = self.since or step

    def reading(self, tensors: str | list[str] = "") -> list[Reading]:
        if self.count == self.total and self.count >= KINDS[self.kind].bound:
            return [measured(self.kind, tensors, self.count, step=self.since)]
        if 0 < self.count < self.total and self.total >= 20:
            part = self.count / self.total
            return [measured(self.note, tensors, part, 0.0, step=self.since)]
        return []


def zero_gradients() -> Law:
    """Read steps without a gradient, of all tensors and of one that had a gradient."""
    whole = _Share("zero-gradients", "zero-share")
    counts: Counter[str] = Counter()
    since: dict[str, int] = {}
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.arrived is None:
            continue
        whole.add(step.arrived == 0, step.step)
        if step.arrived:
            counts.update(step.zero)
        for name in step.zero:
            since.setdefault(name, step.step)
        readings = whole.reading()
        if counts and whole.total >= 20:
            names = [name for name, _ in counts.most_common()]
            part = counts[names[0]] / whole.total
            readings.append(measured("zero-share", names, part, 0.0, step=since[names[0]]))


def gradients_kept() -> Law:
    """Read steps that begin with the gradient of the step before."""
    whole = _Share("gradients-kept", "kept-share")
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.kept is not None:
            whole.add(step.kept, step.step)
            readings = whole.reading()


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


# ── the optimizer and the ranks ───────────────────────────────────────────────────────────────────


def ranks() -> Law:
    """Read gradients that were not summed over ranks; where they were, weights that differ."""
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        kind = "ranks-unsummed" if step.unsummed else "ranks-apart"
        names = step.unsummed or step.apart
        if names:
            readings = [measured(kind, names, len(names), 0, step=step.step)]


def jump() -> Law:
    """Read a weight that moved far in one step, beside the largest rate and the usual step of 20.

    In a warm-up the rate of one step is no unit.
    """
    recent: deque[tuple[float, float, Step]] = deque(maxlen=20)
    factor = KINDS["weights-jump"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        if step.largest is None or step.skipped:
            continue
        recent.append((step.largest, step.rate or 0.0, step))
        if len(recent) < 5:
            continue
        sizes, rates, steps = zip(*recent, strict=True)
        bound = factor * max(median(sizes), *rates)
        if max(sizes) > bound:
            worst = steps[sizes.index(max(sizes))]
            name = worst.largest_in
            readings = [measured("weights-jump", name, max(sizes), None, bound, step=worst.step)]
