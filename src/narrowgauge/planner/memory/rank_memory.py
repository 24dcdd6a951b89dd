"""Memory of the worst rank, term by term, at the worst moment of a step.

A step has moments that can be the worst: the end of forward, where all activations and the logits exist; the start of
backward, where the logits' gradient joins them; and the end of backward, where all gradients exist. Each is a sum of terms;
the terms of the largest are returned, so that their sum is a peak and not a sum of peaks.

What is there between steps comes from :mod:`~narrowgauge.planner.memory.state_bytes`, what layers keep from
:mod:`~narrowgauge.planner.memory.activations`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.memory.activations import (
    COUNTED,
    KORTHIKANTI,
    Attention,
    Kernels,
    LayerCounter,
    RankRequest,
    figures_of,
    kernels_of,
)
from narrowgauge.planner.memory.state_bytes import Bytes, bytes_per_parameter, on_stage, shared
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.sums import ACCUMULATIONS

_OF_A_STEP = ("activations", "logits", "buffers", "gradients")
_FORMULA_ERROR = 0.05


def memory_terms(
    architecture: Architecture,
    recipe: Recipe,
    layout: Layout,
    sequence_length: int,
    *,
    attention: Attention = "flash",
    is_loss_chunked: bool = True,
    kernels: Kernels | None = None,
    fixed: Mapping[str, float] | None = None,
    counted: LayerCounter | None = None,
) -> Terms:
    """The memory of the worst rank at its worst moment: bytes in the groups of ``MEMORY_GROUPS``.

    Args:
        architecture: one of which only the size is known gets its state and nothing else.
        attention: whether scores are kept.
        is_loss_chunked: whether logits are computed a chunk of tokens at a time. With tensor, pipeline or context parallelism
            they are not.
        kernels: of norms and activation functions; None for ``"eager"`` where every rank computes whole layers, which are then
            Hugging Face's, and ``"fused"`` elsewhere, as in Megatron-LM.
        fixed: bytes of overhead by name of ``FIXED`` where they are known, fragmentation as a share; each is then exact.
        counted: what a layer keeps, counted in the model's own modules; it replaces the formula where kernels are eager, and the
            terms that follow from it have the source ``COUNTED``.

    Example:
        >>> from narrowgauge.planner.inputs.architectures import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> [memory_terms(of_size(10e9), parse(f"bfloat16/{s}"), Layout(), 0).total / 1e9 for s in ("master", "word", "states8")]
        [160.0, 80.0, 60.0]
    """
    kinds: Kernels = kernels or kernels_of(layout)
    figures = figures_of(architecture, recipe, sequence_length, attention, kinds, counted)
    # PEFT's models do not have the trainer's chunked loss.
    is_loss_chunked = is_loss_chunked and architecture.adapters is None
    options = (attention, kinds, is_loss_chunked, fixed or {})
    request = RankRequest(architecture, recipe, layout, sequence_length, *options, figures)
    stages = stages_of(architecture, layout)
    found = [_worst_moment(request, stage) for stage in stages]
    return max(found, key=lambda terms: terms.total)


def _worst_moment(request: RankRequest, stage: Stage) -> Terms:
    """The terms of one stage's worst moment, with its overhead."""
    state = _state_terms(request, stage)
    if not request.architecture.has_shape:
        return Terms(state)
    buffers = buffer_terms(request, stage)
    weights, gradients, optimizer = state
    planes = _sum_planes(request, gradients)
    none = replace(gradients, value=0.0, formula=f"none at this moment; {gradients.formula} later")
    early = gradients if _sums_into_gradients(request) else none
    if planes and not (request.layout.is_fsdp or request.layout.keeps_gradients):
        gradients = early = replace(gradients, value=0.0, formula="each is added to the sum as soon as it is made")
    kept, layer, passing = _activations(request, stage), _one_layer(request), _passing(request)
    forward, backward = loss_terms(request, stage)
    # The planes of a sum exist all the time. Where layers are computed again, one is whole beside the inputs of all.
    always = (weights, optimizer, *planes, *_widened_matrix(request))
    # No gradient is on its way before the first layer's backward.
    gathered = [term for term in buffers if term.name != ON_THEIR_WAY]
    again = (layer,) if request.layout.recompute == "full" else ()
    moments = [
        (early, *always, *kept, *forward, *gathered),
        (early, *always, *kept, *backward, *gathered),
        (early, *always, *kept, *again, passing, *buffers, *_head_gradient(request, stage, early)),
        (gradients, *always, layer, passing, *buffers, *_made_gradients(request, gradients)),
    ]
    worst = max(moments, key=lambda terms: sum(term.value for term in terms))
    dynamic = sum(term.value for term in worst if term.group in _OF_A_STEP)
    return Terms((*map(_widened, worst), *overhead_terms(dynamic, request.layout.num_ranks, request.fixed)))


