"""Memory of the worst rank at the worst moment of a step, term by term.

Three moments can be the worst. At the start of backward, all activations, the logits and their
gradient exist. In the last layer's backward, its temporary gradients replace the logits. At the end
of backward, all gradients exist.

Source: Korthikanti et al., arXiv 2205.05198, section 4 (activations); Rajbhandari et al., ZeRO,
arXiv 1910.02054, section 5 (state).
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

from narrowgauge.planner.ask import Ask, State
from narrowgauge.planner.program import LOGIT_BYTES
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.formats import bytes_per_number

CONTEXT = 0.8e9
COMMUNICATION = 1.0e9
"""Bytes without a formula: driver and libraries, and the channels of collectives."""
FRAGMENTATION = 0.08
"""Fraction of all memory that changes during a step."""
_EXACT_SUM_BYTES = 16  # of two float64 words that sum gradients exactly
_SCORE_BYTES = 5  # the softmax, the dropout mask and its result: Korthikanti et al.


class Held(NamedTuple):
    """Hold a rank's state before ZeRO shards it, and the ranks that share it."""

    rest: State
    experts: State
    sharing: int
    sharing_experts: int

    def bytes(self, name: str, *, is_shared: bool) -> float:
        """Return the bytes of a field of the state on a rank."""
        rest = getattr(self.rest, name)
        experts = getattr(self.experts, name)
        if is_shared:
            return float(rest / self.sharing + experts / self.sharing_experts)
        return float(rest + experts)


def held(ask: Ask) -> Held:
    """Return the state of a rank: its stage's layers, its experts, and embedding or head."""
    layout = ask.layout
    places = ask.state
    outer = places["first"].plus(places["last"])
    if layout.pipeline > 1:
        outer = max(places["first"], places["last"], key=sum)
    rest = places["layers"].plus(outer, layout.pipeline)
    none = State()
    divided = layout.tensor * layout.pipeline
    of_experts = layout.pipeline * layout.expert * layout.expert_tensor_ranks
    return Held(
        none.plus(rest, 1 / divided),
        none.plus(places["experts"], 1 / of_experts),
        layout.num_sharing,
        layout.sharing_experts(layout.num_sharing),
    )


def host_bytes(ask: Ask) -> float:
    """Return the memory that the ranks of a node need on their host: what the program offloads, and
    inputs of recomputed layers, if it keeps them there.
    """
    on_host = 0.0
    if ask.program.offload:
        state = held(ask)
        zero = ask.layout.zero
        on_host += state.bytes("gradients", is_shared=zero >= 2)
        on_host += state.bytes("states", is_shared=zero >= 1)
        on_host += state.bytes("frozen", is_shared=zero == 3)
    if ask.program.saved == "host" and ask.layout.recompute == "full":
        on_host += layers_in_flight(ask) * ask.tokens * _stream_bytes(ask)
    return on_host * min(ask.layout.num_ranks, ask.cluster.chips_per_node)


def memory_terms(ask: Ask) -> Terms:
    """Return the memory of the worst rank at its worst moment: bytes by group."""
    layout = ask.layout
    state = held(ask)
    weights = Term("weights", "weights", _weights(ask, state))
    whole = state.bytes("whole", is_shared=False)
    states = 0.0
    if not ask.program.offload:
        states = state.bytes("states", is_shared=layout.zero >= 1)
    optimizer = Term("optimizer", "states beside the weights", states + whole)
    gradients = state.bytes("gradients", is_shared=layout.zero >= 2)
    sums = _sums(ask, gradients)
    if sums and not layout.is_fsdp:
        gradients = 0.0  # added to the sum as soon as it is made
    elif ask.program.offload or ask.program.release:
        gradients = min(gradients, _largest_layer(ask) * _gradient_bytes(ask))
    all_gradients = Term("gradients", "gradients", gradients)
    is_late = layout.is_fsdp and (layout.micro_batches == 1 or sums > 0)
    early = Term("gradients", "gradients", 0.0 if is_late else gradients)
    always = [Term("gradients", "sums of micro-batches", sums), *_buffers(ask)]
    layer = Term("activations", "the layer in backward", layer_bytes(ask) * ask.tokens)
    passing = Term("activations", "gradients on their way", _passing_bytes(ask) * ask.tokens)
    kept = Term("activations", "kept by the layers", _kept_bytes(ask))
    again = [] if layout.recompute == "none" else [layer]
    moments = [
        Terms([early, kept, *_loss(ask), *always]),
        Terms([early, kept, *again, passing, *always]),
        Terms([all_gradients, layer, passing, *always]),
    ]
    changing = max(moments, key=attrgetter("total"))
    fragmentation = Term("overhead", "fragmentation", FRAGMENTATION * changing.total)
    outside = CONTEXT + COMMUNICATION * (layout.num_ranks > 1)
    overhead = Term("overhead", "driver, libraries, collectives", outside)
    terms = [weights, optimizer, *changing, fragmentation, overhead]
    return Terms(term for term in terms if term.value)


