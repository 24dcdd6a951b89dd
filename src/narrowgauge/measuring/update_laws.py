"""Laws of what formats keep: of the updates, and of the tensors of layers.

Published bounds of casts hold in no healthy run, so these laws read noisy casts alone: a healthy cast
to int8 or four bits rounds half of a tensor to zero, and its signal-to-noise ratio stays above 12 dB.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import fmean, stdev

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.step import Law, Tell

SAMPLED = (
    ("cast-range", "tensors", "underflow", 0.05), ("cast-range", "tensors", "overflow", 0.001),
    ("attention-logits", "attention", "max_logit", KINDS["attention-logits"].bound),
)  # fmt: skip
"""Kinds that read samples of the gauges: the table, the metric and its bound."""
NOISY = 8.0
"""Decibels below which the error of a cast exceeds a sixth of its operand's energy."""


def lost_updates(tell: Tell, fewest: int = 5, most: int = 20) -> Law:
    """Read stored shares of updates that are below their bound with three standard errors."""
    shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=most))
    low: dict[str, float] = {}
    since = 0
    while True:
        step = yield
        for name, value in step.stored.items():
            values = shares[name]
            values.append(value)
            low.pop(name, None)
            if len(values) < fewest:
                continue
            error = stdev(values) / math.sqrt(len(values))
            if fmean(values) + 3 * error < 1 - KINDS["stored-share"].bound:
                low[name] = fmean(values)
        if low:
            names = sorted(low, key=low.__getitem__)
            since = since or step.step
            tell("stored-share", names, low[names[0]], 1.0, step=since)


def sampled(tell: Tell) -> Law:
    """Read what casts lose, and attention logits that are far too large."""
    while True:
        step = yield
        for kind, table, metric, bound in SAMPLED:
            values = {}
            for name, metrics in step.gauges.get(table, {}).items():
                value = metrics.get(metric)
                ratio = metrics.get("sqnr_db", 0.0)
                is_noisy = ratio is not None and ratio <= NOISY
                if value is not None and value >= bound and is_noisy:
                    values[f"{name}, {metric}"] = value
            if values:
                names = sorted(values, key=values.__getitem__, reverse=True)
                tell(kind, names, values[names[0]], None, bound)
