"""Plans: from a question to its options, the best first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, NarrowgaugeError, RecipeError, suggestion
from narrowgauge.planner.inputs.architectures import Adapters, Architecture, of_size
from narrowgauge.planner.inputs.clusters import (
    HERE,
    Cluster,
    between_sizes,
    clusters_asked_for,
    multiples_of,
    numbers_of,
    parts_of,
    sizes_up_to,
)
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import NAMED_LAYOUTS, Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.memory.activations import LayerCounter
from narrowgauge.planner.memory.rank_memory import memory_terms
from narrowgauge.planner.memory.state_bytes import is_stepped, with_optimizer
from narrowgauge.planner.plan_report import MOST_SHARED, Plan
from narrowgauge.planner.question import OURS, Option, Question
from narrowgauge.planner.search import MOST_CHIPS, MOST_OPTIONS, SearchCache, search, smallest_changes
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.time.roofline import describe_support
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import MODELS
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

LONGEST_DAYS = 120.0
"""The deadline where the fewest chips are asked for without one: BLOOM's run, one of the longest published, took 117 days (arXiv
2211.05100)."""
_COSTS_VARY = 1.25
LARGEST = ("context", "batch")
ADAPTED: dict[str, Any] = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
"""The layout of adapters: FSDP2 shards PEFT's layers, or they are replicated; no other axis divides them."""
_MOST_POSITIONS, _STEP_OF_LENGTH, _MOST_SEQUENCES = 1 << 24, 1024, 1 << 16
OBJECTIVES: dict[str, Callable[[Option], float]] = {
    "days": lambda option: 1.0 / (option.tokens_per_second or 1.0),
    "cost": lambda option: (option.dollars_per_hour or option.num_chips) / (option.tokens_per_second or 1.0),
    "chips": lambda option: float(option.num_chips),
    "memory": lambda option: option.memory.total / (option.capacity_bytes or 1.0),
}
"""What the best option has least of."""
_PINNED = ("shard", "zero", "tensor", "pipeline", "context", "expert", "micro_batch", "recompute", "offload",
           "sequence_parallel", "expert_tensor", "accumulation_dtype", "keeps_gradients")  # fmt: skip
"""What one configuration for several clusters has in common; replicas and micro-batches follow from the number of chips."""
_BATCH = ("micro_batch", "micro_batches", "recompute", "offload")
_MOST_LAYOUTS = 8
_TUNING = ("int8-outlier", "int8-outlier-codes")
_SEQUENCE_LENGTH = 4096
_STATE = ("weights", "gradients", "optimizer")


