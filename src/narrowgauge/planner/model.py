"""Models: the architecture of a preset, a ``config.json`` or a model of the hub's cache.

A preset answers at once. transformers builds a ``config.json`` on the meta device, without memory.
We read its parameters and guess none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, require_package, suggestion
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.shapes import (
    Architecture,
    LatentAttention,
    Layers,
    Mixture,
    Split,
    Weight,
)
from narrowgauge.spec.models import MODELS, Model, refuse_own_code
from narrowgauge.spec.toml import load_data


def decoder(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    vocab_size: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    has_biases: bool = False,
    mixture: Mixture | None = None,
    dense_layers: int = 0,
    has_head_norms: bool = False,
    latent: LatentAttention | None = None,
    **fields: Any,
) -> Architecture:
    """Return a usual decoder: layers of attention and an MLP (or a mixture) between an embedding
    and a head.

    Args:
        num_kv_heads: None for the number of heads; head_dim: None for width over heads;
            intermediate_size: None for four times the width.
        has_biases: all matmuls but the head have biases, and norms too.
        dense_layers: those with an MLP beside a ``mixture``.
        has_head_norms: queries and keys have norms, a gain for each dimension of a head.
        fields: further fields of :class:`Architecture`.
    """
    kv_heads = num_kv_heads or num_heads
    query_dim = value_dim = head_dim or hidden_size // num_heads
    size = intermediate_size or 4 * hidden_size
    norm = hidden_size * (2 if has_biases else 1)
    vectors = 2 * norm + 2 * query_dim * has_head_norms

    def weight(name: str, inner: int, out: int, split: Split = "column") -> Weight:
        return Weight(name, inner, out, 1, "attention", split, has_bias=has_biases)

    def mlp(inner: int, prefix: str = "") -> list[Weight]:
        rows = [weight(f"{prefix}up_proj", hidden_size, inner)]
        if fields.get("is_gated", True):
            rows.insert(0, weight(f"{prefix}gate_proj", hidden_size, inner))
        rows.append(weight(f"{prefix}down_proj", inner, hidden_size, "row"))
        return [replace(row, part="mlp") for row in rows]

    projections = {"q_proj": num_heads, "k_proj": kv_heads, "v_proj": kv_heads}
    attention = [weight(key, hidden_size, n * query_dim) for key, n in projections.items()]
    if latent:
        query_dim = latent.plain_dim + latent.rotary_dim
        value_dim = latent.value_dim
        rank = latent.key_value_rank
        vectors += rank
        attention = [
            weight("kv_a_proj", hidden_size, rank + latent.rotary_dim, "none"),
            weight("kv_b_proj", rank, num_heads * (latent.plain_dim + value_dim)),
            weight("q_proj", hidden_size, num_heads * query_dim),
        ]
        if latent.query_rank:
            vectors += latent.query_rank
            attention[2:] = [
                weight("q_b_proj", latent.query_rank, num_heads * query_dim),
                weight("q_a_proj", hidden_size, latent.query_rank, "none"),
            ]
    attention.append(weight("o_proj", num_heads * value_dim, hidden_size, "row"))
    dense = Layers(1, (*attention, *mlp(size)), vectors, inner_size=size)
    kinds: tuple[Layers, ...] = (dense.times(num_layers),)
    if mixture:
        share = mixture.experts_per_token / mixture.num_experts
        experts = [Weight("router", hidden_size, mixture.num_experts, 1, "experts")]
        for row in mlp(mixture.expert_size, "experts."):
            row = replace(row, part="experts", count=mixture.num_experts, tokens_share=share)
            experts.append(row)
        if mixture.shared_size:
            experts += mlp(mixture.shared_size, "shared.")
        sparse = Layers(1, (*attention, *experts), vectors, mixture=mixture)
        kinds = (sparse.times(num_layers - dense_layers),)
        if dense_layers:
            kinds = (dense.times(dense_layers), *kinds)
    return Architecture(
        name, kinds, hidden_size, vocab_size, num_heads, kv_heads, query_dim, value_dim, norm, latent=latent,
        **fields,
    )  # fmt: skip


_PRESETS: dict[str, Any] = load_data("presets", "planner")
PRESET_NAMES = tuple(_PRESETS["models"])
"""The presets that the trainer does not build."""


def _of_preset(name: str, row: Mapping[str, Any]) -> Architecture:
    sizes = {**_PRESETS["families"][row.get("like", "llama")], **row}
    for key in ("like", "source"):
        sizes.pop(key, None)
    for key, kind in (("mixture", Mixture), ("latent", LatentAttention)):
        if key in sizes:
            sizes[key] = kind(**sizes[key])
    return decoder(name, **sizes)


_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "intermediate_size",
    "vocab_size",
    "tie_embeddings",
)


def _of_trainer(model: Model) -> Architecture:
    """Return the shape of a trainer model."""
    row = {name: getattr(model, name) for name in _SIZES}
    if model.family == "gpt2":
        row |= {"like": "gpt", "positions": model.max_positions}
    return _of_preset(model.name, row)


def read_model(text: str) -> Architecture:
    """Return the architecture of a preset (``narrowgauge show models``), a Hugging Face model
    folder or a ``config.json``.

    Example:
        >>> read_model("mixtral-8x7b").num_parameters
        46702792704
    """
    key = text.strip().lower()
    key = _PRESETS["aliases"].get(key, key)
    if key in MODELS:
        return _of_trainer(MODELS[key])
    if key in _PRESETS["models"]:
        return _of_preset(key, _PRESETS["models"][key])
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.exists():
        require_package("transformers")
        from huggingface_hub import try_to_load_from_cache

        file = Path(str(try_to_load_from_cache(text, "config.json")))
    if not key or not file.is_file():
        near = suggestion(key, (*MODELS, *PRESET_NAMES, *_PRESETS["aliases"]))
        raise RecipeError(
            f"no model and no config.json is named {text!r}.",
            near
            or "narrowgauge plan run --help names the presets. hf download ORG/NAME config.json caches one of the hub.",
        )
    advice = "It must be a Hugging Face config.json."
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}.", advice) from error
    if not isinstance(config, dict):
        raise DataError(f"{file} holds {type(config).__name__}, no table.", advice)
    refuse_own_code(file)
    require_package("transformers")
    return of_config(config, str(path))