def _widened_matrix(request: RankRequest) -> list[Term]:
    """A matrix of a narrow frozen base in 16 bits, for as long as its product takes."""
    architecture, layout = request.architecture, request.layout
    if architecture.adapters is None or not architecture.adapters.is_widened:
        return []
    largest = max(m.in_features * m.out_features for m in architecture.matmuls if m.part != "head") / layout.tensor
    source = "QLoRA, arXiv 2305.14314, section 3"
    return [Term("buffers", "a frozen matrix, widened", 2 * largest, f"{largest:,.0f} parameters × 2 B", source)]


def _widened(term: Term) -> Term:
    """A term with the error of formulas in its interval: steps that were run and counted differ by less
    (benchmarks/planned_memory.py).
    """
    if term.group not in _OF_A_STEP:
        return term
    low, high = term.interval
    # Not dataclasses.replace, which takes most of a search's time.
    ends = low * (1 - _FORMULA_ERROR), high * (1 + _FORMULA_ERROR)
    return Term(term.group, term.name, term.value, term.formula, term.source, *ends)


# ── between steps ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _state(request: RankRequest, stage: Stage) -> Bytes:
    layout = request.layout
    experts, rest = on_stage(request.architecture, request.figures.state, layout, stage.layers, stage.number)
    return shared(experts, layout, layout.sharing_experts(layout.num_sharing)) + shared(
        rest, layout, layout.num_sharing
    )


def _state_terms(request: RankRequest, stage: Stage) -> tuple[Term, Term, Term]:
    layout, state, per = request.layout, _state(request, stage), request.figures.per
    count = request.figures.num_parameters
    ranks = [
        layout.tensor * layout.pipeline * (layout.num_sharing if layout.zero >= level else 1) for level in (3, 2, 1)
    ]
    offloaded = {"none": (), "optimizer": ("optimizer",), "all": ("weights", "gradients", "optimizer")}[layout.offload]
    terms = []
    for group, each, over in zip(
        ("weights", "gradients", "optimizer"), (per.weights, per.gradients, per.optimizer), ranks, strict=True
    ):
        value = getattr(state, group)
        formula = f"{count:,} parameters × {each:g} B / {over} ranks"
        if request.architecture.has_shape:
            formula += ", vectors and what is not shared as they are"
        if group in offloaded:
            value, formula = 0.0, f"in the host's memory ({value / 1e9:.3g} GB a rank)"
        names = {"weights": "weights", "gradients": "gradients", "optimizer": "states beside the weights"}
        terms.append(
            Term(group, names[group], value, formula, ZERO if layout.zero and layout.num_sharing > 1 else "definition")
        )
    return terms[0], terms[1], terms[2]


def state_terms(architecture: Architecture, recipe: Recipe, layout: Layout) -> Terms:
    """Weights, gradients, optimizer states and sums of micro-batches of the worst rank: what a step keeps, all together.

    Example:
        >>> from narrowgauge.planner.inputs.architectures import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> state_terms(of_size(1e9), parse("bfloat16/word"), Layout(micro_batches=2)).groups
        {'weights': 2000000000.0, 'gradients': 6000000000.0, 'optimizer': 4000000000.0}
    """
    figures = figures_of(architecture, recipe, 0, "flash", "eager")
    request = RankRequest(architecture, recipe, layout, 0, "flash", "eager", True, {}, figures)
    found = []
    for stage in stages_of(architecture, layout):
        weights, gradients, optimizer = _state_terms(request, stage)
        found.append(Terms((weights, gradients, optimizer, *_sum_planes(request, gradients))))
    return max(found, key=lambda terms: terms.total)


