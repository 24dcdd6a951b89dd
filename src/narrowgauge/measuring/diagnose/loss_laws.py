"""Laws of the losses, of skipped steps and the loss scale, and of the throughput: a log of any program
may have these numbers.
"""

import math
from bisect import insort
from collections import deque
from itertools import pairwise
from statistics import median

from narrowgauge.measuring.diagnose.step_metrics import Emit, Law, reads
from narrowgauge.measuring.kinds import KINDS


@reads("skipped", "loss_scale", least=5)
def skipped(emit: Emit) -> Law:
    """Read skipped steps, beyond those of a search for the loss scale.

    Rows that come evenly between steps are of micro-batches, without a loss scale.
    """
    count = taken = leading = since = last = 0
    gaps = set()
    has_scale = False
    while True:
        step = yield
        has_scale = has_scale or step.loss_scale is not None
        if step.skipped:
            count += 1
            leading += not taken
            since = since or step.step
        elif step.skipped is not None:
            taken += 1
            if last:
                gaps.add(step.step - last)
            last = step.step
        bound = min(leading, 24) + KINDS["skipped-steps"].bound + 0.05 * (count + taken)
        is_even = taken and len(gaps) < 2 and gaps != {1}
        if count > bound and (has_scale or not is_even):
            emit("skipped-steps", "", count, None, bound, step=since)


@reads("loss_scale", least=2)
def loss_scale(emit: Emit) -> Law:
    """Read a loss scale that began anew."""
    number = 0
    last = math.inf
    while True:
        step = yield
        if step.loss_scale:
            doublings = min(step.step - number, 60)
            if last * 2.0**doublings < step.loss_scale < math.inf:
                emit("not-restored", "loss scale", step.loss_scale, last, last)
            number = step.step
            last = step.loss_scale


@reads("loss", least=21)
def spikes(emit: Emit) -> Law:
    """Read losses far above the median of the last 30 steps.

    The noise is the median difference of two steps: distances from the median would count the fall of
    a loss. Twice the largest rise from step to step is no spike either: the losses of games have long
    tails. A spike does not enter the statistics.
    """
    values: deque[float] = deque(maxlen=100)
    while True:
        step = yield
        loss = step.loss
        if loss is None or not math.isfinite(loss):
            continue
        limit = math.inf
        if len(values) >= 20:
            level = median([*values][-30:])
            rises = [b - a for a, b in pairwise(values)]
            noise = 1.4826 / math.sqrt(2) * median(map(abs, rises))
            reach = KINDS["spike"].bound * max(noise, 0.01 * max(1.0, abs(level)))
            limit = level + max(reach, 2.0 * max(rises))
        if loss <= limit:
            values.append(loss)
        else:
            emit("spike", "", loss, None, limit)


@reads("tokens_per_second", "seconds", least=40)
def throughput(emit: Emit) -> Law:
    """Read steps that became slower for long.

    Single slow steps do not count: they compile, evaluate or save. Neither does less than ten lost
    seconds, which other programs explain.
    """
    rates = []
    medians: list[float] = []
    usual = 0.0
    first = 0
    was_slow = False
    lost = 0.0
    while True:
        step = yield
        rate = step.tokens_per_second
        if not rate or not math.isfinite(rate):
            continue
        bound = usual * KINDS["slower-steps"].bound
        is_slow = rate < usual - bound
        if is_slow:
            first = first or step.step
            # A log without times lost enough.
            lost += math.inf if step.seconds is None else step.seconds * (1 - rate / usual)
        elif not was_slow:
            first = 0
            lost = 0.0
        was_slow = is_slow
        rates.append(rate)
        if len(rates) < 20:
            continue
        middle = median(rates)
        rates.clear()
        if middle >= usual - bound:
            insort(medians, middle)  # a sorted list is sorted again in no time
            usual = median(medians)
        elif lost >= 10.0:
            emit("slower-steps", "", middle, usual, bound, step=first)


@reads("utilization", least=2)
def idle_device(emit: Emit) -> Law:
    """Read a device that is idle for most of the median step. A log may hold the share in percent."""
    bound = KINDS["idle-device"].bound
    shares = []
    since = 0
    while True:
        step = yield
        if step.utilization is not None and math.isfinite(step.utilization):
            shares.append(step.utilization / (100 if step.utilization > 1.5 else 1))
            if shares[-1] < bound:
                since = since or step.step
        if len(shares) >= 2 and median(shares) < bound:
            emit("idle-device", "", median(shares), 1.0, step=since)
