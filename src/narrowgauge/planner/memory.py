"""Memory of the worst rank at the worst moment of a step, term by term.

Three moments can be the worst. At the start of backward, all activations, the logits and their
gradient exist. In the last layer's backward, its temporary gradients replace the logits. At the end
of backward, all gradients exist. Each moment is a sum of terms. We return the terms of the largest
moment, so their sum is a peak, not a sum of peaks.
"""

from __future__ import annotations

import math

from narrowgauge.planner.activations import layer_bytes, widths_of
from narrowgauge.planner.job import OPTIMIZER_STATES, Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.model_state import (
    bytes_per_parameter,
    on_stage,
    shared,
    state_of,
)
from narrowgauge.planner.roofline import bytes_per_number
from narrowgauge.planner.terms import Term, Terms

_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, section 4; as in layers that run (planner/activations.py)"
_ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5"
_FSDP = "torch FSDP2: the layer in use, and the one that is gathered meanwhile"
_STAGES = "torchtitan and torch.distributed.pipelining: stages gather weights once a step, and reduce gradients after the last"
_SEQUENCE = "Korthikanti et al., arXiv 2205.05198, section 4.2.2: gathered before a layer's matmuls, and again in backward"
_LOSS = "compiled: logits and their gradient; eager: 16-bit and float32 logits, log-softmax and its gradient"
_SUMS = "Micikevicius et al. 2018; Megatron-LM's buffers for bf16, and DeepSpeed's where grad_accum_dtype is fp32"
_OVERHEAD_SOURCE = (
    "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication"
)

OVERHEAD = {
    "context": 0.7e9,
    "communication buffers": 1.0e9,
    "workspaces": 0.1e9,
    "fragmentation": 0.08,
}
"""Memory without a formula, in bytes: driver, collectives (with several ranks), libraries.

Fragmentation is a fraction of all memory that changes during a step.
"""
OUTSIDE = ("context", "communication buffers")
"""Memory that a framework's allocator does not reserve.

What it reserves beyond its tensors is the fragmentation.
"""
_EXACT_SUM_BYTES = 16  # of two float64 words that sum them exactly
_IN_TRANSIT = "gradients of two layers"


def stages_of(architecture: Architecture, layout: Layout) -> dict[int, tuple[float, float]]:
    """Return the stages that can be the worst: the first, the second and the last.

    Each has its layers, and layers in flight.

    The first holds activations of as many micro-batches as there are stages, ``L (1 + (p - 1) / (p
    v))`` layers. The second can have a layer more. The last has the head and the logits.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.2.3; Narayanan et al., arXiv 2104.04473,
    figure 4, for interleaving.
    """
    p = layout.pipeline
    v = layout.interleave
    total = architecture.num_layers
    even = total % (p * v) == 0 or p == 1
    stages = {}
    for number in (0, p - 1) if even else (0, 1, p - 1):
        # Uneven stages omit a layer where the embedding or head is.
        layers = total / p if even else math.ceil((total + 2) / p) - (number in (0, p - 1))
        batches_in_flight = p - number if v == 1 else (2 * (p - number - 1) + (v - 1) * p + 1) / v
        stages[number] = layers, layers * min(batches_in_flight, layout.micro_batches)
    return stages


def memory_terms(job: Job) -> Terms:
    """Return the memory of the worst rank at its worst moment: bytes by group."""
    peaks = []
    for stage, (layers, in_flight) in stages_of(job.architecture, job.layout).items():
        terms = _Rank(job, stage, layers, in_flight).worst_moment()
        peaks.append(Terms((*terms, *_overhead_terms(terms, job.layout))))
    return max(peaks, key=lambda terms: terms.total)


def host_bytes(job: Job) -> float:
    """Return the memory that the ranks of a node need on their host: parts, states and inputs of
    layers that lie there.
    """
    most = 0.0
    for stage, (layers, in_flight) in stages_of(job.architecture, job.layout).items():
        rank = _Rank(job, stage, layers, in_flight)
        rank.worst_moment()
        most = max(most, rank.on_host)
    return most * min(job.layout.num_ranks, job.cluster.chips_per_node)


