"""Heat maps of gauge metrics: a row per tensor, a column per sampled step, for one run.

A page cannot hold every cell of a large model's long run. So a cell joins steps and keeps their
*worst* value. If there are too many tensors, we show the tensors that ever were farthest from
health, in the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from narrowgauge.analysis.columns import Array
from narrowgauge.report.figures.figure import json_list
from narrowgauge.report.figures.palette import SEQUENTIAL, plain
from narrowgauge.runs.schema import Row, gauge_metrics, step_of

MOST_TENSORS = 64
MOST_COLUMNS = 100
"""Maximum numbers of rows and columns in a heat map."""
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
        "updates", "edq", "EDQ: fraction of the update that was applied",
        "A row is a parameter, a column a sampled step. The middle colour is 1: the whole update "
        "was applied. Towards 0 the "
        "update was rounded away and the parameter stalls; above 1 the storage moved it farther "
        "than intended.",
        0.0, 2.0, good=1.0,
    ),
    "noise": Metric(
        "updates", "noise", "Noise relative to the update",
        "The rounding error that the storage adds to the intended update, relative to the update. "
        "1 means as much noise as "
        "update. Stochastic rounding tolerates that, because its noise averages out; round to "
        "nearest does not.",
        1e-3, 30.0, is_log=True,
    ),
    "lost": Metric(
        "updates", "lost_fraction", "Fraction of lost updates",
        "The fraction of intended changes that left the stored value unchanged. A high fraction in "
        "embeddings is normal, because "
        "most tokens are rare. A high fraction in every row late in training means that updates "
        "are too small for the storage.",
        0.0, 1.0,
    ),
    "decay": Metric(
        "updates", "lost_decay", "Fraction of weight decay that is lost",
        "The fraction of the intended weight decay that the storage did not take. A row near 1 "
        "does not decay at all, and its "
        "weights grow; this happens in bfloat16 while EDQ is still near 1, since decay is far "
        "smaller than an update.",
        0.0, 1.0,
    ),
    "underflow": Metric(
        "tensors", "underflow", "Underflow of the cast",
        "The fraction of nonzero values that the cast into the matmul rounds to zero. A row is an "
        "operand. A row that brightens "
        "over time is a tensor whose values become too small for their format.",
        1e-6, 1.0, is_log=True,
    ),
    "overflow": Metric(
        "tensors", "overflow", "Overflow of the cast",
        "The fraction of values beyond the range of their format. Most rows should stay dark. "
        "Formats with power-of-two block "
        "scales saturate a few of the largest values by design; with any other scale, a row that "
        "stays bright has a scale "
        "that is too large or stale.",
        1e-6, 1.0, is_log=True,
    ),
    "max_logit": Metric(
        "attention", "max_logit", "Bound of attention logits",
        "A row is an attention layer: the largest norms of a query and a key, and the factor of "
        "their products. "
        "Logits that rise through the hundreds lead to attention on a single token and to gradient "
        "spikes.",
        1.0, 1e4, is_log=True,
    ),
}  # fmt: skip
"""Metrics that a reader can choose. The first is the default."""


def heat_maps(rows: Sequence[Row]) -> dict[str, Row]:
    """Return the heat maps of a run by metric, as Plotly figures, in the order of
    :data:`HEAT_MAPS`.

    Cost: about 1 s per thousand samples of 400 tensors.
    """
    cells: dict[str, dict[str, Array]] = {name: {} for name in HEAT_MAPS}
    for column, row in enumerate(rows):
        for table, tensor, metrics in gauge_metrics(row):
            for name, metric in HEAT_MAPS.items():
                value = metrics.get(metric.field) if metric.table == table else None
                if value is None or not math.isfinite(value):
                    continue
                if tensor not in cells[name]:
                    cells[name][tensor] = np.full(len(rows), np.nan)
                cells[name][tensor][column] = value
    steps = np.array(list(map(step_of, rows)), float)
    figures = {}
    for name, lines in cells.items():
        if lines:
            figures[name] = _heat_map(HEAT_MAPS[name], lines, steps)
    return figures


def _heat_map(metric: Metric, tensors: Mapping[str, Array], steps: Array) -> Row:
    """Return the figure of one metric, from the values of each tensor at all steps."""
    values = np.array(list(tensors.values()))
    reach = np.fmax.reduce(np.abs(values - metric.good), axis=1)
    lines = np.sort(np.argsort(-reach, kind="stable")[:MOST_TENSORS])
    labels = [plain(list(tensors)[line]) for line in lines]
    sampled = np.flatnonzero(~np.isnan(values).all(axis=0))
    columns = np.array_split(sampled, min(len(sampled), MOST_COLUMNS))
    z = metric.scaled(_worst(values[lines], columns, metric.good))
    x = steps[[column[-1] for column in columns]]
    low_end, high_end = metric.scaled(np.array([metric.low, metric.high])).tolist()
    places = list(range(len(lines)))
    # A cell is centred at its step, half a cell from the edges of the axis.
    half = float(x[-1] - x[0]) / (2 * max(1, len(x) - 1)) or 0.5
    trace = {
        "type": "heatmap", "x": json_list(x, 9), "y": places,
        "z": [json_list(row, 3) for row in z], "zmin": low_end, "zmax": high_end,
        "colorscale": _DIVERGING if metric.good else SEQUENTIAL, "hoverongaps": False,
        "meta": {"names": labels, "log": metric.is_log},
    }  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": "step"}, "range": [float(x[0]) - half, float(x[-1]) + half]}, "height": 22 * len(lines) + 110,
        "yaxis": {"autorange": "reversed", "tickvals": places, "ticktext": labels},
    }  # fmt: skip
    how = metric.how
    if len(lines) < len(tensors) or len(columns) < len(sampled):
        how += (
            f" Shown are {len(lines)} of {len(tensors)} tensors, those farthest from health, and "
            f"the worst of {len(sampled)} samples in each of {len(columns)} columns."
        )
    return {"data": [trace], "layout": layout, "how": how}


def _worst(values: Array, columns: Sequence[Any], good: float) -> Array:
    """Join columns: of each row the value farthest from ``good``."""
    worst = []
    for column in columns:
        low = np.fmin.reduce(values[:, column], axis=1)
        high = np.fmax.reduce(values[:, column], axis=1)
        worst.append(np.where(high - good >= good - low, high, low))
    return np.stack(worst, axis=1)
