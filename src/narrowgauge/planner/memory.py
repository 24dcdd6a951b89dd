"""Memory of the worst rank at the worst moment of a step, term by term.

Three moments can be the worst. At the start of backward, all activations, the logits and their
gradient exist. In the last layer's backward, its temporary gradients replace the logits. At the end
of backward, all gradients exist. Each moment is a sum of terms. We return the terms of the largest
moment, so their sum is a peak, not a sum of peaks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from narrowgauge.planner.activations import layer_bytes, widths_of
from narrowgauge.planner.architecture import Architecture
from narrowgauge.planner.host import in_use_bytes
from narrowgauge.planner.job import OPTIMIZER_STATES, Job
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model_state import (
    bytes_per_parameter,
    on_stage,
    shared,
    state_of,
)
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.spec.formats import bytes_per_number

GROUPS = {
    "weights": ("weights",),
    "gradients": ("gradients", "gradients of a layer", "gradient of the head", "sums of micro-batches"),
    "optimizer": ("states beside the weights",),
    "activations": ("kept by the layers", "inputs of the layers", "casts of the weights", "the layer in backward",
                    "gradients on their way", "at the peak of a step"),
    "logits": ("input of the head", "logits"),
    "buffers": ("two layers, gathered", "gradients of two layers", "outer weights, gathered",
                "weights of the stage, gathered", "gradients of the stage, before they are shared",
                "a matrix, dequantized", "a layer from the host", "a layer's input and its gradient, gathered"),
    "overhead": ("context", "communication buffers", "workspaces", "fragmentation"),
}  # fmt: skip
"""Every term of a memory, by group."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}
_KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, section 4; as in layers that run (planner/activations.py)"
_ZERO = "Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5"
_FSDP = "torch FSDP2: the layer in use, and the one that is gathered meanwhile"
_STAGES = "torchtitan and torch.distributed.pipelining: stages gather weights once a step, and reduce gradients after the last"
_SOURCES = {
    "weights": _ZERO,
    "gradients": _ZERO,
    "states beside the weights": _ZERO,
    "sums of micro-batches": "Micikevicius et al. 2018; Megatron-LM's buffers, DeepSpeed's where grad_accum_dtype is fp32",
    "kept by the layers": _KORTHIKANTI,
    "inputs of the layers": _KORTHIKANTI,
    "the layer in backward": _KORTHIKANTI,
    "logits": "compiled: logits and their gradient; eager: 16-bit and float32 logits, log-softmax and its gradient",
    "two layers, gathered": _FSDP,
    "gradients of two layers": _FSDP,
    "outer weights, gathered": _FSDP,
    "weights of the stage, gathered": _STAGES,
    "gradients of the stage, before they are shared": _STAGES,
    "a matrix, dequantized": "bitsandbytes: the largest matrix in bfloat16",
    "a layer from the host": "definition",
    "a layer's input and its gradient, gathered": "Korthikanti et al., arXiv 2205.05198, section 4.2.2",
    **dict.fromkeys(GROUPS["overhead"], "commonly observed: CUDA contexts, NCCL's channels, cuBLAS's workspace; no publication"),
}  # fmt: skip
"""Publications behind a term; without one it follows from a definition."""

OVERHEAD = {"context": 0.7e9, "communication buffers": 1.0e9, "workspaces": 0.1e9}
"""Memory without a formula, in bytes: driver, collectives (with several ranks), libraries."""
FRAGMENTATION = 0.08
"""Fraction of all memory that changes during a step."""
OUTSIDE = ("context", "communication buffers")
"""Memory that a framework's allocator does not reserve.

What it reserves beyond its tensors is the fragmentation.
"""
_EXACT_SUM_BYTES = 16  # of two float64 words that sum them exactly


def _term(name: str, value: float, formula: str) -> Term:
    return Term(_GROUP_OF[name], name, value, formula, _SOURCES.get(name, "definition"))


def _of(count: float, noun: str, width: float) -> tuple[float, str]:
    """Return the bytes of ``count`` things of ``width`` bytes, and their formula."""
    return count * width, f"{count:,.10g} {noun} × {width:,.6g} B"


