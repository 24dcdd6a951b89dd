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

from narrowgauge.planner.ask import Ask
from narrowgauge.planner.efficiency import Efficiency
from narrowgauge.planner.program import Program, adapters_of
from narrowgauge.planner.roofline import bytes_seconds, operation_seconds
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES, SLOTS, first_of_input
from narrowgauge.spec.formats import bytes_per_number
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
# Stream tensors per visited expert of a token: sort and restore, in both directions.
_DISPATCHED = 8


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
    matmuls = [0.0, 0.0, 0.0]  # forward, backward and once
    casts = [0.0, 0.0, 0.0]
    start = shares["kernel_seconds"]
    for matmul in (*architecture.matmuls, *adapters_of(architecture, program)):
        if is_head != (matmul.part == "head"):
            continue
        is_adapter = "lora" in matmul.name
        compute = recipe.compute
        if is_adapter or (is_head and not compute.is_wide):
            compute = COMPUTES[recipe.dtype]
        is_first = first_of_input(matmul.name) == matmul.name
        base = matmul.name.removesuffix(".lora_A")
        if is_adapter and program.kernels == "fused" and first_of_input(base) != base:
            continue  # one matrix for all that read this input
        part = program.part_of(matmul)
        is_frozen = not part.trains and not is_adapter
        tensor = ranks[0]
        tokens = tokens_on_rank * matmul.tokens_share
        count = kernels = float(matmul.count)
        reached = 1.0
        if matmul.is_expert:
            experts, tensor = ranks[1:]
            tokens *= experts * tensor / ranks[0]
            count /= experts
            reached = shares["experts"]
            kernels /= architecture.num_experts  # one grouped kernel for a layer's experts
        out = matmul.out_features
        inputs = matmul.in_features
        if matmul.split == "column":
            out = round(out / tensor)
        elif matmul.split == "row":
            inputs = round(inputs / tensor)
        operations = operation_seconds(out, inputs, compute, recipe, tokens, chip, shares)
        for name, seconds in operations.items():
            place, _, side = name.partition(".")
            when = int(place != "output")
            if is_frozen and place == "grad_weight":
                continue
            if not side:
                matmuls[when] += (seconds - start) / reached * count + start * kernels
                continue
            tensor_name = SLOTS[name].tensor
            if tensor_name == "input" and not is_first:
                continue  # cast for another layer already
            if tensor_name == "weight":
                when = 2
            casts[when] += (seconds - start) * count + start * kernels
        if is_frozen and part.is_narrow:
            read = bytes_seconds(out * inputs * (part.bytes + 2), chip, shares)
            for when in (0, 1):
                casts[when] += read * count + start * kernels
    return Seconds(*matmuls), Seconds(*casts)


def moving_seconds(ask: Ask, num_bytes: float) -> float:
    """Return the seconds to read or write ``num_bytes`` of the chip's memory."""
    return bytes_seconds(num_bytes, ask.chip, ask.efficiency)


def attention_seconds(ask: Ask) -> Seconds:
    """Return the seconds of scores, softmax and values in all layers.

    Flash kernels skip masked scores.
    """
    shape = ask.architecture
    chip = ask.chip
    shares = ask.efficiency
    is_flash = ask.program.attention == "flash"
    per_token = shape.attention_flops(ask.sequence_length, is_causal=is_flash) / 3
    flops = ask.tokens * per_token / ask.layout.tensor
    peak = chip.peak_tflops[ask.recipe.dtype] * 1e12
    start = shares["kernel_seconds"] * shape.num_layers
    if is_flash:
        forward = flops / (peak * shares.attention(ask.sequence_length / ask.layout.context))
        return Seconds(forward + start, (ATTENTION_PASSES - 1) * forward + start)
    forward = flops / (peak * shares[f"matmul.{ask.recipe.dtype}"])
    heads = shape.num_heads / ask.layout.tensor * shape.num_layers
    scores = ask.tokens * ask.sequence_length * heads
    read = moving_seconds(ask, scores * _SCORE_BYTES[0])
    written = moving_seconds(ask, scores * _SCORE_BYTES[1])
    return Seconds(forward + read + 4 * start, 2 * forward + written + 8 * start)


def mixture_seconds(ask: Ask) -> Seconds:
    """Return the waiting time of mixtures in addition to matmuls: routers, sorting, and host
    launches.
    """
    shares = ask.efficiency
    seconds = 0.0
    for count, mixture in ask.architecture.mixtures:
        launches = shares["expert_seconds"] * mixture.num_experts / ask.layout.expert
        seconds += count * (shares["mixture_seconds"] + launches)
    return _by_thirds(seconds)


def elementwise_seconds(ask: Ask) -> Seconds:
    """Return the seconds of norms, residuals, rotary positions, gates, and expert sorting in all
    layers.
    """
    a = ask.architecture
    streams = a.num_layers * _STREAMS
    if not a.positions:
        streams += a.num_layers * _ROTARY_STREAMS
    inner = sum(layers.count * layers.inner_size for layers in a.layers)
    for count, mixture in a.mixtures:
        visited = mixture.experts_per_token
        streams += count * _DISPATCHED * visited
        inner += count * (visited * mixture.expert_size + mixture.shared_size)
    inner *= _GATED if a.is_gated else _UNGATED
    widths = ask.widths
    moved = streams * a.hidden_size * widths.stream / ask.layout.stream_ranks
    moved += inner * widths.matmul / ask.layout.tensor
    if ask.program.kernels == "eager":
        moved *= EAGER_FACTOR
    return _by_thirds(moving_seconds(ask, ask.tokens * moved / ask.efficiency["elementwise"]))


def loss_seconds(ask: Ask) -> Seconds:
    logits = ask.tokens * ask.architecture.vocab_size / ask.layout.tensor
    return _by_thirds(moving_seconds(ask, logits * LOGIT_BYTES[ask.program.loss]))


def _by_thirds(seconds: float) -> Seconds:
    """Split seconds: forward moves about a third of the bytes."""
    return Seconds(seconds / 3, seconds * 2 / 3)


def optimizer_seconds(ask: Ask, num_parameters: float) -> float:
    """Return the seconds to read and write all stored tensors of a rank's parameters once.

    Gradients are only read.

    If the host updates them, the gradients of each micro-batch go there, for the most part during
    backward, and weights come back.
    """
    gradient = bytes_per_number(ask.recipe.storage.visible)
    if ask.program.offload:
        rate = 1e9 * ask.chip.host_gb_per_second * ask.efficiency["host"]
        updates = ask.efficiency["host_updates"] / min(ask.num_chips, ask.cluster.chips_per_node)
        transfers = 1 + ask.layout.micro_batches * (1 - ask.efficiency["overlap.shard"])
        return num_parameters * (transfers * gradient / rate + 1 / updates)
    return moving_seconds(ask, num_parameters * (2 * ask.bytes_per_param - gradient))
