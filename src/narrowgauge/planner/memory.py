"""Memory of the worst rank at the worst moment of a step, term by term.

Three moments can be the worst. At the start of backward, all activations, the logits and their
gradient exist. In the last layer's backward, its temporary gradients replace the logits. At the end
of backward, all gradients exist. Each moment is a sum of terms. We return the terms of the largest
moment, so their sum is a peak, not a sum of peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from narrowgauge.planner.activations import layer_bytes
from narrowgauge.planner.ask import Ask
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.shapes import Architecture
from narrowgauge.planner.state import (
    Bytes,
    bytes_per_parameter,
    on_stage,
    shared,
    state_of_ask,
)
from narrowgauge.planner.terms import Term, Terms, term
from narrowgauge.spec.formats import bytes_per_number

OVERHEAD = {"context": 0.7e9, "communication buffers": 1.0e9, "workspaces": 0.1e9}
"""Memory without a formula, in bytes: driver, collectives (with several ranks), libraries."""
FRAGMENTATION = 0.08
"""Fraction of all memory that changes during a step."""
OUTSIDE = ("context", "communication buffers")
"""Memory that a framework's allocator does not reserve.

What it reserves beyond its tensors is the fragmentation.
"""
_EXACT_SUM_BYTES = 16  # of two float64 words that sum them exactly


def _product(group: str, name: str, count: float, noun: str, width: float, note: str = "") -> Term:
    """Return the term of ``count`` things of ``width`` bytes."""
    value = count * width
    return term(group, name, value, "{:,.10g} {} × {:,.6g} B{}", count, noun, width, note)


class Stage(NamedTuple):
    """Hold a stage that can be the worst: its number, its layers, and its layers in flight."""

    number: int
    layers: float
    in_flight: float


def stages_of(architecture: Architecture, layout: Layout) -> list[Stage]:
    """Return the stages that can be the worst: the first, the second and the last.

    The first holds activations of as many micro-batches as there are stages, ``L (1 + (p - 1) / (p
    v))`` layers. The second can have a layer more. The last has the head and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473,
    figure 4, for interleaving.
    """
    p = layout.pipeline
    v = layout.interleave
    total = architecture.num_layers
    even = total % (p * v) == 0 or p == 1
    stages = []
    for number in sorted({0, p - 1} if even else {0, 1, p - 1}):
        # Uneven stages omit a layer where the embedding or head is.
        layers = total / p
        if not even:
            layers = math.ceil((total + 2) / p) - (number in (0, p - 1))
        batches_in_flight = float(p - number)
        if v > 1:
            batches_in_flight = (2 * (p - number - 1) + (v - 1) * p + 1) / v
        in_flight = layers * min(batches_in_flight, layout.micro_batches)
        stages.append(Stage(number, layers, in_flight))
    return stages


def memory_terms(ask: Ask) -> Terms:
    """Return the memory of the worst rank at its worst moment: bytes by group."""
    peaks = []
    for stage in stages_of(ask.architecture, ask.layout):
        terms = worst_moment(ask, stage)
        peaks.append(Terms((*terms, *_overhead_terms(terms, ask.layout))))
    return max(peaks, key=attrgetter("total"))


def host_bytes(ask: Ask) -> float:
    """Return the memory that the ranks of a node need on their host: gradients and states, and
    inputs of recomputed layers, if the program keeps them there.
    """
    most = 0.0
    for stage in stages_of(ask.architecture, ask.layout):
        on_host = 0.0
        if ask.program.offload:
            state = _state(ask, stage)
            on_host += state.gradients + state.optimizer
        if ask.program.saved == "host" and ask.layout.recompute == "full":
            on_host += stage.in_flight * ask.tokens * _stream_bytes(ask)
        most = max(most, on_host)
    return most * min(ask.layout.num_ranks, ask.cluster.chips_per_node)


def worst_moment(ask: Ask, stage: Stage) -> Terms:
    """Return the terms of a stage's largest moment."""
    a = ask.architecture
    layout = ask.layout
    weights, gradients, optimizer = _state_terms(ask, stage)
    buffers = list(_buffer_terms(ask, stage))
    sums = _sum_terms(ask, gradients)
    # Accumulation buffers live for the whole step.
    always = [weights, optimizer, *sums]
    if a.counts:
        width = a.counts.activations / a.counts.tokens
        peak = _product("activations", "at the peak of a step", ask.tokens, "tokens", width)
        least = min(gradients.value, a.counts.gradients)
        at_peak = _gradients(least, "at this moment, counted")
        return _largest([*always, at_peak, peak, *buffers], [*always, gradients])
    # Autograd adds to earlier gradients. Megatron-LM has buffers for them. Both exist during
    # forward.
    late = early = gradients
    if sums and not layout.is_fsdp:
        late = early = _gradients(0.0, "each is added to the sum as soon as it is made")
    elif layout.is_fsdp and (layout.micro_batches == 1 or sums):
        early = _gradients(0.0, "none at this moment, all later")
    # Temporary gradients: of the head, the first in backward, and of the current layer.
    at_start = []
    if not early.value and _is_last(ask, stage) and ask.program.part("head").trains:
        value = a.vocab_size * a.hidden_size * _visible_bytes(ask) / layout.tensor
        first = "the first that backward makes"
        at_start.append(term("gradients", "gradient of the head", value, first))
    at_end = []
    if not late.value and layout.zero < 3:
        size = _largest_layer(ask)
        at_end.append(
            _product("gradients", "gradients of a layer", size, "parameters", _gradient_bytes(ask))
        )
    saved, layer = _activation_terms(ask, stage)
    passing = _passing_term(ask)
    # Before the first layer's backward, no gradient is in transit.
    gathered = [term for term in buffers if term.name != "gradients of two layers"]
    # With full recomputation one layer's activations coexist with every layer's saved input.
    again = [] if layout.recompute == "none" else [layer]
    return _largest(
        [early, *always, *saved, *loss_terms(ask, stage), *gathered],
        [early, *always, *saved, *again, passing, *buffers, *at_start],
        [late, *always, layer, passing, *buffers, *at_end],
    )


