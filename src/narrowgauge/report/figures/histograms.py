"""Histograms of binary exponents over the ranges of number formats, for a slider over a run's
sampled steps.

Left of a format's range values round to zero, right of it they overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from narrowgauge.report.figures.figure import json_list, rounded
from narrowgauge.report.figures.palette import colour
from narrowgauge.runs.schema import FIRST_EXPONENT, Row, finite_number, step_of
from narrowgauge.spec.formats import FORMATS

SHOWN_FORMATS = (
    "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn",
)  # fmt: skip
"""Formats with ranges above the histograms."""

KIND_TITLES: dict[str, str] = {
    "weight": "Weights", "input": "Layer inputs", "output_grad": "Output gradients", "grad": "Parameter gradients",
    "exp_avg": "First moments", "exp_avg_sq": "Second moments",
}  # fmt: skip
"""Panels of the histogram figure, from top to bottom."""

MOST_STEPS = 30
"""Maximum number of steps of the slider."""


def histogram(rows: Sequence[Row], index: int) -> Row | None:
    """Return the exponent histograms of a run, or ``None`` without any.

    Args:
        rows: of ``gauges.jsonl``.
        index: palette index of the run.
    Returns:
        A Plotly figure, and for its slider at most :data:`MOST_STEPS` steps, including the first
        and the last. Its ``frames`` hold the heights of the bars, per step and panel.
    """
    counted = []
    for row in rows:
        counts = _counts(row)
        if counts:
            counted.append((step_of(row), counts))
    if not counted:
        return None
    num_steps = min(len(counted), MOST_STEPS)
    last = len(counted) - 1
    chosen = []
    for place in range(num_steps):
        chosen.append(counted[round(place * last / max(1, num_steps - 1))])
    # All exponents that occur, and the whole range of float16 for comparison.
    half = FORMATS["float16"]
    low = half.finest_exponent
    high = half.max_exponent + 1
    data: list[Row] = []
    panels = []
    for kind, title in KIND_TITLES.items():
        bins = [counts.get(kind, []) for _, counts in chosen]
        span = _span(bins)
        if span is None:
            continue
        start, stop = np.array(span) + FIRST_EXPONENT
        low = min(low, int(start))
        high = max(high, int(stop))
        panels.append([_shares(counts, span) for counts in bins])
        data.append({
            "type": "bar", "x": np.arange(start, stop).tolist(), "y": panels[-1][-1], "offset": 0, "width": 1,
            "yaxis": f"y{len(data) + 2}", "marker": {"color": colour(index), "line": {"width": 0}},
            "meta": {"title": title},
            "hovertemplate": f"%{{y:.3~p}} of {title.lower()}<br>2<sup>%{{x}}</sup> to twice that<extra></extra>",
        })  # fmt: skip
    # The page's script shows the frame of the chosen step.
    return {
        "data": [*data, *_format_bars()],
        "layout": _panels(len(data), [low - 2, high + 2]),
        "steps": [step for step, _ in chosen],
        "frames": list(map(list, zip(*panels, strict=True))),
    }


def _counts(row: Row) -> dict[str, list[float]]:
    """Return the histograms of a row that count anything. A bin without a valid count is empty."""
    histograms = row.get("histograms") or {}
    counts = {}
    for kind in KIND_TITLES:
        bins = [max(0.0, finite_number(count) or 0.0) for count in histograms.get(kind) or ()]
        if any(bins):
            counts[kind] = bins
    return counts


def _span(histograms: Sequence[Sequence[float]]) -> tuple[int, int] | None:
    """Return the first used bin, and the one after the last; ``None`` if none is used."""
    used = set()
    for bins in histograms:
        used.update(np.flatnonzero(bins).tolist())
    return (min(used), max(used) + 1) if used else None


def _shares(counts: Sequence[float], span: tuple[int, int]) -> list[float | None] | None:
    if not counts:
        return None
    shares = np.array(counts[slice(*span)]) / sum(counts)
    return json_list(np.where(shares, shares, np.nan), 3)


def format_ranges() -> list[Row]:
    """Return the formats above the histograms, their ends as powers of two.

    Returns:
        Rows ``name, subnormal, normal, max`` in binary exponents, and ``zero_below`` and ``last``.
        Bins below ``zero_below`` round to zero in the format. Bins above ``last`` overflow.
    """
    rows = []
    for name in SHOWN_FORMATS:
        row = FORMATS[name]
        rows.append({
            "name": name, "subnormal": row.finest_exponent, "normal": row.min_exponent, "max": rounded(math.log2(row.max), 5),
            "zero_below": row.finest_exponent - 1,  # half of the smallest value still rounds up to it
            "last": row.max_exponent,
        })  # fmt: skip
    return rows


def _format_bars() -> list[Row]:
    """Return a thick bar over a format's normal range, a thin bar over its subnormals."""
    bars = []
    for line, row in enumerate(format_ranges()):
        for start, stop, width in (("subnormal", "normal", 3), ("normal", "max", 9)):
            bars.append({
                "type": "scatter", "mode": "lines", "x": [row[start], row[stop]], "y": [line, line],
                "line": {"color": "@muted", "width": width}, "meta": {"format": row["name"], "part": start},
                "hovertemplate": f"{row['name']}: normal from 2<sup>{row['normal']}</sup> to 2<sup>{row['max']:.4g}</sup>, "
                                 f"subnormal from 2<sup>{row['subnormal']}</sup><extra></extra>",
            })  # fmt: skip
    return bars


def _panels(num_panels: int, exponents: list[float]) -> Row:
    """Return the axes: formats on top, a panel per kind below, all over one axis of exponents."""
    top = 24 * len(SHOWN_FORMATS)
    panel = 74
    gap = 30
    bottom = 10
    total = top + (panel + gap) * num_panels + bottom
    layout: Row = {
        "height": total + 105, "bargap": 0,
        "xaxis": {
            "title": {"text": "magnitude, as a power of two"}, "range": exponents, "tickprefix": "2<sup>", "ticksuffix": "</sup>",
            "dtick": 8, "tick0": 0, "anchor": f"y{num_panels + 1}",
        },
        "yaxis": {
            "domain": [1 - top / total, 1], "range": [len(SHOWN_FORMATS) - 0.5, -0.5], "showgrid": False, "fixedrange": True,
            "tickvals": list(range(len(SHOWN_FORMATS))), "ticktext": list(SHOWN_FORMATS),
        },
    }  # fmt: skip
    for index in range(num_panels):
        upper = total - top - gap - index * (panel + gap)
        layout[f"yaxis{index + 2}"] = {
            "domain": [(upper - panel) / total, upper / total], "type": "log", "range": [-6, 0], "fixedrange": True,
            "tickvals": [1e-6, 1e-4, 1e-2, 1], "ticktext": ["0.0001 %", "0.01 %", "1 %", "100 %"],
        }  # fmt: skip
    return layout
