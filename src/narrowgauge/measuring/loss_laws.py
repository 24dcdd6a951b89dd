"""Laws of the losses, of skipped steps and the loss scale, and of the throughput: a log of any program
may have these numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Law, Step


def skipped() -> Law:
    """Read skipped steps, beyond those of a search for the loss scale.

    Rows that come evenly between steps are of micro-batches.
    """
    count = 0
    leading = 0
    since = 0
    taken: list[int] = []
    has_scale = False
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.skipped is None:
            continue
        has_scale |= step.loss_scale is not None
        if step.skipped:
            count += 1
            since = since or step.step
            leading += not taken
        else:
            taken.append(step.step)
        bound = min(leading, 24) + KINDS["skipped-steps"].bound + 0.05 * (count + len(taken))
        readings = []
        if count > bound and (has_scale or not _is_even(taken)):
            readings = [measured("skipped-steps", "", count, None, bound, step=since)]


def _is_even(taken: list[int]) -> bool:
    """Return whether steps were taken at equal distances, as far as known."""
    gaps = {after - before for before, after in pairwise(taken)}
    return len(taken) in (1, 2) or (len(gaps) == 1 and gaps != {1})


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
        has_loss = math.isfinite(step.loss or 0.0)
        is_bad = not has_loss or not math.isfinite(step.grad_norm or 0.0)
        if has_loss and step.loss_scale and step.loss_scale < math.inf:
            is_bad = step.loss_scale <= 1 and (is_bad or bool(step.skipped))
        in_a_row = in_a_row + 1 if is_bad else 0
        if in_a_row >= KINDS["divergence"].bound:
            readings = [measured("divergence", "", in_a_row, step=step.step)]


def loss_scale(settling: int = 100) -> Law:
    """Read a loss scale that is halved often, and one that began anew.

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
        if scale < last and step.step > settling:
            halved += [step.step] * max(1, round(math.log2(last / scale)))
        while halved and halved[0] <= step.step - settling:
            halved.popleft()
        if len(halved) >= KINDS["scale-halvings"].bound:
            readings.append(measured("scale-halvings", "", len(halved), step=step.step))


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
        level = median(losses[-30:])
        limit = 1.2 * max(losses[:5])
        if len(losses) >= 60 and 0.05 < limit < level:
            first = median(losses[:5])
            readings = [measured("loss-rise", "", level, first, limit - first, step=step.step)]


def loss_spikes() -> Law:
    """Read losses far above those before."""

    def least(level: float) -> float:
        return 0.01 * max(1.0, abs(level))

    return _spikes("loss-spike", lambda step: step.loss, float, least)


def gradient_spikes() -> Law:
    """Read norms of gradients far above those before; norms vary by factors."""

    def logarithm(step: Step) -> float | None:
        return math.log(step.grad_norm) if step.grad_norm and step.grad_norm > 0 else None

    return _spikes("gradient-spike", logarithm, math.exp, lambda level: math.log(10.0) / 8)


def _spikes(
    kind: str,
    value_of: Callable[[Step], float | None],
    shown: Callable[[float], float],
    least: Callable[[float], float],
) -> Law:
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
            limit = level + KINDS[kind].bound * max(noise, least(level))
        if value <= limit:
            values.append(value)
            beyond = []
            continue
        beyond.append(value)
        bound = shown(min(limit, 700.0)) if kind == "gradient-spike" else limit
        readings = [measured(kind, "", shown(value), None, bound, step=step.step)]
        if len(beyond) >= 50:
            values = deque(beyond, maxlen=100)
            beyond = []


def throughput(size: int = 20, least_seconds: float = 10.0) -> Law:
    """Read steps that became slower for long.

    Single slow steps do not count: they compile, evaluate or save. Neither does less than ten lost
    seconds, which other programs explain.
    """
    rates: list[float] = []
    medians: list[float] = []
    first = 0
    num_fast = 0
    lost = 0.0
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        rate = step.tokens_per_second
        if not rate or not math.isfinite(rate):
            continue
        usual = median(medians or [0.0])
        bound = usual * KINDS["slower-steps"].bound
        if rate < usual - bound:
            first = first or step.step
            num_fast = 0
            # A log without times lost enough.
            lost += math.inf if step.seconds is None else step.seconds * (1 - rate / usual)
        else:
            num_fast += 1
        if num_fast > 1:
            first = 0
            lost = 0.0
        rates.append(rate)
        if len(rates) < size:
            continue
        middle = median(rates)
        rates.clear()
        if middle >= usual - bound:
            medians.append(middle)
        elif lost >= least_seconds:
            readings = [measured("slower-steps", "", middle, usual, bound, step=first)]


def idle_device() -> Law:
    """Read a device that is idle for most of the median step. A log may hold the share in percent."""
    limit = 1 - KINDS["idle-device"].bound
    shares: list[float] = []
    since = 0
    readings: list[Reading] = []
    while True:
        step = yield readings
        value = step.utilization
        if value is None or not math.isfinite(value):
            continue
        shares.append(value / 100 if value > 1.5 else value)
        if shares[-1] < limit:
            since = since or step.step
        middle = median(shares)
        readings = []
        if len(shares) >= 2 and middle < limit:
            readings = [measured("idle-device", "", middle, 1.0, step=since)]