def _gradients(value: float, formula: str) -> Term:
    return term("gradients", "gradients", value, formula)


def _largest(*moments: list[Term]) -> Terms:
    sums = [Terms(tuple(terms)) for terms in moments]
    return max(sums, key=attrgetter("total"))


def _is_last(ask: Ask, stage: Stage) -> bool:
    return stage.number == ask.layout.pipeline - 1


def _visible_bytes(ask: Ask) -> float:
    """Return the bytes of a gathered weight."""
    return bytes_per_number(ask.gathered or ask.recipe.storage.visible)


def _gradient_bytes(ask: Ask) -> float:
    """Return the bytes of the gradient of a layer's mean parameter before it is sharded."""
    return _visible_bytes(ask) * ask.trained_parameters / ask.architecture.num_parameters


def _stream_bytes(ask: Ask) -> float:
    """Return the bytes of a token in the residual stream on a rank."""
    return ask.widths.stream * ask.architecture.hidden_size / ask.layout.stream_ranks


def _largest_layer(ask: Ask) -> float:
    """Count the parameters of the largest layer on one of the ranks that shard it."""
    a = ask.architecture
    layout = ask.layout
    largest = a.largest_layer / layout.tensor
    if a.mixture:
        of_layer = a.parameters["experts"] / a.num_mixture_layers
        largest += of_layer / layout.expert / layout.expert_tensor_ranks
    return largest


def _state(ask: Ask, stage: Stage) -> Bytes:
    """Return the state of a rank between steps, wherever it lies."""
    layout = ask.layout
    experts, rest = on_stage(ask, stage.layers, stage.number)
    state = shared(experts, layout, layout.sharing_experts(layout.num_sharing))
    state = state.plus(shared(rest, layout, layout.num_sharing))
    share = 1.0
    if ask.architecture.counts:
        share = ask.trained_parameters / ask.architecture.num_parameters
    return state._replace(gradients=state.gradients * share, optimizer=state.optimizer * share)


