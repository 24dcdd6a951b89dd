"""Which programs run a job, and why others do not."""

from __future__ import annotations

from collections.abc import Iterator

from narrowgauge.planner.job import Job
from narrowgauge.planner.layouts import AXES
from narrowgauge.planner.program import PROGRAMS, Program
from narrowgauge.spec.update_rules import UPDATE_RULES


def why_not(program: Program, job: Job) -> str:
    """Say why a program does not run a job; empty if it does."""
    return next(_reasons(program, job), "") if program.limits else ""


def _reasons(program: Program, job: Job) -> Iterator[str]:
    """Yield every reason, the one that no layout can change first."""
    limits = program.limits
    layout = job.layout
    recipe = job.recipe
    rule = UPDATE_RULES[job.optimizer].optimizer
    has_adapters = job.program.has_adapters
    axes = limits["axes"]
    used = [axis for axis in (*AXES, "expert") if getattr(layout, axis) > 1]
    # A recipe that the program has itself needs no optimizer and no layers of ours.
    is_own = recipe.storage.short_name in limits.get("storages", ())
    is_own &= recipe.compute.is_wide or recipe.compute.name in limits.get("computes", ())
    is_own &= not recipe.reduction.order_invariant
    own_rules = limits.get("own_rules", ("AdamW", "Adam"))
    if job.chip.vendor not in limits.get("vendors", ("NVIDIA", "AMD")):
        yield f"it does not run on {job.chip.vendor}'s chips"
    if has_adapters and not limits.get("has_adapters"):
        yield "it has no adapters"
    if job.program.offload and not limits.get("has_offload"):
        yield "it does not offload states"
    if not (has_adapters or limits.get("ours", True)):
        if not is_own:
            yield f"it does not run {recipe.name}"
        elif rule not in own_rules:
            yield f"it does not run {job.optimizer}"
    if rule not in limits.get("rules", (rule,)):
        yield f"it does not run {job.optimizer}"
    if not {*used} <= {*axes}:
        yield f"it has no {', '.join(sorted({*used} - {*axes}))} ranks"
    if layout.zero not in limits["zeros"] and layout.num_sharing > 1:
        yield f"it has no ZeRO-{layout.zero}"
    is_wide = recipe.compute.is_wide or (is_own and rule in own_rules)
    narrow_axes = axes if is_wide else limits.get("narrow_axes", axes)
    if not {*used} <= {*narrow_axes}:
        yield f"it has no {', '.join(sorted({*used} - {*narrow_axes}))} ranks under narrow layers"
    heads = job.architecture.num_kv_heads
    if limits.get("divides_kv_heads") and heads % layout.tensor:
        yield f"{layout.tensor} tensor ranks do not divide {heads} key and value heads"
    groups = layout.pipeline * layout.interleave
    layers = job.architecture.num_layers
    if limits.get("has_even_stages") and all((layers + extra) % groups for extra in range(4)):
        yield f"{groups} groups of layers do not divide {layers} layers"


def programs_of(job: Job) -> list[Program]:
    """Return the programs that run a job: its own, or all named ones if its own has no limits."""
    programs = [row for row in PROGRAMS.values() if row.limits]
    if job.program.limits:
        programs = [job.program]
    return [program for program in programs if not why_not(program, job)]
