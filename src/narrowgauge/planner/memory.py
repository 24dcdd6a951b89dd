"""Memory of the worst rank, term by term, at the worst moment of a step.

A step has moments that can be the worst: the end of forward, where all activations and the logits exist; the start of
backward, where the logits' gradient joins them; and the end of backward, where all gradients exist. Each is a sum of terms;
the terms of the largest are returned, so that their sum is a peak and not a sum of peaks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from narrowgauge.planner.activations import (
    Attention,
    Kernels,
    Widths,
    bytes_per_token,
    cast_weight_bytes,
    layer_tensors,
    widths_of,
)
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.model_state import Bytes, ModelState, bytes_per_parameter, on_stage, shared, state_of
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.sums import ACCUMULATIONS, Accumulation

_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, section 4; as in layers that run (planner/activations.py)"
_ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5"
_FSDP = "torch FSDP2: the layer in use, and the one that is gathered meanwhile"
_STAGES = (
    "torchtitan and torch.distributed.pipelining: stages gather weights once a step, and share gradients after the last"
)
_SEQUENCE = (
    "Korthikanti et al., arXiv 2205.05198, section 4.2.2: gathered before a layer's matmuls, and again in backward"
)
_LOSS = "log-softmax in float32: its result, its gradient, and the gradient of the logits"
_FIXED_SOURCE = "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication"

CHUNK_LOGITS = 1 << 24
"""Logits of one chunk of the trainer's loss, 64 MiB in float32: smaller ones make thin matmuls, larger ones gain little."""
LARGE_VOCABULARY = 16_384
"""Vocabulary size from which the trainer uses the chunked loss."""
FIXED: dict[str, tuple[float, float, float]] = {
    "context": (0.7e9, 0.4e9, 1.0e9),
    "communication buffers": (1.0e9, 0.4e9, 2.0e9),
    "workspaces": (0.1e9, 0.03e9, 0.3e9),
    "fragmentation": (0.03, 0.0, 0.25),
}
"""Memory that no formula gives, ``(usual, least, most)`` in bytes: of the driver, of collectives where there are several ranks,
of libraries; and what the allocator cannot use, as a share of all that changes during a step. In published runs it reserves up
to a quarter more than it hands out, where the chip has room for it."""
_STEP_GROUPS = ("activations", "logits", "buffers", "gradients")
_FORMULA_ERROR = 0.05  # steps that were run and counted differ by less
_ON_THE_WAY = "gradients of two layers"


@dataclass(frozen=True, slots=True)
class _Model:
    """What does not depend on the layout: per token of a mean layer all bytes, those of the residual stream, and of scores;
    bytes of the casts of a layer's weights that autocast saves; and bytes of a parameter of the layers."""

    saved: float
    stream: float
    scores: float
    casts: float
    widths: Widths
    per: Bytes
    state: ModelState


