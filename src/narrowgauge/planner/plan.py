"""Plans: turn a question into options, the best first."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import NarrowgaugeError, RecipeError, suggestion
from narrowgauge.planner.clusters import Cluster, between_sizes, clusters_asked_for, counts_of, parts_of, with_nodes
from narrowgauge.planner.jobs import Job
from narrowgauge.planner.layouts import DATA_PARALLEL, NAMED_LAYOUTS, Layout, read_layout
from narrowgauge.planner.memory import memory_terms
from narrowgauge.planner.model import Adapters, Architecture, of_size, read_model
from narrowgauge.planner.model_state import is_stepped, with_optimizer
from narrowgauge.planner.option import OURS, Option, Question
from narrowgauge.planner.plan_tables import Plan
from narrowgauge.planner.roofline import multiplies
from narrowgauge.planner.search import MOST_CHIPS, MOST_OPTIONS, search, smallest_changes
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

LARGEST = ("context", "batch")
USUAL_RECIPES = ("bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8", "float8-row/word",
                 "bfloat16/word/reproducible")  # fmt: skip
"""Recipes of the README, which are the default comparison."""
OBJECTIVES: dict[str, Callable[[Option], float]] = {
    "days": lambda option: 1.0 / (option.tokens_per_second or 1.0),
    "cost": lambda option: option.cost(1.0) or option.num_chips / (option.tokens_per_second or 1.0),
    "chips": lambda option: float(option.num_chips),
}
"""Quantities that the best option minimizes."""
# Equal in one configuration for several clusters. Replicas and micro-batches follow from the number of chips.
_PINNED = ("shard", "zero", "tensor", "pipeline", "context", "expert", "micro_batch", "recompute", "offload",
           "accumulation_dtype")  # fmt: skip
_BATCH = ("micro_batch", "micro_batches", "recompute", "offload")
_TUNING = ("int8-outlier", "int8-outlier-codes")
_MOST_POSITIONS, _STEP_OF_LENGTH, _MOST_SEQUENCES = 1 << 24, 1024, 1 << 16
_SEQUENCE_LENGTH, _MOST_LAYOUTS, _COSTS_VARY = 4096, 8, 1.25


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
    tokens_per_step: int | None = None,
    tokens: float | None = None,
    days: float | None = None,
    budget: float | None = None,
    largest: str = "",
    optimizer: str = "adamw",
    lora: int | None = None,
    base: str = "bfloat16",
    minimize: str | None = None,
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
        days, budget: a deadline in days and a limit in dollars for ``tokens``. Numbers of chips are tried, up to ``chips`` if
            set. With a deadline the best option has the fewest chips. With only a budget it is the fastest.
        largest: ``"context"`` for the longest sequences, ``"batch"`` for the most sequences at once, that certainly fit.
        optimizer: ``"adamw"``, ``"adam"``, ``"lion"``, ``"muon"`` or ``"adafactor"``, for its states.
        lora: rank of trained adapters over a frozen model; None trains all parameters.
        base: storage of frozen layers, a key of :data:`~narrowgauge.planner.model.BASE_BYTES`; ``"nf4"`` is QLoRA.
        minimize: ``"days"``, ``"cost"`` or ``"chips"``; None for ``"chips"`` with a deadline, else ``"days"``.
        layout: fields of the layout with fixed values: ``{"tensor": 2}``, ``"fsdp2,offload=none"``.
        rates: further fields of :class:`~narrowgauge.planner.clusters.Nodes` for ``chip``: ``interconnect_gbit_per_second``,
            ``dollars_per_hour``, ``host_memory_gb``, ``software``.
    Returns:
        The options, the best first.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is unknown.

    Example:
        >>> answer = plan(params=10e9, recipes=["bfloat16/master", "bfloat16/word", "bfloat16/states8"])
        >>> [option.memory.total / 1e9 for option in answer.options]
        [60.0, 80.0, 160.0]
    """
    minimize = minimize or ("days" if days is None else "chips")
    if minimize not in OBJECTIVES:
        raise NarrowgaugeError(
            f"minimize = {minimize!r} was requested.",
            suggestion(minimize, OBJECTIVES) or f"It is one of {', '.join(OBJECTIVES)}.",
        )
    architecture, fixed = _architecture(model, params), read_layout(layout or {})
    if lora is not None:
        if not architecture.has_shape:
            raise NarrowgaugeError("Cannot plan adapters of a number of parameters.", "Name a model.")
        architecture = replace(architecture, adapters=Adapters(lora, base))
        # FSDP2 shards PEFT's layers, or they are replicated. No other axis divides them.
        fixed = {**DATA_PARALLEL, **fixed}
    question = Question(
        architecture,
        str(model) if isinstance(model, str | Path) else architecture.name if model is not None else "",
        clusters_asked_for(cluster, chip, chips, chips_per_node, **rates),
        _sequence_length(architecture, sequence_length),
        num_tokens=tokens,
        minimize=minimize,
        fixed=fixed,
        tokens_per_step=tokens_per_step,
        deadline_days=days,
        budget=budget,
        largest=largest,
        optimizer=optimizer,
        recipes="all" if recipes == "all" else tuple(with_optimizer(parse(recipe), optimizer) for recipe in recipes),
    )
    places = question.clusters
    is_state_only = params is not None or not places
    _refuse_contradictions(question, sequence_length, is_state_only)
    if is_state_only:
        return _ranked(question, list(_state_options(question, counts_of(chips))))
    if question.largest:
        options = [_largest(question, recipe, place) for place in places for recipe in _recipes(question, place)]
        return _ranked(question, options)
    if question.is_bounded:
        nodes = [None if cluster or chips else chips_per_node or p.groups[0].chip.chips_per_node for p in places]
        options = [option for p, node in zip(places, nodes, strict=True) for option in _within(question, p, node)]
        question = replace(question, clusters=tuple(dict.fromkeys(o.cluster for o in options if o.cluster)))
        return _ranked(question, options, is_by_size=question.recipes in ((), "all"))
    # Fewer chips may be better.
    tried = [part for place in places for part in (parts_of(place) if minimize in ("cost", "chips") else (place,))]
    answer = _ranked(question, [option for size in tried for option in _searched(question, size)])
    answer = replace(answer, trainable=_trainable(answer))
    return replace(answer, shared=_shared(answer)) if len({place.chip_names for place in places}) > 1 else answer


