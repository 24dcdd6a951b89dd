"""Step time: the duration of an optimizer step, term by term.

We follow one rank through its micro-batches: operations over the share of the chip's peak that
training reaches, elementwise bytes over its bandwidth, what exchanges show, and the bubble of a
pipeline. ``data/fitted.toml`` has the shares.

Source: Narayanan et al., arXiv 2104.04473 (schedules); Korthikanti et al., arXiv 2205.05198
(recomputation); Isaev et al., Calculon, SC 2023 (overlap).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.planner.ask import Ask, Shares, shares_of
from narrowgauge.planner.layouts import unsuited
from narrowgauge.planner.memory import held
from narrowgauge.planner.terms import Term, Terms

_AGAIN = {"none": 0.0, "selective": 0.3, "full": 1.0}
_CHEAP_AGAIN = 0.1  # norms and gates, which fused kernels repeat
EAGER_BYTES = 2.2
"""Bytes of eager elementwise operations over those of compiled layers: torchtitan's 8B on 8 and 128
H100, eager and compiled.
"""
_ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: a flash kernel computes the scores again
_STREAMS = 22  # tensors of the stream that a layer moves: norms 10, residuals 4, rotary 8
_DISPATCHED = 8  # more for each expert of a token: sort and restore, in both directions
_LOGIT_BYTES = {"whole": 38, "compiled": 12, "chunked": 38}  # that a loss reads and writes
_HOST_SHARE = 0.85  # 55 of 63 GB/s over PCIe5 (ml-engineering)
_HOST_UPDATES = 4e9  # parameters a second of a node's processors: ZeRO-Offload, 2101.06840, table 4
_ALL_REDUCE_SHOWN = 0.3  # of a sum between replicas, after the last backward pass
TENSOR_SHOWN = 0.6
"""Fraction of an exchange between tensor ranks that computing does not hide: asynchronous tensor
parallelism hides a part."""


def again_of(ask: Ask) -> float:
    """Return the fraction of forward's operations that recomputation repeats."""
    if ask.layout.recompute == "selective" and ask.program.kernels == "fused":
        return _CHEAP_AGAIN
    return _AGAIN[ask.layout.recompute]


def check_ask(ask: Ask) -> None:
    """Raise if a job cannot run."""
    chip = ask.chip
    if chip.rate_format(ask.recipe.dtype) not in chip.peak_tflops:
        raise ChipError(
            f"Cannot run {ask.recipe.name} on {chip.name} because it does not multiply "
            f"{ask.recipe.dtype}.",
            f"It multiplies {', '.join(chip.peak_tflops)}.",
        )
    if ask.layout.num_ranks > ask.cluster.chips:
        raise ChipError(
            f"Cannot place a layout of {ask.layout.num_ranks} ranks on {ask.cluster.chips} chips.",
            "Shard less, or add chips.",
        )
    why = unsuited(ask.architecture, ask.layout, ask.sequence_length)
    if why:
        raise RecipeError(
            f"Cannot run {ask.architecture.name} in this layout: {why}.", "Choose a divisor."
        )


def step_terms(ask: Ask) -> Terms:
    """Return the seconds of an optimizer step of the whole job, by group."""
    layout = ask.layout
    shares = ask.shares or shares_of(ask.chip)
    computed = list(_computing(ask, shares))
    exchanged = list(_exchanges(ask, shares))
    busy = sum(term.value for term in computed)
    batch = busy + sum(term.value for term in exchanged)
    batches = layout.micro_batches
    terms = []
    for term in (*computed, *exchanged):
        terms.append(term._replace(value=batches * term.value))
    terms += _state_exchanges(ask, shares, batches * busy)
    bubble = (layout.pipeline - 1) / layout.interleave * batch
    terms.append(Term("bubble", "filling and draining the pipeline", bubble))
    terms.append(Term("optimizer", "states read and written", _update(ask, shares)))
    total = sum(term.value for term in terms)
    terms.append(Term("gaps", "for the host's memory", max(0.0, _from_host(ask) - total)))
    return Terms(term for term in terms if term.value)


