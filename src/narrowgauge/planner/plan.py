"""Plans: try recipes on clusters, each in its best layout, and sort them."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, NarrowgaugeError, RecipeError, suggestion
from narrowgauge.planner.advice import alternatives, measured_correction
from narrowgauge.planner.architecture import Architecture
from narrowgauge.planner.candidates import compared_recipes, keeps_rate, read_recipes
from narrowgauge.planner.clusters import Cluster, cluster_of, read_cluster
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan_tables import Plan
from narrowgauge.planner.program import (
    BASES,
    Program,
    adapters,
    program_of,
    read_program,
    with_parts,
)
from narrowgauge.planner.search import (
    LEAST_TOKENS_PER_STEP,
    MOST_CONTEXT,
    search,
    usual_tokens_per_step,
)
from narrowgauge.planner.units import duration_text
from narrowgauge.spec.chips import Chip, read_chip
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.recipes import Recipe

# Equal in one configuration for several clusters. Replicas and micro-batches follow from the number
# of chips.
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
_SEQUENCE_LENGTH = 4096
_DOUBLED = [1 << power for power in range(18)]
_LONGEST = 1 << 24
_STEP_OF_LENGTH = 128
_RATES = ("interconnect_gbit_per_second", "software", "host_memory_gb", "chips_per_node")
EQUAL_RATES = 0.02
"""Rates of rows within this fraction count as equal.