def _largest(moments: Sequence[Sequence[Term]]) -> Terms:
    sums = [Terms(tuple(terms)) for terms in moments]
    return max(sums, key=attrgetter("total"))


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
    for number in {0, p - 1} if even else {0, 1, p - 1}:
        # Uneven stages omit a layer where the embedding or head is.
        layers = total / p
        if not even:
            layers = math.ceil((total + 2) / p) - (number in (0, p - 1))
        batches_in_flight = float(p - number)
        if v > 1:
            batches_in_flight = (2 * (p - number - 1) + (v - 1) * p + 1) / v
        stages[number] = layers, layers * min(batches_in_flight, layout.micro_batches)
    return stages


def memory_terms(job: Job) -> Terms:
    """Return the memory of the worst rank at its worst moment: bytes by group."""
    peaks = []
    for rank in _ranks(job):
        terms = rank.worst_moment()
        peaks.append(Terms((*terms, *_overhead_terms(terms, job.layout))))
    return max(peaks, key=attrgetter("total"))


def host_bytes(job: Job) -> float:
    """Return the memory that the ranks of a node need on their host: parts, states and inputs of
    layers that lie there.
    """
    most = max(rank.on_host for rank in _ranks(job))
    return most * min(job.layout.num_ranks, job.cluster.chips_per_node)


def _ranks(job: Job) -> Iterator[_Rank]:
    for stage, (layers, in_flight) in stages_of(job.architecture, job.layout).items():
        yield _Rank(job, stage, layers, in_flight)


