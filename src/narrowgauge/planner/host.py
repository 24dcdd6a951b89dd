"""Parts on the host: the time to bring weights to the chip, to send gradients back, and to update
them there.

A part on the host comes to the chip for each forward and each backward pass, one layer after the
other. Computing hides a share of that, as it hides exchanges between shards. Gradients of what
trains go to the host after each micro-batch, and the processors of the node update the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.job import Job
from narrowgauge.planner.model_state import Bytes, on_stage, state_of
from narrowgauge.planner.program import Program
from narrowgauge.planner.terms import Term
from narrowgauge.spec.formats import bytes_per_number


class HostParts(NamedTuple):
    """Hold the bytes of a rank's parts on the host: weights, a frozen copy of the model, and
    gradients; and how many parameters train there.
    """

    weights: float = 0.0
    reference: float = 0.0
    gradients: float = 0.0
    trained: float = 0.0


@lru_cache(maxsize=256)
def _on_the_chip(program: Program) -> Program:
    """Return the program with all parts on the chip."""
    rows = tuple((name, row._replace(host=False)) for name, row in program.parts)
    return replace(program, parts=rows)


def host_parts(job: Job, layers: int, has_head: bool) -> HostParts:
    """Return what a rank of the slowest stage has on the host."""
    if not job.program.has_host:
        return HostParts()
    layout = job.layout
    stage = layout.pipeline // 2
    if has_head:
        stage = layout.pipeline - 1
    near = replace(job, program=_on_the_chip(job.program))
    weights = gradients = 0.0
    ranks = layout.sharing_experts(layout.num_sharing), layout.num_sharing
    states = zip(on_stage(near, layers, stage), on_stage(job, layers, stage), ranks, strict=True)
    for all_bytes, chip_bytes, sharing in states:
        weights += (all_bytes.weights - chip_bytes.weights) / sharing
        gradients += (all_bytes.gradients - chip_bytes.gradients) / sharing
    copy = job.program.reference
    reference = 0.0
    if copy and copy.host:
        share = layers / job.architecture.num_layers
        number = job.architecture.num_parameters / layout.tensor
        reference = copy.bytes * number * share / layout.num_sharing
    width = bytes_per_number(job.recipe.storage.visible)
    return HostParts(weights - reference, reference, gradients, gradients / width)


def host_terms(job: Job, parts: HostParts, compute: float) -> Iterator[Term]:
    """Yield the transfers of all micro-batches, and the update.

    ``compute`` is the seconds of a micro-batch, which hide a share of the transfers.
    """
    if not parts.weights + parts.reference:
        return
    shares = job.efficiency
    batches = job.layout.micro_batches
    rate = 1e9 * job.chip.host_gb_per_second * shares["host"]
    # The link carries both directions at once: weights in forward and backward, gradients back.
    moved = 2 * parts.weights + parts.reference
    seconds = moved / rate
    hidden = min(seconds * shares["overlap.shard"], compute)
    text = f"{batches} × {moved:.3g} B at {rate / 1e9:.3g} GB/s, {hidden:.3g} s of each hidden"
    name = "weights from the host"
    yield Term("communication", name, batches * (seconds - hidden), text, "bytes of the storage")
    if parts.trained:
        sent = batches * parts.gradients * (1 - shares["overlap.shard"]) / rate
        updates = shares["host_updates"] / min(job.num_chips, job.cluster.chips_per_node)
        updated = parts.trained / updates
        text = f"gradients sent in {sent:.3g} s, {parts.trained:.3g} parameters in {updated:.3g} s"
        name = "update on the host"
        yield Term("optimizer", name, sent + updated, text, "arXiv 2101.06840, table 4")


def in_use_bytes(job: Job) -> float:
    """Return the bytes of the largest layer, embedding or head that comes from the host."""
    if not job.program.has_host:
        return 0.0
    a = job.architecture
    layout = job.layout
    sizes = []
    for program in (_on_the_chip(job.program), job.program):
        ranks = layout.tensor, layout.expert_tensor_ranks
        state = state_of(a, job.recipe.storage, job.optimizer, *ranks, program)
        layers = state.layers + state.experts * (1 / layout.expert)
        sizes.append((layers, state.embedding, state.head, state.reference))
    largest = 0.0
    for near, here, count in zip(*sizes, (a.num_layers, 1, 1, a.num_layers), strict=True):
        largest = max(largest, _weights(near, here) / count)
    return largest


def _weights(near: Bytes, here: Bytes) -> float:
    return near.weights - here.weights