def _is_narrow(ask: Ask) -> bool:
    """Tell whether the chip multiplies the recipe's operands in 8 bits or fewer."""
    format = ask.recipe.compute.output.left.format
    if ask.recipe.compute.is_wide:
        return False
    return ask.chip.rate_format(format) in ask.chip.peak_tflops


def _computing(ask: Ask, shares: Shares) -> Iterator[Term]:
    """Yield the computing of a micro-batch on a rank."""
    a = ask.architecture
    layout = ask.layout
    program = ask.program
    peak = ask.chip.peak_flops
    parts = layout.tensor * layout.pipeline
    again = again_of(ask)
    linear = 0.0
    for matmul in a.matmuls:
        is_head = matmul.part == "head"
        passes = 2.0 if ask.tuning.frozen_bytes(matmul) else 3.0
        if not is_head:
            passes += again
        speed = shares.float8 if _is_narrow(ask) and not is_head else 1.0
        if matmul.is_expert:
            size = min(matmul.in_features, matmul.out_features)
            speed *= program.experts * size / (size + shares.experts)
        linear += matmul.flops_per_token * passes / speed
    if ask.tuning.lora:
        linear *= shares.adapters
    rate = peak * shares.linear * program.factor
    yield Term("matmuls", "linear layers and head", ask.tokens * linear / rate / parts)
    is_flash = program.attention == "flash"
    flops = a.attention_flops(ask.sequence_length, is_causal=is_flash) / 3
    flops *= _ATTENTION_PASSES + again
    reach = peak * attention_share(shares, ask.sequence_length / layout.context) * program.factor
    yield Term("attention", "attention", ask.tokens * flops / reach / parts)
    bandwidth = ask.chip.bandwidth_gb_per_second * 1e9 * shares.bandwidth
    moved = _moved_bytes(ask) * (1 + again / 3)
    yield Term("elementwise", "norms, gates", ask.tokens * moved / bandwidth / parts)
    logits = a.vocab_size * _LOGIT_BYTES[program.loss]
    yield Term("loss", "softmax, cross entropy", ask.tokens * logits / bandwidth / parts)
    layers = a.num_mixture_layers / layout.pipeline
    yield Term("gaps", "routers and launches", layers * 2 * program.mixture_seconds)


def attention_share(shares: Shares, tokens: float) -> float:
    """Return the fraction of the peak that attention reaches over ``tokens`` of a sequence on a
    rank. It grows with their logarithm.
    """
    short, long = shares.attention
    doublings = math.log2(max(1.0, tokens / 32_768))
    return short * math.pow(long / short, min(1.0, doublings / 2))


def _moved_bytes(ask: Ask) -> float:
    """Return the bytes of a token that norms, residuals, gates and sorting move in all layers."""
    a = ask.architecture
    streams = float(_STREAMS * a.num_layers)
    inner = sum(layers.count * layers.inner_size for layers in a.layers)
    for count, mixture in a.mixtures:
        chosen = mixture.experts_per_token
        streams += count * _DISPATCHED * chosen
        inner += count * (chosen * mixture.expert_size + mixture.shared_size)
    moved = streams * a.hidden_size * ask.stream_width + 8 * inner * ask.matmul_width
    return moved * (EAGER_BYTES if ask.program.kernels == "eager" else 1.0)