def plan(
    model: str | Path | Architecture | None = None,
    *,
    params: float | None = None,
    recipes: Sequence[str | Recipe] = (),
    chip: str | Chip | Sequence[str | Chip] = (),
    chips: int | Sequence[int] = (),
    cluster: Cluster | str | Path | Sequence[Cluster | str | Path] = (),
    chips_per_node: int | None = None,
    interconnect_gbit_per_second: float | None = None,
    dollars_per_hour: float | None = None,
    host_memory_gb: float | None = None,
    software: str | None = None,
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
    layout: Mapping[str, Any] | None = None,
    shares: Shares | None = None,
    counted: LayerCounter | None = None,
) -> Plan:
    """Say what fits, how fast, in which layout, and why.

    Nothing is trained and nothing needs PyTorch: memory and time are sums of terms with formulas and sources. Without ``model``
    or without machines, the state alone is counted: weights, gradients and optimizer states.

    Args:
        model: a preset's name, a Hugging Face ``config.json`` or its folder, or an architecture.
        params: number of parameters, instead of a model.
        recipes: names, files or recipes; none means all that suit the chips.
        chip: one or more names of chips (``narrowgauge show chips``), or ``"here"``: this machine, as calibrated.
        chips: how many; several numbers are compared.
        cluster: files or values, instead of ``chip`` and ``chips``.
        chips_per_node, interconnect_gbit_per_second: of the nodes of ``chip``; the rate is that of a node's whole network.
        dollars_per_hour: price of one chip; None leaves costs out.
        host_memory_gb: of one node of ``chip``, in 2^30 bytes; if given, layouts that offload to it are searched too.
        software: a row of :data:`~narrowgauge.planner.inputs.efficiency.SOFTWARE` whose speed is planned; None for what is
            usual on the chip, with wide intervals.
        sequence_length: in tokens; None for the model's longest, at most 4096.
        tokens_per_step: tokens of an optimizer step; chosen if None.
        tokens: of the whole run, for days and cost.
        days, budget: a deadline in days and a limit in dollars for ``tokens``: numbers of chips are tried, up to ``chips`` where
            it is given; the best has the fewest that meet the deadline, or with a budget alone is the fastest that meets it.
        largest: ``"context"`` or ``"batch"``: the longest sequences, or the most sequences at once, that fit for certain.
        optimizer: whose states are counted: ``"adamw"``, ``"adam"``, ``"lion"``, ``"muon"`` or ``"adafactor"``.
        lora: rank of adapters over a frozen model, which alone are trained; None trains all parameters.
        base: how the frozen layers are kept: a key of :data:`~narrowgauge.planner.inputs.architectures.BASE_BYTES`; ``"nf4"`` is
            QLoRA.
        minimize: ``"days"``, ``"cost"``, ``"chips"`` or ``"memory"``; None for ``"chips"`` with a deadline, else ``"days"``.
        layout: fields of the layout that must have these values.
        shares: of the chips' printed rates; None for the published ones, or for ``"here"`` the calibrated ones.
        counted: what a layer keeps, counted in the model's own modules (``narrowgauge.profiling.exact_memory.LayerCounts``); None
            for the formulas.
    Returns:
        The options, best first, and what follows from them.
    Raises:
        NarrowgaugeError: the question contradicts itself, or a model, chip, recipe or cluster is not known.
    Cost: up to a second, for all recipes over all layouts of a large cluster.

    Example:
        >>> found = plan(params=10e9, recipes=["bfloat16/master", "bfloat16/word", "bfloat16/states8"])
        >>> [option.memory.total / 1e9 for option in found.options]
        [60.0, 80.0, 160.0]
    """
    if minimize is None:
        minimize = "days" if days is None else "chips"
    if minimize not in OBJECTIVES:
        raise NarrowgaugeError(
            f"minimize = {minimize!r} was requested.",
            suggestion(minimize, OBJECTIVES) or f"It is one of {', '.join(OBJECTIVES)}.",
        )
    architecture = _architecture(model, params)
    if lora is not None:
        architecture = _with_adapters(architecture, Adapters(lora, base))
        layout = {**ADAPTED, **(layout or {})}
    chip, calibrated = _known_chips(chip)
    places = clusters_asked_for(
        cluster, chip, chips, chips_per_node, interconnect_gbit_per_second=interconnect_gbit_per_second,
        dollars_per_hour=dollars_per_hour, host_memory_gb=host_memory_gb, software=software,
    )  # fmt: skip
    largest = _largest(largest, days, budget, sequence_length, tokens_per_step, layout or {})
    if params is not None or not places:
        _refuse_without_machines(days, budget, largest, lora)
    # Without a deadline, the fewest chips would take forever.
    is_deadline_assumed = minimize == "chips" and days is None and tokens is not None
    question = Question(
        architecture,
        str(model) if isinstance(model, str | Path) else architecture.name if model is not None else "",
        tuple(places),
        _sequence_length(architecture, sequence_length),
        num_tokens=tokens,
        minimize=minimize,
        fixed=dict(layout or {}),
        shares=calibrated if shares is None else shares,
        counted=counted,
        tokens_per_step=tokens_per_step,
        deadline_days=LONGEST_DAYS if is_deadline_assumed else days,
        budget=budget,
        is_deadline_assumed=is_deadline_assumed,
        largest=largest,
        optimizer=optimizer,
    )
    _check_limits(tokens, days, budget)
    if budget is not None and places and any(place.dollars_per_hour is None for place in places):
        raise NarrowgaugeError(
            f"a budget of {budget:,.0f} dollars was requested, and no price of a chip is known.",
            "Give dollars_per_hour (--price), or write it into the cluster's file.",
        )
    known = tuple(with_optimizer(parse(recipe), optimizer) for recipe in recipes)
    if params is not None or not places:
        stepped = (recipe for recipe in _storages() if is_stepped(recipe.storage, optimizer))
        stored = known or tuple(with_optimizer(recipe, optimizer) for recipe in stepped)
        return _ranked(question, list(_state_options(question, stored, numbers_of(chips))))
    if question.largest:
        return _ranked(question, [option for place in places for option in _largest_options(question, place, known)])
    if question.is_bounded:
        is_free = not (cluster or chips)
        tried: dict[str, Cluster] = {}
        nodes = [(chips_per_node or place.groups[0].chip.chips_per_node) if is_free else None for place in places]
        options = [o for p, node in zip(places, nodes, strict=True) for o in _within(question, p, known, node, tried)]
        question = replace(question, clusters=tuple(tried.values()))
    else:
        options = [
            option for place in _tried(question) for option in _searched(question, place, known, tokens_per_step)
        ]
    found = _ranked(question, options, is_by_size=question.is_bounded and not known)
    found = replace(found, trainable=_trainable(found, tokens_per_step), names_recipes=bool(known))
    is_shared = len({place.chip_names for place in places}) > 1 and len(places) <= MOST_SHARED
    return replace(found, shared=_shared(found, tokens_per_step)) if is_shared else found


