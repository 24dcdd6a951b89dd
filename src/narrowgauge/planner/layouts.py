"""Layouts: the distribution of a model, its state and a batch over chips.

The ranks of a job are numbered along five axes. ``data`` replicas see different sequences.
``shard`` ranks do too, and they shard the replica's state (ZeRO, FSDP2; both together are HSDP).
``tensor`` ranks shard each matrix and
the residual stream, ``pipeline`` stages the layers, ``context`` ranks the sequence.
``expert`` ranks shard the experts of a mixture. They add no ranks: they lie inside the data, shard
and context axes. They also lie inside the tensor axis, unless tensor ranks shard each expert's
matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.shapes import Architecture
from narrowgauge.runs.finding import counted
from narrowgauge.spec.sums import ACCUMULATION_DTYPES
from narrowgauge.spec.values import require_choice, require_number

Zero = Literal[0, 1, 2, 3]
Recompute = Literal["none", "selective", "full"]
AXES = ("data", "shard", "tensor", "pipeline", "context")
_COUNTS = (*AXES, "interleave", "expert", "micro_batch", "micro_batches")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": get_args(Zero),
    "recompute": get_args(Recompute),
    "accumulation_dtype": ACCUMULATION_DTYPES,
}
_FIELDS = (*_COUNTS, *_CHOICES)


@dataclass(frozen=True, slots=True)
class Layout:
    """Describe one way to run a model on many chips.

    Args:
        data: replicas of the whole state.
        shard: ranks that shard a replica's state. Context ranks hold the same weights, so they
            shard it too.
        zero: sharded state: 0 nothing, 1 optimizer states, 2 also gradients, 3 also weights (FSDP2
            with resharding).
        tensor, pipeline, context: ranks per matrix, stages, and ranks per sequence.
        interleave: groups of layers per stage (virtual stages).
        expert: ranks that share the experts of a layer.
        micro_batch, micro_batches: sequences per micro-batch on a rank, and micro-batches per
            optimizer step.
        recompute: recomputed in backward: nothing; all but attention and every second matmul
            (selective); or whole layers.
        accumulation_dtype: dtype of the gradient sum over micro-batches.
    """

    data: int = 1
    shard: int = 1
    zero: Zero = 3
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    accumulation_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _COUNTS:
            require_number(name, getattr(self, name), 1, is_whole=True)
        for name, choices in _CHOICES.items():
            require_choice(name, getattr(self, name), choices)
        if self.interleave > 1 and self.pipeline == 1:
            raise RecipeError(
                f"a layout has interleave = {self.interleave} on one stage.", "Use pipeline stages."
            )

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def num_sharing(self) -> int:
        """Count the ranks that shard a replica's state under ZeRO: shard and context ranks.

        Source: torchtitan, distributed/parallel_dims.py (the mesh axis ``fsdp``); Megatron-LM's
        distributed optimizer.
        """
        return self.shard * self.context

    def sharing(self, level: int) -> int:
        """Count the ranks that share what a ZeRO stage of at least ``level`` shards; 1 below it."""
        return self.num_sharing if self.zero >= level else 1

    @property
    def expert_tensor_ranks(self) -> int:
        """Count the ranks that shard each expert's matrices: all tensor ranks, or one if expert
        ranks need the tensor axis.

        Source: Liu et al., MoE Parallel Folding, arXiv 2504.14960, section 3.2.

        Example:
            >>> [Layout(shard=32, tensor=2, expert=ranks).expert_tensor_ranks for ranks in (32, 64)]
            [2, 1]
        """
        return self.tensor if self.num_replicas * self.context % self.expert == 0 else 1

    def sharing_experts(self, ranks: int) -> int:
        """Count the ranks that shard the state of one rank's experts, among ``ranks`` data ranks
        and their tensor ranks.
        """
        return max(1, ranks * (self.tensor // self.expert_tensor_ranks) // self.expert)

    @property
    def num_replicas(self) -> int:
        """Count the ranks that compute different sequences in parallel."""
        return self.data * self.shard

    @property
    def num_sequences(self) -> int:
        """Count the sequences of an optimizer step, over all ranks."""
        return self.num_replicas * self.micro_batch * self.micro_batches

    def tokens_on_rank(self, sequence_length: int) -> float:
        """Count the tokens of a micro-batch on one rank."""
        return self.micro_batch * sequence_length / self.context

    @property
    def is_fsdp(self) -> bool:
        """Tell whether it is plain FSDP2, HSDP or data parallelism, which this project's trainer
        runs.
        """
        is_whole = self.tensor == self.pipeline == self.context == self.expert == 1
        return is_whole and (self.zero in (0, 3) or self.shard == 1)


def unsuited(architecture: Architecture, layout: Layout, sequence_length: int) -> str:
    """Say why a layout does not suit a model; empty if it does."""
    stages = layout.pipeline * layout.interleave
    # Embedding and head may count as a layer each: Llama 3 405B has 126 layers for 16 stages of 8
    # groups.
    layers = architecture.num_layers
    if (stages > 1 and stages > layers + 2) or layout.pipeline > layers:
        return f"{stages} groups of layers and {layers} layers"
    if architecture.num_heads % layout.tensor:
        return f"{layout.tensor} tensor ranks do not divide {architecture.num_heads} heads"
    if architecture.num_kv_heads % layout.tensor and layout.tensor % architecture.num_kv_heads:
        return f"{layout.tensor} tensor ranks do not suit {architecture.num_kv_heads} key and value heads"
    if sequence_length % layout.context:
        return f"{layout.context} context ranks do not divide {sequence_length} tokens"
    num_experts = architecture.num_experts
    if num_experts % layout.expert:
        return f"{layout.expert} expert ranks do not divide {counted(num_experts, 'expert')}"
    ranks = layout.num_replicas * layout.context
    if ranks * layout.tensor % (layout.expert * layout.expert_tensor_ranks):
        return f"{layout.expert} expert ranks do not divide {ranks} data ranks and {layout.tensor} tensor ranks"
    return ""


# ── layouts as they are asked for: names, and fields with values ──────────────────────────────────

_WHOLE = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1}
NAMED_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {**_WHOLE, "zero": 3},
    "ddp": {"shard": 1, **_WHOLE},
}
"""Layouts of ``narrowgauge train``, and pure data parallelism."""
_ADVICE = "For instance tensor=2,pipeline=4,zero=1,recompute=full, or fsdp2."


def read_layout(layout: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a layout: a mapping, or ``FIELD=VALUE`` and layout names between commas.

    Fields override names.
    """
    text = str(layout)
    if not isinstance(layout, str):
        text = ",".join(f"{name}={value}" for name, value in layout.items())
    named, fields = read_fields(text, "layout", NAMED_LAYOUTS, _FIELDS, _ADVICE)
    fields = {**NAMED_LAYOUTS.get(named, {}), **fields}
    Layout(**{name: value for name, value in fields.items() if name != "interleave"})
    return fields


def read_fields(
    text: str, noun: str, names: Iterable[str], fields: Iterable[str], advice: str
) -> tuple[str, dict[str, Any]]:
    """Read a name of ``names`` and ``FIELD=VALUE`` between commas; ``noun`` they describe.

    The name is empty without one.
    """
    named = ""
    values = dict[str, Any]()
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        choices = list(fields if equals else names)
        if name not in choices:
            kind = "field" if equals else "name"
            problem = f"a {noun} has no {kind} '{name}'."
            raise RecipeError(problem, suggestion(name, choices) or advice)
        if name in values or (named and not equals):
            raise RecipeError(f"a {noun} names '{name}' beside another value.", "Name it once.")
        if equals:
            values[name] = int(value) if value.isdecimal() else value
        else:
            named = name
    return named, values
