"""Memory against the plan: the counted memory of runs and the planner's prediction from their settings.

Both are bytes of tensors, so they are comparable on every machine. Neither includes the driver, libraries or the allocator's
reserve.
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
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import finite_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Column, Table, name_columns, number_columns

_COLUMNS = (
    *name_columns(recipe="recipe"),
    *number_columns(state="state", state_planned="state_plan", peak_of_tensors="peak", peak_planned="peak_plan"),
    Column("80 % interval", "interval"),
)


@dataclass(frozen=True)
class MemorySection:
    """Hold a table of recipes with both a plan and counted memory, and the reasons why other recipes are missing."""

    table: Table
    lines: Sequence[str]


def memory_beside_plan(groups: Sequence[Group]) -> MemorySection:
    """Return each recipe's counted memory and its plan. Runs of a recipe differ only in their seed."""
    rows, reasons = [], []
    for group in groups:
        state, peak = (_mean(group, name) for name in ("state_bytes", "peak_tensor_bytes"))
        if state is None and peak is None:
            reasons.append(f"{group.label}: no memory is recorded. Runs of narrowgauge train and compare count it.")
            continue
        try:
            state_plan, peak_plan = _planned(group.runs[0], group.stats[0].recipe)
        except NarrowgaugeError as error:
            reasons.append(f"{group.label}: no plan can be made, because {error.message.rstrip('.')}.")
            continue
        rows.append({
            "recipe": group.label,
            "state": _counted(state, state_plan),
            "state_plan": tensor_bytes(state_plan.total),
            "peak": _counted(peak, peak_plan),
            "peak_plan": tensor_bytes(peak_plan.total),
            "interval": " to ".join(map(tensor_bytes, peak_plan.interval)),
        })  # fmt: skip
    return MemorySection(Table(_COLUMNS, rows), reasons)


def tensor_bytes(value: float) -> str:
    """Write bytes in binary units. Small models have few bytes.

    Example:
        >>> tensor_bytes(3 * 2**30), tensor_bytes(500 * 2**20), tensor_bytes(5.25 * 2**20)
        ('3.00 GiB', '500 MiB', '5.2 MiB')
    """
    if value >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    return f"{value / 2**20:.{0 if value >= 100 * 2**20 else 1}f} MiB"


def _planned(run: Run, recipe: Recipe | None) -> tuple[Terms, Terms]:
    """Plan a run's state and peak from its settings and its number of ranks alone, without overhead.

    Layers are Hugging Face's modules. For a compiled run they are fused kernels, which save about as much.
    """
    config = run.config
    missing = [name for name in ("model", "batch_size", "sequence_length") if config.get(name) is None]
    if recipe is None or missing:
        raise DataError(f"its settings do not say {(missing or ['recipe'])[0]}.", "Those of narrowgauge train do.")
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


def _counted(value: float | None, plan: Terms) -> str:
    if value is None:
        return "–"
    beyond = 100 * (value / plan.total - 1)
    sign = "±" if abs(beyond) < 0.05 else "+" if beyond > 0 else MINUS
    return f"{tensor_bytes(value)} ({sign}{abs(beyond):.1f} %)"


def _mean(group: Group, name: str) -> float | None:
    """Return the mean of a figure over runs. For unfinished runs use the minimum over steps, as their summary will."""
    values = []
    for run in group.runs:
        rows = [run.summary] if run.summary is not None else run.steps
        numbers = [value for row in rows if (value := finite_number(row.get(name))) is not None]
        values += [min(numbers)] if numbers else []
    return fmean(values) if values else None
