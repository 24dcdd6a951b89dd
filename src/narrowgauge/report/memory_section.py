"""Memory against the plan: what runs counted, beside what the planner predicts from their settings.

Both are bytes of tensors, so they can be compared on every machine: no driver, no libraries and nothing that an allocator keeps
are in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from narrowgauge.analysis.comparison.intervals import MINUS
from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.launches import layout_of
from narrowgauge.planner.memory import LARGE_VOCABULARY, memory_terms, state_terms
from narrowgauge.planner.model import read_model
from narrowgauge.planner.model_state import with_optimizer
from narrowgauge.planner.terms import Terms
from narrowgauge.report.recipe_groups import Group
from narrowgauge.report.recipe_tables import Cell, Line, RecipeTable, tensor_bytes
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, finite_number
from narrowgauge.spec.recipes import Recipe

_COLUMNS = {
    "State": SUMMARY["state_bytes"].help,
    "State planned": "weights, gradients, optimizer states and sums of micro-batches, by the planner",
    "Peak of tensors": SUMMARY["peak_tensor_bytes"].help,
    "Peak planned": "of a step's worst moment, by the planner without overhead; below it its 80 % interval",
}
"""The columns with what they mean."""


@dataclass(frozen=True)
class MemorySection:
    """A table, None where no recipe has both a plan and what was counted; and why a recipe is not in it."""

    table: RecipeTable | None
    lines: Sequence[str]


def memory_beside_plan(groups: Sequence[Group]) -> MemorySection:
    """Return what each recipe's runs counted beside their plan; runs of a recipe differ in their seed alone."""
    lines, reasons = [], []
    for group in groups:
        state, peak = (_mean(group, name) for name in ("state_bytes", "peak_tensor_bytes"))
        if state is None and peak is None:
            reasons.append(f"{group.label}: no memory is recorded. Runs of narrowgauge train and compare count it.")
            continue
        try:
            plans = _planned(group.runs[0], group.stats[0].recipe)
        except NarrowgaugeError as error:
            reasons.append(f"{group.label}: no plan can be made, because {error.message.rstrip('.')}.")
            continue
        cells = []
        for name, count, plan in zip(("State", "Peak of tensors"), (state, peak), plans, strict=True):
            planned = f"{name.partition(' ')[0]} planned"
            low, high = plan.interval
            interval = "" if low == high else f"{tensor_bytes(low)} to {tensor_bytes(high)}"
            cells += [_counted(name, count, plan), Cell(planned, tensor_bytes(plan.total), plan.total, interval)]
        lines.append(Line(group.label, group.index, cells))
    return MemorySection(RecipeTable(_COLUMNS, lines) if lines else None, reasons)


def _planned(run: Run, recipe: Recipe | None) -> tuple[Terms, Terms]:
    """Plan a run's state and peak from its settings and its number of ranks alone, without overhead.

    Layers are Hugging Face's modules, or where the run compiled them, fused kernels, which keep about as much.
    """
    config = run.config
    missing = [name for name in ("model", "batch_size", "sequence_length") if config.get(name) is None]
    if recipe is None or missing:
        raise DataError(f"its settings do not say {(missing or ['recipe'])[0]}.", "Those of narrowgauge train do.")
    if config.get("offload"):
        raise DataError("with --offload its state moves between the host and the device.", "Nothing is counted there.")
    length, ranks = config["sequence_length"], int(run.run.get("machine", {}).get("ranks", 1))
    if type(length) is not int or length < 1:
        raise DataError(f"its sequences are of {length!r} tokens.", "A plan needs a whole number above zero.")
    architecture, layout = read_model(str(config["model"])), layout_of(config, ranks, str(run.path))
    recipe = with_optimizer(recipe, str(config.get("rule") or "adamw"))
    peak = memory_terms(
        architecture,
        recipe,
        layout,
        length,
        is_loss_chunked=architecture.vocab_size >= LARGE_VOCABULARY and not recipe.keep,
        kernels="fused" if config.get("compile") else None,
        has_overhead=False,
    )
    return state_terms(architecture, recipe, layout), peak


def _counted(column: str, value: float | None, plan: Terms) -> Cell:
    if value is None:
        return Cell(column, is_final=False)
    beyond = 100 * (value / plan.total - 1)
    sign = "±" if abs(beyond) < 0.05 else "+" if beyond > 0 else MINUS
    return Cell(column, tensor_bytes(value), value, f"{sign}{abs(beyond):.1f} %")


def _mean(group: Group, name: str) -> float | None:
    """Return a figure of finished runs; of one that is under way the least that its steps counted, as its summary will have."""
    values = []
    for run in group.runs:
        rows = [run.summary] if run.summary is not None else run.steps
        known = [value for row in rows if (value := finite_number(row.get(name))) is not None]
        values += [min(known)] if known else []
    return fmean(values) if values else None