# ── state ─────────────────────────────────────────────────────────────────────────────────────────


def _weights(ask: Ask, state: Held) -> float:
    """Return the bytes of weights on the chip. Offloaded frozen ones are there by two layers."""
    is_shared = ask.layout.zero == 3
    frozen = state.bytes("frozen", is_shared=is_shared)
    if ask.program.offload:
        frozen = min(frozen, 2 * _largest_layer(ask) * ask.weight_bytes)
    return state.bytes("weights", is_shared=is_shared) + frozen


def _sums(ask: Ask, gradients: float) -> float:
    """Return the bytes of the buffers that sum the gradients of micro-batches."""
    width = bytes_per_number(ask.layout.accumulation_dtype)
    stored = bytes_per_number(ask.recipe.storage.visible)
    if ask.recipe.reduction.order_invariant:
        width = _EXACT_SUM_BYTES
    if ask.layout.micro_batches == 1 or width <= stored:
        return 0.0
    return gradients / stored * width


def _gradient_bytes(ask: Ask) -> float:
    """Return the bytes of the gradient of a layer's mean parameter before it is sharded."""
    visible = bytes_per_number(ask.gathered or ask.recipe.storage.visible)
    return min(1.0, ask.trained_parameters / ask.architecture.num_parameters) * visible


def _largest_layer(ask: Ask) -> float:
    """Count the parameters of the largest layer on one of the ranks that shard it."""
    a = ask.architecture
    layout = ask.layout
    largest = a.largest_layer / layout.tensor
    if a.mixture:
        of_layer = a.parameters["experts"] / a.num_mixture_layers
        largest += of_layer / layout.expert / layout.expert_tensor_ranks
    return largest


def _buffers(ask: Ask) -> list[Term]:
    """Return unsharded layers of ZeRO-3, a dequantized matrix, and autocast's copies."""
    a = ask.architecture
    layout = ask.layout
    terms = []
    if layout.zero == 3 and layout.num_sharing > 1:
        count = 2 * _largest_layer(ask)
        if layout.pipeline > 1:  # gathering for each micro-batch costs more than the bubble saves
            count = a.parameters["layers"] / layout.tensor
            count += a.parameters["experts"] / layout.expert / layout.expert_tensor_ranks
            count /= layout.pipeline
        gathered = count * (ask.weight_bytes + _gradient_bytes(ask))
        outer = (a.parameters["first"] + a.parameters["last"]) / layout.tensor
        visible = bytes_per_number(ask.gathered or ask.recipe.storage.visible)
        terms.append(Term("buffers", "layers, gathered", gathered))
        terms.append(Term("buffers", "embedding and head, gathered", outer * visible))
    largest = 0.0
    for matmul in a.layer_matmuls:
        if 0 < ask.tuning.frozen_bytes(matmul) < 2:
            largest = max(largest, matmul.num_elements / matmul.count)
    terms.append(Term("buffers", "a matrix, dequantized", 2 * largest / layout.tensor))
    if ask.stream_width > ask.matmul_width and layout.recompute != "full":
        copies = ask.matmul_width * a.num_parameters / layout.tensor / layout.pipeline
        terms.append(Term("activations", "autocast's copies of the weights", copies))
    return terms


# ── activations ───────────────────────────────────────────────────────────────────────────────────


def layers_in_flight(ask: Ask) -> float:
    """Count the layers whose activations the first stage holds.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473,
    figure 4, for interleaving.
    """
    layout = ask.layout
    batches = float(min(layout.pipeline, layout.micro_batches))
    if layout.interleave > 1:
        batches *= 1 + (layout.pipeline - 1) / layout.pipeline / layout.interleave
    return ask.architecture.num_layers / layout.pipeline * batches


