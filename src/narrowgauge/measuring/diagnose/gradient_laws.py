"""Laws of gradients, of the optimizer's step, and of the ranks."""

import math
from collections import Counter, deque
from collections.abc import Callable
from statistics import median

from narrowgauge.measuring.diagnose.step_metrics import (
    COLUMNS,
    UNNAMED,
    DeclaredLaw,
    Emit,
    Law,
    StepMetrics,
    reads,
)
from narrowgauge.measuring.kinds import KINDS

NUMBERS = ("loss", "grad_norm", "limit", "arrived", "lr", "largest", "val_loss")
"""Numbers that must be finite, in the order of a step."""
MOSTLY = KINDS["zero-gradients"].bound
"""Share of the steps from which what some loops do by design is a fault."""
FEW = 3
MANY = 20
"""Steps before a count may speak: of all gradients in each step, and else."""


@reads(also=f"{' '.join(NUMBERS)} bad bad_values bad_weight skipped")
def nonfinite(emit: Emit) -> Law:
    """Read the first place of the run that is not finite, once: it makes all later ones so.

    A loss scaler skips what overflows. A log without skipped steps must hold three such
    norms in a row.
    """
    bad_steps: list[int] = []
    was_reported = False
    while True:
        step = yield
        stage, names = _first_bad(step)
        if was_reported or not stage:
            bad_steps.clear()
            continue
        if step.skipped and math.isfinite(step.loss or 0.0):
            continue
        bad_steps.append(step.step)
        is_known = stage != "gradient" or step.skipped is not None or step.bad
        if is_known or len(bad_steps) >= 3:
            was_reported = True
            count = step.bad_values if names else 1
            emit("nonfinite", names, count, step=bad_steps[0], stage=stage)


def _first_bad(step: StepMetrics) -> tuple[str, list[str]]:
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


def count_of(
    kind: str, needs: str, names_of: Callable[[StepMetrics], list[str] | None], also: str = ""
) -> DeclaredLaw:
    """Return the law that counts the steps in which something is so, of all gradients or of a tensor.

    Report from three steps on, if it is so of all in each, and from twenty on. Policies, games, rare
    experts and layers that are dropped have such steps by design.

    Args:
        names_of: returns the tensors of which it is so, an empty name for all, and ``None`` if that was
            not measured.
    """

    @reads(needs, also, least=FEW)
    def law(emit: Emit) -> Law:
        counts: Counter[str] = Counter()
        since: dict[str, int] = {}
        total = most = 0
        while True:
            step = yield
            names = names_of(step)
            if names is not None:
                total += 1
                most = max(most, len(names))
                counts.update(names)
                since = dict.fromkeys(names, step.step) | since
            if total < (FEW if counts[""] == total else MANY):
                continue
            tensors = [name for name, _ in counts.most_common()]
            named = [name for name in tensors if not name.startswith(UNNAMED)]
            if len(named) >= most:  # rows left out other tensors, which have names elsewhere
                tensors = named
            often = [name for name in tensors if counts[name] >= MOSTLY * total]
            if "" in often:
                often = [""]
            rest = [name for name in tensors if counts[name] < MOSTLY * total]
            for names, is_usual in ((often, False), (rest, True)):
                if names:
                    share = counts[names[0]] / total
                    emit(kind, names, share, 0.0, step=since[names[0]], is_usual=is_usual)

    return law


def _zero(step: StepMetrics) -> list[str] | None:
    if step.arrived is None or step.skipped:
        return None
    if step.arrived == 0 and not step.missing:
        return [""]
    return step.zero or []


def _flagged(flag: float | None) -> list[str] | None:
    if flag is None:
        return None
    return [""] if flag > 0 else []


zero_gradients = count_of("zero-gradients", "arrived", _zero, "zero missing skipped")
missing_gradients = count_of("missing-gradients", "missing", lambda step: step.missing)
gradients_kept = count_of("gradients-kept", "kept", lambda step: _flagged(step.kept))
same_data = count_of("same-data", "same_data", lambda step: _flagged(step.same_data))


@reads("arrived limit", "grad_norm skipped")
def clip_norm(emit: Emit) -> Law:
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
            emit("clip-norm", "", norm, limit, slack)


@reads(also="unsummed apart")
def ranks(emit: Emit) -> Law:
    """Read gradients that differ between ranks, and weights that differ where no gradient did before."""
    explained = set[str]()
    while True:
        step = yield
        explained.update(step.unsummed or ())
        apart = [name for name in step.apart or () if name not in explained]
        if step.unsummed:
            emit("ranks-apart", step.unsummed, len(step.unsummed), 0)
        elif apart:
            emit("ranks-apart", apart, len(apart), 0, stage="optimizer step")


@reads("lr largest", least=10)
def zero_rate(emit: Emit) -> Law:
    """Read learning rates of exactly 0 in many steps in a row, in which no weight moves."""
    still: list[int] = []
    longest = still
    while True:
        step = yield
        if step.lr or step.largest:
            still = []
        elif step.lr is not None and step.largest is not None:
            still.append(step.step)
        longest = max(longest, still, key=len)
        if len(longest) >= KINDS["zero-rate"].bound:
            emit("zero-rate", "", len(longest), None, step=longest[0])


@reads("largest", "largest_in lr skipped", least=5)
def jump(emit: Emit) -> Law:
    """Read a weight that moved far in one step, beside the largest rate and the usual step of 20.

    In a warm-up the rate of one step is not a unit. A step is compared with those before it, so that a
    move that is far in every later step is reported too; the first one with those behind it.
    """
    recent: deque[StepMetrics] = deque(maxlen=20)
    while True:
        step = yield
        if step.largest is None or step.skipped:
            continue
        recent.append(step)
        *steps_before, far = recent
        if len(recent) == 5 and recent[0].largest > step.largest:
            far, *steps_before = recent
        if steps_before:
            usual = median(x.largest for x in steps_before)
            usual = max(usual, *(x.lr or 0.0 for x in recent))
            bound = KINDS["weights-jump"].bound * usual
            if far.largest > bound:
                emit("weights-jump", far.largest_in or "", far.largest, None, bound, step=far.step)