def host_bytes(architecture: Architecture, recipe: Recipe, layout: Layout, sequence_length: int = 0) -> float:
    """What a rank of a layout with offloading keeps in the host's memory.

    Example:
        >>> from narrowgauge.planner.inputs.architectures import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> host_bytes(of_size(8e9), parse("bfloat16/word"), Layout(shard=8, offload="optimizer")) / 1e9
        4.0
    """
    figures = figures_of(architecture, recipe, sequence_length, "flash", "eager")
    request = RankRequest(architecture, recipe, layout, sequence_length, "flash", "eager", True, {}, figures)
    states = [_state(request, stage) for stage in stages_of(architecture, layout)]
    which = {"none": lambda s: 0.0, "optimizer": lambda s: s.optimizer, "all": lambda s: s.total}[layout.offload]
    return float(max(map(which, states)))


def _sums_into_gradients(request: RankRequest) -> bool:
    """Whether gradients exist during forward: autograd adds to earlier ones, and Megatron-LM has buffers for them."""
    if not request.layout.is_fsdp or request.layout.keeps_gradients:
        return True
    visible = request.recipe.storage.visible
    has_planes = ACCUMULATIONS[request.layout.accumulation_dtype].keeps_sums(visible)
    return request.layout.micro_batches > 1 and not has_planes


def _sum_planes(request: RankRequest, gradients: Term) -> tuple[Term, ...]:
    """The planes in which micro-batches' gradients are summed.

    Megatron-LM adds each parameter's gradient to its buffer within backward, so the buffer is all there is; this project's
    trainer adds a micro-batch's gradients when it has all of them, and DeepSpeed's BF16_Optimizer keeps both.

    Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py, ``_make_backward_post_hook``; DeepSpeed,
    deepspeed/runtime/bf16_optimizer.py, ``update_hp_grads``.
    """
    row = ACCUMULATIONS[request.layout.accumulation_dtype]
    if request.layout.micro_batches == 1 or not row.keeps_sums(request.recipe.storage.visible):
        return ()
    width = bytes_per_parameter(request.recipe.storage).gradients
    value = gradients.value / width * row.bytes_per_param
    is_beside = request.layout.is_fsdp or request.layout.keeps_gradients
    where = "beside the last gradients" if is_beside else "to which each gradient is added"
    formula = f"{gradients.value / width:.4g} parameters × {row.bytes_per_param:g} B, {where}"
    return (Term("gradients", f"sum in {row.name}", value, formula, row.source),)


def _made_gradients(request: RankRequest, gradients: Term) -> list[Term]:
    """The gradients of the layer in backward, where they do not stay."""
    if gradients.value or request.layout.zero == 3 or request.architecture.adapters:
        return []
    figures, layout = request.figures, request.layout
    largest = figures.layer_on_rank(layout)
    formula = f"{largest:,.0f} parameters × {figures.per.gradients:g} B"
    return [Term("gradients", "gradients of a layer", largest * figures.per.gradients, formula)]


# ── activations ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _activations(request: RankRequest, stage: Stage) -> list[Term]:
    """What all layers in flight keep, at the end of forward."""
    a, layout, tokens = request.architecture, request.layout, request.tokens
    widths, per_layer, casts = request.figures.widths, request.per_layer, request.casts
    if layout.recompute == "full":
        inputs = tokens * widths.stream * a.hidden_size / layout.stream_ranks
        terms = [
            Term("activations", "inputs of the layers", stage.in_flight * inputs,
                 f"{stage.in_flight:g} layers in flight × {tokens:g} tokens × {widths.stream * a.hidden_size:g} B"
                 f" / {layout.stream_ranks} tensor ranks", KORTHIKANTI),
        ]  # fmt: skip
    else:
        terms = [
            Term("activations", "kept by the layers", stage.in_flight * tokens * per_layer,
                 f"{stage.in_flight:g} layers in flight × {tokens:g} tokens × {per_layer:,.0f} B "
                 f"({request.kernels} kernels, {request.attention} attention)", request.layer_source),
        ]  # fmt: skip
        if casts:
            formula = f"{stage.layers:g} layers × {casts:,.0f} B of casts that autocast keeps for backward"
            source = COUNTED if request.figures.is_counted else "definition"
            terms.append(Term("activations", "casts of the weights", stage.layers * casts, formula, source))
    return terms


