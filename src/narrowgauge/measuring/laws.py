"""Laws of a run: generators that take a step and give its readings.

Each remembers what it must in its own variables. The same laws read a running loop and the rows of a
record. A count over the run gives its share in every step, and the newest reading counts.

Bounds are published numbers where there are any. Some published ones hold in no healthy run, so laws
of casts read noisy casts alone: a healthy cast to int8 or four bits rounds half of a tensor to zero,
and its signal-to-noise ratio still stays above 12 dB.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean, median, stdev

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Metrics, Step, share

Law = Generator[list[Reading], Step, None]
"""Takes steps, in their order, and gives the readings of each."""
TWICE = 2.0
"""A fault is told again when it is so many times as far beyond its bound."""


# ── what formats keep ─────────────────────────────────────────────────────────────────────────────


def lost_updates(fewest: int = 5, most: int = 20) -> Law:
    """Read stored shares of updates that are below their bound with three standard errors."""
    shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=most))
    bound = KINDS["lost-updates"].bound
    since = 0
    readings: list[Reading] = []
    while True:
        step = yield readings
        if not step.stored:
            continue
        low = {}
        for name, value in step.stored.items():
            shares[name].append(value)
        for name, values in shares.items():
            if len(values) < fewest:
                continue
            mean = fmean(values)
            if mean + 3 * stdev(values) / math.sqrt(len(values)) < 1 - bound:
                low[name] = mean
        names = sorted(low, key=low.__getitem__)
        readings = []
        if names:
            since = since or step.step
            readings = [measured("lost-updates", names, low[names[0]], 1.0, step=since)]


def lost_decay(fewest: int = 3) -> Law:
    """Read weight decay that a storage does not take, in three samples in a row."""
    beyond: Counter[str] = Counter()
    bound = KINDS["lost-decay"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        values: dict[str, float] = {}
        for name, metrics in _with_total(step).items():
            value = metrics.get("lost_decay")
            if value is None:
                continue
            beyond[name] = beyond[name] + 1 if value >= bound else 0
            if beyond[name] >= fewest:
                values[name] = value
        readings = [*_worst("lost-decay", values, step)]


def _with_total(step: Step) -> Metrics:
    """Return the metrics of the updates in a sample, and of all tensors in a row."""
    total = {} if step.lost_decay is None else {"": {"lost_decay": step.lost_decay}}
    return {**total, **step.gauges.get("updates", {})}


def never_moved() -> Law:
    """Read tensors of which no sampled element has moved for long."""
    since: dict[str, int] = {}
    bound = KINDS["never-moved"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        if step.arrived is None and not step.still:
            continue
        readings = []
        since = {name: since.get(name, step.step - 1) for name in step.still}
        names = [name for name in since if step.step - since[name] >= bound]
        names.sort(key=since.__getitem__)
        if names:
            value = step.step - since[names[0]]
            readings = [measured("never-moved", names, value, step=step.step)]


def drift() -> Law:
    """Read frozen tensors that change by a few roundings, again and again."""
    counts: Counter[str] = Counter()
    since = 0
    bound = KINDS["drift"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        if not step.drift:
            continue
        counts.update(step.drift)
        names = [name for name, count in counts.most_common() if count >= bound]
        readings = []
        if names:
            since = since or step.step
            readings = [measured("drift", names, counts[names[0]], step=since)]


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────


def nonfinite(least: int = 3) -> Law:
    """Read the first place of the run that is not finite, once: it makes all later ones so.

    A loss scaler skips what overflows. A log that does not tell of skipped steps must hold several such
    norms in a row.
    """
    is_told = False
    unknown: list[int] = []
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        if is_told:
            continue
        is_finite = math.isfinite(step.loss or 0.0)
        is_norm_bad = not math.isfinite(step.grad_norm or 0.0)
        number = step.step
        if step.skipped is None and is_finite and step.grad_norm is not None and not step.bad:
            unknown = [*unknown, step.step] if is_norm_bad else []
            if len(unknown) < least:
                continue
            number = unknown[0]
        elif step.skipped and is_finite:
            continue
        norms = [""] if is_norm_bad else []
        places = {
            "between steps": [step.bad_weight] if step.bad_weight else [],
            "forward": [step.bad_output] if step.bad_output else [],
            "loss": [] if is_finite else [""],
            "gradient": step.bad or norms,
        }
        for stage, names in places.items():
            if names:
                reading = measured("nonfinite", names, len(names), step=number, stage=stage)
                readings = [reading]
                is_told = True
                break


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


# ── casts of layers ───────────────────────────────────────────────────────────────────────────────


def casts() -> Law:
    """Read casts of which little is left, and attention logits that are far too large.

    Below 8 dB rounding error exceeds a sixth of an operand's energy.
    """
    before: Counter[tuple[str, str]] = Counter()
    rules = (("underflow", 2), ("overflow", 1))
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        noisy = {}
        for name, metrics in step.gauges.get("tensors", {}).items():
            ratio = metrics.get("sqnr_db")
            noisy[name] = metrics if ratio is not None and ratio <= 8.0 else {}
        for kind, least in rules:
            values = _beyond(kind, noisy, kind, before, least)
            readings += _worst(kind, values, step)
        attention = step.gauges.get("attention", {})
        values = _beyond("attention-logits", attention, "max_logit", before, 1)
        readings += _worst("attention-logits", values, step)


def outliers(window: int = 10, least: float = 16.0) -> Law:
    """Read inputs whose outliers grow far beyond the lowest median of ten samples, as SwiGLU's do.

    They hurt no operand that enters a matmul as it is.
    """
    usual: dict[str, float] = {}
    recent: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=window))
    beyond: Counter[str] = Counter()
    factor = KINDS["growing-outliers"].bound
    readings: list[Reading] = []
    while True:
        step = yield readings
        worst = {}
        limits = {}
        for name, metrics in step.gauges.get("tensors", {}).items():
            value = metrics.get("outlier")
            if value is None or metrics.get("sqnr_db") is None or not name.startswith("input:"):
                continue
            limits[name] = factor * max(usual.get(name, math.inf), least)
            recent[name].append(value)
            if len(recent[name]) == window:
                usual[name] = min(usual.get(name, math.inf), median(recent[name]))
            beyond[name] = beyond[name] + 1 if value >= limits[name] else 0
            if beyond[name] >= 3:
                worst[name] = value
        readings = []
        names = sorted(worst, key=worst.__getitem__, reverse=True)
        if names:
            bound = limits[names[0]]
            reading = measured(
                "growing-outliers", names, worst[names[0]], None, bound, step=step.step
            )
            readings = [reading]


def _beyond(
    kind: str, tensors: Metrics, metric: str, before: Counter[tuple[str, str]], least: int
) -> dict[str, float]:
    """Return the tensors of which a metric is beyond its bound in so many samples in a row."""
    values = {}
    for name, metrics in tensors.items():
        value = metrics.get(metric)
        is_beyond = value is not None and value >= KINDS[kind].bound
        before[kind, name] = before[kind, name] + 1 if is_beyond else 0
        if value is not None and before[kind, name] >= least:
            values[name] = value
    return values


def _worst(kind: str, values: Mapping[str, float], step: Step) -> Iterator[Reading]:
    """Yield a reading of the worst of several tensors."""
    names = sorted(values, key=values.__getitem__, reverse=True)
    if names:
        yield measured(kind, names, values[names[0]], step=step.step)


LAWS: tuple[Callable[[], Law], ...] = (
    nonfinite, lost_updates, lost_decay, never_moved, drift, skipped, failed, loss_scale, zero_gradients,
    gradients_kept, clip_norm, ranks, jump, loss_rise, loss_spikes, gradient_spikes, throughput, casts, outliers,
)  # fmt: skip
"""Every law of a run."""


class Laws:
    """Read the steps of a run by every law.

    Args:
        ignore: kinds of readings that are intended.
        steps: earlier steps of the same run.

    Example:
        >>> laws = Laws()
        >>> [reading.what for reading in laws.read(Step(1, arrived=3.0, limit=1.0))]
        ['clip-norm']
        >>> [reading.what for reading in laws.fresh(laws.read(Step(2, arrived=3.0, limit=1.0)))]
        ['clip-norm']
        >>> [reading.what for reading in laws.fresh(laws.read(Step(3, arrived=3.0, limit=1.0)))]
        []
    """

    def __init__(self, ignore: Iterable[str] = (), steps: Iterable[Step] = ()) -> None:
        self.ignore = frozenset(ignore)
        self._laws = [law() for law in LAWS]
        self._told: dict[str, float] = {}
        for law in self._laws:
            next(law)
        for step in steps:
            self.fresh(self.read(step))

    def read(self, step: Step) -> list[Reading]:
        """Return all readings of a step, which follows those before."""
        readings = []
        for law in self._laws:
            for reading in law.send(step):
                if reading.what not in self.ignore:
                    readings.append(reading)
        return readings

    def fresh(self, readings: Iterable[Reading]) -> list[Reading]:
        """Return what is new: the first reading of a kind, and one that is twice as far beyond its
        bound.
        """
        new = []
        for reading in readings:
            if reading.excess > TWICE * self._told.get(reading.what, -1.0):
                self._told[reading.what] = reading.excess
                new.append(reading)
        return new