def _state_terms(ask: Ask, stage: Stage) -> tuple[Term, Term, Term]:
    state = _state(ask, stage)
    terms = []
    per = bytes_per_parameter(ask.storage)
    names = ("weights", "gradients", "states beside the weights")
    text = "parts as the program stores them"
    if ask.program.trains_all:
        text = "{:,} parameters × {:g} B / {} ranks, vectors and what is not shared as they are"
    for place, group in enumerate(("weights", "gradients", "optimizer")):
        ranks = ask.layout.tensor * ask.layout.pipeline * ask.layout.sharing(3 - place)
        numbers = ask.architecture.num_parameters, per[place], ranks
        terms.append(term(group, names[place], state[place], text, *numbers))
    weights, gradients, optimizer = terms
    if ask.program.offload:
        optimizer = term("optimizer", names[2], 0.0, "on the host")
    if ask.program.release or ask.program.offload:
        size = min(gradients.value, _largest_layer(ask) * _gradient_bytes(ask))
        gradients = _gradients(size, "of one layer: each is updated and freed, or sent away")
    return weights, gradients, optimizer


def _sum_bytes(ask: Ask) -> float:
    """Return the bytes of a parameter's accumulation buffer; 0 without one."""
    if ask.layout.micro_batches == 1:
        return 0.0
    if ask.recipe.reduction.order_invariant:
        return _EXACT_SUM_BYTES
    width = bytes_per_number(ask.layout.accumulation_dtype)
    return width if width > bytes_per_number(ask.recipe.storage.visible) else 0.0


def _sum_terms(ask: Ask, gradients: Term) -> list[Term]:
    """Return the accumulation buffers of micro-batch gradients.

    Megatron-LM adds each parameter's gradient to its buffer within backward, so only the buffer
    exists. This project's trainer adds a micro-batch's gradients after all of them exist.

    Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py,
    ``_make_backward_post_hook``.
    """
    width = _sum_bytes(ask)
    if not width:
        return []
    count = gradients.value / bytes_per_parameter(ask.storage).gradients
    return [_product("gradients", "sums of micro-batches", count, "parameters", width)]


def _passing_term(ask: Ask) -> Term:
    """Return the gradients of activations that a layer's backward holds: of the stream, and of the
    MLP's inner tensors.
    """
    a = ask.architecture
    size = a.intermediate_size
    if a.mixture:
        size = a.mixture.experts_per_token * a.mixture.expert_size
    if a.is_gated:
        size *= 2
    inner = ask.widths.matmul * size / ask.layout.tensor
    return _product(
        "activations", "gradients on their way", ask.tokens, "tokens", _stream_bytes(ask) + inner
    )


def _layer_bytes(ask: Ask, repeated: str) -> tuple[float, float]:
    """Return a rank's bytes of a layer's saved tensors per token, and of its casts of weights."""
    layout = ask.layout
    length = ask.sequence_length if ask.program.attention == "eager" else 0
    saved, stream, casts = layer_bytes(
        ask.architecture, ask.recipe, ask.program, ask.gathered, repeated, length
    )
    per_token = stream / layout.stream_ranks + (saved - stream) / layout.tensor
    return per_token, casts / layout.tensor


def _activation_terms(ask: Ask, stage: Stage) -> tuple[list[Term], Term]:
    """Return the tensors saved by all layers in flight at the end of forward, and the memory of the
    layer in backward.
    """
    layout = ask.layout
    program = ask.program
    per_layer, casts = _layer_bytes(ask, "")
    layer = _product("activations", "the layer in backward", ask.tokens, "tokens", per_layer)
    layer = layer._replace(value=layer.value + casts)
    count = stage.in_flight * ask.tokens
    noun = "tokens × layers in flight"
    if layout.recompute == "full":
        inputs = _product("activations", "inputs of the layers", count, noun, _stream_bytes(ask))
        if program.saved == "host":
            value = inputs.value * min(1.0, 2 / stage.in_flight)
            formula = "of the two layers in use, the others on the host"
            inputs = term("activations", inputs.name, value, formula)
        return [inputs], layer
    if layout.recompute == "selective":
        per_layer, casts = _layer_bytes(ask, program.selective)
    note = f" ({program.kernels} kernels, {program.attention} attention)"
    terms = [_product("activations", "kept by the layers", count, noun, per_layer, note)]
    if casts:
        note = " for autocast's backward"
        terms.append(
            _product("activations", "casts of the weights", stage.layers, "layers", casts, note)
        )
    return terms, layer