def _known_chips(chip: str | Chip | Sequence[str | Chip]) -> tuple[list[str | Chip], Shares | None]:
    """The named chips, and the calibrated shares where this machine is the one named; None for the published ones."""
    names = [chip] if isinstance(chip, str | Chip) else list(chip)
    if HERE not in names:
        return names, None
    if len(names) > 1:
        raise ChipError("this machine and other chips were requested together.", "Plan for them one after the other.")
    # Imported late: reading runs takes as long to load as all the rest.
    from narrowgauge.planner.measured.calibration import kept

    found = kept(HERE)
    return [found.chip], found.shares


def _check_limits(tokens: float | None, days: float | None, budget: float | None) -> None:
    for name, value in (("days", days), ("budget", budget)):
        if value is not None and not 0 < value < math.inf:
            raise NarrowgaugeError(f"{name} = {value:g} was requested.", "Use a number above 0.")
        if value is not None and tokens is None:
            raise NarrowgaugeError(
                f"{name} = {value:g} was requested for a run whose tokens are not known.",
                "Give tokens (--tokens 300e9).",
            )


def _refuse_without_machines(days: float | None, budget: float | None, largest: str, lora: int | None) -> None:
    """Refuse what a count of the state alone would ignore."""
    for name, value in {"days": days, "budget": budget, "largest": largest or None, "lora": lora}.items():
        if value is not None:
            raise NarrowgaugeError(
                f"{name} = {value} was requested without machines, where the state of a whole model alone is counted.",
                "Name the model and its chips (--model llama-8b --chip H100-SXM).",
            )


def _largest(
    what: str,
    days: float | None,
    budget: float | None,
    sequence_length: int | None,
    tokens_per_step: int | None,
    layout: Mapping[str, Any],
) -> str:
    """What is to be the largest; refused where another argument already fixes it."""
    if what and what not in LARGEST:
        raise NarrowgaugeError(
            f"largest = {what!r} was requested.", suggestion(what, LARGEST) or f"It is one of {', '.join(LARGEST)}."
        )
    if what and (days is not None or budget is not None):
        raise NarrowgaugeError(
            f"the largest {what} and a deadline or a budget were requested together.", "Ask one after the other."
        )
    said: dict[str, Any] = {"sequence_length": sequence_length} if what == "context" else {}
    if what == "batch":
        said = {"tokens_per_step": tokens_per_step} | {
            each: layout.get(each) for each in ("micro_batch", "micro_batches")
        }
    for name, value in said.items():
        if value is not None:
            raise NarrowgaugeError(
                f"the largest {what} was requested, and {name} = {value} as well.",
                f"Leave {name} out: it is the answer.",
            )
    return what


