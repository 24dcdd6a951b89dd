"""What several ranks spent on each other: time in collectives, and for whom the others waited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from narrowgauge.report.figures.palette import SEQUENTIAL
from narrowgauge.report.figures.series import Array, Series, column, equal_parts, json_list, series_of
from narrowgauge.report.figures.traces import Figure, curve_of, layout_of, traces_of
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

MOST_RANKS = 64
"""The most ranks of a heat map or a table: those for which the others waited longest."""
MOST_RUNS = 4
"""The most runs that get a heat map."""
_LEAST_SHARE = 0.05
"""Of a step, the least end of the colour scale, so that noise looks dark."""


@dataclass(frozen=True)
class RankRow:
    """What one rank of a run did in a step on average.

    ``cells`` are in the order of :data:`RANK_COLUMNS`: the text, and what it is sorted by.
    """

    run: str
    rank: int
    cells: tuple[tuple[str, float], ...]


RANK_COLUMNS: dict[str, str] = {
    "Sent per step": "bytes that the rank sent to others in a step, on average",
    "In collectives": "seconds of a step that the rank spent in collectives, waiting included",
    "Waiting": "seconds of a step that the rank waited for the slowest one",
    "Last to arrive": "share of the steps in which the others waited for this rank",
    "Late by": "how long they waited in one of those, on average",
}
"""Titles of the table of ranks, each with a hint."""


def rank_figures(groups: Sequence[Group]) -> list[Figure]:
    """The figures of runs with several ranks; none where no run has any."""
    named = [(run, name) for group in groups for run, name in group.named if tables_of(run)]
    return [figure for figure in (communication(groups), *_heat_maps(named)) if figure is not None]


def communication(groups: Sequence[Group]) -> Figure | None:
    """The shares of each step that went to collectives, and to waiting for the slowest rank."""
    names = {"communication_seconds": "in collectives", "wait_seconds": "waiting for the slowest rank"}
    data = []
    for name, dash in zip(names, ("solid", "dot"), strict=True):
        lines = [[_share_of_step(run, name) for run in group.runs] for group in groups]
        if any(len(line) for found in lines for line in found):
            curves = [curve_of(group, found) for group, found in zip(groups, lines, strict=True)]
            data += traces_of(curves, name=names[name], dash=dash)
    if not data:
        return None
    for trace in data:
        if "hovertemplate" in trace:
            trace["hovertemplate"] = trace["hovertemplate"].replace("%{y:.5~g}", "%{y:.1%}")
    how = (
        "Solid: the share of a step that ranks spent in collectives, on average. Dotted: the part of it in which the others "
        "waited for the slowest rank. What lies between is sending. Waiting that stays high is a slow machine or unequal work."
    )
    layout = layout_of("step", "share of a step")
    layout["yaxis"] |= {"tickformat": ".0%", "rangemode": "tozero"}
    return Figure("communication", "Communication and waiting", how, data, layout)


def tables_of(run: Run) -> list[tuple[int, Row]]:
    """The tables of ranks that a run recorded, each with its step."""
    keys = {"num_steps", "communication_bytes", "communication_seconds", "wait_seconds", "num_last", "late_seconds"}
    found = ((row.get("step"), row.get("ranks")) for row in run.steps)
    return [(int(step), table) for step, table in found if step and isinstance(table, dict) and table.keys() >= keys]


def rank_rows(named: Sequence[tuple[Run, str]]) -> tuple[list[RankRow], int]:
    """The rows of the table of ranks, and how many ranks were left out of it."""
    rows: list[RankRow] = []
    left_out = 0
    for run, name in named:
        tables = [table for _, table in tables_of(run)]
        if not tables:
            continue
        # After a restart with another number of ranks, the earlier tables number other ranks.
        tables = [table for table in tables if len(table["num_last"]) == len(tables[-1]["num_last"])]
        num_steps = sum(table["num_steps"] for table in tables)
        count, late = _sum(tables, "num_last"), _sum(tables, "late_seconds", "num_last")
        means = [_sum(tables, key, "num_steps") / num_steps for key in _MEANS]
        kept = _longest(late, MOST_RANKS)
        left_out += len(late) - len(kept)
        for rank in kept:
            sent, inside, waiting = (float(mean[rank]) for mean in means)
            last, by = float(count[rank] / num_steps), float(late[rank] / max(1.0, count[rank]))
            texts = (_bytes(sent), f"{inside:.3g} s", f"{waiting:.3g} s", f"{last:.0%}", f"{by:.3g} s")
            cells = tuple(zip(texts, (sent, inside, waiting, last, by), strict=True))
            rows.append(RankRow(name, rank, cells))
    return rows, left_out


_MEANS = ("communication_bytes", "communication_seconds", "wait_seconds")


def _sum(tables: Sequence[Row], key: str, weight: str = "") -> Array:
    """A number for each rank, summed over windows and weighted by ``weight``."""
    total: Array = np.sum(
        [np.asarray(table[key], float) * np.asarray(table[weight] if weight else 1.0, float) for table in tables],
        axis=0,
    )
    return total


def _longest(late: Array, most: int) -> list[int]:
    """The ranks for which the others waited longest, in order."""
    return sorted(np.argsort(-late, kind="stable")[:most].tolist())


def _bytes(number: float) -> str:
    """A number of bytes in the largest unit that leaves at least one.

    Example:
        >>> _bytes(0), _bytes(1536), _bytes(3 << 30)
        ('0 B', '1.5 KiB', '3 GiB')
    """
    power = min(4, int(math.log2(number) // 10)) if number >= 1 else 0
    return f"{number / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _share_of_step(run: Run, name: str) -> Series:
    seconds, of = column(run.steps, "seconds"), column(run.steps, name)
    x, mine, theirs = np.intersect1d(of.x, seconds.x, return_indices=True)
    # The collectives of a step may begin before its clock does.
    whole = np.where(seconds.y[theirs] > 0, seconds.y[theirs], np.nan)
    return series_of(zip(x.tolist(), np.minimum(1.0, of.y[mine] / whole).tolist(), strict=True))


def _heat_maps(named: Sequence[tuple[Run, str]]) -> list[Figure]:
    shown = named[:MOST_RUNS]
    more = f" {len(named) - len(shown)} more runs have no map here." if len(named) > len(shown) else ""
    several = len(named) > 1
    return [
        _heat_map(run, f"ranks-{index}", f"The slowest rank · {name}" if several else "The slowest rank", more)
        for index, (run, name) in enumerate(shown)
    ]


def _heat_map(run: Run, name: str, title: str, more: str) -> Figure:
    tables = tables_of(run)
    num_ranks = max(len(table["num_last"]) for _, table in tables)
    durations = column(run.steps, "seconds")
    waited = np.full((num_ranks, len(tables)), np.nan)
    for place, (step, table) in enumerate(tables):
        window = (durations.x > step - table["num_steps"]) & (durations.x <= step)
        whole = float(np.nansum(durations.y[window])) or math.nan
        late = np.asarray(table["late_seconds"], float) * np.asarray(table["num_last"], float)
        waited[: len(late), place] = late / whole
    kept = _longest(np.nansum(waited, axis=1), MOST_RANKS)
    joined = equal_parts(len(tables), 160)
    starts = [first for first, _ in joined]
    values = np.fmax.reduceat(waited[kept], starts, axis=1)
    trace = {
        "type": "heatmap",
        "x": [tables[last - 1][0] for _, last in joined],
        "y": list(range(len(kept))),
        "z": [json_list(row, 3) for row in values],
        "zmin": 0.0,
        "zmax": max(_LEAST_SHARE, float(np.nanmax(values, initial=0.0))),
        "colorscale": SEQUENTIAL,
        "colorbar": {"thickness": 10, "outlinewidth": 0, "x": 1.01, "tickformat": ".0%"},
        "hoverongaps": False,
        "customdata": [[f"rank {rank}"] * len(joined) for rank in kept],
        "hovertemplate": "the others waited %{z:.1%} of the time for %{customdata}, up to step %{x}<extra></extra>",
        "meta": {},
    }
    layout: Row = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "autorange": "reversed",
            "tickvals": list(range(len(kept))),
            "ticktext": [f"rank {rank}" for rank in kept],
        },
    }
    how = (
        "A row is a rank, a column a window of steps. The stronger the colour, the longer the others waited for that rank, as a "
        "share of the time. A row that keeps a strong colour is a straggler; noise moves from row to row." + more
    )
    if len(kept) < num_ranks:
        how += f" Shown are the {len(kept)} of {num_ranks} ranks for which the others waited longest."
    return Figure(name, title, how, [trace], layout, height=22 * len(kept) + 130)