def _one_layer(request: RankRequest) -> Term:
    """What one layer keeps: at the end of backward, or where layers are computed again, it is all that exists."""
    tokens, per_layer = request.tokens, request.per_layer
    formula = f"{tokens:g} tokens × {per_layer:,.0f} B"
    return Term(
        "activations", "the layer in backward", tokens * per_layer + request.casts, formula, request.layer_source
    )


def _passing(request: RankRequest) -> Term:
    """Gradients of activations on their way through a layer: of the stream, and of the MLP's inner tensors."""
    a, widths, layout = request.architecture, request.figures.widths, request.layout
    size = a.mixture.experts_per_token * a.mixture.expert_size if a.mixture else a.intermediate_size
    stream, inner = widths.stream * a.hidden_size, (2 if a.is_gated else 1) * widths.matmul * size
    each = stream / layout.stream_ranks + inner / layout.tensor
    formula = f"{request.tokens:g} tokens × ({stream:,.0f} / {layout.stream_ranks} + {inner:,.0f} / {layout.tensor}) B"
    return Term("activations", "gradients on their way", request.tokens * each, formula)


def _head_gradient(request: RankRequest, stage: Stage, early: Term) -> list[Term]:
    """The head's gradient, the first that backward makes, where gradients do not exist already."""
    if early.value or stage.number != request.layout.pipeline - 1 or request.architecture.adapters:
        return []
    value = request.architecture.vocab_size * request.architecture.hidden_size * request.figures.per.gradients
    return [Term("gradients", "gradient of the head", value / request.layout.tensor, "the first that backward makes")]


# ── what is gathered from other ranks while it is used ────────────────────────────────────────────────────────────────────

ON_THEIR_WAY = "gradients of two layers"
ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5"
_FSDP = "torch FSDP2: the layer in use, and the one that is gathered meanwhile"
_STAGES = (
    "torchtitan and torch.distributed.pipelining: stages gather weights once a step, and share gradients after the last"
)
_SEQUENCE = (
    "Korthikanti et al., arXiv 2205.05198, section 4.2.2: gathered before a layer's matmuls, and again in backward"
)


def buffer_terms(request: RankRequest, stage: Stage) -> list[Term]:
    """Unsharded layers of ZeRO-3 or offloading, buckets of gradients on their way, and inputs of tensor ranks."""
    layout, per = request.layout, request.figures.per
    inputs = _inputs(request)
    is_shared = layout.zero == 3 and layout.num_sharing > 1
    if not (is_shared or layout.offload != "none"):
        return inputs
    if is_shared and layout.pipeline > 1:
        return [*_whole_stage(request, stage), *inputs]
    # Experts are not gathered: they stay on their ranks.
    largest = request.figures.layer_on_rank(layout)
    terms = []
    if is_shared or layout.offload == "all":
        formula = f"2 × {largest:,.0f} parameters × {per.weights:g} B"
        terms.append(Term("buffers", "two layers, gathered", 2 * largest * per.weights, formula, _FSDP))
        formula = f"2 × {largest:,.0f} parameters × {per.gradients:g} B: of the layer, and on their way"
        terms.append(Term("buffers", ON_THEIR_WAY, 2 * largest * per.gradients, formula, _FSDP))
        outer = _outer_weights(request, stage)
        if outer:
            formula = "embedding, head and last norm stay gathered from forward to backward"
            terms.append(Term("buffers", "outer weights, gathered", outer, formula, _FSDP))
    elif layout.offload == "optimizer":
        formula = f"2 × {largest:,.0f} parameters × {per.optimizer:g} B: of the layer that is updated, and the next"
        terms.append(Term("buffers", "states on their way", 2 * largest * per.optimizer, formula, ZERO))
    return [*terms, *inputs]