def _trainable(found: Plan, tokens_per_step: int | None) -> Option | RecipeError | None:
    """The trainer's best option where the best of all is not one of its own, or the error that says why it has none."""
    best, question = found.best, found.question
    if not best.fits or best.runs_with == OURS or question.is_bounded:
        return None
    cluster = next((place for place in _tried(question) if place.name == best.cluster), None)
    if cluster is None:
        return None
    # A number of ranks that was requested together with other axes says nothing about a layout without these.
    batch = {name: value for name, value in question.fixed.items() if name in _BATCH}
    try:
        return _search(question, best.recipe, cluster, {**batch, **NAMED_LAYOUTS["fsdp2"]}, tokens_per_step)[0]
    except RecipeError as error:
        return error


def _architecture(model: str | Path | Architecture | None, params: float | None) -> Architecture:
    if (model is None) == (params is None):
        raise NarrowgaugeError(
            "a model and a number of parameters were requested together."
            if model is not None
            else "no model was named.",
            "Give a model, or a number of parameters for its state alone.",
        )
    if params is not None:
        if not 1 <= params < 1e18:
            raise NarrowgaugeError(f"{params:g} parameters were requested.", "Give a number above 1, such as 10e9.")
        return of_size(int(params))
    return model if isinstance(model, Architecture) else read_architecture(str(model))


def _with_adapters(architecture: Architecture, adapters: Adapters) -> Architecture:
    if not architecture.has_shape:
        raise NarrowgaugeError(
            "adapters were requested for a number of parameters.", "Name a model: adapters follow from its matrices."
        )
    return replace(architecture, adapters=adapters)


def _sequence_length(architecture: Architecture, wanted: int | None) -> int:
    preset = MODELS.get(architecture.name)
    longest = architecture.max_positions or (preset.max_positions if preset is not None else None)
    if wanted is None:
        return min(longest or _SEQUENCE_LENGTH, _SEQUENCE_LENGTH)
    # Rotary positions extend beyond those that a model was trained with; learned ones do not.
    if architecture.max_positions is not None and wanted > architecture.max_positions:
        raise NarrowgaugeError(
            f"sequences of {wanted:,} tokens were requested for {architecture.name}, which has {architecture.max_positions:,} "
            "positions.",
            "Use shorter sequences.",
        )
    return wanted


def _storages() -> Iterator[Recipe]:
    """A recipe for each storage of bfloat16 weights, the widest first."""
    named = [parse(f"bfloat16/{name}") for name in STORAGES if "/" not in name]
    return iter(sorted(named, key=lambda recipe: -recipe.bytes_per_param))


def _state_options(question: Question, recipes: Sequence[Recipe], numbers: Sequence[int]) -> Iterator[Option]:
    # With a shape, memory_terms would return the worst moment, at which not all gradients exist.
    size = of_size(question.architecture.num_parameters)
    places: list[tuple[Cluster | None, int | None]] = [(cluster, cluster.num_chips) for cluster in question.clusters]
    for cluster, number in places or [(None, number) for number in numbers] or [(None, None)]:
        layout = _state_layout(question.fixed, number)
        for recipe in recipes:
            terms = memory_terms(size, recipe, layout, question.sequence_length)
            state = Terms(tuple(term for term in terms if term.group in _STATE))
            if cluster is None:
                yield Option(recipe, layout, state)
                continue
            option = Option(recipe, layout, state, cluster.memory_bytes, cluster=cluster.name)
            job = Job(size, recipe, layout, cluster, question.sequence_length)
            yield option if option.fits else replace(option, advice=smallest_changes(job, fixed=question.fixed))


def _state_layout(fixed: Mapping[str, Any], number: int | None) -> Layout:
    """The requested layout of a state, which the remaining chips shard."""
    layout = Layout(**fixed)
    if number is None or number == layout.num_ranks:
        return layout
    shard, rest = divmod(number, layout.num_ranks)
    if rest or "shard" in fixed:
        raise NarrowgaugeError(
            f"a layout of {layout.num_ranks} chips was requested on {number}.", "Name all its axes, or none of them."
        )
    return replace(layout, shard=shard)


