"""Step time: how long an optimizer step of a job takes, term by term.

One rank of the slowest stage is followed through its micro-batches: matmuls, casts, attention, element-wise work, the loss; then
what it exchanges beyond what computing hides, and the optimizer. A pipeline adds the time in which the stage waits for the others
to fill and to drain; many chips wait for the slowest of them; checkpoints and failures take their share.

Source: Narayanan et al., arXiv 2104.04473 (schedules, exchanges); Korthikanti et al., arXiv 2205.05198 (recomputation);
Young 1974 and Daly 2006 (the interval between checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.activations import Attention
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.collectives import Exchanges, parameters_of
from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.layer_times import (
    Seconds,
    Work,
    attention_seconds,
    elementwise_seconds,
    linear_seconds,
    loss_seconds,
    mixture_seconds,
    optimizer_seconds,
)
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.roofline import bytes_per_number
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.recipes import Recipe

CHECKPOINT_SECONDS = 3600.0
"""Between checkpoints where no failures are expected: an assumption."""
UNSTEADY_GROUPS = ("checkpoints", "faults")
"""Groups that published throughputs of short runs leave out."""
LATE_NODES, SLOWEST_KIND = "for late nodes", "for the slowest kind of chip"
"""Terms of what all chips wait for, in groups of nodes that are slower than others."""
_GROUPS = {
    "matmuls": ("linear layers and head", "roofline, measured share of the peak"),
    "casts": ("casts to narrow formats", "roofline, measured share of the bandwidth"),
    "attention": ("attention", "arXiv 2307.08691, 2407.08608"),
    "elementwise": ("norms, residuals, gates", "bytes moved by fused kernels"),
    "loss": ("softmax and cross entropy", "bytes moved by fused kernels"),
    "waiting": ("routers, sorting and launches of mixtures", "Megatron-Bridge's mixtures"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A training job, as far as its time depends on it.

    The layout has as many ranks as the cluster has chips; of several groups of nodes the slowest sets the pace. ``shares`` are of
    the chips' printed rates, None for the published ones.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    shares: Efficiency | None = None

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length


def step_terms(job: Job, *, attention: Attention = "flash") -> Terms:
    """Return the seconds of an optimizer step of the whole job, in groups of ``STEP_GROUPS``.

    Raises:
        ChipError: a chip does not multiply the recipe's dtype, or the layout has more ranks than the cluster chips.
        RecipeError: nothing but the number of parameters is known of the model, or the layout does not suit it.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.model import read_model
        >>> from narrowgauge.spec.notation import parse
        >>> model, chips = read_model("llama-8b"), cluster_of("H100-SXM", 8)
        >>> terms = step_terms(Job(model, parse("bfloat16/word"), Layout(shard=8), chips, 8192))
        >>> 0.5 < terms.groups["matmuls"] / terms.total < 0.7
        True
    """
    check_layout(job)
    paces = []
    for nodes in job.cluster.groups:
        shares = job.shares or efficiency_of(nodes.chip, nodes.software)
        work = Work(job.architecture, job.recipe, job.layout, job.sequence_length, nodes, shares, attention)
        paces.append((nodes, Terms(tuple(_terms(work, job.cluster)))))
    slowest, terms = max(paces, key=lambda pace: pace[1].total)
    if len({nodes.chip.name for nodes, _ in paces}) == 1:
        return terms
    alone = {nodes.chip.name: pace.total for nodes, pace in paces if nodes.chip.name != slowest.chip.name}
    others = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in alone.items())
    formula = f"{slowest.chip.name} sets the pace; alone: {others}"
    return Terms((*terms, Term("waiting", SLOWEST_KIND, 0.0, formula, "every step ends with the slowest")))


def check_layout(job: Job) -> None:
    """Refuse what cannot be computed: see :func:`step_terms`."""
    architecture, recipe, layout, cluster = job.architecture, job.recipe, job.layout, job.cluster
    if not architecture.has_shape:
        raise RecipeError(f"only the size of {architecture.name} is known.", "Name a model, or a config.json.")
    for nodes in cluster.groups:
        if nodes.chip.rate_format(recipe.dtype) not in nodes.chip.peak_tflops:
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
    """Say why a layout does not suit a model; empty if it does."""
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
    """Return the layers of the slowest stage, and whether it is the last one, which has the head.

    Stages are equal where they can be; else the first and the last have one layer less, for embedding and head.

    Example:
        >>> stage_layers(32, 4), stage_layers(126, 16), stage_layers(61, 16)
        ((8, True), (8, False), (4, False))
    """
    if num_layers % stages == 0:
        return num_layers // stages, True
    return math.ceil((num_layers + 2) / stages) if num_layers > stages else 1, False


@dataclass(frozen=True, slots=True)
class _Stage:
    """The slowest stage: seconds of a micro-batch by group, and of the other stages together."""

    layers: int
    groups: dict[str, float]
    others: float


def _stage_of(work: Work) -> _Stage:
    layout, num_layers = work.layout, work.architecture.num_layers
    layers, has_head = stage_layers(num_layers, layout.pipeline)
    is_full = layout.recompute == "full"
    # Fused attention always computes its scores again; unfused only if asked to.
    scores_again = is_full or (layout.recompute == "selective" and work.attention == "eager")
    # Casts of weights are made once a step as long as weights stay gathered.
    stays = layout.zero < 3 or layout.num_sharing == 1

    def total(seconds: Seconds, is_repeated: bool) -> float:
        once = seconds.once / layout.micro_batches if stays else seconds.once
        return seconds.forward * (1 + is_repeated) + seconds.backward + once

    matmuls, casts = linear_seconds(work, head=False)
    body = {
        "matmuls": total(matmuls, is_full),
        "casts": total(casts, is_full),
        "attention": total(attention_seconds(work), scores_again),
        "elementwise": total(elementwise_seconds(work), is_full),
        "waiting": total(mixture_seconds(work), is_full),
    }
    matmuls, casts = linear_seconds(work, head=True)
    tail = {"matmuls": total(matmuls, False), "casts": total(casts, False), "loss": total(loss_seconds(work), False)}
    groups = {group: seconds * layers / num_layers for group, seconds in body.items()}
    for group, seconds in tail.items():
        groups[group] = groups.get(group, 0.0) + seconds * has_head
    others = sum(body.values()) + sum(tail.values()) - sum(groups.values())
    return _Stage(layers, groups, max(others, 0.0))


def _terms(work: Work, cluster: Cluster) -> Iterator[Term]:
    stage = _stage_of(work)
    terms = [*_steady_terms(work, cluster, stage), *_optimizer_terms(work, stage.layers)]
    yield from terms
    yield from _waiting_terms(work, cluster, stage.layers, sum(term.value for term in terms))


def _steady_terms(work: Work, cluster: Cluster, stage: _Stage) -> Iterator[Term]:
    layout, library, busy = work.layout, work.shares["library"], sum(stage.groups.values())
    batches, where = layout.micro_batches, f"{stage.layers} layers on {work.nodes.chip.name}"
    for group, seconds in stage.groups.items():
        if seconds:
            name, source = _GROUPS[group]
            yield Term(group, name, batches * seconds, f"{batches} × {seconds:.3g} s, {where}", source)
    formula = f"{batches} × {busy:.3g} s × (1 / {library:.3g} - 1)"
    source = f"{work.shares.engines}: what it reaches of its kernels' sum"
    yield Term("waiting", "between kernels", batches * busy * (1 / library - 1), formula, source)
    yield from Exchanges(work, cluster, stage.layers, busy, stage.groups["attention"])
    if layout.pipeline > 1:
        bubble = stage.others / layout.interleave / library
        formula = f"{layout.pipeline - 1} other stages, {stage.others:.3g} s a micro-batch, / {layout.interleave}"
        yield Term("bubble", "filling and draining the pipeline", bubble, formula, "arXiv 2104.04473")


def _optimizer_terms(work: Work, layers: int) -> Iterator[Term]:
    layout, recipe, shares = work.layout, work.recipe, work.shares
    owned = parameters_of(work, layers)
    number = owned.on_rank(layout) * work.architecture.trained_share
    if layout.offload == "none":
        formula = f"{number:.3g} parameters × {recipe.bytes_per_param:g} B read and written"
        seconds = optimizer_seconds(work, number)
        yield Term("optimizer", "states read and written", seconds, formula, "bytes of the storage")
        return
    host = work.nodes.host_bytes_per_second * shares["host"]
    there = number * recipe.bytes_per_param * shares["host_memory_seconds_per_byte"]
    yield Term("optimizer", "states in the host's memory", there, f"{number:.3g} parameters on the host", "CPU Adam")
    width = bytes_per_number(recipe.storage.visible)
    # Gradients go there and weights come back; offloading all, as in FSDP2: shards of weights twice for each micro-batch.
    moved = 2 * width * number
    if layout.offload == "all":
        moved = layout.micro_batches * width * (2 * owned.on_rank(layout, 3) + owned.on_rank(layout, 2))
    formula = f"{moved / 1e9:.3g} GB at {host / 1e9:.3g} GB/s"
    yield Term("communication", "weights and gradients from and to the host", moved / host, formula, "PCIe")


def _waiting_terms(work: Work, cluster: Cluster, layers: int, seconds: float) -> Iterator[Term]:
    """Yield what a step waits for, in proportion to the seconds it takes."""
    chips, shares = work.layout.num_ranks, work.shares
    if (speed := work.nodes.speed) < 1:
        lost = seconds * (1 / speed - 1)
        formula = f"{seconds:.3g} s × (1 / {speed:g} − 1): all chips wait for {work.nodes.num_chips} of them"
        yield Term("waiting", LATE_NODES, lost, formula, "every step ends with the slowest")
        seconds += lost
    if chips > 1:
        # The expected excess of the slowest of all chips over their mean.
        late = shares["spread"] * math.sqrt(2 * math.log(chips))
        formula = f"{seconds:.3g} s × {shares['spread']:.3g} × √(2 ln {chips})"
        source = "an assumption; Sinha et al., SC 2022"
        yield Term("waiting", "for the slowest chip", seconds * late, formula, source)
        seconds *= 1 + late
    owned = parameters_of(work, layers).on_rank(work.layout) * work.architecture.trained_share
    saved = owned * work.recipe.bytes_per_param / (work.nodes.host_bytes_per_second * shares["host"])
    mtbf = None if cluster.chip_mtbf_hours is None else cluster.chip_mtbf_hours * 3600 / chips
    interval = CHECKPOINT_SECONDS if mtbf is None else math.sqrt(2 * saved * mtbf)
    formula, source = f"{saved:.3g} s to the host's memory every {interval:,.0f} s", "Young 1974, Daly 2006"
    yield Term("checkpoints", "copying states", seconds * saved / interval, formula, source)
    if mtbf is not None:
        lost = interval / 2 + shares["restart_seconds"]
        formula = f"a failure every {mtbf / 3600:,.3g} h costs {lost:,.0f} s"
        yield Term("faults", "work lost and restarts", seconds * lost / mtbf, formula, source)