def _refuse_contradictions(question: Question, sequence_length: int | None, is_state_only: bool) -> None:
    largest, tokens, adapters = question.largest, question.num_tokens, question.architecture.adapters
    asked = {"days": question.deadline_days, "budget": question.budget}
    limits = {name: limit for name, limit in asked.items() if limit is not None}
    if largest and largest not in LARGEST:
        raise NarrowgaugeError(
            f"largest = {largest!r} was requested.",
            suggestion(largest, LARGEST) or f"It is one of {', '.join(LARGEST)}.",
        )
    if largest and limits:
        raise NarrowgaugeError(
            f"the largest {largest} and a deadline or a budget were requested together.", "Ask one after the other."
        )
    batch = {"tokens_per_step": question.tokens_per_step, **question.fixed}
    answers = {"context": {"sequence_length": sequence_length}, "batch": batch}.get(largest, {})
    for name in ("sequence_length", "tokens_per_step", "micro_batch", "micro_batches"):
        if answers.get(name) is not None:
            raise NarrowgaugeError(
                f"the largest {largest} was requested, and {name} = {answers[name]} as well.",
                f"Leave {name} out: it is the answer.",
            )
    for name, value in {**limits, "largest": largest, "lora": adapters and adapters.rank}.items():
        if is_state_only and value:
            raise NarrowgaugeError(
                f"{name} = {value} was requested without machines, where the state of a whole model alone is counted.",
                "Name the model and its chips (--model llama-8b --chip H100-SXM).",
            )
    for name, limit in limits.items():
        if not 0 < limit < math.inf:
            raise NarrowgaugeError(f"{name} = {limit:g} was requested.", "Use a number above 0.")
        if tokens is None:
            raise NarrowgaugeError(
                f"{name} = {limit:g} was requested for a run whose tokens are not known.",
                "Give tokens (--tokens 300e9).",
            )
    if question.budget is not None and any(place.dollars_per_hour is None for place in question.clusters):
        raise NarrowgaugeError(
            f"a budget of {question.budget:,.0f} dollars was requested, and no price of a chip is known.",
            "Give dollars_per_hour (--price), or write it into the cluster's file.",
        )


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


