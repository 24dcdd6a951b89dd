"""The memory of a recorded run as it is planned from the run's own settings.

A run counts the bytes of its tensors (``state_bytes``, ``peak_tensor_bytes``): no driver, no libraries and nothing that an
allocator keeps are in them. So the plan is taken without overhead too, and the two can be held against each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.errors import DataError
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.measured.launches import layout_of
from narrowgauge.planner.memory.rank_memory import FIXED, LARGE_VOCABULARY, memory_terms, state_terms
from narrowgauge.planner.memory.state_bytes import OPTIMIZER_STATES, with_optimizer
from narrowgauge.planner.terms import Terms
from narrowgauge.runs.record import Run
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Bytes of the worst rank.

    Args:
        state: weights, gradients, optimizer states and sums of micro-batches, all together.
        peak: of a step's worst moment, without overhead.
    """

    state: Terms
    peak: Terms


def planned_memory(run: Run, recipe: Recipe) -> PlannedMemory:
    """The plan for a run of ``narrowgauge train`` in its ``recipe``, from its settings and its number of ranks alone.

    Layers are Hugging Face's modules, or where the run compiled them, fused kernels, which keep about as much.

    Raises:
        NarrowgaugeError: the settings are not those of such a run, or the planner does not know its model or update rule.

    Example:
        >>> from pathlib import Path
        >>> from narrowgauge.spec.notation import parse
        >>> config = {"model": "llama-1m", "batch_size": 4, "sequence_length": 64}
        >>> found = planned_memory(Run(Path("runs/first"), {"config": config}), parse("bfloat16/word"))
        >>> found.state.total, found.peak.total
        (8144896.0, 18456320.0)
    """
    config, where = run.config, str(run.path)
    missing = [name for name in ("model", "batch_size", "sequence_length") if config.get(name) is None]
    if missing:
        raise DataError(f"its settings do not say {missing[0]}.", "Those of narrowgauge train do.")
    if config.get("offload"):
        raise DataError("with --offload its state moves between the host and the device.", "Nothing is counted there.")
    length, rule = config["sequence_length"], str(config.get("rule") or "adamw")
    if type(length) is not int or length < 1:
        raise DataError(f"its sequences are of {length!r} tokens.", "A plan needs a whole number above zero.")
    if rule not in OPTIMIZER_STATES:
        raise DataError(
            f"the states of the update rule {rule} are not planned.", f"Planned: {', '.join(OPTIMIZER_STATES)}."
        )
    architecture = read_architecture(str(config["model"]))
    recipe = with_optimizer(recipe, rule)
    layout = layout_of(config, int(run.run.get("machine", {}).get("ranks", 1)), where)
    peak = memory_terms(
        architecture,
        recipe,
        layout,
        length,
        is_loss_chunked=architecture.vocab_size >= LARGE_VOCABULARY and not recipe.keep,
        kernels="fused" if config.get("compile") else None,
        fixed=dict.fromkeys(FIXED, 0.0),
    )
    return PlannedMemory(state_terms(architecture, recipe, layout), peak)
