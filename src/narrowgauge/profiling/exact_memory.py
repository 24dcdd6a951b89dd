"""``narrowgauge plan run --exact``: what one layer keeps, counted in the model's own modules instead of by the plan's formula.

Two models that differ by one layer run forward on fake tensors, which have shapes and no memory, so a layer of any size is
counted in seconds. What the larger one saves beyond the smaller is what a layer keeps. The planner says the same by formulas; the
count is for models whose modules the formulas do not know, and for tests of the formulas.

The count holds for layouts whose layers run whole on one rank, as this project's trainer runs them. For libraries with tensor,
pipeline or context ranks the plan keeps its formula.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, masking_utils

from narrowgauge.assembly.preparation import narrow_linears
from narrowgauge.errors import DataError
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.planner.inputs.model_configs import preset, read_architecture
from narrowgauge.planner.memory.activations import LayerCount, bytes_per_token, cast_weight_bytes, layer_tensors
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.question import Option
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.models import refuse_own_code
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row
from narrowgauge.trainer import language_model

_ADVICE = "Add --layout fsdp2."


class LayerCounts:
    """Counts one layer of a model for each recipe once; what a plan takes as ``counted``.

    Args:
        model: a preset's name, a Hugging Face ``config.json``, or a folder with one.
    Raises:
        DataError: the model is a mixture: which expert gets a token depends on its values.
    Cost: some seconds for each compute that is planned, whatever the model's size.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> round(LayerCounts("llama-1m")(parse("bfloat16/word"), 64).bytes_per_token)
        5656
    """

    def __init__(self, model: str) -> None:
        self._architecture = read_architecture(model)
        if self._architecture.mixture is not None:
            raise DataError("--exact was requested, and it counts layers without experts.", "Leave --exact out.")
        self._config = _config(model)
        self._found: dict[Hashable, LayerCount] = {}
        self._recipes: dict[Hashable, Recipe] = {}

    def __call__(self, recipe: Recipe, sequence_length: int) -> LayerCount:
        """What a layer keeps; recipes that differ only in what is kept between steps are counted once."""
        vectors = recipe.storage_of("model.norm.weight", 1).visible
        key = (recipe.compute, recipe.storage.visible, vectors, recipe.keep, recipe.overrides, sequence_length)
        if key not in self._found:
            self._found[key] = self._count(recipe, sequence_length)
            self._recipes[key] = recipe
        return self._found[key]

    def _count(self, recipe: Recipe, length: int) -> LayerCount:
        """Counting two numbers of tokens separates what grows with them from what does not."""
        with warnings.catch_warnings():
            # What this processor emulates does not matter: nothing is computed.
            warnings.simplefilter("ignore", EmulationNotice)
            one, two = (
                sum(each.num_bytes * each.num_tensors for each in layer_memory(self._config, recipe, size, length))
                for size in (1, 2)
            )
        return LayerCount((two - one) / length, 2 * one - two)

    def rows(self) -> list[Row]:
        """What was counted, and what the plan's formula says of it; bytes of one layer."""
        return [self._row(self._recipes[key], found) for key, found in self._found.items()]

    def _row(self, recipe: Recipe, found: LayerCount) -> Row:
        a = self._architecture
        tensors = layer_tensors(a, recipe, is_mixture=False, attention="flash", kernels="eager")
        elements = sum(m.count * m.in_features * m.out_features for m in a.matmuls if m.part != "head") / a.num_layers
        return {
            "compute": recipe.compute.name,
            "weights": recipe.storage.visible,
            "bytes_per_token": found.bytes_per_token,
            "bytes_per_layer": found.bytes_per_layer,
            "formula_bytes_per_token": bytes_per_token(tensors),
            "formula_bytes_per_layer": cast_weight_bytes(a, recipe) * elements,
        }

    def sentence(self) -> str:
        """What was counted, beside the formula."""
        found = [
            f"{row['compute']} over {row['weights']} weights {row['bytes_per_token']:,.0f} "
            f"(formula {row['formula_bytes_per_token']:,.0f})"
            for row in self.rows()
        ]
        return f"Counted in the model's own modules, bytes a token and layer: {', '.join(found)}."


def require_counted(found: Plan) -> None:
    """Refuse a plan in which nothing was counted: no option has its layers whole on one rank."""
    options = [*found.options, *([found.trainable] if isinstance(found.trainable, Option) else [])]
    if not any(option.is_counted for option in options):
        raise DataError("--exact was requested, and it counts layers that lie whole on one rank.", _ADVICE)


def _config(model: str) -> Mapping[str, Any]:
    found = preset(model)
    if found is not None:
        return found[0]
    path = Path(model).expanduser()
    refuse_own_code(path)
    table: Mapping[str, Any] = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    return table


# ── the tensors that autograd saves ───────────────────────────────────────────────────────────────────────────────────

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

    Cost: seconds, whatever the model's size.
    Example:
        >>> from narrowgauge.planner.inputs.model_configs import config_of
        >>> from narrowgauge.spec.models import get_model
        >>> from narrowgauge.spec.notation import parse
        >>> saved = layer_memory(config_of(get_model("llama-1m")), parse("bfloat16/word"), 1, 64)
        >>> sum(each.num_bytes * each.num_tensors for each in saved) // 64
        5656
    """
    key = next(key for key in _LAYERS if key in config)
    one, two = (_saved({**config, key: layers}, recipe, micro_batch, sequence_length) for layers in (1, 2))
    found = [Saved(shape, dtype, size, count) for (shape, dtype, size), count in (two - one).items()]
    return sorted(found, key=lambda each: -each.num_bytes)


def _saved(config: Mapping[str, Any], recipe: Recipe, micro_batch: int, length: int) -> Counter[Kind]:
    """The tensors that autograd saves in the layers of a model, by shape, dtype and bytes."""
    made = AutoConfig.for_model(**config)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = language_model.ready(language_model.drawn(made, 0))
        for name, parameter in model.named_parameters():
            visible = recipe.storage_of(name, parameter.ndim).visible
            parameter.data = parameter.data.to(getattr(torch, visible))
        narrow_linears(model, recipe, 0)
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        tokens = torch.zeros(micro_batch, length, dtype=torch.int64)
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                kept.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        # Fake positions have no values that say whether sequences are packed; ours are not, so no mask is made.
        unpacked = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with unpacked, saved_tensors_hooks(pack, lambda tensor: tensor), compute_scope(recipe, torch.device("cpu")):
            model.base_model(input_ids=tokens, use_cache=False)
    kinds = ((tuple(t.shape), dtype_name(t.dtype), t.untyped_storage().nbytes()) for t in kept.values())
    return Counter(kinds)
