"""Layer times: how long one rank computes on one micro-batch, for all layers of the model and for its head.

Matmuls and casts follow the roofline; attention its operations at a fused kernel's rate; what is left (norms, residuals, rotary
positions, the gate, the loss) moves bytes. Tensor parallelism divides the matrices and, where norms and residuals are shared too
(sequence parallelism), the bytes. Context parallelism divides the tokens. Experts get the tokens that chose them, of as many
ranks as share the experts; the experts of a rank are one grouped kernel.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.inputs.architectures import Architecture, Matmul
from narrowgauge.planner.inputs.clusters import Nodes
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.memory.activations import Attention
from narrowgauge.planner.terms import Term
from narrowgauge.planner.time.roofline import (
    Setting,
    Shape,
    bytes_per_number,
    bytes_seconds,
    operation_seconds,
    setting_of,
)
from narrowgauge.spec.computes import SLOTS, first_of_input
from narrowgauge.spec.recipes import Recipe

ATTENTION_PASSES = 3.5
"""Operations of a fused attention over its forward: forward 1, backward 2.5, since it computes the scores again."""
LOGIT_BYTES = 12
"""Per logit: bfloat16 ones are written and read, their gradient is in float32 and bfloat16."""
# Bytes per score of unfused attention in 16 bits: written by a matmul, read and written by softmax and by dropout with its
# mask, read by a matmul; and the same with both gradients.
_SCORE_BYTES = (13, 19)
# Tensors of the residual stream that a layer moves, forward and backward: two norms (5 each), residuals (4), rotary (8).
_STREAMS, _ROTARY_STREAMS = 14, 8
_GATED, _UNGATED = 8, 5  # tensors of the MLP's inner size: of the gate, of GELU
_DISPATCHED = 8  # tensors of the stream per expert that a token visits: sorted and put back, in both directions

_PLACES = {
    "attention": "model.layers.0.self_attn.",
    "mlp": "model.layers.0.mlp.",
    "experts": "model.layers.0.mlp.",
    "head": "",
}


class Seconds(NamedTuple):
    """Of one micro-batch on one rank: forward, backward, and what is done once per step as long as weights stay."""

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward, self.once + other.once)


class Steady(NamedTuple):
    """The terms of a step that do not depend on how states are stored, their sum, and the layers of the slowest stage."""

    terms: tuple[Term, ...]
    total: float
    layers: int


@dataclass(frozen=True, slots=True)
class Known:
    """What was computed already, by what it depends on.

    Args:
        passes: of a micro-batch, in all layers and in the head, by group.
        micro_batches: the same in seconds, with what backward computes again.
        steady: of a step.
    """

    passes: dict[Hashable, tuple[dict[str, Seconds], dict[str, Seconds]]] = field(default_factory=dict)
    micro_batches: dict[Hashable, tuple[dict[str, float], dict[str, float]]] = field(default_factory=dict)
    steady: dict[tuple[Shares, Layout], Steady] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What a rank computes.

    Args:
        shares: of the chip's printed rates.
        attention: ``"flash"`` for fused kernels that skip what the mask hides, ``"eager"`` for matmuls around a softmax.
        known: what was computed already; shared by the works of one architecture, sequence length, attention and group of nodes,
            and of recipes that are :func:`computed_as` one another.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    sequence_length: int
    nodes: Nodes
    shares: Shares
    attention: Attention = "flash"
    known: Known = field(default_factory=Known, compare=False, repr=False)

    @property
    def tokens(self) -> float:
        """Of a micro-batch, on one rank."""
        return self.layout.tokens_on_rank(self.sequence_length)

    @property
    def width(self) -> float:
        """Bytes of a number between layers."""
        return bytes_per_number(self.recipe.dtype)

    @property
    def stream_bytes(self) -> float:
        """Of the residual stream of a micro-batch, before tensor ranks share it."""
        return self.tokens * self.architecture.hidden_size * self.width

    def moved(self, num_bytes: float) -> float:
        return bytes_seconds(num_bytes, self.nodes.chip, self.shares)


def computed_as(architecture: Architecture, recipe: Recipe) -> Hashable:
    """What a step reads of a recipe, all but its optimizer: where it is equal, computing and exchanging take equal times."""
    visible = recipe.storage.visible
    sent = recipe.reduction.bytes_per_element(visible)
    return _settings(architecture, recipe), recipe.dtype, visible, sent


def linear_seconds(work: Work, *, head: bool) -> tuple[Seconds, Seconds]:
    """Seconds of matmuls and of the casts before them, in the head or in all layers; casts of weights are under ``once``."""
    matmuls, casts = Seconds(), Seconds()
    settings = _settings(work.architecture, work.recipe)
    for matmul, setting, has_own_cast in settings:
        if (matmul.part == "head") == head:
            own, before = _matmul_seconds(matmul, setting, has_own_cast, work)
            matmuls, casts = matmuls.plus(own), casts.plus(before)
    return matmuls, casts


@lru_cache(maxsize=64)
def _settings(architecture: Architecture, recipe: Recipe) -> tuple[tuple[Matmul, Setting, bool], ...]:
    """Each matmul, how the recipe computes it, and whether it casts its input itself."""
    names = [(matmul, _PLACES[matmul.part] + matmul.name) for matmul in architecture.matmuls]
    return tuple((matmul, setting_of(name, recipe), first_of_input(name) == name) for matmul, name in names)


def _matmul_seconds(matmul: Matmul, setting: Setting, has_own_cast: bool, work: Work) -> tuple[Seconds, Seconds]:
    layout, chip = work.layout, work.nodes.chip
    grouped = matmul.name.startswith("experts.")
    ranks = layout.expert if grouped else 1
    tensor = layout.expert_tensor_ranks if grouped else layout.tensor
    out = matmul.out_features / (tensor if matmul.split == "column" else 1)
    inputs = matmul.in_features / (tensor if matmul.split == "row" else 1)
    tokens = work.tokens * matmul.tokens_share * ranks * tensor / layout.tensor
    found = operation_seconds(Shape(round(out), round(inputs)), setting, tokens, chip, work.shares)
    count, start = matmul.count / ranks, work.shares["kernel_seconds"].value
    mixture = work.architecture.mixture
    # A grouped kernel starts once for all experts of a layer.
    kernels = mixture.num_layers if grouped and mixture else count
    mine, casts = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    adapters = work.architecture.adapters
    for name, seconds in found.items():
        place, _, side = name.partition(".")
        if adapters is not None and place == "grad_weight":
            continue
        if side and SLOTS[name].tensor == "input" and not has_own_cast:
            continue
        when = 2 if side and SLOTS[name].tensor == "weight" else int(place != "output")
        reached = work.shares["experts"].value if grouped and not side else 1.0
        (casts if side else mine)[when] += (seconds - start) / reached * count + start * kernels
    if adapters is not None and adapters.parameters_of(matmul):
        for shape in (Shape(adapters.rank, round(inputs)), Shape(round(out), adapters.rank)):
            for name, seconds in operation_seconds(shape, setting.plain, tokens, chip, work.shares).items():
                mine[int(name != "output")] += seconds * count
    if adapters is not None and adapters.is_widened and matmul.part != "head":
        # Read and written before the product of forward, and of backward.
        widened = work.moved((adapters.base_bytes + 2) * round(out) * round(inputs)) * count
        casts[0], casts[1] = casts[0] + widened, casts[1] + widened
    return Seconds(*mine), Seconds(*casts)


def attention_seconds(work: Work) -> Seconds:
    """Scores, softmax and values of all layers; flash kernels skip what the mask hides."""
    shape, chip = work.architecture, work.nodes.chip
    is_flash = work.attention == "flash"
    flops = work.tokens * shape.attention_flops(work.sequence_length, is_causal=is_flash) / 3 / work.layout.tensor
    peak = chip.peak_tflops[work.recipe.dtype] * 1e12
    start = work.shares["kernel_seconds"].value * shape.num_layers
    if is_flash:
        forward = flops / (peak * work.shares["attention"].value)
        return Seconds(forward + start, (ATTENTION_PASSES - 1) * forward + start)
    forward = flops / (peak * work.shares.matmul(work.recipe.dtype).value)
    scores = work.tokens * work.sequence_length * shape.num_heads / work.layout.tensor * shape.num_layers
    read, written = (work.moved(scores * each) for each in _SCORE_BYTES)
    return Seconds(forward + read + 4 * start, 2 * forward + written + 8 * start)


def mixture_seconds(work: Work) -> Seconds:
    """What mixtures wait for besides their matmuls: routers, sorting, and launches that the host makes for each micro-batch."""
    mixture = work.architecture.mixture
    seconds = work.shares["mixture_seconds"].value * mixture.num_layers if mixture else 0.0
    return Seconds(seconds / 3, seconds * 2 / 3)


def elementwise_seconds(work: Work) -> Seconds:
    """Norms, residuals, rotary positions, gates, and the sorting of tokens by expert, of all layers."""
    shape = work.architecture
    streams = _STREAMS + (0 if shape.max_positions else _ROTARY_STREAMS)
    gates = _GATED if shape.is_gated else _UNGATED
    stream = shape.num_layers * streams * shape.hidden_size
    inner = float(shape.num_dense_layers * gates * shape.intermediate_size)
    if shape.mixture:
        visited = shape.mixture.experts_per_token
        stream += shape.mixture.num_layers * _DISPATCHED * visited * shape.hidden_size
        inner += shape.mixture.num_layers * gates * (visited * shape.mixture.expert_size + shape.mixture.shared_size)
    moved = stream / work.layout.stream_ranks + inner / work.layout.tensor
    num_bytes = work.tokens * moved * work.width / work.shares["elementwise"].value
    seconds = work.moved(num_bytes)
    # Forward moves about a third of the bytes.
    return Seconds(seconds / 3, seconds * 2 / 3)


def loss_seconds(work: Work) -> Seconds:
    num_bytes = work.tokens * work.architecture.vocab_size * LOGIT_BYTES / work.layout.tensor
    seconds = work.moved(num_bytes / work.shares["loss"].value)
    return Seconds(seconds / 3, seconds * 2 / 3)


def optimizer_seconds(work: Work, num_parameters: float) -> float:
    """Seconds of reading and writing everything stored of a rank's parameters once; the gradient is only read."""
    gradient = bytes_per_number(work.recipe.storage.visible)
    num_bytes = num_parameters * (2 * work.recipe.bytes_per_param - gradient)
    return work.moved(num_bytes / work.shares["optimizer"].value)