The order then follows the risk of the storages.
"""
FINE_MOMENT = 5
"""Mantissa bits of a second moment from which rows of equal speed are ordered by speed alone: those
of ``word``.
"""


def plan(
    model: Any,
    *,
    batch: Any = None,
    loss: Any = None,
    recipes: str | Recipe | Sequence[str | Recipe] = (),
    chip: str | Path | Chip | Sequence[str | Path | Chip] = (),
    chips: int | Sequence[int] = (),
    cluster: Cluster | str | Path | Sequence[Cluster | str | Path] = (),
    sequence_length: int | None = None,
    tokens_per_step: float | None = None,
    tokens: float | None = None,
    optimizer: Any = "adamw",
    layout: str | Mapping[str, Any] = "",
    program: str | Program = "",
    lora: int = 0,
    base: str = "",
    parts: Mapping[str, str] | None = None,
    like: Any = None,
    price: float | None = None,
    advise: bool = True,
    **rates: Any,
) -> Plan:
    """Plan what fits, how fast, in which layout, and why.

    Nothing is trained, and only a ``config.json`` needs transformers.

    Args:
        model: a preset's name, a Hugging Face ``config.json``, its folder or a cached ``org/name``,
            an architecture, or a module. A step of a module is counted on fake tensors, and planned
            over data and shard ranks.
        batch, loss: of a module's step on each chip: arguments, and ``loss(model, batch)``; None
            for the output's ``loss`` or its sum. The batch is the step, unless the layout fixes
            ``micro_batch`` or ``micro_batches``.
        recipes: names, files or recipes. By default the usual ones that the chips multiply
            natively; ``"all"`` for every recipe that they multiply natively.
        chip, chips: names (``narrowgauge show chips``) or files, and numbers, 1 by default. Several
            are compared.
        cluster: files or values, instead of ``chip`` and ``chips``.
        sequence_length: in tokens; None for 4096, or for the positions of a preset or of learned
            positions if they are fewer.
        tokens_per_step: tokens of an optimizer step; chosen if None.
        tokens: of the whole run, for its days.
        optimizer: a rule of ``narrowgauge show rules`` but ``"sgd"``, for its states; or an
            optimizer, for its rule and storage.
        layout: fields of the layout with fixed values: ``{"tensor": 2}``,
            ``"fsdp2,recompute=none"``.
        program: the training loop: a name, fields with values, or both, as
            ``"hf-trainer,loss=chunked"``. See :class:`~narrowgauge.planner.program.Program`. By
            default that of ``software``, or a loop of compiled layers that any program may run.
        lora, base: rank of adapters, and the format of the frozen weights of layers: ``bfloat16``,
            ``int8``, ``nf4``, ``nvfp4``.
        parts: rows of the table of parts (:data:`~narrowgauge.planner.program.PARTS`), as
            ``{"head": "trained"}``.
        like: a measured run of the answer's first row: a run folder, a log, or its tokens per
            second of all chips.
        price: of a chip-hour, for the price of the run.
        advise: whether to look for what would fit, and for what a program's limits removed.
        rates: further fields of :class:`~narrowgauge.planner.clusters.Cluster` for ``chip``:
            ``interconnect_gbit_per_second``, ``software``.
    Returns:
        The jobs, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is
            unknown.

    Example:
        >>> best = plan("llama-8b", recipes="bfloat16/word", chip="H100-SXM", chips=8).best
        >>> best.fits, best.layout.shard
        (True, 8)
    """
    _refuse_number("sequence_length", sequence_length, 1, is_whole=True)
    _refuse_number("tokens_per_step", tokens_per_step, 1)
    _refuse_number("tokens", tokens, 1)
    _refuse_number("price", price, 1e-6)
    _refuse_number("lora", lora, 0, is_whole=True)
    if price is not None and tokens is None:
        raise NarrowgaugeError("Cannot price a run without its tokens.", "Name tokens (--tokens).")
    fixed = read_layout(layout)
    is_named = isinstance(model, str | Path | Architecture)
    if is_named and batch is not None:
        raise DataError("Cannot plan a batch of a named model.", "Name sequence_length.")
    if not is_named and batch is None:
        raise DataError(
            f"Cannot plan {type(model).__name__} without a batch.",
            "Name batch: a step's arguments.",
        )
    if batch is not None:
        from narrowgauge.planner.own_module import of_module, question_of, refuse_options

        refuse_options(
            sequence_length=sequence_length,
            tokens_per_step=tokens_per_step,
            lora=lora,
            base=base,
            parts=parts or (isinstance(program, Program) and program.parts),
            recompute=fixed.setdefault("recompute", "none") != "none",
        )
        model, sequence_length, num_sequences = of_module(model, batch, loss)
        if "micro_batch" not in fixed and "micro_batches" not in fixed:
            fixed |= {"micro_batch": num_sequences, "micro_batches": 1}
        if not isinstance(optimizer, str):
            optimizer, storage = question_of(optimizer)
            recipes = recipes or f"bfloat16/{storage}"
    name = str(model)
    if isinstance(model, Architecture):
        architecture = model
        name = architecture.name
    else:
        architecture = read_model(name)
    length = _sequence_length(architecture, sequence_length)
    if tokens_per_step is not None and tokens_per_step < length:
        raise NarrowgaugeError(
            f"Cannot plan a step of {tokens_per_step:,.0f} tokens because a sequence has "
            f"{length:,}.",
            "Use shorter sequences, or more tokens.",
        )
    machines = _machines(cluster, chip, chips, rates)
    _refuse_absent(architecture, parts or {})
    loop = _program(program, lora, base, parts or {}, {where.software for where in machines})
    most = max([0, *(row.rank for _, row in loop.parts)])
    if most > architecture.hidden_size:
        raise RecipeError(
            f"Cannot plan adapters of rank {most:,} on matrices of {architecture.hidden_size:,} "
            "columns.",
            "Name a smaller rank (--lora 16).",
        )
    named = rates.get("software")
    if program and named and loop.softwares and not named.startswith(tuple(loop.softwares)):
        raise NarrowgaugeError(
            f"Cannot plan {loop.text} at the speed of {named}, which is another program's.",
            "Name the program or the software.",
        )
    asked = read_recipes(recipes, optimizer)
    most_chips = max(where.chips for where in machines)
    usual_tokens = _shared_tokens(usual_tokens_per_step(most_chips, loop), length, machines)
    correction = 1.0

    def searched(
        where: Cluster,
        recipe: Recipe,
        fixed: Mapping[str, Any] = fixed,
        tokens: float | None = tokens_per_step,
    ) -> Estimate:
        arguments = architecture, recipe, where, length, tokens
        options: dict[str, Any] = {
            "optimizer": optimizer,
            "fixed": fixed,
            "usual_tokens": usual_tokens,
            "correction": correction,
        }
        try:
            return search(*arguments, program=loop, **options)
        except RecipeError:
            if program or not loop.limits:
                raise
            # The software names a program that does not run this job: another loop may be as fast.
            like_it = replace(loop, limits={}, text=f"a loop like {loop.text}")
            return search(*arguments, program=like_it, **options)

    def compared(where: Cluster) -> list[Recipe]:
        has_adapters = loop.has_adapters
        return compared_recipes(asked, recipes, where.chip, optimizer, has_adapters=has_adapters)

    jobs: list[Estimate] = []
    left_out: dict[str, str] = {}
    refusal: NarrowgaugeError | None = None
    for where in machines:
        for recipe in compared(where):
            try:
                jobs.append(searched(where, recipe))
            except (ChipError, RecipeError) as error:
                if asked and len(machines) == 1:
                    raise
                left_out[f"{recipe.title} on {where.chip.name}"] = error.message
                refusal = refusal or error
    if refusal and not jobs:
        raise refusal
    # Rows of one table have one number of tokens per step, if it is a usual one.
    is_free = tokens_per_step is None and "micro_batches" not in fixed
    fitting = [job.tokens_per_step for job in jobs if job.fits]
    if is_free and fitting:
        usual = [tokens for tokens in fitting if tokens >= LEAST_TOKENS_PER_STEP]
        least = min(usual or fitting)
        for place, job in enumerate(jobs):
            if job.fits and job.tokens_per_step > least:
                with contextlib.suppress(RecipeError):  # its ranks compute more at once
                    jobs[place] = searched(job.cluster, job.recipe, tokens=least)
    jobs = _ranked(jobs)
    if like is not None:
        correction = measured_correction(jobs[0], like)
        jobs = [job.corrected(correction) for job in jobs]
    shared = _shared(jobs, machines, tokens_per_step, is_free, searched)
    answer = Plan(
        tuple(jobs), name, tokens, shared=shared, left_out=left_out, price=price, fixed=fixed
    )
    if not advise:
        return answer
    if answer.best.fits:
        return answer.with_removed()
    question = {
        "recipes": recipes,
        "sequence_length": length,
        "tokens_per_step": tokens_per_step,
        "optimizer": optimizer,
        "layout": fixed,
        "lora": lora,
        "base": base,
        "parts": parts,
    }
    changes = []
    for text, job in alternatives(plan, architecture, machines, loop, question):
        changes.append((text, job.corrected(correction)))
    return replace(answer, instead=tuple(changes))


def plan_within(
    days: float, *, tokens: float | None = None, chip: Any = (), chips: Any = (), **question: Any
) -> Plan:
    """Plan the fewest chips that train within ``days``, also at the slow end of the interval.

    Args:
        days: of the whole run, of ``tokens`` tokens.
        chip, question: one kind of chip, and further arguments of :func:`plan`. Numbers are 1, 2, 4
            or multiples of 8.
    Raises:
        ChipError: 131,072 chips are too few.

    Example:
        >>> plan_within(9, model="llama-1b", tokens=1e9, chip="RTX-4090", recipes="bfloat16/word").best.num_chips
        1
    """
    kinds = _listed(chip)
    if tokens is None or len(kinds) != 1 or chips or not days > 0:
        raise ChipError(
            "Cannot plan for days without tokens, days above 0 and one kind of chip, or with a "
            "number of chips.",
            "Name days above 0, tokens and one kind of chip; the number of chips is the answer.",
        )
    asked = question.get("tokens_per_step")
    refused: list[RecipeError] = []

    @cache
    def answer(number: int) -> Plan:
        planned = plan(**{**question, "advise": False}, tokens=tokens, chip=kinds, chips=number)
        return replace(planned, days=days)

    def is_enough(number: int) -> bool:
        try:
            best = answer(number).best
        except RecipeError as error:  # a fixed layout needs more chips
            refused.append(error)
            return False
        # Ranks may not divide the tokens of a step.
        is_asked = asked is None or abs(best.tokens_per_step / asked - 1) < 0.02
        ends = best.days_interval(tokens) or (0.0, best.days(tokens))
        return is_asked and best.fits and ends[1] <= days

    for number in _DOUBLED:
        if is_enough(number):
            sizes = range(number // 2, number + 1, 8) if number > 8 else [number]
            return answer(sizes[bisect_left(sizes, True, key=is_enough)])
    if len(refused) == len(_DOUBLED):
        raise refused[-1]
    raise ChipError(
        f"Cannot train within {duration_text(86400 * days)} on {_DOUBLED[-1]:,} chips or fewer.",
        "Allow more days, more tokens a step, or faster chips.",
    )


def plan_longest(**question: Any) -> Plan:
    """Plan the longest sequence that fits, to 128 tokens.

    Arguments are those of :func:`plan` but ``sequence_length``.

    Raises:
        NarrowgaugeError: no length fits, or the question is wrong at every length.

    Example:
        >>> plan_longest(model="llama-1b", chip="RTX-4090", recipes="bfloat16/word").best.sequence_length > 10_000
        True
    """

    @cache
    def answer(length: int) -> Plan:
        return plan(**question, advise=False, sequence_length=length)

    def is_too_long(length: int) -> bool:
        try:
            return not answer(length).best.fits
        except NarrowgaugeError:  # beyond learned positions, or no step of one sequence
            return True

    # A wrong question raises here.
    # Context ranks need a multiple of them, so lengths are doubled first.
    odd = [_odd_part(job.cluster.chips) for job in answer(_STEP_OF_LENGTH).options]
    unit = _STEP_OF_LENGTH * math.lcm(*(part for part in odd if part <= MOST_CONTEXT))
    if is_too_long(unit):
        unit = _STEP_OF_LENGTH
    low = unit
    while low < _LONGEST and not is_too_long(2 * low):
        low *= 2
    if is_too_long(low):
        raise NarrowgaugeError(
            f"No sequence fits, even of {low} tokens.", "Ask narrowgauge plan run what would fit."
        )
    sizes = range(low, 2 * low, unit)
    length = sizes[bisect_left(sizes, True, key=is_too_long) - 1]
    between = range(length + unit - _STEP_OF_LENGTH, length, -_STEP_OF_LENGTH)
    return answer(next((size for size in between if not is_too_long(size)), length))


def _odd_part(number: int) -> int:
    return number // (number & -number)


def _machines(cluster: Any, chip: Any, chips: Any, rates: Mapping[str, Any]) -> list[Cluster]:
    """Return the clusters of a question."""
    clusters = _listed(cluster)
    kinds = _listed(chip)
    counts = _listed(chips)
    if bool(clusters) == bool(kinds) or (clusters and (counts or rates)):
        why = "no machine was named"
        if clusters:
            why = f"a cluster has its own {next(iter(rates), 'chips')}"
        advice = "Name chips (--chip H100-SXM --chips 8), or clusters, which have their chips and rates (--cluster FILE)."
        raise ChipError(f"Cannot plan because {why}.", advice)
    for name in rates:
        if name not in _RATES:
            advice = suggestion(name, _RATES) or f"There are {', '.join(_RATES)}."
            raise NarrowgaugeError(f"Cannot plan with {name!r}, which is no argument.", advice)
    for count in counts:
        _refuse_number("chips", count, 1, is_whole=True)
    for name in ("interconnect_gbit_per_second", "host_memory_gb"):
        _refuse_number(name, rates.get(name), 1e-3)
    machines = []
    for where in clusters:
        machines.append(where if isinstance(where, Cluster) else read_cluster(where))
    for kind in kinds:
        chip_row = kind if isinstance(kind, Chip) else read_chip(kind)
        for count in counts or [1]:
            machines.append(cluster_of(chip_row, count, **rates))
    return machines


def _refuse_number(name: str, value: Any, least: float, *, is_whole: bool = False) -> None:
    """Raise for a number below ``least``, or for what is no number."""
    kinds = int if is_whole else int | float
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if value is None or (is_number and least <= value < math.inf):
        return
    kind = "a whole number" if is_whole else "a number"
    raise NarrowgaugeError(
        f"Cannot plan with {name} = {value!r}.", f"Use {kind} from {least:g} on."
    )


def _listed(value: Any) -> list[Any]:
    """Return one value, or several, as a list."""
    is_one = isinstance(value, str | float | int | Path | Chip | Cluster)
    return [value] if is_one else list(value)


def _program(
    program: str | Program, lora: int, base: str, parts: Mapping[str, str], software: set[str]
) -> Program:
    """Return the training loop of a question, with its table of parts."""
    if base and base not in BASES:
        raise RecipeError(
            f"Cannot store frozen weights in {base!r}.",
            suggestion(base, BASES) or f"There are {', '.join(BASES)}.",
        )
    if program or lora:
        loop = read_program(program or "hf-trainer")
    else:
        loop = program_of(software)
    if lora:
        loop = with_parts(loop, adapters(lora, base or "bfloat16"))
    elif base and not loop.has_adapters:
        raise RecipeError(
            f"Cannot store the weights in {base} because they train.",
            f"Train adapters over them (--lora 16 --base {base}).",
        )
    return with_parts(loop, parts)


def _refuse_absent(architecture: Architecture, parts: Mapping[str, str]) -> None:
    """Raise for a part that the model does not have."""
    absent = []
    if not architecture.expert_parameters:
        absent.append("experts")
    if not any(matmul.part == "mlp" for matmul in architecture.matmuls):
        absent.append("mlp")
    for name in absent:
        if name in parts:
            raise RecipeError(
                f"Cannot store the part {name!r} because {architecture.name} has none.",
                f"Leave {name} out.",
            )


def _shared(
    jobs: Sequence[Estimate],
    machines: Sequence[Cluster],
    tokens_per_step: float | None,
    is_free: bool,
    searched: Callable[..., Estimate],
) -> tuple[Estimate, ...]:
    """Return the first configuration that fits on every cluster: same recipe, model sharding and
    micro-batch.
    """
    if len({where.chip.name for where in machines}) == 1:
        return ()
    for job in jobs:
        if not job.fits:
            continue
        pinned = {name: getattr(job.layout, name) for name in _PINNED}
        # The chips may not divide like that, or lack a format.
        with contextlib.suppress(RecipeError, ChipError):
            tokens_of_all = job.tokens_per_step if is_free else tokens_per_step
            on_each = [searched(where, job.recipe, pinned, tokens_of_all) for where in machines]
            if all(job.fits for job in on_each):
                return tuple(on_each)
    return ()


def _shared_tokens(tokens: int, length: int, machines: Sequence[Cluster]) -> int:
    """Return the tokens near ``tokens`` that replicas of every cluster share evenly, in
    micro-batches of several sequences.
    """
    unit = math.lcm(*(where.chips for where in machines))
    sequences = max(1, round(tokens / length))
    for micro_batch in (8, 4, 2, 1):
        if sequences >= 2 * unit * micro_batch:
            return length * unit * micro_batch * round(sequences / unit / micro_batch)
    return length * sequences


def _sequence_length(architecture: Architecture, length: int | None) -> int:
    if length is None:
        longest = architecture.positions
        if architecture.name in MODELS and not longest:
            longest = MODELS[architecture.name].max_positions
        return min(longest or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    # Rotary positions extend beyond the trained positions, learned positions do not.
    if architecture.positions and length > architecture.positions:
        raise NarrowgaugeError(
            f"Cannot plan sequences of {length:,} tokens because {architecture.name} has "
            f"{architecture.positions:,} positions.",
            "Use shorter sequences.",
        )
    return length


def _ranked(jobs: Sequence[Estimate]) -> list[Estimate]:
    """Sort jobs by safety, then speed. Jobs that do not fit come last, the closest first."""

    def safety(job: Estimate) -> tuple[bool, ...]:
        # Recipes that do not train at the rate come last, however fast. Jobs that may run out of
        # memory come after roomy ones.
        if not job.fits:
            return (True,)
        return False, not keeps_rate(job.recipe.storage), not job.has_room

    def pace(job: Estimate) -> float:
        return -job.tokens_per_second if job.fits else -job.headroom_bytes

    def risk(job: Estimate) -> bool:
        # Among rows of equal speed, moments of few bits are the larger risk.
        return job.recipe.storage.exp_avg_sq.mantissa_bits < FINE_MOMENT

    def place(job: Estimate) -> tuple[bool | float, ...]:
        return *safety(job), pace(job)

    rest = sorted(jobs, key=place)
    ranked: list[Estimate] = []
    while rest:
        first = rest[0]
        equal = []
        different = []
        for job in rest:
            is_alike = first.fits and safety(job) == safety(first)
            ratio = job.tokens_per_second / first.tokens_per_second
            is_equal = job is first or (is_alike and ratio >= 1 - EQUAL_RATES)
            if is_equal:
                equal.append(job)
            else:
                different.append(job)
        ranked += sorted(equal, key=risk)
        rest = different
    return ranked
