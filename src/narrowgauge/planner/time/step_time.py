"""Step time: how long an optimizer step of a job takes, term by term.

One rank of the slowest stage is followed through its micro-batches: matmuls, casts, attention, element-wise work, the loss; then
what it exchanges beyond what computing hides, and the optimizer. A pipeline adds the time in which the stage waits for the others
to fill and to drain; many chips wait for the slowest of them; data, checkpoints and failures take their share. Every term is
evaluated three times, with all shares at the middle and towards both ends of their intervals.

Source: Narayanan et al., arXiv 2104.04473 (schedules, exchanges); Korthikanti et al., arXiv 2205.05198 (recomputation);
Young 1974 and Daly 2006 (the interval between checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.inputs.efficiency import rate_name, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.memory.activations import Attention
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.time.collectives import Exchange, Exchanges, parameters_of
from narrowgauge.planner.time.layer_times import (
    Known,
    Seconds,
    Steady,
    Work,
    attention_seconds,
    elementwise_seconds,
    linear_seconds,
    loss_seconds,
    mixture_seconds,
    optimizer_seconds,
)
from narrowgauge.planner.time.roofline import bytes_per_number

CHECKPOINT_SECONDS = 3600.0
"""Between checkpoints where no failures are expected: an assumption."""
UNSTEADY_GROUPS = ("data", "checkpoints", "faults")
"""Groups that published throughputs of short runs leave out."""
LATE_NODES, SLOWEST_KIND = "for late nodes", "for the slowest kind of chip"
"""Terms of what all chips wait for, in groups of nodes that are slower than others."""


SecondsCache = dict[int, Known]
"""What was computed already, by group of nodes."""


def step_terms(
    job: Job, *, attention: Attention = "flash", has_intervals: bool = True, known: SecondsCache | None = None
) -> Terms:
    """Seconds of an optimizer step of the whole job, in groups of ``STEP_GROUPS``.

    Args:
        attention: see :class:`~narrowgauge.planner.time.layer_times.Work`.
        has_intervals: whether terms have intervals, which takes three evaluations.
        known: see :func:`least_seconds`.
    Raises:
        ChipError: a chip does not multiply the recipe's dtype, or the layout has more ranks than the cluster chips.
        RecipeError: nothing but the number of parameters is known of the model, or the layout does not suit it.

    Example:
        >>> from narrowgauge.planner.inputs.clusters import cluster_of
        >>> from narrowgauge.planner.inputs.model_configs import read_architecture
        >>> from narrowgauge.spec.notation import parse
        >>> model, chips = read_architecture("llama-8b"), cluster_of("H100-SXM", 8)
        >>> terms = step_terms(Job(model, parse("bfloat16/word"), Layout(shard=8), chips, 8192))
        >>> 0.5 < terms.groups["matmuls"] / terms.total < 0.7
        True
    """
    check_layout(job)
    cluster, works = job.cluster, _works(job, attention, known)
    paces = [(work.nodes, work, tuple(_terms(work, cluster))) for work in works]
    slowest, work, found = max(paces, key=lambda pace: sum(term.value for term in pace[2]))
    if has_intervals:
        found = _with_intervals(found, work, cluster)
    if len({nodes.chip.name for nodes in cluster.groups}) > 1:
        found = (*found, _pace(slowest, [(nodes, terms) for nodes, _, terms in paces]))
    return Terms(found)


def least_seconds(job: Job, *, known: SecondsCache | None = None) -> float:
    """A lower bound of a step: the slowest stage computes and waits for the others; exchanges count only where they are known.

    ``known`` holds what was computed of other layouts and of recipes that are
    :func:`~narrowgauge.planner.time.layer_times.computed_as` this one, of the same model on the same cluster; what is computed
    here is added.
    """
    layout, found = job.layout, 0.0
    for work in _works(job, "flash", known):
        steady = work.known.steady.get((work.shares, layout))
        if steady is not None:
            computing = steady.total
        else:
            stage = _Stage(work)
            waited = stage.others / layout.interleave if layout.pipeline > 1 else 0.0
            computing = (layout.micro_batches * stage.seconds + waited) / work.shares["library"].value
        found = max(found, computing / work.nodes.speed * (1 + _lateness(work)) * (1 + work.shares["data"].value))
    return found


def _works(job: Job, attention: Attention, known: SecondsCache | None) -> list[Work]:
    """What a rank computes, of each group of nodes."""
    given = job.architecture, job.recipe, job.layout, job.sequence_length
    return [
        Work(
            *given,
            nodes,
            job.shares or shares_of(nodes.chip, nodes.software),
            attention,
            Known() if known is None else known.setdefault(number, Known()),
        )
        for number, nodes in enumerate(job.cluster.groups)
    ]


def check_layout(job: Job) -> None:
    """Refuse what cannot be computed: see :func:`step_terms`."""
    architecture, recipe, layout, cluster = job.architecture, job.recipe, job.layout, job.cluster
    if not architecture.has_shape:
        raise RecipeError(f"only the size of {architecture.name} is known.", "Name a model, or a config.json.")
    for nodes in cluster.groups:
        if rate_name(recipe.dtype) not in nodes.chip.peak_tflops:
            raise ChipError(
                f"{recipe.name} was requested on {nodes.chip.name}, which does not multiply {recipe.dtype}.",
                f"It multiplies {', '.join(nodes.chip.peak_tflops)}.",
            )
    if layout.num_ranks > cluster.num_chips:
        raise ChipError(
            f"a layout of {layout.num_ranks} ranks was requested on {cluster.num_chips} chips.",
            "Share less, or add chips.",
        )
    why = why_not(architecture, layout, job.sequence_length)
    if why:
        raise RecipeError(f"{architecture.name} cannot run in this layout: {why}.", "Choose a divisor.")


def why_not(architecture: Architecture, layout: Layout, sequence_length: int) -> str:
    """Why a layout does not suit a model; empty if it does."""
    stages = layout.pipeline * layout.interleave
    # Embedding and head may stand for a layer each: Llama 3 405B has 126 layers for 16 stages of 8 groups.
    if stages > architecture.num_layers + (2 if stages > 1 else 0) or layout.pipeline > architecture.num_layers:
        return f"{stages} groups of layers and {architecture.num_layers} layers"
    if architecture.num_heads % layout.tensor:
        return f"{layout.tensor} tensor ranks do not divide {architecture.num_heads} heads"
    if sequence_length % layout.context:
        return f"{layout.context} context ranks do not divide {sequence_length} tokens"
    num_experts = architecture.mixture.num_experts if architecture.mixture else 1
    if num_experts % layout.expert:
        return f"{layout.expert} expert ranks do not divide {num_experts} expert{'s' * (num_experts > 1)}"
    ranks = layout.num_replicas * layout.context
    if ranks * layout.tensor % (layout.expert * layout.expert_tensor_ranks):
        beside = f" and {layout.tensor} tensor ranks, {layout.expert_tensor_ranks} for each expert" * (
            layout.tensor > 1
        )
        return f"{layout.expert} expert ranks do not divide {ranks} data ranks{beside}"
    return ""


def stage_layers(num_layers: int, stages: int) -> tuple[int, bool]:
    """Layers of the slowest stage, and whether it is the last one, which has the head.

    Stages are equal where they can be; else the first and the last have one layer less, for embedding and head.

    Example:
        >>> stage_layers(32, 4), stage_layers(126, 16), stage_layers(61, 16)
        ((8, True), (8, False), (4, False))
    """
    if num_layers % stages == 0:
        return num_layers // stages, True
    return math.ceil((num_layers + 2) / stages) if num_layers > stages else 1, False


class _Stage:
    """The slowest stage: seconds of a micro-batch by group, and of the other stages together."""

    def __init__(self, work: Work) -> None:
        layers = work.architecture.num_layers
        self.layers, self.has_head = stage_layers(layers, work.layout.pipeline)
        body, tail = _body_and_tail(work)
        own_share, own_tail = self.layers / layers, float(self.has_head)
        self.groups = {group: seconds * own_share for group, seconds in body.items()}
        for group, seconds in tail.items():
            self.groups[group] = self.groups.get(group, 0.0) + seconds * own_tail
        self.seconds = sum(self.groups.values())
        self.others = max(sum(body.values()) + sum(tail.values()) - self.seconds, 0.0)


def _body_and_tail(work: Work) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a micro-batch in all layers, with what backward computes again, and in the head and the loss."""
    layout = work.layout
    tensor = layout.tensor, layout.stream_ranks, layout.expert_tensor_ranks
    divided = work.shares, tensor, layout.expert, work.tokens
    passes, micro_batches = work.known.passes, work.known.micro_batches
    if divided not in passes:  # every layout that divides a micro-batch alike takes the same
        passes[divided] = _passes(work, head=False), _passes(work, head=True)
    body, tail = passes[divided]
    is_once = any(seconds.once for seconds in (*body.values(), *tail.values()))
    key = divided, layout.recompute, layout.micro_batches if is_once and _stay_gathered(layout) else 0
    if key not in micro_batches:
        is_full = layout.recompute == "full"
        # Fused attention always computes its scores again; unfused only if asked to.
        scores_again = is_full or (layout.recompute == "selective" and work.attention == "eager")
        again = {group: scores_again if group == "attention" else is_full for group in body}
        micro_batches[key] = (
            {group: _both(seconds, work, again[group]) for group, seconds in body.items()},
            {group: _both(seconds, work, False) for group, seconds in tail.items()},
        )
    return micro_batches[key]


