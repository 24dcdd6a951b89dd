"""Layouts: the distribution of a model, its state and a batch over chips.

The ranks of a job are numbered along five axes. ``data`` replicas see different sequences.
``shard`` ranks do too, and they shard the replica's state (ZeRO, FSDP2; both together are HSDP).
``tensor`` ranks shard each matrix and
the residual stream, ``pipeline`` stages the layers, ``context`` ranks the sequence.
``expert`` ranks shard the experts of a mixture. They add no ranks: they lie inside the data, shard
and context axes. They also lie inside the tensor axis, unless tensor ranks shard each expert's
matrices.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.toml import refuse_unknown

_CHOICES = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "accumulation_dtype": ("float32", "bfloat16", "float64"),
}


@dataclass(frozen=True)
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
        accumulation_dtype: dtype of the gradient sum over micro-batches; PyTorch adds to ``.grad`` in
            the dtype of the weight, if that is wider.
    """

    data: int = 1
    shard: int = 1
    zero: int = 3
    tensor: int = 1
    pipeline: int = 1
    interleave: int = 1
    context: int = 1
    expert: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    recompute: str = "none"
    accumulation_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in _CHOICES:
                require_choice(name, value, _CHOICES[name])
            else:
                require_number(name, value, 1, is_whole=True)

    @cached_property
    def num_ranks(self) -> int:
        return self.num_replicas * self.tensor * self.pipeline * self.context

    @cached_property
    def num_replicas(self) -> int:
        """Count the ranks that compute different sequences in parallel."""
        return self.data * self.shard

    @cached_property
    def num_sequences(self) -> int:
        """Count the sequences of an optimizer step, over all ranks."""
        return self.num_replicas * self.micro_batch * self.micro_batches

    @cached_property
    def num_sharing(self) -> int:
        """Count the ranks that shard a replica's state under ZeRO: shard and context ranks.

        Source: torchtitan, distributed/parallel_dims.py (the mesh axis ``fsdp``); Megatron-LM's
        distributed optimizer.
        """
        return self.shard * self.context

    @cached_property
    def expert_tensor_ranks(self) -> int:
        """Count the ranks that shard each expert's matrices: all tensor ranks, or one if expert
        ranks need the tensor axis.

        Source: Liu et al., MoE Parallel Folding, arXiv 2504.14960, section 3.2.

        Example:
            >>> [Layout(shard=32, tensor=2, expert=ranks).expert_tensor_ranks for ranks in (32, 64)]
            [2, 1]
        """
        return self.tensor if self.num_replicas * self.context % self.expert == 0 else 1

    @cached_property
    def ranks_of_experts(self) -> int:
        """Count the ranks that divide the experts of a stage."""
        return self.expert * self.expert_tensor_ranks

    @property
    def is_fsdp(self) -> bool:
        """Tell whether it is plain FSDP2, HSDP or data parallelism, which this project's trainer
        runs.
        """
        is_whole = self.tensor == self.pipeline == self.context == self.expert == 1
        return is_whole and (self.zero in (0, 3) or self.shard == 1)

    def __str__(self) -> str:
        """Write what is not the default, and the batch, as ``--layout`` takes them.

        Example:
            >>> print(Layout(shard=4, zero=1, tensor=2, micro_batch=2, recompute="full"))
            shard=4,zero=1,tensor=2,micro_batch=2,micro_batches=1,recompute=full
        """
        words = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default or "micro" in field.name:
                words.append(f"{field.name}={value}")
        return ",".join(words)


FIELDS = tuple(field.name for field in fields(Layout))


def suits(a: Architecture, layout: Layout, sequence_length: int) -> bool:
    """Tell whether a layout divides a model: layers, heads, tokens and experts.

    Embedding and head may count as a layer each: Llama 3 405B has 126 layers for 16 stages of 8
    groups.
    """
    stages = layout.pipeline * layout.interleave
    ranks = layout.num_ranks // layout.pipeline // layout.expert_tensor_ranks
    most_heads = max(a.num_kv_heads, layout.tensor)
    return (
        layout.pipeline <= a.num_layers
        and stages <= (a.num_layers + 2 if layout.pipeline > 1 else 1)
        and a.num_heads % layout.tensor == 0
        and most_heads % min(a.num_kv_heads, layout.tensor) == 0
        and sequence_length % layout.context == 0
        and (a.num_experts or 1) % layout.expert == ranks % layout.expert == 0
    )


def read_layout(layout: str | Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields of a layout: a mapping, or ``FIELD=VALUE`` between commas."""
    values = layout if isinstance(layout, Mapping) else read_values(str(layout).split(","))
    refuse_unknown(values, FIELDS, "a layout", RecipeError)
    Layout(**values)
    return {**values}


def read_values(words: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE``. A value is JSON, or else a text.

    Example:
        >>> read_values(["chips=128", "recipes=float8-row/word", "sequence-length=16384"])
        {'chips': 128, 'recipes': 'float8-row/word', 'sequence_length': 16384}
    """
    values = {}
    for word in filter(str.strip, words):
        name, equals, value = map(str.strip, word.partition("="))
        if not equals:
            raise RecipeError(f"Cannot read {word!r}.", "Write NAME=VALUE: chips=128.")
        name = name.replace("-", "_")
        values[name] = value
        with contextlib.suppress(ValueError):
            values[name] = json.loads(value)
    return values
