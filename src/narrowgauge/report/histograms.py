"""Histograms of binary exponents over the ranges of number formats, for a slider over a run's sampled steps.

A format is a window on the powers of two: what lies left of it becomes zero, what lies right of it overflows. Drawn over
such windows, a histogram of exponents shows at a glance what a format would cut off, and where a scale would have to
move the values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.report.samples import MOST_HISTOGRAMS, Samples, spread
from narrowgauge.report.series import rounded
from narrowgauge.report.traces import colour
from narrowgauge.runs.schema import FIRST_EXPONENT, Row
from narrowgauge.spec.formats import FORMATS

SHOWN_FORMATS = (
    "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn",
)  # fmt: skip
"""The formats whose ranges stand above the histograms."""

KIND_TITLES: dict[str, str] = {
    "weight": "Weights",
    "input": "Layer inputs",
    "output_grad": "Output gradients",
    "grad": "Parameter gradients",
    "exp_avg": "First moments",
    "exp_avg_sq": "Second moments",
}
"""The panels of the histogram figure, from top to bottom."""

MAX_BARS = 150_000
"""Bars of all histograms of a page together; a bar takes about two bytes of it, compressed."""


def histograms(samples: Sequence[Samples], places: Sequence[int]) -> list[Row | None]:
    """The exponent histograms of every run, for a slider over its sampled steps.

    Args:
        samples: of the page's runs, in its order.
        places: each one's place in the palette.

    Returns:
        Per run a Plotly figure whose ``steps`` name the sampled steps and whose ``frames`` give, per step and panel, the
        heights of the bars; or ``None`` where the run has no histograms.
    """
    widths = sum(stop - start for found in samples for start, stop in found.spans.values())
    num_steps = min(MOST_HISTOGRAMS, max(5, MAX_BARS // max(1, widths)))
    exponents = _exponent_range([span for found in samples for span in found.spans.values()])
    return [
        _histogram(found, place, num_steps, exponents) if found.spans else None
        for found, place in zip(samples, places, strict=True)
    ]


def format_ranges() -> list[Row]:
    """The formats above the histograms, their ends as powers of two.

    Returns:
        Rows ``name, subnormal, normal, max`` in binary exponents, and ``zero_below`` and ``last``: bins below the one
        become zero in the format, bins above the other lie beyond its end.
    """
    rows = []
    for name in SHOWN_FORMATS:
        row = FORMATS[name]
        rows.append(
            {
                "name": name,
                "subnormal": row.finest_exponent,
                "normal": row.min_exponent,
                "max": rounded(math.log2(row.max), 5),
                # Half of the smallest value still rounds up to it.
                "zero_below": row.finest_exponent - 1,
                "last": row.max_exponent,
            }
        )
    return rows


def _exponent_range(spans: Sequence[tuple[int, int]]) -> list[float]:
    """The exponents drawn: all that occur, and float16's whole range for comparison."""
    half = FORMATS["float16"]
    low = min([start + FIRST_EXPONENT for start, _ in spans] + [half.finest_exponent])
    high = max([stop + FIRST_EXPONENT for _, stop in spans] + [half.max_exponent + 1])
    return [low - 2, high + 2]


def _histogram(samples: Samples, place: int, num_steps: int, exponents: list[float]) -> Row:
    spans = {kind: samples.spans[kind] for kind in KIND_TITLES if kind in samples.spans}
    chosen = spread(samples.histograms, num_steps)
    frames = [[_shares(row["histograms"].get(kind), span) for kind, span in spans.items()] for row in chosen]
    data = [
        {
            "type": "bar",
            "x": [bin + FIRST_EXPONENT for bin in range(*span)],
            "y": frames[-1][panel],
            "offset": 0,
            "width": 1,
            "yaxis": f"y{panel + 2}",
            "marker": {"color": colour(place), "line": {"width": 0}},
            "meta": {"title": KIND_TITLES[kind]},
            "hovertemplate": f"%{{y:.3~p}} of {KIND_TITLES[kind].lower()}<br>2<sup>%{{x}}</sup> to twice that<extra></extra>",
        }
        for panel, (kind, span) in enumerate(spans.items())
    ]
    return {
        "data": [*data, *_format_bars()],
        "layout": _panels(len(spans), exponents),
        "steps": [row["step"] for row in chosen],
        "frames": frames,
        "num_sampled": samples.num_histograms,
    }


def _shares(counts: Sequence[float] | None, span: tuple[int, int]) -> list[float | None] | None:
    total = sum(counts) if counts else 0
    if not counts or not total:
        return None
    return [rounded(count / total, 3) if count else None for count in counts[slice(*span)]]


def _format_bars() -> list[Row]:
    """A thick bar over a format's normal range, a thin one over its subnormals."""
    bars = []
    for line, row in enumerate(format_ranges()):
        low = f"2<sup>{row['normal']}</sup>"
        text = f"{row['name']}: normal from {low} to 2<sup>{row['max']:.4g}</sup>, subnormal from 2<sup>{row['subnormal']}</sup>"
        for name, start, stop, width in (
            ("subnormal", row["subnormal"], row["normal"], 3),
            ("normal", row["normal"], row["max"], 9),
        ):
            bars.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [start, stop],
                    "y": [line, line],
                    "line": {"color": "@muted", "width": width},
                    "meta": {"format": row["name"], "part": name},
                    "hovertemplate": f"{text}<extra></extra>",
                }
            )
    return bars


def _panels(num_panels: int, exponents: list[float]) -> Row:
    """The formats on top, below them a panel per kind, all over one axis of exponents."""
    top, panel, gap, bottom = 24 * len(SHOWN_FORMATS), 74, 30, 10
    total = top + (panel + gap) * num_panels + bottom
    layout: Row = {
        "height": total + 90,
        "xaxis": {
            "title": {"text": "magnitude, as a power of two"},
            "range": exponents,
            "tickprefix": "2<sup>",
            "ticksuffix": "</sup>",
            "dtick": 8,
            "tick0": 0,
            "anchor": f"y{num_panels + 1}",
        },
        "yaxis": {
            "domain": [1 - top / total, 1],
            "range": [len(SHOWN_FORMATS) - 0.5, -0.5],
            "tickvals": list(range(len(SHOWN_FORMATS))),
            "ticktext": list(SHOWN_FORMATS),
            "showgrid": False,
            "fixedrange": True,
        },
        "bargap": 0,
    }
    for number_ in range(num_panels):
        upper = total - top - gap - number_ * (panel + gap)
        layout[f"yaxis{number_ + 2}"] = {
            "domain": [(upper - panel) / total, upper / total],
            "type": "log",
            "range": [-6, 0],
            "tickvals": [1e-6, 1e-4, 1e-2, 1],
            "ticktext": ["0.0001 %", "0.01 %", "1 %", "100 %"],
            "fixedrange": True,
        }
    return layout
