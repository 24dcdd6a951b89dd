"""Layer times: the computing time of one micro-batch on one rank, for all layers and for the head.

Matmuls and casts follow the roofline. Attention runs its operations at a fused kernel's rate. The
rest (norms, residuals, rotary positions, the gate, the loss) moves bytes. Tensor parallelism
divides the matrices. With sequence parallelism it also divides the bytes of norms and residuals.
Context parallelism divides the tokens. Experts get their chosen tokens, from all ranks that share
the experts. The experts of a rank are one grouped kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.activations import widths_of
from narrowgauge.planner.efficiency import Efficiency
from narrowgauge.planner.job import Job
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.program import Program, adapters_of
from narrowgauge.planner.roofline import bytes_per_number, bytes_seconds, operation_seconds
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES, SLOTS, first_of_input
from narrowgauge.spec.recipes import Recipe

ATTENTION_PASSES = 3.5
"""Operations of a fused attention over its forward: forward 1, backward 2.5, since it recomputes
the scores.
"""
LOGIT_BYTES = {"whole": 38, "compiled": 12, "chunked": 38}
"""Bytes per logit that a loss moves.

Compiled: bfloat16 logits are written and read, their gradient is in float32 and bfloat16. Eager:
also float32 logits, log-softmax and its gradient, each written and read.
"""
EAGER_FACTOR = 2.2
"""Bytes of eager elementwise operations over those of compiled layers: torchtitan's 8B on 8 and 128
H100, eager and compiled.
"""
# Bytes per score of unfused attention in 16 bits. A matmul writes it, softmax and dropout (with its
# mask) read and write it, a matmul reads it. The second number is for backward, with both
# gradients.
_SCORE_BYTES = (13, 19)
# Tensors of the residual stream that a layer moves, forward and backward: two norms (5 each),
# residuals (4), rotary (8).
_STREAMS = 14
_ROTARY_STREAMS = 8
_GATED, _UNGATED = 8, 5  # tensors of the MLP's inner size: with a gate, with GELU
_DISPATCHED = (
    8  # stream tensors per visited expert of a token: sort and restore, in both directions
)

_PLACES = {
    "attention": "model.layers.0.self_attn.",
    "mlp": "model.layers.0.mlp.",
    "experts": "model.layers.0.mlp.",
    "head": "",
}


class Seconds(NamedTuple):
    """Hold the seconds of one micro-batch on one rank: forward, backward, and work once per step
    while weights stay.
    """

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0


# Layouts of a search share most results.
@lru_cache(maxsize=4096)
def linear_seconds(
    architecture: Architecture,
    recipe: Recipe,
    ranks: tuple[int, int, int],
    tokens_on_rank: float,
    chip: Chip,
    shares: Efficiency,
    program: Program,
    *,
    is_head: bool,
) -> tuple[Seconds, Seconds]:
    """Return the seconds of matmuls and of the casts before them, in the head or in all layers.

    ``ranks`` are the tensor ranks, the expert ranks, and the tensor ranks of an expert. Casts of
    weights are under ``once``. Frozen weights have no gradients. Narrow bases are dequantized in
    each pass. Adapters multiply in bfloat16.
    """
    matmuls, casts = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]  # forward, backward and once
    mixture = architecture.mixture
    start = shares["kernel_seconds"]
    for matmul in (*architecture.matmuls, *adapters_of(architecture, program)):
        if (matmul.part == "head") != is_head:
            continue
        is_adapter = "lora" in matmul.name
        layer = _PLACES[matmul.part] + matmul.name
        compute = recipe.compute_of(layer)
        is_first = first_of_input(layer) == layer
        if is_adapter:
            compute = COMPUTES[recipe.dtype]
            base = layer.removesuffix(".lora_A")
            if program.kernels == "fused" and first_of_input(base) != base:
                continue  # one matrix for all that read this input
        part = program.part_of(matmul)
        is_frozen = not part.trains and not is_adapter
        experts, tensor = ranks[1:] if matmul.is_expert else (1, ranks[0])
        out = round(matmul.out_features / (tensor if matmul.split == "column" else 1))
        inputs = round(matmul.in_features / (tensor if matmul.split == "row" else 1))
        tokens = tokens_on_rank * matmul.tokens_share * experts * tensor / ranks[0]
        count = matmul.count / experts
        # A grouped kernel starts once for all experts of a layer.
        kernels = mixture.num_layers if matmul.is_expert and mixture else count
        for name, seconds in operation_seconds(
            out, inputs, compute, recipe, tokens, chip, shares
        ).items():
            place, _, side = name.partition(".")
            if side and SLOTS[name].tensor == "input" and not is_first:
                continue  # cast for another layer already
            if is_frozen and place == "grad_weight":
                continue
            when = 2 if side and SLOTS[name].tensor == "weight" else int(place != "output")
            reached = shares["experts"] if matmul.is_expert and not side else 1.0
            (casts if side else matmuls)[when] += (
                seconds - start
            ) / reached * count + start * kernels
        if is_frozen and part.is_narrow:
            read = (
                bytes_seconds(out * inputs * (part.bytes + 2), chip, shares) * count
                + start * kernels
            )
            casts = [casts[0] + read, casts[1] + read, casts[2]]
    return Seconds(*matmuls), Seconds(*casts)


def attention_seconds(job: Job) -> Seconds:
    """Return the seconds of scores, softmax and values in all layers.

    Flash kernels skip masked scores.
    """
    shape = job.architecture
    chip = job.chip
    shares = job.efficiency
    is_flash = job.program.attention == "flash"
    flops = (
        job.tokens
        * shape.attention_flops(job.sequence_length, is_causal=is_flash)
        / 3
        / job.layout.tensor
    )
    peak = chip.peak_tflops[job.recipe.dtype] * 1e12
    start = shares["kernel_seconds"] * shape.num_layers
    if is_flash:
        forward = flops / (peak * shares["attention"])
        return Seconds(forward + start, (ATTENTION_PASSES - 1) * forward + start)
    forward = flops / (peak * shares[f"matmul.{job.recipe.dtype}"])
    scores = (
        job.tokens * job.sequence_length * shape.num_heads / job.layout.tensor * shape.num_layers
    )
    read, written = (job.moved(scores * width) for width in _SCORE_BYTES)
    return Seconds(forward + read + 4 * start, 2 * forward + written + 8 * start)


def mixture_seconds(job: Job) -> Seconds:
    """Return the waiting time of mixtures in addition to matmuls: routers, sorting, and host
    launches.
    """
    mixture = job.architecture.mixture
    shares = job.efficiency
    if mixture is None:
        return Seconds()
    launches = shares["expert_seconds"] * mixture.num_experts / job.layout.expert
    return _by_thirds((shares["mixture_seconds"] + launches) * mixture.num_layers)


def elementwise_seconds(job: Job) -> Seconds:
    """Return the seconds of norms, residuals, rotary positions, gates, and expert sorting in all
    layers.
    """
    a = job.architecture
    gates = _GATED if a.is_gated else _UNGATED
    stream = a.num_layers * (_STREAMS + (0 if a.positions else _ROTARY_STREAMS)) * a.hidden_size
    inner = float(a.num_dense_layers * gates * a.intermediate_size)
    if a.mixture:
        visited = a.mixture.experts_per_token
        stream += a.mixture.num_layers * _DISPATCHED * visited * a.hidden_size
        inner += (
            a.mixture.num_layers * gates * (visited * a.mixture.expert_size + a.mixture.shared_size)
        )
    widths = widths_of(job.recipe, job.gathered, job.program)
    moved = stream * widths.stream / job.layout.stream_ranks
    moved += inner * widths.matmul / job.layout.tensor
    moved *= EAGER_FACTOR if job.program.kernels == "eager" else 1
    return _by_thirds(job.moved(job.tokens * moved / job.efficiency["elementwise"]))


def loss_seconds(job: Job) -> Seconds:
    width = LOGIT_BYTES[job.program.loss]
    return _by_thirds(
        job.moved(job.tokens * job.architecture.vocab_size * width / job.layout.tensor)
    )


def _by_thirds(seconds: float) -> Seconds:
    """Split seconds: forward moves about a third of the bytes."""
    return Seconds(seconds / 3, seconds * 2 / 3)


def optimizer_seconds(job: Job, num_parameters: float) -> float:
    """Return the seconds to read and write all stored tensors of a rank's parameters once.

    Gradients are only read.

    If the host updates them, the gradients of each micro-batch go there, for the most part during
    backward, and weights come back.
    """
    gradient = bytes_per_number(job.recipe.storage.visible)
    if job.program.offload:
        rate = 1e9 * job.chip.host_gb_per_second * job.efficiency["host"]
        updates = job.efficiency["host_updates"] / min(job.num_chips, job.cluster.chips_per_node)
        transfers = 1 + job.layout.micro_batches * (1 - job.efficiency["overlap.shard"])
        return num_parameters * (transfers * gradient / rate + 1 / updates)
    return job.moved(num_parameters * (2 * job.bytes_per_param - gradient))
