"""What a layer keeps for backward, counted in the model's own modules.

Tensors are fake: they have shapes and no memory. Those of a mixture are real, since the tokens of each expert are data.

Two models that differ by one layer run forward. What the larger one saves beyond the smaller is what a layer keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, masking_utils

from narrowgauge.assembly.preparation import narrow_linears
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer import language_model

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


Kind = tuple[tuple[int, ...], str, int]


class Saved(NamedTuple):
    """Equal tensors that a layer keeps; ``num_bytes`` is of each one's memory, which other tensors may share."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    num_tensors: int


def layer_memory(config: Mapping[str, Any], recipe: Recipe, micro_batch: int, sequence_length: int) -> list[Saved]:
    """What one layer of a model keeps for backward besides its parameters, the largest first.

    ``config`` has the keys of a Hugging Face ``config.json`` with equal layers.

    """
    key = next(key for key in _LAYERS if key in config)
    single, two = (_saved({**config, key: layers}, recipe, micro_batch, sequence_length) for layers in (1, 2))
    saved = [Saved(shape, dtype, size, count) for (shape, dtype, size), count in (two - single).items()]
    return sorted(saved, key=lambda saved_tensor: -saved_tensor.num_bytes)


def _saved(config: Mapping[str, Any], recipe: Recipe, micro_batch: int, length: int) -> Counter[Kind]:
    """The tensors that autograd saves in the layers of a model, by shape, dtype and bytes."""
    built = AutoConfig.for_model(**config)
    is_mixture = "num_local_experts" in config
    with nullcontext() if is_mixture else FakeTensorMode(allow_non_fake_inputs=True):
        model = language_model.drawn(built, 0)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, recipe.storage.visible))
        narrow_linears(model, recipe, 0)
        parameters = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        tokens = torch.zeros(micro_batch, length, dtype=torch.int64)
        tensors: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in parameters:
                tensors.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        # Fake positions have no values that say whether sequences are packed; ours are not, so no mask is made.
        unpacked = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with unpacked, saved_tensors_hooks(pack, lambda tensor: tensor), compute_scope(recipe, torch.device("cpu")):
            model.base_model(input_ids=tokens, use_cache=False)
    kinds = ((tuple(t.shape), dtype_name(t.dtype), t.untyped_storage().nbytes()) for t in tensors.values())
    return Counter(kinds)
