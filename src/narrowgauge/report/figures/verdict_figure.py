"""The figure of the verdict: each recipe's loss difference from the baseline, with its interval and
the threshold.
"""

from __future__ import annotations

import math

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.intervals import PairedDifference, shown_difference
from narrowgauge.report.figures.figure import Figure, layout_of, rounded
from narrowgauge.report.figures.palette import colour, plain, symbol_of
from narrowgauge.runs.schema import Row

FAR = 15.0
"""The axis ends at this multiple of the threshold. Else the recipes inside would overlap."""


def differences(comparison: Comparison) -> Figure | None:
    """Return each recipe's paired difference from the baseline, with its 95 % interval; ``None`` if
    there is none.
    """
    threshold = comparison.acceptable
    drawn: list[str] = []
    data = []
    reach = [0.0]
    for index, (label, recipe) in enumerate(comparison.classes.items()):
        paired = recipe.difference
        if paired is None or not math.isfinite(paired.mean):
            continue
        data.append(_bar(index, plain(label), paired, len(drawn)))
        drawn.append(plain(label))
        sides = (paired.low, paired.high, paired.mean)
        reach += map(abs, filter(math.isfinite, sides))
    if not drawn or comparison.baseline is None or not 0 < threshold < math.inf:
        return None
    # An interval may be much wider than any difference, and may leave the figure.
    limit = 1.1 * max(1.5 * threshold, min(max(reach), FAR * threshold))
    layout = layout_of("nats per token", "")
    layout["xaxis"] |= {"range": [-limit, limit], "zeroline": True, "nticks": 4}
    layout["yaxis"] |= {
        "tickvals": list(range(len(drawn))), "ticktext": drawn,
        "range": [len(drawn) - 0.5, -0.5], "zeroline": False, "showgrid": False,
    }  # fmt: skip
    layout["shapes"] = [{
        "type": "rect", "xref": "x", "yref": "paper", "x0": -threshold, "x1": threshold, "y0": 0, "y1": 1,
        "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
    }]  # fmt: skip
    how = (
        f"Left of zero is better than {comparison.baseline}, right of it worse. A bar is the 95 % "
        "interval of the mean over "
        f"seeds, of runs with the same seed. The band is the threshold, ± {threshold:.2g} nats: "
        "inside it a recipe is as good; "
        "a bar over its edge is not resolved by these seeds. A mark without a bar is one seed "
        "alone; a recipe without a mark lies far beyond the axis."
    )
    return Figure(
        "verdict-figure",
        "Difference from the baseline",
        how,
        data,
        layout,
        height=110 + 34 * len(drawn),
    )


def _bar(index: int, label: str, paired: PairedDifference, line: int) -> Row:
    half = paired.half if math.isfinite(paired.half) else 0.0
    return {
        "type": "scatter", "mode": "markers", "x": [rounded(paired.mean)], "y": [line], "name": label,
        "error_x": {
            "type": "data", "array": [rounded(half)], "visible": half > 0, "color": colour(index),
            "thickness": 2.5, "width": 6,
        },
        "marker": {"size": 11, "color": colour(index), "symbol": symbol_of(index)},
        "meta": {"group": index},
        "hovertemplate": f"{plain(shown_difference(paired.mean, paired.half))} nats<extra>{label}</extra>",
    }  # fmt: skip
