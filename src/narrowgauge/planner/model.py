"""Models: the architecture of a preset, a ``config.json`` or a model of the hub's cache.

A preset answers at once. transformers builds a ``config.json`` on the meta device, without memory.
We read its parameters and guess none.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError, RecipeError, require_package, suggestion
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.shapes import Architecture, Layers, Mixture, Part, Weight
from narrowgauge.spec.models import MODELS, refuse_own_code
from narrowgauge.spec.toml import load_data

Sizes = dict[str, tuple[int, int]]
"""Inputs and outputs of matmuls by name."""


def _weights(sizes: Sizes, part: Part, prefix: str = "", **fields: Any) -> tuple[Weight, ...]:
    weights = []
    for name, (inner, out) in sizes.items():
        weights.append(Weight(prefix + name, inner, out, part, **fields))
    return tuple(weights)


def decoder(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int = 0,
    head_dim: int = 0,
    intermediate_size: int = 0,
    is_gated: bool = True,
    has_biases: bool = False,
    has_head_norms: bool = False,
    mixture: Mapping[str, int] | None = None,
    dense_layers: int = 0,
    latent: Mapping[str, int] | None = None,
    **fields: Any,
) -> Architecture:
    """Return a usual decoder: layers of attention and an MLP (or a mixture) between an embedding
    and a head.

    Args:
        num_kv_heads: 0 for the number of heads; head_dim: 0 for width over heads;
            intermediate_size: 0 for four times the width.
        has_biases: all matmuls but the head have biases, and norms too.
        has_head_norms: queries and keys have norms, a gain for each dimension of a head.
        mixture: fields of :class:`Mixture`; ``dense_layers`` have an MLP beside it.
        latent: ``query_rank``, ``key_value_rank``, and ``plain_dim``, ``rotary_dim``, ``value_dim``
            of a head.
        fields: further fields of :class:`Architecture`.
    """
    kv_heads = num_kv_heads or num_heads
    query_dim = value_dim = head_dim or hidden_size // num_heads
    vectors = 2 * hidden_size + 2 * query_dim * has_head_norms
    projections: Sizes = {
        "q_proj": (hidden_size, num_heads * query_dim),
        "k_proj": (hidden_size, kv_heads * query_dim),
        "v_proj": (hidden_size, kv_heads * query_dim),
    }
    if latent:
        query_rank = latent["query_rank"]
        rank = latent["key_value_rank"]
        value_dim = latent["value_dim"]
        query_dim = latent["plain_dim"] + latent["rotary_dim"]
        vectors += query_rank + rank
        projections = {
            "q_a_proj": (hidden_size, query_rank),
            "q_b_proj": (query_rank, num_heads * query_dim),
            "kv_a_proj": (hidden_size, rank + latent["rotary_dim"]),
            "kv_b_proj": (rank, num_heads * (latent["plain_dim"] + value_dim)),
        }
    projections["o_proj"] = (num_heads * value_dim, hidden_size)

    def mlp(size: int) -> Sizes:
        sizes = {"up_proj": (hidden_size, size), "down_proj": (size, hidden_size)}
        if is_gated:
            sizes["gate_proj"] = (hidden_size, size)
        return sizes

    size = intermediate_size or 4 * hidden_size
    dense = projections | mlp(size)
    if has_biases:
        vectors += 2 * hidden_size + sum(out for _, out in dense.values())
    attention = _weights(projections, "attention")
    count = dense_layers if mixture else num_layers
    kinds = [Layers((*attention, *_weights(mlp(size), "mlp")), vectors, count, inner_size=size)]
    if mixture:
        row = Mixture(**mixture)
        of_expert = {
            "count": row.num_experts,
            "tokens_share": row.experts_per_token / row.num_experts,
        }
        experts = _weights(mlp(row.expert_size), "experts", "experts.", **of_expert)
        router = Weight("router", hidden_size, row.num_experts, "experts")
        shared = _weights(mlp(row.shared_size), "mlp", "shared.") if row.shared_size else ()
        matmuls = (*attention, router, *experts, *shared)
        kinds.append(Layers(matmuls, vectors, num_layers - dense_layers, mixture=row))
    return Architecture(
        name, tuple(layers for layers in kinds if layers.count), hidden_size,
        num_heads=num_heads, num_kv_heads=kv_heads, query_dim=query_dim, value_dim=value_dim,
        outer_vectors=hidden_size * (1 + has_biases), is_gated=is_gated, is_latent=bool(latent),
        **fields,
    )  # fmt: skip


_PRESETS: dict[str, Any] = load_data("presets", "planner")
PRESET_NAMES = tuple(_PRESETS["models"])
"""The presets that the trainer does not build."""
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size", "vocab_size",
          "tie_embeddings")  # fmt: skip


def _of_preset(name: str, row: Mapping[str, Any]) -> Architecture:
    sizes = {**_PRESETS["families"][row.get("like", "llama")], **row}
    sizes.pop("like", None)
    sizes.pop("source", None)
    return decoder(name, **sizes)


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
        model = asdict(MODELS[key])
        row = {name: model[name] for name in _SIZES}
        if model["family"] == "gpt2":
            row |= {"like": "gpt", "positions": model["max_positions"]}
        return _of_preset(key, row)
    if key in _PRESETS["models"]:
        return _of_preset(key, _PRESETS["models"][key])
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", text) and not path.exists():
        require_package("transformers")
        from huggingface_hub import try_to_load_from_cache

        with contextlib.suppress(ValueError):  # no name of the hub
            file = Path(str(try_to_load_from_cache(text, "config.json")))
    if not key or not file.is_file():
        near = suggestion(key, (*MODELS, *PRESET_NAMES, *_PRESETS["aliases"]))
        raise RecipeError(
            f"no model and no config.json is named {text!r}.",
            near
            or "narrowgauge plan run --help names the presets. hf download ORG/NAME config.json "
            "caches one of the hub.",
        )
    try:
        config = {**json.loads(file.read_bytes())}
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read: {error}.", "It must be a Hugging Face config.json."
        ) from error
    refuse_own_code(file)
    require_package("transformers")
    return of_config(config, str(path))
