"""Laws of the losses, of skipped steps and the loss scale, and of the throughput: a log of any program
may have these numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from statistics import median

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Law, Step, share


def skipped() -> Law:
    """Read skipped steps, beyond those of a search for the loss scale.

    Rows that come evenly between steps are of micro-batches.
    """
    count = 0
    leading = 0
    since = 0
    taken: list[int] = []
    gaps: set[int] = set()
    has_scale = False
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.skipped is None:
            continue
        readings = []
        has_scale |= step.loss_scale is not None
        if step.skipped:
            count += 1
            since = since or step.step
            leading += not taken
        else:
            if taken:
                gaps.add(step.step - taken[-1])
            taken.append(step.step)
        bound = min(leading, 24) + KINDS["skipped-steps"].bound + 0.05 * (count + len(taken))
        is_known = has_scale or not taken or len(taken) > 2
        is_even = len(gaps) == 1 and gaps != {1} and not has_scale
        if count > bound and is_known and not is_even:
            readings = [measured("skipped-steps", "", count, None, bound, step=since)]


def failed() -> Law:
    """Read a run whose loss or gradient is not finite for long.

    An overflow is no failure as long as the loss scaler can lower the scale. A scale of 1 and below
    leaves float16 none of its advantage.
    """
    in_a_row = 0
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        if step.loss is None and step.grad_norm is None:
            continue
        scale = step.loss_scale or math.inf
        has_loss = math.isfinite(step.loss or 0.0)
        is_bad = not has_loss or not math.isfinite(step.grad_norm or 0.0)
        if has_loss and scale < math.inf:
            is_bad = scale <= 1 and (is_bad or bool(step.skipped))
        in_a_row = in_a_row + 1 if is_bad else 0
        if in_a_row >= KINDS["divergence"].bound:
            readings = [measured("divergence", "", in_a_row, step=step.step)]


def loss_scale(settling: int = 100) -> Law:
    """Read a loss scale that is halved often, one at its floor, and one that began anew.

    The first steps search for a scale.
    """
    before: tuple[int, float] | None = None
    halved: deque[int] = deque()
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        scale = step.loss_scale
        if not scale:
            continue
        number, last = before or (step.step, scale)
        before = step.step, scale
        most = last * 2.0 ** min(max(step.step - number, 0), 60)
        if most < scale < math.inf:
            readings.append(measured("loss-scale-anew", "", scale, last, last, step=step.step))
        if step.step <= settling:
            continue
        if scale < last:
            halved += [step.step] * max(1, round(math.log2(last / scale)))
        while halved and halved[0] <= step.step - settling:
            halved.popleft()
        if len(halved) >= KINDS["scale-halvings"].bound:
            readings.append(measured("scale-halvings", "", len(halved), step=step.step))
        if scale <= KINDS["scale-floor"].bound:
            readings.append(measured("scale-floor", "", scale, step=step.step))


# ── losses and throughput ─────────────────────────────────────────────────────────────────────────


def loss_rise() -> Law:
    """Give the median loss of a run that ends above its start: a number, for not every loss has a level."""
    losses: list[float] = []
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.loss is None or not math.isfinite(step.loss):
            continue
        readings = []
        losses.append(step.loss)
        if len(losses) < 60:
            continue
        level = median(losses[-30:])
        first = median(losses[:5])
        limit = 1.2 * max(losses[:5])
        if 0.05 < limit < level:
            readings = [measured("loss-rise", "", level, first, limit - first, step=step.step)]


def loss_spikes() -> Law:
    """Read losses far above those before."""
    return _spikes("loss-spike", lambda step: step.loss, 0.01)


def gradient_spikes() -> Law:
    """Read norms of gradients far above those before; norms vary by factors."""

    def logarithm(step: Step) -> float | None:
        return math.log(step.grad_norm) if step.grad_norm and step.grad_norm > 0 else None

    return _spikes("gradient-spike", logarithm, math.log(10.0) / 8)


def _spikes(kind: str, value_of: Callable[[Step], float | None], floor: float) -> Law:
    """Read values far above the median of the last 30 steps.

    The noise is the median difference of two steps: distances from the median would count the fall of
    a loss. A spike does not enter the statistics; after 50 in a row they are the new level.
    """
    values: deque[float] = deque(maxlen=100)
    beyond: list[float] = []
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        value = value_of(step)
        if value is None or not math.isfinite(value):
            continue
        limit = math.inf
        if len(values) >= 20:
            level = median([*values][-30:])
            noise = 1.4826 / math.sqrt(2) * median(abs(b - a) for a, b in pairwise(values))
            least = floor * max(1.0, abs(level)) if kind == "loss-spike" else floor
            limit = level + KINDS[kind].bound * max(noise, least)
        if value > limit:
            beyond.append(value)
            shown = (value, limit)
            if kind == "gradient-spike":
                shown = (math.exp(value), math.exp(min(limit, 700.0)))
            readings = [measured(kind, "", shown[0], None, shown[1], step=step.step)]
            if len(beyond) < 50:
                continue
            values.clear()
            values.extend(beyond)
        else:
            values.append(value)
        beyond = []


def throughput(size: int = 20, least_seconds: float = 10.0) -> Law:
    """Read steps that became slower for long, and a device that is idle for most of the median step.

    Single slow steps do not count: they compile, evaluate or save. Neither does less than ten lost
    seconds, which other programs explain.
    """
    window: deque[Step] = deque(maxlen=size)
    medians: list[float] = []
    count = 0
    since = 0
    shares: dict[str, list[float]] = defaultdict(list)
    low: dict[str, int] = {}
    lost = 0.0
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        for name, kind in (("utilization", "idle-device"), ("mfu", "low-mfu")):
            readings += _idle(kind, share(getattr(step, name)), shares[name], low, step)
        rate = step.tokens_per_second
        if not rate or not math.isfinite(rate):
            continue
        window.append(step)
        count += 1
        middle = median(x.tokens_per_second or 0.0 for x in window)
        usual = 0.0
        if medians:
            usual = max(median(medians), median(medians[: -(-len(medians) // 4)]))
        limit = usual * (1 - KINDS["slower-steps"].bound)
        if middle >= limit or len(window) < size:
            since = 0
            if count % size == 0:
                medians.append(middle)
            continue
        if not since:
            slow = _slow_steps(window, limit)
            since = slow[0].step
            lost = sum(_lost(x, usual) for x in slow)
        else:
            lost += _lost(step, usual)
        if lost >= least_seconds:
            bound = usual - limit
            readings.append(measured("slower-steps", "", middle, usual, bound, step=since))


def _idle(
    kind: str, value: float | None, shares: list[float], low: dict[str, int], step: Step
) -> Iterator[Reading]:
    """Yield a share of the device's time that is low in the median step, with the first low step."""
    limit = 1 - KINDS[kind].bound
    if value is not None:
        shares.append(value)
        if value < limit:
            low.setdefault(kind, step.step)
    middle = median(shares or [1.0])
    if len(shares) >= 2 and middle < limit:
        yield measured(kind, "", middle, 1.0, step=low[kind])


def _slow_steps(window: Iterable[Step], limit: float) -> list[Step]:
    """Return the steps of a window from the first slow one on, after the last two fast ones in a row."""
    slow: list[Step] = []
    num_fast = 0
    for step in window:
        is_slow = (step.tokens_per_second or 0.0) < limit
        num_fast = 0 if is_slow else num_fast + 1
        if num_fast >= 2:
            slow = []
        elif is_slow or slow:
            slow.append(step)
    return slow


def _lost(step: Step, usual: float) -> float:
    """Return the seconds that a step lost; a log without times lost enough."""
    if step.seconds is None:
        return math.inf
    return step.seconds * (1 - (step.tokens_per_second or 0.0) / usual)
