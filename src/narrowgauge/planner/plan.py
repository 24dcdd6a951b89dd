"""Plans: try recipes on clusters, each in its best layout, and sort them."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError, suggestion
from narrowgauge.planner.clusters import Cluster, cluster_of, read_cluster
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.model import Architecture, read_model
from narrowgauge.planner.model_state import OPTIMIZER_STATES
from narrowgauge.planner.plan_tables import Plan
from narrowgauge.planner.program import Program, program_of, read_program
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.search import LEAST_TOKENS_PER_STEP, search, usual_tokens_per_step
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_pair

USUAL_RECIPES = ("bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8", "float8-row/word",
                 "bfloat16/word/reproducible")  # fmt: skip
"""Recipes of the README, which are the default comparison."""
XLA_RECIPES = ("bfloat16/float32", "bfloat16/master")
"""The default comparison on TPUs, which this project's optimizers do not run on."""
# Equal in one configuration for several clusters. Replicas and micro-batches follow from the number of chips.
_PINNED = (
    "shard",
    "zero",
    "tensor",
    "pipeline",
    "context",
    "expert",
    "micro_batch",
    "recompute",
    "accumulation_dtype",
)
_TUNING = ("int8-outlier", "int8-outlier-codes")
STORAGE_RECIPES = [
    f"bfloat16/{row.name}"
    for row in sorted(STORAGES.values(), key=lambda row: -row.bytes_per_param)
    if not row.owner
]
"""A recipe for each storage of bfloat16 weights."""
_SEQUENCE_LENGTH = 4096
_DOUBLED = [1 << power for power in range(18)]
EQUAL_RATES = 0.02
"""Rates of rows within this fraction count as equal. The order then follows the risk of the storages."""
FINE_MOMENT = 5
"""Mantissa bits of a second moment from which rows of equal speed are ordered by speed alone: those of ``word``."""