# ── state alone ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_storages() -> list[str]:
    """Name a recipe for each storage of bfloat16 weights, the largest first."""
    storages = (storage for storage in STORAGES.values() if not storage.owner)
    return [f"bfloat16/{row.name}" for row in sorted(storages, key=lambda row: -row.bytes_per_param)]


def _state_options(question: Question, numbers: Sequence[int]) -> Iterator[Option]:
    named = question.recipes if question.recipes != "all" else ()
    recipes = named or [with_optimizer(recipe, question.optimizer) for recipe in map(parse, _of_storages())
                        if is_stepped(recipe.storage, question.optimizer)]  # fmt: skip
    # With a shape, memory_terms would return the worst moment, which lacks some gradients.
    size = of_size(question.architecture.num_parameters)
    places: list[tuple[Cluster | None, int | None]] = [(cluster, cluster.num_chips) for cluster in question.clusters]
    for cluster, number in places or [(None, number) for number in numbers] or [(None, None)]:
        layout = _state_layout(question.fixed, number)
        for recipe in recipes:
            option = Option(size, recipe, layout, memory_terms(size, recipe, layout, 0), cluster)
            if cluster is not None and not option.fits:
                job = Job(size, recipe, layout, cluster, question.sequence_length)
                option = replace(option, advice=smallest_changes(job, fixed=question.fixed))
            yield option


def _state_layout(fixed: Mapping[str, Any], number: int | None) -> Layout:
    """Return the requested layout of a state. The remaining chips shard it."""
    layout = Layout(**fixed)
    if number is None or number == layout.num_ranks:
        return layout
    shard, rest = divmod(number, layout.num_ranks)
    if rest or "shard" in fixed:
        raise NarrowgaugeError(
            f"a layout of {layout.num_ranks} chips was requested on {number}.", "Name all its axes, or none of them."
        )
    return replace(layout, shard=shard)


# ── searches ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _search(
    question: Question, recipe: Recipe, cluster: Cluster, fixed: Mapping[str, Any] | None = None, most: int = 1
) -> list[Option]:
    """Return the best layouts of a recipe. ``fixed`` replaces the question's layout fields."""
    fixed = question.fixed if fixed is None else fixed
    arguments = question.architecture, recipe, cluster, question.sequence_length, question.tokens_per_step
    return search(*arguments, fixed=fixed, most=most)


def _searched(question: Question, cluster: Cluster) -> list[Option]:
    """Return the best layouts of a single recipe, or the best layout of each recipe."""
    recipes = _recipes(question, cluster)
    most = MOST_OPTIONS if len(recipes) == 1 else 1
    return [option for recipe in recipes for option in _search(question, recipe, cluster, most=most)]


def _recipes(question: Question, cluster: Cluster) -> Sequence[Recipe]:
    """Return the requested recipes; else the usual ones, or all, that all chips multiply natively."""
    if question.recipes not in ((), "all"):
        return question.recipes  # type: ignore[return-value]
    usual = [] if question.recipes else _suited(USUAL_RECIPES, cluster, question.optimizer)
    if usual:
        return usual
    # Every storage of 16-bit weights, and every other compute with its storage.
    is_wide = all("bfloat16" in group.chip.peak_tflops for group in cluster.groups)
    names = _of_storages() if is_wide else [name for name in STORAGES if name.startswith("float16/")]
    # Users must request computes that change the whole model or are for fine-tuning.
    names += [
        f"{compute.name}/{compute.default_storage}"
        for compute in COMPUTES.values()
        if not compute.transform and compute.name not in _TUNING
    ]
    return _suited(dict.fromkeys(names), cluster, question.optimizer)