def _ranked(question: Question, options: Sequence[Option], *, is_by_size: bool = False) -> Plan:
    objective = OBJECTIVES[question.minimize]

    def rank(option: Option) -> tuple[float, ...]:
        if option.step is None:
            return option.num_chips, option.memory.total
        room = option.headroom_bytes or 0.0
        # A recipe whose updates are lost is no answer, however fast, and what may run out of memory comes after what does not.
        safety: tuple[float, ...] = (
            not option.fits,
            not option.recipe.storage.keeps_updates,
            option.is_certain is False,
        )
        if question.is_bounded:
            is_met = question.meets(option)
            # Of those that miss the limits the fastest is the nearest, whatever is minimized.
            safety = (*safety, not is_met)
            if not is_met and option.fits:
                return (
                    *safety,
                    OBJECTIVES["days" if question.deadline_days is not None else "cost"](option),
                    0.0,
                    -room,
                )
        if question.largest:
            safety = (
                *safety,
                -(option.sequence_length if question.largest == "context" else option.layout.num_sequences),
            )
        return (*safety, *((objective(option), OBJECTIVES["days"](option)) if option.fits else ()), -room)

    ordered = sorted(options, key=rank)
    is_one = len({option.recipe for option in ordered}) == 1 and len({option.cluster for option in ordered}) <= 1
    groups: dict[Any, list[Option]] = {}
    for option in ordered:
        place = option.num_chips if option.step is None else 0
        row = (option.cluster,) if is_by_size else (option.recipe, option.cluster, place)
        groups.setdefault(None if is_one and place == 0 else row, []).append(option)
    listed = ordered[:_MOST_LAYOUTS] if is_one and len(groups) == 1 else [group[0] for group in groups.values()]
    return Plan(question, tuple(listed))


def _tried(question: Question) -> Iterator[Cluster]:
    """The clusters that were asked for, and parts of them where fewer chips may be better."""
    for cluster in question.clusters:
        yield from parts_of(cluster) if question.minimize in ("cost", "chips") else (cluster,)


def _within(
    question: Question, cluster: Cluster, recipes: Sequence[Recipe], node: int | None, looked_at: dict[str, Cluster]
) -> Iterator[Option]:
    """The layouts on as few chips as a deadline allows, or on as many as a budget does, and on other numbers beside these.

    ``node`` is the size of the nodes of clusters of any size; None tries parts of ``cluster``. What is tried is added to
    ``looked_at``, by name.
    """
    tried = parts_of(cluster) if node is None else sizes_up_to(cluster, node, MOST_CHIPS)
    sizes = sorted(tried, key=lambda size: size.num_chips)
    sizes = [size for size in sizes if _could_end(question, size)] or sizes[-1:]
    has_deadline = question.deadline_days is not None
    is_usual = question.minimize == ("chips" if has_deadline else "days")
    met: list[int] = []  # places of the sizes that meet the limits
    for place, size in enumerate(sizes):
        found = list(_searched(question, size, recipes, question.tokens_per_step))
        yield from found
        met += [place] if any(map(question.meets, filter(_is_safe, found))) else []
        looked_at[size.name] = size
        # More chips only shorten a run; what they cost goes up and down by some per cent.
        if is_usual and met and (has_deadline or not _could_cost(question, found)):
            break
    edges = (met[0] - 1, met[0]) if met and has_deadline else (met[-1], met[-1] + 1) if met else (-1, 0)
    if not is_usual or edges[0] < 0 or edges[1] == len(sizes) or sizes[edges[1]].name not in looked_at:
        return
    for between in between_sizes(sizes[edges[0]], sizes[edges[1]]):
        looked_at[between.name] = between
        found = list(_searched(question, between, recipes, question.tokens_per_step))
        yield from found
        if has_deadline and any(map(question.meets, filter(_is_safe, found))):
            return