class _Rank:
    """The memory of a rank of one stage, from its number of layers and of layers in flight.

    Attributes:
        on_host: bytes that lie in the host's memory.
    """

    def __init__(self, job: Job, stage: int, layers: float, layers_in_flight: float) -> None:
        self.job = job
        self.a = a = job.architecture
        self.layout = layout = job.layout
        self.program = job.program
        self.layers = layers
        self.layers_in_flight = layers_in_flight
        self.is_last = stage == layout.pipeline - 1
        self.storage = storage = job.recipe.storage
        self.is_sharded = layout.zero == 3 and layout.num_sharing > 1
        is_exact = job.recipe.reduction.order_invariant
        self.sum_bytes = 0.0
        if layout.micro_batches > 1:
            width = bytes_per_number(layout.accumulation_dtype)
            if is_exact:
                self.sum_bytes = _EXACT_SUM_BYTES
            elif width > bytes_per_number(storage.visible):
                self.sum_bytes = width
        self.widths = widths_of(job.recipe, job.gathered, job.program)
        self.experts, self.rest = on_stage(job, layers, stage)  # state of the stage before ZeRO
        self.per = bytes_per_parameter(storage.keeping(OPTIMIZER_STATES[job.optimizer]))
        # Bytes of a gathered weight, and of the gradient of a layer's mean parameter before it is
        # sharded.
        self.visible = bytes_per_number(job.gathered or storage.visible)
        self.gathered = job.weight_bytes
        self.gradient = self.visible * job.trained_parameters / a.num_parameters
        # Parameters of the largest layer on one of the ranks that shard it.
        self.largest_layer = a.largest_layer / layout.tensor
        if a.mixture:
            of_layer = a.expert_parameters / a.mixture.num_layers
            self.largest_layer += of_layer / layout.expert / layout.expert_tensor_ranks
        self.on_host = 0.0
        self.weights, self.gradients, self.optimizer = self.state_terms()
        self.saved, self.layer = self.activation_terms()

    def worst_moment(self) -> Terms:
        a = self.a
        layout = self.layout
        gradients = self.gradients
        buffers = list(self.buffer_terms())
        sums = self.sum_terms()
        # Accumulation buffers live for the whole step.
        always = [self.weights, self.optimizer, *sums]
        if a.counts:
            width = a.counts.activations / a.counts.tokens
            formula = f"{self.job.tokens:g} tokens × {width:,.0f} B, counted on fake tensors"
            peak = _term("at the peak of a step", width * self.job.tokens, formula)
            least = min(gradients.value, a.counts.gradients)
            at_peak = gradients._replace(value=least, formula="at this moment, counted")
            moments = [[*always, at_peak, peak, *buffers], [*always, gradients]]
            return _largest(moments)
        # Autograd adds to earlier gradients. Megatron-LM has buffers for them. Both exist during
        # forward.
        late = early = gradients
        if sums and not layout.is_fsdp:
            formula = "each is added to the sum as soon as it is made"
            late = early = gradients._replace(value=0.0, formula=formula)
        elif layout.is_fsdp and (layout.micro_batches == 1 or sums):
            formula = f"none at this moment; {gradients.formula} later"
            early = gradients._replace(value=0.0, formula=formula)
        # Temporary gradients: of the head, the first in backward, and of the current layer.
        at_start = []
        if not early.value and self.is_last and self.program.part("head").trains:
            value = a.vocab_size * a.hidden_size * self.visible / layout.tensor
            at_start.append(_term("gradient of the head", value, "the first that backward makes"))
        at_end = []
        if not late.value and layout.zero < 3:
            value, formula = _of(self.largest_layer, "parameters", self.gradient)
            at_end.append(_term("gradients of a layer", value, formula))
        passing = self.passing_term()
        # Before the first layer's backward, no gradient is in transit.
        gathered = [term for term in buffers if term.name != "gradients of two layers"]
        # With full recomputation one layer's activations coexist with every layer's saved input.
        again = [self.layer]
        if layout.recompute == "none":
            again.clear()
        moments = [
            [early, *always, *self.saved, *self.loss_terms(), *gathered],
            [early, *always, *self.saved, *again, passing, *buffers, *at_start],
            [late, *always, self.layer, passing, *buffers, *at_end],
        ]
        return _largest(moments)

    def passing_term(self) -> Term:
        """Return the gradients of activations that a layer's backward holds: of the stream, and of
        the MLP's inner tensors.
        """
        a = self.a
        size = a.intermediate_size
        if a.mixture:
            size = a.mixture.experts_per_token * a.mixture.expert_size
        if a.is_gated:
            size *= 2
        stream = self.widths.stream * a.hidden_size / self.layout.stream_ranks
        inner = self.widths.matmul * size / self.layout.tensor
        return _term("gradients on their way", *_of(self.job.tokens, "tokens", stream + inner))

    def state_terms(self) -> tuple[Term, Term, Term]:
        layout = self.layout
        per = self.per
        state = shared(self.experts, layout, layout.sharing_experts(layout.num_sharing))
        state += shared(self.rest, layout, layout.num_sharing)
        weights = self.state_term("weights", state.weights, per.weights, 3)
        gradients = self.state_term("gradients", state.gradients, per.gradients, 2)
        name = "states beside the weights"
        optimizer = self.state_term(name, state.optimizer, per.optimizer, 1)
        if self.a.counts:
            share = self.job.trained_parameters / self.a.num_parameters
            gradients = gradients._replace(value=gradients.value * share)
            optimizer = optimizer._replace(value=optimizer.value * share)
        self.on_host = state.host
        is_away = self.program.offload
        if is_away:
            self.on_host += gradients.value + optimizer.value
            optimizer = optimizer._replace(value=0.0, formula="on the host")
        if self.program.release or is_away:
            size = min(gradients.value, self.largest_layer * self.gradient)
            formula = "of one layer: each is updated and freed, or sent away"
            gradients = gradients._replace(value=size, formula=formula)
        return weights, gradients, optimizer

    def state_term(self, name: str, value: float, width: float, level: int) -> Term:
        layout = self.layout
        ranks = layout.tensor * layout.pipeline * layout.sharing(level)
        formula = (
            f"{self.a.num_parameters:,} parameters × {width:g} B / {ranks} ranks, vectors and what "
            "is not shared as they are"
        )
        if not self.program.trains_all:
            formula = "parts as the program stores them"
        return _term(name, value, formula)

    def sum_terms(self) -> list[Term]:
        """Return the accumulation buffers of micro-batch gradients.

        Megatron-LM adds each parameter's gradient to its buffer within backward, so only the buffer
        exists. This project's trainer adds a micro-batch's gradients after all of them exist.

        Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py,
        ``_make_backward_post_hook``.
        """
        if not self.sum_bytes:
            return []
        count = self.gradients.value / self.per.gradients
        value, formula = _of(count, "parameters", self.sum_bytes)
        return [_term("sums of micro-batches", value, formula)]

    def layer_bytes(self, repeated: str) -> tuple[float, float]:
        """Return a rank's bytes of a layer's saved tensors per token, and of its casts of weights."""
        layout = self.layout
        job = self.job
        length = job.sequence_length if self.program.attention == "eager" else 0
        saved, stream, casts = layer_bytes(
            self.a, job.recipe, self.program, job.gathered, repeated, length
        )
        per_token = stream / layout.stream_ranks + (saved - stream) / layout.tensor
        return per_token, casts / layout.tensor

    def activation_terms(self) -> tuple[list[Term], Term]:
        """Return the tensors saved by all layers in flight at the end of forward, and the memory of
        the layer in backward.
        """
        layout = self.layout
        tokens = self.job.tokens
        in_flight = self.layers_in_flight
        per_layer, casts = self.layer_bytes("")
        value, formula = _of(tokens, "tokens", per_layer)
        layer = _term("the layer in backward", value + casts, formula)
        if layout.recompute == "full":
            width = self.widths.stream * self.a.hidden_size / layout.stream_ranks
            value, formula = _of(in_flight * tokens, "tokens × layers in flight", width)
            if self.program.saved == "host":
                self.on_host += value
                value *= min(1.0, 2 / in_flight)
                formula = "of the two layers in use, the others on the host"
            return [_term("inputs of the layers", value, formula)], layer
        if layout.recompute == "selective":
            per_layer, casts = self.layer_bytes(self.program.selective)
        value, formula = _of(in_flight * tokens, "tokens × layers in flight", per_layer)
        formula += f" ({self.program.kernels} kernels, {self.program.attention} attention)"
        terms = [_term("kept by the layers", value, formula)]
        if casts:
            value, formula = _of(self.layers, "layers", casts)
            terms.append(_term("casts of the weights", value, f"{formula} for autocast's backward"))
        return terms, layer

    def buffer_terms(self) -> Iterator[Term]:
        """Yield unsharded layers of ZeRO-3, gradients in transit, and gathered inputs of tensor
        ranks.
        """
        layout = self.layout
        if self.is_sharded and layout.pipeline > 1:
            # Gathering weights for every micro-batch would cost more than the bubble saves.
            width = self.gathered
            if self.program.trains_all:
                width = self.per.weights
            count = (self.experts + self.rest).weights / width
            reduced = 0.0
            if self.job.gathered:
                reduced = bytes_per_number(self.program.reduced)
            yield _term("weights of the stage, gathered", *_of(count, "parameters", self.gathered))
            width = max(self.gradient, self.sum_bytes, reduced)
            yield _term(
                "gradients of the stage, before they are shared", *_of(count, "parameters", width)
            )
        elif self.is_sharded:
            count = 2 * self.largest_layer
            yield _term("two layers, gathered", *_of(count, "parameters", self.gathered))
            yield _term("gradients of two layers", *_of(count, "parameters", self.gradient))
            state = state_of(
                self.a, self.storage, self.job.optimizer, layout.tensor, program=self.program
            )
            outer = state.embedding.weights + state.head.weights
            if self.job.gathered:
                outer *= self.gathered / self.per.weights
            formula = "embedding, head and last norm stay gathered from forward to backward"
            yield _term("outer weights, gathered", outer, formula)
        narrow = 0.0
        for matmul in self.a.layer_matmuls:
            if self.program.part_of(matmul).is_narrow:
                narrow = max(narrow, matmul.num_elements / matmul.count)
        if narrow:
            yield _term("a matrix, dequantized", *_of(narrow / layout.tensor, "parameters", 2.0))
        in_use = in_use_bytes(self.job)
        if in_use:
            yield _term("a layer from the host", in_use, "weights in use")
        if layout.stream_ranks > 1:  # else every rank holds it whole, and it is counted there
            row = self.a.hidden_size * self.widths.matmul
            name = "a layer's input and its gradient, gathered"
            yield _term(name, *_of(2 * self.job.tokens, "tokens", row))

    def loss_terms(self) -> list[Term]:
        """Return the memory of head and loss at the start of backward."""
        if not self.is_last:
            return []
        layout = self.layout
        tokens = self.job.tokens
        row = (4 + 2 * self.widths.stream) * self.a.hidden_size / layout.stream_ranks
        width = self.program.logit_bytes(self.widths.matmul) / layout.tensor
        value, formula = _of(tokens * self.a.vocab_size, "logits", width)
        return [
            _term("input of the head", *_of(tokens, "tokens", row)),
            _term("logits", value, f"{formula} ({self.program.loss} loss)"),
        ]


def _overhead_terms(terms: Terms, layout: Layout) -> Iterator[Term]:
    """Yield memory without a formula. What is allocated and freed during a step can fragment."""
    for name, value in OVERHEAD.items():
        if layout.num_ranks > 1 or name != "communication buffers":
            yield _term(name, value, f"{value / 1e9:g} GB")
    changing = terms.without("weights", "optimizer").total
    formula = f"{FRAGMENTATION:.0%} of {changing / 1e9:.3g} GB that change"
    yield _term("fragmentation", FRAGMENTATION * changing, formula)
