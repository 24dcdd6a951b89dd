"""Laws of what formats keep of the updates and of the tensors of layers.

Bounds are published numbers where there are any. Some published ones hold in no healthy run, so laws
of casts read noisy casts alone: a healthy cast to int8 or four bits rounds half of a tensor to zero,
and its signal-to-noise ratio still stays above 12 dB.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import fmean, median, stdev

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Law, Metrics, Step

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


# ── casts of layers ───────────────────────────────────────────────────────────────────────────────


SAMPLED = (
    ("lost-decay", "updates", "lost_decay", 3), ("underflow", "tensors", "underflow", 2),
    ("overflow", "tensors", "overflow", 1), ("attention-logits", "attention", "max_logit", 1),
)  # fmt: skip
"""Kinds that read samples of the gauges: the table, the metric, and samples in a row beyond the bound."""


def sampled() -> Law:
    """Read what storages and casts lose, and attention logits that are far too large.

    Below 8 dB rounding error exceeds a sixth of an operand's energy.
    """
    before: Counter[tuple[str, str]] = Counter()
    readings: list[Reading] = []
    while True:
        step = yield readings
        readings = []
        for kind, table, metric, least in SAMPLED:
            values = {}
            for name, metrics in _tensors(step, table).items():
                value = metrics.get(metric)
                is_beyond = value is not None and value >= KINDS[kind].bound
                before[kind, name] = (before[kind, name] + 1) * is_beyond
                if value is not None and before[kind, name] >= least:
                    values[name] = value
            readings += _worst(kind, values, step)


def _tensors(step: Step, table: str) -> Metrics:
    """Return the metrics of a table: of casts the noisy ones, and of updates the audit's of all tensors."""
    tensors = dict(step.gauges.get(table, {}))
    if table == "updates" and step.lost_decay is not None:
        tensors[""] = {"lost_decay": step.lost_decay}
    if table == "tensors":
        for name, metrics in tensors.items():
            ratio = metrics.get("sqnr_db")
            if ratio is None or ratio > 8.0:
                tensors[name] = {}
    return tensors


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
        values = {}
        for name, metrics in step.gauges.get("tensors", {}).items():
            value = metrics.get("outlier")
            if value is None or metrics.get("sqnr_db") is None or not name.startswith("input:"):
                continue
            limit = factor * max(usual.get(name, math.inf), least)
            recent[name].append(value)
            if len(recent[name]) == window:
                usual[name] = min(usual.get(name, math.inf), median(recent[name]))
            beyond[name] = (beyond[name] + 1) * (value >= limit)
            if beyond[name] >= 3:
                values[name] = value
        readings = []
        for reading in _worst("growing-outliers", values, step):
            name = max(values, key=values.__getitem__)
            readings = [replace(reading, bound=factor * max(usual[name], least))]


def _worst(kind: str, values: Mapping[str, float], step: Step) -> Iterator[Reading]:
    """Yield a reading of the worst of several tensors."""
    names = sorted(values, key=values.__getitem__, reverse=True)
    if names:
        yield measured(kind, names, values[names[0]], step=step.step)
