"""The best option of a plan as a settings file for ``narrowgauge train --config``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.options import OURS, Option
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.words import axes_text
from narrowgauge.spec.models import MODELS


def train_settings(plan: Plan) -> str:
    """A TOML file of the best option.

    Args:
        plan: with an option that fits and that the trainer runs.
    Returns:
        The file; comments say what it is for and how many ranks to start.
    Raises:
        NarrowgaugeError: no option fits, or the trainer cannot run it.
    """
    import tomli_w

    best = plan.best
    _require_trainable(plan, best)
    layout = best.layout
    start = "narrowgauge train --config FILE"
    if best.num_chips > 1:
        start = f"torchrun --nproc-per-node N --nnodes M -m {start}, with N × M = {best.num_chips}"
    lines = [f"# {plan.title}", f"# {axes_text(layout)}: {start}"]
    recipe = best.recipe.to_value()
    settings: dict[str, Any] = {
        "model": _trainable_model(plan),
        "batch_size": layout.num_sequences,
        "sequence_length": best.sequence_length,
        "gradient_accumulation_steps": layout.num_sequences // layout.micro_batch,
        "activation_checkpointing": layout.recompute == "full",
        "shard": "full" if layout.shard > 1 else "none",
    }
    if plan.question.num_tokens is not None:
        settings["steps"] = max(1, round(plan.question.num_tokens / best.tokens_per_step))
    if layout.accumulation_dtype != "float32":
        settings["accumulation_dtype"] = layout.accumulation_dtype
    if layout.shard > 1:
        settings |= {"replicas": layout.data, "offload": layout.offload == "all"}
    # A table must come last: keys after it would be its own.
    settings["recipe"] = recipe
    return "\n".join(lines) + "\n" + tomli_w.dumps(settings)


def _require_trainable(plan: Plan, best: Option) -> None:
    if not best.fits:
        raise NarrowgaugeError(f"settings were requested, and nothing fits: {best.reason}.", best.advice)
    if plan.question.optimizer != "adamw":
        raise NarrowgaugeError(
            f"settings were requested for states of {plan.question.optimizer}, and narrowgauge train steps with AdamW.",
            "Leave --optimizer out.",
        )
    if best.runs_with != OURS:
        raise NarrowgaugeError(
            f"settings were requested for a layout that narrowgauge train does not run ({axes_text(best.layout)}).",
            "Use --layout fsdp2,offload=none or fsdp2,offload=all.",
        )


def _trainable_model(plan: Plan) -> str:
    """The model as the trainer names it."""
    name = plan.question.model
    path = Path(name).expanduser()
    row = MODELS.get(name.strip().lower())
    if row is not None and plan.best.sequence_length > row.max_positions:
        raise NarrowgaugeError(
            f"settings were requested for sequences of {plan.best.sequence_length:,} tokens of {row.name}, which has "
            f"{row.max_positions:,} positions.",
            "Name a folder with a config.json whose max_position_embeddings says so.",
        )
    if row is not None:
        return row.name
    if path.exists():
        return str(path.resolve())
    raise NarrowgaugeError(
        f"settings were requested for {name!r}, of which only the shape is known here.",
        "Name a folder with its Hugging Face config.json.",
    )
