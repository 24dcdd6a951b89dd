"""Plans: turn a question into jobs, the best first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError
from narrowgauge.planner.clusters import Cluster, clusters_asked_for
from narrowgauge.planner.jobs import OURS, Job
from narrowgauge.planner.layouts import NAMED_LAYOUTS, Layout, read_layout
from narrowgauge.planner.model import Architecture, of_size, read_model
from narrowgauge.planner.model_state import is_stepped, with_optimizer
from narrowgauge.planner.plan_tables import Plan
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.search import MOST_OPTIONS, search
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

USUAL_RECIPES = ("bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8", "float8-row/word",
                 "bfloat16/word/reproducible")  # fmt: skip
"""Recipes of the README, which are the default comparison."""
MOST_CHIPS = 1 << 14
"""Maximum number of chips that a deadline tries, as for Llama 3 405B (arXiv 2407.21783)."""
# Equal in one configuration for several clusters. Replicas and micro-batches follow from the number of chips.
_PINNED = ("shard", "zero", "tensor", "pipeline", "context", "expert", "micro_batch", "recompute", "accumulation_dtype")
_TUNING = ("int8-outlier", "int8-outlier-codes")
_SEQUENCE_LENGTH = 4096


def plan(
    model: str | Path | Architecture | None = None,
    *,
    params: float | None = None,
    recipes: Sequence[str | Recipe] | Literal["all"] = (),
    chip: str | Chip | Sequence[str | Chip] = (),
    chips: int | Sequence[int] = (),
    cluster: Cluster | str | Path | Sequence[Cluster | str | Path] = (),
    chips_per_node: int | None = None,
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    tokens: float | None = None,
    days: float | None = None,
    optimizer: str = "adamw",
    layout: str | Mapping[str, Any] | None = None,
    **rates: Any,
) -> Plan:
    """Plan what fits, how fast, in which layout, and why. Nothing is trained and nothing needs PyTorch.

    Without ``model`` or machines, plan only the state: weights, gradients and optimizer states.

    Args:
        model: a preset's name, a Hugging Face ``config.json`` or its folder, or an architecture.
        params: number of parameters, instead of a model.
        recipes: names, files or recipes. By default the recipes of :data:`USUAL_RECIPES` that the chips multiply natively;
            ``"all"`` for every recipe that they multiply natively.
        chip, chips: names (``narrowgauge show chips``) and numbers. Several are compared.
        cluster: files or values, instead of ``chip`` and ``chips``.
        chips_per_node: of ``chip``; None for its usual node.
        sequence_length: in tokens; None for the model's longest, at most 4096.
        tokens_per_step: tokens of an optimizer step; chosen if None.
        tokens: of the whole run, for days and cost.
        days: a deadline in days for ``tokens``. The best job has the fewest chips that meet it. Without ``chips`` or
            ``cluster``, numbers of chips are tried.
        optimizer: ``"adamw"``, ``"adam"``, ``"lion"``, ``"muon"`` or ``"adafactor"``, for its states.
        layout: fields of the layout with fixed values: ``{"tensor": 2}``, ``"fsdp2,recompute=none"``.
        rates: further fields of :class:`~narrowgauge.planner.clusters.Cluster` for ``chip``:
            ``interconnect_gbit_per_second``, ``dollars_per_hour``, ``software``.
    Returns:
        The jobs, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is unknown.

    Example:
        >>> answer = plan(params=10e9, recipes=["bfloat16/master", "bfloat16/word", "bfloat16/states8"])
        >>> [option.memory.total / 1e9 for option in answer.options]
        [60.0, 80.0, 160.0]
    """
    architecture, fixed = _architecture(model, params), read_layout(layout or {})
    counts = [chips] if isinstance(chips, int) else list(chips)
    if any(count < 1 for count in counts):
        raise ChipError(f"{min(counts)} chips were requested.", "Use 1 or more.")
    clusters = clusters_asked_for(cluster, chip, counts, chips_per_node, **rates)
    asked = () if recipes == "all" else [with_optimizer(parse(recipe), optimizer) for recipe in recipes]
    name = str(model) if isinstance(model, str | Path) else architecture.name if model is not None else ""
    answer = Plan((), name, tokens, days, optimizer)
    if days is not None and not 0 < days < math.inf:
        raise NarrowgaugeError(f"days = {days:g} was requested.", "Use a number above 0.")
    if days is not None and tokens is None:
        raise NarrowgaugeError(
            f"days = {days:g} was requested for a run whose tokens are not known.", "Give tokens (--tokens 300e9)."
        )
    if params is not None or not clusters:
        if days is not None:
            raise NarrowgaugeError(
                f"days = {days:g} was requested without machines, where the state of a whole model alone is counted.",
                "Name the model and its chips (--model llama-8b --chip H100-SXM).",
            )
        compared = asked or _suited(_of_storages(), [], optimizer)
        places: Sequence[Cluster | int | None] = clusters or counts or [None]
        # A state has no shape: with one, the worst moment of a step would lack some gradients.
        whole = of_size(architecture.num_parameters)
        jobs = [_state_job(whole, recipe, fixed, place) for place in places for recipe in compared]
        return replace(answer, options=tuple(sorted(jobs, key=lambda job: (job.num_chips, job.memory.total))))

    length = _sequence_length(architecture, sequence_length)

    def searched(where: Cluster, recipe: Recipe, most: int, fixed: Mapping[str, Any] = fixed) -> list[Job]:
        return search(architecture, recipe, where, length, tokens_per_step, fixed=fixed, most=most)

    def tried(where: Cluster) -> list[Job]:
        compared = asked or _default_recipes(recipes, where.chip, optimizer)
        # Show several layouts of a single recipe, and one job for each size that is tried for a deadline.
        most = MOST_OPTIONS if len(compared) == len(clusters) == 1 and days is None else 1
        jobs = [job for recipe in compared for job in searched(where, recipe, most)]
        return jobs if days is None else [min(jobs, key=lambda job: _rank(answer, job))]

    jobs = []
    if days is None or counts or cluster:
        jobs = [job for where in clusters for job in tried(where)]
    else:
        flops_per_day = (tokens or 0.0) * architecture.flops_per_token(length) / days
        for where in clusters:
            for size in _sizes(where, chips_per_node or where.chip.chips_per_node, flops_per_day):
                jobs += tried(size)
                if jobs[-1].is_certain and jobs[-1].recipe.storage.keeps_updates and answer.is_met_by(jobs[-1]):
                    break
    jobs.sort(key=lambda job: _rank(answer, job))
    best, trainable = jobs[0], None
    if not fixed and days is None and best.fits and best.runs_with != OURS:
        with contextlib.suppress(RecipeError):  # the trainer's replicas are more than the sequences of a step
            [trainable] = searched(best.hardware, best.recipe, 1, NAMED_LAYOUTS["fsdp2"])
    shared: tuple[Job, ...] = ()
    if len({where.chip.name for where in clusters}) > 1 and days is None:
        shared = _shared(jobs, clusters, lambda job, where, pinned: searched(where, job.recipe, 1, pinned)[0])
    return replace(answer, options=tuple(jobs), shared=shared, trainable=trainable)


def _architecture(model: str | Path | Architecture | None, params: float | None) -> Architecture:
    if (model is None) == (params is None):
        problem = (
            "no model was named." if model is None else "a model and a number of parameters were requested together."
        )
        raise NarrowgaugeError(problem, "Give a model, or a number of parameters for its state alone.")
    if params is None:
        return model if isinstance(model, Architecture) else read_model(str(model))
    if not 1 <= params < 1e18:
        raise NarrowgaugeError(f"{params:g} parameters were requested.", "Give a number above 1, such as 10e9.")
    return of_size(int(params))


def _sequence_length(architecture: Architecture, length: int | None) -> int:
    preset = MODELS.get(architecture.name)
    longest = architecture.positions or (preset.max_positions if preset is not None else None)
    if length is None:
        return min(longest or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if architecture.positions and length > architecture.positions:
        raise NarrowgaugeError(
            f"sequences of {length:,} tokens were requested for {architecture.name}, which has {architecture.positions:,} "
            "positions.",
            "Use shorter sequences.",
        )
    return length


def _state_job(size: Architecture, recipe: Recipe, fixed: Mapping[str, Any], place: Cluster | int | None) -> Job:
    """Return the state in the requested layout, on a cluster or a number of chips. The remaining chips shard it."""
    cluster, layout = place if isinstance(place, Cluster) else None, Layout(**fixed)
    number = place.chips if isinstance(place, Cluster) else place or layout.num_ranks
    shard, rest = divmod(number, layout.num_ranks)
    if rest or (shard > 1 and "shard" in fixed):
        raise NarrowgaugeError(
            f"a layout of {layout.num_ranks} chips was requested on {number}.", "Name all its axes, or none of them."
        )
    return Job(size, recipe, layout if shard == 1 else replace(layout, shard=shard), cluster)


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_storages() -> list[str]:
    """Name a recipe for each storage of bfloat16 weights, the largest first."""
    storages = (storage for storage in STORAGES.values() if not storage.owner)
    return [f"bfloat16/{row.name}" for row in sorted(storages, key=lambda row: -row.bytes_per_param)]


def _default_recipes(recipes: Sequence[Any] | str, chip: Chip, optimizer: str) -> list[Recipe]:
    """Return the usual recipes, or all, that a chip multiplies natively."""
    usual = [] if recipes == "all" else _suited(USUAL_RECIPES, [chip], optimizer)
    if usual:
        return usual
    # Every storage of 16-bit weights, and every other compute with its storage.
    is_wide = "bfloat16" in chip.peak_tflops
    names = _of_storages() if is_wide else [name for name in STORAGES if name.startswith("float16/")]
    # Users must request computes that change the whole model or are for fine-tuning.
    names += [
        f"{compute.name}/{compute.default_storage}"
        for compute in COMPUTES.values()
        if not compute.transform and compute.name not in _TUNING
    ]
    return _suited(dict.fromkeys(names), [chip], optimizer)


def _suited(names: Iterable[str], chips: Sequence[Chip], optimizer: str) -> list[Recipe]:
    return [
        with_optimizer(recipe, optimizer)
        for recipe in map(parse, names)
        if all(multiplies(recipe.compute, chip) for chip in chips) and is_stepped(recipe.storage, optimizer)
    ]


# ── several clusters ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _sizes(cluster: Cluster, node: int, flops_per_day: float) -> list[Cluster]:
    """Return a part of a node, then numbers of nodes a fifth or a quarter apart, up to ``MOST_CHIPS``.

    Leave out sizes that would be late if only matmuls in the fastest format took time.
    """
    parts = [1 << power for power in range((node - 1).bit_length())]
    nodes = dict.fromkeys((quarters << power) // 4 for power in range(20) for quarters in (4, 5, 6, 7))
    counts = [count for count in [*parts, *(number * node for number in nodes)] if count <= MOST_CHIPS]
    least = flops_per_day / 86_400 / (1e12 * max(cluster.chip.peak_tflops.values()))
    in_time = [count for count in counts if count >= least] or counts[-1:]
    return [
        replace(cluster, chips=count, chips_per_node=min(node, count), name=f"{count} × {cluster.chip.name}")
        for count in in_time
    ]


def _rank(answer: Plan, job: Job) -> tuple[float, ...]:
    """Return the sort key of jobs: safety, then the deadline with the fewest chips, then speed, then headroom."""
    # Recipes that lose updates come last, however fast. Jobs that may run out of memory come after certain ones.
    is_late = answer.days is not None and not answer.is_met_by(job)
    rank = not job.fits, not job.recipe.storage.keeps_updates, job.is_certain is False, is_late
    chips = job.num_chips if answer.days is not None and not is_late else 0
    return (*rank, chips, -job.tokens_per_second if job.fits else 0.0, -(job.headroom_bytes or 0.0))


def _shared(
    jobs: Iterable[Job], clusters: Sequence[Cluster], pinned_on: Callable[[Job, Cluster, Mapping[str, Any]], Job]
) -> tuple[Job, ...]:
    """Return the first configuration that fits on every cluster: same recipe, model sharding and micro-batch."""
    for job in (job for job in jobs if job.fits):
        pinned = {name: getattr(job.layout, name) for name in _PINNED}
        try:
            shared = [pinned_on(job, cluster, pinned) for cluster in clusters]
        except RecipeError:  # the chips do not divide like that
            continue
        if all(job.fits for job in shared):
            return tuple(shared)
    return ()