def _suited(names: Iterable[str], cluster: Cluster, optimizer: str) -> list[Recipe]:
    chips = {group.chip.name: group.chip for group in cluster.groups}.values()
    return [
        with_optimizer(recipe, optimizer)
        for recipe in map(parse, names)
        if all(multiplies(recipe.compute, chip) for chip in chips) and is_stepped(recipe.storage, optimizer)
    ]


def _within(question: Question, cluster: Cluster, node: int | None) -> list[Option]:
    """Search the fewest chips that meet a deadline, or the most that a budget allows, and numbers near these.

    ``node`` is the node size of clusters of any size; None tries parts of ``cluster``.
    """
    largest = cluster if node is None else with_nodes(cluster, 1 << ((MOST_CHIPS // node).bit_length() - 1), chips=node)
    sizes = sorted(parts_of(largest), key=lambda size: size.num_chips)
    sizes = [size for size in sizes if _could_end(question, size)] or sizes[-1:]
    has_deadline = question.deadline_days is not None
    is_usual = question.minimize == ("chips" if has_deadline else "days")
    tried: list[list[Option]] = []

    def is_met_by(size: Cluster) -> bool:
        tried.append(_searched(question, size))
        return any(_is_safe(option) and question.meets(option) for option in tried[-1])

    met: list[int] = []  # indices of the sizes that meet the limits
    for place, size in enumerate(sizes):
        met += [place] if is_met_by(size) else []
        # More chips only shorten a run. The cost varies by some per cent.
        costs = [option.cost(question.num_tokens) or 0.0 for option in tried[-1] if option.fits]
        could_cost = question.budget is None or min(costs, default=0.0) <= _COSTS_VARY * question.budget
        if is_usual and met and (has_deadline or not could_cost):
            break
    if is_usual and met:
        few, many = (met[0] - 1, met[0]) if has_deadline else (met[-1], met[-1] + 1)
        if few >= 0 and many < len(tried):
            for between in between_sizes(sizes[few], sizes[many]):
                if is_met_by(between) and has_deadline:
                    break
    return [option for options in tried for option in options]


def _is_safe(option: Option) -> bool:
    """Tell whether an option certainly fits and keeps updates."""
    return bool(option.fits and option.is_certain) and option.recipe.storage.keeps_updates


def _could_end(question: Question, cluster: Cluster) -> bool:
    """Tell whether a run could meet the deadline if only matmuls in the fastest format took time."""
    if question.deadline_days is None or question.num_tokens is None:
        return True
    flops = question.num_tokens * question.architecture.flops_per_token(question.sequence_length)
    peak = sum(1e12 * group.num_chips * max(group.chip.peak_tflops.values()) for group in cluster.groups)
    return flops / peak <= 86_400 * question.deadline_days


def _largest(question: Question, recipe: Recipe, cluster: Cluster) -> Option:
    """Return the option with the longest sequences, or the most at once, that certainly fits."""
    if question.largest == "context":
        most = question.architecture.positions or _MOST_POSITIONS
        sizes = _sizes(min(_STEP_OF_LENGTH, most), most)
        return _largest_of(sizes, lambda n: _search(replace(question, sequence_length=n), recipe, cluster)[0])
    # Layouts of this project's trainer, unless the question fixes others or these do not fit.
    free = replace(question, tokens_per_step=None)

    def largest_batch(fixed: Mapping[str, Any]) -> Option:
        def option_of(size: int) -> Option:
            return _search(free, recipe, cluster, {**fixed, "micro_batch": size, "micro_batches": 1})[0]

        return _largest_of(_sizes(1, _MOST_SEQUENCES), option_of)

    option = largest_batch({**NAMED_LAYOUTS["fsdp2"], **question.fixed})
    return option if option.fits else largest_batch(question.fixed)


def _largest_of(sizes: Sequence[int], option_of: Callable[[int], Option]) -> Option:
    """Return the option of the largest size that certainly fits, or of the smallest. Smaller sizes fit too."""
    option_of = cache(option_of)

    def is_too_large(size: int) -> bool:
        return not (option_of(size).fits and option_of(size).is_certain)

    return option_of(sizes[max(0, bisect_left(sizes, True, key=is_too_large) - 1)])


def _sizes(least: int, most: int) -> list[int]:
    """Return multiples of ``least`` up to ``most``. Each is at least a sixteenth larger than the last.

    Example:
        >>> _sizes(1024, 8192), _sizes(1, 24)[-6:]
        ([1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192], [19, 20, 21, 22, 23, 24])
    """
    sizes = [least]
    while (size := max(sizes[-1] + least, sizes[-1] * 17 // 16 // least * least)) <= most:
        sizes.append(size)
    return sizes


# ── from options to an answer ─────────────────────────────────────────────────────────────────────────────────────────────


def _ranked(question: Question, options: Sequence[Option], *, is_by_size: bool = False) -> Plan:
    ordered = sorted(options, key=lambda option: _rank(question, option))
    is_one = len({option.recipe for option in ordered}) == 1 and len({option.cluster for option in ordered}) <= 1
    if is_one and (ordered[0].step is not None or len({option.num_chips for option in ordered}) == 1):
        return Plan(question, tuple(ordered[:_MOST_LAYOUTS]))
    first: dict[Any, Option] = {}
    for option in ordered:
        chips = option.num_chips if option.step is None else 0
        first.setdefault((option.cluster,) if is_by_size else (option.recipe, option.cluster, chips), option)
    return Plan(question, tuple(first.values()))


def _rank(question: Question, option: Option) -> tuple[float, ...]:
    """Return the sort key of options: safety, then limits, then the objective, then headroom."""
    if option.step is None:
        return option.num_chips, option.memory.total
    headroom = option.headroom_bytes or 0.0
    # Recipes that lose updates come last, however fast. Options that may run out of memory come after certain ones.
    rank = [float(not option.fits), not option.recipe.storage.keeps_updates, option.is_certain is False]
    if question.is_bounded:
        is_met = question.meets(option)
        rank.append(not is_met)
        if not is_met and option.fits:
            # Among options that miss the limits, the fastest is the nearest, for any objective.
            nearest = OBJECTIVES["days" if question.deadline_days is not None else "cost"]
            return (*rank, nearest(option), 0.0, -headroom)
    if question.largest:
        rank.append(-(option.sequence_length if question.largest == "context" else option.layout.num_sequences))
    rank += [OBJECTIVES[name](option) for name in (question.minimize, "days") if option.fits]
    return (*rank, -headroom)


def _trainable(answer: Plan) -> Option | RecipeError | None:
    """Return the trainer's best option if another is the best, or the error that explains why there is none."""
    best, question = answer.best, answer.question
    if not best.fits or best.runs_with == OURS or best.cluster is None:
        return None
    # A rank count that was fixed together with other axes does not apply to a layout without them.
    batch = {name: value for name, value in question.fixed.items() if name in _BATCH}
    try:
        return _search(question, best.recipe, best.cluster, {**batch, **NAMED_LAYOUTS["fsdp2"]})[0]
    except RecipeError as error:
        return error


def _shared(answer: Plan) -> tuple[Option, ...]:
    """Return the first configuration that fits on every cluster: same recipe, model sharding and micro-batch."""
    question = answer.question
    for option in filter(lambda option: option.fits, answer.options):
        pinned = {name: getattr(option.layout, name) for name in _PINNED}
        try:
            shared = [_search(question, option.recipe, cluster, pinned)[0] for cluster in question.clusters]
        except RecipeError:  # the chips do not divide like that
            continue
        if all(option.fits for option in shared):
            return tuple(shared)
    return ()