def _buffer_terms(ask: Ask, stage: Stage) -> Iterator[Term]:
    """Yield unsharded layers of ZeRO-3, gradients in transit, and gathered inputs of tensor ranks."""
    layout = ask.layout
    program = ask.program
    is_sharded = layout.zero == 3 and layout.num_sharing > 1
    stored = bytes_per_parameter(ask.storage).weights
    gradient = _gradient_bytes(ask)
    if is_sharded and layout.pipeline > 1:
        # Gathering weights for every micro-batch would cost more than the bubble saves.
        experts, rest = on_stage(ask, stage.layers, stage.number)
        width = stored if program.trains_all else ask.weight_bytes
        count = (experts.weights + rest.weights) / width
        reduced = bytes_per_number(program.reduced) if ask.gathered else 0.0
        yield _product(
            "buffers", "weights of the stage, gathered", count, "parameters", ask.weight_bytes
        )
        width = max(gradient, _sum_bytes(ask), reduced)
        name = "gradients of the stage, before they are shared"
        yield _product("buffers", name, count, "parameters", width)
    elif is_sharded:
        count = 2 * _largest_layer(ask)
        yield _product("buffers", "two layers, gathered", count, "parameters", ask.weight_bytes)
        yield _product("buffers", "gradients of two layers", count, "parameters", gradient)
        state = state_of_ask(ask)
        outer = state.first.weights + state.last.weights
        if ask.gathered:
            outer *= ask.weight_bytes / stored
        formula = "embedding, head and last norm stay gathered from forward to backward"
        yield term("buffers", "outer weights, gathered", outer, formula)
    narrow = 0.0
    if program.parts:
        for matmul in ask.architecture.layer_matmuls:
            if program.part_of(matmul).is_narrow:
                narrow = max(narrow, matmul.num_elements / matmul.count)
    if narrow:
        yield _product(
            "buffers", "a matrix, dequantized", narrow / layout.tensor, "parameters", 2.0
        )
    if layout.stream_ranks > 1:  # else every rank holds it whole, and it is counted there
        row = ask.architecture.hidden_size * ask.widths.matmul
        name = "a layer's input and its gradient, gathered"
        yield _product("buffers", name, 2 * ask.tokens, "tokens", row)


def loss_terms(ask: Ask, stage: Stage) -> list[Term]:
    """Return the memory of head and loss at the start of backward."""
    if not _is_last(ask, stage):
        return []
    a = ask.architecture
    widths = ask.widths
    row = (4 + 2 * widths.stream) * a.hidden_size / ask.layout.stream_ranks
    width = ask.program.logit_bytes(widths.matmul) / ask.layout.tensor
    note = f" ({ask.program.loss} loss)"
    return [
        _product("logits", "input of the head", ask.tokens, "tokens", row),
        _product("logits", "logits", ask.tokens * a.vocab_size, "logits", width, note),
    ]


def _overhead_terms(terms: Terms, layout: Layout) -> Iterator[Term]:
    """Yield memory without a formula. What is allocated and freed during a step can fragment."""
    for name, value in OVERHEAD.items():
        if layout.num_ranks > 1 or name != "communication buffers":
            yield term("overhead", name, value, "{:g} GB", value / 1e9)
    changing = terms.without("weights", "optimizer").total
    value = FRAGMENTATION * changing
    text = "{:.0%} of {:.3g} GB that change"
    yield term("overhead", "fragmentation", value, text, FRAGMENTATION, changing / 1e9)
