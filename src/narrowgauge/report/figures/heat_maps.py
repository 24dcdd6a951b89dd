"""Heat maps of gauge metrics: a row per tensor, a column per sampled step, for one run.

A page cannot hold every cell of a large model's long run. So a cell joins steps and keeps their *worst* value. If there are too
many tensors, we show the tensors that ever were farthest from health, in the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.analysis.columns import Array
from narrowgauge.report.figures.palette import SEQUENTIAL, plain
from narrowgauge.report.figures.series import json_list
from narrowgauge.runs.schema import Row

MAX_CELLS = 150_000
"""Maximum number of cells of all heat maps on a page. A compressed cell takes about one byte."""

MOST_TENSORS = 64
"""Maximum number of rows in a heat map."""

_DIVERGING = [[0, "@below"], [0.5, "@even"], [1, "@above"]]
_SMALLEST = 1e-7


@dataclass(frozen=True)
class Metric:
    """Describe one metric of a heat map.

    Args:
        table, field: its place in a row of ``gauges.jsonl``.
        how: the caption that explains its heat map.
        low, high: ends of the colour scale, in the metric's unit.
        good: value of perfect health. The value farthest from it is the worst.
        is_log: the colour scale is logarithmic.
    """

    table: str
    field: str
    title: str
    how: str
    low: float
    high: float
    good: float = 0.0
    is_log: bool = False

    def scaled(self, values: Array) -> Array:
        return np.log10(np.maximum(np.abs(values), _SMALLEST)) if self.is_log else values


HEAT_MAPS: dict[str, Metric] = {
    "edq": Metric(
        "updates", "edq", "EDQ: share of the update that was applied",
        "A row is a parameter, a column a sampled step. The middle colour is 1: the whole update was applied. Towards 0 the "
        "update was rounded away and the parameter stalls; above 1 the storage moved it farther than intended.",
        0.0, 2.0, good=1.0,
    ),
    "noise": Metric(
        "updates", "noise", "Noise relative to the update",
        "The rounding error that the storage adds to the intended update, relative to the update. 1 means as much noise as "
        "update. Stochastic rounding tolerates that, because its noise averages out; round to nearest does not.",
        1e-3, 30.0, is_log=True,
    ),
    "lost": Metric(
        "updates", "lost_fraction", "Share of lost updates",
        "The share of intended changes that left the stored value unchanged. A high share in embeddings is normal, because "
        "most tokens are rare. A high share in every row late in training means that updates are too small for the storage.",
        0.0, 1.0,
    ),
    "unchanged": Metric(
        "updates", "imprecision_share", "Share of weights left unchanged",
        "The share of all elements whose visible weight a step left as it was, elements without an update among them. High is "
        "healthy where a tail, a master copy or a low part keeps what does not show yet.",
        0.0, 1.0,
    ),
    "decay": Metric(
        "updates", "lost_decay", "Share of weight decay that is lost",
        "The share of the intended weight decay that the storage did not take. A row near 1 does not decay at all, and its "
        "weights grow; this happens in bfloat16 while EDQ is still near 1, since decay is far smaller than an update.",
        0.0, 1.0,
    ),
    "underflow": Metric(
        "tensors", "underflow", "Underflow of the cast",
        "The share of nonzero values that the cast into the matmul rounds to zero. A row is an operand. A row that brightens "
        "over time is a tensor whose values become too small for their format.",
        1e-6, 1.0, is_log=True,
    ),
    "overflow": Metric(
        "tensors", "overflow", "Overflow of the cast",
        "The share of values beyond the range of their format. Most rows should stay dark. Formats with power-of-two block "
        "scales saturate a few of the largest values by design; with any other scale, a row that stays bright has a scale "
        "that is too large or stale.",
        1e-6, 1.0, is_log=True,
    ),
    "outlier": Metric(
        "tensors", "outlier", "Outliers: amax over rms",
        "How far the largest magnitude of a tensor exceeds its rms. A normal distribution has 4 to 6. A row that rises into "
        "the hundreds needs a scale per row or per block.",
        1.0, 1000.0, is_log=True,
    ),
    "bias": Metric(
        "moments", "bias", "Second moments relative to exact ones",
        "The stored second moments over the same ones kept in float32. The middle colour is 1: no bias. Below 1 the steps are "
        "too long, above 1 too short.",
        0.0, 2.0, good=1.0,
    ),
    "frozen": Metric(
        "moments", "frozen_fraction", "Share of frozen second moments",
        "The share of second moments that did not change since the last sample although their float32 copies did. A row that "
        "brightens is freezing: it decays too slowly for the storage.",
        0.0, 1.0,
    ),
    "max_logit": Metric(
        "attention", "max_logit", "Largest attention logit",
        "A row is an attention layer. Logits that rise through the hundreds lead to attention on a single token and to "
        "gradient spikes.",
        1.0, 1e4, is_log=True,
    ),
}  # fmt: skip
"""Metrics that a reader can choose. The first is the default."""


@dataclass(frozen=True, eq=False)
class MetricValues:
    """Hold one metric of the tensors that were farthest from health.

    Args:
        names: tensors, in the run's order.
        values: a row per tensor, a column per sampled step; NaN where unsampled.
        num_tensors: number of tensors with the metric.
    """

    names: Sequence[str]
    values: Array
    num_tensors: int

    def farthest(self, good: float, most: int) -> MetricValues:
        """Keep only the ``most`` tensors that ever were farthest from health, in their order."""
        reach = np.fmax.reduce(np.abs(self.values - good), axis=1)
        rows = np.sort(np.argsort(-reach, kind="stable")[:most])
        return MetricValues([self.names[row] for row in rows], self.values[rows], self.num_tensors)


def heat_maps(steps: Sequence[Sequence[float]], metrics: Sequence[Mapping[str, MetricValues]]) -> list[dict[str, Row]]:
    """Return the heat maps of every run by metric, as Plotly figures."""
    num_cells = MAX_CELLS // max(1, sum(map(len, metrics)))
    return [
        {name: _heat_map(HEAT_MAPS[name], np.asarray(sampled), values, num_cells) for name, values in by_metric.items()}
        for sampled, by_metric in zip(steps, metrics, strict=True)
    ]


def short_names(names: Sequence[str]) -> list[str]:
    """Remove common leading and trailing parts of names, split at dots. Keep a kind before a colon.

    Example:
        >>> short_names(["input:model.layers.0.up.weight", "grad:model.norm.weight"])
        ['input:layers.0.up', 'grad:norm']
    """
    pairs = [name.rpartition(":") for name in names]
    parts = [name.split(".") for _, _, name in pairs]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({part[0] for part in parts}) == 1:
        parts = [part[1:] for part in parts]
    while len(parts) > 1 and min(map(len, parts)) > 1 and len({part[-1] for part in parts}) == 1:
        parts = [part[:-1] for part in parts]
    return [kind + colon + ".".join(part) for (kind, colon, _), part in zip(pairs, parts, strict=True)]


def _heat_map(metric: Metric, sampled: Array, metric_values: MetricValues, num_cells: int) -> Row:
    shown = metric_values.farthest(metric.good, min(MOST_TENSORS, max(16, num_cells // 40)))
    # Steps without a sample of these tensors have no column.
    is_taken = ~np.isnan(shown.values).all(axis=0)
    steps, values = sampled[is_taken], shown.values[:, is_taken]
    num_columns = min(len(steps), 160, max(20, num_cells // max(1, len(values))))
    starts = [len(steps) * column // num_columns for column in range(num_columns)]
    low, high = (reduce(values, starts, axis=1) for reduce in (np.fmin.reduceat, np.fmax.reduceat))
    worst = np.where(high - metric.good >= metric.good - low, high, low)
    low_end, high_end = metric.scaled(np.array([metric.low, metric.high])).tolist()
    trace = {
        "type": "heatmap",
        "x": json_list(steps[[*(start - 1 for start in starts[1:]), -1]], 9),
        "y": list(range(len(worst))),
        "z": [json_list(row, 3) for row in metric.scaled(worst)],
        "zmin": low_end,
        "zmax": high_end,
        "colorscale": _DIVERGING if metric.good else SEQUENTIAL,
        "hoverongaps": False,
        "meta": {"names": [plain(name) for name in shown.names], "log": metric.is_log},
    }
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "autorange": "reversed",
            "tickvals": list(range(len(worst))),
            "ticktext": [plain(name) for name in short_names(shown.names)],
        },
        "height": 22 * len(worst) + 110,
    }
    how = metric.how
    if len(worst) < shown.num_tensors:
        how += f" Shown are the {len(worst)} of {shown.num_tensors} tensors that were farthest from health."
    if num_columns < len(steps):
        how += f" Each column joins {math.ceil(len(steps) / num_columns)} samples and shows the worst."
    return {"data": [trace], "layout": layout, "how": how}