def _inputs(request: RankRequest) -> list[Term]:
    """A layer's input and its gradient, whole on each tensor rank; between layers each has a part of the tokens."""
    layout, width = request.layout, request.architecture.hidden_size * request.figures.widths.matmul
    if layout.stream_ranks == 1:
        return []  # whole on every rank, and counted there
    formula = f"2 × {request.tokens:g} tokens × {width:,.0f} B"
    return [
        Term("buffers", "a layer's input and its gradient, gathered", 2 * request.tokens * width, formula, _SEQUENCE)
    ]


def _whole_stage(request: RankRequest, stage: Stage) -> list[Term]:
    """Weights and gradients of a stage: gathering them for every micro-batch would cost more than the bubble saves."""
    layout, figures = request.layout, request.figures
    experts, rest = on_stage(request.architecture, figures.state, layout, stage.layers, stage.number)
    whole = experts + rest
    count = whole.weights / figures.per.weights
    each = figures.per.gradients
    row = ACCUMULATIONS[request.layout.accumulation_dtype]
    if row.keeps_sums(request.recipe.storage.visible):
        each = max(each, row.bytes_per_param * (layout.micro_batches > 1))
    weights, gradients = (f"{count:,.0f} parameters × {width:g} B" for width in (figures.per.weights, each))
    return [
        Term("buffers", "weights of the stage, gathered", whole.weights, weights, _STAGES),
        Term("buffers", "gradients of the stage, before they are shared", count * each, gradients, _STAGES),
    ]


def _outer_weights(request: RankRequest, stage: Stage) -> float:
    state, layout = request.figures.state, request.layout
    parts = [state.embedding] * (stage.number == 0) + [state.head] * (stage.number == layout.pipeline - 1)
    return sum(part.on_rank(layout.tensor).weights for part in parts)


# ── the head and the loss: logits, whole or a chunk of tokens at a time ───────────────────────────────────────────────────

CHUNK_LOGITS = 1 << 24
"""Logits of one chunk of the trainer's loss, 64 MiB in float32: smaller ones make thin matmuls, larger ones gain little."""
LARGE_VOCABULARY = 16_384
"""Vocabulary size from which the trainer uses the chunked loss."""
_LOSS = "log-softmax in float32: its result, its gradient, and the gradient of the logits"


def loss_terms(request: RankRequest, stage: Stage) -> tuple[list[Term], list[Term]]:
    """What the head and the loss keep at the end of forward, and at the start of backward."""
    a, layout, tokens = request.architecture, request.layout, request.tokens
    if stage.number != layout.pipeline - 1:
        return [], []
    widths = request.figures.widths
    norm = tokens * (4 + 2 * widths.stream) * a.hidden_size
    each = f"{tokens:g} tokens × {norm / tokens:g} B"
    hidden = Term("logits", "input of the head", norm / layout.stream_ranks, each)
    if request.is_loss_chunked and layout.model_ranks == 1:
        both = [hidden, *_chunked(request, widths.matmul)]
        return both, both
    # A compiled or fused loss keeps the logits and their gradient alone, in the matmuls' dtype.
    fused = 2 * tokens * widths.matmul * a.vocab_size / layout.tensor
    sizes = bytes_per_logit(widths.matmul)
    texts = ("logits, as float32, log-softmax", _LOSS)
    forward, backward = (
        [hidden, Term("logits", "logits", tokens * size * a.vocab_size / layout.tensor,
                      f"{tokens:g} tokens × {a.vocab_size:,} × {size:g} B / {layout.tensor}: {text}", _LOSS, low=fused)]
        for size, text in zip(sizes, texts, strict=True)
    )  # fmt: skip
    return forward, backward


def bytes_per_logit(width: float) -> tuple[float, float]:
    """Bytes per logit of an unchunked loss at the end of forward and at the start of backward, of logits of ``width`` bytes.

    Example:
        >>> bytes_per_logit(2.0), bytes_per_logit(4.0)
        ((10.0, 12.0), (8.0, 12.0))
    """
    return (width if width < 4 else 0.0) + 8.0, 12.0


