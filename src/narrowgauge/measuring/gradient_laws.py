"""Laws of gradients, of the optimizer's step, and of the ranks."""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.step import COLUMNS, Law, Step, Tell, reads

NUMBERS = ("loss", "grad_norm", "limit", "arrived", "lr", "largest", "val_loss")
"""Numbers that must be finite, in the order of a step."""
MOSTLY = 0.9
"""Share of the steps from which a gradient that is missing, or is not new, is a fault."""


@reads(also=f"{' '.join(NUMBERS)} bad bad_values bad_weight skipped")
def nonfinite(tell: Tell, least: int = 3) -> Law:
    """Read the first place of the run that is not finite, once: it makes all later ones so.

    A loss scaler skips what overflows. A log without skipped steps must hold several such
    norms in a row.
    """
    bad_steps: list[int] = []
    is_told = False
    while True:
        step = yield
        stage, names = _first_bad(step)
        if is_told or not stage:
            bad_steps.clear()
            continue
        if step.skipped and math.isfinite(step.loss or 0.0):
            continue
        bad_steps.append(step.step)
        is_known = stage != "gradient" or step.skipped is not None or step.bad
        if is_known or len(bad_steps) >= least:
            count = step.bad_values if names else 1
            tell("nonfinite", names, count, step=bad_steps[0], stage=stage)
            is_told = True


def _first_bad(step: Step) -> tuple[str, list[str]]:
    """Return the first stage of a step that is not finite, and the tensors there."""
    if step.bad_weight:
        return "between steps", [step.bad_weight]
    for name in NUMBERS:
        stage = COLUMNS[name].stage
        if stage == "gradient" and step.bad:
            return stage, step.bad
        if not math.isfinite(getattr(step, name) or 0.0):
            return stage, []
    return "", []


@reads("arrived", "zero", least=3)
def zero_gradients(tell: Tell) -> Law:
    """Count the steps without a gradient, and those in which one tensor alone has none.

    Report the first from three steps on, if all are so, and tensors from twenty on. Policies, games,
    rare experts and layers that are dropped have such steps by design.
    """
    counts: Counter[str] = Counter()
    since: dict[str, int] = {}
    total = 0
    while True:
        step = yield
        if step.arrived is not None:
            total += 1
            names = (step.zero or []) if step.arrived else [""]
            counts.update(names)
            for name in names:
                since.setdefault(name, step.step)
        often = [name for name, count in counts.most_common() if count >= MOSTLY * total]
        if "" in often and (total >= 20 or 3 <= counts[""] == total):
            tell("zero-gradients", "", counts[""] / total, 0.0, step=since[""])
        elif often and total >= 20:
            first = often[0]
            tell("zero-gradients", often, counts[first] / total, 0.0, step=since[first])


@reads("kept", least=3)
def gradients_kept(tell: Tell) -> Law:
    """Count the steps that begin with the gradient of the step before.

    Games of two networks have some by design.
    """
    count = total = 0
    first = 0
    while True:
        step = yield
        if step.kept is not None:
            total += 1
            count += step.kept > 0
            if step.kept and not first:
                first = step.step
        if count >= MOSTLY * total and (total >= 20 or 3 <= count == total):
            tell("gradients-kept", "", count / total, 0.0, step=first)


@reads("arrived limit", "grad_norm skipped")
def clip_norm(tell: Tell) -> Law:
    """Read gradients that reach the step with another norm than the limit of the clip allows: above it, or
    below it though the norm before the clip was above it.
    """
    while True:
        step = yield
        norm = step.arrived
        limit = step.limit
        if not limit or not norm or not math.isfinite(norm) or step.skipped:
            continue
        slack = KINDS["clip-norm"].bound * limit
        power = round(math.log2(limit / norm))
        is_scaled = power >= 3 and abs(norm * 2.0**power / limit - 1) < 1e-5
        is_short = norm < limit - slack and limit < (step.grad_norm or 0.0) < math.inf
        if is_scaled or is_short or norm > limit + slack:
            tell("clip-norm", "", norm, limit, slack)


@reads(also="unsummed apart")
def ranks(tell: Tell) -> Law:
    """Read gradients that differ between ranks, and weights that differ where no gradient did before."""
    explained: set[str] = set()
    while True:
        step = yield
        explained.update(step.unsummed or ())
        apart = [name for name in step.apart or () if name not in explained]
        if step.unsummed:
            tell("ranks-apart", step.unsummed, len(step.unsummed), 0)
        elif apart:
            tell("ranks-apart", apart, len(apart), 0, stage="optimizer step")


@reads("largest", "largest_in lr skipped", least=5)
def jump(tell: Tell) -> Law:
    """Read a weight that moved far in one step, beside the largest rate and the usual step of 20.

    In a warm-up the rate of one step is not a unit. A step is compared with those before it, so that a
    move that is far in every later step is reported too; the first one with those behind it.
    """
    recent: deque[Step] = deque(maxlen=20)
    while True:
        step = yield
        if step.largest is None or step.skipped:
            continue
        recent.append(step)
        *steps_before, far = recent
        if len(recent) == 5 and (recent[0].largest or 0.0) > step.largest:
            far, *steps_before = recent
        if steps_before:
            usual = median(x.largest or 0.0 for x in steps_before)
            usual = max(usual, *(x.lr or 0.0 for x in recent))
            bound = KINDS["weights-jump"].bound * usual
            if (far.largest or 0.0) > bound:
                tell("weights-jump", far.largest_in, far.largest, None, bound, step=far.step)
