"""``narrowgauge plan --exact``: what one layer keeps, counted in the model's own modules, beside what the plan's formula says."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.planner.activations import bytes_per_token, layer_tensors
from narrowgauge.planner.options import Option
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.presets import preset
from narrowgauge.planner.words import gigabytes, layout_text
from narrowgauge.profiling.block_memory import layer_memory
from narrowgauge.spec.models import refuse_own_code
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns, text_columns

_MOST = 4
_COLUMNS = (
    *name_columns(recipe="recipe"), *text_columns(layout="layout"),
    *number_columns(B_per_token_and_layer_planned="planned", counted="counted", memory_planned="memory", memory_counted="exact"),
)  # fmt: skip


def exact_rows(plan: Plan) -> list[Row]:
    """Count what one layer keeps in each of the best options that this project's trainer runs.

    Args:
        plan: of a model whose modules transformers has; without tensor, pipeline and context parallelism.
    Returns:
        A row for each of the first four such options: bytes per token and layer, and of the worst rank, planned and counted.
    Raises:
        DataError: the model is a mixture, or no option has its layers whole on one rank.
    Cost: some seconds for each.
    """
    options = [option for option in plan.options if option.layout.runs_here and option.step is not None][:_MOST]
    if plan.trainable is not None:
        options = [plan.trainable, *options][:_MOST]
    if not options or plan.question.architecture.mixture is not None:
        raise DataError(
            "--exact was requested, and it counts dense layers that lie whole on one rank.", "Add --layout fsdp2."
        )
    config = _config(plan.question.model)
    return [_row(plan, option, config) for option in options]


def exact_table(rows: list[Row]) -> Table:
    """The rows of :func:`exact_rows` to print."""
    shown = [{**row, "memory": gigabytes(row["memory"]), "exact": gigabytes(row["exact"])} for row in rows]
    return Table(_COLUMNS, shown, "One layer, counted with fake tensors in the model's own modules")


def _row(plan: Plan, option: Option, config: Mapping[str, Any]) -> Row:
    architecture, layout = plan.question.architecture, option.layout
    tokens = layout.micro_batch * option.sequence_length
    with warnings.catch_warnings():
        # What this processor emulates is of no interest: nothing is computed.
        warnings.simplefilter("ignore", EmulationNotice)
        saved = layer_memory(config, option.recipe, layout.micro_batch, option.sequence_length)
    counted = sum(each.num_bytes * each.num_tensors for each in saved) / tokens
    tensors = layer_tensors(architecture, option.recipe, is_mixture=False, attention="flash", kernels="eager")
    planned = bytes_per_token(tensors)
    layers = 1 if layout.recompute == "full" else architecture.num_layers
    return {
        "recipe": option.recipe.title,
        "layout": layout_text(layout),
        "planned": round(planned),
        "counted": round(counted),
        "memory": option.memory.total,
        "exact": option.memory.total + (counted - planned) * tokens * layers,
    }


def _config(model: str) -> Mapping[str, Any]:
    found = preset(model)
    if found is not None:
        return found[0]
    path = Path(model).expanduser()
    refuse_own_code(path)
    table: Mapping[str, Any] = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    return table