def _passes(work: Work, *, head: bool) -> dict[str, Seconds]:
    """Seconds of a micro-batch, forward and backward, in all layers or in the head and the loss."""
    matmuls, casts = linear_seconds(work, head=head)
    if head:
        return {"matmuls": matmuls, "casts": casts, "loss": loss_seconds(work)}
    attention, elementwise, routing = attention_seconds(work), elementwise_seconds(work), mixture_seconds(work)
    return {"matmuls": matmuls, "casts": casts, "attention": attention, "elementwise": elementwise, "waiting": routing}


def _both(seconds: Seconds, work: Work, is_repeated: bool) -> float:
    """Forward, backward, and the share of what is done once per step as long as weights stay gathered."""
    once = seconds.once / work.layout.micro_batches if _stay_gathered(work.layout) else seconds.once
    return seconds.forward * (1 + is_repeated) + seconds.backward + once


def _stay_gathered(layout: Layout) -> bool:
    return layout.zero < 3 or layout.shard == 1


def _terms(work: Work, cluster: Cluster) -> Iterator[Term]:
    known, key = work.known.steady, (work.shares, work.layout)
    if key not in known:
        stage = _Stage(work)
        terms = tuple(_steady_terms(work, cluster, stage))
        known[key] = Steady(terms, sum(term.value for term in terms), stage.layers)
    steady = known[key]
    yield from steady.terms
    total = steady.total
    for term in _optimizer_terms(work, steady.layers):
        yield term
        total += term.value
    yield from _waiting_terms(work, cluster, steady.layers, total)


