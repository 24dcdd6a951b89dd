"""Step time: the duration of an optimizer step, term by term.

We follow one rank of the slowest stage through its micro-batches: matmuls, casts, attention, element-wise work, the loss. Then
come exchanges that computing does not hide, and the optimizer. A pipeline adds the bubble: the stage waits while the others
fill and drain. Many chips wait for the slowest of them. Checkpoints and failures add time.

Source: Narayanan et al., arXiv 2104.04473 (schedules, exchanges); Korthikanti et al., arXiv 2205.05198 (recomputation);
Young 1974 and Daly 2006 (the interval between checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from narrowgauge.planner.collectives import layer_exchanges, parameters_of, state_exchanges
from narrowgauge.planner.jobs import Job, check_job
from narrowgauge.planner.layer_times import (
    Seconds,
    attention_seconds,
    elementwise_seconds,
    linear_seconds,
    loss_seconds,
    mixture_seconds,
    optimizer_seconds,
)
from narrowgauge.planner.roofline import bytes_per_number
from narrowgauge.planner.terms import Formula, Term, Terms

CHECKPOINT_SECONDS = 3600.0
"""Seconds between checkpoints if no failures are expected: an assumption."""
UNSTEADY_GROUPS = ("checkpoints", "faults")
"""Groups that published throughputs of short runs omit."""
LATE_NODES, SLOWEST_KIND = "for late nodes", "for the slowest kind of chip"
"""Terms of stragglers that all chips wait for: slower nodes, and slower kinds of chips."""
_GROUPS = {
    "matmuls": ("linear layers and head", "roofline, measured share of the peak"),
    "casts": ("casts to narrow formats", "roofline, measured share of the bandwidth"),
    "attention": ("attention", "arXiv 2307.08691, 2407.08608"),
    "elementwise": ("norms, residuals, gates", "bytes moved by fused kernels"),
    "loss": ("softmax and cross entropy", "bytes moved by fused kernels"),
    "waiting": ("routers, sorting and launches of mixtures", "Megatron-Bridge's mixtures"),
}


def step_terms(job: Job) -> Terms:
    """Return the seconds of an optimizer step of the whole job, in groups of ``STEP_GROUPS``.

    The slowest group of nodes sets the pace. Raise for jobs that cannot run: see :func:`check_job`.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.layouts import Layout
        >>> from narrowgauge.planner.model import read_model
        >>> from narrowgauge.spec.notation import parse
        >>> model, chips = read_model("llama-8b"), cluster_of("H100-SXM", 8)
        >>> terms = step_terms(Job(model, parse("bfloat16/word"), Layout(shard=8), chips, 8192))
        >>> 0.5 < terms.groups["matmuls"] / terms.total < 0.7
        True
    """
    check_job(job)
    groups = job.cluster.groups
    if len(groups) == 1:
        return Terms(tuple(_terms(job)))
    paces = [(nodes.chip.name, Terms(tuple(_terms(replace(job, group=n))))) for n, nodes in enumerate(groups)]
    slowest, terms = max(paces, key=lambda pace: pace[1].total)
    alone = {name: pace.total for name, pace in paces if name != slowest}
    if not alone:
        return terms
    paces_text = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in alone.items())
    formula = f"{slowest} sets the pace; alone: {paces_text}"
    return Terms((*terms, Term("waiting", SLOWEST_KIND, 0.0, formula, "every step ends with the slowest")))


def stage_layers(num_layers: int, stages: int) -> tuple[int, bool]:
    """Return the layers of the slowest stage, and whether it is the last stage, which has the head.

    Stages are equal if possible. Else the first and the last have one layer less, for embedding and head.

    Example:
        >>> stage_layers(32, 4), stage_layers(126, 16), stage_layers(61, 16)
        ((8, True), (8, False), (4, False))
    """
    if num_layers % stages == 0:
        return num_layers // stages, True
    return math.ceil((num_layers + 2) / stages) if num_layers > stages else 1, False


def _terms(job: Job) -> Iterator[Term]:
    """Yield the terms of a rank of the slowest stage."""
    layers, has_head = stage_layers(job.architecture.num_layers, job.layout.pipeline)
    terms = [*_stage_terms(job, layers, has_head), *_optimizer_terms(job, layers)]
    yield from terms
    yield from _waiting_terms(job, layers, sum(term.value for term in terms))


def _micro_batch_seconds(job: Job) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a micro-batch by group: for all layers, and for head and loss."""
    layout = job.layout
    is_full = layout.recompute == "full"
    # Fused attention always recomputes its scores, unfused attention only on request.
    scores_again = is_full or (layout.recompute == "selective" and job.attention == "eager")
    # Weights are cast once a step while they stay gathered.
    once_share = 1 / layout.micro_batches if layout.zero < 3 or layout.num_sharing == 1 else 1.0

    def total(seconds: Seconds, is_repeated: bool = False) -> float:
        return seconds.forward * (1 + is_repeated) + seconds.backward + seconds.once * once_share

    matmuls, casts = linear_seconds(job, is_head=False)
    head, head_casts = linear_seconds(job, is_head=True)
    body = {
        "matmuls": total(matmuls, is_full),
        "casts": total(casts, is_full),
        "attention": total(attention_seconds(job), scores_again),
        "elementwise": total(elementwise_seconds(job), is_full),
        "waiting": total(mixture_seconds(job), is_full),
    }
    return body, {"matmuls": total(head), "casts": total(head_casts), "loss": total(loss_seconds(job))}