def _chunked(request: RankRequest, width: float) -> list[Term]:
    """A chunk of logits, and for narrow weights the head in float32 with its gradient."""
    a = request.architecture
    count = min(CHUNK_LOGITS, request.tokens * a.vocab_size)
    head = a.vocab_size * a.hidden_size
    if width == 4:
        # PyTorch's own chunked loss works in place.
        chunk = Term("logits", "a chunk of logits", 4.0 * count, f"{count:,.0f} logits × 4 B", "torch 2.13, counted")
        return [chunk, Term("logits", "gradient of the head", 4.0 * head, f"{head:,} × 4 B, made in forward")]
    # The larger of two moments: the chunk's log-softmax backward, and its part of the head's gradient, in both dtypes.
    earlier = 4 * (count < request.tokens * a.vocab_size)
    softmax = (4 + width + earlier) * head + 12.0 * count
    weight = (8 + 2 * width + earlier) * head + width * count
    sizes = f"{4 + width + earlier:g} h + 12 c and {8 + 2 * width + earlier:g} h + {width:g} c B"
    formula = (
        f"the larger of {sizes}: h = {head:,} of the head, in float32 and with its gradient, c = {count:,.0f} logits"
    )
    return [
        Term("logits", "a chunk of logits, head in float32", max(softmax, weight), formula, "trainer/language_model.py")
    ]


# ── what no formula gives: the driver, libraries, and what the allocator cannot use ───────────────────────────────────────

FIXED: dict[str, tuple[float, float, float]] = {
    "context": (0.7e9, 0.4e9, 1.0e9),
    "communication buffers": (1.0e9, 0.4e9, 2.0e9),
    "workspaces": (0.1e9, 0.03e9, 0.3e9),
    "fragmentation": (0.03, 0.0, 0.25),
}
"""Memory that no formula gives, ``(usual, least, most)`` in bytes: of the driver, of collectives where there are several ranks,
of libraries; and what the allocator cannot use, as a share of all that changes during a step. In published runs it reserves up
to a quarter more than it hands out (benchmarks/planned_peaks.py), where the chip has room for it."""
_FIXED_SOURCE = "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication"


def overhead_terms(dynamic_bytes: float, num_ranks: int, fixed: Mapping[str, float]) -> list[Term]:
    """The terms of overhead; ``dynamic_bytes``, allocated and freed during a step, can be fragmented.

    ``fixed`` has what is known, by name: bytes, or for fragmentation a share.
    """
    found = []
    for name, (usual, least, most) in FIXED.items():
        if name == "communication buffers" and num_ranks == 1:
            continue
        is_share = name == "fragmentation"
        if name in fixed:
            usual = least = most = fixed[name]
        factor = dynamic_bytes if is_share else 1.0
        formula = f"{usual:.0%} of {dynamic_bytes / 1e9:.3g} GB that change" if is_share else f"{usual / 1e9:g} GB"
        source = "given" if name in fixed else _FIXED_SOURCE
        found.append(Term("overhead", name, usual * factor, formula, source, least * factor, most * factor))
    return found


# ── pipeline stages: which layers a stage holds, and of how many micro-batches their activations exist at once ────────────


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of one pipeline; ``in_flight`` is layers times micro-batches whose activations are held at once."""

    number: int
    layers: float
    in_flight: float


def stages_of(architecture: Architecture, layout: Layout) -> list[Stage]:
    """The stages that can be the worst: the first, the second and the last.

    The first holds the activations of as many micro-batches as there are stages, ``L (1 + (p - 1) / (p v))`` layers; the second
    can have a layer more; the last has the head and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473, figure 4, for interleaving.
    """
    p, v, total = layout.pipeline, layout.interleave, architecture.num_layers
    even = total % (p * v) == 0 or p == 1
    numbers = dict.fromkeys((0, p - 1) if even else (0, 1, p - 1))
    stages = []
    for number in numbers:
        # Uneven stages leave out a layer beside embedding and head.
        per_stage = total / p if even else math.ceil((total + 2) / p) - (number in (0, p - 1))
        held = p - number if v == 1 else (2 * (p - number - 1) + (v - 1) * p + 1) / v
        stages.append(Stage(number, per_stage, per_stage * min(held, layout.micro_batches)))
    return stages