def _steady_terms(work: Work, cluster: Cluster, stage: _Stage) -> Iterator[Term]:
    layout, chip = work.layout, work.nodes.chip
    batches, where = layout.micro_batches, f"{stage.layers} layers on {chip.name}"
    for group, seconds in stage.groups.items():
        if seconds:
            yield Term(
                group, _NAMES[group], batches * seconds, f"{batches} × {seconds:.3g} s, {where}", _SOURCES[group]
            )
    library = work.shares["library"]
    gaps = batches * stage.seconds * (1 / library.value - 1)
    formula = f"{batches} × {stage.seconds:.3g} s × (1 / {library.value:.3g} - 1)"
    yield Term("waiting", "between kernels", gaps, formula, library.source)
    for exchange in Exchanges(work, cluster, stage.layers, stage.seconds, stage.groups["attention"]):
        yield _exchange_term(exchange)
    if layout.pipeline > 1:
        bubble = stage.others / layout.interleave / library.value
        formula = f"{layout.pipeline - 1} other stages, {stage.others:.3g} s a micro-batch, / {layout.interleave}"
        yield Term("bubble", "filling and draining the pipeline", bubble, formula, "arXiv 2104.04473")


_NAMES = {
    "matmuls": "linear layers and head",
    "casts": "casts to narrow formats",
    "attention": "attention",
    "elementwise": "norms, residuals, gates",
    "loss": "softmax and cross entropy",
    "waiting": "routers, sorting and launches of mixtures",
}
_SOURCES = {
    "matmuls": "roofline, measured share of the peak",
    "casts": "roofline, measured share of the bandwidth",
    "attention": "arXiv 2307.08691, 2407.08608",
    "elementwise": "bytes moved by fused kernels",
    "loss": "bytes moved by fused kernels",
    "waiting": "Megatron-Bridge's mixtures (planner/inputs/efficiency.py)",
}


def _exchange_term(exchange: Exchange) -> Term:
    beside = f"{exchange.hidden:.3g} hidden, computing {exchange.slowed:.3g} longer meanwhile"
    formula = f"{exchange.formula}: {exchange.seconds:.3g} s, {beside}"
    return Term("communication", exchange.name, exchange.exposed, formula, "ring, tree or hierarchy; arXiv 2104.04473")