def _stage_terms(job: Job, layers: int, has_head: bool) -> Iterator[Term]:
    """Yield a stage's computing and exchanges for all micro-batches, and its wait for other stages."""
    layout, library, batches = job.layout, job.efficiency["library"], job.layout.micro_batches
    body, tail = _micro_batch_seconds(job)
    groups = {group: seconds * layers / job.architecture.num_layers for group, seconds in body.items()}
    for group, seconds in tail.items():
        groups[group] = groups.get(group, 0.0) + seconds * has_head
    busy = sum(groups.values())
    for group, seconds in groups.items():
        if seconds:
            name, source = _GROUPS[group]
            formula: Formula = ("{} × {:.3g} s, {} layers on {}", batches, seconds, layers, job.nodes.chip.name)
            yield Term(group, name, batches * seconds, formula, source)
    formula = "{} × {:.3g} s × (1 / {:.3g} - 1)", batches, busy, library
    source = f"{job.efficiency.engines}: what it reaches of its kernels' sum"
    yield Term("waiting", "between kernels", batches * busy * (1 / library - 1), formula, source)
    yield from layer_exchanges(job, layers, busy, groups["attention"])
    yield from state_exchanges(job, layers, busy)
    if layout.pipeline > 1:
        waiting = max(sum(body.values()) + sum(tail.values()) - busy, 0.0)
        formula = "{} other stages, {:.3g} s a micro-batch, / {}", layout.pipeline - 1, waiting, layout.interleave
        bubble = waiting / layout.interleave / library
        yield Term("bubble", "filling and draining the pipeline", bubble, formula, "arXiv 2104.04473")


def _optimizer_terms(job: Job, layers: int) -> Iterator[Term]:
    layout, recipe, shares = job.layout, job.recipe, job.efficiency
    owned = parameters_of(job, layers)
    number = owned.on_rank(layout) * job.architecture.trained_share
    if layout.offload == "none":
        formula: Formula = ("{:.3g} parameters × {:g} B read and written", number, recipe.bytes_per_param)
        seconds = optimizer_seconds(job, number)
        yield Term("optimizer", "states read and written", seconds, formula, "bytes of the storage")
        return
    host = job.nodes.host_bytes_per_second * shares["host"]
    there = number * recipe.bytes_per_param * shares["host_memory_seconds_per_byte"]
    formula = "{:.3g} parameters on the host", number
    yield Term("optimizer", "states in the host's memory", there, formula, "CPU Adam")
    width = bytes_per_number(recipe.storage.visible)
    # Gradients go there and weights come back. FSDP2 offloads all: shards of weights twice for each micro-batch.
    moved = 2 * width * number
    if layout.offload == "all":
        moved = layout.micro_batches * width * (2 * owned.on_rank(layout, 3) + owned.on_rank(layout, 2))
    formula = "{:.3g} GB at {:.3g} GB/s", moved / 1e9, host / 1e9
    yield Term("communication", "weights and gradients from and to the host", moved / host, formula, "PCIe")


def _waiting_terms(job: Job, layers: int, seconds: float) -> Iterator[Term]:
    """Yield waiting times, in proportion to the seconds of a step."""
    chips, shares = job.layout.num_ranks, job.efficiency
    if (speed := job.nodes.speed) < 1:
        lost = seconds * (1 / speed - 1)
        text = "{:.3g} s × (1 / {:g} − 1): all chips wait for {} of them"
        formula: Formula = (text, seconds, speed, job.nodes.num_chips)
        yield Term("waiting", LATE_NODES, lost, formula, "every step ends with the slowest")
        seconds += lost
    if chips > 1:
        # The expected excess of the slowest chip over the mean.
        late = shares["spread"] * math.sqrt(2 * math.log(chips))
        formula = "{:.3g} s × {:.3g} × √(2 ln {})", seconds, shares["spread"], chips
        source = "an assumption; Sinha et al., SC 2022"
        yield Term("waiting", "for the slowest chip", seconds * late, formula, source)
        seconds *= 1 + late
    owned = parameters_of(job, layers).on_rank(job.layout) * job.architecture.trained_share
    saved = owned * job.recipe.bytes_per_param / (job.nodes.host_bytes_per_second * shares["host"])
    mtbf = None if job.cluster.chip_mtbf_hours is None else job.cluster.chip_mtbf_hours * 3600 / chips
    interval = CHECKPOINT_SECONDS if mtbf is None else math.sqrt(2 * saved * mtbf)
    formula, source = ("{:.3g} s to the host's memory every {:,.0f} s", saved, interval), "Young 1974, Daly 2006"
    yield Term("checkpoints", "copying states", seconds * saved / interval, formula, source)
    if mtbf is not None:
        lost = interval / 2 + shares["restart_seconds"]
        formula = "a failure every {:,.3g} h costs {:,.0f} s", mtbf / 3600, lost
        yield Term("faults", "work lost and restarts", seconds * lost / mtbf, formula, source)
