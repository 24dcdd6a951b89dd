"""Memory of what is gathered from other ranks while it is used: unsharded weights, their gradients, inputs of tensor ranks."""

from __future__ import annotations

from narrowgauge.planner.memory_figures import Request
from narrowgauge.planner.pipeline_stages import Stage
from narrowgauge.planner.state_bytes import on_stage
from narrowgauge.planner.terms import Term
from narrowgauge.spec.accumulations import ACCUMULATIONS

ON_THEIR_WAY = "gradients of two layers"
ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5"
_FSDP = "torch FSDP2: the layer in use, and the one that is gathered meanwhile"
_STAGES = (
    "torchtitan and torch.distributed.pipelining: stages gather weights once a step, and share gradients after the last"
)
_SEQUENCE = (
    "Korthikanti et al., arXiv 2205.05198, section 4.2.2: gathered before a layer's matmuls, and again in backward"
)


def buffer_terms(request: Request, stage: Stage) -> list[Term]:
    """Unsharded layers of ZeRO-3 or offloading, buckets of gradients on their way, and inputs of tensor ranks."""
    layout, per = request.layout, request.figures.per
    inputs = _inputs(request)
    is_shared = layout.zero == 3 and layout.num_sharing > 1
    if not (is_shared or layout.offload != "none"):
        return inputs
    if is_shared and layout.pipeline > 1:
        return [*_whole_stage(request, stage), *inputs]
    # Experts stay where they are, on the ranks of their own.
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


def _inputs(request: Request) -> list[Term]:
    """A layer's input and its gradient, whole on each tensor rank; between layers each has a part of the tokens."""
    layout, width = request.layout, request.architecture.hidden_size * request.figures.widths.matmul
    if layout.stream_ranks == 1:
        return []  # whole on every rank, and counted there
    formula = f"2 × {request.tokens:g} tokens × {width:,.0f} B"
    return [
        Term("buffers", "a layer's input and its gradient, gathered", 2 * request.tokens * width, formula, _SEQUENCE)
    ]


def _whole_stage(request: Request, stage: Stage) -> list[Term]:
    """Weights and gradients of a stage: gathering them for every micro-batch would cost more than the bubble saves."""
    layout, figures = request.layout, request.figures
    experts, rest = on_stage(request.architecture, figures.state, layout, stage.layers, stage.number)
    whole = experts + rest
    count = whole.weights / figures.per.weights
    each = figures.per.gradients
    if request.recipe.storage.visible != "float32":
        each = max(each, ACCUMULATIONS[request.layout.accumulation_dtype].bytes_per_param * (layout.micro_batches > 1))
    weights, gradients = (f"{count:,.0f} parameters × {width:g} B" for width in (figures.per.weights, each))
    return [
        Term("buffers", "weights of the stage, gathered", whole.weights, weights, _STAGES),
        Term("buffers", "gradients of the stage, before they are shared", count * each, gradients, _STAGES),
    ]


def _outer_weights(request: Request, stage: Stage) -> float:
    state, layout = request.figures.state, request.layout
    parts = [state.embedding] * (stage.number == 0) + [state.head] * (stage.number == layout.pipeline - 1)
    return sum(part.on_rank(layout.tensor).weights for part in parts)