def _is_safe(option: Option) -> bool:
    """Whether an option fits for certain and keeps updates."""
    return bool(option.fits) and bool(option.is_certain) and option.recipe.storage.keeps_updates


def _could_cost(question: Question, options: Sequence[Option]) -> bool:
    """Whether a larger cluster than that of these options could still keep the budget."""
    costs = [option.cost(question.num_tokens or 0.0) or 0.0 for option in options if option.fits]
    return question.budget is None or min(costs, default=0.0) <= _COSTS_VARY * question.budget


def _could_end(question: Question, cluster: Cluster) -> bool:
    """Whether a run could end in time if nothing but multiplying in the fastest format took time."""
    if question.deadline_days is None or question.num_tokens is None:
        return True
    flops = question.num_tokens * question.architecture.flops_per_token(question.sequence_length)
    peak = sum(1e12 * group.num_chips * max(group.chip.peak_tflops.values()) for group in cluster.groups)
    return flops / peak <= 86_400 * question.deadline_days


def _largest_options(question: Question, cluster: Cluster, recipes: Sequence[Recipe]) -> Iterator[Option]:
    """Of each recipe the option with the longest sequences, or the most at once, that fits for certain."""
    near = 0
    for recipe in list(recipes or _suited(cluster, question.optimizer)):
        if question.largest == "context":
            most = question.architecture.max_positions or _MOST_POSITIONS
            sizes = _sizes(min(_STEP_OF_LENGTH, most), most)
            found, near = _largest_of(_of_length(question, cluster, recipe), sizes, near)
        else:
            sizes = _sizes(1, _MOST_SEQUENCES)
            # What this project's trainer runs, unless other layouts were asked for or these do not fit.
            own = {**NAMED_LAYOUTS["fsdp2"], **question.fixed}
            found, near = _largest_of(_of_batch(question, cluster, recipe, own), sizes, near)
            if not found.fits:
                found, near = _largest_of(_of_batch(question, cluster, recipe, question.fixed), sizes, near)
        yield found


def _of_length(question: Question, cluster: Cluster, recipe: Recipe) -> Callable[[int], Option]:
    """The best option as a function of the sequence length."""

    def of(length: int) -> Option:
        asked = replace(question, sequence_length=length)
        return _search(asked, recipe, cluster, question.fixed, question.tokens_per_step)[0]

    return of


def _of_batch(
    question: Question, cluster: Cluster, recipe: Recipe, fixed: Mapping[str, Any]
) -> Callable[[int], Option]:
    """The best option as a function of the number of sequences at once, without accumulation."""

    def of(micro_batch: int) -> Option:
        asked = {**fixed, "micro_batch": micro_batch, "micro_batches": 1}
        return _search(question, recipe, cluster, asked, None)[0]

    return of


