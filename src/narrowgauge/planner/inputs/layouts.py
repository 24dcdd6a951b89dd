"""Layouts: how a model, its state and a batch are spread over chips.

The ranks of a job are numbered along five axes. ``data`` replicas see different sequences; ``shard`` ranks too, and share the
replica's state between them (ZeRO, FSDP2; both together are HSDP). ``tensor`` ranks share each matrix, ``pipeline`` stages the
layers, ``context`` ranks the sequence. ``expert`` ranks, which share the experts of a mixture, add none: they lie inside the
data, shard and context axes, and inside the tensor axis where its ranks do not share each expert's matrices.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.sums import ACCUMULATIONS

Recompute = Literal["none", "selective", "full"]
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
Offload = Literal["none", "optimizer", "all"]
_COUNTS = ("data", "shard", "tensor", "pipeline", "interleave", "context", "expert", "micro_batch", "micro_batches")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run a model on many chips.

    Args:
        data: replicas of the whole state.
        shard: ranks that share a replica's state; context ranks, which hold the same weights, share it with them.
        zero: what they share: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too (FSDP2 with resharding).
        tensor: ranks that share each matrix.
        sequence_parallel: whether tensor ranks split norms and residuals too, by tokens; Megatron-LM before 2022 and what is
            derived from it (BLOOM, GPT-NeoX) keep them whole on each.
        pipeline: stages.
        interleave: groups of layers per stage (virtual stages).
        context: ranks that share a sequence.
        expert: ranks that share the experts of a layer.
        expert_tensor: ranks that share each expert's matrices; 0 for the tensor ranks where the expert ranks fit beside them, and
            for 1 where they need the tensor ranks as well (Megatron-Core's ``expert-tensor-parallel-size``).
        micro_batch: sequences that a rank computes at once.
        micro_batches: how many of these a rank computes before an optimizer step.
        recompute: what backward computes again: nothing, the attention's scores (with flash attention that is none), or layers.
        offload: what is kept in the host's memory between uses: optimizer states, or weights and gradients too.
        accumulation_dtype: the sum of several micro-batches' gradients (``narrowgauge show accumulations``).
        keeps_gradients: whether a micro-batch's own gradients stay beside that sum, as in DeepSpeed's BF16_Optimizer (BLOOM);
            Megatron-LM adds each to the sum as soon as it is made.
    """

    data: int = 1
    shard: int = 1
    zero: Literal[0, 1, 2, 3] = 3
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    offload: Offload = "none"
    sequence_parallel: bool = True
    expert_tensor: int = 0
    accumulation_dtype: str = "float32"
    keeps_gradients: bool = False

    def __post_init__(self) -> None:
        counts = (self.data, self.shard, self.tensor, self.pipeline, self.interleave, self.context, self.expert)
        if min(*counts, self.micro_batch, self.micro_batches) < 1:
            name, value = next((name, getattr(self, name)) for name in _COUNTS if getattr(self, name) < 1)
            raise RecipeError(f"a layout has {name} = {value}.", "Use 1 or more.")
        if self.interleave > 1 and self.pipeline == 1:
            raise RecipeError(
                f"a layout interleaves {self.interleave} groups of layers on one stage.", "Use pipeline stages."
            )
        if self.accumulation_dtype not in ACCUMULATIONS:
            raise RecipeError(
                f"a layout has accumulation_dtype = {self.accumulation_dtype!r}.",
                suggestion(self.accumulation_dtype, ACCUMULATIONS) or f"There are {', '.join(ACCUMULATIONS)}.",
            )
        if self.expert_tensor and self.tensor % self.expert_tensor:
            raise RecipeError(
                f"a layout has expert_tensor = {self.expert_tensor} and tensor = {self.tensor}.",
                "Use a divisor of tensor.",
            )

    @property
    def num_ranks(self) -> int:
        return self.data * self.shard * self.tensor * self.pipeline * self.context

    @property
    def num_sharing(self) -> int:
        """Ranks that share a replica's state under ZeRO: those with other sequences, and those with other parts of the same ones.

        Source: torchtitan, distributed/parallel_dims.py (the mesh axis ``fsdp``); Megatron-LM's distributed optimizer.
        """
        return self.shard * self.context

    @property
    def stream_ranks(self) -> int:
        """Tensor ranks that share norms and residuals: all of them, or none."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share each expert's matrices.

        Source: Liu et al., MoE Parallel Folding, arXiv 2504.14960, section 3.2.

        Example:
            >>> [Layout(shard=32, tensor=2, expert=ranks).expert_tensor_ranks for ranks in (32, 64)]
            [2, 1]
        """
        if self.expert_tensor:
            return self.expert_tensor
        return self.tensor if self.num_replicas * self.context % self.expert == 0 else 1

    def sharing_experts(self, ranks: int) -> int:
        """Of ``ranks`` data ranks and the tensor ranks beside them, how many share the state of one rank's experts."""
        return max(1, ranks * (self.tensor // self.expert_tensor_ranks) // self.expert)

    @property
    def num_replicas(self) -> int:
        """Ranks that compute different sequences at the same time."""
        return self.data * self.shard

    @property
    def model_ranks(self) -> int:
        """Ranks that compute one sequence together: tensor, pipeline and context."""
        return self.tensor * self.pipeline * self.context

    @property
    def num_sequences(self) -> int:
        """Sequences of an optimizer step, over all ranks.

        Example:
            >>> Layout(shard=8, tensor=4, micro_batch=2, micro_batches=3).num_sequences
            48
        """
        return self.num_replicas * self.micro_batch * self.micro_batches

    def tokens_on_rank(self, sequence_length: int) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * sequence_length / self.context

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits for others: (p − 1) / (v m + p − 1).

        Source: Narayanan et al., arXiv 2104.04473, section 2.2.

        Example:
            >>> [round(Layout(pipeline=4, micro_batches=m).bubble, 3) for m in (4, 8, 16, 32)]
            [0.429, 0.273, 0.158, 0.086]
        """
        waiting = self.pipeline - 1
        return waiting / (self.interleave * self.micro_batches + waiting)

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes whole layers of whole sequences: replicas and shards without other axes."""
        return self.tensor == self.pipeline == self.context == self.expert == 1

    @property
    def is_fsdp(self) -> bool:
        """Whether it is FSDP2 or HSDP without other axes, or replicas alone."""
        return self.is_whole and (self.zero in (0, 3) or self.shard == 1)

    @property
    def runs_here(self) -> bool:
        """Whether this project's trainer runs it; it offloads all or nothing."""
        return self.is_fsdp and self.offload != "optimizer"


# ── layouts as they are asked for: names, and fields with values ──────────────────────────────────────────────────────────

NAMED_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "zero": 3},
    "ddp": {"shard": 1, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1},
}
"""What ``narrowgauge train`` runs, and pure data parallelism."""
_TEXTS = {"recompute": RECOMPUTES, "offload": ("none", "optimizer", "all"), "accumulation_dtype": tuple(ACCUMULATIONS)}
_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_FIELDS = tuple(field.name for field in dataclasses.fields(Layout))
_ZERO = 3
_ADVICE = "For instance tensor=2,pipeline=4,zero=1,recompute=full, or fsdp2."


