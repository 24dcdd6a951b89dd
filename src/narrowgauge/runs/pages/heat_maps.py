"""Heat maps of the gauges' readings: a row per tensor, a column per sampled step, for one run.

A page cannot hold every cell of a long run of a large model, so steps are joined, each cell keeping its *worst* reading,
and of too many tensors those that ever strayed farthest are shown, in the model's order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.runs.pages.curves import plain
from narrowgauge.runs.pages.series import number, rounded, thin_places
from narrowgauge.runs.readings import FIELDS
from narrowgauge.runs.record import Row, Run

MAX_CELLS = 150_000
"""Cells of all heat maps of a page together; a cell takes about one byte of it, compressed."""

_SEQUENTIAL = [[0, "@heat0"], [0.5, "@heat1"], [1, "@heat2"]]
_DIVERGING = [[0, "@below"], [0.5, "@even"], [1, "@above"]]
_SMALLEST = 1e-7


@dataclass(frozen=True)
class Measure:
    """One reading that a heat map can show.

    Args:
        table, field: where a row of ``gauges.jsonl`` has it.
        title: what it is.
        how: how to read its heat map.
        low, high: the ends of the colours, in the reading's own unit.
        good: the reading of perfect health; what lies farthest from it is the worst.
        log: whether the colours count powers of ten.
    """

    table: str
    field: str
    title: str
    how: str
    low: float
    high: float
    good: float = 0.0
    log: bool = False

    def worst(self, values: Iterable[float]) -> float:
        """The value farthest from health, of at least one."""
        found = list(values)
        low, high = min(found), max(found)
        return high if high - self.good >= self.good - low else low


MEASURES: dict[str, Measure] = {
    "edq": Measure(
        "updates", "edq", "EDQ: share of the update that arrived",
        "A row is a parameter, a column a sampled step. The middle colour is 1: the whole update arrived. Towards 0 it was "
        "rounded away and the parameter stands still; above 1 the storage moved it farther than asked.",
        0.0, 2.0, good=1.0,
    ),
    "noise": Measure(
        "updates", "noise", "Noise beside the update",
        "What the storage added beside the intended update, relative to it. 1 means as much noise as update, which "
        "stochastic rounding can bear, since it averages out; rounding to nearest cannot.",
        1e-3, 30.0, log=True,
    ),
    "lost": Measure(
        "updates", "lost_fraction", "Share of changes that were lost",
        "The share of intended changes that left the stored value exactly as it was. High in embeddings is normal, since "
        "most words are rare; high in every row late in training says the updates have become too small for the storage.",
        0.0, 1.0,
    ),
    "underflow": Measure(
        "tensors", "underflow", "Underflow of the cast",
        "The share of nonzero values that the cast into the matmul made zero. A row is an operand; rows that brighten with "
        "time are tensors outgrowing their format's small end.",
        1e-6, 1.0, log=True,
    ),
    "overflow": Measure(
        "tensors", "overflow", "Overflow of the cast",
        "The share of values beyond the end of their format. It should be dark nearly everywhere. Formats "
        "with a scale per block cut off a few of the largest values by the rule of their scales, which are powers of two; "
        "under any other scale a row that stays bright has one that is too large or too old.",
        1e-6, 1.0, log=True,
    ),
    "outlier": Measure(
        "tensors", "outlier", "Outliers: largest magnitude over the rms",
        "How far the largest value of a tensor stands above its typical one. A normal distribution reads 4 to 6; rows that "
        "climb into the hundreds need a scale per row or block.",
        1.0, 1000.0, log=True,
    ),
    "bias": Measure(
        "moments", "bias", "Second moments against an exact shadow",
        "The stored second moments over those kept exactly. The middle colour is 1: no bias. Below, the steps come out too "
        "long; above, too short.",
        0.0, 2.0, good=1.0,
    ),
    "frozen": Measure(
        "moments", "frozen_fraction", "Share of second moments that stand still",
        "The share of second moments that did not move since the last sample although their exact shadow did. A row that "
        "brightens is freezing: its decay is too slow for the storage.",
        0.0, 1.0,
    ),
    "max_logit": Measure(
        "attention", "max_logit", "Largest attention logit",
        "A row is an attention layer. Logits that climb through the hundreds end in attention on a single token and in "
        "gradient spikes.",
        1.0, 1e4, log=True,
    ),
}  # fmt: skip
"""The readings a reader can choose, the first by default."""


def heat_maps(runs: Sequence[Run]) -> list[dict[str, Row]]:
    """Every measure of every run that has it.

    Args:
        runs: of the page, in its order.

    Returns:
        Per run, Plotly figures by measure.
    """
    found = [{name: _readings(run, measure.table, measure.field) for name, measure in MEASURES.items()} for run in runs]
    num_maps = sum(bool(readings) for measures in found for readings in measures.values())
    share = MAX_CELLS // max(1, num_maps)
    return [
        {name: _heat_map(MEASURES[name], readings, share) for name, readings in measures.items() if readings}
        for measures in found
    ]


def worst_of_run(run: Run, field: str) -> dict[float, tuple[str, float]]:
    """Per sampled step the tensor with the largest reading of a field, and the reading.

    Args:
        run: any run.
        field: a column of ``tensors``.

    Returns:
        By step; a step without the reading is left out.
    """
    worst: dict[float, tuple[str, float]] = {}
    for name, readings in _readings(run, "tensors", field).items():
        for step, value in readings.items():
            if step not in worst or value > worst[step][1]:
                worst[step] = (name, value)
    return dict(sorted(worst.items()))


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


def _readings(run: Run, table: str, field: str) -> dict[str, dict[float, float]]:
    """By tensor, by step; tensors in the order in which the run names them."""
    place = list(FIELDS[table]).index(field)
    most = sys.float_info.max
    found: dict[str, dict[float, float]] = {}
    for row in run.gauges:
        step, values_of = number(row.get("step")), row.get(table)
        if step is None or not isinstance(values_of, dict):
            continue
        for name, values in values_of.items():
            value = values[place] if place < len(values) else None
            # Millions of these: a finite float is the common case, and asked for without a call.
            if type(value) is not float or not -most <= value <= most:
                value = number(value)
            if value is not None:
                found.setdefault(name, {})[step] = value
    return found


def _heat_map(measure: Measure, readings: dict[str, dict[float, float]], num_cells: int) -> Row:
    most_rows = min(64, max(16, num_cells // 40))
    names = _farthest(readings, measure, most_rows)
    steps = sorted({step for name in names for step in readings[name]})
    shares = thin_places(len(steps), min(160, max(20, num_cells // max(1, len(names)))))
    cells = [[_worst(measure, readings[name], steps[a:b]) for a, b in shares] for name in names]
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
    total = len(readings)
    shown = "" if len(names) == total else f" Shown are the {len(names)} of {total} that strayed farthest."
    joined = (
        ""
        if len(shares) == len(steps)
        else f" Each column joins {math.ceil(len(steps) / len(shares))} samples and shows the worst."
    )
    return {"data": [trace], "layout": layout, "how": measure.how + shown + joined}


def _farthest(readings: dict[str, dict[float, float]], measure: Measure, most: int) -> list[str]:
    reach = {name: abs(measure.worst(found.values()) - measure.good) for name, found in readings.items()}
    kept = set(sorted(reach, key=lambda name: -reach[name])[:most])
    return [name for name in readings if name in kept]


def _worst(measure: Measure, readings: dict[float, float], steps: Sequence[float]) -> float | None:
    found = [readings[step] for step in steps if step in readings]
    return measure.worst(found) if found else None


def _scaled(measure: Measure, value: float) -> float:
    return math.log10(max(abs(value), _SMALLEST)) if measure.log else value