def plan(
    model: Any,
    *,
    batch: Any = None,
    loss: Any = None,
    recipes: str | Recipe | Sequence[str | Recipe] = (),
    chip: str | Chip | Sequence[str | Chip] = (),
    chips: int | Sequence[int] = (),
    cluster: Cluster | str | Path | Sequence[Cluster | str | Path] = (),
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    tokens: float | None = None,
    optimizer: Any = "adamw",
    layout: str | Mapping[str, Any] = "",
    program: str | Program = "",
    lora: int = 0,
    base: str = "bfloat16",
    **rates: Any,
) -> Plan:
    """Plan what fits, how fast, in which layout, and why. Nothing is trained, and only a ``config.json`` needs transformers.

    Args:
        model: a preset's name, a Hugging Face ``config.json`` or its folder, an architecture, or a module. A step of a
            module is counted on fake tensors, and planned over data and shard ranks.
        batch, loss: of a module's step: arguments, and ``loss(model, batch)``; None for the output's ``loss`` or its sum.
        recipes: names, files or recipes. By default the recipes of :data:`USUAL_RECIPES` that the chips multiply natively;
            ``"all"`` for every recipe that they multiply natively.
        chip, chips: names (``narrowgauge show chips``) and numbers, 1 by default. Several are compared.
        cluster: files or values, instead of ``chip`` and ``chips``.
        sequence_length: in tokens; None for 4096, or for the positions of a preset or of learned positions if they are fewer.
        tokens_per_step: tokens of an optimizer step; chosen if None.
        tokens: of the whole run, for its days.
        optimizer: a rule of ``narrowgauge show rules`` but ``"sgd"``, for its states; or an optimizer, for its rule and storage.
        layout: fields of the layout with fixed values: ``{"tensor": 2}``, ``"fsdp2,recompute=none"``.
        program: the training loop: a name, fields with values, or both, as ``"hf-trainer,loss=chunked"``. See
            :class:`~narrowgauge.planner.program.Program`. By default that of ``software``, or a loop of compiled layers that any
            program may run.
        lora, base: rank of adapters, and the format of the frozen weights: ``bfloat16``, ``int8``, ``nf4``, ``nvfp4``.
        rates: further fields of :class:`~narrowgauge.planner.clusters.Cluster` for ``chip``:
            ``interconnect_gbit_per_second``, ``software``.
    Returns:
        The jobs, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is unknown.

    Example:
        >>> best = plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8).best
        >>> best.fits, best.layout.shard
        (True, 8)
    """
    numbers = {
        "sequence_length": sequence_length,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
    }
    for name, value in numbers.items():
        if value is not None and not 1 <= value < math.inf:
            raise NarrowgaugeError(f"Cannot plan with {name} = {value}.", "Use 1 or more.")
    fixed = read_layout(layout)
    if batch is not None:
        from narrowgauge.planner.own_module import of_module, question_of

        model, length = of_module(model, batch, loss)
        sequence_length = sequence_length or length
        fixed.setdefault("recompute", "none")
        if not isinstance(optimizer, str):
            optimizer, storage = question_of(optimizer)
            recipes = recipes or f"bfloat16/{storage}"
    architecture = model if isinstance(model, Architecture) else read_model(str(model))
    length = _sequence_length(architecture, sequence_length)
    if tokens_per_step is not None and tokens_per_step < length:
        raise NarrowgaugeError(
            f"Cannot plan a step of {tokens_per_step:,.0f} tokens because a sequence has {length:,}.",
            "Use shorter sequences, or more tokens.",
        )
    clusters = [cluster] if isinstance(cluster, Cluster | str | Path) else list(cluster)
    kinds = [chip] if isinstance(chip, str | Chip) else list(chip)
    counts = [chips] if isinstance(chips, int) else list(chips)
    if bool(clusters) == bool(kinds) or (clusters and (counts or rates)):
        both = f"a cluster has its own {next(iter(rates), 'chips')}"
        advice = "Name chips (--chip H100-SXM --chips 8), or clusters, which have their chips and rates (--cluster FILE)."
        raise ChipError(
            f"Cannot plan because {both if clusters else 'no machine was named'}.", advice
        )
    machines = [where if isinstance(where, Cluster) else read_cluster(where) for where in clusters]
    machines += [cluster_of(kind, count, **rates) for kind in kinds for count in counts or [1]]
    asked, software = read_recipes(recipes, optimizer), {where.software for where in machines}
    loop = read_program(program or "hf-trainer") if program or lora else program_of(software)
    if (
        program
        and (named := rates.get("software"))
        and loop.softwares
        and not named.startswith(tuple(loop.softwares))
    ):
        raise NarrowgaugeError(
            f"Cannot plan {loop.text} at the speed of {named}, which is another program's.",
            "Name the program or the software.",
        )
    if lora:
        loop = replace(loop, lora=lora, base=base)
        asked = asked or [parse("bfloat16/master"), parse("bfloat16/word")]
    usual_tokens = _shared_tokens(
        max(usual_tokens_per_step(where.chips, loop) for where in machines), length, machines
    )

    def searched(
        where: Cluster,
        recipe: Recipe,
        fixed: Mapping[str, Any] = fixed,
        tokens: float | None = tokens_per_step,
    ) -> Job:
        arguments = architecture, recipe, where, length, tokens
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "fixed": fixed,
            "usual_tokens": usual_tokens,
        }
        try:
            return search(*arguments, program=loop, **options)
        except RecipeError:
            if program or not loop.limits:
                raise
            # The software names a program that does not run this job: another loop may be as fast.
            like = replace(loop, limits={}, text=f"a loop like {loop.text}")
            return search(*arguments, program=like, **options)

    jobs: list[Job] = []
    left_out: dict[str, NarrowgaugeError] = {}
    for where in machines:
        names = XLA_RECIPES if where.chip.vendor == "Google" else USUAL_RECIPES
        suited = [] if recipes == "all" else suited_recipes(names, where.chip, optimizer)
        for recipe in asked or suited or _native_recipes(where.chip, optimizer):
            try:
                jobs.append(searched(where, recipe))
            except (ChipError, RecipeError) as error:
                if asked and len(machines) == 1:
                    raise
                left_out[f"{recipe.title} on {where.chip.name}"] = error
    if not jobs:
        raise next(iter(left_out.values()))
    # Rows of one table have one number of tokens per step, if it is a usual one.
    is_free = tokens_per_step is None and "micro_batches" not in fixed
    steps = sorted(job.tokens_per_step for job in jobs if job.fits)
    usual = [tokens for tokens in steps if tokens >= LEAST_TOKENS_PER_STEP]
    least = (usual or steps)[0] if is_free and steps else math.inf
    for place, job in enumerate(jobs):
        if job.fits and job.tokens_per_step > least:
            with contextlib.suppress(RecipeError):  # its ranks compute more at once
                jobs[place] = searched(job.cluster, job.recipe, tokens=least)
    jobs = _ranked(jobs)
    # The first configuration that fits on every cluster: same recipe, model sharding and micro-batch.
    shared: list[Job] = []
    has_kinds = len({where.chip.name for where in machines}) > 1
    for job in (job for job in jobs if has_kinds and job.fits):
        pinned = {name: getattr(job.layout, name) for name in _PINNED}
        with contextlib.suppress(
            RecipeError, ChipError
        ):  # the chips do not divide like that, or lack a format
            tokens_of_all = job.tokens_per_step if is_free else tokens_per_step
            on_each = [searched(where, job.recipe, pinned, tokens_of_all) for where in machines]
            if all(job.fits for job in on_each):
                shared = on_each
                break
    name = architecture.name if isinstance(model, Architecture) else str(model)
    reasons = {row: error.message for row, error in left_out.items()}
    return Plan(tuple(jobs), name, tokens, shared=tuple(shared), left_out=reasons)