def _sizes(least: int, most: int) -> list[int]:
    """Multiples of ``least`` up to ``most``, each at least a sixteenth larger than the one before.

    Example:
        >>> _sizes(1024, 8192), _sizes(1, 24)[-6:]
        ([1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192], [19, 20, 21, 22, 23, 24])
    """
    sizes = [least]
    while (size := max(sizes[-1] + least, sizes[-1] * 17 // 16 // least * least)) <= most:
        sizes.append(size)
    return sizes


def _largest_of(of: Callable[[int], Option], sizes: Sequence[int], near: int) -> tuple[Option, int]:
    """The option of the largest size that fits for certain, and its place; that of the least size if none does.

    What fits is taken to fit in smaller sizes too, so this is a bisection of the ascending ``sizes``. It begins at ``near``, such
    as the place of another recipe; the answer does not depend on it.
    """
    fitting: dict[int, Option] = {}
    low, high, stride, place = -1, len(sizes), 1, max(0, min(near, len(sizes) - 1))
    while high - low > 1:
        option = of(sizes[place])
        if option.fits and option.is_certain:
            low, fitting[place] = place, option
        else:
            high = place
        stride *= 2
        if low < 0:
            place = max(0, high - stride)
        elif high == len(sizes):
            place = min(high - 1, low + stride)
        else:
            place = (low + high) // 2
    return (fitting[low], low) if low >= 0 else (of(sizes[0]), 0)


def _searched(
    question: Question, cluster: Cluster, recipes: Sequence[Recipe], tokens_per_step: int | None
) -> Iterator[Option]:
    """The best layouts of the only recipe, or of each of many recipes the best one."""
    known, common = list(recipes or _suited(cluster, question.optimizer)), SearchCache()
    most = MOST_OPTIONS if len(known) == 1 else 1
    for recipe in known:
        yield from _search(question, recipe, cluster, question.fixed, tokens_per_step, common, most)


def _search(
    question: Question,
    recipe: Recipe,
    cluster: Cluster,
    fixed: Mapping[str, Any],
    tokens_per_step: int | None,
    common: SearchCache | None = None,
    most: int = 1,
) -> list[Option]:
    given = question.architecture, recipe, cluster, question.sequence_length, tokens_per_step
    same: dict[str, Any] = {"minimize": question.minimize, "shares": question.shares, "counted": question.counted}
    return search(*given, fixed=fixed, **same, common=common, most=most)


def _suited(cluster: Cluster, optimizer: str = "adamw") -> Iterator[Recipe]:
    """Every storage of 16-bit weights, and every other compute with its own storage, that all chips multiply natively.

    Computes that change the whole model, or are for fine-tuning, are for those who ask for them.
    """
    chips = {group.chip.name: group.chip for group in cluster.groups}.values()
    wide = "bfloat16" if all("bfloat16" in chip.peak_tflops for chip in chips) else "float16"
    names = [recipe.name for recipe in _storages()] if wide == "bfloat16" else []
    names += [name for name in STORAGES if name.startswith(f"{wide}/")]
    names += [f"{compute.name}/{compute.default_storage}" for compute in COMPUTES.values()]
    for recipe in map(parse, dict.fromkeys(names)):
        is_native = all(describe_support(recipe.compute, chip) == "native" for chip in chips)
        is_left_out = recipe.compute.transform or recipe.compute.name in _TUNING
        if is_native and not is_left_out and is_stepped(recipe.storage, optimizer):
            yield with_optimizer(recipe, optimizer)


def _shared(found: Plan, tokens_per_step: int | None) -> tuple[Option, ...]:
    """The first configuration that fits on every cluster: on all the same recipe, division of the model and micro-batch."""
    for option in found.options:
        pinned = {name: getattr(option.layout, name) for name in _PINNED}
        everywhere = [
            _fitting(found.question, option.recipe, cluster, pinned, tokens_per_step)
            for cluster in found.question.clusters
        ]
        if option.fits and None not in everywhere:
            return tuple(each for each in everywhere if each is not None)
    return ()


def _fitting(
    question: Question, recipe: Recipe, cluster: Cluster, fixed: Mapping[str, Any], tokens_per_step: int | None
) -> Option | None:
    try:
        found = _search(question, recipe, cluster, fixed, tokens_per_step)
    except RecipeError:  # the chips cannot be divided like that
        return None
    return next((option for option in found if option.fits), None)


def sizes_of(found: Plan, most: int = 8) -> list[Option]:
    """The best recipe's best option on smaller and larger clusters, up to four times the chips; none for states alone."""
    best, question = found.best, replace(found.question, sequence_length=found.best.sequence_length)
    if question.is_bounded:
        return sorted((o for o in found.options if o.fits and o.recipe == best.recipe), key=lambda o: o.num_chips)
    if best.step is None or not best.fits or len(question.clusters) != 1 or len(question.clusters[0].groups) != 1:
        return []
    free = {name: value for name, value in question.fixed.items() if name not in ("data", "shard")}
    sizes = [*parts_of(question.clusters[0]), *multiples_of(question.clusters[0])]
    options = []
    for cluster in sizes[-most:]:
        option = _fitting(question, best.recipe, cluster, free, best.tokens_per_step)
        options += [option] if option is not None else []
    return options