def _exchanges(ask: Ask, shares: Shares) -> Iterator[Term]:
    """Yield what a micro-batch shows of its exchanges between tensor ranks, experts and stages."""
    a = ask.architecture
    layout = ask.layout
    layers = a.num_layers / layout.pipeline
    stream = ask.tokens * a.hidden_size * ask.matmul_width
    again = again_of(ask)
    if layout.tensor > 1:
        rate = group_rate(ask, shares, layout.tensor, 1)
        sent = layers * (4 + 2 * again) * 2 * stream * (1 - 1 / layout.tensor)
        name = "activations between tensor ranks"
        yield Term("communication", name, sent / rate * TENSOR_SHOWN)
    if layout.context > 1:
        rate = group_rate(ask, shares, layout.context, layout.tensor)
        heads = a.num_kv_heads * (a.query_dim + a.value_dim) * ask.matmul_width / layout.tensor
        sent = layers * (3 + again) * (layout.context - 1) * ask.tokens * heads
        yield Term("communication", "keys and values between context ranks", sent / rate)
    if layout.pipeline > 1:
        rate = group_rate(ask, shares, 2, layout.num_ranks // layout.pipeline)
        sent = 2 * layout.interleave * stream / layout.tensor
        yield Term("communication", "activations between stages", sent / rate)
    if a.mixture and layout.expert > 1:
        stride = layout.context * layout.expert_tensor_ranks
        rate = group_rate(ask, shares, layout.expert, stride)
        copies = a.mixture.experts_per_token * (1 - 1 / layout.expert)
        sent = a.num_mixture_layers / layout.pipeline * (4 + 2 * again) * stream * copies
        hidden = ask.program.expert_overlap
        if layout.interleave > 1:
            hidden = ask.program.interleaved_overlap
        shown = sent / layout.tensor / rate * (1 - hidden)
        yield Term("communication", "tokens between experts", shown)


def group_rate(ask: Ask, shares: Shares, ranks: int, stride: int) -> float:
    """Return the bytes a second of a chip to a group of ranks at a distance of ``stride``."""
    cluster = ask.cluster
    if ranks * stride <= cluster.chips_per_node:
        return shares.link * cluster.link_bytes_per_second(ranks, stride)
    cards = min(ranks, max(1, cluster.chips_per_node // stride))
    return shares.network * cluster.network_bytes_per_second * cards


def _state_exchanges(ask: Ask, shares: Shares, computing: float) -> Iterator[Term]:
    """Yield what a step shows of gathers of weights and sums of gradients."""
    layout = ask.layout
    a = ask.architecture
    experts = a.parameters["experts"] / layout.expert / layout.expert_tensor_ranks
    number = (a.num_parameters - a.parameters["experts"]) / layout.tensor + experts
    number /= layout.pipeline
    sharing = layout.num_sharing
    dtype = ask.gathered or ask.recipe.storage.visible
    summed = ask.recipe.reduction.bytes_per_element(dtype)
    summed *= min(1.0, ask.trained_parameters / a.num_parameters)
    batches = layout.micro_batches
    if sharing > 1:
        rate = group_rate(ask, shares, sharing, layout.tensor)
        sums = batches if layout.zero >= 2 else 1
        gathers = 2 * batches if layout.zero == 3 else 1
        seconds = number * (gathers * ask.weight_bytes + sums * summed) / rate
        shown = max(seconds - shares.hidden * computing, (1 - shares.hidden) * seconds)
        yield Term("communication", "weights and gradients between shards", shown)
    if layout.data > 1:
        rate = group_rate(ask, shares, layout.num_ranks, 1)
        seconds = 2 * number * summed / sharing / rate
        shown = _ALL_REDUCE_SHOWN * seconds
        yield Term("communication", "gradients between replicas", shown)


def _update(ask: Ask, shares: Shares) -> float:
    """Return the seconds to read and write all stored tensors once, or to update them on the host."""
    layout = ask.layout
    number = ask.trained_parameters / layout.tensor / layout.pipeline / layout.sharing(1)
    if ask.program.offload:
        rate = 1e9 * ask.chip.host_gb_per_second
        chips = min(ask.num_chips, ask.cluster.chips_per_node)
        return number * (4 * layout.micro_batches / rate + chips / _HOST_UPDATES)
    bandwidth = ask.chip.bandwidth_gb_per_second * 1e9 * shares.bandwidth
    return number * 2 * ask.storage.bytes_per_param / bandwidth


def _from_host(ask: Ask) -> float:
    """Return the seconds that a step's tensors take to the host and back: inputs of recomputed
    layers, and frozen weights, which each pass reads again. Computing hides them up to that.
    """
    layout = ask.layout
    sent = 0.0
    if ask.program.saved == "host" and layout.recompute == "full":
        width = ask.stream_width * ask.architecture.hidden_size
        sent += 2 * ask.tokens * width * ask.architecture.num_layers / layout.pipeline
    if ask.program.offload:
        frozen = held(ask).bytes("frozen", is_shared=layout.zero == 3)
        sent += frozen * (2 + (layout.recompute == "full"))
    return layout.micro_batches * sent / (1e9 * ask.chip.host_gb_per_second * _HOST_SHARE)