def plan_within(
    days: float, *, tokens: float | None = None, chip: Any = (), chips: Any = (), **question: Any
) -> Plan:
    """Plan the fewest chips that train within ``days``, also at the slow end of the interval.

    Args:
        days: of the whole run, of ``tokens`` tokens.
        chip, question: one kind of chip, and further arguments of :func:`plan`. Numbers are 1, 2, 4 or multiples of 8.
    Raises:
        ChipError: 131,072 chips are too few.

    Example:
        >>> plan_within(9, model="llama-1b", tokens=1e9, chip="RTX-4090", recipes="bfloat16/word").best.num_chips
        1
    """
    kinds = [chip] if isinstance(chip, str | Chip) else list(chip)
    if tokens is None or len(kinds) != 1 or chips or not days > 0:
        raise ChipError(
            "Cannot plan for days without tokens, days above 0 and one kind of chip, or with a number of chips.",
            "Name days above 0, tokens and one kind of chip; the number of chips is the answer.",
        )
    asked = question.get("tokens_per_step")
    refused: list[RecipeError] = []

    @cache
    def answer(number: int) -> Plan:
        return replace(plan(**question, tokens=tokens, chip=kinds, chips=number), days=days)

    def is_enough(number: int) -> bool:
        try:
            best = answer(number).best
        except RecipeError as error:  # a fixed layout needs more chips
            refused.append(error)
            return False
        is_asked = (
            asked is None or abs(best.tokens_per_step / asked - 1) < 0.02
        )  # ranks may not divide it
        return is_asked and best.fits and best.days_interval(tokens)[1] <= days

    number = next((number for number in _DOUBLED if is_enough(number)), None)
    if number is None and len(refused) == len(_DOUBLED):
        raise refused[-1]
    if number is None:
        raise ChipError(
            f"Cannot train within {duration_text(86400 * days)} on {_DOUBLED[-1]:,} chips or fewer.",
            "Allow more days, more tokens a step, or faster chips.",
        )
    sizes = range(number // 2, number + 1, 8) if number > 8 else [number]
    return answer(sizes[bisect_left(sizes, True, key=is_enough)])


def _shared_tokens(tokens: int, length: int, machines: Sequence[Cluster]) -> int:
    """Return the tokens near ``tokens`` that replicas of every cluster share evenly, in micro-batches of several sequences."""
    unit, sequences = math.lcm(*(where.chips for where in machines)), max(1, round(tokens / length))
    for micro_batch in (8, 4, 2, 1):
        if sequences >= 2 * unit * micro_batch:
            return length * unit * micro_batch * round(sequences / unit / micro_batch)
    return length * sequences


def _sequence_length(architecture: Architecture, length: int | None) -> int:
    preset = MODELS.get(architecture.name)
    longest = architecture.positions or (preset.max_positions if preset is not None else None)
    if length is None:
        return min(longest or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if architecture.positions and length > architecture.positions:
        raise NarrowgaugeError(
            f"Cannot plan sequences of {length:,} tokens because {architecture.name} has {architecture.positions:,} positions.",
            "Use shorter sequences.",
        )
    return length


def _ranked(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs by safety, then speed. Jobs that do not fit come last, the closest first."""

    def safety(job: Job) -> tuple[bool, ...]:
        # Recipes that lose updates come last, however fast. Jobs that may run out of memory come after certain ones.
        return (
            not job.fits,
            job.fits and not job.recipe.storage.keeps_updates,
            job.fits and not job.is_certain,
        )

    rest = sorted(
        jobs,
        key=lambda job: (*safety(job), -job.tokens_per_second if job.fits else -job.headroom_bytes),
    )
    ranked: list[Job] = []
    while rest:
        first = rest[0]
        slowest = first.tokens_per_second * (1 - EQUAL_RATES)
        equal = [
            j
            for j in rest
            if safety(j) == safety(first) and j.fits and j.tokens_per_second >= slowest
        ] or [first]
        # Among rows of equal speed, moments of few bits are the larger risk.
        ranked += sorted(
            equal, key=lambda job: job.recipe.storage.exp_avg_sq.mantissa_bits < FINE_MOMENT
        )
        rest = [job for job in rest if job not in equal]
    return ranked


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_recipes(recipes: str | Recipe | Sequence[str | Recipe], optimizer: str) -> list[Recipe]:
    """Return the recipes of a question. A text is one recipe, ``"all"`` is none.

    Raises:
        RecipeError: the optimizer cannot be planned, or does not support a storage; or layers of a recipe differ.
    """
    if optimizer not in OPTIMIZER_STATES:
        raise RecipeError(
            f"Cannot plan optimizer {optimizer!r} because its states are unknown.",
            suggestion(optimizer, OPTIMIZER_STATES) or f"Known: {', '.join(OPTIMIZER_STATES)}.",
        )
    names = [recipes] if isinstance(recipes, str | Recipe) else recipes
    parsed = [] if recipes == "all" else list(map(parse, names))
    for recipe in parsed:
        if recipe.overrides:
            name = replace(recipe, overrides=()).name
            raise RecipeError(
                f"Cannot plan {recipe.title} because its layers differ.",
                f"Plan {name}, and add the rest.",
            )
        _refuse_storage(recipe.storage, optimizer)
    return parsed


def _refuse_storage(storage: Storage, optimizer: str) -> None:
    rule = UPDATE_RULES[optimizer]
    kept = storage.keeping(rule.moments or ())
    refuse_pair(optimizer, kept, is_matrix=rule.is_matrix, is_adamw=optimizer == "adamw")


def _native_recipes(chip: Chip, optimizer: str) -> list[Recipe]:
    """Return every storage of 16-bit weights, and every other compute with its storage, that a chip multiplies natively."""
    is_wide = "bfloat16" in chip.peak_tflops
    names = (
        STORAGE_RECIPES if is_wide else [name for name in STORAGES if name.startswith("float16/")]
    )
    # Users must request computes that change the whole model or are for fine-tuning.
    computes = [
        f"{compute.name}/{compute.default_storage}"
        for compute in COMPUTES.values()
        if not compute.transform and compute.name not in _TUNING
    ]
    return suited_recipes(dict.fromkeys([*names, *computes]), chip, optimizer)


def suited_recipes(names: Iterable[str], chip: Chip | None, optimizer: str) -> list[Recipe]:
    """Return the recipes that a chip (None for any) multiplies natively and that an optimizer steps."""
    suited = []
    for recipe in map(parse, names):
        if chip is None or multiplies(recipe.compute, chip):
            with contextlib.suppress(RecipeError):
                _refuse_storage(recipe.storage, optimizer)
                suited.append(recipe)
    return suited
