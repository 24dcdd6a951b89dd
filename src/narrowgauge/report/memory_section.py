"""Memory against the plan: what runs counted, beside what the planner predicts from their settings.

Both are bytes of tensors, so they can be compared on every machine; the memory of a process holds much else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from narrowgauge.analysis.comparison.intervals import MINUS
from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.measured.recorded_memory import PlannedMemory, planned_memory
from narrowgauge.planner.terms import Terms
from narrowgauge.report.recipe_groups import Group
from narrowgauge.report.recipe_tables import Cell, Line, RecipeTable, tensor_bytes
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, finite_number

_COLUMNS = {
    "State": SUMMARY["state_bytes"].help,
    "State planned": "weights, gradients, optimizer states and sums of micro-batches, by the planner",
    "Peak of tensors": SUMMARY["peak_tensor_bytes"].help,
    "Peak planned": "of a step's worst moment, by the planner without overhead; below it its 80 % interval",
}
"""The columns with what they mean."""


@dataclass(frozen=True)
class MemorySection:
    """The section of a page.

    Args:
        table: ``None`` where no recipe has both a plan and what was counted.
        lines: why a recipe is not in it, a sentence each.
    """

    table: RecipeTable | None
    lines: Sequence[str]


def memory_beside_plan(groups: Sequence[Group]) -> MemorySection:
    """What each recipe's runs counted beside their plan; runs of a recipe differ in their seed alone, so one plan is theirs."""
    lines, reasons = [], []
    for group in groups:
        state, peak = (_mean(group, name) for name in ("state_bytes", "peak_tensor_bytes"))
        if state is None and peak is None:
            reasons.append(f"{group.label}: no memory is recorded. Runs of narrowgauge train and compare count it.")
            continue
        try:
            plan = _plan_of(group)
        except NarrowgaugeError as error:
            reasons.append(f"{group.label}: no plan can be made, because {error.message.rstrip('.')}.")
            continue
        lines.append(Line(group.label, group.index, _cells(state, peak, plan)))
    return MemorySection(RecipeTable(_COLUMNS, lines) if lines else None, reasons)


def _plan_of(group: Group) -> PlannedMemory:
    recipe = group.stats[0].recipe
    if recipe is None:
        raise DataError(f"{group.label} is no recipe's name.", "narrowgauge show recipes lists all.")
    return planned_memory(group.runs[0], recipe)


def _cells(state: float | None, peak: float | None, plan: PlannedMemory) -> list[Cell]:
    counted_state, planned_state, counted_peak, planned_peak = _COLUMNS
    low, high = plan.peak.interval
    return [
        _counted(counted_state, state, plan.state),
        Cell(planned_state, tensor_bytes(plan.state.total), plan.state.total),
        _counted(counted_peak, peak, plan.peak),
        Cell(
            planned_peak, tensor_bytes(plan.peak.total), plan.peak.total, f"{tensor_bytes(low)} to {tensor_bytes(high)}"
        ),
    ]


def _counted(column: str, value: float | None, plan: Terms) -> Cell:
    if value is None:
        return Cell(column, is_final=False)
    beyond = 100 * (value / plan.total - 1)
    sign = "±" if abs(beyond) < 0.05 else "+" if beyond > 0 else MINUS
    return Cell(column, tensor_bytes(value), value, f"{sign}{abs(beyond):.1f} %")


def _mean(group: Group, name: str) -> float | None:
    found = [value for run in group.runs if (value := _of(run, name)) is not None]
    return fmean(found) if found else None


def _of(run: Run, name: str) -> float | None:
    """A finished run's figure; of one that is under way the least that its steps counted, which is what its summary will have."""
    if run.summary is not None:
        return finite_number(run.summary.get(name))
    found = [value for row in run.steps if (value := finite_number(row.get(name))) is not None]
    return min(found, default=None)