class _Rank:
    """The memory of a rank of one stage, from its number of layers and of layers in flight."""

    def __init__(self, job: Job, stage: int, layers: float, layers_in_flight: float) -> None:
        self.job = job
        self.a = job.architecture
        self.layout = job.layout
        self.tokens = job.tokens
        self.layers = layers
        self.layers_in_flight = layers_in_flight
        self.program = job.program
        self.on_host = 0.0
        self.is_last = stage == self.layout.pipeline - 1
        storage = job.recipe.storage
        is_exact = job.recipe.reduction.order_invariant
        width = bytes_per_number(self.layout.accumulation_dtype)
        is_wide = is_exact or width > bytes_per_number(storage.visible)
        has_sums = self.layout.micro_batches > 1 and is_wide
        self.sum_bytes = (_EXACT_SUM_BYTES if is_exact else width) if has_sums else 0.0
        self.widths = widths_of(job.recipe, job.gathered, job.program)
        self.experts, self.rest = on_stage(job, layers, stage)  # state of the stage before ZeRO
        self.per = bytes_per_parameter(storage.keeping(OPTIMIZER_STATES[job.optimizer]))
        # Bytes of a gathered weight, and of the gradient of a layer's mean parameter before it is
        # sharded.
        visible = bytes_per_number(job.gathered or storage.visible)
        self.gathered = job.weight_bytes
        self.gradient = visible * job.trained_parameters / self.a.num_parameters
        # Parameters of the largest layer on one of the ranks that shard it.
        a = self.a
        layout = self.layout
        experts = a.expert_parameters / a.mixture.num_layers if a.mixture else 0.0
        experts = experts / layout.expert / layout.expert_tensor_ranks
        self.largest_layer = a.largest_layer / layout.tensor + experts

    def worst_moment(self) -> Terms:
        a = self.a
        layout = self.layout
        weights, gradients, optimizer = self.state_terms()
        buffers = self.buffer_terms()
        sums = self.sum_terms(gradients)
        # Autograd adds to earlier gradients. Megatron-LM has buffers for them. Both exist during
        # forward.
        late = early = gradients
        if sums and not layout.is_fsdp:
            late = early = gradients._replace(
                value=0.0, formula="each is added to the sum as soon as it is made"
            )
        elif layout.is_fsdp and (layout.micro_batches == 1 or sums):
            early = gradients._replace(
                value=0.0, formula=f"none at this moment; {gradients.formula} later"
            )
        saved, layer = self.activation_terms()
        # Backward of a layer holds gradients of activations: of the stream, and of the MLP's inner
        # tensors.
        size = (
            a.mixture.experts_per_token * a.mixture.expert_size
            if a.mixture
            else a.intermediate_size
        )
        stream = self.widths.stream * a.hidden_size
        inner = (2 if a.is_gated else 1) * self.widths.matmul * size
        value = self.tokens * (stream / layout.stream_ranks + inner / layout.tensor)
        formula = f"{self.tokens:g} tokens × ({stream:,.0f} / {layout.stream_ranks} + {inner:,.0f} / {layout.tensor}) B"
        passing = Term("activations", "gradients on their way", value, formula)
        # Temporary gradients: of the head, the first in backward, and of the current layer.
        head = []
        of_layer = []
        width = self.gradient
        if not early.value and self.is_last and self.program.part("head").trains:
            width_of_head = bytes_per_number(self.job.gathered or self.job.recipe.storage.visible)
            value = a.vocab_size * a.hidden_size * width_of_head / layout.tensor
            head = [
                Term("gradients", "gradient of the head", value, "the first that backward makes")
            ]
        if not late.value and layout.zero < 3:
            formula = f"{self.largest_layer:,.0f} parameters × {width:g} B"
            of_layer = [
                Term("gradients", "gradients of a layer", self.largest_layer * width, formula)
            ]
        # Accumulation buffers live for the whole step.
        always = [weights, optimizer, *sums]
        if counts := a.counts:
            text = f"{self.tokens:g} tokens × {counts.activations / counts.tokens:,.0f} B, counted on fake tensors"
            value = counts.activations / counts.tokens * self.tokens
            kept = Term("activations", "at the peak of a step", value, text)
            at_peak = gradients._replace(
                value=min(gradients.value, counts.gradients), formula="at this moment, counted"
            )
            last = (weights, optimizer, gradients, *sums)
            return Terms(
                max(
                    [(*always, at_peak, kept, *buffers), last],
                    key=lambda terms: sum(t.value for t in terms),
                )
            )
        # Before the first layer's backward, no gradient is in transit.
        gathered = [term for term in buffers if term.name != _IN_TRANSIT]
        # With full recomputation one layer's activations coexist with every layer's saved input.
        again = (layer,) if layout.recompute != "none" else ()
        moments = [
            (early, *always, *saved, *self.loss_terms(), *gathered),
            (early, *always, *saved, *again, passing, *buffers, *head),
            (late, *always, layer, passing, *buffers, *of_layer),
        ]
        return Terms(max(moments, key=lambda terms: sum(term.value for term in terms)))

    def state_terms(self) -> tuple[Term, Term, Term]:
        layout = self.layout
        per = self.per
        state = shared(self.experts, layout, layout.sharing_experts(layout.num_sharing))
        state += shared(self.rest, layout, layout.num_sharing)
        source = _ZERO if layout.zero and layout.num_sharing > 1 else "definition"

        def term(group: str, name: str, level: int) -> Term:
            value = getattr(state, group)
            width = getattr(per, group)
            over = (
                layout.tensor
                * layout.pipeline
                * (layout.num_sharing if layout.zero >= level else 1)
            )
            formula = (
                f"{self.a.num_parameters:,} parameters × {width:g} B / {over} ranks, "
                "vectors and what is not shared as they are"
            )
            if not self.program.trains_all:
                formula = "parts as the program stores them"
            return Term(group, name, value, formula, source)

        weights, gradients, optimizer = (
            term("weights", "weights", 3), term("gradients", "gradients", 2), term("optimizer", "states beside the weights", 1)
        )  # fmt: skip
        share = self.job.trained_parameters / self.a.num_parameters
        if self.a.counts and share < 1:
            gradients = gradients._replace(value=gradients.value * share)
            optimizer = optimizer._replace(value=optimizer.value * share)
        self.on_host = state.host
        if self.program.offload:
            self.on_host += gradients.value + optimizer.value
        if self.program.release or self.program.offload:
            size = min(gradients.value, self.largest_layer * self.gradient)
            gradients = gradients._replace(
                value=size, formula="of one layer: each is updated and freed, or sent away"
            )
        if self.program.offload:
            optimizer = optimizer._replace(value=0.0, formula="on the host")
        return weights, gradients, optimizer

    def sum_terms(self, gradients: Term) -> tuple[Term, ...]:
        """Return the accumulation buffers of micro-batch gradients.

        Megatron-LM adds each parameter's gradient to its buffer within backward, so only the buffer
        exists. This project's trainer adds a micro-batch's gradients after all of them exist.

        Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py,
        ``_make_backward_post_hook``.
        """
        if not self.sum_bytes:
            return ()
        count = gradients.value / self.per.gradients
        where = (
            "beside the last gradients"
            if self.layout.is_fsdp
            else "to which each gradient is added"
        )
        formula = f"{count:.4g} parameters × {self.sum_bytes:g} B, {where}"
        is_exact = self.job.recipe.reduction.order_invariant
        kind = "exact sum" if is_exact else f"sum in {self.layout.accumulation_dtype}"
        return (Term("gradients", kind, count * self.sum_bytes, formula, _SUMS),)

    def activation_terms(self) -> tuple[list[Term], Term]:
        """Return the tensors saved by all layers in flight at the end of forward, and the memory of
        the layer in backward.
        """
        a = self.a
        layout = self.layout
        in_flight = self.layers_in_flight
        tokens = self.tokens
        job = self.job
        length = self.job.sequence_length if self.program.attention == "eager" else 0

        def bytes_of(repeated: str) -> tuple[float, float]:
            saved, stream, casts = layer_bytes(
                a, job.recipe, self.program, job.gathered, repeated, length
            )
            return stream / layout.stream_ranks + (
                saved - stream
            ) / layout.tensor, casts / layout.tensor

        per_layer, casts = bytes_of("")
        formula = f"{tokens:g} tokens × {per_layer:,.0f} B"
        layer = Term(
            "activations",
            "the layer in backward",
            tokens * per_layer + casts,
            formula,
            _KORTHIKANTI,
        )
        start = f"{in_flight:g} layers in flight × {tokens:g} tokens × "
        if layout.recompute == "full":
            width = self.widths.stream * a.hidden_size
            value = in_flight * tokens * width / layout.stream_ranks
            formula = f"{start}{width:g} B / {layout.stream_ranks} tensor ranks"
            if self.program.saved == "host":
                self.on_host += value
                value *= min(1.0, 2 / in_flight)
                formula = "of the two layers in use, the others on the host"
            return [
                Term("activations", "inputs of the layers", value, formula, _KORTHIKANTI)
            ], layer
        if layout.recompute == "selective":
            per_layer, casts = bytes_of(self.program.selective)
        value = in_flight * tokens * per_layer
        formula = f"{start}{per_layer:,.0f} B ({self.program.kernels} kernels, {self.program.attention} attention)"
        terms = [Term("activations", "kept by the layers", value, formula, _KORTHIKANTI)]
        if casts:
            formula = (
                f"{self.layers:g} layers × {casts:,.0f} B of casts that autocast keeps for backward"
            )
            terms.append(Term("activations", "casts of the weights", self.layers * casts, formula))
        return terms, layer

    def buffer_terms(self) -> list[Term]:
        """Return unsharded layers of ZeRO-3, gradients in transit, and gathered inputs of tensor
        ranks.
        """
        layout = self.layout
        per = self.per
        largest = self.largest_layer
        terms: list[Term] = []

        def add(name: str, count: float, width: float, source: str) -> None:
            formula = f"{count:,.0f} parameters × {width:g} B"
            terms.append(Term("buffers", name, count * width, formula, source))

        is_sharded = layout.zero == 3 and layout.num_sharing > 1
        if is_sharded and layout.pipeline > 1:
            # Gathering weights for every micro-batch would cost more than the bubble saves.
            count = (self.experts + self.rest).weights / (
                per.weights if self.program.trains_all else self.gathered
            )
            reduced = bytes_per_number(self.program.reduced) if self.job.gathered else 0.0
            width = max(self.gradient, self.sum_bytes, reduced)
            add("weights of the stage, gathered", count, self.gathered, _STAGES)
            add("gradients of the stage, before they are shared", count, width, _STAGES)
        elif is_sharded:
            add("two layers, gathered", 2 * largest, self.gathered, _FSDP)
            add(_IN_TRANSIT, 2 * largest, self.gradient, _FSDP)
            state = state_of(
                self.a,
                self.job.recipe.storage,
                self.job.optimizer,
                layout.tensor,
                program=self.program,
            )
            outer = state.embedding.weights + state.head.weights
            if self.job.gathered:
                outer *= self.gathered / per.weights
            formula = "embedding, head and last norm stay gathered from forward to backward"
            terms.append(Term("buffers", "outer weights, gathered", outer, formula, _FSDP))
        narrow = [
            m.num_elements / m.count
            for m in self.a.matmuls[:-1]
            if self.program.part_of(m).is_narrow
        ]
        if narrow:
            matrix = max(narrow) / layout.tensor
            add(
                "a matrix, dequantized", matrix, 2.0, "bitsandbytes: the largest matrix in bfloat16"
            )
        if layout.stream_ranks > 1:  # else every rank holds it whole, and it is counted there
            tokens = 2 * self.tokens
            row = self.a.hidden_size * self.widths.matmul
            name = "a layer's input and its gradient, gathered"
            formula = f"{tokens:g} tokens × {row:,.0f} B"
            terms.append(Term("buffers", name, tokens * row, formula, _SEQUENCE))
        return terms

    def loss_terms(self) -> list[Term]:
        """Return the memory of head and loss at the start of backward."""
        if not self.is_last:
            return []
        layout = self.layout
        tokens = self.tokens
        vocab = self.a.vocab_size
        program = self.program
        row = (4 + 2 * self.widths.stream) * self.a.hidden_size
        value = tokens * row / layout.stream_ranks
        hidden = Term("logits", "input of the head", value, f"{tokens:g} tokens × {row:g} B")
        width = program.logit_bytes(self.widths.matmul)
        formula = (
            f"{tokens:g} tokens × {vocab:,} × {width:.3g} B / {layout.tensor} ({program.loss} loss)"
        )
        return [
            hidden,
            Term("logits", "logits", tokens * vocab * width / layout.tensor, formula, _LOSS),
        ]


def _overhead_terms(terms: Terms, layout: Layout) -> list[Term]:
    """Return memory without a formula. What is allocated and freed during a step can fragment."""
    changing = terms.without("weights", "optimizer")
    overhead = []
    for name, usual in OVERHEAD.items():
        if name == "communication buffers" and layout.num_ranks == 1:
            continue
        value = usual
        formula = f"{usual / 1e9:g} GB"
        if name == "fragmentation":
            value = usual * changing.total
            formula = f"{usual:.0%} of {changing.total / 1e9:.3g} GB that change"
        overhead.append(Term("overhead", name, value, formula, _OVERHEAD_SOURCE))
    return overhead
