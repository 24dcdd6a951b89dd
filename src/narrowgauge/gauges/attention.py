"""Attention as gauges see it: the queries and keys of transformers' models, on their way into the attention kernel.

Transformers looks up by a name in an attention module's config which function computes it. As with experts, a watched module
gets a config of its own that names a function of ours: it marks queries and keys, which are in memory for the kernel,
and goes on with the kernel that was named before. The model's config, and so its masks and its checkpoints, stay.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.gauges.board import SWITCH, mark_attention
from narrowgauge.transforms.scaled_tensor import Scaled

IMPLEMENTATION = "narrowgauge-watched"
"""What transformers calls it, in front of the name of the kernel that it goes on with."""


class _Restored:
    """What takes the watched function away again."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module, self.config = module, config

    def remove(self) -> None:
        """Give the module its config back."""
        self.module.config = self.config


def is_attention(module: nn.Module) -> bool:
    """Whether transformers looks up the attention of a module by name, and its kernel is ``sdpa``."""
    own = getattr(module, "config", None)
    named = getattr(own, "_attn_implementation", None) == "sdpa"
    return named and type(module).__name__.endswith("Attention") and not list(_inner(module))


def _inner(module: nn.Module) -> Any:
    return (child for _, child in module.named_modules() if child is not module and "Attention" in type(child).__name__)


def watch(module: nn.Module) -> _Restored:
    """Let a module's attention be marked."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if IMPLEMENTATION not in ALL_ATTENTION_FUNCTIONS.valid_keys():

        def watched(module: nn.Module, query: Tensor, key: Tensor, *others: Any, **options: Any) -> Any:
            # In this order, so that code compiled for evaluation is not guarded by the switch.
            if torch.is_grad_enabled() and module.training and SWITCH.is_on:
                scale = options.get("scaling")
                scale = float(query.shape[-1]) ** -0.5 if scale is None else float(scale)
                mark_attention(_values(query), _values(key), scale, module.gauge_places[2])  # type: ignore[index]
            return sdpa_attention_forward(module, query, key, *others, **options)

        ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, watched)
    before = module.config
    own = copy.copy(before)
    own._attn_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    module.config = own
    return _Restored(module, before)


def _values(x: Tensor) -> Tensor:
    """Of the first sequence, which alone is looked at where a tensor carries its scale."""
    x = x.detach()
    return x._data[:1] * x._scale if isinstance(x, Scaled) else x