def _stream_bytes(ask: Ask) -> float:
    """Return the bytes of a token in the residual stream on a rank."""
    return ask.stream_width * ask.architecture.hidden_size / ask.stream_ranks


def layer_bytes(ask: Ask, *, is_cheap_repeated: bool = False) -> float:
    """Return the bytes that a mean layer keeps of a token on a rank: of norms, inputs of matmuls,
    attention, and the MLP or the chosen experts; without norms and gates if these are repeated.
    """
    a = ask.architecture
    is_eager = ask.program.kernels == "eager"
    hidden = a.hidden_size
    stream = ask.stream_width
    width = ask.matmul_width
    codes = ask.recipe.compute.kept_bytes if ask.recipe.compute.keeps_codes else width
    is_cast = stream > width
    inputs = hidden * codes * (3 if is_cast else 1)  # each matmul under autocast keeps its own cast
    norm = hidden * ((4 + stream) if is_eager else stream)
    heads = a.num_heads * a.query_dim + 2 * a.num_kv_heads * a.value_dim
    if a.latent:
        heads = 3 * a.num_heads * a.query_dim
    attention = width * (heads + a.num_heads * a.value_dim)
    if ask.program.attention == "eager" and not is_cheap_repeated:
        attention += _SCORE_BYTES * a.num_heads * ask.sequence_length
    inner = 1 + a.is_gated
    if is_eager:
        inner = 3 if a.is_gated else 4
    gates = inner * width + codes
    if is_cheap_repeated:
        norm = 0.0
        gates -= codes
    total = 0.0
    for layers in a.layers:
        of_stream = 2 * norm + inputs
        rest = layers.mixer_width * width
        if layers.has_attention:
            rest += attention
        if layers.inner_size:
            of_stream += inputs
            rest += gates * layers.inner_size
        if layers.mixture:
            chosen = layers.mixture.experts_per_token
            of_stream += inputs + 2 * chosen * hidden * width
            rest += gates * (chosen * layers.mixture.expert_size + layers.mixture.shared_size)
        of_layer = of_stream / ask.stream_ranks + rest / ask.layout.tensor
        total += of_layer * layers.count / a.num_layers
    return total


def _kept_bytes(ask: Ask) -> float:
    """Return the bytes that all layers in flight keep until their backward pass."""
    a = ask.architecture
    layout = ask.layout
    layers = layers_in_flight(ask)
    saved = layer_bytes(ask)
    if layout.recompute == "full":
        saved = _stream_bytes(ask)
        if ask.program.saved == "host":  # of the two layers in use
            layers = min(layers, 2.0)
    elif layout.recompute == "selective" and ask.program.kernels == "fused":
        saved = layer_bytes(ask, is_cheap_repeated=True)
    elif layout.recompute == "selective":
        outputs = sum(m.flops_per_token / 2 / m.in_features for m in a.layer_matmuls)
        numbers = a.num_heads * a.value_dim + outputs / 2 / a.num_layers
        saved = _stream_bytes(ask) + ask.matmul_width * numbers / layout.tensor
    return saved * layers * ask.tokens


def _passing_bytes(ask: Ask) -> float:
    """Return the bytes of a token's gradients that a layer's backward holds: of the stream, and of
    the MLP's inner tensors.
    """
    a = ask.architecture
    size = a.intermediate_size
    if a.mixture:
        size = a.mixture.experts_per_token * a.mixture.expert_size
    inner = ask.matmul_width * size * (1 + a.is_gated)
    return _stream_bytes(ask) + inner / ask.layout.tensor


def _loss(ask: Ask) -> list[Term]:
    """Return the memory of head and loss at the start of backward. In a long pipeline, the first
    stage holds more.
    """
    a = ask.architecture
    layout = ask.layout
    if layout.pipeline > 2:
        return []
    row = (4 + 2 * ask.stream_width) * a.hidden_size / ask.stream_ranks
    logits = a.vocab_size * LOGIT_BYTES[ask.program.loss] / layout.tensor
    return [
        Term("logits", "input of the head", ask.tokens * row),
        Term("logits", "logits and their gradient", ask.tokens * logits),
    ]