def _optimizer_terms(work: Work, layers: int) -> Iterator[Term]:
    layout, storage = work.layout, work.recipe
    owned = parameters_of(work, layers)
    number = owned.on_rank(layout) * work.architecture.trained_share
    if layout.offload == "none":
        seconds = optimizer_seconds(work, number)
        formula = f"{number:.3g} parameters × {storage.bytes_per_param:g} B read and written"
        yield Term("optimizer", "states read and written", seconds, formula, "bytes of the storage")
        return
    host = work.nodes.host_bytes_per_second * work.shares["host"].value
    there = number * storage.bytes_per_param * work.shares["host_memory_seconds_per_byte"].value
    yield Term("optimizer", "states in the host's memory", there, f"{number:.3g} parameters on the host", "CPU Adam")
    width = bytes_per_number(work.recipe.storage.visible)
    # Gradients go there and weights come back; offloading all, as in FSDP2: shards of weights twice for each micro-batch.
    moved = 2 * width * number
    if layout.offload == "all":
        moved = layout.micro_batches * width * (2 * owned.on_rank(layout, 3) + owned.on_rank(layout, 2))
    formula = f"{moved / 1e9:.3g} GB at {host / 1e9:.3g} GB/s"
    yield Term("communication", "weights and gradients from and to the host", moved / host, formula, "PCIe")


def _lateness(work: Work) -> float:
    """The expected excess of the slowest of all chips over their mean, as a share."""
    return work.shares["spread"].value * math.sqrt(2 * math.log(work.layout.num_ranks))


def _waiting_terms(work: Work, cluster: Cluster, layers: int, seconds: float) -> Iterator[Term]:
    """What a step waits for, in proportion to the seconds it takes."""
    chips = work.layout.num_ranks
    if (speed := work.nodes.speed) < 1:
        lost = seconds * (1 / speed - 1)
        formula = f"{seconds:.3g} s × (1 / {speed:g} − 1): all chips wait for {work.nodes.num_chips} of them"
        yield Term("waiting", LATE_NODES, lost, formula, "every step ends with the slowest")
        seconds += lost
    if chips > 1:
        late = _lateness(work)
        formula = f"{seconds:.3g} s × {work.shares['spread'].value:.3g} × √(2 ln {chips})"
        yield Term("waiting", "for the slowest chip", seconds * late, formula, work.shares["spread"].source)
        seconds *= 1 + late
    share = work.shares["data"].value
    yield Term("data", "batches and the host", seconds * share, f"{share:.1%} of the step", work.shares["data"].source)
    owned = parameters_of(work, layers).on_rank(work.layout) * work.architecture.trained_share
    saved = owned * work.recipe.bytes_per_param / (work.nodes.host_bytes_per_second * work.shares["host"].value)
    mtbf = None if cluster.chip_mtbf_hours is None else cluster.chip_mtbf_hours * 3600 / chips
    interval = CHECKPOINT_SECONDS if mtbf is None else math.sqrt(2 * saved * mtbf)
    formula = f"{saved:.3g} s to the host's memory every {interval:,.0f} s"
    yield Term("checkpoints", "copying states", seconds * saved / interval, formula, "Young 1974, Daly 2006")
    if mtbf is not None:
        lost = interval / 2 + work.shares["restart_seconds"].value
        formula = f"a failure every {mtbf / 3600:,.3g} h costs {lost:,.0f} s"
        yield Term("faults", "work lost and restarts", seconds * lost / mtbf, formula, "Young 1974, Daly 2006")


def _with_intervals(found: tuple[Term, ...], work: Work, cluster: Cluster) -> tuple[Term, ...]:
    """The terms with what they are at both ends of all shares; a term that vanishes at one end is 0 there."""
    ends = []
    for shares in (work.shares.best, work.shares.worst):
        ends.append({(t.group, t.name): t.value for t in _terms(replace(work, shares=shares), cluster)})
    result = []
    for term in found:
        values = [term.value, *(end.get((term.group, term.name), 0.0) for end in ends)]
        result.append(replace(term, low=min(values), high=max(values)))
    return tuple(result)


def _pace(slowest: Nodes, paces: list[tuple[Nodes, tuple[Term, ...]]]) -> Term:
    """A term of zero seconds that names the chips for which the others wait."""
    alone = {nodes.chip.name: sum(term.value for term in terms) for nodes, terms in paces}
    others = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in alone.items() if name != slowest.chip.name)
    formula = f"{slowest.chip.name} sets the pace; alone: {others}"
    return Term("waiting", SLOWEST_KIND, 0.0, formula, "every step ends with the slowest")
