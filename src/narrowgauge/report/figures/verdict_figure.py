"""The figure of the verdict: each recipe's loss difference from the baseline, with its interval and the threshold.

The figure shows the verdict at a glance. An interval inside the band is as good as the baseline. An interval beyond it costs
something. An interval across the edge is not resolved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.comparison.intervals import PairedDifference, shown_difference
from narrowgauge.report.figures.palette import colour, plain, symbol_of
from narrowgauge.report.figures.series import rounded
from narrowgauge.report.figures.traces import Figure, layout_of
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.schema import Row

FAR = 10.0
"""Draw a recipe at the edge if its difference exceeds this multiple of the threshold. Else the others would overlap."""


def differences(groups: Sequence[Group], comparison: Comparison) -> Figure | None:
    """Return each recipe's paired difference from the baseline, with its 95 % interval; ``None`` if there is none."""
    pairs = [(group, comparison.classes[group.label].difference) for group in groups]
    drawn = [(group, paired) for group, paired in pairs if paired is not None and math.isfinite(paired.mean)]
    threshold = comparison.acceptable
    if not drawn or comparison.baseline is None or not 0 < threshold < math.inf:
        return None
    near = [paired for _, paired in drawn if abs(paired.mean) <= FAR * threshold]
    reach = [abs(side) for paired in near for side in (paired.low, paired.high, paired.mean) if math.isfinite(side)]
    # An interval may be much wider than any difference, and may leave the figure.
    limit = 1.1 * max(1.5 * threshold, min(max(reach, default=0.0), 1.5 * FAR * threshold))
    beyond = [(group, paired) for group, paired in drawn if abs(paired.mean) > limit]
    layout = layout_of(f"loss minus {plain(comparison.baseline)} (nats per token)", "")
    layout["xaxis"] |= {"range": [-limit, limit], "zeroline": True}
    layout["yaxis"] |= {
        "tickvals": list(range(len(drawn))), "ticktext": [plain(group.label) for group, _ in drawn],
        "range": [len(drawn) - 0.5, -0.5], "zeroline": False, "showgrid": False,
    }  # fmt: skip
    layout["shapes"] = [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": -threshold, "x1": threshold, "y0": 0, "y1": 1,
            "fillcolor": "@band", "line": {"width": 0}, "layer": "below",
        }
    ]  # fmt: skip
    how = (
        f"Left of zero is better than {comparison.baseline}, right of it worse. A bar is the 95 % interval of the mean over "
        f"seeds, of runs with the same seed. The band is the threshold, ± {threshold:.2g} nats: inside it a recipe is as good; "
        "a bar over its edge is not resolved by these seeds."
    )
    if any(not math.isfinite(paired.half) for _, paired in drawn):
        how += " A mark without a bar is one seed alone, which has no interval."
    if beyond:
        named = ", ".join(f"{group.label} ({shown_difference(paired.mean, paired.half)})" for group, paired in beyond)
        how += f" Beyond the axis: {named}."
    data = [_bar(group, paired, line, limit) for line, (group, paired) in enumerate(drawn)]
    return Figure("verdict-figure", "Difference from the baseline", how, data, layout, height=110 + 34 * len(drawn))


def _bar(group: Group, paired: PairedDifference, line: int, limit: float) -> Row:
    is_beyond = abs(paired.mean) > limit
    symbol = ("triangle-right" if paired.mean > 0 else "triangle-left") if is_beyond else symbol_of(group.index)
    at = math.copysign(0.98 * limit, paired.mean) if is_beyond else paired.mean
    half = paired.half if math.isfinite(paired.half) and not is_beyond else 0.0
    return {
        "type": "scatter", "mode": "markers", "x": [rounded(at)], "y": [line], "name": plain(group.label),
        "error_x": {
            "type": "data", "array": [rounded(half)], "visible": half > 0, "color": colour(group.index),
            "thickness": 2.5, "width": 6,
        },
        "marker": {"size": 11, "color": colour(group.index), "symbol": symbol},
        "meta": {"group": group.index},
        "hovertemplate": f"{plain(shown_difference(paired.mean, paired.half))} nats<extra>{plain(group.label)}</extra>",
    }  # fmt: skip
