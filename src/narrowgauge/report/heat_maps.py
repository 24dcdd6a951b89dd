"""Heat maps of the gauges' readings: a row per tensor, a column per sampled step, for one run.

A page cannot hold every cell of a long run of a large model, so steps are joined, each cell keeping its *worst* reading,
and of too many tensors those that ever strayed farthest are shown, in the model's order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.report.heat_map_metrics import MEASURES, Measure
from narrowgauge.report.samples import MOST_TENSORS, Readings, Samples, farthest, known
from narrowgauge.report.series import rounded, thin_places
from narrowgauge.report.traces import plain
from narrowgauge.runs.schema import Row

MAX_CELLS = 150_000
"""Cells of all heat maps of a page together; a cell takes about one byte of it, compressed."""

_SEQUENTIAL = [[0, "@heat0"], [0.5, "@heat1"], [1, "@heat2"]]
_DIVERGING = [[0, "@below"], [0.5, "@even"], [1, "@above"]]
_SMALLEST = 1e-7


def heat_maps(samples: Sequence[Samples]) -> list[dict[str, Row]]:
    """Every measure of every run that has it.

    Args:
        samples: of the page's runs, in its order.

    Returns:
        Per run, Plotly figures by measure.
    """
    share = MAX_CELLS // max(1, sum(len(found.readings) for found in samples))
    return [
        {name: _heat_map(MEASURES[name], found.steps, readings, share) for name, readings in found.readings.items()}
        for found in samples
    ]


def short_names(names: Sequence[str]) -> list[str]:
    """Names without what all of them share at either end, cut at dots; a kind before a colon is kept.

    Example:
        >>> short_names(["input:model.layers.0.up.weight", "grad:model.norm.weight"])
        ['input:layers.0.up', 'grad:norm']
    """
    kinds = [name.rpartition(":")[0] for name in names]
    parts = [name.rpartition(":")[2].split(".") for name in names]
    room = min((len(part) for part in parts), default=1) - 1
    first = _num_shared(parts, room)
    last = _num_shared([part[::-1] for part in parts], room - first)
    cut = [".".join(part[first : len(part) - last]) for part in parts]
    return [f"{kind}:{name}" if kind else name for kind, name in zip(kinds, cut, strict=True)]


def _num_shared(parts: Sequence[Sequence[str]], most: int) -> int:
    shared = 0
    while len(parts) > 1 and shared < most and len({part[shared] for part in parts}) == 1:
        shared += 1
    return shared


def _heat_map(measure: Measure, sampled: Sequence[float], readings: Readings, num_cells: int) -> Row:
    lines = farthest(readings.lines, measure, min(MOST_TENSORS, max(16, num_cells // 40)))
    names = list(lines)
    # Steps at which none of these was read have no column.
    read = [column for column in range(len(sampled)) if any(not math.isnan(line[column]) for line in lines.values())]
    steps = [sampled[column] for column in read]
    shares = thin_places(len(steps), min(160, max(20, num_cells // max(1, len(names)))))
    cells = [[_worst(measure, [line[column] for column in read[a:b]]) for a, b in shares] for line in lines.values()]
    trace = {
        "type": "heatmap",
        "x": [rounded(steps[last - 1], 9) for _, last in shares],
        "y": list(range(len(names))),
        "z": [[None if value is None else rounded(_scaled(measure, value), 3) for value in row] for row in cells],
        "zmin": _scaled(measure, measure.low),
        "zmax": _scaled(measure, measure.high),
        "colorscale": _DIVERGING if measure.good else _SEQUENTIAL,
        "hoverongaps": False,
        "meta": {"names": [plain(name) for name in names], "log": measure.log},
    }
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "autorange": "reversed",
            "tickvals": list(range(len(names))),
            "ticktext": [plain(name) for name in short_names(names)],
        },
        "height": 22 * len(names) + 110,
    }
    total = readings.total
    shown = "" if len(names) == total else f" Shown are the {len(names)} of {total} that strayed farthest."
    joined = (
        ""
        if len(shares) == len(steps)
        else f" Each column joins {math.ceil(len(steps) / len(shares))} samples and shows the worst."
    )
    return {"data": [trace], "layout": layout, "how": measure.how + shown + joined}


def _worst(measure: Measure, values: Sequence[float]) -> float | None:
    found = known(values)
    return measure.worst(found) if found else None


def _scaled(measure: Measure, value: float) -> float:
    return math.log10(max(abs(value), _SMALLEST)) if measure.log else value