def read_layout(text: str) -> dict[str, Any]:
    """The fields of a layout that a text asks for: ``FIELD=VALUE`` and names of layouts, separated by commas.

    Fields after a name override it.

    Example:
        >>> read_layout("tensor=2, recompute=full")
        {'tensor': 2, 'recompute': 'full'}
        >>> read_layout("fsdp2,shard=8")["shard"]
        8
    """
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            fields |= _named(name)
        elif name not in _FIELDS:
            raise RecipeError(f"a layout has no field '{name}'.", suggestion(name, _FIELDS) or _ADVICE)
        else:
            found = _value(name, value)
            if own.setdefault(name, found) != found:
                raise RecipeError(
                    f"{name} = {own[name]} and {name} = {found} were requested of a layout.", "Name it once."
                )
            fields[name] = found
    Layout(**{name: value for name, value in fields.items() if name != "interleave"})
    return fields


def _named(name: str) -> dict[str, Any]:
    if name.lower() not in NAMED_LAYOUTS:
        raise RecipeError(f"no layout is named '{name}'.", suggestion(name.lower(), NAMED_LAYOUTS) or _ADVICE)
    return NAMED_LAYOUTS[name.lower()]


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        if text not in _TEXTS[name]:
            raise RecipeError(
                f"{name} = '{text}' was requested of a layout.", f"It is one of {', '.join(_TEXTS[name])}."
            )
        return text
    if name in ("sequence_parallel", "keeps_gradients"):
        if text.lower() not in _SWITCHES:
            raise RecipeError(f"{name} = '{text}' was requested of a layout.", "Use true or false.")
        return _SWITCHES[text.lower()]
    if not text.isdecimal() or (name == "zero" and int(text) > _ZERO):
        raise RecipeError(
            f"{name} = '{text}' was requested of a layout.",
            "Use 0 to 3." if name == "zero" else "Use a number from 1 on.",
        )
    return int(text)
