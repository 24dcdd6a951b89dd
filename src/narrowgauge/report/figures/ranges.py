"""The exponents of a run's values beside the ranges of number formats.

Left of a format's range values round to zero, right of it they overflow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowgauge.report.figures.figure import Figure, rounded
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.runs.schema import FIRST_EXPONENT, Row, finite_number
from narrowgauge.spec.formats import FORMATS

SHOWN_FORMATS = (
    "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn",
)  # fmt: skip
_HOW = (
    "The fraction of values in each power of two, on a log scale, in the last sample of {run}. The "
    "thick bars at the top are the ranges of number formats, the thin ones their subnormals, where "
    "precision decreases towards zero. A scale moves a line sideways, so what matters is its width."
)


def ranges_figure(run: str, histograms: Mapping[str, Sequence[float]]) -> Figure | None:
    """Draw a line for each kind of tensor below a bar for each format; ``None`` without a count.

    Args:
        run: its name.
        histograms: counts of exponents by kind of tensor.
    """
    data: list[Row] = []
    exponents = set[int]()
    for kind, histogram in histograms.items():
        counts = {}
        for exponent, count in enumerate(map(finite_number, histogram), FIRST_EXPONENT):
            if count is not None and count > 0:
                counts[exponent] = count
        if not counts:
            continue
        exponents.update(counts)
        x = list(range(min(counts), max(counts) + 1))
        total = sum(counts.values())
        shares = [rounded(counts[at] / total, 3) if at in counts else None for at in x]
        data.append({
            "type": "scatter", "mode": "lines", "x": x, "y": shares, "name": plain(kind), "connectgaps": True,
            "line": {"color": colour(len(data)), "shape": "hvh", "width": 1.8},
            "hovertemplate": f"%{{y:.3~p}} of {kind}<br>2<sup>%{{x}}</sup> to twice that<extra></extra>",
        })  # fmt: skip
    if not data:
        return None
    for line, name in enumerate(SHOWN_FORMATS):
        data += _bars(line, name)
    half = FORMATS["float16"]
    low = min(*exponents, half.finest_exponent) - 2
    high = max(*exponents, half.max_exponent) + 2
    layout = {
        "showlegend": True, "legend": {"orientation": "h", "y": -0.16},
        "xaxis": {
            "title": {"text": "magnitude, as a power of two"}, "range": [low, high], "dtick": 16,
            "tickprefix": "2<sup>", "ticksuffix": "</sup>", "anchor": "y",
        },
        "yaxis": {
            "domain": [0, 0.64], "type": "log", "range": [-6, 0], "tickformat": "~%", "title": {"text": "share of values"},
        },
        "yaxis2": {
            "domain": [0.68, 1], "range": [len(SHOWN_FORMATS) - 0.5, -0.5], "showgrid": False, "fixedrange": True,
            "tickvals": list(range(len(SHOWN_FORMATS))), "ticktext": list(SHOWN_FORMATS),
        },
    }  # fmt: skip
    return Figure(
        "exponents", "Exponents beside formats", _HOW.format(run=run), data, layout, height=520
    )


def _bars(line: int, name: str) -> list[Row]:
    """Return a thin bar over a format's subnormals, and a thick one over its normal values."""
    row = FORMATS[name]
    ends = (row.finest_exponent, row.min_exponent, rounded(math.log2(row.max), 5))
    bars: list[Row] = []
    for start, width in ((0, 3), (1, 9)):
        bars.append({
            "type": "scatter", "mode": "lines", "x": [*ends[start : start + 2]], "y": [line, line], "yaxis": "y2",
            "line": {"color": "@muted", "width": width}, "showlegend": False, "name": name,
            "hovertemplate": f"{name}: normal from 2<sup>{ends[1]}</sup> to 2<sup>{ends[2]:.4g}</sup>, "
                             f"subnormal from 2<sup>{ends[0]}</sup><extra></extra>",
        })  # fmt: skip
    return bars