@lru_cache(maxsize=1024)
def _model(a: Architecture, recipe: Recipe, length: int, attention: Attention, kernels: Kernels) -> _Model:
    mixtures = a.mixture.num_layers if a.mixture else 0
    keys = a.mean_keys(length, is_causal=False)
    total = stream = scores = casts = 0.0
    for is_mixture, count in ((False, a.num_layers - mixtures), (True, mixtures)):
        if count:
            tensors = layer_tensors(a, recipe, is_mixture=is_mixture, attention=attention, kernels=kernels)
            share = count / a.num_layers
            total += share * bytes_per_token(tensors)
            stream += share * sum(tensor.bytes_per_token for tensor in tensors if tensor.is_stream)
            scores += share * sum(tensor.per_key for tensor in tensors) * keys
    if a.has_shape:
        elements = sum(matmul.num_elements for matmul in a.matmuls[:-1]) / a.num_layers
        casts = cast_weight_bytes(a, recipe) * elements
    per = bytes_per_parameter(recipe.storage)
    if a.adapters is not None:
        # A frozen parameter has its share of the adapters' gradients and states.
        share = a.trained_share
        per = Bytes(a.adapters.base_bytes + share * per.weights, share * per.gradients, share * per.optimizer)
    widths = widths_of(recipe.compute, recipe.storage.visible)
    return _Model(total, stream, scores, casts, widths, per, state_of(a, recipe))


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of one pipeline; ``in_flight`` is layers times micro-batches whose activations exist at once."""

    number: int
    layers: float
    in_flight: float


def stages_of(architecture: Architecture, layout: Layout) -> list[Stage]:
    """Return the stages that can be the worst: the first, the second and the last.

    The first holds the activations of as many micro-batches as there are stages, ``L (1 + (p - 1) / (p v))`` layers; the second
    can have a layer more; the last has the head and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473, figure 4, for interleaving.
    """
    p, v, total = layout.pipeline, layout.interleave, architecture.num_layers
    even = total % (p * v) == 0 or p == 1
    stages = []
    for number in dict.fromkeys((0, p - 1) if even else (0, 1, p - 1)):
        # Uneven stages leave out a layer beside embedding and head.
        layers = total / p if even else math.ceil((total + 2) / p) - (number in (0, p - 1))
        held = p - number if v == 1 else (2 * (p - number - 1) + (v - 1) * p + 1) / v
        stages.append(Stage(number, layers, layers * min(held, layout.micro_batches)))
    return stages


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
) -> Terms:
    """Return the memory of the worst rank at its worst moment: bytes in the groups of ``MEMORY_GROUPS``.

    Args:
        architecture: one of which only the size is known gets its state and nothing else.
        attention: whether scores are saved.
        is_loss_chunked: whether logits are computed a chunk of tokens at a time. With tensor, pipeline or context parallelism
            they are not.
        kernels: of norms and activation functions; None for ``"eager"`` where every rank computes whole layers, which are then
            Hugging Face's, and ``"fused"`` elsewhere, as in Megatron-LM.
        fixed: bytes of overhead by name of ``FIXED`` where they are known, fragmentation as a share; each is then exact.

    Example:
        >>> from narrowgauge.planner.model import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> [memory_terms(of_size(10e9), parse(f"bfloat16/{s}"), Layout(), 0).total / 1e9 for s in ("master", "word", "states8")]
        [160.0, 80.0, 60.0]
    """
    # PEFT's models do not have the trainer's chunked loss.
    is_chunked = is_loss_chunked and architecture.adapters is None
    ranks = _ranks(architecture, recipe, layout, sequence_length, attention, kernels, is_chunked, fixed or {})
    return max((rank.worst_moment() for rank in ranks), key=lambda terms: terms.total)


def state_terms(architecture: Architecture, recipe: Recipe, layout: Layout) -> Terms:
    """Return what the worst rank holds all step long: weights, gradients, optimizer states and sums of micro-batches.

    Example:
        >>> from narrowgauge.planner.model import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> state_terms(of_size(1e9), parse("bfloat16/word"), Layout(micro_batches=2)).groups
        {'weights': 2000000000.0, 'gradients': 6000000000.0, 'optimizer': 4000000000.0}
    """
    states = [(rank, rank.state_terms()) for rank in _ranks(architecture, recipe, layout, 0)]
    return max((Terms((*state, *rank.sum_terms(state[1]))) for rank, state in states), key=lambda terms: terms.total)


def host_bytes(architecture: Architecture, recipe: Recipe, layout: Layout) -> float:
    """Return what a rank of a layout with offloading keeps in the host's memory.

    Example:
        >>> from narrowgauge.planner.model import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> host_bytes(of_size(8e9), parse("bfloat16/word"), Layout(shard=8, offload="optimizer")) / 1e9
        4.0
    """
    if layout.offload == "none":
        return 0.0
    states = (rank.state() for rank in _ranks(architecture, recipe, layout, 0))
    return max(state.optimizer if layout.offload == "optimizer" else state.total for state in states)


def _ranks(
    a: Architecture,
    recipe: Recipe,
    layout: Layout,
    length: int,
    attention: Attention = "flash",
    kernels: Kernels | None = None,
    is_loss_chunked: bool = True,
    fixed: Mapping[str, float] | None = None,
) -> list[_Rank]:
    kernels = kernels or ("eager" if layout.is_whole else "fused")
    model, how = _model(a, recipe, length, attention, kernels), f"{kernels} kernels, {attention} attention"
    tokens = layout.tokens_on_rank(length)
    return [_Rank(a, recipe, layout, tokens, s, model, how, is_loss_chunked, fixed or {}) for s in stages_of(a, layout)]


@dataclass(frozen=True)
class _Rank:
    """A rank of one stage, with the arguments of :func:`memory_terms`; ``tokens`` are those of a micro-batch."""

    a: Architecture
    recipe: Recipe
    layout: Layout
    tokens: float
    stage: Stage
    model: _Model
    how: str
    is_loss_chunked: bool
    fixed: Mapping[str, float]

    @property
    def is_last(self) -> bool:
        return self.stage.number == self.layout.pipeline - 1

    @cached_property
    def accumulation(self) -> Accumulation | None:
        """Return how micro-batches' gradients are summed in buffers; None where they are not."""
        row = ACCUMULATIONS[self.layout.accumulation_dtype]
        return row if self.layout.micro_batches > 1 and row.keeps_sums(self.recipe.storage.visible) else None

    @cached_property
    def per_layer(self) -> float:
        """Return the bytes per token that a layer saves on a rank."""
        model, layout = self.model, self.layout
        scores = 0.0 if layout.recompute == "selective" else model.scores
        return model.stream / layout.stream_ranks + (model.saved - model.stream + scores) / layout.tensor

    @cached_property
    def largest_layer(self) -> float:
        """Return the parameters of the largest layer on one of the ranks that share it."""
        experts = self.a.expert_parameters / self.a.mixture.num_layers if self.a.mixture else 0.0
        layout = self.layout
        return self.a.largest_layer / layout.tensor + experts / layout.expert / layout.expert_tensor_ranks

    def worst_moment(self) -> Terms:
        state = self.state_terms()
        if not self.a.has_shape:
            return Terms(state)
        weights, gradients, optimizer = state
        layout, buffers, sums = self.layout, self.buffer_terms(), self.sum_terms(gradients)
        source = gradients.source
        # Autograd adds to earlier gradients, and Megatron-LM has buffers for them: then they exist during forward.
        is_early = not layout.is_fsdp or (layout.micro_batches > 1 and not sums)
        if sums and not layout.is_fsdp:
            gradients = early = Term(
                "gradients", "gradients", 0.0, "each is added to the sum as soon as it is made", source
            )
        elif is_early:
            early = gradients
        else:
            early = Term("gradients", "gradients", 0.0, f"none at this moment; {gradients.formula} later", source)
        forward, backward = self.loss_terms()
        saved, layer, passing = self.activation_terms(), self._one_layer(), self._passing()
        # Accumulation buffers live for the whole step.
        always = (weights, optimizer, *sums, *self._widened_matrix())
        # No gradient is on its way before the first layer's backward.
        gathered = [term for term in buffers if term.name != _ON_THE_WAY]
        # With full recomputation one layer's activations coexist with every layer's saved input.
        again = (layer,) if layout.recompute == "full" else ()
        moments = [
            (early, *always, *saved, *forward, *gathered),
            (early, *always, *saved, *backward, *gathered),
            (early, *always, *saved, *again, passing, *buffers, *self._head_gradient(early)),
            (gradients, *always, layer, passing, *buffers, *self._layer_gradients(gradients)),
        ]
        worst = max(moments, key=lambda terms: sum(term.value for term in terms))
        changing = sum(term.value for term in worst if term.group in _STEP_GROUPS)
        return Terms((*map(_with_error, worst), *self.overhead_terms(changing)))

    # between steps

    def state(self) -> Bytes:
        layout, stage = self.layout, self.stage
        experts, rest = on_stage(self.a, self.model.state, layout, stage.layers, stage.number)
        on_rank = shared(experts, layout, layout.sharing_experts(layout.num_sharing))
        return on_rank + shared(rest, layout, layout.num_sharing)

    def state_terms(self) -> tuple[Term, Term, Term]:
        layout, state, per = self.layout, self.state(), self.model.per
        offloaded = {"none": (), "optimizer": ("optimizer",), "all": ("weights", "gradients", "optimizer")}
        source = _ZERO if layout.zero and layout.num_sharing > 1 else "definition"

        def term(group: str, name: str, level: int) -> Term:
            value, width = getattr(state, group), getattr(per, group)
            over = layout.tensor * layout.pipeline * (layout.num_sharing if layout.zero >= level else 1)
            formula = f"{self.a.num_parameters:,} parameters × {width:g} B / {over} ranks"
            if self.a.has_shape:
                formula += ", vectors and what is not shared as they are"
            if group in offloaded[layout.offload]:
                value, formula = 0.0, f"in the host's memory ({value / 1e9:.3g} GB a rank)"
            return Term(group, name, value, formula, source)

        optimizer = term("optimizer", "states beside the weights", 1)
        return term("weights", "weights", 3), term("gradients", "gradients", 2), optimizer

    def sum_terms(self, gradients: Term) -> tuple[Term, ...]:
        """Return the buffers in which micro-batches' gradients are summed.

        Megatron-LM adds each parameter's gradient to its buffer within backward, so the buffer is all there is; this project's
        trainer adds a micro-batch's gradients when it has all of them.

        Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py, ``_make_backward_post_hook``.
        """
        row = self.accumulation
        if row is None:
            return ()
        count = gradients.value / bytes_per_parameter(self.recipe.storage).gradients
        where = "beside the last gradients" if self.layout.is_fsdp else "to which each gradient is added"
        formula = f"{count:.4g} parameters × {row.bytes_per_param:g} B, {where}"
        return (Term("gradients", f"sum in {row.name}", count * row.bytes_per_param, formula, row.source),)

    # activations

    def activation_terms(self) -> list[Term]:
        """Return what all layers in flight save, at the end of forward."""
        stage, tokens, layout = self.stage, self.tokens, self.layout
        start = f"{stage.in_flight:g} layers in flight × {tokens:g} tokens × "
        if layout.recompute == "full":
            width = self.model.widths.stream * self.a.hidden_size
            value = stage.in_flight * tokens * width / layout.stream_ranks
            formula = f"{start}{width:g} B / {layout.stream_ranks} tensor ranks"
            return [Term("activations", "inputs of the layers", value, formula, _KORTHIKANTI)]
        value = stage.in_flight * tokens * self.per_layer
        formula = f"{start}{self.per_layer:,.0f} B ({self.how})"
        terms = [Term("activations", "kept by the layers", value, formula, _KORTHIKANTI)]
        if casts := self.model.casts / layout.tensor:
            formula = f"{stage.layers:g} layers × {casts:,.0f} B of casts that autocast keeps for backward"
            terms.append(Term("activations", "casts of the weights", stage.layers * casts, formula))
        return terms

    def _one_layer(self) -> Term:
        value = self.tokens * self.per_layer + self.model.casts / self.layout.tensor
        formula = f"{self.tokens:g} tokens × {self.per_layer:,.0f} B"
        return Term("activations", "the layer in backward", value, formula, _KORTHIKANTI)

    def _passing(self) -> Term:
        """Return the gradients of activations on their way through a layer: of the stream, and of the MLP's inner tensors."""
        a, widths, layout = self.a, self.model.widths, self.layout
        size = a.mixture.experts_per_token * a.mixture.expert_size if a.mixture else a.intermediate_size
        stream, inner = widths.stream * a.hidden_size, (2 if a.is_gated else 1) * widths.matmul * size
        value = self.tokens * (stream / layout.stream_ranks + inner / layout.tensor)
        formula = f"{self.tokens:g} tokens × ({stream:,.0f} / {layout.stream_ranks} + {inner:,.0f} / {layout.tensor}) B"
        return Term("activations", "gradients on their way", value, formula)

    def _layer_gradients(self, gradients: Term) -> list[Term]:
        """Return the gradients of the layer in backward, where they do not stay."""
        if gradients.value or self.layout.zero == 3 or self.a.adapters:
            return []
        width = self.model.per.gradients
        formula = f"{self.largest_layer:,.0f} parameters × {width:g} B"
        return [Term("gradients", "gradients of a layer", self.largest_layer * width, formula)]

    def _head_gradient(self, early: Term) -> list[Term]:
        """Return the head's gradient, the first that backward makes, where gradients do not exist already."""
        if early.value or not self.is_last or self.a.adapters:
            return []
        value = self.a.vocab_size * self.a.hidden_size * self.model.per.gradients / self.layout.tensor
        return [Term("gradients", "gradient of the head", value, "the first that backward makes")]

    def _widened_matrix(self) -> list[Term]:
        """Return a matrix of a narrow frozen base in 16 bits, for as long as its product takes."""
        if self.a.adapters is None or not self.a.adapters.is_widened:
            return []
        largest = max(m.in_features * m.out_features for m in self.a.matmuls[:-1]) / self.layout.tensor
        formula, source = f"{largest:,.0f} parameters × 2 B", "QLoRA, arXiv 2305.14314, section 3"
        return [Term("buffers", "a frozen matrix, widened", 2 * largest, formula, source)]

    # what is gathered from other ranks while it is used

    def buffer_terms(self) -> list[Term]:
        """Return unsharded layers of ZeRO-3 or offloading, gradients on their way, and inputs of tensor ranks."""
        layout, per, largest = self.layout, self.model.per, self.largest_layer
        two_layers = f"2 × {largest:,.0f} parameters ×"
        terms: list[Term] = []

        def add(name: str, value: float, formula: str, source: str) -> None:
            terms.append(Term("buffers", name, value, formula, source))

        is_sharded = layout.zero == 3 and layout.num_sharing > 1
        if is_sharded and layout.pipeline > 1:
            # Gathering them for every micro-batch would cost more than the bubble saves.
            experts, rest = on_stage(self.a, self.model.state, layout, self.stage.layers, self.stage.number)
            weights, width = (experts + rest).weights, per.gradients
            count = weights / per.weights
            width = max(width, self.accumulation.bytes_per_param) if self.accumulation else width
            add("weights of the stage, gathered", weights, f"{count:,.0f} parameters × {per.weights:g} B", _STAGES)
            name = "gradients of the stage, before they are shared"
            add(name, count * width, f"{count:,.0f} parameters × {width:g} B", _STAGES)
        elif is_sharded or layout.offload == "all":
            add("two layers, gathered", 2 * largest * per.weights, f"{two_layers} {per.weights:g} B", _FSDP)
            formula = f"{two_layers} {per.gradients:g} B: of the layer, and on their way"
            add(_ON_THE_WAY, 2 * largest * per.gradients, formula, _FSDP)
            ends = [self.model.state.embedding] * (self.stage.number == 0) + [self.model.state.head] * self.is_last
            if outer := sum(part.on_rank(layout.tensor).weights for part in ends):
                formula = "embedding, head and last norm stay gathered from forward to backward"
                add("outer weights, gathered", outer, formula, _FSDP)
        elif layout.offload == "optimizer":
            formula = f"{two_layers} {per.optimizer:g} B: of the layer that is updated, and the next"
            add("states on their way", 2 * largest * per.optimizer, formula, _ZERO)
        if layout.stream_ranks > 1:  # else it is whole on every rank, and counted there
            width = self.a.hidden_size * self.model.widths.matmul
            formula = f"2 × {self.tokens:g} tokens × {width:,.0f} B"
            add("a layer's input and its gradient, gathered", 2 * self.tokens * width, formula, _SEQUENCE)
        return terms

    # the head and the loss

    def loss_terms(self) -> tuple[list[Term], list[Term]]:
        """Return what the head and the loss save at the end of forward, and hold at the start of backward."""
        if not self.is_last:
            return [], []
        layout, tokens, vocab, widths = self.layout, self.tokens, self.a.vocab_size, self.model.widths
        row = (4 + 2 * widths.stream) * self.a.hidden_size
        formula = f"{tokens:g} tokens × {row:g} B"
        hidden = Term("logits", "input of the head", tokens * row / layout.stream_ranks, formula)
        if self.is_loss_chunked and layout.model_ranks == 1:
            terms = [hidden, *self._chunked_loss(widths.matmul)]
            return terms, terms

        def logits(size: float, what: str) -> list[Term]:
            formula = f"{tokens:g} tokens × {vocab:,} × {size:g} B / {layout.tensor}: {what}"
            # A compiled or fused loss keeps the logits and their gradient alone, in the matmuls' dtype.
            low, value = (tokens * width * vocab / layout.tensor for width in (2 * widths.matmul, size))
            return [hidden, Term("logits", "logits", value, formula, _LOSS, low=low)]

        narrow = widths.matmul if widths.matmul < 4 else 0.0
        return logits(narrow + 8.0, "logits, as float32, log-softmax"), logits(12.0, _LOSS)

    def _chunked_loss(self, width: float) -> list[Term]:
        """Return a chunk of logits, and for narrow weights the head in float32 with its gradient."""
        logits = self.tokens * self.a.vocab_size
        count, head = min(CHUNK_LOGITS, logits), self.a.vocab_size * self.a.hidden_size
        if width == 4:
            # PyTorch's own chunked loss works in place.
            formula = f"{count:,.0f} logits × 4 B"
            chunk = Term("logits", "a chunk of logits", 4.0 * count, formula, "torch 2.13, counted")
            return [chunk, Term("logits", "gradient of the head", 4.0 * head, f"{head:,} × 4 B, made in forward")]
        # The larger of two moments: the chunk's log-softmax backward, and its part of the head's gradient, in both dtypes.
        earlier = 4 * (count < logits)
        softmax = (4 + width + earlier) * head + 12.0 * count
        weight = (8 + 2 * width + earlier) * head + width * count
        formula = (
            f"the larger of {4 + width + earlier:g} h + 12 c and {8 + 2 * width + earlier:g} h + {width:g} c B: h = {head:,} "
            f"of the head, in float32 and with its gradient, c = {count:,.0f} logits"
        )
        name = "a chunk of logits, head in float32"
        return [Term("logits", name, max(softmax, weight), formula, "trainer/language_model.py")]

    # what no formula gives

    def overhead_terms(self, changing: float) -> list[Term]:
        """Return the terms of overhead; ``changing`` bytes are allocated and freed during a step, and can be fragmented."""
        terms = []
        for name, interval in FIXED.items():
            if name == "communication buffers" and self.layout.num_ranks == 1:
                continue
            usual, least, most = (self.fixed[name],) * 3 if name in self.fixed else interval
            is_share = name == "fragmentation"
            factor = changing if is_share else 1.0
            formula = f"{usual:.0%} of {changing / 1e9:.3g} GB that change" if is_share else f"{usual / 1e9:g} GB"
            source = "given" if name in self.fixed else _FIXED_SOURCE
            terms.append(Term("overhead", name, usual * factor, formula, source, least * factor, most * factor))
        return terms


def _with_error(term: Term) -> Term:
    """Widen the interval of a term by the error of formulas."""
    if term.group not in _STEP_GROUPS:
        return term
    low, high = term.interval
    # Not dataclasses.replace, which takes most of a search's time.
    ends = low * (1 - _FORMULA_ERROR), high * (1 + _FORMULA_ERROR)
    return Term(term.group, term.name, term.value, term.formula, term.source, *ends)
